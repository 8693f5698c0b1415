//! Records the VMs that this process made a moment ago. The cloud's lists and deletes may not know them for some
//! seconds; without the record such a VM would be lost. Pure but for the clock.

use std::collections::HashMap;
use std::time::Duration;

use parking_lot::Mutex;
use peerpod_provider_api::{IdempotencyKey, InstanceId, Owned, OwnedState};
use tokio::time::Instant;

/// Time for which a VM counts as recent; longer than EC2, the slowest of the clouds, was ever seen to need.
pub(crate) const RECENT: Duration = Duration::from_secs(60);
/// Time within which creates form a burst.
const BURST: Duration = Duration::from_secs(2);
/// Maximum number of records. When it is reached, old records are dropped; if none is old, new VMs are not recorded.
const MOST: usize = 10_000;

/// VMs that this process made a moment ago.
#[derive(Debug, Default)]
pub struct Recent(Mutex<HashMap<InstanceId, Made>>);

#[derive(Debug)]
struct Made {
    at: Instant,
    owned: Owned,
    /// Whether the cloud has shown the VM; from then on its answers about the VM are reliable.
    seen: bool,
}

impl Recent {
    /// Records a VM that the cloud has just made.
    pub fn made(&self, id: &InstanceId, key: &IdempotencyKey, name: &str, now: Instant) {
        let mut all = self.0.lock();
        if all.len() >= MOST {
            all.retain(|_, made| now.saturating_duration_since(made.at) < RECENT);
        }
        if all.len() >= MOST
            && let Some(oldest) = all.iter().min_by_key(|(_, made)| made.at).map(|(id, _)| id.clone())
        {
            all.remove(&oldest);
        }
        let owned = Owned {
            id: id.clone(),
            key: Some(key.clone()),
            name: Some(name.to_owned()),
            state: OwnedState::Pending,
            addresses: Vec::new(),
            created: None,
            node: None,
        };
        all.entry(id.clone()).or_insert(Made { at: now, owned, seen: false });
    }

    /// Returns whether more than two VMs were made within two seconds.
    pub fn is_burst(&self, now: Instant) -> bool {
        let young = |made: &&Made| now.saturating_duration_since(made.at) < BURST;
        self.0.lock().values().filter(young).count() > 2
    }

    /// Returns whether the cloud may deny the VM although it exists.
    pub fn may_be_denied(&self, id: &InstanceId, now: Instant) -> bool {
        let is_new = |made: &Made| !made.seen && now.saturating_duration_since(made.at) < RECENT;
        self.0.lock().get(id).is_some_and(is_new)
    }

    /// Records that the cloud has shown the VM, or has deleted it.
    pub fn seen(&self, id: &InstanceId) {
        if let Some(made) = self.0.lock().get_mut(id) {
            made.seen = true;
        }
    }

    /// Returns the recent VMs that the cloud's list does not have yet.
    pub fn missing_from(&self, listed: &[Owned], now: Instant) -> Vec<Owned> {
        let mut all = self.0.lock();
        all.retain(|_, made| now.saturating_duration_since(made.at) < RECENT);
        for one in listed {
            if let Some(made) = all.get_mut(&one.id) {
                made.seen = true;
            }
        }
        all.values().filter(|made| !made.seen).map(|made| made.owned.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_vm_counts_until_the_cloud_lists_it_or_a_minute_passes() {
        let (recent, now) = (Recent::default(), Instant::now());
        let key = IdempotencyKey::derive("c", "s", 0);
        let id = |text: &str| InstanceId::new(text).unwrap();
        recent.made(&id("i-1"), &key, "a", now);
        recent.made(&id("i-2"), &key, "b", now);
        assert!(recent.may_be_denied(&id("i-1"), now) && !recent.is_burst(now));
        assert_eq!(recent.missing_from(&[], now).len(), 2);
        recent.seen(&id("i-1"));
        assert!(!recent.may_be_denied(&id("i-1"), now) && recent.may_be_denied(&id("i-2"), now));
        let missing = recent.missing_from(&[], now);
        assert_eq!(missing.iter().map(|one| one.id.as_str()).collect::<Vec<_>>(), ["i-2"]);
        assert_eq!(recent.missing_from(&missing, now), [], "the list has it");
        recent.made(&id("i-3"), &key, "c", now);
        assert!(recent.is_burst(now) && !recent.is_burst(now + BURST));
        let later = now + RECENT;
        assert!(!recent.may_be_denied(&id("i-3"), later) && recent.missing_from(&[], later).is_empty());
    }
}
