//! Tests the whole tunnel in real namespaces: node, pod, other pod, VM.

use super::world;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use peerpod_podnet::inspect::inspect;
use peerpod_podnet::netlink::Client;
use peerpod_podnet::netns::{self, Netns, NetnsId};
use peerpod_podnet::nft::{Filter, Peer};
use peerpod_podnet::underlay;
use peerpod_podnet::vxlan::{self, Held};
use peerpod_podnet::{Error, guest};
use world::{SHAPE4, SHAPE6, World, attempt, run};

const DEADLINE: Duration = Duration::from_secs(30);

/// Exchanges two small echoes.
fn ping(world: &World, from: &str, to: &str) {
    for _ in 0..2 {
        world.ping(from, to, 56);
    }
}

/// Fetches over TCP from a server in `podns`; returns the client address that the server saw.
fn fetch(world: &World, from: &str, address: &str) -> IpAddr {
    let address: SocketAddr = address.parse().unwrap();
    let listener = world.within("podns", || TcpListener::bind(address).unwrap());
    let server = std::thread::spawn(move || {
        let (mut stream, peer) = listener.accept().unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        let mut asked = vec![0; 4];
        stream.read_exact(&mut asked).unwrap();
        stream.write_all(&vec![7; 1 << 20]).unwrap();
        peer.ip()
    });
    world.within(from, || {
        let mut stream = TcpStream::connect_timeout(&address, DEADLINE).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream.write_all(b"page").unwrap();
        let mut page = Vec::new();
        stream.read_to_end(&mut page).unwrap();
        assert_eq!(page, vec![7; 1 << 20]);
    });
    server.join().unwrap()
}

#[test]
fn both_families_pass_the_tunnel_both_ways() {
    let mut world = World::new();
    let (_pod, seen, _held, plan) = world.whole(SHAPE4);
    assert_eq!(plan.interfaces[0].mtu, 1450);
    for address in ["10.244.1.7", "fd10:244:1::7"] {
        ping(&world, "other", address);
        ping(&world, "node", address);
    }
    for address in ["10.244.1.20", "fd10:244:1::20", "10.244.1.1", "fd10:244:1::1"] {
        ping(&world, "podns", address);
    }
    // Full packets: 1450 = 1422 + 28.
    world.ping("other", "10.244.1.7", 1422);
    world.ping("other", "fd10:244:1::7", 1402);
    assert_eq!(fetch(&world, "other", "10.244.1.7:8080"), "10.244.1.20".parse::<IpAddr>().unwrap());
    assert_eq!(fetch(&world, "other", "[fd10:244:1::7]:8080"), "fd10:244:1::20".parse::<IpAddr>().unwrap());
    for end in ["node", "vm"] {
        assert_eq!(world.fragments(end), "0", "{end} cuts the tunnel's packets");
    }
    // The VM's copy equals the pod's network.
    let copy = inspect(&world.open("podns")).unwrap();
    assert_eq!(copy.primary().mac, seen.primary().mac);
    assert_eq!(copy.primary().mtu, 1450);
    assert_eq!(sorted(&copy.primary().addresses), sorted(&seen.primary().addresses));
    assert_eq!(sorted(&copy.primary().routes), sorted(&seen.primary().routes));
}

fn sorted<T: std::fmt::Debug>(all: &[T]) -> Vec<String> {
    let mut all: Vec<String> = all.iter().map(|one| format!("{one:?}")).collect();
    all.sort();
    all
}

#[test]
fn an_ipv6_underlay_carries_both_families() {
    let mut world = World::new();
    let (_pod, _seen, _held, plan) = world.whole(SHAPE6);
    assert_eq!(plan.interfaces[0].mtu, 1430, "1500 less 70");
    for address in ["10.244.1.7", "fd10:244:1::7"] {
        ping(&world, "other", address);
    }
    assert_eq!(fetch(&world, "other", "10.244.1.7:8080"), "10.244.1.20".parse::<IpAddr>().unwrap());
}

/// The cloud reports the VM's address to the node before the VM has it: the answer of its DHCP server is on its way, or
/// duplicate address detection still runs. Until then its only source address is an `fe80::` one.
#[test]
fn a_tentative_address_counts_as_the_vms_own() {
    let mut world = World::new();
    world.ip("vm", "addr flush dev eth0");
    world.ip("vm", "addr add fe80::77/64 dev eth0 nodad");
    world.ip("vm", "route add fd77::/64 dev eth0");
    let (_pod, _seen, _held, plan) = world.whole(SHAPE6);
    let device = world.ip("podns", "-d link show eth0");
    assert!(device.contains("local fd77::2 "), "{device}");
    // This time with duplicate address detection, which takes a second or more.
    world.ip("vm", "addr add fd77::2/128 dev eth0");
    assert!(!world.apply(&plan).unwrap().changed, "while it is still asked for");
    // A tentative address does not count yet, so that its readiness is a change that a watcher sees.
    let own: IpAddr = "fd77::2".parse().unwrap();
    let is_asked_for = || world.ip("vm", "addr show dev eth0 tentative").contains("fd77::2");
    let has_it = || {
        let uplinks = world.within("vm", || underlay::inspect(&mut Client::route().unwrap()).unwrap());
        uplinks.iter().any(|uplink| uplink.addresses.iter().any(|(address, _)| *address == own))
    };
    let end = std::time::Instant::now() + DEADLINE;
    while is_asked_for() {
        assert!(std::time::Instant::now() < end, "the kernel still checks {own} for duplicates");
        let early = has_it();
        assert!(!early || !is_asked_for(), "the address is reported during duplicate address detection");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(has_it());
    assert!(!world.apply(&plan).unwrap().changed, "when it has it");
    ping(&world, "other", "10.244.1.7");
}

#[test]
fn the_mtu_follows_the_smaller_path_on_either_side() {
    let mut world = World::new();
    world.ip("node", "link set ul0 mtu 1400");
    world.ip("vm", "link set eth0 mtu 1390");
    let (_pod, _seen, _held, plan) = world.whole(SHAPE4);
    assert_eq!(plan.interfaces[0].mtu, 1350, "the MTU of the node's path");
    assert!(world.ip("podns", "link show eth0").contains("mtu 1340"), "the MTU of the VM's path");
    world.ip("node", "link set ul0 mtu 1320");
    let pod = world.open("pod");
    let seen = inspect(&pod).unwrap();
    let held = world.reserve(&pod, "sandbox", SHAPE4, None).unwrap();
    let error = world.connect(&pod, held, SHAPE4, &seen).unwrap_err().to_string();
    assert!(error.contains("1270") && error.contains("1280"), "{error}");
}

#[test]
fn a_second_setup_changes_nothing() {
    let mut world = World::new();
    let (pod, seen, held, plan) = world.whole(SHAPE4);
    let traces = world.traces("pod");
    let inside = world.ip("podns", "addr show eth0") + &world.ip("podns", "route show");
    let again = world.reserve(&pod, "sandbox", SHAPE4, Some(held.vni)).unwrap();
    assert_eq!(again, held);
    assert_eq!(world.reserve(&pod, "sandbox", SHAPE4, None).unwrap(), held);
    assert_eq!(world.connect(&pod, held, SHAPE4, &seen).unwrap(), plan);
    assert_eq!(inspect(&pod).unwrap(), seen, "our own device does not change the inspection");
    let applied = world.apply(&plan).unwrap();
    assert!(!applied.changed && applied.mtu == 1450, "{applied:?}");
    assert_eq!(world.traces("pod"), traces);
    assert_eq!(world.ip("podns", "addr show eth0") + &world.ip("podns", "route show"), inside);
    let filters = run(&format!("tc -n {} filter show dev eth0 ingress", world.name("pod")));
    assert_eq!(filters.matches("mirred").count(), 1, "{filters}");
    ping(&world, "other", "10.244.1.7");
}

#[test]
fn the_guest_adds_missing_entries_and_keeps_existing_ones() {
    let mut world = World::new();
    let (_pod, _seen, _held, plan) = world.whole(SHAPE4);
    let index = world.ip("podns", "-o link show eth0").split(':').next().unwrap().to_owned();
    world.ip("podns", "addr del fd10:244:1::7/64 dev eth0");
    world.ip("podns", "route del 10.96.0.0/16");
    world.ip("podns", "link set eth0 mtu 1300");
    world.ip("podns", "route add 10.200.0.0/16 dev eth0");
    assert!(world.apply(&plan).unwrap().changed);
    assert!(world.ip("podns", "-o link show eth0").starts_with(&index), "the device was made anew");
    assert!(world.ip("podns", "route show").contains("10.200.0.0/16"));
    ping(&world, "other", "fd10:244:1::7");
    assert!(!world.apply(&plan).unwrap().changed);
    // Another plan (a new VNI) replaces it.
    let mut other = plan.clone();
    other.interfaces[0].vni ^= 1;
    assert!(world.apply(&other).unwrap().changed);
    assert!(
        world.ip("podns", "-d link show eth0").contains(&format!("vxlan id {}", other.interfaces[0].vni))
    );
}

#[test]
fn the_guest_makes_all_of_it_or_nothing() {
    let mut world = World::new();
    let (_pod, _seen, _held, plan) = world.whole(SHAPE4);
    let path = world.path("podns");
    world.within("vm", || guest::remove(&plan, &path)).unwrap();
    world.within("vm", || guest::remove(&plan, &path)).unwrap();
    assert_eq!(world.tables("vm"), []);
    let empty = world.ip("podns", "-o link show");
    assert_eq!(empty.lines().count(), 1, "{empty}");
    let mut impossible = plan.clone();
    impossible.interfaces[0].routes[0].source = "203.0.113.1".into();
    let error = world.apply(&impossible).unwrap_err().to_string();
    assert!(error.contains("add the route to"), "{error}");
    assert_eq!(world.ip("podns", "-o link show"), empty);
    assert!(world.apply(&plan).unwrap().changed);
    world.within("vm", || guest::remove(&plan, std::path::Path::new("/run/netns/ppt-none"))).unwrap();
}

#[test]
fn undo_is_complete_after_every_step_and_twice() {
    let mut world = World::new();
    let pod = world.pod("pod", 7);
    let before = world.traces("pod");
    let seen = inspect(&pod).unwrap();
    let undo = |held: Option<Held>, sandbox: Option<&str>| {
        let errors = world.undo(&pod, sandbox.unwrap_or("another"), held);
        assert!(errors.is_empty(), "{errors:?}");
        assert_eq!(world.traces("pod"), before);
    };
    undo(None, None);
    undo(None, Some("sandbox"));
    // Reserved, recorded or not.
    let held = world.reserve(&pod, "sandbox", SHAPE4, None).unwrap();
    undo(Some(held), None);
    undo(Some(held), None);
    world.reserve(&pod, "sandbox", SHAPE4, None).unwrap();
    undo(None, Some("sandbox"));
    // Connected.
    for name in [None, Some("sandbox")] {
        let held = world.reserve(&pod, "sandbox", SHAPE4, None).unwrap();
        world.connect(&pod, held, SHAPE4, &seen).unwrap();
        undo(if name.is_some() { None } else { Some(held) }, name);
    }
    // Connected, then another program deletes the device: the redirect to nowhere goes too.
    let held = world.reserve(&pod, "sandbox", SHAPE4, None).unwrap();
    world.connect(&pod, held, SHAPE4, &seen).unwrap();
    world.ip("pod", "link del pp-vx0");
    undo(Some(held), Some("sandbox"));
    // A connection after that is complete again.
    let held = world.reserve(&pod, "sandbox", SHAPE4, None).unwrap();
    world.connect(&pod, held, SHAPE4, &seen).unwrap();
    world.ip("pod", "link del pp-vx0");
    let held = world.reserve(&pod, "sandbox", SHAPE4, Some(held.vni)).unwrap();
    let plan = world.connect(&pod, held, SHAPE4, &seen).unwrap();
    world.apply(&plan).unwrap();
    ping(&world, "other", "10.244.1.7");
}

#[test]
fn foreign_entries_on_the_interface_stay() {
    let mut world = World::new();
    let pod = world.pod("pod", 7);
    let name = world.name("pod");
    run(&format!("tc -n {name} qdisc add dev eth0 clsact"));
    run(&format!(
        "tc -n {name} filter add dev eth0 ingress prio 9 protocol ip u32 match ip dst 192.0.2.1 flowid 1:1"
    ));
    let before = world.traces("pod");
    let seen = inspect(&pod).unwrap();
    let held = world.reserve(&pod, "sandbox", SHAPE4, None).unwrap();
    for _ in 0..2 {
        let plan = world.connect(&pod, held, SHAPE4, &seen).unwrap();
        world.apply(&plan).unwrap();
        ping(&world, "other", "10.244.1.7");
        let filters = run(&format!("tc -n {name} filter show dev eth0 ingress"));
        assert_eq!(filters.matches("mirred").count(), 1, "{filters}");
    }
    let errors = world.undo(&pod, "sandbox", Some(held));
    assert!(errors.is_empty(), "{errors:?}");
    assert_eq!(world.traces("pod"), before);
}

#[test]
fn a_vni_is_never_given_twice_for_one_family() {
    let mut world = World::new();
    let (one, two) = (world.pod("one", 31), world.pod("two", 32));
    let first = world.reserve(&one, "first", SHAPE4, Some(777)).unwrap();
    assert_eq!(first.vni, 777);
    let second = world.reserve(&two, "second", SHAPE4, Some(777)).unwrap();
    assert_ne!(second.vni, 777);
    // The other family has its own VNIs.
    let third = world.pod("three", 33);
    assert_eq!(world.reserve(&third, "third", SHAPE6, Some(777)).unwrap().vni, 777);
    // A recorded VNI is used again after its device was lost.
    world.ip("one", "link del pp-vx0");
    assert_eq!(world.reserve(&one, "first", SHAPE4, Some(777)).unwrap().vni, 777);
    // Another shape makes the device anew.
    let held = world.reserve(&one, "first", SHAPE6, None).unwrap();
    assert!(world.ip("one", "-d link show pp-vx0").contains("remote ::1"), "{held:?}");
    let alias = world.ip("one", "-d link show pp-vx0");
    assert!(alias.contains("alias peerpod:first") && !alias.contains("state UP"), "{alias}");
}

#[test]
fn two_sandboxes_cannot_claim_one_namespace() {
    let mut world = World::new();
    let pod = world.pod("pod", 7);
    let held = world.reserve(&pod, "first", SHAPE4, None).unwrap();
    let error = world.reserve(&pod, "second", SHAPE4, None).unwrap_err();
    assert!(matches!(&error, Error::Claimed { other, .. } if other == "first"), "{error}");
    // Its undo leaves the first sandbox's device alone.
    for never in [None, Some(Held { vni: held.vni ^ 1, ..held })] {
        let errors = world.undo(&pod, "second", never);
        assert!(errors.is_empty(), "{errors:?}");
    }
    assert_eq!(world.reserve(&pod, "first", SHAPE4, Some(held.vni)).unwrap(), held);
}

#[test]
fn a_deleted_namespace_is_reported_as_gone() {
    let mut world = World::new();
    let pod = world.pod("pod", 7);
    let seen = inspect(&pod).unwrap();
    let held = world.reserve(&pod, "sandbox", SHAPE4, None).unwrap();
    netns::delete_named(world.path("pod")).unwrap();
    assert!(!pod.is_still_there());
    assert!(matches!(Netns::open(world.path("pod")), Err(e) if e.is_gone()));
    // The open namespace lives, and every operation works on it.
    world.connect(&pod, held, SHAPE4, &seen).unwrap();
    // A namespace that is made anew under the same name is another one.
    let new = netns::create_named(world.path("pod")).unwrap();
    assert_ne!(new.id(), pod.id());
    assert_eq!(NetnsId::of(&world.path("pod")), Some(new.id()));
    let error = world.connect(&new, held, SHAPE4, &seen).unwrap_err();
    assert!(matches!(error, Error::Gone { .. }), "{error}");
    for netns in [&new, &pod] {
        let errors = world.undo(netns, "sandbox", Some(held));
        assert!(errors.is_empty(), "{errors:?}");
    }
}

#[test]
fn a_file_that_is_no_network_namespace_is_refused() {
    let file = std::env::temp_dir().join(format!("ppt-{}-file", std::process::id()));
    std::fs::write(&file, "").unwrap();
    for wrong in [file.as_path(), "/".as_ref(), "/dev/zero".as_ref(), "/proc/self/ns/mnt".as_ref()] {
        let error = Netns::open(wrong).unwrap_err();
        assert!(matches!(error, Error::NotNetns { .. }), "{error}");
    }
    std::fs::remove_file(&file).unwrap();
    let fifo = file.with_extension("fifo");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert!(matches!(Netns::open(&fifo), Err(Error::NotNetns { .. })));
    std::fs::remove_file(&fifo).unwrap();
    let error = Netns::open("/run/netns/ppt-none").unwrap_err();
    assert!(error.is_gone() && error.to_string().contains("/run/netns/ppt-none"), "{error}");
    let here = Netns::current().unwrap();
    assert!(here.run(|| panic!("inside")).is_err());
}

#[test]
fn the_error_of_a_used_port_names_the_other_device() {
    let mut world = World::new();
    let mut host = world.open("node").netlink().unwrap();
    vxlan::probe(&mut host, SHAPE4, None).unwrap();
    assert!(!world.ip("node", "-o link show").contains("pp-vx0"));
    world.ip("node", "link add greedy type vxlan external dstport 4789");
    world.ip("node", "link set greedy up");
    let error = vxlan::probe(&mut host, SHAPE4, None).unwrap_err();
    assert!(matches!(error, Error::Port { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("greedy") && text.contains("4789") && text.contains("tunnel.port"), "{text}");
    world.ip("node", "link del greedy");
    // A CNI's own VXLAN on the port is no obstacle.
    world.ip("node", "link add flannel.1 type vxlan id 1 dstport 4789 local 10.77.0.1 nolearning");
    world.ip("node", "link set flannel.1 up");
    vxlan::probe(&mut host, SHAPE4, None).unwrap();
    let pod = world.pod("pod", 7);
    assert_ne!(world.reserve(&pod, "sandbox", SHAPE4, Some(1)).unwrap().vni, 1);
}

/// Sends 100 VXLAN packets from one address of the VM; returns whether the pod's device received them. (The VM's own
/// neighbour discovery adds one now and then.)
fn taken(world: &World, from: &str, vni: u32) -> bool {
    let received = || -> u64 {
        let all = world.ip("pod", "-s -o link show pp-vx0");
        let numbers = all.split("RX:").nth(1).unwrap().split('\\').nth(1).unwrap();
        numbers.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    let before = received();
    let from: IpAddr = from.parse().unwrap();
    let to = if from.is_ipv6() { "[fd77::1]:4789" } else { "10.77.0.1:4789" };
    world.within("vm", || {
        let socket = UdpSocket::bind((from, 0)).unwrap();
        let mut packet = vec![0x08, 0, 0, 0];
        packet.extend((vni << 8).to_be_bytes());
        packet.extend([0xff; 6]); // broadcast, from a made-up address, of an unused type
        packet.extend([0x02, 0, 0, 0, 0, 9, 0x88, 0xb5]);
        packet.extend([0; 46]);
        for _ in 0..100 {
            socket.send_to(&packet, to).unwrap();
        }
    });
    match received() - before {
        0..10 => false,
        100..110 => true,
        some => panic!("{some} of 100"),
    }
}

#[test]
fn only_the_vm_itself_may_send_into_its_tunnel() {
    for (shape, vm, stranger) in [(SHAPE4, "10.77.0.2", "10.77.0.66"), (SHAPE6, "fd77::2", "fd77::66")] {
        let mut world = World::new();
        world.ip("vm", &format!("addr add {stranger}/{} dev eth0 nodad", if shape.v6 { 64 } else { 24 }));
        let (_pod, _seen, held, _plan) = world.whole(shape);
        assert!(taken(&world, stranger, held.vni), "without the filter");
        let mut client = world.open("node").netfilter().unwrap();
        let filter = Filter::new(4789);
        let peer = Peer { address: vm.parse().unwrap(), vni: held.vni };
        for _ in 0..2 {
            filter.add(&mut client, &[peer], &Vec::new).unwrap();
        }
        assert_eq!(world.tables("node"), [peer]);
        assert!(!taken(&world, stranger, held.vni));
        assert!(!taken(&world, vm, held.vni ^ 1));
        assert!(taken(&world, vm, held.vni));
        ping(&world, "other", "10.244.1.7");
        // The guest has its own filter: another host on the node's network does not reach the pod either.
        assert_eq!(world.tables("vm").len(), 1);
        filter.remove(&mut client, peer).unwrap();
        filter.remove(&mut client, peer).unwrap();
        assert!(filter.remove_if_empty(&mut client).unwrap());
        assert!(!filter.remove_if_empty(&mut client).unwrap());
        assert!(taken(&world, stranger, held.vni), "the table is gone");
    }
}

#[test]
fn the_filter_table_survives_restarts_and_foreign_changes() {
    let mut world = World::new();
    let node = world.empty("fresh");
    let mut client = node.netfilter().unwrap();
    let filter = Filter::new(4789);
    let peers: Vec<Peer> = (1..=3000)
        .map(|n| Peer { address: IpAddr::from([10, 1, (n >> 8) as u8, n as u8]), vni: n })
        .chain([Peer { address: "fd00::1".parse().unwrap(), vni: 5 }])
        .collect();
    filter.delete(&mut client).unwrap();
    assert_eq!(filter.list(&mut client).unwrap(), []);
    filter.add(&mut client, &peers[..1], &|| peers[1..].to_vec()).unwrap();
    assert_eq!(filter.list(&mut client).unwrap().len(), peers.len());
    assert!(!filter.remove_if_empty(&mut client).unwrap(), "it is not empty");
    // Two clients at once, as with two daemons.
    let mut second = node.netfilter().unwrap();
    filter.add(&mut second, &peers[..5], &Vec::new).unwrap();
    assert_eq!(filter.list(&mut second).unwrap().len(), peers.len());
    filter.delete(&mut second).unwrap();
    std::thread::scope(|scope| {
        for part in peers[..64].chunks(8) {
            let (node, filter) = (&node, &filter);
            scope.spawn(move || {
                let mut client = node.netfilter().unwrap();
                for peer in part {
                    filter.add(&mut client, &[*peer], &Vec::new).unwrap();
                    filter.remove(&mut client, *peer).unwrap();
                    filter.remove_if_empty(&mut client).unwrap();
                    filter.add(&mut client, &[*peer], &Vec::new).unwrap();
                }
            });
        }
    });
    assert_eq!(filter.list(&mut client).unwrap().len(), 64);
    assert_eq!(Filter::new(4790).list(&mut client).unwrap(), [], "another port, another table");
    filter.delete(&mut client).unwrap();
}

#[test]
fn named_namespaces_come_and_go() {
    let world = World::new();
    let path = world.path("named");
    let made = netns::create_named(&path).unwrap();
    assert_eq!(netns::create_named(&path).unwrap().id(), made.id(), "kept");
    assert!(run("ip netns list").contains(&world.name("named")));
    netns::delete_named(&path).unwrap();
    netns::delete_named(&path).unwrap();
    assert!(!path.exists());
    // A plain file from a crash half-way is used.
    std::fs::write(&path, "").unwrap();
    netns::create_named(&path).unwrap();
    netns::delete_named(&path).unwrap();
    assert!(!attempt(&format!("ip netns exec {} true", world.name("named"))).status.success());
}
