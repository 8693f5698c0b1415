//! Finds the relays that an upgrade left behind: their pods are of an older revision than their DaemonSet.

use std::collections::BTreeMap;

use k8s_openapi::api::apps::v1::ControllerRevision;
use k8s_openapi::api::core::v1::Pod;
use kube::{Resource, ResourceExt};

use crate::source::Cluster;

/// Label of a DaemonSet's revisions and pods.
const HASH: &str = "controller-revision-hash";

/// Returns for each node with a relay whether the relay is behind. Empty where this account may not list revisions.
pub(super) async fn behind(cluster: &Cluster) -> BTreeMap<String, bool> {
    let revisions = cluster.ours::<ControllerRevision>("ControllerRevisions").await.unwrap_or_default();
    let pods = cluster.ours::<Pod>("Pods").await.unwrap_or_default();
    of(&revisions, &pods)
}

fn of(revisions: &[ControllerRevision], pods: &[Pod]) -> BTreeMap<String, bool> {
    let mut newest: BTreeMap<String, &ControllerRevision> = BTreeMap::new();
    for revision in revisions {
        let Some(owner) = owner(revision) else { continue };
        let best = newest.entry(owner).or_insert(revision);
        if best.revision < revision.revision {
            *best = revision;
        }
    }
    let relays = pods.iter().filter(|pod| {
        let component = pod.labels().get("app.kubernetes.io/component");
        component.is_some_and(|component| component == "relay") && pod.metadata.deletion_timestamp.is_none()
    });
    let mut found = BTreeMap::new();
    for pod in relays {
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
        let wanted = owner(pod).and_then(|owner| newest.get(&owner)?.labels().get(HASH));
        if let (Some(node), Some(wanted)) = (node, wanted) {
            let is_behind = pod.labels().get(HASH) != Some(wanted);
            // Two pods are there while the new relay takes over.
            found.entry(node).and_modify(|behind| *behind |= is_behind).or_insert(is_behind);
        }
    }
    found
}

/// UID of the DaemonSet.
fn owner<K: Resource>(object: &K) -> Option<String> {
    object.owner_references().first().map(|owner| owner.uid.clone())
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    #[test]
    fn a_relay_of_an_older_revision_is_behind() {
        let labels = |hash: &str| json!({HASH: hash, "app.kubernetes.io/component": "relay"});
        let owners = json!([{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "r", "uid": "u"}]);
        let revision = |number: i64, hash: &str| -> ControllerRevision {
            from_value(
                json!({"metadata": {"labels": labels(hash), "ownerReferences": owners}, "revision": number}),
            )
            .unwrap()
        };
        let pod = |node: &str, hash: &str| -> Pod {
            from_value(json!({"metadata": {"labels": labels(hash), "ownerReferences": owners},
                "spec": {"nodeName": node, "containers": []}}))
            .unwrap()
        };
        let found = of(&[revision(2, "new"), revision(1, "old")], &[pod("a", "old"), pod("b", "new")]);
        assert_eq!(found, [("a".to_owned(), true), ("b".to_owned(), false)].into());
        assert!(of(&[], &[pod("a", "old")]).is_empty());
    }
}
