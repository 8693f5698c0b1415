//! Relay and node in one, as small as they can be: grants the second claim, keeps one session, sends requests and
//! receives replies.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures_util::future::BoxFuture;
use peerpod_link::claim::{self, First};
use peerpod_link::endpoint::{Endpoint, EndpointHandle, Filter, Handler, Limits, LinkEvent, Role, Transport};
use peerpod_link::tls;
use peerpod_proto::guest::request::Body;
use peerpod_proto::guest::{ClaimReply, Reply, Request, Status};
use protobuf::Message;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair,
};
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;

pub(crate) const SECRET: [u8; 32] = [9; 32];
/// Longest wait of a test, on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

struct Trust {
    sandbox: String,
    ca: CertificateDer<'static>,
    issuer: Issuer<'static, KeyPair>,
    claims: AtomicU32,
    /// Key that the ticket is bound to.
    bound: Mutex<Option<Vec<u8>>>,
}

pub(crate) struct Relay {
    trust: Arc<Trust>,
    handle: Option<EndpointHandle>,
    links: Option<mpsc::UnboundedReceiver<LinkEvent>>,
    replies: Option<mpsc::UnboundedReceiver<Reply>>,
    early: HashMap<u64, Reply>,
    next: AtomicU64,
}

impl Relay {
    pub(crate) fn new(sandbox: &str) -> Relay {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        let ca = params.self_signed(&key).unwrap().der().clone();
        let issuer = Issuer::new(params, key);
        let trust =
            Trust { sandbox: sandbox.into(), ca, issuer, claims: AtomicU32::new(0), bound: Mutex::new(None) };
        Relay {
            trust: Arc::new(trust),
            handle: None,
            links: None,
            replies: None,
            early: HashMap::new(),
            next: AtomicU64::new(1),
        }
    }

    pub(crate) fn ca_sha256(&self) -> [u8; 32] {
        tls::fingerprint(&self.trust.ca)
    }

    pub(crate) fn claims(&self) -> u32 {
        self.trust.claims.load(Ordering::Relaxed)
    }

    /// Signs a guest's certificate request.
    pub(crate) fn sign(&self, csr: &[u8]) -> Vec<Vec<u8>> {
        self.trust.sign(csr)
    }

    fn acceptor(&self) -> TlsAcceptor {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec![tls::SERVER_NAME.to_owned()]).unwrap();
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let leaf = params.signed_by(&key, &self.trust.issuer).unwrap();
        let chain = vec![leaf.der().clone(), self.trust.ca.clone()];
        let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
        tls::server_config(chain, key, std::slice::from_ref(&self.trust.ca)).unwrap().into()
    }

    /// Answers in the place of another relay, until guests have refused it so many times.
    pub(crate) async fn impersonate(&self, address: &str, times: usize) {
        let acceptor = self.acceptor();
        let listener = TcpListener::bind(address.parse::<SocketAddr>().unwrap()).await.unwrap();
        let mut turned_away = 0;
        while turned_away < times {
            let accepted = timeout(PATIENCE, listener.accept()).await;
            let (tcp, _) = accepted.expect("the guest goes on dialling").unwrap();
            let shaken = timeout(PATIENCE, acceptor.accept(tcp)).await.expect("the guest goes on or ends it");
            let error = shaken.map(drop).expect_err("the guest trusts any certificate");
            println!("impostor: {error}");
            // An attempt that another one overtook ends without an alert.
            turned_away += usize::from(error.to_string().contains("alert"));
        }
    }

    pub(crate) async fn listen(self, address: &str) -> Relay {
        self.on(TcpListener::bind(address.parse::<SocketAddr>().unwrap()).await.unwrap())
    }

    /// Serves incoming connections; must be called within a runtime.
    pub(crate) fn on(mut self, listener: TcpListener) -> Relay {
        let acceptor = self.acceptor();
        let (links, link_events) = mpsc::unbounded_channel();
        let (replies, reply_events) = mpsc::unbounded_channel();
        let (endpoint, handle) = Endpoint::new(Role::Relay, Side { links, replies }, Limits::default());
        tokio::spawn(endpoint.run());
        let (trust, attach) = (self.trust.clone(), handle.clone());
        tokio::spawn(async move {
            loop {
                let (tcp, _) = listener.accept().await.unwrap();
                let (acceptor, trust, attach) = (acceptor.clone(), trust.clone(), attach.clone());
                tokio::spawn(async move {
                    if let Err(error) = serve(acceptor, tcp, &trust, &attach).await {
                        println!("relay: {error}");
                    }
                });
            }
        });
        (self.handle, self.links, self.replies) = (Some(handle), Some(link_events), Some(reply_events));
        self
    }

    fn handle(&self) -> &EndpointHandle {
        self.handle.as_ref().unwrap()
    }

    /// Waits for the next link that comes up.
    pub(crate) fn up(&mut self, runtime: &Runtime) -> LinkEvent {
        let links = self.links.as_mut().unwrap();
        runtime.block_on(async {
            loop {
                let event = timeout(PATIENCE, links.recv()).await.expect("a link in time").unwrap();
                println!("relay: {event:?}");
                if let LinkEvent::Up { .. } = event {
                    return event;
                }
            }
        })
    }

    /// Sends a request over the control stream, and returns the reply.
    pub(crate) fn ask(&mut self, runtime: &Runtime, body: Body) -> Reply {
        let mut request = Request::new();
        request.id = self.next.fetch_add(1, Ordering::Relaxed);
        request.body = Some(body);
        self.handle().control(request.write_to_bytes().unwrap().into()).unwrap();
        loop {
            let reply = self.reply(runtime);
            if reply.id == request.id {
                return reply;
            }
            self.early.insert(reply.id, reply);
        }
    }

    /// Waits until the guest sends such a status unasked.
    pub(crate) fn told(&mut self, runtime: &Runtime, what: impl Fn(&Status) -> bool) -> Status {
        loop {
            let reply = self.reply(runtime);
            if reply.id == 0 && what(&reply.status) {
                return reply.status.unwrap();
            }
        }
    }

    fn reply(&mut self, runtime: &Runtime) -> Reply {
        let replies = self.replies.as_mut().unwrap();
        runtime.block_on(async { timeout(PATIENCE, replies.recv()).await.expect("a reply in time").unwrap() })
    }

    /// Opens a new connection of a shim.
    pub(crate) fn shim(&self) -> StdUnixStream {
        let (ours, theirs) = StdUnixStream::pair().unwrap();
        ours.set_read_timeout(Some(PATIENCE)).unwrap();
        theirs.set_nonblocking(true).unwrap();
        // Needs the reactor of the runtime that the endpoint runs on.
        let handle = self.handle().clone();
        let (done, adopted) = std::sync::mpsc::channel();
        self.spawn(move || {
            handle.adopt(UnixStream::from_std(theirs).unwrap());
            done.send(()).unwrap();
        });
        adopted.recv_timeout(PATIENCE).unwrap();
        ours
    }

    fn spawn(&self, what: impl FnOnce() + Send + 'static) {
        RUNTIME.get().unwrap().spawn(async move { what() });
    }
}

/// Runtime that `listen` ran in.
static RUNTIME: std::sync::OnceLock<tokio::runtime::Handle> = std::sync::OnceLock::new();

async fn serve(
    acceptor: TlsAcceptor,
    tcp: TcpStream,
    trust: &Trust,
    handle: &EndpointHandle,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    drop(RUNTIME.set(tokio::runtime::Handle::current()));
    tcp.set_nodelay(true)?;
    let mut stream = acceptor.accept(tcp).await?;
    if stream.get_ref().1.peer_certificates().is_some() {
        handle.attach(Transport::from(stream));
        return Ok(());
    }
    let First::Claim(claim) = claim::first_record(&mut stream).await? else { return Err("a Hello?".into()) };
    let mut reply = ClaimReply::new();
    if trust.claims.fetch_add(1, Ordering::Relaxed) == 0 {
        (reply.retry, reply.error) = (true, "the node is away".into());
    } else if claim.ticket_secret != SECRET {
        reply.error = "wrong secret".into();
    } else {
        let bound = trust.bound.lock().unwrap().get_or_insert(claim.csr.clone()).clone();
        assert_eq!(public_key(&bound), public_key(&claim.csr), "the same key both times");
        reply.sandbox_id = trust.sandbox.clone();
        reply.certificates = trust.sign(&claim.csr);
    }
    claim::reply(&mut stream, &reply).await?;
    Ok(())
}

fn public_key(csr: &[u8]) -> Vec<u8> {
    use rcgen::PublicKeyData;
    let request = CertificateSigningRequestParams::from_der(&csr.into()).unwrap();
    request.public_key.der_bytes().to_vec()
}

impl Trust {
    fn sign(&self, csr: &[u8]) -> Vec<Vec<u8>> {
        let mut request = CertificateSigningRequestParams::from_der(&csr.into()).unwrap();
        request.params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let leaf = request.signed_by(&self.issuer).unwrap();
        vec![leaf.der().to_vec(), self.ca.to_vec()]
    }
}

struct Side {
    links: mpsc::UnboundedSender<LinkEvent>,
    replies: mpsc::UnboundedSender<Reply>,
}

impl Handler for Side {
    fn filter(&mut self) -> Box<dyn Filter> {
        Box::new(Through)
    }
    fn dial(&mut self) -> BoxFuture<'static, io::Result<UnixStream>> {
        Box::pin(async { Err(io::ErrorKind::Unsupported.into()) })
    }
    fn on_control(&mut self, message: Bytes) {
        drop(self.replies.send(Reply::parse_from_bytes(&message).unwrap()));
    }
    fn on_link(&mut self, event: LinkEvent) {
        drop(self.links.send(event));
    }
    fn on_connections(&mut self, _open: usize) {}
}

struct Through;

impl Filter for Through {
    fn from_local(&mut self, input: &[u8], peer: &mut BytesMut, _local: &mut BytesMut) {
        peer.extend_from_slice(input);
    }
    fn from_peer(&mut self, input: &[u8], _peer: &mut BytesMut, local: &mut BytesMut) {
        local.extend_from_slice(input);
    }
    fn stream_lost(&mut self, _again: Option<&mut BytesMut>, _local: &mut BytesMut) -> bool {
        false
    }
}
