//! Which VMs nobody wants, and which nodes are gone: what was so for how long, by our own clock. Pure; the rules stand in
//! the room's page.

use std::{
    collections::{HashMap, HashSet},
    time::{Duration, Instant},
};

use peerpod_kube::crds::{PeerPod, PeerPodSpec};
use peerpod_provider_api::{IdempotencyKey, InstanceId, Owned, OwnedState};

use super::find::keys;

/// What PeerPods say is theirs.
#[derive(Debug, Default)]
pub(super) struct Claims {
    ids: HashSet<String>,
    keys: HashSet<IdempotencyKey>,
}

impl Claims {
    /// One PeerPod's: its VM; while it does not know which that is, whatever its keys may have made.
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

/// A node's heartbeat, as it was read.
#[derive(Clone, Debug)]
pub(super) struct Beat {
    /// Changes with each beat.
    pub(super) version: String,
    /// How long one beat lasts.
    pub(super) lasts: Duration,
}

/// One look at the cluster; the provider's list was made before the rest was read.
pub(super) struct Look<'a> {
    pub(super) owned: &'a [Owned],
    pub(super) claims: &'a Claims,
    /// By node.
    pub(super) beats: &'a HashMap<String, Beat>,
    /// The Node objects.
    pub(super) nodes: &'a HashSet<String>,
    pub(super) at: Instant,
}

/// What was seen by looks before.
#[derive(Debug, Default)]
pub(super) struct Seen {
    unclaimed: HashMap<InstanceId, Instant>,
    beats: HashMap<String, (String, Instant)>,
    gone: HashMap<String, Instant>,
}

/// A VM that nobody wants, unless its node's pods do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Suspect {
    pub(super) id: InstanceId,
    pub(super) name: Option<String>,
    pub(super) node: String,
    /// Whether the Node object is there: then its pods must be asked for.
    pub(super) node_exists: bool,
    pub(super) unclaimed_for: Duration,
}

/// What a look found.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) suspects: Vec<Suspect>,
    /// Nodes whose PeerPods are to go.
    pub(super) gone: HashSet<String>,
    /// VMs that no PeerPod names.
    pub(super) unclaimed: usize,
    /// Those of them whose node never had a daemon here, or is not known.
    pub(super) unattributed: Vec<InstanceId>,
}

impl Seen {
    /// Takes note of a look. `peerpods_of`: the nodes that PeerPods name.
    pub(super) fn look(
        &mut self,
        look: &Look<'_>,
        peerpods_of: &HashSet<String>,
        orphan_grace: Duration,
        node_grace: Duration,
    ) -> Found {
        self.note_beats(look);
        let mut found = Found::default();
        self.note_vms(look, orphan_grace, &mut found);
        self.note_nodes(look, peerpods_of, node_grace, &mut found);
        found
    }

    fn note_beats(&mut self, look: &Look<'_>) {
        self.beats.retain(|node, _| look.beats.contains_key(node));
        for (node, beat) in look.beats {
            let known = self.beats.entry(node.clone()).or_insert_with(|| (beat.version.clone(), look.at));
            if known.0 != beat.version {
                *known = (beat.version.clone(), look.at);
            }
        }
    }

    /// Whether there is a heartbeat that was not renewed for this time, nor for its own.
    fn silent(&self, look: &Look<'_>, node: &str, grace: Duration) -> Option<bool> {
        let (beat, (_, changed)) = (look.beats.get(node)?, self.beats.get(node)?);
        Some(look.at.duration_since(*changed) >= grace.max(beat.lasts))
    }

    fn note_vms(&mut self, look: &Look<'_>, grace: Duration, found: &mut Found) {
        let unclaimed: Vec<&Owned> =
            look.owned.iter().filter(|vm| vm.state != OwnedState::Deleting && !look.claims.has(vm)).collect();
        let ids: HashSet<&InstanceId> = unclaimed.iter().map(|vm| &vm.id).collect();
        self.unclaimed.retain(|id, _| ids.contains(id));
        found.unclaimed = unclaimed.len();
        for vm in unclaimed {
            let since = *self.unclaimed.entry(vm.id.clone()).or_insert(look.at);
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
        found: &mut Found,
    ) {
        let gone = |seen: &Seen, node: &String| {
            // Without a heartbeat, ever, the Node object alone tells.
            !look.nodes.contains(node) && seen.silent(look, node, Duration::ZERO).unwrap_or(true)
        };
        let now_gone: HashSet<&String> = peerpods_of.iter().filter(|node| gone(self, node)).collect();
        self.gone.retain(|node, _| now_gone.contains(node));
        for node in now_gone {
            let since = *self.gone.entry(node.clone()).or_insert(look.at);
            if look.at.duration_since(since) >= grace {
                found.gone.insert(node.clone());
            }
        }
    }
}

/// Whether a PeerPod is to go with its node.
pub(super) fn goes_with(peerpod: &PeerPod, gone: &HashSet<String>) -> bool {
    peerpod.metadata.deletion_timestamp.is_none()
        && peerpod.spec.node_name.as_ref().is_some_and(|node| gone.contains(node))
}

#[cfg(test)]
mod tests;
