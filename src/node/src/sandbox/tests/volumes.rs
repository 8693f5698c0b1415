//! Tests sandboxes whose pods have volumes.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use peerpod_provider_api::{EventKind, ProviderEvent};
use peerpod_volume::descriptor::VERSION;
use peerpod_volume::{GuestVolume, Mode, Source, VolumeId};
use tokio::time::Instant;

use super::node::*;
use super::world::*;
use crate::sandbox::ports::CloudError;
use crate::volumes::{PodVolume, PodVolumes};

const SECOND: Duration = Duration::from_secs(1);

/// Returns a world in which every pod has one share.
fn world() -> Arc<World> {
    let world = World::new(1);
    let volume = GuestVolume {
        version: VERSION,
        id: VolumeId::of("driver", "v"),
        name: "v".into(),
        source: Source::Nfs { server: "10.0.0.2".into(), export: "/e".into() },
        mode: Mode::Filesystem { fs_type: None, mount_options: Vec::new(), fs_group: None },
        read_only: false,
    };
    let volume =
        PodVolume { volume, target_path: "/t".into(), marker: "m".into(), fence: None, identity: None };
    *world.volumes.lock().unwrap() = Some(PodVolumes { uid: "u".into(), volumes: vec![volume] });
    world
}

#[tokio::test(start_paused = true)]
async fn volumes_are_marked_as_taken_before_the_provider_is_asked() {
    for in_cluster in [true, false] {
        let (world, dir) = (world(), Dir::new());
        world.in_cluster.store(in_cluster, Ordering::Relaxed);
        let node = Node::start(&world, &dir).await;
        node.run("a").await;
        assert_eq!(world.state().expected, [("a".to_owned(), 0)], "in a cluster: {in_cluster}");
        node.kill().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_pod_without_a_claim_to_its_volumes_makes_no_vm() {
    let (world, dir) = (world(), Dir::new());
    *world.expect_fails.lock().unwrap() = Some(CloudError::invalid("volume v was unpublished"));
    let node = Node::start(&world, &dir).await;
    node.create("a").await.unwrap();
    let error = node.table.start(&id("a")).await.unwrap_err().to_string();
    assert!(error.contains("volume v was unpublished"), "{error}");
    assert_eq!((world.create_calls(), world.made()), (0, 0));
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_vm_of_an_earlier_process_is_deleted_when_its_pod_has_lost_its_volumes() {
    let (world, dir) = (world(), Dir::new());
    *world.create_takes.lock().unwrap() = Duration::from_secs(2);
    let node = Node::start(&world, &dir).await;
    node.create("a").await.unwrap();
    node.until("the VM is made", |_| world.made() == 1).await;
    assert_eq!(node.phase("a"), "booting", "the answer is still on its way");
    node.kill().await;
    *world.expect_fails.lock().unwrap() = Some(CloudError::invalid("volume v was unpublished"));
    let node = Node::start(&world, &dir).await;
    node.until("it is gone", |node| node.phase("a") == "gone").await;
    assert_eq!((world.vms(), world.made()), (0, 1));
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_vm_that_has_ended_is_not_asked_to_flush() {
    for has_volume in [false, true] {
        let (world, dir) = (world(), Dir::new());
        if !has_volume {
            *world.volumes.lock().unwrap() = None;
        }
        *world.flush_takes.lock().unwrap() = 100_000 * SECOND;
        let node = Node::start(&world, &dir).await;
        node.run("a").await;
        world.guests_stay_away.store(true, Ordering::Relaxed);
        // Its link still seems to be up.
        let vm = world.state().vms.pop_first().unwrap().0;
        let began = Instant::now();
        let kind = EventKind::Ended { reason: "destroyed".into() };
        world.events.send(ProviderEvent { id: vm, kind }).unwrap();
        node.until("the shim's connections close", |_| world.state().relay.is_empty()).await;
        assert!(began.elapsed() < Duration::from_millis(1500), "{:?}", began.elapsed());
        node.until("gone", |node| node.phase("a") == "gone").await;
        assert_eq!(world.state().flushed, [""; 0]);
        node.kill().await;
    }
}
