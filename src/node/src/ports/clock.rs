//! Clock of the records: milliseconds since 1970 as the wall clock was at the boot's first start of the node, advanced
//! by the kernel's time since boot. A step of the wall clock moves no ticket's and no tombstone's end.
//!
//! May touch: `<state-dir>/clock.json`.

use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use nix::time::{ClockId, clock_gettime};
use peerpod_common::files;
use serde::{Deserialize, Serialize};

use crate::sandbox::ports::Clock;

const VERSION: u32 = 1;
const MAX_FILE: u64 = 4096;
const MINUTE_MS: u64 = 60_000;

/// Base of the clock in one boot of the machine, as on disk.
#[derive(Serialize, Deserialize)]
struct Base {
    version: u32,
    boot_id: String,
    /// Time of the boot, in milliseconds since 1970.
    booted_ms: u64,
}

/// Clock of one boot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NodeClock {
    booted_ms: u64,
}

impl NodeClock {
    /// Continues this boot's clock, or begins it with the wall clock's time `wall`.
    pub(crate) fn open(state_dir: &Path, boot_id: &str, wall: SystemTime) -> Result<NodeClock> {
        let file = state_dir.join("clock.json");
        let known = files::read(&file, MAX_FILE).ok().flatten();
        let known = known.and_then(|bytes| serde_json::from_slice::<Base>(&bytes).ok());
        if let Some(base) = known.filter(|base| base.version == VERSION && base.boot_id == boot_id) {
            return Ok(NodeClock { booted_ms: base.booted_ms });
        }
        let booted_ms = millis_since_1970(wall).saturating_sub(millis(since_boot()));
        let base = Base { version: VERSION, boot_id: boot_id.to_owned(), booted_ms };
        // A power cut ends the boot, and this file's use with it.
        files::write_volatile(&file, &serde_json::to_vec(&base)?)
            .with_context(|| format!("write the base of the clock to {}", file.display()))?;
        Ok(NodeClock { booted_ms })
    }

    /// Converts a time of this clock to the wall clock, which may have been set after the node's start. Whole minutes, so
    /// that a later conversion gives the same time.
    pub(crate) fn as_wall_ms(self, at_ms: u64, wall: SystemTime) -> u64 {
        let (wall_ms, now_ms) = (millis_since_1970(wall), self.now_ms());
        let step = (wall_ms.abs_diff(now_ms) + MINUTE_MS / 2) / MINUTE_MS * MINUTE_MS;
        if wall_ms > now_ms { at_ms.saturating_add(step) } else { at_ms.saturating_sub(step) }
    }
}

impl Clock for NodeClock {
    fn now_ms(&self) -> u64 {
        self.booted_ms.saturating_add(millis(since_boot()))
    }
}

fn millis_since_1970(wall: SystemTime) -> u64 {
    millis(wall.duration_since(UNIX_EPOCH).unwrap_or_default())
}

/// Returns the time since boot; a suspended machine counts.
fn since_boot() -> Duration {
    clock_gettime(ClockId::CLOCK_BOOTTIME).map(Duration::from).unwrap_or_default()
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trust::Ticket;

    const DAY: Duration = Duration::from_secs(86_400);
    const HOUR: Duration = Duration::from_secs(3600);

    #[test]
    fn a_step_of_the_wall_clock_ends_and_prolongs_no_ticket() {
        let dir = std::env::temp_dir().join(format!("peerpod-clock-{}", std::process::id()));
        files::make_folder(&dir).unwrap();
        let wall = SystemTime::now();
        let clock = NodeClock::open(&dir, "boot", wall).unwrap();
        let (now, hour) = (clock.now_ms(), millis(HOUR));
        let (short, long) = (Ticket::new(now - hour, HOUR).unwrap(), Ticket::new(now, HOUR).unwrap());
        // The node restarts after the wall clock was set.
        for wall in [wall + DAY, wall - DAY] {
            let (before, later) = (clock.now_ms(), NodeClock::open(&dir, "boot", wall).unwrap());
            assert!(later.now_ms() >= before && later.now_ms() < before + hour, "{later:?}");
            assert!(short.is_expired(later.now_ms()) && !long.is_expired(later.now_ms()), "{later:?}");
        }
        // The cluster gets the time that was set.
        let (now, day) = (clock.now_ms(), millis(DAY));
        for (wall, at) in [(wall, now), (wall + DAY, now + day), (wall - DAY, now - day)] {
            assert_eq!(clock.as_wall_ms(now, wall), at);
        }
        // Another boot, and a file that cannot be read, begin anew.
        let rebooted = NodeClock::open(&dir, "another", wall + DAY).unwrap();
        assert!(rebooted.now_ms() > clock.now_ms() + hour);
        std::fs::write(dir.join("clock.json"), "{").unwrap();
        assert!(NodeClock::open(&dir, "another", wall).unwrap().now_ms() < clock.now_ms() + hour);
        std::fs::remove_dir_all(dir).unwrap();
    }
}
