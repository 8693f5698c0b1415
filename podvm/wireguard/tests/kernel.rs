//! Tests the data plane between real kernels: node, NAT and VM are network namespaces, the devices are TUN and VXLAN,
//! and `ip`, `ping` and a packet socket on the wire verify the results. Needs root.

#![allow(clippy::unwrap_used)] // a failed set-up fails the test

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, setsockopt, socket, sockopt,
};
use nix::sys::time::TimeVal;
use peerpod_podnet::netns::Netns;
use peerpod_podnet::wireguard::Inner;
use peerpod_wireguard::{
    DataPlane, Engine, Lane, NODE_INNER, PeerConfig, PrivateKey, Reason, Tun, bind, inner_of,
};

static COUNTER: AtomicU32 = AtomicU32::new(0);
const VNI: u32 = 0x00_1234;
const VXLAN_PORT: u16 = 4789;
const MTU: u32 = 1500 - 60;

fn run(line: &str) -> String {
    let mut words = line.split_whitespace();
    let out = Command::new(words.next().unwrap()).args(words).output().unwrap();
    assert!(out.status.success(), "{line}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8_lossy(&out.stdout).into_owned()
}

struct World {
    prefix: String,
    dir: PathBuf,
    names: Vec<String>,
}

impl World {
    /// node 10.77.0.1 — 10.77.0.254 nat 192.168.50.1 — 192.168.50.2 vm, and the end of a pod on either side.
    fn new() -> World {
        assert!(nix::unistd::geteuid().is_root(), "these tests make network namespaces: run them as root");
        let prefix = format!("ppwg{}-{}-", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed));
        let dir = std::env::temp_dir().join(format!("{prefix}dir"));
        std::fs::create_dir_all(&dir).unwrap();
        let mut world = World { prefix, dir, names: Vec::new() };
        for name in ["node", "nat", "vm", "outer", "pod"] {
            let full = world.name(name);
            run(&format!("ip netns add {full}"));
            world.names.push(full.clone());
            run(&format!("ip -n {full} link set lo up"));
        }
        let (node, nat, vm) = (world.name("node"), world.name("nat"), world.name("vm"));
        run(&format!("ip -n {nat} link add left type veth peer name eth0 netns {node}"));
        run(&format!("ip -n {nat} link add right type veth peer name eth0 netns {vm}"));
        for (ns, device, address) in [
            (&node, "eth0", "10.77.0.1/24"),
            (&nat, "left", "10.77.0.254/24"),
            (&nat, "right", "192.168.50.1/24"),
            (&vm, "eth0", "192.168.50.2/24"),
        ] {
            run(&format!("ip -n {ns} addr add {address} dev {device}"));
            run(&format!("ip -n {ns} link set {device} up"));
        }
        run(&format!("ip -n {vm} route add default via 192.168.50.1"));
        run(&format!("ip netns exec {nat} sysctl -qw net.ipv4.ip_forward=1"));
        world.nft("add table ip t");
        world.nft("add chain ip t post { type nat hook postrouting priority 100 ; }");
        world.nft("add rule ip t post oifname left masquerade");
        world
    }

    fn nft(&self, what: &str) {
        let nat = self.name("nat");
        let out = Command::new("ip").args(["netns", "exec", &nat, "nft", what]).output().unwrap();
        assert!(out.status.success(), "nft {what}: {}", String::from_utf8_lossy(&out.stderr));
    }

    fn name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    fn netns(&self, name: &str) -> Netns {
        Netns::open(format!("/run/netns/{}", self.name(name))).unwrap()
    }

    fn inner_path(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}.netns"))
    }

    /// Sets up one end: its private namespace, its device, and in `pod` a VXLAN device from there.
    fn end(
        &self,
        side: &str,
        pod: &str,
        ours: Ipv4Addr,
        theirs: Ipv4Addr,
        host: u8,
    ) -> peerpod_wireguard::Tun {
        let path = self.inner_path(side);
        let opened = Inner::open(&path, None, ours, 9000).unwrap();
        opened.inner.fit(theirs, MTU).unwrap();
        let (path, pod) = (path.display().to_string(), self.name(pod));
        run(&format!(
            "nsenter --net={path} ip link add pp-vx type vxlan id {VNI} local {ours} remote {theirs} dstport {VXLAN_PORT} noudpcsum nolearning"
        ));
        run(&format!("nsenter --net={path} ip link set pp-vx netns {pod}"));
        run(&format!("ip -n {pod} link set pp-vx name eth0 mtu {} up", MTU - 50));
        run(&format!("ip -n {pod} addr add 10.244.1.{host}/24 dev eth0"));
        run(&format!("ip -n {pod} addr add fd10:244:1::{host}/64 dev eth0 nodad"));
        opened.tun.unwrap()
    }

    fn ping(&self, from: &str, target: &str, extra: &str) -> bool {
        let line = format!("netns exec {} ping -n -c 1 -W 1 {extra} {target}", self.name(from));
        Command::new("ip").args(line.split_whitespace()).output().unwrap().status.success()
    }

    fn ping_within(&self, from: &str, target: &str, patience: Duration) -> Duration {
        let since = Instant::now();
        while !self.ping(from, target, "") {
            assert!(since.elapsed() < patience, "{target} does not answer {from} within {patience:?}");
        }
        since.elapsed()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for side in ["node", "vm"] {
            drop(peerpod_podnet::netns::delete_named(self.inner_path(side)));
        }
        for name in &self.names {
            drop(Command::new("ip").args(["netns", "del", name]).output());
        }
        drop(std::fs::remove_dir_all(&self.dir));
    }
}

/// Both ends with their keys and data planes.
struct Tunnel {
    world: World,
    keys: [PrivateKey; 2],
    node: Option<DataPlane>,
    guest: Option<DataPlane>,
    port: u16,
}

impl Tunnel {
    fn new() -> Tunnel {
        let world = World::new();
        let keys = [PrivateKey::generate().unwrap(), PrivateKey::generate().unwrap()];
        let vm = inner_of(VNI).unwrap();
        let tun = world.end("node", "outer", NODE_INNER, vm, 1);
        let socket = world.netns("node").run(|| bind(0)).unwrap().unwrap();
        let port = socket.local_addr().unwrap().port();
        let node = DataPlane::start(Tunnel::node_engine(&keys), tun, socket, "node", || ()).unwrap();
        let tun = world.end("vm", "pod", vm, NODE_INNER, 7);
        let socket = world.netns("vm").run(|| bind(0)).unwrap().unwrap();
        let engine = Engine::new(keys[1].clone());
        let lane = Lane { ours: vm, theirs: NODE_INNER, port: VXLAN_PORT, vnis: vec![VNI], fragments: true };
        let endpoint = SocketAddr::from(([10, 77, 0, 1], port));
        let peer = PeerConfig {
            name: "node".to_owned(),
            key: keys[0].public(),
            lane,
            endpoints: vec![endpoint],
            keepalive: Some(Duration::from_secs(1)),
        };
        engine.put_peer(&peer).unwrap();
        let guest = DataPlane::start(Arc::new(engine), tun, socket, "guest", || ()).unwrap();
        let tunnel = Tunnel { world, keys, node: Some(node), guest: Some(guest), port };
        tunnel.world.ping_within("outer", "10.244.1.7", Duration::from_secs(60));
        tunnel
    }

    fn node_engine(keys: &[PrivateKey; 2]) -> Arc<Engine> {
        let engine = Engine::new(keys[0].clone());
        let theirs = inner_of(VNI).unwrap();
        let lane = Lane { ours: NODE_INNER, theirs, port: VXLAN_PORT, vnis: vec![VNI], fragments: false };
        let peer = PeerConfig {
            name: "pod".to_owned(),
            key: keys[1].public(),
            lane,
            endpoints: vec![],
            keepalive: None,
        };
        engine.put_peer(&peer).unwrap();
        Arc::new(engine)
    }

    fn node(&self) -> &DataPlane {
        self.node.as_ref().unwrap()
    }
}

/// Moves `bytes` over one TCP connection and returns the time taken.
fn transfer(from: &Netns, to: &Netns, address: &str, content: &[u8], bytes: usize) -> Duration {
    let listener = to.run(|| TcpListener::bind((address, 0))).unwrap().unwrap();
    let target = listener.local_addr().unwrap();
    let since = Instant::now();
    std::thread::scope(|scope| {
        let received = scope.spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut buffer = vec![0; 1 << 17];
            let mut total = 0;
            loop {
                match stream.read(&mut buffer).unwrap() {
                    0 => return total,
                    n => total += n,
                }
            }
        });
        let mut stream = from.run(|| TcpStream::connect(target)).unwrap().unwrap();
        stream.set_write_timeout(Some(Duration::from_secs(20))).unwrap();
        let block: Vec<u8> = content.iter().copied().cycle().take(1 << 17).collect();
        let mut left = bytes;
        while left > 0 {
            let n = left.min(block.len());
            stream.write_all(&block[..n]).unwrap();
            left -= n;
        }
        drop(stream);
        assert_eq!(received.join().unwrap(), bytes);
    });
    since.elapsed()
}

#[test]
fn ping_and_tcp_of_both_families_go_both_ways_through_a_nat() {
    let tunnel = Tunnel::new();
    let world = &tunnel.world;
    for (from, target) in
        [("outer", "10.244.1.7"), ("outer", "fd10:244:1::7"), ("pod", "10.244.1.1"), ("pod", "fd10:244:1::1")]
    {
        world.ping_within(from, target, Duration::from_secs(60));
    }
    let (outer, pod) = (world.netns("outer"), world.netns("pod"));
    for (from, to, address) in [
        (&outer, &pod, "10.244.1.7"),
        (&pod, &outer, "10.244.1.1"),
        (&outer, &pod, "fd10:244:1::7"),
        (&pod, &outer, "fd10:244:1::1"),
    ] {
        let took = transfer(from, to, address, b"x", 64 << 20);
        println!("64 MiB to {address}: {took:?}");
    }
    let path = tunnel.node().engine().path_of("pod").unwrap();
    assert_eq!(path.peer.ip().to_string(), "10.77.0.254", "it is behind the NAT");
    let snapshot = tunnel.node().engine().stats().snapshot();
    println!("{snapshot:?}");
    assert!(tunnel.node().is_running() && tunnel.guest.as_ref().unwrap().is_running());
}

#[test]
fn packets_of_exactly_the_mtu_pass_whole_and_larger_ones_are_cut_inside() {
    let tunnel = Tunnel::new();
    let world = &tunnel.world;
    // 1390 bytes of IP: 20 + 8 + 1362; the wire takes 1500 and no more.
    assert!(world.ping("outer", "10.244.1.7", "-M do -s 1362"));
    assert!(!world.ping("outer", "10.244.1.7", "-M do -s 1363"));
    // Fragments made by the pod itself.
    assert!(world.ping("outer", "10.244.1.7", "-s 4000"));
    // A device with a wrong MTU, as after a redirect from a wider one: the packet is fragmented inside the tunnel.
    let lone = || tunnel.node().engine().stats().snapshot().dropped(Reason::Fragment);
    run(&format!("ip -n {} link set eth0 mtu 2000", world.name("outer")));
    assert!(world.ping("outer", "10.244.1.7", "-s 1900"), "the pod's answer fits, in fragments of its own");
    assert_eq!(lone(), 0);
    // Not in the other direction: a guest fits the MTU of its pod, and one that undoes this must not fill the node's
    // memory.
    run(&format!("ip -n {} link set eth0 mtu 2000", world.name("pod")));
    assert!(!world.ping("outer", "10.244.1.7", "-s 1900"));
    assert!(lone() >= 2, "{}", lone());
    let node = world.inner_path("node").display().to_string();
    let counters = run(&format!("nsenter --net={node} cat /proc/net/snmp"));
    let ip: Vec<&str> = counters.lines().filter(|line| line.starts_with("Ip: ")).collect();
    let at = ip[0].split(' ').position(|name| name == "ReasmReqds").unwrap();
    assert_eq!(ip[1].split(' ').nth(at), Some("0"), "nothing waits in the node's kernel: {counters}");
    let sent = run(&format!("ip netns exec {} nft list ruleset", world.name("nat")));
    assert!(sent.contains("masquerade"));
}

#[test]
fn nothing_can_be_read_on_the_wire() {
    let tunnel = Tunnel::new();
    let world = &tunnel.world;
    const MARK: &[u8] = b"this must never be seen on the wire ";
    let wire = world
        .netns("nat")
        .run(|| {
            let flags = SockFlag::SOCK_CLOEXEC;
            socket(AddressFamily::Packet, SockType::Raw, flags, SockProtocol::EthAll).unwrap()
        })
        .unwrap();
    setsockopt(&wire, sockopt::RcvBufForce, &(64 << 20)).unwrap();
    setsockopt(&wire, sockopt::ReceiveTimeout, &TimeVal::new(0, 200_000)).unwrap();
    let (outer, pod) = (world.netns("outer"), world.netns("pod"));
    let over = Arc::new(AtomicBool::new(false));
    let ended = over.clone();
    let spying = std::thread::spawn(move || {
        let (mut frames, mut seen, mut buffer) = (0u32, 0u32, vec![0; 1 << 17]);
        // Until all packets sent before the end are read; the guest's keepalives never end.
        let mut read_on = 10_000;
        while read_on > 0 {
            read_on -= u32::from(ended.load(Ordering::SeqCst));
            match recv(wire.as_raw_fd(), &mut buffer, MsgFlags::empty()) {
                Ok(n) => {
                    frames += 1;
                    seen += u32::from(buffer[..n].windows(MARK.len()).any(|w| w == MARK));
                }
                Err(_) if ended.load(Ordering::SeqCst) => break,
                Err(_) => {}
            }
        }
        (frames, seen)
    });
    transfer(&outer, &pod, "10.244.1.7", MARK, 1 << 20);
    transfer(&pod, &outer, "10.244.1.1", MARK, 1 << 20);
    over.store(true, Ordering::SeqCst);
    let (frames, seen) = spying.join().unwrap();
    assert!(frames > 50, "the spy captured {frames} frames only");
    assert_eq!(seen, 0);
}

#[test]
fn a_node_with_a_new_data_plane_process_reaches_its_guest_again() {
    let mut tunnel = Tunnel::new();
    drop(tunnel.node.take());
    // Another test that starts a program holds all descriptors from fork to exec.
    let deadline = Instant::now() + Duration::from_secs(60);
    let again = loop {
        let again = Inner::open(&tunnel.world.inner_path("node"), None, NODE_INNER, 9000).unwrap();
        if again.tun.is_some() {
            break again;
        }
        assert!(Instant::now() < deadline, "no process holds the device");
        std::thread::sleep(Duration::from_millis(10));
    };
    let port = tunnel.port;
    let socket = tunnel.world.netns("node").run(|| bind(port)).unwrap().unwrap();
    let engine = Tunnel::node_engine(&tunnel.keys);
    tunnel.node = Some(DataPlane::start(engine, again.tun.unwrap(), socket, "node", || ()).unwrap());
    let busy = Inner::open(&tunnel.world.inner_path("node"), None, NODE_INNER, 9000).unwrap();
    assert!(busy.tun.is_none(), "a process holds it");
    // WireGuard requests new keys after 15 s in any case, which is too long for a pod.
    let took = tunnel.world.ping_within("pod", "10.244.1.1", Duration::from_secs(15));
    println!("healed by silence after {took:?}");
    tunnel.guest.as_ref().unwrap().begin();
}

#[test]
fn the_namespace_of_a_passed_device_gets_its_name_in_another_container() {
    let folder = std::env::temp_dir().join(format!("peerpod-carried-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let [first, second, third] = ["first", "second", "third"].map(|name| folder.join(name));
    let opened = Inner::open(&first, None, NODE_INNER, 9000).unwrap();
    let tun = opened.tun.unwrap();
    // Another container finds the plain file; the name may be mounted on it in the first container's mount namespace.
    fs::write(&second, "").unwrap();
    let file = fs::metadata(&second).unwrap().ino();
    let again = Inner::open(&second, Some(&tun), NODE_INNER, 9000).unwrap();
    assert_eq!(again.inner.netns().id(), opened.inner.netns().id());
    nix::mount::umount2(&second, nix::mount::MntFlags::MNT_DETACH).unwrap();
    assert_eq!(fs::metadata(&second).unwrap().ino(), file, "the file is the same");
    // Not a TUN device: no namespace is found, and the tunnel is created anew.
    let other = Tun::from(OwnedFd::from(File::open("/dev/null").unwrap()));
    let made = Inner::open(&third, Some(&other), NODE_INNER, 9000).unwrap();
    assert_ne!(made.inner.netns().id(), opened.inner.netns().id());
    for path in [&first, &second, &third] {
        peerpod_podnet::netns::delete_named(path).unwrap();
    }
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_guest_that_gets_another_address_is_found_behind_its_nat_again() {
    let tunnel = Tunnel::new();
    let vm = tunnel.world.name("vm");
    let before = tunnel.node().engine().path_of("pod").unwrap();
    run(&format!("ip -n {vm} addr flush dev eth0"));
    run(&format!("ip -n {vm} addr add 192.168.50.3/24 dev eth0"));
    run(&format!("ip -n {vm} route replace default via 192.168.50.1"));
    // From outside, like a probe of the node: only the guest's own packets can reveal its address.
    tunnel.world.ping_within("outer", "10.244.1.7", Duration::from_secs(60));
    let after = tunnel.node().engine().path_of("pod").unwrap();
    assert_ne!(before.peer, after.peer);
    assert_eq!(after.peer.ip().to_string(), "10.77.0.254");
    assert!(tunnel.node().engine().stats().snapshot().roams >= 1);
}
