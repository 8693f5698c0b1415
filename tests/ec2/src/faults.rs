//! What goes wrong, and when: the knobs of the proxy. Pure but for the clock.

use std::{
    collections::{BTreeSet, HashMap},
    time::{Duration, Instant},
};

/// A token bucket of EC2's: so many calls at once, so many a second after that.
#[derive(Clone, Copy, Debug)]
pub struct Bucket {
    /// Refilled per second.
    pub rate: f64,
    /// At most.
    pub burst: f64,
}

/// The buckets of an account in a region, as EC2 publishes them, each action its own.
pub fn ec2_bucket(action: &str) -> Bucket {
    let (rate, burst) = match action {
        "RunInstances" => (2.0, 5.0),
        "TerminateInstances" => (5.0, 100.0),
        "CreateTags" => (10.0, 100.0),
        _ if action.starts_with("Describe") || action.starts_with("Get") => (20.0, 100.0),
        _ => (5.0, 50.0),
    };
    Bucket { rate, burst }
}

/// What happens to one call.
#[derive(Clone, Debug)]
pub enum Fault {
    /// Refused, and nothing was done.
    Refuse {
        /// HTTP.
        status: u16,
        /// EC2's.
        code: String,
        /// For people.
        message: String,
    },
    /// The connection breaks before anything was done.
    Reset,
    /// It is done, and the connection breaks before the answer.
    LostAnswer,
    /// It is done, and the answer comes this much later.
    Late(Duration),
}

impl Fault {
    /// A refusal.
    pub fn refuse(status: u16, code: &str, message: &str) -> Fault {
        Fault::Refuse { status, code: code.to_owned(), message: message.to_owned() }
    }
}

/// Everything that is set.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    /// Whether EC2's buckets count, and by how much they are faster than EC2's.
    pub(crate) buckets: Option<f64>,
    pub(crate) filled: HashMap<String, (f64, Instant)>,
    /// What there is of `(type, zone, market)`; what is missing is endless. `*` is any.
    pub(crate) stock: Vec<([String; 3], u64)>,
    pub(crate) denied: BTreeSet<String>,
    pub(crate) expired: bool,
    /// For the next calls of an action.
    pub(crate) next: Vec<(String, Fault, u32)>,
    /// So long what was made is not seen.
    pub(crate) lag: Duration,
    /// So long a VM is pending.
    pub(crate) boot: Duration,
}

impl Faults {
    /// Takes a token; false when there is none.
    pub(crate) fn take(&mut self, action: &str, now: Instant) -> bool {
        let Some(speed) = self.buckets else { return true };
        let bucket = ec2_bucket(action);
        let (tokens, at) = self.filled.entry(action.to_owned()).or_insert((bucket.burst, now));
        let since = now.saturating_duration_since(*at).as_secs_f64();
        *tokens = (*tokens + since * bucket.rate * speed).min(bucket.burst);
        *at = now;
        if *tokens < 1.0 {
            return false;
        }
        *tokens -= 1.0;
        true
    }

    /// The fault of this call, if one was ordered.
    pub(crate) fn next(&mut self, action: &str) -> Option<Fault> {
        let place = self.next.iter().position(|(wanted, _, _)| wanted == action)?;
        let (_, fault, left) = &mut self.next[place];
        let fault = fault.clone();
        *left -= 1;
        if *left == 0 {
            self.next.remove(place);
        }
        Some(fault)
    }

    /// How many of an offering there are.
    pub(crate) fn left(&mut self, offering: [&str; 3]) -> Option<&mut u64> {
        let fits =
            |names: &[String; 3]| names.iter().zip(offering).all(|(name, one)| name == "*" || name == one);
        self.stock.iter_mut().find(|(names, _)| fits(names)).map(|(_, left)| left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_gives_its_burst_and_then_its_rate() {
        let mut faults = Faults { buckets: Some(1.0), ..Faults::default() };
        let now = Instant::now();
        let taken = |faults: &mut Faults, at| (0..100).filter(|_| faults.take("RunInstances", at)).count();
        assert_eq!(taken(&mut faults, now), 5);
        assert_eq!(taken(&mut faults, now + Duration::from_secs(2)), 4);
        assert_eq!(taken(&mut faults, now + Duration::from_secs(100)), 5);
    }

    #[test]
    fn a_fault_is_for_its_action_and_its_number_of_calls() {
        let mut faults = Faults::default();
        faults.next.push(("A".to_owned(), Fault::Reset, 2));
        assert!(faults.next("B").is_none());
        assert!(faults.next("A").is_some() && faults.next("A").is_some() && faults.next("A").is_none());
    }
}
