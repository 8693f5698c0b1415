//! The machine's watchdog, where it has one: it is fed by pid 1 and by nobody else, while things are as they should be.
//!
//! "As they should be" is what [`Pulse`] says: `serve` notes the lease every five seconds ([`crate::power`]); pid 1 sees
//! the note change. A `serve` that does not is killed and started again; one that never comes back leaves the watchdog
//! hungry. In a boot in which it never came up at all the dog is fed: the first lease ends such a VM for good, while
//! resets would keep it alive for ever.

use std::{
    fs::{self, File, OpenOptions},
    io::Write,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// The first there is.
pub(crate) const FIRST: &str = "/dev/watchdog0";
const DEVICES: [&str; 2] = [FIRST, "/dev/watchdog"];
/// Hardware bites after 30 s or so, unless `/sys` says less.
pub(crate) const MEAL: Duration = Duration::from_secs(5);
/// After a `serve` that hangs was killed, so many times its patience until the dog goes hungry.
const HUNGER: u32 = 3;

/// The open device.
pub(crate) struct Watchdog(File);

impl Watchdog {
    /// Wakes it, if there is one. From now on it must be fed.
    pub(crate) fn open() -> Option<Watchdog> {
        let device = DEVICES.iter().find(|device| Path::new(device).exists())?;
        match OpenOptions::new().write(true).open(device) {
            Ok(file) => {
                let about = |what| fs::read_to_string(format!("/sys/class/watchdog/watchdog0/{what}"));
                let kind = about("identity").unwrap_or_default();
                let timeout = about("timeout").unwrap_or_default();
                tracing::info!(device, kind = kind.trim(), timeout = timeout.trim(), "the watchdog is awake");
                Some(Watchdog(file))
            }
            Err(error) => {
                tracing::warn!(device, %error, "cannot use the watchdog");
                None
            }
        }
    }

    /// Good for another [`MEAL`] and some.
    pub(crate) fn feed(&mut self) {
        if let Err(error) = self.0.write_all(b"1") {
            tracing::warn!(%error, "cannot feed the watchdog");
        }
    }
}

/// Whether `serve` lives, by the note that it writes again and again.
pub(crate) struct Pulse {
    note: PathBuf,
    patience: Duration,
    /// Inode and time of the note: it is a new file each time.
    seen: Option<(u64, i64, i64)>,
    last: Instant,
    ever: bool,
}

/// What the pulse says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// All is well, or was never well.
    Fine,
    /// It should be killed: once, then again after as much time.
    Hangs,
    /// Killing did not help.
    Lost,
}

impl Pulse {
    /// `patience` is how long `serve` may say nothing.
    pub(crate) fn new(note: PathBuf, patience: Duration) -> Pulse {
        Pulse { note, patience, seen: None, last: Instant::now(), ever: false }
    }

    /// How long `serve` may say nothing.
    pub(crate) fn patience(&self) -> Duration {
        self.patience
    }

    /// Looks at the note.
    pub(crate) fn look(&mut self) -> Verdict {
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
    use crate::files::{self, testing::TempDir};

    const PATIENCE: Duration = Duration::from_millis(200);

    #[test]
    fn silence_is_noticed_and_a_sign_of_life_ends_it() {
        let dir = TempDir::new();
        let note = dir.path().join("note");
        let mut pulse = Pulse::new(note.clone(), PATIENCE);
        std::thread::sleep(PATIENCE * HUNGER + PATIENCE);
        assert_eq!(pulse.look(), Verdict::Fine, "it never lived in this boot");
        files::write(&note, b"1").unwrap();
        assert_eq!(pulse.look(), Verdict::Fine);
        std::thread::sleep(PATIENCE + PATIENCE / 4);
        assert_ne!(pulse.look(), Verdict::Fine);
        files::write(&note, b"1").unwrap();
        assert_eq!(pulse.look(), Verdict::Fine, "the same content is a new sign");
        assert_eq!(pulse.verdict(PATIENCE / 2), Verdict::Fine);
        assert_eq!(pulse.verdict(PATIENCE), Verdict::Hangs);
        assert_eq!(pulse.verdict(PATIENCE * HUNGER), Verdict::Lost);
    }
}
