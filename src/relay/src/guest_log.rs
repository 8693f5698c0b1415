//! Writes the guests' log lines into the relay's log. Each record names its sandbox and pod and contains only text of
//! that guest. Guests may be hostile: the lines of each sandbox are rate-limited, and left-out lines are counted and
//! reported at intervals. Control characters are escaped, so that no guest can forge a line of another source.
//!
//! The records have the target `guest` and the guest's level: `log.level: info,guest=warn` leaves out lower levels.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use peerpod_common::limit::RateLimit;
use peerpod_link::endpoint::{Level, Line};

use crate::id::SandboxId;
use crate::metrics::Metrics;

/// Burst of lines: enough for a boot and for lines that waited during a lost connection.
const MOST: f64 = 500.0;
/// Lines per second after the burst.
const PER_SECOND: f64 = 10.0;
/// Interval between reports of left-out lines.
const REPORT_EVERY: Duration = Duration::from_secs(10);
/// Most lost lines counted from one report of a guest; a larger number is false.
const LOST_AT_MOST: u32 = 1 << 20;

/// Log writer of one sandbox, with its rate limit.
#[derive(Debug)]
pub(crate) struct GuestLog {
    metrics: Arc<Metrics>,
    limit: Mutex<LineLimit>,
}

/// Rate limit that counts the left-out lines.
#[derive(Debug)]
struct LineLimit {
    rate: RateLimit,
    left_out: u64,
    reported: Option<Instant>,
}

impl LineLimit {
    fn new(now: Instant) -> LineLimit {
        LineLimit { rate: RateLimit::new(MOST, PER_SECOND, now), left_out: 0, reported: None }
    }

    /// Returns whether to write a line, and the number of left-out lines to report now.
    fn judge(&mut self, now: Instant) -> (bool, Option<u64>) {
        let write = self.rate.take(now);
        if !write {
            self.left_out += 1;
        }
        let due = self.reported.is_none_or(|last| now.saturating_duration_since(last) >= REPORT_EVERY);
        let report = self.left_out > 0 && due;
        if report {
            self.reported = Some(now);
        }
        (write, report.then(|| std::mem::take(&mut self.left_out)))
    }
}

impl GuestLog {
    pub(crate) fn new(metrics: Arc<Metrics>) -> GuestLog {
        GuestLog { metrics, limit: Mutex::new(LineLimit::new(Instant::now())) }
    }

    /// Writes a line of this sandbox's guest into the log, unless the limit is reached.
    pub(crate) fn line(&self, sandbox: &SandboxId, pod: impl FnOnce() -> String, line: &Line<'_>) {
        let (write, left_out) = self.limit.lock().judge(Instant::now());
        let lost = line.lost.min(LOST_AT_MOST);
        self.metrics.guests.log("lost_in_guest", u64::from(lost));
        self.metrics.guests.log(if write { "written" } else { "left_out" }, 1);
        if !write && left_out.is_none() {
            return;
        }
        let pod = pod();
        if let Some(lines) = left_out {
            tracing::warn!(target: "guest", %sandbox, pod, lines, "the guest logs too much; lines were left out");
        }
        if !write {
            return;
        }
        if lost > 0 {
            tracing::warn!(target: "guest", %sandbox, pod, lines = lost, "lines of the guest's log were lost in the VM");
        }
        let (from, text) = (clean(line.target), clean(line.text));
        let (guest_level, uptime_ms) = (line.level.name(), line.uptime_ms);
        macro_rules! write {
            ($level:ident) => {
                tracing::$level!(target: "guest", %sandbox, pod, guest_level, from, uptime_ms, line = text, "log line of the guest")
            };
        }
        match line.level {
            Level::Error => write!(error),
            Level::Warn => write!(warn),
            Level::Info => write!(info),
            Level::Debug => write!(debug),
            Level::Trace => write!(trace),
        }
    }
}

/// Escapes control characters and characters that change the writing direction as `\u{..}`; a tab becomes a space.
fn clean(text: &str) -> String {
    let turns = |c| matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{feff}');
    let mut clean = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\t' => clean.push(' '),
            c if c.is_control() || turns(c) => clean.extend(c.escape_unicode()),
            c => clean.push(c),
        }
    }
    clean
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_rate_limited_and_dropped_lines_are_reported_periodically() {
        let began = Instant::now();
        let mut limit = LineLimit::new(began);
        let (mut written, mut said, mut left_out) = (0, 0, 0);
        // A hundred thousand lines in a hundred seconds.
        for n in 0..100_000u64 {
            let (write, report) = limit.judge(began + Duration::from_millis(n));
            written += u32::from(write);
            said += u32::from(report.is_some());
            left_out += report.unwrap_or(0);
        }
        assert!((1495..=1500).contains(&written), "{written}");
        assert_eq!(said, 10);
        // The rest is reported with the next line, however late.
        let (write, report) = limit.judge(began + Duration::from_secs(1000));
        assert!(write);
        assert_eq!(left_out + report.unwrap(), 100_000 - u64::from(written));
    }

    #[test]
    fn text_of_a_guest_begins_no_line_and_sets_no_colour() {
        let said = "a\nINFO peerpod_relay: forged\r\u{1b}[31m\tred\u{9b}\u{202e}\u{0}\u{85}\u{2028}";
        let clean = clean(said);
        assert!(!clean.chars().any(char::is_control) && !clean.contains(['\u{202e}', '\u{2028}']), "{clean}");
        assert!(clean.starts_with("a\\u{a}INFO peerpod_relay: forged\\u{d}\\u{1b}[31m red"), "{clean}");
    }
}
