//! The pod's `localhost`: connections to 127.0.0.1 and ::1 in the node's side of a pod's namespace (port-forward, probes)
//! are carried to the same port in the VM. A refusal there is a refusal here: the client's SYN is not answered before
//! the guest's own connection stands, and that very connection is the one that is then used.
//!
//! How SYNs get here and back without any right of ours: [`peerpod_link::net::localhost`]. The node hands the sockets
//! in; they go with the sandbox. Touches nothing else.

pub(crate) mod packet;

use std::{
    any::Any,
    collections::HashMap,
    convert::Infallible,
    io,
    net::TcpListener as StdListener,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    panic::AssertUnwindSafe,
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use async_trait::async_trait;
use futures_util::FutureExt;
use nix::sys::socket::{MsgFlags, SockaddrIn, SockaddrIn6, recv, sendto};
use peerpod_link::{
    endpoint::{Connected, DialError, EndpointHandle},
    net::localhost::{INJECT, LISTEN, LOG, Way},
    reactor,
};
use rustix::net::{AddressFamily, SocketType};
use serde_json::Value;
use tokio::{
    io::{Interest, unix::AsyncFd},
    net::{TcpListener, TcpStream},
    task::{JoinHandle, JoinSet},
};
use tracing::{Instrument, Span};

use self::packet::{Key, Syn, logged};
use crate::{
    handin::{Handed, Kind, Wanted},
    id::SandboxId,
    metrics::Metrics,
    sandboxes::Sandboxes,
};

/// The word in a hand-in's header.
const KIND: &str = "localhost";
const IPPROTO_TCP: u32 = 6;
const IPPROTO_RAW: u32 = 255;
const NETLINK_NETFILTER: u32 = 12;
/// Connections of one sandbox that are being made.
const PENDING: usize = 512;
/// How long a SYN that was sent again may take to become a connection, and how long an answered one is remembered.
const PARKED: Duration = Duration::from_secs(3);
/// Answered SYNs that are remembered.
const REMEMBERED: usize = 2048;
/// After a panic of ours it begins again; doubled each time up to the maximum, until it went well for that long.
const ANEW_AFTER: Duration = Duration::from_millis(50);
const ANEW_AT_MOST: Duration = Duration::from_secs(10);
/// A message of the kernel's log.
const ROOM: usize = 16 << 10;

/// Takes the sockets for a sandbox that is served here.
pub(crate) struct Localhost {
    /// The table holds what is taken, and ends it with the sandbox.
    pub(crate) sandboxes: Weak<Sandboxes>,
    pub(crate) metrics: Arc<Metrics>,
}

#[async_trait]
impl Kind for Localhost {
    fn name(&self) -> &'static str {
        KIND
    }

    async fn held(&self, sandbox: Option<&SandboxId>) -> Option<Value> {
        let way = self.sandboxes.upgrade()?.localhost(sandbox?).await?;
        serde_json::to_value(way).ok()
    }

    async fn take(&self, sandbox: Option<&SandboxId>, mut handed: Handed) -> Result<Value, String> {
        let stops = || "the relay stops".to_owned();
        let sandbox = sandbox.ok_or("a pod's localhost without its sandbox")?;
        let way: Way = serde_json::from_value(handed.detail.clone())
            .map_err(|error| format!("the ways cannot be read: {error}"))?;
        let sandboxes = self.sandboxes.upgrade().ok_or_else(stops)?;
        if sandboxes.get(sandbox).is_none() {
            return Err(format!("sandbox {sandbox} is not served here; put it first"));
        }
        let sockets = Sockets::take(&mut handed).map_err(|why| format!("sandbox {sandbox}: {why}"))?;
        handed.finish()?;
        let pod = sandboxes.pod(sandbox);
        let span = tracing::info_span!("localhost", pod = &*pod);
        let serving = Serving::of(&self.sandboxes, sandbox, &pod, way, sockets, self.metrics.clone());
        sandboxes.keep_localhost(sandbox, serving).await?;
        span.in_scope(|| tracing::info!(%sandbox, "the pod's localhost is served"));
        serde_json::to_value(way).map_err(|error| error.to_string())
    }
}

/// One family's.
#[derive(Debug)]
struct Family {
    listener: TcpListener,
    inject: OwnedFd,
}

/// What the node handed in for one pod.
#[derive(Debug)]
pub(crate) struct Sockets {
    log: AsyncFd<OwnedFd>,
    /// v4, v6; what the kernel has not is missing.
    families: [Option<Family>; 2],
}

impl Sockets {
    /// Copies, each with its name.
    pub(crate) fn copies(&self) -> io::Result<Vec<(String, OwnedFd)>> {
        let copy = |name: &str, socket: BorrowedFd<'_>| {
            Ok::<_, io::Error>((name.to_owned(), socket.try_clone_to_owned()?))
        };
        let mut copies = vec![copy(LOG, self.log.get_ref().as_fd())?];
        for (at, family) in self.families.iter().enumerate() {
            if let Some(family) = family {
                copies.push(copy(LISTEN[at], family.listener.as_fd())?);
                copies.push(copy(INJECT[at], family.inject.as_fd())?);
            }
        }
        Ok(copies)
    }

    /// The sockets that were handed in.
    pub(crate) fn take(handed: &mut Handed) -> Result<Sockets, String> {
        let family = AddressFamily::NETLINK;
        let log = Wanted { family, kind: SocketType::DGRAM, protocol: NETLINK_NETFILTER, listens: false };
        let log = handed.socket(LOG, log)?;
        let log = reactor::register(log, Interest::READABLE).map_err(|error| error.to_string())?;
        let mut families = [None, None];
        for (at, family) in [AddressFamily::INET, AddressFamily::INET6].into_iter().enumerate() {
            if !handed.has(LISTEN[at]) {
                continue;
            }
            let wanted = Wanted { family, kind: SocketType::STREAM, protocol: IPPROTO_TCP, listens: true };
            let listener = StdListener::from(handed.socket(LISTEN[at], wanted)?);
            let wanted = Wanted { family, kind: SocketType::RAW, protocol: IPPROTO_RAW, listens: false };
            let inject = handed.socket(INJECT[at], wanted)?;
            let listener = listener
                .set_nonblocking(true)
                .and_then(|()| TcpListener::from_std(listener))
                .map_err(|error| format!("descriptor {}: {error}", LISTEN[at]))?;
            families[at] = Some(Family { listener, inject });
        }
        Ok(Sockets { log, families })
    }
}

/// A running one; dropping it ends it, with its sockets.
#[derive(Debug)]
pub(crate) struct Serving {
    pub(crate) way: Way,
    pub(crate) sockets: Arc<Sockets>,
    task: JoinHandle<()>,
}

impl Serving {
    /// Serves the localhost of a sandbox in this table.
    pub(crate) fn of(
        table: &Weak<Sandboxes>,
        id: &SandboxId,
        pod: &str,
        way: Way,
        sockets: Sockets,
        metrics: Arc<Metrics>,
    ) -> Serving {
        // Asked for each time: an endpoint that failed is another one afterwards.
        let (table, sandbox) = (table.clone(), id.clone());
        let endpoint = move || Some(table.upgrade()?.get(&sandbox)?.endpoint);
        let span = tracing::info_span!("localhost", pod);
        Serving::start(id.clone(), way, sockets, endpoint, metrics, &span)
    }

    fn start(
        id: SandboxId,
        way: Way,
        sockets: Sockets,
        endpoint: impl Fn() -> Option<EndpointHandle> + Send + 'static,
        metrics: Arc<Metrics>,
        span: &Span,
    ) -> Serving {
        let sockets = Arc::new(sockets);
        let door = Door {
            id,
            endpoint: Box::new(endpoint),
            metrics,
            sockets: sockets.clone(),
            pending: HashMap::new(),
            answered: HashMap::new(),
            asking: JoinSet::new(),
        };
        Serving { way, sockets, task: tokio::spawn(door.stay_open().instrument(span.clone())) }
    }

    /// Whether it still works.
    pub(crate) fn is_running(&self) -> bool {
        !self.task.is_finished()
    }

    /// Ends it; its sockets are closed on return.
    pub(crate) async fn stop(mut self) {
        self.task.abort();
        // Only that it is over matters.
        drop((&mut self.task).await);
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A connection between its SYN and its acceptance.
enum Pending {
    /// The guest was asked.
    Asking,
    /// The guest's connection stands, the SYN was sent again.
    Parked(Connected, Instant),
}

/// A SYN that has its answer. Its client may have sent it again before that, and the copy waits in the log.
struct Answered {
    sequence: u32,
    refused: bool,
    at: Instant,
}

struct Door {
    id: SandboxId,
    endpoint: Box<dyn Fn() -> Option<EndpointHandle> + Send>,
    metrics: Arc<Metrics>,
    sockets: Arc<Sockets>,
    pending: HashMap<Key, Pending>,
    answered: HashMap<Key, Answered>,
    asking: JoinSet<(Syn, Result<Connected, DialError>)>,
}

impl Door {
    /// Runs until it is dropped. A panic is a bug of ours and costs the connections that are being made then; the
    /// sockets stay, so that nobody has to notice and hand others in.
    async fn stay_open(mut self) {
        let mut pause = ANEW_AFTER;
        loop {
            let began = Instant::now();
            let Err(panic) = AssertUnwindSafe(self.run()).catch_unwind().await;
            self.metrics.panics.inc();
            if began.elapsed() > ANEW_AT_MOST {
                pause = ANEW_AFTER;
            }
            tracing::error!(sandbox = %self.id, panic = words(&*panic), again_in = ?pause, "the pod's localhost failed; this is a bug of ours, and connections that were being made are lost");
            self.pending = HashMap::new();
            self.answered = HashMap::new();
            self.asking = JoinSet::new();
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(ANEW_AT_MOST);
        }
    }

    async fn run(&mut self) -> Infallible {
        let mut sweep = tokio::time::interval(PARKED);
        loop {
            let [v4, v6] = &self.sockets.families;
            tokio::select! {
                // In this order: a SYN that was sent again is met while its first copy is still known here.
                biased;
                syns = read(&self.sockets.log) => match syns {
                    Ok(syns) => syns.into_iter().for_each(|syn| self.ask(syn)),
                    Err(error) => {
                        tracing::warn!(sandbox = %self.id, %error, "the pod's localhost is not heard");
                        tokio::time::sleep(Duration::from_millis(100)).await;
                    }
                },
                Some(answered) = self.asking.join_next() => {
                    // A task of ours neither panics nor is cut off; its SYN comes again.
                    if let Ok((syn, result)) = answered {
                        self.answered(&syn, result);
                    }
                }
                accepted = accept(v4.as_ref()) => self.accepted(accepted).await,
                accepted = accept(v6.as_ref()) => self.accepted(accepted).await,
                _ = sweep.tick(), if !(self.pending.is_empty() && self.answered.is_empty()) => self.sweep(),
            }
        }
    }

    /// A client wants to connect.
    fn ask(&mut self, syn: Syn) {
        match self.pending.get(&syn.key) {
            // It asks again because the answer takes long.
            Some(Pending::Asking) => return,
            // Its SYN got lost, however that was.
            Some(Pending::Parked(..)) => return self.send(&syn.key, &syn.again()),
            None => {}
        }
        // Only the order in which the kernel wakes us decides whether the copy or the connection is met first.
        match self.answered.get(&syn.key).filter(|answered| answered.sequence == syn.sequence()) {
            Some(Answered { refused: true, .. }) => return self.send(&syn.key, &syn.reset()),
            Some(_) => return,
            None => {}
        }
        if self.pending.len() >= PENDING {
            return self.refuse(&syn, DialError::TooMany);
        }
        let Some(endpoint) = (self.endpoint)() else { return self.refuse(&syn, DialError::Away) };
        self.pending.insert(syn.key, Pending::Asking);
        self.asking.spawn(async move {
            let result = endpoint.dial(syn.key.target).await;
            (syn, result)
        });
    }

    /// What the guest said.
    fn answered(&mut self, syn: &Syn, result: Result<Connected, DialError>) {
        if self.answered.len() < REMEMBERED {
            let (sequence, refused) = (syn.sequence(), result.is_err());
            self.answered.insert(syn.key, Answered { sequence, refused, at: Instant::now() });
        }
        match result {
            Ok(connected) => {
                self.pending.insert(syn.key, Pending::Parked(connected, Instant::now()));
                self.send(&syn.key, &syn.again());
            }
            Err(why) => {
                self.pending.remove(&syn.key);
                self.refuse(syn, why);
            }
        }
    }

    fn refuse(&self, syn: &Syn, why: DialError) {
        let (port, client) = (syn.key.target.port, syn.key.client);
        tracing::debug!(sandbox = %self.id, port, %client, %why, "a connection to the pod's localhost is refused");
        self.metrics.localhost(if why == DialError::Refused { "refused" } else { "failed" });
        self.send(&syn.key, &syn.reset());
    }

    fn send(&self, key: &Key, packet: &[u8]) {
        let Some(family) = &self.sockets.families[usize::from(key.target.v6)] else { return };
        let fd = family.inject.as_raw_fd();
        let to = key.target.v6;
        let sent = if to {
            let to = SockaddrIn6::from(std::net::SocketAddrV6::new(std::net::Ipv6Addr::LOCALHOST, 0, 0, 0));
            sendto(fd, packet, &to, MsgFlags::MSG_DONTWAIT)
        } else {
            let to = SockaddrIn::from(std::net::SocketAddrV4::new(std::net::Ipv4Addr::LOCALHOST, 0));
            sendto(fd, packet, &to, MsgFlags::MSG_DONTWAIT)
        };
        if let Err(error) = sent {
            // The client sends its SYN again by itself.
            tracing::warn!(sandbox = %self.id, %error, "a packet for the pod's localhost is not sent");
        }
    }

    /// A client's connection stands.
    async fn accepted(&mut self, accepted: io::Result<TcpStream>) {
        let named = accepted.and_then(|socket| {
            let key = Key::of(socket.peer_addr()?, socket.local_addr()?);
            Ok((socket, key))
        });
        let (socket, key) = match named {
            Ok(named) => named,
            Err(error) => {
                tracing::warn!(sandbox = %self.id, %error, "a connection to the pod's localhost is not accepted");
                tokio::time::sleep(Duration::from_millis(20)).await;
                return;
            }
        };
        match self.pending.remove(&key) {
            Some(Pending::Parked(connected, _)) => {
                self.metrics.localhost("carried");
                connected.join(socket);
            }
            // Nobody asked for it: what stands there belongs to a SYN that was never here.
            other => {
                tracing::warn!(sandbox = %self.id, client = %key.client, asking = other.is_some(), "a connection to the pod's localhost that nobody was asked for is reset");
                reset(&socket);
            }
        }
    }

    /// Forgets connections whose client went away, and what was answered long ago.
    fn sweep(&mut self) {
        let now = Instant::now();
        self.pending.retain(|_, pending| match pending {
            Pending::Asking => true,
            Pending::Parked(_, since) => now.duration_since(*since) < PARKED,
        });
        self.answered.retain(|_, answered| now.duration_since(answered.at) < PARKED);
        if self.answered.is_empty() {
            self.answered.shrink_to_fit();
        }
    }
}

/// What a panic said.
fn words(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no words")
}

fn reset(socket: &TcpStream) {
    if let Err(error) = rustix::net::sockopt::set_socket_linger(socket, Some(Duration::ZERO)) {
        tracing::debug!(%error, "a connection is closed, not reset");
    }
}

async fn accept(family: Option<&Family>) -> io::Result<TcpStream> {
    match family {
        Some(family) => family.listener.accept().await.map(|(socket, _)| socket),
        None => std::future::pending().await,
    }
}

async fn read(log: &AsyncFd<OwnedFd>) -> io::Result<Vec<Syn>> {
    log.async_io(Interest::READABLE, |log| {
        let mut datagram = [0; ROOM];
        let length = recv(log.as_raw_fd(), &mut datagram, MsgFlags::MSG_DONTWAIT)?;
        Ok(logged(datagram.get(..length).unwrap_or_default()))
    })
    .await
}

#[cfg(test)]
mod tests;
