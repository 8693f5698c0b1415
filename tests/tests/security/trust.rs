//! Tests the admission of guests: only the VM that shows a ticket first is admitted, and only with the key it shows
//! then.

use super::guest_common;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use guest_common::{RELAY, assert_closed, claims, csr, dial, entry, identity, secure, user_data_of};
use peerpod_client::Annotations;
use peerpod_link::user_data::{UserData, from_hex};
use peerpod_link::{claim, record};
use peerpod_proto::guest::Claim;
use peerpod_tests::{PATIENCE, Sandbox, fresh_id, nothing_beyond, resident, sample};
use peerpod_world::proxy::Proxy;
use peerpod_world::{Daemons, Settings, Sight, World, eventually};
use rcgen::{CertificateParams, KeyPair};
use rustls_pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Returns the root directory of the only VM, as seen from outside.
fn root_of_vm(world: &World, daemons: &Daemons) -> PathBuf {
    let sight = Sight::of(world, &[], daemons).unwrap();
    let pids = sight.pids("peerpod-guest");
    PathBuf::from(format!("/proc/{}/root", pids.first().unwrap_or_else(|| panic!("a guest runs:\n{sight}"))))
}

/// Returns the root directories of all VMs and their guests' grants, by sandbox id.
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

fn birth_of_vm(world: &World, daemons: &Daemons) -> UserData {
    let user_data = root_of_vm(world, daemons).join("media/cidata/user-data");
    UserData::parse(&fs::read(user_data).unwrap()).unwrap()
}

/// Returns the key that the guest of the VM with this root made; the folder also contains other files, and a pipe.
fn key_of_guest(root: &std::path::Path) -> KeyPair {
    let all = fs::read_dir(root.join("run/peerpod/guest")).unwrap().flatten();
    let mut files = all.filter(|entry| entry.file_type().unwrap().is_file());
    files
        .find_map(|entry| KeyPair::try_from(fs::read(entry.path()).ok()?).ok())
        .expect("the guest keeps its key")
}

#[tokio::test]
async fn a_wrong_ticket_or_one_used_by_another_key_gets_no_certificate() {
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "ticket").await.unwrap();
    let user_data = birth_of_vm(&world, &daemons);
    let secret = *user_data.ticket.secret.expose();
    let mut other = secret;
    other[31] ^= 1;
    let start = Instant::now();
    for (id, secret, case) in [
        ("00000000000000000000000000000000", secret, "unknown id"),
        (&user_data.ticket.id[..], other, "wrong secret"),
        ("", secret, "no id"),
        (&user_data.ticket.id[..], secret, "used by the VM's own key"),
    ] {
        let reply = claims(&world, &user_data, id, secret, csr().1).await;
        assert!(!reply.error.is_empty() && !reply.retry && reply.certificates.is_empty(), "{case}: {reply}");
        assert!(!reply.error.contains(&hex::encode(secret)), "{case}: the answer keeps the secret");
    }
    for n in 0..50 {
        let reply = claims(&world, &user_data, &format!("{n:032x}"), other, Vec::new()).await;
        assert!(!reply.error.is_empty() && !reply.retry, "{reply}");
    }
    // One line for each address and minute.
    let most = 1 + start.elapsed().as_secs() as usize / 60;
    let count = |log: &str, parts: [&str; 2]| {
        log.lines().filter(|line| parts.iter().all(|part| line.contains(part))).count()
    };
    let [node, relay] = ["node", "relay"].map(|name| fs::read_to_string(daemons.log(name)).unwrap());
    let lines = [
        count(&node, ["claim refused: unknown ticket", " ticket="]),
        count(&relay, ["ticket shown", "\"refused\""]),
    ];
    assert!(lines.iter().all(|lines| (1..=most).contains(lines)), "{lines:?} lines of node and relay");
    assert!(!(node + &relay).contains(&hex::encode(secret)), "no log has the secret");
    sandbox.lives().await.unwrap();
    sandbox.stop(&daemons).await.unwrap();
    // Also after the sandbox is gone.
    let reply = claims(&world, &user_data, &user_data.ticket.id, secret, csr().1).await;
    assert!(!reply.error.is_empty(), "{reply}");
}

#[tokio::test]
async fn a_vm_that_does_not_join_in_time_is_named_and_deleted() {
    let world = World::new().unwrap();
    let settings = Settings::none()
        // Long enough to read its user-data, which is gone after these limits.
        .set("node.ticket-ttl", "10s")
        .set("node.boot-timeout", "10s")
        .set("provider.local.boot-delay", "60s");
    let daemons = Daemons::start(&world, settings).await.unwrap();
    let pod = world.pod().unwrap();
    let before = Sight::of(&world, &[pod.namespace()], &daemons).unwrap();
    let shim = daemons.shim().await.unwrap();
    let id = fresh_id("late");
    shim.create_vm(&id, Annotations::new("default", &id), &pod.namespace().path()).await.unwrap();
    let user_data = user_data_of(&daemons, &id).await;
    let error = tokio::time::timeout(PATIENCE, shim.start_vm(&id)).await.unwrap().unwrap_err();
    for word in ["join", "within 10s", "firewall", "10.99.0.1:15151"] {
        assert!(error.answer().contains(word), "the stage and what to look at are named: {error}");
    }
    daemons.gone(&id, PATIENCE).await.unwrap();
    nothing_beyond(&world, &[pod.namespace()], &daemons, &before, &before).await.unwrap();
    // A guest that connects now gets nothing for its ticket.
    let reply =
        claims(&world, &user_data, &user_data.ticket.id, *user_data.ticket.secret.expose(), csr().1).await;
    assert!(!reply.error.is_empty() && !reply.retry && reply.certificates.is_empty(), "{reply}");
}

/// The tickets expire while the node is down, because the clock runs on. One was shown in time, the other was not.
#[tokio::test]
async fn a_ticket_that_is_first_shown_too_late_gets_nothing_and_one_that_was_shown_in_time_gets_it_again() {
    let world = World::new().unwrap();
    let settings = Settings::none().set("provider.local.boot-delay", "60s");
    let mut daemons = Daemons::start(&world, settings).await.unwrap();
    let (pods, shim) = ([world.pod().unwrap(), world.pod().unwrap()], daemons.shim().await.unwrap());
    let ids = [fresh_id("late"), fresh_id("in-time")];
    let mut births = Vec::new();
    for (pod, id) in pods.iter().zip(&ids) {
        shim.create_vm(id, Annotations::new("default", id), &pod.namespace().path()).await.unwrap();
        births.push(user_data_of(&daemons, id).await);
    }
    let requests = [csr().1, csr().1];
    let show = async |which: usize| {
        let (user_data, request): (&UserData, _) = (&births[which], requests[which].clone());
        claims(&world, user_data, &user_data.ticket.id, *user_data.ticket.secret.expose(), request).await
    };
    let granted = show(1).await;
    assert_eq!((granted.error.as_str(), granted.sandbox_id.as_str()), ("", ids[1].as_str()));
    daemons.kill_node().unwrap();
    let records = daemons.state_dir().join("sandboxes");
    let expire = |id: &str, ms: u64| {
        let file = records.join(format!("{id}.json"));
        let mut record: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        assert!(record["ticket"]["expires_ms"].is_u64(), "{record}");
        record["ticket"]["expires_ms"] = ms.into();
        fs::write(&file, record.to_string()).unwrap();
    };
    let now = u64::try_from(std::time::UNIX_EPOCH.elapsed().unwrap().as_millis()).unwrap();
    ids.iter().for_each(|id| expire(id, now));
    daemons.start_node().unwrap();
    daemons.ready().await.unwrap();

    let late = show(0).await;
    assert!(late.error.contains("expired") && !late.retry && late.certificates.is_empty(), "{late}");
    let metrics = daemons.metrics("node").unwrap();
    assert_eq!(sample(&metrics, "peerpod_node_claims_refused_total{reason=\"expired\"}").unwrap(), 1.0);
    let again = show(1).await;
    assert_eq!(again.certificates, granted.certificates, "bound in time it is never too late: {again}");
    // The expiry was the only reason.
    daemons.kill_node().unwrap();
    expire(&ids[0], now + 600_000);
    daemons.start_node().unwrap();
    daemons.ready().await.unwrap();
    assert_eq!(show(0).await.sandbox_id, ids[0]);
    for id in &ids {
        shim.stop_vm(id).await.unwrap();
        daemons.gone(id, PATIENCE).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_node_s_ca_rotates_under_running_guests() {
    let world = World::new().unwrap();
    let proxy = Proxy::start(world.node(), 25_151, RELAY.parse().unwrap()).unwrap();
    let settings =
        Settings::none().set("node.relay-addresses", vec!["10.99.0.1:25151"]).set("node.ca-roll-over", "2s");
    let mut daemons = Daemons::start(&world, settings).await.unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "rolled").await.unwrap();
    let pins = birth_of_vm(&world, &daemons).node.ca_sha256;
    eventually("the CA of the guest's birth is no longer shown", Duration::from_secs(60), async || {
        // A new guest must trust the new CA; a running guest must have received it before.
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
    let user_data = birth_of_vm(&world, &daemons);
    // A guest that lost its certificate but not its key, which the test copies.
    let key = key_of_guest(&root_of_vm(&world, &daemons));
    let csr = CertificateParams::default().serialize_request(&key).unwrap().der().to_vec();
    let reply =
        claims(&world, &user_data, &user_data.ticket.id, *user_data.ticket.secret.expose(), csr).await;
    assert_eq!((reply.error.as_str(), reply.sandbox_id.as_str()), ("", sandbox.id.as_str()));
    assert!(!reply.certificates.is_empty());
    sandbox.lives().await.unwrap();

    let identity = identity(&key, &reply.certificates);
    sandbox.stop(&daemons).await.unwrap();
    let late = secure(&world, &user_data.node.ca_sha256, Some(identity)).await;
    assert_closed(late, "a certificate that outlived its VM").await;
}

#[tokio::test]
async fn foreign_and_missing_certificates_do_not_open_the_link() {
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let sandbox = Sandbox::start(&world, &daemons, "others").await.unwrap();
    let user_data = birth_of_vm(&world, &daemons);
    // With another CA than the node's CA, the guest ends the handshake before it sends anything.
    assert!(secure(&world, &[[7; 32]], None).await.is_err());
    // A certificate of another CA than the node's CA.
    let key = KeyPair::generate().unwrap();
    let own = CertificateParams::new(vec!["guest".into()]).unwrap().self_signed(&key).unwrap();
    let der = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialized_der().to_vec()));
    let foreign = secure(&world, &user_data.node.ca_sha256, Some((vec![own.der().clone()], der))).await;
    assert_closed(foreign, "a foreign certificate").await;
    // A session without a certificate.
    assert_closed(secure(&world, &user_data.node.ca_sha256, None).await, "no certificate").await;
    // Invalid records after a valid handshake.
    let lengths: [u32; 4] = [0, 65_537, 4 << 20, u32::MAX];
    for (length, kind) in lengths.into_iter().flat_map(|length| [1u8, 3, 11, 255].map(|kind| (length, kind)))
    {
        let mut stream = secure(&world, &user_data.node.ca_sha256, None).await.unwrap();
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
async fn stalled_handshakes_and_noise_on_the_link_do_not_block_guests() {
    let world = World::new().unwrap();
    let daemons = Daemons::start(&world, Settings::none()).await.unwrap();
    let relay = daemons.relay_pid().unwrap();
    let idle = resident(relay).unwrap();
    let mut stalled = Vec::new();
    for index in 0..600 {
        let mut stream = dial(&world).await;
        if index % 3 == 1 {
            // The beginning of a handshake, or no handshake.
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
    // Twice the default limit for control messages of a link.
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
    // The node reads the record with the initdata again.
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
    let user_data = UserData::parse(&fs::read(other_root.join("media/cidata/user-data")).unwrap()).unwrap();
    let hex = |text: &Value| -> Vec<u8> {
        let text = text.as_str().unwrap();
        (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
    };
    let chain: Vec<_> = grant["certificates"].as_array().unwrap().iter().map(hex).collect();
    let key = key_of_guest(&root);
    let identity = || identity(&key, &chain);
    let pins = user_data.node.ca_sha256.clone();
    // A pending call of the other sandbox, throughout.
    let waiting = tokio::spawn({
        let agent = other.agent.clone();
        async move { agent.wait_process(peerpod_tests::CONTAINER, "").await }
    });

    // The key of `one` with the ticket of `other`.
    let csr = CertificateParams::default().serialize_request(&key).unwrap().der().to_vec();
    let secret = *user_data.ticket.secret.expose();
    let reply = claims(&world, &user_data, &user_data.ticket.id, secret, csr.clone()).await;
    assert!(!reply.error.is_empty() && !reply.retry && reply.certificates.is_empty(), "{reply}");
    // The ticket of `other` on a link with the certificate of `one`.
    let mut stream = secure(&world, &pins, Some(identity())).await.unwrap();
    let mut claim = Claim::new();
    (claim.version, claim.ticket_id, claim.ticket_secret, claim.csr) =
        (1, user_data.ticket.id.clone(), secret.to_vec(), csr);
    let asked = tokio::time::timeout(Duration::from_secs(8), claim::ask(&mut stream, &claim)).await;
    assert!(!matches!(&asked, Ok(Ok(reply)) if !reply.certificates.is_empty()), "{asked:?}");
    // The certificate of `one`, with the session of the guest of `other`.
    let session = session_of(&daemons, &other.id);
    let mut stream = secure(&world, &pins, Some(identity())).await.unwrap();
    let hello = record::Hello { versions: (1, 1), session, epoch: 0, recv: 0, program: "thief".into() };
    stream.write_all(&record::plain(record::RecordKind::Hello, &hello.encode()).unwrap()).await.unwrap();
    let mut welcome = [0; 28];
    // The relay accepts it as a guest of `one`. It receives nothing of `other`.
    drop(tokio::time::timeout(Duration::from_secs(2), stream.read_exact(&mut welcome)).await);
    other.lives().await.unwrap();
    drop(stream);

    // Once `one` is gone, its identity is not accepted any more.
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

/// Returns the session of a sandbox's guest, as the relay logged it.
fn session_of(daemons: &Daemons, id: &str) -> record::SessionId {
    let log = fs::read_to_string(daemons.log("relay")).unwrap();
    let line = log.lines().find(|line| line.contains("guest connected") && line.contains(id)).unwrap();
    let hex = line.split("session=").nth(1).unwrap().trim_start_matches('"');
    let whole = from_hex(&format!("{}{}", &hex[..32], "0".repeat(32))).unwrap();
    record::SessionId(whole[..16].try_into().unwrap())
}

/// The VM's own guest sleeps; the test acts as its guest.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_killed_before_the_certificate_left_gives_it_to_the_same_key_and_to_no_other() {
    let world = World::new().unwrap();
    let settings = Settings::none().set("provider.local.boot-delay", "60s");
    let mut daemons = Daemons::start(&world, settings).await.unwrap();
    let (pod, shim, id) = (world.pod().unwrap(), daemons.shim().await.unwrap(), fresh_id("bound"));
    shim.create_vm(&id, Annotations::new("default", &id), &pod.namespace().path()).await.unwrap();
    let served = daemons.state_dir().join("relay/sandboxes");
    let user_data = user_data_of(&daemons, &id).await;
    let ask = |csr: &[u8]| {
        let (world, user_data, csr) = (world.clone(), user_data.clone(), csr.to_vec());
        async move {
            claims(&world, &user_data, &user_data.ticket.id, *user_data.ticket.secret.expose(), csr).await
        }
    };
    // A relay that cannot store the certificate's owner prevents the reply.
    fs::rename(&served, served.with_extension("away")).unwrap();
    let (key, csr) = csr();
    let asking = tokio::spawn(ask(&csr));
    eventually("the ticket is bound", PATIENCE, async || {
        entry(&daemons, &id)?.record["binding"]["key_sha256"].is_string().then_some(())
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
    // The relay has stored the certificate: the link opens.
    let identity = identity(&key, &granted.certificates);
    let mut stream = secure(&world, &user_data.node.ca_sha256, Some(identity)).await.unwrap();
    let hello = record::Hello {
        versions: (1, 1),
        session: record::SessionId([7; 16]),
        epoch: 0,
        recv: 0,
        program: "test".into(),
    };
    stream.write_all(&record::plain(record::RecordKind::Hello, &hello.encode()).unwrap()).await.unwrap();
    let mut welcome = [0; 28];
    tokio::time::timeout(PATIENCE, stream.read_exact(&mut welcome)).await.unwrap().unwrap();
    shim.stop_vm(&id).await.unwrap();
    daemons.gone(&id, PATIENCE).await.unwrap();
}
