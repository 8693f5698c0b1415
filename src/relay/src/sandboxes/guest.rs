//! The relay's side of one sandbox's guest: the events of its endpoint, and the node's calls that wait for its answers.
//! The endpoint's task calls these methods and must not be delayed: locks are short and nothing waits.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use peerpod_common::limit::RateLimit;
use peerpod_link::endpoint::{Filter, Handler, Line, LinkEvent};
use peerpod_link::path_mtu::echo::Pass;
use peerpod_proto::guest::Reply;
use protobuf::rt::skip_field_for_tag;
use protobuf::{CodedInputStream, Message};
use thiserror::Error;
use tokio::net::UnixStream;
use tokio::sync::{oneshot, watch};

use super::states::States;
use crate::agent::CONNECTIONS;
use crate::agent::filter::{AgentFilter, Bounds, Shared};
use crate::guest_log::GuestLog;
use crate::id::SandboxId;
use crate::metrics::Metrics;
use crate::store::SandboxRecord;

/// Limit of the node's calls that wait for one guest.
const CALLS: usize = 64;
/// Unrequested reports of a guest: a burst, then a rate. It can neither keep the node busy nor fill the log.
const REPORTS: f64 = 50.0;
const REPORTS_PER_SECOND: f64 = 10.0;
/// Bytes of unrequested reports: a burst, then a rate. Others are not decoded.
const REPORT_BYTES: f64 = (256 << 10) as f64;
const REPORT_BYTES_PER_SECOND: f64 = (64 << 10) as f64;
/// Largest status of a guest that is stored, in bytes.
const STATUS_BYTES: usize = 64 << 10;
/// Links of a guest: a burst, then a rate. Each costs log lines here, and a look at the sandbox in the node.
const LINKS: f64 = 60.0;
const LINKS_PER_SECOND: f64 = 2.0;

/// Tag of [`Reply`]'s field `id`: field 1, a number.
const NUMBER: u32 = 1 << 3;

#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(crate) enum Gone {
    #[error("the guest of sandbox {0} is not connected")]
    NotConnected(SandboxId),
    /// The guest program was replaced, or its sandbox deleted, before the answer.
    #[error("the guest program of sandbox {0} was replaced; call the new one")]
    Replaced(SandboxId),
    #[error("{CALLS} calls wait for the guest of sandbox {0}; wait for their answers")]
    TooMany(SandboxId),
}

#[derive(Debug, Default)]
struct Calls {
    last: u64,
    waiting: HashMap<u64, oneshot::Sender<Result<Bytes, Gone>>>,
}

/// Whether a guest's link is up, and the number of its changes, including failed attempts.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Link {
    pub(crate) up: bool,
    pub(crate) changes: u64,
}

/// State of one guest, shared by the endpoint's task and the node's calls.
#[derive(Debug)]
pub(crate) struct Guest {
    id: SandboxId,
    states: Arc<States>,
    metrics: Arc<Metrics>,
    pub(crate) traffic: Arc<Shared>,
    pub(crate) connections: AtomicUsize,
    link: watch::Sender<Link>,
    calls: Mutex<Calls>,
    /// Limits of unrequested reports and of their bytes.
    unrequested: Mutex<[RateLimit; 2]>,
    links: Mutex<RateLimit>,
    log: GuestLog,
    /// Right of the last connection to have its path probes answered.
    probes: Mutex<Option<Pass>>,
}

/// Call in flight; dropping it forgets the call.
pub(crate) struct Waiting<'g> {
    guest: &'g Guest,
    pub(crate) id: u64,
    pub(crate) answer: oneshot::Receiver<Result<Bytes, Gone>>,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.guest.calls.lock().waiting.remove(&self.id);
    }
}

impl Guest {
    pub(crate) fn new(id: SandboxId, states: Arc<States>, metrics: Arc<Metrics>) -> Guest {
        let traffic = Arc::new(Shared::new(id.to_string(), metrics.sandboxes.traffic()));
        let limit = |burst, per_second| RateLimit::new(burst, per_second, Instant::now());
        Guest {
            id,
            states,
            log: GuestLog::new(metrics.clone()),
            metrics,
            traffic,
            connections: AtomicUsize::new(0),
            link: watch::Sender::default(),
            calls: Mutex::default(),
            unrequested: Mutex::new([
                limit(REPORTS, REPORTS_PER_SECOND),
                limit(REPORT_BYTES, REPORT_BYTES_PER_SECOND),
            ]),
            links: Mutex::new(limit(LINKS, LINKS_PER_SECOND)),
            probes: Mutex::default(),
        }
    }

    pub(crate) fn last_call(&self) -> u64 {
        self.calls.lock().last
    }

    /// Continues the numbering from `last`, so that no late answer is taken for that of another call.
    pub(crate) fn count_calls_from(&self, last: u64) {
        self.calls.lock().last = last;
    }

    /// Permits the guest's path probes, until its next connection brings its own pass or the sandbox ends.
    pub(crate) fn may_probe(&self, pass: Pass) {
        *self.probes.lock() = Some(pass);
    }

    /// Uses pod and volumes of the record from now on.
    pub(crate) fn set(&self, record: &SandboxRecord) {
        self.traffic.set(&record.pod, &record.volumes);
    }

    /// Returns `namespace/name`, for log records.
    pub(crate) fn pod(&self) -> String {
        self.traffic.pod()
    }

    /// Whether another connection may become the guest's link.
    pub(crate) fn may_link(&self) -> bool {
        self.links.lock().take(Instant::now())
    }

    /// Whether another connection of a shim may be accepted; counts a refusal.
    pub(crate) fn has_place(&self) -> bool {
        let has = self.connections.load(Relaxed) < CONNECTIONS;
        if !has {
            self.metrics.sandboxes.agent_connections_refused.inc();
        }
        has
    }

    pub(crate) fn watch(&self) -> watch::Receiver<Link> {
        self.link.subscribe()
    }

    /// Registers a call, before its bytes are sent.
    pub(crate) fn call(&self) -> Result<Waiting<'_>, Gone> {
        let mut calls = self.calls.lock();
        if !self.link.borrow().up {
            return Err(Gone::NotConnected(self.id.clone()));
        }
        if calls.waiting.len() >= CALLS {
            return Err(Gone::TooMany(self.id.clone()));
        }
        calls.last += 1;
        let (sender, answer) = oneshot::channel();
        let id = calls.last;
        calls.waiting.insert(id, sender);
        Ok(Waiting { guest: self, id, answer })
    }

    /// Fails all waiting calls: the guest will not answer them.
    pub(crate) fn fail_calls(&self) {
        for (_, sender) in self.calls.lock().waiting.drain() {
            drop(sender.send(Err(Gone::Replaced(self.id.clone())))); // The caller may have left.
        }
    }

    fn set_up(&self, up: bool) {
        let mut before = up;
        self.link.send_modify(|link| {
            before = std::mem::replace(&mut link.up, up);
            link.changes += 1;
        });
        self.metrics.sandboxes.guests_connected.inc_by(i64::from(up) - i64::from(before));
    }

    fn reply(&self, message: &Bytes) {
        // A reply without a number is a report that was not requested.
        let id = number(message).unwrap_or_default();
        let asked = if id == 0 { None } else { self.calls.lock().waiting.remove(&id) };
        if asked.is_none() && !self.may_report(message.len()) {
            self.metrics.guests.reports_dropped.inc();
            return;
        }
        match Reply::parse_from_bytes(message) {
            Ok(reply) => self.keep_status(&reply),
            Err(error) => {
                tracing::warn!(sandbox = %self.id, pod = self.pod(), %error, bytes = message.len(), "cannot decode a message of the guest");
            }
        }
        if let Some(sender) = asked {
            drop(sender.send(Ok(message.clone()))); // The caller may have left.
        }
    }

    fn may_report(&self, bytes: usize) -> bool {
        let now = Instant::now();
        let [reports, of_bytes] = &mut *self.unrequested.lock();
        reports.take(now) && of_bytes.take_many(bytes as f64, now)
    }

    fn keep_status(&self, reply: &Reply) {
        if let Some(status) = reply.status.as_ref() {
            self.traffic.without_agent(if status.agent_running { "" } else { &status.error });
        }
        if let Some(status) = reply.status.as_ref()
            && status.compute_size() <= STATUS_BYTES as u64
            && let Ok(status) = status.write_to_bytes()
        {
            self.states.change(&self.id, |state| state.guest_status = status);
        }
    }

    fn link(&self, event: LinkEvent) {
        match event {
            LinkEvent::Up { resumed, session, peer, version } => {
                self.set_up(true);
                let session = hex::encode(session.0);
                self.states.change(&self.id, |state| {
                    state.reconnects = if resumed { state.reconnects + 1 } else { 0 };
                    state.guest_connected = true;
                    state.guest_session = session.clone();
                    state.guest_address = peer.ip().to_canonical().to_string();
                });
                if resumed {
                    self.metrics.sandboxes.reconnects.inc();
                }
                tracing::info!(sandbox = %self.id, pod = self.pod(), %peer, resumed, session, version, "guest connected");
            }
            LinkEvent::Down { reason, violation } => {
                self.set_up(false);
                self.states.change(&self.id, |state| state.guest_connected = false);
                if violation {
                    tracing::warn!(sandbox = %self.id, pod = self.pod(), reason, "guest disconnected: it broke the protocol");
                } else {
                    tracing::info!(sandbox = %self.id, pod = self.pod(), reason, "guest disconnected");
                }
            }
            LinkEvent::SessionLost => {
                self.metrics.sandboxes.sessions_lost.inc();
                self.fail_calls();
                tracing::warn!(sandbox = %self.id, pod = self.pod(), "the guest program was replaced; calls that wait are asked again, its other pending calls get UNAVAILABLE");
            }
        }
    }

    fn connections(&self, open: usize) {
        let before = self.connections.swap(open, Relaxed);
        self.metrics.sandboxes.agent_connections.inc_by(open as i64 - before as i64);
        self.states.change(&self.id, |state| {
            state.shim_connections = u32::try_from(open).unwrap_or(u32::MAX);
            state.shim_seen |= open > 0;
        });
    }
}

/// Reads the number of a [`Reply`] and nothing else; `None`: it is malformed.
fn number(message: &[u8]) -> Option<u64> {
    let mut input = CodedInputStream::from_bytes(message);
    let mut number = 0;
    while let Some(tag) = input.read_raw_tag_or_eof().ok()? {
        match tag {
            NUMBER => number = input.read_uint64().ok()?,
            _ => skip_field_for_tag(tag, &mut input).ok()?,
        }
    }
    Some(number)
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.set_up(false);
        self.metrics.sandboxes.agent_connections.dec_by(self.connections.load(Relaxed) as i64);
    }
}

#[derive(Debug, Clone)]
pub(crate) struct GuestHandler(pub(crate) Arc<Guest>);

impl Handler for GuestHandler {
    fn filter(&mut self) -> Box<dyn Filter> {
        Box::new(AgentFilter::new(self.0.traffic.clone(), Bounds::default()))
    }

    fn dial(&mut self) -> BoxFuture<'static, io::Result<UnixStream>> {
        let refused = io::Error::new(io::ErrorKind::PermissionDenied, "guests open no streams to the relay");
        Box::pin(std::future::ready(Err(refused)))
    }

    fn on_control(&mut self, message: Bytes) {
        self.0.reply(&message);
    }

    fn on_line(&mut self, line: Line<'_>) {
        self.0.log.line(&self.0.id, || self.0.pod(), &line);
    }

    fn on_link(&mut self, event: LinkEvent) {
        self.0.link(event);
    }

    fn on_connections(&mut self, open: usize) {
        self.0.connections(open);
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use peerpod_link::endpoint::SessionId;
    use peerpod_proto::guest::Status;
    use prometheus_client::registry::Registry;

    use super::*;

    fn guest() -> (Arc<States>, Guest) {
        let states = Arc::new(States::new("e".into()));
        let metrics = Arc::new(Metrics::new(&mut Registry::default()));
        let id = SandboxId::new("a").unwrap();
        let guest = Guest::new(id.clone(), states.clone(), metrics);
        states.put(&id, "", guest.traffic.clone());
        (states, guest)
    }

    fn up(session: u8, resumed: bool) -> LinkEvent {
        let peer = SocketAddr::from(([10, 0, 0, 1], 1));
        LinkEvent::Up { resumed, session: SessionId([session; 16]), peer, version: "1".into() }
    }

    fn answer(id: u64, stage: &str) -> Bytes {
        let status = Status { stage: stage.into(), ..Default::default() };
        let reply = Reply { id, status: protobuf::MessageField::some(status), ..Default::default() };
        reply.write_to_bytes().unwrap().into()
    }

    #[tokio::test]
    async fn calls_get_their_own_answers_and_an_error_when_the_guest_is_replaced() {
        let (states, guest) = guest();
        assert!(matches!(guest.call(), Err(Gone::NotConnected(_))));
        guest.link(up(1, false));
        let mut first = guest.call().unwrap();
        let mut second = guest.call().unwrap();
        guest.reply(&answer(second.id, "network"));
        guest.reply(&answer(999, "x"));
        guest.reply(&Bytes::from_static(&[0xff; 9]));
        assert!((&mut second.answer).await.unwrap().is_ok());
        guest.link(LinkEvent::Down { reason: "cut".into(), violation: false });
        assert!(first.answer.try_recv().is_err(), "a cut link is not the end of a call");
        guest.link(LinkEvent::SessionLost);
        assert!(matches!((&mut first.answer).await.unwrap(), Err(Gone::Replaced(_))));
        let seen = states.newer("", 0).await;
        assert!(!seen.changed[0].guest_connected);
        let status = Status::parse_from_bytes(&seen.changed[0].guest_status).unwrap();
        assert_eq!(status.stage, "x", "the last one seen");
    }

    #[tokio::test]
    async fn a_flooding_guest_is_ignored() {
        let (states, guest) = guest();
        guest.link(up(1, false));
        let before = states.newer("", 0).await.version;
        for n in 0..10_000 {
            guest.reply(&answer(0, &n.to_string()));
        }
        let told = states.newer("", 0).await.version - before;
        assert!((50..100).contains(&told), "{told}");
        let mut call = guest.call().unwrap();
        guest.reply(&answer(call.id, "asked"));
        assert!((&mut call.answer).await.unwrap().is_ok(), "an answer always arrives");
    }

    #[tokio::test]
    async fn the_bytes_of_unrequested_messages_are_bounded() {
        let (states, guest) = guest();
        guest.link(up(1, false));
        let before = states.newer("", 0).await.version;
        let mut long = answer(0, "long").to_vec();
        // 100 KiB of an unknown field before a status that is stored.
        let unknown = [&[0x7a, 0x80, 0xa0, 0x06][..], &[0; 100 << 10]].concat();
        long.splice(0..0, unknown);
        for _ in 0..20 {
            guest.reply(&Bytes::from(long.clone()));
        }
        assert_eq!(states.newer("", 0).await.version - before, 1, "the same status");
        assert!(guest.metrics.guests.reports_dropped.get() >= 10);
        // An answer of any size arrives, with its number at any place.
        let mut call = guest.call().unwrap();
        long.extend([0x08, u8::try_from(call.id).unwrap()]);
        guest.reply(&Bytes::from(long));
        assert!((&mut call.answer).await.unwrap().is_ok());
    }

    #[test]
    fn forgotten_calls_make_room() {
        let (_, guest) = guest();
        guest.link(up(1, false));
        let calls: Vec<_> = (0..CALLS).map(|_| guest.call().unwrap()).collect();
        assert!(matches!(guest.call(), Err(Gone::TooMany(_))));
        drop(calls);
        assert!(guest.call().is_ok());
    }

    #[tokio::test]
    async fn sessions_reconnects_and_connections_are_reported() {
        let (states, guest) = guest();
        guest.link(up(1, false));
        guest.link(up(1, true));
        guest.link(up(1, true));
        guest.connections(2);
        guest.connections(0);
        let state = states.newer("", 0).await.changed.remove(0);
        assert_eq!((state.reconnects, state.shim_connections, state.shim_seen), (2, 0, true));
        assert_eq!(state.guest_address, "10.0.0.1");
        guest.link(up(2, false));
        let state = states.newer("", 0).await.changed.remove(0);
        assert_eq!((state.reconnects, state.guest_session), (0, "02".repeat(16)));
    }
}
