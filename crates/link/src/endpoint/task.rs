//! Runs an endpoint: each poll moves bytes in all directions until none move or the poll's rounds are used up.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::BytesMut;
use tokio::sync::oneshot;
use tokio::time::{Duration, Instant, Sleep, sleep_until};
use tracing::{debug, warn};

use self::locals::Locals;
use super::dialled::Dialled;
use super::freeze::Restored;
use super::handle::{Command, Ended};
use super::join::Joining;
use super::local::Local;
use super::{Frozen, Handler, Limits, LinkEvent, NotFrozen, Role, Stats, Transport};
use crate::record::SessionId;
use crate::session::{Session, SessionLimits};

mod link;
mod locals;

/// Rounds of one poll; then other tasks run.
const ROUNDS: usize = 3;

/// Time limit for writing the rest of a closing connection; after it the rest is dropped.
const LINGER: Duration = Duration::from_secs(1);

/// Interval between checks of connections with a deadline.
pub(super) const LOOK: Duration = Duration::from_millis(100);

pub(super) struct Task<H> {
    role: Role,
    pub(super) handler: H,
    limits: Limits,
    shared: Ended,
    session: Session,
    link: Option<Link>,
    joining: Option<Joining>,
    locals: Locals,
    dialled: Dialled,
    /// Whether dialled connections go first in this round.
    dialled_first: bool,
    alarm: Alarm,
    stats: Stats,
}

/// Timer that is set anew only when its time changes.
struct Alarm {
    sleep: Pin<Box<Sleep>>,
    at: Option<Instant>,
}

impl Alarm {
    fn new() -> Alarm {
        Alarm { sleep: Box::pin(sleep_until(Instant::now())), at: None }
    }

    /// Returns whether the time has come; if not, the task wakes then. `None` turns the alarm off.
    fn is_due(&mut self, cx: &mut Context<'_>, next: Option<Instant>) -> bool {
        let Some(at) = next else {
            self.at = None;
            return false;
        };
        if self.at != next {
            self.sleep.as_mut().reset(at);
            self.at = next;
        }
        let due = self.sleep.as_mut().poll(cx).is_ready();
        if due {
            self.at = None;
        }
        due
    }
}

struct Link {
    transport: Transport,
    /// Received bytes that are not a whole record yet.
    carry: Vec<u8>,
    /// `carry` has not been parsed yet.
    fresh: bool,
    /// Whether bytes were sent or received since the last heartbeat.
    sent: bool,
    received: bool,
    received_at: Instant,
    beat: Instant,
}

/// Buffers that filters append to; each thread has one set and lends it for one poll.
#[derive(Default)]
struct Scratch {
    peer: BytesMut,
    local: BytesMut,
}

/// A scratch buffer that grew beyond this size (a rewritten message) is dropped.
const SCRATCH_KEPT: usize = 256 << 10;

thread_local! {
    static SCRATCH: std::cell::Cell<Option<Box<Scratch>>> = const { std::cell::Cell::new(None) };
}

impl Scratch {
    fn lend() -> Box<Scratch> {
        SCRATCH.take().unwrap_or_default()
    }

    fn give_back(mut self: Box<Self>) {
        for buffer in [&mut self.peer, &mut self.local] {
            buffer.clear();
            if buffer.capacity() > SCRATCH_KEPT {
                *buffer = BytesMut::new();
            }
        }
        SCRATCH.set(Some(self));
    }
}

pub(super) fn bounds(limits: &Limits) -> SessionLimits {
    SessionLimits { streams: limits.connections + limits.dialled, control_message: limits.control_message }
}

impl<H: Handler> Task<H> {
    pub(super) fn new(role: Role, handler: H, limits: Limits, shared: Ended) -> Task<H> {
        let id = (role == Role::Guest).then(random_id);
        let bounds = bounds(&limits);
        Task {
            role,
            handler,
            limits,
            shared,
            session: Session::new(role, id, bounds),
            link: None,
            joining: None,
            locals: Locals::default(),
            dialled: Dialled::default(),
            dialled_first: false,
            alarm: Alarm::new(),
            stats: Stats::default(),
        }
    }

    pub(super) fn resume(&mut self, Restored { session, locals, dialled }: Restored) {
        self.session = session;
        for local in locals {
            let stream = local.stream;
            let at = self.locals.insert(local);
            if let Some(stream) = stream {
                self.locals.by_stream.insert(stream, at);
            }
        }
        self.dialled.conns = dialled;
        // The other process has reported a number, from which even the first one here may differ.
        self.locals.reported = usize::MAX;
    }

    /// Stops the endpoint and sends its state. If the receiver is gone, the endpoint continues: nothing would thaw it.
    fn freeze(&self, asked: oneshot::Sender<Result<Frozen, NotFrozen>>) {
        let frozen =
            Frozen::take(&self.session, self.locals.slots.iter().flatten(), self.dialled.conns.iter());
        let stands = frozen.is_ok();
        if stands {
            self.shared.stand_still();
        }
        if asked.send(frozen).is_err() && stands {
            self.shared.go_on();
        }
    }

    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.shared.register(cx);
        if self.shared.is_frozen() {
            return Poll::Pending;
        }
        let mut scratch = Scratch::lend();
        let mut moved = true;
        for _ in 0..ROUNDS {
            if self.shared.is_closed() {
                self.finish(cx, &mut scratch);
                return Poll::Ready(());
            }
            moved = self.round(cx, &mut scratch);
            if !moved || self.shared.is_frozen() {
                break;
            }
        }
        scratch.give_back();
        if self.shared.is_frozen() {
            return Poll::Pending;
        }
        self.publish();
        self.poll_timer(cx);
        if moved {
            cx.waker().wake_by_ref();
        }
        Poll::Pending
    }

    fn round(&mut self, cx: &mut Context<'_>, scratch: &mut Scratch) -> bool {
        let mut moved = self.commands();
        if self.shared.is_frozen() {
            return false;
        }
        moved |= self.poll_joining(cx);
        moved |= self.poll_receive(cx, scratch);
        // Both share the session's room, so they take turns.
        self.dialled_first = !self.dialled_first;
        if self.dialled_first {
            moved |= self.poll_dialled(cx);
        }
        moved |= self.poll_locals(cx, scratch);
        if !self.dialled_first {
            moved |= self.poll_dialled(cx);
        }
        moved |= self.poll_lines(cx);
        moved |= self.poll_send(cx);
        moved
    }

    /// Sends log records, after all other data.
    fn poll_lines(&mut self, cx: &mut Context<'_>) -> bool {
        let mut moved = false;
        while self.link.is_some() && self.session.has_room_for_line() {
            let Poll::Ready(line) = self.handler.poll_line(cx) else { break };
            self.session.line(&line);
            moved = true;
        }
        moved
    }

    fn poll_dialled(&mut self, cx: &mut Context<'_>) -> bool {
        let moved = self.dialled.poll(cx, &mut self.session);
        self.stats.bytes_to_peer += moved.to_peer;
        moved.any
    }

    fn commands(&mut self) -> bool {
        let commands = self.shared.take();
        let any = !commands.is_empty();
        let mut freezing = None;
        for command in commands {
            match command {
                Command::Attach(transport) => self.attach(transport),
                Command::Control(message) => self.session.control(message),
                Command::Dial(target, answer) => {
                    self.dialled.call(&mut self.session, &self.limits, target, answer)
                }
                Command::Join(call, socket) => self.dialled.join(call, socket),
                Command::Freeze(asked) => freezing = Some(asked),
                Command::Hang(call) => self.dialled.hang(&mut self.session, call),
                Command::Adopt(socket) => {
                    if self.locals.open < self.limits.connections {
                        match Local::accepted(socket, self.handler.filter()) {
                            Ok(local) => drop(self.locals.insert(local)),
                            Err(error) => warn!(%error, "local connection refused: it cannot be watched"),
                        }
                    } else {
                        debug!(
                            limit = self.limits.connections,
                            "local connection refused: too many are open"
                        );
                    }
                }
            }
        }
        // Freezing comes after all commands queued with it.
        if let Some(asked) = freezing {
            self.freeze(asked);
        }
        any
    }

    fn attach(&mut self, transport: Transport) {
        // The guest's Hello carries the last received number, so the old connection must deliver no more.
        let mut hello = None;
        if self.role == Role::Guest {
            self.down("replaced by a newer connection");
            hello = self.session.hello();
        }
        let deadline = Instant::now() + self.limits.handshake;
        match Joining::new(transport, hello.as_ref(), deadline) {
            Ok(joining) => self.joining = Some(joining),
            Err(why) => self.refuse(why.to_string()),
        }
    }

    /// Reports a transport that never came up.
    fn refuse(&mut self, reason: String) {
        debug!(reason, "link not joined");
        if self.link.is_none() {
            self.handler.on_link(LinkEvent::Down { reason, violation: false });
        }
    }

    fn finish(&mut self, cx: &mut Context<'_>, scratch: &mut Scratch) {
        for local in self.locals.slots.iter_mut().flatten() {
            scratch.local.clear();
            local.filter.finish(&mut scratch.local);
            local.flush(cx);
            local.write_answer(cx, &scratch.local);
        }
        self.locals.slots.clear();
        self.dialled.end();
        self.locals.open = 0;
        self.link = None;
        self.publish();
    }

    fn publish(&mut self) {
        self.shared.control_left(self.session.control_done());
        self.publish_stats();
        if self.locals.reported != self.locals.open {
            self.locals.reported = self.locals.open;
            self.handler.on_connections(self.locals.open);
        }
    }

    fn publish_stats(&mut self) {
        let waiting = self.locals.waiting + self.dialled.waiting();
        self.stats = Stats {
            replayed: self.session.counts().replayed,
            connections: self.locals.open,
            dialled: self.dialled.conns.len(),
            buffered: self.session.unacknowledged() + waiting,
            up: self.link.is_some(),
            ..self.stats
        };
        *self.shared.stats.lock() = self.stats;
    }

    fn poll_timer(&mut self, cx: &mut Context<'_>) {
        loop {
            let beat = self.link.as_ref().map(|link| link.beat);
            let join = self.joining.as_ref().map(|joining| joining.deadline);
            let next = [beat, join, self.locals.look_at, self.dialled.look_at].into_iter().flatten().min();
            if !self.alarm.is_due(cx, next) {
                return;
            }
            self.tick(Instant::now());
            // The next poll sends the output of this tick.
            cx.waker().wake_by_ref();
        }
    }

    fn tick(&mut self, now: Instant) {
        self.dialled.inspect(&mut self.session, now);
        if self.joining.as_ref().is_some_and(|joining| joining.deadline <= now) {
            self.joining = None;
            self.refuse(format!("handshake: not finished in {:?}", self.limits.handshake));
        }
        if self.locals.look_at.is_some_and(|at| at <= now) {
            self.inspect(now);
        }
        if self.link.as_ref().is_some_and(|link| link.beat <= now) {
            self.beat(now);
        }
    }

    fn lost(&mut self) {
        self.dialled.lost();
        self.stats.sessions_lost += 1;
        self.publish_stats();
        self.handler.on_link(LinkEvent::SessionLost);
        let streams: Vec<usize> = self.locals.by_stream.drain().map(|(_, at)| at).collect();
        for at in streams {
            self.stream_lost(at, true);
        }
    }
}

fn random_id() -> SessionId {
    SessionId(random())
}

fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    if let Err(error) = getrandom::fill(&mut bytes) {
        // No supported kernel refuses. Ids that are merely distinct still suffice, because the link is authenticated.
        debug!(%error, "no random numbers from the kernel");
        let now =
            std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default().as_nanos();
        let seed = now ^ u128::from(std::process::id()) << 64;
        bytes.iter_mut().zip(seed.to_be_bytes()).for_each(|(byte, value)| *byte = value);
    }
    bytes
}
