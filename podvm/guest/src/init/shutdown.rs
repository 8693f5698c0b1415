//! Shuts a machine down in order: asks every process to end, then kills it, writes mounted file systems back and
//! unmounts them, the innermost first. Every step has a time limit: storage that died with the node must not keep a VM
//! alive.

use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use super::watchdog::Watchdog;
use crate::power;

/// Time that containers may take to end after the request.
const ASKED: Duration = Duration::from_secs(5);
const KILLED: Duration = Duration::from_secs(2);
const STEP: Duration = Duration::from_millis(10);
/// Filesystems of the kernel, in memory, or never written: no content of theirs outlives the machine.
const FLEETING: &str = "autofs bpf cgroup2 configfs debugfs devpts devtmpfs mqueue nsfs proc ramfs rootfs securityfs \
                        squashfs sysfs tmpfs tracefs";

const NONE: Option<&str> = None;

/// Ends all processes but this one. Returns when the power may go off.
pub(super) fn finish(mut watchdog: Option<Watchdog>) {
    for (signal, limit) in [(Signal::SIGTERM, ASKED), (Signal::SIGKILL, KILLED)] {
        if kill(Pid::from_raw(-1), signal).is_err() || all_gone(limit, &mut watchdog) {
            break; // ESRCH: no process is left
        }
    }
    let work = || [power::flush(), unmount()].concat();
    if flush(work, &mut watchdog) {
        tracing::info!("all disks are synced and unmounted");
    }
}

/// Runs the last flush within its time limit, and logs its failures. Returns whether it ended in time.
pub(super) fn flush(
    work: impl FnOnce() -> Vec<String> + Send + 'static,
    watchdog: &mut Option<Watchdog>,
) -> bool {
    let deadline = Instant::now() + power::LAST_FLUSH;
    let (done, waiting) = std::sync::mpsc::channel();
    // The receiver may be gone when the work is done.
    let begun = std::thread::Builder::new().name("last".into()).spawn(move || drop(done.send(work())));
    while begun.is_ok() && Instant::now() < deadline {
        watchdog.iter_mut().for_each(Watchdog::feed);
        let Ok(problems) = waiting.recv_timeout(Duration::from_secs(1)) else { continue };
        for problem in problems {
            tracing::error!(problem, "the last flush is not complete");
        }
        return true;
    }
    tracing::error!("the last flush takes too long; the power goes off without it");
    false
}

fn all_gone(limit: Duration, watchdog: &mut Option<Watchdog>) -> bool {
    let deadline = Instant::now() + limit;
    while Instant::now() < deadline {
        match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
            Err(Errno::ECHILD) => return true,
            Ok(WaitStatus::StillAlive) | Err(_) => {
                watchdog.iter_mut().for_each(Watchdog::feed);
                std::thread::sleep(STEP);
            }
            Ok(_) => {}
        }
    }
    false
}

/// Unmounts lasting file systems; returns the failures as text.
fn unmount() -> Vec<String> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mut problems = Vec::new();
    for target in lasting(&mounts).iter().rev() {
        match umount2(target.as_str(), MntFlags::UMOUNT_NOFOLLOW) {
            Ok(()) | Err(Errno::EINVAL) => {}
            Err(error) => {
                // A process that cannot be killed holds it: read-only, at least nothing is half written.
                let flags = MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
                if mount(NONE, target.as_str(), NONE, flags, NONE).is_err() {
                    problems.push(format!("unmount of {target}: {error}"));
                }
            }
        }
    }
    problems
}

/// Returns the mount points of data that outlives the machine, except the root, in mount order.
fn lasting(mountinfo: &str) -> Vec<String> {
    let point = |line: &str| {
        let (mount, filesystem) = line.split_once(" - ")?;
        let kind = filesystem.split(' ').next()?;
        let target = power::unescape(mount.split(' ').nth(4)?);
        (target != "/" && FLEETING.split(' ').all(|other| other != kind)).then_some(target)
    };
    mountinfo.lines().filter_map(point).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_persistent_file_systems_are_unmounted() {
        let mountinfo = "\
22 1 0:20 / / rw - rootfs rootfs rw
30 22 8:0 / /run/peerpod/volumes/v\\0400 rw,relatime shared:1 - ext4 /dev/vdb rw
32 22 0:5 / /run tmp - tmpfs tmpfs rw
33 30 0:5 / /run/c/merged rw - overlay overlay rw,lowerdir=/x
34 22 0:6 / /proc rw - proc proc rw
35 22 0:7 / /mnt/n rw - nfs4 server:/x rw
";
        assert_eq!(lasting(mountinfo), ["/run/peerpod/volumes/v 0", "/run/c/merged", "/mnt/n"]);
        assert!(lasting("nonsense\n").is_empty());
    }
}
