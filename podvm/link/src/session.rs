//! The session: what survives a lost connection. A state machine without sockets and without a clock.
//!
//! Both ends number what they send, keep it until it is acknowledged, and send it again over the next transport
//! ([`Session::hello`], [`Session::answer`], [`Session::welcomed`]), so that a cut anywhere loses and doubles nothing.
//! Streams share the session; each has a window of credit, so that a reader that stands still stops its own stream
//! and nothing else. Control messages go first, then what is small (open, credit), then data, round robin; lines of the
//! guest's log only when nothing else waits.
//!
//! Bounds, whatever the peer does: unacknowledged records at most [`Limits::replay`] and a record; per stream at most
//! what its local side was allowed to hand over; streams [`Limits::streams`]; a control message under assembly
//! [`Limits::control_message`]. A peer that breaks the rules gives a [`Violation`]: the owner closes the transport and
//! calls [`Session::reset`].

mod bind;
mod lines;
mod log;
pub(crate) mod pool;
mod receive;
pub(crate) mod state;
mod stream;

use std::{
    collections::VecDeque,
    io::{IoSlice, IoSliceMut},
};

use bytes::Bytes;

pub use self::{
    bind::Joined,
    receive::{Event, Violation},
    state::{BadState, SessionState},
};
use self::{lines::Lines, log::Log, stream::Stream};
use crate::{
    endpoint::Role,
    ids::IdMap,
    record::{CloseReason, HEADER_LEN, Header, Kind, MORE, SessionId, StreamKind},
};

/// Bytes that may be under way in one direction of a stream before the receiver took some off.
pub const WINDOW: u32 = 256 << 10;

/// The receiver gives credit back in steps of this size: each is a record, a write and somebody woken at the other end.
const CREDIT_STEP: u32 = WINDOW / 4 * 3;

/// Received bytes after which an acknowledgement is sent when nothing else carries it; on bulk a credit does.
const ACK_STEP: usize = CREDIT_STEP as usize + (32 << 10);

/// What a waiting control message counts besides its bytes, so that empty ones are bounded too.
pub(crate) const CONTROL_COST: usize = 64;

/// Records without number that wait for the transport; beyond, no others are made.
const URGENT_MOST: usize = 512;

/// The longest payload we send: header and payload fill one TLS record, so that the receiver can use it as soon as
/// that is decrypted.
pub(crate) const CHUNK: usize = (16 << 10) - HEADER_LEN;

/// Bounds of one session.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Unacknowledged bytes kept; beyond, streams have no room. At least twice what is received before it is acknowledged.
    pub replay: usize,
    /// Bytes ready for the transport ahead of what it took.
    pub ahead: usize,
    /// Streams, ending ones included.
    pub streams: usize,
    /// The longest control message taken from the peer.
    pub control_message: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { replay: 1 << 20, ahead: 128 << 10, streams: 1024, control_message: 1 << 20 }
    }
}

/// One end of a session; see the module.
pub struct Session {
    role: Role,
    limits: Limits,
    /// The guest's own, or the one that the relay accepted.
    id: Option<SessionId>,
    /// The relay's side of the session; 0 = no handshake was finished.
    epoch: u64,
    /// What both ends speak; 0 = no handshake was finished.
    version: u16,
    log: Log,
    /// Records without number (Welcome, Ack, Ping, Pong) under way, and how much of them the transport took.
    urgent: Vec<u8>,
    urgent_taken: usize,
    want: Want,
    /// The highest number received in order.
    recv: u64,
    /// Bytes received since an acknowledgement was last put on the way.
    unacked: usize,
    control: VecDeque<Bytes>,
    /// Bytes of finished control messages since [`Session::control_done`] was asked.
    control_done: usize,
    assembly: Vec<u8>,
    lines: Lines,
    streams: IdMap<Stream>,
    /// Streams with an Open or a Credit to send.
    signals: VecDeque<u32>,
    /// Streams with data that has credit, or with a Close, to send.
    ready: VecDeque<u32>,
    /// The next stream that this end opens, and the least number that the peer may open.
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

/// What went over the session since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Sequenced records sent, each once.
    pub sent: u64,
    /// Sequenced records received.
    pub received: u64,
    /// Records sent again.
    pub replayed: u64,
}

impl Session {
    /// A fresh session. The guest names it; the relay's has no name until a guest says Hello.
    pub fn new(role: Role, id: Option<SessionId>, limits: Limits) -> Session {
        let (next_own, next_peer) = first_streams(role);
        Session {
            role,
            limits: Limits { replay: limits.replay.max(2 * ACK_STEP), ..limits },
            id,
            epoch: 0,
            version: 0,
            log: Log::new(),
            urgent: Vec::new(),
            urgent_taken: 0,
            want: Want::default(),
            recv: 0,
            unacked: 0,
            control: VecDeque::new(),
            control_done: 0,
            assembly: Vec::new(),
            lines: Lines::default(),
            streams: IdMap::default(),
            signals: VecDeque::new(),
            ready: VecDeque::new(),
            next_own,
            next_peer,
            counts: Counts::default(),
        }
    }

    /// Forgets streams, records and control messages and takes another name: the peer does not have the old session.
    pub fn reset(&mut self, id: Option<SessionId>) {
        let dropped: usize = self.control.iter().map(|message| message.len() + CONTROL_COST).sum();
        let fresh = Session::new(self.role, id, self.limits);
        let old = std::mem::replace(self, fresh);
        self.control_done = old.control_done + dropped;
        self.counts = old.counts;
    }

    /// What went over it so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// The session's name.
    pub fn id(&self) -> Option<SessionId> {
        self.id
    }

    /// Bytes kept for the peer: unacknowledged, or waiting for credit.
    pub fn buffered(&self) -> usize {
        self.log.len() + self.streams.values().map(Stream::waiting).sum::<usize>()
    }

    /// Bytes kept for a replay.
    pub fn unacknowledged(&self) -> usize {
        self.log.len()
    }

    /// Opens a stream to the peer; `None` when there are too many (try again when one has ended).
    pub fn open(&mut self, kind: StreamKind) -> Option<u32> {
        if self.streams.len() >= self.limits.streams {
            return None;
        }
        let id = self.next_own;
        self.next_own = id.checked_add(2)?;
        self.streams.insert(id, Stream::opened(kind));
        self.signals.push_back(id);
        Some(id)
    }

    /// Whether the peer knows dialled streams; false also before a handshake.
    pub fn speaks_dial(&self) -> bool {
        self.version >= 2
    }

    /// How many bytes a stream may be given now. 0 = wait for an acknowledgement or for credit; 0 also for a stream
    /// that has ended.
    pub fn room(&self, stream: u32) -> usize {
        match self.streams.get(&stream) {
            Some(stream) if stream.may_send() && stream.waiting() == 0 => {
                self.log_room().min(stream.credit as usize)
            }
            _ => 0,
        }
    }

    /// How many bytes a stream that is opened next may be given; 0 also when none can be opened.
    pub fn room_for_new(&self) -> usize {
        if self.streams.len() < self.limits.streams { self.log_room().min(WINDOW as usize) } else { 0 }
    }

    /// A last record may be longer than the room that is left, so that none is cut to a few bytes.
    fn log_room(&self) -> usize {
        let ahead = self.limits.ahead.saturating_sub(self.log.unsent());
        let replay = self.limits.replay.saturating_sub(self.log.len());
        if self.has_room() { ahead.min(replay).max(CHUNK) } else { 0 }
    }

    /// Sends bytes on a stream. All of them are taken, also beyond what [`Session::room`] says (a rewritten message is
    /// longer than what was read); what has no credit or room waits in the stream. Ignored when the stream has ended.
    pub fn send(&mut self, id: u32, mut data: &[u8]) {
        self.pump();
        // Straight to the log when nobody waits; this is the usual case.
        let straight = self.signals.is_empty() && self.ready.is_empty() && self.control.is_empty();
        let Some(stream) = self.streams.get_mut(&id).filter(|stream| stream.may_send()) else { return };
        if straight && stream.waiting() == 0 {
            while !data.is_empty() && stream.credit > 0 && self.log.fits(&self.limits) {
                let (part, rest) = data.split_at(data.len().min(CHUNK).min(stream.credit as usize));
                stream.credit -= part.len() as u32; // part is not longer than the credit
                self.log.push(Header { stream: id, ack: self.recv, ..Header::new(Kind::Data, 0) }, part);
                self.unacked = 0;
                data = rest;
            }
        }
        if !data.is_empty() {
            stream.append(data);
            if stream.may_queue() {
                self.ready.push_back(id);
            }
        }
    }

    /// Where the next bytes of the stream may be read to, so that they need not be copied there: at most `most` bytes,
    /// which is at most [`Session::room`]. Returns how many slices were filled; 0 = others wait, [`Session::send`] must
    /// be used. Nothing else may be asked of the session until [`Session::sent_in_place`] is.
    pub(crate) fn send_in_place<'a>(&'a mut self, most: usize, out: &mut [IoSliceMut<'a>]) -> usize {
        self.pump();
        let straight = self.signals.is_empty() && self.ready.is_empty() && self.control.is_empty();
        if straight { self.log.spaces(most, out) } else { 0 }
    }

    /// The first `bytes` of what [`Session::send_in_place`] gave are to be sent on this stream, which has room for them.
    pub(crate) fn sent_in_place(&mut self, id: u32, bytes: usize) {
        let ack = self.recv;
        match self.streams.get_mut(&id) {
            Some(stream) => {
                stream.credit = stream.credit.saturating_sub(bytes as u32);
                self.log.fill(Header { stream: id, ack, ..Header::new(Kind::Data, 0) }, bytes);
            }
            None => self.log.fill(Header::new(Kind::Data, 0), 0),
        }
        if bytes > 0 {
            self.unacked = 0;
        }
    }

    /// Ends a stream after what was sent on it. Ignored when it has ended.
    pub fn close(&mut self, id: u32, reason: CloseReason) {
        if let Some(stream) = self.streams.get_mut(&id)
            && stream.close(reason)
            && stream.may_queue()
        {
            self.ready.push_back(id);
        }
    }

    /// No more bytes come from this side of the stream; the other side's go on. Ignored when it has ended.
    pub fn finish(&mut self, id: u32) {
        if let Some(stream) = self.streams.get_mut(&id)
            && stream.finish()
            && stream.may_queue()
        {
            self.ready.push_back(id);
        }
    }

    /// The local end of a stream that the peer dialled is there: the peer may send.
    pub fn accept(&mut self, id: u32) {
        self.consumed(id, WINDOW as usize);
    }

    /// The local side took this many bytes of what the stream received: the peer may send so many more.
    pub fn consumed(&mut self, id: u32, bytes: usize) {
        if let Some(stream) = self.streams.get_mut(&id)
            && stream.consumed(bytes)
        {
            self.signals.push_back(id);
        }
    }

    /// Queues a control message. The owner bounds how many wait, with [`Session::control_done`].
    pub fn control(&mut self, message: Bytes) {
        self.control.push_back(message);
    }

    /// Bytes of control messages, and 64 for each, that left the queue since this was asked last.
    pub fn control_done(&mut self) -> usize {
        std::mem::take(&mut self.control_done)
    }

    /// Asks the peer for a sign of life.
    pub fn ping(&mut self) {
        self.want.ping = true;
    }

    /// Turns what waits into records, as far as there is room. To be called before [`Session::output`].
    pub fn pump(&mut self) {
        while self.has_room() {
            if !(self.pump_control() || self.pump_signal() || self.pump_stream()) {
                break;
            }
        }
        self.pump_urgent();
    }

    fn has_room(&self) -> bool {
        self.log.fits(&self.limits)
    }

    /// A numbered record; it also acknowledges.
    fn push(&mut self, header: Header, payload: &[u8]) {
        self.log.push(Header { ack: self.recv, ..header }, payload);
        self.unacked = 0;
    }

    fn pump_control(&mut self) -> bool {
        let Some(mut message) = self.control.pop_front() else { return false };
        let part = message.split_to(message.len().min(CHUNK));
        self.control_done += part.len();
        let mut header = Header::new(Kind::Control, 0);
        if message.is_empty() {
            self.control_done += CONTROL_COST;
        } else {
            header.flags = MORE;
            self.control.push_front(message);
        }
        self.push(header, &part);
        true
    }

    fn pump_signal(&mut self) -> bool {
        let Some(id) = self.signals.pop_front() else { return false };
        let Some(stream) = self.streams.get_mut(&id) else { return true };
        let kind = stream.open.take();
        let credit = stream.take_credit();
        if let Some(kind) = kind {
            let (payload, length) = kind.encode();
            self.push(Header { stream: id, ..Header::new(Kind::Open, 0) }, &payload[..length]);
        }
        if let Some(credit) = credit {
            self.push(Header { stream: id, ..Header::new(Kind::Credit, 0) }, &credit.to_be_bytes());
        }
        true
    }

    fn pump_stream(&mut self) -> bool {
        let Some(id) = self.ready.pop_front() else { return false };
        let Some(stream) = self.streams.get_mut(&id) else { return true };
        stream.queued = false;
        // An Open goes before anything else of its stream.
        debug_assert!(stream.open.is_none(), "signals are sent before data");
        let most = CHUNK.min(stream.credit as usize);
        let part = stream.next_part(most);
        if !part.is_empty() {
            let header = Header { stream: id, ack: self.recv, ..Header::new(Kind::Data, 0) };
            self.log.push(header, part);
            self.unacked = 0;
            let sent = part.len();
            stream.sent(sent);
        } else if stream.finish_due() {
            stream.sent_finish();
            self.log.push(Header { stream: id, ack: self.recv, ..Header::new(Kind::Finish, 0) }, &[]);
            self.unacked = 0;
        } else if let Some(reason) = stream.close_due() {
            let over = stream.sent_close();
            self.push(Header { stream: id, ..Header::new(Kind::Close, 0) }, &[reason as u8]);
            if over {
                self.streams.remove(&id);
            }
            return true;
        }
        if stream.may_queue() {
            self.ready.push_back(id);
        }
        true
    }

    fn pump_urgent(&mut self) {
        // A peer that asks and never reads: one answer waits, the rest is not written down.
        if self.urgent.len() - self.urgent_taken >= URGENT_MOST {
            return;
        }
        let mut put = |kind: Kind, recv: u64, unacked: &mut usize| {
            self.urgent.extend_from_slice(&Header { ack: recv, ..Header::new(kind, 0) }.encode());
            *unacked = 0;
        };
        let want = std::mem::take(&mut self.want);
        if want.ping {
            put(Kind::Ping, self.recv, &mut self.unacked);
        }
        if want.pong {
            put(Kind::Pong, self.recv, &mut self.unacked);
        }
        if want.ack && self.unacked >= ACK_STEP {
            put(Kind::Ack, self.recv, &mut self.unacked);
        }
    }

    /// What the transport should send now, in order; returns how many slices were filled (0 = nothing to send).
    pub fn output<'a>(&'a self, out: &mut [IoSlice<'a>]) -> usize {
        let begun = self.log.begun();
        let urgent = &self.urgent[self.urgent_taken..];
        if urgent.is_empty() {
            return self.log.unsent_slices(0, out);
        }
        // Records without number go between two others: after the one that was begun, before the rest.
        let mut filled = 0;
        for piece in [begun, urgent] {
            if !piece.is_empty() && filled < out.len() {
                out[filled] = IoSlice::new(piece);
                filled += 1;
            }
        }
        filled + self.log.unsent_slices(begun.len(), &mut out[filled..])
    }

    /// The transport took the first `n` bytes of what [`Session::output`] gave.
    pub fn wrote(&mut self, mut n: usize) {
        let urgent = self.urgent.len() - self.urgent_taken;
        if urgent > 0 {
            let begun = n.min(self.log.begun().len());
            self.counts.sent += self.log.wrote(begun);
            n -= begun;
            let taken = n.min(urgent);
            self.urgent_taken += taken;
            n -= taken;
            if self.urgent_taken == self.urgent.len() {
                self.urgent = Vec::new();
                self.urgent_taken = 0;
            }
        }
        self.counts.sent += self.log.wrote(n);
    }
}

impl Log {
    fn fits(&self, limits: &Limits) -> bool {
        self.unsent() < limits.ahead && self.len() < limits.replay
    }
}

/// The relay opens odd streams, the guest even ones.
fn first_streams(role: Role) -> (u32, u32) {
    match role {
        Role::Relay => (1, 2),
        Role::Guest => (2, 1),
    }
}

#[cfg(test)]
mod tests;
