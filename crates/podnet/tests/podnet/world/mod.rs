//! Makes the namespaces for the tests of `net`: a node, a pod, another pod and a VM. `ip` and `tc` make and inspect
//! them: witnesses that share no code with the tested modules. Names carry the process id and a counter; everything is
//! removed on drop. No packet leaves these namespaces.

#![allow(dead_code, unreachable_pub)] // each test binary uses a part
#![allow(clippy::unwrap_used)] // a test fails if its world cannot be made

use std::net::IpAddr;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrStorage, recv, sendto, setsockopt,
    socket, sockopt,
};
use nix::sys::time::TimeVal;
use peerpod_podnet::inspect::{PodNetworkState, inspect};
use peerpod_podnet::mark::{Mark, Owner};
use peerpod_podnet::netns::{self, Netns};
use peerpod_podnet::nft::{Filter, Peer};
use peerpod_podnet::plan::{self, Underlay};
use peerpod_podnet::redirect::{Classifier, Classifiers};
use peerpod_podnet::tunnel::{self, Connection, Pair};
use peerpod_podnet::vxlan::{self, Held, Reservation, Shape, Slot, Vnis};
use peerpod_podnet::{Error, guest};
use peerpod_proto::guest::NetworkPlan;

static COUNTER: AtomicU32 = AtomicU32::new(0);

pub const SHAPE4: Shape = Shape { port: 4789, v6: false, udp_checksum: false };
pub const SHAPE6: Shape = Shape { port: 4789, v6: true, udp_checksum: false };

/// Runs a witness and returns its output; fails the test if the witness fails.
pub fn run(line: &str) -> String {
    let out = attempt(line);
    assert!(out.status.success(), "{line}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8_lossy(&out.stdout).into_owned()
}

pub fn attempt(line: &str) -> Output {
    let mut words = line.split_whitespace();
    Command::new(words.next().unwrap()).args(words).output().unwrap()
}

pub struct World {
    prefix: String,
    names: Vec<String>,
}

impl World {
    /// Makes a node with bridge `cni0`, an underlay to the VM, and one ordinary pod (`other`, 10.244.1.20); no peer pod
    /// yet.
    pub fn new() -> World {
        assert!(nix::unistd::geteuid().is_root(), "these tests make network namespaces: run them as root");
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let mut world = World { prefix: format!("ppt{}-{number}-", std::process::id()), names: Vec::new() };
        for name in ["node", "vm", "other"] {
            world.add(name);
        }
        let (node, vm) = (world.name("node"), world.name("vm"));
        run(&format!("ip -n {node} link add cni0 type bridge forward_delay 0"));
        run(&format!("ip -n {node} addr add 10.244.1.1/24 dev cni0"));
        run(&format!("ip -n {node} addr add fd10:244:1::1/64 dev cni0 nodad"));
        run(&format!("ip -n {node} link set cni0 up"));
        run(&format!("ip -n {node} link add ul0 type veth peer name eth0 netns {vm}"));
        for (ns, device, end) in [(&node, "ul0", 1), (&vm, "eth0", 2)] {
            run(&format!("ip -n {ns} addr add 10.77.0.{end}/24 dev {device}"));
            run(&format!("ip -n {ns} addr add fd77::{end}/64 dev {device} nodad"));
            run(&format!("ip -n {ns} link set {device} up"));
        }
        world.connect_pod("other", 20);
        world
    }

    /// Returns this world's own daemon.
    pub fn owner(&self) -> Owner {
        Owner::of(&["test", &self.prefix])
    }

    pub fn mark<'a>(&self, sandbox: &'a str) -> Mark<'a> {
        Mark { owner: self.owner(), sandbox }
    }

    fn add(&mut self, name: &str) {
        let full = self.name(name);
        run(&format!("ip netns add {full}"));
        run(&format!("ip -n {full} link set lo up"));
        self.names.push(full);
    }

    /// Makes a pod as a CNI does: `eth0` with both families, MTU 1450, default routes and a static one each.
    pub fn pod(&mut self, name: &str, number: u8) -> Netns {
        self.add(name);
        self.connect_pod(name, number);
        self.open(name)
    }

    /// Makes a pod without any connection, in four steps: for tests with many pods.
    pub fn bare_pod(&mut self, name: &str) -> Netns {
        let (full, node) = (self.name(name), self.name("node"));
        run(&format!("ip netns add {full}"));
        self.names.push(full.clone());
        run(&format!("ip -n {full} link add eth0 type veth peer name h{name} netns {node}"));
        run(&format!("ip -n {full} addr add 10.244.2.7/24 dev eth0"));
        run(&format!("ip -n {full} link set eth0 up"));
        self.open(name)
    }

    fn connect_pod(&mut self, name: &str, number: u8) {
        let (pod, node) = (self.name(name), self.name("node"));
        run(&format!(
            "ip -n {node} link add veth{number} mtu 1450 type veth peer name eth0 mtu 1450 netns {pod}"
        ));
        run(&format!("ip -n {node} link set veth{number} master cni0 up"));
        run(&format!("ip -n {pod} addr add 10.244.1.{number}/24 dev eth0"));
        run(&format!("ip -n {pod} addr add fd10:244:1::{number}/64 dev eth0 nodad"));
        run(&format!("ip -n {pod} link set eth0 up"));
        run(&format!("ip -n {pod} route add default via 10.244.1.1"));
        run(&format!("ip -n {pod} route add default via fd10:244:1::1"));
        run(&format!("ip -n {pod} route add 10.96.0.0/16 via 10.244.1.1 metric 50"));
        run(&format!("ip -n {pod} route add fd96::/64 via fd10:244:1::1 metric 50"));
        // The kernel reports the carrier a moment after both ends are up.
        let deadline = Instant::now() + Duration::from_secs(30);
        while !run(&format!("ip -n {pod} -o link show eth0")).contains("state UP") {
            assert!(Instant::now() < deadline, "eth0 of {name} got no carrier");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Adds an interface to a pod, towards the node, up and with an address.
    pub fn attach(&self, pod: &str, device: &str, address: &str) {
        let (pod, node) = (self.name(pod), self.name("node"));
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        run(&format!("ip -n {node} link add more{number} type veth peer name {device} netns {pod}"));
        run(&format!("ip -n {node} link set more{number} up"));
        run(&format!("ip -n {pod} addr add {address} dev {device}"));
        run(&format!("ip -n {pod} link set {device} up"));
    }

    /// Makes a pod before its CNI plugin ran: these interfaces with an end in the node, up, without addresses.
    pub fn bare(&mut self, name: &str, devices: &[&str]) -> Netns {
        self.add(name);
        let (pod, node) = (self.name(name), self.name("node"));
        for device in devices {
            let number = COUNTER.fetch_add(1, Ordering::Relaxed);
            run(&format!("ip -n {node} link add more{number} type veth peer name {device} netns {pod}"));
            run(&format!("ip -n {node} link set more{number} up mtu 9100"));
            run(&format!("ip -n {pod} link set {device} up"));
        }
        self.open(name)
    }

    /// Runs lines of `ip` in one of the namespaces; those that begin with `-6` come after the others. With `force`,
    /// lines that `ip` refuses are skipped.
    pub fn batch(&self, name: &str, lines: &str, force: bool) {
        let name = self.name(name);
        let file = std::env::temp_dir().join(format!("{name}-batch"));
        let (six, any): (Vec<&str>, Vec<&str>) =
            lines.lines().map(str::trim).partition(|line| line.starts_with("-6 "));
        let six: Vec<&str> = six.iter().map(|line| line.trim_start_matches("-6 ")).collect();
        for (lines, family) in [(any, ""), (six, "-6")] {
            let lines = lines.join("\n");
            std::fs::write(&file, &lines).unwrap();
            let flag = if force { "-force" } else { "" };
            let out = attempt(&format!("ip -n {name} {family} {flag} -batch {}", file.display()));
            std::fs::remove_file(&file).unwrap();
            assert!(force || out.status.success(), "{lines}\n{}", String::from_utf8_lossy(&out.stderr));
        }
    }

    /// Allows jumbo frames between node and VM, so that no pod's MTU is too large for the path.
    pub fn widen(&self) {
        self.ip("node", "link set ul0 mtu 9200");
        self.ip("vm", "link set eth0 mtu 9200");
    }

    /// Returns the plan for a state, each interface with a tunnel of its own, of which only the VM's end is made.
    pub fn plan(&self, seen: &PodNetworkState) -> NetworkPlan {
        let first = 100_000 + COUNTER.fetch_add(100, Ordering::Relaxed);
        let vni = |n: usize| first + u32::try_from(n).unwrap();
        let tunnels: Vec<plan::Tunnel> = plan::node(seen, 9150, [10, 77, 0, 2].into())
            .unwrap()
            .iter()
            .map(|carry| plan::Tunnel { interface: carry.interface, vni: vni(carry.slot), mtu: carry.mtu })
            .collect();
        let underlay = Underlay {
            node: [10, 77, 0, 1].into(),
            vm: Some([10, 77, 0, 2].into()),
            port: 4789,
            udp_checksum: false,
            overhead: 50,
        };
        plan::write(seen, &tunnels, &underlay)
    }

    /// Removes one of the namespaces.
    pub fn forget(&mut self, name: &str) {
        let name = self.name(name);
        netns::delete_named(format!("/run/netns/{name}")).unwrap();
        self.names.retain(|kept| *kept != name);
    }

    /// Applies a plan as the guest does, in another namespace than `podns`, after another plan.
    pub fn apply_in(
        &mut self,
        podns: &str,
        plan: &NetworkPlan,
        previous: Option<&NetworkPlan>,
    ) -> Result<guest::Applied, Error> {
        let path = self.path(podns);
        if !path.exists() {
            let full = self.name(podns);
            netns::create_named(&path).unwrap();
            self.names.push(full);
        }
        self.within("vm", || guest::apply(plan, previous, &path))
    }

    /// Makes an empty namespace.
    pub fn empty(&mut self, name: &str) -> Netns {
        self.add(name);
        self.open(name)
    }

    pub fn name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/run/netns/{}", self.name(name)))
    }

    pub fn open(&self, name: &str) -> Netns {
        Netns::open(self.path(name)).unwrap()
    }

    /// Runs `f` in one of the namespaces.
    pub fn within<T: Send>(&self, name: &str, f: impl FnOnce() -> T + Send) -> T {
        self.open(name).run(f).unwrap()
    }

    /// `ip -n <name> <rest>`
    pub fn ip(&self, name: &str, rest: &str) -> String {
        run(&format!("ip -n {} {rest}", self.name(name)))
    }

    /// Waits until every IPv6 address of a namespace has its local route. The kernel makes that a moment after the
    /// address, without duplicate address detection, too.
    pub fn settle(&self, name: &str) {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let (addresses, routes) =
                (self.ip(name, "-6 -o address show"), self.ip(name, "-6 route show table local"));
            let own = addresses.lines().filter_map(|line| line.split_whitespace().nth(3)?.split('/').next());
            if own.into_iter().all(|own| routes.contains(&format!("local {own} dev"))) {
                return;
            }
            assert!(Instant::now() < deadline, "{name}: an address has no route: {addresses}\n{routes}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub fn reserve(
        &self,
        pod: &Netns,
        sandbox: &str,
        shape: Shape,
        wanted: Option<u32>,
    ) -> Result<Held, Error> {
        let mut host = self.open("node").netlink().unwrap();
        let slots = [Slot { number: 0, vni: wanted }];
        let wanted = Reservation {
            mark: self.mark(sandbox),
            shape,
            source_ports: None,
            vnis: Vnis::default(),
            slots: &slots,
        };
        vxlan::reserve(&mut host, pod, wanted).map(|held| held[0])
    }

    /// Undoes [`World::reserve`] and [`World::connect`] for a sandbox, or for the device `held`.
    pub fn undo(&self, pod: &Netns, sandbox: &str, held: Option<Held>) -> Vec<Error> {
        let held: Vec<Held> = held.into_iter().collect();
        let mut errors = Vec::new();
        tunnel::undo(pod, self.mark(sandbox), (&held, 4789), &[], &mut errors);
        errors
    }

    /// Does the node's steps at StartVM, without its filter.
    pub fn connect(
        &self,
        pod: &Netns,
        held: Held,
        shape: Shape,
        seen: &PodNetworkState,
    ) -> Result<NetworkPlan, Error> {
        let vm: IpAddr = if shape.v6 { "fd77::2" } else { "10.77.0.2" }.parse().unwrap();
        let mut host = self.open("node").netlink().unwrap();
        let path = tunnel::path(&mut host, shape, vm)?;
        let carry = plan::node(seen, path.mtu, vm)?.swap_remove(0);
        let pairs = [Pair { held, interface: carry.interface, mtu: carry.device_mtu }];
        let connection = Connection {
            mark: self.mark("sandbox"),
            remote: vm,
            local: path.source,
            by: Classifiers { into: Classifier::U32, back: Classifier::U32 },
            pairs: &pairs,
        };
        tunnel::connect(pod, &connection)?;
        let underlay = Underlay {
            node: path.source,
            vm: Some(vm),
            port: shape.port,
            udp_checksum: shape.udp_checksum,
            overhead: shape.overhead(),
        };
        let tunnel = plan::Tunnel { interface: carry.interface, vni: held.vni, mtu: carry.mtu };
        Ok(plan::write(seen, &[tunnel], &underlay))
    }

    /// Applies a plan as the guest does, in the VM's namespace.
    pub fn apply(&mut self, plan: &NetworkPlan) -> Result<guest::Applied, Error> {
        let path = self.path("podns");
        if !path.exists() {
            let full = self.name("podns");
            netns::create_named(&path).unwrap();
            self.names.push(full);
        }
        self.within("vm", || guest::apply(plan, None, &path))
    }

    /// Makes pod `10.244.1.7` with its complete tunnel to the VM.
    pub fn whole(&mut self, shape: Shape) -> (Netns, PodNetworkState, Held, NetworkPlan) {
        let pod = self.pod("pod", 7);
        let seen = inspect(&pod).unwrap();
        let held = self.reserve(&pod, "sandbox", shape, None).unwrap();
        let plan = self.connect(&pod, held, shape, &seen).unwrap();
        self.apply(&plan).unwrap();
        (pod, seen, held, plan)
    }

    /// Sends an ICMP echo with `size` bytes of data; the test fails unless it is answered in full.
    pub fn ping(&self, from: &str, to: &str, size: usize) {
        let to: IpAddr = to.parse().unwrap();
        let answered = self.within(from, || echo(to, size));
        assert!(answered, "no echo from {to} in {from}");
    }

    /// Returns the number of IPv4 fragments that a namespace's stack has made.
    pub fn fragments(&self, name: &str) -> String {
        let all = self.within(name, || std::fs::read_to_string("/proc/thread-self/net/snmp").unwrap());
        let mut lines = all.lines().filter(|line| line.starts_with("Ip:"));
        let (names, values) = (lines.next().unwrap(), lines.next().unwrap());
        let found = names.split(' ').zip(values.split(' ')).find(|(name, _)| *name == "FragCreates");
        found.unwrap().1.to_owned()
    }

    /// Returns everything that a tunnel could leave behind in the namespaces, as the witnesses print it.
    pub fn traces(&self, pod: &str) -> String {
        let name = self.name(pod);
        let mut all = run(&format!("ip -n {name} -o link show"));
        all += &run(&format!("tc -n {name} qdisc show"));
        all += &run(&format!("tc -n {name} filter show dev eth0 ingress"));
        // These forms omit counters such as those of the veth's carrier, but include the number of an action.
        all.lines().filter(|line| !line.starts_with("\tindex ")).map(|line| format!("{line}\n")).collect()
    }

    pub fn tables(&self, name: &str) -> Vec<Peer> {
        let mut client = self.open(name).netfilter().unwrap();
        let mut all = Filter::new(4789).list(&mut client).unwrap();
        all.extend(Filter::of(self.owner(), 4789).list(&mut client).unwrap());
        all
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for name in self.names.iter().rev() {
            // The devices in the other namespaces go with their namespaces.
            if let Err(e) = netns::delete_named(format!("/run/netns/{name}")) {
                eprintln!("not removed: {e}");
            }
        }
    }
}

/// Sends an echo request from the calling thread's namespace and waits for its answer; sends it again while a neighbour
/// or a bridge port is not ready yet.
fn echo(to: IpAddr, size: usize) -> bool {
    let (family, protocol, request, reply) = match to {
        IpAddr::V4(_) => (AddressFamily::Inet, SockProtocol::Icmp, 8, 0),
        IpAddr::V6(_) => (AddressFamily::Inet6, SockProtocol::IcmpV6, 128, 129),
    };
    let socket = socket(family, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol).unwrap();
    setsockopt(&socket, sockopt::ReceiveTimeout, &TimeVal::new(0, 300_000)).unwrap();
    let mark = std::process::id().to_ne_bytes();
    let mut packet = vec![request, 0, 0, 0, mark[0], mark[1], 0, 1];
    packet.resize(8 + size, 0x5a);
    if to.is_ipv4() {
        let sum: u32 =
            packet.chunks(2).map(|p| u32::from(p[0]) << 8 | p.get(1).map_or(0, |b| u32::from(*b))).sum();
        let sum = (sum & 0xffff) + (sum >> 16);
        let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
        packet[2..4].copy_from_slice(&sum.to_be_bytes());
    }
    let address = SockaddrStorage::from(std::net::SocketAddr::from((to, 0)));
    let deadline = Instant::now() + Duration::from_secs(10);
    while Instant::now() < deadline {
        if sendto(socket.as_raw_fd(), &packet, &address, MsgFlags::empty()).is_err() {
            std::thread::sleep(Duration::from_millis(20)); // no route yet, or no answer to ARP
            continue;
        }
        let mut buffer = [0; 16_384];
        while let Ok(length) = recv(socket.as_raw_fd(), &mut buffer, MsgFlags::empty()) {
            // IPv4 raw sockets return the IP header too.
            let message = &buffer[if to.is_ipv4() { 20 } else { 0 }..length];
            if message[0] == reply && message[4..] == packet[4..] {
                return true;
            }
        }
    }
    false
}

/// Returns the namespaces of all threads of this process.
pub fn threads() -> Vec<PathBuf> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let mut all: Vec<PathBuf> =
        tasks.filter_map(|task| std::fs::read_link(task.ok()?.path().join("ns/net")).ok()).collect();
    all.sort();
    all.dedup();
    all
}
