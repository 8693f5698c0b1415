//! Limits a container's memory with a cgroup (version 2) of its own.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::{fs, io};

/// Root of the VM's cgroups.
const ROOT: &str = "/sys/fs/cgroup";

impl Cgroup {
    /// Returns whether the VM's cgroups (version 2) can limit memory. A VM made of namespaces cannot if its machine has
    /// the memory controller in version 1; containers then have no limit.
    pub(crate) fn are_there() -> bool {
        let controllers = fs::read_to_string(Path::new(ROOT).join("cgroup.controllers")).unwrap_or_default();
        controllers.split_whitespace().any(|controller| controller == "memory")
    }
}

/// The cgroup of a container with a memory limit.
pub(crate) struct Cgroup {
    folder: PathBuf,
    /// Kills that [`Cgroup::killed`] has reported.
    reported: AtomicU64,
}

impl Cgroup {
    /// Makes the cgroup, with a limit in bytes.
    pub(crate) fn new(container: &str, limit: i64) -> io::Result<Cgroup> {
        fs::write(Path::new(ROOT).join("cgroup.subtree_control"), "+memory")?;
        let folder = Path::new(ROOT).join(format!("peerpod-test-agent-{container}"));
        fs::create_dir_all(&folder)?;
        fs::write(folder.join("memory.max"), limit.to_string())?;
        Ok(Cgroup { folder, reported: AtomicU64::new(0) })
    }

    /// Returns its folder.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns whether the kernel has killed a process for the limit since the last call.
    pub(crate) fn killed(&self) -> bool {
        let events = fs::read_to_string(self.folder.join("memory.events")).unwrap_or_default();
        let kills = events.lines().find_map(|line| line.strip_prefix("oom_kill ")?.parse().ok()).unwrap_or(0);
        self.reported.swap(kills, Ordering::Relaxed) < kills
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // The folder is busy while a process is in it; the VM ends soon after.
        fs::remove_dir(&self.folder).ok();
    }
}
