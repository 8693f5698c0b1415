//! Tests the underlay between node and VM: the pod uses its MTU to the byte, over IPv4 and over IPv6 alone.

use super::network_common;
use network_common::Vm;
use peerpod_tests::{PATIENCE, vm};
use peerpod_world::{Daemons, Settings, World, eventually, traffic};

/// Checks that an underlay with MTU `mtu` leaves `room` bytes for a pod's packet: such a packet passes, and one with
/// one byte more does not. No packet is fragmented on the way.
async fn carries(mtu: u32, ipv4: bool, room: u64) {
    let world = World::new().unwrap();
    let settings = Settings::none().set("provider.local.mtu", mtu).set("provider.local.ipv4", ipv4);
    let daemons = Daemons::start(&world, settings).await.unwrap();
    // The pods' own network has a larger MTU than all of these.
    let (pod, other) = (world.pod_with_mtu(9216).unwrap(), world.pod_with_mtu(9216).unwrap());
    let sandbox = Vm::start(&daemons, "whole", &pod.namespace().path()).await.unwrap();
    let outside = vm::network(&world, &daemons).unwrap();
    // The guest probes the path beside the pod's start. The result must not change a correct MTU.
    let probed = format!("probed={mtu}");
    let tried =
        eventually(&probed, PATIENCE, async || vm::consoles(&daemons).contains(&probed).then_some(()));
    tried.await.unwrap_or_else(|error| panic!("{error}\n{}", vm::consoles(&daemons)));
    let shown = vm::run(&sandbox.inside, "ip -o link show dev eth0").unwrap();
    assert!(shown.contains(&format!(" mtu {room} ")), "{shown}");

    let cut = || vm::fragments(world.node().netns()).unwrap() + vm::fragments(&outside).unwrap();
    let before = cut();
    let beside = other.namespace().netns();
    for (to, own) in other.addresses().into_iter().zip(pod.addresses()) {
        traffic::ping_whole(&sandbox.inside, to, room).await.unwrap();
        traffic::ping_whole(beside, own, room).await.unwrap();
        assert!(
            traffic::is_too_large(&sandbox.inside, to, room + 1).await.unwrap(),
            "{} bytes to {to}",
            room + 1
        );
    }
    assert_eq!(cut(), before, "whole packets were cut on the way");
    let _echoes = [
        traffic::Echo::start(&sandbox.inside, &pod.addresses()).unwrap(),
        traffic::Echo::start(beside, &other.addresses()).unwrap(),
    ];
    for (to, own) in other.addresses().into_iter().zip(pod.addresses()) {
        let at = |address| std::net::SocketAddr::new(address, traffic::ECHO_PORT);
        assert_eq!(traffic::tcp(&sandbox.inside, at(to), 1 << 20).await.unwrap(), own);
        assert_eq!(traffic::tcp(beside, at(own), 1 << 20).await.unwrap(), to);
    }
    sandbox.stop(&daemons).await.unwrap();
}

macro_rules! underlays {
    ($($test:ident: $mtu:literal, $ipv4:literal, $room:literal,)*) => {
        $(#[tokio::test(flavor = "multi_thread")]
        async fn $test() {
            carries($mtu, $ipv4, $room).await;
        })*
    };
}

underlays! {
    jumbo_frames_leave_a_pod_8951_bytes: 9001, true, 8951,
    jumbo_frames_over_ipv6_leave_a_pod_8931_bytes: 9001, false, 8931,
    packets_of_1460_bytes_leave_a_pod_1410: 1460, true, 1410,
    packets_of_1460_bytes_over_ipv6_leave_a_pod_1390: 1460, false, 1390,
    an_ethernet_over_ipv6_leaves_a_pod_1430_bytes: 1500, false, 1430,
}
