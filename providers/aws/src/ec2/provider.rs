//! Implements the provider trait, and holds the state that its parts share.

use std::collections::HashSet;
use std::net::IpAddr;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use futures_util::stream::BoxStream;
use parking_lot::Mutex as Lock;
use peerpod_provider_api::{
    Arch, Batch, Capabilities, Confidential, Console, CreateRequest, Created, CreatedMany, DiskIdentity,
    DiskRequest, Error, Extensions, IdempotencyKey, InstanceId, Market, Owned, Owner, Placement, Preflight,
    Provider, ProviderEvent, Volumes,
};
use peerpod_provider_cloud::{
    Kept, Look, Lookup, Planner, Policy, Recent, Scheduler, Strays, VmState, Wait, Window, check_creates,
    offerings, until, wait_for,
};
use prometheus_client::registry::Registry;
use tokio::sync::{Mutex, OnceCell};
use tokio::time::Instant;

use crate::config::{AwsConfig, AwsImage, is_id};
use crate::ec2::client::{self, Ec2};
use crate::ec2::create::AwsLaunch;
use crate::ec2::events;
use crate::ec2::facts::{AwsFacts, FRESH, Subnet};
use crate::ec2::remove::{self, Terminate};
use crate::ec2::shape::AwsImageFacts;
use crate::ec2::vms::{self, AwsVm};
use crate::ec2::volumes;

/// User-data limit before base64 (EC2 User Guide, "Run commands at launch"); it also holds for a fleet.
const MAX_USER_DATA: usize = 16 << 10;
/// Maximum number of offerings in a placement, and thus in one call (karpenter's figure).
const MAX_OFFERINGS: usize = 60;
/// Pauses between two lookups: the first one, then the others. EC2 takes some seconds to run a VM and to attach a disk.
pub(super) static LOOKS: Wait = Wait::new(Duration::from_millis(300), Duration::from_secs(1));
/// Longest time for attaching disks before they are requested.
const AHEAD: Duration = Duration::from_secs(300);

/// Provider of VMs on EC2; see the crate's documentation.
pub struct AwsProvider(Arc<Aws>);

/// State that the parts of the provider share.
pub(crate) struct Aws {
    pub(crate) config: AwsConfig,
    pub(crate) owner: Owner,
    pub(crate) planner: Planner,
    pub(crate) recent: Recent,
    pub(crate) names: volumes::Names,
    pub(crate) spots: events::Spots,
    strays: Strays,
    scheduler: Scheduler,
    connection: OnceCell<AwsConnection>,
    pub(super) facts: Kept<AwsFacts>,
    /// Names of existing launch templates.
    pub(super) templates: Mutex<HashSet<String>>,
    pub(super) second: Lock<Vec<Subnet>>,
    /// Image of the configured name for the architecture other than the configured one.
    pub(super) other_image: Kept<AwsImageFacts>,
}

/// The client, and the batchers that collect calls for it.
pub(crate) struct AwsConnection {
    pub(crate) ec2: Ec2,
    pub(crate) inspect: Lookup<AwsVm>,
    pub(crate) look_in_a_burst: Lookup<AwsVm>,
    pub(crate) terminate: Terminate,
    pub(crate) volumes: volumes::VolumeLookup,
}

impl AwsProvider {
    /// Creates a provider from its settings; makes no call.
    pub fn new(config: AwsConfig, owner: Owner) -> AwsProvider {
        let policy = Policy {
            allowed: config.instance_types.clone(),
            default: config.instance_type.clone(),
            markets: config.markets.clone(),
            arch: Some(arch(&config)),
            confidential: config.confidential.then_some(Confidential::SevSnp),
        };
        AwsProvider(Arc::new(Aws {
            owner,
            planner: Planner::new(policy),
            recent: Recent::default(),
            names: volumes::Names::default(),
            spots: events::Spots::default(),
            strays: Strays::new(Instant::now()),
            scheduler: Scheduler::new(client::table()),
            connection: OnceCell::new(),
            facts: Kept::new("facts about the AWS account", FRESH),
            templates: Mutex::default(),
            second: Lock::default(),
            other_image: Kept::new("image for the other architecture", FRESH),
            config,
        }))
    }
}

pub(super) fn arch(config: &AwsConfig) -> Arch {
    if config.arch == "arm64" { Arch::Aarch64 } else { Arch::X86_64 }
}

impl Aws {
    /// Returns the client; connects at first use.
    pub(crate) async fn ec2(&self) -> Result<&AwsConnection, Error> {
        let connect = || async {
            let ec2 = Ec2::connect(&self.config, self.scheduler.clone()).await?;
            Ok(AwsConnection {
                inspect: vms::inspect(ec2.clone(), Window::LIST),
                look_in_a_burst: vms::inspect(ec2.clone(), Window::BURST),
                terminate: remove::terminate(ec2.clone(), self.owner.clone()),
                volumes: volumes::inspect(ec2.clone()),
                ec2,
            })
        };
        self.connection.get_or_try_init(connect).await
    }

    /// Waits until a VM is as wanted, or is ending. The caller sets the deadline by dropping the future.
    /// Fails with [`Error::NotFound`] if this owner has no such VM.
    pub(crate) async fn wait_for(
        &self,
        id: &InstanceId,
        what: &str,
        is_as_wanted: impl Fn(&AwsVm) -> bool,
    ) -> Result<AwsVm, Error> {
        let connected = self.ec2().await?;
        let look = || async {
            let inspect = match self.recent.is_burst(Instant::now()) {
                true => &connected.look_in_a_burst,
                false => &connected.inspect,
            };
            let Some(seen) = inspect.ask(id.as_str().to_owned(), until(), what).await? else {
                return Ok(Look::Unknown);
            };
            if !seen.marks.are_of(&self.owner) {
                return Ok(if seen.marks.cluster.is_some() { Look::Foreign } else { Look::Unmarked });
            }
            self.spots.seen(&seen);
            let has_ended = matches!(seen.state, VmState::Deleting | VmState::Deleted);
            Ok(if has_ended || is_as_wanted(&seen) { Look::Done(seen) } else { Look::Open })
        };
        wait_for(&LOOKS, &self.recent, id, (what, "EC2"), look).await
    }

    fn check(&self, request: &CreateRequest) -> Result<(), Error> {
        check_creates(self.config.creates, request)?;
        self.capabilities().check(request, "aws")?;
        if request.second_nic && (request.public_ip || self.config.use_public_ip) {
            let text = format!(
                "create of {}: EC2 gives no public address to a VM that begins with two NICs; leave one of the \
                 two out",
                request.name
            );
            return Err(Error::unsupported("second_nic", text));
        }
        Ok(())
    }

    fn follows_spot(&self) -> bool {
        self.config.markets.contains(&Market::Spot) && !self.config.spot_watch.is_zero()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            images: true,
            instance_types: true,
            gpus: true,
            // A name may match an image of each architecture; an id is an image of one.
            archs: match &self.config.image {
                AwsImage::Named { .. } => vec![Arch::X86_64, Arch::Aarch64],
                _ => vec![arch(&self.config)],
            },
            confidential: vec![Confidential::SevSnp],
            spot: self.config.markets.contains(&Market::Spot),
            zones: true,
            public_ip: true,
            second_nic: !self.config.second_subnet_ids.is_empty(),
            volumes: true,
            console: true,
            max_batch: self.config.batch,
            events: self.follows_spot(),
            ..Capabilities::minimal(MAX_USER_DATA)
        }
    }

    async fn place(&self, request: &CreateRequest) -> Result<Placement, Error> {
        self.facts(false).await?;
        let what = format!("create of {}", request.name);
        let mut wanted = CreateRequest { user_data: String::new(), ..request.clone() };
        let zones = volumes::zones(self, &request.disks, &what).await?;
        for (disk, zone) in wanted.disks.iter_mut().zip(zones) {
            disk.zone = Some(zone);
        }
        self.check(&wanted)?;
        if request.second_nic {
            let second: Vec<String> = self.second_subnets().into_iter().map(|subnet| subnet.zone).collect();
            match &request.zones[..] {
                [] => wanted.zones = second,
                _ => wanted.zones.retain(|zone| second.contains(zone)),
            }
            if wanted.zones.is_empty() {
                return Err(Error::invalid(format!(
                    "{what}: no subnet for its second NIC is in {}; add one to provider.aws.second-subnet-ids",
                    request.zones.join(" or ")
                )));
            }
        }
        self.planner.place(&wanted, MAX_OFFERINGS)
    }

    async fn make(
        &self,
        request: &CreateRequest,
        count: u32,
        key: &IdempotencyKey,
    ) -> Result<CreatedMany, Error> {
        self.check(request)?;
        let until = until();
        let facts = self.facts(false).await?;
        let offerings = offerings(request, self.place(request)).await?;
        let ec2 = &self.ec2().await?.ec2;
        let image = self.own_image(ec2, request, until).await?;
        let launch =
            AwsLaunch { aws: self, ec2, facts: &facts, request, key, offerings: &offerings, image, until };
        launch.go(count).await
    }
}

/// Deletes left-over NICs in a task of its own, so that no list waits for it.
fn clean(aws: Arc<Aws>) {
    tokio::spawn(async move {
        let cleaned = async { remove::clean_again(&aws.strays, &aws.ec2().await?.ec2, &aws.owner).await };
        match cleaned.await {
            Ok(0) => {}
            Ok(count) => tracing::info!(count, "deleted our unattached NICs"),
            Err(error) => tracing::warn!("unattached NICs of failed launches stay: {error}"),
        }
    });
}

#[async_trait]
impl Provider for AwsProvider {
    fn name(&self) -> &'static str {
        "aws"
    }

    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    async fn preflight(&self) -> Result<Preflight, Error> {
        crate::ec2::preflight::run(&self.0).await
    }

    async fn place(&self, request: &CreateRequest) -> Result<Option<Placement>, Error> {
        self.0.check(request)?;
        self.0.place(request).await.map(Some)
    }

    async fn create(&self, request: &CreateRequest, key: &IdempotencyKey) -> Result<Created, Error> {
        let made = self.0.make(request, 1, key).await?;
        let one = made.made.into_iter().next().ok_or_else(|| {
            Error::transient(format!(
                "create of {}: EC2's answer names no VM; the same call is repeated",
                request.name
            ))
        })?;
        for disk in request.disks.clone() {
            // Disks are attached before they are requested: EC2 needs seconds, and the guest is booting meanwhile.
            let (aws, id) = (Arc::clone(&self.0), one.id.clone());
            tokio::spawn(async move {
                let attached = tokio::time::timeout(AHEAD, volumes::attach(&aws, &id, &disk)).await;
                if let Ok(Err(error)) = attached {
                    tracing::debug!(vm = %id, "attached ahead: {error}");
                }
            });
        }
        Ok(one)
    }

    async fn addresses(&self, id: &InstanceId) -> Result<Vec<IpAddr>, Error> {
        let what = format!("addresses of VM {id}");
        if !is_id(id.as_str(), "i-") {
            return Err(Error::not_found(format!("{what}: this is no EC2 instance id")));
        }
        let aws = &self.0;
        let public = aws.config.use_public_ip;
        let seen = aws
            .wait_for(id, &what, |vm| vm.state == VmState::Ended || !vm.addresses(public).is_empty())
            .await?;
        if seen.state.lives() {
            return Ok(seen.addresses(public));
        }
        let why = seen.reason.map(|why| format!(": {why}")).unwrap_or_default();
        Err(Error::not_found(format!("{what}: it has ended{why}")))
    }

    async fn delete(&self, id: &InstanceId) -> Result<(), Error> {
        if !is_id(id.as_str(), "i-") {
            return Ok(());
        }
        let aws = &self.0;
        let what = format!("delete of VM {id}");
        let known = aws.ec2().await?.terminate.ask(id.as_str().to_owned(), until(), &what).await?;
        if known.is_none() && aws.recent.may_be_denied(id, Instant::now()) {
            return Err(Error::transient(format!(
                "{what}: EC2 does not know it yet, it was made a moment ago; it is tried again"
            )));
        }
        aws.recent.seen(id);
        aws.names.forget(id.as_str());
        aws.spots.forget(id.as_str());
        Ok(())
    }

    async fn list_owned(&self) -> Result<Vec<Owned>, Error> {
        let aws = &self.0;
        let seen = vms::all_of(&aws.ec2().await?.ec2, &aws.owner, until()).await?;
        seen.iter().for_each(|vm| aws.spots.seen(vm));
        if aws.strays.is_due(Instant::now()) {
            clean(Arc::clone(aws));
        }
        let mut owned: Vec<Owned> = seen.iter().filter_map(|vm| vm.owned(aws.config.use_public_ip)).collect();
        owned.extend(aws.recent.missing_from(&owned, Instant::now()));
        Ok(owned)
    }

    fn extensions(&self) -> Extensions<'_> {
        Extensions {
            batch: (self.0.config.batch > 0).then_some(self as &dyn Batch),
            volumes: Some(self),
            console: Some(self),
        }
    }

    fn events(&self) -> Option<BoxStream<'static, ProviderEvent>> {
        self.0.follows_spot().then(|| events::follow(Arc::clone(&self.0)))
    }

    fn register_metrics(&self, registry: &mut Registry) {
        self.0.scheduler.register(registry);
    }
}

#[async_trait]
impl Batch for AwsProvider {
    async fn create_many(
        &self,
        request: &CreateRequest,
        count: NonZeroU32,
        key: &IdempotencyKey,
    ) -> Result<CreatedMany, Error> {
        self.0.capabilities().check_batch(request, count, "aws")?;
        if request.second_nic {
            let text = format!("create of {count} VMs like {}: a fleet gives one NIC each", request.name);
            return Err(Error::unsupported("second_nic", text));
        }
        self.0.make(request, count.get(), key).await
    }
}

#[async_trait]
impl Volumes for AwsProvider {
    async fn attach(&self, id: &InstanceId, disk: &DiskRequest) -> Result<DiskIdentity, Error> {
        volumes::attach(&self.0, id, disk).await
    }

    async fn detach(&self, id: &InstanceId, volume: &str) -> Result<(), Error> {
        volumes::detach(&self.0, id, volume).await
    }
}

#[async_trait]
impl Console for AwsProvider {
    async fn tail(&self, id: &InstanceId, limit: usize) -> Result<Vec<u8>, Error> {
        let what = format!("console of VM {id}");
        if !is_id(id.as_str(), "i-") {
            return Err(Error::not_found(format!("{what}: this is no EC2 instance id")));
        }
        let ec2 = &self.0.ec2().await?.ec2;
        // Nitro has the latest output. Other types have output of some minutes ago, and refuse a call for the latest.
        let mut latest = true;
        let answer = loop {
            let ask =
                ec2.client.get_console_output().instance_id(id.as_str()).set_latest(latest.then_some(true));
            match ec2.call("GetConsoleOutput", id.as_str(), &what, until(), || ask.clone().send()).await {
                Err(failure) if latest && failure.code().starts_with("Unsupported") => latest = false,
                answer => break answer?,
            }
        };
        let text = answer.output.unwrap_or_default();
        let bytes: Vec<u8> = text.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
        let console = STANDARD
            .decode(bytes)
            .map_err(|error| Error::transient(format!("{what}: not base64: {error}")))?;
        Ok(console[console.len().saturating_sub(limit)..].to_vec())
    }
}
