//! Controls a running endpoint through a command queue that its task empties, and reads its counters.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::task::Context;

use bytes::Bytes;
use futures_util::task::AtomicWaker;
use parking_lot::Mutex;
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::oneshot;

use super::dialled::{Call, Connected, DialAnswer, DialError};
use super::{Frozen, NotFrozen, Transport};
use crate::record::Target;
use crate::session::CONTROL_COST;

/// Error: the control queue is full because the peer is away or does not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "control message not queued: {waiting} bytes wait for the link already; the guest is away or does not read"
)]
pub struct ControlFull {
    /// Bytes in the queue.
    pub waiting: usize,
}

/// Counters of an endpoint since its creation, not read together atomically.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Stream bytes read from local sockets and passed to the session.
    pub bytes_to_peer: u64,
    /// Stream bytes received from the peer.
    pub bytes_from_peer: u64,
    /// Finished handshakes; reconnects are one fewer.
    pub links: u64,
    /// Sessions lost with their streams.
    pub sessions_lost: u64,
    /// Records sent again after a reconnect.
    pub replayed: u64,
    /// Open local connections.
    pub connections: usize,
    /// Dialled connections that are open or being opened.
    pub dialled: usize,
    /// Buffered bytes: unacknowledged, waiting for credit, or waiting for a local socket.
    pub buffered: usize,
    /// Whether a transport is up.
    pub up: bool,
}

/// Handle to a running [`super::Endpoint`]. Cheap to clone; the endpoint closes when the last clone is dropped.
#[derive(Clone)]
pub struct EndpointHandle {
    shared: Arc<Shared>,
    _last: Arc<CloseOnDrop>,
}

impl fmt::Debug for EndpointHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("EndpointHandle").field(&self.stats()).finish()
    }
}

impl EndpointHandle {
    /// Attaches a new connection after its TLS handshake. After Hello and Welcome it replaces the earlier one.
    pub fn attach(&self, link: Transport) {
        self.shared.push(Command::Attach(link));
    }

    /// Relay: adopts a shim's connection; its first byte opens its stream.
    pub fn adopt(&self, local: UnixStream) {
        self.shared.push(Command::Adopt(local));
    }

    /// Relay: makes the guest connect to a port on the pod's localhost, within [`super::Limits::call`].
    pub async fn dial(&self, target: Target) -> Result<Connected, DialError> {
        let (answer, answered) = oneshot::channel();
        self.shared.push(Command::Dial(target, answer));
        answered.await.unwrap_or(Err(DialError::Away))
    }

    /// Queues a control message for the peer. They survive a reconnect, but no loss of the session.
    pub fn control(&self, message: Bytes) -> Result<(), ControlFull> {
        let shared = &self.shared;
        let room = |waiting: usize| {
            let after = waiting.checked_add(message.len() + CONTROL_COST)?;
            (waiting == 0 || after <= shared.control_limit).then_some(after)
        };
        shared
            .control_waiting
            .fetch_update(AcqRel, Relaxed, room)
            .map_err(|waiting| ControlFull { waiting })?;
        shared.push(Command::Control(message));
        Ok(())
    }

    /// Stops the endpoint and returns its state. It stays stopped until [`EndpointHandle::thaw`], even if the caller
    /// drops the returned future, unless that happens before the endpoint stops. After an error it continues.
    pub async fn freeze(&self) -> Result<Frozen, NotFrozen> {
        let (answer, answered) = oneshot::channel();
        self.shared.push(Command::Freeze(answer));
        answered.await.unwrap_or(Err(NotFrozen::Ended))
    }

    /// Continues a stopped endpoint. No effect on a running one.
    pub fn thaw(&self) {
        self.shared.go_on();
    }

    /// Ends the endpoint; its `run` returns soon after.
    pub fn close(&self) {
        self.shared.close();
    }

    /// Returns the counters so far.
    pub fn stats(&self) -> Stats {
        *self.shared.stats.lock()
    }
}

struct CloseOnDrop(Arc<Shared>);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0.close();
    }
}

pub(super) enum Command {
    Attach(Transport),
    Adopt(UnixStream),
    Control(Bytes),
    Dial(Target, DialAnswer),
    Join(Call, TcpStream),
    Hang(Call),
    Freeze(oneshot::Sender<Result<Frozen, NotFrozen>>),
}

pub(super) struct Shared {
    queue: Mutex<VecDeque<Command>>,
    /// Lets the task skip the lock while the queue is empty.
    queued: AtomicBool,
    closed: AtomicBool,
    frozen: AtomicBool,
    waker: AtomicWaker,
    control_waiting: AtomicUsize,
    control_limit: usize,
    pub(super) stats: Mutex<Stats>,
}

/// The endpoint's own reference: stops the queue and drops its commands when the endpoint ends in any way.
pub(super) struct Ended(pub(super) Arc<Shared>);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.close();
        let queue = std::mem::take(&mut *self.0.queue.lock());
        drop(queue);
    }
}

impl std::ops::Deref for Ended {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.0
    }
}

pub(super) fn pair(control_limit: usize) -> (Ended, EndpointHandle) {
    let shared = Arc::new(Shared {
        queue: Mutex::default(),
        queued: AtomicBool::new(false),
        closed: AtomicBool::new(false),
        frozen: AtomicBool::new(false),
        waker: AtomicWaker::new(),
        control_waiting: AtomicUsize::new(0),
        control_limit,
        stats: Mutex::default(),
    });
    let handle = EndpointHandle { shared: shared.clone(), _last: Arc::new(CloseOnDrop(shared.clone())) };
    (Ended(shared), handle)
}

impl Shared {
    pub(super) fn push(&self, command: Command) {
        let mut queue = self.queue.lock();
        // The endpoint has ended: the queue would keep the socket open and unread while another handle exists.
        if self.is_closed() {
            return;
        }
        // Only the newest transport counts; a stopped endpoint would otherwise collect transports.
        let mut replaced = Vec::new();
        if matches!(command, Command::Attach(..)) {
            for waiting in std::mem::take(&mut *queue) {
                let is_older = matches!(waiting, Command::Attach(..));
                if is_older { replaced.push(waiting) } else { queue.push_back(waiting) }
            }
        }
        queue.push_back(command);
        drop(queue);
        drop(replaced);
        self.queued.store(true, Release);
        self.waker.wake();
    }

    fn close(&self) {
        self.closed.store(true, Release);
        self.waker.wake();
    }

    /// Registers the task's waker. Call it before [`Shared::take`] in the same poll, so that no command is missed.
    pub(super) fn register(&self, cx: &Context<'_>) {
        self.waker.register(cx.waker());
    }

    pub(super) fn take(&self) -> VecDeque<Command> {
        if self.queued.load(Acquire) && self.queued.swap(false, AcqRel) {
            std::mem::take(&mut *self.queue.lock())
        } else {
            VecDeque::new()
        }
    }

    /// Returns whether the task is stopped. Only the task itself stops.
    pub(super) fn is_frozen(&self) -> bool {
        self.frozen.load(Acquire)
    }

    pub(super) fn stand_still(&self) {
        self.frozen.store(true, Release);
    }

    pub(super) fn go_on(&self) {
        self.frozen.store(false, Release);
        self.waker.wake();
    }

    /// Adds bytes that already wait when the endpoint starts.
    pub(super) fn control_waits(&self, bytes: usize) {
        self.control_waiting.fetch_add(bytes, AcqRel);
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Acquire)
    }

    /// Subtracts control bytes that left the queue for records, or were dropped.
    pub(super) fn control_left(&self, bytes: usize) {
        if bytes > 0 {
            self.control_waiting.fetch_sub(bytes, AcqRel);
        }
    }
}
