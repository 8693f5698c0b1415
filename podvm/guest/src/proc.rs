//! Reads processes in `/proc`, and opens handles that cannot come to mean another process.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use nix::unistd::{SysconfVar, sysconf};
use peerpod_common::reactor;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Process by number and start: the pair is unique for as long as the machine runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct ProcessId {
    pub(crate) pid: u32,
    /// Ticks since boot, field 22 of `/proc/<pid>/stat`.
    pub(crate) start: u64,
}

impl ProcessId {
    /// Returns the process that has this number now, unless it is a zombie. An error means that this cannot be
    /// determined, as without a free descriptor.
    pub(crate) fn inspect(pid: u32) -> io::Result<Option<ProcessId>> {
        let stat = match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
            Ok(stat) => stat,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) if error.raw_os_error() == Some(Errno::SRCH.raw_os_error()) => return Ok(None),
            Err(error) => return Err(error),
        };
        let alive = parse_stat(&stat).filter(|(state, _)| !matches!(state, 'Z' | 'X'));
        Ok(alive.map(|(_, start)| ProcessId { pid, start }))
    }

    /// Returns a handle that becomes readable when this very process ends; `None` if it has ended already.
    pub(crate) fn watch(self) -> io::Result<Option<Exit>> {
        let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) else { return Ok(None) };
        let fd = match pidfd_open(pid, PidfdFlags::NONBLOCK) {
            Err(Errno::SRCH) => return Ok(None),
            other => other?,
        };
        // Checked with the descriptor open: only then can the number not pass to another process unnoticed.
        if ProcessId::inspect(self.pid)? != Some(self) {
            return Ok(None);
        }
        Ok(Some(Exit(reactor::register(fd, Interest::READABLE)?)))
    }
}

pub(crate) struct Exit(AsyncFd<OwnedFd>);

impl Exit {
    pub(crate) async fn wait(&self) {
        // An error means that the reactor is gone, and the program with it.
        drop(self.0.readable().await);
    }
}

/// Returns the start time of a process, since boot.
pub(crate) fn started(pid: u32) -> Option<Duration> {
    let ticks = ProcessId::inspect(pid).ok()??.start;
    let per_second = u64::try_from(sysconf(SysconfVar::CLK_TCK).ok()??).ok().filter(|n| *n > 0)?;
    Some(Duration::from_micros(ticks.saturating_mul(1_000_000) / per_second))
}

/// Parses state and start time. The name in parentheses may contain anything, even parentheses.
fn parse_stat(stat: &str) -> Option<(char, u64)> {
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?; // field 3
    let start = fields.nth(18)?.parse().ok()?; // field 22
    Some((state, start))
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_process_name_with_brackets_is_parsed() {
        let stat =
            format!("7 (a) Z 0 (b)) S {} 123456 9", (4..22).map(|n| n.to_string() + " ").collect::<String>());
        assert_eq!(parse_stat(&stat), Some(('S', 123_456)));
        assert_eq!(parse_stat("garbage"), None);
        assert_eq!(parse_stat("7 (a) S 1 2"), None);
    }

    #[tokio::test]
    async fn the_end_of_a_process_is_noticed_at_once_and_a_number_alone_is_not_enough() {
        let mut child = Command::new("sleep").arg("100").stdin(Stdio::null()).spawn().unwrap();
        let process = ProcessId::inspect(child.id()).unwrap().unwrap();
        assert!(started(child.id()).unwrap() > Duration::ZERO);
        let other = ProcessId { start: process.start + 1, ..process };
        assert!(other.watch().unwrap().is_none());
        let exit = process.watch().unwrap().unwrap();
        assert!(tokio::time::timeout(Duration::from_millis(20), exit.wait()).await.is_err());
        child.kill().unwrap();
        tokio::time::timeout(Duration::from_secs(5), exit.wait()).await.unwrap();
        // A dead process that is not reaped counts as gone.
        assert_eq!(ProcessId::inspect(child.id()).unwrap(), None);
        child.wait().unwrap();
        assert!(process.watch().unwrap().is_none());
    }
}
