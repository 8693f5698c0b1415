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

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque},
    time::{Duration, Instant},
};

use bytes::Bytes;
use peerpod_proto::ttrpc_frame::Request;

pub(crate) use self::state::QueueState;
use super::call::{self, Kind, code};
use crate::id::SandboxId;

/// Identifies a shim's connection; never reused in a process.
pub(crate) type ConnId = u64;

/// Receiver of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Caller {
    /// A shim's connection and the stream of its call.
    Shim { conn: ConnId, stream: u32 },
    /// A component of this process, with a number of its own.
    Internal(u64),
}

/// Work that the queue requests.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Output {
    /// Write this request to the node's connection.
    Send { stream: u32, body: Bytes },
    /// Send the answer (a response envelope) to its caller.
    Answer { caller: Caller, body: Bytes },
    /// Make the stop of this sandbox durable, then call [`Queue::inbox_written`].
    WriteInbox(SandboxId),
    /// Close the node's unusable connection and dial again.
    Reconnect(&'static str),
}

/// Limits of the queue.
#[derive(Debug, Clone)]
pub(crate) struct Limits {
    /// Waiting and running calls, over all connections.
    pub(crate) calls: usize,
    /// Waiting and running calls of one connection.
    pub(crate) calls_per_connection: usize,
    /// Waiting and running calls of one sandbox.
    pub(crate) calls_per_sandbox: usize,
    /// Bytes of requests that are kept for sending again.
    pub(crate) bytes: usize,
    /// Time limit of the node's answer to a StopVM before it goes to the inbox.
    pub(crate) stop_grace: Duration,
    /// Silence of a node that owes answers before a liveness check.
    pub(crate) probe_after: Duration,
    /// Time limit of the answer to that check.
    pub(crate) hang: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            calls: 8192,
            calls_per_connection: 256,
            calls_per_sandbox: 64,
            bytes: 64 << 20,
            stop_grace: Duration::from_millis(400),
            probe_after: Duration::from_secs(5),
            hang: Duration::from_secs(10),
        }
    }
}

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

#[derive(Debug, PartialEq, Eq)]
enum Node {
    Away,
    /// Connected, but the first ReadInbox is not answered yet.
    Greeting,
    Ready,
}

/// The queue. Each method may produce outputs, which [`Queue::take`] returns.
#[derive(Debug)]
pub(crate) struct Queue {
    limits: Limits,
    node: Node,
    calls: BTreeMap<CallId, Call>,
    next_call: CallId,
    lanes: HashMap<SandboxId, VecDeque<CallId>>,
    by_connection: HashMap<ConnId, HashSet<CallId>>,
    sent: HashMap<u32, CallId>,
    next_stream: u32,
    bytes: usize,
    timers: BTreeSet<(Instant, Timer)>,
    /// Stops in the inbox that no ReadInbox has covered yet, with the number of their write.
    unread: HashMap<SandboxId, u64>,
    /// Stops that are being written to the inbox.
    writing: HashSet<SandboxId>,
    writings: u64,
    /// ReadInbox in flight: its stream, and the number of the last write that it covers.
    reading: Option<(u32, u64)>,
    last_heard: Instant,
    probing: bool,
    outputs: VecDeque<Output>,
}

impl Queue {
    pub(crate) fn new(limits: Limits, now: Instant) -> Queue {
        Queue {
            limits,
            node: Node::Away,
            calls: BTreeMap::new(),
            next_call: 0,
            lanes: HashMap::new(),
            by_connection: HashMap::new(),
            sent: HashMap::new(),
            next_stream: 1,
            bytes: 0,
            timers: BTreeSet::new(),
            unread: HashMap::new(),
            writing: HashSet::new(),
            writings: 0,
            reading: None,
            last_heard: now,
            probing: false,
            outputs: VecDeque::new(),
        }
    }

    /// Returns the next output.
    pub(crate) fn take(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// Time of the next call to [`Queue::tick`].
    pub(crate) fn next_timer(&self) -> Option<Instant> {
        self.timers.first().map(|(at, _)| *at)
    }

    /// Number of waiting and running calls.
    pub(crate) fn len(&self) -> usize {
        self.calls.len()
    }

    /// Whether the node is connected and has read the inbox.
    pub(crate) fn node_is_ready(&self) -> bool {
        self.node == Node::Ready
    }

    /// Adds a call.
    pub(crate) fn accept(&mut self, caller: Caller, kind: Kind, request: Request, now: Instant) {
        if let Kind::Stop(id) = &kind {
            let id = id.clone();
            self.cancel_before(&id, CallId::MAX, false);
            if self.unread.contains_key(&id) {
                // The same stop is durable already, and no later call has reached the node.
                self.answer_to(Some(caller), call::done());
                return;
            }
        }
        if matches!(caller, Caller::Internal(_)) && self.node != Node::Ready {
            self.answer_to(Some(caller), call::status(code::UNAVAILABLE, "peerpod-node is away"));
            return;
        }
        if let Some(full) = self.full(&caller, &kind, request.payload.len()) {
            self.answer_to(Some(caller), call::status(code::RESOURCE_EXHAUSTED, &full));
            return;
        }
        let call = self.insert(Some(caller), kind, request, now);
        let Some(entry) = self.calls.get(&call) else { return };
        if matches!(entry.kind, Kind::Stop(_)) {
            self.timers.insert((now + self.limits.stop_grace, Timer::StopGrace(call)));
            if self.node != Node::Ready {
                self.fall_back(call);
                return;
            }
        }
        self.send_if_due(call, now);
    }

    fn full(&self, caller: &Caller, kind: &Kind, size: usize) -> Option<String> {
        let of_connection = match caller {
            Caller::Shim { conn, .. } => self.by_connection.get(conn).map_or(0, HashSet::len),
            Caller::Internal(_) => 0,
        };
        // A refused stop would leak a VM: stops have places of their own.
        let stop = matches!(kind, Kind::Stop(_));
        if of_connection >= self.limits.calls_per_connection * if stop { 2 } else { 1 } {
            return Some(format!(
                "{of_connection} calls of this connection wait for the node; wait for their answers"
            ));
        }
        if stop {
            return None;
        }
        let of_sandbox = kind.id().and_then(|id| self.lanes.get(id)).map_or(0, VecDeque::len);
        if of_sandbox >= self.limits.calls_per_sandbox {
            return Some(format!(
                "{of_sandbox} calls of this sandbox wait for the node; wait for their answers"
            ));
        }
        if self.calls.len() >= self.limits.calls || self.bytes + size > self.limits.bytes {
            return Some(format!(
                "{} calls of {} bytes wait for peerpod-node, which is the limit; check that it runs",
                self.calls.len(),
                self.bytes
            ));
        }
        None
    }

    fn insert(&mut self, caller: Option<Caller>, kind: Kind, request: Request, now: Instant) -> CallId {
        let id = self.next_call;
        self.next_call += 1;
        let deadline = u64::try_from(request.timeout_nano)
            .ok()
            .filter(|&nanos| nanos > 0)
            .and_then(|nanos| now.checked_add(Duration::from_nanos(nanos)));
        if let Some(at) = deadline {
            self.timers.insert((at, Timer::Deadline(id)));
        }
        if let Some(sandbox) = kind.id() {
            self.lanes.entry(sandbox.clone()).or_default().push_back(id);
        }
        if let Some(Caller::Shim { conn, .. }) = caller {
            self.by_connection.entry(conn).or_default().insert(id);
        }
        let size = request.payload.len();
        self.bytes += size;
        let call = Call { kind, request, size, caller, deadline, sent: None, in_inbox: false };
        self.calls.insert(id, call);
        id
    }

    /// Removes a call; a later answer to it is dropped.
    fn remove(&mut self, id: CallId) -> Option<Call> {
        let call = self.calls.remove(&id)?;
        self.bytes = self.bytes.saturating_sub(call.size);
        if let Some(stream) = call.sent {
            self.sent.remove(&stream);
        }
        if let Some(at) = call.deadline {
            self.timers.remove(&(at, Timer::Deadline(id)));
        }
        if let Some(sandbox) = call.kind.id()
            && let Some(lane) = self.lanes.get_mut(sandbox)
        {
            lane.retain(|&other| other != id);
            if lane.is_empty() {
                self.lanes.remove(sandbox);
            }
        }
        if let Some(Caller::Shim { conn, .. }) = call.caller
            && let Some(of_connection) = self.by_connection.get_mut(&conn)
        {
            of_connection.remove(&id);
            if of_connection.is_empty() {
                self.by_connection.remove(&conn);
            }
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
        if self.node != Node::Ready {
            return;
        }
        let Some(call) = self.calls.get(&id) else { return };
        if call.sent.is_some() || call.in_inbox || self.must_wait(id, &call.kind) {
            return;
        }
        let mut request = call.request.clone();
        if let Some(deadline) = call.deadline {
            let left = deadline.saturating_duration_since(now).as_nanos();
            request.timeout_nano = i64::try_from(left).unwrap_or(i64::MAX).max(1);
        }
        let Some(stream) = self.send(&request) else { return };
        if let Some(call) = self.calls.get_mut(&id) {
            call.sent = Some(stream);
        }
        if self.sent.is_empty() {
            self.last_heard = now;
        }
        self.sent.insert(stream, id);
        if !self.probing {
            self.probing = true;
            self.timers.insert((now + self.limits.probe_after, Timer::Probe));
        }
    }

    fn must_wait(&self, id: CallId, kind: &Kind) -> bool {
        let (sandbox, for_creates) = match kind {
            Kind::Create(sandbox) => (sandbox, false),
            Kind::Start(sandbox) => (sandbox, true),
            Kind::Stop(_) | Kind::Other => return false,
        };
        self.unread.contains_key(sandbox)
            || self.writing.contains(sandbox)
            || self.lanes.get(sandbox).into_iter().flatten().take_while(|other| **other < id).any(|other| {
                self.calls.get(other).is_some_and(|call| match call.kind {
                    Kind::Stop(_) => true,
                    Kind::Create(_) => for_creates,
                    _ => false,
                })
            })
    }

    /// Sends the calls of this sandbox that the end of another call releases.
    fn advance(&mut self, id: &SandboxId, now: Instant) {
        let waiting: Vec<CallId> = self.lanes.get(id).into_iter().flatten().copied().collect();
        for call in waiting {
            self.send_if_due(call, now);
        }
    }

    /// Handles a closed shim connection. Its calls end, except stops, which take effect without a caller, too.
    pub(crate) fn connection_closed(&mut self, conn: ConnId, now: Instant) {
        // All calls are removed before others advance: else the end of a CreateVM would release this shim's own
        // StartVM.
        let mut touched = Vec::new();
        for id in self.by_connection.remove(&conn).unwrap_or_default() {
            let Some(call) = self.calls.get_mut(&id) else { continue };
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
                Timer::StopGrace(id) => self.fall_back(id),
                Timer::Probe => self.probe(now),
                Timer::Hang => {
                    self.reading = None;
                    self.outputs.push_back(Output::Reconnect("the node does not answer"));
                }
            }
        }
    }

    fn expire(&mut self, id: CallId, now: Instant) {
        let Some(call) = self.calls.get_mut(&id) else { return };
        call.deadline = None;
        if matches!(call.kind, Kind::Stop(_)) {
            return; // The caller has left; the stop stays.
        }
        let why = match (call.sent, &self.node) {
            (Some(_), _) => "peerpod-node did not answer within the caller's deadline",
            (None, Node::Ready) => "an earlier call of this sandbox did not end within the caller's deadline",
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
