//! Implements the provider trait, and holds the state that its parts share.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use peerpod_common::keyed_locks::KeyedLocks;
use peerpod_provider_api::{
    Arch, Capabilities, CreateRequest, Created, Error, IdempotencyKey, InstanceId, Owned, OwnedState, Owner,
    Preflight, Provider,
};
use peerpod_provider_cloud::refusal::clip;
use peerpod_provider_cloud::{
    Look, Lookup, Marks, Recent, Scheduler, VmState, Wait, check_creates, names, until, wait_for,
};
use prometheus_client::registry::Registry;
use tokio::time::Instant;

use crate::client::{self, Power};
use crate::config::{PowerVsConfig, is_name};
use crate::create::{PowerVsLaunch, Unclear};
use crate::duplicates;
use crate::leases::{self, LeaseLookup};
use crate::vms::{self, PowerVsVm, Tags};

/// User-data limit before base64 ("63K" in IBM's description of the API).
const MAX_USER_DATA: usize = 63 << 10;
/// Longest pauses between two looks: at a VM that PowerVS builds, which takes minutes, and at another.
const PAUSES: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(3));
/// Time after its start in which a process finishes the creates of an earlier one.
const YOUNG: Duration = Duration::from_secs(60);

/// Provider of VMs on PowerVS; see the crate's documentation.
pub struct PowerVsProvider(Arc<PowerVs>);

/// State that the parts of the provider share.
pub(crate) struct PowerVs {
    pub(crate) config: PowerVsConfig,
    pub(crate) owner: Owner,
    pub(crate) recent: Recent,
    pub(crate) tags: Tags,
    pub(crate) unclear: Unclear,
    /// Creates in progress.
    pub(crate) creates: KeyedLocks<IdempotencyKey>,
    /// Pauses of the waits for the decision on a VM, and for a state that is usually there.
    pub(crate) decisions: Wait,
    pub(crate) looks: Wait,
    started: Instant,
    scheduler: Scheduler,
    connection: OnceLock<PowerVsConnection>,
}

/// The client, and the batchers that collect looks for it.
struct PowerVsConnection {
    power: Power,
    vms: Lookup<Vec<PowerVsVm>>,
    leases: LeaseLookup,
}

impl PowerVsProvider {
    /// Creates a provider from its settings; makes no call.
    pub fn new(config: PowerVsConfig, owner: Owner) -> PowerVsProvider {
        PowerVsProvider(Arc::new(PowerVs {
            decisions: Wait::new(config.pause, PAUSES.0),
            looks: Wait::new(config.pause, PAUSES.1),
            config,
            owner,
            recent: Recent::default(),
            tags: Tags::default(),
            unclear: Unclear::default(),
            creates: KeyedLocks::default(),
            started: Instant::now(),
            scheduler: Scheduler::new(client::table()),
            connection: OnceLock::new(),
        }))
    }
}

impl PowerVs {
    /// Returns the client; sets it up at first use, without a call.
    pub(crate) fn power(&self) -> Result<&Power, Error> {
        self.connected().map(|connected| &connected.power)
    }

    /// Returns the lookup of VMs by their names and ids.
    pub(crate) fn vms(&self) -> Result<&Lookup<Vec<PowerVsVm>>, Error> {
        self.connected().map(|connected| &connected.vms)
    }

    fn connected(&self) -> Result<&PowerVsConnection, Error> {
        if let Some(connected) = self.connection.get() {
            return Ok(connected);
        }
        let power = Power::connect(&self.config, self.scheduler.clone())?;
        let connected = PowerVsConnection {
            vms: vms::inspect(power.clone()),
            leases: leases::inspect(power.clone()),
            power,
        };
        // Another caller may have been faster; both clients are as good.
        Ok(self.connection.get_or_init(|| connected))
    }

    /// Whether creates of an earlier process may still be on their way.
    pub(crate) fn is_young(&self) -> bool {
        self.started.elapsed() < YOUNG
    }

    /// Looks at a VM, together with other callers. `None`: PowerVS does not know it.
    pub(crate) async fn look(
        &self,
        id: &InstanceId,
        until: Instant,
        what: &str,
    ) -> Result<Option<PowerVsVm>, Error> {
        if !is_id(id) {
            return Ok(None);
        }
        let seen = self.vms()?.ask(id.as_str().to_owned(), until, what).await?;
        let seen = seen.and_then(|vms| vms.into_iter().next());
        if seen.is_some() {
            self.recent.seen(id);
        }
        Ok(seen)
    }

    /// Returns every VM of this owner, each name once. Deletes the others of a name.
    pub(crate) async fn list(&self) -> Result<Vec<Owned>, Error> {
        let (what, until) = ("list our VMs", until());
        let power = self.power()?;
        let mut all = vms::list(power, what, until).await?;
        self.tags.keep(&all);
        all.retain(|vm| vm.name.starts_with(&names::prefix(&self.owner)));
        let mut by_name: BTreeMap<String, Vec<(PowerVsVm, Marks)>> = BTreeMap::new();
        for (vm, marks) in self.tags.of_all(power, all, what, until).await? {
            if marks.are_of(&self.owner) {
                by_name.entry(vm.name.clone()).or_default().push((vm, marks));
            }
        }
        let mut owned = Vec::new();
        for ((first, marks), duplicates) in by_name.into_values().filter_map(duplicates::choose) {
            owned.extend(first.owned(&marks, self.config.use_public_ip));
            duplicates::remove(power, &duplicates).await?;
            // Without a key: no pod may join it.
            let going = Marks { node: marks.node, ..Marks::default() };
            let duplicates =
                duplicates.iter().filter_map(|(vm, _)| vm.owned(&going, self.config.use_public_ip));
            owned.extend(duplicates.map(|one| Owned { state: OwnedState::Deleting, ..one }));
        }
        Ok(owned)
    }

    fn check(&self, request: &CreateRequest) -> Result<(), Error> {
        check_creates(self.config.creates, request)?;
        self.capabilities().check(request, "ibmcloud-powervs")?;
        if request.placement.is_some() {
            let text = format!(
                "create of {}: PowerVS has no choice of places; its placement is none of ours",
                request.name
            );
            return Err(Error::invalid(text));
        }
        Ok(())
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            images: true,
            instance_types: true,
            archs: vec![Arch::Ppc64le],
            public_ip: self.config.use_public_ip,
            second_nic: self.config.second_network.is_some(),
            // A disk has several paths with one WWN, and no image of ours joins them.
            volumes: false,
            ..Capabilities::minimal(MAX_USER_DATA)
        }
    }

    async fn make(&self, request: &CreateRequest, key: &IdempotencyKey) -> Result<Created, Error> {
        self.check(request)?;
        let size = self.config.size.of(request)?;
        if self.config.processor_type == "dedicated" && size.quarters % 4 != 0 {
            let text = format!("create of {}: dedicated processors are whole, not {size}", request.name);
            return Err(Error::invalid(text));
        }
        let image = request.image.as_ref().or(self.config.image.as_ref()).filter(|image| is_name(image));
        let image = image.ok_or_else(|| {
            Error::invalid(format!("create of {}: its image is no id; write it as image-id", request.name))
        })?;
        let launch = PowerVsLaunch {
            power_vs: self,
            power: self.power()?,
            request,
            key,
            size: &size,
            image,
            until: until(),
        };
        launch.go().await
    }

    /// Waits until a VM has addresses. The caller sets the deadline by dropping the future.
    async fn addresses(&self, id: &InstanceId, what: &str) -> Result<Vec<IpAddr>, Error> {
        let connected = self.connected()?;
        let look = || async {
            let Some(vm) = self.look(id, until(), what).await? else { return Ok(Look::Unknown) };
            let marks = self.tags.of(&connected.power, &vm.id, what, until()).await?.unwrap_or_default();
            if !marks.are_of(&self.owner) {
                return Ok(Look::Foreign);
            }
            if matches!(vm.state, VmState::Ended | VmState::Failed | VmState::Deleting) {
                let why = vm.fault.map(|said| format!(": {}", clip(&said.message))).unwrap_or_default();
                return Err(Error::not_found(format!("{what}: it has ended{why}")));
            }
            let Some(nic) = vm.nics.first() else { return Ok(Look::Open) };
            let known = nic.addresses(self.config.use_public_ip);
            if !known.is_empty() {
                return Ok(Look::Done(known));
            }
            let Some(mac) = nic.mac.clone().filter(|_| nic.address.is_none()) else { return Ok(Look::Open) };
            let lease = connected.leases.ask(mac, until(), what).await?;
            Ok(lease.map_or(Look::Open, |address| Look::Done(vec![address])))
        };
        wait_for(&self.looks, &self.recent, id, (what, "PowerVS"), look).await
    }
}

/// Whether a VM can have this id. Names begin like none.
fn is_id(id: &InstanceId) -> bool {
    is_name(id.as_str()) && !id.as_str().starts_with(names::ALL)
}

#[async_trait]
impl Provider for PowerVsProvider {
    fn name(&self) -> &'static str {
        "ibmcloud-powervs"
    }

    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    async fn preflight(&self) -> Result<Preflight, Error> {
        crate::preflight::run(&self.0).await
    }

    async fn create(&self, request: &CreateRequest, key: &IdempotencyKey) -> Result<Created, Error> {
        self.0.make(request, key).await
    }

    async fn addresses(&self, id: &InstanceId) -> Result<Vec<IpAddr>, Error> {
        let what = format!("addresses of VM {id}");
        if !is_id(id) {
            return Err(Error::not_found(format!("{what}: this is no id of a VM")));
        }
        self.0.addresses(id, &what).await
    }

    async fn delete(&self, id: &InstanceId) -> Result<(), Error> {
        let power_vs = &self.0;
        let (what, until) = (format!("delete of VM {id}"), until());
        let is_new = power_vs.recent.may_be_denied(id, Instant::now());
        let Some(vm) = power_vs.look(id, until, &what).await? else {
            if is_new {
                return Err(Error::transient(format!(
                    "{what}: PowerVS does not know it yet, it was made a moment ago; it is tried again"
                )));
            }
            return Ok(());
        };
        let power = power_vs.power()?;
        let Some(marks) = power_vs.tags.of(power, &vm.id, &what, until).await? else { return Ok(()) };
        if !marks.are_of(&power_vs.owner) {
            tracing::warn!(vm = %id, "the VM has no tags of this cluster, node and installation: it is left alone");
            return Ok(());
        }
        if vm.state == VmState::Deleting {
            return Ok(());
        }
        vms::delete(power, &vm.id, &what, until).await
    }

    async fn list_owned(&self) -> Result<Vec<Owned>, Error> {
        let mut owned = self.0.list().await?;
        owned.extend(self.0.recent.missing_from(&owned, Instant::now()));
        Ok(owned)
    }

    fn register_metrics(&self, registry: &mut Registry) {
        self.0.scheduler.register(registry);
    }
}
