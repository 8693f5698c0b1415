//! Asks the API server for the controller role. Each call has a deadline. The API server cannot look up an object by a
//! driver's id: all objects are listed once and their names cached. Later calls read that one object and check its id.
//!
//! An attach fails when the pods cannot be determined, even for a volume of an ordinary pod. If it were attached to the
//! node, a peer pod's disk would be missing in its VM. The attacher gets its work from the same API server and repeats
//! the call. May touch: nothing; it reads.

use std::collections::HashMap;

use k8s_openapi::api::core::v1::{PersistentVolume, Pod};
use k8s_openapi::api::storage::v1::CSINode;
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt};
use parking_lot::Mutex;
use peerpod_kube::client::within;
use peerpod_kube::crds::{PeerPod, PeerpodVolume};
use peerpod_volume::VolumeId;

use crate::grpc::{Code, Status};
use crate::objects;

pub(super) struct Lookup {
    client: Client,
    /// Names of nodes by the driver's id, as of the last full list.
    nodes: Mutex<HashMap<String, String>>,
    /// Names of PersistentVolumes by the driver's handle, as of the last full list.
    volumes: Mutex<HashMap<String, String>>,
}

impl Lookup {
    pub(super) fn new(client: Client) -> Lookup {
        Lookup { client, nodes: Mutex::default(), volumes: Mutex::default() }
    }

    pub(super) async fn node_of(&self, driver: &str, id: &str) -> Result<Option<String>, Status> {
        let nodes: Api<CSINode> = Api::all(self.client.clone());
        let cached = self.nodes.lock().get(id).cloned();
        if let Some(name) = cached {
            let one = ListParams::default().fields(&format!("metadata.name={name}"));
            let found = within(format!("read CSINode {name}"), nodes.list(&one)).await?;
            if found.items.iter().any(|node| node_id(node, driver) == Some(id)) {
                return Ok(Some(name));
            }
        }
        let all = within("list CSINodes", nodes.list(&ListParams::default())).await?;
        let named = |node: CSINode| Some((node_id(&node, driver)?.to_owned(), node.metadata.name?));
        let names: HashMap<_, _> = all.items.into_iter().filter_map(named).collect();
        let found = names.get(id).cloned();
        *self.nodes.lock() = names;
        Ok(found)
    }

    pub(super) async fn volume(
        &self,
        driver: &str,
        handle: &str,
    ) -> Result<Option<PersistentVolume>, Status> {
        let cached = self.volumes.lock().get(handle).cloned();
        if let Some(name) = cached {
            let same = self.named(&name, driver, handle).await?;
            if same.is_some() {
                return Ok(same);
            }
        }
        let volumes: Api<PersistentVolume> = Api::all(self.client.clone());
        let all = within("list PersistentVolumes", volumes.list(&ListParams::default())).await?;
        let named = |volume: &PersistentVolume| {
            Some((handle_of(volume, driver)?.to_owned(), volume.metadata.name.clone()?))
        };
        *self.volumes.lock() = all.items.iter().filter_map(named).collect();
        Ok(all.items.into_iter().find(|volume| handle_of(volume, driver) == Some(handle)))
    }

    /// Whether pods on that node use the volume, and all of them have one of these RuntimeClasses.
    pub(super) async fn all_of_class(
        &self,
        driver: &str,
        handle: &str,
        node: &str,
        classes: &[String],
    ) -> Result<bool, Status> {
        let claim = self.volume(driver, handle).await?.and_then(|volume| claim_of(&volume));
        let Some((namespace, claim)) = claim else { return Ok(false) };
        let Some(node) = self.node_of(driver, node).await? else { return Ok(false) };
        let users = self.users(&namespace, &claim, &node).await?;
        let (mut ours, mut others) = (0, 0);
        for pod in users.iter().filter_map(|pod| pod.spec.as_ref()) {
            let class = pod.runtime_class_name.as_deref().unwrap_or_default();
            if classes.iter().any(|one| one == class) { ours += 1 } else { others += 1 }
        }
        if ours > 0 && others > 0 {
            return Err(Code::FailedPrecondition.status(format!(
                "claim {namespace}/{claim} is used on {node} by pods with and without a VM; keep them apart"
            )));
        }
        Ok(ours > 0)
    }

    /// Returns the PersistentVolume of this name, if it is this volume of the driver.
    pub(super) async fn named(
        &self,
        name: &str,
        driver: &str,
        handle: &str,
    ) -> Result<Option<PersistentVolume>, Status> {
        let volumes: Api<PersistentVolume> = Api::all(self.client.clone());
        let found = within(format!("read PersistentVolume {name}"), volumes.get_opt(name)).await?;
        Ok(found.filter(|volume| handle_of(volume, driver) == Some(handle)))
    }

    /// Returns the pods on a node that use a claim.
    pub(super) async fn users(&self, namespace: &str, claim: &str, node: &str) -> Result<Vec<Pod>, Status> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        let here = ListParams::default().fields(&format!("spec.nodeName={node}"));
        let mut pods = within(format!("list pods of {namespace} on {node}"), pods.list(&here)).await?.items;
        pods.retain(|pod| has_claim(pod, claim));
        Ok(pods)
    }

    /// Returns the PeerPods of a pod on a node: one for each of its sandboxes.
    pub(super) async fn peerpods(
        &self,
        namespace: &str,
        node: &str,
        pod: &Pod,
    ) -> Result<Vec<PeerPod>, Status> {
        let all: Api<PeerPod> = Api::namespaced(self.client.clone(), namespace);
        let here = ListParams::default().fields(&format!("spec.nodeName={node}"));
        let what = format!("list PeerPods of {namespace} on {node}");
        let mut found = within(what, all.list(&here)).await?.items;
        found.retain(|peerpod| is_of(peerpod, pod));
        Ok(found)
    }

    /// Returns a pod that has the volume in its VM.
    pub(super) async fn user(&self, volume: &VolumeId) -> Result<Option<String>, Status> {
        let all: Api<PeerpodVolume> = Api::all(self.client.clone());
        let one = ListParams::default().labels(&format!("{}={volume}", objects::VOLUME)).limit(1);
        let found = within("list PeerpodVolumes", all.list(&one)).await?;
        Ok(found.items.into_iter().next().map(|object| {
            let spec = object.spec;
            format!("{}/{}", spec.pod_namespace.unwrap_or_default(), spec.pod_name.unwrap_or_default())
        }))
    }
}

/// Whether one of the pod's volumes is this claim. Kubernetes names the claim of an ephemeral volume
/// `<pod>-<volume>`.
fn has_claim(pod: &Pod, claim: &str) -> bool {
    let name = pod.metadata.name.as_deref().unwrap_or_default();
    let volumes = pod.spec.as_ref().and_then(|spec| spec.volumes.as_deref()).unwrap_or_default();
    volumes.iter().any(|volume| {
        let named = volume.persistent_volume_claim.as_ref().is_some_and(|used| used.claim_name == claim);
        named || volume.ephemeral.is_some() && format!("{name}-{}", volume.name) == claim
    })
}

/// Whether a PeerPod is of this pod. The node writes it without an owner while it does not know the pod's UID.
fn is_of(peerpod: &PeerPod, pod: &Pod) -> bool {
    let mut owners = peerpod.owner_references().iter().filter(|owner| owner.kind == "Pod").peekable();
    let (name, sandbox) = (pod.metadata.name.as_deref(), peerpod.spec.sandbox_id.as_deref());
    if owners.peek().is_some() {
        return owners.any(|owner| Some(&owner.uid) == pod.metadata.uid.as_ref());
    }
    name.zip(sandbox).is_some_and(|(name, sandbox)| peerpod.name_any() == PeerPod::name_of(name, sandbox))
}

/// Returns namespace and name of the claim that a PersistentVolume belongs to.
pub(super) fn claim_of(volume: &PersistentVolume) -> Option<(String, String)> {
    let claim = volume.spec.as_ref()?.claim_ref.clone()?;
    Some((claim.namespace?, claim.name?))
}

fn node_id<'a>(node: &'a CSINode, driver: &str) -> Option<&'a str> {
    node.spec.drivers.iter().find(|one| one.name == driver).map(|one| one.node_id.as_str())
}

/// Returns the handle of a volume, if it belongs to the driver.
fn handle_of<'a>(volume: &'a PersistentVolume, driver: &str) -> Option<&'a str> {
    let csi = volume.spec.as_ref()?.csi.as_ref()?;
    (csi.driver == driver).then_some(csi.volume_handle.as_str())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_claim_belongs_to_pods_that_name_it_and_to_the_pod_that_it_was_made_for() {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": "web"},
            "spec": {"containers": [], "volumes": [
                {"name": "data", "persistentVolumeClaim": {"claimName": "shared"}},
                {"name": "scratch", "ephemeral": {}},
                {"name": "other", "emptyDir": {}},
            ]},
        }))
        .unwrap();
        for claim in ["shared", "web-scratch"] {
            assert!(has_claim(&pod, claim), "{claim}");
        }
        for claim in ["data", "web-data", "scratch", "web-other"] {
            assert!(!has_claim(&pod, claim), "{claim}");
        }
    }

    #[test]
    fn a_peerpod_is_of_its_owner_or_of_the_pod_in_its_name() {
        let pod: Pod = serde_json::from_value(json!({"metadata": {"name": "web", "uid": "u-1"}})).unwrap();
        let peerpod = |name: String, owner: Option<&str>| -> PeerPod {
            let owner =
                owner.map(|uid| json!({"apiVersion": "v1", "kind": "Pod", "name": "web", "uid": uid}));
            let owners: Vec<_> = owner.into_iter().collect();
            let metadata = json!({"name": name, "ownerReferences": owners});
            let spec = json!({"sandboxID": "s-1"});
            serde_json::from_value(
                json!({"apiVersion": "confidentialcontainers.org/v1alpha1", "kind": "PeerPod",
                "metadata": metadata, "spec": spec}),
            )
            .unwrap()
        };
        let named = || PeerPod::name_of("web", "s-1");
        assert!(is_of(&peerpod("any".into(), Some("u-1")), &pod));
        assert!(is_of(&peerpod(named(), None), &pod));
        assert!(!is_of(&peerpod(named(), Some("u-2")), &pod), "of an earlier pod of this name");
        assert!(!is_of(&peerpod(PeerPod::name_of("api", "s-1"), None), &pod));
    }
}
