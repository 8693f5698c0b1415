//! Implements the provider trait, and holds the state that its parts share.

use std::net::IpAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use peerpod_common::keyed_locks::KeyedLocks;
use peerpod_provider_api::{
    Arch, Capabilities, Confidential, CreateRequest, Created, DiskIdentity, DiskRequest, Error, Extensions,
    IdempotencyKey, InstanceId, Market, Owned, Owner, Placement, Preflight, Provider, Volumes,
};
use peerpod_provider_cloud::exhausted::{LONGEST, Scope};
use peerpod_provider_cloud::refusal::clip;
use peerpod_provider_cloud::{
    Kept, Look, Lookup, Offering, Planner, Policy, Recent, Scheduler, Strays, VmState, Wait, Window,
    check_creates, offering, until, wait_for,
};
use prometheus_client::registry::Registry;
use tokio::time::Instant;

use crate::client::{self, Vpc};
use crate::config::IbmCloudConfig;
use crate::create::IbmCloudLaunch;
use crate::facts::{self, FRESH, IbmCloudFacts};
use crate::ids::{self, IbmCloudPlace};
use crate::vms::{self, IbmCloudVm};
use crate::{remove, volumes};

/// User-data limit ("User data", 64 KB), in bytes.
const MAX_USER_DATA: usize = 64 << 10;
/// Pauses between two looks at a VM: the first one, then the others.
const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(2));
/// Most images beside the configured ones whose facts are kept.
const MOST_IMAGES: usize = 64;

/// Provider of VMs on IBM Cloud VPC; see the crate's documentation.
pub struct IbmCloudProvider(Arc<IbmCloud>);

/// State that the parts of the provider share.
pub(crate) struct IbmCloud {
    pub(crate) config: IbmCloudConfig,
    pub(crate) owner: Owner,
    pub(crate) planner: Planner,
    pub(crate) recent: Recent,
    /// Changes of VMs in progress.
    pub(crate) changes: KeyedLocks<InstanceId>,
    pub(crate) strays: Strays,
    /// Pauses of the waits for IBM's decision on a VM, and for a state that is usually there.
    pub(crate) decisions: Wait,
    pub(crate) looks: Wait,
    scheduler: Scheduler,
    connection: OnceLock<IbmCloudConnection>,
    facts: Kept<IbmCloudFacts>,
    /// Facts about images that pods name.
    images: Mutex<Vec<(Arch, String)>>,
}

/// The client, and the batchers that collect looks for it.
struct IbmCloudConnection {
    vpc: Vpc,
    inspect: Lookup<IbmCloudVm>,
    look_in_a_burst: Lookup<IbmCloudVm>,
}

impl IbmCloudProvider {
    /// Creates a provider from its settings; makes no call.
    pub fn new(config: IbmCloudConfig, owner: Owner) -> IbmCloudProvider {
        let policy = Policy {
            allowed: config.instance_types.clone(),
            default: config.instance_type.clone(),
            markets: config.markets.clone(),
            arch: Some(config.arch),
            confidential: config.confidential,
        };
        IbmCloudProvider(Arc::new(IbmCloud {
            owner,
            planner: Planner::new(policy),
            recent: Recent::default(),
            changes: KeyedLocks::default(),
            strays: Strays::new(Instant::now()),
            decisions: Wait::learning(PAUSES.0, PAUSES.1),
            looks: Wait::new(PAUSES.0, PAUSES.1),
            scheduler: Scheduler::new(client::table()),
            connection: OnceLock::new(),
            facts: Kept::new("facts about the VPC", FRESH),
            images: Mutex::default(),
            config,
        }))
    }
}

impl IbmCloud {
    /// Returns the client; sets it up at first use, without a call.
    pub(crate) fn vpc(&self) -> Result<&Vpc, Error> {
        self.connected().map(|connected| &connected.vpc)
    }

    fn connected(&self) -> Result<&IbmCloudConnection, Error> {
        if let Some(connected) = self.connection.get() {
            return Ok(connected);
        }
        let vpc = Vpc::connect(&self.config, self.scheduler.clone())?;
        let inspect = |window| vms::inspect(vpc.clone(), self.config.vpc.clone(), window);
        let connected = IbmCloudConnection {
            inspect: inspect(Window::LIST),
            look_in_a_burst: inspect(Window::BURST),
            vpc: vpc.clone(),
        };
        // Another caller may have been faster; both clients are as good.
        Ok(self.connection.get_or_init(|| connected))
    }

    /// Looks at a VM, together with other callers. `None`: IBM does not know it.
    pub(crate) async fn look(
        &self,
        id: &InstanceId,
        until: Instant,
        what: &str,
    ) -> Result<Option<IbmCloudVm>, Error> {
        if !ids::is_id(id.as_str()) {
            return Ok(None);
        }
        self.look_by(&self.connected()?.inspect, id, until, what).await
    }

    async fn look_by(
        &self,
        batcher: &Lookup<IbmCloudVm>,
        id: &InstanceId,
        until: Instant,
        what: &str,
    ) -> Result<Option<IbmCloudVm>, Error> {
        let seen = batcher.ask(id.as_str().to_owned(), until, what).await?;
        if seen.is_some() {
            self.recent.seen(id);
        }
        Ok(seen)
    }

    /// Returns the facts; loads them if they are missing, old or not wanted from before.
    pub(crate) async fn facts(&self, anew: bool) -> Result<Arc<IbmCloudFacts>, Error> {
        let vpc = self.vpc()?;
        let load = || async {
            let facts = IbmCloudFacts::load(vpc, &self.config).await?;
            self.planner.learn(facts.catalogue.clone());
            for (market, machine, zone) in facts.no_spot_places() {
                let why = "IBM does not sell this type on the spot market";
                self.planner.exhausted_for(Scope::Offering(market, machine, zone), why, LONGEST);
            }
            Ok(facts)
        };
        if anew { self.facts.renew(load).await } else { self.facts.get(load).await }
    }

    /// Returns the image of a request for VMs of this type.
    async fn image(
        &self,
        request: &CreateRequest,
        offering: &Offering,
        facts: &IbmCloudFacts,
    ) -> Result<String, Error> {
        let what = format!("create of {}", request.name);
        let machine = &offering.machine;
        let Some(wanted) = &request.image else {
            let found = facts.image(machine).map(str::to_owned);
            return found.ok_or_else(|| {
                Error::invalid(format!(
                    "{what}: no image of provider.ibmcloud.image-ids starts on {machine}; add one"
                ))
            });
        };
        let what = format!("{what}: look at the image");
        if !ids::is_id(wanted) {
            let shown: String = wanted.chars().take(40).collect();
            let text = format!(
                "{what}: `{shown}` is not the id of an image; write it as in provider.ibmcloud.image-ids"
            );
            return Err(Error::invalid(text));
        }
        let kept = self.images.lock().iter().find(|(_, id)| id == wanted).cloned();
        let image = match kept {
            Some(image) => image,
            None => {
                let image = facts::image(self.vpc()?, wanted, &what).await?;
                let mut images = self.images.lock();
                if images.len() >= MOST_IMAGES {
                    images.remove(0);
                }
                images.push(image.clone());
                image
            }
        };
        let catalogue = self.planner.catalogue();
        let fits = catalogue.types.iter().any(|one| one.name == *machine && one.archs.contains(&image.0));
        if fits {
            return Ok(image.1);
        }
        Err(Error::invalid(format!(
            "{what} {wanted}: it is for {}, which {machine} is not; name another one",
            image.0
        )))
    }

    fn check(&self, request: &CreateRequest) -> Result<(), Error> {
        check_creates(self.config.creates, request)?;
        self.capabilities().check(request, "ibmcloud")
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            images: true,
            instance_types: true,
            gpus: true,
            archs: match self.config.images.len() {
                0 | 1 => vec![self.config.arch],
                _ => vec![Arch::X86_64, Arch::S390x],
            },
            confidential: vec![Confidential::Tdx],
            spot: self.config.markets.contains(&Market::Spot),
            zones: true,
            second_nic: !self.config.second_subnets.is_empty(),
            volumes: true,
            ..Capabilities::minimal(MAX_USER_DATA)
        }
    }

    /// Chooses an offering among those that are not exhausted. One per attempt: the name of the VM follows from the key.
    pub(crate) fn planned(&self, wanted: &CreateRequest) -> Result<Placement, Error> {
        self.planner.place(&CreateRequest { user_data: String::new(), ..wanted.clone() }, 1)
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
        self.planned(&wanted)
    }

    async fn make(self: &Arc<Self>, request: &CreateRequest, key: &IdempotencyKey) -> Result<Created, Error> {
        self.check(request)?;
        let until = until();
        let facts = self.facts(false).await?;
        let offering = &offering(request, self.place(request)).await?;
        let place = offering.subnet.as_deref().and_then(IbmCloudPlace::parse).ok_or_else(|| {
            Error::invalid(format!("create of {}: its placement names no subnet or host", request.name))
        })?;
        let image = self.image(request, offering, &facts).await?;
        let launch = IbmCloudLaunch {
            ibm: self,
            vpc: self.vpc()?,
            request,
            key,
            offering,
            place: &place,
            second_subnets: &facts.second_subnets,
            image: &image,
            until,
        };
        launch.go().await
    }

    /// Waits until a VM has addresses. The caller sets the deadline by dropping the future.
    async fn addresses(&self, id: &InstanceId, what: &str) -> Result<Vec<IpAddr>, Error> {
        let connected = self.connected()?;
        let look = || async {
            let batcher = match self.recent.is_burst(Instant::now()) {
                true => &connected.look_in_a_burst,
                false => &connected.inspect,
            };
            let Some(vm) = self.look_by(batcher, id, until(), what).await? else { return Ok(Look::Unknown) };
            if !ids::is_of(&self.owner, &vm.name) {
                return Ok(Look::Foreign);
            }
            if matches!(vm.state, VmState::Ended | VmState::Failed | VmState::Deleting) {
                let why = vm.reason.map(|said| format!(": {}: {}", said.code, clip(&said.message)));
                return Err(Error::not_found(format!("{what}: it has ended{}", why.unwrap_or_default())));
            }
            Ok(if vm.addresses.is_empty() { Look::Open } else { Look::Done(vm.addresses) })
        };
        wait_for(&self.looks, &self.recent, id, (what, "IBM"), look).await
    }
}

/// Deletes left-over boot volumes in a task of its own, so that no list waits for it.
fn clean(ibm: Arc<IbmCloud>) {
    tokio::spawn(async move {
        let cleaned = async { remove::clean(&ibm.strays, ibm.vpc()?, &ibm.owner).await };
        match cleaned.await {
            Ok(0) => {}
            Ok(count) => tracing::info!(count, "deleted our boot volumes without a VM"),
            Err(error) => tracing::warn!("boot volumes of failed creates stay: {error}"),
        }
    });
}

#[async_trait]
impl Provider for IbmCloudProvider {
    fn name(&self) -> &'static str {
        "ibmcloud"
    }

    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    async fn preflight(&self) -> Result<Preflight, Error> {
        crate::preflight::run(&self.0).await
    }

    async fn place(&self, request: &CreateRequest) -> Result<Option<Placement>, Error> {
        self.0.check(request)?;
        self.0.place(request).await.map(Some)
    }

    async fn create(&self, request: &CreateRequest, key: &IdempotencyKey) -> Result<Created, Error> {
        self.0.make(request, key).await
    }

    async fn addresses(&self, id: &InstanceId) -> Result<Vec<IpAddr>, Error> {
        let what = format!("addresses of VM {id}");
        if !ids::is_id(id.as_str()) {
            return Err(Error::not_found(format!("{what}: this is no id of an instance")));
        }
        self.0.addresses(id, &what).await
    }

    async fn delete(&self, id: &InstanceId) -> Result<(), Error> {
        let ibm = &self.0;
        let (what, until) = (format!("delete of VM {id}"), until());
        let is_new = ibm.recent.may_be_denied(id, Instant::now());
        let Some(vm) = ibm.look(id, until, &what).await? else {
            if is_new {
                return Err(Error::transient(format!(
                    "{what}: IBM does not know it yet, it was made a moment ago; it is tried again"
                )));
            }
            return Ok(());
        };
        if !ids::is_of(&ibm.owner, &vm.name) {
            let name = vm.name;
            tracing::warn!(vm = %id, name, "the VM has no name of this cluster, node and installation: it is left alone");
            return Ok(());
        }
        if vm.state == VmState::Deleting {
            return Ok(());
        }
        remove::vm(ibm.vpc()?, id.as_str(), &what, until).await
    }

    async fn list_owned(&self) -> Result<Vec<Owned>, Error> {
        let ibm = &self.0;
        let mut owned = vms::all_of(ibm.vpc()?, &ibm.config.vpc, &ibm.owner, until()).await?;
        if ibm.strays.is_due(Instant::now()) {
            clean(Arc::clone(ibm));
        }
        owned.extend(ibm.recent.missing_from(&owned, Instant::now()));
        Ok(owned)
    }

    fn extensions(&self) -> Extensions<'_> {
        Extensions { batch: None, volumes: Some(self), console: None }
    }

    fn register_metrics(&self, registry: &mut Registry) {
        self.0.scheduler.register(registry);
    }
}

#[async_trait]
impl Volumes for IbmCloudProvider {
    async fn attach(&self, id: &InstanceId, disk: &DiskRequest) -> Result<DiskIdentity, Error> {
        volumes::attach(&self.0, id, disk).await
    }

    async fn detach(&self, id: &InstanceId, volume: &str) -> Result<(), Error> {
        volumes::detach(&self.0, id, volume).await
    }
}
