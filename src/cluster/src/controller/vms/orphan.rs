//! Finds orphaned VMs and lost nodes, and how long they have been so by the local clock. Pure; the documentation of
//! `controller::vms` has the rules.

use std::collections::{HashMap, HashSet};
use std::mem::take;
use std::time::{Duration, Instant};

use peerpod_kube::crds::{PeerPod, PeerPodSpec};
use peerpod_provider_api::{IdempotencyKey, InstanceId, Owned, OwnedState};

use super::find::keys;

/// VMs that PeerPods claim.
#[derive(Debug, Default)]
pub(super) struct Claims {
    ids: HashSet<String>,
    keys: HashSet<IdempotencyKey>,
}

impl Claims {
    /// Adds one PeerPod: its VM, or without an instance id all VMs that its keys may have made.
    pub(super) fn add(&mut self, cluster: &str, spec: &PeerPodSpec) {
        if let Some(id) = &spec.instance_id {
            self.ids.insert(id.clone());
            return;
        }
        let keys = keys(cluster, spec);
        self.keys.extend(keys.own);
        self.keys.extend(keys.shared);
    }

    fn has(&self, vm: &Owned) -> bool {
        self.ids.contains(vm.id.as_str()) || vm.key.as_ref().is_some_and(|key| self.keys.contains(key))
    }
}

/// Heartbeat of a node, as it was read.
#[derive(Clone, Debug)]
pub(super) struct Beat {
    /// Changes with each renewal.
    pub(super) version: String,
    /// Duration of one renewal.
    pub(super) lasts: Duration,
}

/// One observation of the cluster. The provider's list was made before the rest was read.
pub(super) struct Look<'a> {
    pub(super) owned: &'a [Owned],
    pub(super) claims: &'a Claims,
    /// Heartbeats by node.
    pub(super) beats: &'a HashMap<String, Beat>,
    /// Names of the Node objects.
    pub(super) nodes: &'a HashSet<String>,
    pub(super) at: Instant,
}

/// Earlier observations.
#[derive(Debug, Default)]
pub(super) struct Seen {
    unclaimed: HashMap<InstanceId, Instant>,
    beats: HashMap<String, (String, Instant)>,
    gone: HashMap<String, Instant>,
}

/// A VM that no PeerPod names; it is an orphan unless a pod of its node may use it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Suspect {
    pub(super) id: InstanceId,
    pub(super) name: Option<String>,
    pub(super) node: String,
    /// Whether the Node object exists: then its pods must be checked.
    pub(super) node_exists: bool,
    pub(super) unclaimed_for: Duration,
}

/// Result of an observation.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Observation {
    pub(super) suspects: Vec<Suspect>,
    /// Nodes of PeerPods that are to be deleted.
    pub(super) gone: HashSet<String>,
    /// Number of VMs that no PeerPod names.
    pub(super) unclaimed: usize,
    /// Of these, the VMs of an unknown node, or of a node that never ran in this cluster.
    pub(super) unattributed: Vec<InstanceId>,
}

impl Seen {
    /// Records an observation. `peerpods_of` are the nodes that PeerPods name.
    pub(super) fn inspect(
        &mut self,
        look: &Look<'_>,
        peerpods_of: &HashSet<String>,
        orphan_grace: Duration,
        node_grace: Duration,
    ) -> Observation {
        self.note_beats(look);
        let mut found = Observation::default();
        self.note_vms(look, orphan_grace, &mut found);
        self.note_nodes(look, peerpods_of, node_grace, &mut found);
        found
    }

    fn note_beats(&mut self, look: &Look<'_>) {
        let before = take(&mut self.beats);
        for (node, beat) in look.beats {
            let same = before.get(node).filter(|(version, _)| *version == beat.version);
            let changed = same.map_or(look.at, |(_, changed)| *changed);
            self.beats.insert(node.clone(), (beat.version.clone(), changed));
        }
    }

    /// Whether the node's heartbeat was not renewed within `grace` and its own duration; `None`: it has no heartbeat.
    fn silent(&self, look: &Look<'_>, node: &str, grace: Duration) -> Option<bool> {
        let (beat, (_, changed)) = (look.beats.get(node)?, self.beats.get(node)?);
        Some(look.at.duration_since(*changed) >= grace.max(beat.lasts))
    }

    fn note_vms(&mut self, look: &Look<'_>, grace: Duration, found: &mut Observation) {
        let before = take(&mut self.unclaimed);
        for vm in look.owned.iter().filter(|vm| vm.state != OwnedState::Deleting && !look.claims.has(vm)) {
            found.unclaimed += 1;
            let since = before.get(&vm.id).copied().unwrap_or(look.at);
            self.unclaimed.insert(vm.id.clone(), since);
            let unclaimed_for = look.at.duration_since(since);
            let silent = vm.node.as_deref().and_then(|node| Some((node, self.silent(look, node, grace)?)));
            match silent {
                None => found.unattributed.push(vm.id.clone()),
                Some((node, true)) if unclaimed_for >= grace => found.suspects.push(Suspect {
                    id: vm.id.clone(),
                    name: vm.name.clone(),
                    node: node.to_owned(),
                    node_exists: look.nodes.contains(node),
                    unclaimed_for,
                }),
                Some(_) => {}
            }
        }
    }

    fn note_nodes(
        &mut self,
        look: &Look<'_>,
        peerpods_of: &HashSet<String>,
        grace: Duration,
        found: &mut Observation,
    ) {
        let before = take(&mut self.gone);
        for node in peerpods_of.iter().filter(|node| !look.nodes.contains(*node)) {
            // A node that never had a heartbeat is judged by its Node object alone.
            if self.silent(look, node, Duration::ZERO) == Some(false) {
                continue;
            }
            let since = before.get(node).copied().unwrap_or(look.at);
            self.gone.insert(node.clone(), since);
            if look.at.duration_since(since) >= grace {
                found.gone.insert(node.clone());
            }
        }
    }
}

/// Whether a PeerPod is to be deleted with its node.
pub(super) fn goes_with(peerpod: &PeerPod, gone: &HashSet<String>) -> bool {
    peerpod.metadata.deletion_timestamp.is_none()
        && peerpod.spec.node_name.as_ref().is_some_and(|node| gone.contains(node))
}

#[cfg(test)]
mod tests;
