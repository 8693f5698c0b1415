//! Records the state of a world as independent witnesses show it: `ip`, `tc`, `nft` and `/proc`. The difference of two
//! records is the state that is left over.

mod network;

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::{fmt, fs};

use anyhow::Context;
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::{Daemons, Namespace, World};

/// Folders that a daemon makes at their first use, and keeps.
const FOLDERS: &[&str] = &["run/pods", "state/inbox", "state/relay/sandboxes"];

/// One observation, a line per thing. Tombstones in the ledger are not part of it: the node keeps them on purpose.
#[derive(Debug, Clone, Default)]
pub struct Sight {
    lines: BTreeSet<String>,
    processes: BTreeMap<u32, Process>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Process {
    started: u64,
    parent: u32,
    name: String,
}

impl Sight {
    /// Observes the node, the given namespaces, the daemons' folders and every process that belongs to them.
    pub fn of(world: &World, namespaces: &[&Namespace], daemons: &Daemons) -> anyhow::Result<Sight> {
        let mut sight = Sight::default();
        for entry in fs::read_dir("/run/netns")? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if name.starts_with(world.prefix()) {
                sight.lines.insert(format!("network namespace {name}"));
            }
        }
        for namespace in [world.node()].into_iter().chain(namespaces.iter().copied()) {
            sight.lines.extend(network::lines(namespace)?);
        }
        for folder in [daemons.run_dir(), daemons.state_dir()] {
            sight.files(&folder, world.folder());
        }
        for entry in daemons.ledger()?.into_iter().filter(|entry| !entry.is_tombstone()) {
            sight.lines.insert(format!("ledger entry {} in phase {}", entry.id, entry.phase()));
        }
        sight.mounts(world)?;
        sight.processes(world, namespaces)?;
        Ok(sight)
    }

    /// Returns the state that `before` does not have. `ended` is an observation of processes that should have ended by
    /// now; those that still run are returned too.
    pub fn beyond(&self, before: &Sight, ended: Option<&Sight>) -> Vec<String> {
        let mut left: Vec<String> = self.lines.difference(&before.lines).cloned().collect();
        let new = self.processes.iter().filter(|(pid, process)| before.processes.get(pid) != Some(process));
        left.extend(new.map(|(pid, process)| format!("process {pid} {}", process.name)));
        for (pid, process) in ended.iter().flat_map(|sight| &sight.processes) {
            let known = before.processes.get(pid) == Some(process) || self.processes.contains_key(pid);
            if !known && read_process(*pid).as_ref() == Some(process) {
                left.push(format!("process {pid} {}", process.name));
            }
        }
        left
    }

    /// Sends SIGKILL to every observed process of this program with this argument (an empty one: with any), and returns
    /// their number.
    pub fn kill(&self, program: &str, argument: &str) -> anyhow::Result<usize> {
        let pids =
            self.pids(program).into_iter().filter(|pid| arguments(*pid).iter().any(|word| word == argument));
        let mut count = 0;
        for pid in pids {
            match kill(Pid::from_raw(pid as i32), Signal::SIGKILL) {
                // It ended with a process that was killed before it.
                Err(Errno::ESRCH) if count > 0 => {}
                killed => killed?,
            }
            count += 1;
        }
        Ok(count)
    }

    /// Returns the observed processes of this program that still run: those with a first argument that ends with
    /// `program`.
    pub fn pids(&self, program: &str) -> Vec<u32> {
        let running =
            self.processes.iter().filter(|(pid, process)| read_process(**pid).as_ref() == Some(process));
        running
            .map(|(pid, _)| *pid)
            .filter(|pid| arguments(*pid).first().is_some_and(|name| name.ends_with(program)))
            .collect()
    }

    /// Returns the number of observed processes.
    pub fn process_count(&self) -> usize {
        self.processes.len()
    }

    /// Returns the lines that contain a text.
    pub fn containing(&self, text: &str) -> Vec<&str> {
        self.lines.iter().map(String::as_str).filter(|line| line.contains(text)).collect()
    }

    /// Adds every file and socket below a folder, except the ledger's records, which are read separately.
    fn files(&mut self, folder: &Path, top: &Path) {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let path = entry.path();
            let shown = path.strip_prefix(top).unwrap_or(&path);
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                self.files(&path, top);
                if FOLDERS.iter().any(|folder| shown == Path::new(folder)) {
                    continue;
                }
            }
            if !shown.starts_with("state/sandboxes") {
                self.lines.insert(format!("file {}", shown.display()));
            }
        }
    }

    fn mounts(&mut self, world: &World) -> anyhow::Result<()> {
        let folder = world.folder().to_string_lossy().into_owned();
        for line in fs::read_to_string("/proc/self/mountinfo")?.lines() {
            let point = line.split(' ').nth(4).unwrap_or_default();
            // The kubelet's folder is part of the world, shared as on a node.
            if (names(line, &folder) || line.contains(world.prefix())) && point != format!("{folder}/kubelet")
            {
                self.lines.insert(format!("mount {point}"));
            }
        }
        Ok(())
    }

    /// Finds the processes in the world's network namespaces, those with arguments, mounts or open files in its folder,
    /// and the descendants of all of them. A VM's processes are in their own namespaces, below a process that holds its
    /// console.
    fn processes(&mut self, world: &World, namespaces: &[&Namespace]) -> anyhow::Result<()> {
        let us = fs::metadata("/proc/self/ns/mnt")?.ino();
        let folder = world.folder().to_string_lossy().into_owned();
        let kubelet = world.folder().join("kubelet");
        let networks: BTreeSet<u64> = [world.node()]
            .into_iter()
            .chain(namespaces.iter().copied())
            .map(|ns| ns.netns().id().inode)
            .collect();
        let mut all = BTreeMap::new();
        let mut ours = BTreeSet::new();
        for entry in fs::read_dir("/proc").context("read /proc")? {
            let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
                continue;
            };
            // A process that ends meanwhile is gone, which is a valid observation.
            let Some(process) = read_process(pid) else { continue };
            let at = |name: &str| format!("/proc/{pid}/{name}");
            let inode = |name: &str| fs::metadata(at(name)).map(|metadata| metadata.ino()).unwrap_or(0);
            // Mount namespaces that other processes make meanwhile have copies of the kubelet's shared mounts.
            let has_mounts = || {
                let list = fs::read_to_string(at("mountinfo")).unwrap_or_default();
                list.lines().any(|line| {
                    let point = line.split(' ').nth(4).unwrap_or_default();
                    names(line, &folder) && !Path::new(point).starts_with(&kubelet)
                })
            };
            let holds = || {
                let open = fs::read_dir(at("fd")).into_iter().flatten().flatten();
                open.filter_map(|entry| fs::read_link(entry.path()).ok())
                    .any(|path| path.starts_with(world.folder()))
            };
            let in_network = networks.contains(&inode("ns/net"));
            let elsewhere = inode("ns/mnt");
            let own_mounts = elsewhere != 0 && elsewhere != us && has_mounts();
            if pid != std::process::id()
                && !is_janitor(pid)
                && (in_network
                    || own_mounts
                    || arguments(pid).iter().any(|word| names(word, &folder))
                    || holds())
            {
                ours.insert(pid);
            }
            all.insert(pid, process);
        }
        loop {
            let children: Vec<u32> = all
                .iter()
                .filter(|(pid, process)| ours.contains(&process.parent) && !ours.contains(pid))
                .map(|(pid, _)| *pid)
                .collect();
            if children.is_empty() {
                break;
            }
            ours.extend(children);
        }
        self.processes = all.into_iter().filter(|(pid, _)| ours.contains(pid)).collect();
        Ok(())
    }
}

impl fmt::Display for Sight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.lines.iter().try_for_each(|line| writeln!(f, "{line}"))?;
        self.processes.iter().try_for_each(|(pid, process)| writeln!(f, "process {pid} {}", process.name))
    }
}

/// Returns whether a text contains this folder, and not one with a longer name (`n1`, `n14`).
fn names(text: &str, folder: &str) -> bool {
    text.match_indices(folder)
        .any(|(at, _)| !text[at + folder.len()..].starts_with(|next: char| next.is_ascii_digit()))
}

fn is_janitor(pid: u32) -> bool {
    arguments(pid).iter().any(|word| word == "peerpod-janitor")
}

/// Returns a process's arguments, its name first; empty if the process is gone.
fn arguments(pid: u32) -> Vec<String> {
    let text = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    text.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect()
}

/// Reads name, parent and start time; `None` for a process that is gone or is a zombie.
fn read_process(pid: u32) -> Option<Process> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name is in parentheses and may contain any character.
    let (head, tail) = stat.rsplit_once(')')?;
    let name = head.split_once('(')?.1.to_owned();
    let fields: Vec<&str> = tail.split_whitespace().collect();
    if matches!(fields.first(), Some(&"Z" | &"X")) {
        return None;
    }
    Some(Process { started: fields.get(19)?.parse().ok()?, parent: fields.get(1)?.parse().ok()?, name })
}
