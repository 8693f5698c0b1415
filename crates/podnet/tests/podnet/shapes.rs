//! Tests the shapes that CNI plugins leave in a pod's namespace: they are inspected unchanged, and made the same in the
//! VM. The witness at both ends is `ip -j`.

use super::world;
use peerpod_podnet::inspect::{PodNetworkState, inspect};
use serde_json::Value;
use world::{World, run};

/// Network that a plugin leaves.
struct Shape {
    cni: &'static str,
    devices: &'static [&'static str],
    /// Lines for `ip -batch` in the pod.
    lines: &'static str,
    /// Interfaces, routes of the pod's first one, rules.
    counts: (usize, usize, usize),
}

/// network.md's table of CNIs. `fe80::` addresses and their routes are the kernel's own and not counted.
const SHAPES: &[Shape] = &[
    Shape {
        cni: "bridge, flannel",
        devices: &["eth0"],
        lines: "link set eth0 mtu 1450
            addr add 10.244.1.7/24 brd 10.244.1.255 dev eth0
            route add default via 10.244.1.1
            route add 10.244.0.0/16 via 10.244.1.1",
        counts: (1, 3, 0),
    },
    Shape {
        cni: "ptp, GKE",
        devices: &["eth0"],
        lines: "link set eth0 mtu 1460
            addr add 10.52.0.9/24 brd 10.52.0.255 dev eth0 noprefixroute
            route add 10.52.0.1 dev eth0 scope link src 10.52.0.9
            route add 10.52.0.0/24 via 10.52.0.1 src 10.52.0.9
            route add default via 10.52.0.1",
        counts: (1, 3, 0),
    },
    Shape {
        cni: "Calico",
        devices: &["eth0"],
        lines: "link set eth0 mtu 1480
            addr add 192.168.77.5/32 dev eth0
            addr add fd77:5::5/128 dev eth0 nodad
            route add 169.254.1.1 dev eth0 scope link
            route add default via 169.254.1.1 dev eth0
            -6 route add default via fe80::eeee:eeff:feee:eeee dev eth0 metric 1024",
        counts: (1, 4, 0),
    },
    Shape {
        cni: "Cilium",
        devices: &["eth0"],
        lines: "addr add 10.0.1.121/32 dev eth0
            addr add fd00:10::121/128 dev eth0 nodad
            route add 10.0.1.66 dev eth0 scope link
            route add default via 10.0.1.66 dev eth0 mtu 1423
            -6 route add fd00:10::66 dev eth0 metric 1024
            -6 route add default via fd00:10::66 dev eth0 metric 1024 mtu 1423
            neigh add 10.0.1.66 lladdr 3e:11:22:33:44:55 dev eth0 nud permanent",
        counts: (1, 5, 0),
    },
    Shape {
        cni: "AWS VPC CNI, with a table for each of two ENIs",
        devices: &["eth0", "eth1"],
        lines: "link set eth0 mtu 9001
            link set eth1 mtu 9001
            addr add 10.0.96.5/32 dev eth0
            addr add 10.0.97.6/32 dev eth1
            route add 169.254.1.1 dev eth0 scope link
            route add default via 169.254.1.1 dev eth0
            neigh add 169.254.1.1 lladdr ee:ee:ee:ee:ee:ee dev eth0 nud permanent
            route add 169.254.1.2 dev eth1 scope link
            route add 169.254.1.2 dev eth1 table 2 scope link
            route add default via 169.254.1.2 dev eth1 table 2
            neigh add 169.254.1.2 lladdr ee:ee:ee:ee:ee:e1 dev eth1 nud permanent
            rule add from 10.0.97.6 priority 1536 lookup 2
            rule add fwmark 0x80/0x80 priority 1024 lookup main",
        counts: (2, 2, 2),
    },
    Shape {
        cni: "AWS VPC CNI, IPv6",
        devices: &["eth0"],
        lines: "addr add 2600:1f13::f:1/128 dev eth0 nodad
            -6 route add fe80::1 dev eth0 metric 1024
            -6 route add default via fe80::1 dev eth0 metric 1024
            neigh add fe80::1 lladdr ee:ee:ee:ee:ee:ee dev eth0 nud permanent router",
        counts: (1, 3, 0),
    },
    Shape {
        cni: "OpenShift SDN",
        devices: &["eth0"],
        lines: "link set eth0 mtu 1450 address 0a:58:0a:84:02:49
            addr add 10.132.2.73/23 brd 10.132.3.255 dev eth0
            route add 10.132.0.0/14 dev eth0
            route add 172.30.0.0/16 via 10.132.2.1
            route add 224.0.0.0/4 dev eth0
            route add default via 10.132.2.1",
        counts: (1, 5, 0),
    },
    Shape {
        cni: "OVN-Kubernetes, dual stack",
        devices: &["eth0"],
        lines: "link set eth0 mtu 1400 address 0a:58:0a:84:02:2e
            addr add 10.132.2.46/23 brd 10.132.3.255 dev eth0
            addr add fd01:0:0:3::2e/64 dev eth0 nodad
            route add default via 10.132.2.1
            route add 10.132.0.0/14 via 10.132.2.1
            route add 172.30.0.0/16 via 10.132.2.1
            route add 100.64.0.0/16 via 10.132.2.1
            -6 route add default via fd01:0:0:3::1
            -6 route add fd01::/48 via fd01:0:0:3::1",
        counts: (1, 8, 0),
    },
    Shape {
        cni: "Azure CNI",
        devices: &["eth0"],
        lines: "addr add 10.240.0.15/16 dev eth0 noprefixroute
            route add 169.254.1.1 dev eth0
            route add default via 169.254.1.1 dev eth0
            neigh add 169.254.1.1 lladdr aa:aa:aa:aa:aa:aa dev eth0 nud permanent",
        counts: (1, 2, 0),
    },
    Shape {
        cni: "Multus with three interfaces",
        devices: &["eth0", "net1", "net2"],
        lines: "link set eth0 mtu 1450
            link set net2 mtu 9000 txqueuelen 4000
            addr add 10.244.1.9/24 brd 10.244.1.255 dev eth0
            route add default via 10.244.1.1
            addr add 10.55.0.2/24 dev net1
            route add 10.56.0.0/16 via 10.55.0.1
            addr add fd55::2/64 dev net2 nodad
            -6 route add fd56::/48 via fd55::1 metric 50
            route add 10.57.0.0/16 nexthop via 10.244.1.1 weight 2 nexthop via 10.55.0.1
            route add blackhole 10.58.0.0/16
            -6 route add unreachable fd58::/48 metric 9
            rule add from 10.55.0.2 iif net1 priority 100 lookup 1000
            route add 10.59.0.0/16 via 10.55.0.1 table 1000",
        counts: (3, 2, 1),
    },
    Shape {
        cni: "IPv6 only",
        devices: &["eth0"],
        lines: "addr add fd10:244:1::7/64 dev eth0 nodad
            -6 route add default via fd10:244:1::1",
        counts: (1, 2, 0),
    },
    Shape {
        cni: "an address of a router advertisement",
        devices: &["eth0"],
        lines: "addr add 2001:db8::7/64 dev eth0 nodad valid_lft 86000 preferred_lft 14000
            addr add 2001:db8::8/64 dev eth0 nodad preferred_lft 0
            -6 route add default via fe80::1 dev eth0 proto ra metric 1024 expires 1700 pref high",
        counts: (1, 2, 0),
    },
];

#[test]
fn the_network_of_each_cni_is_inspected_completely_and_equal_in_the_vm() {
    let mut world = World::new();
    world.widen();
    for (number, shape) in SHAPES.iter().enumerate() {
        let (pod, podns) = (format!("pod{number}"), format!("podns{number}"));
        let netns = world.bare(&pod, shape.devices);
        world.batch(&pod, shape.lines, false);
        let seen = inspect(&netns).unwrap();
        assert_eq!(seen.left_out, [""; 0], "{}", shape.cni);
        let is_own = |r: &&peerpod_podnet::inspect::Route| r.destination.to_string() != "fe80::";
        let routes = seen.primary().routes.iter().filter(is_own).count();
        assert_eq!(
            (seen.interfaces.len(), routes, seen.rules.len()),
            shape.counts,
            "{}: {seen:#?}",
            shape.cni
        );

        let plan = world.plan(&seen);
        let applied = world.apply_in(&podns, &plan, None).unwrap_or_else(|e| panic!("{}: {e}", shape.cni));
        assert_eq!((applied.changed, applied.left_out), (true, Vec::new()), "{}", shape.cni);
        let again = world.apply_in(&podns, &plan, Some(&plan)).unwrap();
        assert!(!again.changed, "{}: the second time changed something", shape.cni);
        let copy = inspect(&world.open(&podns)).unwrap();
        assert_eq!(timeless(&copy), timeless(&seen), "{}", shape.cni);
        // Where a route is narrower than its interface, the VM makes the interface narrow.
        let narrow = format!("\"mtu\":{}", seen.primary().mtu);
        let mut expected = witness(&world, &pod);
        for line in expected.iter_mut().filter(|line| line.contains("\"ifname\":\"eth0\"")) {
            *line = line.replace("\"mtu\":1500", &narrow);
        }
        assert_eq!(witness(&world, &podns), expected, "{}", shape.cni);
    }
}

/// Removes values that change with time.
fn timeless(seen: &PodNetworkState) -> PodNetworkState {
    let mut seen = seen.clone();
    for interface in &mut seen.interfaces {
        for address in &mut interface.addresses {
            address.valid = address.valid.map(|left| left / 100);
            address.preferred = address.preferred.map(|left| left / 100);
        }
        for route in &mut interface.routes {
            route.expires = route.expires.map(|left| left / 1000);
        }
    }
    seen
}

/// Returns everything that `ip` shows of a pod's network, as text. Legitimate differences are removed: the kind of a
/// device, remaining lifetimes, and the missing automatic routes of addresses.
fn witness(world: &World, name: &str) -> Vec<String> {
    let name = world.name(name);
    let mut all = Vec::new();
    for what in [
        "addr",
        "route show table all",
        "-6 route show table all",
        "rule",
        "-6 rule",
        "neigh show nud permanent",
    ] {
        let answer: Value = serde_json::from_str(&run(&format!("ip -n {name} -j {what}"))).unwrap();
        let mut entries: Vec<Value> = answer.as_array().cloned().unwrap_or_default();
        entries.retain(|entry| entry["table"] != "local");
        if what.starts_with("neigh") {
            entries.sort_by_key(|entry| entry["dst"].to_string()); // listed in hash order
        }
        for entry in &mut entries {
            strip(entry);
            all.push(format!("{what}: {entry}"));
        }
    }
    all
}

fn strip(entry: &mut Value) {
    match entry {
        Value::Object(fields) => {
            let differing = [
                "link",
                "link_index",
                "link_netnsid",
                "qdisc",
                "operstate",
                "flags",
                "group",
                "valid_life_time",
                "preferred_life_time",
                "noprefixroute",
                "expires",
                "dynamic",
                "nodad",
                "tentative",
                "optimistic",
            ];
            fields.retain(|name, _| !differing.contains(&name.as_str()));
            fields.values_mut().for_each(strip);
        }
        Value::Array(entries) => entries.iter_mut().for_each(strip),
        _ => {}
    }
}
