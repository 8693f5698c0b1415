//! Who may be a guest: the VM that shows a ticket first, with the key it then shows, and nobody else.

#![allow(clippy::unwrap_used)] // test code outside of test functions

use std::{fs, net::SocketAddr, os::unix::fs::PermissionsExt, path::PathBuf, sync::Arc, time::Duration};

use peerpod_client::Annotations;
use peerpod_link::{birth::BirthData, claim, record, tls};
use peerpod_proto::guest::{Claim, ClaimReply};
use peerpod_tests::{PATIENCE, Sandbox, fresh_id, nothing_beyond};
use peerpod_world::{Daemons, Settings, Sight, World, eventually, proxy::Proxy};
use rcgen::{CertificateParams, KeyPair};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use tokio_rustls::{TlsConnector, client::TlsStream};

const RELAY: &str = "127.0.0.1:15151";

async fn dial(world: &World) -> TcpStream {
    let address: SocketAddr = RELAY.parse().unwrap();
    let stream = world.node().run(|| std::net::TcpStream::connect(address)).unwrap().unwrap();
    stream.set_nonblocking(true).unwrap();
    TcpStream::from_std(stream).unwrap()
}

type Identity = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

async fn secure(
    world: &World,
    pins: &[[u8; 32]],
    identity: Option<Identity>,
) -> std::io::Result<TlsStream<TcpStream>> {
    let config = tls::client_config(pins, identity).unwrap();
    TlsConnector::from(config).connect(tls::server_name(), dial(world).await).await
}

/// Somebody's attempt to become a guest, with a key of their own.
async fn claims(world: &World, birth: &BirthData, id: &str, secret: [u8; 32], csr: Vec<u8>) -> ClaimReply {
    let mut stream = secure(world, &birth.node.ca_sha256, None).await.unwrap();
    let mut claim = Claim::new();
    (claim.version, claim.ticket_id, claim.ticket_secret, claim.csr) = (1, id.into(), secret.to_vec(), csr);
    tokio::time::timeout(PATIENCE, claim::ask(&mut stream, &claim)).await.unwrap().unwrap()
}

fn csr() -> (KeyPair, Vec<u8>) {
    let key = KeyPair::generate().unwrap();
    let csr = CertificateParams::default().serialize_request(&key).unwrap().der().to_vec();
    (key, csr)
}

/// The root directory of the only VM there is, seen from outside.
fn root_of_vm(world: &World, daemons: &Daemons) -> PathBuf {
    let sight = Sight::of(world, &[], daemons).unwrap();
    let pids = sight.pids("peerpod-guest");
    PathBuf::from(format!("/proc/{}/root", pids.first().unwrap_or_else(|| panic!("a guest runs:\n{sight}"))))
}

fn birth_of_vm(world: &World, daemons: &Daemons) -> BirthData {
    let user_data = root_of_vm(world, daemons).join("media/cidata/user-data");
    BirthData::parse(&fs::read(user_data).unwrap()).unwrap()
}

#[tokio::test]
async fn a_ticket_that_is_wrong_or_was_used_by_another_key_gets_nothing() {
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "ticket").await.unwrap();
    let birth = birth_of_vm(&world, &daemons);
    let secret = *birth.ticket.secret.expose();
    let mut other = secret;
    other[31] ^= 1;
    for (id, secret, case) in [
        ("00000000000000000000000000000000", secret, "unknown id"),
        (&birth.ticket.id[..], other, "wrong secret"),
        ("", secret, "no id"),
        (&birth.ticket.id[..], secret, "used by the VM's own key"),
    ] {
        let reply = claims(&world, &birth, id, secret, csr().1).await;
        assert!(!reply.error.is_empty() && !reply.retry && reply.certificates.is_empty(), "{case}: {reply}");
        assert!(!reply.error.contains(&tls_hex(&secret)), "{case}: the answer keeps the secret");
    }
    let log =
        fs::read_to_string(daemons.log("node")).unwrap() + &fs::read_to_string(daemons.log("relay")).unwrap();
    assert!(!log.contains(&tls_hex(&secret)), "no log has the secret");
    sandbox.lives().await.unwrap();
    sandbox.stop(&daemons).await.unwrap();
    // And after the sandbox is gone.
    let reply = claims(&world, &birth, &birth.ticket.id, secret, csr().1).await;
    assert!(!reply.error.is_empty(), "{reply}");
}

fn tls_hex(bytes: &[u8]) -> String {
    peerpod_link::birth::to_hex(bytes)
}

#[tokio::test]
async fn a_vm_that_does_not_join_in_time_is_named_and_taken_away() {
    let world = World::new().unwrap();
    let settings = Settings::none()
        .set("node.ticket-ttl", "2s")
        .set("node.boot-timeout", "2s")
        .set("provider.local.boot-delay", "60s");
    let daemons = Daemons::start(&world, settings).await.unwrap();
    let pod = world.pod().unwrap();
    let before = Sight::of(&world, &[pod.namespace()], &daemons).unwrap();
    let shim = daemons.shim().await.unwrap();
    let id = fresh_id("late");
    shim.create_vm(&id, Annotations::new("default", &id), &pod.namespace().path()).await.unwrap();
    let error = tokio::time::timeout(PATIENCE, shim.start_vm(&id)).await.unwrap().unwrap_err();
    for word in ["join", "within 2s", "firewall", "10.99.0.1:15151"] {
        assert!(error.answer().contains(word), "the stage and what to look at are named: {error}");
    }
    daemons.gone(&id, PATIENCE).await.unwrap();
    nothing_beyond(&world, &[pod.namespace()], &daemons, &before, &before).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_node_s_ca_is_rolled_over_under_running_guests() {
    let world = World::new().unwrap();
    let proxy = Proxy::start(world.node(), 25_151, RELAY.parse().unwrap()).unwrap();
    let settings =
        Settings::none().set("node.relay-addresses", vec!["10.99.0.1:25151"]).set("node.ca-roll-over", "2s");
    let mut daemons = Daemons::start(&world, settings).await.unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "rolled").await.unwrap();
    let pins = birth_of_vm(&world, &daemons).node.ca_sha256;
    eventually("the CA of the guest's birth is no longer shown", Duration::from_secs(60), async || {
        // Whoever is new must trust the new one; whoever was there before must have learnt of it.
        sandbox.lives().await.unwrap();
        proxy.cut();
        secure(&world, &pins, None).await.is_err().then_some(())
    })
    .await
    .unwrap_or_else(|error| panic!("{error}\n{}", daemons.log_tails()));
    proxy.cut();
    sandbox.lives().await.unwrap();
    let later = Sandbox::start(&world, &daemons, "later").await.unwrap();
    daemons.kill_node().unwrap();
    daemons.start_node().unwrap();
    daemons.ready().await.unwrap();
    proxy.cut();
    sandbox.lives().await.unwrap();
    later.stop(&daemons).await.unwrap();
    sandbox.stop(&daemons).await.unwrap();
}

#[tokio::test]
async fn the_same_key_gets_its_certificate_again_and_a_stopped_sandboxes_is_worth_nothing() {
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "again").await.unwrap();
    let birth = birth_of_vm(&world, &daemons);
    // A guest that lost its certificate but not its key, which we borrow.
    let folder = root_of_vm(&world, &daemons).join("run/peerpod/guest");
    let key = fs::read_dir(&folder)
        .unwrap()
        .flatten()
        .find_map(|entry| KeyPair::try_from(fs::read(entry.path()).unwrap()).ok())
        .expect("the guest keeps its key");
    let csr = CertificateParams::default().serialize_request(&key).unwrap().der().to_vec();
    let reply = claims(&world, &birth, &birth.ticket.id, *birth.ticket.secret.expose(), csr).await;
    assert_eq!((reply.error.as_str(), reply.sandbox_id.as_str()), ("", sandbox.id.as_str()));
    assert!(!reply.certificates.is_empty());
    sandbox.lives().await.unwrap();

    let chain: Vec<_> = reply.certificates.into_iter().map(CertificateDer::from).collect();
    let identity =
        || (chain.clone(), PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialized_der().to_vec())));
    sandbox.stop(&daemons).await.unwrap();
    assert_closed(
        secure(&world, &birth.node.ca_sha256, Some(identity())).await,
        "a certificate that outlived its VM",
    )
    .await;
}

/// The other side ends it, at the handshake or right after.
async fn assert_closed(connected: std::io::Result<TlsStream<TcpStream>>, case: &str) {
    let Ok(mut stream) = connected else { return };
    drop(stream.write_all(&record::plain(record::Kind::Hello, &[0; 64]).unwrap()).await);
    let mut byte = [0];
    let ended = tokio::time::timeout(Duration::from_secs(8), stream.read(&mut byte)).await;
    assert!(matches!(ended, Ok(Ok(0) | Err(_))), "{case}: {ended:?}");
}

#[tokio::test]
async fn certificates_of_others_and_of_nobody_do_not_open_the_link() {
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "others").await.unwrap();
    let birth = birth_of_vm(&world, &daemons);
    // A CA that is not the node's: a guest turns away before it says anything.
    assert!(secure(&world, &[[7; 32]], None).await.is_err());
    // A certificate of a CA that is not the node's.
    let key = KeyPair::generate().unwrap();
    let own = CertificateParams::new(vec!["guest".into()]).unwrap().self_signed(&key).unwrap();
    let der = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialized_der().to_vec()));
    let foreign = secure(&world, &birth.node.ca_sha256, Some((vec![own.der().clone()], der))).await;
    assert_closed(foreign, "a foreign certificate").await;
    // A session without a certificate.
    assert_closed(secure(&world, &birth.node.ca_sha256, None).await, "no certificate").await;
    // And words that are none, behind a handshake that is right.
    let lengths: [u32; 4] = [0, 65_537, 4 << 20, u32::MAX];
    for (length, kind) in lengths.into_iter().flat_map(|length| [1u8, 3, 11, 255].map(|kind| (length, kind)))
    {
        let mut stream = secure(&world, &birth.node.ca_sha256, None).await.unwrap();
        let mut record = length.to_be_bytes().to_vec();
        record.extend([kind, 0xff, 0xff, 0xff]);
        record.resize(record.len() + 4096, 0xa5);
        drop(stream.write_all(&record).await);
        assert_closed(Ok(stream), &format!("a record of kind {kind} and {length} bytes")).await;
    }
    sandbox.lives().await.unwrap();
    sandbox.stop(&daemons).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn stalled_handshakes_and_noise_on_the_link_keep_nobody_out() {
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let mut stalled = Vec::new();
    for index in 0..600 {
        let mut stream = dial(&world).await;
        if index % 3 == 1 {
            // The beginning of a handshake, or none at all.
            drop(stream.write_all(&[22, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3]).await);
        } else if index % 3 == 2 {
            drop(stream.write_all(&[0x5a; 4096]).await);
        }
        stalled.push(stream);
    }
    let sandbox = Sandbox::start(&world, &daemons, "beside").await.unwrap();
    sandbox.lives().await.unwrap();
    let stalled = Arc::new(tokio::sync::Mutex::new(stalled));
    eventually("every stalled connection is closed", PATIENCE, async || {
        let mut streams = stalled.lock().await;
        let mut open = Vec::new();
        for mut stream in streams.drain(..) {
            let mut byte = [0; 64];
            match tokio::time::timeout(Duration::from_millis(1), stream.read(&mut byte)).await {
                Ok(Ok(0) | Err(_)) => {}
                _ => open.push(stream),
            }
        }
        *streams = open;
        streams.is_empty().then_some(())
    })
    .await
    .unwrap();
    sandbox.stop(&daemons).await.unwrap();
}

#[tokio::test]
async fn initdata_of_any_size_travels_over_the_link_and_not_in_user_data() {
    let world = World::new().unwrap();
    let mut daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let pod = world.pod().unwrap();
    let shim = daemons.shim().await.unwrap();
    let id = fresh_id("initdata");
    // Twice as much as the control messages of a link may carry by default.
    let initdata = format!("algorithm = \"sha384\"\nversion = \"0.1.0\"\n# {}\n", "canary ".repeat(300_000));
    let annotations = Annotations::new("default", &id).hypervisor("cc_init_data", &initdata);
    shim.create_vm(&id, annotations, &pod.namespace().path()).await.unwrap();
    tokio::time::timeout(PATIENCE, shim.start_vm(&id)).await.unwrap().unwrap();
    let root = root_of_vm(&world, &daemons);
    let file = root.join("run/peerpod/guest/initdata");
    assert!(fs::read_to_string(&file).unwrap() == initdata, "it arrived as it was sent");
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    let user_data = fs::read_to_string(root.join("media/cidata/user-data")).unwrap();
    assert!(user_data.len() < 4096 && !user_data.contains("canary"), "user-data holds nothing of the pod");
    for daemon in ["node", "relay"] {
        assert!(!fs::read_to_string(daemons.log(daemon)).unwrap().contains("canary"), "{daemon} logs it");
    }
    // The record that holds it is read again.
    daemons.kill_node().unwrap();
    daemons.start_node().unwrap();
    daemons.ready().await.unwrap();
    let phases: Vec<_> =
        daemons.ledger().unwrap().iter().map(|entry| (entry.id.clone(), entry.phase())).collect();
    assert_eq!(phases, [(id.clone(), "running".to_owned())]);
    shim.stop_vm(&id).await.unwrap();
    daemons.gone(&id, PATIENCE).await.unwrap();
}
