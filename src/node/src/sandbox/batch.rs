//! Sandboxes that want the same VM at the same moment get theirs by one call.
//!
//! A new sandbox joins a window; when it closes, its members have their seats, numbered. Then the batch's file is
//! written (the one write before the cloud hears of it), the cloud is asked, what it made is written, and only then
//! does each member hear which VM is its own: the one with the number of its seat. The file is the only intent: a member
//! says nothing of its seat in its record until it has its VM, and a member that recovers finds its seat by the file.
//! The file goes when no member's record needs it: that is when the last of them is gone, or had to try again by itself.
//!
//! All VMs of a batch have the same user-data, and so the same ticket. Whose VM a guest is in is told by the address it
//! comes from (`tickets.rs`).
//!
//! Touches the world through [`Effects`]; knows the sandboxes' records, never their tasks.

mod course;

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use parking_lot::{Mutex, MutexGuard};
use peerpod_provider_api::{CreateRequest, IdempotencyKey, InstanceId};
use tokio::{
    sync::{oneshot, watch},
    task::JoinSet,
    time::{Instant, sleep_until},
};

use super::{
    Settings,
    effects::{CloudError, Effects},
    phase::Phase,
    tickets::Tickets,
};
use crate::{
    ledger::{Batch, Member, Record, Rest, batch_key},
    metrics::Metrics,
    spec::SandboxId,
};

/// A window closes when nobody has come for so long.
const IDLE: Duration = Duration::from_millis(35);
/// And at the latest after this.
const LONGEST: Duration = Duration::from_secs(1);

/// How a sandbox gets the VM of its present attempt.
#[derive(Clone)]
pub(super) enum Way {
    /// New: nobody was asked for anything, so it may join others.
    Open,
    /// It waits in a window, or has been given a seat just now.
    Joining,
    /// With others.
    Seated(Seat),
    /// By a call of its own, or it has its VM.
    Alone,
}

/// A member's place in a batch.
#[derive(Clone)]
pub(super) struct Seat {
    course: Arc<Course>,
    number: u32,
}

/// One batch, from the moment its window closed.
struct Course {
    members: Vec<Member>,
    status: watch::Sender<Status>,
    /// Seats whose members' records may need the file.
    needed: watch::Sender<HashSet<u32>>,
}

#[derive(Clone)]
enum Status {
    /// The file is not written yet; nobody was asked.
    Forming,
    /// There will be none: each for itself.
    Void,
    /// The file is written; the cloud may have been asked.
    Asked(Arc<Batch>),
    /// What was made is written.
    Answered(Arc<Batch>),
}

/// All batches of the node. Cheap to clone.
#[derive(Clone)]
pub(super) struct Batches(Arc<Inner>);

struct Inner {
    fx: Arc<dyn Effects>,
    settings: Arc<Settings>,
    metrics: Metrics,
    tickets: Arc<Tickets>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// By what is asked for.
    windows: HashMap<String, Window>,
    opened: u64,
    seats: HashMap<SandboxId, Seat>,
    courses: Vec<Arc<Course>>,
    tasks: JoinSet<()>,
}

struct Window {
    /// Tells it from an earlier one of the same shape.
    number: u64,
    shape: CreateRequest,
    waiting: Vec<Waiting>,
    opened: Instant,
    last: Instant,
}

struct Waiting {
    member: Member,
    answer: oneshot::Sender<Option<Seat>>,
}

/// What must not be taken for an orphan.
pub(super) enum Claimed {
    /// VMs with this key: what they will be is not known yet.
    Key(IdempotencyKey),
    /// This VM, as long as the sandbox is not known to be gone.
    Vm(SandboxId, InstanceId),
}

impl Batches {
    pub(super) fn new(
        fx: Arc<dyn Effects>,
        settings: Arc<Settings>,
        metrics: Metrics,
        tickets: Arc<Tickets>,
    ) -> Batches {
        Batches(Arc::new(Inner { fx, settings, metrics, tickets, state: Mutex::default() }))
    }

    /// How a sandbox with this record goes on. One that this process has just accepted may join others; for any other
    /// a call may have been made that nobody remembers, so it keeps to its seat or its own key.
    pub(super) fn way(&self, record: &Record) -> Way {
        if record.phase == Phase::Created {
            let fits = record.request.as_ref().is_some_and(|request| self.takes(request));
            return if fits { Way::Open } else { Way::Alone };
        }
        match self.state().seat(&record.id) {
            Some(seat) if seat.is_needed(record) => Way::Seated(seat.clone()),
            Some(seat) => {
                seat.settle();
                Way::Alone
            }
            None => Way::Alone,
        }
    }

    /// Disks and second cards are one VM's; no call makes many of those.
    fn takes(&self, request: &CreateRequest) -> bool {
        self.0.settings.max_batch > 1 && request.disks.is_empty() && !request.second_nic
    }

    /// Waits with others for a VM like this. Hears of its seat when the window closes; `None`: it is alone.
    pub(super) fn join(&self, member: Member, request: &CreateRequest) -> oneshot::Receiver<Option<Seat>> {
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
        // What it is given already is nothing to ask for once more.
        if state.seat(&member.sandbox).is_some() {
            drop(answer.send(None));
            return answered;
        }
        let now = Instant::now();
        if !state.windows.contains_key(&digest) {
            state.opened += 1;
            let number = state.opened;
            let window = Window { number, shape, waiting: Vec::new(), opened: now, last: now };
            state.windows.insert(digest.clone(), window);
            self.spawn(&mut state, self.clone().watch(digest.clone(), number));
        }
        let mut full = false;
        if let Some(window) = state.windows.get_mut(&digest) {
            window.waiting.push(Waiting { member, answer });
            window.last = now;
            full = window.waiting.len() >= self.0.settings.max_batch as usize;
        }
        if full {
            self.close_window(&mut state, &digest);
        }
        answered
    }

    /// Takes a sandbox out of the window it waits in. If that has closed already, its seat.
    pub(super) fn withdraw(&self, id: &SandboxId) -> Option<Seat> {
        let mut state = self.state();
        for window in state.windows.values_mut() {
            window.waiting.retain(|waiting| waiting.member.sandbox != *id);
        }
        state.seat(id).cloned()
    }

    /// Takes the batches of the ledger up again, before any sandbox of it is. `unread`: sandboxes whose record cannot
    /// be read; nobody knows whether they need theirs.
    pub(super) fn adopt(
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
            let course = Arc::new(Course {
                members,
                status: watch::Sender::new(status),
                needed: watch::Sender::new(needed.clone()),
            });
            let mut state = self.state();
            for number in needed {
                let seat = Seat { course: course.clone(), number };
                state.seats.insert(seat.member().sandbox.clone(), seat);
            }
            state.courses.push(course.clone());
            self.spawn(&mut state, self.clone().follow(course, None));
        }
    }

    /// What batches have that no sandbox's view shows yet.
    pub(super) fn claimed(&self) -> Vec<Claimed> {
        let mut claimed = Vec::new();
        for course in &self.state().courses {
            match &*course.status.borrow() {
                Status::Forming | Status::Void => {}
                Status::Asked(batch) => claimed.push(Claimed::Key(batch.key.clone())),
                Status::Answered(batch) => {
                    let made = batch.made.as_deref().unwrap_or_default();
                    claimed.extend(course.needed.borrow().iter().filter_map(|number| {
                        let number = *number as usize;
                        let sandbox = batch.members.get(number)?.sandbox.clone();
                        Some(Claimed::Vm(sandbox, made.get(number)?.clone()))
                    }));
                }
            }
        }
        claimed
    }

    /// The key of a batch's call.
    pub(super) fn key(&self, id: &str) -> IdempotencyKey {
        batch_key(&self.0.settings.cluster_id, id)
    }

    /// Ends everything where it is. What was begun is in the ledger.
    pub(super) async fn close(&self) {
        let mut tasks = std::mem::take(&mut self.state().tasks);
        tasks.shutdown().await;
    }

    /// Closes a window when its time is over.
    async fn watch(self, digest: String, number: u64) {
        loop {
            let until = {
                let mut state = self.state();
                let Some(window) = state.windows.get(&digest).filter(|window| window.number == number) else {
                    return; // it was full
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

    /// Gives who waits its seat. From here on who is a member stands.
    fn close_window(&self, state: &mut State, digest: &str) {
        let Some(Window { shape, mut waiting, .. }) = state.windows.remove(digest) else { return };
        // Whoever panicked meanwhile goes on alone.
        waiting.retain(|waiting| !waiting.answer.is_closed());
        if waiting.len() < 2 {
            for Waiting { answer, .. } in waiting {
                drop(answer.send(None));
            }
            return;
        }
        let course = Arc::new(Course {
            members: waiting.iter().map(|waiting| waiting.member.clone()).collect(),
            status: watch::Sender::new(Status::Forming),
            needed: watch::Sender::new((0..).take(waiting.len()).collect()),
        });
        for (number, Waiting { member, answer }) in (0..).zip(waiting) {
            let seat = Seat { course: course.clone(), number };
            state.seats.insert(member.sandbox, seat.clone());
            drop(answer.send(Some(seat)));
        }
        state.courses.push(course.clone());
        self.spawn(state, self.clone().follow(course, Some(shape)));
    }

    /// Forgets a batch.
    fn drop_course(&self, course: &Arc<Course>) {
        let mut state = self.state();
        state.seats.retain(|_, seat| !Arc::ptr_eq(&seat.course, course));
        state.courses.retain(|other| !Arc::ptr_eq(other, course));
    }

    fn spawn(&self, state: &mut State, task: impl Future<Output = ()> + Send + 'static) {
        while state.tasks.try_join_next().is_some() {} // ended ones
        state.tasks.spawn(task);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Never held across an await, and nothing in here leaves it half changed.
        self.0.state.lock()
    }
}

impl State {
    /// The seat that somebody has and may need.
    fn seat(&self, id: &SandboxId) -> Option<&Seat> {
        self.seats.get(id).filter(|seat| seat.course.needed.borrow().contains(&seat.number))
    }
}

impl Seat {
    /// The member's VM, or why it has none. Waits for the batch's answer. `None`: there is no batch after all, and
    /// nobody was asked.
    pub(super) async fn outcome(self) -> Option<Result<InstanceId, CloudError>> {
        let mut status = self.course.status.subscribe();
        let done = status.wait_for(|status| matches!(status, Status::Void | Status::Answered(_))).await;
        // We hold the sender.
        let Status::Answered(batch) = done.ok()?.clone() else { return None };
        let made = batch.made.as_deref().unwrap_or_default();
        Some(made.get(self.number as usize).cloned().ok_or_else(|| match &batch.rest {
            Some(Rest { again: false, text }) => CloudError::invalid(text.clone()),
            Some(Rest { again: true, text }) => CloudError::capacity("a batch of VMs", text.clone()),
            None => CloudError::capacity("a batch of VMs", "the cloud made fewer VMs than were asked for"),
        }))
    }

    /// What was written of the batch, once it is.
    pub(super) fn batch(&self) -> Option<Arc<Batch>> {
        match &*self.course.status.borrow() {
            Status::Forming | Status::Void => None,
            Status::Asked(batch) | Status::Answered(batch) => Some(batch.clone()),
        }
    }

    /// The place in the batch.
    pub(super) fn number(&self) -> u32 {
        self.number
    }

    /// Whether a sandbox with this record still needs the batch's file.
    pub(super) fn is_needed(&self, record: &Record) -> bool {
        let batch = self.batch();
        is_needed(record, self.member(), self.number, batch.as_ref().map_or("", |batch| &batch.ticket.id))
    }

    /// The member's record is durable and does not need the file any more.
    pub(super) fn settle(&self) {
        self.course.needed.send_if_modified(|needed| needed.remove(&self.number));
    }

    fn member(&self) -> &Member {
        &self.course.members[self.number as usize]
    }
}

/// Whether the file is what says which VM is the record's, or the only one that does if the record is lost.
fn is_needed(record: &Record, member: &Member, number: u32, ticket: &str) -> bool {
    if record.id != member.sandbox {
        return false;
    }
    match record.phase {
        Phase::Booting { attempt } | Phase::Unwanted { attempt } => attempt == member.attempt,
        Phase::Joining { .. } | Phase::Running { .. } | Phase::Leaving { .. } => {
            record.seat == Some(number) && record.ticket.as_ref().is_some_and(|own| own.id == ticket)
        }
        Phase::Created | Phase::Gone => false,
    }
}
