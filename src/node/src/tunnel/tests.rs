//! Tests of the node's tunnels with real namespaces: the properties on which the whole daemon relies.

#[path = "../../../../crates/podnet/tests/podnet/world/mod.rs"]
pub(crate) mod net_world;

use std::net::IpAddr;

use net_world::{World, run};
use peerpod_podnet::nft::Filter;

use super::*;

mod encrypted;
mod faults;
mod leftovers;
mod shapes;

fn open(world: &World) -> Tunnel {
    open_with(world, TunnelConfig::default())
}

fn open_with(world: &World, config: TunnelConfig) -> Tunnel {
    world.within("node", || Tunnel::open(TunnelConfig { owner: world.owner(), ..config })).unwrap()
}

const VM: &str = "10.77.0.2";

/// Looks, reserves and connects.
fn whole(
    tunnel: &Tunnel,
    pod: &Netns,
    sandbox: &str,
    vm: IpAddr,
) -> (PodNetworkState, Reserved, NetworkPlan) {
    let seen = inspect(pod).unwrap();
    let reserved = tunnel.reserve(pod, sandbox, &seen, vm.is_ipv6(), None).unwrap();
    let plan = tunnel.connect(pod, sandbox, &reserved, &seen, vm).unwrap().0;
    (seen, reserved, plan)
}

/// Returns a larger number when there is time for it.
fn times(usually: usize, long: usize) -> usize {
    if std::env::var_os("PEERPOD_TEST_LONG").is_some() { long } else { usually }
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// Whether a namespace has any table of this program, even an empty one, according to `nft`.
fn table(world: &World, name: &str) -> bool {
    world.within(name, || run("nft list tables")).contains("peerpod")
}

#[test]
fn one_sandbox_from_inspection_to_undo() {
    for (v6, vm) in [(false, "10.77.0.2"), (true, "fd77::2")] {
        let mut world = World::new();
        let tunnel = open(&world);
        let pod = world.pod("pod", 7);
        let before = world.traces("pod");
        let seen = inspect(&pod).unwrap();
        let reserved = tunnel.reserve(&pod, "sandbox", &seen, v6, None).unwrap();
        let plan = tunnel.connect(&pod, "sandbox", &reserved, &seen, ip(vm)).unwrap().0;
        assert_eq!(tunnel.reserve(&pod, "sandbox", &seen, v6, Some(&reserved)).unwrap(), reserved);
        assert_eq!(tunnel.connect(&pod, "sandbox", &reserved, &seen, ip(vm)).unwrap().0, plan);
        assert_eq!(plan.underlay.vm_address, vm);
        world.apply(&plan).unwrap();
        world.ping("other", "10.244.1.7", 56);
        world.ping("other", "fd10:244:1::7", 56);
        assert!(table(&world, "node"));
        for _ in 0..2 {
            tunnel.undo("sandbox", Some(&pod), Some(&reserved), Some(ip(vm))).unwrap();
        }
        assert_eq!(world.traces("pod"), before);
        assert!(!table(&world, "node"), "a table is left");
        assert_eq!(world.ip("node", "-o link show type vxlan"), "");
    }
}

#[test]
fn undo_finds_unrecorded_state() {
    let mut world = World::new();
    let tunnel = open(&world);
    let pod = world.pod("pod", 7);
    let before = world.traces("pod");
    let seen = inspect(&pod).unwrap();
    let reserved = tunnel.reserve(&pod, "sandbox", &seen, false, None).unwrap();
    tunnel.connect(&pod, "sandbox", &reserved, &seen, ip("10.77.0.2")).unwrap();
    // The daemon died before it recorded the reservation; the next one knows at most the VM's address.
    drop(tunnel);
    let tunnel = open(&world);
    tunnel.undo("sandbox", Some(&pod), None, Some(ip("10.77.0.2"))).unwrap();
    assert_eq!(world.traces("pod"), before);
    assert!(!table(&world, "node"));
    // No known state at all is fine too.
    tunnel.undo("sandbox", None, None, None).unwrap();
    tunnel.undo("sandbox", None, Some(&reserved), None).unwrap();
}

#[test]
fn the_table_is_removed_with_the_last_sandbox() {
    let mut world = World::new();
    let tunnel = open(&world);
    assert!(!table(&world, "node"), "nothing is made before it is needed");
    let mut pods = Vec::new();
    for number in 1..=3 {
        let pod = world.pod(&format!("pod{number}"), 30 + number);
        let sandbox = format!("sandbox-{number}");
        let seen = inspect(&pod).unwrap();
        let reserved = tunnel.reserve(&pod, &sandbox, &seen, false, None).unwrap();
        let vm = IpAddr::from([10, 77, 0, 100 + number]);
        tunnel.connect(&pod, &sandbox, &reserved, &seen, vm).unwrap();
        pods.push((pod, sandbox, reserved, seen, vm));
    }
    // Another daemon of the same node, as during an upgrade: it knows all of the elements.
    let tunnel = open(&world);
    assert_eq!(world.tables("node").len(), 3);
    let (pod, sandbox, reserved, _, vm) = &pods[0];
    tunnel.undo(sandbox, Some(pod), Some(reserved), Some(*vm)).unwrap();
    assert_eq!(world.tables("node").len(), 2);
    // Another program flushes the node's rules; the next connection restores all of them.
    Filter::of(world.owner(), 4789).delete(&mut world.open("node").netfilter().unwrap()).unwrap();
    let (pod, sandbox, reserved, seen, vm) = &pods[1];
    tunnel.connect(pod, sandbox, reserved, seen, *vm).unwrap();
    assert_eq!(world.tables("node").len(), 2);
    // Only one of the two is live: the other one went unobserved, and the rules are flushed.
    Filter::of(world.owner(), 4789).delete(&mut world.open("node").netfilter().unwrap()).unwrap();
    let live = Live {
        sandbox: sandbox.clone(),
        netns: Some((pod.path().to_owned(), pod.id())),
        reserved: Some(reserved.clone()),
        vm: Some(*vm),
    };
    let done = tunnel.reconcile(&[live]);
    assert!(done.errors.is_empty(), "{done:?}");
    assert_eq!(world.tables("node").len(), 1);
    assert_eq!(tunnel.reconcile(&[]).elements, 1);
    assert!(!table(&world, "node"));
}

#[test]
fn two_daemons_on_two_nodes_do_not_see_each_other() {
    let (mut one, mut two) = (World::new(), World::new());
    let (first, second) = (open(&one), open(&two));
    let (a, b) = (one.pod("pod", 7), two.pod("pod", 7));
    let seen = inspect(&a).unwrap();
    let device = Device { interface: seen.primary().index, slot: 0, vni: 4242, ifindex: 0, shared: false };
    let wanted = Reserved { kind: TunnelKind::Vxlan, v6: false, port: 4789, devices: vec![device] };
    let ra = first.reserve(&a, "sandbox", &seen, false, Some(&wanted)).unwrap();
    let rb = second.reserve(&b, "sandbox", &seen, false, Some(&wanted)).unwrap();
    assert_eq!((ra.vni(), rb.vni()), (Some(4242), Some(4242)), "each node has its own numbers");
    first.connect(&a, "sandbox", &ra, &seen, ip("10.77.0.2")).unwrap();
    assert!(table(&one, "node") && !table(&two, "node"));
    first.undo("sandbox", Some(&a), Some(&ra), Some(ip("10.77.0.2"))).unwrap();
    second.undo("sandbox", Some(&b), Some(&rb), None).unwrap();
}

#[test]
fn an_unreachable_vm_is_reported() {
    let mut world = World::new();
    let tunnel = open(&world);
    let pod = world.pod("pod", 7);
    let seen = inspect(&pod).unwrap();
    let reserved = tunnel.reserve(&pod, "sandbox", &seen, false, None).unwrap();
    for (vm, why) in [
        ("192.0.2.1", "no route"),
        ("10.77.0.1", "this machine itself"),
        ("fd77::2", "IPv4"),
        ("127.0.0.1", "no address of another machine"),
    ] {
        let error = tunnel.connect(&pod, "sandbox", &reserved, &seen, ip(vm)).unwrap_err().to_string();
        assert!(error.contains(why) && error.contains(vm), "{error}");
    }
    assert!(!table(&world, "node"));
}

#[test]
fn a_hundred_pods_leave_nothing() {
    let mut world = World::new();
    let tunnel = open(&world);
    let mut all = Vec::new();
    for number in 1..=100_u8 {
        let pod = world.pod(&format!("p{number}"), 30 + number);
        let sandbox = format!("sandbox-{number}");
        let seen = inspect(&pod).unwrap();
        let reserved = tunnel.reserve(&pod, &sandbox, &seen, false, None).unwrap();
        tunnel.connect(&pod, &sandbox, &reserved, &seen, IpAddr::from([10, 77, 0, 100 + number])).unwrap();
        all.push((pod, sandbox, reserved));
    }
    for (pod, sandbox, reserved) in &all {
        tunnel.undo(sandbox, Some(pod), Some(reserved), None).unwrap();
    }
    assert!(!table(&world, "node"));
    assert_eq!(run(&format!("ip -n {} -o link show type vxlan", world.name("p1"))), "");
}
