//! Remembers exhausted offerings: an offering without capacity is not tried again for some time. Pure and bounded; the
//! oldest mark goes first.

use std::collections::HashMap;
use std::time::Duration;

use peerpod_provider_api::Market;
use tokio::time::Instant;

use crate::catalogue::Offering;
use crate::text;

/// Lifetime of a mark, where the provider gives none (karpenter's figure for EC2).
pub const STANDS: Duration = Duration::from_secs(180);

/// Longest lifetime of a mark. The account's limits change, and only another try finds that.
pub const LONGEST: Duration = Duration::from_secs(24 * 3600);

/// Most marks at once: all types of a large cloud in a zone or two. Beyond that the oldest mark is dropped, which costs
/// one refused call.
pub const MOST: usize = 4096;

/// Longest text of a mark, in bytes.
const MAX_WHY: usize = 160;

/// Object of a mark.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Scope {
    /// A market, a type on it and a zone, for all subnets.
    Offering(Market, String, String),
    /// All types in a subnet without free addresses.
    Subnet(String),
    /// All types on a market that is closed to the account.
    Market(Market),
}

impl From<&Offering> for Scope {
    fn from(offering: &Offering) -> Scope {
        Scope::Offering(offering.market, offering.machine.clone(), offering.zone.clone())
    }
}

/// Time and reason of a refusal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mark {
    /// Time of the last refusal.
    pub at: Instant,
    /// Time until which the offering is not tried again.
    pub until: Instant,
    /// Reason from the cloud, shortened.
    pub why: String,
}

impl Mark {
    fn is_standing(&self, now: Instant) -> bool {
        now < self.until
    }
}

/// Marks of one account.
#[derive(Debug, Clone)]
pub struct Exhausted {
    most: usize,
    marks: HashMap<Scope, Mark>,
}

impl Default for Exhausted {
    fn default() -> Exhausted {
        Exhausted { most: MOST, marks: HashMap::new() }
    }
}

impl Exhausted {
    /// Returns the youngest valid mark that applies to this offering.
    pub fn find(
        &self,
        machine: &str,
        zone: &str,
        subnet: Option<&str>,
        market: Market,
        now: Instant,
    ) -> Option<&Mark> {
        if self.marks.is_empty() {
            return None;
        }
        let keys = [
            Some(Scope::Offering(market, machine.to_owned(), zone.to_owned())),
            subnet.map(|subnet| Scope::Subnet(subnet.to_owned())),
            Some(Scope::Market(market)),
        ];
        let found = keys.into_iter().flatten().filter_map(|key| self.marks.get(&key));
        found.filter(|mark| mark.is_standing(now)).max_by_key(|mark| mark.at)
    }

    /// Marks these offerings as exhausted for this time, at most [`LONGEST`].
    pub fn mark(&mut self, scope: impl Into<Scope>, why: &str, time: Duration, now: Instant) {
        let scope = scope.into();
        if self.marks.len() >= self.most && !self.marks.contains_key(&scope) {
            self.marks.retain(|_, mark| mark.is_standing(now));
        }
        if self.marks.len() >= self.most && !self.marks.contains_key(&scope) {
            let oldest = self.marks.iter().min_by_key(|(_, mark)| mark.at).map(|(key, _)| key.clone());
            if let Some(oldest) = oldest {
                self.marks.remove(&oldest);
            }
        }
        self.marks
            .insert(scope, Mark { at: now, until: now + time.min(LONGEST), why: text::clip(why, MAX_WHY) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offering(machine: &str, zone: &str, market: Market) -> Offering {
        Offering { machine: machine.into(), zone: zone.into(), subnet: None, market }
    }

    #[test]
    fn a_mark_holds_for_its_time_and_its_offering_alone() {
        let (mut marks, now) = (Exhausted::default(), Instant::now());
        marks.mark(&offering("m", "a", Market::Spot), "none left", STANDS, now);
        let at = |after: u64| now + Duration::from_secs(after);
        let find = |machine, zone, market, at| marks.find(machine, zone, None, market, at).map(|m| &*m.why);
        assert_eq!(find("m", "a", Market::Spot, at(179)), Some("none left"));
        assert_eq!(find("m", "a", Market::Spot, at(180)), None);
        assert_eq!(find("m", "a", Market::OnDemand, now), None);
        assert_eq!(find("m", "b", Market::Spot, now), None);
        assert_eq!(find("n", "a", Market::Spot, now), None);
    }

    #[test]
    fn a_mark_may_stand_for_hours_but_not_for_ever() {
        let (mut marks, now) = (Exhausted::default(), Instant::now());
        let hour = Duration::from_secs(3600);
        marks.mark(&offering("m", "a", Market::Spot), "quota", hour, now);
        marks.mark(&offering("n", "a", Market::Spot), "closed", Duration::MAX, now);
        let stands = |machine, at| marks.find(machine, "a", None, Market::Spot, at).is_some();
        assert!(stands("m", now + hour - Duration::from_secs(1)) && !stands("m", now + hour));
        assert!(stands("n", now + hour) && !stands("n", now + LONGEST));
    }

    #[test]
    fn marks_of_a_subnet_and_a_market_apply_to_all_types() {
        let (mut marks, now) = (Exhausted::default(), Instant::now());
        marks.mark(Scope::Subnet("s1".to_owned()), "no addresses", STANDS, now);
        marks.mark(Scope::Market(Market::Spot), "no service-linked role", STANDS, now);
        assert!(marks.find("m", "a", Some("s1"), Market::OnDemand, now).is_some());
        assert!(marks.find("m", "a", Some("s2"), Market::OnDemand, now).is_none());
        assert!(marks.find("m", "a", Some("s2"), Market::Spot, now).is_some());
    }

    #[test]
    fn marks_are_bounded_and_the_oldest_goes_first() {
        let (mut marks, start) = (Exhausted { most: 10, ..Exhausted::default() }, Instant::now());
        for number in 0..100 {
            let now = start + Duration::from_millis(number);
            marks.mark(&offering(&format!("m{number}"), "a", Market::Spot), &"x".repeat(9999), STANDS, now);
            assert!(marks.marks.len() <= 10);
        }
        let now = start + Duration::from_secs(1);
        assert!(marks.find("m89", "a", None, Market::Spot, now).is_none());
        let mark = marks.find("m90", "a", None, Market::Spot, now).unwrap();
        assert!(mark.why.len() <= MAX_WHY + 3, "{}", mark.why.len());
        // Expired marks make room before a valid one is dropped.
        let later = start + STANDS + Duration::from_millis(95);
        marks.mark(&offering("new", "a", Market::Spot), "none", STANDS, later);
        assert_eq!(marks.marks.len(), 5);
    }
}
