//! Implements the session: the state that survives a lost connection. A state machine without sockets and clock.
//!
//! Both ends number their records, keep them until acknowledged, and send them again over the next transport
//! ([`Session::hello`], [`Session::answer`], [`Session::welcomed`]). No cut loses or duplicates a record.
//!
//! Streams share the session. Each has a credit window, so that a stalled reader stops only its own stream. Control
//! messages go first, then small records, then data, round robin, then log records.
//!
//! Bounds, independent of the peer: [`REPLAY`] plus one record of unacknowledged bytes, the bytes that
//! the local side may pass per stream, [`SessionLimits::streams`], and [`SessionLimits::control_message`]. A peer that
//! breaks the rules causes a [`Violation`]: the owner closes the transport and calls [`Session::reset`].

mod bind;
mod lines;
mod log;
pub(crate) mod pool;
mod receive;
pub(crate) mod state;
mod stream;

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};

use bytes::Bytes;
use serde::{Deserialize, Serialize};

pub use self::bind::Joined;
use self::lines::Lines;
use self::log::Log;
pub use self::receive::{Received, Violation};
pub use self::state::{BadState, SessionState};
use self::stream::Stream;
use crate::endpoint::Role;
use crate::ids::IdMap;
use crate::record::{CloseReason, HEADER_LEN, MORE, RecordHeader, RecordKind, SessionId, StreamKind};

/// Most bytes in flight in one direction of a stream before the receiver returns credit.
pub const WINDOW: u32 = 256 << 10;

/// Step in which the receiver returns credit: each return costs a record, a write and a wake-up at the other end.
const CREDIT_STEP: u32 = WINDOW / 4 * 3;

/// Received bytes after which an acknowledgement is sent if no other record (as Credit in bulk transfers) carries it.
const ACK_STEP: usize = CREDIT_STEP as usize + (32 << 10);

/// Cost in bytes of a waiting control message besides its contents, so that empty ones are bounded too.
pub(crate) const CONTROL_COST: usize = 64;

/// Most bytes of unnumbered records that wait for the transport; at this limit no more are made.
const URGENT_MOST: usize = 512;

/// Longest payload that this program sends. With its header it fills one TLS record, and needs no other to be used.
pub(crate) const CHUNK: usize = (16 << 10) - HEADER_LEN;

/// Unacknowledged bytes that a session keeps for a replay; above this, streams have no room. At least twice the bytes
/// before an acknowledgement.
pub const REPLAY: usize = 1 << 20;

/// Most bytes ready for the transport that it has not taken, and so the most that a control message waits behind.
const AHEAD: usize = 128 << 10;

/// Limits of one session.
#[derive(Clone, Copy, Debug)]
pub struct SessionLimits {
    /// Most streams, ending ones included.
    pub streams: usize,
    /// Longest control message accepted from the peer, in bytes.
    pub control_message: usize,
}

impl Default for SessionLimits {
    fn default() -> Self {
        SessionLimits { streams: 1024, control_message: 1 << 20 }
    }
}

/// One end of a session; see the module documentation.
pub struct Session {
    role: Role,
    limits: SessionLimits,
    /// The guest's own session id, or the one that the relay accepted.
    id: Option<SessionId>,
    /// Epoch of the relay's side of the session; 0 = no handshake has finished.
    epoch: u64,
    /// Protocol version in use; 0 = no handshake has finished.
    version: u16,
    log: Log,
    urgent: Urgent,
    inbound: Inbound,
    control: ControlQueue,
    lines: Lines,
    streams: IdMap<Stream>,
    turns: Turns,
    /// Next stream that this end opens, and lowest stream that the peer may open.
    next_own: u32,
    next_peer: u32,
    counts: Counts,
}

#[derive(Clone, Copy, Default)]
struct Want {
    ack: bool,
    ping: bool,
    pong: bool,
}

/// Unnumbered records (Welcome, Ack, Ping, Pong).
#[derive(Default)]
struct Urgent {
    bytes: Vec<u8>,
    /// Number of bytes that the transport took.
    taken: usize,
    want: Want,
}

impl Urgent {
    fn rest(&self) -> &[u8] {
        &self.bytes[self.taken..]
    }

    fn wrote(&mut self, bytes: usize) {
        self.taken += bytes;
        if self.taken == self.bytes.len() {
            (self.bytes, self.taken) = (Vec::new(), 0);
        }
    }

    /// Encodes the wanted records, each of which acknowledges the received ones.
    fn schedule(&mut self, inbound: &mut Inbound) {
        // A peer may ping and never read: above the limit, no further answers are queued.
        if self.rest().len() >= URGENT_MOST {
            return;
        }
        let want = std::mem::take(&mut self.want);
        let kinds =
            [(want.ping, RecordKind::Ping), (want.pong, RecordKind::Pong), (want.ack, RecordKind::Ack)];
        for (_, kind) in kinds.into_iter().filter(|(wanted, _)| *wanted) {
            // Another record may have carried the acknowledgement.
            if kind != RecordKind::Ack || inbound.unacked >= ACK_STEP {
                let header = RecordHeader { ack: inbound.acknowledge(), ..RecordHeader::new(kind, 0) };
                self.bytes.extend_from_slice(&header.encode());
            }
        }
    }
}

#[derive(Default)]
struct Inbound {
    /// Highest sequence number received in order.
    recv: u64,
    /// Bytes received since the last acknowledgement was queued.
    unacked: usize,
    /// Control message that is not complete.
    assembly: Vec<u8>,
}

impl Inbound {
    /// Returns the number to acknowledge in the next record.
    fn acknowledge(&mut self) -> u64 {
        self.unacked = 0;
        self.recv
    }
}

#[derive(Default)]
struct ControlQueue {
    messages: VecDeque<Bytes>,
    /// Bytes of finished messages since the last [`Session::control_done`].
    done: usize,
}

impl ControlQueue {
    /// Returns the next part, and whether it is the last one of its message.
    fn next_part(&mut self) -> Option<(Bytes, bool)> {
        let mut message = self.messages.pop_front()?;
        let part = message.split_to(message.len().min(CHUNK));
        let last = message.is_empty();
        self.done += part.len() + if last { CONTROL_COST } else { 0 };
        if !last {
            self.messages.push_front(message);
        }
        Some((part, last))
    }

    fn waiting(&self) -> usize {
        self.messages.iter().map(|message| message.len() + CONTROL_COST).sum()
    }
}

/// Streams with records to send, in their order. Ended streams stay listed until their turn.
#[derive(Default)]
struct Turns {
    /// Streams with an Open or a Credit.
    signals: VecDeque<u32>,
    /// Streams with a Finish, a Close, or data that has credit.
    ready: VecDeque<u32>,
}

/// Records of the session since its creation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Sequenced records sent, each counted once.
    pub sent: u64,
    /// Sequenced records received.
    pub received: u64,
    /// Records sent again.
    pub replayed: u64,
}

impl Session {
    /// Returns a fresh session. The guest chooses the id; the relay's session has none until a guest sends Hello.
    pub fn new(role: Role, id: Option<SessionId>, limits: SessionLimits) -> Session {
        // The relay opens odd streams, the guest even ones.
        let (next_own, next_peer) = if role == Role::Relay { (1, 2) } else { (2, 1) };
        Session {
            role,
            limits,
            id,
            epoch: 0,
            version: 0,
            log: Log::new(),
            urgent: Urgent::default(),
            inbound: Inbound::default(),
            control: ControlQueue::default(),
            lines: Lines::default(),
            streams: IdMap::default(),
            turns: Turns::default(),
            next_own,
            next_peer,
            counts: Counts::default(),
        }
    }

    /// Drops streams, records and control messages and takes another id: the peer no longer holds the old session.
    pub fn reset(&mut self, id: Option<SessionId>) {
        let fresh = Session::new(self.role, id, self.limits);
        let old = std::mem::replace(self, fresh);
        self.control.done = old.control.done + old.control.waiting();
        self.counts = old.counts;
    }

    /// Returns the counters so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Returns the session id.
    pub fn id(&self) -> Option<SessionId> {
        self.id
    }

    /// Returns the number of bytes kept for the peer: unacknowledged, or waiting for credit.
    pub fn buffered(&self) -> usize {
        self.log.len() + self.streams.values().map(Stream::waiting).sum::<usize>()
    }

    /// Returns the number of bytes kept for a replay.
    pub fn unacknowledged(&self) -> usize {
        self.log.len()
    }

    /// Opens a stream to the peer; returns `None` if there are too many (try again after one has ended).
    pub fn open(&mut self, kind: StreamKind) -> Option<u32> {
        if self.streams.len() >= self.limits.streams {
            return None;
        }
        let id = self.next_own;
        self.next_own = id.checked_add(2)?;
        self.streams.insert(id, Stream::opened(kind));
        self.turns.signals.push_back(id);
        Some(id)
    }

    /// Returns whether the peer supports dialled streams; false before a handshake.
    pub fn speaks_dial(&self) -> bool {
        self.version >= 2
    }

    /// Returns the number of bytes that a stream takes now. 0 = it waits, or has ended.
    pub fn room(&self, stream: u32) -> usize {
        match self.streams.get(&stream) {
            Some(stream) if stream.may_send() && stream.waiting() == 0 => {
                self.log_room().min(stream.kept.credit as usize)
            }
            _ => 0,
        }
    }

    /// Returns the number of bytes that the next opened stream takes; 0 if none can be opened.
    pub fn room_for_new(&self) -> usize {
        if self.streams.len() < self.limits.streams { self.log_room().min(WINDOW as usize) } else { 0 }
    }

    /// Returns the number of bytes that the log takes. The last record may exceed the room, so that none is tiny.
    fn log_room(&self) -> usize {
        let ahead = AHEAD.saturating_sub(self.log.unsent());
        let replay = REPLAY.saturating_sub(self.log.len());
        if self.log.fits() { ahead.min(replay).max(CHUNK) } else { 0 }
    }

    /// Sends bytes on a stream. Takes all of them, also beyond [`Session::room`] (a rewritten message is longer than
    /// the original); bytes without credit or room wait in the stream. Ignored after the stream has ended.
    pub fn send(&mut self, id: u32, mut data: &[u8]) {
        self.schedule();
        // Straight to the log if no other data waits; this is the usual case.
        let straight = self.is_idle();
        let Some(stream) = self.streams.get_mut(&id).filter(|stream| stream.may_send()) else { return };
        if straight && stream.waiting() == 0 {
            while !data.is_empty() && stream.kept.credit > 0 && self.log.fits() {
                let (part, rest) = data.split_at(data.len().min(CHUNK).min(stream.kept.credit as usize));
                stream.kept.credit -= part.len() as u32; // part is not longer than the credit
                let header = RecordHeader::of_stream(RecordKind::Data, id);
                self.log.push(RecordHeader { ack: self.inbound.acknowledge(), ..header }, part);
                data = rest;
            }
        }
        if !data.is_empty() {
            stream.append(data);
            if stream.may_queue() {
                self.turns.ready.push_back(id);
            }
        }
    }

    /// Fills `out` with the places in the log for the next bytes of a stream, so that a read needs no copy. They have
    /// at most `most` bytes, which must not exceed [`Session::room`]. Returns the number of slices filled; 0 = other
    /// data waits, and the caller must use [`Session::send`]. The next call must be [`Session::sent_in_place`].
    pub(crate) fn send_in_place<'a>(&'a mut self, most: usize, out: &mut [IoSliceMut<'a>]) -> usize {
        self.schedule();
        if self.is_idle() { self.log.spaces(most, out) } else { 0 }
    }

    /// Sends the first `bytes` of the slices from [`Session::send_in_place`] on this stream, which has room for them.
    pub(crate) fn sent_in_place(&mut self, id: u32, bytes: usize) {
        match self.streams.get_mut(&id) {
            Some(stream) => {
                stream.kept.credit = stream.kept.credit.saturating_sub(bytes as u32);
                let header = RecordHeader::of_stream(RecordKind::Data, id);
                let ack = if bytes > 0 { self.inbound.acknowledge() } else { self.inbound.recv };
                self.log.fill(RecordHeader { ack, ..header }, bytes);
            }
            None => self.log.fill(RecordHeader::new(RecordKind::Data, 0), 0),
        }
    }

    /// Ends a stream after the bytes sent on it. Ignored after the stream has ended.
    pub fn close(&mut self, id: u32, reason: CloseReason) {
        self.end_with(id, |stream| stream.close(reason));
    }

    /// Ends this end's direction of a stream; the peer may still send. Ignored after the stream has ended.
    pub fn finish(&mut self, id: u32) {
        self.end_with(id, Stream::finish);
    }

    fn end_with(&mut self, id: u32, request: impl FnOnce(&mut Stream) -> bool) {
        if self.streams.get_mut(&id).is_some_and(|stream| request(stream) && stream.may_queue()) {
            self.turns.ready.push_back(id);
        }
    }

    /// Accepts a stream that the peer dialled: the local end is established, so the peer may send.
    pub fn accept(&mut self, id: u32) {
        self.consumed(id, WINDOW as usize);
    }

    /// Counts bytes that the local side took off the stream: the peer may send as many more.
    pub fn consumed(&mut self, id: u32, bytes: usize) {
        if self.streams.get_mut(&id).is_some_and(|stream| stream.consumed(bytes)) {
            self.turns.signals.push_back(id);
        }
    }

    /// Queues a control message. The owner bounds the waiting ones with [`Session::control_done`].
    pub fn control(&mut self, message: Bytes) {
        self.control.messages.push_back(message);
    }

    /// Returns the bytes of control messages, plus 64 for each, that left the queue since the last call.
    pub fn control_done(&mut self) -> usize {
        std::mem::take(&mut self.control.done)
    }

    /// Queues a Ping to the peer.
    pub fn ping(&mut self) {
        self.urgent.want.ping = true;
    }

    /// Turns waiting data into records, as far as there is room. Call it before [`Session::output`].
    pub fn schedule(&mut self) {
        while self.log.fits() {
            if !(self.schedule_control() || self.schedule_signal() || self.schedule_stream()) {
                break;
            }
        }
        self.urgent.schedule(&mut self.inbound);
    }

    /// Whether no data but log records waits.
    fn is_idle(&self) -> bool {
        self.turns.signals.is_empty() && self.turns.ready.is_empty() && self.control.messages.is_empty()
    }

    /// Appends a numbered record, which also carries an acknowledgement.
    fn push(&mut self, header: RecordHeader, payload: &[u8]) {
        self.log.push(RecordHeader { ack: self.inbound.acknowledge(), ..header }, payload);
    }

    fn schedule_control(&mut self) -> bool {
        let Some((part, last)) = self.control.next_part() else { return false };
        let flags = if last { 0 } else { MORE };
        self.push(RecordHeader { flags, ..RecordHeader::new(RecordKind::Control, 0) }, &part);
        true
    }

    fn schedule_signal(&mut self) -> bool {
        let Some(id) = self.turns.signals.pop_front() else { return false };
        let Some(stream) = self.streams.get_mut(&id) else { return true };
        let kind = stream.open.take();
        let credit = stream.take_credit();
        if let Some(kind) = kind {
            let (payload, length) = kind.encode();
            self.push(RecordHeader::of_stream(RecordKind::Open, id), &payload[..length]);
        }
        if let Some(credit) = credit {
            self.push(RecordHeader::of_stream(RecordKind::Credit, id), &credit.to_be_bytes());
        }
        true
    }

    fn schedule_stream(&mut self) -> bool {
        let Some(id) = self.turns.ready.pop_front() else { return false };
        let Some(stream) = self.streams.get_mut(&id) else { return true };
        stream.queued = false;
        // An Open precedes all other records of its stream.
        debug_assert!(stream.open.is_none(), "signals are sent before data");
        let header = |kind| RecordHeader::of_stream(kind, id);
        let most = CHUNK.min(stream.kept.credit as usize);
        let part = stream.next_part(most);
        if !part.is_empty() {
            let ack = self.inbound.acknowledge();
            self.log.push(RecordHeader { ack, ..header(RecordKind::Data) }, part);
            let sent = part.len();
            stream.sent(sent);
        } else if stream.finish_due() {
            stream.kept.finish_sent = true;
            let ack = self.inbound.acknowledge();
            self.log.push(RecordHeader { ack, ..header(RecordKind::Finish) }, &[]);
        } else if let Some(reason) = stream.close_due() {
            stream.kept.close_sent = true;
            let over = stream.kept.ended;
            self.push(header(RecordKind::Close), &[reason as u8]);
            if over {
                self.streams.remove(&id);
            }
            return true;
        }
        if stream.may_queue() {
            self.turns.ready.push_back(id);
        }
        true
    }

    /// Fills `out` with the bytes to send now, in order; returns the number of slices filled (0 = none).
    pub fn output<'a>(&'a self, out: &mut [IoSlice<'a>]) -> usize {
        let begun = self.log.begun();
        let urgent = self.urgent.rest();
        if urgent.is_empty() {
            return self.log.unsent_slices(0, out);
        }
        // Unnumbered records go between two others: after the one that has begun, before the rest.
        let mut filled = 0;
        for piece in [begun, urgent] {
            if !piece.is_empty() && filled < out.len() {
                out[filled] = IoSlice::new(piece);
                filled += 1;
            }
        }
        filled + self.log.unsent_slices(begun.len(), &mut out[filled..])
    }

    /// Counts the first `n` bytes of [`Session::output`] as taken by the transport.
    pub fn wrote(&mut self, mut n: usize) {
        let urgent = self.urgent.rest().len();
        if urgent > 0 {
            let begun = n.min(self.log.begun().len());
            self.counts.sent += self.log.wrote(begun);
            n -= begun;
            let taken = n.min(urgent);
            self.urgent.wrote(taken);
            n -= taken;
        }
        self.counts.sent += self.log.wrote(n);
    }
}

impl Log {
    fn fits(&self) -> bool {
        self.unsent() < AHEAD && self.len() < REPLAY
    }
}

#[cfg(test)]
mod tests;
