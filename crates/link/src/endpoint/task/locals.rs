//! Handles the local sockets of the task.

use std::io::IoSliceMut;
use std::task::{Context, Poll};

use tokio::time::{Duration, Instant};
use tracing::debug;

use super::{LINGER, LOOK, Scratch, Task};
use crate::endpoint::local::{Local, READ, SLICES};
use crate::endpoint::{Handler, Role};
use crate::ids::IdMap;
use crate::record::{CloseReason, StreamKind};
use crate::session::CHUNK;
use crate::session::pool::{self, Size};

/// Records of at least this size get a slice of their own.
const STRAIGHT: usize = 2 << 10;

/// A read of this size indicates that more bytes follow.
const BULK: usize = 64 << 10;

/// Guest: time limit for dialling the agent.
const DIAL: Duration = Duration::from_secs(10);

/// Most pieces of one read in place; `READ` needs one fewer.
const IN_PLACE: usize = READ.div_ceil(CHUNK) + 1;

/// Consecutive records for one connection, gathered into one write.
#[derive(Default)]
pub(super) struct Batch<'a> {
    at: Option<usize>,
    /// Stream bytes that these pieces came from.
    received: usize,
    pieces: [Piece<'a>; SLICES],
    filled: usize,
}

#[derive(Clone, Copy)]
enum Piece<'a> {
    /// Unchanged bytes in the transport's buffer.
    Straight(&'a [u8]),
    /// Filter output in the scratch buffer: its start and end.
    Made(usize, usize),
}

impl Default for Piece<'_> {
    fn default() -> Self {
        Piece::Straight(&[])
    }
}

impl<'a> Batch<'a> {
    /// Adds a piece; the caller ensures that there is room, see [`Task::data`].
    fn add(&mut self, piece: Piece<'a>) {
        if let Some(free) = self.pieces.get_mut(self.filled) {
            *free = piece;
            self.filled += 1;
        }
    }

    /// Adds filter output at the end of the scratch buffer.
    fn made(&mut self, from: usize, to: usize) {
        match self.pieces[..self.filled].last_mut() {
            _ if from == to => {}
            Some(Piece::Made(_, end)) => *end = to,
            _ => self.add(Piece::Made(from, to)),
        }
    }
}

#[derive(Default)]
pub(super) struct Locals {
    pub(super) slots: Vec<Option<Local>>,
    pub(super) by_stream: IdMap<usize>,
    /// Number of open connections, and the number last reported to the handler.
    pub(super) open: usize,
    pub(super) reported: usize,
    /// Bytes that wait for local sockets, as of the last round.
    pub(super) waiting: usize,
    /// Time of the next check of connections with a deadline, or with unread bytes and no link; `None` without such.
    pub(super) look_at: Option<Instant>,
    /// Connection that is read first in this round.
    turn: usize,
}

impl Locals {
    pub(super) fn insert(&mut self, local: Local) -> usize {
        if local.is_timed() {
            self.look_soon();
        }
        self.open += 1;
        match self.slots.iter().position(Option::is_none) {
            Some(free) if self.open <= self.slots.len() => {
                self.slots[free] = Some(local);
                free
            }
            _ => {
                self.slots.push(Some(local));
                self.slots.len() - 1
            }
        }
    }

    fn look_soon(&mut self) {
        self.look_at.get_or_insert_with(|| Instant::now() + LOOK);
    }

    fn get_mut(&mut self, at: usize) -> Option<&mut Local> {
        self.slots.get_mut(at).and_then(Option::as_mut)
    }

    fn remove(&mut self, at: usize) -> Option<Local> {
        let local = self.slots.get_mut(at).and_then(Option::take)?;
        self.open -= 1;
        if let Some(stream) = local.stream {
            self.by_stream.remove(&stream);
        }
        Some(local)
    }
}

impl<H: Handler> Task<H> {
    /// Closes a connection; its stream, if any, ends after the bytes already read.
    fn remove(&mut self, at: usize, reason: CloseReason) {
        if let Some(stream) = self.locals.remove(at).and_then(|local| local.stream) {
            self.session.close(stream, reason);
        }
    }

    pub(super) fn opened(&mut self, stream: u32) {
        if self.role == Role::Relay || self.locals.open >= self.limits.connections {
            debug!(stream, "stream refused");
            return self.session.close(stream, CloseReason::Refused);
        }
        let (filter, dial) = (self.handler.filter(), self.handler.dial());
        let deadline = Instant::now() + DIAL;
        let at = self.locals.insert(Local::dialling(dial, deadline, filter, stream));
        self.locals.by_stream.insert(stream, at);
    }

    /// Handles the loss of a connection's stream, which `by_stream` has no more. The filter decides about the socket.
    pub(super) fn stream_lost(&mut self, at: usize, replaced: bool) {
        let Some(local) = self.locals.get_mut(at) else { return };
        (local.stream, local.owed) = (None, 0); // no peer waits for the credit
        let (mut again, mut answers) = (bytes::BytesMut::new(), bytes::BytesMut::new());
        let stays = local.filter.stream_lost(replaced.then_some(&mut again), &mut answers);
        local.queue(&answers);
        if !stays {
            local.leaving = Some(Instant::now() + LINGER);
            self.locals.look_soon();
        } else if !again.is_empty() {
            self.give_peer(at, &again);
        }
    }

    /// Handles received stream bytes; gathers them while they belong to the same connection.
    pub(super) fn data<'a>(
        &mut self,
        cx: &mut Context<'_>,
        scratch: &mut Scratch,
        batch: &mut Batch<'a>,
        stream: u32,
        data: &'a [u8],
    ) {
        self.stats.bytes_from_peer += data.len() as u64;
        let Some(at) = self.locals.by_stream.get(&stream).copied() else { return };
        if batch.at != Some(at) || batch.filled == SLICES {
            self.deliver(cx, scratch, batch);
            batch.at = Some(at);
        }
        let Some(local) = self.locals.get_mut(at) else { return };
        batch.received += data.len();
        if data.len() >= STRAIGHT && local.filter.passes_from_peer(data) {
            return batch.add(Piece::Straight(data));
        }
        let from = scratch.local.len();
        local.filter.from_peer(data, &mut scratch.peer, &mut scratch.local);
        batch.made(from, scratch.local.len());
    }

    pub(super) fn deliver(&mut self, cx: &mut Context<'_>, scratch: &mut Scratch, batch: &mut Batch<'_>) {
        let Some(at) = batch.at.take() else { return };
        let received = std::mem::take(&mut batch.received);
        let filled = std::mem::take(&mut batch.filled);
        if let Some(local) = self.locals.get_mut(at) {
            let mut slices: [&[u8]; SLICES] = [&[]; SLICES];
            for (slice, piece) in slices.iter_mut().zip(&batch.pieces[..filled]) {
                *slice = match *piece {
                    Piece::Straight(data) => data,
                    Piece::Made(from, to) => &scratch.local[from..to],
                };
            }
            local.write_received(cx, &slices[..filled], received);
            if let Some(stream) = local.stream {
                self.session.consumed(stream, local.take_credit());
                if !scratch.peer.is_empty() {
                    self.session.send(stream, &scratch.peer);
                }
            }
        }
        scratch.local.clear();
        scratch.peer.clear();
    }

    pub(super) fn poll_locals(&mut self, cx: &mut Context<'_>, scratch: &mut Scratch) -> bool {
        let (mut moved, many) = (false, self.locals.slots.len());
        self.locals.waiting = 0;
        self.locals.turn = if self.locals.turn + 1 < many { self.locals.turn + 1 } else { 0 };
        for at in (self.locals.turn..many).chain(0..self.locals.turn) {
            moved |= self.poll_local(at, cx, scratch);
            self.locals.waiting += self.locals.slots[at].as_ref().map_or(0, Local::waiting);
        }
        moved
    }

    fn poll_local(&mut self, at: usize, cx: &mut Context<'_>, scratch: &mut Scratch) -> bool {
        let Some(local) = self.locals.get_mut(at) else { return false };
        let mut moved = match local.poll_dial(cx) {
            Ok(opened) => opened,
            Err(error) => {
                debug!(%error, "the local end cannot be opened");
                self.remove(at, CloseReason::Refused);
                return true;
            }
        };
        if local.flush(cx) {
            moved = true;
            let credit = local.take_credit();
            if let Some(stream) = local.stream {
                self.session.consumed(stream, credit);
            }
        }
        if local.is_done() {
            self.remove(at, CloseReason::Closed);
            return true;
        }
        if local.filter.poll(cx, &mut scratch.peer, &mut scratch.local) {
            moved = true;
            self.give_filtered(at, cx, scratch);
        }
        self.poll_local_read(at, cx, scratch) || moved
    }

    fn poll_local_read(&mut self, at: usize, cx: &mut Context<'_>, scratch: &mut Scratch) -> bool {
        // Calls wait in their sockets while there is no link: in the session they are lost with the guest program. No
        // caller waits for the last ones of a connection that has ended.
        let is_linked = self.link.is_some();
        if !is_linked && !self.has_local_ended(at, cx) {
            return false;
        }
        let Some(local) = self.locals.get_mut(at).filter(|local| local.wants_read()) else { return false };
        let room = match local.stream {
            Some(stream) => self.session.room(stream),
            None => self.session.room_for_new(),
        };
        if room == 0 {
            let is_over = !is_linked && self.role == Role::Relay;
            if is_over {
                self.remove(at, CloseReason::Closed);
            }
            return is_over;
        }
        if let (true, Some(stream)) = (local.bulk, local.stream)
            && let Some(moved) = self.read_in_place(at, stream, room.min(READ), cx, scratch)
        {
            return moved;
        }
        let Some(local) = self.locals.get_mut(at) else { return false };
        if local.poll_readable(cx).is_pending() {
            return false;
        }
        let mut buffer = pool::take(Size::Read);
        let read = local.poll_read(cx, &mut buffer[..room.min(READ)]);
        let moved = match read {
            Poll::Pending => false,
            Poll::Ready(Ok(n @ 1..)) => {
                let passed = self.take_local(at, &buffer[..n], cx, scratch);
                if let Some(local) = self.locals.get_mut(at) {
                    local.bulk = passed && n >= BULK;
                }
                true
            }
            // The socket ended or broke; all bytes read before are on their way.
            Poll::Ready(_) => {
                self.remove(at, CloseReason::Closed);
                true
            }
        };
        pool::give(buffer);
        moved
    }

    /// Returns whether the other side of a connection has ended; bytes of it may still be unread.
    fn has_local_ended(&mut self, at: usize, cx: &mut Context<'_>) -> bool {
        let Some(local) = self.locals.get_mut(at) else { return false };
        let ended = local.poll_ended(cx);
        if ended == Poll::Ready(false) {
            // Unread bytes keep the socket readable, so its end wakes no task.
            self.locals.look_soon();
        }
        ended == Poll::Ready(true)
    }

    /// Reads the middle of a large frame into the session's log, which saves a copy. `None` = not possible now.
    fn read_in_place(
        &mut self,
        at: usize,
        stream: u32,
        most: usize,
        cx: &mut Context<'_>,
        scratch: &mut Scratch,
    ) -> Option<bool> {
        let local = self.locals.get_mut(at)?;
        let mut slices: [_; IN_PLACE] = std::array::from_fn(|_| IoSliceMut::new(&mut []));
        let filled = self.session.send_in_place(most, &mut slices);
        if filled == 0 {
            return None;
        }
        let read = local.poll_read_vectored(cx, &mut slices[..filled]);
        let n = if let Poll::Ready(Ok(n)) = read { n } else { 0 };
        // Bytes that the filter must see take the other way. They are the end of the frame.
        let (mut passed, mut kept) = (0, 0);
        let mut rest = None;
        for slice in &slices[..filled] {
            let piece = &slice[..slice.len().min(n - passed - kept)];
            if piece.is_empty() {
                break;
            }
            if rest.is_none() && local.filter.passes_from_local(piece) {
                passed += piece.len();
            } else {
                let rest = rest.get_or_insert_with(|| pool::take(Size::Read));
                rest[kept..kept + piece.len()].copy_from_slice(piece);
                kept += piece.len();
            }
        }
        local.bulk = rest.is_none() && n >= BULK;
        self.session.sent_in_place(stream, passed);
        self.stats.bytes_to_peer += passed as u64;
        if let Some(rest) = rest {
            self.take_local(at, &rest[..kept], cx, scratch);
            pool::give(rest);
        }
        match read {
            Poll::Pending => return Some(false),
            Poll::Ready(Ok(1..)) => {}
            // As in `poll_local_read`.
            Poll::Ready(_) => self.remove(at, CloseReason::Closed),
        }
        Some(true)
    }

    /// Passes bytes from the local socket to the filter; returns whether the last piece passed unchanged.
    fn take_local(&mut self, at: usize, data: &[u8], cx: &mut Context<'_>, scratch: &mut Scratch) -> bool {
        let mut passed = false;
        // Piece by piece, so that the middle of a frame passes unchanged although its head does not.
        for piece in data.chunks(CHUNK) {
            let Some(local) = self.locals.get_mut(at) else { return false };
            passed = local.filter.passes_from_local(piece);
            if passed {
                self.give_filtered(at, cx, scratch);
                self.give_peer(at, piece);
            } else {
                local.filter.from_local(piece, &mut scratch.peer, &mut scratch.local);
            }
        }
        self.give_filtered(at, cx, scratch);
        passed
    }

    /// Sends the filter's output for bytes from the local socket.
    fn give_filtered(&mut self, at: usize, cx: &mut Context<'_>, scratch: &mut Scratch) {
        if !scratch.local.is_empty() {
            if let Some(local) = self.locals.get_mut(at) {
                local.write_answer(cx, &scratch.local);
            }
            scratch.local.clear();
        }
        if !scratch.peer.is_empty() {
            self.give_peer(at, &scratch.peer);
            scratch.peer.clear();
        }
    }

    fn give_peer(&mut self, at: usize, data: &[u8]) {
        let Some(local) = self.locals.get_mut(at) else { return };
        // The stream opens with the first byte to send, so that the agent sees no connections that stay silent.
        let opens = local.stream.is_none();
        if opens {
            local.stream = self.session.open(StreamKind::Agent);
        }
        match local.stream {
            Some(stream) => {
                if opens {
                    self.locals.by_stream.insert(stream, at);
                }
                self.stats.bytes_to_peer += data.len() as u64;
                self.session.send(stream, data);
            }
            // Unreachable below 2^31 streams: `room_for_new()` was checked, or the session is new.
            None => self.remove(at, CloseReason::Closed),
        }
    }

    pub(super) fn inspect(&mut self, now: Instant) {
        let mut timed = false;
        for at in 0..self.locals.slots.len() {
            let Some(local) = &self.locals.slots[at] else { continue };
            if local.is_late(now) {
                debug!(
                    "local connection closed: it could not be opened, or did not take its last bytes, in time"
                );
                let reason = if local.leaving.is_some() { CloseReason::Closed } else { CloseReason::Refused };
                self.remove(at, reason);
            } else {
                timed |= local.is_timed();
            }
        }
        self.locals.look_at = timed.then(|| now + LOOK);
    }
}
