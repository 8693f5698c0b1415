//! Asks the API server for the node role: pods, PersistentVolumes, and the PeerpodVolume of each published volume.
//! Every call has a deadline, and no unneeded call is made. May touch: those objects.

use std::collections::HashMap;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{PersistentVolume, Pod as KubePod, PodSpec};
use k8s_openapi::api::storage::v1::CSIDriver;
use kube::{Api, Client, Resource};
use parking_lot::Mutex;
use peerpod_kube::client::{self, Error, within};
use peerpod_kube::crds::PeerpodVolumeSpec;
use peerpod_volume::descriptor::FsGroupPolicy;
use peerpod_volume::records::Pod;
use peerpod_volume::{Identity, SecretRef};
use serde_json::json;

use crate::capability::{Capability, MULTI_NODE_MULTI_WRITER, MULTI_NODE_READER_ONLY};
use crate::config::CsiConfig;
use crate::drivers;
use crate::grpc::{Code, Status};
use crate::node::publications::Publication;
use crate::objects::{self, ATTACHED, RELEASED};

pub(crate) struct NodeCluster {
    client: Client,
    node: String,
    /// RuntimeClasses by pod UID; a pod's class never changes.
    classes: Mutex<HashMap<String, Option<String>>>,
}

/// Limit of cached classes. A node never has more pods at once; at the limit the cache is cleared.
const MAX_CLASSES: usize = 4096;

#[derive(Clone, Debug, Default)]
pub(crate) struct PodFacts {
    pub(crate) runtime_class: Option<String>,
    pub(crate) fs_group: Option<u32>,
    /// When the volume's files are given to the group.
    pub(crate) policy: FsGroupPolicy,
    /// `fsGroupPolicy` of the CSIDriver: when kubelet would apply the group.
    pub(crate) driver_policy: Option<String>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Claim {
    pub(crate) zone: Option<String>,
    pub(crate) secret: Option<SecretRef>,
}

impl PodFacts {
    /// Returns the group that kubelet would give the files of a volume mounted in this way.
    pub(crate) fn group(&self, wanted: &Capability) -> Option<u32> {
        let once = ![MULTI_NODE_READER_ONLY, MULTI_NODE_MULTI_WRITER].contains(&wanted.access_mode);
        let applies = match self.driver_policy.as_deref() {
            Some("File") => true,
            Some("None") => false,
            // `ReadWriteOnceWithFSType`, which is also the default.
            _ => once && wanted.fs_type.is_some(),
        };
        self.fs_group.filter(|_| applies)
    }
}

impl NodeCluster {
    /// Makes the client. Sends no request.
    pub(crate) async fn connect(config: &CsiConfig) -> anyhow::Result<NodeCluster> {
        if config.node_name.is_empty() {
            anyhow::bail!(
                "cluster.node-name is missing; set PEERPOD_CLUSTER_NODE_NAME from the downward API (spec.nodeName)"
            );
        }
        let client = client::connect(config.cluster.as_ref().and_then(Option::as_deref)).await?;
        Ok(NodeCluster { client, node: config.node_name.clone(), classes: Mutex::default() })
    }

    pub(crate) fn leases(&self, namespace: &str) -> Api<Lease> {
        Api::namespaced(self.client.clone(), namespace)
    }

    /// Returns a pod's RuntimeClass, if it exists and has one. A pod that was seen before needs no API server.
    pub(crate) async fn class(&self, pod: &Pod) -> Result<Option<String>, Status> {
        if let Some(known) = self.classes.lock().get(&pod.uid) {
            return Ok(known.clone());
        }
        let spec = self.spec(pod).await.map_err(|why| {
            let because = "a volume is not published before it is known whether its pod has a VM";
            why.code.status(format!("{}; {because}", why.message))
        })?;
        Ok(spec.and_then(|spec| spec.runtime_class_name))
    }

    async fn spec(&self, pod: &Pod) -> Result<Option<PodSpec>, Status> {
        let pods: Api<KubePod> = Api::namespaced(self.client.clone(), &pod.namespace);
        let what = format!("read pod {}/{}", pod.namespace, pod.name);
        let found = within(what, pods.get_opt(&pod.name)).await?;
        let spec =
            found.filter(|found| found.metadata.uid.as_deref() == Some(&pod.uid)).and_then(|pod| pod.spec);
        if let Some(spec) = &spec {
            let mut classes = self.classes.lock();
            if classes.len() >= MAX_CLASSES {
                classes.clear();
            }
            classes.insert(pod.uid.clone(), spec.runtime_class_name.clone());
        }
        Ok(spec)
    }

    /// Returns a pod's properties; `None` when there is no such pod.
    pub(crate) async fn pod(&self, pod: &Pod, driver: &str) -> Result<Option<PodFacts>, Status> {
        let Some(spec) = self.spec(pod).await? else { return Ok(None) };
        let security = spec.security_context.unwrap_or_default();
        let fs_group = security.fs_group.and_then(|group| u32::try_from(group).ok());
        let policy = match security.fs_group_change_policy.as_deref() {
            Some("OnRootMismatch") => FsGroupPolicy::OnRootMismatch,
            _ => FsGroupPolicy::Always,
        };
        let mut driver_policy = None;
        if fs_group.is_some() {
            let drivers: Api<CSIDriver> = Api::all(self.client.clone());
            let found = within(format!("read CSIDriver {driver}"), drivers.get_opt(driver)).await?;
            driver_policy = found.and_then(|driver| driver.spec.fs_group_policy);
        }
        Ok(Some(PodFacts { runtime_class: spec.runtime_class_name, fs_group, policy, driver_policy }))
    }

    /// Returns the properties of the PersistentVolume of this name, if it has this handle.
    pub(crate) async fn claim(&self, name: &str, handle: &str) -> Result<Option<Claim>, Status> {
        let volumes: Api<PersistentVolume> = Api::all(self.client.clone());
        let found = within(format!("read PersistentVolume {name}"), volumes.get_opt(name)).await?;
        let Some(spec) = found.and_then(|volume| volume.spec) else { return Ok(None) };
        let Some(csi) = spec.csi.filter(|csi| csi.volume_handle == handle) else { return Ok(None) };
        let secret = csi.node_stage_secret_ref.or(csi.node_publish_secret_ref);
        let secret =
            secret.and_then(|secret| Some(SecretRef { namespace: secret.namespace?, name: secret.name? }));
        let terms =
            spec.node_affinity.and_then(|affinity| affinity.required).map(|all| all.node_selector_terms);
        let zone =
            terms.unwrap_or_default().into_iter().flat_map(|term| term.match_expressions.unwrap_or_default());
        let zone = zone
            .filter(|rule| rule.key.ends_with("/zone") && rule.operator == "In")
            .find_map(|rule| rule.values.unwrap_or_default().into_iter().next());
        Ok(Some(Claim { zone, secret }))
    }

    /// Creates the object of a published volume, or finds it. UNAVAILABLE also means that an earlier object of the same
    /// volume and pod is being deleted.
    pub(crate) async fn put_object(&self, publication: &Publication) -> Result<(), Status> {
        if !publication.of_kubernetes() {
            return Ok(());
        }
        let pod = &publication.pod;
        let api = objects::api(&self.client, &pod.namespace);
        let spec = PeerpodVolumeSpec {
            pod_name: Some(pod.name.clone()),
            pod_namespace: Some(pod.namespace.clone()),
            pod_uid: Some(pod.uid.clone()),
            node_name: Some(self.node.clone()),
            volume_id: Some(publication.handle.clone()),
            volume_name: Some(publication.name.clone()),
            target_path: Some(publication.target.display().to_string()),
            wrapper_node_publish_volume_req: Some(publication.request().to_string()),
            ..PeerpodVolumeSpec::default()
        };
        let wanted = objects::new(publication, spec);
        let found = objects::make(&api, &wanted).await?;
        let ours =
            found.spec.pod_uid.as_deref() == Some(&pod.uid) && found.spec.volume_id == wanted.spec.volume_id;
        if !ours {
            let name = wanted.metadata.name.unwrap_or_default();
            let text = format!("PeerpodVolume {}/{name} belongs to another pod or volume", pod.namespace);
            return Err(Code::AlreadyExists.status(text));
        }
        if found.meta().deletion_timestamp.is_some() || objects::holds(&found, RELEASED) {
            let name = &publication.name;
            let text = format!("volume {name} is still being detached from the pod's earlier VM; this waits");
            return Err(Code::Unavailable.status(text));
        }
        Ok(())
    }

    /// Writes the pod's VM to the object, and returns the identity of the disk that the driver attached to it; `None`:
    /// not yet. Fails if the driver's answer does not identify the disk.
    pub(crate) async fn attached(
        &self,
        publication: &Publication,
        vm: &str,
    ) -> Result<Option<Identity>, Status> {
        let api = objects::api(&self.client, &publication.pod.namespace);
        let name = objects::name(&publication.volume, &publication.pod.uid);
        let found = objects::read(&api, &name).await?;
        let Some(object) = found else { return Ok(None) };
        if object.spec.vm_id.as_deref() != Some(vm) {
            objects::set_spec(&api, &object, json!({"vmID": vm})).await?;
            return Ok(None);
        }
        let answered = objects::holds(&object, ATTACHED)
            .then_some(object.spec.wrapper_controller_publish_volume_res.as_deref());
        let Some(Some(answer)) = answered else { return Ok(None) };
        let answer: Published = serde_json::from_str(answer).map_err(|why| {
            Code::Internal.status(format!("PeerpodVolume {name}: the driver's answer: {why}"))
        })?;
        if answer.vm != vm {
            return Ok(None);
        }
        let identity = drivers::identity(&publication.driver, &publication.handle, &answer.publish_context);
        let unknown = || {
            let keys: Vec<&str> = answer.publish_context.keys().map(String::as_str).collect();
            Code::FailedPrecondition.status(format!(
                "{} attached volume {} and named no identity of its disk (keys {keys:?})",
                publication.driver, publication.name
            ))
        };
        identity.map(Some).ok_or_else(unknown)
    }

    /// Marks the object as released, and deletes it. Returns true once it is gone and its disk detached.
    pub(crate) async fn finish_object(&self, publication: &Publication) -> Result<bool, Status> {
        if !publication.of_kubernetes() {
            return Ok(true);
        }
        let api = objects::api(&self.client, &publication.pod.namespace);
        let name = objects::name(&publication.volume, &publication.pod.uid);
        let found = objects::read(&api, &name).await?;
        let Some(mut object) =
            found.filter(|found| found.spec.pod_uid.as_deref() == Some(&publication.pod.uid))
        else {
            return Ok(true);
        };
        if !objects::holds(&object, RELEASED) {
            let why = ("VMGone", "the volume is unpublished and the pod's VM is gone or never was");
            let state = "nodeUnpublishVolumeApplied";
            object = objects::set_condition(&api, &object, state, RELEASED, true, why).await?;
        }
        objects::delete(&api, &object).await?;
        if publication.driver_attached {
            // The controller role detaches the disk and removes the finalizer.
            return Ok(false);
        }
        let object = objects::read(&api, &name).await?;
        if let Some(object) = object {
            objects::let_go(&api, &object).await?;
        }
        Ok(true)
    }
}

/// The driver's answer, as the object holds it.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Published {
    /// VM that the disk is attached to.
    pub(crate) vm: String,
    pub(crate) publish_context: HashMap<String, String>,
}

/// UNAVAILABLE for a refusal or silence of the API server, so that the caller repeats the call.
impl From<Error> for Status {
    fn from(why: Error) -> Status {
        Code::Unavailable.status(why.to_string())
    }
}
