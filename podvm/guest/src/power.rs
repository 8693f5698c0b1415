//! Ends the VM: the lease that expires when the VM is not wanted any more, the flush before, the power-off.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::errno::Errno;
use nix::mount::{MntFlags, umount2};
use nix::sys::reboot::{RebootMode, reboot};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, sync, syncfs};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;
use tokio::time::timeout;

use crate::{files, proc, status};

/// Lease until user-data sets another one: a VM that is never assigned to a pod costs money for so long.
pub(crate) const FIRST_LEASE: Duration = Duration::from_secs(15 * 60);
/// End of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Finish {
    PowerOff,
    /// The machine returns to its pool.
    Reboot,
}

impl Finish {
    /// Returns the end as a command of systemd.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Finish::PowerOff => "poweroff",
            Finish::Reboot => "reboot",
        }
    }
}

/// Exit code of `serve` that asks pid 1 to power the machine off.
pub(crate) const POWER_OFF: u8 = 70;
/// Time limits of the last flush and sync: storage that died with the node must not keep the VM alive.
pub(crate) const LAST_FLUSH: Duration = Duration::from_secs(30);
const LAST_SYNC: Duration = Duration::from_secs(5);
/// Limit of the data that the kernel has not written back: a volume of 10 MB/s takes it within [`LAST_FLUSH`]. A large
/// machine would keep gigabytes.
const UNWRITTEN: u64 = 128 << 20;
/// Interval between notes of contact while the link is up.
const TICK: Duration = Duration::from_secs(5);
/// File of the lease's note, rewritten again and again for as long as `serve` lives.
pub(crate) const FILE: &str = "lease.json";
/// Prefixes of mount points with data that outlives the VM. (Not the kata-agent's own `/run/kata-containers`: its
/// scratch space dies with the VM.)
const VOLUMES: &[&str] = &[
    "/run/peerpod/volumes/",
    "/run/peerpod/volumes-moment/",
    "/run/peerpod/shares/",
    "/run/kata-containers/sandbox/storage/",
];

/// Lease on disk, so that a program that crashes over and over does not renew it.
#[derive(Clone, Copy, Serialize, Deserialize)]
struct Note {
    version: u32,
    /// On the clock of [`status::since_boot`].
    last_contact_us: u64,
    lease_us: u64,
}

/// Lease that expires when the link was silent for too long.
pub(crate) struct Lease {
    file: PathBuf,
    inner: Mutex<Inner>,
    changed: Notify,
}

struct Inner {
    length: Duration,
    last_contact: Duration,
    up: bool,
}

impl Lease {
    /// Continues the lease of the previous run.
    pub(crate) fn load(dir: &Path) -> Lease {
        let file = dir.join(FILE);
        let (last_contact, length) = read(&file).unwrap_or((status::since_boot(), FIRST_LEASE));
        let inner = Inner { length, last_contact, up: false };
        let lease = Lease { file, inner: Mutex::new(inner), changed: Notify::new() };
        lease.note();
        lease
    }

    /// Sets the permitted silence from now on.
    pub(crate) fn set_length(&self, length: Duration) {
        self.inner.lock().length = length;
        self.note();
    }

    /// Reports whether the link is up. Contact lasts while it is; then silence begins.
    pub(crate) fn linked(&self, up: bool) {
        let mut inner = self.inner.lock();
        if up || inner.up {
            (inner.up, inner.last_contact) = (up, status::since_boot());
        }
        drop(inner);
        self.note();
    }

    pub(crate) async fn expired(&self) {
        loop {
            let left = {
                let mut inner = self.inner.lock();
                if inner.up {
                    inner.last_contact = status::since_boot();
                }
                (inner.last_contact + inner.length).saturating_sub(status::since_boot())
            };
            if left.is_zero() {
                return;
            }
            // Short steps: a sleeper's clock stops while a machine is suspended, but the lease continues.
            if timeout(left.min(TICK), self.changed.notified()).await.is_err() {
                self.write();
            }
        }
    }

    fn note(&self) {
        self.write();
        self.changed.notify_one();
    }

    fn write(&self) {
        let note = {
            let inner = self.inner.lock();
            Note {
                version: 1,
                last_contact_us: inner.last_contact.as_micros() as u64,
                lease_us: inner.length.as_micros() as u64,
            }
        };
        if let Err(error) = files::write_json(&self.file, &note) {
            tracing::warn!(path = %self.file.display(), %error, "cannot note the lease");
        }
    }
}

fn read(file: &Path) -> Option<(Duration, Duration)> {
    let content = files::read(file, 4096).ok().flatten()?;
    let note: Note = serde_json::from_slice(&content).ok().filter(|note: &Note| note.version == 1)?;
    Some((Duration::from_micros(note.last_contact_us), Duration::from_micros(note.lease_us)))
}

/// Returns whether the lease of the last `serve` has expired meanwhile; for pid 1, between two runs of `serve`.
pub(crate) fn is_overdue(state_dir: &Path) -> bool {
    let (last_contact, length) = read(&state_dir.join(FILE))
        .unwrap_or_else(|| (proc::started(1).unwrap_or_else(status::since_boot), FIRST_LEASE));
    last_contact + length < status::since_boot()
}

/// Writes volumes back and unmounts them, the innermost first, with every step tried. Returns the failures. Blocks.
pub(crate) fn flush() -> Vec<String> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mut problems = Vec::new();
    for target in volumes_in(&mounts).iter().rev() {
        if let Err(error) = File::open(target).and_then(|root| Ok(syncfs(root)?)) {
            problems.push(format!("sync of {target}: {error}"));
        }
        match umount2(target.as_str(), MntFlags::UMOUNT_NOFOLLOW) {
            Ok(()) | Err(Errno::EINVAL) => {} // no longer a mount
            Err(Errno::EBUSY) => {
                problems.push(format!("{target} is still in use; it is synced but not unmounted"));
            }
            Err(error) => problems.push(format!("unmount of {target}: {error}")),
        }
    }
    sync_machine();
    problems
}

/// Returns the number of bytes that the kernel has not written back yet; `None` if the kernel is the host's.
pub(crate) fn unwritten() -> Option<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let bytes = bytes_of("Dirty", &meminfo)? + bytes_of("Writeback", &meminfo)?;
    status::in_first_pid_namespace().then_some(bytes)
}

/// Limits the data that the kernel has not written back, unless the kernel's command line sets a limit in bytes, or
/// the kernel's own limit, a fifth of memory, is lower.
pub(crate) fn limit_unwritten() {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let is_low = bytes_of("MemTotal", &meminfo).is_none_or(|total| total / 5 <= UNWRITTEN);
    if is_low || !status::in_first_pid_namespace() {
        return;
    }
    let folder = Path::new("/proc/sys/vm");
    let is_set = |name: &str| std::fs::read_to_string(folder.join(name)).is_ok_and(|set| set.trim() != "0");
    for (name, bytes) in [("dirty_background_bytes", UNWRITTEN / 4), ("dirty_bytes", UNWRITTEN)] {
        if !is_set(name)
            && let Err(error) = std::fs::write(folder.join(name), bytes.to_string())
        {
            tracing::warn!(setting = name, bytes, %error, "cannot limit the data that is not written back");
        }
    }
}

/// Returns a figure of /proc/meminfo, in bytes.
pub(crate) fn bytes_of(name: &str, meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

/// Runs work that may hang for ever, and waits for it for at most `limit`. `None`: it goes on, on a detached thread.
pub(crate) fn within<T: Send + 'static>(
    limit: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (done, waiting) = std::sync::mpsc::channel();
    // The receiver may be gone when the work is done.
    let begun = std::thread::Builder::new().name("last".into()).spawn(move || drop(done.send(work())));
    begun.ok().and_then(|_| waiting.recv_timeout(limit).ok())
}

/// Writes all cached data back: first to disks without a file system, then the rest, much of which may be images that
/// are not needed any more. Does nothing if the machine belongs to the host: it would write back all data of the host.
pub(crate) fn sync_machine() {
    if status::in_first_pid_namespace() {
        sync_disks();
        sync();
    }
}

fn sync_disks() {
    for entry in std::fs::read_dir("/sys/class/block").into_iter().flatten().flatten() {
        let node = Path::new("/dev").join(entry.file_name());
        // A disk without a medium cannot be opened; the following sync covers all.
        if let Ok(disk) = File::open(&node)
            && let Err(error) = disk.sync_all()
        {
            tracing::error!(disk = %node.display(), %error, "cannot sync a disk");
        }
    }
}

/// Returns the mount points of volumes, in mount order.
fn volumes_in(mountinfo: &str) -> Vec<String> {
    let targets = mountinfo.lines().filter_map(|line| line.split(' ').nth(4)).map(unescape);
    targets.filter(|target| VOLUMES.iter().any(|prefix| target.starts_with(prefix))).collect()
}

/// Decodes a field of mountinfo: the kernel writes space, tab, newline and backslash as three octal digits.
pub(crate) fn unescape(field: &str) -> String {
    let mut parts = field.split('\\');
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let byte = part.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok());
        out.push(byte.map_or('\\', char::from));
        out += &part[if byte.is_some() { 3 } else { 0 }..];
    }
    out
}

/// Time that pid 1 may take to end the machine in order after the request.
pub(crate) const ORDERLY: Duration = Duration::from_secs(60);
/// Time limit of the request. A systemd that hangs must not keep a machine alive after its lease.
const ASKED: Duration = Duration::from_secs(10);

/// Makes pid 1 end the machine in order, if it is peerpod-guest; in any other case the machine ends at once.
pub(crate) fn have_ended(finish: Finish) {
    if crate::init::is_ours() {
        // Pid 1 also notices the end of this process, but a thread that hangs in its flush could delay that.
        match kill(Pid::from_raw(1), Signal::SIGPWR) {
            Ok(()) => return,
            Err(error) => tracing::error!(%error, "cannot signal pid 1"),
        }
    }
    now(finish);
}

/// Makes systemd end the machine in order, if it is pid 1. Returns whether it ends this process, too, before
/// [`ORDERLY`].
pub(crate) fn is_ended_by_systemd(finish: Finish) -> bool {
    if !status::in_first_pid_namespace() || !Path::new("/run/systemd/system").exists() {
        return false;
    }
    let ask = move || std::process::Command::new("systemctl").args(["--no-block", finish.word()]).status();
    match within(ASKED, ask) {
        Some(Ok(status)) if status.success() => return true,
        Some(Ok(status)) => tracing::error!(%status, "systemctl {}", finish.word()),
        Some(Err(error)) => tracing::error!(%error, "systemctl {}", finish.word()),
        None => tracing::error!("systemd does not answer within {ASKED:?}; the machine ends without it"),
    }
    false
}

/// Ends the machine at once. Does nothing if pid 1 is one of many: its end is the end of such a "VM". Returns only if it
/// must not or cannot end the machine.
pub(crate) fn now(finish: Finish) {
    if !status::in_first_pid_namespace() {
        return;
    }
    if within(LAST_SYNC, sync).is_none() {
        tracing::error!("the last sync takes too long; the machine ends without it");
    }
    // `reboot` returns only on an error.
    let Err(error) = reboot(match finish {
        Finish::PowerOff => RebootMode::RB_POWER_OFF,
        Finish::Reboot => RebootMode::RB_AUTOBOOT,
    });
    tracing::error!(%error, ?finish, "cannot end the machine");
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::files::testing::TempDir;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    #[test]
    fn a_blocked_call_is_not_waited_for() {
        let begun = Instant::now();
        let (_hold, never) = std::sync::mpsc::channel::<()>();
        assert!(within(MS(50), move || never.recv().is_ok()).is_none());
        assert!(begun.elapsed() < MS(20_000), "{:?}", begun.elapsed());
        assert_eq!(within(MS(10_000), || 7), Some(7));
    }

    #[tokio::test]
    async fn silence_ends_the_lease_and_contact_holds_it() {
        let dir = TempDir::new();
        let lease = Lease::load(dir.path());
        lease.set_length(MS(150));
        lease.linked(true);
        assert!(timeout(MS(400), lease.expired()).await.is_err(), "the link is up");
        let since = Instant::now();
        lease.linked(false);
        timeout(MS(20_000), lease.expired()).await.unwrap();
        assert!(since.elapsed() >= MS(100), "{:?}", since.elapsed());
    }

    #[tokio::test]
    async fn a_new_length_counts_at_once() {
        let dir = TempDir::new();
        let lease = std::sync::Arc::new(Lease::load(dir.path()));
        let waiting = tokio::spawn({
            let lease = lease.clone();
            async move { lease.expired().await }
        });
        tokio::task::yield_now().await;
        lease.set_length(MS(1));
        timeout(MS(20_000), waiting).await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_restart_does_not_renew_the_lease() {
        let dir = TempDir::new();
        let now = status::since_boot();
        let silent_since = |last_contact: Duration, length: Duration| {
            let (last_contact_us, lease_us) = (last_contact.as_micros() as u64, length.as_micros() as u64);
            let note = Note { version: 1, last_contact_us, lease_us };
            std::fs::write(dir.path().join(FILE), serde_json::to_vec(&note).unwrap()).unwrap();
        };
        silent_since(now, MS(600_000));
        let lease = Lease::load(dir.path());
        assert!(!is_overdue(dir.path()));
        assert_eq!(
            lease.inner.lock().last_contact.as_micros(),
            now.as_micros(),
            "the previous run had contact"
        );
        drop(lease);
        // The same after the lease. (If the clock began a moment ago, nothing can be long ago.)
        silent_since(now.saturating_sub(MS(5000)), now.min(MS(5000)) / 2);
        assert!(is_overdue(dir.path()));
        let again = Lease::load(dir.path());
        assert!(is_overdue(dir.path()), "the next run notes no new contact");
        timeout(MS(10_000), again.expired()).await.unwrap();
        std::fs::write(dir.path().join(FILE), "junk").unwrap();
        assert_eq!(Lease::load(dir.path()).inner.lock().length, FIRST_LEASE);
    }

    #[test]
    fn figures_of_the_kernel_are_read() {
        let meminfo = "MemTotal:  2048 kB\nDirty:    12 kB\nWriteback:   4 kB\nWritebackTmp:  8 kB\nX: 1\n";
        let read = |name| bytes_of(name, meminfo);
        assert_eq!((read("Dirty"), read("Writeback"), read("X")), (Some(12 << 10), Some(4 << 10), None));
        assert!(bytes_of("Dirty", &std::fs::read_to_string("/proc/meminfo").unwrap()).is_some());
    }

    #[test]
    fn only_volumes_are_unmounted() {
        let mountinfo = "\
22 1 0:20 / / rw - ext4 /dev/vda rw
30 22 8:0 / /run/peerpod/volumes/v0 rw,relatime shared:1 - ext4 /dev/vdb rw
31 30 8:0 / /run/peerpod/volumes/a\\040b\\134 rw - ext4 /dev/vdc rw
32 22 0:5 / /run/peerpod/guest rw - tmpfs tmpfs rw
33 22 0:5 / /run/peerpod/volumes rw - tmpfs tmpfs rw
34 22 0:5 / /run/kata-containers/sandbox/storage/eA== rw - ext4 /dev/vdd rw
35 22 0:40 / /run/peerpod/shares/v1 rw - cifs //s/x rw
";
        let expected = [
            "/run/peerpod/volumes/v0",
            "/run/peerpod/volumes/a b\\",
            "/run/kata-containers/sandbox/storage/eA==",
            "/run/peerpod/shares/v1",
        ];
        assert_eq!(volumes_in(mountinfo), expected);
        assert_eq!(unescape("a\\9b\\"), "a\\9b\\");
        assert!(volumes_in("").is_empty());
    }
}
