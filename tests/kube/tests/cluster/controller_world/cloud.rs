//! Plays a cloud in the test's own process. The controller reaches it as an external provider over unix sockets, one
//! per replica. The cloud outlives the replicas and records the replica of each call.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::IpAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use peerpod_provider_api::{
    Capabilities, CreateRequest, Created, Error, IdempotencyKey, InstanceId, Owned, OwnedState, Preflight,
    Provider,
};
use peerpod_provider_external::Owner;
use peerpod_provider_external::serve::{Serving, listen_on_socket};
use tokio::sync::watch;

/// A `delete` call.
#[derive(Clone, Debug)]
pub struct Delete {
    /// Socket that it arrived on.
    pub via: &'static str,
    pub vm: String,
    pub at: Instant,
}

#[derive(Default)]
struct State {
    vms: BTreeMap<String, Owned>,
    deletes: Vec<Delete>,
    fault: Option<Error>,
    under_way: HashMap<String, watch::Receiver<bool>>,
    peak: usize,
    /// VMs that no list shows: of another cluster in the same account, or made a moment ago.
    hidden: HashSet<String>,
    lists: usize,
}

/// A cloud with VMs, calls and faults.
pub struct Cloud {
    takes: Duration,
    installation: String,
    state: Mutex<State>,
}

/// The cloud as one replica reaches it.
struct Side {
    cloud: Arc<Cloud>,
    via: &'static str,
}

impl Cloud {
    /// Makes a cloud with deletes of this duration; a delete continues even if its caller closes the connection. All
    /// its VMs are of this installation: the calls of another one fail.
    pub fn new(takes: Duration, installation: String) -> Arc<Cloud> {
        Arc::new(Cloud { takes, installation, state: Mutex::default() })
    }

    pub async fn serve(self: &Arc<Self>, socket: &Path, via: &'static str) -> Serving {
        let cloud = self.clone();
        let providers = move |owner: &Owner| -> Result<Arc<dyn Provider>, Error> {
            match owner.installation == cloud.installation {
                true => Ok(Arc::new(Side { cloud: cloud.clone(), via })),
                false => Err(Error::invalid(format!("{owner:?} has no VM here"))),
            }
        };
        Serving::start("test-cloud", listen_on_socket(socket).unwrap(), providers).await.unwrap()
    }

    pub fn make(&self, id: &str, node: Option<&str>, key: Option<IdempotencyKey>) {
        let vm = Owned {
            id: InstanceId::new(id).unwrap(),
            key,
            name: Some(format!("name-of-{id}")),
            state: OwnedState::Running,
            addresses: vec![],
            created: None,
            node: node.map(str::to_owned),
        };
        self.lock().vms.insert(id.to_owned(), vm);
    }

    /// Hides a VM from the lists, or shows it again. A delete of a hidden VM succeeds, as in a cloud that compares no
    /// owner.
    pub fn hide(&self, id: &str, hidden: bool) {
        let mut state = self.lock();
        if hidden {
            state.hidden.insert(id.to_owned())
        } else {
            state.hidden.remove(id)
        };
    }

    /// Ends the VMs with this prefix, as their owners do.
    pub fn end(&self, prefix: &str) {
        self.lock().vms.retain(|id, _| !id.starts_with(prefix));
    }

    /// Returns the number of lists so far.
    pub fn lists(&self) -> usize {
        self.lock().lists
    }

    pub fn has(&self, id: &str) -> bool {
        self.lock().vms.contains_key(id)
    }

    /// Returns the number of VMs with this prefix.
    pub fn count(&self, prefix: &str) -> usize {
        self.lock().vms.keys().filter(|id| id.starts_with(prefix)).count()
    }

    pub fn deletes(&self) -> Vec<Delete> {
        self.lock().deletes.clone()
    }

    /// Returns the maximum number of concurrent deletes.
    pub fn peak(&self) -> usize {
        self.lock().peak
    }

    /// Refuses every delete with this error; `None` ends that.
    pub fn refuse(&self, error: Option<Error>) {
        self.lock().fault = error;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a delete, or finds it begun.
    fn begin(self: &Arc<Self>, id: &str, via: &'static str) -> Result<Option<watch::Receiver<bool>>, Error> {
        let mut state = self.lock();
        state.deletes.push(Delete { via, vm: id.to_owned(), at: Instant::now() });
        if let Some(error) = state.fault.clone() {
            return Err(error);
        }
        if let Some(going) = state.under_way.get(id) {
            return Ok(Some(going.clone()));
        }
        if !state.vms.contains_key(id) {
            return Ok(None);
        }
        let (done, going) = watch::channel(false);
        state.under_way.insert(id.to_owned(), going.clone());
        state.peak = state.peak.max(state.under_way.len());
        let (cloud, id) = (self.clone(), id.to_owned());
        tokio::spawn(async move {
            tokio::time::sleep(cloud.takes).await;
            let mut state = cloud.lock();
            state.vms.remove(&id);
            state.under_way.remove(&id);
            drop(state);
            done.send_replace(true);
        });
        Ok(Some(going))
    }
}

#[async_trait]
impl Provider for Side {
    fn name(&self) -> &'static str {
        "test-cloud"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::minimal(64 << 10)
    }

    async fn preflight(&self) -> Result<Preflight, Error> {
        Err(Error::invalid("a client that only lists and deletes calls no preflight"))
    }

    async fn create(&self, _: &CreateRequest, _: &IdempotencyKey) -> Result<Created, Error> {
        Err(Error::invalid("the controller makes no VMs"))
    }

    async fn addresses(&self, _: &InstanceId) -> Result<Vec<IpAddr>, Error> {
        Err(Error::invalid("the controller connects to no VM"))
    }

    async fn delete(&self, id: &InstanceId) -> Result<(), Error> {
        if let Some(mut going) = self.cloud.begin(id.as_str(), self.via)? {
            // Fails only if the deleting task panicked.
            going.wait_for(|done| *done).await.map_err(|error| Error::transient(error.to_string()))?;
        }
        Ok(())
    }

    async fn list_owned(&self) -> Result<Vec<Owned>, Error> {
        let mut state = self.cloud.lock();
        state.lists += 1;
        let listed = state.vms.values().filter(|vm| !state.hidden.contains(vm.id.as_str())).cloned();
        let shown = listed.map(|vm| match state.under_way.contains_key(vm.id.as_str()) {
            true => Owned { state: OwnedState::Deleting, ..vm },
            false => vm,
        });
        Ok(shown.collect())
    }
}
