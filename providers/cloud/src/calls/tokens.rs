//! Token buckets that start with the cloud's published rates and adapt.
//!
//! The cloud's bucket belongs to the account, and this bucket to one process. Other nodes, people and programs draw
//! from the account's bucket unseen. A throttle reply therefore halves the local rate and empties the bucket. It also
//! blocks the bucket for as long as the cloud asks, at least for one token's time. Each second in which calls are
//! answered restores a tenth of the published rate (the seed), up to the seed. This is the additive increase and
//! multiplicative decrease of TCP: independent users of one account converge to fair shares, unless they act in step. A
//! random part of the pause prevents that. Calls that were in flight together are throttled together, and cut the rate
//! once.
//!
//! Some clouds fill the account's bucket at the start of each minute only. Such a bucket gets a minute's tokens of the
//! current rate at that time, and a throttle reply blocks it until then.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::time::Instant;

use super::table::BucketLimits;

/// Part of the seed that one second of answers restores.
const GIVEN_BACK: f64 = 0.1;
/// Smallest part of the seed that remains after many cuts.
const LEAST: f64 = 1.0 / 16.0;
/// Upper limit for a pause that the cloud asks for: a longer one would be an outage of its own.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// Time between two fillings of a bucket that is filled by the minute.
const MINUTE: Duration = Duration::from_secs(60);
/// Largest random delay of the first call after a pause of a bucket that is filled by the minute.
const SPREAD: Duration = Duration::from_secs(1);
/// One token, less a margin for floating-point errors.
const WHOLE: f64 = 1.0 - 1e-6;

/// Adaptive token bucket of one process; see the module.
#[derive(Debug)]
pub(super) struct TokenBucket {
    limits: BucketLimits,
    /// Current rate, in tokens per second.
    pub(super) rate: f64,
    level: f64,
    /// Time at which `level` is valid; in a pause, the end of the pause.
    at: Option<Instant>,
    held_until: Option<Instant>,
    /// Time of the last rate cut.
    cut: Option<Instant>,
    /// Time of the last rate change.
    changed: Option<Instant>,
    /// Start of the next minute, where the bucket is filled by the minute.
    minute: Option<Instant>,
}

/// Returns the time to the start of the next minute of the clock: the pause after a throttle reply of a cloud that
/// counts calls by the minute.
pub fn rest_of_minute(now: SystemTime) -> Duration {
    let since = now.duration_since(UNIX_EPOCH).unwrap_or_default();
    MINUTE - Duration::from_millis(u64::try_from(since.as_millis() % MINUTE.as_millis()).unwrap_or(0))
}

impl TokenBucket {
    /// Returns a full bucket.
    pub(super) fn new(limits: BucketLimits) -> TokenBucket {
        TokenBucket {
            limits,
            rate: limits.per_second,
            level: f64::from(limits.burst),
            at: None,
            held_until: None,
            cut: None,
            changed: None,
            minute: limits.by_minute.then(|| Instant::now() + rest_of_minute(SystemTime::now())),
        }
    }

    /// Records that the cloud accepts only this many more calls for now.
    pub(super) fn left(&mut self, calls: u32, now: Instant) {
        self.fill(now);
        self.level = self.level.min(f64::from(calls));
    }

    /// Takes a token. An error is the time of the next try, later than `now`.
    pub(super) fn take(&mut self, now: Instant) -> Result<(), Instant> {
        if let Some(held) = self.held_until.filter(|held| now < *held) {
            return Err(held);
        }
        self.fill(now);
        if self.level >= WHOLE {
            self.level -= 1.0;
            return Ok(());
        }
        // Timers have a resolution of a millisecond. Never `now`, or the caller would repeat without a pause.
        Err(self.when(1.0, now).max(now + Duration::from_millis(1)))
    }

    /// Returns a token that was taken and not used.
    pub(super) fn give_back(&mut self, now: Instant) {
        self.fill(now);
        self.level = (self.level + 1.0).min(f64::from(self.limits.burst));
    }

    /// Forecasts the time at which a caller with `ahead` others before it gets its token.
    pub(super) fn forecast(&mut self, ahead: u32, now: Instant) -> Instant {
        self.fill(now);
        self.when(f64::from(ahead) + 1.0, now)
    }

    /// Records that a call sent at `sent` was throttled, and the pause that the cloud asked for.
    pub(super) fn throttled(&mut self, sent: Instant, after: Option<Duration>, now: Instant) {
        if self.cut.is_none_or(|cut| sent > cut) {
            self.rate = (self.rate / 2.0).max(self.limits.per_second * LEAST);
            (self.cut, self.changed) = (Some(now), Some(now));
        }
        if let Some(minute) = self.next_minute(now) {
            let pause = minute.saturating_duration_since(now) + SPREAD.mul_f64(chance());
            // The bucket is filled when the pause ends.
            (self.held_until, self.level) = (self.held_until.max(Some(now + pause)), 0.0);
            return;
        }
        let least = Duration::from_secs_f64(1.0 / self.rate);
        let pause = after.map_or(least, |after| after.max(least)).min(LONGEST_PAUSE);
        let pause = pause + pause.mul_f64(chance() / 2.0);
        let held = self.held_until.max(Some(now + pause));
        // One call may try at the end of the pause; the bucket fills from then on.
        (self.held_until, self.at, self.level) = (held, held, 1.0);
    }

    /// Records that a call got any other answer.
    pub(super) fn answered(&mut self, now: Instant) {
        let seed = self.limits.per_second;
        let since = self.changed.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        if self.rate < seed && since >= Duration::from_secs(1) {
            self.fill(now);
            self.rate = (self.rate + seed * GIVEN_BACK).min(seed);
            self.changed = Some(now);
        }
    }

    /// Returns the start of the next minute, where the bucket is filled by the minute.
    fn next_minute(&mut self, now: Instant) -> Option<Instant> {
        let minute = self.minute.as_mut()?;
        if *minute <= now {
            let late = now.saturating_duration_since(*minute).as_secs() / MINUTE.as_secs();
            *minute += MINUTE * u32::try_from(late + 1).unwrap_or(u32::MAX);
        }
        Some(*minute)
    }

    /// Number of tokens that each minute brings, where the bucket is filled by the minute.
    fn per_minute(&self) -> f64 {
        (self.rate * MINUTE.as_secs_f64()).max(1.0)
    }

    fn fill(&mut self, now: Instant) {
        if let Some(minute) = self.minute {
            if minute <= now {
                self.next_minute(now);
                self.level = self.per_minute();
            }
            return;
        }
        let since = self.at.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        self.level = (self.level + self.rate * since.as_secs_f64()).min(f64::from(self.limits.burst));
        self.at = Some(self.at.map_or(now, |at| at.max(now)));
    }

    /// Returns the time at which the bucket holds this many tokens, if none is taken.
    fn when(&self, tokens: f64, now: Instant) -> Instant {
        let missing = (tokens - self.level).max(0.0);
        if let Some(minute) = self.minute {
            if missing <= 1.0 - WHOLE {
                return self.held_until.map_or(now, |held| held.max(now));
            }
            let minutes = (missing / self.per_minute()).ceil().clamp(1.0, 5e5) - 1.0;
            return self.held_until.map_or(minute, |held| held.max(minute)) + MINUTE.mul_f64(minutes);
        }
        // The rate is never 0, so this is finite. A wait of a year is as good as any longer one.
        let wait = Duration::from_secs_f64((missing / self.rate).min(3.2e7));
        self.held_until.map_or(now, |held| held.max(now)) + wait
    }
}

/// Returns a random number from 0 to 1. The fresh keys of a hasher are the standard library's source of randomness.
fn chance() -> f64 {
    (RandomState::new().build_hasher().finish() % 1024) as f64 / 1024.0
}
