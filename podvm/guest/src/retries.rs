//! Schedules the retries of something that fails by itself. The first retry is immediate, later ones follow growing
//! pauses. After many failures within a period, the next retry waits for its end. Pure: the caller passes the time.

use std::time::Duration;

use tokio::time::Instant;

/// Number of failures within [`WHILE`] after which the next retry waits for its end.
const MOST: u32 = 20;
const WHILE: Duration = Duration::from_secs(600);
/// Pause after the second failure; doubled with each up to the longest.
const FIRST: Duration = Duration::from_millis(250);
const LONGEST: Duration = Duration::from_secs(30);

#[derive(Debug, Default)]
pub(crate) struct Retries {
    /// Number of failures, and the time of the first.
    failures: Option<(u32, Instant)>,
    due: Option<Instant>,
}

impl Retries {
    /// Records a failure; returns the number of failures within the period.
    pub(crate) fn failed(&mut self, now: Instant) -> u32 {
        let (before, since) = self.failures.filter(|(_, since)| now < *since + WHILE).unwrap_or((0, now));
        let pause = match before {
            0 => Duration::ZERO,
            before => (FIRST * 2u32.saturating_pow(before.min(16) - 1)).min(LONGEST),
        };
        self.failures = Some((before + 1, since));
        self.due = Some(if before < MOST { now + pause } else { since + WHILE });
        before + 1
    }

    /// Returns the time of the next attempt; `None` = nothing is to be done.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.due
    }

    pub(crate) fn begun(&mut self) {
        self.due = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_first_retry_is_immediate_and_later_ones_wait_longer_without_end() {
        let (start, mut retries) = (Instant::now(), Retries::default());
        assert_eq!(retries.due(), None);
        let mut now = start;
        let mut pauses = Vec::new();
        for nth in 1..=MOST {
            assert_eq!(retries.failed(now), nth);
            let due = retries.due().unwrap();
            pauses.push(due - now);
            now = due;
            retries.begun();
            assert_eq!(retries.due(), None);
        }
        assert_eq!(pauses[..4], [0, 250, 500, 1000].map(Duration::from_millis));
        assert!(pauses.is_sorted() && pauses[MOST as usize - 1] == LONGEST, "{pauses:?}");
        assert!(now < start + WHILE, "the bound means nothing");
        retries.failed(now);
        assert_eq!(retries.due(), Some(start + WHILE));
        retries.begun();
        assert_eq!(retries.failed(start + WHILE), 1, "old failures do not count");
        assert_eq!(retries.due(), Some(start + WHILE));
    }
}
