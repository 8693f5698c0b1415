//! Holds a cloud's faults: which call fails, and how.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::fake::Answer;

/// Fault of one call.
#[derive(Clone, Debug)]
pub enum Fault {
    /// The call is refused in the cloud's form and has no effect.
    Refuse {
        /// HTTP status.
        status: u16,
        /// The cloud's code.
        code: String,
        /// Text for the user.
        message: String,
    },
    /// The call gets this answer and has no effect.
    Answer(Answer),
    /// The connection breaks before the call has an effect.
    Reset,
    /// The call takes effect, and the connection breaks before the answer.
    LostAnswer,
    /// The call takes effect, and the answer is delayed by this time.
    Late(Duration),
    /// The create is accepted. The cloud refuses it when it decides.
    LateRefusal {
        /// The cloud's code.
        code: String,
        /// Text for the user.
        message: String,
    },
    /// The list misses the changes of this last time.
    StaleList(Duration),
}

impl Fault {
    /// Returns a refusal.
    pub fn refuse(status: u16, code: &str, message: &str) -> Fault {
        Fault::Refuse { status, code: code.to_owned(), message: message.to_owned() }
    }

    /// Returns a refusal after acceptance.
    pub fn refuse_late(code: &str, message: &str) -> Fault {
        Fault::LateRefusal { code: code.to_owned(), message: message.to_owned() }
    }
}

/// All configured faults.
#[derive(Debug, Default)]
pub struct Faults {
    /// Number of VMs left per `(type, zone, market)`; `*` is any. Offerings without an entry are endless.
    pub stock: Vec<([String; 3], u64)>,
    /// Denied actions and rights.
    pub denied: BTreeSet<String>,
    /// Faults of the next calls: action, fault, number of calls.
    pub next: Vec<(String, Fault, u32)>,
    /// Time for which lists miss changes.
    pub lag: Duration,
    /// Time before each call takes effect, and time from then until its answer.
    pub latency: (Duration, Duration),
    /// Time until the cloud decides on a create.
    pub decision: Duration,
    /// Time from the decision until a VM runs.
    pub boot: Duration,
}

impl Faults {
    /// Returns the fault of this call, if one is set.
    pub fn next(&mut self, action: &str) -> Option<Fault> {
        let place = self.next.iter().position(|(wanted, _, _)| wanted == action)?;
        let (_, fault, left) = self.next.get_mut(place)?;
        let fault = fault.clone();
        *left -= 1;
        if *left == 0 {
            self.next.remove(place);
        }
        Some(fault)
    }

    /// Takes up to `wanted` VMs of an offering from the stock; returns how many there were.
    pub fn take_stock(&mut self, offering: [&str; 3], wanted: u64) -> u64 {
        let fits =
            |names: &[String; 3]| names.iter().zip(offering).all(|(name, one)| name == "*" || name == one);
        let Some((_, left)) = self.stock.iter_mut().find(|(names, _)| fits(names)) else { return wanted };
        let taken = wanted.min(*left);
        *left -= taken;
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_is_for_its_action_and_its_number_of_calls() {
        let mut faults = Faults::default();
        faults.next.push(("A".to_owned(), Fault::Reset, 2));
        assert!(faults.next("B").is_none());
        assert!(faults.next("A").is_some() && faults.next("A").is_some() && faults.next("A").is_none());
    }

    #[test]
    fn the_stock_of_an_offering_ends() {
        let mut faults = Faults::default();
        faults.stock.push((["small", "*", "spot"].map(str::to_owned), 1));
        assert_eq!(faults.take_stock(["small", "1", "on-demand"], 3), 3);
        assert_eq!(faults.take_stock(["small", "1", "spot"], 3), 1);
        assert_eq!(faults.take_stock(["small", "2", "spot"], 3), 0);
    }
}
