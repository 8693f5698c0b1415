//! A relay in this process, with a simulated node, guests and shims around it.

#![allow(unreachable_pub, missing_docs, clippy::unwrap_used, clippy::new_without_default)] // a module of tests

pub mod guest;
pub mod node;

use std::net::SocketAddr;
use std::os::unix::net::UnixStream as UnixSocket;
use std::path::{Path, PathBuf};
use std::time::Duration;

use peerpod_link::frame::{self, Header};
use peerpod_proto::hypervisor::{CreateVMRequest, StartVMRequest, StopVMRequest};
use peerpod_proto::relay::{ConfigureRequest, PutSandboxRequest, SandboxState, WatchRequest};
use peerpod_proto::relay_ttrpc::RelayClient;
use peerpod_proto::ttrpc_frame::{Request, Response};
use peerpod_relay::app::{self, BoundRelay};
use peerpod_relay::config::RelayConfig;
use protobuf::Message;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

/// Longest wait of a test, on a slow machine.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Waits for a future, and fails the test instead of waiting for ever.
pub async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.unwrap_or_else(|_| panic!("waited too long for {what}"))
}

/// Polls a condition.
pub async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    soon(what, async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

pub type Identity = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

/// A certificate authority like that of the node.
pub struct Ca {
    pub der: CertificateDer<'static>,
    issuer: Issuer<'static, KeyPair>,
}

impl Ca {
    pub fn new() -> Ca {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, "a node's CA");
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let der = params.self_signed(&key).unwrap().der().clone();
        Ca { der, issuer: Issuer::new(params, key) }
    }

    pub fn sha256(&self) -> [u8; 32] {
        peerpod_link::tls::fingerprint(&self.der)
    }

    fn issue(&self, names: Vec<String>, usage: ExtendedKeyUsagePurpose) -> Identity {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(names).unwrap();
        params.extended_key_usages = vec![usage];
        let leaf = params.signed_by(&key, &self.issuer).unwrap();
        (vec![leaf.der().clone(), self.der.clone()], PrivateKeyDer::try_from(key.serialize_der()).unwrap())
    }

    pub fn server(&self) -> Identity {
        self.issue(vec![peerpod_link::tls::SERVER_NAME.into()], ExtendedKeyUsagePurpose::ServerAuth)
    }

    pub fn client(&self) -> Identity {
        self.issue(vec![], ExtendedKeyUsagePurpose::ClientAuth)
    }
}

/// A relay and its folders.
pub struct World {
    pub base: PathBuf,
    pub ca: Ca,
    pub config: RelayConfig,
    pub relay: Option<BoundRelay>,
    pub listen: SocketAddr,
}

impl World {
    pub async fn new(name: &str) -> World {
        let base = std::env::temp_dir().join(format!("ppr-{name}-{}", std::process::id()));
        drop(std::fs::remove_dir_all(&base));
        std::fs::create_dir_all(&base).unwrap();
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let config = RelayConfig {
            threads: 1,
            run_dir: base.join("run"),
            state_dir: base.join("state"),
            listen: any,
            admin_listen: any,
            max_handshakes: 512,
            max_handshakes_per_address: 32,
            waits_when_replaced: false,
            bundles: Vec::new(),
            must_be_hardened: true,
            pod: None,
        };
        let mut world = World { base, ca: Ca::new(), config, relay: None, listen: any };
        world.start().await;
        world
    }

    pub async fn start(&mut self) {
        let relay = app::build(self.config.clone()).await.unwrap();
        self.listen = relay.listen;
        // A restarted relay listens at the address that guests dial.
        self.config.listen = relay.listen;
        self.relay = Some(relay);
    }

    pub async fn stop(&mut self) {
        self.relay.take().unwrap().stop().await;
    }

    pub fn run(&self, name: &str) -> PathBuf {
        self.config.run_dir.join(name)
    }

    pub fn inbox(&self) -> Vec<String> {
        let mut names: Vec<String> = std::fs::read_dir(self.config.state_dir.join("inbox"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    pub async fn shim(&self) -> Raw {
        Raw::connect(&self.run("hypervisor.sock")).await
    }

    pub fn agent_socket(&self, id: &str) -> PathBuf {
        self.run("pods").join(id).join("agent.ttrpc")
    }

    pub fn relay_client(&self) -> RelayClient {
        client(&self.run("relay.sock"))
    }

    pub async fn configure(&self) {
        let (chain, key) = self.ca.server();
        let request = ConfigureRequest {
            certificates: chain.iter().map(|der| der.to_vec()).collect(),
            private_key: key.secret_der().to_vec(),
            trusted_cas: vec![self.ca.der.to_vec()],
            ..Default::default()
        };
        let answer = self.relay_client().configure(Default::default(), &request).await.unwrap();
        assert_eq!(answer.listen_address, self.listen.to_string());
    }

    pub async fn put(&self, id: &str, guests: &[&Identity]) {
        self.put_at(id, guests, &[]).await;
    }

    /// Puts a sandbox with these addresses of its VM.
    pub async fn put_at(&self, id: &str, guests: &[&Identity], addresses: &[&str]) {
        let request = PutSandboxRequest {
            addresses: addresses.iter().map(|&address| address.to_owned()).collect(),
            id: id.into(),
            agent_socket: self.agent_socket(id).to_str().unwrap().into(),
            guest_certificates: guests
                .iter()
                .map(|(chain, _)| peerpod_link::tls::fingerprint(&chain[0]).to_vec())
                .collect(),
            pod: "shop/web".into(),
            ..Default::default()
        };
        self.relay_client().put_sandbox(Default::default(), &request).await.unwrap();
    }

    /// Watches until a sandbox's state is as wanted.
    pub async fn state(&self, id: &str, what: &str, wanted: impl Fn(&SandboxState) -> bool) -> SandboxState {
        let client = self.relay_client();
        soon(what, async {
            let mut request = WatchRequest::new();
            loop {
                let answer = client.watch(Default::default(), &request).await.unwrap();
                if let Some(state) = answer.changed.into_iter().find(|state| state.id == id && wanted(state))
                {
                    return state;
                }
                (request.epoch, request.since) = (answer.epoch, answer.version);
            }
        })
        .await
    }
}

/// A client of `relay.sock`.
pub fn client(path: &Path) -> RelayClient {
    let stream = UnixSocket::connect(path).unwrap();
    RelayClient::new(ttrpc::r#async::Client::new(
        ttrpc::r#async::transport::Socket::try_from(stream).unwrap(),
    ))
}

impl Drop for World {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.base));
    }
}

/// A ttrpc client that can send any bytes.
pub struct Raw {
    pub stream: UnixStream,
    next: u32,
}

/// An answer: stream, code, message, payload.
#[derive(Debug)]
pub struct Answer {
    pub stream: u32,
    pub code: i32,
    pub message: String,
    pub payload: Vec<u8>,
}

impl Raw {
    pub async fn connect(path: &Path) -> Raw {
        let stream = soon("a socket", async {
            loop {
                match UnixStream::connect(path).await {
                    Ok(stream) => return stream,
                    Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
                }
            }
        })
        .await;
        Raw { stream, next: 1 }
    }

    pub async fn send(&mut self, service: &str, method: &str, payload: Vec<u8>, timeout: Duration) -> u32 {
        let stream = self.next;
        self.next += 2;
        let request = Request {
            service: service.into(),
            method: method.into(),
            payload,
            timeout_nano: timeout.as_nanos() as i64,
            ..Default::default()
        };
        let frame = frame_of(stream, &request.write_to_bytes().unwrap());
        self.stream.write_all(&frame).await.unwrap();
        stream
    }

    pub async fn create(&mut self, id: &str) -> u32 {
        let request = CreateVMRequest { id: id.into(), ..Default::default() };
        self.send("hypervisor.Hypervisor", "CreateVM", request.write_to_bytes().unwrap(), Duration::ZERO)
            .await
    }

    pub async fn start(&mut self, id: &str) -> u32 {
        let request = StartVMRequest { id: id.into(), ..Default::default() };
        let timeout = Duration::from_secs(10_000);
        self.send("hypervisor.Hypervisor", "StartVM", request.write_to_bytes().unwrap(), timeout).await
    }

    /// Allows more time than a shim's second, which the queue's own tests cover with a simulated clock.
    pub async fn stop(&mut self, id: &str) -> u32 {
        let request = StopVMRequest { id: id.into(), ..Default::default() };
        let timeout = Duration::from_secs(10);
        self.send("hypervisor.Hypervisor", "StopVM", request.write_to_bytes().unwrap(), timeout).await
    }

    pub async fn answer(&mut self) -> Answer {
        soon("an answer", self.next_answer()).await.expect("the connection ended")
    }

    pub async fn next_answer(&mut self) -> Option<Answer> {
        let mut header = [0; frame::HEADER_LEN];
        self.stream.read_exact(&mut header).await.ok()?;
        let header = Header::decode(&header);
        let mut body = vec![0; header.length as usize];
        self.stream.read_exact(&mut body).await.ok()?;
        assert_eq!(header.kind, frame::RESPONSE);
        let response = Response::parse_from_bytes(&body).unwrap();
        Some(Answer {
            stream: header.stream,
            code: response.status.code,
            message: response.status.message.clone(),
            payload: response.payload,
        })
    }

    /// Whether no answer arrives for a while.
    pub async fn silent(&mut self) -> bool {
        tokio::time::timeout(Duration::from_millis(100), self.next_answer()).await.is_err()
    }

    /// Waits until the other side closes.
    pub async fn closed(&mut self) {
        soon("the end of the connection", async {
            let mut buffer = [0; 4096];
            while !matches!(self.stream.read(&mut buffer).await, Ok(0) | Err(_)) {}
        })
        .await;
    }
}

pub fn frame_of(stream: u32, body: &[u8]) -> Vec<u8> {
    let header = Header { length: body.len() as u32, stream, kind: frame::REQUEST, flags: 0 };
    [&header.encode()[..], body].concat()
}

pub fn header(length: u32, stream: u32, kind: u8) -> [u8; frame::HEADER_LEN] {
    Header { length, stream, kind, flags: 0 }.encode()
}

/// Resident memory of this process in KiB.
pub fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}
