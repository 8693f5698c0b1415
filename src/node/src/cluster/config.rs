//! Reads the keys of sections `cluster` and `kubernetes` that the node uses.

use std::path::{Path, PathBuf};
use std::time::Duration;

use peerpod_base::config::Reader;

/// File in which Kubernetes gives a pod its namespace.
const NAMESPACE_FILE: &str = "/var/run/secrets/kubernetes.io/serviceaccount/namespace";
/// Length limit of a node's name: the Lease is `peerpod-node-<node>`, and a name has at most 253 characters.
const MOST_NAME: usize = 253 - peerpod_kube::heartbeat::PREFIX.len();

/// Time for which the node must be not ready before it withdraws its capacity: longer than a restart of the relay or of
/// libvirtd.
const WITHDRAW_AFTER: Duration = Duration::from_secs(15);

/// Settings of the client of the cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ClusterConfig {
    pub node_name: String,
    pub pod_uid: Option<String>,
    /// `cluster.namespace`, or the namespace of the service account.
    pub namespace: String,
    pub resource: String,
    /// `cluster.capacity`; `None`: nothing is advertised.
    pub capacity: Option<u32>,
    pub withdraw_after: Duration,
    pub kubeconfig: Option<PathBuf>,
}

impl ClusterConfig {
    /// Reads the keys. `None`: this node is in no cluster.
    pub(crate) fn read(reader: &mut Reader) -> Option<ClusterConfig> {
        let kubeconfig: Option<PathBuf> = reader.optional(
            "kubernetes.kubeconfig",
            "kubeconfig file for the API server; when not set, the pod's service account",
        );
        let node_name: Option<String> = reader.optional(
            "cluster.node-name",
            "name of the Kubernetes node that this daemon runs on; when not set, the daemon reports nothing \
             to Kubernetes",
        );
        let pod_uid = reader.optional(
            "cluster.pod-uid",
            "UID of the pod that this daemon runs in; it distinguishes the old from the new daemon in a \
             rolling update",
        );
        let namespace: Option<String> = reader.optional(
            "cluster.namespace",
            "namespace of the daemon's Leases; that of the service account when not set",
        );
        let resource: String = reader.get(
            "cluster.extended-resource",
            "kata.peerpods.io/vm",
            "extended resource by which Kubernetes counts peer pods",
        );
        let capacity: i32 = reader.get(
            "cluster.capacity",
            "10",
            "peer pods that Kubernetes may place on this node; negative: nothing is advertised",
        );
        let withdraw_after = reader.constant("cluster.withdraw-after", "WITHDRAW_AFTER", WITHDRAW_AFTER);
        let node_name = node_name?;
        if node_name.is_empty() || node_name.len() > MOST_NAME {
            let why = format!("not a node's name; it has 1 to {MOST_NAME} characters");
            reader.mistake("cluster.node-name", why);
        }
        if !is_resource(&resource) {
            let why = "not an extended resource; it is written like kata.peerpods.io/vm";
            reader.mistake("cluster.extended-resource", why);
        }
        let namespace = namespace.or_else(|| own_namespace(Path::new(NAMESPACE_FILE))).unwrap_or_else(|| {
            let why = "not set, and the daemon runs in no pod with a service account; set a namespace";
            reader.mistake("cluster.namespace", why);
            String::new()
        });
        let capacity = u32::try_from(capacity).ok();
        Some(ClusterConfig { node_name, pod_uid, namespace, resource, capacity, withdraw_after, kubeconfig })
    }
}

fn own_namespace(file: &Path) -> Option<String> {
    let text = std::fs::read_to_string(file).ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

/// Whether the text is `domain/name`, which separates it from the resources that a kubelet counts itself.
fn is_resource(text: &str) -> bool {
    let fits = |part: &str| {
        let edge = |b: Option<&u8>| b.is_some_and(u8::is_ascii_alphanumeric);
        let bytes = part.as_bytes();
        edge(bytes.first())
            && edge(bytes.last())
            && bytes.iter().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(b))
    };
    text.len() <= 253 && text.split_once('/').is_some_and(|(domain, name)| fits(domain) && fits(name))
}
