//! Limits each caller's requests with a token bucket and a number of requests at once. The number of callers is
//! bounded.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;

/// Limit of remembered callers.
const MOST: usize = 16_384;

#[derive(Clone, Copy, Debug)]
pub(super) struct Rate {
    /// Requests in a burst from rest.
    pub(super) burst: f64,
    /// Further requests per second.
    pub(super) per_second: f64,
    /// Requests in flight at once.
    pub(super) at_once: usize,
}

struct Bucket {
    left: f64,
    at: Instant,
    under_way: usize,
}

pub(super) struct Limits<K> {
    rate: Rate,
    buckets: Arc<Mutex<HashMap<K, Bucket>>>,
}

/// One request in flight.
pub(super) struct Place<K: Hash + Eq> {
    key: K,
    buckets: Arc<Mutex<HashMap<K, Bucket>>>,
}

impl<K: Hash + Eq + Clone> Limits<K> {
    pub(super) fn new(rate: Rate) -> Limits<K> {
        Limits { rate, buckets: Arc::default() }
    }

    /// Admits a request; `None`: too many.
    pub(super) fn enter(&self, key: &K, now: Instant) -> Option<Place<K>> {
        let Rate { burst, per_second, at_once } = self.rate;
        let mut buckets = self.buckets.lock();
        let filled = |bucket: &Bucket| {
            (bucket.left + now.saturating_duration_since(bucket.at).as_secs_f64() * per_second).min(burst)
        };
        if buckets.len() >= MOST && !buckets.contains_key(key) {
            // A full bucket is the same as none.
            buckets.retain(|_, bucket| bucket.under_way > 0 || filled(bucket) < burst);
            if buckets.len() >= MOST {
                return None;
            }
        }
        let bucket = buckets.entry(key.clone()).or_insert(Bucket { left: burst, at: now, under_way: 0 });
        (bucket.left, bucket.at) = (filled(bucket), now);
        if bucket.left < 1.0 || bucket.under_way >= at_once {
            return None;
        }
        bucket.left -= 1.0;
        bucket.under_way += 1;
        Some(Place { key: key.clone(), buckets: self.buckets.clone() })
    }
}

impl<K: Hash + Eq> Drop for Place<K> {
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
        let limits = Limits::new(Rate { burst: 3.0, per_second: 1.0, at_once: 2 });
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
        let limits = Limits::new(Rate { burst: 1.0, per_second: 1.0, at_once: 1 });
        let now = Instant::now();
        for caller in 0..MOST {
            assert!(limits.enter(&caller, now).is_some());
        }
        assert!(limits.enter(&MOST, now).is_none());
        assert!(limits.enter(&MOST, now + Duration::from_secs(2)).is_some());
    }
}
