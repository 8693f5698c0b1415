//! Tests failures and their error messages.

use std::sync::atomic::Ordering;
use std::time::Duration;

use peerpod_link::user_data::UserData;
use peerpod_provider_api::Error as CloudError;
use tokio::time::Instant;

use super::node::*;
use super::world::*;
use crate::sandbox::phase::MAX_ATTEMPTS;
use crate::sandbox::ports::NetworkError;
use crate::sandbox::{ClaimRefused, Error, Settings, Stop};

fn capacity() -> CloudError {
    CloudError::capacity("m6a.large", "no m6a.large left in eu-north-1a")
}

async fn cause(node: &Node, name: &str) -> String {
    match node.table.start(&id(name)).await {
        Err(Error::Failed { cause, .. }) => cause,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn a_refusal_of_the_cloud_fails_at_once_and_leaves_nothing() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    world
        .scripted_creates
        .lock()
        .unwrap()
        .push_back(CloudError::Quota { text: "vCPU limit 32 reached; ask for more".into() });
    node.create("a").await.unwrap();
    let begin = Instant::now();
    assert!(cause(&node, "a").await.contains("vCPU limit 32"));
    assert!(begin.elapsed() < Duration::from_secs(1));
    node.until("gone", |node| node.phase("a") == "gone").await;
    assert!(world.devices() == 0 && world.state().relay.is_empty());
    // The shim stops the sandbox that it could not start, and may call StartVM again.
    node.table.stop(&id("a"), Stop::Called).await.unwrap();
    assert!(cause(&node, "a").await.contains("vCPU limit 32"));
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn no_capacity_retries_with_new_keys_up_to_a_limit() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    world.scripted_creates.lock().unwrap().extend([capacity(), capacity()]);
    node.run("a").await;
    assert_eq!((world.create_calls(), world.vms()), (3, 1));
    let key = peerpod_provider_api::IdempotencyKey::derive("test", "a", 2);
    assert!(world.state().vms.values().all(|vm| vm.key == key));
    world.scripted_creates.lock().unwrap().extend((0..MAX_ATTEMPTS).map(|_| capacity()));
    node.create("b").await.unwrap();
    assert!(cause(&node, "b").await.contains("no m6a.large left"));
    assert_eq!(world.vms(), 1);
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn each_retry_uses_another_placement_and_exhaustion_fails_at_once() {
    let (world, dir) = (World::new(1), Dir::new());
    world.places.store(true, Ordering::Relaxed);
    let node = Node::start(&world, &dir).await;
    world.scripted_creates.lock().unwrap().extend([capacity(), capacity()]);
    node.run("a").await;
    // Each attempt had a placement of its own, and so a request of its own.
    assert_eq!((world.create_calls(), world.vms(), world.state().placed), (3, 1, 3));
    assert_eq!(world.state().reused, 0);

    let none_left =
        CloudError::capacity("all", "all that fits is exhausted: m6a.large in eu-1a: no capacity");
    world.scripted_places.lock().unwrap().push_back(none_left);
    node.create("b").await.unwrap();
    let begin = Instant::now();
    assert!(cause(&node, "b").await.contains("m6a.large in eu-1a: no capacity"));
    assert!(begin.elapsed() < Duration::from_secs(1));
    node.until("gone", |node| node.phase("b") == "gone").await;
    assert_eq!((world.create_calls(), world.vms()), (3, 1), "the cloud got no call for it");
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_late_refusal_leads_to_the_next_offering_like_an_early_one() {
    let (world, dir) = (World::new(1), Dir::new());
    world.places.store(true, Ordering::Relaxed);
    let node = Node::start(&world, &dir).await;
    world.late_refusals.lock().unwrap().extend([capacity(), capacity()]);
    node.run("a").await;
    // The pod has the third VM. The cloud still lists the refused ones, which it is deleting.
    let key = peerpod_provider_api::IdempotencyKey::derive("test", "a", 2);
    let dying = |world: &World| world.state().vms.values().filter(|vm| vm.is_deleting).count();
    assert_eq!((world.create_calls(), world.made(), world.state().placed), (3, 3, 3));
    assert!(world.state().vms.values().all(|vm| vm.is_deleting || vm.key == key));
    assert_eq!(dying(&world), 2);

    // Any other refusal of that kind fails the pod, which joins no dying VM, either.
    world.late_refusals.lock().unwrap().push_back(CloudError::Quota { text: "limit reached".into() });
    node.create("b").await.unwrap();
    assert!(cause(&node, "b").await.contains("limit reached"));
    node.until("gone", |node| node.phase("b") == "gone").await;
    assert_eq!(dying(&world), 3);
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_stopped_sandbox_deletes_its_vm_even_if_the_cloud_is_deleting_it() {
    // The node dies before the answer to the create, after the sandbox was stopped.
    let (world, dir) = (World::new(1), Dir::new());
    *world.create_takes.lock().unwrap() = Duration::from_secs(30);
    let node = Node::start(&world, &dir).await;
    node.create("a").await.unwrap();
    node.until("made", |_| world.vms() == 1).await;
    node.table.stop(&id("a"), Stop::Called).await.unwrap();
    node.until("unwanted", |node| node.phase("a") == "unwanted").await;
    node.kill().await;
    world.state().vms.values_mut().for_each(|vm| vm.is_deleting = true);
    let node = Node::start(&world, &dir).await;
    node.until("gone", |node| node.phase("a") == "gone").await;
    assert_eq!((world.create_calls(), world.made(), world.vms()), (1, 1, 0));
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_sandbox_stopped_before_its_placement_makes_no_vm() {
    let (world, dir) = (World::new(1), Dir::new());
    world.places.store(true, Ordering::Relaxed);
    world.scripted_places.lock().unwrap().extend((0..3).map(|_| transient("prices")));
    let node = Node::start(&world, &dir).await;
    node.create("a").await.unwrap();
    node.until("asked", |_| world.scripted_places.lock().unwrap().len() < 3).await;
    node.table.stop(&id("a"), Stop::Called).await.unwrap();
    node.until("gone", |node| node.phase("a") == "gone").await;
    assert_eq!((world.create_calls(), world.made()), (0, 0));
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_refusal_after_a_lost_answer_does_not_lose_the_vm() {
    // The first call makes the VM and its answer is lost; meanwhile the credentials expire.
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    node.create("a").await.unwrap();
    node.until("made", |_| world.vms() == 1).await;
    node.kill().await;
    world.scripted_creates.lock().unwrap().push_back(CloudError::Auth { text: "the token has ended".into() });
    let node = Node::start(&world, &dir).await;
    node.table.start(&id("a")).await.unwrap();
    assert_eq!((world.vms(), world.made()), (1, 1));
    node.kill().await;

    // If even the look-up fails, the caller gets the error at once; the VM is deleted once it can be seen.
    let node = Node::start(&world, &dir).await;
    *world.owned_fails.lock().unwrap() = Some(CloudError::Auth { text: "the token has ended".into() });
    world.scripted_creates.lock().unwrap().push_back(CloudError::Auth { text: "the token has ended".into() });
    node.create("b").await.unwrap();
    assert!(cause(&node, "b").await.contains("token has ended"));
    assert_eq!(node.phase("b"), "unwanted");
    *world.owned_fails.lock().unwrap() = None;
    node.until("gone", |node| node.phase("b") == "gone").await;
    assert_eq!(world.vms(), 1);
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_never_connects_fails_with_the_likely_cause_and_its_console() {
    let (world, dir) = (World::new(1), Dir::new());
    world.guests_stay_away.store(true, Ordering::Relaxed);
    // A busy cloud.
    *world.console_takes.lock().unwrap() = Duration::from_secs(8);
    let node = Node::start(&world, &dir).await;
    let begin = Instant::now();
    node.create("a").await.unwrap();
    let cause = cause(&node, "a").await;
    assert!(begin.elapsed() >= Duration::from_secs(300) && begin.elapsed() < Duration::from_secs(320));
    for word in ["i-1", "firewall", "10.99.0.1:15151", "kernel panic"] {
        assert!(cause.contains(word), "{cause}");
    }
    node.until("gone", |node| node.phase("a") == "gone").await;
    assert!(world.state().vms.is_empty());
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn start_ends_at_its_own_deadline_and_a_repeat_gives_the_answer() {
    let (world, dir) = (World::new(1), Dir::new());
    *world.create_takes.lock().unwrap() = Duration::from_secs(30);
    let node = Node::start_with(
        &world,
        &dir,
        Fuse::after(None),
        Settings { start_timeout: Duration::from_secs(10), ..settings() },
    )
    .await
    .unwrap();
    node.create("a").await.unwrap();
    assert!(matches!(node.table.start(&id("a")).await, Err(Error::Late { .. })));
    node.until("running", |node| node.phase("a") == "running").await;
    node.table.start(&id("a")).await.unwrap();
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn an_error_of_the_guest_reaches_the_caller() {
    let (world, dir) = (World::new(1), Dir::new());
    *world.guest_error.lock().unwrap() = "kata-agent did not listen within 30s".into();
    let node = Node::start(&world, &dir).await;
    node.create("a").await.unwrap();
    assert!(cause(&node, "a").await.contains("kata-agent did not listen"));
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_rejects_the_plan_fails_the_start_and_its_vm_is_deleted() {
    let (world, dir) = (World::new(1), Dir::new());
    *world.guest_error.lock().unwrap() =
        "making the pod's network: read the network plan: version 2 is unknown, this guest knows 1 to 1"
            .into();
    let node = Node::start(&world, &dir).await;
    node.create("a").await.unwrap();
    assert!(cause(&node, "a").await.contains("version 2 is unknown, this guest knows 1 to 1"));
    node.until("gone", |node| node.phase("a") == "gone").await;
    assert_eq!(world.vms(), 0);
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn an_unsupported_network_fails_and_a_busy_one_is_retried() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    let error = |permanent| NetworkError { text: "a route of type blackhole".into(), permanent };
    *world.reserve_fails.lock().unwrap() = Some(error(true));
    node.create("a").await.unwrap();
    assert!(cause(&node, "a").await.contains("blackhole"));
    *world.reserve_fails.lock().unwrap() = Some(error(false));
    node.create("b").await.unwrap();
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert_eq!(node.phase("b"), "joining");
    *world.reserve_fails.lock().unwrap() = None;
    node.table.start(&id("b")).await.unwrap();
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn an_invalid_network_namespace_is_refused_before_any_effect() {
    let (world, dir) = (World::new(1), Dir::new());
    world.state().dead_netns.insert("/run/netns/a".into());
    let node = Node::start(&world, &dir).await;
    assert!(matches!(node.create("a").await, Err(Error::Netns { .. })));
    assert_eq!(node.phase("a"), "-");
    assert_eq!(world.create_calls(), 0);
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_sandbox_ends_half_a_minute_after_its_shim_and_not_for_a_moment_without() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    for name in ["a", "b"] {
        node.run(name).await;
    }
    let gone = |name: &str, gone: bool| {
        node.fx.guest_sender(name).send_modify(|guest| guest.shim_gone = gone);
    };
    gone("a", true);
    gone("b", true);
    tokio::time::sleep(Duration::from_secs(15)).await;
    gone("b", false);
    let began = Instant::now();
    node.until("its end", |node| node.phase("a") == "gone").await;
    assert!(began.elapsed() < Duration::from_secs(15), "{:?}", began.elapsed());
    assert_eq!((node.phase("b"), world.vms()), ("running".into(), 1));
    let late = node.table.start(&id("a")).await.unwrap_err();
    assert!(matches!(&late, Error::Stopped { cause, .. } if cause == "its shim is gone"), "{late}");
    // The same for a shim that ended while the node was dead.
    node.kill().await;
    let node = Node::start(&world, &dir).await;
    node.fx.guest_sender("b").send_modify(|guest| guest.shim_gone = true);
    node.until("its end", |node| node.phase("b") == "gone").await;
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_full_disk_fails_the_call_before_any_effect() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    node.run("old").await;
    world.disk_full.store(true, Ordering::Relaxed);
    let error = node.create("a").await.unwrap_err();
    assert!(matches!(&error, Error::Disk { full: true, text } if text.contains("free space")), "{error}");
    let error = node.table.stop(&id("old"), Stop::Called).await.unwrap_err();
    assert!(matches!(error, Error::Disk { .. }), "{error}");
    let error = node.table.stop(&id("unknown"), Stop::Called).await.unwrap_err();
    assert!(matches!(error, Error::Disk { .. }), "{error}");
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!((node.phase("a"), node.phase("old")), ("-".into(), "running".into()));
    assert_eq!((world.create_calls(), world.vms(), world.devices()), (1, 1, 1));
    world.disk_full.store(false, Ordering::Relaxed);
    node.run("a").await;
    node.table.stop(&id("old"), Stop::Called).await.unwrap();
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_fills_up_while_the_cloud_works_loses_no_vm() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    node.create("a").await.unwrap();
    world.disk_full.store(true, Ordering::Relaxed);
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert_eq!((node.phase("a").as_str(), world.vms()), ("booting", 1));
    world.disk_full.store(false, Ordering::Relaxed);
    node.table.start(&id("a")).await.unwrap();
    assert_eq!(world.vms(), 1);
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn cleanup_retries_until_the_cloud_succeeds() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    node.run("a").await;
    *world.delete_fails.lock().unwrap() = Some(CloudError::Auth { text: "the token has ended".into() });
    node.table.stop(&id("a"), Stop::Called).await.unwrap();
    tokio::time::sleep(Duration::from_secs(3600)).await;
    assert_eq!(node.phase("a"), "leaving");
    // The other steps did not wait for the cloud.
    assert!(world.devices() == 0 && world.state().relay.is_empty());
    *world.delete_fails.lock().unwrap() = None;
    node.until("gone", |node| node.phase("a") == "gone").await;
    assert!(world.state().vms.is_empty());
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn sandboxes_never_started_or_without_a_namespace_are_removed() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    node.create("never").await.unwrap();
    node.run("lost").await;
    node.run("kept").await;
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert_eq!(node.phase("never"), "running");
    world.state().dead_netns.insert("/run/netns/lost".into());
    tokio::time::sleep(Duration::from_secs(20)).await;
    assert_eq!(node.phase("lost"), "running");
    node.until("lost is gone", |node| node.phase("lost") == "gone").await;
    node.until("never is gone", |node| node.phase("never") == "gone").await;
    assert_eq!(node.phase("kept"), "running");
    assert_eq!(world.vms(), 1);
    node.kill().await;
}

/// Creates a sandbox that waits for its guest; returns the guest's user-data.
async fn waiting(world: &std::sync::Arc<World>, node: &Node, name: &str) -> UserData {
    world.guests_stay_away.store(true, Ordering::Relaxed);
    let before = world.made();
    node.create(name).await.unwrap();
    node.until("made", |_| world.made() > before).await;
    let key =
        node.table.view(&id(name)).map(|_| peerpod_provider_api::IdempotencyKey::derive("test", name, 0));
    let state = world.state();
    state.vms.values().find(|vm| Some(&vm.key) == key.as_ref()).unwrap().user_data.clone()
}

#[tokio::test(start_paused = true)]
async fn only_the_first_key_gets_the_certificate_again() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    let user_data = waiting(&world, &node, "a").await;
    let ticket = user_data.ticket.id.clone();
    let first = node.table.claim(&ticket, claim(&user_data, b"key 1")).await.unwrap();
    let again = node.table.claim(&ticket, claim(&user_data, b"key 1")).await.unwrap();
    assert_eq!(first, again);
    // Each other tunnel key is recorded; a guest that changes it in a loop must wait.
    let changed = |n: u8| crate::sandbox::Claim { tunnel_key: vec![n; 32], ..claim(&user_data, b"key 1") };
    let mut granted = 0;
    for n in 0..100 {
        match node.table.claim(&ticket, changed(n)).await {
            Ok(_) => granted += 1,
            Err(error) => assert!(matches!(error, Error::Unavailable(_)), "{error}"),
        }
    }
    assert!((10..=20).contains(&granted), "{granted} changes");
    tokio::time::sleep(Duration::from_secs(20)).await;
    node.table.claim(&ticket, claim(&user_data, b"key 1")).await.unwrap();
    let other = node.table.claim(&ticket, claim(&user_data, b"key 2")).await;
    assert_eq!(other, Err(Error::Claim(ClaimRefused::OtherKey)));
    // The same after a restart: the binding is on disk.
    node.kill().await;
    let node = Node::start(&world, &dir).await;
    assert_eq!(node.table.claim(&ticket, claim(&user_data, b"key 1")).await.unwrap(), first);
    let other = node.table.claim(&ticket, claim(&user_data, b"key 2")).await;
    assert_eq!(other, Err(Error::Claim(ClaimRefused::OtherKey)));
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn wrong_used_up_and_late_tickets_are_refused() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start_with(
        &world,
        &dir,
        Fuse::after(None),
        Settings {
            boot_timeout: Duration::from_secs(7200),
            never_started_grace: Duration::from_secs(7200),
            ..settings()
        },
    )
    .await
    .unwrap();
    let a = waiting(&world, &node, "a").await;
    let b = waiting(&world, &node, "b").await;
    let unknown = node.table.claim("00", claim(&a, b"key")).await;
    assert_eq!(unknown, Err(Error::Claim(ClaimRefused::UnknownTicket)));
    // The secret of another sandbox's ticket.
    let wrong = node.table.claim(&a.ticket.id, claim(&b, b"key")).await;
    assert_eq!(wrong, Err(Error::Claim(ClaimRefused::WrongSecret)));
    let no_csr = node.table.claim(&a.ticket.id, claim(&a, b"")).await;
    assert_eq!(no_csr, Err(Error::Claim(ClaimRefused::BadRequest)));
    node.table.claim(&b.ticket.id, claim(&b, b"key")).await.unwrap();
    tokio::time::sleep(settings().ticket_ttl).await;
    let late = node.table.claim(&a.ticket.id, claim(&a, b"key")).await;
    assert_eq!(late, Err(Error::Claim(ClaimRefused::Expired)));
    // A key that was bound in time is never too late.
    node.table.claim(&b.ticket.id, claim(&b, b"key")).await.unwrap();
    node.table.stop(&id("b"), Stop::Called).await.unwrap();
    assert!(node.table.claim(&b.ticket.id, claim(&b, b"key")).await.is_err());
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_dialling_node_gives_the_relay_addresses_and_accepts_only_the_dialled_vms_ticket() {
    let (world, dir) = (World::new(1), Dir::new());
    let dials = Settings { dial: Some(15150), ..settings() };
    let node = Node::start_with(&world, &dir, Fuse::after(None), dials).await.unwrap();
    let user_data = waiting(&world, &node, "a").await;
    let dialled =
        || world.state().relay.get(id("a").as_str()).map(|put| put.dial.clone()).unwrap_or_default();
    node.until("the relay knows where", |_| !dialled().is_empty()).await;
    assert!(dialled().iter().all(|address| address.ends_with(":15150")), "{:?}", dialled());
    let shown_at =
        |sandbox: &str| crate::sandbox::Claim { dialled: sandbox.into(), ..claim(&user_data, b"key") };
    let other = node.table.claim(&user_data.ticket.id, shown_at("b")).await;
    assert_eq!(other, Err(Error::Claim(ClaimRefused::OtherVm)));
    node.table.claim(&user_data.ticket.id, shown_at(id("a").as_str())).await.unwrap();

    // The cloud names another address while the guest is away: the relay dials there first, then at the former ones.
    let before = dialled();
    node.table.moved(&id("a"), vec!["10.99.0.77".parse().unwrap()]);
    node.until("the relay knows where else", |_| dialled() != before).await;
    assert_eq!(dialled()[0], "10.99.0.77:15150");
    assert_eq!(dialled()[1..], before);
    node.kill().await;
}
