//! Tests sandboxes whose pods have volumes.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use parking_lot::Mutex;
use peerpod_provider_api::{EventKind, ProviderEvent};
use peerpod_volume::descriptor::{Attach, VERSION};
use peerpod_volume::records::{Attached, Records};
use peerpod_volume::{GuestVolume, Identity, Mode, Source, VolumeId};
use tokio::time::{Instant, sleep};

use super::node::*;
use super::world::*;
use crate::ledger::Ledger;
use crate::sandbox::ports::CloudError;
use crate::sandbox::{CreateVm, Stop};
use crate::volumes::tests::{Vms, record};
use crate::volumes::{PodStorage, PodVolume, PodVolumes, Volumes};

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

/// The record of a sandbox is lost, and its VM lives. The next sandbox of the pod waits until that VM is gone.
#[tokio::test(start_paused = true)]
async fn a_quarantined_sandbox_keeps_its_volumes_until_its_vm_is_gone() {
    let (world, dir) = (World::new(1), Dir::new());
    let (folder, provider) = (dir.0.join("volumes"), Arc::new(Vms(Mutex::new(vec!["i-1"]))));
    let mut record = record("u", "v", Attach::Driver);
    record.pod.namespace = "default".into();
    record.pod.name = "pod-a".into();
    let records = Records::new(&folder);
    records.put(&record).unwrap();
    let driver_attaches = |vm: &str| {
        let identity = Identity::Serial(vm.into());
        let attached = Attached { version: VERSION, instance: vm.into(), identity };
        records.put_attached("u", &record.volume.id, &attached).unwrap();
    };
    driver_attaches("i-1");
    let storage = PodStorage { volumes: Volumes::new(&folder, None, None), provider: provider.clone() };
    *world.storage.lock().unwrap() = Some(Arc::new(storage));
    let node = Node::start(&world, &dir).await;
    node.run("a").await;
    assert_eq!(world.state().vms.keys().next().unwrap().as_str(), "i-1");
    node.kill().await;
    fs::write(dir.0.join("sandboxes/a.json"), "{").unwrap();
    assert_eq!(Ledger::open(&dir.0).unwrap().load().unwrap().quarantined.len(), 1);
    let node = Node::start(&world, &dir).await;
    assert_eq!(node.phase("a"), "-");
    let again = CreateVm { id: id("b"), netns: "/run/netns/b".into(), ..create_vm("a") };
    node.table.create(again).await.unwrap();
    sleep(60 * SECOND).await;
    assert_eq!((node.phase("b").as_str(), world.create_calls()), ("booting", 1));
    world.state().vms.clear();
    provider.0.lock().clear();
    driver_attaches("i-2");
    node.table.start(&id("b")).await.unwrap();
    assert_eq!((world.vms(), world.create_calls()), (1, 2));
    node.kill().await;
}

/// Returns the texts of the Events about data that may be lost.
fn lost(world: &World) -> Vec<String> {
    let state = world.state();
    state.said.iter().filter(|said| said.1 == "VolumesNotFlushed").map(|said| said.2.clone()).collect()
}

/// Runs a pod with a volume that takes `takes` to flush, and stops it.
async fn stopped(world: &Arc<World>, dir: &Dir, takes: Duration) -> Node {
    *world.flush_takes.lock().unwrap() = takes;
    let node = Node::start(world, dir).await;
    node.run("a").await;
    world.guests_stay_away.store(true, Ordering::Relaxed);
    let began = Instant::now();
    node.table.stop(&id("a"), Stop::Called).await.unwrap();
    assert!(began.elapsed() < SECOND, "StopVM waits for no flush");
    node
}

#[tokio::test(start_paused = true)]
async fn a_stop_waits_while_the_guest_writes_its_volumes_back() {
    let (world, dir) = (world(), Dir::new());
    let node = stopped(&world, &dir, 300 * SECOND).await;
    for left in (1..30).rev() {
        sleep(10 * SECOND).await;
        node.fx.has_unwritten("a", left << 20);
        assert_eq!((world.vms(), world.state().relay.len()), (1, 1), "{left} MiB are left");
    }
    node.until("gone", |node| node.phase("a") == "gone").await;
    assert_eq!((world.vms(), lost(&world)), (0, Vec::new()));
    assert_eq!(world.state().flushed, ["a"]);
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_read_only_volume_delays_no_stop() {
    let (world, dir) = (world(), Dir::new());
    world.volumes.lock().unwrap().as_mut().unwrap().volumes[0].volume.read_only = true;
    let node = stopped(&world, &dir, 300 * SECOND).await;
    let began = Instant::now();
    node.until("gone", |node| node.phase("a") == "gone").await;
    assert!(began.elapsed() < 10 * SECOND, "{:?}", began.elapsed());
    assert_eq!(lost(&world), Vec::<String>::new());
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_flush_without_progress_and_one_without_an_end_are_given_up_with_an_event() {
    for reports in [false, true] {
        let (world, dir) = (world(), Dir::new());
        let node = stopped(&world, &dir, 100_000 * SECOND).await;
        let began = Instant::now();
        let mut left = u64::MAX - 1;
        while node.phase("a") != "gone" {
            sleep(SECOND).await;
            left -= 1;
            node.fx.has_unwritten("a", if reports { left } else { 1 << 30 });
        }
        let limit = if reports { 590..620 } else { 30..40 };
        assert!(limit.contains(&began.elapsed().as_secs()), "{:?}", began.elapsed());
        let lost = lost(&world);
        assert!(lost.len() == 1 && lost[0].contains("may be lost"), "{lost:?}");
        assert_eq!(world.vms(), 0);
        node.kill().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_lost_link_ends_no_flush_and_another_guest_program_is_asked_again() {
    let (world, dir) = (world(), Dir::new());
    *world.flush_takes.lock().unwrap() = 20 * SECOND;
    let node = Node::start(&world, &dir).await;
    node.run("a").await;
    world.guests_stay_away.store(true, Ordering::Relaxed);
    let session = world.state().links["a"].clone();
    node.fx.unlink("a");
    node.table.stop(&id("a"), Stop::Called).await.unwrap();
    sleep(60 * SECOND).await;
    assert_eq!((world.vms(), world.state().flushed.len()), (1, 0), "the guest cannot be asked");
    node.fx.link("a", &session);
    node.until("it is asked", |_| world.state().flushed.len() == 1).await;
    for _ in 0..20 {
        node.fx.unlink("a");
        sleep(SECOND / 4).await;
        node.fx.link("a", &session);
        sleep(SECOND / 4).await;
    }
    node.fx.unlink("a");
    sleep(60 * SECOND).await;
    assert_eq!((world.vms(), world.state().flushed.len()), (1, 1), "the guest has the request");
    node.fx.link("a", "another");
    node.until("gone", |node| node.phase("a") == "gone").await;
    assert_eq!((world.vms(), world.state().flushed.len()), (0, 2));
    assert_eq!(lost(&world), Vec::<String>::new());
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

#[tokio::test(start_paused = true)]
async fn a_vm_that_ends_during_its_flush_is_not_waited_for() {
    let (world, dir) = (world(), Dir::new());
    let node = stopped(&world, &dir, 100_000 * SECOND).await;
    node.until("it is asked", |_| world.state().flushed.len() == 1).await;
    world.state().vms.clear();
    node.fx.unlink("a");
    let began = Instant::now();
    node.until("gone", |node| node.phase("a") == "gone").await;
    assert!(began.elapsed() < 10 * SECOND, "{:?}", began.elapsed());
    assert!(lost(&world)[0].contains("the VM has ended"), "{:?}", lost(&world));
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_restarted_node_flushes_once() {
    for is_noted in [true, false] {
        let (world, dir) = (world(), Dir::new());
        *world.delete_fails.lock().unwrap() = Some(CloudError::transient("the cloud is away"));
        let node = stopped(&world, &dir, SECOND).await;
        node.until("the relay has forgotten it", |_| world.state().relay.is_empty()).await;
        node.kill().await;
        *world.delete_fails.lock().unwrap() = None;
        let ledger = Ledger::open(&dir.0).unwrap();
        let mut record = ledger.read(&id("a")).unwrap().unwrap();
        // An earlier release does not record it.
        record.end.flush_over = is_noted;
        ledger.save(&record).unwrap();
        drop(ledger);
        let node = Node::start(&world, &dir).await;
        let began = Instant::now();
        node.until("gone", |node| node.phase("a") == "gone").await;
        assert!(began.elapsed() < 10 * SECOND, "no link comes back: {:?}", began.elapsed());
        assert_eq!(world.state().flushed, ["a"]);
        assert_eq!(lost(&world), Vec::<String>::new());
        node.kill().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_full_disk_keeps_no_vm_after_its_flush() {
    let (world, dir) = (world(), Dir::new());
    let node = stopped(&world, &dir, 20 * SECOND).await;
    world.disk_full.store(true, Ordering::Relaxed);
    node.until("the VM is deleted", |_| world.vms() == 0).await;
    assert_eq!(node.phase("a"), "leaving", "its tombstone cannot be written");
    world.disk_full.store(false, Ordering::Relaxed);
    node.until("gone", |node| node.phase("a") == "gone").await;
    assert_eq!(world.state().flushed, ["a"]);
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_failure_that_cannot_be_recorded_leaves_the_flush_due() {
    let (world, dir) = (world(), Dir::new());
    let node = Node::start(&world, &dir).await;
    node.run("a").await;
    world.guests_stay_away.store(true, Ordering::Relaxed);
    let session = world.state().links["a"].clone();
    let vm = world.state().vms.keys().next().unwrap().clone();
    node.fx.unlink("a");
    world.disk_full.store(true, Ordering::Relaxed);
    assert!(node.table.lost(&id("a"), &vm, None).await.is_err());
    world.disk_full.store(false, Ordering::Relaxed);
    node.fx.link("a", &session);
    node.table.stop(&id("a"), Stop::Called).await.unwrap();
    node.until("gone", |node| node.phase("a") == "gone").await;
    assert_eq!(world.state().flushed, ["a"]);
    node.kill().await;
}
