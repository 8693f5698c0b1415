//! Hypervisor proxy: serves `hypervisor.sock`, passes the shims' calls to the node, and holds them while it is away.
//! One task owns the [`queue`]; the tasks of the connections only read, write and send it events.
//!
//! May touch: its listener, `node.sock` (as a client), the inbox. [`call`] defines how far a request is inspected.

mod call;
mod conn;
mod freeze;
mod node;
mod queue;

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use bytes::{Bytes, BytesMut};
use peerpod_common::accept::Acceptor;
use peerpod_link::frame::{self, Header};
use peerpod_proto::node::{ClaimRequest, ClaimResponse};
use peerpod_proto::ttrpc_frame;
use protobuf::Message;
use serde::{Deserialize, Serialize};
use thiserror::Error;
use tokio::net::UnixListener;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::task::JoinSet;

pub(crate) use self::call::code;
use self::call::{Incoming, Kind};
use self::conn::{Conn, ConnState, Peer};
use self::queue::{Caller, ConnId, Output, Queue, QueueState};
use crate::id::SandboxId;
use crate::inbox::Inbox;
use crate::metrics::Metrics;
use crate::sandboxes::states::States;

/// Limit of open connections to `hypervisor.sock`.
const CONNECTIONS: usize = 8192;
/// Memory for bodies that are still arriving, over all connections: 64 MiB, in pieces.
const BUDGET: usize = (64 << 20) / conn::PIECE;
/// Limit of sandboxes remembered for one connection that carried their CreateVM.
const CREATED_PER_CONNECTION: usize = 64;
/// Time limit of the node's answer to a guest's claim.
const CLAIM_WITHIN: Duration = Duration::from_secs(10);
/// Limit of claims in flight.
const CLAIMS: usize = 256;
/// Limit of inbox writes at once. While the state's disk stalls, each holds a thread of the runtime's 512, which also
/// keep stops without the disk.
const WRITES: usize = 64;

type Events = mpsc::Sender<Event>;

/// Input of the proxy's task.
enum Event {
    Opened { conn: ConnId, peer: Peer },
    Freeze { shown: oneshot::Sender<FrozenHypervisor>, thaw: oneshot::Receiver<()> },
    Request { conn: ConnId, stream: u32, incoming: Incoming },
    Closed { conn: ConnId },
    NodeUp { requests: mpsc::UnboundedSender<(u32, Bytes)> },
    NodeDown,
    NodeAnswer { stream: u32, body: Bytes },
    Written { id: SandboxId, result: Result<(), String> },
    Kept { id: SandboxId, result: Result<(), String> },
    Claim { request: ttrpc_frame::Request, answer: oneshot::Sender<Bytes> },
}

/// State of the proxy as data. The sockets of its connections are sent with it, in the same order.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct HypervisorState {
    queue: QueueState,
    conns: Vec<(ConnId, ConnState)>,
    /// Connection that created a sandbox, the sandbox's id, and its pod.
    created: Vec<(ConnId, SandboxId, String)>,
}

/// State of a frozen proxy; the proxy resumes when the other end of `thaw` is used or dropped.
pub(crate) type FrozenHypervisor = io::Result<(HypervisorState, Vec<OwnedFd>)>;

/// State of another process's proxy, read but not served yet.
#[derive(Default)]
pub(crate) struct Restored {
    queue: Option<Queue>,
    conns: Vec<(ConnId, Conn, Peer)>,
    created: Vec<(ConnId, SandboxId, String)>,
}

impl Restored {
    /// Reads a proxy's state; `sockets` are those of its connections, in the same order.
    pub(crate) fn read(state: HypervisorState, sockets: Vec<OwnedFd>) -> Result<Restored, String> {
        if sockets.len() != state.conns.len() || sockets.len() > CONNECTIONS {
            return Err("the numbers of hypervisor API sockets and connections differ".to_owned());
        }
        let now = Instant::now();
        let mut queue = Queue::new(now);
        queue.restore(state.queue, now)?;
        let mut conns = Vec::new();
        for ((id, conn), socket) in state.conns.into_iter().zip(sockets) {
            let (conn, peer) = Conn::restore(socket, conn).map_err(|error| error.to_string())?;
            conns.push((id, conn, peer));
        }
        queue.keep_connections(|id| conns.iter().any(|(known, ..)| *known == id), now);
        // A connection that ended during the freeze sends no event here.
        let lives = |(conn, ..): &(ConnId, SandboxId, String)| conns.iter().any(|(known, ..)| known == conn);
        let created = state.created.into_iter().filter(lives).collect();
        Ok(Restored { queue: Some(queue), conns, created })
    }
}

pub(crate) struct HypervisorParts {
    pub(crate) listener: UnixListener,
    pub(crate) restored: Restored,
    pub(crate) node_socket: PathBuf,
    pub(crate) inbox: Inbox,
    pub(crate) states: Arc<States>,
    pub(crate) metrics: Arc<Metrics>,
}

#[derive(Clone)]
pub(crate) struct HypervisorHandle {
    events: Events,
    claims: Arc<Semaphore>,
}

#[derive(Debug, Error)]
pub(crate) enum ClaimError {
    #[error("the node is away or busy: {0}")]
    Away(String),
    #[error("the node refused the claim: {message} (code {code})")]
    Refused { code: i32, message: String },
}

impl HypervisorHandle {
    /// Freezes the proxy and returns its state; the proxy resumes when `thaw`'s other end is used or dropped.
    pub(crate) async fn freeze(&self, thaw: oneshot::Receiver<()>) -> FrozenHypervisor {
        let (shown, answered) = oneshot::channel();
        let stops = || io::Error::other("the hypervisor API is closed");
        self.events.send(Event::Freeze { shown, thaw }).await.map_err(|_| stops())?;
        answered.await.unwrap_or_else(|_| Err(stops()))
    }

    /// Asks the node to judge a ticket.
    pub(crate) async fn claim(&self, request: ClaimRequest) -> Result<ClaimResponse, ClaimError> {
        let away = |why: &str| ClaimError::Away(why.to_owned());
        let _place = self.claims.try_acquire().map_err(|_| away("too many claims at once"))?;
        let payload = request.write_to_bytes().map_err(|error| away(&error.to_string()))?;
        let request = ttrpc_frame::Request {
            service: "peerpod.node.v1.Node".into(),
            method: "Claim".into(),
            payload,
            timeout_nano: CLAIM_WITHIN.as_nanos() as i64,
            ..Default::default()
        };
        let (answer, answered) = oneshot::channel();
        // Fails only in a relay that stops, and so does the next line.
        drop(self.events.send(Event::Claim { request, answer }).await);
        let body = answered.await.map_err(|_| away("the relay is stopping"))?;
        let unreadable = |error| away(&format!("the node's answer cannot be read: {error}"));
        let response = ttrpc_frame::Response::parse_from_bytes(&body).map_err(unreadable)?;
        match response.status.code {
            0 => ClaimResponse::parse_from_bytes(&response.payload).map_err(unreadable),
            code if code::FINAL.contains(&code) => {
                Err(ClaimError::Refused { code, message: response.status.message.clone() })
            }
            // A full disk or a stopping node is no judgement of the ticket.
            _ => Err(away(&response.status.message)),
        }
    }
}

pub(crate) fn open(parts: HypervisorParts, tasks: &mut JoinSet<()>) -> HypervisorHandle {
    let (events, incoming) = mpsc::channel(1024);
    let handle = HypervisorHandle { events: events.clone(), claims: Arc::new(Semaphore::new(CLAIMS)) };
    tasks.spawn(node::run(parts.node_socket, events.clone()));
    let (accepting, orders) = mpsc::unbounded_channel();
    let Restored { queue, conns, created } = parts.restored;
    let (peers, open) = conns.into_iter().map(|(id, conn, peer)| ((id, peer), (id, conn))).unzip();
    let accept = Accept { orders, events: events.clone(), metrics: parts.metrics.clone() };
    tasks.spawn(accept.run(parts.listener, open));
    let now = Instant::now();
    let mut queue = queue.unwrap_or_else(|| Queue::new(now));
    queue.continue_kept(parts.inbox.kept(), now);
    let mut hypervisor = HypervisorProxy {
        queue,
        accepting,
        peers,
        node: None,
        claims: HashMap::new(),
        next_claim: 0,
        created: HashMap::new(),
        creators: HashMap::new(),
        inbox: parts.inbox,
        writes: Arc::new(Semaphore::new(WRITES)),
        states: parts.states,
        metrics: parts.metrics,
        events,
    };
    for (conn, id, pod) in created {
        hypervisor.remember(conn, &id, &pod);
    }
    tasks.spawn(hypervisor.run(incoming));
    handle
}

/// Order that freezes or resumes the accept loop.
enum Pause {
    Hold(oneshot::Sender<()>),
    Go,
}

struct Accept {
    orders: mpsc::UnboundedReceiver<Pause>,
    events: Events,
    metrics: Arc<Metrics>,
}

impl Accept {
    async fn run(mut self, listener: UnixListener, restored: Vec<(ConnId, Conn)>) {
        let budget = Arc::new(Semaphore::new(BUDGET));
        let mut open = JoinSet::new();
        let mut next: ConnId = 0;
        for (id, conn) in restored {
            next = next.max(id);
            self.serve(&mut open, id, conn, &budget);
        }
        let mut held = false;
        let mut acceptor = Acceptor::new("hypervisor.sock");
        loop {
            let (stream, _) = tokio::select! {
                biased;
                order = self.orders.recv() => {
                    match order {
                        // The requester may have left; the proxy then sends `Go`.
                        Some(Pause::Hold(done)) => {
                            held = true;
                            done.send(()).ok();
                        }
                        Some(Pause::Go) => held = false,
                        None => return,
                    }
                    continue;
                }
                accepted = acceptor.next(|| listener.accept()), if !held => accepted,
                Some(_) = open.join_next() => continue,
            };
            if open.len() >= CONNECTIONS {
                tracing::warn!(
                    bound = CONNECTIONS,
                    "connection to hypervisor.sock refused: too many are open"
                );
                continue;
            }
            next += 1;
            let (conn, peer) = Conn::new(stream);
            // The proxy gets this event before any other of the connection, also if this task is held next.
            if self.events.send(Event::Opened { conn: next, peer }).await.is_err() {
                return;
            }
            self.serve(&mut open, next, conn, &budget);
        }
    }

    fn serve(&self, open: &mut JoinSet<()>, id: ConnId, conn: Conn, budget: &Arc<Semaphore>) {
        let (events, budget, metrics) = (self.events.clone(), budget.clone(), self.metrics.clone());
        metrics.hypervisor.connections.inc();
        open.spawn(async move {
            let end = conn.serve(id, events, budget).await;
            metrics.hypervisor.connections.dec();
            tracing::debug!(conn = id, %end, "connection to hypervisor.sock ended");
        });
    }
}

struct HypervisorProxy {
    queue: Queue,
    accepting: mpsc::UnboundedSender<Pause>,
    peers: HashMap<ConnId, Peer>,
    node: Option<mpsc::UnboundedSender<(u32, Bytes)>>,
    claims: HashMap<u64, oneshot::Sender<Bytes>>,
    next_claim: u64,
    /// Sandboxes with their last CreateVM on this connection.
    created: HashMap<ConnId, Vec<SandboxId>>,
    creators: HashMap<SandboxId, ConnId>,
    inbox: Inbox,
    writes: Arc<Semaphore>,
    states: Arc<States>,
    metrics: Arc<Metrics>,
    events: Events,
}

impl HypervisorProxy {
    async fn run(mut self, mut incoming: mpsc::Receiver<Event>) {
        // The state of another process may contain work already.
        self.act();
        loop {
            let event = match self.queue.next_timer() {
                Some(at) => tokio::select! {
                    event = incoming.recv() => event,
                    () = tokio::time::sleep_until(at.into()) => {
                        self.queue.tick(Instant::now());
                        self.act();
                        continue;
                    }
                },
                None => incoming.recv().await,
            };
            match event {
                None => return,
                Some(Event::Freeze { shown, thaw }) => self.freeze(&mut incoming, shown, thaw).await,
                Some(event) => {
                    self.take(event, Instant::now());
                    self.act();
                }
            }
        }
    }

    fn take(&mut self, event: Event, now: Instant) {
        match event {
            // One freeze at a time: a second requester reads the dropped channel as an error.
            Event::Freeze { .. } => {}
            Event::Opened { conn, peer } => {
                self.peers.insert(conn, peer);
            }
            Event::Request { conn, stream, incoming } => self.request(conn, stream, incoming, now),
            Event::Closed { conn } => {
                self.peers.remove(&conn);
                self.queue.connection_closed(conn, now);
                for id in self.created.remove(&conn).unwrap_or_default() {
                    if self.creators.get(&id) == Some(&conn) {
                        self.creators.remove(&id);
                        self.states.hypervisor(&id, None);
                    }
                }
            }
            Event::NodeUp { requests } => {
                self.node = Some(requests);
                self.queue.node_connected(now);
                tracing::info!("peerpod-node is connected");
            }
            Event::NodeDown => {
                self.node = None;
                self.metrics.hypervisor.node_losses.inc();
                self.queue.node_lost(now);
            }
            Event::NodeAnswer { stream, body } => {
                // A late answer of an abandoned connection does not belong to a stream of the present one.
                if self.node.is_some() {
                    self.queue.answer(stream, body, now);
                }
            }
            Event::Written { id, result } => {
                let pod = self.states.pod(&id);
                match &result {
                    Ok(()) => tracing::info!(sandbox = %id, pod = &*pod, "stop recorded in the inbox"),
                    Err(error) => tracing::error!(sandbox = %id, pod = &*pod, %error, "stop not recorded"),
                }
                self.queue.inbox_written(&id, result, now);
            }
            Event::Kept { id, result } => self.kept(&id, result),
            Event::Claim { request, answer } => {
                self.next_claim += 1;
                self.claims.insert(self.next_claim, answer);
                self.queue.accept(Caller::Internal(self.next_claim), Kind::Other, request, now);
            }
        }
    }

    fn kept(&mut self, id: &SandboxId, result: Result<(), String>) {
        let pod = self.states.pod(id);
        match result {
            Ok(()) => {
                tracing::warn!(sandbox = %id, pod = &*pod, "the state's disk stalls: stop kept in the run-dir");
                self.queue.stop_kept(id);
            }
            // The inbox decides.
            Err(error) => tracing::error!(sandbox = %id, pod = &*pod, error, "stop not kept in the run-dir"),
        }
    }

    fn request(&mut self, conn: ConnId, stream: u32, incoming: Incoming, now: Instant) {
        if !self.peers.contains_key(&conn) {
            return;
        }
        let method = incoming.request.method.as_str();
        if let Some(id) = incoming.kind.id() {
            let pod = incoming.pod.as_deref().map_or_else(|| self.states.pod(id), Into::into);
            tracing::debug!(sandbox = %id, pod = &*pod, method, conn, bytes = incoming.request.payload.len(), "call from a shim");
        }
        if let Kind::Create(id) = &incoming.kind {
            self.remember(conn, id, incoming.pod.as_deref().unwrap_or("-"));
        }
        self.metrics.hypervisor.call(method);
        self.queue.accept(Caller::Shim { conn, stream }, incoming.kind, incoming.request, now);
    }

    /// Records the connection over which a sandbox was created; its end is the only sign of a killed shim.
    fn remember(&mut self, conn: ConnId, id: &SandboxId, pod: &str) {
        let created = self.created.entry(conn).or_default();
        if !created.contains(id) {
            if created.len() >= CREATED_PER_CONNECTION {
                return;
            }
            created.push(id.clone());
        }
        self.creators.insert(id.clone(), conn);
        self.states.hypervisor(id, Some(pod));
    }

    fn act(&mut self) {
        while let Some(output) = self.queue.take() {
            match output {
                Output::Send { stream, body } => {
                    // If the connection has ended, its task reports the end, and the queue sends again.
                    if let Some(node) = &self.node {
                        drop(node.send((stream, body)));
                    }
                }
                Output::Answer { caller: Caller::Shim { conn, stream }, body } => {
                    self.answer(conn, stream, &body)
                }
                Output::Answer { caller: Caller::Internal(claim), body } => {
                    if let Some(answer) = self.claims.remove(&claim) {
                        drop(answer.send(body)); // The guest may have left.
                    }
                }
                Output::WriteInbox(id) => self.write_inbox(id),
                Output::KeepStop(id) => self.keep_stop(id),
                Output::ForgetStop(id) => {
                    let inbox = self.inbox.clone();
                    tokio::task::spawn_blocking(move || inbox.forget(&id));
                }
                Output::Reconnect(why) => {
                    tracing::warn!(why, "closing the connection to peerpod-node");
                    self.node = None;
                    self.queue.node_lost(Instant::now());
                }
            }
        }
        self.metrics.hypervisor.queued_calls.set(self.queue.len() as i64);
        self.metrics.hypervisor.node_connected.set(i64::from(self.queue.node_is_ready()));
    }

    fn answer(&mut self, conn: ConnId, stream: u32, body: &Bytes) {
        let Some(peer) = self.peers.get(&conn) else { return };
        let header = Header { length: body.len() as u32, stream, kind: frame::RESPONSE, flags: 0 };
        let mut answer = BytesMut::with_capacity(frame::HEADER_LEN + body.len());
        answer.extend_from_slice(&header.encode());
        answer.extend_from_slice(body);
        if peer.answers.try_send(answer.freeze()).is_err() {
            peer.close.notify_one();
        }
    }

    fn write_inbox(&self, id: SandboxId) {
        self.metrics.hypervisor.inbox_writes.inc();
        let (inbox, writes, events) = (self.inbox.clone(), self.writes.clone(), self.events.clone());
        tokio::spawn(async move {
            // The semaphore is never closed.
            let permit = writes.acquire_owned().await;
            tokio::task::spawn_blocking(move || {
                let result = inbox.stop(&id, SystemTime::now()).map_err(|error| error.to_string());
                drop(permit);
                // Only a stopping relay does not receive this; the file is written all the same.
                drop(events.blocking_send(Event::Written { id, result }));
            });
        });
    }

    fn keep_stop(&self, id: SandboxId) {
        let (inbox, events) = (self.inbox.clone(), self.events.clone());
        tokio::task::spawn_blocking(move || {
            let result = inbox.keep(&id).map_err(|error| error.to_string());
            // Only a stopping relay does not receive this; the next one continues the kept stop.
            drop(events.blocking_send(Event::Kept { id, result }));
        });
    }
}
