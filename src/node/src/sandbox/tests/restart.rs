//! Tests the recovery of a restarted node, and the calls of relay and guest meanwhile.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use sha2::{Digest, Sha256};

use super::node::*;
use super::world::*;
use crate::cluster::Recorded;
use crate::ledger::{Inbox, Ledger};
use crate::ports::NodeClock;
use crate::rpc;
use crate::sandbox::ports::Trusted;
use crate::sandbox::{ClaimRefused, Error, Orphans, Stop};
use crate::spec::PodRef;

fn note(dir: &Dir, name: &str) {
    let text = format!(r#"{{"version":1,"op":"stop","id":"{name}","at_ms":1}}"#);
    fs::write(dir.0.join("inbox").join(format!("{name}.json")), text).unwrap();
}

#[tokio::test(start_paused = true)]
async fn running_sandboxes_are_restored_unchanged() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    for name in ["a", "b", "c"] {
        node.run(name).await;
    }
    let greeted = world.greetings();
    for _ in 0..10 {
        node.fuse.blown.notify_one();
        let node = Node::start(&world, &dir).await;
        for name in ["a", "b", "c"] {
            node.table.start(&id(name)).await.unwrap();
        }
        node.kill().await;
    }
    assert_eq!(world.create_calls(), 3);
    assert_eq!(world.greetings(), greeted, "a guest that did not change is not spoken to");
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn an_acknowledged_stop_is_applied_first() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    node.run("running").await;
    *world.create_takes.lock().unwrap() = Duration::from_secs(60);
    node.create("booting").await.unwrap();
    tokio::time::sleep(Duration::from_secs(1)).await;
    node.kill().await;
    for name in ["running", "booting", "unknown"] {
        note(&dir, name);
    }
    let calls = world.create_calls();
    let node = Node::start(&world, &dir).await;
    assert_eq!(fs::read_dir(dir.0.join("inbox")).unwrap().count(), 0);
    assert_eq!(node.phase("unknown"), "gone");
    node.create("unknown").await.unwrap();
    node.until("all gone", |node| ["running", "booting"].iter().all(|name| node.phase(name) == "gone")).await;
    assert!(world.state().vms.is_empty());
    // The create with the lost answer was repeated once with its key, in order to delete its VM.
    assert!(world.create_calls() <= calls + 1);
    node.kill().await;
}

/// The wall clock is set two days ahead or back while the node is down. A tombstone lasts as long as before.
#[tokio::test(start_paused = true)]
async fn a_step_of_the_wall_clock_frees_no_stopped_sandbox() {
    let (day, wall) = (Duration::from_secs(86_400), SystemTime::now());
    for (name, wall_then) in [("ahead", wall + 2 * day), ("back", wall - 2 * day)] {
        let (world, dir) = (World::new(1), Dir::new());
        let set_clock = |wall| {
            let clock = NodeClock::open(&dir.0, "boot", wall).unwrap();
            *world.clock.lock().unwrap() = Some(Arc::new(clock));
        };
        set_clock(wall);
        let node = Node::start(&world, &dir).await;
        node.table.stop(&id("late"), Stop::Called).await.unwrap();
        node.kill().await;
        set_clock(wall_then);
        let node = Node::start(&world, &dir).await;
        // The reaper runs meanwhile.
        tokio::time::sleep(Duration::from_secs(3600)).await;
        drop(node.create("late").await);
        tokio::time::sleep(Duration::from_secs(60)).await;
        assert_eq!((node.phase("late").as_str(), world.create_calls()), ("gone", 0), "{name}");
        node.kill().await;
    }
}

/// Stops a running sandbox, an unknown one, and, before these two, one with a record that cannot be written.
#[tokio::test(start_paused = true)]
async fn an_acknowledged_stop_that_cannot_be_recorded_delays_no_other() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    node.run("stuck").await;
    node.run("fine").await;
    for (at_ms, name) in [(1, "stuck"), (2, "fine"), (3, "unknown")] {
        let text = format!(r#"{{"version":1,"op":"stop","id":"{name}","at_ms":{at_ms}}}"#);
        fs::write(dir.0.join("inbox").join(format!("{name}.json")), text).unwrap();
    }
    let inbox = Inbox::open(&dir.0).unwrap();
    let notes = || {
        let names = fs::read_dir(dir.0.join("inbox")).unwrap().flatten();
        names.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect::<Vec<_>>()
    };
    *world.cannot_record.lock().unwrap() = Some(id("stuck"));
    assert_eq!(rpc::read_inbox(&node.table, &inbox, &node.metrics).await, Ok(2));
    node.until("the other is gone", |node| node.phase("fine") == "gone").await;
    assert_eq!((node.phase("stuck").as_str(), node.phase("unknown").as_str()), ("running", "gone"));
    assert_eq!(notes(), ["stuck.json"], "the promise stays");
    *world.cannot_record.lock().unwrap() = None;
    assert_eq!(rpc::read_inbox(&node.table, &inbox, &node.metrics).await, Ok(1));
    node.until("it is gone", |node| node.phase("stuck") == "gone").await;
    assert!(notes().is_empty() && world.vms() == 0);
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_create_with_a_lost_answer_is_found_by_its_key() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    node.create("a").await.unwrap();
    node.until("made", |_| world.vms() == 1).await;
    node.kill().await;
    assert!(fs::read_to_string(dir.0.join("sandboxes/a.json")).unwrap().contains("booting"));
    let node = Node::start(&world, &dir).await;
    node.table.start(&id("a")).await.unwrap();
    assert_eq!((world.vms(), world.made()), (1, 1));
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_running_sandbox_keeps_neither_request_nor_user_data() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    node.run("a").await;
    let text = fs::read_to_string(dir.0.join("sandboxes/a.json")).unwrap();
    assert!(text.contains(r#""request":null"#) && !text.contains("user_data"), "{text}");
    node.table.stop(&id("a"), Stop::Called).await.unwrap();
    node.until("gone", |node| node.phase("a") == "gone").await;
    let text = fs::read_to_string(dir.0.join("sandboxes/a.json")).unwrap();
    assert!(text.contains(r#""ticket":null"#), "{text}");
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_new_relay_process_gets_the_full_state() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    node.run("a").await;
    node.run("b").await;
    world.state().relay.clear();
    world.epoch.send_modify(|epoch| *epoch += 1);
    node.until("put again", |_| world.state().relay.len() == 2).await;
    assert!(world.state().relay.values().all(|put| put.guest_certificates.len() == 1));
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_restarted_guest_program_is_assigned_again() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    node.run("a").await;
    // The fake guest would come back with its own session.
    world.guests_stay_away.store(true, Ordering::Relaxed);
    node.fx.link("a", "i-1 again");
    node.until("greeted", |_| world.greetings() == 2).await;
    // The same for a guest that came back while the node was dead.
    node.kill().await;
    world.state().links.insert("a".into(), "i-1 a third time".into());
    let node = Node::start(&world, &dir).await;
    node.until("greeted", |_| world.greetings() == 3).await;
    assert_eq!(node.phase("a"), "running");
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_changes_its_session_is_assigned_once_a_second() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    node.run("a").await;
    // The fake guest would come back with its own session.
    world.guests_stay_away.store(true, Ordering::Relaxed);
    for n in 0..100 {
        node.fx.link("a", &format!("session {n}"));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let greetings = world.greetings() - 1;
    assert!((3..=6).contains(&greetings), "{greetings} assignments in 5 s");
    tokio::time::sleep(Duration::from_secs(2)).await;
    let settled = world.greetings();
    node.fx.link("a", "session 99");
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(world.greetings(), settled, "the last session has its assignment");
    node.fx.link("a", "session 100");
    node.until("greeted", |_| world.greetings() == settled + 1).await;
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_quarantined_sandbox_keeps_its_vm_and_affects_no_other() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    for name in ["a", "b", "c"] {
        node.run(name).await;
    }
    node.kill().await;
    let file = |name: &str| dir.0.join(format!("sandboxes/{name}.json"));
    let whole = fs::read(file("a")).unwrap();
    fs::write(file("a"), &whole[..whole.len() / 2]).unwrap();
    let newer = fs::read_to_string(file("b")).unwrap().replacen(r#""version":1"#, r#""version":99"#, 1);
    fs::write(file("b"), newer).unwrap();
    let loaded = Ledger::open(&dir.0).unwrap().load().unwrap();
    let mut bad: Vec<_> = loaded.quarantined.iter().map(|q| q.id.clone().unwrap()).collect();
    bad.sort();
    assert_eq!(bad, [id("a"), id("b")]);
    assert!(loaded.quarantined.iter().all(|q| q.moved_to.starts_with(dir.0.join("quarantine"))));
    let node = Node::start(&world, &dir).await;
    node.table.start(&id("c")).await.unwrap();
    let mut orphans = Orphans::new(bad, vec![], Duration::ZERO);
    assert_eq!(orphans.pass(&node.table).await.unwrap(), 0);
    assert_eq!(world.vms(), 3);
    node.kill().await;
    // The next start finds no bad record any more, but the owners of these VMs are still known.
    let ledger = Ledger::open(&dir.0).unwrap();
    assert!(ledger.load().unwrap().quarantined.is_empty());
    let mut set_aside = ledger.in_quarantine().unwrap();
    set_aside.sort();
    assert_eq!(set_aside, [id("a"), id("b")]);
    drop(ledger);
    let node = Node::start(&world, &dir).await;
    let mut orphans = Orphans::new(set_aside, vec![], Duration::ZERO);
    assert_eq!(orphans.pass(&node.table).await.unwrap(), 0);
    // Once it is stopped, its VM has no owner.
    node.table.stop(&id("a"), Stop::Called).await.unwrap();
    assert_eq!(orphans.pass(&node.table).await.unwrap(), 1);
    assert_eq!(world.vms(), 2);
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn an_emptied_ledger_keeps_the_vms_that_peerpods_name() {
    let (world, dir) = (World::new(1), Dir::new());
    world.in_cluster.store(true, Ordering::Relaxed);
    let node = Node::start(&world, &dir).await;
    for name in ["a", "b", "c", "stopped", "before"] {
        node.run(name).await;
    }
    node.kill().await;
    for name in ["a", "b", "c", "stopped", "before"] {
        fs::remove_file(dir.0.join(format!("sandboxes/{name}.json"))).unwrap();
    }
    *world.peerpods.lock().unwrap() = Err("the API server is away".into());
    let node = Node::start(&world, &dir).await;
    let mut orphans = Orphans::new(vec![], vec![], Duration::ZERO);
    let error = orphans.pass(&node.table).await.unwrap_err();
    assert!(error.contains("away") && world.vms() == 5, "{error}");
    node.run("after").await;
    // One names its VM, the other was written before the VM was made.
    let peerpod = |sandbox: &str, vm: Option<&str>| Recorded {
        namespace: "ns".into(),
        name: format!("of-{sandbox}"),
        pod: Some(PodRef { namespace: "ns".into(), name: sandbox.into(), uid: Some("u".into()) }),
        sandbox: sandbox.into(),
        instance: vm.map(str::to_owned),
        key: None,
        is_over: false,
    };
    let stopped = Recorded { is_over: true, ..peerpod("stopped", Some("i-4")) };
    let mut before = peerpod("before", Some("i-5"));
    before.pod.as_mut().unwrap().uid = Some("uid of default/pod-after".into());
    // The VMs of a batch have one key.
    let key = world.state().vms.values().nth(2).unwrap().key.to_string();
    let a = Recorded { key: Some(key), ..peerpod("a", Some("i-1")) };
    *world.peerpods.lock().unwrap() = Ok(vec![a, peerpod("b", None), stopped, before]);
    assert_eq!(orphans.pass(&node.table).await.unwrap(), 3, "no PeerPod keeps the VMs of the others");
    assert_eq!(orphans.pass(&node.table).await.unwrap(), 0);
    let names: Vec<String> = world.state().vms.keys().map(|vm| vm.to_string()).collect();
    assert_eq!(names, ["i-1", "i-2", "i-6"]);
    let said: Vec<_> = world.state().said.iter().map(|(pod, reason, _)| (pod.clone(), *reason)).collect();
    assert_eq!(said, [("ns/a".to_owned(), "RecordLost"), ("ns/b".to_owned(), "RecordLost")], "each once");
    node.table.stop(&id("a"), Stop::Called).await.unwrap();
    node.table.stop(&id("b"), Stop::Called).await.unwrap();
    assert_eq!((orphans.pass(&node.table).await.unwrap(), world.vms()), (2, 1), "their pods have ended");
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_vm_without_a_record_is_deleted_after_a_second_check() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    node.run("a").await;
    node.run("b").await;
    world.guests_stay_away.store(true, Ordering::Relaxed);
    *world.create_takes.lock().unwrap() = Duration::from_secs(60);
    node.create("booting").await.unwrap();
    node.until("made", |_| world.vms() == 3).await;
    // The disk lost a record while the node was down.
    node.kill().await;
    fs::remove_file(dir.0.join("sandboxes/a.json")).unwrap();
    let node = Node::start(&world, &dir).await;
    let mut orphans = Orphans::new(vec![], vec![], Duration::from_secs(60));
    assert_eq!(orphans.pass(&node.table).await.unwrap(), 0);
    tokio::time::sleep(Duration::from_secs(59)).await;
    assert_eq!(orphans.pass(&node.table).await.unwrap(), 0);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(orphans.pass(&node.table).await.unwrap(), 1);
    let names: Vec<String> = world.state().vms.keys().map(|vm| vm.to_string()).collect();
    assert_eq!(names, ["i-2", "i-3"]);
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_running_guest_follows_the_ca_and_its_old_certificate_stays_good_for_a_while() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    node.run("a").await;
    let first = world.state().relay["a"].guest_certificates.clone();
    world
        .trusted
        .send_replace(Arc::new(Trusted { id: "second".into(), cas: vec![b"ca".to_vec(), b"cb".to_vec()] }));
    let trusts = |node: &Node, id: &str| {
        node.table.view(&super::world::id("a")).is_some_and(|view| view.borrow().trust.as_deref() == Some(id))
    };
    node.until("told", |node| trusts(node, "second")).await;
    assert_eq!(world.state().rotated, [("a".to_owned(), false), ("a".to_owned(), true)]);
    let both = world.state().relay["a"].guest_certificates.clone();
    assert!(both.len() == 2 && both[0] == first[0]);
    // A guest that was away during the rotation follows once it is back, also after a restart of the node.
    world.state().links.remove("a");
    node.kill().await;
    world.trusted.send_replace(Arc::new(Trusted { id: "third".into(), cas: vec![b"cb".to_vec()] }));
    world.guests_stay_away.store(true, Ordering::Relaxed);
    let node = Node::start(&world, &dir).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(!trusts(&node, "third"));
    node.fx.link("a", "i-1");
    node.until("told", |node| trusts(node, "third")).await;
    assert_eq!(world.state().relay["a"].guest_certificates.len(), 3);
    node.kill().await;
}

/// The ticket is bound to a key on disk; the guest has no answer yet. The boundaries after the write: the binding is
/// durable; the relay is about to be updated; the relay has the certificate and no answer was sent.
#[tokio::test(start_paused = true)]
async fn after_a_kill_between_a_tickets_binding_and_its_answer_only_the_same_key_is_answered() {
    for (boundaries, relay_knows) in [(1, false), (2, false), (3, true)] {
        let (world, dir) = (World::new(1), Dir::new());
        world.guests_stay_away.store(true, Ordering::Relaxed);
        let node = Node::start(&world, &dir).await;
        node.create("a").await.unwrap();
        node.until("connected", |_| world.devices() == 1 && world.state().relay.contains_key("a")).await;
        // The clock is paused: after this, only the wait for the guest is in flight.
        tokio::time::sleep(Duration::from_secs(1)).await;
        let user_data = world.state().vms.values().next().unwrap().user_data.clone();

        node.fuse.burn_after(boundaries);
        tokio::select! {
            answer = node.table.claim(&user_data.ticket.id, claim(&user_data, b"the guest's")) => panic!("{answer:?}"),
            () = node.fuse.blown.notified() => {}
        }
        node.kill().await;
        let record = fs::read_to_string(dir.0.join("sandboxes/a.json")).unwrap();
        let record: serde_json::Value = serde_json::from_str(&record).unwrap();
        assert!(record["binding"]["key_sha256"].is_string(), "boundary {boundaries}: {record}");
        let known = world.state().relay["a"].guest_certificates.len();
        assert_eq!(known, usize::from(relay_knows), "boundary {boundaries}");

        let node = Node::start(&world, &dir).await;
        let thief = node.table.claim(&user_data.ticket.id, claim(&user_data, b"another's")).await;
        assert_eq!(thief, Err(Error::Claim(ClaimRefused::OtherKey)), "boundary {boundaries}");
        let granted =
            node.table.claim(&user_data.ticket.id, claim(&user_data, b"the guest's")).await.unwrap();
        let known = world.state().relay["a"].guest_certificates.clone();
        assert_eq!(
            known,
            [Sha256::digest(&granted.chain[0]).to_vec()],
            "boundary {boundaries}: the relay first"
        );
        let again = node.table.claim(&user_data.ticket.id, claim(&user_data, b"the guest's")).await.unwrap();
        assert_eq!(again, granted, "boundary {boundaries}: the very same certificate");
        node.fx.link("a", "i-1");
        node.table.start(&id("a")).await.unwrap();
        node.kill().await;
    }
}
