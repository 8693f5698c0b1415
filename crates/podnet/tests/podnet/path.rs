//! Tests the path MTU probe on misleading paths: two routers between node and VM with a narrow hop between them, and no
//! report of it (ICMP is dropped). Real namespaces, real traffic.

use super::world;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use peerpod_link::path_mtu::Token;
use peerpod_link::path_mtu::ask::{self, PathMtu};
use peerpod_link::path_mtu::echo::{Echo, Known, Pass};
use peerpod_podnet::{plan, underlay};
use tokio::runtime::Runtime;
use tokio::time::timeout;
use world::{SHAPE4, SHAPE6, World, run};

const DEADLINE: Duration = Duration::from_secs(20);
const PORT: u16 = 15151;

/// Returns a world with an underlay of `ends` bytes at node and VM, and `middle` bytes between two silent routers.
fn world(ends: u32, middle: u32) -> World {
    let mut world = World::new();
    for name in ["r1", "r2"] {
        world.empty(name);
    }
    let (node, vm, r1, r2) = (world.name("node"), world.name("vm"), world.name("r1"), world.name("r2"));
    run(&format!("ip -n {node} link del ul0"));
    run(&format!("ip -n {node} link add ul0 mtu {ends} type veth peer name west mtu {ends} netns {r1}"));
    run(&format!("ip -n {r1} link add east mtu {middle} type veth peer name east mtu {middle} netns {r2}"));
    run(&format!("ip -n {vm} link add eth0 mtu {ends} type veth peer name west mtu {ends} netns {r2}"));
    // Each end reaches the whole network through its router.
    let routes = [
        (&node, "ul0", "10.77.0.1", "fd77::1", "10.77.1.1", "fd77:1::1"),
        (&vm, "eth0", "10.77.0.2", "fd77::2", "10.77.1.2", "fd77:1::2"),
    ];
    for (ns, device, v4, v6, gateway4, gateway6) in routes {
        run(&format!("ip -n {ns} addr add {v4}/32 dev {device}"));
        run(&format!("ip -n {ns} addr add {v6}/128 dev {device} nodad"));
        run(&format!("ip -n {ns} link set {device} up"));
        run(&format!("ip -n {ns} route add default via {gateway4} dev {device} onlink metric 9"));
        run(&format!("ip -n {ns} route add {gateway6} dev {device}"));
        run(&format!("ip -n {ns} route add default via {gateway6} dev {device} metric 9"));
    }
    for (ns, number, near4, near6, other) in
        [(&r1, 1, "10.77.0.1", "fd77::1", 2), (&r2, 2, "10.77.0.2", "fd77::2", 1)]
    {
        run(&format!("ip -n {ns} addr add 10.77.1.{number}/32 dev west"));
        run(&format!("ip -n {ns} addr add fd77:1::{number}/128 dev west nodad"));
        run(&format!("ip -n {ns} addr add 10.77.2.{number}/24 dev east"));
        run(&format!("ip -n {ns} addr add fd77:2::{number}/64 dev east nodad"));
        for device in ["west", "east"] {
            run(&format!("ip -n {ns} link set {device} up"));
        }
        run(&format!("ip -n {ns} route add {near4} dev west"));
        run(&format!("ip -n {ns} route add {near6} dev west"));
        run(&format!("ip -n {ns} route add default via 10.77.2.{other}"));
        run(&format!("ip -n {ns} route add default via fd77:2::{other}"));
        for (name, value) in [("ipv4/ip_forward", "1"), ("ipv6/conf/all/forwarding", "1")] {
            let path = format!("/proc/sys/net/{name}");
            world.open(ns.rsplit('-').next().unwrap()).run(|| std::fs::write(path, value).unwrap()).unwrap();
        }
        let rules = "add table inet silent; \
             add chain inet silent out { type filter hook output priority 0; }; \
             add rule inet silent out icmp type destination-unreachable drop; \
             add rule inet silent out icmpv6 type packet-too-big drop";
        let nft =
            std::process::Command::new("ip").args(["netns", "exec", ns, "nft", rules]).output().unwrap();
        assert!(nft.status.success(), "{}", String::from_utf8_lossy(&nft.stderr));
    }
    // The link comes before the probe, so the neighbours are resolved by then.
    world.ping("vm", "10.77.0.1", 56);
    world.ping("vm", "fd77::1", 56);
    world
}

struct Relay {
    runtime: Runtime,
    known: Known,
    _pass: Pass,
}

fn token() -> Token {
    Token::new([0x5a; 16])
}

fn relay(world: &World) -> Relay {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let known = Known::default();
    let pass = known.admit(token());
    let address: SocketAddr = format!("[::]:{PORT}").parse().unwrap();
    let echo = world.within("node", || runtime.block_on(Echo::bind(address, known.clone())).unwrap());
    runtime.spawn(echo.run());
    Relay { runtime, known, _pass: pass }
}

impl Relay {
    /// Measures the path MTU as the guest does.
    fn ask(&self, world: &World, node: &str) -> PathMtu {
        let node: IpAddr = node.parse().unwrap();
        world.within("vm", || {
            let top = underlay::mtus(node).unwrap().device;
            let asking =
                async { timeout(DEADLINE, ask::ask(SocketAddr::new(node, PORT), token(), top)).await };
            self.runtime.block_on(asking).expect("the measurement ends by itself").unwrap()
        })
    }
}

/// Sends `bytes` bytes from one namespace to another over TCP, or fails the test.
fn transfer(world: &World, from: &str, to: &str, address: &str, bytes: usize) {
    let address: SocketAddr = address.parse().unwrap();
    let listener = world.within(to, || TcpListener::bind(address).unwrap());
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        let mut got = 0;
        let mut buffer = vec![0; 1 << 16];
        loop {
            match stream.read(&mut buffer).unwrap() {
                0 => return got,
                n => got += n,
            }
        }
    });
    world.within(from, || {
        let mut stream = TcpStream::connect_timeout(&address, DEADLINE).unwrap();
        stream.set_write_timeout(Some(DEADLINE)).unwrap();
        stream.write_all(&vec![7; bytes]).unwrap();
    });
    assert_eq!(server.join().unwrap(), bytes);
}

fn fragments(world: &World) -> Vec<String> {
    ["node", "vm", "r1", "r2"].iter().map(|name| format!("{name} {}", world.fragments(name))).collect()
}

#[test]
fn the_pods_mtu_follows_the_path_and_not_the_devices() {
    for (ends, middle, pod) in [
        (1460, 1460, 1410),
        (1500, 1500, 1450),
        (1500, 1460, 1410),
        (9001, 1500, 1450),
        (9001, 9001, 8951),
        (9001, 8896, 8846),
    ] {
        let mut world = world(ends, middle);
        let relay = relay(&world);
        assert_eq!(relay.ask(&world, "10.77.0.1"), PathMtu::Passes(middle), "{ends} {middle}");
        assert_eq!(relay.ask(&world, "fd77::1"), PathMtu::Passes(middle), "{ends} {middle}");
        // Pods that would use the whole of a jumbo frame.
        for (name, device) in [("node", "cni0"), ("node", "veth20"), ("other", "eth0")] {
            world.ip(name, &format!("link set {device} mtu {ends}"));
        }
        let netns = world.pod("pod", 7);
        world.ip("node", &format!("link set veth7 mtu {ends}"));
        world.ip("pod", &format!("link set eth0 mtu {ends}"));
        let seen = peerpod_podnet::inspect::inspect(&netns).unwrap();
        let held = world.reserve(&netns, "sandbox", SHAPE4, None).unwrap();
        let mut plan = world.connect(&netns, held, SHAPE4, &seen).unwrap();
        assert_eq!(plan::fit_to_path(&mut plan, middle), None);
        let applied = world.apply(&plan).unwrap();
        assert_eq!(applied.mtu, pod, "{ends} {middle}");
        let before = fragments(&world);
        transfer(&world, "other", "podns", "10.244.1.7:9000", 4 << 20);
        transfer(&world, "podns", "other", "10.244.1.20:9000", 4 << 20);
        transfer(&world, "podns", "other", "[fd10:244:1::20]:9001", 4 << 20);
        assert_eq!(fragments(&world), before, "{ends} {middle}: the tunnel's packets were cut");
    }
}

#[test]
fn without_the_probe_a_silent_path_cuts_every_full_packet() {
    // Control for the test above: the same path, with a plan by the MTU of the node's device.
    let mut world = world(1500, 1460);
    let (_pod, _seen, _held, plan) = world.whole(SHAPE4);
    assert_eq!(plan.interfaces[0].mtu, 1450);
    let before = fragments(&world);
    transfer(&world, "podns", "other", "10.244.1.20:9000", 4 << 20);
    assert_ne!(fragments(&world), before);
}

#[test]
fn an_ipv6_path_that_drops_large_packets_passes_a_full_transfer() {
    let mut world = world(1500, 1400);
    let relay = relay(&world);
    let PathMtu::Passes(path) = relay.ask(&world, "fd77::1") else { panic!("no answer") };
    assert_eq!(path, 1400);
    let netns = world.pod("pod", 7);
    let seen = peerpod_podnet::inspect::inspect(&netns).unwrap();
    let held = world.reserve(&netns, "sandbox", SHAPE6, None).unwrap();
    let mut plan = world.connect(&netns, held, SHAPE6, &seen).unwrap();
    plan::fit_to_path(&mut plan, path);
    assert_eq!(world.apply(&plan).unwrap().mtu, 1330);
    transfer(&world, "other", "podns", "10.244.1.7:9000", 1 << 20);
    transfer(&world, "podns", "other", "[fd10:244:1::20]:9000", 1 << 20);
}

#[test]
fn blocked_udp_and_missing_answers_are_reported_in_time() {
    let world = world(1500, 1500);
    let relay = relay(&world);
    // A relay of an earlier version has no such socket.
    let no_relay = SocketAddr::new("10.77.0.1".parse().unwrap(), PORT + 1);
    let ask = |to| world.within("vm", || relay.runtime.block_on(ask::ask(to, token(), 1500)).unwrap());
    assert_eq!(ask(no_relay), PathMtu::Refused);
    drop(relay.known.admit(token())); // the link ends
    assert_eq!(relay.ask(&world, "10.77.0.1"), PathMtu::Silence);
}

/// Sends datagrams that must not be fragmented until the kernel has learnt the path MTU from the routers' reports.
fn learn(world: &World, from: &str, to: &str, size: usize) {
    use rustix::net::sockopt::{Ipv4PathMtuDiscovery, Ipv6PathMtuDiscovery};
    let to: SocketAddr = to.parse().unwrap();
    let any = if to.is_ipv6() { "[::]:0" } else { "0.0.0.0:0" };
    world.within(from, || {
        let socket = std::net::UdpSocket::bind(any).unwrap();
        if to.is_ipv6() {
            rustix::net::sockopt::set_ipv6_mtu_discover(&socket, Ipv6PathMtuDiscovery::DO).unwrap();
        } else {
            rustix::net::sockopt::set_ip_mtu_discover(&socket, Ipv4PathMtuDiscovery::DO).unwrap();
        }
        socket.connect(to).unwrap();
        let since = Instant::now();
        while underlay::mtus(to.ip()).unwrap().learnt == 1500 {
            assert!(since.elapsed() < DEADLINE, "no router reports the narrow link before {to}");
            drop(socket.send(&vec![0; size])); // refused as soon as the value is learnt
            std::thread::sleep(Duration::from_millis(5));
        }
    });
}

#[test]
fn an_old_router_message_does_not_narrow_a_pod_on_a_wide_path() {
    let mut world = world(1500, 1400);
    for name in ["r1", "r2"] {
        run(&format!("ip netns exec {} nft delete table inet silent", world.name(name)));
    }
    let relay = relay(&world);
    for (node, to, size) in [("10.77.0.1", "10.77.0.1:9", 1472), ("fd77::1", "[fd77::1]:9", 1452)] {
        learn(&world, "vm", to, size);
        let node: IpAddr = node.parse().unwrap();
        let figures = world.within("vm", || underlay::mtus(node).unwrap());
        assert_eq!(figures, underlay::Mtus { device: 1500, route: 1500, learnt: 1400 });
    }
    learn(&world, "node", "10.77.0.2:9", 1472);
    for name in ["r1", "r2"] {
        world.ip(name, "link set east mtu 1500");
    }
    assert_eq!(relay.ask(&world, "10.77.0.1"), PathMtu::Passes(1500));
    assert_eq!(relay.ask(&world, "fd77::1"), PathMtu::Passes(1500));
    let (_pod, _seen, _held, mut plan) = world.whole(SHAPE4);
    assert_eq!(plan.interfaces[0].mtu, 1450, "the node plans with the MTU that it learnt long ago");
    plan::fit_to_path(&mut plan, 1500);
    assert_eq!(world.apply(&plan).unwrap().mtu, 1450);
    // A configured MTU of a route stays in force, unlike a learnt one.
    run(&format!("ip -n {} route add 10.77.0.1 via 10.77.1.2 dev eth0 onlink mtu 1420", world.name("vm")));
    assert_eq!(world.apply(&plan).unwrap().mtu, 1370);
}
