//! Finds the VMs of a PeerPod without an instance id, and shares one list of the provider among concurrent callers.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kube::ResourceExt;
use peerpod_kube::crds::{PeerPod, PeerPodSpec};
use peerpod_provider_api::{Error, IdempotencyKey, InstanceId, Owned, OwnedState, Provider};
use tokio::sync::Mutex;

/// Maximum number of attempts per sandbox, each with its own key; nodes make at most eight.
const ATTEMPTS: u32 = 16;

/// The provider's last list. Only callers that asked before it was begun may reuse it as fresh.
#[derive(Default)]
pub(super) struct Listing(Mutex<Option<(Instant, Arc<Vec<Owned>>)>>);

impl Listing {
    /// Returns the VM of this id from the last list, since node and key of a VM never change, or else from a new list.
    pub(super) async fn vm(&self, provider: &dyn Provider, id: &str) -> Result<Option<Owned>, Error> {
        let find = |list: &[Owned]| list.iter().find(|vm| vm.id.as_str() == id).cloned();
        let known = self.0.lock().await.as_ref().and_then(|(_, list)| find(list));
        match known {
            Some(vm) => Ok(Some(vm)),
            None => Ok(find(&self.fresh(provider).await?)),
        }
    }

    /// Returns a list that was begun after this call.
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

    /// Frees the list if it is older than this and not locked. A caller holds the lock during the provider's call, and
    /// this function does not wait for it.
    pub(super) fn forget(&self, older_than: Duration) {
        let Ok(mut kept) = self.0.try_lock() else { return };
        if kept.as_ref().is_some_and(|(begun, _)| begun.elapsed() > older_than) {
            *kept = None;
        }
    }
}

/// Keys that a PeerPod's sandbox may have asked with: the key of its spec, and the keys of its other attempts. All VMs
/// with a key of `own` belong to this sandbox. `shared` cannot be derived from the sandbox; several VMs of a batch have
/// it.
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
    // No VM was ever requested with an invalid key.
    let said = spec.idempotency_key.as_ref().and_then(|key| IdempotencyKey::parse(key.clone()).ok());
    let shared = said.filter(|key| !own.contains(key));
    Keys { own, shared }
}

/// VMs of a PeerPod without an instance id.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Meant {
    /// These VMs, or none.
    Vms(Vec<InstanceId>),
    /// Several VMs have its key, and they cannot be distinguished. They are left to the search for orphans.
    Several(usize),
}

/// Returns the VMs for these keys. The other PeerPods' specs are read only for a shared key.
pub(super) fn meant<'a>(
    keys: &Keys,
    owned: &[Owned],
    others: impl Iterator<Item = &'a PeerPodSpec> + Clone,
) -> Meant {
    let exists = owned.iter().filter(|vm| vm.state != OwnedState::Deleting);
    let with = |wanted: &dyn Fn(&IdempotencyKey) -> bool| -> Vec<InstanceId> {
        exists.clone().filter(|vm| vm.key.as_ref().is_some_and(wanted)).map(|vm| vm.id.clone()).collect()
    };
    let mut vms = with(&|key| keys.own.contains(key));
    let Some(shared) = &keys.shared else { return Meant::Vms(vms) };
    let mut candidates = with(&|key| key == shared);
    candidates.retain(|id| !others.clone().any(|spec| spec.instance_id.as_deref() == Some(id.as_str())));
    let contested = |spec: &PeerPodSpec| {
        spec.instance_id.is_none() && spec.idempotency_key.as_deref() == Some(shared.as_str())
    };
    match candidates.len() {
        0 => {}
        1 if !others.clone().any(contested) => vms.append(&mut candidates),
        several => return Meant::Several(several),
    }
    Meant::Vms(vms)
}

/// Returns the reason why the VM of this PeerPod's id belongs to another owner, if it does: any writer of PeerPods can
/// write any id. `vm` is the provider's entry of the VM; `others` are PeerPods of the same provider, perhaps with this
/// one among them.
pub(super) fn another_ones<'a>(
    cluster: &str,
    peerpod: &PeerPod,
    vm: Option<&Owned>,
    others: impl IntoIterator<Item = &'a PeerPod>,
) -> Option<String> {
    let id = peerpod.spec.instance_id.as_deref()?;
    let at = vm.and_then(|vm| vm.node.as_deref());
    if let (Some(at), Some(said)) = (at, peerpod.spec.node_name.as_deref())
        && at != said
    {
        return Some(format!(
            "VM {id} belongs to node {at} and this PeerPod to node {said}: the VM is left alone; if no pod \
             needs it, delete it at the provider"
        ));
    }
    let rival = others.into_iter().find(|other| has_better_claim(cluster, id, vm, other, peerpod))?;
    let name = format!("{}/{}", rival.namespace().unwrap_or_default(), rival.name_any());
    Some(format!("VM {id} belongs to PeerPod {name}, too: it stays, and is deleted with that PeerPod"))
}

/// The better claim has the PeerPod with the sandbox that asked for the VM; else one that is not being deleted; else
/// the older one.
fn has_better_claim(cluster: &str, id: &str, vm: Option<&Owned>, other: &PeerPod, peerpod: &PeerPod) -> bool {
    if other.metadata.uid == peerpod.metadata.uid || other.spec.instance_id.as_deref() != Some(id) {
        return false;
    }
    let key = vm.and_then(|vm| vm.key.as_ref());
    let asked = |one: &PeerPod| key.is_some_and(|key| keys(cluster, &one.spec).own.contains(key));
    let age = |one: &PeerPod| (one.creation_timestamp(), one.uid());
    match (asked(other), asked(peerpod)) {
        (true, false) => true,
        (false, true) => false,
        _ => other.metadata.deletion_timestamp.is_none() || age(other) < age(peerpod),
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use k8s_openapi::jiff::Timestamp;

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
    fn a_sandbox_owns_all_its_attempts_and_no_others() {
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
        let not_needed = std::iter::from_fn(|| -> Option<&PeerPodSpec> { panic!("not needed") });
        assert_eq!(meant(&keys, &owned, not_needed), ids(&["first", "fallback"]));
    }

    #[test]
    fn a_shared_key_names_the_only_unclaimed_vm() {
        let spec = PeerPodSpec {
            sandbox_id: Some("s".into()),
            idempotency_key: Some("batch".into()),
            ..PeerPodSpec::default()
        };
        let keys = keys("c", &spec);
        assert_eq!(keys.shared, Some(key("batch")));
        let owned = [vm("a", key("batch")), vm("b", key("batch"))];
        let meant = |owned: &[Owned], others: &[(Option<&str>, Option<&str>)]| {
            let spec = |(id, key): &(Option<&str>, Option<&str>)| PeerPodSpec {
                instance_id: id.map(str::to_owned),
                idempotency_key: key.map(str::to_owned),
                ..PeerPodSpec::default()
            };
            let others: Vec<PeerPodSpec> = others.iter().map(spec).collect();
            meant(&keys, owned, others.iter())
        };
        assert_eq!(meant(&owned, &[(Some("a"), Some("batch"))]), ids(&["b"]));
        assert_eq!(meant(&owned, &[]), Meant::Several(2));
        let contested = [(Some("a"), Some("batch")), (None, Some("batch"))];
        assert_eq!(
            meant(&owned, &contested),
            Meant::Several(1),
            "the other PeerPod counts as well as this one"
        );
        assert_eq!(meant(&[], &[]), ids(&[]));
        assert_eq!(meant(&owned, &[(Some("a"), None), (Some("b"), None)]), ids(&[]));
    }

    fn peerpod(name: &str, created: i64, spec: PeerPodSpec) -> PeerPod {
        let mut peerpod = PeerPod::new(name, PeerPodSpec { instance_id: Some("i-1".into()), ..spec });
        peerpod.metadata.uid = Some(format!("uid-of-{name}"));
        peerpod.metadata.namespace = Some("ns".into());
        let at = |second| Some(Time(Timestamp::from_second(second).unwrap()));
        peerpod.metadata.creation_timestamp = at(created);
        peerpod.metadata.deletion_timestamp = at(1_000_000);
        peerpod
    }

    fn of_sandbox(sandbox: &str) -> PeerPodSpec {
        PeerPodSpec { sandbox_id: Some(sandbox.into()), ..PeerPodSpec::default() }
    }

    #[test]
    fn a_vm_of_another_node_is_left_alone() {
        let at = |node: Option<&str>| Owned {
            node: node.map(str::to_owned),
            ..vm("i-1", IdempotencyKey::derive("c", "s", 0))
        };
        let says = |node: Option<&str>| {
            peerpod("p", 1, PeerPodSpec { node_name: node.map(str::to_owned), ..PeerPodSpec::default() })
        };
        let why = |vm: Option<&Owned>, node| another_ones("c", &says(node), vm, []);
        let told = why(Some(&at(Some("a"))), Some("b")).unwrap();
        assert!(told.contains("node a") && told.contains("node b"), "{told}");
        for (vm, node) in [(Some("a"), Some("a")), (None, Some("b")), (Some("a"), None)] {
            assert_eq!(why(Some(&at(vm)), node), None, "{vm:?} {node:?}");
        }
        assert_eq!(why(None, Some("b")), None, "the provider does not know it, and deletes nothing");
    }

    #[test]
    fn only_one_peerpod_may_delete_a_shared_vm() {
        let made_for_s = vm("i-1", IdempotencyKey::derive("c", "s", 0));
        let whose = |vm: Option<&Owned>, one: &PeerPod, all: &[PeerPod]| another_ones("c", one, vm, all);
        let (first, second) = (peerpod("first", 1, of_sandbox("s")), peerpod("second", 2, of_sandbox("t")));
        let alone = [first.clone()];
        assert_eq!(whose(Some(&made_for_s), &first, &alone), None, "itself is no other");
        let both = [first.clone(), second.clone()];
        assert_eq!(whose(Some(&made_for_s), &first, &both), None);
        let told = whose(Some(&made_for_s), &second, &both).unwrap();
        assert!(told.contains("ns/first"), "{told}");
        // Without a key the older one has the claim, but never against one that is not being deleted.
        assert_eq!(whose(None, &first, &both), None);
        assert!(whose(None, &second, &both).is_some());
        let mut stays = second.clone();
        stays.metadata.deletion_timestamp = None;
        assert!(whose(None, &first, &[first.clone(), stays.clone()]).is_some());
        assert_eq!(whose(Some(&made_for_s), &first, &[first.clone(), stays]), None, "made for its sandbox");
        let mut elsewhere = second;
        elsewhere.spec.instance_id = Some("i-2".into());
        assert_eq!(whose(None, &first, &[elsewhere]), None);
    }

    #[test]
    fn an_invalid_key_finds_nothing() {
        let spec = PeerPodSpec { idempotency_key: Some("no key!".into()), ..PeerPodSpec::default() };
        assert_eq!(keys("c", &spec), Keys::default());
    }
}
