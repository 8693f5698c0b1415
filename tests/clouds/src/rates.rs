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

/// Counters of one cloud.
#[derive(Debug, Default)]
pub(crate) struct Rates {
    /// Speed of the counters, as a multiple of the cloud's own; `None`: no limits.
    pub(crate) speed: Option<f64>,
    /// Calls left, and the time of that number (bucket) or the number of the minute.
    counters: HashMap<String, (f64, f64)>,
}

impl Rates {
    /// Returns fresh counters.
    pub(crate) fn with_speed(speed: f64) -> Rates {
        Rates { speed: Some(speed), ..Rates::default() }
    }

    /// Takes a call; returns how many are left (`None`: unlimited).
    ///
    /// # Errors
    /// The time until a call is possible, when there is none now.
    pub(crate) fn take(&mut self, name: &str, rate: Rate, now: Duration) -> Result<Option<u64>, Duration> {
        let Some(speed) = self.speed else { return Ok(None) };
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
        Err(Duration::from_secs_f64((wait * 60.0 / speed).min(3_600.0)))
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
        let mut rates = Rates { speed: Some(1.0), ..Rates::default() };
        let rate = Rate::Bucket { per_minute: 60.0, burst: 5.0 };
        assert_eq!(taken(&mut rates, rate, 0), 5);
        assert_eq!(taken(&mut rates, rate, 2), 2);
        assert_eq!(taken(&mut rates, rate, 100), 5);
        let wait = rates.take("c", rate, Duration::from_secs(100)).unwrap_err();
        assert_eq!(wait, Duration::from_secs(1));
    }

    #[test]
    fn a_fixed_minute_is_full_again_when_the_next_one_begins() {
        let mut rates = Rates { speed: Some(1.0), ..Rates::default() };
        let rate = Rate::Minute { calls: 10 };
        assert_eq!(taken(&mut rates, rate, 59), 10);
        assert_eq!(rates.take("c", rate, Duration::from_secs(59)), Err(Duration::from_secs(1)));
        assert_eq!(taken(&mut rates, rate, 60), 10);
        assert_eq!(taken(&mut rates, rate, 119), 0);
    }
}
