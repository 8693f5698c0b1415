//! Finds what an interrupted create left without a VM, such as NICs and disks. A resource may have no VM for a moment
//! while its VM is made. A resource that has none in two searches, minutes apart, is left over. Pure but for the clock.

use std::collections::HashSet;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Interval between two searches.
const EVERY: Duration = Duration::from_secs(600);

/// Resources of this owner that had no VM at the last search.
#[derive(Debug)]
pub struct Strays(Mutex<Searched>);

#[derive(Debug)]
struct Searched {
    at: Instant,
    ids: HashSet<String>,
}

impl Strays {
    /// Starts the interval without a search.
    pub fn new(now: Instant) -> Strays {
        Strays(Mutex::new(Searched { at: now, ids: HashSet::new() }))
    }

    /// Returns whether a search is due, every ten minutes. `true` starts the next interval, so the caller must search.
    pub fn is_due(&self, now: Instant) -> bool {
        let mut searched = self.0.lock();
        let is_due = now.saturating_duration_since(searched.at) >= EVERY;
        if is_due {
            searched.at = now;
        }
        is_due
    }

    /// Records the resources that a search found without a VM. Returns those that had none at the last search, either.
    pub fn again(&self, ids: Vec<String>) -> Vec<String> {
        let mut searched = self.0.lock();
        let before = std::mem::replace(&mut searched.ids, ids.iter().cloned().collect());
        ids.into_iter().filter(|id| before.contains(id)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nic_is_stray_when_two_lists_show_it_unattached() {
        let now = Instant::now();
        let strays = Strays::new(now);
        assert!(!strays.is_due(now) && strays.is_due(now + EVERY) && !strays.is_due(now + EVERY));
        let nics = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        assert!(strays.again(nics(&["a", "b"])).is_empty());
        assert_eq!(strays.again(nics(&["b", "c"])), ["b"]);
        assert!(strays.again(nics(&["a"])).is_empty(), "it was attached in between");
    }
}
