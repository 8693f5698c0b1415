//! Tests the external network through the VM in real namespaces: source addresses, unreachable destinations, and the
//! state that remains.

use super::world;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use peerpod_podnet::drift::drift;
use peerpod_podnet::{external, guest};
use peerpod_proto::guest as wire;
use world::{SHAPE4, World};

const DEADLINE: Duration = Duration::from_secs(10);
const METADATA: &str = "169.254.169.254";

/// The node is also the cloud's gateway. Behind it is the internet, with routes back to VMs and pods.
fn world() -> World {
    let mut world = World::new();
    world.empty("internet");
    let internet = world.name("internet");
    world.ip("node", &format!("link add inet0 type veth peer name eth0 netns {internet}"));
    for (ns, device, end) in [("node", "inet0", 1), ("internet", "eth0", 2)] {
        world.ip(ns, &format!("addr add 203.0.113.{end}/24 dev {device}"));
        world.ip(ns, &format!("addr add 2001:db8::{end}/64 dev {device} nodad"));
        world.ip(ns, &format!("link set {device} up"));
    }
    world.ip("internet", "route add default via 203.0.113.1");
    world.ip("internet", "route add default via 2001:db8::1");
    world.ip("vm", "route add default via 10.77.0.1");
    world.ip("vm", "route add default via fd77::1");
    // The cloud's own services, and a machine beside the VM: other addresses of the node's namespace stand for both.
    world.ip("node", &format!("addr add {METADATA}/32 dev ul0"));
    world.ip("node", "addr add fd00:ec2::254/128 dev ul0 nodad");
    world.ip("node", "addr add 10.77.0.9/32 dev ul0");
    for (name, value) in [("ipv4/ip_forward", "1"), ("ipv6/conf/all/forwarding", "1")] {
        world.within("node", || std::fs::write(format!("/proc/sys/net/{name}"), value).unwrap());
    }
    world
}

/// Returns the client address that a server at `address` in `at` sees for a connection from `from`; `None` if the
/// connection fails.
fn seen_by(world: &World, at: &str, from: &str, address: &str) -> Option<IpAddr> {
    let address: SocketAddr = address.parse().unwrap();
    let listener = world.within(at, || TcpListener::bind(address).unwrap());
    let port = listener.local_addr().unwrap().port();
    let address = SocketAddr::new(address.ip(), port);
    let mut stream =
        world.within(from, || TcpStream::connect_timeout(&address, Duration::from_secs(3))).ok()?;
    let (mut accepted, peer) = listener.accept().unwrap();
    for stream in [&stream, &accepted] {
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
    }
    stream.write_all(&[1; 100_000]).unwrap();
    let mut got = vec![0; 100_000];
    accepted.read_exact(&mut got).unwrap();
    accepted.write_all(b"answer").unwrap();
    stream.read_exact(&mut got[..6]).unwrap();
    Some(peer.ip().to_canonical())
}

fn wanted(allow: &[&str]) -> wire::External {
    wire::External {
        way: "vm".into(),
        cluster_cidrs: ["10.244.0.0/16", "fd10:244::/32"].map(str::to_owned).into(),
        node_addresses: ["10.77.0.1", "fd77::1"].map(str::to_owned).into(),
        allow: allow.iter().map(|text| (*text).to_owned()).collect(),
        ..Default::default()
    }
}

/// Does the guest's steps: the egress path, then the tunnel without the default routes that left it.
fn leave_by_vm(world: &mut World, plan: &wire::NetworkPlan, allow: &[&str]) -> external::Applied {
    let mut plan = plan.clone();
    plan.external = Some(wanted(allow)).into();
    let external = external::read(&plan).unwrap().unwrap();
    let podns = world.path("podns");
    let previous = plan.clone();
    external::split(&mut plan, &external, |_| true);
    world.within("vm", || {
        guest::apply(&plan, Some(&previous), &podns).unwrap();
        external::apply(&external, &podns).unwrap()
    })
}

fn ip(text: &str) -> Option<IpAddr> {
    Some(text.parse().unwrap())
}

#[test]
fn egress_has_the_vms_address_and_cluster_traffic_uses_the_tunnel() {
    let mut world = world();
    let (_pod, _seen, _held, plan) = world.whole(SHAPE4);
    let applied = leave_by_vm(&mut world, &plan, &[]);
    assert_eq!((applied.v4, applied.v6, applied.uplinks), (true, true, vec!["eth0".to_owned()]));
    for (at, address, source) in [
        ("internet", "203.0.113.2:0", "10.77.0.2"),
        ("internet", "[2001:db8::2]:0", "fd77::2"),
        ("other", "10.244.1.20:0", "10.244.1.7"),
        ("other", "[fd10:244:1::20]:0", "fd10:244:1::7"),
        // The node itself, by any of its addresses: kubelet's probes come from there.
        ("node", "10.77.0.1:0", "10.244.1.7"),
        ("node", "[fd77::1]:0", "fd10:244:1::7"),
    ] {
        assert_eq!(seen_by(&world, at, "podns", address), ip(source), "{address}");
    }
    // From inside the cluster the pod is reachable as before.
    assert_eq!(seen_by(&world, "podns", "other", "10.244.1.7:0"), ip("10.244.1.20"));
    // A repeated call changes nothing.
    let show = |world: &World| {
        let nft = || std::process::Command::new("nft").args(["list", "ruleset"]).output().unwrap().stdout;
        let nft = String::from_utf8(world.within("vm", nft)).unwrap();
        let inside = world.ip("podns", "route show") + &world.ip("podns", "-6 route show");
        inside + &world.ip("podns", "neigh show dev pp-ext0") + &world.ip("vm", "route show") + &nft
    };
    let once = show(&world);
    leave_by_vm(&mut world, &plan, &[]);
    assert_eq!(show(&world), once);
}

#[test]
fn the_pod_cannot_reach_metadata_the_vm_and_its_network() {
    let mut world = world();
    let (_pod, _seen, _held, plan) = world.whole(SHAPE4);
    leave_by_vm(&mut world, &plan, &[]);
    for (at, address) in [
        ("node", format!("{METADATA}:0")),
        ("node", "[fd00:ec2::254]:0".to_owned()),
        ("node", "10.77.0.9:0".to_owned()),
        ("vm", "10.77.0.2:0".to_owned()),
        ("vm", "[fd77::2]:0".to_owned()),
        ("vm", "0.0.0.0:0".to_owned()),
    ] {
        let told = seen_by(&world, at, "podns", &address.replace("0.0.0.0", "10.77.0.2"));
        assert_eq!(told, None, "{address}");
        if at == "node" {
            assert!(seen_by(&world, at, "vm", &address).is_some(), "the VM itself reaches {address}");
        }
    }
    // The internet cannot connect by a route of its own, and the pod cannot connect with a forged source.
    world.ip("internet", "route add 10.244.1.7/32 via 203.0.113.1");
    world.ip("node", "route add 10.244.1.7/32 via 10.77.0.2");
    assert_eq!(seen_by(&world, "podns", "internet", "10.244.1.7:0"), None);
    world.ip("node", "route del 10.244.1.7/32");
    world.ip("podns", "addr add 10.99.99.99/32 dev lo");
    world.ip("podns", "route change default via 169.254.1.1 dev pp-ext0 onlink src 10.99.99.99");
    assert_eq!(seen_by(&world, "internet", "podns", "203.0.113.2:0"), None);
    world.ip("podns", "route change default via 169.254.1.1 dev pp-ext0 onlink src 10.244.1.7");
    // Traffic for the tunnel does not leave by the VM, even after the pod deletes its routes.
    world.ip("podns", "route del 10.244.0.0/16");
    world.ip("podns", "route del 10.244.1.0/24");
    assert_eq!(seen_by(&world, "other", "podns", "10.244.1.20:0"), None);
    // An allowed address is reachable.
    leave_by_vm(&mut world, &plan, &[METADATA, "10.77.0.9/32"]);
    assert_eq!(seen_by(&world, "node", "podns", &format!("{METADATA}:0")), ip("10.77.0.2"));
    assert_eq!(seen_by(&world, "node", "podns", "10.77.0.9:0"), ip("10.77.0.2"));
}

/// As Google, and some networks of Azure, assign it: an address alone, and a route to the gateway.
#[test]
fn the_pod_cannot_reach_gateways_and_neighbours_of_a_vm_with_a_host_address() {
    let mut world = world();
    for address in ["10.77.0.254/32", "10.78.0.9/32", "10.79.0.9/32"] {
        world.ip("node", &format!("addr add {address} dev ul0"));
    }
    for address in ["fd77::254/128", "fd78::9/128"] {
        world.ip("node", &format!("addr add {address} dev ul0 nodad"));
    }
    world.ip("vm", "addr flush dev eth0 scope global");
    world.ip("vm", "addr add 10.77.0.2/32 dev eth0");
    world.ip("vm", "addr add fd77::2/128 dev eth0 nodad");
    for (beside, gateway) in [("10.78.0.0/24", "10.77.0.254"), ("fd78::/64", "fd77::254")] {
        world.ip("vm", &format!("route add {gateway} dev eth0"));
        world.ip("vm", &format!("route add {beside} dev eth0"));
        world.ip("vm", &format!("route replace default via {gateway}"));
    }
    // Behind a router: not a neighbour; only the router is directly connected to the VM.
    world.ip("vm", "route add 10.79.0.0/24 via 10.77.0.254");
    let (_pod, _seen, _held, plan) = world.whole(SHAPE4);
    let applied = leave_by_vm(&mut world, &plan, &[]);
    assert_eq!((applied.v4, applied.v6), (true, true));
    assert_eq!(seen_by(&world, "internet", "podns", "203.0.113.2:0"), ip("10.77.0.2"));
    assert_eq!(seen_by(&world, "internet", "podns", "[2001:db8::2]:0"), ip("fd77::2"));
    assert_eq!(seen_by(&world, "node", "podns", "10.79.0.9:0"), ip("10.77.0.2"));
    for address in ["10.77.0.254:0", "10.78.0.9:0", "[fd77::254]:0", "[fd78::9]:0"] {
        assert_eq!(seen_by(&world, "node", "podns", address), None, "{address}");
        assert!(seen_by(&world, "node", "vm", address).is_some(), "the VM itself reaches {address}");
    }
    leave_by_vm(&mut world, &plan, &["10.78.0.9/32"]);
    assert_eq!(seen_by(&world, "node", "podns", "10.78.0.9:0"), ip("10.77.0.2"));
}

/// Adds a second NIC to the VM, on a network that also leads to the internet. Its gateway is in a table of the NIC's
/// own, as clouds' tools configure it.
fn second_nic(world: &World) {
    let vm = world.name("vm");
    world.ip("node", &format!("link add ul1 type veth peer name eth1 netns {vm}"));
    for (ns, device, end) in [("node", "ul1", 1), ("vm", "eth1", 2)] {
        world.ip(ns, &format!("addr add 10.78.0.{end}/24 dev {device}"));
        world.ip(ns, &format!("addr add fd78::{end}/64 dev {device} nodad"));
        world.ip(ns, &format!("link set {device} up"));
    }
    world.ip("vm", "route add default via 10.78.0.1 dev eth1 table 101");
    world.ip("vm", "-6 route add default via fd78::1 dev eth1 table 101");
    // A machine beside that NIC.
    world.ip("node", "addr add 10.78.0.9/32 dev ul1");
    // Node and VM drop packets that take another way back.
    for ns in ["node", "vm"] {
        world.within(ns, || std::fs::write("/proc/sys/net/ipv4/conf/all/rp_filter", "1").unwrap());
    }
}

fn leave_by_second(world: &World, plan: &wire::NetworkPlan) -> external::External {
    let mut plan = plan.clone();
    plan.external = Some(wire::External { way: "second-nic".into(), ..wanted(&[]) }).into();
    let external = external::read(&plan).unwrap().unwrap();
    let (podns, previous) = (world.path("podns"), plan.clone());
    world.within("vm", || {
        let (v4, v6) = external::leaves(&external).unwrap();
        external::split(&mut plan, &external, |is_v6| if is_v6 { v6 } else { v4 });
        guest::apply(&plan, Some(&previous), &podns).unwrap();
        if (v4, v6) == (false, false) {
            external::undo().unwrap();
        } else {
            assert_eq!(external::apply(&external, &podns).unwrap().uplinks, ["eth1"]);
        }
    });
    external
}

#[test]
fn with_a_second_nic_the_pod_uses_only_that_nic() {
    let mut world = world();
    let (_pod, _seen, _held, plan) = world.whole(SHAPE4);
    second_nic(&world);
    leave_by_second(&world, &plan);
    for (at, address, source) in [
        ("internet", "203.0.113.2:0", "10.78.0.2"),
        ("internet", "[2001:db8::2]:0", "fd78::2"),
        ("other", "10.244.1.20:0", "10.244.1.7"),
        ("other", "[fd10:244:1::20]:0", "fd10:244:1::7"),
        ("node", "10.77.0.1:0", "10.244.1.7"),
    ] {
        assert_eq!(seen_by(&world, at, "podns", address), ip(source), "{address}");
    }
    // The VM's own traffic is unchanged.
    assert_eq!(seen_by(&world, "internet", "vm", "203.0.113.2:0"), ip("10.77.0.2"));
    for (at, address) in [
        ("node", format!("{METADATA}:0")),
        ("node", "10.77.0.9:0".to_owned()),
        ("node", "10.78.0.9:0".to_owned()),
        ("vm", "10.77.0.2:0".to_owned()),
        ("vm", "10.78.0.2:0".to_owned()),
        ("vm", "[fd78::2]:0".to_owned()),
    ] {
        assert_eq!(seen_by(&world, at, "podns", &address), None, "{address}");
    }
    // Without the routes of the policy route's table, no packet leaves by the first NIC.
    world.ip("vm", "route flush table 28784");
    assert_eq!(seen_by(&world, "internet", "podns", "203.0.113.2:0"), None);
    let rules = |world: &World| world.ip("vm", "rule show") + &world.ip("vm", "-6 rule show");
    let once = rules(&world);
    leave_by_second(&world, &plan);
    assert_eq!(rules(&world), once);
    assert_eq!(seen_by(&world, "internet", "podns", "203.0.113.2:0"), ip("10.78.0.2"));
    // With the second NIC down the tunnel carries all traffic again, and the first NIC none.
    world.ip("vm", "link set eth1 down");
    leave_by_second(&world, &plan);
    assert_eq!(seen_by(&world, "internet", "podns", "203.0.113.2:0"), ip("10.244.1.7"));
}

#[test]
fn egress_by_the_second_nic_is_undone_and_can_move_to_the_first() {
    let mut world = world();
    let (_pod, _seen, _held, plan) = world.whole(SHAPE4);
    second_nic(&world);
    let state = |world: &World| {
        world.settle("vm");
        let routes = world.ip("vm", "route show table all") + &world.ip("vm", "-6 route show table all");
        routes
            + &world.ip("vm", "rule show")
            + &world.ip("vm", "-6 rule show")
            + &world.ip("vm", "-o link show")
    };
    let before = state(&world);
    leave_by_second(&world, &plan);
    assert!(state(&world).contains("iif pp-ext lookup 28784"), "{}", state(&world));
    world.within("vm", || external::undo().unwrap());
    assert_eq!(state(&world), before);
    leave_by_second(&world, &plan);
    leave_by_vm(&mut world, &plan, &[]);
    assert!(!state(&world).contains("28784"), "{}", state(&world));
    assert_eq!(seen_by(&world, "internet", "podns", "203.0.113.2:0"), ip("10.77.0.2"));
}

#[test]
fn undo_removes_everything_and_all_traffic_uses_the_tunnel() {
    let mut world = world();
    let (_pod, _seen, _held, plan) = world.whole(SHAPE4);
    let state = |world: &World| {
        let files = ["ipv4/conf/eth0/forwarding", "ipv6/conf/all/forwarding"];
        let read = || files.map(|file| std::fs::read_to_string(format!("/proc/sys/net/{file}")).unwrap());
        let nft = || std::process::Command::new("nft").args(["list", "tables"]).output().unwrap().stdout;
        let links = world.ip("vm", "-o link show") + &world.ip("podns", "-o link show");
        (world.within("vm", read), String::from_utf8(world.within("vm", nft)).unwrap(), links)
    };
    let before = state(&world);
    leave_by_vm(&mut world, &plan, &[]);
    assert_ne!(state(&world), before);
    world.within("vm", || external::undo().unwrap());
    assert_eq!(state(&world), before);
    world.within("vm", || external::undo().unwrap());
    world.apply(&plan).unwrap();
    assert_eq!(seen_by(&world, "internet", "podns", "203.0.113.2:0"), ip("10.244.1.7"));
}

#[test]
fn without_an_external_network_the_pod_cannot_reach_the_uplink() {
    let mut world = world();
    let (_pod, _seen, _held, _plan) = world.whole(SHAPE4);
    // Packets from the pod's namespace reach the node with the pod's own address, also on the way to machines beside
    // the VM. The VM itself is no router, and its own sockets are not the pod's.
    for (at, address) in [("internet", "203.0.113.2:0"), ("node", "10.77.0.9:0")] {
        assert_eq!(seen_by(&world, at, "podns", address), ip("10.244.1.7"), "{address}");
    }
    let links = world.ip("podns", "-o link show");
    assert_eq!(links.lines().count(), 2, "lo and the tunnel: {links}");
    // With the tunnel cut at the node the pod reaches nothing, least of all the VM's own addresses.
    world.ip("pod", "link set eth0 down");
    for (at, address) in [("internet", "203.0.113.2:0"), ("vm", "10.77.0.2:0"), ("vm", "[fd77::2]:0")] {
        assert_eq!(seen_by(&world, at, "podns", address), None, "{address}");
    }
    let forwarding = || std::fs::read_to_string("/proc/sys/net/ipv4/conf/all/forwarding").unwrap();
    assert_eq!(world.within("vm", forwarding).trim(), "0");
}

#[test]
fn missing_parts_of_the_pods_network_are_named_and_restored() {
    let mut world = world();
    let (_pod, _seen, _held, mut plan) = world.whole(SHAPE4);
    let podns = world.path("podns");
    let lacks = |plan: &wire::NetworkPlan| drift(plan, &podns).unwrap();
    assert_eq!(lacks(&plan), Vec::<String>::new());
    world.ip("podns", "route del 10.96.0.0/16");
    world.ip("podns", "addr del fd10:244:1::7/64 dev eth0");
    let named = lacks(&plan);
    assert!(named.iter().any(|text| text.contains("10.96.0.0/16")), "{named:?}");
    assert!(named.iter().any(|text| text.contains("fd10:244:1::7")), "{named:?}");
    world.within("vm", || guest::apply(&plan, Some(&plan), &podns).unwrap());
    assert_eq!(lacks(&plan), Vec::<String>::new());
    world.ip("podns", "link del eth0");
    assert!(!lacks(&plan).is_empty());
    world.within("vm", || guest::apply(&plan, Some(&plan), &podns).unwrap());
    assert_eq!(lacks(&plan), Vec::<String>::new());
    // The external network's own device is not reported, and routes that left the tunnel are not missed.
    leave_by_vm(&mut world, &plan, &[]);
    plan.external = Some(wanted(&[])).into();
    let external = external::read(&plan).unwrap().unwrap();
    external::split(&mut plan, &external, |_| true);
    assert_eq!(lacks(&plan), Vec::<String>::new());
}
