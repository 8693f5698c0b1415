//! Tests a plan that changes while the pod runs: the guest adds new parts and removes those of the older plan, and
//! nothing of other programs.

use super::world;

use peerpod_podnet::inspect::inspect;
use peerpod_proto::guest::NetworkPlan;
use world::World;

/// A pod with two interfaces, and the plan for it.
fn two_interfaces(world: &mut World) -> NetworkPlan {
    world.widen();
    let pod = world.bare("pod", &["eth0", "net1"]);
    world.batch(
        "pod",
        "addr add 10.244.1.7/24 dev eth0
        addr add 10.244.1.8/24 dev eth0
        addr add fd10::7/64 dev eth0 nodad
        addr add 10.55.0.2/24 dev net1
        route add default via 10.244.1.1 src 10.244.1.8
        route add 10.9.0.0/16 via 10.55.0.1
        route add 10.8.0.0/16 via 10.55.0.1 table 100
        -6 route add default via fd10::1
        route add blackhole 10.7.0.0/16
        rule add from 10.55.0.2 lookup 100 priority 500
        neigh add 10.244.1.1 lladdr 02:00:00:00:00:01 dev eth0 nud permanent",
        false,
    );
    let set = |file: &str, value: &str| std::fs::write(format!("/proc/sys/net/{file}"), value).unwrap();
    world.within("pod", || {
        set("core/somaxconn", "77");
        set("ipv4/conf/eth0/arp_notify", "1");
    });
    world.plan(&inspect(&pod).unwrap())
}

fn sysctl(world: &World, name: &str, file: &str) -> String {
    world.within(name, || std::fs::read_to_string(format!("/proc/sys/net/{file}")).unwrap().trim().to_owned())
}

fn all(world: &World, name: &str) -> String {
    world.settle(name);
    ["addr", "route show table all", "-6 route show table all", "rule", "-6 rule", "neigh show nud permanent"]
        .map(|what| world.ip(name, what))
        .concat()
}

#[test]
fn dropped_entries_of_the_plan_are_removed_and_foreign_entries_stay() {
    let mut world = World::new();
    let before = two_interfaces(&mut world);
    world.apply_in("podns", &before, None).unwrap();
    assert_eq!(sysctl(&world, "podns", "core/somaxconn"), "77");
    // Additions by a mesh's sidecar, or by the pod itself.
    let theirs = "addr add 192.0.2.9/32 dev eth0
        route add 198.51.100.0/24 via 10.244.1.1
        route add local 0.0.0.0/0 dev lo table 133
        rule add fwmark 0x539 lookup 133 priority 400
        neigh add 10.244.1.99 lladdr 02:00:00:00:00:99 dev eth0 nud permanent";
    world.batch("podns", theirs, false);

    let mut after = before.clone();
    after.interfaces.retain(|i| i.name == "eth0");
    let eth0 = &mut after.interfaces[0];
    // The network's first address is removed. The kernel then also removes the second one, and routes with it as the
    // source.
    eth0.addresses.retain(|a| a.prefix != "10.244.1.7/24" && !a.prefix.starts_with("fd10::7"));
    eth0.routes.retain(|r| r.gateway != "fd10::1" && r.destination != "fd10::/64");
    eth0.routes.iter_mut().filter(|r| r.source == "10.244.1.7").for_each(|r| r.source = "10.244.1.8".into());
    eth0.neighbours.clear();
    eth0.sysctls.clear();
    eth0.mtu = 1400;
    (after.routes, after.rules, after.sysctls) = (Vec::new(), Vec::new(), Vec::new());
    let applied = world.apply_in("podns", &after, Some(&before)).unwrap();
    assert!(applied.changed && applied.mtu == 1400, "{applied:?}");
    let now = all(&world, "podns");
    for gone in [
        "10.244.1.7",
        "fd10::7",
        "fd10::1",
        "net1",
        "10.9.0.0",
        "10.8.0.0",
        "10.7.0.0",
        "10.55.0.2",
        "02:00:00:00:00:01",
    ] {
        assert!(!now.contains(gone), "{gone} still exists: {now}");
    }
    for kept in [
        "10.244.1.8/24",
        "default via 10.244.1.1 dev eth0 src 10.244.1.8",
        "192.0.2.9/32",
        "198.51.100.0/24",
        "local default dev lo table 133",
        "lookup 133",
        "02:00:00:00:00:99",
        "mtu 1400",
    ] {
        assert!(now.contains(kept), "{kept} is gone: {now}");
    }
    assert_ne!(sysctl(&world, "podns", "core/somaxconn"), "77");
    assert_eq!(sysctl(&world, "podns", "ipv4/conf/eth0/arp_notify"), "0");
    assert!(!world.apply_in("podns", &after, Some(&after)).unwrap().changed);

    // Back to the first plan.
    assert!(world.apply_in("podns", &before, Some(&after)).unwrap().changed);
    let now = all(&world, "podns");
    for back in [
        "10.244.1.7/24",
        "fd10::7/64",
        "10.55.0.2/24",
        "10.8.0.0/16 via 10.55.0.1 dev net1 table 100",
        "192.0.2.9/32",
    ] {
        assert!(now.contains(back), "{back} did not come back: {now}");
    }
    assert!(!world.apply_in("podns", &before, Some(&before)).unwrap().changed);
}

#[test]
fn a_failed_change_is_rolled_back() {
    let mut world = World::new();
    let before = two_interfaces(&mut world);
    world.apply_in("podns", &before, None).unwrap();
    let was = all(&world, "podns");
    let mut after = before.clone();
    after.interfaces[0].mtu = 1300;
    after.interfaces[0].addresses[0].prefix = "10.244.1.70/24".into();
    after.interfaces[0].routes[0].source = "203.0.113.9".into(); // no interface has it
    let error = world.apply_in("podns", &after, Some(&before)).unwrap_err().to_string();
    assert!(error.contains("add the route to"), "{error}");
    assert_eq!(all(&world, "podns"), was);
    assert!(!world.apply_in("podns", &before, Some(&before)).unwrap().changed);
}

#[test]
fn a_new_node_address_needs_no_new_device() {
    let mut world = World::new();
    let before = two_interfaces(&mut world);
    world.apply_in("podns", &before, None).unwrap();
    let was = all(&world, "podns");
    world.ip("node", "addr add 10.77.0.9/24 dev ul0");
    world.ip("vm", "addr add 10.77.0.8/24 dev eth0");
    let mut after = before.clone();
    let underlay = after.underlay.mut_or_insert_default();
    (underlay.node_address, underlay.vm_address) = ("10.77.0.9".into(), "10.77.0.8".into());
    assert!(world.apply_in("podns", &after, Some(&before)).unwrap().changed);
    for device in ["eth0", "net1"] {
        let link = world.ip("podns", &format!("-d link show {device}"));
        assert!(link.contains("remote 10.77.0.9 local 10.77.0.8"), "{link}");
    }
    assert_eq!(all(&world, "podns"), was, "nothing else changed, not even an index");
    let peers: Vec<String> = world.tables("vm").iter().map(|p| p.address.to_string()).collect();
    assert_eq!(peers, ["10.77.0.9", "10.77.0.9"], "the old address may not send any more");
}

#[test]
fn an_expired_address_is_not_restored() {
    let mut world = World::new();
    let mut plan = two_interfaces(&mut world);
    plan.interfaces[0].addresses[2].valid = Some(70_000);
    world.apply_in("podns", &plan, None).unwrap();
    assert!(world.ip("podns", "-6 addr").contains("fd10::7/64"));
    world.ip("podns", "addr del fd10::7/64 dev eth0");
    world.apply_in("podns", &plan, Some(&plan)).unwrap();
    assert!(!world.ip("podns", "-6 addr").contains("fd10::7/64"));
    world.apply_in("podns", &plan, None).unwrap();
    assert!(
        world.ip("podns", "-6 addr").contains("fd10::7/64"),
        "a new namespace gets the address that the node inspected"
    );
}
