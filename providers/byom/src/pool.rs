//! Implements the provider trait on a pool of machines, and holds the state that its parts share.

mod claim;
mod connect;
mod create;
mod events;
mod fault;
mod files;
mod known;
mod list;
mod machine;
mod metrics;
mod place;
mod preflight;
mod remove;

use std::net::IpAddr;
use std::sync::{Arc, Once};

use async_trait::async_trait;
use futures_util::stream::BoxStream;
use peerpod_common::keyed_locks::KeyedLocks;
use peerpod_provider_api::{
    Capabilities, CreateRequest, Created, Error, IdempotencyKey, InstanceId, Owned, Owner, Placement,
    Preflight, Provider, ProviderEvent, detached,
};
use peerpod_provider_cloud::check_creates;
use prometheus_client::registry::Registry;
use tokio::sync::broadcast;

use crate::config::{ByomConfig, MachineAddress};
use claim::VmId;
use machine::Machine;

/// Largest accepted user-data, in bytes: the guest's limit.
const MAX_USER_DATA: usize = 64 << 10;
/// Most events that wait for a slow listener.
const MAX_EVENTS: usize = 1024;

/// Provider of VMs on machines that exist; see the crate's documentation.
pub struct ByomProvider(Arc<Pool>);

/// State that the parts of the provider share.
pub(crate) struct Pool {
    pub(crate) config: ByomConfig,
    pub(crate) owner: Owner,
    pub(crate) machines: Vec<Arc<Machine>>,
    /// Locks of creates without a placement.
    pub(crate) turns: KeyedLocks<IdempotencyKey>,
    pub(crate) ended: broadcast::Sender<ProviderEvent>,
    /// Start of the task that looks for such ends.
    pub(crate) watch: Once,
}

impl Pool {
    /// Returns the machine of this address.
    pub(crate) fn machine(&self, address: &MachineAddress) -> Option<&Arc<Machine>> {
        self.machines.iter().find(|machine| machine.address == *address)
    }

    fn capabilities() -> Capabilities {
        Capabilities { events: true, ..Capabilities::minimal(MAX_USER_DATA) }
    }

    fn check(&self, request: &CreateRequest) -> Result<(), Error> {
        check_creates(self.config.creates, request)?;
        Pool::capabilities().check(request, "byom")
    }

    async fn addresses(&self, id: &InstanceId) -> Result<Vec<IpAddr>, Error> {
        let gone = |why: &str| Error::not_found(format!("{why}; its machine has rebooted"));
        let vm = VmId::parse(id).ok_or_else(|| gone("this is no VM of the pool"))?;
        let machine = self
            .machine(&vm.machine)
            .ok_or_else(|| Error::not_found(format!("{} is not in provider.byom.machines", vm.machine)))?;
        let session = machine.look(self).await;
        let session = session.map_err(|fault| Error::transient(format!("{}: {fault}", vm.machine)))?;
        match session.ours(&self.owner) {
            Some(found) if found.claim.boot_id == vm.boot_id && !found.reboots => {
                Ok(vec![vm.machine.socket().ip()])
            }
            Some(found) if found.claim.boot_id == vm.boot_id => Err(Error::not_found("it is being deleted")),
            _ => Err(gone("it has ended")),
        }
    }
}

impl ByomProvider {
    /// Creates a provider of this owner's VMs; makes no connection.
    pub fn new(config: ByomConfig, owner: Owner) -> ByomProvider {
        let machines = config.machines.iter().map(|address| Arc::new(Machine::new(*address))).collect();
        let ended = broadcast::channel(MAX_EVENTS).0;
        ByomProvider(Arc::new(Pool {
            config,
            owner,
            machines,
            turns: KeyedLocks::default(),
            ended,
            watch: Once::new(),
        }))
    }
}

// A call whose caller leaves goes on in a task of its own: half a step with a machine would cost its connection.
#[async_trait]
impl Provider for ByomProvider {
    fn name(&self) -> &'static str {
        "byom"
    }

    fn capabilities(&self) -> Capabilities {
        Pool::capabilities()
    }

    async fn preflight(&self) -> Result<Preflight, Error> {
        preflight::run(&self.0).await.map_err(|error| error.during("byom"))
    }

    async fn place(&self, request: &CreateRequest) -> Result<Option<Placement>, Error> {
        self.0.check(request)?;
        let machine = place::choose(&self.0, request, &create::holder_of(request)).await?;
        Placement::new(machine.address.to_string()).map(Some)
    }

    async fn create(&self, request: &CreateRequest, key: &IdempotencyKey) -> Result<Created, Error> {
        self.0.check(request)?;
        let (pool, wanted, key) = (self.0.clone(), request.clone(), key.clone());
        let created = detached(async move { create::create(&pool, &wanted, &key).await }).await;
        created.map_err(|error| error.during(format_args!("create of {}", request.name)))
    }

    async fn addresses(&self, id: &InstanceId) -> Result<Vec<IpAddr>, Error> {
        let (pool, vm) = (self.0.clone(), id.clone());
        let addresses = detached(async move { pool.addresses(&vm).await }).await;
        addresses.map_err(|error| error.during(format_args!("addresses of VM {id}")))
    }

    async fn delete(&self, id: &InstanceId) -> Result<(), Error> {
        let (pool, vm) = (self.0.clone(), id.clone());
        let deleted = detached(async move { remove::delete(&pool, &vm).await }).await;
        deleted.map_err(|error| error.during(format_args!("delete of VM {id}")))
    }

    async fn list_owned(&self) -> Result<Vec<Owned>, Error> {
        list::all(&self.0).await.map_err(|error| error.during("list the VMs"))
    }

    fn events(&self) -> Option<BoxStream<'static, ProviderEvent>> {
        Some(events::stream(&self.0))
    }

    fn register_metrics(&self, registry: &mut Registry) {
        metrics::register(&self.0, registry);
    }
}
