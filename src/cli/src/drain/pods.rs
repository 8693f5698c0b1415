//! Finds the peer pods of a node, and decides which of them may be evicted.

use k8s_openapi::api::core::v1::{Pod, PodSpec};
use kube::ResourceExt;
use kube::api::ListParams;

use crate::source::{Cluster, RESOURCE, Source};

/// Annotation of a pod that kubelet makes of a file.
const STATIC: &str = "kubernetes.io/config.mirror";

/// A pod of the node with a VM, or one that wants a VM. One of the two may be gone already.
#[derive(Clone, Debug)]
pub(super) struct Found {
    /// Pod as namespace/name.
    pub(super) name: String,
    /// The provider's id of the VM.
    pub(super) vm: Option<String>,
    pod: Option<Pod>,
    /// A word that no other pod of the node has: the pod's UID, also after the pod is gone.
    pub(super) key: String,
}

impl Found {
    /// The pod, unless it ends by itself.
    pub(super) fn evictable(&self) -> Option<&Pod> {
        self.pod.as_ref().filter(|pod| pod.metadata.deletion_timestamp.is_none() && !has_ended(pod))
    }
}

/// Finds the peer pods of a node.
///
/// # Errors
/// The API server refuses or is away.
pub(super) async fn find(cluster: &Cluster, node: &str) -> anyhow::Result<Vec<Found>> {
    let of_node = ListParams::default().fields(&format!("spec.nodeName={node}"));
    let mut pods: Vec<Pod> = cluster.list("Pods", of_node).await?;
    let mut found = Vec::new();
    for vm in Source::Cluster(cluster.clone()).list().await? {
        if vm.node != node {
            continue;
        }
        let uid = vm.fact("uid");
        let at = pods.iter().position(|pod| pod.metadata.uid.as_deref() == Some(&*uid));
        let pod = at.map(|at| pods.swap_remove(at));
        let key = if uid.is_empty() { vm.peerpod.unwrap_or_default() } else { uid };
        found.push(Found { name: vm.pod, vm: vm.vm, pod, key });
    }
    // Those that have no PeerPod yet.
    pods.retain(|pod| pod.spec.as_ref().is_some_and(wants_vm) && !has_ended(pod));
    found.extend(pods.into_iter().map(|pod| {
        let name = format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any());
        let key = pod.uid().unwrap_or_default();
        Found { name, vm: None, pod: Some(pod), key }
    }));
    found.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(found)
}

/// Whether the pod requests a VM, as the webhook writes it.
fn wants_vm(spec: &PodSpec) -> bool {
    let resources = spec.containers.iter().filter_map(|container| container.resources.as_ref());
    resources.flat_map(|resources| resources.limits.iter().flatten()).any(|(name, _)| name == RESOURCE)
}

fn has_ended(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// Returns the reason why a pod must not be evicted, as `kubectl drain` has it.
pub(super) fn kept(pod: &Pod, force: bool, delete_emptydir_data: bool) -> Option<String> {
    let controller = pod.owner_references().iter().find(|owner| owner.controller == Some(true));
    if pod.annotations().contains_key(STATIC) {
        return Some(
            "kubelet makes it of a file on the node and would start it again; move the file".to_owned(),
        );
    }
    match controller {
        Some(owner) if owner.kind == "DaemonSet" => {
            let name = &owner.name;
            return Some(format!(
                "DaemonSet {name} would start it here again; exclude the node from the DaemonSet first"
            ));
        }
        None if !force => return Some("no controller would start it again; --force evicts it".to_owned()),
        _ => {}
    }
    let mut volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    let has_data = volumes.any(|volume| volume.empty_dir.is_some());
    (has_data && !delete_emptydir_data)
        .then(|| "its emptyDir volumes would lose their content; --delete-emptydir-data evicts it".to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, from_value, json};

    use super::*;

    fn pod(metadata: Value, volumes: Value) -> Pod {
        let limits = json!({RESOURCE: "1"});
        from_value(json!({"metadata": metadata, "spec": {"volumes": volumes,
            "containers": [{"name": "c", "resources": {"limits": limits}}]}}))
        .unwrap()
    }

    fn owned(kind: &str) -> Value {
        json!({"ownerReferences": [{"apiVersion": "apps/v1", "kind": kind, "name": "x", "uid": "u", "controller": true}]})
    }

    #[test]
    fn only_pods_that_start_again_elsewhere_are_evicted_by_default() {
        let why = |pod: &Pod, force, data| kept(pod, force, data).unwrap_or_default();
        let bare = pod(json!({"name": "a"}), json!([]));
        assert!(why(&bare, false, true).contains("--force") && kept(&bare, true, false).is_none());
        let of_set = pod(owned("ReplicaSet"), json!([]));
        assert_eq!(kept(&of_set, false, false), None);
        let of_daemon_set = pod(owned("DaemonSet"), json!([]));
        assert!(why(&of_daemon_set, true, true).contains("DaemonSet x"));
        let with_data = pod(owned("ReplicaSet"), json!([{"name": "v", "emptyDir": {}}]));
        assert!(why(&with_data, true, false).contains("--delete-emptydir-data"));
        assert_eq!(kept(&with_data, false, true), None);
        let of_file = pod(json!({"name": "a", "annotations": {STATIC: "x"}}), json!([]));
        assert!(why(&of_file, true, true).contains("move the file"));
    }

    #[test]
    fn a_pod_that_has_ended_or_is_ending_is_not_evicted() {
        let found =
            |pod: Pod| Found { name: "a/b".to_owned(), vm: None, pod: Some(pod), key: "u".to_owned() };
        let mut one = pod(owned("ReplicaSet"), json!([]));
        assert!(found(one.clone()).evictable().is_some() && wants_vm(one.spec.as_ref().unwrap()));
        one.status = Some(from_value(json!({"phase": "Succeeded"})).unwrap());
        assert!(found(one.clone()).evictable().is_none());
        one.status = None;
        one.metadata.deletion_timestamp = Some(from_value(json!("2026-01-01T00:00:00Z")).unwrap());
        assert!(found(one).evictable().is_none());
    }
}
