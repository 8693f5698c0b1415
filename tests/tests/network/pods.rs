//! Tests the pod's network on both sides, for the shape of each CNI: the pod in its VM sees the same network and
//! reaches the same peers as in its namespace on the node. Afterwards nothing is left.

use super::network_common;
use std::net::SocketAddr;

use network_common::{Company, Place, Places, ROOM, Vm};
use peerpod_tests::{beyond_wall, long, nothing_beyond};
use peerpod_world::cni::{self, Attached, Cluster};
use peerpod_world::picture::Picture;
use peerpod_world::spy::Spy;
use peerpod_world::traffic::{self, ECHO_PORT, Echo};
use peerpod_world::{Daemons, Settings, Sight, World};

/// Difference between the overhead of a VXLAN packet over IPv6 and over IPv4, in bytes.
const MORE_OF_V6: u64 = 20;
/// MTU that the encrypted tunnel (VXLAN in WireGuard) leaves of the cloud network's 1500 bytes over IPv6. The node's
/// IPv6 address may be chosen as well as its IPv4 address.
const ENCRYPTED_ROOM: u64 = 1370;
/// Port of the encrypted tunnel.
const WIREGUARD_PORT: u16 = 51820;

/// Tunnel between the pods and their VMs.
struct Scenario {
    settings: Settings,
    /// MTU that the tunnel leaves.
    room: u64,
    is_encrypted: bool,
}

fn plain() -> Scenario {
    Scenario { settings: Settings::none(), room: ROOM, is_encrypted: false }
}

/// Plain tunnel in a cloud with this MTU.
fn over(mtu: u64) -> Scenario {
    Scenario { settings: Settings::none().set("provider.local.mtu", mtu), room: mtu - 50, ..plain() }
}

fn encrypted() -> Scenario {
    let settings = Settings::none().set("tunnel.kind", "wireguard");
    Scenario { settings, room: ENCRYPTED_ROOM, is_encrypted: true }
}

async fn replay(shape: &str) {
    replay_with(shape, plain(), |_| {}).await;
}

/// Replays a shape. `more` changes the pod's network after the CNI.
async fn replay_with(shape: &str, scenario: Scenario, more: impl FnOnce(&Attached)) {
    let Scenario { settings, room, is_encrypted } = scenario;
    let world = World::bare().unwrap();
    let cluster = Cluster::new(&world, cni::shape(shape).unwrap()).unwrap();
    let shape = cluster.shape;
    let settings = settings.set("tunnel.port", shape.port);
    let daemons = Daemons::start(&world, settings).await.unwrap();
    let (pod, near, far) = (cluster.pod(1).unwrap(), cluster.pod(1).unwrap(), cluster.pod(2).unwrap());
    let company = Company {
        cluster: &cluster,
        pod: &pod,
        near: &near,
        far: &far,
        own: &cluster.service(10, &pod).unwrap(),
        others: &cluster.service(11, &near).unwrap(),
    };
    more(&pod);
    // Without VMs first: a failure here concerns the CNI alone.
    let outside = pod.namespace.netns();
    company.converse(company.without_vms()).await.unwrap_or_else(|e| panic!("the shape itself: {e:#}"));

    let node = world.node().netns();
    let spy = Spy::start(world.node(), "pplocal0", &[shape.port, WIREGUARD_PORT]).unwrap();
    let left_by_cni = Picture::of(outside, shape.sysctls).unwrap();
    let node_before = Picture::of(node, &[]).unwrap();
    let before = Sight::of(&world, &[&pod.namespace], &daemons).unwrap();
    let vm = Vm::start(&daemons, shape.name, &pod.namespace.path()).await.unwrap();
    let inside = Picture::of(&vm.inside, shape.sysctls).unwrap();
    let differences = beyond_wall(left_by_cni.differences(&inside, room));
    assert!(differences.is_empty(), "the VM has less (-) or more (+):\n{}", differences.join("\n"));
    let untouched = left_by_cni.differences(&Picture::of(outside, shape.sysctls).unwrap(), u64::MAX);
    assert!(untouched.is_empty(), "the node's half changed:\n{}", untouched.join("\n"));

    let pod_in_vm = Place { netns: &vm.inside, mtu: room.min(shape.mtu) };
    let talked = company.converse(Places { pod: pod_in_vm, ..company.without_vms() }).await;
    talked.unwrap_or_else(|e| panic!("in the VM: {e:#}\n{}", daemons.log_tails()));
    assert!(traffic::tracked(node, traffic::ECHO_PORT).unwrap() > 0, "the node tracks connections");
    assert_eq!(traffic::tracked(node, shape.port).unwrap(), 0, "the tunnel is in the node's conntrack");
    let (plain, sealed) = (spy.packets(shape.port).unwrap(), spy.packets(WIREGUARD_PORT).unwrap());
    let (right, wrong) = if is_encrypted { (sealed, plain) } else { (plain, sealed) };
    assert!(right > 1000 && wrong == 0, "{plain} packets in clear, {sealed} encrypted");

    let log = std::fs::read_to_string(daemons.log("node")).unwrap();
    let changed = log.lines().find(|line| line.contains("the pod's network changed"));
    assert_eq!(changed, None, "nobody changed anything");

    let running = Sight::of(&world, &[&pod.namespace], &daemons).unwrap();
    vm.stop(&daemons).await.unwrap();
    nothing_beyond(&world, &[&pod.namespace], &daemons, &before, &running).await.unwrap();
    let after = left_by_cni.differences(&Picture::of(outside, shape.sysctls).unwrap(), u64::MAX);
    assert!(after.is_empty(), "the pod's namespace is another than before:\n{}", after.join("\n"));
    let after: Vec<String> = node_before.differences(&Picture::of(node, &[]).unwrap(), u64::MAX);
    let after: Vec<_> = after.into_iter().filter(|line| !line.contains("pplocal0")).collect();
    assert!(after.is_empty(), "the node is another than before:\n{}", after.join("\n"));
    // The pod's namespace works again as the CNI made it.
    company.converse(company.without_vms()).await.unwrap_or_else(|e| panic!("afterwards: {e:#}"));
}

/// Puts the pod, its neighbour and the far pod into VMs: each packet between them passes through two tunnels.
async fn between_vms(shape: &str, scenario: Scenario) {
    let Scenario { settings, room, .. } = scenario;
    let (world, away) = (World::bare().unwrap(), World::bare().unwrap());
    let cluster = Cluster::between(&world, &away, cni::shape(shape).unwrap()).unwrap();
    let shape = cluster.shape;
    let settings = settings.set("tunnel.port", shape.port);
    let here = Daemons::start(&world, settings.clone()).await.unwrap();
    let there = Daemons::start(&away, settings).await.unwrap();
    let (pod, near, far) = (cluster.pod(1).unwrap(), cluster.pod(1).unwrap(), cluster.pod(2).unwrap());
    let company = Company {
        cluster: &cluster,
        pod: &pod,
        near: &near,
        far: &far,
        own: &cluster.service(10, &pod).unwrap(),
        others: &cluster.service(11, &near).unwrap(),
    };
    let [pod_at, near_at, far_at] = [&pod, &near, &far].map(|pod| pod.namespace.path());
    let (pod_vm, near_vm, far_vm) = tokio::try_join!(
        Vm::start(&here, shape.name, &pod_at),
        Vm::start(&here, shape.name, &near_at),
        Vm::start(&there, shape.name, &far_at),
    )
    .unwrap_or_else(|e| panic!("{e:#}\n{}", there.log_tails()));
    let mtu = room.min(shape.mtu);
    let [in_pod, in_near, in_far] = [&pod_vm, &near_vm, &far_vm].map(|vm| Place { netns: &vm.inside, mtu });
    let places = Places { pod: in_pod, near: in_near, far: in_far };
    let tails = || format!("{}\non the other node:\n{}", here.log_tails(), there.log_tails());
    company.converse(places).await.unwrap_or_else(|e| panic!("between VMs: {e:#}\n{}", tails()));

    // Long transfers, so that full-sized segments pass through both tunnels.
    let bytes = if long() { 256 << 20 } else { 16 << 20 };
    let vms = [(&pod, &pod_vm), (&near, &near_vm), (&far, &far_vm)];
    let _servers = vms.map(|(pod, vm)| Echo::start(&vm.inside, &pod.primary()).unwrap());
    for (from, vm, to) in [(&pod, &pod_vm, &near), (&pod, &pod_vm, &far), (&far, &far_vm, &pod)] {
        for (source, address) in from.primary().into_iter().zip(to.primary()) {
            let seen = traffic::tcp(&vm.inside, SocketAddr::new(address, ECHO_PORT), bytes).await;
            assert_eq!(seen.unwrap_or_else(|e| panic!("{e:#}\n{}", tails())), source);
        }
    }
    for (vm, daemons) in [(pod_vm, &here), (near_vm, &here), (far_vm, &there)] {
        vm.stop(daemons).await.unwrap();
    }
    company.converse(company.without_vms()).await.unwrap_or_else(|e| panic!("afterwards: {e:#}"));
}

macro_rules! replays {
    ($($test:ident: $shape:literal,)*) => {
        $(#[tokio::test(flavor = "multi_thread")]
        async fn $test() {
            replay($shape).await;
        })*

        #[test]
        fn every_shape_is_replayed() {
            let shapes: Vec<&str> = cni::SHAPES.iter().map(|shape| shape.name).collect();
            assert_eq!(shapes, [$($shape),*]);
        }
    };
}

replays! {
    a_pod_of_the_bridge_plugin_is_the_same_in_its_vm: "bridge",
    a_pod_of_flannel_is_the_same_in_its_vm: "flannel",
    a_pod_of_openshift_sdn_is_the_same_in_its_vm: "openshift-sdn",
    a_pod_of_ovn_kubernetes_is_the_same_in_its_vm: "ovn-kubernetes",
    a_pod_of_multus_with_three_interfaces_is_the_same_in_its_vm: "multus",
    a_pod_of_the_ptp_plugin_is_the_same_in_its_vm: "ptp",
    a_pod_without_ipv4_is_the_same_in_its_vm: "v6-only",
    a_pod_of_calico_with_ipip_is_the_same_in_its_vm: "calico-ipip",
    a_pod_of_calico_with_vxlan_is_the_same_in_its_vm: "calico-vxlan",
    a_pod_of_cilium_is_the_same_in_its_vm: "cilium",
    a_pod_of_aws_is_the_same_in_its_vm: "aws",
    a_pod_of_aws_without_ipv4_is_the_same_in_its_vm: "aws-v6",
    a_pod_of_azure_is_the_same_in_its_vm: "azure",
    a_pod_of_gke_is_the_same_in_its_vm: "gke",
    a_pod_with_everything_at_once_is_the_same_in_its_vm: "everything",
}

/// The kernel does not fragment VXLAN over IPv6, so the CNI's MTU must leave room for it.
#[tokio::test(flavor = "multi_thread")]
async fn a_pod_is_the_same_in_a_vm_that_is_reached_over_ipv6_alone() {
    let settings = Settings::none().set("provider.local.ipv4", false);
    replay_with("calico-vxlan", Scenario { settings, room: ROOM - MORE_OF_V6, ..plain() }, |_| {}).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn jumbo_frames_are_used_whole_where_the_cloud_has_them() {
    replay_with("aws", over(9001), |_| {}).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cloud_with_smaller_packets_than_ethernets_gets_smaller_ones() {
    replay_with("gke", over(1460), |_| {}).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_redirects_as_well_as_a_filter_beside_others() {
    let settings = Settings::none().set("tunnel.redirect", "bpf");
    replay_with("cilium", Scenario { settings, ..plain() }, |_| {}).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_with_a_device_without_offloads_is_the_same_in_its_vm() {
    let off = "ethtool -K eth0 tx off rx off sg off tso off gso off gro off";
    replay_with("ptp", plain(), |pod| drop(pod.namespace.shell(off, &[]).unwrap())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_of_a_bridge_talk_from_vm_to_vm() {
    between_vms("bridge", plain()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn routed_pods_talk_from_vm_to_vm() {
    between_vms("cilium", plain()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_talk_from_vm_to_vm_through_two_encrypted_tunnels() {
    between_vms("ptp", encrypted()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_of_every_shape_talk_from_vm_to_vm() {
    // All shapes take many minutes. The short version runs one that has several interfaces.
    let few: &[_] = &["multus"];
    let all: Vec<&str> = cni::SHAPES.iter().map(|shape| shape.name).collect();
    for shape in if long() { &all[..] } else { few } {
        between_vms(shape, plain()).await;
    }
}

macro_rules! encrypted_replays {
    ($($test:ident: $shape:literal,)*) => {
        $(#[tokio::test(flavor = "multi_thread")]
        async fn $test() {
            replay_with($shape, encrypted(), |_| {}).await;
        })*
    };
}

encrypted_replays! {
    an_encrypted_pod_of_cilium_is_the_same_in_its_vm: "cilium",
    an_encrypted_pod_of_aws_is_the_same_in_its_vm: "aws",
    an_encrypted_pod_of_multus_with_three_interfaces_is_the_same_in_its_vm: "multus",
}

#[tokio::test(flavor = "multi_thread")]
async fn an_encrypted_pod_of_every_shape_is_the_same_in_its_vm() {
    let few: &[_] = &["everything"];
    let all: Vec<&str> = cni::SHAPES.iter().map(|shape| shape.name).collect();
    for shape in if long() { &all[..] } else { few } {
        replay_with(shape, encrypted(), |_| {}).await;
    }
}
