//! Feeds the machine's watchdog, if there is one. Only pid 1 feeds it, and only while `serve` is alive.
//!
//! [`Pulse`] determines that: `serve` writes the note of the lease every five seconds ([`crate::power`]), and pid 1
//! sees the note change. Pid 1 kills a `serve` that stops writing and starts it again; if `serve` never recovers, pid 1
//! stops feeding. In a boot in which `serve` never came up at all, feeding continues. The first lease ends such a VM
//! for good, while resets would keep it alive for ever.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Device of the first watchdog.
pub(crate) const FIRST: &str = "/dev/watchdog0";
const DEVICES: [&str; 2] = [FIRST, "/dev/watchdog"];
/// Interval between feeds. Hardware resets the machine after 30 s or so, unless `/sys` shows less.
pub(crate) const MEAL: Duration = Duration::from_secs(5);
/// Silence after which feeding stops, as a multiple of the time after which `serve` is killed.
const HUNGER: u32 = 3;

pub(crate) struct Watchdog(File);

impl Watchdog {
    /// Starts the watchdog, if there is one. From now on it must be fed.
    pub(crate) fn open() -> Option<Watchdog> {
        let device = DEVICES.iter().find(|device| Path::new(device).exists())?;
        let file = OpenOptions::new().write(true).open(device);
        let file =
            file.inspect_err(|error| tracing::warn!(device, %error, "cannot use the watchdog")).ok()?;
        let about =
            |what| fs::read_to_string(format!("/sys/class/watchdog/watchdog0/{what}")).unwrap_or_default();
        let (kind, timeout) = (about("identity"), about("timeout"));
        tracing::info!(device, kind = kind.trim(), timeout = timeout.trim(), "the watchdog is active");
        Some(Watchdog(file))
    }

    /// Feeds the watchdog, which suffices for a little more than another [`MEAL`].
    pub(crate) fn feed(&mut self) {
        if let Err(error) = self.0.write_all(b"1") {
            tracing::warn!(%error, "cannot feed the watchdog");
        }
    }
}

/// Liveness of `serve`, by the note that it rewrites.
pub(crate) struct Pulse {
    note: PathBuf,
    /// Longest permitted silence of `serve`.
    pub(crate) patience: Duration,
    /// Inode and time of the note: it is a new file each time.
    seen: Option<(u64, i64, i64)>,
    last: Instant,
    ever: bool,
}

/// Liveness of `serve` according to its note.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Alive, or never seen alive.
    Fine,
    /// Silent for too long: to be killed, and again after as much time.
    Hangs,
    /// Still silent after the kill.
    Lost,
}

impl Pulse {
    pub(crate) fn new(note: PathBuf, patience: Duration) -> Pulse {
        Pulse { note, patience, seen: None, last: Instant::now(), ever: false }
    }

    pub(crate) fn inspect(&mut self) -> Verdict {
        let now = Instant::now();
        let seen = fs::metadata(&self.note).ok();
        let seen = seen.map(|note| (note.ino(), note.mtime(), note.mtime_nsec()));
        if seen.is_some() && seen != self.seen {
            (self.seen, self.last) = (seen, now);
            self.ever = true;
        }
        self.verdict(now.saturating_duration_since(self.last))
    }

    fn verdict(&self, silent: Duration) -> Verdict {
        match silent {
            _ if !self.ever => Verdict::Fine,
            silent if silent < self.patience => Verdict::Fine,
            silent if silent < self.patience * HUNGER => Verdict::Hangs,
            _ => Verdict::Lost,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files;
    use crate::files::testing::TempDir;

    const PATIENCE: Duration = Duration::from_millis(200);

    #[test]
    fn silence_is_noticed_and_a_heartbeat_ends_it() {
        let dir = TempDir::new();
        let note = dir.path().join("note");
        let mut pulse = Pulse::new(note.clone(), PATIENCE);
        std::thread::sleep(PATIENCE * HUNGER + PATIENCE);
        assert_eq!(pulse.inspect(), Verdict::Fine, "it never reported in this boot");
        files::write(&note, b"1").unwrap();
        assert_eq!(pulse.inspect(), Verdict::Fine);
        std::thread::sleep(PATIENCE + PATIENCE / 4);
        assert_ne!(pulse.inspect(), Verdict::Fine);
        files::write(&note, b"1").unwrap();
        assert_eq!(pulse.inspect(), Verdict::Fine, "the same content is a new report");
        assert_eq!(pulse.verdict(PATIENCE / 2), Verdict::Fine);
        assert_eq!(pulse.verdict(PATIENCE), Verdict::Hangs);
        assert_eq!(pulse.verdict(PATIENCE * HUNGER), Verdict::Lost);
    }
}
