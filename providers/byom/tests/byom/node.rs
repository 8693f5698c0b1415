//! Runs the real peerpod-node with this provider. The tests simulate shims, but no guests: no pod gets ready, but each gets
//! its machine, its address, and its deletion.
//!
//! With `PEERPOD_TEST_LONG` there are more pods and 100 kills.

use std::net::Ipv4Addr;

use peerpod_client::Annotations;
use peerpod_tests::cloud_node::{CloudNode, is_full};
use peerpod_world::{Settings, World};

use super::common::Site;

async fn start(count: u8, more: impl FnOnce(Settings) -> Settings) -> CloudNode<Site> {
    let world = World::bare().unwrap();
    let address = |number: u8| Ipv4Addr::new(10, 77, 0, number + 1);
    let lines: Vec<String> =
        (0..count).map(|number| format!("addr add {}/32 dev lo", address(number))).collect();
    world.node().ip(&(lines.join("\n") + "\n")).unwrap();
    let site = Site::start_at(count, address, Some(&world.node().path()));
    let folder = site.folder().to_owned();
    CloudNode::start(world, site, |settings| more(settings.with_volume(&folder))).await
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_pods_at_once_have_one_machine_each() {
    let count = if is_full() { 100 } else { 50 };
    // As many machines as pods: the last pod finds the last machine.
    let node = start(count, |settings| settings).await;
    let pods = node.pods(count.into());
    let took = node.burst(&pods).await;
    println!("{count} pods: {took:?}");
    assert_eq!(node.site.doubles(), 0);
    node.stop(&pods).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_killed_while_a_machine_answers_has_one_machine_for_each_pod_afterwards() {
    let mut node = start(8, |settings| settings).await;
    node.kill_while_creating(|_| {}).await;
    assert_eq!(node.site.doubles(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_reaches_the_pods_error() {
    let node = start(2, |settings| settings).await;
    let pods = node.pods(2);
    let error = node.refused(&pods[0], Annotations::new("default", "large").size("96", 512)).await;
    assert!(error.contains("no machine of the pool is large enough"), "{error}");
    node.site.machine(0).files().write("claim", b"of somebody else");
    node.site.machine(1).files().write("claim", b"of somebody else");
    let error = node.refused(&pods[1], Annotations::new("default", "one").size("1", 512)).await;
    assert!(error.contains("no machine of the pool is free") && error.contains("it has a pod"), "{error}");
}
