//! Token buckets that start with the cloud's published rates and adapt.
//!
//! The cloud's bucket belongs to the account, and this bucket to one process. Other nodes, people and programs draw
//! from the account's bucket unseen. A throttle reply therefore halves the local rate and empties the bucket. It also
//! blocks the bucket for as long as the cloud asks, at least for one token's time. Each second in which calls are
//! answered restores a tenth of the published rate (the seed), up to the seed. This is the additive increase and
//! multiplicative decrease of TCP: independent users of one account converge to fair shares, unless they act in step. A
//! random part of the pause prevents that. Calls that were in flight together are throttled together, and cut the rate
//! once.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::table::{BucketLimits, Table};

/// Part of the seed that one second of answers restores.
const GIVEN_BACK: f64 = 0.1;
/// Smallest part of the seed that remains after many cuts.
const LEAST: f64 = 1.0 / 16.0;
/// Upper limit for a pause that the cloud asks for: a longer one would be an outage of its own.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// One token, less a margin for floating-point errors.
const WHOLE: f64 = 1.0 - 1e-6;

/// Adaptive token buckets of one process; see the module.
#[derive(Debug)]
pub(super) struct TokenBuckets(Mutex<HashMap<&'static str, Bucket>>);

#[derive(Debug)]
struct Bucket {
    seed: f64,
    burst: f64,
    rate: f64,
    level: f64,
    /// Time at which `level` is valid; in a pause, the end of the pause.
    at: Option<Instant>,
    held_until: Option<Instant>,
    /// Time of the last rate cut.
    cut: Option<Instant>,
    /// Time of the last rate change.
    changed: Option<Instant>,
}

impl TokenBuckets {
    /// Returns full buckets with the limits of the table.
    pub(super) fn new(table: &Table) -> TokenBuckets {
        TokenBuckets(Mutex::new(table.buckets().map(|(name, limits)| (name, Bucket::new(limits))).collect()))
    }

    /// Returns the current rate of a bucket, in tokens per second.
    #[cfg(test)]
    pub(super) fn rate(&self, bucket: &str) -> Option<f64> {
        self.0.lock().get(bucket).map(|bucket| bucket.rate)
    }

    /// Takes a token. Called under the queue's lock, so it answers at once.
    ///
    /// # Errors
    /// The time of the next try, later than `now`.
    pub(super) fn take(&self, bucket: &'static str, now: Instant) -> Result<(), Instant> {
        let mut buckets = self.0.lock();
        let Some(bucket) = buckets.get_mut(bucket) else { return Ok(()) };
        if let Some(held) = bucket.held_until.filter(|held| now < *held) {
            return Err(held);
        }
        bucket.fill(now);
        if bucket.level >= WHOLE {
            bucket.level -= 1.0;
            return Ok(());
        }
        // Timers have a resolution of a millisecond. Never `now`, or the caller would repeat without a pause.
        Err(bucket.when(1.0, now).max(now + Duration::from_millis(1)))
    }

    /// Returns a token that was taken and not used.
    pub(super) fn give_back(&self, bucket: &'static str, now: Instant) {
        let mut buckets = self.0.lock();
        if let Some(bucket) = buckets.get_mut(bucket) {
            bucket.fill(now);
            bucket.level = (bucket.level + 1.0).min(bucket.burst);
        }
    }

    /// Forecasts the time at which a caller with `ahead` others before it gets its token.
    pub(super) fn forecast(&self, bucket: &'static str, ahead: u32, now: Instant) -> Instant {
        let mut buckets = self.0.lock();
        let Some(bucket) = buckets.get_mut(bucket) else { return now };
        bucket.fill(now);
        bucket.when(f64::from(ahead) + 1.0, now)
    }

    /// Records that a call sent at `sent` was throttled, and the pause that the cloud asked for.
    pub(super) fn throttled(
        &self,
        bucket: &'static str,
        sent: Instant,
        after: Option<Duration>,
        now: Instant,
    ) {
        let mut buckets = self.0.lock();
        let Some(bucket) = buckets.get_mut(bucket) else { return };
        if bucket.cut.is_none_or(|cut| sent > cut) {
            bucket.rate = (bucket.rate / 2.0).max(bucket.seed * LEAST);
            (bucket.cut, bucket.changed) = (Some(now), Some(now));
        }
        let least = Duration::from_secs_f64(1.0 / bucket.rate);
        let pause = after.map_or(least, |after| after.max(least)).min(LONGEST_PAUSE);
        let pause = pause + pause.mul_f64(chance() / 2.0);
        let held = bucket.held_until.max(Some(now + pause));
        // One call may try at the end of the pause; the bucket fills from then on.
        (bucket.held_until, bucket.at, bucket.level) = (held, held, 1.0);
    }

    /// Records that a call got any other answer.
    pub(super) fn answered(&self, bucket: &'static str, now: Instant) {
        let mut buckets = self.0.lock();
        let Some(bucket) = buckets.get_mut(bucket) else { return };
        if bucket.rate >= bucket.seed {
            return;
        }
        let since = bucket.changed.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        if since >= Duration::from_secs(1) {
            bucket.fill(now);
            bucket.rate = (bucket.rate + bucket.seed * GIVEN_BACK).min(bucket.seed);
            bucket.changed = Some(now);
        }
    }
}

impl Bucket {
    fn new(limits: &BucketLimits) -> Bucket {
        let burst = f64::from(limits.burst);
        Bucket {
            seed: limits.per_second,
            burst,
            rate: limits.per_second,
            level: burst,
            at: None,
            held_until: None,
            cut: None,
            changed: None,
        }
    }

    fn fill(&mut self, now: Instant) {
        let since = self.at.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        self.level = (self.level + self.rate * since.as_secs_f64()).min(self.burst);
        self.at = Some(self.at.map_or(now, |at| at.max(now)));
    }

    /// Returns the time at which the bucket holds this many tokens, if none is taken.
    fn when(&self, tokens: f64, now: Instant) -> Instant {
        let missing = (tokens - self.level).max(0.0);
        // The rate is never 0, so this is finite. A wait of a year is as good as any longer one.
        let wait = Duration::from_secs_f64((missing / self.rate).min(3.2e7));
        self.held_until.map_or(now, |held| held.max(now)) + wait
    }
}

/// Returns a random number from 0 to 1. The fresh keys of a hasher are the standard library's source of randomness.
fn chance() -> f64 {
    (RandomState::new().build_hasher().finish() % 1024) as f64 / 1024.0
}
