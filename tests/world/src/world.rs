//! Makes the node's network namespace and pods of a CNI on it.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use std::{fmt, io};

use anyhow::{Context, ensure};
use nix::unistd::Uid;
use peerpod_podnet::netns::Netns;

use crate::command::{ip, run};
use crate::janitor::Janitor;
use crate::spawner::Spawner;
use crate::wait::eventually_blocking;

/// MTU of the CNI's pods, smaller than that of Ethernet as with any overlay.
const POD_MTU: u32 = 1450;

static COUNTER: AtomicU32 = AtomicU32::new(0);

/// Network namespace with a name in `ip netns`.
#[derive(Clone)]
pub struct Namespace {
    name: String,
    netns: Netns,
}

impl Namespace {
    fn create(name: String) -> anyhow::Result<Namespace> {
        run("ip", &["netns", "add", &name], "")?;
        let netns = Netns::open(Path::new("/run/netns").join(&name))?;
        Ok(Namespace { name, netns })
    }

    /// Deletes the name; the kernel frees the namespace when its last user is gone.
    pub fn delete(&self) -> anyhow::Result<()> {
        run("ip", &["netns", "del", &self.name], "").map(drop)
    }

    /// Returns the name for `ip -n` and `ip netns exec`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the path that a CNI would pass on.
    pub fn path(&self) -> PathBuf {
        Path::new("/run/netns").join(&self.name)
    }

    /// Returns the open namespace.
    pub fn netns(&self) -> &Netns {
        &self.netns
    }

    /// Runs a closure in the namespace, on a short-lived thread.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> io::Result<T> {
        self.netns.run(work)
    }

    /// Runs `ip -batch` in the namespace.
    pub fn ip(&self, lines: &str) -> anyhow::Result<String> {
        ip(&self.name, lines)
    }

    /// Runs a shell script in the namespace with these variables, and returns its output. The first command that fails
    /// ends it.
    pub fn shell(&self, script: &str, variables: &[(&str, &str)]) -> anyhow::Result<String> {
        let mut text = String::new();
        for (name, value) in variables {
            text.push_str(&format!("{name}='{value}'\n"));
        }
        text.push_str(script);
        self.run(|| run("/bin/sh", &["-eu"], &text))?
            .with_context(|| format!("in {}, with {variables:?}:\n{script}", self.name))
    }

    /// Writes below `/proc/sys/net` of this namespace.
    pub fn sysctl(&self, name: &str, value: &str) -> anyhow::Result<()> {
        let path = format!("/proc/sys/net/{name}");
        self.run(|| fs::write(&path, value))?
            .with_context(|| format!("write {value} to {path} in {}", self.name))
    }

    /// Returns the bytes that an interface has received and sent so far.
    pub fn counters(&self, interface: &str) -> anyhow::Result<(u64, u64)> {
        let table = self.run(|| fs::read_to_string("/proc/thread-self/net/dev"))??;
        let line = table.lines().find_map(|line| line.trim().strip_prefix(interface)?.strip_prefix(':'));
        let numbers: Vec<u64> =
            line.unwrap_or_default().split_whitespace().filter_map(|number| number.parse().ok()).collect();
        match numbers[..] {
            [received, _, _, _, _, _, _, _, sent, ..] => Ok((received, sent)),
            _ => anyhow::bail!("{} has no interface {interface}", self.name),
        }
    }
}

impl fmt::Debug for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// One node. Clones share it; dropping the last clone, and all that was made with it, removes it.
#[derive(Clone)]
pub struct World(Arc<Inner>);

struct Inner {
    // Before the janitor: dropped first, so that no process is started once the janitor runs.
    spawner: Spawner,
    _janitor: Janitor,
    prefix: String,
    folder: PathBuf,
    node: Namespace,
    pods: AtomicU32,
}

impl World {
    /// Makes the node: loopback, forwarding, and the bridge `cni0` with 10.244.1.1/24 and fd10:244:1::1/64.
    pub fn new() -> anyhow::Result<World> {
        let world = World::bare()?;
        world.node().ip("link add cni0 type bridge\n\
             link set cni0 up\n\
             addr add 10.244.1.1/24 dev cni0\n\
             addr add fd10:244:1::1/64 dev cni0 nodad\n")?;
        Ok(world)
    }

    /// Makes a node with loopback and forwarding and no CNI; [`World::pod`] does not work on it.
    pub fn bare() -> anyhow::Result<World> {
        ensure!(Uid::effective().is_root(), "network namespaces need root: run this as root");
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let prefix = format!("pp{}n{number}-", std::process::id());
        // Short, because the folder contains sockets, and a socket path has at most 107 bytes.
        let folder = Path::new("/tmp").join(format!("pp{}n{number}", std::process::id()));
        let janitor = Janitor::start(&prefix, &folder).context("start the janitor")?;
        fs::create_dir(&folder).with_context(|| format!("make {}", folder.display()))?;
        let node = Namespace::create(format!("{prefix}node"))?;
        node.ip("link set lo up\n")?;
        node.sysctl("ipv4/ip_forward", "1")?;
        node.sysctl("ipv6/conf/all/forwarding", "1")?;
        let spawner = Spawner::start(Some(node.netns.clone()))?;
        Ok(World(Arc::new(Inner {
            spawner,
            _janitor: janitor,
            prefix,
            folder,
            node,
            pods: AtomicU32::new(0),
        })))
    }

    /// Returns the prefix of all its namespaces' names.
    pub fn prefix(&self) -> &str {
        &self.0.prefix
    }

    /// Returns the world's folder, which is removed with it.
    pub fn folder(&self) -> &Path {
        &self.0.folder
    }

    /// Returns the node's network namespace.
    pub fn node(&self) -> &Namespace {
        &self.0.node
    }

    /// Makes a further network namespace with its loopback up. It is removed with the world at the latest.
    pub fn namespace(&self, name: &str) -> anyhow::Result<Namespace> {
        let namespace = Namespace::create(format!("{}{name}", self.0.prefix))?;
        namespace.ip("link set lo up\n")?;
        Ok(namespace)
    }

    /// Starts a program in the node's network namespace and in a new process group, with its output appended to `log`.
    /// The program is killed when this process or the world ends.
    pub fn spawn(&self, program: &Path, arguments: &[&OsStr], log: &Path) -> anyhow::Result<Child> {
        let output = OpenOptions::new().create(true).append(true).open(log);
        let output = output.with_context(|| format!("open {}", log.display()))?;
        self.start(program, arguments, output, false).with_context(|| format!("start {}", program.display()))
    }

    /// Does the same in a new PID namespace, with the program as its first process.
    pub fn spawn_in_pid_namespace(
        &self,
        program: &Path,
        arguments: &[&OsStr],
        log: &Path,
    ) -> anyhow::Result<Child> {
        let output = OpenOptions::new().create(true).append(true).open(log);
        let output = output.with_context(|| format!("open {}", log.display()))?;
        self.start(program, arguments, output, true).with_context(|| format!("start {}", program.display()))
    }

    fn start(
        &self,
        program: &Path,
        arguments: &[&OsStr],
        output: File,
        own_pids: bool,
    ) -> anyhow::Result<Child> {
        // `setpriv` of util-linux does in the child, without unsafe code here, the call that sets the death signal.
        let mut command = Command::new("setpriv");
        command
            .args(["--pdeathsig", "KILL", "--"])
            .arg(program)
            .args(arguments)
            .env("PEERPOD_TESTING", "1")
            .current_dir("/")
            .process_group(0);
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        self.0.spawner.spawn(command, own_pids)
    }

    /// Adds a pod as a CNI would: a namespace with `eth0`, with the other end of the veth pair on the bridge. `eth0`
    /// has IPv4 and IPv6, default routes, one further static route in each family, and MTU 1450.
    pub fn pod(&self) -> anyhow::Result<Pod> {
        self.pod_with_mtu(POD_MTU)
    }

    /// Adds a pod with another MTU.
    pub fn pod_with_mtu(&self, mtu: u32) -> anyhow::Result<Pod> {
        let number = self.0.pods.fetch_add(1, Ordering::Relaxed);
        let host =
            u8::try_from(number + 10).ok().filter(|host| *host < 255).context("the pods' subnet is full")?;
        let namespace = Namespace::create(format!("{}pod{number}", self.0.prefix))?;
        let v4 = Ipv4Addr::new(10, 244, 1, host);
        let v6 = Ipv6Addr::new(0xfd10, 0x244, 1, 0, 0, 0, 0, host.into());
        let link = format!("veth{number}");
        let peer = &namespace.name;
        self.node().ip(&format!(
            "link add {link} mtu {mtu} type veth peer name eth0 mtu {mtu} netns {peer}\n\
             link set {link} master cni0 up\n"
        ))?;
        namespace.ip(&format!(
            "link set lo up\n\
             link set eth0 up\n\
             addr add {v4}/24 dev eth0\n\
             addr add {v6}/64 dev eth0 nodad\n\
             route add 10.244.1.1 dev eth0\n\
             route add default via 10.244.1.1 dev eth0\n\
             route add 10.96.0.0/12 via 10.244.1.1 dev eth0\n\
             route add default via fd10:244:1::1 dev eth0\n\
             route add fd10:96::/64 via fd10:244:1::1 dev eth0\n"
        ))?;
        // The kernel reports the carrier later, and only then routes to the IPv6 address.
        eventually_blocking("the pod's carrier", Duration::from_secs(30), || {
            let shown = namespace.ip("address show dev eth0\n").ok()?;
            (shown.contains("LOWER_UP") && !shown.contains("tentative")).then_some(())
        })?;
        Ok(Pod { world: self.clone(), namespace, link, v4, v6 })
    }
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "World({})", self.0.prefix)
    }
}

/// A pod's network; removed when dropped.
#[derive(Debug)]
pub struct Pod {
    world: World,
    namespace: Namespace,
    link: String,
    v4: Ipv4Addr,
    v6: Ipv6Addr,
}

impl Pod {
    /// Returns its network namespace.
    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// Returns its IPv4 address.
    pub fn v4(&self) -> IpAddr {
        self.v4.into()
    }

    /// Returns its IPv6 address.
    pub fn v6(&self) -> IpAddr {
        self.v6.into()
    }

    /// Returns both addresses.
    pub fn addresses(&self) -> [IpAddr; 2] {
        [self.v4(), self.v6()]
    }
}

impl Drop for Pod {
    fn drop(&mut self) {
        // A test may have removed it already; the janitor removes the rest.
        drop(self.world.node().ip(&format!("link del {}\n", self.link)));
        drop(run("ip", &["netns", "del", &self.namespace.name], ""));
    }
}
