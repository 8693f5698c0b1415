//! Manages one local connection: its socket, its filter, and the bytes that the socket has not taken yet.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::OwnedFd;
use std::task::{Context, Poll};

use bytes::BytesMut;
use futures_util::future::BoxFuture;
use serde::{Deserialize, Serialize};
use tokio::net::UnixStream;
use tokio::time::{Duration, Instant};

use super::socket::LocalSocket;
use super::{Filter, NotFrozen, freeze};
use crate::base64_bytes;
use crate::session::CHUNK;

/// Undelivered bytes of own answers above which the socket is not read. Bytes of the stream do not count, because the
/// window bounds them: an agent that writes before it reads on must be read.
const BACKLOG: usize = 64 << 10;

/// Most bytes read from a socket before the next one: whole records, and a frame of 64 KiB in one read.
pub(super) const READ: usize = 8 * CHUNK;

/// Most pieces that one write takes: the pieces of one read of the transport.
pub(super) const SLICES: usize = 12;

pub(super) struct Local {
    socket: Socket,
    pub(super) filter: Box<dyn Filter>,
    /// `None` before the first byte and after the loss of a stream.
    pub(super) stream: Option<u32>,
    /// Bytes that the socket has not taken yet.
    out: BytesMut,
    /// Bytes received on the stream with unreturned credit.
    pub(super) owed: usize,
    /// Bytes of the filter's answers that went behind `out` since it was last empty.
    answered: usize,
    /// Deadline for closing, even with unwritten bytes. Once set, the socket is not read.
    pub(super) leaving: Option<Instant>,
    /// The other side no longer reads; bytes that it wrote are read to their end.
    deaf: bool,
    /// The last read ended in the middle of a large frame: the next one may go straight into the session's log.
    pub(super) bulk: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct LocalState {
    filter: serde_json::Value,
    stream: Option<u32>,
    #[serde(with = "base64_bytes")]
    out: BytesMut,
    owed: usize,
    answered: usize,
    /// Milliseconds left until the connection is closed.
    leaving_ms: Option<u64>,
    deaf: bool,
}

enum Socket {
    Dialling(BoxFuture<'static, io::Result<UnixStream>>, Instant),
    Open(LocalSocket),
}

impl Local {
    pub(super) fn accepted(socket: UnixStream, filter: Box<dyn Filter>) -> io::Result<Local> {
        Ok(Local::with(Socket::Open(LocalSocket::new(socket)?), filter, None))
    }

    pub(super) fn dialling(
        dial: BoxFuture<'static, io::Result<UnixStream>>,
        deadline: Instant,
        filter: Box<dyn Filter>,
        stream: u32,
    ) -> Local {
        Local::with(Socket::Dialling(dial, deadline), filter, Some(stream))
    }

    fn with(socket: Socket, filter: Box<dyn Filter>, stream: Option<u32>) -> Local {
        Local {
            socket,
            filter,
            stream,
            out: BytesMut::new(),
            owed: 0,
            answered: 0,
            leaving: None,
            deaf: false,
            bulk: false,
        }
    }

    /// Returns the serialised state and appends the socket to `sockets`; `None` if there is no socket yet.
    pub(super) fn state(
        &self,
        now: Instant,
        sockets: &mut Vec<OwnedFd>,
    ) -> Result<Option<LocalState>, NotFrozen> {
        let Socket::Open(socket) = &self.socket else { return Ok(None) };
        let filter = self.filter.state().ok_or(NotFrozen::State("a filter cannot be handed over"))?;
        sockets.push(freeze::copy(socket)?);
        Ok(Some(LocalState {
            filter,
            stream: self.stream,
            out: self.out.clone(),
            owed: self.owed,
            answered: self.answered,
            leaving_ms: self.leaving.map(|at| at.saturating_duration_since(now).as_millis() as u64), // a second
            deaf: self.deaf,
        }))
    }

    pub(super) fn restore(
        socket: UnixStream,
        mut filter: Box<dyn Filter>,
        state: LocalState,
    ) -> Result<Local, NotFrozen> {
        if !filter.restore(&state.filter) {
            return Err(NotFrozen::State("a filter cannot restore its position"));
        }
        Ok(Local {
            stream: state.stream,
            out: state.out,
            owed: state.owed,
            answered: state.answered,
            leaving: state.leaving_ms.map(|ms| Instant::now() + Duration::from_millis(ms.min(10_000))),
            deaf: state.deaf,
            ..Local::accepted(socket, filter)?
        })
    }

    pub(super) fn waiting(&self) -> usize {
        self.out.len()
    }

    pub(super) fn is_timed(&self) -> bool {
        self.leaving.is_some() || matches!(self.socket, Socket::Dialling(..))
    }

    /// Returns whether the deadline has passed: the dial took too long, or the last bytes were not taken.
    pub(super) fn is_late(&self, now: Instant) -> bool {
        let dial = matches!(self.socket, Socket::Dialling(_, deadline) if deadline <= now);
        dial || self.leaving.is_some_and(|deadline| deadline <= now)
    }

    /// Returns whether all bytes due before the close are written.
    pub(super) fn is_done(&self) -> bool {
        self.leaving.is_some() && self.out.is_empty()
    }

    /// Polls the dial. An error means that there will be no local end.
    pub(super) fn poll_dial(&mut self, cx: &mut Context<'_>) -> io::Result<bool> {
        let Socket::Dialling(dial, _) = &mut self.socket else { return Ok(false) };
        match dial.as_mut().poll(cx) {
            Poll::Pending => Ok(false),
            Poll::Ready(socket) => {
                self.socket = Socket::Open(LocalSocket::new(socket?)?);
                Ok(true)
            }
        }
    }

    /// Writes the output for `received` bytes of the stream, at most `SLICES` pieces, in one call.
    pub(super) fn write_received(&mut self, cx: &mut Context<'_>, slices: &[&[u8]], received: usize) {
        self.owed += received;
        match slices {
            [] => {}
            [one] => self.write(cx, one),
            many => self.write_all(cx, many),
        }
    }

    fn write_all(&mut self, cx: &mut Context<'_>, slices: &[&[u8]]) {
        let mut written = 0;
        if let (Socket::Open(socket), true, false) = (&mut self.socket, self.out.is_empty(), self.deaf) {
            let mut vector = [IoSlice::new(&[]); SLICES];
            vector.iter_mut().zip(slices).for_each(|(to, from)| *to = IoSlice::new(from));
            match socket.poll_write(cx, &vector[..slices.len()]) {
                Poll::Ready(Ok(n)) => written = n,
                Poll::Ready(Err(_)) => self.deaf = true,
                Poll::Pending => {}
            }
        }
        // After a partial write the socket is polled again, so that it wakes the task.
        for slice in slices {
            let rest = &slice[written.min(slice.len())..];
            written -= slice.len() - rest.len();
            if !rest.is_empty() {
                self.write(cx, rest);
            }
        }
    }

    pub(super) fn write_answer(&mut self, cx: &mut Context<'_>, data: &[u8]) {
        self.write(cx, data);
        self.answered = if self.out.is_empty() { 0 } else { self.answered + data.len() };
    }

    /// Writes `data` after the waiting bytes; keeps the part that the socket does not take.
    fn write(&mut self, cx: &mut Context<'_>, data: &[u8]) {
        let mut rest = data;
        if self.out.is_empty() {
            rest = &rest[self.poll_write(cx, data)..];
        }
        if !self.deaf {
            self.out.extend_from_slice(rest);
        }
    }

    pub(super) fn queue(&mut self, data: &[u8]) {
        if !self.deaf {
            self.out.extend_from_slice(data);
        }
    }

    /// Writes waiting bytes; returns whether any were written.
    pub(super) fn flush(&mut self, cx: &mut Context<'_>) -> bool {
        if self.out.is_empty() {
            return false;
        }
        let mut out = std::mem::take(&mut self.out);
        let written = self.poll_write(cx, &out);
        if self.deaf || written == out.len() {
            self.answered = 0;
            return true; // an empty buffer is not kept
        }
        bytes::Buf::advance(&mut out, written);
        self.out = out;
        written > 0
    }

    fn poll_write(&mut self, cx: &mut Context<'_>, data: &[u8]) -> usize {
        let Socket::Open(socket) = &mut self.socket else { return 0 };
        let mut written = 0;
        while written < data.len() && !self.deaf {
            match socket.poll_write(cx, &[IoSlice::new(&data[written..])]) {
                Poll::Ready(Ok(n @ 1..)) => written += n,
                Poll::Ready(_) => self.deaf = true,
                Poll::Pending => break,
            }
        }
        if self.deaf { data.len() } else { written }
    }

    /// Returns the number of stream bytes that were passed on; their credit goes back to the peer.
    pub(super) fn take_credit(&mut self) -> usize {
        let credit = self.owed.saturating_sub(self.out.len());
        self.owed -= credit;
        credit
    }

    pub(super) fn wants_read(&self) -> bool {
        let answers = self.answered + self.filter.answers_waiting();
        self.leaving.is_none() && answers < BACKLOG && matches!(self.socket, Socket::Open(_))
    }

    /// Reads into several buffers at once. Costs one more system call when there are no bytes to read.
    pub(super) fn poll_read_vectored(
        &mut self,
        cx: &mut Context<'_>,
        slices: &mut [IoSliceMut<'_>],
    ) -> Poll<io::Result<usize>> {
        match &self.socket {
            Socket::Open(socket) => socket.poll_read_vectored(cx, slices),
            Socket::Dialling(..) => Poll::Pending,
        }
    }

    /// Returns whether a read may succeed; call it before taking a buffer for the read.
    pub(super) fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<()> {
        match &self.socket {
            Socket::Open(socket) => socket.poll_readable(cx),
            Socket::Dialling(..) => Poll::Pending,
        }
    }

    /// Returns whether the other side has ended, without a read; pending while neither bytes nor an end are there.
    pub(super) fn poll_ended(&self, cx: &mut Context<'_>) -> Poll<bool> {
        match &self.socket {
            Socket::Open(socket) => socket.poll_ended(cx),
            Socket::Dialling(..) => Poll::Pending,
        }
    }

    pub(super) fn poll_read(&mut self, cx: &mut Context<'_>, buffer: &mut [u8]) -> Poll<io::Result<usize>> {
        match &self.socket {
            Socket::Open(socket) => socket.poll_read(cx, buffer),
            Socket::Dialling(..) => Poll::Pending,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Answers(usize);

    impl Filter for Answers {
        fn from_local(&mut self, _input: &[u8], _peer: &mut BytesMut, _local: &mut BytesMut) {}
        fn from_peer(&mut self, _input: &[u8], _peer: &mut BytesMut, _local: &mut BytesMut) {}
        fn answers_waiting(&self) -> usize {
            self.0
        }
        fn stream_lost(&mut self, _again: Option<&mut BytesMut>, _local: &mut BytesMut) -> bool {
            true
        }
    }

    #[tokio::test]
    async fn nothing_is_read_while_many_answers_wait_in_the_filter() {
        for (waiting, reads) in [(0, true), (BACKLOG - 1, true), (BACKLOG, false)] {
            let (socket, _other) = UnixStream::pair().unwrap();
            let local = Local::accepted(socket, Box::new(Answers(waiting))).unwrap();
            assert_eq!(local.wants_read(), reads, "{waiting} bytes");
        }
    }
}
