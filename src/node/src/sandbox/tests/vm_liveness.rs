//! Tests VMs that vanish under running sandboxes, and tasks that panic.

use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use peerpod_provider_api::{EventKind, InstanceId, ProviderEvent};

use super::node::*;
use super::world::*;
use crate::ledger::Ledger;
use crate::rotate::{SharedTrust, is_due};
use crate::sandbox::{Error, Stop};
use crate::trust::{Trust, Validity};

const SECOND: Duration = Duration::from_secs(1);

#[tokio::test(start_paused = true)]
async fn a_sandbox_without_its_vm_fails_and_leaves_nothing() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    node.run("a").await;
    node.run("b").await;
    let began = tokio::time::Instant::now();
    world.guests_stay_away.store(true, Ordering::Relaxed);
    node.fx.unlink("a");
    world.state().vms.retain(|_, vm| vm.user_data.ticket.id != ticket(&dir, "a"));
    node.until("gone", |node| node.phase("a") == "gone").await;
    let took = began.elapsed();
    assert!(took >= settings().vm_gone_grace && took < settings().vm_gone_grace * 2, "{took:?}");
    let Err(Error::Failed { cause, .. }) = node.table.start(&id("a")).await else { panic!("not failed") };
    for word in ["VM i-1 is gone", "kernel panic"] {
        assert!(cause.contains(word), "{cause}");
    }
    assert_eq!(node.phase("b"), "running");
    assert!(!world.state().relay.contains_key("a"), "the shim's connections are closed");
    assert!(!world.state().devices.contains_key("a"));
    node.table.stop(&id("a"), Stop::Called).await.unwrap();
    node.kill().await;
}

fn ticket(dir: &Dir, name: &str) -> String {
    let text = std::fs::read_to_string(dir.0.join(format!("sandboxes/{name}.json"))).unwrap();
    serde_json::from_str::<serde_json::Value>(&text).unwrap()["ticket"]["id"].as_str().unwrap().into()
}

#[tokio::test(start_paused = true)]
async fn a_reported_end_is_accepted_at_once_if_the_vm_has_no_addresses() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    node.run("a").await;
    node.run("b").await;
    let vm_of = |name: &str| {
        let state = world.state();
        state.vms.iter().find(|(_, vm)| vm.user_data.ticket.id == ticket(&dir, name)).unwrap().0.clone()
    };
    let (a, b) = (vm_of("a"), vm_of("b"));
    let tell = |vm: &InstanceId, kind| {
        assert_eq!(world.events.send(ProviderEvent { id: vm.clone(), kind }).unwrap(), 1);
    };
    let ended = || EventKind::Ended { reason: "another user's action".into() };
    let taken = || EventKind::Interruption { at: SystemTime::now() + 120 * SECOND };
    // A VM with an interruption notice exists until the cloud reclaims it.
    tell(&InstanceId::new("i-of-nobody").unwrap(), taken());
    tell(&b, taken());
    // The report is about a VM that exists: an earlier end.
    tell(&b, ended());
    // The report is about a VM that is gone, while its link still seems up.
    world.guests_stay_away.store(true, Ordering::Relaxed);
    world.state().vms.retain(|id, _| *id != a);
    let began = tokio::time::Instant::now();
    tell(&a, ended());
    node.until("gone", |node| node.phase("a") == "gone").await;
    assert!(began.elapsed() < 5 * SECOND, "{:?}", began.elapsed());
    let Err(Error::Failed { cause, .. }) = node.table.start(&id("a")).await else { panic!("not failed") };
    for word in [format!("VM {a} has ended: another user's action"), "kernel panic".into()] {
        assert!(cause.contains(&word), "{cause}");
    }
    tokio::time::sleep(60 * SECOND).await;
    assert_eq!(node.phase("b"), "running");
    assert_eq!(
        (node.metrics.sandboxes.notices.get("interruption"), node.metrics.sandboxes.notices.get("ended")),
        (1, 2)
    );
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_vm_that_ends_during_boot_fails_with_its_kernels_reason_and_its_memory() {
    let (world, dir) = (World::new(1), Dir::new());
    world.guests_stay_away.store(true, Ordering::Relaxed);
    let reason = "Kernel panic - not syncing: System is deadlocked on memory";
    *world.console.lock().unwrap() = format!("SECRET_TOKEN=x1\n[ 1.2] {reason}\n[ 1.3] a stack\n");
    let node = Node::start(&world, &dir).await;
    node.create("a").await.unwrap();
    node.until("booting", |node| node.phase("a") == "joining").await;
    let vm = world.state().vms.keys().next().unwrap().clone();
    world.state().vms.clear();
    let kind = EventKind::Ended { reason: "it was shut down or powered itself off".into() };
    world.events.send(ProviderEvent { id: vm.clone(), kind }).unwrap();
    node.until("gone", |node| node.phase("a") == "gone").await;
    let Err(Error::Failed { cause, .. }) = node.table.start(&id("a")).await else { panic!("not failed") };
    let begins = format!("its VM {vm} has ended: {reason} (it was shut down or powered itself off)");
    assert!(cause.starts_with(&begins), "{cause}");
    // The pod's 2048 MiB, plus the guest's 100, plus a 32nd.
    assert!(cause.contains("node.guest-memory-mib (the VM has 2216 MiB)"), "{cause}");
    assert!(cause.ends_with("SECRET_TOKEN=…"), "{cause}");
    let said = world.state().said.clone();
    assert!(said.iter().any(|(_, why, text)| *why == "StartFailed" && text.contains(&begins)), "{said:?}");
    node.kill().await;
}

/// Checks for an hour each that weaker evidence does not end a sandbox.
#[tokio::test(start_paused = true)]
async fn only_a_certain_provider_and_a_silent_link_end_a_sandbox() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    node.run("a").await;
    world.guests_stay_away.store(true, Ordering::Relaxed);
    // The list lacks the VM, but its guest is connected.
    let vms = std::mem::take(&mut world.state().vms);
    tokio::time::sleep(3600 * SECOND).await;
    assert_eq!(node.phase("a"), "running", "the guest answers");
    // The guest is away, but the VM exists.
    world.state().vms = vms;
    node.fx.unlink("a");
    tokio::time::sleep(3600 * SECOND).await;
    assert_eq!(node.phase("a"), "running", "the VM is there");
    // The guest is away, and the provider gives no answer.
    let vms = std::mem::take(&mut world.state().vms);
    *world.owned_fails.lock().unwrap() = Some(transient("the cloud is away"));
    tokio::time::sleep(3600 * SECOND).await;
    assert_eq!(node.phase("a"), "running", "the provider does not know");
    *world.owned_fails.lock().unwrap() = None;
    // A list lacks the VM once, or for less than the time between two queries.
    world.state().vms = vms;
    for _ in 0..100 {
        let vms = std::mem::take(&mut world.state().vms);
        tokio::time::sleep(settings().vm_gone_grace / 5).await;
        world.state().vms = vms;
        tokio::time::sleep(settings().vm_gone_grace * 2).await;
    }
    assert_eq!(node.phase("a"), "running", "a list may lag");
    // The VM is really gone, across a restart of the node.
    world.state().vms.clear();
    node.kill().await;
    let node = Node::start(&world, &dir).await;
    node.until("gone", |node| node.phase("a") == "gone").await;
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_panicked_task_restarts_from_the_ledger_unnoticed_by_callers() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    // During the boot: StartVM waits across the panics.
    world.panics.store(3, Ordering::Relaxed);
    node.run("a").await;
    assert_eq!((node.metrics.panics.get(), world.made(), world.vms()), (3, 1, 1));
    // While it runs: the relay is updated again, and that panics.
    world.panics.store(2, Ordering::Relaxed);
    world.state().relay.clear();
    world.epoch.send_modify(|epoch| *epoch += 1);
    node.until("put again", |node| world.state().relay.len() == 1 && node.metrics.panics.get() == 5).await;
    node.table.start(&id("a")).await.unwrap();
    assert_eq!((node.phase("a").as_str(), world.made()), ("running", 1));
    // During the removal.
    world.panics.store(2, Ordering::Relaxed);
    node.table.stop(&id("a"), Stop::Called).await.unwrap();
    node.until("gone", |node| node.phase("a") == "gone").await;
    assert_eq!((node.metrics.panics.get(), world.vms(), world.devices()), (7, 0, 0));
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_stop_reaches_a_sandbox_after_a_panic_of_its_task() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    node.run("a").await;
    world.panics.store(1, Ordering::Relaxed);
    world.epoch.send_modify(|epoch| *epoch += 1);
    node.until("the panic", |node| node.metrics.panics.get() == 1).await;
    node.table.stop(&id("a"), Stop::Called).await.unwrap();
    node.until("gone", |node| node.phase("a") == "gone").await;
    assert_eq!(world.vms(), 0);
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_does_not_follow_delays_the_rotation_for_a_bounded_time() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    let trust = Trust::open(&dir.0.join("trust"), SystemTime::now(), Validity::default(), false);
    let trust = SharedTrust::new(trust.unwrap());
    let (hour, never) = (Duration::from_secs(3600), Duration::MAX);
    let now = Duration::ZERO;
    assert!(!is_due(&trust, &node.table, never, Duration::ZERO), "a young CA stays");
    assert!(is_due(&trust, &node.table, now, hour), "every guest follows");
    // The guests of this test have another CA set than this one, and never get it.
    node.run("a").await;
    assert!(!is_due(&trust, &node.table, now, Duration::ZERO), "an unrequested step waits for all");
    trust.step().unwrap();
    assert!(!is_due(&trust, &node.table, never, hour), "within its time it is waited for");
    assert_eq!(node.metrics.guests.left_behind.get(), 0);
    assert!(is_due(&trust, &node.table, never, Duration::ZERO), "and then not any more");
    assert_eq!(node.metrics.guests.left_behind.get(), 1, "which is counted");
    node.table.stop(&id("a"), Stop::Called).await.unwrap();
    assert!(is_due(&trust, &node.table, never, hour), "a stopping sandbox delays no step");
    node.kill().await;
}

#[tokio::test]
async fn the_state_directory_stays_locked_until_the_last_write_is_done() {
    use nix::fcntl::{Flock, FlockArg};
    let dir = Dir::new();
    let ledger = Ledger::open(&dir.0).unwrap();
    let lock = || {
        let folder = std::fs::File::open(dir.0.join("sandboxes")).unwrap();
        Flock::lock(folder, FlockArg::LockExclusiveNonblock)
    };
    let ledger = ledger.guarded_by(lock().unwrap());
    let (go, may_go) = std::sync::mpsc::channel::<()>();
    let writing = tokio::task::spawn_blocking({
        let ledger = ledger.clone();
        move || {
            may_go.recv().unwrap();
            drop(ledger);
        }
    });
    // The requester of the write is gone, as at the node's end.
    drop(ledger);
    assert!(lock().is_err(), "a successor must wait");
    go.send(()).unwrap();
    writing.await.unwrap();
    lock().unwrap();
}
