//! PeerpodVolume: one volume of one pod, between the CSI driver and the VM. The `wrapper…` fields hold CSI messages as
//! JSON, never with secrets.

#![expect(clippy::duplicated_attributes, reason = "each printed column names its type")]
#![expect(unreachable_pub, reason = "the derive of KubeSchema hides a public type in a block")]

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A volume, the pod that has it, and what the CSI driver was asked.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[kube(
    group = "confidentialcontainers.org",
    version = "v1alpha1",
    kind = "PeerpodVolume",
    plural = "peerpodvolumes",
    singular = "peerpodvolume",
    namespaced,
    derive = "PartialEq",
    derive = "Default",
    doc = "A volume of a peer pod, on its way from the CSI driver into the pod's VM.",
    status = "PeerpodVolumeStatus",
    selectable = ".spec.nodeName",
    selectable = ".spec.podUid",
    printcolumn(name = "Volume", type_ = "string", json_path = ".spec.volumeName"),
    printcolumn(name = "Pod", type_ = "string", json_path = ".spec.podName"),
    printcolumn(name = "Node", type_ = "string", json_path = ".spec.nodeName"),
    printcolumn(name = "VM", type_ = "string", json_path = ".spec.vmID"),
    printcolumn(name = "State", type_ = "string", json_path = ".status.state"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("!has(oldSelf.volumeID) || oldSelf.volumeID == '' || has(self.volumeID) && self.volumeID == oldSelf.volumeID")
    .message("volumeID cannot change: the object is named by it"))]
pub struct PeerpodVolumeSpec {
    /// The pod's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub pod_name: Option<String>,
    /// The pod's namespace.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub pod_namespace: Option<String>,
    /// The pod's UID.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub pod_uid: Option<String>,
    /// The node as the CSI driver names it.
    #[serde(rename = "nodeID", skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub node_id: Option<String>,
    /// The Kubernetes node.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub node_name: Option<String>,
    /// The CSI volume handle.
    #[serde(rename = "volumeID", skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub volume_id: Option<String>,
    /// The volume's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub volume_name: Option<String>,
    /// The provider's identifier of the VM.
    #[serde(rename = "vmID", skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub vm_id: Option<String>,
    /// The VM's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub vm_name: Option<String>,
    /// The device, as the attach named it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 4096))]
    pub device_path: Option<String>,
    /// The path of the CSI staging.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 4096))]
    pub staging_target_path: Option<String>,
    /// The path of the CSI publication.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 4096))]
    pub target_path: Option<String>,
    /// ControllerPublishVolume, the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wrapper_controller_publish_volume_req: Option<String>,
    /// ControllerPublishVolume, the answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wrapper_controller_publish_volume_res: Option<String>,
    /// NodeStageVolume, the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wrapper_node_stage_volume_req: Option<String>,
    /// NodePublishVolume, the request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wrapper_node_publish_volume_req: Option<String>,
    /// NodeUnpublishVolume, the request. The replaced definition forgot it, and the API server dropped it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wrapper_node_unpublish_volume_req: Option<String>,
    /// NodeUnstageVolume, the request. The replaced definition forgot it, too.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wrapper_node_unstage_volume_req: Option<String>,
}

/// How far the volume is.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct PeerpodVolumeStatus {
    /// One of the replaced system's words (`controllerPublishVolumeCached`, …); empty: idle.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 63))]
    pub state: Option<String>,
    /// `Attached`, `Mounted`, `Detached`: what is done, or why it is not.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
    /// The generation of the spec that this status speaks of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
}
