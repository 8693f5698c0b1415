//! Tests how a sandbox follows changes around a running pod's network, and the reports of its guest.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::node::*;
use super::world::*;

const MOVED: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 99, 0, 8));

fn change(world: &World, name: &str) {
    *world.network.lock().unwrap() = name.into();
    world.noise.send_modify(|heard| *heard += 1);
}

/// Waits until a further inspection has run and its result is applied.
async fn settled(node: &Node, world: &World) {
    let looks = world.looks();
    world.noise.send_modify(|heard| *heard += 1);
    node.until("looked", |_| world.looks() > looks).await;
    tokio::time::sleep(Duration::from_secs(30)).await;
}

#[tokio::test(start_paused = true)]
async fn a_change_is_sent_once_and_noise_is_not() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    node.run("a").await;
    settled(&node, &world).await;
    assert_eq!(world.greetings(), 1, "nothing was new");
    change(&world, "eth1");
    node.until("told", |_| world.greetings() == 2).await;
    settled(&node, &world).await;
    assert_eq!(world.greetings(), 2);
    assert_eq!(node.metrics.guests.network_changes.get(), 1);
    // The next node process has the digest of the guest's plan.
    node.kill().await;
    let node = Node::start(&world, &dir).await;
    settled(&node, &world).await;
    assert_eq!(world.greetings(), 2);
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn changes_during_a_node_outage_are_followed() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    node.run("a").await;
    node.kill().await;
    *world.network.lock().unwrap() = "eth1".into();
    let node = Node::start(&world, &dir).await;
    node.until("told", |_| world.greetings() == 2).await;
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_plan_that_the_guest_refuses_is_not_repeated_and_costs_nothing() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    node.run("a").await;
    *world.guest_error.lock().unwrap() = "no such table".into();
    change(&world, "eth1");
    node.until("told", |_| world.greetings() == 2).await;
    settled(&node, &world).await;
    assert_eq!((world.greetings(), node.phase("a").as_str()), (2, "running"));
    world.guest_error.lock().unwrap().clear();
    change(&world, "eth2");
    node.until("told", |_| world.greetings() == 3).await;
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_tunnel_follows_a_new_address_of_its_vm() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    node.run("a").await;
    // Neither the cloud nor the guest confirms that the address is the VM's: a NAT.
    node.fx.comes_from("a", MOVED);
    settled(&node, &world).await;
    assert_eq!((world.greetings(), world.tunnel_to("a")), (1, Some("10.99.0.7".into())));

    node.fx.comes_from("a", IpAddr::V4(Ipv4Addr::new(10, 99, 0, 7)));
    node.fx.comes_from("a", IpAddr::V4(Ipv4Addr::new(10, 99, 0, 9)));
    *world.addresses.lock().unwrap() = vec![IpAddr::V4(Ipv4Addr::new(10, 99, 0, 9))];
    node.until("told", |_| world.greetings() == 2).await;
    assert_eq!(world.tunnel_to("a"), Some("10.99.0.9".into()));
    node.kill().await;
    let node = Node::start(&world, &dir).await;
    settled(&node, &world).await;
    assert_eq!((world.greetings(), world.tunnel_to("a")), (2, Some("10.99.0.9".into())));
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn an_address_reported_by_the_guest_needs_no_confirmation_by_the_cloud() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    node.run("a").await;
    // The guest reports this address as its own, but it lies on another path: in the pod's own network, for example.
    let pod = IpAddr::V4(Ipv4Addr::new(10, 244, 1, 7));
    node.fx.has_address("a", pod);
    node.fx.comes_from("a", pod);
    settled(&node, &world).await;
    assert_eq!((world.greetings(), world.tunnel_to("a")), (1, Some("10.99.0.7".into())));
    node.fx.has_address("a", MOVED);
    node.fx.comes_from("a", MOVED);
    node.until("told", |_| world.greetings() == 2).await;
    assert_eq!(world.tunnel_to("a"), Some(MOVED.to_string()));
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_vm_without_a_known_address_has_the_one_that_the_link_saw() {
    let (world, dir) = (World::new(1), Dir::new());
    world.hides_addresses.store(true, Ordering::Relaxed);
    let node = Node::start(&world, &dir).await;
    node.create("a").await.unwrap();
    node.until("made", |node| node.phase("a") == "joining").await;
    node.fx.link("a", "i-1");
    node.fx.comes_from("a", MOVED);
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert_eq!(
        (node.phase("a").as_str(), world.tunnel_to("a")),
        ("joining", None),
        "it may be the address of a NAT"
    );
    node.fx.has_address("a", MOVED);
    node.table.start(&id("a")).await.unwrap();
    assert_eq!(world.tunnel_to("a"), Some(MOVED.to_string()));
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_new_node_address_is_sent_to_the_guests() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    node.run("a").await;
    let node_endpoints = |address: &str| Some(std::sync::Arc::new(vec![address.to_owned()]));
    world.node_endpoints.send_replace(node_endpoints("10.0.0.8:15151"));
    node.until("told", |_| world.greetings() == 2).await;
    world.node_endpoints.send_replace(node_endpoints("10.0.0.9:15151"));
    node.until("told", |_| world.greetings() == 3).await;
    // The next node process has no endpoints at first, and sends nothing because of that.
    node.kill().await;
    world.node_endpoints.send_replace(None);
    let node = Node::start(&world, &dir).await;
    settled(&node, &world).await;
    assert_eq!(world.greetings(), 3);
    world.node_endpoints.send_replace(node_endpoints("10.0.0.9:15151"));
    settled(&node, &world).await;
    assert_eq!(world.greetings(), 3);
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn traffic_obstacles_are_reported_once() {
    let (world, dir) = (World::new(1), Dir::new());
    *world.obstacles.lock().unwrap() = vec!["foreign filter".into()];
    let node = Node::start(&world, &dir).await;
    node.run("a").await;
    settled(&node, &world).await;
    settled(&node, &world).await;
    assert_eq!((node.metrics.guests.obstacles.get(), node.phase("a").as_str()), (1, "running"));
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn a_narrow_path_is_counted_once_and_guest_reports_are_bounded() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    node.run("a").await;
    node.fx.finds_path("a", 1500, 1450);
    node.until("heard", |node| node.metrics.guests.paths.get("as_planned") == 1).await;
    node.fx.finds_path("a", 1400, 1350);
    node.until("heard", |node| node.metrics.guests.paths.get("narrow") == 1).await;
    settled(&node, &world).await;
    assert_eq!(
        (node.metrics.guests.paths.get("as_planned"), node.metrics.guests.paths.get("narrow")),
        (1, 1)
    );
    for n in 0..1000 {
        node.fx.finds_path("a", 1500 - n % 2, 1450 - n % 2);
        tokio::task::yield_now().await;
    }
    settled(&node, &world).await;
    assert!(node.metrics.guests.paths.get("narrow") < 100, "{}", node.metrics.guests.paths.get("narrow"));
    node.kill().await;
}

/// Checks the Event, the count and the bound of a notice that only the VM gets.
#[tokio::test(start_paused = true)]
async fn a_guest_reports_once_that_the_cloud_takes_its_vm_back() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    node.run("a").await;
    node.run("b").await;
    let counted = |node: &Node| node.metrics.sandboxes.notices.get("interruption");
    let events = || {
        let said = world.state().said.clone();
        let texts = said.into_iter().filter(|(_, reason, _)| *reason == "VMInterruption");
        texts.map(|(pod, _, text)| (pod, text)).collect::<Vec<_>>()
    };
    node.fx.is_reclaimed("a", 0);
    settled(&node, &world).await;
    assert_eq!((counted(&node), events().len()), (0, 0), "no notice");
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let now = u64::try_from(now.as_millis()).unwrap();
    node.fx.is_reclaimed("a", now + 3_600_000);
    node.until("told", |node| counted(node) == 1).await;
    for other in [u64::MAX, 1, now] {
        node.fx.is_reclaimed("a", other);
        settled(&node, &world).await;
    }
    let told = events();
    let [(pod, text)] = &told[..] else { panic!("{told:?}") };
    assert_eq!((counted(&node), pod.as_str()), (1, "default/pod-a"));
    assert!(text.contains("the cloud reclaims this pod's VM i-") && text.contains(" in 3"), "{text}");
    // The guest of another sandbox may lie about the time.
    node.fx.is_reclaimed("b", u64::MAX);
    node.until("told", |node| counted(node) == 2).await;
    assert_eq!((node.phase("a").as_str(), node.phase("b").as_str()), ("running", "running"));
    node.kill().await;
}

#[tokio::test(start_paused = true)]
async fn the_progress_of_a_long_pull_is_posted_and_bounded() {
    let (world, dir) = (World::new(1), Dir::new());
    let node = Node::start(&world, &dir).await;
    node.run("a").await;
    let texts = || {
        let progress = world.state().progress.clone();
        let pulls = progress.into_iter().filter(|(_, reason, _)| *reason == "PullingImage");
        pulls.map(|(_, _, text)| text).collect::<Vec<_>>()
    };
    node.fx.pulls("a", "r.example/a:1", Some(30));
    settled(&node, &world).await;
    assert_eq!(texts(), ["The VM pulls image r.example/a:1: 30 of 300 MiB after 20 s, 1.5 MiB/s"]);
    // The same pull in another report, and its end.
    node.fx.pulls("a", "r.example/a:1", Some(30));
    settled(&node, &world).await;
    node.fx.pulls("a", "r.example/a:1", None);
    settled(&node, &world).await;
    assert_eq!(texts().len(), 1);
    // A hostile guest reports ever more.
    for mib in 0..100 {
        node.fx.pulls("a", "\n", Some(mib));
        settled(&node, &world).await;
    }
    assert_eq!(texts().len(), 64);
    assert!(texts().iter().all(|text| !text.contains('\n')), "{:?}", texts());
    node.kill().await;
}
