//! Tests of failures while pods are set up, run and are torn down.

use std::time::Duration;

use peerpod_podnet::events::Events;
use tokio::time::timeout;

use super::*;

#[test]
fn reconnecting_repairs_every_fault() {
    let mut world = World::new();
    let tunnel = open(&world);
    let (pod, name) = (world.pod("pod", 7), world.name("pod"));
    let (seen, reserved, plan) = whole(&tunnel, &pod, "sandbox", ip(VM));
    world.apply(&plan).unwrap();
    world.ping("other", "10.244.1.7", 56);
    let vni = reserved.vni().unwrap();
    let set = format!("inet peerpod-{}", world.owner());
    // Includes state that the other tests need not see: the ends, the way back, the guarded VNIs.
    let sight = || {
        let back = run(&format!("tc -n {name} filter show dev pp-vx0 ingress"));
        let back: Vec<&str> = back.lines().filter(|line| !line.starts_with("\tindex ")).collect();
        let ends = world.ip("pod", "-d link show pp-vx0");
        let rules = world.within("node", || run("nft list ruleset"));
        // A program that was loaded again has another id.
        let numberless = |line: &str| match line.split_once(" id ") {
            Some((filter, _)) if filter.contains(" bpf ") => filter.to_owned(),
            _ => line.to_owned(),
        };
        let traces: Vec<String> = world.traces("pod").lines().map(numberless).collect();
        [traces.join("\n"), back.join("\n"), ends, rules].join("\n")
    };
    let before = sight();
    let in_pod = [
        "ip link set pp-vx0 down".to_owned(),
        "ip link set pp-vx0 mtu 1200".to_owned(),
        format!("ip link set pp-vx0 type vxlan id {vni} remote 10.77.0.99"),
        format!("ip link set pp-vx0 type vxlan id {vni} local 10.77.0.98"),
        "tc qdisc del dev eth0 ingress".to_owned(),
        "tc qdisc del dev pp-vx0 ingress".to_owned(),
        "tc filter del dev eth0 ingress".to_owned(),
        "tc filter del dev pp-vx0 ingress".to_owned(),
    ];
    let in_node = [
        format!("nft flush set {set} peers4"),
        format!("nft flush set {set} vnis4"),
        format!("nft delete table {set}"),
    ];
    for (ns, line) in in_pod.iter().map(|l| ("pod", l)).chain(in_node.iter().map(|l| ("node", l))) {
        world.within(ns, || run(line));
        assert_ne!(sight(), before, "{line} broke nothing");
        let again = tunnel.connect(&pod, "sandbox", &reserved, &seen, ip(VM)).unwrap().0;
        assert_eq!(again, plan);
        assert_eq!(sight(), before, "after {line}");
        world.ping("other", "10.244.1.7", 56);
    }
    // The pod's interface goes down and comes up again; the kernel keeps its configuration.
    world.ip("pod", "link set eth0 down");
    world.ip("pod", "link set eth0 up");
    tunnel.connect(&pod, "sandbox", &reserved, &seen, ip(VM)).unwrap();
    world.ping("other", "10.244.1.7", 56);
    // Another program's redirect behind the node's own.
    let double = "filter add dev eth0 ingress prio 2 protocol all u32 match u32 0 0 action mirred egress redirect dev pp-vx0";
    run(&format!("tc -n {name} {double}"));
    tunnel.connect(&pod, "sandbox", &reserved, &seen, ip(VM)).unwrap();
    let filters = run(&format!("tc -n {name} filter show dev eth0 ingress"));
    assert!(filters.matches("mirred").count() >= 1, "{filters}");
    world.ping("other", "10.244.1.7", 56);
}

#[tokio::test]
async fn reconnecting_causes_no_events_in_the_pods_network() {
    let mut world = World::new();
    let tunnel = open(&world);
    let pod = world.pod("pod", 7);
    let (seen, reserved, _) = whole(&tunnel, &pod, "sandbox", ip(VM));
    let mut events = Events::of_pod(&pod).unwrap();
    let moment = Duration::from_millis(500);
    // The kernel's own events (a neighbour that ages, late on a busy machine) may fall into a round; those of the node
    // would fall into each.
    let mut silent = false;
    for _ in 0..10 {
        while timeout(moment, events.settled(Duration::ZERO, Duration::ZERO)).await.is_ok() {}
        for _ in 0..3 {
            tunnel.connect(&pod, "sandbox", &reserved, &seen, ip(VM)).unwrap();
        }
        silent = timeout(moment, events.settled(Duration::ZERO, Duration::ZERO)).await.is_err();
        if silent {
            break;
        }
    }
    assert!(silent, "events would make a follower connect for ever");
    world.ip("pod", "link set pp-vx0 down");
    timeout(10 * moment, events.settled(Duration::ZERO, Duration::ZERO)).await.unwrap().unwrap();
}

#[test]
fn a_new_address_of_the_vm_or_the_node_is_followed() {
    let mut world = World::new();
    let tunnel = open(&world);
    let pod = world.pod("pod", 7);
    let (seen, reserved, plan) = whole(&tunnel, &pod, "sandbox", ip(VM));
    world.apply(&plan).unwrap();
    world.ip("vm", "addr add 10.77.0.3/24 dev eth0");
    let plan = tunnel.connect(&pod, "sandbox", &reserved, &seen, ip("10.77.0.3")).unwrap().0;
    assert_eq!(plan.underlay.vm_address, "10.77.0.3");
    let only = |address: &str| {
        let all = world.tables("node");
        assert_eq!(all.iter().map(|peer| peer.address).collect::<Vec<_>>(), [ip(address)]);
    };
    only("10.77.0.3");
    assert!(world.ip("pod", "-d link show pp-vx0").contains("remote 10.77.0.3 local 10.77.0.1"));
    let vnis = world.within("node", || run(&format!("nft list set inet peerpod-{} vnis4", world.owner())));
    assert!(vnis.contains("elements"), "the VNI is no longer guarded: {vnis}");
    world.ip("node", "addr del 10.77.0.1/24 dev ul0");
    world.ip("node", "addr add 10.77.0.9/24 dev ul0");
    let plan = tunnel.connect(&pod, "sandbox", &reserved, &seen, ip("10.77.0.3")).unwrap().0;
    assert_eq!(plan.underlay.node_address, "10.77.0.9");
    assert!(world.ip("pod", "-d link show pp-vx0").contains("remote 10.77.0.3 local 10.77.0.9"));
    world.apply(&plan).unwrap();
    world.ping("other", "10.244.1.7", 56);
    tunnel.undo("sandbox", Some(&pod), Some(&reserved), Some(ip("10.77.0.3"))).unwrap();
    assert!(!table(&world, "node"));
}

#[test]
fn a_namespace_deleted_during_the_setup_is_an_error() {
    let mut world = World::new();
    let tunnel = open(&world);
    let mut outcomes = [0, 0];
    for round in 0..times(15, 200) {
        let name = format!("pod{round}");
        world.bare_pod(&name);
        let path = world.path(&name);
        let steps = || {
            // No handle is held across the steps: that alone would keep the namespace.
            let seen = inspect(&Netns::open(&path)?)?;
            let reserved = tunnel.reserve(&Netns::open(&path)?, "sandbox", &seen, false, None)?;
            tunnel.connect(&Netns::open(&path)?, "sandbox", &reserved, &seen, ip(VM))
        };
        let (path, world) = (&path, &world);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                // At another point of the set-up each time.
                std::thread::sleep(Duration::from_micros(100 * round as u64));
                peerpod_podnet::netns::delete_named(path).unwrap();
            });
            match steps() {
                Ok(_) => outcomes[0] += 1,
                Err(error) => {
                    assert!(error.is_gone() || matches!(error, Error::NotNetns { .. }), "{error}");
                    outcomes[1] += 1;
                }
            }
        });
        tunnel.undo("sandbox", None, None, Some(ip(VM))).unwrap();
        assert!(!table(world, "node"), "round {round}");
    }
    println!("set up before the end {}, refused {}", outcomes[0], outcomes[1]);
    assert!(outcomes[1] > 0, "it never went in the middle");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_pods_are_set_up_and_torn_down_at_once() {
    let mut world = World::new();
    let tunnel = open(&world);
    let count = times(60, 300);
    let pods: Vec<Netns> = (0..count).map(|n| world.bare_pod(&format!("p{n}"))).collect();
    for _ in 0..2 {
        let tasks: Vec<_> = pods
            .iter()
            .enumerate()
            .map(|(n, pod)| {
                let (tunnel, pod) = (tunnel.clone(), pod.clone());
                tokio::task::spawn_blocking(move || {
                    let vm = IpAddr::from([10, 77, 0, 10 + (n % 200) as u8]);
                    let sandbox = format!("sandbox-{n}");
                    let (_, reserved, _) = whole(&tunnel, &pod, &sandbox, vm);
                    (pod, sandbox, reserved, vm)
                })
            })
            .collect();
        let mut all = Vec::new();
        for task in tasks {
            all.push(task.await.unwrap());
        }
        let mut vnis: Vec<_> = all.iter().map(|(_, _, reserved, _)| reserved.vni()).collect();
        vnis.sort_unstable();
        vnis.dedup();
        assert_eq!((vnis.len(), world.tables("node").len()), (count, count));
        let tasks: Vec<_> = all
            .into_iter()
            .map(|(pod, sandbox, reserved, vm)| {
                let tunnel = tunnel.clone();
                tokio::task::spawn_blocking(move || {
                    tunnel.undo(&sandbox, Some(&pod), Some(&reserved), Some(vm)).unwrap();
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
        assert!(!table(&world, "node"));
        for n in [0, count / 2, count - 1] {
            let traces = world.traces(&format!("p{n}"));
            assert!(!traces.contains("pp-vx") && !traces.contains("ingress"), "{traces}");
        }
    }
}

#[test]
fn a_tunnel_is_made_beside_a_thousand_foreign_links() {
    let mut world = World::new();
    let tunnel = open(&world);
    let pod = world.bare_pod("pod");
    let batch: String =
        (0..times(500, 2500)).map(|n| format!("link add f{n} type veth peer name g{n}\n")).collect();
    let file = std::env::temp_dir().join(world.name("links"));
    std::fs::write(&file, batch).unwrap();
    run(&format!("ip -n {} -batch {}", world.name("node"), file.display()));
    std::fs::remove_file(&file).unwrap();
    for _ in 0..5 {
        let (_, reserved, _) = whole(&tunnel, &pod, "sandbox", ip(VM));
        tunnel.undo("sandbox", Some(&pod), Some(&reserved), Some(ip(VM))).unwrap();
    }
}
