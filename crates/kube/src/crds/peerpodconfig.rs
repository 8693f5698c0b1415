//! PeerPodConfig: selects the nodes that run peer pods, their number per node, and the provider's settings.

#![expect(clippy::duplicated_attributes, reason = "each printed column names its type")]
#![expect(unreachable_pub, reason = "the derive of KubeSchema hides a public type in a block")]

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What the nodes that match are to have.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[kube(
    group = "confidentialcontainers.org",
    version = "v1alpha1",
    kind = "PeerPodConfig",
    plural = "peerpodconfigs",
    singular = "peerpodconfig",
    namespaced,
    derive = "PartialEq",
    derive = "Default",
    doc = "Peer pods on the nodes that match: how many per node, and where the provider's settings are.",
    status = "PeerPodConfigStatus",
    printcolumn(name = "Limit", type_ = "string", json_path = ".spec.limit"),
    printcolumn(name = "Instance type", type_ = "string", json_path = ".spec.instanceType"),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = r#".status.conditions[?(@.type=="Ready")].status"#
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct PeerPodConfigSpec {
    /// The VM's type where a pod asks for none.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub instance_type: Option<String>,
    /// The most peer pods of one node, which the node advertises as an extended resource.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 10))]
    #[x_kube(validation = Rule::new("self.matches('^-?[0-9]+$')")
        .message("limit must be a whole number; a negative one advertises nothing"))]
    pub limit: Option<String>,
    /// The secret with the provider's credentials, in the namespace of this object.
    #[serde(default = "cloud_secret_name")]
    #[schemars(length(min = 1, max = 253))]
    pub cloud_secret_name: String,
    /// The config map with the provider's settings, in the namespace of this object.
    #[serde(default = "config_map_name")]
    #[schemars(length(min = 1, max = 253))]
    pub config_map_name: String,
    /// The labels of the nodes that are to have peer pods; all workers when it is empty.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub node_selector: BTreeMap<String, String>,
}

fn cloud_secret_name() -> String {
    "peer-pods-secret".to_owned()
}

fn config_map_name() -> String {
    "peer-pods-cm".to_owned()
}

/// How far the nodes are.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct PeerPodConfigStatus {
    /// Whether all is set up. The replaced system never wrote it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub setup_completed: Option<bool>,
    /// `Ready`: every node that matches serves peer pods.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
    /// The generation of the spec that this status speaks of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
}
