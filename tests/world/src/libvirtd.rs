//! Runs a real libvirtd per world, in the node's network namespace, with all its folders in the world's folder.
//!
//! A separate mount namespace replaces the distribution's folders in `/etc`, `/run` and `/var`. QEMU runs as root,
//! without cgroups and security labels, which a container lacks. The witness is `virsh`.

use std::ffi::OsStr;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};
use std::{fs, thread};

use anyhow::{Context, ensure};

use crate::command::run;
use crate::wait::eventually_blocking;
use crate::{Settings, World};

/// Time limit of a start. libvirtd first probes QEMU's capabilities unless they are cached, which is slow on a busy
/// machine.
const PATIENCE: Duration = Duration::from_secs(90);

/// Time limit for the node's KVM probe, longer than the probe's own limit.
const TRIAL: Duration = Duration::from_secs(60);
const STEP: Duration = Duration::from_millis(50);

const QEMU_CONF: &str = "user = \"root\"\n\
    group = \"root\"\n\
    dynamic_ownership = 1\n\
    remember_owner = 0\n\
    security_driver = \"none\"\n\
    cgroup_controllers = []\n\
    namespaces = []\n\
    stdio_handler = \"file\"\n";

/// Script of the start. `$1` is libvirtd's folder in the world, `$2` the cache of QEMU's capabilities, shared between
/// tests. libvirtd needs an entry for the distribution's QEMU user even if it is not used.
const SCRIPT: &str = r#"
set -eu
for part in etc lib log run; do mkdir -p "$1/$part"; done
mkdir -p "$2" /etc/libvirt /var/lib/libvirt /var/log/libvirt /var/cache/libvirt /run/libvirt
cp /etc/passwd "$1/passwd"; cp /etc/group "$1/group"
grep -q ^libvirt-qemu: "$1/passwd" || echo 'libvirt-qemu:x:64055:64055::/nonexistent:/bin/false' >> "$1/passwd"
grep -q ^libvirt-qemu: "$1/group" || echo 'libvirt-qemu:x:64055:' >> "$1/group"
grep -q ^kvm: "$1/group" || echo 'kvm:x:64056:' >> "$1/group"
mount --bind "$1/passwd" /etc/passwd
mount --bind "$1/group" /etc/group
mount --bind "$1/etc" /etc/libvirt
mount --bind "$1/lib" /var/lib/libvirt
mount --bind "$1/log" /var/log/libvirt
mount --bind "$1/run" /run/libvirt
mount --bind "$2" /var/cache/libvirt
exec libvirtd -f "$1/libvirtd.conf" -p "$1/libvirtd.pid"
"#;

/// Name of its VMs' network.
pub const NETWORK: &str = "pods";
/// Name of its pool.
pub const POOL: &str = "pods";

/// Shape of the VMs' network.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// MTU of the network in bytes, which DHCP and router advertisements announce to the VMs. `None`: Ethernet's 1500,
    /// unannounced.
    pub mtu: Option<u32>,
    /// Whether the network has IPv6 beside IPv4.
    pub ipv6: bool,
    /// Interval of a VM's DHCPv4 renewals in seconds, at least 3; `None`: half an hour.
    pub renewal: Option<u32>,
}

impl Default for Shape {
    fn default() -> Shape {
        Shape { mtu: None, ipv6: true, renewal: None }
    }
}

impl Shape {
    /// Returns the definition of the network.
    fn xml(&self, name: &str) -> String {
        let mtu = self.mtu.map(|mtu| format!("<mtu size='{mtu}'/>")).unwrap_or_default();
        let v6 = "<ip family='ipv6' address='fd97::1' prefix='64'><dhcp><range start='fd97::100' end='fd97::1ff'/></dhcp></ip>";
        let v6 = if self.ipv6 { v6 } else { "" };
        let renewal = self.renewal.map(|seconds| {
            format!(
                "<dnsmasq:options xmlns:dnsmasq='http://libvirt.org/schemas/network/dnsmasq/1.0'>\
                 <dnsmasq:option value='dhcp-option=option:T1,{seconds}'/></dnsmasq:options>"
            )
        });
        let renewal = renewal.unwrap_or_default();
        format!(
            "<network><name>{name}</name><forward mode='open'/><bridge name='lv{name}' stp='off' delay='0'/>{mtu}\
             <ip address='10.97.0.1' prefix='24'><dhcp><range start='10.97.0.10' end='10.97.0.250'/></dhcp></ip>\
             {v6}{renewal}</network>"
        )
    }
}

/// A running libvirtd. Killed when dropped; its VMs end with the world.
pub struct Libvirtd {
    world: World,
    folder: PathBuf,
    child: Option<Child>,
}

impl Libvirtd {
    /// Starts libvirtd with a pool and a network (10.97.0.0/24 and fd97::/64, DHCP in both).
    pub fn start(world: &World) -> anyhow::Result<Libvirtd> {
        Libvirtd::start_with(world, Shape::default())
    }

    /// Starts libvirtd with a pool and a network of this shape.
    pub fn start_with(world: &World, shape: Shape) -> anyhow::Result<Libvirtd> {
        let mut libvirtd = Libvirtd::bare(world)?;
        libvirtd.begin()?;
        libvirtd.make_pool(POOL)?;
        libvirtd.make_network(NETWORK, shape)?;
        Ok(libvirtd)
    }

    /// Writes the configuration and starts nothing.
    pub fn bare(world: &World) -> anyhow::Result<Libvirtd> {
        let folder = world.folder().join("libvirt");
        // QEMU may run as another user.
        fs::DirBuilder::new().recursive(true).mode(0o755).create(folder.join("etc"))?;
        fs::write(folder.join("etc/qemu.conf"), QEMU_CONF)?;
        let conf = format!(
            "unix_sock_dir = \"{}\"\nauth_unix_ro = \"none\"\nauth_unix_rw = \"none\"\nlog_outputs = \"3:stderr\"\n",
            folder.join("sock").display()
        );
        fs::create_dir_all(folder.join("sock"))?;
        fs::write(folder.join("libvirtd.conf"), conf)?;
        Ok(Libvirtd { world: world.clone(), folder, child: None })
    }

    /// Starts the process, for the first time or after a kill, and waits until it answers.
    pub fn begin(&mut self) -> anyhow::Result<()> {
        ensure!(self.child.is_none(), "libvirtd runs");
        let socket = self.socket();
        // It may not exist.
        fs::remove_file(&socket).ok();
        let arguments: Vec<&OsStr> = ["-m", "--propagation", "private", "sh", "-c", SCRIPT, "libvirtd"]
            .iter()
            .map(OsStr::new)
            .chain([self.folder.as_os_str(), OsStr::new("/var/tmp/peerpod-libvirt-cache")])
            .collect();
        self.child = Some(self.world.spawn(Path::new("unshare"), &arguments, &self.log())?);
        let child = &mut self.child;
        let up = eventually_blocking("libvirtd answers", PATIENCE, || {
            if let Some(status) = child.as_mut().and_then(|child| child.try_wait().ok().flatten()) {
                return Some(Err(anyhow::anyhow!("libvirtd ended: {status}")));
            }
            socket.exists().then(|| run("virsh", &["-c", &uri_of(&socket), "list"], "")).filter(Result::is_ok)
        });
        up.and_then(|up| up).map(drop).with_context(|| fs::read_to_string(self.log()).unwrap_or_default())
    }

    /// Kills libvirtd with SIGKILL; its VMs keep running.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        let mut child = self.child.take().context("libvirtd does not run")?;
        child.kill()?;
        child.wait()?;
        Ok(())
    }

    /// Limits the address space of VMs that are started from now on, independently of the host's free memory; `None`
    /// removes the limit.
    pub fn limit_memory(&self, mib: Option<u64>) -> anyhow::Result<()> {
        let pid = fs::read_to_string(self.folder.join("libvirtd.pid"))?;
        // Sets the soft limit: a child inherits it, and lifting it again needs no privilege.
        let bytes = mib.map_or("unlimited".to_owned(), |mib| (mib << 20).to_string());
        run("prlimit", &["--pid", pid.trim(), &format!("--as={bytes}:")], "").map(drop)
    }

    /// Makes and starts a pool of files, and returns its folder.
    pub fn make_pool(&self, name: &str) -> anyhow::Result<PathBuf> {
        let folder = self.pool_folder(name);
        fs::create_dir_all(&folder)?;
        self.virsh(&["pool-define-as", name, "dir", "--target", &folder.display().to_string()])?;
        self.virsh(&["pool-start", name])?;
        Ok(folder)
    }

    /// Returns the folder of a pool's files.
    pub fn pool_folder(&self, name: &str) -> PathBuf {
        self.folder.join("pool").join(name)
    }

    /// Makes and starts a network with the node as its gateway.
    pub fn make_network(&self, name: &str, shape: Shape) -> anyhow::Result<()> {
        let file = self.folder.join(format!("{name}.xml"));
        fs::write(&file, shape.xml(name))?;
        self.virsh(&["net-define", &file.display().to_string()])?;
        self.virsh(&["net-start", name])?;
        // A bridge without a port has no carrier, and gets the routes of its addresses only with the first VM. This
        // port makes the state the same before and after a VM.
        let (port, end) = (format!("lv{name}-up"), format!("lv{name}-end"));
        self.world.node().ip(&format!(
            "link add {port} type veth peer name {end}\nlink set {end} up\nlink set {port} master lv{name} up\n"
        ))?;
        let own = if shape.ipv6 { "fd97::1/" } else { "10.97.0.1/" };
        eventually_blocking("the bridge's own address", PATIENCE, || {
            let addresses = self.world.node().ip(&format!("address show dev lv{name}\n")).ok()?;
            let settled = addresses.contains("LOWER_UP") && !addresses.contains("tentative");
            (settled && addresses.contains(own)).then_some(())
        })
    }

    /// Adds a DHCP lease for every running VM, for VMs that boot no DHCP client.
    pub fn lease_to_all(&self) -> anyhow::Result<()> {
        self.lease(|[first, middle, last]| vec![format!("10.{first}.{middle}.{last}")])
    }

    /// Adds leases with the addresses that `addresses` returns for the last three bytes of each VM's MAC. Earlier
    /// leases end.
    pub fn lease(&self, addresses: impl Fn([u8; 3]) -> Vec<String>) -> anyhow::Result<()> {
        let mut leases = Vec::new();
        for entry in fs::read_dir(self.folder.join("run/qemu"))?.flatten() {
            // A VM that ends meanwhile is gone.
            let xml = fs::read_to_string(entry.path()).unwrap_or_default();
            let macs = xml.split("<mac address='").skip(1).filter_map(|rest| rest.split('\'').next());
            for mac in macs {
                // All three bytes: with two of them, eight machines would often collide.
                let own: Vec<u8> =
                    mac.rsplit(':').take(3).filter_map(|byte| u8::from_str_radix(byte, 16).ok()).collect();
                let [last, middle, first] = own[..] else { continue };
                leases.extend(addresses([first, middle, last]).into_iter().map(|address| {
                    serde_json::json!({
                        "ip-address": address, "mac-address": mac, "expiry-time": 4_000_000_000u64,
                    })
                }));
            }
        }
        let file = self.folder.join(format!("lib/dnsmasq/lv{NETWORK}.status"));
        let temporary = file.with_extension("tmp");
        fs::write(&temporary, serde_json::to_vec(&leases)?)?;
        Ok(fs::rename(temporary, file)?)
    }

    /// Removes the addresses that providers reserved in the VMs' network, and returns their number.
    pub fn unreserve(&self) -> anyhow::Result<usize> {
        let xml = self.virsh(&["net-dumpxml", NETWORK])?;
        let hosts = xml
            .lines()
            .map(str::trim)
            .filter(|line| line.starts_with("<host ") && line.contains("name='peerpod-"));
        let mut removed = 0;
        for host in hosts {
            self.virsh(&["net-update", NETWORK, "delete", "ip-dhcp-host", host, "--live"])?;
            removed += 1;
        }
        Ok(removed)
    }

    /// Returns the path of its socket.
    pub fn socket(&self) -> PathBuf {
        self.folder.join("sock/libvirt-sock")
    }

    /// Returns its URI.
    pub fn uri(&self) -> String {
        uri_of(&self.socket())
    }

    /// Returns the log file of libvirtd and its helper programs.
    pub fn log(&self) -> PathBuf {
        self.folder.join("libvirtd.log")
    }

    /// Runs `virsh`, the witness.
    pub fn virsh(&self, arguments: &[&str]) -> anyhow::Result<String> {
        let uri = self.uri();
        run("virsh", &[&["-q", "-c", &uri], arguments].concat(), "")
    }

    /// Returns the names of all domains, running or not. Waits for the end of the VM of a node's KVM probe, which ends
    /// by itself.
    pub fn domains(&self) -> anyhow::Result<Vec<String>> {
        without_trial(|| {
            Ok(self.virsh(&["list", "--all", "--name"])?.split_whitespace().map(str::to_owned).collect())
        })
    }

    /// Returns the files of a pool that belong to a single VM. Waits like [`Libvirtd::domains`].
    pub fn files(&self, pool: &str) -> anyhow::Result<Vec<String>> {
        without_trial(|| {
            let mut names = Vec::new();
            for entry in fs::read_dir(self.pool_folder(pool))? {
                let name = entry?.file_name().to_string_lossy().into_owned();
                names.extend(Some(name).filter(|name| !name.starts_with("peerpod-base-")));
            }
            names.sort();
            Ok(names)
        })
    }

    /// Returns the NVRAM files of UEFI machines, which libvirt makes, one per machine.
    pub fn firmware(&self) -> anyhow::Result<Vec<String>> {
        let folder = self.folder.join("lib/qemu/nvram");
        let entries = match fs::read_dir(&folder) {
            Ok(entries) => entries,
            // No UEFI machine was started yet.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error).with_context(|| format!("read {}", folder.display())),
        };
        entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    }

    /// Returns the settings of a node that makes its VMs with this libvirtd, from an image's folder.
    pub fn settings(&self, image: &Path, settings: Settings) -> anyhow::Result<Settings> {
        let text = fs::read_to_string(image.join("image.json"))
            .with_context(|| format!("{}: build it first (make image)", image.display()))?;
        let json: serde_json::Value = serde_json::from_str(&text)?;
        let part = |key: &str| {
            json[key].as_str().map(str::to_owned).with_context(|| format!("image.json has no {key}"))
        };
        let file = |key: &str| part(key).map(|name| image.join(name).display().to_string());
        Ok(self
            .here(settings.with_volume(image))
            .set("provider.libvirt.kernel", file("kernel")?)
            .set("provider.libvirt.initrd", file("initrd")?)
            .set("provider.libvirt.cmdline", part("cmdline")?))
    }

    /// Returns the settings of a node that makes its VMs with this libvirtd, from a disk image.
    pub fn disk_settings(&self, image: &Path, settings: Settings) -> Settings {
        let folder = image.parent().unwrap_or(image);
        self.here(settings.with_volume(folder)).set("provider.libvirt.image", image.display().to_string())
    }

    fn here(&self, settings: Settings) -> Settings {
        settings
            .with_volume(&self.folder)
            .set("provider.kind", "libvirt")
            .set("provider.libvirt.uri", self.uri())
            .set("provider.libvirt.pool", POOL)
            .set("provider.libvirt.network", NETWORK)
            // The same on every machine, and without the trial of KVM: a processor busy for ten seconds where KVM hangs.
            .set("provider.libvirt.acceleration", "emulated")
    }
}

impl Drop for Libvirtd {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            // It may have ended before.
            child.kill().ok();
            child.wait().ok();
        }
    }
}

fn uri_of(socket: &Path) -> String {
    format!("qemu+unix:///system?socket={}", socket.display())
}

/// Repeats `inspect` until it returns nothing of a KVM probe. After the time limit it returns the leftovers to the caller.
fn without_trial(inspect: impl Fn() -> anyhow::Result<Vec<String>>) -> anyhow::Result<Vec<String>> {
    let deadline = Instant::now() + TRIAL;
    loop {
        let names = inspect()?;
        if Instant::now() > deadline || !names.iter().any(|name| name.contains("probe-")) {
            return Ok(names);
        }
        thread::sleep(STEP);
    }
}
