//! Identifies processes that are not children of this process. The start time distinguishes a process from a later one
//! with the same pid, and a pidfd ensures that a signal hits no other process. Touches `/proc` and sends SIGKILL.

use std::fs;
use std::io;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

/// Process of this boot: its pid and its start time, in clock ticks since boot (field 22 of `/proc/<pid>/stat`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProcessId {
    /// Pid in the node's pid namespace.
    pub(crate) pid: u32,
    /// Start time in clock ticks since boot.
    pub(crate) started: u64,
}

impl ProcessId {
    pub(crate) fn current() -> io::Result<ProcessId> {
        ProcessId::of(std::process::id())?.ok_or_else(|| io::Error::other("/proc does not show this process"))
    }

    /// Returns the process that has this pid now; `None` if there is none, or only a zombie.
    pub(crate) fn of(pid: u32) -> io::Result<Option<ProcessId>> {
        let stat = match fs::read_to_string(format!("/proc/{pid}/stat")) {
            Ok(stat) => stat,
            // ESRCH: it ended between open and read.
            Err(error) if error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(3) => {
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        Ok(parse_stat(&stat).map(|started| ProcessId { pid, started }))
    }

    /// Whether this very process still exists and is no zombie.
    pub(crate) fn alive(self) -> io::Result<bool> {
        Ok(ProcessId::of(self.pid)? == Some(self))
    }

    /// Sends SIGKILL to this very process, which may still exist when this returns. A process that is gone is fine.
    pub(crate) fn kill(self) -> io::Result<()> {
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
        let Some(pid) = pid else {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "not a process number"));
        };
        let handle = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(handle) => handle,
            Err(rustix::io::Errno::SRCH) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        };
        // Checked after the handle is open: from here on, the pid cannot pass to another process unnoticed.
        if !self.alive()? {
            return Ok(());
        }
        match pidfd_send_signal(&handle, Signal::KILL) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

/// Returns the start time from a `stat` line; `None` for a zombie (state Z or X) or an invalid line.
fn parse_stat(stat: &str) -> Option<u64> {
    // The name is in parentheses and may contain anything, parentheses too: the last one ends it.
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace();
    let state = fields.next()?;
    if state == "Z" || state == "X" {
        return None;
    }
    // `state` was field 3; the start time is field 22.
    fields.nth(18)?.parse().ok()
}

/// Returns the id of this boot of the machine. Pids and start times of another boot have no meaning.
pub(crate) fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_parentheses_does_not_confuse() {
        let stat = "12 (a) Z) b) S 1 12 12 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 4242 0 0";
        assert_eq!(parse_stat(stat), Some(4242));
        assert_eq!(parse_stat(&stat.replace(" S ", " Z ")), None);
        assert_eq!(parse_stat("nonsense"), None);
    }

    #[test]
    fn a_reused_pid_is_not_our_process() {
        let us = ProcessId::current().unwrap();
        assert!(us.alive().unwrap());
        assert!(!ProcessId { started: us.started + 1, ..us }.alive().unwrap());
    }

    #[test]
    fn a_kill_hits_only_the_recorded_process() {
        let mut child = std::process::Command::new("/bin/sleep").arg("60").spawn().unwrap();
        let it = ProcessId::of(child.id()).unwrap().unwrap();
        ProcessId { started: it.started + 1, ..it }.kill().unwrap();
        assert!(it.alive().unwrap());
        it.kill().unwrap();
        let status = child.wait().unwrap();
        assert!(!status.success());
        assert!(!it.alive().unwrap());
        it.kill().unwrap();
    }
}
