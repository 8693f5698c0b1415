//! Table of the sandboxes that the relay serves. Each has an agent socket, an endpoint for its guest's link, and a
//! record on disk. Each sandbox has its own lock, so that sandboxes do not wait for each other. Finding the sandbox of
//! a certificate takes only the table's lock, briefly.

pub(crate) mod guest;
pub(crate) mod states;

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::path::{Component, Path};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use peerpod_common::backoff::Backoff;
use peerpod_common::blocking::{Interrupted, blocking};
use peerpod_link::endpoint::{self, Endpoint, EndpointHandle, Role};
use thiserror::Error;
use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinHandle};

use self::guest::{Guest, GuestHandler};
pub(crate) use self::handed::{Handed, Prepared};
use self::states::States;
use crate::agent::{AgentSocket, CONNECTIONS};
use crate::guest_dialer::Order;
use crate::id::SandboxId;
use crate::localhost::{Ports, Serving};
use crate::metrics::Metrics;
use crate::store::{RelayStore, SandboxRecord, StoreError};

/// Time limit for a deleted sandbox's connections to receive their last answers.
const CLOSE_WITHIN: Duration = Duration::from_secs(2);
/// Pause before a panicked endpoint is made again.
const RESTART: Backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(10));

#[derive(Debug, Error)]
pub(crate) enum SandboxError {
    #[error(
        "agent socket {0:?} of sandbox {1}: it must be an absolute path without '..', in a folder named like the sandbox"
    )]
    Path(String, SandboxId),
    #[error(
        "a guest certificate of sandbox {0} belongs to sandbox {1} already; a certificate has one sandbox"
    )]
    Certificate(SandboxId, SandboxId),
    #[error("listen on {path}: {why}")]
    Listen { path: String, why: std::io::Error },
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Interrupted(#[from] Interrupted),
}

/// A sandbox's endpoint and the state of its guest.
#[derive(Clone)]
pub(crate) struct Attached {
    pub(crate) id: SandboxId,
    pub(crate) endpoint: EndpointHandle,
    pub(crate) guest: Arc<Guest>,
}

struct Live {
    record: SandboxRecord,
    attached: Attached,
    socket: AgentSocket,
    /// Abort handle of the endpoint's task; `running` is the task that waits for its end.
    endpoint: AbortHandle,
    localhost: Option<Serving>,
    running: JoinHandle<()>,
    /// Pauses before this sandbox's endpoints are made again after panics.
    restart: Backoff,
}

type Slot = Arc<tokio::sync::Mutex<Option<Live>>>;

#[derive(Default)]
struct Table {
    slots: HashMap<SandboxId, Slot>,
    attached: HashMap<SandboxId, Attached>,
    fingerprints: HashMap<[u8; 32], SandboxId>,
    /// Addresses of VMs, and the number of sandboxes that name each.
    addresses: HashMap<IpAddr, usize>,
}

impl Table {
    /// Enters the record's certificates and addresses, in place of those of the record before.
    fn enter(&mut self, record: &SandboxRecord, before: Option<&SandboxRecord>) {
        if let Some(before) = before {
            self.remove(before);
        }
        for print in &record.guest_certificates {
            self.fingerprints.insert(*print, record.id.clone());
        }
        for address in addresses(record) {
            *self.addresses.entry(address).or_default() += 1;
        }
    }

    fn remove(&mut self, record: &SandboxRecord) {
        for print in &record.guest_certificates {
            if self.fingerprints.get(print) == Some(&record.id) {
                self.fingerprints.remove(print);
            }
        }
        for address in addresses(record) {
            match self.addresses.get_mut(&address) {
                Some(sandboxes) if *sandboxes > 1 => *sandboxes -= 1,
                _ => drop(self.addresses.remove(&address)),
            }
        }
    }
}

fn addresses(record: &SandboxRecord) -> HashSet<IpAddr> {
    let dialled = record.dial.iter().map(|address| address.ip());
    record.addresses.iter().copied().chain(dialled).map(|address| address.to_canonical()).collect()
}

pub(crate) struct Sandboxes {
    me: Weak<Sandboxes>,
    store: RelayStore,
    pub(crate) states: Arc<States>,
    metrics: Arc<Metrics>,
    limits: endpoint::Limits,
    table: Mutex<Table>,
    /// Orders to dial guests, and their receiver until `guest_dialer` takes it.
    dials: mpsc::UnboundedSender<Order>,
    orders: Mutex<Option<mpsc::UnboundedReceiver<Order>>>,
}

impl Sandboxes {
    pub(crate) fn new(store: RelayStore, states: Arc<States>, metrics: Arc<Metrics>) -> Arc<Sandboxes> {
        let limits = endpoint::Limits { connections: CONNECTIONS, ..endpoint::Limits::default() };
        // Bounded by the node's puts and deletes.
        let (dials, orders) = mpsc::unbounded_channel();
        Arc::new_cyclic(|me| Sandboxes {
            me: me.clone(),
            store,
            states,
            metrics,
            limits,
            table: Mutex::default(),
            dials,
            orders: Mutex::new(Some(orders)),
        })
    }

    /// Takes the receiver of the dial orders; `None` after the first call.
    pub(crate) fn orders(&self) -> Option<mpsc::UnboundedReceiver<Order>> {
        self.orders.lock().take()
    }

    fn dial(&self, record: &SandboxRecord) {
        let id = record.id.clone();
        let order =
            if record.dial.is_empty() { Order::Stop(id) } else { Order::Dial(id, record.dial.clone()) };
        drop(self.dials.send(order)); // Fails only in a relay that ends.
    }

    /// Returns the sandbox of the guest certificate with this fingerprint.
    pub(crate) fn of_certificate(&self, fingerprint: &[u8; 32]) -> Option<Attached> {
        let table = self.table.lock();
        table.attached.get(table.fingerprints.get(fingerprint)?).cloned()
    }

    /// Returns the number of served VMs with this address.
    pub(crate) fn vms_at(&self, address: &IpAddr) -> usize {
        self.table.lock().addresses.get(address).copied().unwrap_or(0)
    }

    pub(crate) fn get(&self, id: &SandboxId) -> Option<Attached> {
        self.table.lock().attached.get(id).cloned()
    }

    /// Serves the sandboxes of the records on disk. A sandbox without a bound socket is reported and left out.
    pub(crate) async fn restore(&self, records: Vec<SandboxRecord>) {
        for record in records {
            let (id, pod) = (record.id.clone(), record.pod.clone());
            match self.put_in_slot(record, false).await {
                Ok(()) => tracing::info!(sandbox = %id, pod, "sandbox is served again"),
                Err(error) => tracing::error!(sandbox = %id, pod, %error, "sandbox is not served"),
            }
        }
    }

    /// Serves a sandbox as its record describes; the last record wins. On return it is durable and the socket listens.
    ///
    /// Cancel safety: the work continues in a task of its own, under the sandbox's lock. A record that is being written
    /// when the caller leaves must not appear after a later delete. The task holds `open` until it ends.
    pub(crate) async fn put(
        &self,
        record: SandboxRecord,
        open: impl Send + 'static,
    ) -> Result<(), SandboxError> {
        let Some(me) = self.me.upgrade() else { return Err(Interrupted.into()) };
        let put = async move {
            let _open = open;
            me.put_in_slot(record, true).await
        };
        tokio::spawn(put).await.unwrap_or(Err(Interrupted.into()))
    }

    async fn put_in_slot(&self, record: SandboxRecord, write: bool) -> Result<(), SandboxError> {
        check_path(&record)?;
        loop {
            let slot = self.table.lock().slots.entry(record.id.clone()).or_default().clone();
            let mut live = slot.lock().await;
            // A delete may have removed the slot from the table during this wait.
            if self.is_current(&record.id, &slot) {
                return self.update(&mut live, record, write).await;
            }
        }
    }

    fn is_current(&self, id: &SandboxId, slot: &Slot) -> bool {
        self.table.lock().slots.get(id).is_some_and(|current| Arc::ptr_eq(current, slot))
    }

    async fn update(
        &self,
        slot: &mut Option<Live>,
        record: SandboxRecord,
        write: bool,
    ) -> Result<(), SandboxError> {
        let listens = |live: &Live| live.socket.listens_on(&record.agent_socket);
        if slot.as_ref().is_some_and(|live| live.record == record && listens(live)) {
            return Ok(());
        }
        self.check_certificates(&record)?;
        if write {
            let (store, kept) = (self.store.clone(), record.clone());
            blocking(move || store.put(&kept).map_err(SandboxError::from)).await?;
        }
        match slot {
            Some(live) => {
                live.attached.guest.set(&record);
                if !listens(live) {
                    live.socket = listen(&record, &live.attached)?;
                }
                self.take_keys(&record, Some(&live.record))?;
                if live.record.dial != record.dial {
                    self.dial(&record);
                }
                live.record = record;
            }
            None => *slot = Some(self.start(record, RESTART)?),
        }
        Ok(())
    }

    fn start(&self, record: SandboxRecord, restart: Backoff) -> Result<Live, SandboxError> {
        let guest = self.guest(&record);
        let (task, endpoint) = Endpoint::new(Role::Relay, GuestHandler(guest.clone()), self.limits.clone());
        let attached = Attached { id: record.id.clone(), endpoint, guest };
        let socket = listen(&record, &attached)?;
        self.take_keys(&record, None)?;
        self.states.put(&record.id, &record.pod, attached.guest.traffic.clone());
        Ok(self.run(record, attached, task, socket, restart))
    }

    fn guest(&self, record: &SandboxRecord) -> Arc<Guest> {
        let guest = Guest::new(record.id.clone(), self.states.clone(), self.metrics.clone());
        guest.set(record);
        Arc::new(guest)
    }

    fn run(
        &self,
        record: SandboxRecord,
        attached: Attached,
        endpoint: Endpoint<GuestHandler>,
        socket: AgentSocket,
        mut restart: Backoff,
    ) -> Live {
        self.dial(&record);
        self.table.lock().attached.insert(record.id.clone(), attached.clone());
        self.metrics.sandboxes.served.inc();
        let task = tokio::spawn(endpoint.run());
        let endpoint = task.abort_handle();
        let restart_in = restart.pause();
        let running = tokio::spawn(restart_after_panic(task, self.me.clone(), attached.clone(), restart_in));
        Live { record, attached, socket, localhost: None, endpoint, running, restart }
    }

    /// Makes a sandbox's endpoint anew, if the ended one is still the current one.
    async fn renew(&self, ended: &Attached) {
        let Some(slot) = self.table.lock().slots.get(&ended.id).cloned() else { return };
        let mut live = slot.lock().await;
        let same = |live: &mut Live| Arc::ptr_eq(&live.attached.guest, &ended.guest);
        if !self.is_current(&ended.id, &slot) {
            return;
        }
        let Some(mut dead) = live.take_if(same) else { return };
        // The sockets of the localhost serve the next endpoint, too.
        let localhost = dead.localhost.take();
        let (record, restart, pod) = (dead.record.clone(), dead.restart, ended.guest.pod());
        drop(self.take_out(&ended.id, dead));
        match self.start(record, restart) {
            Ok(anew) => {
                *live = Some(Live { localhost, ..anew });
                tracing::info!(sandbox = %ended.id, pod, "sandbox is served again");
            }
            // The node puts the sandbox again when it next sees the state; until then no connection is served wrongly.
            Err(error) => tracing::error!(sandbox = %ended.id, pod, %error, "sandbox is no longer served"),
        }
    }

    /// Removes a sandbox from every index; returns the task that ends with its endpoint.
    fn take_out(&self, id: &SandboxId, live: Live) -> JoinHandle<()> {
        {
            let mut table = self.table.lock();
            table.attached.remove(id);
            table.remove(&live.record);
        }
        drop(self.dials.send(Order::Stop(id.clone())));
        live.socket.linger();
        self.states.delete(id);
        self.metrics.sandboxes.served.dec();
        live.attached.guest.fail_calls();
        live.running
    }

    fn check_certificates(&self, record: &SandboxRecord) -> Result<(), SandboxError> {
        let table = self.table.lock();
        let others = record.guest_certificates.iter().filter_map(|print| table.fingerprints.get(print));
        match others.into_iter().find(|other| **other != record.id) {
            Some(other) => Err(SandboxError::Certificate(record.id.clone(), other.clone())),
            None => Ok(()),
        }
    }

    /// Assigns the record's certificates and addresses to its sandbox, in place of those of the record before.
    fn take_keys(&self, record: &SandboxRecord, before: Option<&SandboxRecord>) -> Result<(), SandboxError> {
        self.check_certificates(record)?;
        self.table.lock().enter(record, before);
        Ok(())
    }

    /// Serves the pod's localhost on these listeners until the sandbox ends.
    pub(crate) async fn keep_localhost(&self, id: &SandboxId, serving: Serving) -> Result<(), String> {
        let slot = self.table.lock().slots.get(id).cloned();
        if let Some(slot) = slot
            && let Some(live) = slot.lock().await.as_mut()
        {
            live.localhost = Some(serving);
            return Ok(());
        }
        Err(format!("sandbox {id} is no longer served here"))
    }

    /// Returns the ports of the listeners that serve the pod's localhost.
    pub(crate) async fn localhost(&self, id: &SandboxId) -> Option<Ports> {
        let slot = self.table.lock().slots.get(id).cloned()?;
        let live = slot.lock().await;
        live.as_ref()?.localhost.as_ref().filter(|serving| serving.is_running()).map(|serving| serving.ports)
    }

    /// Ends a sandbox; an unknown one is no error. Its connections get their last answers; then nothing of it is left.
    pub(crate) async fn delete(&self, id: &SandboxId) -> Result<(), SandboxError> {
        let slot = self.table.lock().slots.get(id).cloned();
        // A sandbox that could not be restored may have left its record.
        let Some(slot) = slot else { return self.forget(id).await };
        let mut live = slot.lock().await;
        if !self.is_current(id, &slot) {
            return Ok(());
        }
        // The record goes first: a relay that dies now must not serve the sandbox again.
        self.forget(id).await?;
        if let Some(live) = live.take() {
            self.end(id, live).await;
        }
        self.table.lock().slots.remove(id);
        Ok(())
    }

    async fn forget(&self, id: &SandboxId) -> Result<(), SandboxError> {
        let (store, gone) = (self.store.clone(), id.clone());
        blocking(move || Ok(store.delete(&gone)?)).await
    }

    async fn end(&self, id: &SandboxId, mut live: Live) {
        let Attached { endpoint: handle, guest, .. } = live.attached.clone();
        let endpoint = live.endpoint.clone();
        let localhost = live.localhost.take();
        let mut running = self.take_out(id, live);
        handle.close();
        // These sockets hold the pod's netns.
        if let Some(localhost) = localhost {
            localhost.stop().await;
        }
        if tokio::time::timeout(CLOSE_WITHIN, &mut running).await.is_err() {
            tracing::warn!(sandbox = %id, pod = guest.pod(), "connections of a deleted sandbox did not close in time; aborting them");
            running.abort();
            endpoint.abort();
        }
    }

    /// Stops serving but keeps the records: sockets are unlinked, records stay.
    pub(crate) async fn stop(&self) {
        let slots: Vec<(SandboxId, Slot)> = self.table.lock().slots.drain().collect();
        for (_, slot) in &slots {
            if let Some(live) = slot.lock().await.take() {
                drop(live.socket);
                live.attached.endpoint.close();
                live.running.abort();
                live.endpoint.abort();
            }
        }
    }
}

fn listen(record: &SandboxRecord, sandbox: &Attached) -> Result<AgentSocket, SandboxError> {
    let path = record.agent_socket.as_path();
    AgentSocket::open(path, sandbox)
        .map_err(|why| SandboxError::Listen { path: path.display().to_string(), why })
}

/// Waits for the end of an endpoint's task; an orderly end needs no action. A panic is a bug of the relay and closes
/// the shim's connections. A new endpoint is then made for the next connections and the guest's link.
async fn restart_after_panic(
    task: JoinHandle<GuestHandler>,
    sandboxes: Weak<Sandboxes>,
    attached: Attached,
    pause: Duration,
) {
    let Err(error) = task.await else { return };
    let Some(sandboxes) = sandboxes.upgrade() else { return };
    sandboxes.metrics.sandboxes.panics.inc();
    tracing::error!(sandbox = %attached.id, pod = attached.guest.pod(), %error, again_in = ?pause, "the sandbox's endpoint ended early; this is a bug of peerpod-relay, and the connections are closed");
    // Runs in its own task: a delete that waits for this task must not wait for itself.
    tokio::spawn(async move {
        tokio::time::sleep(pause).await;
        sandboxes.renew(&attached).await;
    });
}

/// Checks the agent socket's path. It comes from the node, but must still not lead elsewhere.
fn check_path(record: &SandboxRecord) -> Result<(), SandboxError> {
    let path: &Path = &record.agent_socket;
    let plain = path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
    let folder = path.parent().and_then(Path::file_name).and_then(|name| name.to_str());
    if path.is_absolute() && plain && folder == Some(record.id.as_str()) && path.to_str().is_some() {
        Ok(())
    } else {
        Err(SandboxError::Path(path.display().to_string(), record.id.clone()))
    }
}

mod handed;
#[cfg(test)]
mod tests;
