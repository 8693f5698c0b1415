//! Tests batches: each sandbox gets a VM of its own, even if the node dies, a sandbox stops or the cloud refuses in
//! between.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::future::join_all;
use peerpod_link::user_data::UserData;
use peerpod_provider_api::InstanceId;

use super::node::*;
use super::world::*;
use crate::ledger::Ledger;
use crate::sandbox::error::Granted;
use crate::sandbox::ports::CloudError;
use crate::sandbox::{Claim, ClaimRefused, Error, Orphans, Stop};

const THREE: [&str; 3] = ["a", "b", "c"];

async fn start(world: &Arc<World>, dir: &Dir) -> Node {
    world.own_addresses.store(true, Ordering::Relaxed);
    Node::start_with(world, dir, Fuse::after(None), batching(10)).await.unwrap()
}

async fn create(node: &Node, names: &[&str]) {
    for created in join_all(names.iter().map(|name| node.create(name))).await {
        created.unwrap();
    }
}

async fn run(node: &Node, names: &[&str]) {
    create(node, names).await;
    for started in join_all(names.iter().map(|name| async move { node.table.start(&id(name)).await })).await {
        started.unwrap();
    }
}

async fn stop(node: &Node, name: &str) {
    node.table.stop(&id(name), Stop::Called).await.unwrap();
    node.until("gone", |node| node.phase(name) == "gone").await;
}

fn vm_of(node: &Node, name: &str) -> Option<InstanceId> {
    node.table.view(&id(name)).and_then(|view| view.borrow().vm().cloned())
}

/// Asserts that each sandbox has a VM of its own, and that the guest in it is the one linked for the sandbox.
fn each_has_its_own(node: &Node, world: &World, names: &[&str]) {
    let vms: BTreeSet<InstanceId> = names.iter().map(|name| vm_of(node, name).unwrap()).collect();
    assert_eq!(vms.len(), names.len());
    let state = world.state();
    assert_eq!(vms, state.vms.keys().cloned().collect(), "these and no others exist");
    for name in names {
        assert_eq!(
            state.links[*name],
            vm_of(node, name).unwrap().as_str(),
            "{name}'s guest is in its own VM"
        );
    }
}

fn files(dir: &Dir) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir.0.join("batches")).unwrap();
    entries.map(|entry| entry.unwrap().path()).collect()
}

#[tokio::test(start_paused = true)]
async fn simultaneous_sandboxes_get_their_vms_by_one_call() {
    let (world, dir) = (World::new(1), Dir::new());
    world.places.store(true, Ordering::Relaxed);
    let node = start(&world, &dir).await;
    run(&node, &THREE).await;
    each_has_its_own(&node, &world, &THREE);
    assert_eq!((world.many_calls(), world.create_calls()), (vec![3], 0));
    assert_eq!(world.placed(), 1, "one place for all");
    {
        let state = world.state();
        let births: Vec<&UserData> = state.vms.values().map(|vm| &vm.user_data).collect();
        assert!(births.iter().all(|user_data| *user_data == births[0]) && births[0].ticket.claims == 3);
    }
    let [file]: [PathBuf; 1] = files(&dir).try_into().unwrap();
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    for name in THREE {
        assert_eq!(files(&dir), std::slice::from_ref(&file), "it stays for the other members");
        stop(&node, name).await;
    }
    node.until("the file is gone", |_| files(&dir).is_empty()).await;
    assert_eq!(world.vms(), 0);
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_lone_sandbox_makes_its_own_call() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = start(&world, &dir).await;
    run(&node, &["a"]).await;
    run(&node, &["b"]).await;
    assert_eq!((world.many_calls(), world.create_calls()), (vec![], 2));
    assert_eq!(world.writes().0, 0);
    assert!(world.state().vms.values().all(|vm| vm.user_data.ticket.claims == 1));
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn only_equal_requests_form_a_batch_up_to_the_providers_limit() {
    let (world, dir) = (World::new(1), Dir::new());
    world.own_addresses.store(true, Ordering::Relaxed);
    let node = Node::start_with(&world, &dir, Fuse::after(None), batching(2)).await.unwrap();
    let mut large = create_vm("large");
    large.wanted.as_mut().unwrap().size.vcpus = 16;
    let (created, ()) = tokio::join!(node.table.create(large), create(&node, &["a", "b", "c", "d", "e"]));
    created.unwrap();
    let all = ["a", "b", "c", "d", "e", "large"];
    for name in all {
        node.table.start(&id(name)).await.unwrap();
    }
    each_has_its_own(&node, &world, &all);
    assert_eq!((world.many_calls(), world.create_calls()), (vec![2, 2], 2));
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_batch_is_written_once_before_the_call_and_once_after_it() {
    let (world, dir) = (World::new(1), Dir::new());
    *world.create_takes.lock().unwrap() = Duration::from_secs(10);
    let node = start(&world, &dir).await;
    create(&node, &THREE).await;
    // Tunnels are reserved and recorded while the window is open.
    tokio::time::sleep(Duration::from_millis(30)).await;
    let (_, before) = world.writes();
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(world.writes(), (1, before + 1), "one write for all three");
    node.until("made", |node| THREE.iter().all(|name| vm_of(node, name).is_some())).await;
    assert_eq!(world.writes().0, 2);
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_member_without_a_vm_retries_alone() {
    let (world, dir) = (World::new(1), Dir::new());
    world.places.store(true, Ordering::Relaxed);
    *world.shortage.lock().unwrap() = Some(2);
    let node = start(&world, &dir).await;
    run(&node, &THREE).await;
    each_has_its_own(&node, &world, &THREE);
    assert_eq!((world.many_calls(), world.create_calls()), (vec![3], 1));
    assert_eq!(world.placed(), 2, "another attempt, another place");
    for name in THREE {
        stop(&node, name).await;
    }
    node.until("the file is gone", |_| files(&dir).is_empty()).await;
    assert_eq!(world.vms(), 0);
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn members_of_a_refused_batch_retry_alone() {
    let (world, dir) = (World::new(1), Dir::new());
    world.scripted_batches.lock().unwrap().push_back(CloudError::capacity("m", "none left"));
    let node = start(&world, &dir).await;
    run(&node, &THREE).await;
    each_has_its_own(&node, &world, &THREE);
    assert_eq!((world.many_calls(), world.create_calls()), (vec![3], 3));
    node.until("the file is gone", |_| files(&dir).is_empty()).await;
    // An error that a person must resolve goes to each member.
    let text = "the token ended";
    world.scripted_batches.lock().unwrap().push_back(CloudError::Auth { text: text.into() });
    create(&node, &["d", "e"]).await;
    for name in ["d", "e"] {
        let error = node.table.start(&id(name)).await.unwrap_err();
        assert!(error.to_string().contains(text), "{error}");
    }
    assert_eq!((world.create_calls(), world.vms()), (3, 3));
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn members_retry_alone_if_no_placement_fits_all() {
    let (world, dir) = (World::new(1), Dir::new());
    world.places.store(true, Ordering::Relaxed);
    world.scripted_places.lock().unwrap().push_back(CloudError::capacity("m", "not so many"));
    let node = start(&world, &dir).await;
    run(&node, &THREE).await;
    each_has_its_own(&node, &world, &THREE);
    assert_eq!((world.many_calls(), world.create_calls()), (vec![], 3));
    assert_eq!(world.writes().0, 0);
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_lost_answer_repeats_the_call_with_the_same_key() {
    let (world, dir) = (World::new(1), Dir::new());
    for _ in 0..3 {
        world.scripted_batches.lock().unwrap().push_back(transient("no answer"));
    }
    let node = start(&world, &dir).await;
    run(&node, &THREE).await;
    each_has_its_own(&node, &world, &THREE);
    assert_eq!((world.many_calls(), world.made()), (vec![3; 4], 3));
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_full_disk_delays_a_batch_and_its_call() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = start(&world, &dir).await;
    create(&node, &THREE).await;
    world.disk_full.store(true, Ordering::Relaxed);
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert_eq!((world.many_calls().len(), world.vms()), (0, 0));
    world.disk_full.store(false, Ordering::Relaxed);
    for name in THREE {
        node.table.start(&id(name)).await.unwrap();
    }
    each_has_its_own(&node, &world, &THREE);
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_member_stopped_while_the_batch_forms_is_left_out() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = start(&world, &dir).await;
    create(&node, &THREE).await;
    tokio::time::sleep(Duration::from_millis(10)).await;
    node.table.stop(&id("b"), Stop::Called).await.unwrap();
    for name in ["a", "c"] {
        node.table.start(&id(name)).await.unwrap();
    }
    node.until("gone", |node| node.phase("b") == "gone").await;
    each_has_its_own(&node, &world, &["a", "c"]);
    assert_eq!((world.many_calls(), world.made(), world.create_calls()), (vec![2], 2, 0));
    // After one of two leaves the window, the other makes its own call.
    create(&node, &["d", "e"]).await;
    tokio::time::sleep(Duration::from_millis(10)).await;
    node.table.stop(&id("d"), Stop::Called).await.unwrap();
    node.table.start(&id("e")).await.unwrap();
    assert_eq!((world.many_calls().len(), world.create_calls(), world.made()), (1, 1, 3));
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_member_stopped_during_the_call_loses_only_its_own_vm() {
    // Before the cloud has made the VMs, and after that but before its answer; also if the node dies after the stop.
    for (after, dies) in [(2, false), (7, false), (2, true), (7, true)] {
        let (world, dir) = (World::new(1), Dir::new());
        *world.create_takes.lock().unwrap() = Duration::from_secs(10);
        let mut node = start(&world, &dir).await;
        create(&node, &THREE).await;
        tokio::time::sleep(Duration::from_secs(after)).await;
        node.table.stop(&id("b"), Stop::Called).await.unwrap();
        assert_eq!(node.phase("b"), "unwanted");
        if dies {
            node.kill().await;
            node = start(&world, &dir).await;
        }
        for name in ["a", "c"] {
            node.table.start(&id(name)).await.unwrap();
        }
        node.until("gone", |node| node.phase("b") == "gone").await;
        each_has_its_own(&node, &world, &["a", "c"]);
        assert_eq!((world.made(), world.create_calls()), (3, 0), "{after} s, dies: {dies}");
        node.kill().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_member_stopped_before_its_guest_connects_loses_only_its_own_vm() {
    let (world, dir) = (World::new(1), Dir::new());
    world.guests_stay_away.store(true, Ordering::Relaxed);
    let node = start(&world, &dir).await;
    create(&node, &THREE).await;
    node.until("made", |node| THREE.iter().all(|name| node.phase(name) == "joining")).await;
    let own = vm_of(&node, "b").unwrap();
    stop(&node, "b").await;
    assert!(world.vms() == 2 && !world.state().vms.contains_key(&own));
    world.guests_stay_away.store(false, Ordering::Relaxed);
    for name in ["a", "c"] {
        node.table.start(&id(name)).await.unwrap();
    }
    each_has_its_own(&node, &world, &["a", "c"]);
    node.kill().await;
}

/// Claims from the source address `from`, and returns the node's answer.
async fn claims(node: &Node, user_data: &UserData, from: &str, key: &[u8]) -> Result<Granted, Error> {
    let claim = Claim { peer: from.into(), ..claim(user_data, key) };
    node.table.claim(&user_data.ticket.id, claim).await
}

#[tokio::test(start_paused = true)]
async fn a_guest_is_identified_by_its_source_address() {
    let (world, dir) = (World::new(1), Dir::new());
    world.guests_stay_away.store(true, Ordering::Relaxed);
    world.hides_addresses.store(true, Ordering::Relaxed);
    *world.create_takes.lock().unwrap() = Duration::from_secs(10);
    let mut node = start(&world, &dir).await;
    create(&node, &THREE).await;
    let not_yet = Err(Error::Claim(ClaimRefused::NotYet));
    let unknown = Err(Error::Claim(ClaimRefused::WrongSecret));
    node.until("the VMs boot", |_| world.vms() == 3).await;
    let user_data = world.state().vms.values().next().unwrap().user_data.clone();
    let from = |world: &World, vm: &InstanceId| world.home_of(vm).to_string();
    let first = world.state().vms.keys().next().unwrap().clone();
    let early = claims(&node, &user_data, &from(&world, &first), b"k").await;
    assert_eq!(early, not_yet, "its guest is faster than the cloud's answer");
    node.until("made", |node| THREE.iter().all(|name| node.phase(name) == "joining")).await;
    let early = claims(&node, &user_data, &from(&world, &first), b"k").await;
    assert_eq!(early, not_yet, "the cloud has not reported the addresses");
    world.hides_addresses.store(false, Ordering::Relaxed);
    tokio::time::sleep(Duration::from_secs(1)).await;
    for restarted in [false, true] {
        if restarted {
            node.kill().await;
            node = start(&world, &dir).await;
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        for stranger in ["10.99.0.77", "192.0.2.1", "", "not an address"] {
            assert_eq!(claims(&node, &user_data, stranger, b"k").await, not_yet, "{stranger:?}");
        }
        for name in ["a", "b"] {
            let home = from(&world, &vm_of(&node, name).unwrap());
            let wrong = UserData {
                ticket: peerpod_link::user_data::UserDataTicket {
                    secret: peerpod_link::user_data::TicketSecret::new([9; 32]),
                    ..user_data.ticket.clone()
                },
                ..user_data.clone()
            };
            assert_eq!(claims(&node, &wrong, &home, name.as_bytes()).await, unknown);
            let granted = claims(&node, &user_data, &home, name.as_bytes()).await.unwrap();
            assert_eq!(granted.id, id(name));
            let again = claims(&node, &user_data, &home, name.as_bytes()).await.unwrap();
            assert_eq!(again, granted, "the very same certificate");
            let thief = claims(&node, &user_data, &home, b"another's key").await;
            assert_eq!(thief, Err(Error::Claim(ClaimRefused::OtherKey)));
        }
    }
    // The address of a member that leaves is removed; those of the others stay.
    let home = from(&world, &vm_of(&node, "a").unwrap());
    stop(&node, "a").await;
    assert_eq!(claims(&node, &user_data, &home, b"a").await, not_yet);
    let home = from(&world, &vm_of(&node, "c").unwrap());
    assert_eq!(claims(&node, &user_data, &home, b"c").await.unwrap().id, id("c"));
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn vms_behind_one_nat_address_are_not_assigned_and_the_failure_names_the_remedy() {
    let (world, dir) = (World::new(1), Dir::new());
    world.guests_stay_away.store(true, Ordering::Relaxed);
    let node = start(&world, &dir).await;
    create(&node, &THREE).await;
    node.until("made", |node| THREE.iter().all(|name| node.phase(name) == "joining")).await;
    let user_data = world.state().vms.values().next().unwrap().user_data.clone();
    let refused = claims(&node, &user_data, "192.0.2.1", b"k").await;
    assert_eq!(refused, Err(Error::Claim(ClaimRefused::NotYet)));
    for name in THREE {
        let text = node.table.start(&id(name)).await.unwrap_err().to_string();
        assert!(text.contains("192.0.2.1") && text.contains("node.batch"), "{text}");
    }
    node.until("gone", |_| world.vms() == 0).await;
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_panicked_batch_task_resumes() {
    let (world, dir) = (World::new(1), Dir::new());
    *world.create_takes.lock().unwrap() = Duration::from_secs(1);
    let node = start(&world, &dir).await;
    create(&node, &THREE).await;
    // The relay has them by now, so the panic hits the call for the VMs.
    tokio::time::sleep(Duration::from_millis(20)).await;
    world.panics.store(1, Ordering::Relaxed);
    for name in THREE {
        node.table.start(&id(name)).await.unwrap();
    }
    each_has_its_own(&node, &world, &THREE);
    assert_eq!((node.metrics.panics.get(), world.made()), (1, 3));
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_panicked_member_task_rejoins_its_batch() {
    let (world, dir) = (World::new(1), Dir::new());
    *world.create_takes.lock().unwrap() = Duration::from_secs(10);
    let node = start(&world, &dir).await;
    create(&node, &THREE).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    world.panics.store(3, Ordering::Relaxed);
    world.epoch.send_modify(|epoch| *epoch += 1); // each sandbox updates the relay again
    for name in THREE {
        node.table.start(&id(name)).await.unwrap();
    }
    each_has_its_own(&node, &world, &THREE);
    assert_eq!((node.metrics.panics.get(), world.made(), world.create_calls()), (3, 3, 0));
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_recovered_batch_is_created_although_batches_are_off() {
    let (world, dir) = (World::new(1), Dir::new());
    *world.create_takes.lock().unwrap() = Duration::from_secs(10);
    let node = start(&world, &dir).await;
    create(&node, &THREE).await;
    node.until("made", |_| world.vms() == 3).await;
    node.kill().await;
    let node = Node::start(&world, &dir).await;
    for name in THREE {
        node.table.start(&id(name)).await.unwrap();
    }
    each_has_its_own(&node, &world, &THREE);
    assert_eq!((world.made(), world.create_calls()), (3, 0));
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn members_of_a_quarantined_batch_get_new_vms() {
    let (world, dir) = (World::new(1), Dir::new());
    *world.create_takes.lock().unwrap() = Duration::from_secs(10);
    let node = start(&world, &dir).await;
    create(&node, &THREE).await;
    node.until("made", |_| world.vms() == 3).await;
    node.kill().await;
    let [file]: [PathBuf; 1] = files(&dir).try_into().unwrap();
    fs::write(&file, "{").unwrap();
    let loaded = Ledger::open(&dir.0).unwrap().load().unwrap();
    assert_eq!((loaded.quarantined.len(), loaded.unread_batches.len()), (1, 1));
    let node = start(&world, &dir).await;
    for name in THREE {
        node.table.start(&id(name)).await.unwrap();
    }
    assert_eq!((world.vms(), world.create_calls()), (6, 3));
    // The contents of the file are unknown: its VMs are spared until a person has looked.
    let mut orphans = Orphans::new(vec![], loaded.unread_batches, Duration::ZERO);
    assert_eq!(orphans.pass(&node.table).await.unwrap(), 0);
    let mut orphans = Orphans::new(vec![], vec![], Duration::ZERO);
    assert_eq!(orphans.pass(&node.table).await.unwrap(), 3);
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_quarantined_member_keeps_its_vm_and_the_batch_its_file() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = start(&world, &dir).await;
    run(&node, &THREE).await;
    node.kill().await;
    fs::write(dir.0.join("sandboxes/b.json"), "{").unwrap();
    let ledger = Ledger::open(&dir.0).unwrap();
    ledger.load().unwrap();
    let unread = ledger.in_quarantine().unwrap();
    assert_eq!(unread, [id("b")]);
    let node = start(&world, &dir).await;
    let mut orphans = Orphans::new(unread, vec![], Duration::ZERO);
    for name in ["a", "c"] {
        stop(&node, name).await;
        assert_eq!(orphans.pass(&node.table).await.unwrap(), 0);
    }
    assert_eq!((world.vms(), files(&dir).len()), (1, 1));
    // Once it is stopped, its VM has no owner, and the file goes at the next start.
    node.table.stop(&id("b"), Stop::Called).await.unwrap();
    assert_eq!(orphans.pass(&node.table).await.unwrap(), 1);
    node.kill().await;
    let node = start(&world, &dir).await;
    node.until("the file is gone", |_| files(&dir).is_empty()).await;
    assert_eq!(world.vms(), 0);
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_vm_of_an_open_batch_is_no_orphan_but_a_surplus_vm_is() {
    let (world, dir) = (World::new(1), Dir::new());
    world.guests_stay_away.store(true, Ordering::Relaxed);
    *world.create_takes.lock().unwrap() = Duration::from_secs(10);
    let node = start(&world, &dir).await;
    create(&node, &THREE).await;
    node.until("made", |_| world.vms() == 3).await;
    let mut orphans = Orphans::new(vec![], vec![], Duration::ZERO);
    assert_eq!(orphans.pass(&node.table).await.unwrap(), 0, "the call is out");
    node.until("made", |node| THREE.iter().all(|name| vm_of(node, name).is_some())).await;
    assert_eq!(orphans.pass(&node.table).await.unwrap(), 0);
    world.double("i-1");
    assert_eq!((orphans.pass(&node.table).await.unwrap(), world.vms()), (1, 3));
    node.kill().await;
}

/// Kills the node at each boundary in the life of three sandboxes with one call; afterwards they are stopped, or run
/// on.
#[test]
fn the_node_recovers_from_a_kill_at_each_boundary_of_a_batch() {
    for (stays, places) in [(false, true), (true, false)] {
        let mut boundaries = 0;
        loop {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .start_paused(true)
                .build()
                .unwrap();
            if runtime.block_on(killed_after(boundaries, stays, places)) {
                break;
            }
            boundaries += 1;
        }
        assert!(boundaries > 40, "{boundaries}");
    }
}

async fn killed_after(boundaries: u64, stays: bool, places: bool) -> bool {
    let (world, dir) = (World::new(7), Dir::new());
    world.own_addresses.store(true, Ordering::Relaxed);
    world.places.store(places, Ordering::Relaxed);
    let fuse = Fuse::after(Some(boundaries));
    let mut survived = false;
    if let Some(node) = Node::start_with(&world, &dir, fuse.clone(), batching(10)).await {
        let whole = async {
            run(&node, &THREE).await;
            if !stays {
                join_all(THREE.iter().map(|name| stop(&node, name))).await;
                node.until("no file", |_| files(&dir).is_empty()).await;
            }
        };
        tokio::select! {
            biased;
            () = fuse.blown.notified() => {}
            () = whole => survived = true,
        }
        node.kill().await;
    }
    let node = start(&world, &dir).await;
    if stays {
        run(&node, &THREE).await;
        each_has_its_own(&node, &world, &THREE);
    } else if !survived {
        // The relay repeats the calls without an answer; a stopped sandbox refuses them.
        for name in THREE {
            node.create(name).await.unwrap();
            drop(node.table.start(&id(name)).await);
        }
        join_all(THREE.iter().map(|name| stop(&node, name))).await;
    }
    if !stays {
        node.until("no file", |_| files(&dir).is_empty()).await;
        let state = world.state();
        assert!(state.vms.is_empty() && state.devices.is_empty() && state.relay.is_empty(), "{boundaries}");
    }
    {
        let state = world.state();
        assert_eq!(state.reused, 0, "boundary {boundaries}: a repeated call is the same byte for byte");
        assert!(state.made <= 3, "boundary {boundaries}: {} VMs were made", state.made);
        assert!(state.batches.len() <= 1, "boundary {boundaries}");
    }
    node.kill().await;
    survived
}
