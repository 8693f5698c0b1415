//! Queue of the calls to the node. It keeps their order per sandbox, sends them again after the node was away, and ends
//! them on their deadline, the loss of their caller or a stop. It has no sockets and no clock: the caller passes the
//! time in and executes the [`Output`]s.
//!
//! Rules of order:
//!
//! * A StartVM waits for the earlier CreateVM and StopVM of its sandbox.
//! * A CreateVM waits for the earlier StopVMs. It does not wait for a StartVM: a shim's clean-up repeats CreateVM while
//!   the start still runs, and has little time.
//! * A StopVM waits for nothing, and cancels the earlier CreateVM and StartVM that the node has not received.
//! * A StopVM that the node does not answer in time goes to the inbox. Until the node has read it there, later CreateVM
//!   and StartVM of that sandbox wait.
//! * A StopVM whose inbox file is not written in time, because the disk stalls, is kept without the disk and answered.
//!   It stays in the queue until it is in the inbox.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

use bytes::Bytes;
use peerpod_proto::ttrpc_frame::Request;

pub(crate) use self::state::QueueState;
use super::call::{self, Kind, code};
use crate::id::SandboxId;

/// Identifies a shim's connection; never reused in a process.
pub(crate) type ConnId = u64;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Caller {
    /// A shim's connection and the stream of its call.
    Shim { conn: ConnId, stream: u32 },
    /// A component of this process, with a number of its own.
    Internal(u64),
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Output {
    /// Write this request to the node's connection.
    Send { stream: u32, body: Bytes },
    /// Send the answer (a response envelope) to its caller.
    Answer { caller: Caller, body: Bytes },
    /// Make the stop of this sandbox durable, then call [`Queue::inbox_written`].
    WriteInbox(SandboxId),
    /// Keep the stop of this sandbox without the state's disk, then call [`Queue::stop_kept`].
    KeepStop(SandboxId),
    /// Remove the kept stop of this sandbox.
    ForgetStop(SandboxId),
    /// Close the node's unusable connection and dial again.
    Reconnect(&'static str),
}

/// Limit of waiting and running calls, over all connections.
const CALLS: usize = 8192;
const CALLS_PER_CONNECTION: usize = 256;
const CALLS_PER_SANDBOX: usize = 64;
/// Limit of the bytes of requests that are kept for sending again.
const BYTES: usize = 64 << 20;
/// Time limit of the node's answer to a StopVM before it goes to the inbox.
const STOP_GRACE: Duration = Duration::from_millis(400);
/// Time limit of the inbox write before the stop is kept without the disk.
const WRITE_GRACE: Duration = Duration::from_millis(300);
/// Silence of a node that owes answers before a liveness check.
const PROBE_AFTER: Duration = Duration::from_secs(5);
/// Time limit of the answer to that check.
const HANG: Duration = Duration::from_secs(10);

type CallId = u64;

#[derive(Debug)]
struct Call {
    kind: Kind,
    request: Request,
    size: usize,
    caller: Option<Caller>,
    deadline: Option<Instant>,
    /// Stream on the node's present connection, if the call was sent there.
    sent: Option<u32>,
    /// The inbox file of this StopVM is being written.
    in_inbox: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    Deadline(CallId),
    StopGrace(CallId),
    Probe,
    Hang,
}

#[derive(Debug, Default)]
struct Calls {
    all: BTreeMap<CallId, Call>,
    next: CallId,
    by_sandbox: HashMap<SandboxId, VecDeque<CallId>>,
    by_connection: HashMap<ConnId, HashSet<CallId>>,
    bytes: usize,
}

impl Calls {
    fn insert(&mut self, call: Call) -> CallId {
        let id = self.next;
        self.next += 1;
        if let Some(sandbox) = call.kind.id() {
            self.by_sandbox.entry(sandbox.clone()).or_default().push_back(id);
        }
        if let Some(Caller::Shim { conn, .. }) = call.caller {
            self.by_connection.entry(conn).or_default().insert(id);
        }
        self.bytes += call.size;
        self.all.insert(id, call);
        id
    }

    fn remove(&mut self, id: CallId) -> Option<Call> {
        let call = self.all.remove(&id)?;
        self.bytes = self.bytes.saturating_sub(call.size);
        if let Some(sandbox) = call.kind.id()
            && let Some(calls) = self.by_sandbox.get_mut(sandbox)
        {
            calls.retain(|&other| other != id);
            if calls.is_empty() {
                self.by_sandbox.remove(sandbox);
            }
        }
        self.forget_caller(id, call.caller);
        Some(call)
    }

    /// Removes and returns the caller of a call, which stays.
    fn take_caller(&mut self, id: CallId) -> Option<Caller> {
        let caller = self.all.get_mut(&id)?.caller.take();
        self.forget_caller(id, caller);
        caller
    }

    fn forget_caller(&mut self, id: CallId, caller: Option<Caller>) {
        if let Some(Caller::Shim { conn, .. }) = caller
            && let Some(calls) = self.by_connection.get_mut(&conn)
        {
            calls.remove(&id);
            if calls.is_empty() {
                self.by_connection.remove(&conn);
            }
        }
    }

    /// Returns the calls of a sandbox, oldest first.
    fn of_sandbox(&self, sandbox: &SandboxId) -> impl Iterator<Item = (CallId, &Call)> {
        let ids = self.by_sandbox.get(sandbox).into_iter().flatten();
        ids.filter_map(|id| Some((*id, self.all.get(id)?)))
    }

    fn full(&self, caller: &Caller, kind: &Kind, size: usize) -> Option<String> {
        let of_connection = match caller {
            Caller::Shim { conn, .. } => self.by_connection.get(conn).map_or(0, HashSet::len),
            Caller::Internal(_) => 0,
        };
        let wait = |calls: usize, of: &str| {
            Some(format!("{calls} calls of this {of} wait for the node; wait for their answers"))
        };
        // A refused stop would leak a VM: stops have places of their own.
        let stop = matches!(kind, Kind::Stop(_));
        if of_connection >= CALLS_PER_CONNECTION * if stop { 2 } else { 1 } {
            return wait(of_connection, "connection");
        }
        if stop {
            return None;
        }
        let of_sandbox = kind.id().and_then(|id| self.by_sandbox.get(id)).map_or(0, VecDeque::len);
        if of_sandbox >= CALLS_PER_SANDBOX {
            return wait(of_sandbox, "sandbox");
        }
        let (calls, bytes) = (self.all.len(), self.bytes);
        (calls >= CALLS || bytes + size > BYTES).then(|| {
            format!(
                "{calls} calls of {bytes} bytes wait for peerpod-node, which is the limit; check that it runs"
            )
        })
    }
}

#[derive(Debug, PartialEq, Eq)]
enum NodeState {
    Away,
    /// Connected, but the first ReadInbox is not answered yet.
    ReadingInbox,
    Ready,
}

#[derive(Debug)]
struct Node {
    state: NodeState,
    /// Unanswered calls by their stream.
    sent: HashMap<u32, CallId>,
    next_stream: u32,
    last_received: Instant,
    probing: bool,
}

/// Stops in the inbox, and on the way there.
#[derive(Debug, Default)]
struct Inbox {
    /// Stops that no ReadInbox has covered yet, with the number of their write.
    unread: HashMap<SandboxId, u64>,
    writing: HashSet<SandboxId>,
    /// Stops that are kept without the disk, or about to be.
    kept: HashSet<SandboxId>,
    writes: u64,
    /// ReadInbox in flight: its stream, and the number of the last write that it covers.
    reading: Option<(u32, u64)>,
}

impl Inbox {
    fn written(&mut self, id: SandboxId) {
        self.writes += 1;
        self.unread.insert(id, self.writes);
    }
}

/// The queue. Each method may produce outputs, which [`Queue::take`] returns.
#[derive(Debug)]
pub(crate) struct Queue {
    calls: Calls,
    node: Node,
    inbox: Inbox,
    timers: BTreeSet<(Instant, Timer)>,
    outputs: VecDeque<Output>,
}

impl Queue {
    pub(crate) fn new(now: Instant) -> Queue {
        Queue {
            calls: Calls::default(),
            node: Node {
                state: NodeState::Away,
                sent: HashMap::new(),
                next_stream: 1,
                last_received: now,
                probing: false,
            },
            inbox: Inbox::default(),
            timers: BTreeSet::new(),
            outputs: VecDeque::new(),
        }
    }

    pub(crate) fn take(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// Time of the next call to [`Queue::tick`].
    pub(crate) fn next_timer(&self) -> Option<Instant> {
        self.timers.first().map(|(at, _)| *at)
    }

    pub(crate) fn len(&self) -> usize {
        self.calls.all.len()
    }

    /// Whether the node is connected and has read the inbox.
    pub(crate) fn node_is_ready(&self) -> bool {
        self.node.state == NodeState::Ready
    }

    pub(crate) fn accept(&mut self, caller: Caller, kind: Kind, request: Request, now: Instant) {
        if let Kind::Stop(id) = &kind {
            let id = id.clone();
            self.cancel_before(&id, CallId::MAX, false);
            if self.inbox.unread.contains_key(&id) {
                // The same stop is durable already, and no later call has reached the node.
                self.answer_to(Some(caller), call::done());
                return;
            }
        }
        if matches!(caller, Caller::Internal(_)) && self.node.state != NodeState::Ready {
            self.answer_to(Some(caller), call::status(code::UNAVAILABLE, "peerpod-node is away"));
            return;
        }
        if let Some(full) = self.calls.full(&caller, &kind, request.payload.len()) {
            self.answer_to(Some(caller), call::status(code::RESOURCE_EXHAUSTED, &full));
            return;
        }
        let call = self.insert(Some(caller), kind, request, now);
        let Some(entry) = self.calls.all.get(&call) else { return };
        if matches!(entry.kind, Kind::Stop(_)) {
            if self.node.state != NodeState::Ready {
                self.fall_back(call, now);
                return;
            }
            self.timers.insert((now + STOP_GRACE, Timer::StopGrace(call)));
        }
        self.send_if_due(call, now);
    }

    fn insert(&mut self, caller: Option<Caller>, kind: Kind, request: Request, now: Instant) -> CallId {
        let deadline = u64::try_from(request.timeout_nano)
            .ok()
            .filter(|&nanos| nanos > 0)
            .and_then(|nanos| now.checked_add(Duration::from_nanos(nanos)));
        let size = request.payload.len();
        let call = Call { kind, request, size, caller, deadline, sent: None, in_inbox: false };
        let id = self.calls.insert(call);
        if let Some(at) = deadline {
            self.timers.insert((at, Timer::Deadline(id)));
        }
        id
    }

    /// Removes a call; a later answer to it is dropped.
    fn remove(&mut self, id: CallId) -> Option<Call> {
        let call = self.calls.remove(id)?;
        if let Some(stream) = call.sent {
            self.node.sent.remove(&stream);
        }
        if let Some(at) = call.deadline {
            self.timers.remove(&(at, Timer::Deadline(id)));
        }
        Some(call)
    }

    fn finish(&mut self, id: CallId, body: Bytes) {
        if let Some(call) = self.remove(id) {
            self.answer_to(call.caller, body);
        }
    }

    fn answer_to(&mut self, caller: Option<Caller>, body: Bytes) {
        if let Some(caller) = caller {
            self.outputs.push_back(Output::Answer { caller, body });
        }
    }

    fn send_if_due(&mut self, id: CallId, now: Instant) {
        if self.node.state != NodeState::Ready {
            return;
        }
        let Some(call) = self.calls.all.get(&id) else { return };
        if call.sent.is_some() || call.in_inbox || self.must_wait(id, &call.kind) {
            return;
        }
        let mut request = call.request.clone();
        if let Some(deadline) = call.deadline {
            let left = deadline.saturating_duration_since(now).as_nanos();
            request.timeout_nano = i64::try_from(left).unwrap_or(i64::MAX).max(1);
        }
        let Some(stream) = self.send(&request) else { return };
        if let Some(call) = self.calls.all.get_mut(&id) {
            call.sent = Some(stream);
        }
        if self.node.sent.is_empty() {
            self.node.last_received = now;
        }
        self.node.sent.insert(stream, id);
        if !self.node.probing {
            self.node.probing = true;
            self.timers.insert((now + PROBE_AFTER, Timer::Probe));
        }
    }

    fn must_wait(&self, id: CallId, kind: &Kind) -> bool {
        let (sandbox, for_creates) = match kind {
            Kind::Create(sandbox) => (sandbox, false),
            Kind::Start(sandbox) => (sandbox, true),
            Kind::Stop(_) | Kind::Other => return false,
        };
        self.inbox.unread.contains_key(sandbox)
            || self.inbox.writing.contains(sandbox)
            || self.calls.of_sandbox(sandbox).take_while(|(other, _)| *other < id).any(|(_, call)| match call
                .kind
            {
                Kind::Stop(_) => true,
                Kind::Create(_) => for_creates,
                _ => false,
            })
    }

    /// Sends the calls of this sandbox that the end of another call releases.
    fn advance(&mut self, id: &SandboxId, now: Instant) {
        let waiting: Vec<CallId> = self.calls.of_sandbox(id).map(|(call, _)| call).collect();
        for call in waiting {
            self.send_if_due(call, now);
        }
    }

    /// Handles a closed shim connection. Its calls end, except stops, which take effect without a caller, too.
    pub(crate) fn connection_closed(&mut self, conn: ConnId, now: Instant) {
        // All calls are removed first: else the end of a CreateVM would release this shim's own StartVM.
        let mut touched = Vec::new();
        for id in self.calls.by_connection.remove(&conn).unwrap_or_default() {
            let Some(call) = self.calls.all.get_mut(&id) else { continue };
            if matches!(call.kind, Kind::Stop(_)) {
                call.caller = None;
                continue;
            }
            touched.extend(call.kind.id().cloned());
            self.remove(id);
        }
        for sandbox in touched {
            self.advance(&sandbox, now);
        }
    }

    /// Executes the timers that are due at `now`.
    pub(crate) fn tick(&mut self, now: Instant) {
        while let Some(&(at, timer)) = self.timers.first() {
            if at > now {
                return;
            }
            self.timers.pop_first();
            match timer {
                Timer::Deadline(id) => self.expire(id, now),
                Timer::StopGrace(id) => self.fall_back(id, now),
                Timer::Probe => self.probe(now),
                Timer::Hang => {
                    self.inbox.reading = None;
                    self.outputs.push_back(Output::Reconnect("the node does not answer"));
                }
            }
        }
    }

    fn expire(&mut self, id: CallId, now: Instant) {
        let Some(call) = self.calls.all.get_mut(&id) else { return };
        call.deadline = None;
        if matches!(call.kind, Kind::Stop(_)) {
            return; // The caller has left; the stop stays.
        }
        let why = match (call.sent, &self.node.state) {
            (Some(_), _) => "peerpod-node did not answer within the caller's deadline",
            (None, NodeState::Ready) => {
                "an earlier call of this sandbox did not end within the caller's deadline"
            }
            (None, _) => "peerpod-node was away until the caller's deadline; check that it runs",
        };
        let sandbox = call.kind.id().cloned();
        self.finish(id, call::status(code::DEADLINE_EXCEEDED, why));
        if let Some(sandbox) = sandbox {
            self.advance(&sandbox, now);
        }
    }
}

mod node;
mod state;
mod stop;
#[cfg(test)]
mod tests;
