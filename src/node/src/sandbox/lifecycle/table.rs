//! Maps an id to its sandbox's task. No call of the hypervisor API scans the entries: each is a look-up in an index.

mod state;

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use peerpod_common::caller_limits::{CallerLimits, ONE_LINE_A_MINUTE};
use peerpod_common::crowd::network;
use peerpod_proto::guest::{Reply, Request};
use peerpod_provider_api::{CreateRequest, InstanceId};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, timeout_at};
use tracing::{Instrument, debug, error, info, info_span, warn};

use state::State;
pub(crate) use state::{Entry, Running};

use crate::ledger::{Enrolment, NetnsRef, Record, RecordEnd, StartTrace, VERSION, WantedVm};
use crate::metrics::Metrics;
use crate::sandbox::Settings;
use crate::sandbox::error::{ClaimRefused, Error, Granted};
use crate::sandbox::guest::claims::{Claim, Claims};
use crate::sandbox::guest::pull::Pull;
use crate::sandbox::guest::reports::Reports;
use crate::sandbox::guest::tickets::{Owner, Tickets};
use crate::sandbox::lifecycle::task::{End, GuestState, NetworkState, RelayState, Start, VmCreation};
use crate::sandbox::lifecycle::{Command, Phase, Slots, Stop, Task, View};
use crate::sandbox::network::follow::Following;
use crate::sandbox::ports::Ports;
use crate::sandbox::recovery::restart::PanicGuard;
use crate::sandbox::vm::batch::Batches;
use crate::spec::{SandboxId, Size, Wanted, vm_memory};
use crate::volumes::PodVolumes;

#[derive(Clone, Debug)]
pub(crate) struct CreateVm {
    pub id: SandboxId,
    /// Parsed annotations, or the error in them. A known id does not need them.
    pub wanted: Result<Wanted, String>,
    pub netns: PathBuf,
}

/// All sandboxes of this node. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Sandboxes(pub(crate) Arc<Inner>);

pub(crate) struct Inner {
    pub(crate) ports: Arc<Ports>,
    pub(crate) settings: Arc<Settings>,
    pub(crate) metrics: Metrics,
    pub(crate) batches: Batches,
    tickets: Arc<Tickets>,
    state: Mutex<State>,
    /// Held while a tombstone of an unknown id is written: one at a time, because they are rare.
    tombstones: tokio::sync::Mutex<()>,
    /// Log lines about claims with an unknown ticket, of each network.
    claim_lines: CallerLimits<Option<IpAddr>>,
    /// Counts insertions, for calls that wait for a pod without a sandbox yet.
    pub(crate) inserted: watch::Sender<u64>,
}

/// Maximum number of queued commands for one sandbox; a shim has one or two in flight.
const QUEUE: usize = 64;
/// Time for which a call that changes a sandbox waits for a new task, after the sandbox's task is gone.
const ANOTHER: Duration = Duration::from_secs(5);

impl Sandboxes {
    pub(crate) fn new(ports: Ports, settings: Settings, metrics: Metrics) -> Sandboxes {
        let (ports, settings, tickets) = (Arc::new(ports), Arc::new(settings), Arc::<Tickets>::default());
        Sandboxes(Arc::new(Inner {
            batches: Batches::new(ports.clone(), settings.clone(), metrics.clone(), tickets.clone()),
            ports,
            settings,
            metrics,
            state: Mutex::new(State::new(tickets.clone())),
            tickets,
            tombstones: tokio::sync::Mutex::default(),
            claim_lines: CallerLimits::new(ONE_LINE_A_MINUTE),
            inserted: watch::Sender::new(0),
        }))
    }

    /// Handles CreateVM. Returns the agent socket's path as soon as the intent is durable; the rest runs in the
    /// background. A known id, even a stopped one, gets its path before any other check. Just after the node's start, a
    /// new id waits for a bounded time until the node's endpoints are known. After an error, nothing was done.
    pub(crate) async fn create(&self, create: CreateVm) -> Result<String, Error> {
        let path = self.0.settings.agent_socket_text(&create.id)?;
        if let Some(view) = self.view(&create.id) {
            return accepted(view).await.map(|()| path);
        }
        let wanted = create.wanted.map_err(Error::Invalid)?;
        wanted.vm_options.check(&self.0.settings.allowed_options).map_err(Error::Invalid)?;
        self.0.ports.identity.settled().await;
        let netns = self.0.ports.network.netns(&create.netns).await;
        let netns = netns.map_err(|error| Error::Netns { id: create.id.clone(), why: error.text })?;
        let volumes = self.0.ports.storage.volumes(&wanted.pod).await.map_err(Error::Invalid)?;
        let record = self.record(create.id, wanted, netns, volumes)?;
        let view = self.admit(record)?;
        accepted(view).await.map(|()| path)
    }

    /// Handles StartVM: waits until the sandbox runs or fails, as long as a call may wait. The call may be dropped.
    pub(crate) async fn start(&self, id: &SandboxId) -> Result<(), Error> {
        let limit = self.0.settings.start_timeout;
        let deadline = Instant::now() + limit;
        loop {
            let running = match self.find(id) {
                Some(Entry::Task(running)) => running,
                Some(Entry::Tombstone { view, .. }) => return Err(view.ended()),
                None => return Err(Error::Unknown(id.clone())),
            };
            let mut view = running.view.clone();
            accepted(running.view.clone()).await?;
            // A task that is gone meanwhile leaves its last view behind.
            if let Some(result) = self.ask(&running, Command::Start).await {
                result?;
            }
            let waited = timeout_at(deadline, view.wait_for(|view| view.outcome().is_some())).await;
            match waited.map(|seen| seen.ok()?.outcome()) {
                Ok(Some(outcome)) => return outcome,
                Err(_) => return Err(self.late(id, limit)),
                Ok(None) => {
                    let left = deadline.duration_since(Instant::now());
                    if !self.restarted(id, &running, left).await {
                        return Err(broken(id));
                    }
                }
            }
        }
    }

    /// Returns the error of a StartVM that has reached its time limit.
    pub(crate) fn late(&self, id: &SandboxId, waited: Duration) -> Error {
        let phase = self.view(id).map_or("unknown", |view| view.borrow().phase.name());
        Error::Late { id: id.clone(), phase, waited }
    }

    /// Handles StopVM and the other reasons to stop. Returns as soon as the stop is durable; after an error, the sandbox
    /// goes on. An unknown id becomes a tombstone, so that a CreateVM that was overtaken makes nothing.
    pub(crate) async fn stop(&self, id: &SandboxId, stop: Stop) -> Result<(), Error> {
        loop {
            match self.find(id) {
                Some(Entry::Tombstone { .. }) => {
                    if !self.state().unwritten.contains(id) {
                        return Ok(());
                    }
                    // Another call is writing this tombstone.
                    drop(self.0.tombstones.lock().await);
                }
                Some(Entry::Task(running)) => {
                    // A sandbox that cannot be recorded does not exist, so there is nothing to stop.
                    if accepted(running.view.clone()).await.is_err() {
                        tokio::task::yield_now().await;
                        continue;
                    }
                    match self.ask(&running, |answer| Command::Stop(stop, answer)).await {
                        Some(result) => return result,
                        None if running.view.borrow().phase == Phase::Gone => return Ok(()),
                        None if self.restarted(id, &running, ANOTHER).await => {}
                        None => return Err(broken(id)),
                    }
                }
                None => {
                    // In a task of its own: a caller that goes away must leave no id that counts as unwritten.
                    let (table, id) = (self.clone(), id.clone());
                    let written = tokio::spawn(async move { table.write_tombstone_of_unknown(&id).await });
                    match written.await {
                        Ok(None) => {}
                        Ok(Some(result)) => return result,
                        Err(error) => {
                            return Err(Error::Unavailable(format!("the stop was not recorded: {error}")));
                        }
                    }
                }
            }
        }
    }

    pub(crate) async fn claim(&self, ticket: &str, claim: Claim) -> Result<Granted, Error> {
        let found = match self.0.tickets.owner(ticket, claim.from()) {
            Owner::Sandbox(id) => self.find(&id),
            Owner::Unknown => None,
            Owner::NotYet => {
                // Repeated many times a second until the cloud has reported the VMs' addresses.
                debug!(
                    peer = claim.peer,
                    "claim with a batch's ticket deferred: the VM's owner is not known yet"
                );
                self.0.metrics.guests.claims_refused.count(ClaimRefused::NotYet.reason());
                return Err(Error::Claim(ClaimRefused::NotYet));
            }
        };
        let Some(Entry::Task(running)) = found else {
            // A guest may send any id; only hexadecimal digits go into a log line.
            self.0.metrics.guests.claims_refused.count(ClaimRefused::UnknownTicket.reason());
            let ticket: String = ticket.chars().filter(char::is_ascii_hexdigit).take(32).collect();
            if self.0.claim_lines.may_log(&claim.from().map(network)) {
                warn!(ticket, peer = claim.peer, "claim refused: unknown ticket");
            }
            return Err(Error::Claim(ClaimRefused::UnknownTicket));
        };
        let asked = self.ask(&running, |answer| Command::Claim(claim, answer)).await;
        asked.unwrap_or_else(|| {
            // A live sandbox without a task gets a new one; the guest asks again.
            let view = running.view.borrow();
            Err(if view.phase.is_live() { broken(&view.id) } else { Error::Claim(ClaimRefused::NotWanted) })
        })
    }

    /// Forwards the addresses that the provider reports for a VM, while its guest is away.
    pub(crate) fn moved(&self, id: &SandboxId, addresses: Vec<IpAddr>) {
        if let Some(Entry::Task(running)) = self.find(id) {
            // A full queue drops the message; it is sent again later.
            drop(running.commands.try_send(Command::Moved(addresses)));
        }
    }

    /// Fails a sandbox whose VM the provider says is gone; `false`: it no longer uses the VM, or its guest is back.
    pub(crate) async fn lost(
        &self,
        id: &SandboxId,
        vm: &InstanceId,
        why: Option<String>,
    ) -> Result<bool, Error> {
        let Some(Entry::Task(running)) = self.find(id) else { return Ok(false) };
        let asked = self.ask(&running, |answer| Command::Lost(vm.clone(), why, answer)).await;
        asked.unwrap_or_else(|| Err(broken(id)))
    }

    /// Returns the VM of the pod's newest live sandbox. With `wait`, waits for it; the call may be dropped.
    pub(crate) async fn vm_of(&self, namespace: &str, name: &str, wait: bool) -> Result<InstanceId, Error> {
        let pod = (namespace.to_owned(), name.to_owned());
        let text = format!("{namespace}/{name}");
        let mut inserted = self.0.inserted.subscribe();
        loop {
            inserted.borrow_and_update();
            let Some(mut view) = self.state().newest_of(&pod) else {
                if !wait {
                    return Err(Error::NoSuchPod(text));
                }
                drop(inserted.changed().await);
                continue;
            };
            if let Some(vm) = view.borrow_and_update().vm() {
                return Ok(vm.clone());
            }
            if !wait {
                return Err(Error::NoVmYet(text));
            }
            tokio::select! {
                changed = view.changed() => if changed.is_err() { tokio::task::yield_now().await },
                changed = inserted.changed() => drop(changed),
            }
        }
    }

    /// Returns the sandbox with the volumes of the pod with this UID.
    pub(crate) fn of_pod_uid(&self, uid: &str) -> Option<SandboxId> {
        self.state().uids.get(uid).cloned()
    }

    pub(crate) async fn ask_guest(
        &self,
        id: &SandboxId,
        request: Request,
        limit: Duration,
    ) -> Result<Reply, String> {
        match tokio::time::timeout(limit, self.0.ports.relay.call(id, request, limit)).await {
            Ok(answer) => answer.map_err(|error| error.text),
            Err(_) => Err(format!("the guest of sandbox {id} did not answer within {limit:?}")),
        }
    }

    /// Makes a sandbox's VM see that one of its pod's disks was enlarged. A volume that the provider does not attach is
    /// left to its driver. After an error, the VM may see the new size all the same.
    pub(crate) async fn disk_grown(
        &self,
        id: &SandboxId,
        volume: &str,
        bytes: u64,
        limit: Duration,
    ) -> Result<(), String> {
        let ports = &self.0.ports;
        let show = async {
            let record = ports.store.recall(id).await.map_err(|error| error.to_string())?;
            let known = record.as_ref().and_then(|record| {
                let volumes = &record.volumes.as_ref()?.volumes;
                let one = volumes.iter().find(|one| one.volume.id.as_str() == volume)?;
                record.phase.vm().zip(one.disk())
            });
            let Some((vm, disk)) = known else { return Ok(()) };
            ports.cloud.disk_grown(vm, &disk, bytes).await.map_err(|error| error.to_string())
        };
        let late = |_| Err(format!("the provider did not answer within {limit:?}"));
        tokio::time::timeout(limit, show).await.unwrap_or_else(late)
    }

    /// Returns the present views of all sandboxes that are not tombstones.
    pub(crate) fn views(&self) -> Vec<View> {
        self.state().running().map(|(_, running)| running.view.borrow().clone()).collect()
    }

    /// Returns a sandbox's pod for log lines: namespace/name, or `-` if it is not known.
    pub(crate) fn pod(&self, id: &SandboxId) -> Arc<str> {
        match self.state().entries.get(id) {
            Some(Entry::Task(running)) => running.view.borrow().pod.clone(),
            Some(Entry::Tombstone { view, .. }) => view.pod.clone(),
            None => "-".into(),
        }
    }

    pub(crate) fn view(&self, id: &SandboxId) -> Option<watch::Receiver<View>> {
        self.state().entries.get(id).map(Entry::view)
    }

    /// Aborts all tasks. The ledger contains everything they had started.
    pub(crate) async fn close(&self) {
        let mut tasks = {
            let mut state = self.state();
            state.closed = true;
            std::mem::take(&mut state.tasks)
        };
        tasks.shutdown().await;
        self.0.batches.close().await;
    }

    /// Builds the record of a new sandbox. It contains everything that a repeated cloud call must repeat.
    fn record(
        &self,
        id: SandboxId,
        wanted: Wanted,
        netns: NetnsRef,
        volumes: Option<PodVolumes>,
    ) -> Result<Record, Error> {
        let Inner { ports, settings, .. } = &*self.0;
        let now = ports.clock.now_ms();
        let ticket = ports.identity.ticket(settings.ticket_ttl).map_err(Error::Unavailable)?;
        let user_data = ports.identity.user_data(&ticket, 1).map_err(Error::Unavailable)?;
        let labels = [
            ("peerpod.cluster", settings.cluster_id.as_str()),
            ("peerpod.node", settings.node_name.as_str()),
            ("peerpod.sandbox", id.as_str()),
            ("peerpod.namespace", wanted.pod.namespace.as_str()),
            ("peerpod.pod", wanted.pod.name.as_str()),
        ];
        let gpus = wanted.size.gpus;
        let short: String = id.as_str().chars().take(12).collect();
        let mut request = CreateRequest {
            name: format!("{}-{short}", wanted.pod.name),
            user_data,
            size: Size {
                memory_mib: vm_memory(wanted.size.memory_mib, settings.guest_memory_mib),
                ..wanted.size
            },
            instance_type: wanted.instance_type,
            image: wanted.image,
            second_nic: settings.second_nic,
            disks: volumes.as_ref().map(PodVolumes::disks).unwrap_or_default(),
            labels: labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
            ..CreateRequest::default()
        };
        wanted.vm_options.ask(&mut request);
        let trust = Some(ports.identity.trusted().borrow().id.clone());
        Ok(Record {
            version: VERSION,
            phase: Phase::Created,
            pod: Some(wanted.pod),
            netns: Some(netns),
            wanted: WantedVm {
                request: Some(request),
                attempt: 0,
                initdata: wanted.initdata,
                gpus,
                chosen: None,
            },
            trace: StartTrace { parent: wanted.traceparent, ..StartTrace::default() },
            volumes,
            enrolment: Enrolment { ticket: Some(ticket), trust, ..Enrolment::default() },
            end: RecordEnd::default(),
            ..Record::tombstone(id, now)
        })
    }

    /// Adds a new sandbox to the table and starts its task. A sandbox that was added in between wins.
    fn admit(&self, record: Record) -> Result<watch::Receiver<View>, Error> {
        let mut state = self.state();
        if let Some(entry) = state.entries.get(&record.id) {
            return Ok(entry.view());
        }
        if state.count >= self.0.settings.max_sandboxes {
            return Err(Error::Full(self.0.settings.max_sandboxes));
        }
        for volume in record.volumes.iter().flat_map(PodVolumes::single_writers) {
            if let Some(other) = state.writers.get(&volume.id) {
                let volume = format!("{} ({})", volume.name, volume.id);
                return Err(Error::VolumeTaken { volume, other: other.clone() });
            }
        }
        let mut predecessor = None;
        if let Some(netns) = &record.netns
            && let Some(other) = state.netns.get(&netns.identity()).and_then(|other| state.task(other))
        {
            let view = other.view.borrow();
            // After a reboot, or if the kernel reuses an inode, the other sandbox's namespace is a different one.
            let lives = other.netns.as_ref().is_some_and(|netns| self.0.ports.network.netns_lives(netns));
            if view.phase.is_live() && lives {
                let path = netns.path.display().to_string();
                return Err(Error::NetnsTaken { path, other: view.id.clone() });
            }
            predecessor = (lives && !view.network_gone).then(|| other.view.clone());
        }
        Ok(self.spawn(&mut state, record, predecessor))
    }

    /// Adds a sandbox from the ledger.
    pub(crate) fn adopt(&self, state: &mut State, mut record: Record) {
        if record.phase == Phase::Gone {
            // The clock of an earlier boot may have been ahead of this one's.
            record.end.gone_ms = record.end.gone_ms.map(|at| at.min(self.0.ports.clock.now_ms()));
            self.0.metrics.sandboxes.moved(None, Some(&record.phase));
            state.write_tombstone(&record, self.0.settings.tombstone_ttl);
            return;
        }
        self.0.metrics.sandboxes.recoveries.count(record.phase.name());
        self.0.metrics.sandboxes.moved(None, Some(&record.phase));
        self.0.metrics.sandboxes.vm(None, record.offering());
        let claimed = record.netns.as_ref().and_then(|netns| state.netns.get(&netns.identity()));
        let other = claimed.and_then(|other| state.task(other)).filter(|_| record.phase.is_live());
        let predecessor = other.map(|other| other.view.clone());
        self.spawn(state, record, predecessor);
    }

    /// Removes a sandbox from the table after its task panicked.
    pub(crate) fn drop_dead(&self, state: &mut State, id: &SandboxId) {
        if let Some(dead) = state.task(id) {
            let phase = dead.view.borrow().phase.clone();
            // A sandbox in phase `Created` is not counted yet.
            if phase != Phase::Created {
                self.0.metrics.sandboxes.moved(Some(&phase), None);
            }
            state.remove(id);
        }
    }

    fn spawn(
        &self,
        state: &mut State,
        record: Record,
        predecessor: Option<watch::Receiver<View>>,
    ) -> watch::Receiver<View> {
        let (commands, receiver) = mpsc::channel(QUEUE);
        let (sender, view) = watch::channel(View::of(&record, false));
        let id = record.id.clone();
        let span = info_span!("sandbox", sandbox = %id, pod = record.pod_name());
        let running = Running {
            commands,
            view: view.clone(),
            netns: record.netns.clone(),
            pod: record.pod.as_ref().map(|pod| (pod.namespace.clone(), pod.name.clone())),
            volumes: record.volumes.clone().map(Arc::new),
        };
        state.link(&record, running);
        let task = Box::new(self.task(record, sender, receiver, predecessor));
        let table = self.clone();
        while state.tasks.try_join_next().is_some() {} // finished tasks; `PanicGuard` has handled their panics
        let life = table.live(id, task);
        // A node has a thousand of these futures, nearly always idle.
        debug_assert!(size_of_val(&life) < 5 << 10, "{}", size_of_val(&life));
        state.tasks.spawn(life.instrument(span));
        self.0.inserted.send_modify(|count| *count += 1);
        view
    }

    /// Makes the task of a sandbox, which continues from its record.
    fn task(
        &self,
        record: Record,
        view: watch::Sender<View>,
        commands: mpsc::Receiver<Command>,
        predecessor: Option<watch::Receiver<View>>,
    ) -> Task {
        let Inner { ports, settings, metrics, batches, tickets, .. } = &*self.0;
        Task {
            ports: ports.clone(),
            settings: settings.clone(),
            metrics: metrics.clone(),
            view,
            commands,
            in_flight: Slots::default(),
            vm: VmCreation {
                path: batches.create_path(&record),
                batches: batches.clone(),
                tickets: tickets.clone(),
                unsent: record.phase == Phase::Created,
                placed: None,
                moved: Vec::new(),
            },
            start: Start {
                announced: !ports.kubernetes.is_in_cluster() && record.volumes.is_none(),
                ..Start::default()
            },
            guest: GuestState {
                state: ports.relay.guest(&record.id),
                claims: Claims::new(),
                renewal: None,
                trusted: ports.identity.trusted(),
                plan: None,
                refused: None,
                assigned_at: None,
                reports: Reports::default(),
                pull: Pull::default(),
            },
            relay: RelayState::new(ports.relay.epoch()),
            network: NetworkState {
                node_endpoints: ports.identity.node_endpoints(),
                following: Following::default(),
                given_up: false,
                predecessor,
            },
            end: End::default(),
            record,
        }
    }

    /// Runs one sandbox from its beginning to its tombstone.
    async fn live(self, id: SandboxId, mut task: Box<Task>) {
        let _guard = PanicGuard { table: self.clone(), id: id.clone() };
        if task.record.phase == Phase::Created {
            if let Err(error) = Box::pin(task.begin()).await {
                error!(%error, "cannot create the sandbox");
                // Removed from the table before the error is published: the caller may create it again at once.
                self.state().remove(&id);
                task.view.send_modify(|view| view.rejected = Some(error));
                return;
            }
            info!(netns = ?task.record.netns.as_ref().map(|netns| &netns.path), "created");
        } else {
            info!(phase = %task.record.phase, vm = ?task.record.phase.vm(), "restored from the ledger");
        }
        task.run().await;
        if task.record.phase == Phase::Gone {
            let mut state = self.state();
            state.unlink(&id);
            state.write_tombstone(&task.record, self.0.settings.tombstone_ttl);
        }
    }

    /// Writes a tombstone for an unknown id. Returns `None` if the id has become known meanwhile.
    async fn write_tombstone_of_unknown(&self, id: &SandboxId) -> Option<Result<(), Error>> {
        let _one = self.0.tombstones.lock().await;
        let Inner { ports, settings, metrics, .. } = &*self.0;
        let mut record = Record::tombstone(id.clone(), ports.clock.now_ms());
        record.end.cause = Some(Stop::Called.reason().into());
        {
            let mut state = self.state();
            if state.entries.contains_key(id) {
                return None;
            }
            // The id is known from here on, so that no CreateVM makes anything during the write.
            state.write_tombstone(&record, settings.tombstone_ttl);
            state.unwritten.insert(id.clone());
        }
        let saved = ports.store.save(&record).await;
        {
            let mut state = self.state();
            state.unwritten.remove(id);
            if let Err(error) = saved {
                metrics.sandboxes.ledger_errors.inc();
                state.entries.remove(id);
                return Some(Err(error.into()));
            }
        }
        metrics.sandboxes.moved(None, Some(&Phase::Gone));
        info!(sandbox = %id, pod = "-", "stopped before its CreateVM; only its tombstone is kept");
        Some(Ok(()))
    }

    /// Locks the table; the lock is never held across an await.
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock()
    }

    fn find(&self, id: &SandboxId) -> Option<Entry> {
        self.state().entries.get(id).cloned()
    }

    /// Sends a command and waits for its answer; `None` if the task is gone.
    async fn ask<T>(&self, task: &Running, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Option<T> {
        let (answer, answered) = oneshot::channel();
        task.commands.send(command(answer)).await.ok()?;
        answered.await.ok()
    }
}

/// Waits until a sandbox is accepted or rejected.
async fn accepted(mut view: watch::Receiver<View>) -> Result<(), Error> {
    let seen = view.wait_for(|view| view.is_accepted() || view.rejected.is_some()).await;
    match seen {
        Ok(view) => match &view.rejected {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        },
        Err(_) => Err(Error::Unavailable("the node is stopping; send the call again".into())),
    }
}

fn broken(id: &SandboxId) -> Error {
    Error::Unavailable(format!("the task of sandbox {id} is gone; send the call again"))
}
