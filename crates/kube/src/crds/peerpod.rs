//! PeerPod: one VM. The object is written as an intent before the VM exists, and deleted after the VM.

#![expect(clippy::duplicated_attributes, reason = "each printed column names its type")]
#![expect(unreachable_pub, reason = "the derive of KubeSchema hides a public type in a block")]

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// The VM of one pod, as the provider is asked for it. Every field is written once.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[kube(
    group = "confidentialcontainers.org",
    version = "v1alpha1",
    kind = "PeerPod",
    plural = "peerpods",
    singular = "peerpod",
    shortname = "pp",
    namespaced,
    derive = "PartialEq",
    derive = "Default",
    doc = "The VM of one pod. It exists from before the VM is made until after the VM is gone.",
    status = "PeerPodStatus",
    selectable = ".spec.nodeName",
    printcolumn(name = "Provider", type_ = "string", json_path = ".spec.cloudProvider"),
    printcolumn(name = "Instance", type_ = "string", json_path = ".spec.instanceID"),
    printcolumn(name = "Node", type_ = "string", json_path = ".spec.nodeName"),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].status"
    ),
    printcolumn(name = "Type", type_ = "string", json_path = ".status.instanceType"),
    printcolumn(name = "Zone", type_ = "string", json_path = ".status.zone"),
    printcolumn(name = "Market", type_ = "string", json_path = ".status.market"),
    printcolumn(name = "Image", type_ = "string", json_path = ".status.image", priority = 1),
    printcolumn(name = "Address", type_ = "string", json_path = ".status.addresses[0]", priority = 1),
    printcolumn(name = "Sandbox", type_ = "string", json_path = ".spec.sandboxID", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.instanceID) || has(self.idempotencyKey)")
        .message("an instanceID or an idempotencyKey must name the VM"),
    validation = Rule::new("!has(oldSelf.cloudProvider) || has(self.cloudProvider) && self.cloudProvider == oldSelf.cloudProvider")
        .message("cloudProvider cannot change: the VM would not be found again"),
    validation = Rule::new("!has(oldSelf.instanceID) || has(self.instanceID) && self.instanceID == oldSelf.instanceID")
        .message("instanceID cannot change: the VM would not be found again"),
    validation = Rule::new("!has(oldSelf.idempotencyKey) || has(self.idempotencyKey) && self.idempotencyKey == oldSelf.idempotencyKey || has(self.instanceID) && !has(oldSelf.instanceID)")
        .message("idempotencyKey cannot change except with the instanceID that the last attempt gave"),
    validation = Rule::new("!has(oldSelf.sandboxID) || has(self.sandboxID) && self.sandboxID == oldSelf.sandboxID")
        .message("sandboxID cannot change"),
    validation = Rule::new("!has(oldSelf.nodeName) || has(self.nodeName) && self.nodeName == oldSelf.nodeName")
        .message("nodeName cannot change: a VM stays with the node that made it")
)]
pub struct PeerPodSpec {
    /// The provider's name, as `cloud-provider` in its settings.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63))]
    pub cloud_provider: Option<String>,
    /// The provider's identifier of the VM; absent until the provider has given one.
    #[serde(rename = "instanceID", skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024))]
    pub instance_id: Option<String>,
    /// The sandbox's identifier on its node.
    #[serde(rename = "sandboxID", skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub sandbox_id: Option<String>,
    /// The Kubernetes node whose daemon makes and keeps the VM.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub node_name: Option<String>,
    /// The key with which the provider is asked for the VM: by it a VM whose identifier was never learnt is found.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub idempotency_key: Option<String>,
}

impl PeerPod {
    /// Returns the name of the object for this sandbox's VM. The same sandbox always gives the same name, so that a
    /// writer that repeats the write after a crash writes the same object. Two sandboxes of one pod (a sandbox made
    /// anew) have two names.
    pub fn name_of(pod: &str, sandbox: &str) -> String {
        let digest = Sha256::digest(sandbox.as_bytes());
        let digest: String = hex::encode(&digest[..5]);
        // Pod names are DNS subdomains of at most 253 bytes. The object's name has the same limit.
        let room = 253 - digest.len() - 1;
        let pod = pod.get(..room).unwrap_or(pod).trim_end_matches(['-', '.']);
        format!("{pod}-{digest}")
    }
}

/// What is known of the VM now.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct PeerPodStatus {
    /// Whether the VM was deleted. The name is the replaced system's, which never wrote it.
    #[serde(rename = "cleand", skip_serializing_if = "Option::is_none")]
    pub cleaned: Option<bool>,
    /// How far the sandbox is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<Phase>,
    /// The VM's type, where the cloud has types.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub instance_type: Option<String>,
    /// The VM's zone, by the cloud's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub zone: Option<String>,
    /// The VM's pricing model: `spot` or `on_demand`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 63))]
    pub market: Option<String>,
    /// The VM's image, by the cloud's name or id.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub image: Option<String>,
    /// The VM's addresses, the one that the node uses first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), inner(length(max = 45)))]
    pub addresses: Vec<String>,
    /// When the sandbox came to each stage, in order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub stages: Vec<Stage>,
    /// `Created`: the provider has made the VM. `Ready`: its agent answers. `Deleted`: the provider says that it is gone,
    /// or why it could not be deleted yet.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"]))]
    pub conditions: Vec<Condition>,
    /// The generation of the spec that this status speaks of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
}

/// How far a sandbox is, as its node's ledger says.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Recorded; the provider has been asked, or will be.
    Created,
    /// The VM exists and has not connected yet.
    Booting,
    /// The VM has connected and receives its plan.
    Joining,
    /// The agent answers.
    Running,
    /// A stop was recorded; the VM is being deleted.
    Leaving,
    /// The VM is gone.
    Gone,
    /// A stop arrived while the provider was still making the VM.
    Unwanted,
}

impl Phase {
    /// Whether the node has recorded a stop of this very sandbox.
    pub fn is_stopped(self) -> bool {
        matches!(self, Phase::Leaving | Phase::Gone | Phase::Unwanted)
    }
}

/// One stage on the way to a running pod.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct Stage {
    /// Its name, as in the node's metrics.
    #[schemars(length(min = 1, max = 63))]
    pub name: String,
    /// When it was reached.
    pub at: Time,
    /// How long it took, in milliseconds.
    #[schemars(range(min = 0))]
    pub took_milliseconds: i64,
}
