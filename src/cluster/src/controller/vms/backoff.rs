//! Computes the backoff of failed objects. A change of the object does not shorten it.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use peerpod_common::backoff;

/// Pause after the first failure.
const FIRST: Duration = Duration::from_secs(1);

struct Failed {
    pauses: backoff::Backoff,
    again: Instant,
}

/// Failed objects, by uid.
pub(super) struct Backoff {
    longest: Duration,
    failed: Mutex<HashMap<String, Failed>>,
}

impl Backoff {
    pub(super) fn new(longest: Duration) -> Backoff {
        Backoff { longest, failed: Mutex::default() }
    }

    /// Returns the rest of this object's pause.
    pub(super) fn waits(&self, uid: &str, now: Instant) -> Option<Duration> {
        let left = self.failed.lock().get(uid)?.again.saturating_duration_since(now);
        (!left.is_zero()).then_some(left)
    }

    /// Records a failure and returns the pause, which is at least `least`, as the provider asks for.
    pub(super) fn failed(&self, uid: &str, now: Instant, least: Duration) -> Duration {
        let mut all = self.failed.lock();
        let first = || Failed { pauses: backoff::Backoff::new(FIRST, self.longest), again: now };
        let failed = all.entry(uid.to_owned()).or_insert_with(first);
        let pause = failed.pauses.pause().max(least);
        failed.again = now + pause;
        pause
    }

    pub(super) fn done(&self, uid: &str) {
        self.failed.lock().remove(uid);
    }

    /// Removes all objects except these.
    pub(super) fn keep(&self, there: &HashSet<String>) {
        self.failed.lock().retain(|uid, _| there.contains(uid));
    }

    pub(super) fn len(&self) -> usize {
        self.failed.lock().len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest_and_end_with_success() {
        let backoff = Backoff::new(Duration::from_secs(5));
        let now = Instant::now();
        let pauses: Vec<u64> = (0..5).map(|_| backoff.failed("a", now, Duration::ZERO).as_secs()).collect();
        assert_eq!(pauses, [1, 2, 4, 5, 5]);
        assert_eq!(backoff.waits("a", now), Some(Duration::from_secs(5)));
        assert_eq!(backoff.waits("a", now + Duration::from_secs(5)), None);
        assert_eq!(backoff.waits("b", now), None);
        backoff.done("a");
        assert_eq!(backoff.waits("a", now), None);
        assert_eq!(backoff.failed("a", now, Duration::from_secs(60)).as_secs(), 60, "as the provider asks");
        backoff.keep(&HashSet::new());
        assert_eq!(backoff.len(), 0);
    }
}
