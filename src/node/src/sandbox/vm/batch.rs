//! Creates the VMs of several sandboxes by one call, if they want the same VM at the same time.
//!
//! A new sandbox joins a window. When the window closes, its members are numbered. The batch's task writes the batch
//! file, calls the cloud, and writes the result; only then does each member get the VM with its number. The file is the
//! only intent: a member that recovers finds its number by it. It is removed when no member's record needs it.
//!
//! All VMs of a batch have the same user-data, and so the same ticket. The node identifies each guest of a batch by its
//! source address (`tickets.rs`).

mod run;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use peerpod_provider_api::{CreateRequest, IdempotencyKey, InstanceId};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};

use crate::ledger::{Batch, Member, Record, Rest, batch_key};
use crate::metrics::Metrics;
use crate::sandbox::Settings;
use crate::sandbox::guest::tickets::Tickets;
use crate::sandbox::lifecycle::Phase;
use crate::sandbox::ports::{CloudError, Ports};
use crate::spec::SandboxId;

/// Time without a new member after which a window closes.
const IDLE: Duration = Duration::from_millis(35);
/// Maximum time for which a window stays open.
const LONGEST: Duration = Duration::from_secs(1);

/// Create path of a sandbox's current attempt.
#[derive(Clone)]
pub(crate) enum CreatePath {
    /// The sandbox is new and nothing was requested for it; it may join a batch.
    Open,
    /// The sandbox waits in a window, or has just become a member of a batch.
    Joining,
    Member(BatchMember),
    /// The sandbox makes a call of its own, or has its VM.
    Alone,
}

/// Membership of one sandbox in a batch.
#[derive(Clone)]
pub(crate) struct BatchMember {
    run: Arc<BatchRun>,
    pub(crate) number: u32,
}

/// One batch, from the closing of its window.
struct BatchRun {
    members: Vec<Member>,
    status: watch::Sender<Status>,
    /// Numbers of the members that may still need the batch file.
    needed: watch::Sender<HashSet<u32>>,
}

#[derive(Clone)]
enum Status {
    /// The file is not written yet; nothing was requested.
    Forming,
    /// The batch was given up; each member makes its own call.
    Void,
    /// The file is written; the cloud may have been called.
    Asked(Arc<Batch>),
    /// The file contains the cloud's result.
    Answered(Arc<Batch>),
}

/// All batches of the node. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Batches(Arc<Inner>);

struct Inner {
    ports: Arc<Ports>,
    settings: Arc<Settings>,
    metrics: Metrics,
    tickets: Arc<Tickets>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Open windows, by the digest of the request.
    windows: HashMap<String, Window>,
    opened: u64,
    members: HashMap<SandboxId, BatchMember>,
    runs: Vec<Arc<BatchRun>>,
    tasks: JoinSet<()>,
}

struct Window {
    /// Distinguishes the window from an earlier one for the same request.
    number: u64,
    shape: CreateRequest,
    waiting: Vec<(Member, oneshot::Sender<Option<BatchMember>>)>,
    opened: Instant,
    last: Instant,
}

impl Batches {
    pub(crate) fn new(
        ports: Arc<Ports>,
        settings: Arc<Settings>,
        metrics: Metrics,
        tickets: Arc<Tickets>,
    ) -> Batches {
        Batches(Arc::new(Inner { ports, settings, metrics, tickets, state: Mutex::default() }))
    }

    /// Returns the create path of a sandbox. Only a new one may join a batch: an earlier process may have made a call.
    pub(crate) fn create_path(&self, record: &Record) -> CreatePath {
        if record.phase == Phase::Created {
            let fits = record.wanted.request.as_ref().is_some_and(|request| self.takes(request));
            return if fits { CreatePath::Open } else { CreatePath::Alone };
        }
        match self.state().member(&record.id) {
            Some(member) if member.is_needed(record) => CreatePath::Member(member.clone()),
            Some(member) => {
                member.settle();
                CreatePath::Alone
            }
            None => CreatePath::Alone,
        }
    }

    /// Whether a batch may serve the request. Disks and a second NIC belong to one VM; no call makes several of those.
    fn takes(&self, request: &CreateRequest) -> bool {
        self.0.settings.max_batch > 1 && request.disks.is_empty() && !request.second_nic
    }

    /// Adds the sandbox to a window. When it closes, the receiver yields the membership, or `None` to go on alone.
    pub(crate) fn join(
        &self,
        member: Member,
        request: &CreateRequest,
    ) -> oneshot::Receiver<Option<BatchMember>> {
        let (answer, answered) = oneshot::channel();
        let shape = CreateRequest {
            name: String::new(),
            user_data: String::new(),
            labels: std::collections::BTreeMap::new(),
            placement: None,
            ..request.clone()
        };
        let digest = shape.digest();
        let mut state = self.state();
        // The sandbox is a member of a batch already; it does not join another one.
        if state.member(&member.sandbox).is_some() {
            drop(answer.send(None));
            return answered;
        }
        let now = Instant::now();
        if !state.windows.contains_key(&digest) {
            state.opened += 1;
            let watch = self.clone().watch(digest.clone(), state.opened);
            self.spawn(&mut state, watch);
        }
        let number = state.opened;
        let open = || Window { number, shape, waiting: Vec::new(), opened: now, last: now };
        let window = state.windows.entry(digest.clone()).or_insert_with(open);
        window.waiting.push((member, answer));
        window.last = now;
        if window.waiting.len() >= self.0.settings.max_batch as usize {
            self.close_window(&mut state, &digest);
        }
        answered
    }

    /// Removes a sandbox from its window. Returns its batch membership if the window has closed already.
    pub(crate) fn withdraw(&self, id: &SandboxId) -> Option<BatchMember> {
        let mut state = self.state();
        for window in state.windows.values_mut() {
            window.waiting.retain(|(member, _)| member.sandbox != *id);
        }
        state.member(id).cloned()
    }

    /// Resumes the ledger's batches, before their sandboxes. Those in `unread` may still need one.
    pub(crate) fn adopt(
        &self,
        batches: Vec<Batch>,
        records: &HashMap<SandboxId, Record>,
        unread: &HashSet<SandboxId>,
    ) {
        for batch in batches {
            let needs = |(number, member): (usize, &Member)| {
                let number = u32::try_from(number).unwrap_or(u32::MAX);
                let needed = match records.get(&member.sandbox) {
                    Some(record) => is_needed(record, member, number, &batch.ticket.id),
                    None => unread.contains(&member.sandbox),
                };
                needed.then_some(number)
            };
            let needed: HashSet<u32> = batch.members.iter().enumerate().filter_map(needs).collect();
            self.0.tickets.open(&batch.ticket.id);
            let members = batch.members.clone();
            let batch = Arc::new(batch);
            let status = if batch.made.is_some() { Status::Answered(batch) } else { Status::Asked(batch) };
            let run = Arc::new(BatchRun {
                members,
                status: watch::Sender::new(status),
                needed: watch::Sender::new(needed.clone()),
            });
            let mut state = self.state();
            for number in needed {
                let member = BatchMember { run: run.clone(), number };
                state.members.insert(member.member().sandbox.clone(), member);
            }
            state.runs.push(run.clone());
            self.spawn(&mut state, self.clone().follow(run, None));
        }
    }

    /// Returns the claims of batches that no sandbox's view shows yet: the keys of VMs with unknown ids, and the VMs of
    /// sandboxes, each until its sandbox is known to be gone.
    pub(crate) fn claimed(&self) -> (Vec<IdempotencyKey>, Vec<(SandboxId, InstanceId)>) {
        let (mut keys, mut vms) = (Vec::new(), Vec::new());
        for run in &self.state().runs {
            match &*run.status.borrow() {
                Status::Forming | Status::Void => {}
                Status::Asked(batch) => keys.push(batch.key.clone()),
                Status::Answered(batch) => {
                    let made = batch.made.as_deref().unwrap_or_default();
                    vms.extend(run.needed.borrow().iter().filter_map(|number| {
                        let number = *number as usize;
                        let sandbox = batch.members.get(number)?.sandbox.clone();
                        Some((sandbox, made.get(number)?.clone()))
                    }));
                }
            }
        }
        (keys, vms)
    }

    pub(crate) fn key(&self, id: &str) -> IdempotencyKey {
        batch_key(&self.0.settings.cluster_id, id)
    }

    /// Aborts all tasks. The ledger contains everything they had started.
    pub(crate) async fn close(&self) {
        let mut tasks = std::mem::take(&mut self.state().tasks);
        tasks.shutdown().await;
    }

    /// Closes a window when its time is over.
    async fn watch(self, digest: String, number: u64) {
        loop {
            let until = {
                let mut state = self.state();
                let Some(window) = state.windows.get(&digest).filter(|window| window.number == number) else {
                    return; // the window was full
                };
                let until = (window.last + IDLE).min(window.opened + LONGEST);
                if until <= Instant::now() {
                    self.close_window(&mut state, &digest);
                    return;
                }
                until
            };
            sleep_until(until).await;
        }
    }

    /// Closes a window and makes the waiting sandboxes members of a batch. The membership is fixed from here on.
    fn close_window(&self, state: &mut State, digest: &str) {
        let Some(Window { shape, mut waiting, .. }) = state.windows.remove(digest) else { return };
        // A task that panicked meanwhile has dropped its receiver; its sandbox goes on alone.
        waiting.retain(|(_, answer)| !answer.is_closed());
        if waiting.len() < 2 {
            for (_, answer) in waiting {
                drop(answer.send(None));
            }
            return;
        }
        let run = Arc::new(BatchRun {
            members: waiting.iter().map(|(member, _)| member.clone()).collect(),
            status: watch::Sender::new(Status::Forming),
            needed: watch::Sender::new((0..).take(waiting.len()).collect()),
        });
        for (number, (Member { sandbox, .. }, answer)) in (0..).zip(waiting) {
            let member = BatchMember { run: run.clone(), number };
            state.members.insert(sandbox, member.clone());
            drop(answer.send(Some(member)));
        }
        state.runs.push(run.clone());
        self.spawn(state, self.clone().follow(run, Some(shape)));
    }

    fn drop_batch(&self, run: &Arc<BatchRun>) {
        let mut state = self.state();
        state.members.retain(|_, member| !Arc::ptr_eq(&member.run, run));
        state.runs.retain(|other| !Arc::ptr_eq(other, run));
    }

    fn spawn(&self, state: &mut State, task: impl Future<Output = ()> + Send + 'static) {
        while state.tasks.try_join_next().is_some() {} // finished tasks
        state.tasks.spawn(task);
    }

    /// Locks the state; the lock is never held across an await.
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock()
    }
}

impl State {
    /// Returns the batch membership of a sandbox that may still need it.
    fn member(&self, id: &SandboxId) -> Option<&BatchMember> {
        self.members.get(id).filter(|member| member.run.needed.borrow().contains(&member.number))
    }
}

impl BatchMember {
    /// Waits for the member's VM, or the reason why it has none. `None`: nothing was requested.
    pub(crate) async fn result(self) -> Option<Result<InstanceId, CloudError>> {
        let mut status = self.run.status.subscribe();
        let done = status.wait_for(|status| matches!(status, Status::Void | Status::Answered(_))).await;
        // `self` holds the sender, so the wait cannot fail.
        let Status::Answered(batch) = done.ok()?.clone() else { return None };
        let made = batch.made.as_deref().unwrap_or_default();
        Some(made.get(self.number as usize).cloned().ok_or_else(|| match &batch.rest {
            Some(Rest { again: false, text }) => CloudError::invalid(text.clone()),
            Some(Rest { again: true, text }) => CloudError::capacity("a batch of VMs", text.clone()),
            None => CloudError::capacity("a batch of VMs", "the cloud made fewer VMs than requested"),
        }))
    }

    /// Returns the batch as last written; `None` before the first write.
    pub(crate) fn batch(&self) -> Option<Arc<Batch>> {
        match &*self.run.status.borrow() {
            Status::Forming | Status::Void => None,
            Status::Asked(batch) | Status::Answered(batch) => Some(batch.clone()),
        }
    }

    /// Whether a sandbox with this record still needs the batch file.
    pub(crate) fn is_needed(&self, record: &Record) -> bool {
        let batch = self.batch();
        is_needed(record, self.member(), self.number, batch.as_ref().map_or("", |batch| &batch.ticket.id))
    }

    /// Marks the member as independent of the file: its record is durable and does not need the file any more.
    pub(crate) fn settle(&self) {
        self.run.needed.send_if_modified(|needed| needed.remove(&self.number));
    }

    fn member(&self) -> &Member {
        &self.run.members[self.number as usize]
    }
}

/// Whether the record depends on the batch file: only the file names its VM, or would name it if the record were lost.
fn is_needed(record: &Record, member: &Member, number: u32, ticket: &str) -> bool {
    if record.id != member.sandbox {
        return false;
    }
    match record.phase {
        Phase::Booting { attempt } | Phase::Unwanted { attempt } => attempt == member.attempt,
        Phase::Joining { .. } | Phase::Running { .. } | Phase::Leaving { .. } => {
            record.enrolment.batch_member == Some(number)
                && record.enrolment.ticket.as_ref().is_some_and(|own| own.id == ticket)
        }
        Phase::Created | Phase::Gone => false,
    }
}
