//! Which VMs a PeerPod means, when it does not say an instance id; and one list of the provider's for all who ask at the
//! same time.

use std::{
    collections::HashSet,
    sync::Arc,
    time::{Duration, Instant},
};

use peerpod_kube::crds::PeerPodSpec;
use peerpod_provider_api::{Error, IdempotencyKey, InstanceId, Owned, OwnedState, Provider};
use tokio::sync::Mutex;

/// A sandbox has at most so many attempts, each with a key of its own; nodes make at most eight.
const ATTEMPTS: u32 = 16;

/// The provider's list, kept only for those who asked before it was begun.
#[derive(Default)]
pub(super) struct Listing(Mutex<Option<(Instant, Arc<Vec<Owned>>)>>);

impl Listing {
    /// A list that was begun after this call.
    pub(super) async fn fresh(&self, provider: &dyn Provider) -> Result<Arc<Vec<Owned>>, Error> {
        let asked = Instant::now();
        let mut kept = self.0.lock().await;
        if let Some((begun, list)) = kept.as_ref()
            && *begun >= asked
        {
            return Ok(list.clone());
        }
        let begun = Instant::now();
        let list = Arc::new(provider.list_owned().await?);
        *kept = Some((begun, list.clone()));
        drop(kept);
        Ok(list)
    }

    /// Gives the memory back, if the list is older than that.
    pub(super) async fn forget(&self, older_than: Duration) {
        let mut kept = self.0.lock().await;
        if kept.as_ref().is_some_and(|(begun, _)| begun.elapsed() > older_than) {
            *kept = None;
        }
    }
}

/// The keys that a PeerPod's sandbox may have asked with: that of its spec, and those of its other attempts. All VMs with
/// one of `own` are this sandbox's; `shared` is one that we cannot derive, as several VMs of a batch have.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Keys {
    pub(super) own: HashSet<IdempotencyKey>,
    pub(super) shared: Option<IdempotencyKey>,
}

pub(super) fn keys(cluster: &str, spec: &PeerPodSpec) -> Keys {
    let own: HashSet<IdempotencyKey> = spec
        .sandbox_id
        .iter()
        .flat_map(|sandbox| (0..ATTEMPTS).map(|attempt| IdempotencyKey::derive(cluster, sandbox, attempt)))
        .collect();
    // What is no key was never asked with.
    let said = spec.idempotency_key.as_ref().and_then(|key| IdempotencyKey::parse(key.clone()).ok());
    let shared = said.filter(|key| !own.contains(key));
    Keys { own, shared }
}

/// What a PeerPod without an instance id means.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Meant {
    /// These, or none.
    Vms(Vec<InstanceId>),
    /// Several have its key, and nothing says which is its own. They are left to the search for orphans.
    Several(usize),
}

/// `others`: what other PeerPods say of themselves (instance id, key), read only when the key is a shared one.
pub(super) fn meant<'a>(
    keys: &Keys,
    owned: &[Owned],
    others: impl Fn() -> Vec<(Option<&'a str>, Option<&'a str>)>,
) -> Meant {
    let exists = owned.iter().filter(|vm| vm.state != OwnedState::Deleting);
    let with = |wanted: &dyn Fn(&IdempotencyKey) -> bool| -> Vec<InstanceId> {
        exists.clone().filter(|vm| vm.key.as_ref().is_some_and(wanted)).map(|vm| vm.id.clone()).collect()
    };
    let mut vms = with(&|key| keys.own.contains(key));
    let Some(shared) = &keys.shared else { return Meant::Vms(vms) };
    let mut candidates = with(&|key| key == shared);
    if candidates.is_empty() {
        return Meant::Vms(vms);
    }
    let others = others();
    candidates.retain(|id| !others.iter().any(|(named, _)| *named == Some(id.as_str())));
    let contested = others.iter().any(|(named, key)| named.is_none() && *key == Some(shared.as_str()));
    match candidates.len() {
        0 => {}
        1 if !contested => vms.append(&mut candidates),
        several => return Meant::Several(several),
    }
    Meant::Vms(vms)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(text: &str) -> IdempotencyKey {
        IdempotencyKey::parse(text).unwrap()
    }

    fn vm(id: &str, with: IdempotencyKey) -> Owned {
        Owned {
            id: InstanceId::new(id).unwrap(),
            key: Some(with),
            name: None,
            state: OwnedState::Running,
            addresses: vec![],
            created: None,
            node: None,
        }
    }

    fn ids(ids: &[&str]) -> Meant {
        Meant::Vms(ids.iter().map(|id| InstanceId::new(*id).unwrap()).collect())
    }

    #[test]
    fn every_attempt_of_a_sandbox_is_its_own_and_no_other_sandboxes() {
        let spec = PeerPodSpec {
            sandbox_id: Some("s".into()),
            idempotency_key: Some(IdempotencyKey::derive("c", "s", 0).to_string()),
            ..PeerPodSpec::default()
        };
        let keys = keys("c", &spec);
        assert_eq!(keys.shared, None);
        let owned = [
            vm("first", IdempotencyKey::derive("c", "s", 0)),
            vm("fallback", IdempotencyKey::derive("c", "s", 3)),
            vm("other", IdempotencyKey::derive("c", "t", 0)),
            vm("cluster", IdempotencyKey::derive("d", "s", 0)),
            Owned { state: OwnedState::Deleting, ..vm("going", IdempotencyKey::derive("c", "s", 1)) },
        ];
        assert_eq!(meant(&keys, &owned, || panic!("not needed")), ids(&["first", "fallback"]));
    }

    #[test]
    fn of_a_key_that_several_have_only_the_one_that_is_left_is_meant() {
        let spec = PeerPodSpec {
            sandbox_id: Some("s".into()),
            idempotency_key: Some("batch".into()),
            ..PeerPodSpec::default()
        };
        let keys = keys("c", &spec);
        assert_eq!(keys.shared, Some(key("batch")));
        let owned = [vm("a", key("batch")), vm("b", key("batch"))];
        assert_eq!(meant(&keys, &owned, || vec![(Some("a"), Some("batch"))]), ids(&["b"]));
        assert_eq!(meant(&keys, &owned, Vec::new), Meant::Several(2));
        let contested = || vec![(Some("a"), Some("batch")), (None, Some("batch"))];
        assert_eq!(meant(&keys, &owned, contested), Meant::Several(1), "the other one's as well as ours");
        assert_eq!(meant(&keys, &[], Vec::new), ids(&[]));
        let both = || vec![(Some("a"), None), (Some("b"), None)];
        assert_eq!(meant(&keys, &owned, both), ids(&[]));
    }

    #[test]
    fn what_is_no_key_finds_nothing() {
        let spec = PeerPodSpec { idempotency_key: Some("no key!".into()), ..PeerPodSpec::default() };
        assert_eq!(keys("c", &spec), Keys::default());
    }
}
