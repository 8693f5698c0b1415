//! Mounts the file systems of a machine, on a root that programs can leave.
//!
//! An initramfs is the kernel's first root, and the one root that cannot be pivoted away (`pivot_root`: EINVAL), which
//! every container runtime does. So it is bound onto itself and the bind mount is moved on top. The files are the same,
//! nothing is copied, and the root is a mount like any other. The kernel's own helpers still use the first root, which
//! has the same files.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::symlink;

use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use nix::unistd::{chdir, chroot, dup2_stderr, dup2_stdin, dup2_stdout};

use crate::status;

/// Source, target, type, flags, data.
type Mount = (&'static str, &'static str, &'static str, MsFlags, Option<&'static str>);

const NO_DEV: MsFlags = MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV);
const NO_EXEC: MsFlags = MsFlags::MS_NOSUID.union(MsFlags::MS_NOEXEC);
const SAFE: MsFlags = NO_DEV.union(MsFlags::MS_NOEXEC);
const PROC: Mount = ("proc", "/proc", "proc", SAFE, None);
/// Mounts needed to reach the node.
const FIRST: &[Mount] = &[
    ("sysfs", "/sys", "sysfs", SAFE, None),
    ("devtmpfs", "/dev", "devtmpfs", MsFlags::MS_NOSUID, Some("mode=0755")),
    ("tmpfs", "/run", "tmpfs", NO_DEV, Some("mode=0755")),
];
/// Mounts needed by kata-agent and containers.
const LATER: &[Mount] = &[
    ("devpts", "/dev/pts", "devpts", NO_EXEC, Some("gid=5,mode=620,ptmxmode=666")),
    ("tmpfs", "/dev/shm", "tmpfs", NO_DEV, Some("mode=1777")),
    ("tmpfs", "/tmp", "tmpfs", NO_DEV, Some("mode=1777")),
    ("cgroup2", "/sys/fs/cgroup", "cgroup2", SAFE, None),
];
/// Mount for the lockdown; this one and `EXTRAS` are for machines only, and only if the kernel has them.
const SECURITY: &[Mount] = &[("securityfs", "/sys/kernel/security", "securityfs", SAFE, None)];
const EXTRAS: &[Mount] = &[
    ("mqueue", "/dev/mqueue", "mqueue", SAFE, None),
    ("configfs", "/sys/kernel/config", "configfs", SAFE, None), // attestation reports (TSM)
    ("bpf", "/sys/fs/bpf", "bpf", SAFE, Some("mode=0700")),
];
const LINKS: [(&str, &str); 4] = [
    ("/proc/self/fd", "/dev/fd"),
    ("/proc/self/fd/0", "/dev/stdin"),
    ("/proc/self/fd/1", "/dev/stdout"),
    ("/proc/self/fd/2", "/dev/stderr"),
];
/// Place from which the bind mount of the root is moved.
const STAGE: &str = "/.root";

/// Mounts the file systems needed to reach the node, and leaves the kernel's first root; returns that root, if any.
pub(super) fn build() -> Option<OwnedFd> {
    mount_missing(&[PROC]);
    let leaves = status::in_first_pid_namespace() && is_first_root();
    let first = leaves.then(leave_first_root).transpose();
    let first = first.inspect_err(|error| {
        tracing::error!(%error, "cannot leave the initramfs as root: no container will start");
    });
    mount_missing(FIRST);
    if status::in_first_pid_namespace() {
        mount_known(SECURITY);
        take_console();
    }
    first.ok().flatten()
}

/// Mounts the rest.
pub(super) fn complete() {
    mount_missing(LATER);
    if status::in_first_pid_namespace() {
        mount_known(EXTRAS);
        if let Err(error) = make_tun() {
            tracing::warn!(%error, "cannot make /dev/net/tun: the encrypted tunnel does not start");
        }
    }
    for (to, link) in LINKS {
        if let Err(error) = symlink(to, link)
            && error.kind() != io::ErrorKind::AlreadyExists
        {
            tracing::warn!(link, %error, "cannot make a link");
        }
    }
}

/// Makes the device of the encrypted tunnel. Its first use makes the kernel request the module tun.
fn make_tun() -> io::Result<()> {
    fs::create_dir_all("/dev/net")?;
    let mode = Mode::S_IRUSR | Mode::S_IWUSR;
    match mknod("/dev/net/tun", SFlag::S_IFCHR, mode, makedev(10, 200)) {
        Err(error) if error != Errno::EEXIST => Err(error.into()),
        _ => Ok(()),
    }
}

/// Returns whether everything is mounted, by the last step of [`complete`].
pub(super) fn is_complete() -> bool {
    LINKS.iter().all(|(_, link)| fs::symlink_metadata(link).is_ok())
}

/// Returns whether the root is still the kernel's first one: the last mount on `/` has the type `rootfs`.
fn is_first_root() -> bool {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    root_type(&mounts) == Some("rootfs")
}

fn root_type(mountinfo: &str) -> Option<&str> {
    let root = mountinfo.lines().rfind(|line| line.split(' ').nth(4) == Some("/"))?;
    root.split(" - ").nth(1)?.split(' ').next()
}

fn leave_first_root() -> io::Result<OwnedFd> {
    let none: Option<&str> = None;
    let first = File::open("/")?;
    fs::create_dir_all(STAGE)?;
    mount(Some("/"), STAGE, none, MsFlags::MS_BIND | MsFlags::MS_REC, none)?;
    chdir(STAGE)?;
    mount(Some("."), "/", none, MsFlags::MS_MOVE, none)?;
    chroot(".")?;
    chdir("/")?;
    fs::remove_dir(STAGE)?;
    Ok(first.into())
}

/// Opens the console if the standard streams lack it, as in an initramfs without /dev/console.
fn take_console() {
    let is_open =
        fs::read_link("/proc/self/fd/2").is_ok_and(|to| to.starts_with("/dev/") && !to.ends_with("null"));
    let taken = (!is_open).then(|| File::options().read(true).write(true).open("/dev/console"));
    if let Some(Ok(console)) = taken {
        let all = [dup2_stdin(&console), dup2_stdout(&console), dup2_stderr(&console)];
        if let Some(error) = all.into_iter().find_map(Result::err) {
            tracing::warn!(%error, "cannot write to the console");
        }
    }
}

/// Mounts each entry unless its target is mounted. A failure is logged and survived: namespaces do not allow all of it.
fn mount_missing(entries: &[Mount]) {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    for (source, target, kind, flags, data) in entries.iter().filter(|entry| !is_mounted(&mounts, entry.1)) {
        if let Err(error) = fs::create_dir_all(target) {
            tracing::warn!(target, %error, "cannot make a mount point");
            continue;
        }
        if let Err(error) = mount(Some(*source), *target, Some(*kind), *flags, *data) {
            tracing::warn!(target, kind, %error, "cannot mount");
        }
    }
}

/// Mounts the entries that the kernel supports.
fn mount_known(entries: &[Mount]) {
    let known = fs::read_to_string("/proc/filesystems").unwrap_or_default();
    let known = |entry: &&Mount| known.lines().any(|line| line.split_whitespace().last() == Some(entry.2));
    mount_missing(&entries.iter().filter(known).copied().collect::<Vec<_>>());
}

pub(super) fn is_mounted(mountinfo: &str, target: &str) -> bool {
    mountinfo.lines().any(|line| line.split(' ').nth(4) == Some(target))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounted_file_systems_are_detected() {
        let mountinfo = "22 1 0:20 / / rw - ext4 /dev/vda rw\n30 22 0:5 / /dev/pts rw - devpts x rw\n";
        assert!(is_mounted(mountinfo, "/"));
        assert!(is_mounted(mountinfo, "/dev/pts"));
        assert!(!is_mounted(mountinfo, "/dev"));
        assert!(is_mounted(&fs::read_to_string("/proc/self/mountinfo").unwrap(), "/proc"));
    }

    #[test]
    fn the_last_mount_on_the_root_is_the_root() {
        let first = "1 1 0:2 / / rw - rootfs rootfs rw,size=1k\n22 1 0:20 / /proc rw - proc proc rw\n";
        assert_eq!(root_type(first), Some("rootfs"));
        assert_eq!(root_type(&format!("{first}23 1 0:9 / / rw shared:1 - ext4 /dev/vda rw\n")), Some("ext4"));
        assert_eq!(root_type(""), None);
        assert!(!is_first_root(), "tests run somewhere else");
    }
}
