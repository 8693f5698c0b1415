//! Carries dialled streams: TCP connections from the pod's netns on the node to the pod's localhost in the VM.
//!
//! The relay asks the guest to connect ([`Dialled::call`]) before it joins a local socket, so a refusal in the VM
//! becomes one on the node. The end of one direction is a Finish, the end of both a Close. Any other end resets both
//! ends, so that no peer takes a truncated transfer for a complete one.

use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use std::{fmt, io};

use bytes::{Buf, BytesMut};
use futures_util::future::BoxFuture;
use serde::{Deserialize, Serialize};
use socket2::SockRef;
use tokio::io::AsyncWrite;
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::time::Instant;
use tokio::time::error::Elapsed;

use super::handle::{Command, Shared};
use super::local::READ;
use super::task::LOOK;
use super::transport::poll_read;
use super::{Limits, freeze};
use crate::base64_bytes;
use crate::record::{CloseReason, StreamKind, Target};
use crate::session::Session;
use crate::session::pool::{self, Size};

/// Reason why a call returned no connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DialError {
    /// There is no listener.
    #[error("there is no listener")]
    Refused,
    /// The attempt was impossible, or failed.
    #[error("the guest could not connect")]
    Failed,
    /// No answer within the time limit.
    #[error("the guest did not answer in time")]
    Late,
    /// There is no session, or it was lost during the call.
    #[error("no guest is connected")]
    Away,
    /// The guest program is too old for dialled streams.
    #[error("the guest program does not support dialled streams; use a newer VM image")]
    Unknown,
    /// The limit of open connections is reached.
    #[error("too many connections are open")]
    TooMany,
}

impl From<Elapsed> for DialError {
    fn from(_: Elapsed) -> DialError {
        DialError::Late
    }
}

/// Identifies a call by session and stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Call {
    generation: u64,
    stream: u32,
}

/// A connection that is established in the VM and waits for its local socket. Dropping it closes the connection.
pub struct Connected {
    shared: Arc<Shared>,
    call: Option<Call>,
}

impl fmt::Debug for Connected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connected").field("call", &self.call).finish_non_exhaustive()
    }
}

impl Connected {
    /// Joins the local socket to the connection. A socket that comes too late is reset.
    pub fn join(mut self, socket: TcpStream) {
        if let Some(call) = self.call.take() {
            self.shared.push(Command::Join(call, socket));
        }
    }
}

impl Drop for Connected {
    fn drop(&mut self) {
        if let Some(call) = self.call.take() {
            self.shared.push(Command::Hang(call));
        }
    }
}

/// Guest: time limit for connecting a dialled connection.
const CONNECT: Duration = Duration::from_secs(3);
/// Time to linger of a socket that is reset when it is closed.
const RESET: Option<Duration> = Some(Duration::ZERO);

pub(super) type DialAnswer = oneshot::Sender<Result<Connected, DialError>>;

#[derive(Default)]
pub(super) struct Dialled {
    /// Connections in ascending order of their stream.
    pub(super) conns: Vec<Conn>,
    /// Number of the session: stream numbers begin anew with each session.
    generation: u64,
    /// Connection that is polled first.
    turn: usize,
    /// Time of the next check of deadlines; `None` if there are none.
    pub(super) look_at: Option<Instant>,
}

pub(super) struct Conn {
    state: State,
    kept: DialledState,
}

/// State of a connection without its socket, from which another process continues.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct DialledState {
    /// 0 = the stream's session is lost.
    stream: u32,
    /// The session still has the stream.
    alive: bool,
    /// Bytes that the socket has not taken yet, and the number of bytes with unreturned credit.
    #[serde(with = "base64_bytes")]
    out: BytesMut,
    owed: usize,
    /// The socket was read to its end.
    read_done: bool,
    /// The peer sent Finish; `shut`: the socket's write side was shut down.
    finished: bool,
    shut: bool,
}

enum State {
    Calling(Option<DialAnswer>, Instant),
    Parked(Instant),
    Dialling(BoxFuture<'static, io::Result<TcpStream>>, Instant),
    Open(TcpStream),
}

#[derive(PartialEq, Eq)]
enum Next {
    Goes,
    /// Everything was delivered.
    Done,
    Broken,
}

impl Dialled {
    pub(super) fn waiting(&self) -> usize {
        self.conns.iter().map(|conn| conn.kept.out.len()).sum()
    }

    pub(super) fn has(&self, stream: u32) -> bool {
        !self.conns.is_empty() && self.at(stream).is_some()
    }

    fn at(&self, stream: u32) -> Option<usize> {
        self.conns.binary_search_by_key(&stream, |conn| conn.kept.stream).ok()
    }

    fn add(&mut self, stream: u32, state: State) {
        // Numbers ascend within a session. Number 0, of an earlier session, is never looked up.
        let at = self.conns.partition_point(|conn| conn.kept.stream < stream);
        let kept = DialledState { stream, alive: true, ..DialledState::default() };
        self.conns.insert(at, Conn { state, kept });
        self.look_at.get_or_insert_with(|| Instant::now() + LOOK);
    }

    pub(super) fn call(
        &mut self,
        session: &mut Session,
        limits: &Limits,
        target: Target,
        answer: DialAnswer,
    ) {
        // If the caller is gone, the result is dropped.
        let refuse = |answer: DialAnswer, why| drop(answer.send(Err(why)));
        if session.epoch() == 0 {
            return refuse(answer, DialError::Away);
        }
        if !session.speaks_dial() {
            return refuse(answer, DialError::Unknown);
        }
        if self.conns.len() >= limits.dialled {
            return refuse(answer, DialError::TooMany);
        }
        match session.open(StreamKind::Dial(target)) {
            Some(stream) => {
                self.add(stream, State::Calling(Some(answer), Instant::now() + limits.call));
            }
            None => refuse(answer, DialError::TooMany),
        }
    }

    /// Guest: handles a call of the relay.
    pub(super) fn called(
        &mut self,
        session: &mut Session,
        limits: &Limits,
        stream: u32,
        dial: impl FnOnce() -> BoxFuture<'static, io::Result<TcpStream>>,
    ) {
        if self.conns.len() >= limits.dialled {
            return session.close(stream, CloseReason::Refused);
        }
        self.add(stream, State::Dialling(dial(), Instant::now() + CONNECT));
    }

    /// Relay: handles the guest's report that it has connected.
    pub(super) fn connected(&mut self, shared: &Arc<Shared>, limits: &Limits, stream: u32) {
        let Some(at) = self.at(stream) else { return };
        let conn = &mut self.conns[at];
        let State::Calling(answer, _) = &mut conn.state else { return };
        let answer = answer.take();
        conn.state = State::Parked(Instant::now() + limits.park);
        let call = Some(Call { generation: self.generation, stream });
        if let Some(answer) = answer {
            // If the caller is gone, the dropped `Connected` closes the connection.
            drop(answer.send(Ok(Connected { shared: shared.clone(), call })));
        }
    }

    pub(super) fn join(&mut self, call: Call, socket: TcpStream) {
        let at = self.at(call.stream).filter(|_| call.generation == self.generation);
        match at.map(|at| &mut self.conns[at]) {
            Some(conn) if matches!(conn.state, State::Parked(_)) => {
                prepare(&socket);
                conn.state = State::Open(socket);
            }
            _ => linger(&socket, RESET),
        }
    }

    /// Relay: closes a call after its caller is gone.
    pub(super) fn hang(&mut self, session: &mut Session, call: Call) {
        let at = self.at(call.stream).filter(|_| call.generation == self.generation);
        if let Some(at) = at
            && matches!(self.conns[at].state, State::Parked(_))
        {
            session.close(call.stream, CloseReason::Failed);
            self.conns.remove(at);
        }
    }

    pub(super) fn data(&mut self, cx: &mut Context<'_>, session: &mut Session, stream: u32, data: &[u8]) {
        let Some(at) = self.at(stream) else { return };
        let conn = &mut self.conns[at];
        conn.kept.owed += data.len();
        let mut written = 0;
        if let (State::Open(socket), true) = (&mut conn.state, conn.kept.out.is_empty()) {
            // An error recurs when the rest is written.
            if let Poll::Ready(Ok(n)) = Pin::new(socket).poll_write(cx, data) {
                written = n;
            }
        }
        conn.kept.out.extend_from_slice(&data[written..]);
        session.consumed(stream, conn.kept.take_credit());
    }

    /// Handles a Finish of the peer: it sends no more bytes on this stream.
    pub(super) fn finished(&mut self, stream: u32) {
        if let Some(at) = self.at(stream) {
            self.conns[at].kept.finished = true;
        }
    }

    pub(super) fn closed(&mut self, stream: u32, reason: CloseReason) {
        let Some(at) = self.at(stream) else { return };
        let why = if reason == CloseReason::Refused { DialError::Refused } else { DialError::Failed };
        if self.conns[at].ended(why) {
            self.conns.remove(at).end(RESET);
        }
    }

    pub(super) fn lost(&mut self) {
        self.generation += 1;
        for mut conn in std::mem::take(&mut self.conns) {
            if conn.ended(DialError::Away) {
                conn.end(RESET);
            } else {
                // The remaining bytes are still written; number 0 keeps look-ups from finding the connection.
                conn.kept.stream = 0;
                self.conns.push(conn);
            }
        }
    }

    pub(super) fn poll(&mut self, cx: &mut Context<'_>, session: &mut Session) -> Moved {
        let (mut moved, many) = (Moved::default(), self.conns.len());
        if many == 0 {
            return moved;
        }
        self.turn = if self.turn + 1 < many { self.turn + 1 } else { 0 };
        let mut over = Vec::new();
        for at in (self.turn..many).chain(0..self.turn) {
            let next = self.conns[at].poll(cx, session, &mut moved);
            if next != Next::Goes {
                over.push((at, next));
            }
        }
        over.sort_unstable_by_key(|(at, _)| std::cmp::Reverse(*at));
        for (at, next) in over {
            moved.any = true;
            let conn = self.conns.remove(at);
            match next {
                Next::Broken => conn.end(RESET),
                // The kernel may still send bytes that the socket has taken.
                _ => conn.end(None),
            }
        }
        moved
    }

    pub(super) fn inspect(&mut self, session: &mut Session, now: Instant) {
        if self.look_at.is_none_or(|at| at > now) {
            return;
        }
        let mut timed = false;
        self.conns.retain_mut(|conn| {
            let (late, left) = match &conn.state {
                State::Calling(answer, deadline) => {
                    (*deadline <= now, answer.as_ref().is_none_or(oneshot::Sender::is_closed))
                }
                State::Parked(deadline) | State::Dialling(_, deadline) => (*deadline <= now, false),
                State::Open(_) => return true,
            };
            if !(late || left) {
                timed = true;
                return true;
            }
            if let State::Calling(answer, _) = &mut conn.state
                && let Some(answer) = answer.take()
            {
                drop(answer.send(Err(DialError::Late))); // The caller may be gone.
            }
            session.close(conn.kept.stream, CloseReason::Failed);
            false
        });
        self.look_at = timed.then(|| now + LOOK);
    }

    pub(super) fn end(&mut self) {
        std::mem::take(&mut self.conns).into_iter().for_each(|conn| conn.end(RESET));
    }
}

#[derive(Default)]
pub(super) struct Moved {
    pub(super) any: bool,
    /// Bytes read from sockets.
    pub(super) to_peer: u64,
}

impl DialledState {
    fn take_credit(&mut self) -> usize {
        let credit = self.owed.saturating_sub(self.out.len());
        self.owed -= credit;
        credit
    }
}

impl Conn {
    /// Returns the number of the stream; 0 = its session is lost.
    pub(super) fn stream(&self) -> u32 {
        self.kept.stream
    }

    /// Returns the state and appends the socket to `sockets`. `None` if there is no connection yet.
    pub(super) fn state(&self, sockets: &mut Vec<OwnedFd>) -> io::Result<Option<DialledState>> {
        let State::Open(socket) = &self.state else { return Ok(None) };
        sockets.push(freeze::copy(socket)?);
        Ok(Some(self.kept.clone()))
    }

    pub(super) fn restore(socket: TcpStream, kept: DialledState) -> Conn {
        Conn { state: State::Open(socket), kept }
    }

    /// Handles the stream's end; returns whether to reset now. After a Finish the socket takes all bytes first.
    fn ended(&mut self, why: DialError) -> bool {
        self.kept.alive = false;
        match &mut self.state {
            State::Calling(answer, _) => {
                if let Some(answer) = answer.take() {
                    drop(answer.send(Err(why))); // The caller may be gone.
                }
                true
            }
            State::Parked(_) | State::Dialling(..) => true,
            State::Open(_) if self.kept.finished => false,
            State::Open(socket) => {
                // The reader still gets the bytes before the end, as far as the socket takes them at once.
                drop(socket.try_write(&self.kept.out));
                true
            }
        }
    }

    fn poll(&mut self, cx: &mut Context<'_>, session: &mut Session, moved: &mut Moved) -> Next {
        if let State::Dialling(dial, _) = &mut self.state {
            match dial.as_mut().poll(cx) {
                Poll::Pending => return Next::Goes,
                Poll::Ready(Ok(socket)) => {
                    prepare(&socket);
                    self.state = State::Open(socket);
                    session.accept(self.kept.stream);
                    moved.any = true;
                }
                Poll::Ready(Err(error)) => {
                    let refused = error.kind() == io::ErrorKind::ConnectionRefused;
                    let reason = if refused { CloseReason::Refused } else { CloseReason::Failed };
                    tracing::debug!(%error, "cannot dial the pod's localhost");
                    session.close(self.kept.stream, reason);
                    return Next::Done;
                }
            }
        }
        let next = self.exchange(cx, session, moved);
        if self.kept.alive {
            match next {
                Next::Goes => {}
                Next::Done => session.close(self.kept.stream, CloseReason::Closed),
                Next::Broken => session.close(self.kept.stream, CloseReason::Failed),
            }
        }
        next
    }

    fn exchange(&mut self, cx: &mut Context<'_>, session: &mut Session, moved: &mut Moved) -> Next {
        match self.write(cx) {
            Ok(wrote) => moved.any |= wrote,
            Err(_) => return Next::Broken,
        }
        let State::Open(socket) = &mut self.state else { return Next::Goes };
        if self.kept.alive {
            session.consumed(self.kept.stream, self.kept.take_credit());
        }
        if self.kept.finished && self.kept.out.is_empty() && !self.kept.shut {
            match Pin::new(&mut *socket).poll_shutdown(cx) {
                Poll::Ready(Ok(())) => self.kept.shut = true,
                Poll::Ready(Err(_)) => return Next::Broken,
                Poll::Pending => {}
            }
        }
        let room = if self.kept.alive && !self.kept.read_done {
            session.room(self.kept.stream).min(READ)
        } else {
            0
        };
        if room > 0 {
            let mut buffer = pool::take(Size::Read);
            let read = poll_read(socket, cx, &mut buffer[..room]);
            match read {
                Poll::Ready(Ok(0)) => {
                    self.kept.read_done = true;
                    session.finish(self.kept.stream);
                    moved.any = true;
                }
                Poll::Ready(Ok(n)) => {
                    session.send(self.kept.stream, &buffer[..n]);
                    moved.any = true;
                    moved.to_peer += n as u64;
                }
                _ => {}
            }
            pool::give(buffer);
            if let Poll::Ready(Err(_)) = read {
                return Next::Broken;
            }
        }
        if self.kept.shut && (self.kept.read_done || !self.kept.alive) { Next::Done } else { Next::Goes }
    }

    /// Writes the waiting bytes; returns whether any were written.
    fn write(&mut self, cx: &mut Context<'_>) -> io::Result<bool> {
        let State::Open(socket) = &mut self.state else { return Ok(false) };
        let mut wrote = false;
        while !self.kept.out.is_empty() {
            match Pin::new(&mut *socket).poll_write(cx, &self.kept.out) {
                Poll::Ready(Ok(0)) => return Err(io::ErrorKind::WriteZero.into()),
                Poll::Ready(Ok(n)) => {
                    self.kept.out.advance(n);
                    wrote = true;
                }
                Poll::Ready(Err(error)) => return Err(error),
                Poll::Pending => break,
            }
        }
        if wrote && self.kept.out.is_empty() {
            self.kept.out = BytesMut::new(); // an empty buffer is not kept
        }
        Ok(wrote)
    }

    fn end(self, time: Option<Duration>) {
        if let State::Open(socket) = self.state {
            linger(&socket, time);
        }
    }
}

/// Disables the Nagle delay. Linger 0 makes a crash a reset, not the end of a complete transfer.
fn prepare(socket: &TcpStream) {
    linger(socket, RESET);
    if let Err(error) = socket.set_nodelay(true) {
        tracing::debug!(%error, "a dialled connection keeps its delay");
    }
}

fn linger(socket: &TcpStream, time: Option<Duration>) {
    if let Err(error) = SockRef::from(socket).set_linger(time) {
        tracing::debug!(%error, "how a dialled connection ends is not set");
    }
}
