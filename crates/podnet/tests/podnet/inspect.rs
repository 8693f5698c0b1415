//! Tests the inspection of a pod's network against the state that `ip` made.

use super::world;
use std::net::IpAddr;

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::route::RouteMessage;
use peerpod_podnet::inspect::{Neighbour, PodNetworkState, Route, inspect};
use peerpod_podnet::{Error, netlink};
use world::{World, run};

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn find(seen: &PodNetworkState, destination: &str, prefix: u8) -> Route {
    let wanted = ip(destination);
    let found = seen.primary().routes.iter().find(|r| r.destination == wanted && r.prefix == prefix);
    found.cloned().unwrap_or_else(|| panic!("no route to {destination}/{prefix} in {seen:?}"))
}

#[test]
fn inspect_returns_everything_of_the_pods_interface() {
    let mut world = World::new();
    let pod = world.pod("pod", 7);
    world.ip("pod", "addr add 10.244.1.77/32 dev eth0");
    world.ip("pod", "route add 10.1.0.0/16 via 10.244.1.1 metric 42 src 10.244.1.77 proto 77");
    world.ip("pod", "route add 10.2.0.0/16 via 192.0.2.1 dev eth0 onlink mtu 1300");
    world.ip("pod", "route add 169.254.1.1/32 dev eth0 scope link");
    world.ip("pod", "route add 10.3.0.0/16 via inet6 fd10:244:1::1 dev eth0");
    world.ip("pod", "route add fd55::/48 via fd10:244:1::1 metric 7");
    world.ip("pod", "neigh add 169.254.1.1 lladdr ee:ee:ee:ee:ee:ee dev eth0 nud permanent");
    world.ip("pod", "neigh add fd10:244:1::99 lladdr 02:00:00:00:00:99 dev eth0 nud permanent");
    world.ip("pod", "neigh add 10.244.1.98 lladdr 02:00:00:00:00:98 dev eth0 nud stale");
    let seen = inspect(&pod).unwrap();
    assert_eq!(seen.left_out, [""; 0]);
    let interface = seen.primary();
    assert_eq!((interface.name.as_str(), interface.mtu), ("eth0", 1450));
    assert!(world.ip("pod", "link show eth0").contains(&interface.mac));
    let addresses: Vec<(IpAddr, u8)> = interface.addresses.iter().map(|a| (a.address, a.prefix)).collect();
    for wanted in [("10.244.1.7", 24), ("10.244.1.77", 32), ("fd10:244:1::7", 64)] {
        assert!(addresses.contains(&(ip(wanted.0), wanted.1)), "{addresses:?}");
    }
    assert!(addresses.iter().any(|(a, _)| matches!(a, IpAddr::V6(a) if a.is_unicast_link_local())));
    assert_eq!(find(&seen, "0.0.0.0", 0).gateway, Some(ip("10.244.1.1")));
    assert_eq!(find(&seen, "::", 0).gateway, Some(ip("fd10:244:1::1")));
    let static_one = find(&seen, "10.1.0.0", 16);
    assert_eq!(
        (static_one.metric, static_one.source, static_one.protocol),
        (42, Some(ip("10.244.1.77")), 77)
    );
    let onlink = find(&seen, "10.2.0.0", 16);
    assert!(onlink.onlink && onlink.mtu == 1300, "{onlink:?}");
    let link = find(&seen, "169.254.1.1", 32);
    assert_eq!((link.gateway, link.scope), (None, 253));
    assert_eq!(find(&seen, "10.3.0.0", 16).gateway, Some(ip("fd10:244:1::1")));
    assert_eq!(find(&seen, "fd55::", 48).metric, 7);
    assert_eq!(find(&seen, "10.244.1.0", 24).protocol, 2);
    let neighbours = [("169.254.1.1", "ee:ee:ee:ee:ee:ee"), ("fd10:244:1::99", "02:00:00:00:00:99")]
        .map(|(address, mac)| Neighbour::new(ip(address), mac.to_owned()));
    assert!(neighbours.iter().all(|n| interface.neighbours.contains(n)), "{:?}", interface.neighbours);
    assert_eq!(interface.neighbours.len(), 2);
    // The state survives the ledger's encoding.
    let text = serde_json::to_string(&seen).unwrap();
    assert_eq!(serde_json::from_str::<PodNetworkState>(&text).unwrap(), seen);
}

#[test]
fn the_primary_interface_is_that_of_the_best_default_route_and_the_others_follow() {
    let mut world = World::new();
    let pod = world.pod("pod", 7);
    world.attach("pod", "net1", "10.55.0.2/24");
    world.ip("pod", "route add default via 10.55.0.1 dev net1 metric 100");
    world.ip("pod", "rule add from 10.55.0.2 lookup 100");
    let seen = inspect(&pod).unwrap();
    let names = |seen: &PodNetworkState| seen.interfaces.iter().map(|i| i.name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&seen), ["eth0", "net1"], "metric 0 is better");
    assert!(seen.primary().routes.iter().all(|r| r.destination != ip("10.55.0.0")));
    assert!(seen.interfaces[1].routes.iter().any(|r| r.destination == ip("10.55.0.0")));
    assert_eq!(seen.rules.len(), 1);
    assert_eq!(seen.left_out, [""; 0]);
    world.ip("pod", "route del default via 10.244.1.1");
    assert_eq!(names(&inspect(&pod).unwrap()), ["net1", "eth0"]);
    // This program's own device is not part of the pod.
    world.reserve(&pod, "sandbox", world::SHAPE4, None).unwrap();
    assert_eq!(names(&inspect(&pod).unwrap()), ["net1", "eth0"]);
}

#[test]
fn an_unsupported_interface_is_named_with_its_routes() {
    let mut world = World::new();
    let pod = world.pod("pod", 7);
    // A bridge of the pod's own with a port, and a tunnel without Ethernet addresses.
    world.attach("pod", "net1", "10.55.0.2/24");
    world.ip("pod", "link add br0 type bridge");
    world.ip("pod", "link set net1 master br0");
    world.ip("pod", "route add 10.77.0.0/16 via 10.55.0.1");
    world.ip("pod", "link add mac0 link eth0 type macvlan");
    world.ip("pod", "link set mac0 up");
    let seen = inspect(&pod).unwrap();
    assert_eq!(seen.interfaces.len(), 1, "{seen:?}");
    let left_out = seen.left_out.join("; ");
    for named in
        ["net1, which is a port of br0", "mac0, which lies on eth0", "10.77.0.0/16 through interface net1"]
    {
        assert!(left_out.contains(named), "{named}: {left_out}");
    }
}

#[test]
fn a_pod_of_one_family_or_without_a_default_route_is_inspected() {
    let mut world = World::new();
    let six = world.pod("six", 7);
    world.ip("six", "-4 addr flush dev eth0");
    let seen = inspect(&six).unwrap();
    assert!(seen.primary().addresses.iter().all(|a| a.address.is_ipv6()));
    assert!(seen.primary().routes.iter().all(|r| r.destination.is_ipv6()));
    let lone = world.pod("lone", 8);
    world.ip("lone", "route del default");
    world.ip("lone", "-6 route del default");
    assert_eq!(inspect(&lone).unwrap().primary().name, "eth0");
    let empty = world.empty("empty");
    let error = inspect(&empty).unwrap_err().to_string();
    assert!(error.contains("no interface but lo"), "{error}");
}

#[test]
fn an_unsupported_entry_is_an_error_that_names_it() {
    let mut world = World::new();
    let pod = world.pod("pod", 7);
    world.ip("pod", "-6 route add fd77::/64 encap seg6 mode encap segs fd00::1 dev eth0");
    let error = inspect(&pod).unwrap_err();
    assert!(matches!(error, Error::CannotCarry(_)) && error.to_string().contains("fd77::/64"), "{error}");
    world.ip("pod", "-6 route del fd77::/64");
    inspect(&pod).unwrap();
}

#[test]
fn a_thousand_routes_are_accepted_and_too_many_are_refused() {
    let mut world = World::new();
    let pod = world.pod("pod", 7);
    let batch = |from: u32, to: u32| {
        let lines: String = (from..to)
            .map(|n| format!("route add 10.{}.{}.0/24 via 10.244.1.1\n", 100 + (n >> 8), n & 255))
            .collect();
        let file = std::env::temp_dir().join(format!("{}-routes", world.name("pod")));
        std::fs::write(&file, lines).unwrap();
        run(&format!("ip -n {} -batch {}", world.name("pod"), file.display()));
        std::fs::remove_file(file).unwrap();
    };
    batch(0, 1000);
    assert!(inspect(&pod).unwrap().primary().routes.len() >= 1000);
    batch(1000, 5000);
    let error = inspect(&pod).unwrap_err();
    assert!(matches!(error, Error::TooMany("routes", _)), "{error}");
}

#[test]
fn a_thousand_routes_reach_the_vm() {
    let mut world = World::new();
    let pod = world.pod("pod", 7);
    let lines: String = (0..1000)
        .map(|n| format!("route add 10.{}.{}.0/24 via 10.244.1.1\n", 100 + (n >> 8), n & 255))
        .collect();
    let file = std::env::temp_dir().join(format!("{}-routes", world.name("pod")));
    std::fs::write(&file, lines).unwrap();
    run(&format!("ip -n {} -batch {}", world.name("pod"), file.display()));
    std::fs::remove_file(file).unwrap();
    let seen = inspect(&pod).unwrap();
    let held = world.reserve(&pod, "sandbox", world::SHAPE4, None).unwrap();
    let plan = world.connect(&pod, held, world::SHAPE4, &seen).unwrap();
    assert!(world.apply(&plan).unwrap().changed);
    assert!(!world.apply(&plan).unwrap().changed);
    assert!(world.ip("podns", "route show").lines().count() >= 1000);
}

#[test]
fn a_socket_is_usable_after_a_dump_that_was_too_long() {
    let mut world = World::new();
    world.pod("pod", 7);
    let lines: String = (0..3000)
        .map(|n| format!("route add 10.{}.{}.0/24 via 10.244.1.1\n", 100 + (n >> 8), n & 255))
        .collect();
    world.batch("pod", &lines, false);
    let mut client = world.open("pod").netlink().unwrap();
    let request = RouteNetlinkMessage::GetRoute(RouteMessage::default());
    for limit in [10, 1000, 5] {
        let error = client.dump(&request, limit, Some).unwrap_err();
        assert!(matches!(error, netlink::Error::TooMany(_)), "{error}");
    }
    assert!(client.dump(&request, 4096, Some).unwrap().len() > 3000);
}
