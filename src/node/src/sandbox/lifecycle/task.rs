//! Owns one sandbox: a task that alone reads and writes its state. Calls reach it as commands; operations run inside it
//! concurrently, one per slot. After every event, `reconcile` starts the operations that the phase requires and that
//! are not in flight, so a task that recovers from the ledger does the same as one that never stopped.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use peerpod_provider_api::{IdempotencyKey, InstanceId};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until};
use tracing::{debug, error, info, warn};

use crate::ledger::Record;
use crate::metrics::Metrics;
use crate::sandbox::Settings;
use crate::sandbox::error::{Error, Granted};
use crate::sandbox::guest::claims::{Claim, Claims};
use crate::sandbox::guest::pull::Pull;
use crate::sandbox::guest::renew::Renewal;
use crate::sandbox::guest::reports::Reports;
use crate::sandbox::guest::tickets::Tickets;
use crate::sandbox::lifecycle::clear::Left;
use crate::sandbox::lifecycle::completions::console_of;
use crate::sandbox::lifecycle::{Completion, Phase, PhaseEvent, Slots, View, Which, phase};
use crate::sandbox::network::follow::{Following, PlannedNetwork};
use crate::sandbox::ports::{Guest, NodeEndpoints, PodEvent, Ports, Trusted};
use crate::sandbox::vm::batch::{Batches, CreatePath};

pub(crate) enum Command {
    /// StartVM came. Answered when that is noted; the [`View`] shows readiness.
    Start(oneshot::Sender<Result<(), Error>>),
    /// The sandbox is not wanted any more. Answered when that is durable.
    Stop(Stop, oneshot::Sender<Result<(), Error>>),
    /// The provider reports these addresses of the VM, while its guest is away.
    Moved(Vec<IpAddr>),
    /// The provider says that this VM is gone, maybe with a reason. The answer: whether the sandbox has failed by that.
    Lost(InstanceId, Option<String>, oneshot::Sender<Result<bool, Error>>),
    Claim(Claim, oneshot::Sender<Result<Granted, Error>>),
}

/// Reason of a stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    Called,
    /// The relay promised the stop while the node was away.
    Inbox,
    NeverStarted,
    NetnsGone,
    ShimGone,
}

impl Stop {
    /// Returns the label of the metric, one word.
    pub(crate) fn reason(self) -> &'static str {
        match self {
            Stop::Called => "stop_vm",
            Stop::Inbox => "inbox",
            Stop::NeverStarted => "never_started",
            Stop::NetnsGone => "netns_gone",
            Stop::ShimGone => "shim_gone",
        }
    }

    pub(crate) fn sentence(self) -> &'static str {
        match self {
            Stop::Called => "StopVM was called",
            Stop::Inbox => "StopVM was called while the node was away",
            Stop::NeverStarted => "StartVM was never called",
            Stop::NetnsGone => {
                "its network namespace is gone: the container runtime, the CNI plugin or another program deleted it; \
                 see their logs, and delete the pod to get a new one"
            }
            Stop::ShimGone => "its shim is gone",
        }
    }
}

pub(crate) enum Unapplied {
    /// The event has no meaning in this phase.
    Refused(phase::Refused),
    /// The change could not be recorded; the phase is unchanged.
    Disk(Error),
}

impl From<Unapplied> for Error {
    fn from(unapplied: Unapplied) -> Error {
        match unapplied {
            Unapplied::Disk(error) => error,
            Unapplied::Refused(refused) => Error::Unavailable(refused.to_string()),
        }
    }
}

impl From<Error> for Unapplied {
    fn from(error: Error) -> Unapplied {
        Unapplied::Disk(error)
    }
}

pub(crate) struct Task {
    pub(crate) ports: Arc<Ports>,
    pub(crate) settings: Arc<Settings>,
    pub(crate) metrics: Metrics,
    pub(crate) record: Record,
    pub(crate) view: watch::Sender<View>,
    pub(crate) commands: mpsc::Receiver<Command>,
    pub(crate) in_flight: Slots,
    pub(crate) vm: VmCreation,
    pub(crate) start: Start,
    pub(crate) guest: GuestState,
    pub(crate) relay: RelayState,
    pub(crate) network: NetworkState,
    pub(crate) end: End,
}

/// Creation of the sandbox's VM, and its addresses.
pub(crate) struct VmCreation {
    pub(crate) path: CreatePath,
    pub(crate) batches: Batches,
    pub(crate) tickets: Arc<Tickets>,
    /// Whether nothing was ever requested from the cloud, neither by this task nor before it.
    pub(crate) unsent: bool,
    /// Attempt for which the provider was queried and had no placement to choose.
    pub(crate) placed: Option<u32>,
    /// Further addresses from the cloud at which the guest is dialled, besides the recorded ones.
    pub(crate) moved: Vec<IpAddr>,
}

#[derive(Default)]
pub(crate) struct Start {
    /// Whether the announcement to the volumes' owner and in the cluster has ended.
    pub(crate) announced: bool,
    /// Time of the next report on a slow start, and the duration of the start by then.
    pub(crate) slow: Option<(Instant, Duration)>,
    pub(crate) deadline: Option<Instant>,
    /// The missing step and its usual cause, as last reported.
    pub(crate) hangs: Option<String>,
    /// Last error of each kind of operation; reported when a deadline passes.
    pub(crate) trouble: Vec<(Which, String)>,
}

/// The guest as the relay reports it, and everything that it is to receive.
pub(crate) struct GuestState {
    pub(crate) state: watch::Receiver<Guest>,
    pub(crate) claims: Claims,
    /// Certificate that the relay must have before the guest gets it.
    pub(crate) renewal: Option<Renewal>,
    pub(crate) trusted: watch::Receiver<Arc<Trusted>>,
    /// Network plan for the guest, once the tunnel is connected.
    pub(crate) plan: Option<PlannedNetwork>,
    /// Guest session that refused a plan, with the digests of the plan and of the pull secrets.
    pub(crate) refused: Option<(String, String, Option<String>)>,
    /// Time of the last assignment.
    pub(crate) assigned_at: Option<Instant>,
    pub(crate) reports: Reports,
    pub(crate) pull: Pull,
}

/// State that the relay must have.
pub(crate) struct RelayState {
    pub(crate) epoch: watch::Receiver<u64>,
    pub(crate) epoch_seen: u64,
    /// Version of the state that the relay must have, and the version that it has confirmed.
    pub(crate) put_wanted: u64,
    pub(crate) put_done: u64,
    /// Version of the relay's state at the last redirection of the pod's localhost; 0 before the first.
    pub(crate) localhost_of: u64,
}

impl RelayState {
    pub(crate) fn new(epoch: watch::Receiver<u64>) -> RelayState {
        let epoch_seen = *epoch.borrow();
        RelayState { epoch, epoch_seen, put_wanted: 1, put_done: 0, localhost_of: 0 }
    }
}

/// The pod's network, and changes around it.
pub(crate) struct NetworkState {
    pub(crate) node_endpoints: watch::Receiver<NodeEndpoints>,
    pub(crate) following: Following,
    /// Set if the pod network of a running sandbox cannot be repaired; ends the retries.
    pub(crate) given_up: bool,
    /// Sandbox that had this network namespace before and has not left it yet.
    pub(crate) predecessor: Option<watch::Receiver<View>>,
}

#[derive(Default)]
pub(crate) struct End {
    pub(crate) leaving: Option<Left>,
    pub(crate) left_ms: u64,
}

enum Woken {
    Command(Option<Command>),
    Completion(Which, Completion),
    /// Of the guest, the CA set or the network: `reconcile` handles it.
    Change,
    Epoch,
    Deadline,
    Slow,
}

impl Task {
    /// Accepts a new sandbox: its intent is durable on return. No other operation was started before.
    pub(crate) async fn begin(&mut self) -> Result<(), Error> {
        self.reached("recorded");
        match self.apply(PhaseEvent::Begin, |_| {}).await {
            Ok(()) => Ok(()),
            Err(Unapplied::Disk(error)) => {
                // A failing disk may have kept the record all the same; a restarted node must not find it.
                if let Err(error) = self.ports.store.forget(&self.record.id).await {
                    warn!(%error, "cannot remove the rest of a record that could not be written");
                }
                Err(error)
            }
            Err(refused) => Err(refused.into()),
        }
    }

    /// Runs until the sandbox is gone (with a durable tombstone), or until its table is dropped.
    pub(crate) async fn run(&mut self) {
        self.enter();
        self.ports.kubernetes.show(&self.record);
        loop {
            self.reconcile();
            let (deadline, slow) = (self.start.deadline, self.start.slow.map(|(at, _)| at));
            let woken = tokio::select! {
                command = self.commands.recv() => Woken::Command(command),
                (which, completion) = self.in_flight.next() => Woken::Completion(which, completion),
                () = changed(&mut self.guest.state) => Woken::Change,
                () = changed(&mut self.relay.epoch) => Woken::Epoch,
                () = changed(&mut self.guest.trusted) => Woken::Change,
                () = self.network.following.changed() => Woken::Change,
                () = changed(&mut self.network.node_endpoints) => Woken::Change,
                () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => Woken::Deadline,
                () = sleep_until(slow.unwrap_or_else(Instant::now)), if slow.is_some() => Woken::Slow,
            };
            // Boxed: a sandbox idles in the select above for hours, and these futures are much larger than it.
            match woken {
                Woken::Command(Some(command)) => Box::pin(self.command(command)).await,
                Woken::Command(None) => return,
                Woken::Completion(which, completion) => Box::pin(self.on_completion(which, completion)).await,
                Woken::Change => {}
                Woken::Epoch => self.relay_changed(),
                Woken::Deadline => Box::pin(self.too_late()).await,
                Woken::Slow => self.takes_long(),
            }
            if self.record.phase == Phase::Gone {
                self.final_log_line();
                return;
            }
        }
    }

    /// Sets up everything that a phase needs besides its operations, at its beginning and after a recovery.
    fn enter(&mut self) {
        let is_starting = matches!(self.record.phase, Phase::Booting { .. } | Phase::Joining { .. });
        // The node may have been away for long; the VM gets its full time all the same.
        let (now, after) = (Instant::now(), self.settings.slow_after);
        let deadline = self.start.deadline.unwrap_or(now + self.settings.boot_timeout);
        self.start.deadline = is_starting.then_some(deadline);
        self.start.slow = is_starting.then_some(self.start.slow.unwrap_or((now + after, after)));
        if !self.record.phase.is_live() {
            self.end.left_ms = self.ports.clock.now_ms();
            self.in_flight.guest.cancel();
            self.in_flight.secret.cancel();
            // Attachments go with the VM.
            self.in_flight.volumes.cancel();
            // A running operation continues to its end, so that clearing finds everything it made. A pause ends.
            self.in_flight.network.wake();
            self.in_flight.relay.wake();
            self.in_flight.localhost.wake();
            self.guest.claims.refuse_all(&self.record);
            // In `Leaving`, only an address query or a pause can be in flight: creates end in `Unwanted`. A sandbox in a
            // window stops waiting; `learn` asks the batches whether it has closed meanwhile.
            if matches!(self.record.phase, Phase::Leaving { .. })
                || matches!(self.vm.path, CreatePath::Joining)
            {
                self.in_flight.cloud.cancel();
            } else {
                self.in_flight.cloud.wake();
            }
        }
    }

    async fn command(&mut self, command: Command) {
        match command {
            Command::Start(answer) => {
                let started = self.started().await;
                drop(answer.send(started)); // a caller that went away asks again
            }
            Command::Stop(stop, answer) => {
                let stopped = self.stop(stop).await;
                drop(answer.send(stopped));
            }
            Command::Claim(claim, answer) => self.claim(claim, answer).await,
            Command::Moved(addresses) => self.moved(addresses),
            Command::Lost(vm, why, answer) => {
                let lost = self.lost(&vm, why).await;
                drop(answer.send(lost));
            }
        }
    }

    async fn started(&mut self) -> Result<(), Error> {
        if self.record.started || !self.record.phase.is_live() {
            return Ok(());
        }
        self.reached("start_called");
        if matches!(self.record.phase, Phase::Running { .. }) {
            return self.change(|record| record.started = true).await;
        }
        // Recorded with the next stage: a crash before that also loses the call, and the call is sent again.
        self.record.started = true;
        self.publish();
        Ok(())
    }

    async fn stop(&mut self, stop: Stop) -> Result<(), Error> {
        let was_live = self.record.phase.is_live();
        self.apply(PhaseEvent::Stop, |record| {
            record.end.cause.get_or_insert_with(|| stop.sentence().into());
        })
        .await?;
        if was_live {
            info!(cause = stop.sentence(), phase = %self.record.phase, "stopping");
            self.metrics.sandboxes.stops.count(stop.reason());
            if stop == Stop::NetnsGone {
                self.tell("NetworkLost", format!("the pod's VM is deleted: {}", stop.sentence()));
            }
        }
        Ok(())
    }

    /// Gives up on the sandbox: waiting callers get the cause, and everything that was made is removed.
    pub(crate) async fn fail(
        &mut self,
        stage: &str,
        class: &'static str,
        cause: String,
    ) -> Result<(), Unapplied> {
        let (reason, what) = match self.record.phase {
            Phase::Running { .. } => ("VMFailed", "failed while it ran"),
            _ => ("StartFailed", "could not be started"),
        };
        if self.apply_failure(PhaseEvent::Stop, (stage, class), &cause).await? {
            error!(stage, %cause, "{what}");
            self.tell(reason, format!("the pod's VM {what} ({stage}): {cause}"));
        }
        Ok(())
    }

    /// Applies the event of a failure, with its stage and the class of its cause. Returns whether the sandbox was live, and so fails by it.
    pub(crate) async fn apply_failure(
        &mut self,
        event: PhaseEvent,
        (stage, class): (&str, &'static str),
        cause: &str,
    ) -> Result<bool, Unapplied> {
        let was_live = self.record.phase.is_live();
        let was_starting = was_live && !matches!(self.record.phase, Phase::Running { .. });
        self.apply(event, |record| {
            if was_live {
                record.end.failed = true;
                record.end.cause = Some(cause.to_owned());
            }
        })
        .await?;
        if was_live {
            self.metrics.sandboxes.failures.count(stage);
        }
        if was_starting {
            self.metrics.sandboxes.start_failures.count(class);
            self.settings.tracer.ended(&self.record, self.ports.clock.now_ms(), &[], Some(cause));
        }
        Ok(was_live)
    }

    /// Fails the sandbox, unless its guest is back. A provider's reason outweighs a link: a stop leaves it open.
    async fn lost(&mut self, vm: &InstanceId, why: Option<String>) -> Result<bool, Error> {
        let is_over = match &self.record.phase {
            Phase::Running { .. } => why.is_some() || !self.guest.state.borrow().connected,
            Phase::Joining { .. } => why.is_some(),
            _ => false,
        };
        if !is_over || self.record.phase.vm() != Some(vm) {
            return Ok(false);
        }
        let how = if why.is_some() { "has ended" } else { "is gone" };
        let why = why.as_deref().unwrap_or(
            "the provider no longer has it, and its guest does not answer; find out at the provider who deleted it, \
             or whether its host failed",
        );
        let cause = self.cause_of_end(vm, why, format!("its VM {vm} {how}: {why}")).await;
        // Recorded with the failure: no guest is left that could write anything back.
        self.record.end.flush_over = true;
        let failed = self.fail("vm", "ended", cause).await;
        if failed.is_err() {
            // The sandbox goes on, and its guest may come back.
            self.record.end.flush_over = false;
        }
        failed?;
        Ok(true)
    }

    /// Returns the cause of the VM's end: the kernel's reason, with the provider's `why`; or `otherwise`, if the
    /// console shows no reason.
    pub(crate) async fn cause_of_end(&mut self, vm: &InstanceId, why: &str, otherwise: String) -> String {
        let Some(console) = console_of(&self.ports, vm).await else { return otherwise };
        let mut cause = match &console.reason {
            Some(reason) => format!("its VM {vm} has ended: {reason} ({why})"),
            None => otherwise,
        };
        if console.lacks_memory() {
            cause.push_str("; raise the pod's memory limit, or node.guest-memory-mib");
            let has = self.record.wanted.request.as_ref().map_or(0, |request| request.size.memory_mib);
            if has > 0 {
                cause.push_str(&format!(" (the VM has {has} MiB)"));
            }
        }
        cause.push_str(&console.end());
        cause
    }

    async fn too_late(&mut self) {
        self.start.deadline = None;
        let (stage, cause) = self.why_late().await;
        if let Err(Unapplied::Disk(error)) = self.fail(stage, "late", cause).await {
            warn!(%error, "cannot record that the boot took too long; trying again");
            self.start.deadline = Some(Instant::now() + Duration::from_secs(1));
        }
    }

    /// Reports the missing step of a slow start. The next report follows when the start has taken twice as long.
    fn takes_long(&mut self) {
        let Some((at, waited)) = self.start.slow.take() else { return };
        let (stage, text) = self.where_it_hangs(waited);
        warn!(stage, waited = ?waited, "not running yet: {text}");
        self.start.hangs = Some(text.clone());
        self.publish();
        self.tell("SlowStart", format!("{text} ({stage}); still waiting"));
        self.start.slow = Some((at + waited, waited * 2));
    }

    pub(crate) fn tell(&self, reason: &'static str, text: String) {
        self.post(reason, text, false);
    }

    /// Posts a normal Event.
    pub(crate) fn progress(&self, reason: &'static str, text: String) {
        self.post(reason, text, true);
    }

    fn post(&self, reason: &'static str, text: String, is_normal: bool) {
        if let Some(pod) = &self.record.pod {
            let of = Some(self.record.id.clone());
            self.ports.kubernetes.tell(pod, PodEvent { reason, text, is_normal, of });
        }
    }

    fn relay_changed(&mut self) {
        let before = std::mem::replace(&mut self.relay.epoch_seen, *self.relay.epoch.borrow_and_update());
        if before == 0 {
            return; // the first relay of this task; no other one has received anything
        }
        // A new relay process: its state on disk may be older than the last one's.
        self.put_again();
        debug!("the relay process was replaced");
    }

    /// Makes the relay receive the sandbox's state again.
    pub(crate) fn put_again(&mut self) {
        self.relay.put_wanted += 1;
        self.in_flight.relay.wake();
    }

    /// Changes the record: durably first, then in memory.
    pub(crate) async fn change(&mut self, change: impl FnOnce(&mut Record)) -> Result<(), Error> {
        let mut record = self.record.clone();
        change(&mut record);
        self.save(record).await
    }

    /// Applies an event: records the new phase, then adopts it, then publishes it.
    pub(crate) async fn apply(
        &mut self,
        event: PhaseEvent,
        change: impl FnOnce(&mut Record),
    ) -> Result<(), Unapplied> {
        let phase = phase::next(&self.record.phase, event).map_err(Unapplied::Refused)?;
        if phase != self.record.phase {
            let change = |record: &mut Record| {
                change(record);
                record.phase = phase;
            };
            self.change(change).await?;
            self.enter();
        }
        Ok(())
    }

    pub(crate) async fn save(&mut self, record: Record) -> Result<(), Error> {
        if let Err(error) = self.ports.store.save(&record).await {
            self.metrics.sandboxes.ledger_errors.inc();
            return Err(error.into());
        }
        if record.phase != self.record.phase {
            let from = (self.record.phase != Phase::Created).then_some(&self.record.phase);
            self.metrics.sandboxes.moved(from, Some(&record.phase));
            self.metrics.sandboxes.vm(self.record.offering(), record.offering());
            debug!(from = %self.record.phase, to = %record.phase, vm = ?record.phase.vm(), "phase");
        }
        let shown = |record: &Record| {
            (record.phase.clone(), record.addresses.len(), record.enrolment.binding.is_some())
        };
        let is_news = shown(&record) != shown(&self.record);
        self.record = record;
        if is_news {
            self.ports.kubernetes.show(&self.record);
        }
        if self.record.enrolment.batch_member.is_some() {
            self.vm.tickets.enter(&self.record);
        }
        if let CreatePath::Member(member) = &self.vm.path
            && !member.is_needed(&self.record)
        {
            member.settle();
            self.vm.path = CreatePath::Alone;
        }
        self.publish();
        Ok(())
    }

    /// Notes that a stage was reached, the first time only. The next durable change includes it; a failed one leaves it.
    pub(crate) fn reached(&mut self, stage: &str) {
        let before = self.record.trace.stages.len();
        self.record.reached(stage, self.ports.clock.now_ms());
        if let Some(stage) = self.record.trace.stages.get(before) {
            self.start.hangs = None;
            self.metrics.sandboxes.stage(&stage.name, stage.at_ms);
        }
    }

    pub(crate) fn publish(&self) {
        let network_gone =
            self.end.leaving.as_ref().is_some_and(|left| !left.network) || self.record.phase == Phase::Gone;
        let faults = match &self.record.phase {
            Phase::Booting { .. } | Phase::Joining { .. } => self.start.hangs.iter().cloned().collect(),
            Phase::Running { .. } => self.guest.reports.faults().map(str::to_owned).collect(),
            _ => Arc::default(),
        };
        let new = View { faults, ..View::of(&self.record, network_gone) };
        self.view.send_if_modified(|view| std::mem::replace(view, new) != *view);
    }

    pub(crate) fn key(&self, attempt: u32) -> IdempotencyKey {
        IdempotencyKey::derive(&self.settings.cluster_id, self.record.id.as_str(), attempt)
    }

    fn final_log_line(&self) {
        info!(
            cause = self.record.end.cause.as_deref().unwrap_or("-"),
            failed = self.record.end.failed,
            lived_ms = self.ports.clock.now_ms().saturating_sub(self.record.created_ms),
            stages = self.record.stages_text(),
            "sandbox gone"
        );
    }
}

/// Waits for a change; pending forever if the sender is gone.
async fn changed<T>(receiver: &mut watch::Receiver<T>) {
    if receiver.changed().await.is_err() {
        std::future::pending::<()>().await;
    }
}
