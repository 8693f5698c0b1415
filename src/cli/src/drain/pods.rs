//! Finds the peer pods of a node, and decides which of them may be evicted.

use std::collections::BTreeMap;

use anyhow::Context as _;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::ResourceExt;
use kube::api::ListParams;
use serde_json::Value;

use crate::source::{Cluster, RESOURCE, Source, Vm, text};

/// The default RuntimeClass of peer pods.
const CLASS: &str = "kata-remote";
/// Key of the configuration in the chart's ConfigMap.
const FILE: &str = "peerpod.yaml";
/// Annotation of a pod that kubelet makes of a file.
const STATIC: &str = "kubernetes.io/config.mirror";

/// A pod of the node with a VM, or one that wants a VM. One of the two may be gone already.
#[derive(Clone, Debug)]
pub(super) struct NodePod {
    /// Pod as namespace/name.
    pub(super) name: String,
    /// The provider's id of the VM, or of several, separated by commas.
    pub(super) vm: Option<String>,
    pod: Option<Pod>,
    /// A word that no other pod of the node has: the pod's UID, also after the pod is gone.
    pub(super) key: String,
}

impl NodePod {
    /// The pod, unless it ends by itself.
    pub(super) fn evictable(&self) -> Option<&Pod> {
        self.pod.as_ref().filter(|pod| pod.metadata.deletion_timestamp.is_none() && !has_ended(pod))
    }
}

/// Marks of peer pods, as the installation is configured.
#[derive(Debug)]
pub(super) struct Peers {
    /// Names of the RuntimeClasses.
    classes: Vec<String>,
    /// Names of the extended resource, which the webhook adds.
    resources: Vec<String>,
}

impl Peers {
    /// Reads the marks from the ConfigMaps of the installations. The defaults are marks, too.
    ///
    /// # Errors
    /// The API server refuses or is away.
    pub(super) async fn read(cluster: &Cluster) -> anyhow::Result<Peers> {
        let homes: Vec<String> = cluster.accounts().await?.into_iter().map(|(home, _)| home).collect();
        let mut peers = Peers { classes: vec![CLASS.to_owned()], resources: vec![RESOURCE.to_owned()] };
        let maps =
            if homes.is_empty() { Vec::new() } else { cluster.ours::<ConfigMap>("ConfigMaps").await? };
        for map in maps {
            let text = map.data.as_ref().and_then(|data| data.get(FILE));
            if let Some(text) = text
                && map.namespace().is_some_and(|home| homes.contains(&home))
            {
                let config = serde_yaml::from_str(text);
                let name = || format!("read ConfigMap {}", map.name_any());
                peers.add(&config.with_context(name)?);
            }
        }
        Ok(peers)
    }

    fn add(&mut self, config: &Value) {
        self.resources.extend(text(config, "/cluster/extended-resource"));
        let classes = config.pointer("/webhook/runtime-classes").and_then(Value::as_array);
        self.classes.extend(classes.into_iter().flatten().filter_map(Value::as_str).map(str::to_owned));
    }

    /// Whether the pod has a VM or gets one.
    fn have(&self, pod: &Pod) -> bool {
        let Some(spec) = &pod.spec else { return false };
        let resources = spec.containers.iter().filter_map(|container| container.resources.as_ref());
        let mut limits = resources.flat_map(|resources| resources.limits.iter().flatten());
        spec.runtime_class_name.as_ref().is_some_and(|class| self.classes.contains(class))
            || limits.any(|(name, _)| self.resources.contains(name))
    }
}

/// Finds the peer pods of a node.
///
/// # Errors
/// The API server refuses or is away.
pub(super) async fn find(cluster: &Cluster, node: &str, peers: &Peers) -> anyhow::Result<Vec<NodePod>> {
    let of_node = ListParams::default().fields(&format!("spec.nodeName={node}"));
    let pods: Vec<Pod> = cluster.list("Pods", of_node).await?;
    let mut vms = Source::Cluster(cluster.clone()).list().await?;
    vms.retain(|vm| vm.node == node);
    Ok(join(pods, vms, peers))
}

/// Joins the pods of a node with its VMs. A pod with several VMs is found once.
fn join(pods: Vec<Pod>, vms: Vec<Vm>, peers: &Peers) -> Vec<NodePod> {
    let mut found: BTreeMap<String, NodePod> = BTreeMap::new();
    for pod in pods.iter().filter(|pod| peers.have(pod) && !has_ended(pod)) {
        let (key, name) = (pod.uid().unwrap_or_default(), name_of(pod));
        found.insert(key.clone(), NodePod { name, vm: None, pod: Some(pod.clone()), key });
    }
    for vm in vms {
        let uid = vm.fact("uid");
        // A PeerPod without an owner has the name of its pod.
        let is_its = |pod: &&Pod| match uid.as_str() {
            "" => name_of(pod) == vm.pod && peers.have(pod),
            uid => pod.metadata.uid.as_deref() == Some(uid),
        };
        let pod = pods.iter().find(is_its);
        let uid = pod.and_then(ResourceExt::uid).unwrap_or(uid);
        let key = if uid.is_empty() { vm.pod.clone() } else { uid };
        let new = || NodePod { name: vm.pod, vm: None, pod: pod.cloned(), key: key.clone() };
        let one = found.entry(key.clone()).or_insert_with(new);
        let all: Vec<String> = one.vm.take().into_iter().chain(vm.vm).collect();
        one.vm = Some(all.join(", ")).filter(|all| !all.is_empty());
    }
    let mut found: Vec<NodePod> = found.into_values().collect();
    found.sort_by(|one, other| one.name.cmp(&other.name));
    found
}

/// Returns the pod as namespace/name.
fn name_of(pod: &Pod) -> String {
    format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any())
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
    use serde_json::{from_value, json};

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
            |pod: Pod| NodePod { name: "a/b".to_owned(), vm: None, pod: Some(pod), key: "u".to_owned() };
        let mut one = pod(owned("ReplicaSet"), json!([]));
        assert!(found(one.clone()).evictable().is_some());
        one.status = Some(from_value(json!({"phase": "Succeeded"})).unwrap());
        assert!(found(one.clone()).evictable().is_none());
        one.status = None;
        one.metadata.deletion_timestamp = Some(from_value(json!("2026-01-01T00:00:00Z")).unwrap());
        assert!(found(one).evictable().is_none());
    }

    #[test]
    fn the_marks_of_peer_pods_are_those_of_the_configuration() {
        let mut peers = Peers { classes: vec![CLASS.to_owned()], resources: vec![RESOURCE.to_owned()] };
        let has = |peers: &Peers, spec: Value| peers.have(&from_value(json!({"spec": spec})).unwrap());
        let limited =
            |name: &str| json!({"containers": [{"name": "c", "resources": {"limits": {name: "1"}}}]});
        let of_class = |name: &str| json!({"containers": [], "runtimeClassName": name});
        assert!(has(&peers, limited(RESOURCE)) && has(&peers, of_class(CLASS)));
        assert!(!has(&peers, limited("a.b/vm")) && !has(&peers, of_class("other")));
        peers.add(
            &json!({"cluster": {"extended-resource": "a.b/vm"}, "webhook": {"runtime-classes": ["other"]}}),
        );
        assert!(has(&peers, limited("a.b/vm")) && has(&peers, of_class("other")));
        assert!(!has(&peers, json!({"containers": []})));
    }

    #[test]
    fn a_pod_with_several_vms_is_found_once_and_one_without_an_owner_by_its_name() {
        let peers = Peers { classes: Vec::new(), resources: vec![RESOURCE.to_owned()] };
        let of =
            |name: &str| pod(json!({"namespace": "n", "name": name, "uid": format!("u-{name}")}), json!([]));
        let vm = |pod: &str, vm: &str, uid: &str| Vm {
            pod: pod.to_owned(),
            vm: Some(vm.to_owned()),
            facts: BTreeMap::from([("uid".to_owned(), uid.to_owned())]),
            ..Vm::default()
        };
        let vms = vec![
            vm("n/a", "vm-1", "u-a"),
            vm("n/a", "vm-2", "u-a"),
            vm("n/b", "vm-3", ""),
            vm("n/gone", "vm-4", ""),
        ];
        let found = join(vec![of("a"), of("b"), of("c")], vms, &peers);
        let shown: Vec<_> = found
            .iter()
            .map(|one| (&*one.name, one.vm.as_deref(), &*one.key, one.evictable().is_some()))
            .collect();
        assert_eq!(
            shown,
            [
                ("n/a", Some("vm-1, vm-2"), "u-a", true),
                ("n/b", Some("vm-3"), "u-b", true),
                ("n/c", None, "u-c", true),
                ("n/gone", Some("vm-4"), "n/gone", false),
            ]
        );
    }
}
