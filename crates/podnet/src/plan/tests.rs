//! Tests that a written plan is read back, and that an invalid plan is refused.

use std::net::{Ipv4Addr, Ipv6Addr};

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use protobuf::Message;

use super::*;
use crate::inspect::{
    Address, FibPlace, Hop, Neighbour, Prefix, Route, Rule, RuleFlow, RuleSelector, Sysctl,
};
use crate::link::mac_text;

fn underlay() -> Underlay {
    Underlay {
        node: "10.0.0.1".parse().unwrap(),
        vm: "10.0.0.2".parse().ok(),
        port: 4789,
        udp_checksum: false,
        overhead: 50,
    }
}

fn tunnels(seen: &PodNetworkState) -> Vec<Tunnel> {
    let tunnel =
        |(n, i): (usize, &inspect::Interface)| Tunnel { interface: i.index, vni: 77 + n as u32, mtu: i.mtu };
    seen.interfaces.iter().enumerate().map(tunnel).collect()
}

fn ip(v6: bool) -> BoxedStrategy<IpAddr> {
    if v6 {
        (2u128 << 124..0xfc << 120).prop_map(|a| IpAddr::V6(Ipv6Addr::from_bits(a))).boxed()
    } else {
        (1u32 << 24..0xe0 << 24).prop_map(|a| IpAddr::V4(Ipv4Addr::from_bits(a))).boxed()
    }
}

fn name() -> impl Strategy<Value = String> {
    "[a-z][a-z0-9_.-]{0,13}".prop_filter("lo is not the pod's", |name| name != "lo")
}

fn mac() -> impl Strategy<Value = String> {
    any::<[u8; 5]>().prop_map(|[a, b, c, d, e]| mac_text([0x02, a, b, c, d, e]))
}

fn address() -> impl Strategy<Value = Address> {
    any::<bool>().prop_flat_map(|v6| {
        let broadcast = option::of(any::<u32>().prop_map(Ipv4Addr::from_bits));
        let times = (option::of(any::<u32>()), option::of(any::<u32>()));
        let rest = (any::<u8>(), any::<u32>(), option::of("[a-z0-9:]{1,15}"));
        (ip(v6), 0..=(if v6 { 128 } else { 32u8 }), any::<u8>(), option::of(ip(v6)), broadcast, times, rest)
            .prop_map(
                move |(
                    address,
                    prefix,
                    scope,
                    peer,
                    broadcast,
                    (valid, preferred),
                    (protocol, flags, label),
                )| {
                    let broadcast = broadcast.filter(|_| !v6);
                    Address {
                        address,
                        prefix,
                        scope,
                        peer,
                        broadcast,
                        label,
                        valid,
                        preferred,
                        protocol,
                        flags,
                    }
                },
            )
    })
}

/// Returns routes through these interfaces, or of one interface if the list is empty.
fn route(interfaces: Vec<String>) -> impl Strategy<Value = Route> {
    any::<bool>().prop_flat_map(move |v6| {
        let hop = {
            let names = if interfaces.is_empty() { vec!["lo".to_owned()] } else { interfaces.clone() };
            (option::of(ip(v6)), proptest::sample::select(names), 1..=256u16, any::<bool>())
                .prop_map(|(gateway, interface, weight, onlink)| Hop { gateway, interface, weight, onlink })
        };
        let hops = if interfaces.is_empty() { vec(hop, 0..1) } else { vec(hop, 0..4) };
        let whither =
            (ip(v6), 0..=(if v6 { 128 } else { 32u8 }), option::of(ip(v6)), option::of(ip(v6)), hops);
        let numbers =
            (any::<[u32; 3]>(), 1..u32::MAX, any::<[u8; 4]>(), any::<bool>(), option::of(any::<u32>()));
        let metrics = vec((1..=15u16, any::<u32>()), 0..4);
        (whither, numbers, metrics, proptest::sample::select(&[1u8, 2, 6, 7, 8, 9][..])).prop_map(
            |(whither, numbers, metrics, kind)| {
                let (destination, prefix, gateway, source, hops) = whither;
                let ([metric, mtu, advmss], table, [protocol, scope, tos, preference], onlink, expires) =
                    numbers;
                let route = Route {
                    gateway,
                    source,
                    metric,
                    protocol,
                    scope,
                    onlink,
                    mtu,
                    fib: FibPlace { table, kind, tos },
                    ..Route::new(destination, prefix)
                };
                Route { advmss, hops, metrics, preference, expires, ..route }
            },
        )
    })
}

fn neighbour() -> impl Strategy<Value = Neighbour> {
    let address = any::<bool>().prop_flat_map(ip);
    (address, mac(), any::<[bool; 2]>(), any::<[u8; 2]>()).prop_map(
        |(address, mac, [no_arp, proxy], [flags, protocol])| {
            let mac = if proxy { String::new() } else { mac };
            Neighbour { address, mac, no_arp, proxy, flags, protocol }
        },
    )
}

fn rule() -> impl Strategy<Value = Rule> {
    any::<bool>().prop_flat_map(|v6| {
        let side = || {
            let length = 0..=(if v6 { 128 } else { 32u8 });
            option::of((ip(v6), length).prop_map(|(address, length)| Prefix { address, length }))
        };
        let names = (option::of(name()), option::of(name()));
        let numbers = (
            any::<[u32; 5]>(),
            any::<[u8; 3]>(),
            any::<bool>(),
            proptest::sample::select(&[1u8, 2, 3, 6, 7, 8][..]),
        );
        let rest = (option::of(any::<u32>()), option::of(any::<u32>()), option::of(any::<(u32, u32)>()));
        let ports = (option::of(any::<(u16, u16)>()), option::of(any::<(u16, u16)>()));
        (side(), side(), names, numbers, rest, ports).prop_map(
            move |(from, to, (iif, oif), numbers, rest, ports)| {
                let ([priority, fwmark, fwmask, table, goto], [tos, protocol, ip_protocol], invert, action) =
                    numbers;
                let (suppress_prefix_length, suppress_group, uids) = rest;
                let (source_ports, destination_ports) = ports;
                let (iif, oif) = (iif.unwrap_or_default(), oif.unwrap_or_default());
                Rule {
                    v6,
                    priority,
                    invert,
                    selector: RuleSelector { from, to, iif, oif, fwmark, fwmask, tos },
                    table,
                    action,
                    goto,
                    protocol,
                    suppress_prefix_length,
                    suppress_group,
                    flow: RuleFlow { uids, ip_protocol, source_ports, destination_ports },
                }
            },
        )
    })
}

fn sysctl() -> impl Strategy<Value = Sysctl> {
    ("[a-z0-9_/]{1,40}", "[0-9 ]{1,20}").prop_map(|(name, value)| Sysctl { name, value })
}

fn interface() -> impl Strategy<Value = inspect::Interface> {
    let whole = (name(), mac(), 1280..9001u32, option::of(any::<u32>()), any::<[bool; 4]>());
    let inside =
        (vec(address(), 1..4), vec(route(Vec::new()), 0..5), vec(neighbour(), 0..3), vec(sysctl(), 0..3));
    (whole, inside).prop_map(
        |((name, mac, mtu, tx_queue_len, flags), (addresses, routes, neighbours, sysctls))| {
            let [no_arp, promiscuous, all_multicast, down] = flags;
            inspect::Interface {
                name,
                index: 0,
                mac,
                mtu,
                tx_queue_len,
                no_arp,
                promiscuous,
                all_multicast,
                down,
                addresses,
                routes,
                neighbours,
                sysctls,
            }
        },
    )
}

fn seen() -> impl Strategy<Value = PodNetworkState> {
    vec(interface(), 1..4).prop_flat_map(|mut interfaces| {
        for (n, interface) in interfaces.iter_mut().enumerate() {
            interface.index = 2 + n as u32;
            interface.name.insert_str(0, ["a", "b", "c"][n]);
        }
        let names: Vec<String> = interfaces.iter().map(|i| i.name.clone()).collect();
        let rest = (vec(route(names), 0..4), vec(rule(), 0..4), vec(sysctl(), 0..3), vec(address(), 0..2));
        rest.prop_map(move |(routes, rules, sysctls, loopback)| PodNetworkState {
            interfaces: interfaces.clone(),
            routes,
            rules,
            sysctls,
            loopback,
            left_out: Vec::new(),
        })
    })
}

/// Returns a small, fixed state.
fn example() -> PodNetworkState {
    let ip = |text: &str| text.parse::<IpAddr>().unwrap();
    let route = |destination: &str, prefix, gateway: &str| Route {
        gateway: gateway.parse().ok(),
        ..Route::new(ip(destination), prefix)
    };
    let interface = |name: &str, index, end: u8| inspect::Interface {
        name: name.to_owned(),
        index,
        mac: mac_text([2, 0, 0, 0, 0, end]),
        mtu: 1450,
        addresses: vec![Address::new([10, 244, end, 7].into(), 24, 0), Address::new(ip("fd10::7"), 64, 0)],
        routes: vec![route("0.0.0.0", 0, "10.244.1.1"), route("10.9.0.0", 16, "fe80::1")],
        neighbours: vec![Neighbour::new(ip("169.254.1.1"), "ee:ee:ee:ee:ee:ee".to_owned())],
        ..inspect::Interface::default()
    };
    let hop = |name: &str| Hop { gateway: None, interface: name.to_owned(), weight: 1, onlink: false };
    PodNetworkState {
        interfaces: vec![interface("eth0", 3, 1), interface("net1", 2, 2)],
        routes: vec![Route { hops: vec![hop("eth0"), hop("net1")], ..Route::new(ip("10.8.0.0"), 16) }],
        rules: vec![Rule { action: 1, table: 100, priority: 512, ..Rule::default() }],
        sysctls: vec![Sysctl { name: "core/somaxconn".to_owned(), value: "100".to_owned() }],
        loopback: Vec::new(),
        left_out: Vec::new(),
    }
}

proptest! {
    #[test]
    fn a_written_plan_reads_as_the_inspected_network(seen in seen()) {
        let bytes = write(&seen, &tunnels(&seen), &underlay()).write_to_bytes().unwrap();
        let planned = read(&wire::NetworkPlan::parse_from_bytes(&bytes).unwrap()).unwrap();
        prop_assert_eq!(planned.network, seen);
        prop_assert_eq!(planned.underlay, underlay());
    }

    #[test]
    fn the_inspected_network_survives_the_ledger(seen in seen()) {
        prop_assert_eq!(serde_json::from_str::<PodNetworkState>(&serde_json::to_string(&seen).unwrap()).unwrap(), seen);
    }

    #[test]
    fn any_plan_is_handled(text in ".{0,20}", number: u32, seen in seen()) {
        let mut plan = write(&seen, &tunnels(&seen), &underlay());
        plan.underlay.mut_or_insert_default().port = number;
        let interface = &mut plan.interfaces[0];
        interface.name.clone_from(&text);
        interface.mac.clone_from(&text);
        interface.addresses[0].prefix.clone_from(&text);
        interface.index = number;
        drop(read(&plan));
    }

    #[test]
    fn any_bytes_are_handled(bytes: Vec<u8>) {
        if let Ok(plan) = wire::NetworkPlan::parse_from_bytes(&bytes) {
            drop(read(&plan));
        }
    }
}

#[test]
fn a_plan_of_the_first_version_is_read() {
    let mut plan = write(&example(), &tunnels(&example())[..1], &underlay());
    plan.version = 1;
    plan.rules.clear();
    plan.sysctls.clear();
    let planned = read(&plan).unwrap();
    let broadcast = planned.network.interfaces[0].addresses[0].broadcast;
    assert_eq!(
        broadcast,
        Some([10, 244, 1, 255].into()),
        "an older plan means the default broadcast address"
    );
    assert_eq!(planned.network.interfaces[0].addresses[1].broadcast, None);
}

#[test]
fn routes_through_an_interface_without_a_tunnel_are_left_out() {
    let planned = read(&write(&example(), &tunnels(&example())[..1], &underlay())).unwrap();
    assert_eq!(planned.network.interfaces.len(), 1);
    assert_eq!(planned.network.routes, []);
    assert_eq!(planned.network.rules.len(), 1);
}

#[test]
fn the_node_gives_each_interface_a_device_and_the_mtu_that_fits() {
    let mut seen = example();
    seen.interfaces[1].mtu = 9001;
    let vm = [10, 0, 0, 2].into();
    let carried = node(&seen, 1450, vm).unwrap();
    let as_numbers: Vec<_> = carried.iter().map(|c| (c.slot, c.interface, c.device_mtu, c.mtu)).collect();
    assert_eq!(as_numbers, [(0, 3, 1450, 1450), (1, 2, 9001, 1450)]);
    let error = node(&seen, 1279, vm).unwrap_err().to_string();
    assert!(error.contains("1280"), "{error}");
}

#[test]
fn an_older_guest_refuses_a_new_plan_and_names_the_remedy() {
    let seen = example();
    let written = write(&seen, &tunnels(&seen), &underlay()).version;
    for newest in OLD_VERSION..written {
        let text = read::known(written, newest).unwrap_err().to_string();
        assert!(text.contains(&format!("version {written} is unknown")), "{text}");
        assert!(text.contains("node and VM image must be upgraded together"), "{text}");
    }
    assert!(OLD_VERSION < written && read::known(written, written).is_ok());
    assert!(read::known(0, written).is_err() && read::known(written + 1, written).is_err());
}

#[test]
fn the_error_of_a_wrong_field_names_the_field() {
    type Change = fn(&mut wire::NetworkPlan);
    let cases: [(Change, &str); 24] = [
        (|p| p.version = 3, "version 3"),
        (|p| p.underlay.mut_or_insert_default().kind = "gre".into(), "\"gre\""),
        (|p| p.underlay = None.into(), "underlay"),
        (|p| p.underlay.mut_or_insert_default().port = 70_000, "70000"),
        (|p| p.underlay.mut_or_insert_default().overhead = u32::MAX, "overhead"),
        (|p| p.underlay.mut_or_insert_default().node_address = "node".into(), "\"node\""),
        (|p| p.interfaces.clear(), "0 interfaces"),
        (|p| p.interfaces[0].name = "a/b".into(), "a/b"),
        (|p| p.interfaces[0].name = "lo".into(), "lo"),
        (|p| p.interfaces[1].name = "eth0".into(), "another one"),
        (|p| p.interfaces[1].index = 3, "another one"),
        (|p| p.interfaces[0].index = 1, "no index"),
        (|p| p.interfaces[0].mac = "01:00:5e:00:00:01".into(), "01:00:5e"),
        (|p| p.interfaces[0].vni = 1 << 24, "16777216"),
        (|p| p.interfaces[0].addresses[0].prefix = "10.0.0.1/33".into(), "10.0.0.1/33"),
        (|p| p.interfaces[0].addresses[0].peer = "fd00::1".into(), "fd00::1"),
        (|p| p.interfaces[0].routes[0].gateway = "gw".into(), "gw"),
        (|p| p.interfaces[0].routes[0].table = 0, "table 0"),
        (|p| p.interfaces[0].routes[0].kind = 3, "type 3"),
        (|p| p.interfaces[0].routes[0].hops.push(wire::Hop::new()), "its own next hops"),
        (|p| p.routes[0].hops[0].interface = "eth9".into(), "eth9"),
        (|p| p.rules[0].from = "fd00::/8".into(), "other family"),
        (|p| p.rules[0].action = 9, "action 9"),
        (|p| p.sysctls[0].value = "1\n2".into(), "somaxconn"),
    ];
    for (change, named) in cases {
        let seen = example();
        let mut plan = write(&seen, &tunnels(&seen), &underlay());
        read(&plan).unwrap();
        change(&mut plan);
        let text = read(&plan).unwrap_err().to_string();
        assert!(text.contains(named), "{text:?} does not name {named:?}");
    }
}

#[test]
fn a_path_only_lowers_the_mtu_and_never_below_the_minimum() {
    for (mtu, prefix, path, expected, noted) in [
        (1450, "10.0.0.1/24", 1500, 1450, false),
        (1450, "10.0.0.1/24", 1460, 1410, false),
        (8951, "fd00::1/64", 1500, 1450, false),
        (1450, "fd00::1/64", 1300, 1280, true),
        (1450, "10.0.0.1/24", 1300, 1250, false),
        (1450, "10.0.0.1/24", 20, 576, true),
        (500, "10.0.0.1/24", 576, 500, false),
    ] {
        let address = wire::Address { prefix: prefix.into(), ..Default::default() };
        let interface = wire::Interface { mtu, addresses: vec![address], ..Default::default() };
        let underlay = wire::Underlay { overhead: 50, ..Default::default() };
        let mut plan = wire::NetworkPlan::new();
        (plan.interfaces, plan.underlay) = (vec![interface], Some(underlay).into());
        let note = fit_to_path(&mut plan, path);
        assert_eq!(plan.interfaces[0].mtu, expected, "{prefix} {path}");
        assert_eq!(note.is_some(), noted, "{prefix} {path}: {note:?}");
    }
}
