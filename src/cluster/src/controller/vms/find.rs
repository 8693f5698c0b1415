//! Finds the VMs of a PeerPod in the provider's list, and shares one list among concurrent callers.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kube::ResourceExt;
use peerpod_kube::crds::{PeerPod, PeerPodSpec};
use peerpod_provider_api::{Error, IdempotencyKey, Owned, OwnedState, Provider};
use tokio::sync::Mutex;

/// Maximum number of attempts per sandbox, each with its own key; nodes make at most eight.
const ATTEMPTS: u32 = 16;

/// The provider's last list. Only callers that asked before it was begun may reuse it.
#[derive(Default)]
pub(super) struct Listing(Mutex<Option<(Instant, Arc<Vec<Owned>>)>>);

impl Listing {
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

impl Keys {
    fn has(&self, key: &IdempotencyKey) -> bool {
        self.own.contains(key) || self.shared.as_ref() == Some(key)
    }
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

/// VMs of a PeerPod.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Meant {
    /// These VMs, or none.
    Vms(Vec<Owned>),
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
    let with = |wanted: &dyn Fn(&IdempotencyKey) -> bool| -> Vec<Owned> {
        exists.clone().filter(|vm| vm.key.as_ref().is_some_and(wanted)).cloned().collect()
    };
    let mut vms = with(&|key| keys.own.contains(key));
    let Some(shared) = &keys.shared else { return Meant::Vms(vms) };
    let mut candidates = with(&|key| key == shared);
    candidates.retain(|vm| !others.clone().any(|spec| spec.instance_id.as_deref() == Some(vm.id.as_str())));
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

/// Returns the reason why this VM of the provider's list belongs to another owner than the PeerPod, if it does: any
/// writer of PeerPods can write any id, sandbox and key. `others` are PeerPods of the same provider, perhaps with this
/// one among them.
pub(super) fn another_ones<'a>(
    cluster: &str,
    peerpod: &PeerPod,
    vm: &Owned,
    others: impl IntoIterator<Item = &'a PeerPod>,
) -> Option<String> {
    let id = &vm.id;
    if let (Some(at), Some(said)) = (&vm.node, &peerpod.spec.node_name)
        && at != said
    {
        return Some(format!(
            "VM {id} belongs to node {at} and this PeerPod to node {said}: the VM is left alone; if no pod \
             needs it, delete it at the provider"
        ));
    }
    if let Some(rival) = others.into_iter().find(|other| has_better_claim(cluster, vm, other, peerpod)) {
        let name = format!("{}/{}", rival.namespace().unwrap_or_default(), rival.name_any());
        return Some(format!(
            "VM {id} belongs to PeerPod {name}, too: it stays, and is deleted with that PeerPod"
        ));
    }
    let key = vm.key.as_ref().filter(|key| !keys(cluster, &peerpod.spec).has(key))?;
    Some(format!(
        "VM {id} was made with key {key}, which this PeerPod's sandbox never had: the VM is left alone; if no pod \
         needs it, delete it at the provider"
    ))
}

/// The better claim has the PeerPod with the sandbox that asked for the VM; else one that is not being deleted; else
/// the older one.
fn has_better_claim(cluster: &str, vm: &Owned, other: &PeerPod, peerpod: &PeerPod) -> bool {
    let asked = |one: &PeerPod| vm.key.as_ref().is_some_and(|key| keys(cluster, &one.spec).own.contains(key));
    let claims = match &other.spec.instance_id {
        Some(id) => id == vm.id.as_str(),
        // Its node has not recorded the VM yet.
        None => asked(other),
    };
    if other.metadata.uid == peerpod.metadata.uid || !claims {
        return false;
    }
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
    use peerpod_provider_api::InstanceId;

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

    fn ids(meant: Meant) -> Result<Vec<String>, usize> {
        match meant {
            Meant::Vms(vms) => Ok(vms.into_iter().map(|vm| vm.id.to_string()).collect()),
            Meant::Several(count) => Err(count),
        }
    }

    fn some(ids: &[&str]) -> Result<Vec<String>, usize> {
        Ok(ids.iter().map(|id| (*id).to_owned()).collect())
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
        assert_eq!(ids(meant(&keys, &owned, not_needed)), some(&["first", "fallback"]));
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
            ids(meant(&keys, owned, others.iter()))
        };
        assert_eq!(meant(&owned, &[(Some("a"), Some("batch"))]), some(&["b"]));
        assert_eq!(meant(&owned, &[]), Err(2));
        let contested = [(Some("a"), Some("batch")), (None, Some("batch"))];
        assert_eq!(meant(&owned, &contested), Err(1), "the other PeerPod counts as well as this one");
        assert_eq!(meant(&[], &[]), some(&[]));
        assert_eq!(meant(&owned, &[(Some("a"), None), (Some("b"), None)]), some(&[]));
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

    fn without_key(node: Option<&str>) -> Owned {
        Owned { key: None, node: node.map(str::to_owned), ..vm("i-1", key("k")) }
    }

    #[test]
    fn a_vm_of_another_node_is_left_alone() {
        let says = |node: Option<&str>| {
            peerpod("p", 1, PeerPodSpec { node_name: node.map(str::to_owned), ..PeerPodSpec::default() })
        };
        let why = |at, said| another_ones("c", &says(said), &without_key(at), []);
        let told = why(Some("a"), Some("b")).unwrap();
        assert!(told.contains("node a") && told.contains("node b"), "{told}");
        for (at, said) in [(Some("a"), Some("a")), (None, Some("b")), (Some("a"), None)] {
            assert_eq!(why(at, said), None, "{at:?} {said:?}");
        }
    }

    #[test]
    fn only_one_peerpod_may_delete_a_shared_vm() {
        let made_for_s = vm("i-1", IdempotencyKey::derive("c", "s", 0));
        let no_key = without_key(None);
        let whose = |vm: &Owned, one: &PeerPod, all: &[PeerPod]| another_ones("c", one, vm, all);
        let (first, second) = (peerpod("first", 1, of_sandbox("s")), peerpod("second", 2, of_sandbox("t")));
        let alone = [first.clone()];
        assert_eq!(whose(&made_for_s, &first, &alone), None, "itself is no other");
        let both = [first.clone(), second.clone()];
        assert_eq!(whose(&made_for_s, &first, &both), None);
        let told = whose(&made_for_s, &second, &both).unwrap();
        assert!(told.contains("ns/first"), "{told}");
        // Without a key the older one has the claim, but never against one that is not being deleted.
        assert_eq!(whose(&no_key, &first, &both), None);
        assert!(whose(&no_key, &second, &both).is_some());
        let mut stays = second.clone();
        stays.metadata.deletion_timestamp = None;
        assert!(whose(&no_key, &first, &[first.clone(), stays.clone()]).is_some());
        assert_eq!(whose(&made_for_s, &first, &[first.clone(), stays]), None, "made for its sandbox");
        let mut elsewhere = second;
        elsewhere.spec.instance_id = Some("i-2".into());
        assert_eq!(whose(&no_key, &first, &[elsewhere]), None);
    }

    #[test]
    fn a_stranger_ends_no_vm_by_its_id_or_sandbox() {
        let made_for_s = vm("i-1", IdempotencyKey::derive("c", "s", 0));
        let mut victim = peerpod("victim", 1, of_sandbox("s"));
        victim.metadata.deletion_timestamp = None;
        let mut stranger = peerpod("stranger", 0, of_sandbox("s"));
        for id in [Some("i-1".to_owned()), None] {
            stranger.spec.instance_id = id;
            for recorded in [true, false] {
                victim.spec.instance_id = recorded.then(|| "i-1".to_owned());
                let told = another_ones("c", &stranger, &made_for_s, [&victim]).unwrap();
                assert!(told.contains("ns/victim"), "{told}");
            }
        }
        // A VM that its node has not announced yet is named by no PeerPod.
        let guess = peerpod("guess", 0, of_sandbox("t"));
        assert!(another_ones("c", &guess, &made_for_s, []).unwrap().contains("never had"));
        let batch = PeerPodSpec { idempotency_key: Some("batch".into()), ..of_sandbox("t") };
        assert_eq!(another_ones("c", &peerpod("member", 0, batch), &vm("i-1", key("batch")), []), None);
    }

    #[test]
    fn an_invalid_key_finds_nothing() {
        let spec = PeerPodSpec { idempotency_key: Some("no key!".into()), ..PeerPodSpec::default() };
        assert_eq!(keys("c", &spec), Keys::default());
    }
}
