//! Pid 1, where the image has no other: mounts what is missing, brings `lo` up, reaps, and keeps `peerpod-guest serve`
//! running. Small and single-threaded, because nothing may go wrong here: the end of pid 1 is the end of the VM.
//!
//! `serve` is a process of its own so that agent and containers survive its death: they are then pid 1's children.

use std::{
    os::{fd::AsFd, unix::process::CommandExt},
    path::Path,
    process::{Command, ExitCode, Stdio},
    time::{Duration, Instant},
};

use netlink_packet_route::{
    RouteNetlinkMessage,
    link::{LinkFlags, LinkHeader, LinkMessage},
};
use nix::{
    errno::Errno,
    mount::{MsFlags, mount},
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::{SigSet, Signal, kill},
        signalfd::{SfdFlags, SignalFd},
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::Pid,
};

use crate::{config::Settings, power};

/// Before `serve` is started again; doubled with each quick death.
const PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// Who ran for so long did not die of its start.
const STABLE: Duration = Duration::from_secs(10);
/// `serve` may take so long to end when it is asked to.
const GRACE: Duration = Duration::from_secs(2);
/// A pause of `serve` is also the moment to look at the lease; never longer than this without a look.
const LOOK: Duration = Duration::from_secs(60);

/// Source, target, type, flags, data.
type Mount = (&'static str, &'static str, &'static str, MsFlags, Option<&'static str>);

const SAFE: MsFlags = MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV).union(MsFlags::MS_NOEXEC);
const MOUNTS: &[Mount] = &[
    ("proc", "/proc", "proc", SAFE, None),
    ("sysfs", "/sys", "sysfs", SAFE, None),
    ("devtmpfs", "/dev", "devtmpfs", MsFlags::MS_NOSUID, Some("mode=0755")),
    (
        "devpts",
        "/dev/pts",
        "devpts",
        MsFlags::MS_NOSUID.union(MsFlags::MS_NOEXEC),
        Some("gid=5,mode=620,ptmxmode=666"),
    ),
    ("tmpfs", "/dev/shm", "tmpfs", MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV), Some("mode=1777")),
    ("tmpfs", "/run", "tmpfs", MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV), Some("mode=0755")),
    ("tmpfs", "/tmp", "tmpfs", MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV), Some("mode=1777")),
    ("cgroup2", "/sys/fs/cgroup", "cgroup2", SAFE, None),
];

/// Runs until the machine is to go off. Its end is the end of the VM.
pub(crate) fn run(settings: &Settings) -> anyhow::Result<ExitCode> {
    for entry in MOUNTS {
        mount_missing(entry);
    }
    if let Err(error) = loopback_up() {
        tracing::warn!(error, "cannot bring lo up");
    }
    let mut signals = SigSet::empty();
    for signal in [Signal::SIGCHLD, Signal::SIGTERM, Signal::SIGINT, Signal::SIGPWR] {
        signals.add(signal);
    }
    signals.thread_block()?; // a child gets an empty mask from std
    let signals = SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
    Keeper { signals, serve: None, begun: Instant::now(), due: Instant::now(), pause: PAUSE }
        .keep(&settings.state_dir)
}

struct Keeper {
    signals: SignalFd,
    serve: Option<Pid>,
    begun: Instant,
    due: Instant,
    pause: Duration,
}

enum Turn {
    On,
    Off,
}

impl Keeper {
    fn keep(mut self, state_dir: &Path) -> anyhow::Result<ExitCode> {
        loop {
            if self.serve.is_none() {
                if power::is_overdue(state_dir) {
                    tracing::error!("the guest program does not stay up and the lease is over");
                    break;
                }
                if Instant::now() >= self.due {
                    self.start();
                }
            }
            self.wait(LOOK)?;
            if let Turn::Off = self.signals_and_children()? {
                break;
            }
        }
        self.stop()?;
        match power::within(power::LAST_FLUSH, power::flush) {
            Some(problems) => {
                for problem in problems {
                    tracing::error!(problem, "the last flush is not complete");
                }
            }
            None => tracing::error!("the last flush takes too long"),
        }
        power::off();
        Ok(ExitCode::SUCCESS)
    }

    fn start(&mut self) {
        self.begun = Instant::now();
        let spawned = Command::new("/proc/self/exe")
            .arg0("peerpod-guest")
            .arg("serve")
            .current_dir("/")
            .stdin(Stdio::null())
            .spawn();
        match spawned {
            Ok(child) => self.serve = Some(Pid::from_raw(child.id() as i32)),
            Err(error) => {
                tracing::error!(%error, "cannot start peerpod-guest serve");
                self.back_off();
            }
        }
    }

    fn back_off(&mut self) {
        if self.begun.elapsed() > STABLE {
            self.pause = PAUSE;
        }
        self.due = Instant::now() + self.pause;
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
    }

    /// Until a signal, the next start, or `limit`.
    fn wait(&self, limit: Duration) -> anyhow::Result<()> {
        let until_due = self.due.saturating_duration_since(Instant::now());
        let wait = if self.serve.is_none() { until_due.min(limit) } else { limit };
        let wait = PollTimeout::try_from(wait + Duration::from_millis(1))?;
        match poll(&mut [PollFd::new(self.signals.as_fd(), PollFlags::POLLIN)], wait) {
            Ok(_) | Err(Errno::EINTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn signals_and_children(&mut self) -> anyhow::Result<Turn> {
        let mut turn = Turn::On;
        while let Some(signal) = self.signals.read_signal()? {
            if signal.ssi_signo != Signal::SIGCHLD as u32 {
                tracing::info!(signal = signal.ssi_signo, "asked to power off");
                turn = Turn::Off;
            }
        }
        // Ends of several children may have come as one signal.
        loop {
            let status = match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::StillAlive) | Err(Errno::ECHILD) => return Ok(turn),
                Err(Errno::EINTR) => continue,
                other => other?,
            };
            if status.pid().is_some() && status.pid() == self.serve {
                self.serve = None;
                if status == WaitStatus::Exited(status.pid().unwrap_or(Pid::this()), power::POWER_OFF.into())
                {
                    turn = Turn::Off;
                } else {
                    tracing::error!(?status, "peerpod-guest serve ended");
                    self.back_off();
                }
            }
        }
    }

    /// Lets `serve` end before the flush.
    fn stop(&mut self) -> anyhow::Result<()> {
        let Some(serve) = self.serve else { return Ok(()) };
        let deadline = Instant::now() + GRACE;
        if let Err(error) = kill(serve, Signal::SIGTERM) {
            tracing::debug!(%error, "peerpod-guest serve is gone already");
        }
        while self.serve.is_some() && Instant::now() < deadline {
            self.wait(deadline.saturating_duration_since(Instant::now()))?;
            self.signals_and_children()?;
        }
        Ok(())
    }
}

/// Mounts unless something is mounted there. A failure is said and survived: namespaces do not allow all of it.
fn mount_missing(&(source, target, kind, flags, data): &Mount) {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    if is_mounted(&mounts, target) {
        return;
    }
    if let Err(error) = std::fs::create_dir_all(target) {
        tracing::warn!(target, %error, "cannot make a mount point");
        return;
    }
    if let Err(error) = mount(Some(source), target, Some(kind), flags, data) {
        tracing::warn!(target, kind, %error, "cannot mount");
    }
}

fn is_mounted(mountinfo: &str, target: &str) -> bool {
    mountinfo.lines().any(|line| line.split(' ').nth(4) == Some(target))
}

fn loopback_up() -> Result<(), String> {
    let mut link = LinkMessage::default();
    link.header = LinkHeader { index: 1, flags: LinkFlags::Up, change_mask: LinkFlags::Up, ..link.header };
    let mut netlink = peerpod_link::net::netlink::Client::route().map_err(|error| error.to_string())?;
    netlink.tell(0, RouteNetlinkMessage::SetLink(link)).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_mounted_is_seen() {
        let mountinfo = "22 1 0:20 / / rw - ext4 /dev/vda rw\n30 22 0:5 / /dev/pts rw - devpts x rw\n";
        assert!(is_mounted(mountinfo, "/"));
        assert!(is_mounted(mountinfo, "/dev/pts"));
        assert!(!is_mounted(mountinfo, "/dev"));
        assert!(is_mounted(&std::fs::read_to_string("/proc/self/mountinfo").unwrap(), "/proc"));
    }

    #[test]
    fn quick_deaths_are_answered_slower_and_slower() {
        let signals = SignalFd::with_flags(&SigSet::empty(), SfdFlags::SFD_CLOEXEC).unwrap();
        let now = Instant::now();
        let mut keeper = Keeper { signals, serve: None, begun: now, due: now, pause: PAUSE };
        for expected in [100, 200, 400, 800, 1600, 3200, 5000, 5000] {
            assert_eq!(keeper.pause.as_millis(), expected);
            keeper.back_off();
        }
        keeper.begun = now.checked_sub(STABLE * 2).unwrap();
        keeper.back_off();
        assert_eq!(keeper.pause, PAUSE * 2);
    }
}
