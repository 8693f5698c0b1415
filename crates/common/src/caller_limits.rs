//! Limits each caller's requests, or the log lines about it, with a token bucket and a number at once. The number of
//! callers is bounded.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

use crate::limit::RateLimit;

/// Limit of remembered callers.
const MOST: usize = 16_384;

/// Limits of one caller.
#[derive(Clone, Copy, Debug)]
pub struct Rate {
    /// Requests in a burst from rest.
    pub burst: f64,
    /// Further requests per second.
    pub per_second: f64,
    /// Requests in flight at once.
    pub at_once: usize,
}

/// One log line per caller and minute.
pub const ONE_LINE_A_MINUTE: Rate = Rate { burst: 1.0, per_second: 1.0 / 60.0, at_once: 1 };

#[derive(Debug)]
struct Bucket {
    rate: RateLimit,
    under_way: usize,
}

type Buckets<K> = Arc<Mutex<HashMap<K, Bucket>>>;

/// Limits of each caller. Clones share the counts.
#[derive(Clone, Debug)]
pub struct CallerLimits<K> {
    rate: Rate,
    buckets: Buckets<K>,
}

/// One request in flight.
#[derive(Debug)]
pub struct CallerPermit<K: Hash + Eq> {
    key: K,
    buckets: Buckets<K>,
}

impl<K: Hash + Eq + Clone> CallerLimits<K> {
    /// Makes limits without callers.
    pub fn new(rate: Rate) -> CallerLimits<K> {
        CallerLimits { rate, buckets: Arc::default() }
    }

    /// Admits a request; `None`: too many.
    pub fn enter(&self, key: &K, now: Instant) -> Option<CallerPermit<K>> {
        let Rate { burst, per_second, at_once } = self.rate;
        let mut buckets = self.buckets.lock();
        if buckets.len() >= MOST && !buckets.contains_key(key) {
            // A full bucket is the same as none.
            buckets.retain(|_, bucket| bucket.under_way > 0 || !bucket.rate.is_full(now));
            if buckets.len() >= MOST {
                return None;
            }
        }
        let new = || Bucket { rate: RateLimit::new(burst, per_second, now), under_way: 0 };
        let bucket = buckets.entry(key.clone()).or_insert_with(new);
        if bucket.under_way >= at_once || !bucket.rate.take(now) {
            return None;
        }
        bucket.under_way += 1;
        Some(CallerPermit { key: key.clone(), buckets: self.buckets.clone() })
    }

    /// Whether a line about this caller may be logged.
    pub fn may_log(&self, key: &K) -> bool {
        self.enter(key, Instant::now()).is_some()
    }
}

impl<K: Hash + Eq> Drop for CallerPermit<K> {
    fn drop(&mut self) {
        let mut buckets = self.buckets.lock();
        if let Some(bucket) = buckets.get_mut(&self.key) {
            bucket.under_way = bucket.under_way.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn only_a_too_frequent_caller_waits() {
        let limits = CallerLimits::new(Rate { burst: 3.0, per_second: 1.0, at_once: 2 });
        let now = Instant::now();
        let (one, two) = (limits.enter(&"a", now).unwrap(), limits.enter(&"a", now).unwrap());
        assert!(limits.enter(&"a", now).is_none(), "two at once");
        drop(one);
        assert!(limits.enter(&"a", now).is_some());
        assert!(limits.enter(&"a", now).is_none(), "three from rest");
        assert!(limits.enter(&"b", now).is_some());
        drop(two);
        assert!(limits.enter(&"a", now + Duration::from_millis(900)).is_none());
        assert!(limits.enter(&"a", now + Duration::from_millis(1100)).is_some());
    }

    #[test]
    fn callers_are_bounded_and_idle_ones_are_dropped() {
        let limits = CallerLimits::new(Rate { burst: 1.0, per_second: 1.0, at_once: 1 });
        let now = Instant::now();
        for caller in 0..MOST {
            assert!(limits.enter(&caller, now).is_some());
        }
        assert!(limits.enter(&MOST, now).is_none());
        assert!(limits.enter(&MOST, now + Duration::from_secs(2)).is_some());
    }
}
