//! Runs a relay's and a guest's endpoint with a real agent socket and real TCP, with TLS if wanted. A proxy in the
//! middle cuts or stalls the TCP connection. Used by the tests and by `examples/relay_pair.rs`.
// Every user needs only a part of it, and all of it is test code.
#![allow(dead_code, missing_docs, unreachable_pub, clippy::unwrap_used)]

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use futures_util::future::BoxFuture;
use peerpod_link::endpoint::{
    Endpoint, EndpointHandle, Filter, Handler, Limits, LinkEvent, Role, Target, Transport, tune,
};
use peerpod_link::frame::{self, HEADER_LEN, Header};
use peerpod_link::tls;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::{Notify, mpsc};
use tokio_rustls::{TlsAcceptor, TlsConnector};

pub const DEADLINE: Duration = Duration::from_secs(60);

/// Wanted length of an answer that repeats the request itself.
pub const ECHO: u32 = u32::MAX;

/// Serves frames: the payload begins with the wanted length of the answer. Runs until the listener's task ends.
pub async fn agent(listener: UnixListener) {
    while let Ok((socket, _)) = listener.accept().await {
        tokio::spawn(serve(socket));
    }
}

async fn serve(mut socket: UnixStream) -> io::Result<()> {
    let (mut input, mut out) = (BytesMut::with_capacity(64 << 10), Vec::new());
    loop {
        while let Some(head) = input.first_chunk::<HEADER_LEN>() {
            let header = Header::decode(head);
            let whole = HEADER_LEN + header.length as usize;
            if input.len() < whole {
                break;
            }
            let body = input.split_to(whole).split_off(HEADER_LEN);
            let wanted = body.first_chunk().map_or(ECHO, |bytes| u32::from_be_bytes(*bytes));
            let length = if wanted == ECHO { header.length } else { wanted };
            out.extend_from_slice(&Header { length, kind: frame::RESPONSE, ..header }.encode());
            match wanted {
                ECHO => out.extend_from_slice(&body),
                _ => out.resize(out.len() + wanted as usize, 0x5a),
            }
        }
        if !out.is_empty() {
            socket.write_all(&out).await?;
            out.clear();
        }
        if input.capacity() - input.len() < 32 << 10 {
            input.reserve(64 << 10);
        }
        if socket.read_buf(&mut input).await? == 0 {
            return Ok(());
        }
    }
}

/// Returns a request frame that asks for `answer` bytes (or [`ECHO`]), with `size` bytes of payload (at least 4).
pub fn request(stream: u32, answer: u32, size: usize) -> Vec<u8> {
    let size = size.max(4);
    let mut frame = Header { length: size as u32, stream, kind: frame::REQUEST, flags: 0 }.encode().to_vec();
    frame.extend_from_slice(&answer.to_be_bytes());
    frame.extend((4..size).map(|at| (at as u32 ^ stream) as u8));
    frame
}

/// Sends a request and reads its answer.
pub async fn call(socket: &mut UnixStream, frame: &[u8]) -> io::Result<(Header, Vec<u8>)> {
    socket.write_all(frame).await?;
    answer(socket).await
}

pub async fn answer(socket: &mut UnixStream) -> io::Result<(Header, Vec<u8>)> {
    let mut head = [0; HEADER_LEN];
    socket.read_exact(&mut head).await?;
    let header = Header::decode(&head);
    let mut body = vec![0; header.length as usize];
    socket.read_exact(&mut body).await?;
    Ok((header, body))
}

/// Records of a handler.
#[derive(Default)]
pub struct Seen {
    pub events: Mutex<Vec<LinkEvent>>,
    pub control: Mutex<Vec<Bytes>>,
    pub connections: AtomicUsize,
    pub dials: AtomicUsize,
    pub filters: AtomicUsize,
    pub streams_lost: AtomicUsize,
    pub finished: AtomicUsize,
    pub changed: Notify,
}

impl Seen {
    pub fn ups(&self) -> usize {
        self.count(|event| matches!(event, LinkEvent::Up { .. }))
    }

    pub fn count(&self, wanted: impl Fn(&LinkEvent) -> bool) -> usize {
        self.events.lock().unwrap().iter().filter(|event| wanted(event)).count()
    }
}

pub struct TestHandler {
    pub agent: Option<PathBuf>,
    pub seen: Arc<Seen>,
    /// Whether local sockets survive a lost stream, as at the relay.
    pub stay: bool,
    /// Whether filters take the shortcut; None = every other one.
    pub straight: Option<bool>,
    pub down: mpsc::UnboundedSender<()>,
}

pub struct Pass {
    seen: Arc<Seen>,
    stay: bool,
    straight: bool,
}

/// Answers of [`Pass`] to a lost stream, and to the end of the session.
pub const LOST: &[u8] = b"<lost>";
pub const OVER: &[u8] = b"<over>";
/// Stream of the call that [`Pass`] makes when the peer has another session.
pub const AGAIN: u32 = 99;

impl Filter for Pass {
    fn from_local(&mut self, input: &[u8], peer: &mut BytesMut, _local: &mut BytesMut) {
        peer.extend_from_slice(input);
    }

    fn from_peer(&mut self, input: &[u8], _peer: &mut BytesMut, local: &mut BytesMut) {
        local.extend_from_slice(input);
    }

    // Some pieces take the long path, as heads and tails of frames do, so that one read mixes both paths.
    fn passes_from_local(&mut self, input: &[u8]) -> bool {
        self.straight && !input[0].is_multiple_of(8)
    }

    fn passes_from_peer(&mut self, input: &[u8]) -> bool {
        self.straight && !input[0].is_multiple_of(8)
    }

    fn stream_lost(&mut self, again: Option<&mut BytesMut>, local: &mut BytesMut) -> bool {
        self.seen.streams_lost.fetch_add(1, SeqCst);
        if self.stay {
            local.extend_from_slice(LOST);
            if let Some(peer) = again {
                peer.extend_from_slice(&request(AGAIN, ECHO, 4));
            }
        }
        self.stay
    }

    fn state(&self) -> Option<serde_json::Value> {
        Some(serde_json::Value::Null)
    }

    fn restore(&mut self, state: &serde_json::Value) -> bool {
        state.is_null()
    }

    fn finish(&mut self, local: &mut BytesMut) {
        self.seen.finished.fetch_add(1, SeqCst);
        if self.stay {
            local.extend_from_slice(OVER);
        }
    }
}

impl Handler for TestHandler {
    fn filter(&mut self) -> Box<dyn Filter> {
        // Every other connection takes the shortcut, so that both paths are tested.
        let straight = self.straight.unwrap_or(self.seen.filters.fetch_add(1, SeqCst).is_multiple_of(2));
        Box::new(Pass { seen: self.seen.clone(), stay: self.stay, straight })
    }

    fn dial(&mut self) -> BoxFuture<'static, io::Result<UnixStream>> {
        self.seen.dials.fetch_add(1, SeqCst);
        let agent = self.agent.clone();
        Box::pin(async move {
            match agent {
                Some(path) => UnixStream::connect(path).await,
                None => Err(io::ErrorKind::Unsupported.into()),
            }
        })
    }

    fn dial_pod(&mut self, target: Target) -> BoxFuture<'static, io::Result<TcpStream>> {
        Box::pin(TcpStream::connect(target.address()))
    }

    fn on_control(&mut self, message: Bytes) {
        self.seen.control.lock().unwrap().push(message);
    }

    fn on_link(&mut self, event: LinkEvent) {
        if matches!(event, LinkEvent::Down { .. }) {
            let _gone = self.down.send(());
        }
        self.seen.events.lock().unwrap().push(event);
    }

    fn on_connections(&mut self, open: usize) {
        self.seen.connections.store(open, SeqCst);
    }
}

/// Certificates of a node's CA: one for a server and one for a guest.
pub struct Identities {
    pub ca: CertificateDer<'static>,
    server: (CertificateDer<'static>, PrivateKeyDer<'static>),
    guest: (CertificateDer<'static>, PrivateKeyDer<'static>),
}

impl Identities {
    pub fn new() -> Identities {
        use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};
        let ca_key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let ca = params.self_signed(&ca_key).unwrap();
        let issuer = Issuer::new(params, ca_key);
        let leaf = |name: &str, usage| {
            let key = KeyPair::generate().unwrap();
            let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
            params.extended_key_usages = vec![usage];
            let cert = params.signed_by(&key, &issuer).unwrap();
            (cert.der().clone(), PrivateKeyDer::try_from(key.serialize_der()).unwrap())
        };
        let server = leaf(tls::SERVER_NAME, ExtendedKeyUsagePurpose::ServerAuth);
        let guest = leaf("guest.peerpod.internal", ExtendedKeyUsagePurpose::ClientAuth);
        Identities { ca: ca.der().clone(), server, guest }
    }

    pub fn acceptor(&self) -> TlsAcceptor {
        let chain = vec![self.server.0.clone(), self.ca.clone()];
        let key = self.server.1.clone_key();
        TlsAcceptor::from(tls::server_config(chain, key, std::slice::from_ref(&self.ca)).unwrap())
    }

    pub fn connector(&self) -> TlsConnector {
        let identity = (vec![self.guest.0.clone(), self.ca.clone()], self.guest.1.clone_key());
        TlsConnector::from(tls::client_config(&[tls::fingerprint(&self.ca)], Some(identity)).unwrap())
    }
}

/// A TCP proxy that a test can cut and stall.
pub struct Proxy {
    pub address: SocketAddr,
    /// Bytes (both directions together) after which the connection under way breaks; `usize::MAX` = never.
    budget: Arc<AtomicUsize>,
    stalled: Arc<AtomicBool>,
    pub cuts: Arc<AtomicUsize>,
    cut: Arc<Notify>,
}

impl Proxy {
    /// Starts a proxy. `budgets` returns how long each next connection lives, in bytes.
    pub async fn start(to: SocketAddr, mut budgets: impl FnMut() -> usize + Send + 'static) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let proxy = Proxy {
            address,
            budget: Arc::new(AtomicUsize::new(usize::MAX)),
            stalled: Arc::default(),
            cuts: Arc::default(),
            cut: Arc::default(),
        };
        let (budget, stalled, cuts, cut) =
            (proxy.budget.clone(), proxy.stalled.clone(), proxy.cuts.clone(), proxy.cut.clone());
        tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                let Ok(far) = TcpStream::connect(to).await else { continue };
                near.set_nodelay(true).unwrap();
                far.set_nodelay(true).unwrap();
                budget.store(budgets(), SeqCst);
                let (near_in, near_out) = near.into_split();
                let (far_in, far_out) = far.into_split();
                tokio::select! {
                    () = forward(near_in, far_out, &budget, &stalled) => {}
                    () = forward(far_in, near_out, &budget, &stalled) => {}
                    () = cut.notified() => {}
                }
                cuts.fetch_add(1, SeqCst);
            }
        });
        proxy
    }

    pub fn cut(&self) {
        self.cut.notify_waiters();
    }

    /// Discards bytes while the connection stays open.
    pub fn stall(&self, on: bool) {
        self.stalled.store(on, SeqCst);
    }

    pub fn heal(&self) {
        self.budget.store(usize::MAX, SeqCst);
    }
}

async fn forward(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    budget: &AtomicUsize,
    stalled: &AtomicBool,
) {
    let mut buffer = vec![0; 64 << 10];
    loop {
        let Ok(n @ 1..) = from.read(&mut buffer).await else { return };
        if stalled.load(SeqCst) {
            continue;
        }
        let left = budget.load(SeqCst);
        let n_sent = n.min(left);
        if left != usize::MAX {
            budget.store(left - n_sent, SeqCst);
        }
        // The part before the cut arrives, even if it ends in the middle of a record.
        if to.write_all(&buffer[..n_sent]).await.is_err() || n_sent < n {
            return;
        }
    }
}

/// One end with the records of its handler.
pub struct End {
    pub handle: EndpointHandle,
    pub seen: Arc<Seen>,
    pub down: mpsc::UnboundedReceiver<()>,
    pub task: tokio::task::JoinHandle<TestHandler>,
}

pub fn end(role: Role, agent: Option<PathBuf>, limits: Limits) -> End {
    end_with(role, agent, limits, None)
}

pub fn end_with(role: Role, agent: Option<PathBuf>, limits: Limits, straight: Option<bool>) -> End {
    let seen = Arc::new(Seen::default());
    let (down_tx, down) = mpsc::unbounded_channel();
    let handler =
        TestHandler { agent, seen: seen.clone(), stay: role == Role::Relay, straight, down: down_tx };
    let (endpoint, handle) = Endpoint::new(role, handler, limits);
    End { handle, seen, down, task: tokio::spawn(endpoint.run()) }
}

/// Directory that is removed with the test.
pub struct Dir(pub PathBuf);

impl Dir {
    pub fn new() -> Dir {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("peerpod-link-{}-{}", std::process::id(), NEXT.fetch_add(1, SeqCst));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).unwrap();
        Dir(path)
    }

    pub fn join(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _gone = std::fs::remove_dir_all(&self.0);
    }
}

/// Relay, guest and agent, connected.
pub struct Pair {
    pub relay: EndpointHandle,
    pub guest: EndpointHandle,
    pub relay_seen: Arc<Seen>,
    pub guest_seen: Arc<Seen>,
    pub relay_task: tokio::task::JoinHandle<TestHandler>,
    pub proxy: Option<Proxy>,
    pub dir: Dir,
}

pub struct Options {
    pub tls: bool,
    pub limits: Limits,
    pub budgets: Option<Box<dyn FnMut() -> usize + Send>>,
}

impl Options {
    pub fn tls(tls: bool) -> Options {
        Options { tls, limits: Limits::default(), budgets: None }
    }

    /// Adds a proxy in the middle that cuts by these budgets.
    pub fn cut(mut self, budgets: impl FnMut() -> usize + Send + 'static) -> Options {
        self.budgets = Some(Box::new(budgets));
        self
    }
}

impl Pair {
    pub async fn start(options: Options) -> Pair {
        let dir = Dir::new();
        let path = dir.join("agent.sock");
        tokio::spawn(agent(UnixListener::bind(&path).unwrap()));
        Pair::with_agent(options, dir, &path).await
    }

    pub async fn with_agent(options: Options, dir: Dir, agent: &Path) -> Pair {
        let identities = options.tls.then(|| Arc::new(Identities::new()));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut to = listener.local_addr().unwrap();
        let relay = end(Role::Relay, None, options.limits.clone());
        accept(listener, relay.handle.clone(), identities.clone());
        let proxy = match options.budgets {
            Some(budgets) => Some(Proxy::start(to, budgets).await),
            None => None,
        };
        if let Some(proxy) = &proxy {
            to = proxy.address;
        }
        let guest = end(Role::Guest, Some(agent.to_owned()), options.limits);
        dial(to, guest.handle.clone(), guest.down, identities);
        Pair {
            relay: relay.handle,
            guest: guest.handle,
            relay_seen: relay.seen,
            guest_seen: guest.seen,
            relay_task: relay.task,
            proxy,
            dir,
        }
    }

    /// Returns a shim's connection.
    pub fn connect(&self) -> UnixStream {
        let (ours, theirs) = UnixStream::pair().unwrap();
        self.relay.adopt(theirs);
        ours
    }
}

pub fn accept(listener: TcpListener, relay: EndpointHandle, identities: Option<Arc<Identities>>) {
    let acceptor = identities.map(|identities| identities.acceptor());
    tokio::spawn(async move {
        while let Ok((tcp, _)) = listener.accept().await {
            let _broken = tune(&tcp);
            match &acceptor {
                None => relay.attach(tcp.into()),
                Some(acceptor) => {
                    if let Ok(stream) = acceptor.accept(tcp).await {
                        relay.attach(stream.into());
                    }
                }
            }
        }
    });
}

/// Dials until the handle is closed, and again after every Down.
pub fn dial(
    to: SocketAddr,
    guest: EndpointHandle,
    mut down: mpsc::UnboundedReceiver<()>,
    identities: Option<Arc<Identities>>,
) {
    let connector = identities.map(|identities| identities.connector());
    tokio::spawn(async move {
        loop {
            match connect(to, connector.as_ref()).await {
                Ok(transport) => {
                    while down.try_recv().is_ok() {}
                    guest.attach(transport);
                    if down.recv().await.is_none() {
                        return;
                    }
                }
                Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
    });
}

async fn connect(to: SocketAddr, connector: Option<&TlsConnector>) -> io::Result<Transport> {
    let tcp = TcpStream::connect(to).await?;
    tune(&tcp)?;
    Ok(match connector {
        None => tcp.into(),
        Some(connector) => connector.connect(tls::server_name(), tcp).await?.into(),
    })
}

/// Waits for a condition, with a deadline.
pub async fn until(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < DEADLINE, "timeout: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
