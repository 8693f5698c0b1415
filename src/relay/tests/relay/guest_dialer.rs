//! Tests of dialling: the peer at a VM's address must be the guest of the dialled sandbox.

use super::common;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use common::guest::Guest;
use common::node::{Memory, Node};
use common::{Ca, Identity, World, soon, until};
use peerpod_link::{claim, tls};
use peerpod_proto::guest::Claim;
use peerpod_proto::relay::{DeleteSandboxRequest, PutSandboxRequest};
use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// Long enough for several attempts.
const A_WHILE: Duration = Duration::from_millis(700);

impl World {
    async fn put_waiting(&self, id: &str, guests: &[&Identity], dial: Vec<String>) {
        let request = PutSandboxRequest {
            id: id.into(),
            agent_socket: self.agent_socket(id).to_str().unwrap().into(),
            guest_certificates: guests
                .iter()
                .map(|(chain, _)| tls::fingerprint(&chain[0]).to_vec())
                .collect(),
            dial,
            ..Default::default()
        };
        self.relay_client().put_sandbox(Default::default(), &request).await.unwrap();
    }

    async fn delete(&self, id: &str) {
        let request = DeleteSandboxRequest { id: id.into(), ..Default::default() };
        self.relay_client().delete_sandbox(Default::default(), &request).await.unwrap();
    }
}

/// Accepts the next connection as a guest, which is the TLS client.
async fn answer(listener: &TcpListener, ca: &Ca, identity: Option<&Identity>) -> TlsStream<TcpStream> {
    let handshake = async {
        loop {
            let (tcp, _) = listener.accept().await.unwrap();
            let identity = identity.map(|(chain, key)| (chain.clone(), key.clone_key()));
            let config = tls::client_config(&[ca.sha256()], identity).unwrap();
            // An earlier connection may have been given up by the relay meanwhile.
            if let Ok(stream) = TlsConnector::from(config).connect(tls::server_name(), tcp).await {
                return stream;
            }
        }
    };
    soon("a dial and its handshake", handshake).await
}

async fn dropped(mut stream: impl AsyncReadExt + Unpin) {
    let closed = soon("the end", stream.read(&mut [0; 64])).await;
    assert!(matches!(closed, Ok(0) | Err(_)), "{closed:?}");
}

/// Accepts the connections that were under way.
async fn drain(listener: &TcpListener) {
    while timeout(Duration::from_millis(50), listener.accept()).await.is_ok() {}
}

async fn nobody_dials(listener: &TcpListener) {
    drain(listener).await;
    assert!(timeout(A_WHILE, listener.accept()).await.is_err());
}

/// Returns a bound port without a listener, held so that no other program gets it.
fn held() -> (TcpSocket, SocketAddr) {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_reuseaddr(true).unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = socket.local_addr().unwrap();
    (socket, address)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_is_dialled_until_it_is_there_again_when_it_is_cut_and_never_after_its_sandbox() {
    let mut world = World::new("dials").await;
    world.configure().await;
    let identity = world.ca.client();
    // A port without a listener, one with a listener that stalls, and one on which the guest listens later.
    let (_refusing, dead) = held();
    let stalling = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (later, to) = held();
    let dial = [dead, stalling.local_addr().unwrap(), to].map(|address| address.to_string()).to_vec();
    world.put_waiting("a", &[&identity], dial.clone()).await;
    let (_stalled, _) = soon("a dial", stalling.accept()).await.unwrap();
    let listener = later.listen(16).unwrap();

    let guest = Guest::waiting(world.ca.sha256());
    guest.handle.attach(answer(&listener, &world.ca, Some(&identity)).await.into());
    world.state("a", "the guest", |state| state.guest_connected).await;
    nobody_dials(&listener).await;
    // Lost connection: the same session continues over the next connection.
    for round in 1..=3 {
        guest.handle.attach(peerpod_link::endpoint::Transport::new(tokio::io::empty(), to));
        guest.handle.attach(answer(&listener, &world.ca, Some(&identity)).await.into());
        world
            .state("a", "the resumed link", |state| state.guest_connected && state.reconnects == round)
            .await;
    }
    // A new relay knows the addresses from its own record.
    world.stop().await;
    world.start().await;
    guest.handle.attach(answer(&listener, &world.ca, Some(&identity)).await.into());
    world.state("a", "the guest", |state| state.guest_connected).await;

    // The guest moves to another address, and then the sandbox is deleted.
    let other = TcpListener::bind("127.0.0.1:0").await.unwrap();
    world.put_waiting("a", &[&identity], vec![other.local_addr().unwrap().to_string()]).await;
    guest.handle.attach(peerpod_link::endpoint::Transport::new(tokio::io::empty(), to));
    guest.handle.attach(answer(&other, &world.ca, Some(&identity)).await.into());
    world.state("a", "the guest", |state| state.guest_connected && state.reconnects == 1).await;
    world.delete("a").await;
    nobody_dials(&other).await;
    nobody_dials(&listener).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_of_another_sandbox_is_dropped() {
    let world = World::new("impostor").await;
    world.configure().await;
    let (own, other) = (world.ca.client(), world.ca.client());
    world.put("b", &[&other]).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    world.put_waiting("a", &[&own], vec![listener.local_addr().unwrap().to_string()]).await;
    // An unknown certificate, one of another CA, and one of another sandbox.
    for wrong in [world.ca.client(), Ca::new().client(), other] {
        dropped(answer(&listener, &world.ca, Some(&wrong)).await).await;
    }
    let b = world.state("b", "the other", |_| true).await;
    assert!(!b.guest_connected, "its certificate opened nothing here");
    // Each attempt costs that guest its own link, so it is not dialled again for a while.
    drain(&listener).await;
    let called = tokio::time::timeout(Duration::from_secs(3), listener.accept()).await;
    assert!(called.is_err(), "another sandbox's guest is called again");
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    world.put_waiting("a", &[&own], vec![listener.local_addr().unwrap().to_string()]).await;
    // The right guest is accepted all the same.
    let guest = Guest::waiting(world.ca.sha256());
    guest.handle.attach(answer(&listener, &world.ca, Some(&own)).await.into());
    world.state("a", "the guest", |state| state.guest_connected).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_ticket_is_valid_only_from_its_own_dialled_vm() {
    let world = World::new("dialled").await;
    world.configure().await;
    let memory = Arc::new(Memory::default());
    *memory.chain.lock().unwrap() = vec![vec![7; 900]];
    let _node = Node::start(&world, memory.clone()).await;
    until("the node", || !memory.calls().is_empty()).await;
    let claim = Claim {
        version: 1,
        ticket_id: "00112233445566778899aabbccddeeff".into(),
        ticket_secret: b"secret".to_vec(),
        csr: vec![1, 2, 3],
        ..Default::default()
    };
    // The node grants every claim, for sandbox `sb`, like a node that ignores the dialled sandbox.
    let wrong = TcpListener::bind("127.0.0.1:0").await.unwrap();
    world.put_waiting("a", &[], vec![wrong.local_addr().unwrap().to_string()]).await;
    let mut stream = answer(&wrong, &world.ca, None).await;
    let reply = soon("the end", claim::ask(&mut stream, &claim)).await;
    assert!(reply.is_err(), "the relay issues no certificate: {reply:?}");
    let right = TcpListener::bind("127.0.0.1:0").await.unwrap();
    world.put_waiting("sb", &[], vec![right.local_addr().unwrap().to_string()]).await;
    let mut stream = answer(&right, &world.ca, None).await;
    let reply = soon("the reply", claim::ask(&mut stream, &claim)).await.unwrap();
    assert_eq!((reply.error.as_str(), reply.sandbox_id.as_str()), ("", "sb"));
    let calls = memory.calls();
    assert!(calls.contains(&"Dialled a".to_owned()) && calls.contains(&"Dialled sb".to_owned()), "{calls:?}");
    // The guest is dialled again at once, to return with its certificate.
    drop(stream);
    soon("the next dial", right.accept()).await.unwrap();
}
