//! Holds a cloud's time, which a test can stop. It counts from the cloud's start.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::time::Instant;

/// Time of one cloud.
#[derive(Debug)]
pub(crate) struct Clock {
    /// Time that had passed at `since`.
    passed: Duration,
    /// Start of the present run; `None`: stopped.
    since: Option<Instant>,
}

impl Clock {
    pub(crate) fn start() -> Clock {
        Clock { passed: Duration::ZERO, since: Some(Instant::now()) }
    }

    pub(crate) fn now(&self) -> Duration {
        self.passed + self.since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    pub(crate) fn stop(&mut self) {
        self.passed = self.now();
        self.since = None;
    }

    pub(crate) fn run(&mut self) {
        self.since.get_or_insert_with(Instant::now);
    }

    pub(crate) fn advance(&mut self, time: Duration) {
        self.passed += time;
    }
}

/// Returns a cloud's time as RFC 3339 in UTC. The cloud's start is the start of this process's first cloud.
pub fn stamp(now: Duration) -> String {
    static START: std::sync::OnceLock<Duration> = std::sync::OnceLock::new();
    let start = START.get_or_init(|| SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO));
    rfc3339(*start + now)
}

/// Returns a time since 1970 as RFC 3339, as Google's token services write it.
pub(crate) fn zulu(time: Duration) -> String {
    rfc3339(time).replace("+00:00", "Z")
}

/// Returns a time since 1970 as RFC 3339, with milliseconds.
fn rfc3339(time: Duration) -> String {
    let (seconds, millis) = (time.as_secs(), time.subsec_millis());
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Days since 0000-03-01, so that a leap day ends a year (Hinnant, "chrono-compatible low-level date algorithms").
    let shifted = days + 719_468;
    let (era, day) = (shifted / 146_097, shifted % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let of_year = day - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let of_month = of_year - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let year = era * 400 + year + next;
    let (hour, minute, second) = (rest / 3_600, rest / 60 % 60, rest % 60);
    format!("{year:04}-{month:02}-{of_month:02}T{hour:02}:{minute:02}:{second:02}.{millis:03}+00:00")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_written_as_a_date() {
        let at = |seconds| rfc3339(Duration::from_secs(seconds));
        assert_eq!(at(0), "1970-01-01T00:00:00.000+00:00");
        assert_eq!(at(951_782_400), "2000-02-29T00:00:00.000+00:00");
        assert_eq!(at(1_767_225_599), "2025-12-31T23:59:59.000+00:00");
    }

    #[tokio::test]
    async fn a_stopped_clock_moves_by_advance_alone() {
        let mut clock = Clock::start();
        clock.stop();
        let now = clock.now();
        clock.advance(Duration::from_secs(60));
        assert_eq!(clock.now(), now + Duration::from_secs(60));
        clock.run();
        assert!(clock.now() >= now + Duration::from_secs(60));
    }
}
