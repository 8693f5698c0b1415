//! Who may be a guest: the VM that shows a ticket first, with the key it then shows, and nobody else.

#![allow(clippy::unwrap_used)] // test code outside of test functions

use std::{
    collections::BTreeMap, fs, net::SocketAddr, os::unix::fs::PermissionsExt, path::PathBuf, sync::Arc,
    time::Duration,
};

use peerpod_client::Annotations;
use peerpod_link::{
    birth::{BirthData, from_hex},
    claim, record, tls,
};
use peerpod_proto::guest::{Claim, ClaimReply};
use peerpod_tests::{PATIENCE, Sandbox, fresh_id, nothing_beyond, resident};
use peerpod_world::{Daemons, Settings, Sight, World, eventually, proxy::Proxy};
use rcgen::{CertificateParams, KeyPair};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use serde_json::Value;
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

/// The root directories of all VMs, by the sandbox that each one's guest belongs to, with what the guest was granted.
fn guests(world: &World, daemons: &Daemons) -> BTreeMap<String, (PathBuf, Value)> {
    let sight = Sight::of(world, &[], daemons).unwrap();
    let roots = sight.pids("peerpod-guest").into_iter().map(|pid| PathBuf::from(format!("/proc/{pid}/root")));
    let granted = roots.filter_map(|root| {
        let grant = fs::read(root.join("run/peerpod/guest/identity.json")).ok()?;
        let grant: Value = serde_json::from_slice(&grant).unwrap();
        Some((grant["sandbox_id"].as_str()?.to_owned(), (root, grant)))
    });
    granted.collect()
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
    let relay = daemons.relay_pid().unwrap();
    let idle = resident(relay).unwrap();
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
    let beside = resident(relay).unwrap();
    println!("the relay: {idle} bytes when idle, {beside} beside 600 stalled handshakes");
    assert!(beside < 2 * idle, "{beside} of {idle} bytes");
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

#[tokio::test(flavor = "multi_thread")]
async fn the_identity_of_one_vm_is_not_another_s_and_the_other_goes_on() {
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let (one, other) =
        tokio::try_join!(Sandbox::start(&world, &daemons, "one"), Sandbox::start(&world, &daemons, "other"))
            .unwrap();
    let mut guests = guests(&world, &daemons);
    let (root, grant) = guests.remove(&one.id).unwrap();
    let (other_root, _) = guests.remove(&other.id).unwrap();
    let birth = BirthData::parse(&fs::read(other_root.join("media/cidata/user-data")).unwrap()).unwrap();
    let hex = |text: &Value| -> Vec<u8> {
        let text = text.as_str().unwrap();
        (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
    };
    let chain: Vec<_> =
        grant["certificates"].as_array().unwrap().iter().map(hex).map(CertificateDer::from).collect();
    let files = fs::read_dir(root.join("run/peerpod/guest")).unwrap().flatten();
    let key = files.filter_map(|file| KeyPair::try_from(fs::read(file.path()).unwrap()).ok()).next().unwrap();
    let identity =
        || (chain.clone(), PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialized_der().to_vec())));
    let pins = birth.node.ca_sha256.clone();
    // What the other is doing all the while.
    let waiting = tokio::spawn({
        let agent = other.agent.clone();
        async move { agent.wait_process(peerpod_tests::CONTAINER, "").await }
    });

    // The one's key with the other's ticket.
    let csr = CertificateParams::default().serialize_request(&key).unwrap().der().to_vec();
    let secret = *birth.ticket.secret.expose();
    let reply = claims(&world, &birth, &birth.ticket.id, secret, csr.clone()).await;
    assert!(!reply.error.is_empty() && !reply.retry && reply.certificates.is_empty(), "{reply}");
    // The other's ticket behind the one's certificate.
    let mut stream = secure(&world, &pins, Some(identity())).await.unwrap();
    let mut claim = Claim::new();
    (claim.version, claim.ticket_id, claim.ticket_secret, claim.csr) =
        (1, birth.ticket.id.clone(), secret.to_vec(), csr);
    let asked = tokio::time::timeout(Duration::from_secs(8), claim::ask(&mut stream, &claim)).await;
    assert!(!matches!(&asked, Ok(Ok(reply)) if !reply.certificates.is_empty()), "{asked:?}");
    // The one's certificate, and a session that says it is the other's guest program.
    let session = session_of(&daemons, &other.id);
    let mut stream = secure(&world, &pins, Some(identity())).await.unwrap();
    let hello = record::Hello { versions: (1, 1), session, epoch: 0, recv: 0, program: "thief".into() };
    stream.write_all(&record::plain(record::Kind::Hello, &hello.encode()).unwrap()).await.unwrap();
    let mut welcome = [0; 28];
    // It is welcome as what it is: the one's guest. Nothing of the other's comes over it.
    drop(tokio::time::timeout(Duration::from_secs(2), stream.read_exact(&mut welcome)).await);
    other.lives().await.unwrap();
    drop(stream);

    // When the one is gone its identity opens nothing any more.
    one.stop(&daemons).await.unwrap();
    assert_closed(secure(&world, &pins, Some(identity())).await, "the identity of a VM that is gone").await;
    other.lives().await.unwrap();
    assert!(!waiting.is_finished(), "what waited before still waits");
    let log = fs::read_to_string(daemons.log("relay")).unwrap();
    let links =
        log.lines().filter(|line| line.contains("guest connected") && line.contains(&other.id)).count();
    assert_eq!(links, 1, "its link was never another one");
    other.stop(&daemons).await.unwrap();
}

/// The session of a sandbox's guest program, as the relay logged it.
fn session_of(daemons: &Daemons, id: &str) -> record::SessionId {
    let log = fs::read_to_string(daemons.log("relay")).unwrap();
    let line = log.lines().find(|line| line.contains("guest connected") && line.contains(id)).unwrap();
    let hex = line.split("session=").nth(1).unwrap().trim_start_matches('"');
    let whole = from_hex(&format!("{}{}", &hex[..32], "0".repeat(32))).unwrap();
    record::SessionId(whole[..16].try_into().unwrap())
}

/// The VM's own guest sleeps all the while; we are its guest here.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_killed_before_the_certificate_left_gives_it_to_the_same_key_and_to_no_other() {
    let world = World::new().unwrap();
    let settings = Settings::none().set("provider.local.boot-delay", "60s");
    let mut daemons = Daemons::start(&world, settings).await.unwrap();
    let (pod, shim, id) = (world.pod().unwrap(), daemons.shim().await.unwrap(), fresh_id("bound"));
    shim.create_vm(&id, Annotations::new("default", &id), &pod.namespace().path()).await.unwrap();
    let served = daemons.state_dir().join("relay/sandboxes");
    let birth = eventually("the VM is made and the relay knows the sandbox", PATIENCE, async || {
        let entry = daemons.ledger().ok()?.into_iter().find(|entry| entry.id == id)?;
        let known = entry.phase() == "joining" && served.join(format!("{id}.json")).exists();
        let user_data = entry.record["request"]["user_data"].as_str().filter(|_| known)?;
        BirthData::parse(user_data.as_bytes()).ok()
    })
    .await
    .unwrap();
    let ask = |csr: &[u8]| {
        let (world, birth, csr) = (world.clone(), birth.clone(), csr.to_vec());
        async move { claims(&world, &birth, &birth.ticket.id, *birth.ticket.secret.expose(), csr).await }
    };
    // A relay that cannot keep whose certificate it is keeps the answer from leaving.
    fs::rename(&served, served.with_extension("away")).unwrap();
    let (key, csr) = csr();
    let asking = tokio::spawn(ask(&csr));
    eventually("the ticket is bound", PATIENCE, async || {
        let entry = daemons.ledger().ok()?.into_iter().find(|entry| entry.id == id)?;
        entry.record["binding"]["key_sha256"].is_string().then_some(())
    })
    .await
    .unwrap();
    daemons.kill_node().unwrap();
    let reply = asking.await.unwrap();
    assert!(reply.retry && reply.certificates.is_empty(), "nothing left: {reply}");
    fs::rename(served.with_extension("away"), &served).unwrap();
    daemons.start_node().unwrap();
    daemons.ready().await.unwrap();

    let thief = ask(&self::csr().1).await;
    assert!(!thief.error.is_empty() && !thief.retry && thief.certificates.is_empty(), "{thief}");
    let granted = eventually("the same key is answered", PATIENCE, async || {
        let reply = ask(&csr).await;
        (!reply.retry).then_some(reply)
    })
    .await
    .unwrap();
    assert_eq!((granted.error.as_str(), granted.sandbox_id.as_str()), ("", id.as_str()));
    // And the relay knows it: the link opens.
    let chain: Vec<_> = granted.certificates.into_iter().map(CertificateDer::from).collect();
    let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialized_der().to_vec()));
    let mut stream = secure(&world, &birth.node.ca_sha256, Some((chain, key))).await.unwrap();
    let hello = record::Hello {
        versions: (1, 1),
        session: record::SessionId([7; 16]),
        epoch: 0,
        recv: 0,
        program: "test".into(),
    };
    stream.write_all(&record::plain(record::Kind::Hello, &hello.encode()).unwrap()).await.unwrap();
    let mut welcome = [0; 28];
    tokio::time::timeout(PATIENCE, stream.read_exact(&mut welcome)).await.unwrap().unwrap();
    shim.stop_vm(&id).await.unwrap();
    daemons.gone(&id, PATIENCE).await.unwrap();
}
