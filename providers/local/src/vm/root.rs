//! Builds the VM's root directory: a tmpfs with the node's programs and libraries bound in read-only. Everything else
//! belongs to the VM. Works in the VM's own mount namespace, so its mounts are not visible on the node.

use std::fs::{self, File, Permissions};
use std::io::Write;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, symlink};
use std::path::Path;

use anyhow::Context;
use nix::mount::{MsFlags, mount};
use serde_json::json;

use super::inside::Description;
use crate::cgroup::Hierarchy;

/// Path of the guest program in the VM.
pub(super) const GUEST: &str = "/opt/peerpod/peerpod-guest";
/// Program that the guest starts for each image.
const PULL: &str = "peerpod-pull";
/// Path of the agent in the VM.
const AGENT: &str = "/opt/peerpod/kata-agent";
const AGENT_CONFIG: &str = "/etc/agent-config.toml";
const AGENT_SOCKET: &str = "/run/peerpod/agent.sock";
/// Bundle of the pod's own container, which a real kata-agent expects in the root.
const PAUSE_BUNDLE: &str = "pause_bundle";

/// Folders of the node with programs and libraries; symbolic links on a merged-/usr system.
const SYSTEM: [&str; 8] = ["usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "libo32"];
/// Entries of the node's /etc that programs need: the linker, users, names, certificates.
const ETC: [&str; 15] = [
    "alternatives",
    "ca-certificates",
    "ca-certificates.conf",
    "group",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "nsswitch.conf",
    "passwd",
    "pki",
    "protocols",
    "resolv.conf",
    "services",
    "ssl",
];
const DEVICES: [&str; 6] = ["null", "zero", "full", "random", "urandom", "tty"];

/// Folder of the hierarchies of version 1.
const CGROUPS: &str = "/sys/fs/cgroup";
const TUN: &str = "/dev/net/tun";
/// Absent argument of a mount.
pub(super) const NONE: Option<&str> = None;

/// Builds the root at the path in the description.
pub(super) fn build(description: &Description, cgroups: &[Hierarchy]) -> anyhow::Result<()> {
    let root = description.root.as_path();
    let safe = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    tmpfs(root, MsFlags::empty(), "mode=0755")?;
    for name in SYSTEM {
        mirror(&Path::new("/").join(name), &root.join(name))?;
    }
    etc(root, description)?;
    for (name, mode) in [("run", "mode=0755"), ("tmp", "mode=1777"), ("var", "mode=0755")] {
        tmpfs(&root.join(name), safe, mode)?;
    }
    for name in ["home", "media", "mnt", "opt", "root", "srv", "run/lock", "var/lib", "var/log", "var/tmp"] {
        directory(&root.join(name))?;
    }
    symlink("/run", root.join("var/run")).context("link /var/run")?;
    bind_file(&description.guest_binary, &inside(root, GUEST))?;
    bind_file(&description.agent_binary, &inside(root, AGENT))?;
    // Beside the guest program, where the guest looks first. Without it, the VM's pods have only the images that exist
    // already.
    let pull = description.guest_binary.with_file_name(PULL);
    if pull.is_file() {
        bind_file(&pull, &inside(root, GUEST).with_file_name(PULL))?;
    }
    let bundle = description.agent_binary.with_file_name(PAUSE_BUNDLE);
    if bundle.is_dir() {
        let target = root.join(PAUSE_BUNDLE);
        directory(&target)?;
        bind(&bundle, &target)?;
        read_only(&target)?;
    }
    user_data(root, &description.user_data)?;
    devices(root)?;
    kernel(root, cgroups)
}

fn etc(root: &Path, description: &Description) -> anyhow::Result<()> {
    let etc = root.join("etc");
    directory(&etc.join("peerpod"))?;
    for name in ETC {
        mirror(&Path::new("/etc").join(name), &etc.join(name))?;
    }
    let name = &description.hostname;
    write(&etc.join("hostname"), &format!("{name}\n"), 0o644)?;
    let hosts = format!("127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n127.0.1.1 {name}\n");
    write(&etc.join("hosts"), &hosts, 0o644)?;
    write(&etc.join("machine-id"), &format!("{}\n", description.machine_id), 0o444)?;
    let settings = json!({
        "version": 1,
        "agent": [AGENT, "--config", AGENT_CONFIG],
        "agent_socket": AGENT_SOCKET,
    });
    write(&etc.join("peerpod/guest.json"), &settings.to_string(), 0o644)?;
    // In the agent's own format; a VM image would hold this file.
    let agent = format!(
        "server_addr = \"unix://{AGENT_SOCKET}\"\nlog_level = \"info\"\nguest_components_procs = \"none\"\n"
    );
    write(&inside(root, AGENT_CONFIG), &agent, 0o644)
}

/// Writes user-data to a read-only file system, as NoCloud of cloud-init does.
fn user_data(root: &Path, text: &str) -> anyhow::Result<()> {
    let disk = root.join("media/cidata");
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    tmpfs(&disk, flags, "mode=0755,size=2m")?;
    write(&disk.join("user-data"), text, 0o400)?;
    mount(NONE, &disk, NONE, flags | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY, NONE)
        .context("make user-data read-only")
}

fn devices(root: &Path) -> anyhow::Result<()> {
    let dev = root.join("dev");
    tmpfs(&dev, MsFlags::MS_NOSUID, "mode=0755,size=1m")?;
    for name in DEVICES {
        let node = dev.join(name);
        File::create(&node).with_context(|| format!("make /dev/{name}"))?;
        bind(&Path::new("/dev").join(name), &node)?;
    }
    // For the guest's encrypted tunnel; on a host without the device, VMs lack it too.
    if Path::new(TUN).exists() {
        let node = inside(root, TUN);
        directory(&dev.join("net"))?;
        File::create(&node).context("make /dev/net/tun")?;
        bind(Path::new(TUN), &node)?;
    }
    let options = "newinstance,ptmxmode=0666,mode=0620,gid=5";
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC;
    filesystem("devpts", &dev.join("pts"), flags, options)?;
    tmpfs(&dev.join("shm"), MsFlags::MS_NOSUID | MsFlags::MS_NODEV, "mode=1777")?;
    let links = [
        ("pts/ptmx", "ptmx"),
        ("/proc/self/fd", "fd"),
        ("/proc/self/fd/0", "stdin"),
        ("/proc/self/fd/1", "stdout"),
        ("/proc/self/fd/2", "stderr"),
    ];
    for (target, name) in links {
        symlink(target, dev.join(name)).with_context(|| format!("link /dev/{name}"))?;
    }
    Ok(())
}

/// Mounts the kernel's file systems of this pid and network namespace.
fn kernel(root: &Path, cgroups: &[Hierarchy]) -> anyhow::Result<()> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    filesystem("proc", &root.join("proc"), flags, "")?;
    filesystem("sysfs", &root.join("sys"), flags | MsFlags::MS_RDONLY, "")?;
    if cgroups.iter().any(|hierarchy| hierarchy.kind == "cgroup") {
        tmpfs(&inside(root, CGROUPS), flags, "mode=0755,size=1m")?;
    }
    for Hierarchy { at, kind, options } in cgroups {
        filesystem(kind, &root.join(at.strip_prefix("/")?), flags, options)?;
    }
    Ok(())
}

/// Mirrors a folder, file or symbolic link of the node at the same path inside, read-only. Does nothing if the node has
/// none.
fn mirror(source: &Path, target: &Path) -> anyhow::Result<()> {
    let Ok(metadata) = fs::symlink_metadata(source) else { return Ok(()) };
    if metadata.is_symlink() {
        let to = fs::read_link(source).with_context(|| format!("read link {}", source.display()))?;
        // A link out of the mirrored folders (resolv.conf into /run) becomes a copy of its current target.
        let dangles =
            source.starts_with("/etc") && !source.canonicalize().is_ok_and(|p| p.starts_with("/usr"));
        if !dangles {
            return symlink(to, target).with_context(|| format!("link {}", target.display()));
        }
        return match fs::read(source) {
            Ok(bytes) => fs::write(target, bytes).with_context(|| format!("copy {}", source.display())),
            Err(_) => Ok(()),
        };
    }
    if metadata.is_dir() {
        directory(target)?;
        bind(source, target)?;
        return read_only(target);
    }
    bind_file(source, target)
}

/// Binds a file of the node, read-only, at another path inside.
fn bind_file(source: &Path, target: &Path) -> anyhow::Result<()> {
    if let Some(parent) = target.parent() {
        directory(parent)?;
    }
    File::create(target).with_context(|| format!("make {}", target.display()))?;
    bind(source, target)?;
    read_only(target)
}

fn bind(source: &Path, target: &Path) -> anyhow::Result<()> {
    mount(Some(source), target, NONE, MsFlags::MS_BIND, NONE)
        .with_context(|| format!("bind {} into the VM", source.display()))
}

fn read_only(target: &Path) -> anyhow::Result<()> {
    let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
    mount(NONE, target, NONE, flags, NONE).with_context(|| format!("make {} read-only", target.display()))
}

fn tmpfs(target: &Path, flags: MsFlags, options: &str) -> anyhow::Result<()> {
    filesystem("tmpfs", target, flags, options)
}

fn filesystem(kind: &str, target: &Path, flags: MsFlags, options: &str) -> anyhow::Result<()> {
    directory(target)?;
    mount(Some(kind), target, Some(kind), flags, Some(options))
        .with_context(|| format!("mount {kind} at {}", target.display()))
}

fn directory(path: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(path).with_context(|| format!("make {}", path.display()))
}

fn write(path: &Path, text: &str, mode: u32) -> anyhow::Result<()> {
    let attempt = || format!("write {}", path.display());
    let mut file =
        File::options().create_new(true).write(true).mode(0o600).open(path).with_context(attempt)?;
    file.write_all(text.as_bytes()).with_context(attempt)?;
    fs::set_permissions(path, Permissions::from_mode(mode)).with_context(attempt)
}

fn inside(root: &Path, path: &str) -> std::path::PathBuf {
    root.join(path.trim_start_matches('/'))
}
