//! Where tokens come from: buckets that begin with the cloud's figures and learn.
//!
//! The cloud's bucket belongs to the account, ours to this process: others (nodes, people, other programs) draw from
//! it unseen. So a throttle reply halves our rate, empties the bucket and holds it for as long as the cloud asks (or
//! for one token's time); each second in which calls are answered gives a tenth of the seed back, up to the seed. That
//! is TCP's additive increase and multiplicative decrease, under which strangers that share a line come to share it
//! fairly, as long as they do not keep step: the pause is longer by chance. Calls that were under way together are
//! throttled together, and that is one lesson.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;

use super::table::{Limits, Table};

/// Gives out the right to call. Called under the line's lock: answers at once, without waiting. A source that shares
/// an account's rate between nodes keeps its share in memory and renews it behind; while it has none it says when to
/// ask again.
pub trait TokenSource: Send + Sync + 'static {
    /// Takes a token, or says when to ask again (later than `now`).
    ///
    /// # Errors
    /// The time at which to ask again.
    fn take(&self, bucket: &'static str, now: Instant) -> Result<(), Instant>;

    /// A token that was taken was not used.
    fn give_back(&self, bucket: &'static str, now: Instant);

    /// When a caller will have its token that lets `ahead` others go first, as far as can be told now.
    fn forecast(&self, bucket: &'static str, ahead: u32, now: Instant) -> Instant;

    /// A call that was sent then was throttled, and told to wait for so long.
    fn throttled(&self, bucket: &'static str, sent: Instant, after: Option<Duration>, now: Instant);

    /// A call was answered otherwise.
    fn answered(&self, bucket: &'static str, now: Instant);
}

/// The part of the seed that a second of answers gives back.
const GIVEN_BACK: f64 = 0.1;
/// The least that is left of the seed after many lessons.
const LEAST: f64 = 1.0 / 16.0;
/// A cloud that asks for a longer pause is not believed: it would be an outage of our making.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// Floating point's due.
const WHOLE: f64 = 1.0 - 1e-6;

/// Token buckets of one process that adapt; see the module.
#[derive(Debug)]
pub struct Adaptive(Mutex<HashMap<&'static str, Bucket>>);

#[derive(Debug)]
struct Bucket {
    seed: f64,
    burst: f64,
    rate: f64,
    level: f64,
    /// When `level` is true; in a pause that is its end.
    at: Option<Instant>,
    held_until: Option<Instant>,
    /// The last lesson.
    cut: Option<Instant>,
    /// When the rate last changed.
    changed: Option<Instant>,
}

impl Adaptive {
    /// Full buckets at the table's figures.
    pub fn new(table: &Table) -> Adaptive {
        Adaptive(Mutex::new(table.buckets().map(|(name, limits)| (name, Bucket::new(limits))).collect()))
    }

    /// The rate that a bucket has come to, in tokens a second; for tests and people.
    pub fn rate(&self, bucket: &str) -> Option<f64> {
        self.buckets().get(bucket).map(|bucket| bucket.rate)
    }

    fn buckets(&self) -> MutexGuard<'_, HashMap<&'static str, Bucket>> {
        self.0.lock()
    }
}

impl Bucket {
    fn new(limits: &Limits) -> Bucket {
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

    /// When there will be so many tokens, if nobody takes one.
    fn when(&self, tokens: f64, now: Instant) -> Instant {
        let missing = (tokens - self.level).max(0.0);
        // A share of the rate is never 0, so this is finite; a wait of a year is as good as any longer one.
        let wait = Duration::from_secs_f64((missing / self.rate).min(3.2e7));
        self.held_until.map_or(now, |held| held.max(now)) + wait
    }
}

/// From 0 to 1: a hasher's fresh keys are the standard library's source of chance.
fn chance() -> f64 {
    (RandomState::new().build_hasher().finish() % 1024) as f64 / 1024.0
}

impl TokenSource for Adaptive {
    fn take(&self, bucket: &'static str, now: Instant) -> Result<(), Instant> {
        let mut buckets = self.buckets();
        let Some(bucket) = buckets.get_mut(bucket) else { return Ok(()) };
        if let Some(held) = bucket.held_until.filter(|held| now < *held) {
            return Err(held);
        }
        bucket.fill(now);
        if bucket.level >= WHOLE {
            bucket.level -= 1.0;
            return Ok(());
        }
        // Timers are a millisecond coarse; never `now`, or the caller would ask without a pause.
        Err(bucket.when(1.0, now).max(now + Duration::from_millis(1)))
    }

    fn give_back(&self, bucket: &'static str, now: Instant) {
        let mut buckets = self.buckets();
        if let Some(bucket) = buckets.get_mut(bucket) {
            bucket.fill(now);
            bucket.level = (bucket.level + 1.0).min(bucket.burst);
        }
    }

    fn forecast(&self, bucket: &'static str, ahead: u32, now: Instant) -> Instant {
        let mut buckets = self.buckets();
        let Some(bucket) = buckets.get_mut(bucket) else { return now };
        bucket.fill(now);
        bucket.when(f64::from(ahead) + 1.0, now)
    }

    fn throttled(&self, bucket: &'static str, sent: Instant, after: Option<Duration>, now: Instant) {
        let mut buckets = self.buckets();
        let Some(bucket) = buckets.get_mut(bucket) else { return };
        if bucket.cut.is_none_or(|cut| sent > cut) {
            bucket.rate = (bucket.rate / 2.0).max(bucket.seed * LEAST);
            (bucket.cut, bucket.changed) = (Some(now), Some(now));
        }
        let least = Duration::from_secs_f64(1.0 / bucket.rate);
        let pause = after.map_or(least, |after| after.max(least)).min(LONGEST_PAUSE);
        let pause = pause + pause.mul_f64(chance() / 2.0);
        let held = bucket.held_until.max(Some(now + pause));
        // One call may try when the pause is over, and it fills from then on.
        (bucket.held_until, bucket.at, bucket.level) = (held, held, 1.0);
    }

    fn answered(&self, bucket: &'static str, now: Instant) {
        let mut buckets = self.buckets();
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
