//! Gives each VM cgroups of its own (`cgroups(7)`), which a real kata-agent needs: one folder per hierarchy of the node.
//! A cgroup namespace makes these folders the VM's roots. Without writable cgroups on the node, a VM has none either.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use nix::sched::{CloneFlags, unshare};

/// A mounted hierarchy of the node.
pub(crate) struct Hierarchy {
    /// Mount point on the node, and in the VM.
    pub(crate) at: PathBuf,
    /// `cgroup` or `cgroup2`.
    pub(crate) kind: &'static str,
    /// Mount options: the controllers of a hierarchy of version 1.
    pub(crate) options: String,
}

/// Returns the node's hierarchies: those of version 1, or the one of version 2.
fn hierarchies() -> io::Result<Vec<Hierarchy>> {
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let mut all: Vec<Hierarchy> = mounts.lines().filter_map(hierarchy).collect();
    // A mount point has a second line if a later mount covers the first.
    all.sort_by(|one, other| one.at.cmp(&other.at));
    all.dedup_by(|one, other| one.at == other.at);
    if all.iter().any(|hierarchy| hierarchy.kind == "cgroup") {
        all.retain(|hierarchy| hierarchy.kind == "cgroup");
    }
    Ok(all)
}

/// Reads a line of `/proc/self/mountinfo` (proc_pid_mountinfo(5)).
fn hierarchy(line: &str) -> Option<Hierarchy> {
    let (mount, system) = line.split_once(" - ")?;
    let at = mount.split(' ').nth(4)?.into();
    let mut system = system.split(' ');
    let kind = ["cgroup", "cgroup2"].into_iter().find(|kind| system.clone().next() == Some(kind))?;
    let options = system.nth(2)?.split(',');
    let options: Vec<&str> = options.filter(|option| !matches!(*option, "rw" | "ro" | "xattr")).collect();
    let options = match (kind, options.join(",")) {
        ("cgroup2", _) => String::new(),
        // A hierarchy without a controller has a name alone.
        (_, name) if name.starts_with("name=") => format!("none,{name}"),
        (_, controllers) => controllers,
    };
    Some(Hierarchy { at, kind, options })
}

fn folder(hierarchy: &Hierarchy, vm: &str) -> PathBuf {
    hierarchy.at.join(format!("peerpod-{vm}"))
}

/// Moves this process into cgroups of the VM, and makes them its roots. Returns the hierarchies to mount in the VM:
/// none if the node's are not writable.
pub(crate) fn enter(vm: &str) -> io::Result<Vec<Hierarchy>> {
    let all = hierarchies()?;
    for hierarchy in &all {
        let folder = folder(hierarchy, vm);
        match fs::create_dir(&folder) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                eprintln!("the VM has no cgroups: make {}: {error}", folder.display());
                return Ok(Vec::new());
            }
            _ => {}
        }
        inherit(&hierarchy.at, &folder)?;
        fs::write(folder.join("cgroup.procs"), "0")?;
    }
    unshare(CloneFlags::CLONE_NEWCGROUP)?;
    if let [hierarchy] = &all[..]
        && hierarchy.kind == "cgroup2"
    {
        // In version 2 a cgroup with controllers for others has no process itself.
        let first = folder(hierarchy, vm).join("init");
        fs::create_dir_all(&first)?;
        fs::write(first.join("cgroup.procs"), "0")?;
    }
    Ok(all)
}

/// Copies processors and memory nodes, without which a cgroup of version 1 accepts no process.
fn inherit(from: &Path, to: &Path) -> io::Result<()> {
    if from.join("cgroup.clone_children").exists() && from.join("cpuset.cpus").exists() {
        fs::write(to.join("cgroup.clone_children"), "1")?;
        for file in ["cpuset.cpus", "cpuset.mems"] {
            fs::write(to.join(file), fs::read(from.join(file))?)?;
        }
    }
    Ok(())
}

/// Removes the cgroups of a VM whose processes have ended.
pub(crate) fn remove(vm: &str) -> io::Result<()> {
    hierarchies()?.iter().try_for_each(|hierarchy| remove_tree(&folder(hierarchy, vm)))
}

/// Removes a cgroup with those below it. Its files cannot be removed, and go with it.
fn remove_tree(cgroup: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(cgroup) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_tree(&entry.path())?;
        }
    }
    fs::remove_dir(cgroup)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hierarchies_of_both_versions_are_read() {
        let read = |line: &str| hierarchy(line).map(|found| (found.at, found.kind, found.options));
        let v1 = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory";
        assert_eq!(read(v1), Some(("/sys/fs/cgroup/memory".into(), "cgroup", "memory".to_owned())));
        let named = "40 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd";
        assert_eq!(
            read(named),
            Some(("/sys/fs/cgroup/systemd".into(), "cgroup", "none,name=systemd".to_owned()))
        );
        let v2 = "30 23 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate";
        assert_eq!(read(v2), Some(("/sys/fs/cgroup".into(), "cgroup2", String::new())));
        assert_eq!(read("31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755"), None);
        assert_eq!(read(""), None);
    }
}
