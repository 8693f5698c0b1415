//! What the controller's role asks the API server: which node an id is, which pods a volume is attached for, who uses a
//! volume. One call each, with a deadline. May touch: nothing; it reads.

use std::path::Path;

use k8s_openapi::api::{
    core::v1::{PersistentVolume, Pod},
    storage::v1::CSINode,
};
use kube::{Api, Client, api::ListParams};
use peerpod_kube::{
    client::{self, within},
    crds::PeerpodVolume,
};
use peerpod_volume::VolumeId;

use crate::{
    cluster::away,
    grpc::{Code, Status},
    objects,
};

/// The API server.
#[derive(Clone)]
pub(super) struct Lookup {
    client: Client,
}

impl Lookup {
    pub(super) async fn connect(kubeconfig: Option<&Path>) -> anyhow::Result<Lookup> {
        Ok(Lookup { client: client::connect(kubeconfig).await? })
    }

    pub(super) fn client(&self) -> Client {
        self.client.clone()
    }

    /// The Kubernetes node that the driver calls so.
    pub(super) async fn node_of(&self, driver: &str, id: &str) -> Result<Option<String>, Status> {
        let nodes: Api<CSINode> = Api::all(self.client.clone());
        let all = within("list CSINodes", nodes.list(&ListParams::default())).await.map_err(away)?;
        let found = all
            .items
            .into_iter()
            .find(|node| node.spec.drivers.iter().any(|one| one.name == driver && one.node_id == id));
        Ok(found.and_then(|node| node.metadata.name))
    }

    /// The PersistentVolume of this handle.
    pub(super) async fn volume(
        &self,
        driver: &str,
        handle: &str,
    ) -> Result<Option<PersistentVolume>, Status> {
        let volumes: Api<PersistentVolume> = Api::all(self.client.clone());
        let all =
            within("list PersistentVolumes", volumes.list(&ListParams::default())).await.map_err(away)?;
        Ok(all.items.into_iter().find(|volume| {
            let csi = volume.spec.as_ref().and_then(|spec| spec.csi.as_ref());
            csi.is_some_and(|csi| csi.driver == driver && csi.volume_handle == handle)
        }))
    }

    /// Whether there are pods on that node that use the volume, and all of them have one of these RuntimeClasses.
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
        let pods =
            within(format!("list pods of {namespace} on {node}"), pods.list(&here)).await.map_err(away)?;
        let users = pods.items.iter().filter_map(|pod| pod.spec.as_ref()).filter(|pod| {
            let volumes = pod.volumes.as_deref().unwrap_or_default();
            volumes.iter().any(|volume| {
                volume.persistent_volume_claim.as_ref().is_some_and(|used| used.claim_name == claim)
            })
        });
        let (mut ours, mut others) = (0, 0);
        for pod in users {
            let class = pod.runtime_class_name.as_deref().unwrap_or_default();
            if classes.iter().any(|one| one == class) { ours += 1 } else { others += 1 }
        }
        if ours > 0 && others > 0 {
            return Err(Status::new(
                Code::FailedPrecondition,
                format!(
                    "claim {namespace}/{claim} is used on {node} by pods with and without a VM; keep them apart"
                ),
            ));
        }
        Ok(ours > 0)
    }

    /// A pod that has the volume in its VM.
    pub(super) async fn user(&self, volume: &VolumeId) -> Result<Option<String>, Status> {
        let all: Api<PeerpodVolume> = Api::all(self.client.clone());
        let one = ListParams::default().labels(&format!("{}={volume}", objects::VOLUME)).limit(1);
        let found = within("list PeerpodVolumes", all.list(&one)).await.map_err(away)?;
        Ok(found.items.into_iter().next().map(|object| {
            let spec = object.spec;
            format!("{}/{}", spec.pod_namespace.unwrap_or_default(), spec.pod_name.unwrap_or_default())
        }))
    }
}
