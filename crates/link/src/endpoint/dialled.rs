//! Carries dialled streams: TCP connections from the pod's netns on the node to the pod's localhost in the VM.
//!
//! The relay first asks the guest to connect ([`Dialled::call`]). It joins a local socket to the stream only after
//! the guest has connected. A refusal in the VM can therefore become a refusal on the node. Bytes pass unchanged. The
//! end of one direction is a Finish, the end of both a Close. A connection that ends in any other way is reset at
//! both ends, so that neither peer takes a truncated transfer for a complete one.

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

use super::freeze;
use super::handle::{Command, Shared};
use super::local::READ;
use super::task::LOOK;
use super::transport::poll_read;
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

pub(super) type Answer = oneshot::Sender<Result<Connected, DialError>>;

/// Subset of [`super::Limits`] for dialled connections.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    pub(super) connections: usize,
    pub(super) call: Duration,
    pub(super) park: Duration,
    pub(super) connect: Duration,
}

/// All dialled connections of one endpoint.
pub(super) struct Dialled {
    bounds: Bounds,
    /// Connections in ascending order of their stream.
    conns: Vec<Conn>,
    /// Number of the session: stream numbers begin anew with each session.
    generation: u64,
    /// Connection that is polled first.
    turn: usize,
    look_at: Option<Instant>,
}

pub(super) struct Conn {
    stream: u32,
    state: State,
    /// The session still has the stream.
    alive: bool,
    /// Bytes that the socket has not taken yet, and the number of bytes with unreturned credit.
    out: BytesMut,
    owed: usize,
    /// The socket was read to its end.
    read_done: bool,
    /// The peer sent Finish; `shut`: the socket's write side was shut down.
    finished: bool,
    shut: bool,
}

/// Serialised state of a connection without its socket.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct DialledState {
    stream: u32,
    alive: bool,
    #[serde(with = "base64_bytes")]
    out: Vec<u8>,
    owed: usize,
    read_done: bool,
    finished: bool,
    shut: bool,
}

enum State {
    Calling(Option<Answer>, Instant),
    Parked(Instant),
    Dialling(BoxFuture<'static, io::Result<TcpStream>>, Instant),
    Open(TcpStream),
}

/// Outcome of one poll of a connection.
#[derive(PartialEq, Eq)]
enum Next {
    Goes,
    /// Everything was delivered.
    Done,
    Broken,
}

impl Dialled {
    pub(super) fn new(bounds: Bounds) -> Dialled {
        Dialled { bounds, conns: Vec::new(), generation: 0, turn: 0, look_at: None }
    }

    /// Returns all connections.
    pub(super) fn conns(&self) -> impl Iterator<Item = &Conn> {
        self.conns.iter()
    }

    /// Continues with the connections of another process, ordered by stream.
    pub(super) fn resume(&mut self, conns: Vec<Conn>) {
        self.conns = conns;
    }

    /// Returns the number of connections.
    pub(super) fn len(&self) -> usize {
        self.conns.len()
    }

    pub(super) fn waiting(&self) -> usize {
        self.conns.iter().map(|conn| conn.out.len()).sum()
    }

    /// Returns whether the stream is a dialled one.
    pub(super) fn has(&self, stream: u32) -> bool {
        !self.conns.is_empty() && self.at(stream).is_some()
    }

    fn at(&self, stream: u32) -> Option<usize> {
        self.conns.binary_search_by_key(&stream, |conn| conn.stream).ok()
    }

    /// Returns the time of the next check of deadlines; `None` if there are none.
    pub(super) fn look_at(&self) -> Option<Instant> {
        self.look_at
    }

    fn add(&mut self, stream: u32, state: State) {
        // Numbers ascend within a session. A connection left over from an earlier session has number 0, which no
        // look-up uses.
        let at = self.conns.partition_point(|conn| conn.stream < stream);
        self.conns.insert(at, Conn::new(stream, state));
        self.look_at.get_or_insert_with(|| Instant::now() + LOOK);
    }

    /// Relay: asks the guest to connect.
    pub(super) fn call(&mut self, session: &mut Session, target: Target, answer: Answer) {
        // If the caller is gone, the result is dropped.
        let refuse = |answer: Answer, why| drop(answer.send(Err(why)));
        if session.epoch() == 0 {
            return refuse(answer, DialError::Away);
        }
        if !session.speaks_dial() {
            return refuse(answer, DialError::Unknown);
        }
        if self.conns.len() >= self.bounds.connections {
            return refuse(answer, DialError::TooMany);
        }
        match session.open(StreamKind::Dial(target)) {
            Some(stream) => {
                self.add(stream, State::Calling(Some(answer), Instant::now() + self.bounds.call));
            }
            None => refuse(answer, DialError::TooMany),
        }
    }

    /// Guest: handles a call of the relay.
    pub(super) fn called(
        &mut self,
        session: &mut Session,
        stream: u32,
        dial: impl FnOnce() -> BoxFuture<'static, io::Result<TcpStream>>,
    ) {
        if self.conns.len() >= self.bounds.connections {
            return session.close(stream, CloseReason::Refused);
        }
        self.add(stream, State::Dialling(dial(), Instant::now() + self.bounds.connect));
    }

    /// Relay: handles the guest's report that it has connected.
    pub(super) fn connected(&mut self, shared: &Arc<Shared>, stream: u32) {
        let Some(at) = self.at(stream) else { return };
        let conn = &mut self.conns[at];
        let State::Calling(answer, _) = &mut conn.state else { return };
        let answer = answer.take();
        conn.state = State::Parked(Instant::now() + self.bounds.park);
        let call = Some(Call { generation: self.generation, stream });
        if let Some(answer) = answer {
            // If the caller is gone, the dropped `Connected` closes the connection.
            drop(answer.send(Ok(Connected { shared: shared.clone(), call })));
        }
    }

    /// Relay: joins the local socket to a call.
    pub(super) fn join(&mut self, call: Call, socket: TcpStream) {
        let at = self.at(call.stream).filter(|_| call.generation == self.generation);
        match at.map(|at| &mut self.conns[at]) {
            Some(conn) if matches!(conn.state, State::Parked(_)) => {
                prepare(&socket);
                conn.state = State::Open(socket);
            }
            _ => reset(socket),
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

    /// Writes received bytes of a stream to its socket.
    pub(super) fn data(&mut self, cx: &mut Context<'_>, session: &mut Session, stream: u32, data: &[u8]) {
        let Some(at) = self.at(stream) else { return };
        let conn = &mut self.conns[at];
        conn.owed += data.len();
        let mut written = 0;
        if let (State::Open(socket), true) = (&mut conn.state, conn.out.is_empty()) {
            // An error recurs when the rest is written.
            if let Poll::Ready(Ok(n)) = Pin::new(socket).poll_write(cx, data) {
                written = n;
            }
        }
        conn.out.extend_from_slice(&data[written..]);
        session.consumed(stream, conn.take_credit());
    }

    /// Handles a Finish of the peer: it sends no more bytes on this stream.
    pub(super) fn finished(&mut self, stream: u32) {
        if let Some(at) = self.at(stream) {
            self.conns[at].finished = true;
        }
    }

    /// Handles a Close of the peer.
    pub(super) fn closed(&mut self, stream: u32, reason: CloseReason) {
        let Some(at) = self.at(stream) else { return };
        let why = if reason == CloseReason::Refused { DialError::Refused } else { DialError::Failed };
        if self.conns[at].ended(why) {
            self.conns.remove(at).reset();
        }
    }

    /// Handles the loss of the session and of all its streams.
    pub(super) fn lost(&mut self) {
        self.generation += 1;
        for mut conn in std::mem::take(&mut self.conns) {
            if conn.ended(DialError::Away) {
                conn.reset();
            } else {
                // The remaining bytes are still written; number 0 keeps look-ups from finding the connection.
                conn.stream = 0;
                self.conns.push(conn);
            }
        }
    }

    /// Moves bytes between the sockets and the session.
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
                Next::Broken => conn.reset(),
                _ => conn.let_go(),
            }
        }
        moved
    }

    /// Ends calls and connections past their deadline.
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
            session.close(conn.stream, CloseReason::Failed);
            false
        });
        self.look_at = timed.then(|| now + LOOK);
    }

    /// Resets all connections when the endpoint ends.
    pub(super) fn end(&mut self) {
        std::mem::take(&mut self.conns).into_iter().for_each(Conn::reset);
    }
}

/// Result of one poll.
#[derive(Default)]
pub(super) struct Moved {
    pub(super) any: bool,
    /// Bytes read from sockets.
    pub(super) to_peer: u64,
}

impl Conn {
    fn new(stream: u32, state: State) -> Conn {
        Conn {
            stream,
            state,
            alive: true,
            out: BytesMut::new(),
            owed: 0,
            read_done: false,
            finished: false,
            shut: false,
        }
    }

    /// Stream number; 0 = the stream's session is lost.
    pub(super) fn stream(&self) -> u32 {
        self.stream
    }

    /// Returns the serialised state and appends the socket to `sockets`. Returns `None` if there is no connection
    /// yet; its caller gets an error then.
    pub(super) fn state(&self, sockets: &mut Vec<OwnedFd>) -> io::Result<Option<DialledState>> {
        let State::Open(socket) = &self.state else { return Ok(None) };
        sockets.push(freeze::copy(socket)?);
        Ok(Some(DialledState {
            stream: self.stream,
            alive: self.alive,
            out: self.out.to_vec(),
            owed: self.owed,
            read_done: self.read_done,
            finished: self.finished,
            shut: self.shut,
        }))
    }

    /// The inverse of [`Conn::state`].
    pub(super) fn restore(socket: TcpStream, state: DialledState) -> Conn {
        Conn {
            stream: state.stream,
            state: State::Open(socket),
            alive: state.alive,
            out: BytesMut::from(&state.out[..]),
            owed: state.owed,
            read_done: state.read_done,
            finished: state.finished,
            shut: state.shut,
        }
    }

    fn take_credit(&mut self) -> usize {
        let credit = self.owed.saturating_sub(self.out.len());
        self.owed -= credit;
        credit
    }

    /// Handles the end of the stream; returns whether to reset the connection now. If the peer has sent Finish, the
    /// connection waits until its socket has taken all bytes.
    fn ended(&mut self, why: DialError) -> bool {
        self.alive = false;
        match &mut self.state {
            State::Calling(answer, _) => {
                if let Some(answer) = answer.take() {
                    drop(answer.send(Err(why))); // The caller may be gone.
                }
                true
            }
            State::Parked(_) | State::Dialling(..) => true,
            State::Open(_) if self.finished => false,
            State::Open(socket) => {
                // The reader still gets the bytes before the end, as far as the socket takes them at once.
                drop(socket.try_write(&self.out));
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
                    session.accept(self.stream);
                    moved.any = true;
                }
                Poll::Ready(Err(error)) => {
                    let refused = error.kind() == io::ErrorKind::ConnectionRefused;
                    let reason = if refused { CloseReason::Refused } else { CloseReason::Failed };
                    tracing::debug!(%error, "cannot dial the pod's localhost");
                    session.close(self.stream, reason);
                    return Next::Done;
                }
            }
        }
        let next = self.exchange(cx, session, moved);
        if self.alive {
            match next {
                Next::Goes => {}
                Next::Done => session.close(self.stream, CloseReason::Closed),
                Next::Broken => session.close(self.stream, CloseReason::Failed),
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
        if self.alive {
            let credit = self.owed.saturating_sub(self.out.len());
            self.owed -= credit;
            session.consumed(self.stream, credit);
        }
        if self.finished && self.out.is_empty() && !self.shut {
            match Pin::new(&mut *socket).poll_shutdown(cx) {
                Poll::Ready(Ok(())) => self.shut = true,
                Poll::Ready(Err(_)) => return Next::Broken,
                Poll::Pending => {}
            }
        }
        let room = if self.alive && !self.read_done { session.room(self.stream).min(READ) } else { 0 };
        if room > 0 {
            let mut buffer = pool::take(Size::Read);
            let read = poll_read(socket, cx, &mut buffer[..room]);
            match read {
                Poll::Ready(Ok(0)) => {
                    self.read_done = true;
                    session.finish(self.stream);
                    moved.any = true;
                }
                Poll::Ready(Ok(n)) => {
                    session.send(self.stream, &buffer[..n]);
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
        if self.shut && (self.read_done || !self.alive) { Next::Done } else { Next::Goes }
    }

    /// Writes the waiting bytes; returns whether any were written.
    fn write(&mut self, cx: &mut Context<'_>) -> io::Result<bool> {
        let State::Open(socket) = &mut self.state else { return Ok(false) };
        let mut wrote = false;
        while !self.out.is_empty() {
            match Pin::new(&mut *socket).poll_write(cx, &self.out) {
                Poll::Ready(Ok(0)) => return Err(io::ErrorKind::WriteZero.into()),
                Poll::Ready(Ok(n)) => {
                    self.out.advance(n);
                    wrote = true;
                }
                Poll::Ready(Err(error)) => return Err(error),
                Poll::Pending => break,
            }
        }
        if wrote && self.out.is_empty() {
            self.out = BytesMut::new(); // an empty buffer is not kept
        }
        Ok(wrote)
    }

    /// Ends a connection after its socket has taken all bytes; the kernel may still be sending them.
    fn let_go(self) {
        if let State::Open(socket) = self.state {
            linger(&socket, None);
        }
    }

    fn reset(self) {
        if let State::Open(socket) = self.state {
            reset(socket);
        }
    }
}

/// Disables the Nagle delay. Sets linger 0, so that a crash of this program resets the connection instead of ending
/// it like a complete transfer.
fn prepare(socket: &TcpStream) {
    linger(socket, Some(Duration::ZERO));
    if let Err(error) = socket.set_nodelay(true) {
        tracing::debug!(%error, "a dialled connection keeps its delay");
    }
}

fn reset(socket: TcpStream) {
    linger(&socket, Some(Duration::ZERO));
}

fn linger(socket: &TcpStream, time: Option<Duration>) {
    if let Err(error) = SockRef::from(socket).set_linger(time) {
        tracing::debug!(%error, "how a dialled connection ends is not set");
    }
}
