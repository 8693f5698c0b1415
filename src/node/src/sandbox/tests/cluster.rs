//! Tests the publication of sandboxes in the cluster, and that it does not hold up a pod.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;

use super::node::*;
use super::world::*;
use crate::sandbox::ports::{CloudError, Store};
use crate::sandbox::{Settings, Stop};

/// Returns a world with a cluster.
fn world() -> std::sync::Arc<World> {
    let world = World::new(1);
    world.in_cluster.store(true, Ordering::Relaxed);
    world
}

#[tokio::test(start_paused = true)]
async fn the_intent_is_published_before_the_create_and_the_pods_uid_is_recorded() {
    let (world, dir) = (world(), Dir::new());
    *world.announce_takes.lock().unwrap() = Duration::from_millis(300);
    let node = Node::start(&world, &dir).await;
    node.run("a").await;
    assert_eq!(world.state().announced, [("a".to_owned(), 0)]);
    assert_eq!(world.state().shown["a"], "running");
    let record = node.fx.recall(&id("a")).await.unwrap().unwrap();
    assert_eq!(record.pod.unwrap().uid.as_deref(), Some("uid of default/pod-a"));
    node.kill().await;
    // The sandbox runs: it is not announced again, but published again.
    world.state().shown.clear();
    let node = Node::start(&world, &dir).await;
    node.until("it is shown", |_| world.state().shown.contains_key("a")).await;
    assert_eq!(world.state().announced.len(), 1);
    node.table.stop(&id("a"), Stop::Called).await.unwrap();
    node.until("it is gone", |node| node.phase("a") == "gone").await;
    assert_eq!(world.state().shown["a"], "gone");
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn the_life_of_a_vm_is_reported_with_its_type_and_zone() {
    let (world, dir) = (world(), Dir::new());
    let node = Node::start(&world, &dir).await;
    node.run("a").await;
    node.table.stop(&id("a"), Stop::Called).await.unwrap();
    node.until("it is gone", |node| node.phase("a") == "gone").await;
    let progress = world.state().progress.clone();
    let reasons: Vec<_> = progress.iter().map(|(_, reason, _)| *reason).collect();
    assert_eq!(reasons, ["VMCreated", "VMReady", "VMDeleted"]);
    assert_eq!(progress[0].2, "VM i-1 type of i-1 z1");
    assert!(progress[1].2.starts_with("VM i-1 is ready after "), "{progress:?}");
    assert!(progress.iter().all(|(pod, ..)| pod == "default/pod-a"), "{progress:?}");
    assert!(world.state().said.is_empty(), "no warning");
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_sandbox_stopped_before_the_create_call_makes_no_vm() {
    let (world, dir) = (world(), Dir::new());
    *world.announce_takes.lock().unwrap() = Duration::from_millis(900);
    let node = Node::start(&world, &dir).await;
    node.create("a").await.unwrap();
    node.table.stop(&id("a"), Stop::Called).await.unwrap();
    let began = Instant::now();
    node.until("it is gone", |node| node.phase("a") == "gone").await;
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    assert_eq!((world.create_calls(), world.made()), (0, 0));
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn after_a_crash_around_the_intent_there_is_one_vm() {
    for boundary in 0..40 {
        let (world, dir) = (world(), Dir::new());
        let fuse = Fuse::after(Some(boundary));
        let Some(node) = Node::start_with(&world, &dir, fuse.clone(), settings()).await else { continue };
        tokio::select! {
            () = async { drop(node.create("a").await); drop(node.table.start(&id("a")).await) } => {}
            () = fuse.blown.notified() => {}
        }
        node.kill().await;
        let node = Node::start(&world, &dir).await;
        node.run("a").await;
        assert_eq!(world.made(), 1, "killed at boundary {boundary}");
        assert_eq!(world.state().shown["a"], "running");
        node.kill().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_slow_start_reports_its_step_and_again_after_twice_the_time() {
    let (world, dir) = (world(), Dir::new());
    world.guests_stay_away.store(true, Ordering::Relaxed);
    let slow = Settings { slow_after: Duration::from_secs(30), ..settings() };
    let node = Node::start_with(&world, &dir, Fuse::after(None), slow).await.unwrap();
    node.create("a").await.unwrap();
    let said = |reason| world.state().said.iter().filter(|said| said.1 == reason).count();
    tokio::time::sleep(Duration::from_secs(29)).await;
    assert_eq!(said("SlowStart"), 0);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(said("SlowStart"), 1);
    assert!(world.state().said[0].2.contains("did not dial this node"), "{:?}", world.state().said);
    node.until("it fails", |_| said("StartFailed") == 1).await;
    // After 30, 60, 120 and 240 of 300 seconds.
    assert_eq!(said("SlowStart"), 4);
    assert_eq!(world.state().said[0].0, "default/pod-a");
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_refusal_of_the_cloud_is_reported_once_with_its_text() {
    let (world, dir) = (world(), Dir::new());
    world.scripted_creates.lock().unwrap().push_back(CloudError::invalid("no such image: ami-1"));
    let node = Node::start(&world, &dir).await;
    node.create("a").await.unwrap();
    node.table.start(&id("a")).await.unwrap_err();
    let said = world.state().said.clone();
    assert!(
        said.len() == 1 && said[0].1 == "VMRefused" && said[0].2.contains("no such image: ami-1"),
        "{said:?}"
    );
    node.kill().await;
}
