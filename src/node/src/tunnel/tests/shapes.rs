//! Tests of the properties of tunnels: several interfaces, each classifier, ranges, MTUs.

use super::*;

/// Returns the output of `ip -d -j` for a device.
fn link(world: &World, pod: &str, device: &str) -> serde_json::Value {
    let all: serde_json::Value =
        serde_json::from_str(&world.ip(pod, &format!("-d -j link show dev {device}"))).unwrap();
    all[0].clone()
}

/// Adds another interface to the pod, as Multus does: `name` with 10.5x.0.7, the node at the other end with 10.5x.0.1.
fn extra(world: &World, pod: &str, name: &str, number: u8) {
    let (node, full) = (world.name("node"), world.name(pod));
    run(&format!("ip -n {node} link add x{number} type veth peer name {name} netns {full}"));
    for (ns, device, end) in [(&node, format!("x{number}"), 1), (&full, name.to_owned(), 7)] {
        run(&format!("ip -n {ns} addr add 10.5{number}.0.{end}/24 dev {device}"));
        run(&format!("ip -n {ns} link set {device} up"));
    }
}

#[test]
fn each_interface_has_a_tunnel_of_its_own() {
    let mut world = World::new();
    let tunnel = open(&world);
    let pod = world.pod("pod", 7);
    extra(&world, "pod", "net1", 1);
    extra(&world, "pod", "net2", 2);
    world.ip("pod", "link set net2 mtu 1300");
    let before = world.traces("pod");
    let (seen, reserved, plan) = whole(&tunnel, &pod, "sandbox", ip(VM));
    assert_eq!(seen.interfaces.len(), 3);
    for (slot, (device, interface)) in reserved.devices.iter().zip(&seen.interfaces).enumerate() {
        let there = link(&world, "pod", &format!("pp-vx{slot}"));
        assert_eq!(there["linkinfo"]["info_data"]["id"], device.vni);
        assert_eq!((&there["ifindex"], &there["mtu"]), (&device.ifindex.into(), &interface.mtu.into()));
        assert_eq!(device.interface, interface.index);
        assert_eq!(plan.interfaces[slot].vni, device.vni);
    }
    assert_eq!(world.tables("node").len(), 3);
    world.apply(&plan).unwrap();
    for (from, to) in [("other", "10.244.1.7"), ("node", "10.51.0.7"), ("node", "10.52.0.7")] {
        world.ping(from, to, 56);
    }
    // A repeated call returns the same, recorded or not.
    for recorded in [None, Some(&reserved)] {
        assert_eq!(tunnel.reserve(&pod, "sandbox", &seen, false, recorded).unwrap(), reserved);
    }
    // One interface goes and another one comes: the rest keeps the tunnels that its guest knows.
    world.ip("pod", "link del net1");
    extra(&world, "pod", "net3", 3);
    let now = inspect(&pod).unwrap();
    let later = tunnel.reserve(&pod, "sandbox", &now, false, Some(&reserved)).unwrap();
    assert_eq!(later.devices.len(), 3);
    assert_eq!(later.devices[0], reserved.devices[0]);
    assert_eq!(later.devices[1], reserved.devices[2]);
    assert_eq!(world.tables("node").len(), 2, "the tunnel of net1 is no longer let in");
    assert!(!world.ip("pod", "-o link show").contains("pp-vx1"));
    let plan = tunnel.connect(&pod, "sandbox", &later, &now, ip(VM)).unwrap().0;
    world.apply(&plan).unwrap();
    world.ping("node", "10.53.0.7", 56);
    world.ping("other", "10.244.1.7", 56);
    world.ip("pod", "link del net3");
    tunnel.undo("sandbox", Some(&pod), Some(&later), Some(ip(VM))).unwrap();
    extra(&world, "pod", "net1", 1);
    let names = |text: &str| text.matches(": ").count();
    assert_eq!(names(&world.traces("pod")), names(&before), "{}", world.traces("pod"));
    assert!(!table(&world, "node"));
}

#[test]
fn all_tunnels_are_reserved_or_none() {
    let mut world = World::new();
    let tunnel = open(&world);
    let pod = world.pod("pod", 7);
    extra(&world, "pod", "net1", 1);
    let seen = inspect(&pod).unwrap();
    world.ip("pod", "link add pp-vx1 type vxlan id 5 dstport 99 local 127.0.0.1");
    let error = tunnel.reserve(&pod, "sandbox", &seen, false, None).unwrap_err();
    assert!(matches!(&error, Error::Claimed { .. }), "{error}");
    assert!(!world.ip("pod", "-o link show").contains("pp-vx0"), "half of it stays");
    world.ip("pod", "link del pp-vx1");
    // Other devices have the usual indexes here.
    world.ip("pod", "link add busy index 1048577 type veth peer name busy2 index 1048576");
    let reserved = tunnel.reserve(&pod, "sandbox", &seen, false, None).unwrap();
    for (slot, device) in reserved.devices.iter().enumerate() {
        assert_eq!(link(&world, "pod", &format!("pp-vx{slot}"))["ifindex"], device.ifindex);
    }
    tunnel.undo("sandbox", Some(&pod), Some(&reserved), None).unwrap();
    assert!(!world.ip("pod", "-o link show").contains("pp-vx"));
}

#[test]
fn every_classifier_of_this_kernel_redirects() {
    let mut can = Vec::new();
    for by in Classifier::ALL {
        let mut world = World::new();
        let config = TunnelConfig { redirect: Some(by), owner: world.owner(), ..TunnelConfig::default() };
        let tunnel = match world.within("node", || Tunnel::open(config)) {
            Ok(tunnel) => tunnel,
            Err(error) => {
                let text = error.to_string();
                assert!(matches!(error, Error::NoRedirect(_)) && text.contains(by.name()), "{text}");
                continue;
            }
        };
        let pod = world.pod("pod", 7);
        let before = world.traces("pod");
        let (seen, reserved, plan) = whole(&tunnel, &pod, "sandbox", ip(VM));
        world.apply(&plan).unwrap();
        world.ping("other", "10.244.1.7", 1422);
        let traces = world.traces("pod");
        assert!(traces.contains(&format!("pref 1 {} ", by.name())), "{traces}");
        tunnel.connect(&pod, "sandbox", &reserved, &seen, ip(VM)).unwrap();
        assert_eq!(world.traces("pod"), traces, "a second time adds something");
        // A daemon with another configuration leaves a working redirect as it is, and still removes it at the end.
        let tunnel = open(&world);
        tunnel.connect(&pod, "sandbox", &reserved, &seen, ip(VM)).unwrap();
        assert_eq!(world.traces("pod"), traces, "{by:?} was not left alone");
        tunnel.undo("sandbox", Some(&pod), Some(&reserved), Some(ip(VM))).unwrap();
        assert_eq!(world.traces("pod"), before);
        can.push(by);
    }
    assert!(can.contains(&Classifier::U32) && can.contains(&Classifier::Bpf), "{can:?}");
}

#[test]
fn foreign_ingress_filters_stay_and_work() {
    for (by, kind) in [(Classifier::U32, "clsact"), (Classifier::Bpf, "clsact"), (Classifier::U32, "ingress")]
    {
        let mut world = World::new();
        let tunnel = open_with(&world, TunnelConfig { redirect: Some(by), ..TunnelConfig::default() });
        let (pod, name) = (world.pod("pod", 7), world.name("pod"));
        run(&format!("tc -n {name} qdisc add dev eth0 {kind}"));
        // A program at the preference of the node's own filter, which passes every packet on to the next filter.
        let line = format!("-n {name} filter add dev eth0 ingress prio 1 protocol all bpf bytecode");
        let out = std::process::Command::new("tc")
            .args(line.split(' '))
            .args(["1,6 0 0 0,", "flowid", "1:1"])
            .output()
            .unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        let before = world.traces("pod");
        let (seen, reserved, plan) = whole(&tunnel, &pod, "sandbox", ip(VM));
        assert!(reserved.devices[0].shared, "the qdisc is not ours");
        world.apply(&plan).unwrap();
        world.ping("other", "10.244.1.7", 56);
        let traces = world.traces("pod");
        tunnel.connect(&pod, "sandbox", &reserved, &seen, ip(VM)).unwrap();
        assert_eq!(world.traces("pod"), traces);
        tunnel.undo("sandbox", Some(&pod), Some(&reserved), Some(ip(VM))).unwrap();
        assert_eq!(world.traces("pod"), before, "{by:?} beside {kind}");
    }
}

/// Adds a filter that ends classification for the packets that it matches.
fn add_ending(name: &str, filter: &str) {
    let mut tc = std::process::Command::new("tc");
    tc.args(format!("-n {name} filter add dev eth0 ingress prio 1").split(' '));
    tc.args(filter.split(' '));
    if filter.ends_with("bytecode") {
        tc.arg("1,6 0 0 4294967295,");
    }
    tc.args(["flowid", "1:1"]);
    let out = tc.output().unwrap();
    assert!(out.status.success(), "{filter}: {}", String::from_utf8_lossy(&out.stderr));
}

#[test]
fn a_foreign_terminating_filter_comes_after_ours_or_is_reported() {
    for (filter, first, kind) in [
        ("protocol all bpf bytecode", true, "clsact"),
        ("protocol all bpf bytecode", true, "ingress"),
        ("protocol all u32 match u32 0 0", true, "clsact"),
        ("protocol ip u32 match u32 0 0", false, "clsact"),
        ("protocol ip bpf bytecode", false, "ingress"),
    ] {
        let mut world = World::new();
        let tunnel = open(&world);
        let (pod, name) = (world.pod("pod", 7), world.name("pod"));
        run(&format!("tc -n {name} qdisc add dev eth0 {kind}"));
        add_ending(&name, filter);
        let before = world.traces("pod");
        let (seen, reserved, plan) = whole(&tunnel, &pod, "sandbox", ip(VM));
        world.apply(&plan).unwrap();
        for _ in 0..2 {
            let told = tunnel.connect(&pod, "sandbox", &reserved, &seen, ip(VM)).unwrap();
            assert_eq!((told.0, told.1.is_empty()), (plan.clone(), first), "{filter}: {:?}", told.1);
            if !first {
                let what = filter.split(' ').nth(2).unwrap();
                let [said] = told.1.as_slice() else { panic!("{:?}", told.1) };
                assert!(["eth0", what, "preference 1"].iter().all(|word| said.contains(word)), "{said}");
            }
        }
        if first {
            world.ping("other", "10.244.1.7", 56);
        }
        tunnel.undo("sandbox", Some(&pod), Some(&reserved), Some(ip(VM))).unwrap();
        assert_eq!(world.traces("pod"), before, "{filter}");
    }
}

#[test]
fn a_later_filter_of_the_first_preference_does_not_stay_before_ours() {
    let mut world = World::new();
    let tunnel = open(&world);
    let (pod, name) = (world.pod("pod", 7), world.name("pod"));
    let (seen, reserved, plan) = whole(&tunnel, &pod, "sandbox", ip(VM));
    world.apply(&plan).unwrap();
    add_ending(&name, "protocol all bpf bytecode");
    let told = tunnel.connect(&pod, "sandbox", &reserved, &seen, ip(VM)).unwrap();
    assert_eq!(told.1, [""; 0]);
    world.ping("other", "10.244.1.7", 56);
    for _ in 0..3 {
        let filters = run(&format!("tc -n {name} filter show dev eth0 ingress"));
        let places: Vec<Option<usize>> = ["peerpod:", "bytecode"].map(|word| filters.find(word)).into();
        assert!(filters.matches("peerpod:").count() == 1 && places.is_sorted(), "{filters}");
        let again = tunnel.connect(&pod, "sandbox", &reserved, &seen, ip(VM)).unwrap();
        assert_eq!(again.1, [""; 0]);
    }
}

#[test]
fn qdiscs_exist_before_the_connection_and_one_program_serves_all_pods() {
    let mut world = World::new();
    let tunnel = open(&world);
    let mut programs = Vec::new();
    for (number, name) in [(7, "one"), (8, "two")] {
        let pod = world.pod(name, number);
        let seen = inspect(&pod).unwrap();
        let reserved = tunnel.reserve(&pod, name, &seen, false, None).unwrap();
        // On a device that is up, the kernel waits for all processors before it adds a qdisc.
        let qdiscs = run(&format!("tc -n {} qdisc show dev pp-vx0", world.name(name)));
        assert!(qdiscs.contains("ingress") && !world.ip(name, "link show pp-vx0").contains("UP"), "{qdiscs}");
        tunnel.connect(&pod, name, &reserved, &seen, ip(VM)).unwrap();
        let filters = run(&format!("tc -n {} filter show dev eth0 ingress", world.name(name)));
        let id = filters.split_once(" id ").and_then(|(_, rest)| rest.split(' ').next()).map(str::to_owned);
        programs.push(id.unwrap_or_else(|| panic!("no program: {filters}")));
    }
    assert_eq!(programs[0], programs[1]);
}

#[test]
fn an_existing_empty_qdisc_stays() {
    let mut world = World::new();
    let tunnel = open(&world);
    let (pod, name) = (world.pod("pod", 7), world.name("pod"));
    run(&format!("tc -n {name} qdisc add dev eth0 ingress"));
    let before = world.traces("pod");
    let (_, reserved, _) = whole(&tunnel, &pod, "sandbox", ip(VM));
    tunnel.undo("sandbox", Some(&pod), Some(&reserved), Some(ip(VM))).unwrap();
    assert_eq!(world.traces("pod"), before);
}

#[test]
fn a_pod_with_a_foreign_redirect_is_refused() {
    let mut world = World::new();
    let tunnel = open(&world);
    let (pod, name) = (world.pod("pod", 7), world.name("pod"));
    world.ip("pod", "link add ifb7 type veth peer name ifb8");
    run(&format!("tc -n {name} qdisc add dev eth0 ingress"));
    let line = "filter add dev eth0 ingress prio 1 protocol all u32 match u32 0 0 action mirred egress redirect dev ifb7";
    run(&format!("tc -n {name} {line}"));
    let before = run(&format!("tc -n {name} filter show dev eth0 ingress"));
    let seen = inspect(&pod).unwrap();
    let reserved = tunnel.reserve(&pod, "sandbox", &seen, false, None).unwrap();
    let error = tunnel.connect(&pod, "sandbox", &reserved, &seen, ip(VM)).unwrap_err();
    assert!(matches!(&error, Error::CannotCarry(why) if why.contains("already redirects")), "{error}");
    tunnel.undo("sandbox", Some(&pod), Some(&reserved), Some(ip(VM))).unwrap();
    assert_eq!(run(&format!("tc -n {name} filter show dev eth0 ingress")), before);
}

#[test]
fn vnis_are_in_the_range_and_a_full_range_is_an_error() {
    let mut world = World::new();
    let vnis = Vnis::new(7000, 7002).unwrap();
    let tunnel = open_with(&world, TunnelConfig { vnis, ..TunnelConfig::default() });
    // A VNI of another program on the same port counts as well.
    world.ip("node", "link add flannel.1 type vxlan id 7001 dstport 4789 local 10.77.0.1 nolearning");
    let pods: Vec<Netns> = (1..=3).map(|n| world.pod(&format!("pod{n}"), 30 + n)).collect();
    let mut seen = Vec::new();
    for pod in &pods {
        seen.push(inspect(pod).unwrap());
    }
    let first = tunnel.reserve(&pods[0], "one", &seen[0], false, None).unwrap();
    let second = tunnel.reserve(&pods[1], "two", &seen[1], false, None).unwrap();
    let mut both = [first.vni().unwrap(), second.vni().unwrap()];
    both.sort_unstable();
    assert_eq!(both, [7000, 7002]);
    let error = tunnel.reserve(&pods[2], "three", &seen[2], false, None).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::NoVni { .. }) && text.contains("all of 7000 to 7002"), "{text}");
    tunnel.undo("one", Some(&pods[0]), Some(&first), None).unwrap();
    let third = tunnel.reserve(&pods[2], "three", &seen[2], false, None).unwrap();
    assert_eq!(third.vni(), first.vni());
}

#[test]
fn source_ports_are_in_the_range_and_bound_the_conntrack_entries() {
    let mut world = World::new();
    let config =
        TunnelConfig { source_ports: Some((40000, 40007)), anti_spoof: false, ..TunnelConfig::default() };
    let tunnel = open_with(&world, config);
    world.within("node", || {
        run("nft add table inet firewall");
        run("nft add chain inet firewall in { type filter hook input priority 0 ; }");
        run("nft add rule inet firewall in ct state new counter");
    });
    let pod = world.pod("pod", 7);
    let (_, _, plan) = whole(&tunnel, &pod, "sandbox", ip(VM));
    let range = &link(&world, "pod", "pp-vx0")["linkinfo"]["info_data"]["port_range"];
    assert_eq!((&range["low"], &range["high"]), (&40000.into(), &40007.into()), "{range}");
    world.apply(&plan).unwrap();
    world.ping("other", "10.244.1.7", 56);
    world.within("other", || {
        for _ in 0..200 {
            let socket = std::net::UdpSocket::bind("10.244.1.20:0").unwrap();
            socket.send_to(b"x", "10.244.1.7:9").unwrap();
        }
    });
    let all = world.within("node", || std::fs::read_to_string("/proc/thread-self/net/nf_conntrack").unwrap());
    // The flows that the node began; each line also has the addresses of the answer.
    let begun = |line: &&str| line.split("src=").nth(1).is_some_and(|l| l.starts_with("10.77.0.1 "));
    let tracked = all.lines().filter(begun).filter(|line| line.contains("dport=4789")).count();
    assert!((1..=8).contains(&tracked), "{tracked} entries");
}

#[test]
fn the_mtu_fits_the_path() {
    for (underlay, pods, inside) in [(1460, 1500, 1410), (1500, 1450, 1450), (9001, 9001, 8951)] {
        let mut world = World::new();
        let tunnel = open(&world);
        let pod = world.pod("pod", 7);
        world.ip("node", &format!("link set ul0 mtu {underlay}"));
        world.ip("vm", &format!("link set eth0 mtu {underlay}"));
        for (ns, device) in [("node", "veth7"), ("pod", "eth0"), ("node", "veth20"), ("other", "eth0")] {
            world.ip(ns, &format!("link set {device} mtu {pods}"));
        }
        let (seen, reserved, plan) = whole(&tunnel, &pod, "sandbox", ip(VM));
        assert_eq!(plan.interfaces[0].mtu, inside, "underlay {underlay}, pod {pods}");
        assert_eq!(link(&world, "pod", "pp-vx0")["mtu"], pods, "it takes what the pod's interface takes");
        world.apply(&plan).unwrap();
        world.ping("other", "10.244.1.7", inside as usize - 28);
        assert_eq!((world.fragments("node"), world.fragments("vm")), ("0".into(), "0".into()));
        // The MTU of the route is below that of the device.
        world.ip("node", &format!("route add {VM} dev ul0 mtu {}", underlay - 100));
        assert_eq!(tunnel.path(&reserved, ip(VM)).unwrap(), (ip("10.77.0.1"), underlay - 150));
        let plan = tunnel.connect(&pod, "sandbox", &reserved, &seen, ip(VM)).unwrap().0;
        assert_eq!(plan.interfaces[0].mtu, (underlay - 150).min(pods));
    }
}
