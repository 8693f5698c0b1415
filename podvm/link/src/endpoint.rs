//! One end of a link: drives the session of one sandbox between its transport (a TLS connection that may break and be
//! replaced) and its local connections (unix sockets: shims' at the relay, the agent's in the guest).
//!
//! Everything of a sandbox happens in one task, [`Endpoint::run`]: it polls the transport, the local sockets, the
//! command queue and the clock, and hands bytes from one to the other without a queue between tasks. What belongs to
//! the relay or the guest alone comes in through [`Handler`] (one per endpoint) and [`Filter`] (one per connection).
//!
//! Bounds: a local connection holds at most the stream's window of undelivered bytes, the session at most
//! [`Limits::replay`] of unacknowledged ones; beyond either, reading stops. While there is no transport local sockets
//! stay open and are simply not read. Idle connections hold no buffer.

mod dialled;
mod freeze;
mod handle;
mod join;
mod local;
mod stats;
mod task;
mod tls;
mod transport;

use std::{
    fmt, io,
    net::SocketAddr,
    task::{Context, Poll},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use futures_util::future::BoxFuture;
use tokio::net::{TcpStream, UnixStream};

pub use self::{
    dialled::{Connected, DialError},
    freeze::{EndpointState, Frozen, NotFrozen},
    handle::{ControlFull, EndpointHandle},
    stats::Stats,
    transport::{Transport, tune},
};
pub use crate::record::{Level, Line, SessionId, Target};

/// Which end this is. The guest says Hello and dials local ends; the relay answers and opens streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The node's side.
    Relay,
    /// The VM's side.
    Guest,
}

/// What happened to the link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkEvent {
    /// A transport finished its handshake.
    Up {
        /// Whether the streams of before go on. A first connection is not resumed.
        resumed: bool,
        /// The guest program's session.
        session: SessionId,
        /// The transport's other end.
        peer: SocketAddr,
        /// The other program's version, for people.
        version: String,
    },
    /// The transport is gone (or never finished its handshake); another one may be attached at any time.
    Down {
        /// Why, in words.
        reason: String,
    },
    /// The peer does not have the session any more (its program restarted): all streams and all control messages
    /// under way are gone. Comes before the `Up` of the new session.
    SessionLost,
}

/// What an endpoint asks of its owner. Called from the endpoint's task: must not block.
pub trait Handler: Send + 'static {
    /// A filter for a new local connection (relay: accepted from a shim; guest: dialled to the agent).
    fn filter(&mut self) -> Box<dyn Filter>;
    /// Guest: opens the local end of a stream that the peer opened. The relay refuses with an error.
    fn dial(&mut self) -> BoxFuture<'static, io::Result<UnixStream>>;
    /// Guest: connects to a port of the pod's localhost, for a stream that the relay dialled.
    fn dial_pod(&mut self, target: Target) -> BoxFuture<'static, io::Result<TcpStream>> {
        let refused =
            io::Error::new(io::ErrorKind::ConnectionRefused, format!("nothing dials {target:?} here"));
        Box::pin(std::future::ready(Err(refused)))
    }
    /// A control message from the peer. They have no credit: a handler that keeps them bounds how many.
    fn on_control(&mut self, message: Bytes);
    /// Guest: the next line of its log, as [`Line::encode`] makes it. Asked only when nothing else waits for the link; a
    /// line that was given counts as said, and is sent again by the session when the connection breaks.
    fn poll_line(&mut self, cx: &mut Context<'_>) -> Poll<Vec<u8>> {
        let _ = cx;
        Poll::Pending
    }
    /// Relay: a line of the guest's log. There is no bound on how many come: a handler that keeps or writes them has one.
    fn on_line(&mut self, line: Line<'_>) {
        let _ = line;
    }
    /// The link came up, went down or lost its session.
    fn on_link(&mut self, event: LinkEvent);
    /// The number of local connections changed.
    fn on_connections(&mut self, open: usize);
}

/// Sits between a local socket and its stream. Must hold O(1) memory except for frames it rewrites (at most 4 MiB).
/// Appends to the given buffers only; they may hold bytes already.
// `from_` says where the bytes come from, not what the value is made of.
#[allow(clippy::wrong_self_convention)]
pub trait Filter: Send {
    /// Bytes from the local socket: append what goes to the peer to `peer`, what is answered locally to `local`.
    fn from_local(&mut self, input: &[u8], peer: &mut BytesMut, local: &mut BytesMut);
    /// Bytes from the peer: append what goes to the local socket to `local`, what is answered to the peer to `peer`.
    fn from_peer(&mut self, input: &[u8], peer: &mut BytesMut, local: &mut BytesMut);
    /// A shortcut that spares a copy: whether `input` from the local socket goes to the peer exactly as it is, with
    /// nothing to answer. Yes means that the filter has taken note of it; no, that it has not, and `from_local` follows.
    fn passes_from_local(&mut self, input: &[u8]) -> bool {
        let _ = input;
        false
    }
    /// The same for bytes from the peer that go to the local socket exactly as they are; else `from_peer` follows.
    fn passes_from_peer(&mut self, input: &[u8]) -> bool {
        let _ = input;
        false
    }
    /// What the filter has to say without having been given anything: called whenever the endpoint's task runs; `cx` wakes
    /// it. Append as in the other calls; whether anything was.
    fn poll(&mut self, cx: &mut Context<'_>, peer: &mut BytesMut, local: &mut BytesMut) -> bool {
        let _ = (cx, peer, local);
        false
    }
    /// Bytes of its own answers to the local socket that wait for the end of a frame. Many of them stop the reading of the
    /// socket, as answers do that the socket does not take.
    fn answers_waiting(&self) -> usize {
        0
    }
    /// The stream behind is lost (another guest program, or the peer closed it). Append answers for pending calls to
    /// `local`; return whether the local socket stays open (a new stream is then opened at the next byte to the peer:
    /// the rest of a frame that was cut by the loss must not become the new stream's beginning).
    fn stream_lost(&mut self, local: &mut BytesMut) -> bool;
    /// The endpoint ends (the sandbox is over) and the local socket is about to be closed: a last chance to answer
    /// what is still pending. Written as far as the socket takes it at once.
    fn finish(&mut self, local: &mut BytesMut) {
        let _ = local;
    }
    /// What a filter of another process needs to go on where this one stands; `None`: that cannot be.
    fn state(&self) -> Option<serde_json::Value> {
        None
    }
    /// Goes on where that one stood; false: it makes no sense here.
    fn restore(&mut self, state: &serde_json::Value) -> bool {
        let _ = state;
        false
    }
}

/// Bounds in time and space of one endpoint.
#[derive(Clone, Debug)]
pub struct Limits {
    /// A Ping is sent when nothing else was for so long.
    pub heartbeat: Duration,
    /// A link that was silent for so long is dead.
    pub silence: Duration,
    /// A new transport must have finished Hello and Welcome in this time.
    pub handshake: Duration,
    /// The guest's dial of the agent may take so long.
    pub dial: Duration,
    /// A dialled connection: what the relay waits for the guest's answer, what the guest takes to connect, and how long
    /// one that stands waits for its local socket.
    pub call: Duration,
    /// See `call`.
    pub connect: Duration,
    /// See `call`.
    pub park: Duration,
    /// Unacknowledged bytes that the session keeps for a replay; beyond, local sockets are not read.
    pub replay: usize,
    /// Bytes made ready for the transport ahead of what it took: what a control message may have in front of it.
    pub ahead: usize,
    /// Local connections.
    pub connections: usize,
    /// Dialled connections.
    pub dialled: usize,
    /// Bytes of control messages that wait for being sent.
    pub control_queue: usize,
    /// The longest control message taken from the peer.
    pub control_message: usize,
    /// This program's version, told to the peer.
    pub version: String,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            heartbeat: Duration::from_secs(2),
            silence: Duration::from_secs(8),
            handshake: Duration::from_secs(5),
            dial: Duration::from_secs(10),
            call: Duration::from_secs(5),
            connect: Duration::from_secs(3),
            park: Duration::from_secs(3),
            replay: 1 << 20,
            ahead: 128 << 10,
            connections: 1024,
            dialled: 512,
            control_queue: 4 << 20,
            control_message: 1 << 20,
            version: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }
}

/// One end of a link; see the module.
pub struct Endpoint<H> {
    role: Role,
    handler: H,
    limits: Limits,
    shared: handle::Ended,
    restored: Option<freeze::Restored>,
}

impl<H> fmt::Debug for Endpoint<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint").field("role", &self.role).finish_non_exhaustive()
    }
}

impl<H: Handler> Endpoint<H> {
    /// An endpoint without transport and connections, and the handle to give it some. When the last clone of the
    /// handle is dropped the endpoint closes.
    pub fn new(role: Role, handler: H, limits: Limits) -> (Endpoint<H>, EndpointHandle) {
        let (shared, handle) = handle::pair(limits.control_queue);
        (Endpoint { role, handler, limits, shared, restored: None }, handle)
    }

    /// The relay's endpoint of another process, with its connections, as [`EndpointHandle::freeze`] gave it there. Nothing
    /// is read or written before it runs.
    ///
    /// # Errors
    /// Why the state is not one.
    pub fn restore(
        mut handler: H,
        limits: Limits,
        frozen: Frozen,
    ) -> Result<(Endpoint<H>, EndpointHandle), NotFrozen> {
        let restored = freeze::Restored::read(&mut handler, &limits, frozen)?;
        let (mut endpoint, handle) = Endpoint::new(Role::Relay, handler, limits);
        endpoint.shared.control_waits(restored.control_waiting());
        endpoint.restored = Some(restored);
        Ok((endpoint, handle))
    }

    /// Drives the link until [`EndpointHandle::close`]; gives the handler back. Dropping the future closes all its
    /// sockets at once.
    pub async fn run(self) -> H {
        let mut task = task::Task::new(self.role, self.handler, self.limits, self.shared);
        if let Some(restored) = self.restored {
            task.resume(restored);
        }
        std::future::poll_fn(|cx| task.poll(cx)).await;
        task.into_handler()
    }
}
