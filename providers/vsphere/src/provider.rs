//! Implements the provider trait, and holds the state that its parts share.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::stream::BoxStream;
use parking_lot::Mutex;
use peerpod_provider_api::{
    Arch, Capabilities, Console, CreateRequest, Created, DiskIdentity, DiskRequest, Error, Extensions,
    IdempotencyKey, InstanceId, Market, Owned, Owner, Placement, Preflight, Provider, ProviderEvent, Volumes,
};
use peerpod_provider_cloud::{
    Kept, Look, Lookup, Planner, Policy, Recent, Scheduler, Wait, check_creates, names, offering, offerings,
    until, wait_for,
};
use peerpod_provider_rest::Decision;
use prometheus_client::registry::Registry;
use tokio::sync::broadcast;
use tokio::time::Instant;

use crate::body::VsphereVmSpec;
use crate::client::{self, Vcenter};
use crate::config::VsphereConfig;
use crate::create::{self, VsphereLaunch};
use crate::facts::{self, FRESH, TYPE, Template, VsphereFacts};
use crate::soap::Moref;
use crate::tasks::{self, TaskLookup};
use crate::vms::{self, Folder, Power, VsphereVm};
use crate::{console, events, preflight, remove, volumes};

/// Largest accepted user-data, in bytes: the guest's limit.
const MAX_USER_DATA: usize = 64 << 10;
/// Longest pause between two looks at a task, and at a VM.
const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(1));

/// Provider of VMs on vSphere; see the crate's documentation.
pub struct VsphereProvider(Arc<Vsphere>);

/// State that the parts of the provider share.
pub(crate) struct Vsphere {
    pub(crate) config: VsphereConfig,
    pub(crate) owner: Owner,
    pub(crate) planner: Planner,
    pub(crate) recent: Recent,
    pub(crate) facts: Kept<VsphereFacts>,
    /// Held while the folder is made.
    pub(crate) folder: tokio::sync::Mutex<()>,
    /// Tasks of clones that went on when their callers' time was over, by the VM's name.
    pub(crate) making: Mutex<HashMap<String, Moref>>,
    /// Pauses of the waits for clones, and for other tasks.
    pub(crate) clones: Wait,
    pub(crate) changes: Wait,
    /// Pauses of the waits for a state that is usually there.
    pub(crate) looks: Wait,
    pub(crate) ended: broadcast::Sender<ProviderEvent>,
    scheduler: Scheduler,
    connection: OnceLock<VsphereConnection>,
}

/// The client, and the batchers that collect looks for it.
pub(crate) struct VsphereConnection {
    pub(crate) vcenter: Vcenter,
    pub(crate) folder: Arc<Folder>,
    pub(crate) vms: Lookup<VsphereVm>,
    pub(crate) tasks: TaskLookup,
}

impl VsphereProvider {
    /// Creates a provider from its settings; makes no call.
    pub fn new(config: VsphereConfig, owner: Owner) -> VsphereProvider {
        let policy = Policy {
            allowed: vec![TYPE.to_owned()],
            default: TYPE.to_owned(),
            markets: vec![Market::OnDemand],
            arch: Some(Arch::X86_64),
            confidential: None,
        };
        let learning = || Wait::learning(config.pause, PAUSES.0);
        VsphereProvider(Arc::new(Vsphere {
            owner,
            planner: Planner::new(policy),
            recent: Recent::default(),
            facts: Kept::new("facts about the vCenter", FRESH),
            folder: tokio::sync::Mutex::default(),
            making: Mutex::default(),
            clones: learning(),
            changes: learning(),
            // A boot takes longer than a task.
            looks: Wait::new(3 * config.pause, PAUSES.1),
            ended: events::channel(),
            scheduler: Scheduler::new(client::table()),
            connection: OnceLock::new(),
            config,
        }))
    }
}

impl Vsphere {
    /// Returns the client; sets it up at first use, without a call.
    pub(crate) fn connected(&self) -> Result<&VsphereConnection, Error> {
        if let Some(connected) = self.connection.get() {
            return Ok(connected);
        }
        let vcenter = Vcenter::connect(&self.config, self.scheduler.clone())?;
        let folder = Arc::new(Folder::new(vcenter.clone(), self.config.clone()));
        let vms = vms::inspect(Arc::clone(&folder));
        let tasks = tasks::lookup(vcenter.clone());
        // Another caller may have set it up meanwhile; then this one is dropped.
        Ok(self.connection.get_or_init(|| VsphereConnection { vcenter, folder, vms, tasks }))
    }

    /// Returns the facts about the vCenter. Loads them if they are missing or old, or if `afresh` is set.
    pub(crate) async fn facts(&self, afresh: bool) -> Result<Arc<VsphereFacts>, Error> {
        let load = || async {
            let facts = VsphereFacts::load(&self.connected()?.vcenter, &self.config).await?;
            self.planner.learn(facts.catalogue());
            Ok(facts)
        };
        if afresh { self.facts.renew(load).await } else { self.facts.get(load).await }
    }

    /// Whether the clone of this VM is still going on. Fails with [`Error::NotFound`] if it has failed.
    pub(crate) async fn is_being_made(&self, id: &InstanceId, what: &str) -> Result<bool, Error> {
        let Some(task) = self.making.lock().get(id.as_str()).cloned() else { return Ok(false) };
        let looked = self.look_at(&task, until(), what).await.map_err(|failure| failure.error)?;
        if !matches!(looked, Decision::Open) {
            self.making.lock().remove(id.as_str());
        }
        match looked {
            Decision::Open => Ok(true),
            Decision::Made(()) => Ok(false),
            Decision::Refused(said) => Err(Error::not_found(format!("{what}: {}", create::failed(&said)))),
        }
    }

    /// Waits until a VM is as wanted, or has ended. The caller sets the deadline by dropping the future. Fails with
    /// [`Error::NotFound`] if this owner has no such VM.
    pub(crate) async fn wait_for(
        &self,
        id: &InstanceId,
        what: &str,
        is_as_wanted: impl Fn(&VsphereVm) -> bool,
    ) -> Result<VsphereVm, Error> {
        let connected = self.connected()?;
        let look = || async {
            let Some(seen) = connected.vms.ask(id.as_str().to_owned(), until(), what).await? else {
                return Ok(if self.is_being_made(id, what).await? { Look::Open } else { Look::Unknown });
            };
            if !seen.is_of(&self.owner) {
                return Ok(if seen.marks.cluster.is_some() { Look::Foreign } else { Look::Unmarked });
            }
            let is_starting = seen.power == Power::Off
                && !seen.is_deleting
                && (self.recent.may_be_denied(id, Instant::now()) || self.is_being_made(id, what).await?);
            Ok(match seen.lives() {
                // A VM that was made a moment ago is off until it is switched on.
                false if is_starting => Look::Unknown,
                true if !is_as_wanted(&seen) => Look::Open,
                _ => Look::Done(seen),
            })
        };
        wait_for(&self.looks, &self.recent, id, (what, "the vCenter"), look).await
    }

    fn check(&self, request: &CreateRequest) -> Result<(), Error> {
        check_creates(self.config.creates, request)?;
        self.capabilities().check(request, "vsphere")?;
        volumes::check(&request.disks, &format!("create of {}", request.name))
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            images: true,
            archs: vec![Arch::X86_64],
            second_nic: self.config.second_network.is_some(),
            volumes: true,
            console: self.config.console,
            events: true,
            ..Capabilities::minimal(MAX_USER_DATA)
        }
    }

    /// Chooses one place of those that are not exhausted. Pods spread over all of them, because no price orders them.
    async fn place(&self, request: &CreateRequest) -> Result<Placement, Error> {
        let facts = self.facts(false).await?;
        let wanted = CreateRequest { user_data: String::new(), ..request.clone() };
        let all = offerings(&wanted, async { self.planner.place(&wanted, facts.places.len()) }).await?;
        let first = names::digest(&[&request.name]).first().copied().unwrap_or_default();
        let chosen = all.get(usize::from(first) % all.len().max(1));
        let zones = chosen.map(|offering| offering.zone.clone()).into_iter().collect();
        self.planner.place(&CreateRequest { zones, ..wanted }, 1)
    }

    async fn template(&self, request: &CreateRequest, facts: &VsphereFacts) -> Result<Template, Error> {
        let Some(name) = &request.image else { return Ok(facts.template.clone()) };
        let during = |error: Error| error.during(format!("create of {}", request.name));
        if name.split('/').any(|part| part.is_empty() || part == "..") {
            return Err(during(Error::invalid(
                "the pod's image is no template; write its name, or its path like a/b",
            )));
        }
        facts::template(&self.connected()?.vcenter, &self.config, name).await.map_err(during)
    }

    async fn one(&self, request: &CreateRequest, key: &IdempotencyKey) -> Result<Created, Error> {
        self.check(request)?;
        let until = until();
        let facts = self.facts(false).await?;
        let offering = offering(request, self.place(request)).await?;
        let place = facts.places.iter().find(|place| place.name == offering.zone);
        let place = place.ok_or_else(|| {
            let (name, zone) = (&request.name, &offering.zone);
            Error::capacity(zone.clone(), format!("create of {name}: {zone} is not in the settings any more"))
        })?;
        let template = self.template(request, &facts).await?;
        let folder = create::folder(self, &format!("create of {}", request.name)).await?;
        let shape = VsphereVmSpec {
            config: &self.config,
            owner: &self.owner,
            request,
            key,
            folder: &folder,
            template: &template,
            place,
            networks: [facts.network.as_ref(), facts.second_network.as_ref()],
        };
        let connected = self.connected()?;
        VsphereLaunch { vsphere: self, connected, request, key, offering: &offering, shape, until }
            .one()
            .await
    }
}

#[async_trait]
impl Provider for VsphereProvider {
    fn name(&self) -> &'static str {
        "vsphere"
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
        let seen = self.0.wait_for(id, &what, |vm| !vm.addresses.is_empty()).await?;
        if seen.lives() {
            return Ok(seen.addresses);
        }
        Err(Error::not_found(format!("{what}: it has ended, or is being deleted")))
    }

    async fn delete(&self, id: &InstanceId) -> Result<(), Error> {
        remove::delete(&self.0, id).await
    }

    async fn list_owned(&self) -> Result<Vec<Owned>, Error> {
        let vsphere = &self.0;
        let seen = vsphere.connected()?.folder.all_of(&vsphere.owner, until()).await?;
        let now = Instant::now();
        let is_new = |vm: &VsphereVm| {
            let id = InstanceId::new(vm.name.clone());
            id.is_ok_and(|id| vsphere.recent.may_be_denied(&id, now))
        };
        let mut owned: Vec<Owned> = seen.iter().filter_map(|vm| vm.owned(is_new(vm))).collect();
        // The vCenter lists a VM only when its clone has ended.
        owned.extend(vsphere.recent.missing_from(&owned, now));
        Ok(owned)
    }

    fn extensions(&self) -> Extensions<'_> {
        Extensions {
            batch: None,
            volumes: Some(self),
            console: self.0.config.console.then_some(self as &dyn Console),
        }
    }

    fn events(&self) -> Option<BoxStream<'static, ProviderEvent>> {
        Some(events::stream(&self.0))
    }

    fn register_metrics(&self, registry: &mut Registry) {
        self.0.scheduler.register(registry);
    }
}

#[async_trait]
impl Volumes for VsphereProvider {
    async fn attach(&self, id: &InstanceId, disk: &DiskRequest) -> Result<DiskIdentity, Error> {
        volumes::attach(&self.0, id, disk).await
    }

    async fn detach(&self, id: &InstanceId, volume: &str) -> Result<(), Error> {
        volumes::detach(&self.0, id, volume).await
    }
}

#[async_trait]
impl Console for VsphereProvider {
    async fn tail(&self, id: &InstanceId, limit: usize) -> Result<Vec<u8>, Error> {
        console::tail(&self.0, id, limit).await
    }
}
