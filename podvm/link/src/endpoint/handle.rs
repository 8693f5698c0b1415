//! The way to talk to a running endpoint: a queue that its task empties, and counters.

use std::{
    collections::VecDeque,
    fmt,
    sync::{
        Arc,
        atomic::{
            AtomicBool, AtomicUsize,
            Ordering::{AcqRel, Acquire, Relaxed, Release},
        },
    },
    task::Context,
};

use bytes::Bytes;
use futures_util::task::AtomicWaker;
use parking_lot::{Mutex, MutexGuard};
use tokio::{
    net::{TcpStream, UnixStream},
    sync::oneshot,
};

use super::{
    Frozen, NotFrozen, Stats, Transport,
    dialled::{Answer, Call, Connected, DialError},
    stats::Counters,
};
use crate::{
    record::{Hello, Target},
    session::CONTROL_COST,
};

/// The control queue is full: the peer has been away, or does not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "control message not queued: {waiting} bytes wait for the link already; the guest is away or does not read"
)]
pub struct ControlFull {
    /// Bytes that wait.
    pub waiting: usize,
}

/// Talks to a running [`super::Endpoint`]. Cheap to clone; the endpoint closes when the last clone is gone.
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
    /// A new connection, its TLS handshake done. The endpoint does Hello and Welcome itself; from then on the
    /// connection replaces the one before.
    pub fn attach(&self, link: Transport) {
        self.shared.push(Command::Attach(link, None));
    }

    /// Relay: as [`EndpointHandle::attach`], when the guest's Hello was read already
    /// (by [`crate::claim::first_record`]).
    pub fn attach_after(&self, link: Transport, hello: Hello) {
        self.shared.push(Command::Attach(link, Some(hello)));
    }

    /// Relay: a shim's connection; its stream is opened at its first byte.
    pub fn adopt(&self, local: UnixStream) {
        self.shared.push(Command::Adopt(local));
    }

    /// Relay: has the guest connect to a port of the pod's localhost. What comes back waits for its local socket.
    ///
    /// # Errors
    /// Why there is no connection. Always within [`super::Limits::call`].
    pub async fn dial(&self, target: Target) -> Result<Connected, DialError> {
        let (answer, answered) = oneshot::channel();
        self.shared.push(Command::Dial(target, answer));
        answered.await.unwrap_or(Err(DialError::Away))
    }

    /// Queues a control message for the peer. Messages keep their order and survive a reconnect, not a lost session.
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

    /// Makes the endpoint stand still and say what it is. It does until [`EndpointHandle::thaw`]; also when the returned
    /// future is dropped, unless that is before it stands.
    ///
    /// # Errors
    /// It goes on then.
    pub async fn freeze(&self) -> Result<Frozen, NotFrozen> {
        let (answer, answered) = oneshot::channel();
        self.shared.push(Command::Freeze(answer));
        answered.await.unwrap_or(Err(NotFrozen::Ended))
    }

    /// Lets it go on where it stood. Without effect on one that does not stand still.
    pub fn thaw(&self) {
        self.shared.go_on();
    }

    /// Ends the endpoint: its `run` returns soon after.
    pub fn close(&self) {
        self.shared.close();
    }

    /// What it did so far.
    pub fn stats(&self) -> Stats {
        self.shared.counters.read()
    }
}

struct CloseOnDrop(Arc<Shared>);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0.close();
    }
}

pub(super) enum Command {
    Attach(Transport, Option<Hello>),
    Adopt(UnixStream),
    Control(Bytes),
    Dial(Target, Answer),
    Join(Call, TcpStream),
    Hang(Call),
    Freeze(oneshot::Sender<Result<Frozen, NotFrozen>>),
}

pub(super) struct Shared {
    queue: Mutex<VecDeque<Command>>,
    /// Lets the task skip the lock while nothing was queued.
    queued: AtomicBool,
    closed: AtomicBool,
    frozen: AtomicBool,
    waker: AtomicWaker,
    control_waiting: AtomicUsize,
    control_limit: usize,
    pub(super) counters: Counters,
}

/// The endpoint's own share: ends the command queue with it, however it ends.
pub(super) struct Ended(Arc<Shared>);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl Ended {
    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.0
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
        counters: Counters::default(),
    });
    let handle = EndpointHandle { shared: shared.clone(), _last: Arc::new(CloseOnDrop(shared.clone())) };
    (Ended(shared), handle)
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Command>> {
        self.queue.lock()
    }

    pub(super) fn push(&self, command: Command) {
        let mut queue = self.lock();
        // Nobody would take it: a socket must not stay open and unread because somebody still has a handle.
        if self.is_closed() {
            return;
        }
        // Only the newest transport counts. An endpoint that stands still would otherwise collect them.
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

    /// Registers the task; to be called before [`Shared::take`] in the same poll, so that no command is missed.
    pub(super) fn register(&self, cx: &Context<'_>) {
        self.waker.register(cx.waker());
    }

    /// Nothing is taken any more; what was queued is dropped.
    pub(super) fn end(&self) {
        self.close();
        let queue = std::mem::take(&mut *self.lock());
        drop(queue);
    }

    /// What was queued since.
    pub(super) fn take(&self) -> VecDeque<Command> {
        if self.queued.load(Acquire) && self.queued.swap(false, AcqRel) {
            std::mem::take(&mut *self.lock())
        } else {
            VecDeque::new()
        }
    }

    /// Whether the task stands still. Only the task itself begins that.
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

    /// Bytes that wait already when the endpoint begins.
    pub(super) fn control_waits(&self, bytes: usize) {
        self.control_waiting.fetch_add(bytes, AcqRel);
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Acquire)
    }

    /// Control bytes went out of the queue into records (or were dropped).
    pub(super) fn control_left(&self, bytes: usize) {
        if bytes > 0 {
            self.control_waiting.fetch_sub(bytes, AcqRel);
        }
    }
}
