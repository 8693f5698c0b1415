//! Tests of garbage collection after crashes, and of the state of other programs.

use super::*;

fn live(pod: &Netns, sandbox: &str, reserved: Option<&Reserved>, vm: &str) -> Live {
    Live {
        sandbox: sandbox.to_owned(),
        netns: Some((pod.path().to_owned(), pod.id())),
        reserved: reserved.cloned(),
        vm: Some(ip(vm)),
    }
}

#[test]
fn state_without_a_live_sandbox_is_removed_at_the_start() {
    let mut world = World::new();
    let tunnel = open(&world);
    let pods: Vec<Netns> = (1..=4).map(|n| world.pod(&format!("pod{n}"), 30 + n)).collect();
    let before: Vec<String> = (1..=4).map(|n| world.traces(&format!("pod{n}"))).collect();
    let (_, alive, plan) = whole(&tunnel, &pods[0], "alive", ip(VM));
    world.apply(&plan).unwrap();
    whole(&tunnel, &pods[1], "dead", ip("10.77.0.3"));
    // The first sandbox died before its device was named; the device of the second one was deleted.
    whole(&tunnel, &pods[2], "unnamed", ip("10.77.0.4"));
    let name = world.name("pod3");
    let cleared = std::process::Command::new("ip")
        .args(["-n", &name, "link", "set", "pp-vx0", "alias", ""])
        .status()
        .unwrap();
    assert!(cleared.success() && !world.ip("pod3", "link show pp-vx0").contains("alias"));
    whole(&tunnel, &pods[3], "bare", ip("10.77.0.5"));
    world.ip("pod4", "link del pp-vx0");
    let traces = world.traces("pod1");
    drop(tunnel);
    let tunnel = open(&world);
    let done = tunnel.reconcile(&[live(&pods[0], "alive", Some(&alive), VM)]);
    assert!(done.errors.is_empty(), "{done:?}");
    assert_eq!((done.devices, done.redirects, done.elements), (2, 3, 3), "{done:?}");
    assert!(done.sandboxes.contains(&"dead".to_owned()), "{done:?}");
    for n in 2..=4 {
        assert_eq!(world.traces(&format!("pod{n}")), before[n - 1], "pod{n}");
    }
    assert_eq!(world.traces("pod1"), traces);
    world.ping("other", "10.244.1.31", 56);
    let again = tunnel.reconcile(&[live(&pods[0], "alive", Some(&alive), VM)]);
    assert_eq!((again.devices, again.redirects, again.elements), (0, 0, 0), "{again:?}");
    // In another namespace than its own, a live sandbox keeps nothing.
    let elsewhere =
        Live { netns: Some((pods[1].path().to_owned(), pods[1].id())), ..live(&pods[0], "alive", None, VM) };
    assert_eq!(tunnel.reconcile(&[elsewhere]).devices, 1);
    assert_eq!(world.traces("pod1"), before[0]);
    assert!(!table(&world, "node"));
}

#[test]
fn a_sandbox_with_an_unreadable_record_keeps_its_network() {
    let mut world = World::new();
    let tunnel = open(&world);
    let pod = world.pod("pod", 7);
    let (_, _, plan) = whole(&tunnel, &pod, "set-aside", ip(VM));
    world.apply(&plan).unwrap();
    let (traces, elements) = (world.traces("pod"), world.tables("node"));
    let unread = Live { sandbox: "set-aside".to_owned(), netns: None, reserved: None, vm: None };
    let done = open(&world).reconcile(&[unread]);
    assert_eq!((done.devices, done.redirects, done.elements), (0, 0, 0), "{done:?}");
    assert_eq!((world.traces("pod"), world.tables("node")), (traces, elements));
    world.ping("other", "10.244.1.7", 56);
}

#[test]
fn a_stop_in_the_middle_of_a_hot_plug_leaves_nothing_in_the_filter() {
    for gone in [false, true] {
        let mut world = World::new();
        let tunnel = open(&world);
        let pod = world.pod("pod", 7);
        let before = world.traces("pod");
        let (_, recorded, _) = whole(&tunnel, &pod, "sandbox", ip(VM));
        let (_, beside, _) = whole(&tunnel, &world.pod("beside", 8), "beside", ip("10.77.0.3"));
        world.attach("pod", "net1", "10.55.0.2/24");
        let seen = inspect(&pod).unwrap();
        let both = tunnel.reserve(&pod, "sandbox", &seen, false, Some(&recorded)).unwrap();
        tunnel.connect(&pod, "sandbox", &both, &seen, ip(VM)).unwrap();
        assert_eq!(world.tables("node").len(), 3);
        // The stop came before the second tunnel was recorded, with or without its namespace.
        let netns = (!gone).then_some(&pod);
        tunnel.undo("sandbox", netns, Some(&recorded), Some(ip(VM))).unwrap();
        let left: Vec<u32> = world.tables("node").iter().map(|peer| peer.vni).collect();
        assert_eq!(left, [beside.vni().unwrap()]);
        if !gone {
            world.ip("pod", "link del net1");
            assert_eq!(world.traces("pod"), before);
        }
        tunnel.undo("beside", Some(&world.open("beside")), Some(&beside), None).unwrap();
        assert!(!table(&world, "node"));
    }
}

#[test]
fn two_daemons_of_one_machine_keep_their_own() {
    let mut world = World::new();
    let ours = open(&world);
    let owner = Owner::of(&["another", &world.name("node")]);
    let config = TunnelConfig { owner, ..TunnelConfig::default() };
    let theirs = world.within("node", || Tunnel::open(config)).unwrap();
    let (a, b) = (world.pod("a", 31), world.pod("b", 32));
    let (_, _, _) = whole(&ours, &a, "same-name", ip(VM));
    let (_, _, _) = whole(&theirs, &b, "same-name", ip("10.77.0.3"));
    let (traces, elements) = (world.traces("a"), world.tables("node"));
    // Each of them starts anew and has no sandbox at all.
    let done = theirs.reconcile(&[]);
    assert_eq!((done.devices, done.elements), (1, 1), "{done:?}");
    assert_eq!((world.traces("a"), world.tables("node")), (traces, elements));
    assert!(!world.traces("b").contains("pp-vx0"));
    // Nor does one daemon take the namespace of the other.
    let seen = inspect(&a).unwrap();
    let error = theirs.reserve(&a, "same-name", &seen, false, None).unwrap_err();
    assert!(matches!(error, Error::Claimed { .. }), "{error}");
    theirs.undo("same-name", Some(&a), None, None).unwrap();
    assert_eq!(ours.reconcile(&[]).devices, 1);
    assert!(!table(&world, "node"));
}

#[test]
fn a_cnis_own_vxlan_on_the_port_works_beside_ours() {
    let mut world = World::new();
    for (ns, end, far) in [("node", 1, 2), ("vm", 2, 1)] {
        let dev = format!(
            "link add flannel.1 type vxlan id 1 dstport 4789 local 10.77.0.{end} remote 10.77.0.{far}"
        );
        world.ip(ns, &dev);
        world.ip(ns, &format!("addr add 10.60.0.{end}/24 dev flannel.1"));
        world.ip(ns, "link set flannel.1 up");
    }
    world.ping("node", "10.60.0.2", 56);
    let tunnel = open(&world);
    let pod = world.pod("pod", 7);
    let (_, reserved, plan) = whole(&tunnel, &pod, "sandbox", ip(VM));
    world.apply(&plan).unwrap();
    world.ping("other", "10.244.1.7", 56);
    world.ping("node", "10.60.0.2", 1400);
    world.ping("vm", "10.60.0.1", 1400);
    tunnel.undo("sandbox", Some(&pod), Some(&reserved), Some(ip(VM))).unwrap();
    world.ping("node", "10.60.0.2", 56);
}

#[test]
fn tunnels_of_an_earlier_port_are_accepted_until_they_end() {
    let mut world = World::new();
    let before = open_with(&world, TunnelConfig { port: 4790, ..TunnelConfig::default() });
    let pod = world.pod("pod", 7);
    let (seen, reserved, plan) = whole(&before, &pod, "sandbox", ip(VM));
    assert_eq!(reserved.port, 4790);
    world.apply(&plan).unwrap();
    // The same node with another port: a running pod keeps the port that its guest knows.
    let tunnel = open(&world);
    let live = live(&pod, "sandbox", Some(&reserved), VM);
    let done = tunnel.reconcile(&[live]);
    assert_eq!((done.devices, done.elements), (0, 0), "{done:?}");
    assert_eq!(tunnel.reserve(&pod, "sandbox", &seen, false, Some(&reserved)).unwrap(), reserved);
    assert_eq!(tunnel.connect(&pod, "sandbox", &reserved, &seen, ip(VM)).unwrap().0, plan);
    world.ping("other", "10.244.1.7", 56);
    tunnel.undo("sandbox", Some(&pod), Some(&reserved), Some(ip(VM))).unwrap();
    assert!(!table(&world, "node"));
}

/// A small generator of pseudo-random numbers: rounds must differ, and nothing more.
struct Dice(u64);

impl Dice {
    fn below(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % sides
    }
}

/// Abandons steps at any point, with or without a record of them, and starts a new daemon each time; in the end nothing
/// is left.
#[test]
fn nothing_is_left_after_random_crashes() {
    let seed = std::env::var("PEERPOD_TEST_SEED").ok().and_then(|s| s.parse().ok());
    let mut dice = Dice(seed.unwrap_or_else(|| u64::from(std::process::id()) << 20 | 0x9e37));
    println!("seed {}", dice.0);
    let mut world = World::new();
    let mut tunnel = open(&world);
    let pods: Vec<Netns> = (0..3).map(|n| world.pod(&format!("pod{n}"), 31 + n)).collect();
    world.ip("pod1", "link add net1 type veth peer name far1");
    world.ip("pod1", "addr add 10.51.0.7/24 dev net1");
    world.ip("pod1", "link set net1 up");
    run(&format!("tc -n {} qdisc add dev eth0 clsact", world.name("pod2")));
    let before: Vec<String> = (0..3).map(|n| world.traces(&format!("pod{n}"))).collect();
    let mut recorded: [Option<(String, Option<Reserved>)>; 3] = [None, None, None];
    for round in 0..times(30, 1000) {
        let at = dice.below(3) as usize;
        let (pod, vm) = (&pods[at], IpAddr::from([10, 77, 0, 100 + at as u8]));
        match recorded[at].take() {
            None => {
                let sandbox = format!("sandbox-{round}");
                let seen = inspect(pod).unwrap();
                let reserved = tunnel.reserve(pod, &sandbox, &seen, false, None).unwrap();
                match dice.below(4) {
                    // Died before the reservation was recorded; the record has the sandbox alone, or does not exist.
                    0 => recorded[at] = Some((sandbox, None)),
                    1 => {}
                    2 => recorded[at] = Some((sandbox, Some(reserved))),
                    _ => {
                        tunnel.connect(pod, &sandbox, &reserved, &seen, vm).unwrap();
                        recorded[at] = Some((sandbox, Some(reserved)));
                    }
                }
            }
            Some((sandbox, reserved)) => match dice.below(3) {
                0 => tunnel.undo(&sandbox, Some(pod), reserved.as_ref(), Some(vm)).unwrap(),
                // The record vanished with the sandbox.
                1 => {}
                _ => {
                    // Died in the middle of undoing.
                    tunnel.undo(&sandbox, None, reserved.as_ref(), Some(vm)).unwrap();
                    recorded[at] = Some((sandbox, reserved));
                }
            },
        }
        // The daemon is killed, and the next one inspects the state. A namespace without a recorded sandbox must be
        // clean.
        tunnel = open(&world);
        let lives = recorded.iter().zip(&pods).enumerate().filter_map(|(n, (recorded, pod))| {
            let (sandbox, reserved) = recorded.as_ref()?;
            let vm = IpAddr::from([10, 77, 0, 100 + n as u8]).to_string();
            Some(live(pod, sandbox, reserved.as_ref(), &vm))
        });
        let done = tunnel.reconcile(&lives.collect::<Vec<_>>());
        assert!(done.errors.is_empty(), "round {round}: {done:?}");
        for (n, recorded) in recorded.iter().enumerate() {
            if recorded.is_none() {
                assert_eq!(world.traces(&format!("pod{n}")), before[n], "round {round}, pod{n}");
            }
        }
    }
    for (n, recorded) in recorded.iter_mut().enumerate() {
        if let Some((sandbox, reserved)) = recorded.take() {
            tunnel.undo(&sandbox, Some(&pods[n]), reserved.as_ref(), None).unwrap();
        }
        assert_eq!(world.traces(&format!("pod{n}")), before[n]);
    }
    assert!(!table(&world, "node"));
    assert_eq!(world.ip("node", "-o link show type vxlan"), "");
}
