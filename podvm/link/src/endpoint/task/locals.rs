//! The task's side towards the local sockets.

use std::{
    sync::atomic::Ordering::Relaxed,
    task::{Context, Poll},
};

use tokio::time::Instant;
use tracing::debug;

use super::{LINGER, LOOK, Scratch, Task};
use crate::{
    endpoint::{
        Handler, Role,
        local::{Local, READ, SLICES},
    },
    record::{CloseReason, StreamKind},
    session::pool::{self, Size},
};

/// Records at least so long are worth a slice of their own.
const STRAIGHT: usize = 2 << 10;

/// Consecutive records for one connection become one write.
#[derive(Default)]
pub(super) struct Batch<'a> {
    at: Option<usize>,
    /// Stream bytes that became what is in the scratch buffer.
    received: usize,
    /// Or what goes straight from the transport's buffer to the socket.
    straight: [&'a [u8]; SLICES],
    filled: usize,
}

impl<H: Handler> Task<H> {
    pub(super) fn insert(&mut self, local: Local) -> usize {
        if local.is_timed() {
            self.look_soon();
        }
        self.open += 1;
        match self.locals.iter().position(Option::is_none) {
            Some(free) if self.open <= self.locals.len() => {
                self.locals[free] = Some(local);
                free
            }
            _ => {
                self.locals.push(Some(local));
                self.locals.len() - 1
            }
        }
    }

    fn look_soon(&mut self) {
        self.look_at.get_or_insert_with(|| Instant::now() + LOOK);
    }

    /// Closes a connection; its stream, if it has one, ends after what was read.
    fn remove(&mut self, at: usize, reason: CloseReason) {
        let Some(local) = self.locals.get_mut(at).and_then(Option::take) else { return };
        self.open -= 1;
        if let Some(stream) = local.stream {
            self.by_stream.remove(&stream);
            self.session.close(stream, reason);
        }
    }

    /// The peer opened a stream.
    pub(super) fn opened(&mut self, stream: u32) {
        if self.role == Role::Relay || self.open >= self.limits.connections {
            debug!(stream, "stream refused");
            return self.session.close(stream, CloseReason::Refused);
        }
        let (filter, dial) = (self.handler.filter(), self.handler.dial());
        let deadline = Instant::now() + self.limits.dial;
        let at = self.insert(Local::dialling(dial, deadline, filter, stream));
        self.by_stream.insert(stream, at);
    }

    /// A connection's stream is gone (and out of `by_stream`): the filter says how the local side goes on.
    pub(super) fn stream_lost(&mut self, at: usize) {
        let Some(local) = self.locals.get_mut(at).and_then(Option::as_mut) else { return };
        local.lose_stream();
        let mut answers = bytes::BytesMut::new();
        let stays = local.filter.stream_lost(&mut answers);
        local.queue(&answers);
        if !stays {
            local.leaving = Some(Instant::now() + LINGER);
            self.look_soon();
        }
    }

    /// Bytes of a stream; gathered for as long as they are for the same connection.
    pub(super) fn data<'a>(
        &mut self,
        cx: &mut Context<'_>,
        scratch: &mut Scratch,
        batch: &mut Batch<'a>,
        stream: u32,
        data: &'a [u8],
    ) {
        self.shared.counters.bytes_from_peer.fetch_add(data.len() as u64, Relaxed);
        let Some(at) = self.by_stream.get(&stream).copied() else { return };
        if batch.at != Some(at) || batch.filled == SLICES {
            self.deliver(cx, scratch, batch);
            batch.at = Some(at);
        }
        let Some(local) = &mut self.locals[at] else { return };
        if data.len() >= STRAIGHT && local.filter.passes_from_peer(data) {
            if batch.received > 0 {
                self.deliver(cx, scratch, batch);
                batch.at = Some(at);
            }
            batch.straight[batch.filled] = data;
            batch.filled += 1;
            return;
        }
        if batch.filled > 0 {
            self.deliver(cx, scratch, batch);
            batch.at = Some(at);
        }
        batch.received += data.len();
        if let Some(local) = &mut self.locals[at] {
            local.filter.from_peer(data, &mut scratch.peer, &mut scratch.local);
        }
    }

    /// Writes what was gathered.
    pub(super) fn deliver(&mut self, cx: &mut Context<'_>, scratch: &mut Scratch, batch: &mut Batch<'_>) {
        let Some(at) = batch.at.take() else { return };
        let received = std::mem::take(&mut batch.received);
        let filled = std::mem::take(&mut batch.filled);
        if let Some(local) = &mut self.locals[at] {
            if received > 0 {
                local.write_received(cx, &scratch.local, received);
            }
            if filled > 0 {
                local.write_straight(cx, &batch.straight[..filled]);
            }
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
        let (mut moved, many) = (false, self.locals.len());
        self.waiting = 0;
        self.turn = if self.turn + 1 < many { self.turn + 1 } else { 0 };
        for at in (self.turn..many).chain(0..self.turn) {
            moved |= self.poll_local(at, cx, scratch);
            self.waiting += self.locals[at].as_ref().map_or(0, Local::waiting);
        }
        moved
    }

    fn poll_local(&mut self, at: usize, cx: &mut Context<'_>, scratch: &mut Scratch) -> bool {
        let Some(local) = &mut self.locals[at] else { return false };
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
        self.poll_local_read(at, cx, scratch) || moved
    }

    fn poll_local_read(&mut self, at: usize, cx: &mut Context<'_>, scratch: &mut Scratch) -> bool {
        let Some(local) = self.locals[at].as_mut().filter(|local| local.wants_read()) else { return false };
        let room = match local.stream {
            Some(stream) => self.session.room(stream),
            None => self.session.room_for_new(),
        };
        if room == 0 {
            return false;
        }
        let mut buffer = pool::take(Size::Read);
        let read = local.poll_read(cx, &mut buffer[..room.min(READ)]);
        let moved = match read {
            Poll::Pending => false,
            Poll::Ready(Ok(n @ 1..)) => {
                self.take_local(at, &buffer[..n], cx, scratch);
                true
            }
            // The end, or broken: whatever was read before is on its way.
            Poll::Ready(_) => {
                self.remove(at, CloseReason::Closed);
                true
            }
        };
        pool::give(buffer);
        moved
    }

    fn take_local(&mut self, at: usize, data: &[u8], cx: &mut Context<'_>, scratch: &mut Scratch) {
        let Some(local) = &mut self.locals[at] else { return };
        if local.filter.passes_from_local(data) {
            return self.give_peer(at, data);
        }
        local.filter.from_local(data, &mut scratch.peer, &mut scratch.local);
        if !scratch.local.is_empty() {
            local.write_answer(cx, &scratch.local);
            scratch.local.clear();
        }
        if !scratch.peer.is_empty() {
            self.give_peer(at, &scratch.peer);
            scratch.peer.clear();
        }
    }

    fn give_peer(&mut self, at: usize, data: &[u8]) {
        let Some(local) = &mut self.locals[at] else { return };
        // A stream only when there is something to say: the agent shall not see connections that stay silent.
        if local.stream.is_none() {
            local.stream = self.session.open(StreamKind::Agent);
            if let Some(stream) = local.stream {
                self.by_stream.insert(stream, at);
            }
        }
        match local.stream {
            Some(stream) => {
                self.shared.counters.bytes_to_peer.fetch_add(data.len() as u64, Relaxed);
                self.session.send(stream, data);
            }
            // Not reached before 2^31 streams: room_for_new() was asked.
            None => self.remove(at, CloseReason::Closed),
        }
    }

    /// Looks at connections that wait for the clock.
    pub(super) fn look(&mut self, now: Instant) {
        let mut timed = false;
        for at in 0..self.locals.len() {
            let Some(local) = &self.locals[at] else { continue };
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
        self.look_at = timed.then(|| now + LOOK);
    }
}
