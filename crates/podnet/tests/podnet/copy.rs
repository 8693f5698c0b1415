//! Tests that any pod network, inspected, planned and made in another namespace, is found there unchanged. The shapes
//! are random; `ip` makes them and skips those that the kernel refuses. PEERPOD_TEST_LONG tries many more.

use super::world;
use std::cell::RefCell;

use peerpod_podnet::inspect::{PodNetworkState, Route, inspect};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config, TestRunner};
use world::World;

const DEVICES: [&str; 3] = ["eth0", "net1", "x.2"];

fn device() -> impl Strategy<Value = &'static str> {
    select(&DEVICES[..])
}

/// Few different addresses, so that they coincide.
fn four() -> impl Strategy<Value = String> {
    (0..4u8, 1..5u8).prop_map(|(b, d)| format!("10.{b}.0.{d}"))
}

fn six() -> impl Strategy<Value = String> {
    (0..4u8, 1..5u8).prop_map(|(b, d)| format!("fd00:{b}::{d}"))
}

fn maybe(text: impl Strategy<Value = String>) -> impl Strategy<Value = String> {
    prop_oneof![2 => Just(String::new()), 1 => text]
}

fn option(word: &'static str, range: std::ops::Range<u32>) -> impl Strategy<Value = String> {
    maybe(range.prop_map(move |value| format!(" {word} {value}")))
}

fn link() -> impl Strategy<Value = String> {
    let what = select(
        &[
            "mtu 1400",
            "mtu 9000",
            "txqueuelen 17",
            "txqueuelen 0",
            "arp off",
            "promisc on",
            "allmulticast on",
        ][..],
    );
    (device(), what).prop_map(|(device, what)| format!("link set {device} {what}"))
}

fn address() -> impl Strategy<Value = String> {
    let v4 = (
        four(),
        select(&[8u8, 16, 24, 31, 32][..]),
        device(),
        select(&["", " brd +", " scope link", " label LABEL", " noprefixroute", " peer 10.9.9.9"][..]),
    )
        .prop_map(|(address, bits, device, more)| {
            let more = more.replace("LABEL", &format!("{device}:a"));
            let bits = if more.contains("peer") { String::new() } else { format!("/{bits}") };
            format!("addr add {address}{bits}{more} dev {device}")
        });
    let v6 = (
        six(),
        select(&[48u8, 64, 127, 128][..]),
        device(),
        select(&["", " noprefixroute", " preferred_lft 0", " valid_lft 75000 preferred_lft 65000"][..]),
    )
        .prop_map(|(address, bits, device, more)| {
            format!("addr add {address}/{bits} dev {device} nodad{more}")
        });
    let on_lo = |address: String, bits: u8, more: &str| format!("addr add {address}/{bits} dev lo{more}");
    let more = || select(&["", "", " noprefixroute"][..]);
    let lo = prop_oneof![
        (four(), select(&[16u8, 24, 32][..]), more()).prop_map(move |(a, bits, more)| on_lo(a, bits, more)),
        (six(), select(&[64u8, 128][..]), more()).prop_map(move |(a, bits, more)| on_lo(a, bits, more)),
    ];
    prop_oneof![4 => v4, 4 => v6, 1 => lo]
}

fn route() -> impl Strategy<Value = String> {
    let table = || option("table", 99..103);
    let numbers =
        || (option("metric", 0..4), option("proto", 3..6), table()).prop_map(|(a, b, c)| a + &b + &c);
    let metrics = (
        option("mtu", 1280..1500),
        option("advmss", 500..1400),
        option("initcwnd", 1..30),
        option("rto_min", 1..9),
    )
        .prop_map(|(mtu, mss, window, rto)| mtu + &mss + &window + &rto);
    let to4 = prop_oneof![
        Just("default".to_owned()),
        (0..6u8, select(&[16u8, 24, 32][..])).prop_map(|(b, bits)| format!("10.{}.0.0/{bits}", 20 + b))
    ];
    let to6 = prop_oneof![
        Just("default".to_owned()),
        (0..6u8, select(&[48u8, 64, 128][..])).prop_map(|(b, bits)| format!("fd20:{b}::/{bits}"))
    ];
    let way4 = prop_oneof![
        Just(String::new()),
        four().prop_map(|gateway| format!(" via {gateway} onlink")),
        Just(" scope link".to_owned()),
        six().prop_map(|gateway| format!(" via inet6 {gateway} onlink")),
    ];
    let way6 = prop_oneof![Just(String::new()), six().prop_map(|gateway| format!(" via {gateway} onlink"))];
    let kinds = select(&["blackhole", "unreachable", "prohibit", "throw"][..]);
    prop_oneof![
        4 => (to4.clone(), way4, device(), numbers(), metrics, option("tos", 0..9))
            .prop_map(|(to, way, device, numbers, metrics, tos)| format!("route append {to}{way} dev {device}{numbers}{metrics}{tos}")),
        4 => (to6.clone(), way6, device(), numbers(), option("mtu", 1280..1500), option("pref", 0..1))
            .prop_map(|(to, way, device, numbers, mtu, pref)| format!("-6 route append {to}{way} dev {device}{numbers}{mtu}{}", pref.replace('0', "high"))),
        1 => (kinds.clone(), to4.clone(), numbers()).prop_map(|(kind, to, numbers)| format!("route append {kind} {to}{numbers}")),
        1 => (kinds, to6.clone(), numbers()).prop_map(|(kind, to, numbers)| format!("-6 route append {kind} {to}{numbers}")),
        1 => (to4, vec((four(), device(), 1..5u8), 2..4), numbers()).prop_map(|(to, hops, numbers)| {
            let hops: String = hops.iter().map(|(via, dev, weight)| format!(" nexthop via {via} dev {dev} weight {weight} onlink")).collect();
            format!("route append {to}{numbers}{hops}")
        }),
        1 => (to6, vec((six(), device(), 1..5u8), 2..4), numbers()).prop_map(|(to, hops, numbers)| {
            let hops: String = hops.iter().map(|(via, dev, weight)| format!(" nexthop via {via} dev {dev} weight {weight} onlink")).collect();
            format!("-6 route append {to}{numbers}{hops}")
        }),
        1 => (four(), table()).prop_map(|(to, table)| format!("route append local {to} dev lo{table} proto 7")),
    ]
}

fn rule() -> impl Strategy<Value = String> {
    let side = |word: &'static str, v6: bool| {
        if v6 {
            maybe(six().prop_map(move |a| format!(" {word} {a}/64"))).boxed()
        } else {
            maybe(four().prop_map(move |a| format!(" {word} {a}/24"))).boxed()
        }
    };
    let action = select(
        &[
            " lookup 100",
            " lookup main",
            " lookup 5000 suppress_prefixlength 0",
            " prohibit",
            " blackhole",
            " goto 40000",
            " nop",
        ][..],
    );
    any::<bool>().prop_flat_map(move |v6| {
        let names = (
            maybe(device().prop_map(|d| format!(" iif {d}"))),
            maybe(device().prop_map(|d| format!(" oif {d}"))),
        );
        let rest = maybe(
            select(
                &[
                    " fwmark 0x80/0x80",
                    " fwmark 7",
                    " uidrange 1000-2000",
                    " ipproto tcp dport 80",
                    " ipproto udp sport 1000-2000",
                    " tos 8",
                ][..],
            )
            .prop_map(str::to_owned),
        );
        (select(&["", " not"][..]), side("from", v6), side("to", v6), names, rest, action.clone(), 1..20u32)
            .prop_map(move |(not, from, to, (iif, oif), rest, action, priority)| {
                let family = if v6 { "-6 " } else { "" };
                format!("{family}rule add{not}{from}{to}{iif}{oif}{rest} priority {priority}00{action}")
            })
    })
}

fn neighbour() -> impl Strategy<Value = String> {
    let address = prop_oneof![four(), six()];
    let how = select(
        &["nud permanent", "nud noarp", "nud permanent router", "nud permanent extern_learn", "nud stale"][..],
    );
    let plain = (address.clone(), device(), how, 0..9u8).prop_map(|(a, device, how, mac)| {
        format!("neigh replace {a} lladdr 02:00:00:00:00:0{mac} dev {device} {how}")
    });
    let proxy = (address, device()).prop_map(|(a, device)| format!("neigh add proxy {a} dev {device}"));
    prop_oneof![4 => plain, 1 => proxy]
}

/// Settings, by file and value.
fn sysctl() -> impl Strategy<Value = (String, &'static str)> {
    let of_device = (
        device(),
        select(
            &[
                ("ipv4/conf/IF/rp_filter", "2"),
                ("ipv4/conf/IF/arp_notify", "1"),
                ("ipv4/conf/IF/accept_local", "1"),
                ("ipv4/conf/IF/proxy_arp", "1"),
                ("ipv4/conf/IF/forwarding", "1"),
                ("ipv6/conf/IF/accept_ra", "0"),
                ("ipv6/conf/IF/accept_dad", "0"),
                ("ipv6/conf/IF/ndisc_notify", "1"),
                ("ipv6/conf/IF/forwarding", "1"),
                ("ipv6/conf/IF/keep_addr_on_down", "1"),
                ("ipv4/neigh/IF/base_reachable_time_ms", "12000"),
                ("ipv4/neigh/IF/locktime", "0"),
                ("ipv6/neigh/IF/retrans_time_ms", "500"),
                ("ipv6/neigh/IF/gc_stale_time", "120"),
            ][..],
        ),
    )
        .prop_map(|(device, (file, value))| (file.replace("IF", device), value));
    let of_all = select(
        &[
            ("core/somaxconn", "123"),
            ("ipv4/ip_local_port_range", "20000 30000"),
            ("ipv4/ping_group_range", "0 2147483647"),
            ("ipv4/ip_unprivileged_port_start", "0"),
            ("ipv4/tcp_syncookies", "0"),
            ("ipv4/tcp_keepalive_time", "600"),
            ("ipv4/tcp_rmem", "4096 65536 1000000"),
            ("ipv4/conf/all/forwarding", "1"),
            ("ipv6/conf/all/forwarding", "1"),
            ("ipv4/conf/all/src_valid_mark", "1"),
            ("ipv4/ip_local_reserved_ports", "8080,9000-9010"),
        ][..],
    )
    .prop_map(|(file, value)| (file.to_owned(), value));
    prop_oneof![of_device, of_all]
}

/// Removes values that change with time.
fn timeless(seen: PodNetworkState) -> PodNetworkState {
    let mut seen = seen;
    seen.left_out.clear();
    for address in seen.interfaces.iter_mut().flat_map(|i| &mut i.addresses) {
        address.valid = address.valid.map(|left| left / 10_000);
        address.preferred = address.preferred.map(|left| left / 10_000);
    }
    // No route is wider than its interfaces, and these are as narrow as their narrowest default route.
    let narrow = |route: &mut Route, mtu: u32| {
        let headers = if route.destination.is_ipv6() { 60 } else { 40 };
        route.mtu = route.mtu.min(mtu);
        route.advmss = route.advmss.min(mtu - headers);
        route.expires = route.expires.map(|left| left / 10_000);
    };
    let mtus: Vec<(String, u32)> = seen.interfaces.iter().map(|i| (i.name.clone(), i.mtu)).collect();
    for (interface, (_, mtu)) in seen.interfaces.iter_mut().zip(&mtus) {
        interface.routes.iter_mut().for_each(|route| narrow(route, *mtu));
    }
    for route in &mut seen.routes {
        let of_hops = mtus.iter().filter(|(name, _)| route.hops.iter().any(|hop| hop.interface == *name));
        if let Some(mtu) = of_hops.map(|(_, mtu)| *mtu).min() {
            narrow(route, mtu);
        }
    }
    seen
}

/// Returns the lines that only one of the states has.
fn difference(was: &PodNetworkState, is: &PodNetworkState) -> String {
    let lines = |seen: &PodNetworkState| {
        let mut all: Vec<String> = Vec::new();
        for i in &seen.interfaces {
            all.push(format!(
                "{} {} {} {:?} {} {} {}",
                i.name, i.index, i.mtu, i.tx_queue_len, i.no_arp, i.promiscuous, i.all_multicast
            ));
            all.extend(i.addresses.iter().map(|a| format!("{} {a:?}", i.name)));
            all.extend(i.routes.iter().map(|r| format!("{} {r:?}", i.name)));
            all.extend(i.neighbours.iter().map(|n| format!("{} {n:?}", i.name)));
            all.extend(i.sysctls.iter().map(|s| format!("{} {s:?}", i.name)));
        }
        all.extend(seen.routes.iter().map(|r| format!("{r:?}")));
        all.extend(seen.rules.iter().map(|r| format!("{r:?}")));
        all.extend(seen.sysctls.iter().map(|s| format!("{s:?}")));
        all.extend(seen.loopback.iter().map(|a| format!("lo {a:?}")));
        all
    };
    let (was, is) = (lines(was), lines(is));
    let gone: Vec<String> = was.iter().filter(|l| !is.contains(l)).map(|l| format!("- {l}")).collect();
    let new: Vec<String> = is.iter().filter(|l| !was.contains(l)).map(|l| format!("+ {l}")).collect();
    if gone.is_empty() && new.is_empty() {
        let moved = was.iter().zip(&is).filter(|(a, b)| a != b).map(|(a, b)| format!("- {a}\n+ {b}"));
        return format!("another order:\n{}", moved.collect::<Vec<_>>().join("\n"));
    }
    [gone, new].concat().join("\n")
}

#[test]
fn every_inspected_network_is_the_same_after_it_is_made_again() {
    let cases = if std::env::var_os("PEERPOD_TEST_LONG").is_some() { 2000 } else { 24 };
    let world = World::new();
    world.widen();
    let state = RefCell::new((world, 0));
    let shape = (
        vec(link(), 0..4),
        vec(address(), 1..8),
        vec(route(), 0..12),
        vec(rule(), 0..6),
        vec(neighbour(), 0..6),
        vec(sysctl(), 0..6),
    );
    let mut runner = TestRunner::new(Config {
        cases,
        failure_persistence: None,
        max_shrink_iters: 200,
        ..Config::default()
    });
    let tried = runner.run(&shape, |(links, addresses, routes, rules, neighbours, sysctls)| {
        let (world, number) = &mut *state.borrow_mut();
        *number += 1;
        let (pod, podns) = (format!("p{number}"), format!("v{number}"));
        let netns = world.bare(&pod, &DEVICES);
        let mut lines = links;
        lines.push("addr add 10.200.0.1/32 dev eth0".to_owned());
        lines.extend([addresses, routes, rules, neighbours].concat());
        world.within(&pod, || {
            sysctls
                .iter()
                .for_each(|(file, value)| drop(std::fs::write(format!("/proc/sys/net/{file}"), value)))
        });
        world.batch(&pod, &lines.join("\n"), true);
        let seen = inspect(&netns).unwrap();
        let plan = world.plan(&seen);
        let told = |e: String| TestCaseError::fail(format!("{e}\nof {lines:#?}\n{sysctls:?}"));
        let applied = world.apply_in(&podns, &plan, None).map_err(|e| told(e.to_string()))?;
        prop_assert_eq!(&applied.left_out, &Vec::<String>::new());
        let copy = inspect(&world.open(&podns)).unwrap();
        let (was, is) = (timeless(seen), timeless(copy));
        prop_assert!(was == is, "{}\nof {:#?} {:?}", difference(&was, &is), lines, sysctls);
        let again = world.apply_in(&podns, &plan, Some(&plan)).map_err(|e| told(e.to_string()))?;
        prop_assert!(!again.changed, "the second time changed something of {:#?} {:?}", lines, sysctls);
        world.forget(&pod);
        world.forget(&podns);
        Ok(())
    });
    tried.unwrap();
}

/// The kernel accepts a gateway as on-link as long as the first route to it allows that. The order in which addresses
/// came determines the first route, and the copy has another order.
#[test]
fn a_gateway_in_a_prefix_of_lo_is_copied_unchanged() {
    let mut world = World::new();
    world.widen();
    let netns = world.bare("pod", &DEVICES);
    let lines = "addr add 10.200.0.1/32 dev eth0\n\
                 addr add fd00:3::1/64 dev lo\n\
                 addr add fd00:3::2/64 dev eth0 nodad\n\
                 -6 route append default via fd00:3::3 onlink dev net1\n";
    world.batch("pod", lines, false);
    let seen = inspect(&netns).unwrap();
    world.apply_in("podns", &world.plan(&seen), None).unwrap();
    let copy = inspect(&world.open("podns")).unwrap();
    let (was, is) = (timeless(seen), timeless(copy));
    assert!(was == is, "{}", difference(&was, &is));
}
