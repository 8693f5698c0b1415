//! The pod's network on both sides, for the shape that each CNI leaves: the pod in its VM looks the same, and holds the
//! same conversations as it did in its namespace on the node; afterwards nothing is left.

#![allow(clippy::unwrap_used)] // test code outside of test functions

mod network_common;

use network_common::{Company, ROOM, Vm};
use peerpod_tests::nothing_beyond;
use peerpod_world::{
    Daemons, Settings, Sight, World,
    cni::{self, Cluster},
    picture::Picture,
    traffic,
};

async fn replay(shape: &str) {
    replay_with(shape, Settings::none(), ROOM).await;
}

/// With more settings; `room` is what the tunnel leaves of the cloud network's packets.
async fn replay_with(shape: &str, settings: Settings, room: u64) {
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
    // The CNI's work alone: what fails here is not about VMs.
    let outside = pod.namespace.netns();
    company.converse(outside, shape.mtu).await.unwrap_or_else(|e| panic!("the shape itself: {e:#}"));

    let node = world.node().netns();
    let left_by_cni = Picture::of(outside, shape.sysctls).unwrap();
    let node_before = Picture::of(node, &[]).unwrap();
    let before = Sight::of(&world, &[&pod.namespace], &daemons).unwrap();
    let vm = Vm::start(&daemons, shape.name, &pod.namespace.path()).await.unwrap();
    let inside = Picture::of(&vm.inside, shape.sysctls).unwrap();
    let differences = left_by_cni.differences(&inside, room);
    assert!(differences.is_empty(), "the VM has less (-) or more (+):\n{}", differences.join("\n"));
    let untouched = left_by_cni.differences(&Picture::of(outside, shape.sysctls).unwrap(), u64::MAX);
    assert!(untouched.is_empty(), "the node's half changed:\n{}", untouched.join("\n"));

    let talked = company.converse(&vm.inside, room.min(shape.mtu)).await;
    talked.unwrap_or_else(|e| panic!("in the VM: {e:#}\n{}", daemons.log_tails()));
    assert!(traffic::tracked(node, traffic::ECHO_PORT).unwrap() > 0, "the node tracks connections");
    assert_eq!(traffic::tracked(node, shape.port).unwrap(), 0, "the tunnel is in the node's conntrack");

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
    // The pod's namespace serves again as the CNI made it.
    company.converse(outside, shape.mtu).await.unwrap_or_else(|e| panic!("afterwards: {e:#}"));
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
    a_pod_of_azure_is_the_same_in_its_vm: "azure",
    a_pod_of_gke_is_the_same_in_its_vm: "gke",
    a_pod_with_everything_at_once_is_the_same_in_its_vm: "everything",
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_redirects_as_well_as_a_filter_beside_others() {
    replay_with("cilium", Settings::none().set("tunnel.redirect", "bpf"), ROOM).await;
}
