//! Implements the provider trait, and holds the state that its parts share.

use std::net::IpAddr;
use std::num::NonZeroU32;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use peerpod_provider_api::{
    Batch, Capabilities, Confidential, Console, CreateRequest, Created, CreatedMany, DiskIdentity,
    DiskRequest, Error, Extensions, IdempotencyKey, InstanceId, Market, Owned, Owner, Placement, Preflight,
    Provider, Volumes,
};
use peerpod_provider_cloud::{
    ApiCall, Kept, Look, Lookup, Planner, Policy, Recent, Scheduler, VmState, Wait, check_creates, offering,
    until, wait_for,
};
use prometheus_client::registry::Registry;
use tokio::time::Instant;

use crate::client::{self, Compute};
use crate::config::GcpConfig;
use crate::create::GcpLaunch;
use crate::facts::{self, FRESH, GcpFacts, GcpImageFacts};
use crate::links::{GcpImage, VmId};
use crate::remove::{self, Deleted};
use crate::vms::{self, GcpVm};
use crate::{preflight, volumes};

/// Largest accepted user-data, in bytes: the guest's limit. Google takes 256 KiB.
const MAX_USER_DATA: usize = 64 << 10;
/// First pause between two looks at a VM or operation, and the others.
const PAUSES: (Duration, Duration) = (Duration::from_millis(300), Duration::from_secs(1));
/// The same for a batch, which Google needs longer for.
const BATCH_PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(2));

/// Provider of VMs on Google Cloud; see the crate's documentation.
pub struct GcpProvider(Arc<Gcp>);

/// State that the parts of the provider share.
pub(crate) struct Gcp {
    pub(crate) config: GcpConfig,
    pub(crate) owner: Owner,
    pub(crate) planner: Planner,
    pub(crate) recent: Recent,
    pub(crate) deleted: Deleted,
    pub(crate) facts: Kept<GcpFacts>,
    /// Pauses of the waits for Google's decision on one VM, on a batch, on an attachment.
    pub(crate) decisions: Wait,
    pub(crate) batches: Wait,
    pub(crate) disks: Wait,
    /// Pauses of the waits for a state that is usually there.
    pub(crate) looks: Wait,
    scheduler: Scheduler,
    connection: OnceLock<GcpConnection>,
}

/// The client, and the batcher that collects looks for it.
pub(crate) struct GcpConnection {
    pub(crate) compute: Compute,
    pub(crate) vms: Lookup<GcpVm>,
}

impl GcpProvider {
    /// Creates a provider from its settings; makes no call.
    pub fn new(config: GcpConfig, owner: Owner) -> GcpProvider {
        let policy = Policy {
            allowed: config.instance_types.clone(),
            default: config.instance_type.clone(),
            markets: config.markets.clone(),
            arch: Some(config.arch),
            confidential: config.confidential,
        };
        let learning = || Wait::learning(PAUSES.0, PAUSES.1);
        GcpProvider(Arc::new(Gcp {
            owner,
            planner: Planner::new(policy),
            recent: Recent::default(),
            deleted: Deleted::default(),
            facts: Kept::new("facts about the project", FRESH),
            decisions: learning(),
            batches: Wait::learning(BATCH_PAUSES.0, BATCH_PAUSES.1),
            disks: learning(),
            looks: Wait::new(PAUSES.0, PAUSES.1),
            scheduler: Scheduler::new(client::table()),
            connection: OnceLock::new(),
            config,
        }))
    }
}

impl Gcp {
    /// Returns the client; sets it up at first use, without a call.
    pub(crate) fn connected(&self) -> Result<&GcpConnection, Error> {
        if let Some(connected) = self.connection.get() {
            return Ok(connected);
        }
        let compute = Compute::connect(&self.config, self.scheduler.clone())?;
        let vms = vms::inspect(compute.clone(), self.owner.clone());
        // Another caller may have set it up meanwhile; then this one is dropped.
        Ok(self.connection.get_or_init(|| GcpConnection { compute, vms }))
    }

    /// Returns the facts about the project. Loads them if they are missing or old, or if `afresh` is set.
    pub(crate) async fn facts(&self, afresh: bool) -> Result<Arc<GcpFacts>, Error> {
        let load = || async {
            let facts = GcpFacts::load(&self.connected()?.compute, &self.config).await?;
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
        is_as_wanted: impl Fn(&GcpVm) -> bool,
    ) -> Result<GcpVm, Error> {
        let Some(vm) = VmId::parse(id.as_str()) else {
            return Err(Error::not_found(format!("{what}: this is no VM of Google Cloud")));
        };
        let connected = self.connected()?;
        let look = || async {
            let Some(seen) = connected.vms.ask(vm.to_string(), until(), what).await? else {
                return Ok(Look::Unknown);
            };
            if !seen.marks.are_of(&self.owner) {
                return Ok(if seen.marks.cluster.is_some() { Look::Foreign } else { Look::Unmarked });
            }
            Ok(if !seen.state.lives() || is_as_wanted(&seen) { Look::Done(seen) } else { Look::Open })
        };
        wait_for(&self.looks, &self.recent, id, (what, "Google"), look).await
    }

    fn check(&self, request: &CreateRequest) -> Result<(), Error> {
        check_creates(self.config.creates, request)?;
        self.capabilities().check(request, "gcp")
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            images: true,
            instance_types: true,
            gpus: true,
            archs: vec![self.config.arch],
            confidential: vec![Confidential::Sev, Confidential::SevSnp, Confidential::Tdx],
            spot: self.config.markets.contains(&Market::Spot),
            zones: true,
            public_ip: true,
            second_nic: self.config.second_nic.is_some(),
            volumes: true,
            console: true,
            max_batch: self.config.batch,
            ..Capabilities::minimal(MAX_USER_DATA)
        }
    }

    /// Chooses one offering: an asynchronous cloud has one key, and one name, for each.
    async fn place(&self, request: &CreateRequest) -> Result<Placement, Error> {
        self.facts(false).await?;
        let mut wanted = CreateRequest { user_data: String::new(), ..request.clone() };
        if let Some(zones) = volumes::zones(self, request).await? {
            let allowed = |zone: &String| request.zones.is_empty() || request.zones.contains(zone);
            wanted.zones = zones.into_iter().filter(allowed).collect();
            if wanted.zones.is_empty() {
                return Err(Error::invalid(format!(
                    "create of {}: no allowed zone has all of its disks; the pod's volumes must be in one zone, and in \
                     one of provider.gcp.zones",
                    request.name
                )));
            }
        }
        self.planner.place(&wanted, 1)
    }

    async fn image(&self, request: &CreateRequest, facts: &GcpFacts) -> Result<GcpImageFacts, Error> {
        let Some(text) = &request.image else { return Ok(facts.image.clone()) };
        let what = format!("create of {}: look at the pod's image", request.name);
        let image = GcpImage::parse(text, &self.config.project).ok_or_else(|| {
            Error::invalid(format!(
                "{what}: it is not an image; write it like projects/my-project-1/global/images/podvm-1"
            ))
        })?;
        let found = facts::image_facts(&self.connected()?.compute, &image, &what).await?;
        facts::check_arch(&found, self.config.arch, &what, "name another image")?;
        Ok(found)
    }

    async fn one(&self, request: &CreateRequest, key: &IdempotencyKey) -> Result<Created, Error> {
        self.check(request)?;
        let until = until();
        let disks = volumes::disks_of(self, request)?;
        let facts = self.facts(false).await?;
        let offering = offering(request, self.place(request)).await?;
        let image = self.image(request, &facts).await?;
        let connected = self.connected()?;
        let (offering, image, disks) = (&offering, &image, &disks[..]);
        GcpLaunch { gcp: self, connected, request, key, offering, image, disks, until }.one().await
    }

    async fn many(
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
        let connected = self.connected()?;
        let (offering, image, disks) = (&offering, &image, &[][..]);
        GcpLaunch { gcp: self, connected, request, key, offering, image, disks, until }.many(count).await
    }
}

#[async_trait]
impl Provider for GcpProvider {
    fn name(&self) -> &'static str {
        "gcp"
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
        self.0.one(request, key).await
    }

    async fn addresses(&self, id: &InstanceId) -> Result<Vec<IpAddr>, Error> {
        let what = format!("addresses of VM {id}");
        let gcp = &self.0;
        let public = gcp.config.use_public_ip;
        // Before Google has decided, a VM has an address, and may vanish.
        let is_ready = |vm: &GcpVm| vm.state != VmState::Pending && !vm.addresses(public).is_empty();
        let seen = gcp.wait_for(id, &what, is_ready).await?;
        if seen.state.lives() {
            return Ok(seen.addresses(public));
        }
        let why = seen.reason.map(|why| format!(": {why}")).unwrap_or_default();
        Err(Error::not_found(format!("{what}: it has ended{why}")))
    }

    async fn delete(&self, id: &InstanceId) -> Result<(), Error> {
        remove::delete(&self.0, id).await
    }

    async fn list_owned(&self) -> Result<Vec<Owned>, Error> {
        let gcp = &self.0;
        let compute = &gcp.connected()?.compute;
        let seen = vms::all_of(compute, &gcp.owner, gcp.config.region(), until()).await?;
        let now = Instant::now();
        let owned = |vm: &GcpVm| vm.owned(gcp.config.use_public_ip, gcp.deleted.has(&vm.id, now));
        let mut owned: Vec<Owned> = seen.iter().filter_map(owned).collect();
        owned.extend(gcp.recent.missing_from(&owned, now));
        Ok(owned)
    }

    fn extensions(&self) -> Extensions<'_> {
        Extensions {
            batch: (self.0.config.batch > 0).then_some(self as &dyn Batch),
            volumes: Some(self),
            console: Some(self),
        }
    }

    fn register_metrics(&self, registry: &mut Registry) {
        self.0.scheduler.register(registry);
    }
}

#[async_trait]
impl Batch for GcpProvider {
    async fn create_many(
        &self,
        request: &CreateRequest,
        count: NonZeroU32,
        key: &IdempotencyKey,
    ) -> Result<CreatedMany, Error> {
        self.0.capabilities().check_batch(request, count, "gcp")?;
        self.0.many(request, count.get(), key).await
    }
}

#[async_trait]
impl Volumes for GcpProvider {
    async fn attach(&self, id: &InstanceId, disk: &DiskRequest) -> Result<DiskIdentity, Error> {
        volumes::attach(&self.0, id, disk).await
    }

    async fn detach(&self, id: &InstanceId, volume: &str) -> Result<(), Error> {
        volumes::detach(&self.0, id, volume).await
    }
}

#[async_trait]
impl Console for GcpProvider {
    async fn tail(&self, id: &InstanceId, limit: usize) -> Result<Vec<u8>, Error> {
        let what = format!("console of VM {id}");
        let gcp = &self.0;
        let vm = gcp.wait_for(id, &what, |_| true).await?;
        let compute = &gcp.connected()?.compute;
        // A negative start counts from the end.
        let query = [("port", "1"), ("start", &format!("-{limit}"))];
        let path = compute.own(&format!("{}/serialPort", vm.id.path()));
        let call = ApiCall::new("instances.getSerialPortOutput", id.as_str(), &what);
        let body = compute.get(call, &path, &query).await?;
        let text = body.pointer("/contents").and_then(|text| text.as_str()).unwrap_or_default();
        Ok(text.as_bytes().get(text.len().saturating_sub(limit)..).unwrap_or_default().to_vec())
    }
}
