//! Helpers of tests that act as the guest: the link's TLS, a claim, a key, and the user-data of a VM that sleeps.

#![allow(dead_code, unreachable_pub)] // each test file uses its part
#![allow(clippy::unwrap_used)] // test code outside of test functions

use std::net::SocketAddr;
use std::time::Duration;

use peerpod_link::user_data::UserData;
use peerpod_link::{claim, record, tls};
use peerpod_proto::guest::{Claim, ClaimReply};
use peerpod_tests::PATIENCE;
use peerpod_world::{Daemons, LedgerEntry, World, eventually};
use rcgen::{CertificateParams, KeyPair};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// Address of the relay's listener in the node's namespace.
pub const RELAY: &str = "127.0.0.1:15151";

/// Opens a TCP connection to the relay.
pub async fn dial(world: &World) -> TcpStream {
    let address: SocketAddr = RELAY.parse().unwrap();
    let stream = world.node().run(|| std::net::TcpStream::connect(address)).unwrap().unwrap();
    stream.set_nonblocking(true).unwrap();
    TcpStream::from_std(stream).unwrap()
}

/// A certificate and its key.
pub type Identity = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

/// Opens a TLS connection to the relay as a guest that trusts `pins`.
pub async fn secure(
    world: &World,
    pins: &[[u8; 32]],
    identity: Option<Identity>,
) -> std::io::Result<TlsStream<TcpStream>> {
    let config = tls::client_config(pins, identity).unwrap();
    TlsConnector::from(config).connect(tls::server_name(), dial(world).await).await
}

/// Sends a claim with the given key's request, and returns the reply.
pub async fn claims(
    world: &World,
    user_data: &UserData,
    id: &str,
    secret: [u8; 32],
    csr: Vec<u8>,
) -> ClaimReply {
    let mut stream = secure(world, &user_data.node.ca_sha256, None).await.unwrap();
    let mut claim = Claim::new();
    (claim.version, claim.ticket_id, claim.ticket_secret, claim.csr) = (1, id.into(), secret.to_vec(), csr);
    tokio::time::timeout(PATIENCE, claim::ask(&mut stream, &claim)).await.unwrap().unwrap()
}

/// Makes a key and a certificate request.
pub fn csr() -> (KeyPair, Vec<u8>) {
    let key = KeyPair::generate().unwrap();
    let csr = CertificateParams::default().serialize_request(&key).unwrap().der().to_vec();
    (key, csr)
}

/// Combines a granted certificate with its key.
pub fn identity(key: &KeyPair, chain: &[Vec<u8>]) -> Identity {
    let chain = chain.iter().cloned().map(CertificateDer::from).collect();
    (chain, PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialized_der().to_vec())))
}

/// Asserts that the relay closes the connection, at the handshake or right after it.
pub async fn assert_closed(connected: std::io::Result<TlsStream<TcpStream>>, case: &str) {
    let Ok(mut stream) = connected else { return };
    drop(stream.write_all(&record::plain(record::RecordKind::Hello, &[0; 64]).unwrap()).await);
    let mut byte = [0];
    let ended = tokio::time::timeout(Duration::from_secs(8), stream.read(&mut byte)).await;
    assert!(matches!(ended, Ok(Ok(0) | Err(_))), "{case}: {ended:?}");
}

/// Returns the ledger's record of a sandbox.
pub fn entry(daemons: &Daemons, id: &str) -> Option<LedgerEntry> {
    daemons.ledger().ok()?.into_iter().find(|entry| entry.id == id)
}

/// Returns the user-data of this sandbox's VM, once the VM is made and the relay has a record of the sandbox.
pub async fn user_data_of(daemons: &Daemons, id: &str) -> UserData {
    let served = daemons.state_dir().join(format!("relay/sandboxes/{id}.json"));
    eventually("the VM is made and the relay knows the sandbox", PATIENCE, async || {
        let entry = entry(daemons, id)?;
        let known = entry.phase() == "joining" && served.exists();
        let user_data = entry.record["request"]["user_data"].as_str().filter(|_| known)?;
        UserData::parse(user_data.as_bytes()).ok()
    })
    .await
    .unwrap()
}
