//! Implements the provider trait, and holds the state that its parts share.

use std::net::IpAddr;
use std::num::NonZeroU32;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use futures_util::stream::BoxStream;
use peerpod_provider_api::{
    Batch, Capabilities, Confidential, Console, CreateRequest, Created, CreatedMany, DiskIdentity,
    DiskRequest, Error, Extensions, IdempotencyKey, InstanceId, Market, Owned, Owner, Placement, Preflight,
    Provider, ProviderEvent, Volumes,
};
use peerpod_provider_cloud::{
    ApiCall, Kept, Look, Lookup, Planner, Policy, Recent, Scheduler, VmState, Wait, check_creates, offering,
    until, wait_for,
};
use prometheus_client::registry::Registry;
use tokio::time::Instant;

use crate::client::{self, Ecs, Parameters};
use crate::config::{AlibabaCloudConfig, is_id, is_image};
use crate::create::AlibabaCloudLaunch;
use crate::events::{self, Spots};
use crate::facts::{self, AlibabaCloudFacts, AlibabaCloudImageFacts, FRESH};
use crate::remove::{self, Terminate};
use crate::vms::{self, AlibabaCloudVm};
use crate::{preflight, volumes};

/// Largest accepted user-data, in bytes before base64 ("RunInstances", `UserData`).
const MAX_USER_DATA: usize = 32 << 10;
/// First pause between two looks at a VM or disk, and the others.
const PAUSES: (Duration, Duration) = (Duration::from_millis(300), Duration::from_secs(1));
/// Longest time for attaching disks before they are requested.
const AHEAD: Duration = Duration::from_secs(300);

/// Provider of VMs on Alibaba Cloud; see the crate's documentation.
pub struct AlibabaCloudProvider(Arc<Alibaba>);

/// State that the parts of the provider share.
pub(crate) struct Alibaba {
    pub(crate) config: AlibabaCloudConfig,
    pub(crate) owner: Owner,
    pub(crate) planner: Planner,
    pub(crate) recent: Arc<Recent>,
    pub(crate) spots: Spots,
    pub(crate) facts: Kept<AlibabaCloudFacts>,
    pub(crate) looks: Wait,
    scheduler: Scheduler,
    connection: OnceLock<AlibabaCloudConnection>,
}

/// The client, and the batchers that collect calls for it.
pub(crate) struct AlibabaCloudConnection {
    pub(crate) ecs: Ecs,
    pub(crate) vms: Lookup<AlibabaCloudVm>,
    pub(crate) disks: volumes::DiskLookup,
    terminate: Terminate,
}

impl AlibabaCloudProvider {
    /// Creates a provider from its settings; makes no call.
    pub fn new(config: AlibabaCloudConfig, owner: Owner) -> AlibabaCloudProvider {
        let policy = Policy {
            allowed: config.instance_types.clone(),
            default: config.instance_type.clone(),
            markets: config.markets.clone(),
            arch: Some(config.arch),
            confidential: config.confidential.then_some(Confidential::Tdx),
        };
        AlibabaCloudProvider(Arc::new(Alibaba {
            owner,
            planner: Planner::new(policy),
            recent: Arc::default(),
            spots: Spots::default(),
            facts: Kept::new("facts about the account", FRESH),
            looks: Wait::new(PAUSES.0, PAUSES.1),
            scheduler: Scheduler::new(client::table()),
            connection: OnceLock::new(),
            config,
        }))
    }
}

impl Alibaba {
    /// Returns the client; sets it up at first use, without a call.
    pub(crate) fn connected(&self) -> Result<&AlibabaCloudConnection, Error> {
        if let Some(connected) = self.connection.get() {
            return Ok(connected);
        }
        let ecs = Ecs::connect(&self.config, self.scheduler.clone())?;
        let connected = AlibabaCloudConnection {
            vms: vms::inspect(ecs.clone()),
            disks: volumes::inspect(ecs.clone()),
            terminate: remove::terminate(ecs.clone(), self.owner.clone(), Arc::clone(&self.recent)),
            ecs,
        };
        // Another caller may have set it up meanwhile; then this one is dropped.
        Ok(self.connection.get_or_init(|| connected))
    }

    /// Returns the facts about the account. Loads them if they are missing or old, or if `afresh` is set.
    pub(crate) async fn facts(&self, afresh: bool) -> Result<Arc<AlibabaCloudFacts>, Error> {
        let load = || async {
            let facts = AlibabaCloudFacts::load(&self.connected()?.ecs, &self.config).await?;
            self.planner.learn(facts.catalogue.clone());
            Ok(facts)
        };
        if afresh { self.facts.renew(load).await } else { self.facts.get(load).await }
    }

    /// Waits until a VM is as wanted, or has ended. The caller sets the deadline by dropping the future. Fails with
    /// [`Error::NotFound`] if this owner has no such VM.
    pub(crate) async fn wait_for(
        &self,
        id: &InstanceId,
        what: &str,
        is_as_wanted: impl Fn(&AlibabaCloudVm) -> bool,
    ) -> Result<AlibabaCloudVm, Error> {
        if !is_id(id.as_str(), "i-") {
            return Err(Error::not_found(format!("{what}: this is no VM of Alibaba Cloud")));
        }
        let connected = self.connected()?;
        let look = || async {
            let Some(seen) = connected.vms.ask(id.as_str().to_owned(), until(), what).await? else {
                return Ok(Look::Unknown);
            };
            if !seen.marks.are_of(&self.owner) {
                return Ok(if seen.marks.cluster.is_some() { Look::Foreign } else { Look::Unmarked });
            }
            self.spots.seen(&seen);
            Ok(if !seen.state.lives() || is_as_wanted(&seen) { Look::Done(seen) } else { Look::Open })
        };
        wait_for(&self.looks, &self.recent, id, (what, "Alibaba Cloud"), look).await
    }

    fn check(&self, request: &CreateRequest) -> Result<(), Error> {
        check_creates(self.config.creates, request)?;
        self.capabilities().check(request, "alibabacloud")
    }

    fn follows_spot(&self) -> bool {
        self.config.markets.contains(&Market::Spot) && !self.config.spot_watch.is_zero()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            images: true,
            instance_types: true,
            gpus: true,
            archs: vec![self.config.arch],
            confidential: vec![Confidential::Tdx],
            spot: self.config.markets.contains(&Market::Spot),
            zones: true,
            public_ip: true,
            second_nic: !self.config.second_vswitch_ids.is_empty(),
            volumes: true,
            console: true,
            events: self.follows_spot(),
            max_batch: self.config.batch,
            ..Capabilities::minimal(MAX_USER_DATA)
        }
    }

    /// Chooses one offering: a client token names one.
    async fn place(&self, request: &CreateRequest) -> Result<Placement, Error> {
        let facts = self.facts(false).await?;
        let what = format!("create of {}", request.name);
        let mut wanted = CreateRequest { user_data: String::new(), ..request.clone() };
        let zones = volumes::zones(self, &request.disks, &what).await?;
        for (disk, zone) in wanted.disks.iter_mut().zip(zones) {
            disk.zone = Some(zone);
        }
        self.check(&wanted)?;
        if request.second_nic {
            let second = facts.second.iter().map(|one| one.zone.clone());
            let allowed = |zone: &String| request.zones.is_empty() || request.zones.contains(zone);
            wanted.zones = second.filter(allowed).collect();
            if wanted.zones.is_empty() {
                return Err(no_second(request, &request.zones.join(" or ")));
            }
        }
        self.planner.place(&wanted, 1)
    }

    async fn image(
        &self,
        request: &CreateRequest,
        facts: &AlibabaCloudFacts,
    ) -> Result<AlibabaCloudImageFacts, Error> {
        let Some(id) = &request.image else { return Ok(facts.image.clone()) };
        let what = format!("create of {}: look at the pod's image", request.name);
        if !is_image(id) {
            return Err(Error::invalid(format!(
                "{what}: it is not the id of an image; write it like m-2ze0123456789abcdefg"
            )));
        }
        let words = (what.as_str(), "name another image");
        facts::image_facts(&self.connected()?.ecs, id, self.config.arch, words).await
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
        let offering = offering(request, self.place(request)).await?;
        let image = self.image(request, &facts).await?;
        let second = facts.second.iter().find(|one| request.second_nic && one.zone == offering.zone);
        if request.second_nic && second.is_none() {
            return Err(no_second(request, &offering.zone));
        }
        let launch = AlibabaCloudLaunch {
            alibaba: self,
            connected: self.connected()?,
            request,
            key,
            offering: &offering,
            image: &image,
            second: second.map(|one| one.id.as_str()),
            until,
        };
        launch.go(count).await
    }
}

fn no_second(request: &CreateRequest, zones: &str) -> Error {
    Error::invalid(format!(
        "create of {}: no vSwitch for its second NIC is in {zones}; add one to \
         provider.alibabacloud.second-vswitch-ids",
        request.name
    ))
}

#[async_trait]
impl Provider for AlibabaCloudProvider {
    fn name(&self) -> &'static str {
        "alibabacloud"
    }

    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    async fn preflight(&self) -> Result<Preflight, Error> {
        preflight::run(&self.0).await
    }

    async fn place(&self, request: &CreateRequest) -> Result<Option<Placement>, Error> {
        self.0.check(request)?;
        self.0.place(request).await.map(Some)
    }

    async fn create(&self, request: &CreateRequest, key: &IdempotencyKey) -> Result<Created, Error> {
        let made = self.0.make(request, 1, key).await?;
        let one = made.made.into_iter().next().ok_or_else(|| {
            Error::transient(format!(
                "create of {}: the answer names no VM; the same call is repeated",
                request.name
            ))
        })?;
        for disk in request.disks.clone() {
            // Disks are attached before they are requested: the cloud needs seconds, and the guest is booting meanwhile.
            let (alibaba, id) = (Arc::clone(&self.0), one.id.clone());
            tokio::spawn(async move {
                let attached = tokio::time::timeout(AHEAD, volumes::attach(&alibaba, &id, &disk)).await;
                if let Ok(Err(error)) = attached {
                    tracing::debug!(vm = %id, "attached ahead: {error}");
                }
            });
        }
        Ok(one)
    }

    async fn addresses(&self, id: &InstanceId) -> Result<Vec<IpAddr>, Error> {
        let what = format!("addresses of VM {id}");
        let public = self.0.config.use_public_ip;
        let is_ready = |vm: &AlibabaCloudVm| vm.state != VmState::Pending && !vm.addresses(public).is_empty();
        let seen = self.0.wait_for(id, &what, is_ready).await?;
        if seen.state.lives() {
            return Ok(seen.addresses(public));
        }
        Err(Error::not_found(format!("{what}: it has ended")))
    }

    async fn delete(&self, id: &InstanceId) -> Result<(), Error> {
        if !is_id(id.as_str(), "i-") {
            return Ok(());
        }
        let alibaba = &self.0;
        let what = format!("delete of VM {id}");
        // Its absence is no event from now on. A VM that stays is watched again when it is seen.
        alibaba.spots.forget(id.as_str());
        let is_known = alibaba.connected()?.terminate.ask(id.as_str().to_owned(), until(), &what).await?;
        if !is_known && alibaba.recent.may_be_denied(id, Instant::now()) {
            return Err(Error::transient(format!(
                "{what}: Alibaba Cloud does not know it yet, it was made a moment ago; it is tried again"
            )));
        }
        alibaba.recent.seen(id);
        Ok(())
    }

    async fn list_owned(&self) -> Result<Vec<Owned>, Error> {
        let alibaba = &self.0;
        let seen = vms::all_of(&alibaba.connected()?.ecs, &alibaba.owner, until()).await?;
        seen.iter().for_each(|vm| alibaba.spots.seen(vm));
        let mut owned: Vec<Owned> =
            seen.iter().filter_map(|vm| vm.owned(alibaba.config.use_public_ip)).collect();
        owned.extend(alibaba.recent.missing_from(&owned, Instant::now()));
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
impl Batch for AlibabaCloudProvider {
    async fn create_many(
        &self,
        request: &CreateRequest,
        count: NonZeroU32,
        key: &IdempotencyKey,
    ) -> Result<CreatedMany, Error> {
        self.0.capabilities().check_batch(request, count, "alibabacloud")?;
        self.0.make(request, count.get(), key).await
    }
}

#[async_trait]
impl Volumes for AlibabaCloudProvider {
    async fn attach(&self, id: &InstanceId, disk: &DiskRequest) -> Result<DiskIdentity, Error> {
        volumes::attach(&self.0, id, disk).await
    }

    async fn detach(&self, id: &InstanceId, volume: &str) -> Result<(), Error> {
        volumes::detach(&self.0, id, volume).await
    }
}

#[async_trait]
impl Console for AlibabaCloudProvider {
    async fn tail(&self, id: &InstanceId, limit: usize) -> Result<Vec<u8>, Error> {
        let what = format!("console of VM {id}");
        self.0.wait_for(id, &what, |_| true).await?;
        let asked = Parameters::default().with("InstanceId", id.as_str());
        let call = ApiCall::new("GetInstanceConsoleOutput", id.as_str(), &what);
        let body = self.0.connected()?.ecs.ask(call, asked).await?;
        let text = body.pointer("/ConsoleOutput").and_then(|text| text.as_str()).unwrap_or_default();
        let bytes: Vec<u8> = text.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
        let console = STANDARD
            .decode(bytes)
            .map_err(|error| Error::transient(format!("{what}: not base64: {error}")))?;
        Ok(console.get(console.len().saturating_sub(limit)..).unwrap_or_default().to_vec())
    }
}
