//! Holds the proxy's faults: which call fails, and how. Pure but for the clock.

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

/// One of EC2's token buckets: it allows `burst` calls at once, then `rate` calls per second.
#[derive(Clone, Copy, Debug)]
pub struct Bucket {
    /// Tokens added per second.
    pub rate: f64,
    /// Maximum number of tokens.
    pub burst: f64,
}

/// Returns an action's bucket, as EC2 publishes it per account and region.
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

/// Fault of one call.
#[derive(Clone, Debug)]
pub enum Fault {
    /// The call is refused and has no effect.
    Refuse {
        /// HTTP status.
        status: u16,
        /// EC2's error code.
        code: String,
        /// Text for the user.
        message: String,
    },
    /// The connection breaks before the call has an effect.
    Reset,
    /// The call takes effect, and the connection breaks before the answer.
    LostAnswer,
    /// The call takes effect, and the answer is delayed by this time.
    Late(Duration),
}

impl Fault {
    /// Returns a refusal.
    pub fn refuse(status: u16, code: &str, message: &str) -> Fault {
        Fault::Refuse { status, code: code.to_owned(), message: message.to_owned() }
    }
}

/// All configured faults.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    /// Speed of EC2's buckets, as a multiple of EC2's own; `None`: no buckets.
    pub(crate) buckets: Option<f64>,
    pub(crate) filled: HashMap<String, (f64, Instant)>,
    /// Number of VMs left per `(type, zone, market)`; `*` is any. Offerings without an entry are endless.
    pub(crate) stock: Vec<([String; 3], u64)>,
    pub(crate) denied: BTreeSet<String>,
    pub(crate) expired: bool,
    /// Faults of the next calls: action, fault, number of calls.
    pub(crate) next: Vec<(String, Fault, u32)>,
    /// Time for which a new VM or volume is not visible.
    pub(crate) lag: Duration,
    /// Time for which a VM is pending.
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

    /// Returns the fault of this call, if one is set.
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

    /// Returns the remaining number of an offering; `None`: endless.
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
