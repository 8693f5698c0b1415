//! Implements one end of a link: drives the session of one sandbox between its transport (a TLS connection that may
//! break and be replaced) and its local connections (unix sockets of shims at the relay, of the agent in the guest).
//!
//! One task per sandbox, [`Endpoint::run`], polls the transport, the local sockets, the command queue and the clock.
//! Code of the relay or the guest comes in through [`Handler`] (one per endpoint) and [`Filter`] (one per connection).
//!
//! Bounds: a local connection holds at most the stream's window of undelivered bytes, the session at most
//! [`REPLAY`](crate::session::REPLAY) unacknowledged bytes; then reading stops. Without a transport, local sockets are not read.

mod dialled;
mod freeze;
mod handle;
mod join;
mod local;
mod socket;
mod task;
mod tls;
mod transport;

use std::net::SocketAddr;
use std::task::{Context, Poll};
use std::time::Duration;
use std::{fmt, io};

use bytes::{Bytes, BytesMut};
use futures_util::future::BoxFuture;
use tokio::net::{TcpStream, UnixStream};

pub use self::dialled::{Connected, DialError};
pub use self::freeze::{EndpointState, Frozen, NotFrozen};
pub use self::handle::{ControlFull, EndpointHandle, Stats};
pub use self::transport::{Transport, tune};
pub use crate::record::{Level, Line, SessionId, Target};

/// Role of an endpoint. The guest sends Hello and dials local ends; the relay answers and opens streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The node's side.
    Relay,
    /// The VM's side.
    Guest,
}

/// Change in the state of the link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkEvent {
    /// A transport finished its handshake.
    Up {
        /// Whether the earlier streams continue. A first connection is not resumed.
        resumed: bool,
        /// Session of the guest program.
        session: SessionId,
        /// Address of the peer.
        peer: SocketAddr,
        /// Version of the peer's program, for display.
        version: String,
    },
    /// The transport is lost, or never finished its handshake. Another one may be attached at any time.
    Down {
        /// Reason, as text.
        reason: String,
        /// Whether the peer broke the protocol.
        violation: bool,
    },
    /// The peer no longer holds the session (its program restarted): all streams and control messages are lost.
    /// Precedes the `Up`.
    SessionLost,
}

/// Callbacks of an endpoint to its owner. They run in the endpoint's task and must not block.
pub trait Handler: Send + 'static {
    /// Returns a filter for a new local connection (relay: accepted from a shim; guest: dialled to the agent).
    fn filter(&mut self) -> Box<dyn Filter>;
    /// Guest: opens the local end of a stream that the peer opened. The relay returns an error.
    fn dial(&mut self) -> BoxFuture<'static, io::Result<UnixStream>>;
    /// Guest: connects to a port on the pod's localhost, for a stream that the relay dialled.
    fn dial_pod(&mut self, target: Target) -> BoxFuture<'static, io::Result<TcpStream>> {
        let refused =
            io::Error::new(io::ErrorKind::ConnectionRefused, format!("nothing dials {target:?} here"));
        Box::pin(std::future::ready(Err(refused)))
    }
    /// Receives a control message from the peer. Control messages have no credit: a handler that keeps them must bound
    /// their number.
    fn on_control(&mut self, message: Bytes);
    /// Guest: returns the next log record, encoded by [`Line::encode`]. Polled only when no other data waits for the
    /// link. The session keeps the returned record and sends it again if the connection breaks.
    fn poll_line(&mut self, _cx: &mut Context<'_>) -> Poll<Vec<u8>> {
        Poll::Pending
    }
    /// Relay: receives a record of the guest's log. A handler that keeps or writes records must bound their number.
    fn on_line(&mut self, _line: Line<'_>) {}
    /// Called when the link comes up, goes down or loses its session.
    fn on_link(&mut self, event: LinkEvent);
    /// Called when the number of local connections changes.
    fn on_connections(&mut self, open: usize);
}

/// Filter between a local socket and its stream. It must hold O(1) memory, except for frames that it rewrites (at
/// most 4 MiB). It only appends to the given buffers, which may hold bytes already.
// `from_` names the source of the bytes, not a conversion.
#[allow(clippy::wrong_self_convention)]
pub trait Filter: Send {
    /// Processes bytes from the local socket: appends bytes for the peer to `peer` and local answers to `local`.
    fn from_local(&mut self, input: &[u8], peer: &mut BytesMut, local: &mut BytesMut);
    /// Processes bytes from the peer: appends bytes for the local socket to `local`, answers to `peer`.
    fn from_peer(&mut self, input: &[u8], peer: &mut BytesMut, local: &mut BytesMut);
    /// Returns whether input from the local socket goes to the peer unchanged and without an answer, which saves a
    /// copy. On true the filter has processed it; on false it has not, and `from_local` follows.
    fn passes_from_local(&mut self, _input: &[u8]) -> bool {
        false
    }
    /// As `passes_from_local`, for bytes from the peer to the local socket; on false `from_peer` follows.
    fn passes_from_peer(&mut self, _input: &[u8]) -> bool {
        false
    }
    /// Appends output that no input caused, and returns whether it appended any. The context wakes the endpoint's task.
    fn poll(&mut self, _cx: &mut Context<'_>, _peer: &mut BytesMut, _local: &mut BytesMut) -> bool {
        false
    }
    /// Number of bytes of own answers to the local socket that wait for the end of a frame. Many stop its reading.
    fn answers_waiting(&self) -> usize {
        0
    }
    /// Handles the loss of the stream. Appends answers for pending calls to `local` and returns whether the local socket
    /// stays open. If so, the next byte to the peer opens a new stream, which must not begin with the rest of a cut
    /// frame. If the peer's program was replaced, calls to ask again go to `again`; `None` if the peer closed the stream.
    fn stream_lost(&mut self, again: Option<&mut BytesMut>, local: &mut BytesMut) -> bool;
    /// Appends final answers to pending calls: the endpoint ends (the sandbox is over) and the local socket is about
    /// to close. The endpoint writes as much of them as the socket takes at once.
    fn finish(&mut self, _local: &mut BytesMut) {}
    /// Returns the state from which a filter of another process can continue; `None` if that is impossible.
    fn state(&self) -> Option<serde_json::Value> {
        None
    }
    /// Restores the state of another filter; returns false if the state is invalid here.
    fn restore(&mut self, _state: &serde_json::Value) -> bool {
        false
    }
}

/// Limits of one endpoint.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Send a Ping after this time without other output.
    pub heartbeat: Duration,
    /// Treat a link as dead after this time without input.
    pub silence: Duration,
    /// Time limit for Hello and Welcome on a new transport.
    pub handshake: Duration,
    /// Relay: time to wait for the guest's answer to a dialled connection.
    pub call: Duration,
    /// Relay: time that an established dialled connection waits for its local socket.
    pub park: Duration,
    /// Most local connections.
    pub connections: usize,
    /// Most dialled connections.
    pub dialled: usize,
    /// Most bytes of control messages that wait for sending.
    pub control_queue: usize,
    /// Longest control message accepted from the peer, in bytes.
    pub control_message: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            heartbeat: Duration::from_secs(2),
            silence: Duration::from_secs(8),
            handshake: Duration::from_secs(5),
            call: Duration::from_secs(5),
            park: Duration::from_secs(3),
            connections: 1024,
            dialled: 512,
            control_queue: 4 << 20,
            control_message: 1 << 20,
        }
    }
}

/// One end of a link; see the module documentation.
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
    /// Returns an endpoint without transport and connections, and its handle. It closes with the last clone of that.
    pub fn new(role: Role, handler: H, limits: Limits) -> (Endpoint<H>, EndpointHandle) {
        let (shared, handle) = handle::pair(limits.control_queue);
        (Endpoint { role, handler, limits, shared, restored: None }, handle)
    }

    /// Returns the relay's endpoint of another process with its connections, from the result of
    /// [`EndpointHandle::freeze`] there. It reads and writes nothing before it runs.
    pub fn restore(
        mut handler: H,
        limits: Limits,
        frozen: Frozen,
    ) -> Result<(Endpoint<H>, EndpointHandle), NotFrozen> {
        let restored = freeze::Restored::read(&mut handler, &limits, frozen)?;
        let (mut endpoint, handle) = Endpoint::new(Role::Relay, handler, limits);
        endpoint.shared.control_waits(restored.session.control_waiting());
        endpoint.restored = Some(restored);
        Ok((endpoint, handle))
    }

    /// Drives the link until [`EndpointHandle::close`] and returns the handler. Dropping the future closes all sockets.
    pub async fn run(self) -> H {
        let mut task = task::Task::new(self.role, self.handler, self.limits, self.shared);
        if let Some(restored) = self.restored {
            task.resume(restored);
        }
        std::future::poll_fn(|cx| task.poll(cx)).await;
        task.handler
    }
}
