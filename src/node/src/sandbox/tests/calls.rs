//! Tests the answers of the hypervisor API's calls, and their timing.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;

use super::node::*;
use super::world::*;
use crate::ledger::Ledger;
use crate::sandbox::{Error, Stop};

#[tokio::test(start_paused = true)]
async fn create_answers_before_the_cloud_does_and_start_waits_for_the_guest() {
    let (world, dir) = (World::new(1), Dir::new());
    *world.create_takes.lock().unwrap() = Duration::from_secs(40);
    let node = Node::start(&world, &dir).await;
    let begin = Instant::now();
    assert_eq!(node.create("a").await.unwrap(), "/run/peerpod/pods/a/agent.ttrpc");
    assert!(begin.elapsed() < Duration::from_millis(100), "{:?}", begin.elapsed());
    assert_eq!(node.phase("a"), "booting");
    node.table.start(&id("a")).await.unwrap();
    assert!(begin.elapsed() >= Duration::from_secs(40));
    assert_eq!(node.phase("a"), "running");
    assert_eq!(world.vms(), 1);
    assert_eq!(world.state().greeted, ["a"]);
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_second_create_returns_the_same_path_and_makes_no_vm() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    let (one, two) = tokio::join!(node.create("a"), node.create("a"));
    assert_eq!(one.unwrap(), two.unwrap());
    node.table.start(&id("a")).await.unwrap();
    world.state().dead_netns.insert("/run/netns/a".into());
    let mut late = create_vm("a");
    late.wanted = Err("nonsense".into());
    node.table.create(late).await.unwrap();
    assert_eq!((world.vms(), world.create_calls()), (1, 1));
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn concurrent_and_repeated_starts_give_one_vm() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    node.create("a").await.unwrap();
    let a = id("a");
    let (one, two, three) = tokio::join!(node.table.start(&a), node.table.start(&a), node.table.start(&a));
    one.and(two).and(three).unwrap();
    node.table.start(&a).await.unwrap();
    assert_eq!(world.create_calls(), 1);
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn start_of_an_unknown_sandbox_fails() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    assert_eq!(node.table.start(&id("a")).await, Err(Error::Unknown(id("a"))));
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn stop_returns_at_once_on_a_slow_cloud_and_start_is_refused_after() {
    let (world, dir) = (World::new(1), Dir::new());
    *world.delete_takes.lock().unwrap() = Duration::from_secs(60);
    let node = Node::start(&world, &dir).await;
    node.run("a").await;
    let begin = Instant::now();
    for _ in 0..3 {
        node.table.stop(&id("a"), Stop::Called).await.unwrap();
    }
    assert!(begin.elapsed() < Duration::from_millis(50), "{:?}", begin.elapsed());
    assert!(matches!(node.table.start(&id("a")).await, Err(Error::Stopped { .. })));
    node.until("gone", |node| node.phase("a") == "gone").await;
    assert!(begin.elapsed() >= Duration::from_secs(60));
    {
        let state = world.state();
        assert_eq!((state.vms.len(), state.relay.len(), state.devices.len()), (0, 0, 0));
        assert_eq!(state.flushed, ["a"], "the guest was asked to flush before its VM went");
    }
    assert!(matches!(node.table.start(&id("a")).await, Err(Error::Stopped { .. })));
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_stop_during_the_create_deletes_the_vm() {
    let (world, dir) = (World::new(1), Dir::new());
    *world.create_takes.lock().unwrap() = Duration::from_secs(40);
    let node = Node::start(&world, &dir).await;
    node.create("a").await.unwrap();
    tokio::time::sleep(Duration::from_secs(25)).await;
    assert_eq!(world.vms(), 1);
    let begin = Instant::now();
    node.table.stop(&id("a"), Stop::Called).await.unwrap();
    assert!(begin.elapsed() < Duration::from_millis(50));
    assert_eq!(node.phase("a"), "unwanted");
    node.until("gone", |node| node.phase("a") == "gone").await;
    assert_eq!((world.vms(), world.made()), (0, 1));
    assert!(world.state().devices.is_empty());
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_stop_ends_a_waiting_start() {
    let (world, dir) = (World::new(1), Dir::new());
    world.guests_stay_away.store(true, Ordering::Relaxed);
    let node = Node::start(&world, &dir).await;
    node.create("a").await.unwrap();
    let a = id("a");
    let stop = async {
        tokio::time::sleep(Duration::from_secs(5)).await;
        node.table.stop(&a, Stop::Called).await.unwrap();
    };
    let (started, ()) = tokio::join!(node.table.start(&a), stop);
    assert!(matches!(started, Err(Error::Stopped { .. })), "{started:?}");
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_create_after_a_stop_makes_no_vm_even_for_an_unknown_id() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    node.table.stop(&id("a"), Stop::Called).await.unwrap();
    node.create("a").await.unwrap();
    node.run("b").await;
    node.table.stop(&id("b"), Stop::Called).await.unwrap();
    node.create("b").await.unwrap();
    node.until("gone", |node| node.phase("b") == "gone").await;
    node.create("b").await.unwrap();
    assert!(matches!(node.table.start(&id("b")).await, Err(Error::Stopped { .. })));
    node.kill().await;
    // The same after a restart of the node.
    let node = Node::start(&world, &dir).await;
    for name in ["a", "b"] {
        node.create(name).await.unwrap();
        assert_eq!(node.phase(name), "gone");
    }
    assert_eq!(world.vms(), 0);
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn tombstones_are_forgotten_when_their_time_is_over() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    node.table.stop(&id("a"), Stop::Called).await.unwrap();
    tokio::time::sleep(settings().tombstone_ttl - Duration::from_secs(60)).await;
    assert_eq!(node.phase("a"), "gone");
    tokio::time::sleep(Duration::from_secs(120)).await;
    assert_eq!(node.phase("a"), "-");
    assert_eq!(std::fs::read_dir(dir.0.join("sandboxes")).unwrap().count(), 0);
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_tombstone_of_a_boot_with_a_later_clock_gets_one_more_life() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    node.table.stop(&id("a"), Stop::Called).await.unwrap();
    node.kill().await;
    let ledger = Ledger::open(&dir.0).unwrap();
    let mut record = ledger.read(&id("a")).unwrap().unwrap();
    record.end.gone_ms = record.end.gone_ms.map(|at| at + 365 * 86_400_000);
    ledger.save(&record).unwrap();
    let node = Node::start(&world, &dir).await;
    tokio::time::sleep(settings().tombstone_ttl - Duration::from_secs(60)).await;
    assert_eq!(node.phase("a"), "gone");
    tokio::time::sleep(Duration::from_secs(120)).await;
    assert_eq!(node.phase("a"), "-");
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn departed_callers_change_nothing() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    let a = id("a");
    // Dropped at their first await, as by a deadline of zero.
    drop(tokio::time::timeout(Duration::ZERO, node.create("a")).await);
    node.create("a").await.unwrap();
    drop(tokio::time::timeout(Duration::from_millis(1), node.table.start(&a)).await);
    node.table.start(&a).await.unwrap();
    drop(tokio::time::timeout(Duration::ZERO, node.table.stop(&a, Stop::Called)).await);
    node.table.stop(&a, Stop::Called).await.unwrap();
    node.until("gone", |node| node.phase("a") == "gone").await;
    assert_eq!(world.create_calls(), 1);
    // The same during the write of a tombstone for an unknown id.
    let unknown = id("unknown");
    drop(tokio::time::timeout(Duration::ZERO, node.table.stop(&unknown, Stop::Called)).await);
    let again = node.table.stop(&unknown, Stop::Inbox);
    tokio::time::timeout(Duration::from_secs(5), again).await.expect("it ends").unwrap();
    assert_eq!(node.phase("unknown"), "gone");
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn two_live_sandboxes_cannot_have_one_network_namespace_but_a_successor_waits_for_it() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    node.run("a").await;
    let mut b = create_vm("b");
    b.netns = "/run/netns/a".into();
    let refused = node.table.create(b.clone()).await.unwrap_err();
    assert!(matches!(&refused, Error::NetnsTaken { other, .. } if *other == id("a")), "{refused}");
    *world.delete_takes.lock().unwrap() = Duration::from_secs(20);
    node.table.stop(&id("a"), Stop::Called).await.unwrap();
    node.table.create(b).await.unwrap();
    node.table.start(&id("b")).await.unwrap();
    assert_eq!(world.state().devices.keys().collect::<Vec<_>>(), ["b"]);
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_create_over_the_limit_is_refused_until_a_sandbox_stops() {
    let (world, dir) = (World::new(1), Dir::new());
    let few = crate::sandbox::Settings { max_sandboxes: 2, ..settings() };
    let node = Node::start_with(&world, &dir, Fuse::after(None), few).await.unwrap();
    node.run("a").await;
    node.run("b").await;
    assert_eq!(node.create("c").await, Err(Error::Full(2)));
    node.table.stop(&id("a"), Stop::Called).await.unwrap();
    node.until("gone", |node| node.phase("a") == "gone").await;
    node.run("c").await;
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn the_vm_of_a_pod_is_that_of_its_newest_live_sandbox() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    assert!(matches!(node.table.vm_of("default", "pod-a", false).await, Err(Error::NoSuchPod(_))));
    // The call waits for a pod that does not exist yet, and for its VM.
    let (found, ()) = tokio::join!(node.table.vm_of("default", "pod-a", true), async {
        tokio::time::sleep(Duration::from_secs(3)).await;
        node.create("a").await.unwrap();
        assert!(matches!(node.table.vm_of("default", "pod-a", false).await, Err(Error::NoVmYet(_))));
    });
    assert_eq!(found.unwrap().as_str(), "i-1");
    assert_eq!(node.table.vm_of("default", "pod-a", false).await.unwrap().as_str(), "i-1");
    assert!(matches!(node.table.vm_of("other", "pod-a", false).await, Err(Error::NoSuchPod(_))));
    // A StatefulSet makes a new pod of that name while the old sandbox is still leaving.
    *world.delete_takes.lock().unwrap() = Duration::from_secs(60);
    node.table.stop(&id("a"), Stop::Called).await.unwrap();
    let mut again = create_vm("a2");
    again.wanted.as_mut().unwrap().pod.name = "pod-a".into();
    node.table.create(again).await.unwrap();
    assert_eq!(node.table.vm_of("default", "pod-a", true).await.unwrap().as_str(), "i-2");
    // An endless wait is ended by its caller.
    let waited =
        tokio::time::timeout(Duration::from_secs(9), node.table.vm_of("default", "none", true)).await;
    assert!(waited.is_err());
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_thousand_creates_at_once_all_run() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    let names: Vec<String> = (0..1000).map(|n| format!("s{n}")).collect();
    let all = names.iter().map(|name| node.run(name));
    futures_util::future::join_all(all).await;
    assert_eq!(world.vms(), 1000);
    node.kill().await;
}
