//! Counts calls as clouds limit them: in buckets of tokens, or in fixed minutes.

use std::collections::HashMap;
use std::time::Duration;

/// Limit of a group of calls.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rate {
    /// Bucket of tokens: `burst` calls at once, then `per_minute` calls a minute, evenly.
    Bucket {
        /// Tokens added per minute.
        per_minute: f64,
        /// Maximum number of tokens.
        burst: f64,
    },
    /// Fixed minutes: this many calls in each, wherever in it they are.
    Minute {
        /// Calls per minute.
        calls: u32,
    },
}

impl Rate {
    /// Returns the least time in which the cloud admits this many calls, the first of them now. The counter is full at the
    /// cloud's time `now`, and that time passes `speed` times as fast as the caller's.
    pub fn least(self, calls: usize, now: Duration, speed: f64) -> Duration {
        let (calls, minutes) = (calls as f64, now.as_secs_f64() * speed / 60.0);
        let wait = match self {
            Rate::Bucket { per_minute, burst } => (calls - burst).max(0.0) / per_minute,
            Rate::Minute { calls: each } => match (calls / f64::from(each)).ceil() - 1.0 {
                more if more < 1.0 => 0.0,
                more => minutes.floor() + more - minutes,
            },
        };
        Duration::from_secs_f64(wait * 60.0 / speed)
    }
}

/// Least wait that a refusal asks for.
const LEAST_WAIT: Duration = Duration::from_micros(1);

/// Counters of one cloud.
#[derive(Debug, Default)]
pub struct Rates {
    /// Speed of the counters, as a multiple of the cloud's own; `None`: no limits.
    speed: Option<f64>,
    /// Calls left, and the time of that number (bucket) or the number of the minute.
    counters: HashMap<String, (f64, f64)>,
    /// Limits of this account's counters, where they are not the cloud's default.
    own: HashMap<String, Rate>,
}

impl Rates {
    /// Returns full counters whose time passes `speed` times as fast.
    pub fn with_speed(speed: f64) -> Rates {
        Rates { speed: Some(speed), ..Rates::default() }
    }

    /// Gives this account a limit of its own for a counter, which is full then.
    pub(crate) fn limit(&mut self, name: &str, rate: Rate) {
        self.own.insert(name.to_owned(), rate);
        self.counters.remove(name);
    }

    /// Takes a call; returns how many are left (`None`: unlimited).
    ///
    /// # Errors
    /// The time until a call is possible, when there is none now.
    pub fn take(&mut self, name: &str, rate: Rate, now: Duration) -> Result<Option<u64>, Duration> {
        let Some(speed) = self.speed else { return Ok(None) };
        let rate = self.own.get(name).copied().unwrap_or(rate);
        // The cloud's minute, in its own time.
        let minutes = now.as_secs_f64() * speed / 60.0;
        let (most, gained, at) = match rate {
            Rate::Bucket { per_minute, burst } => (burst, per_minute, minutes),
            Rate::Minute { calls } => (f64::from(calls), f64::INFINITY, minutes.floor()),
        };
        let (left, since) = self.counters.entry(name.to_owned()).or_insert((most, at));
        if at > *since {
            *left = (*left + (at - *since) * gained).min(most);
        }
        *since = at;
        if *left >= 1.0 {
            *left -= 1.0;
            return Ok(Some(left.floor() as u64));
        }
        let wait = match rate {
            Rate::Bucket { per_minute, .. } => (1.0 - *left) / per_minute,
            Rate::Minute { .. } => minutes.floor() + 1.0 - minutes,
        };
        // Rounded down to nothing, it would end no caller's wait.
        Err(Duration::from_secs_f64((wait * 60.0 / speed).min(3_600.0)).max(LEAST_WAIT))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(rates: &mut Rates, rate: Rate, at: u64) -> usize {
        (0..1_000).filter(|_| rates.take("c", rate, Duration::from_secs(at)).is_ok()).count()
    }

    #[test]
    fn a_bucket_gives_its_burst_and_then_its_rate() {
        let mut rates = Rates::with_speed(1.0);
        let rate = Rate::Bucket { per_minute: 60.0, burst: 5.0 };
        assert_eq!(taken(&mut rates, rate, 0), 5);
        assert_eq!(taken(&mut rates, rate, 2), 2);
        assert_eq!(taken(&mut rates, rate, 100), 5);
        let wait = rates.take("c", rate, Duration::from_secs(100)).unwrap_err();
        assert_eq!(wait, Duration::from_secs(1));
    }

    #[test]
    fn the_least_time_is_that_after_which_the_last_call_is_admitted() {
        for rate in [Rate::Bucket { per_minute: 60.0, burst: 5.0 }, Rate::Minute { calls: 10 }] {
            for calls in [1, 5, 6, 10, 11, 31] {
                let mut rates = Rates::with_speed(2.0);
                let (start, mut now) = (Duration::from_secs(7), Duration::from_secs(7));
                for _ in 0..calls {
                    while let Err(wait) = rates.take("c", rate, now) {
                        now += wait;
                    }
                }
                let (least, took) = (rate.least(calls, start, 2.0), now - start);
                assert!(
                    least.abs_diff(took) < Duration::from_millis(1),
                    "{rate:?} {calls}: {least:?} {took:?}"
                );
            }
        }
    }

    #[test]
    fn an_accounts_own_limit_replaces_the_clouds() {
        let mut rates = Rates::with_speed(1.0);
        rates.limit("c", Rate::Minute { calls: 3 });
        assert_eq!(taken(&mut rates, Rate::Minute { calls: 10 }, 0), 3);
    }

    #[test]
    fn a_fixed_minute_is_full_again_when_the_next_one_begins() {
        let mut rates = Rates::with_speed(1.0);
        let rate = Rate::Minute { calls: 10 };
        assert_eq!(taken(&mut rates, rate, 59), 10);
        assert_eq!(rates.take("c", rate, Duration::from_secs(59)), Err(Duration::from_secs(1)));
        assert_eq!(taken(&mut rates, rate, 60), 10);
        assert_eq!(taken(&mut rates, rate, 119), 0);
    }
}
