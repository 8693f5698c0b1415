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
use kube::{Api, Client};
use parking_lot::Mutex;
use peerpod_kube::client::within;
use peerpod_kube::crds::PeerpodVolume;
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
        let volumes: Api<PersistentVolume> = Api::all(self.client.clone());
        let cached = self.volumes.lock().get(handle).cloned();
        if let Some(name) = cached {
            let found = within(format!("read PersistentVolume {name}"), volumes.get_opt(&name)).await?;
            let same = found.filter(|volume| handle_of(volume, driver) == Some(handle));
            if same.is_some() {
                return Ok(same);
            }
        }
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
        let claim = self.volume(driver, handle).await?.and_then(|volume| volume.spec?.claim_ref);
        let Some((namespace, claim)) = claim.and_then(|claim| Some((claim.namespace?, claim.name?))) else {
            return Ok(false);
        };
        let Some(node) = self.node_of(driver, node).await? else { return Ok(false) };
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &namespace);
        let here = ListParams::default().fields(&format!("spec.nodeName={node}"));
        let pods = within(format!("list pods of {namespace} on {node}"), pods.list(&here)).await?;
        let users =
            pods.items.iter().filter(|pod| has_claim(pod, &claim)).filter_map(|pod| pod.spec.as_ref());
        let (mut ours, mut others) = (0, 0);
        for pod in users {
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
}
