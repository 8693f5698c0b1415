//! A guest: dials the relay with TLS, runs the other end of the link, and has an agent that answers by fixed rules.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use bytes::{Bytes, BytesMut};
use futures_util::future::BoxFuture;
use peerpod_link::endpoint::{Endpoint, EndpointHandle, Filter, Handler, Limits, LinkEvent, Role};
use peerpod_link::frame::{self, Header};
use peerpod_link::tls;
use peerpod_proto::guest::{Reply, Request, Status};
use peerpod_proto::ttrpc_frame;
use protobuf::Message;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream, UnixStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::{Identity, soon};

/// Connects with TLS, with or without a certificate.
pub async fn dial(
    to: SocketAddr,
    ca: [u8; 32],
    identity: Option<&Identity>,
) -> io::Result<TlsStream<TcpStream>> {
    shake(TcpStream::connect(to).await?, ca, identity).await
}

/// Connects from this address of 127.0.0.0/8.
pub async fn connect_from(from: [u8; 4], to: SocketAddr) -> io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.bind(SocketAddr::from((from, 0)))?;
    socket.connect(to).await
}

/// Begins TLS on a connection, with or without a certificate.
pub async fn shake(
    tcp: TcpStream,
    ca: [u8; 32],
    identity: Option<&Identity>,
) -> io::Result<TlsStream<TcpStream>> {
    let identity = identity.map(|(chain, key)| (chain.clone(), key.clone_key()));
    let config = tls::client_config(&[ca], identity).map_err(io::Error::other)?;
    TlsConnector::from(config).connect(tls::server_name(), tcp).await
}

/// Observations of the guest.
#[derive(Default)]
pub struct Seen {
    pub up: AtomicUsize,
    pub dials: AtomicUsize,
    /// Calls that the agent received, like `grpc.AgentService/WaitProcess`.
    pub calls: Mutex<Vec<String>>,
    pub flushes: AtomicUsize,
    pub handle: OnceLock<EndpointHandle>,
}

pub struct Guest {
    pub seen: Arc<Seen>,
    pub handle: EndpointHandle,
    to: SocketAddr,
    ca: [u8; 32],
}

struct Ours(Arc<Seen>);

struct Transparent;

impl Filter for Transparent {
    fn from_local(&mut self, input: &[u8], peer: &mut BytesMut, _: &mut BytesMut) {
        peer.extend_from_slice(input);
    }
    fn from_peer(&mut self, input: &[u8], _: &mut BytesMut, local: &mut BytesMut) {
        local.extend_from_slice(input);
    }
    fn stream_lost(&mut self, _: Option<&mut BytesMut>, _: &mut BytesMut) -> bool {
        false
    }
}

impl Handler for Ours {
    fn filter(&mut self) -> Box<dyn Filter> {
        Box::new(Transparent)
    }
    fn dial(&mut self) -> BoxFuture<'static, io::Result<UnixStream>> {
        self.0.dials.fetch_add(1, Ordering::Relaxed);
        let seen = self.0.clone();
        Box::pin(async move {
            let (ours, agents) = UnixStream::pair()?;
            tokio::spawn(agent(agents, seen));
            Ok(ours)
        })
    }
    fn on_control(&mut self, message: Bytes) {
        let request = Request::parse_from_bytes(&message).unwrap();
        if request.has_flush() {
            self.0.flushes.fetch_add(1, Ordering::Relaxed);
            return; // Never answered.
        }
        let status = Status { stage: "running".into(), ready: true, ..Default::default() };
        let reply = Reply { id: request.id, status: Some(status).into(), ..Default::default() };
        self.0.handle.get().unwrap().control(reply.write_to_bytes().unwrap().into()).unwrap();
    }
    fn on_link(&mut self, event: LinkEvent) {
        if matches!(event, LinkEvent::Up { .. }) {
            self.0.up.fetch_add(1, Ordering::Relaxed);
        }
    }
    fn on_connections(&mut self, _: usize) {}
}

impl Guest {
    /// Starts a connected guest.
    pub async fn start(to: SocketAddr, ca: [u8; 32], identity: &Identity) -> Guest {
        let mut guest = Guest::waiting(ca);
        guest.to = to;
        guest.connect(identity).await;
        guest
    }

    /// Starts a guest that waits for a connection.
    pub fn waiting(ca: [u8; 32]) -> Guest {
        let seen = Arc::new(Seen::default());
        let (endpoint, handle) = Endpoint::new(Role::Guest, Ours(seen.clone()), Limits::default());
        assert!(seen.handle.set(handle.clone()).is_ok());
        tokio::spawn(endpoint.run());
        Guest { seen, handle, to: SocketAddr::from(([0; 4], 0)), ca }
    }

    /// Dials until the link is up once more.
    pub async fn connect(&self, identity: &Identity) {
        let before = self.seen.up.load(Ordering::Relaxed);
        soon("the link", async {
            loop {
                if let Ok(stream) = dial(self.to, self.ca, Some(identity)).await {
                    self.handle.attach(stream.into());
                    for _ in 0..200 {
                        if self.seen.up.load(Ordering::Relaxed) > before {
                            return;
                        }
                        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
                    }
                }
                tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            }
        })
        .await;
    }

    /// Number of flush requests that it received.
    pub fn flushes(&self) -> usize {
        self.seen.flushes.load(Ordering::Relaxed)
    }

    pub fn calls(&self) -> Vec<String> {
        self.seen.calls.lock().unwrap().clone()
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.handle.close();
    }
}

/// Echoes the payload of `Check` and `WriteStdin`, answers `Big` with the requested number of bytes, and no other call.
async fn agent(mut stream: UnixStream, seen: Arc<Seen>) {
    loop {
        let mut header = [0; frame::HEADER_LEN];
        if stream.read_exact(&mut header).await.is_err() {
            return;
        }
        let header = Header::decode(&header);
        let mut body = vec![0; header.length as usize];
        stream.read_exact(&mut body).await.unwrap();
        let request = ttrpc_frame::Request::parse_from_bytes(&body).unwrap();
        seen.calls.lock().unwrap().push(format!("{}/{}", request.service, request.method));
        let payload = match request.method.as_str() {
            "Check" | "WriteStdin" => request.payload,
            "Big" => {
                let size = u32::from_be_bytes(request.payload.try_into().unwrap());
                (0..size).map(|n| n as u8).collect()
            }
            _ => continue,
        };
        let response = ttrpc_frame::Response { payload, ..Default::default() }.write_to_bytes().unwrap();
        let answer =
            Header { length: response.len() as u32, stream: header.stream, kind: frame::RESPONSE, flags: 0 };
        stream.write_all(&answer.encode()).await.unwrap();
        stream.write_all(&response).await.unwrap();
    }
}
