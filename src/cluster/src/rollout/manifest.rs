//! What a PeerPodConfig makes of the chart's manifests. Pure.

use std::collections::BTreeMap;

use kube::ResourceExt;
use peerpod_kube::crds::PeerPodConfig;
use serde_json::{Value, json};

/// On all that is made for a PeerPodConfig: its name.
pub const LABEL: &str = "peerpod.io/config";
/// The annotation of a pod that says which settings it began with: a change is a rolling update.
const SETTINGS: &str = "peerpod.io/settings";
/// The nodes that are meant where none are named.
const WORKERS: &str = "node.kubernetes.io/worker";
/// The longest value of a label, and so of a name that becomes one.
const MOST: usize = 63;

/// The chart's manifests, as they are in the ConfigMap.
#[derive(Clone, Debug)]
pub struct Manifests {
    node: Value,
    relay: Value,
    runtime_class: Option<Value>,
    registration: Option<Value>,
}

/// Why there is nothing to apply.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Error {
    /// The ConfigMap is not the chart's.
    #[error("manifest {key}: {why}; install the chart with rollout.mode: config")]
    Manifest {
        /// In the ConfigMap's data.
        key: &'static str,
        /// What is wrong with it.
        why: String,
    },
    /// It cannot be in a label.
    #[error(
        "{0:?} is too long for the name of a PeerPodConfig: with the DaemonSets' it has at most 63 characters"
    )]
    Name(String),
    /// The provider has no such setting.
    #[error(
        "instanceType: this provider has no setting of that kind; say what VMs are like in its own settings"
    )]
    InstanceType,
}

impl Manifests {
    /// Reads a ConfigMap's data.
    ///
    /// # Errors
    /// [`Error::Manifest`].
    pub fn read(data: &BTreeMap<String, String>) -> Result<Manifests, Error> {
        let one = |key: &'static str, kind: &str| {
            let wrong = |why: String| Error::Manifest { key, why };
            let text = data.get(key).ok_or_else(|| wrong("missing".to_owned()))?;
            let value: Value = serde_yaml::from_str(text).map_err(|why| wrong(why.to_string()))?;
            if value["kind"] != kind || !value["metadata"]["name"].is_string() {
                return Err(wrong(format!("not a {kind} with a name")));
            }
            Ok(value)
        };
        let set = |key| {
            let set = one(key, "DaemonSet")?;
            let containers = set["spec"]["template"]["spec"]["containers"].as_array();
            if containers.is_none_or(Vec::is_empty) {
                return Err(Error::Manifest { key, why: "it has no container".to_owned() });
            }
            Ok(set)
        };
        let maybe = |key, kind| data.contains_key(key).then(|| one(key, kind)).transpose();
        Ok(Manifests {
            node: set("node.yaml")?,
            relay: set("relay.yaml")?,
            runtime_class: maybe("runtimeclass.yaml", "RuntimeClass")?,
            registration: maybe("webhook.yaml", "MutatingWebhookConfiguration")?,
        })
    }

    /// The names of the DaemonSets of this PeerPodConfig: node and relay.
    pub fn names(&self, config: &str) -> [String; 2] {
        [&self.node, &self.relay]
            .map(|set| format!("{}-{config}", set["metadata"]["name"].as_str().unwrap_or("")))
    }

    /// The webhook's registration, if pods are to go by it.
    pub fn registration(&self) -> Option<&Value> {
        self.registration.as_ref()
    }

    /// The RuntimeClass, for the nodes of these PeerPodConfigs. Several have no selector in common; then the extended
    /// resource alone says where there is room.
    pub fn runtime_class(&self, configs: &[&PeerPodConfig]) -> Option<Value> {
        let mut class = self.runtime_class.clone()?;
        if let [config] = configs {
            class["scheduling"]["nodeSelector"] = json!(node_selector(config));
        } else if let Some(scheduling) = class["scheduling"].as_object_mut() {
            scheduling.remove("nodeSelector");
        }
        Some(class)
    }
}

/// What else the DaemonSets depend on.
#[derive(Clone, Debug, Default)]
pub struct Around {
    /// The variable of the provider's instance type, if it has one.
    pub instance_type: Option<String>,
    /// The versions of ConfigMap and Secret.
    pub settings: String,
}

/// The nodes a PeerPodConfig means.
pub fn node_selector(config: &PeerPodConfig) -> BTreeMap<String, String> {
    if config.spec.node_selector.is_empty() {
        return BTreeMap::from([(WORKERS.to_owned(), String::new())]);
    }
    config.spec.node_selector.clone()
}

/// The DaemonSets of node and relay.
///
/// # Errors
/// See [`Error`].
pub fn daemon_sets(
    manifests: &Manifests,
    config: &PeerPodConfig,
    around: &Around,
) -> Result<[Value; 2], Error> {
    let name = config.name_any();
    if manifests.names(&name).iter().any(|name| name.len() > MOST) {
        return Err(Error::Name(name));
    }
    let mut node = of(&manifests.node, config);
    let mut more = BTreeMap::new();
    if let Some(limit) = &config.spec.limit {
        more.insert("PEERPOD_CLUSTER_CAPACITY".to_owned(), limit.clone());
        // A node refuses to promise more than it would run.
        if limit.parse::<u32>().is_ok_and(|limit| limit > 1000) {
            more.insert("PEERPOD_NODE_MAX_SANDBOXES".to_owned(), limit.clone());
        }
    }
    if let Some(wanted) = &config.spec.instance_type {
        let variable = around.instance_type.clone().ok_or(Error::InstanceType)?;
        more.insert(variable, wanted.clone());
    }
    let pod = &mut node["spec"]["template"];
    pod["metadata"]["annotations"][SETTINGS] = json!(around.settings);
    let container = &mut pod["spec"]["containers"][0];
    put_env(container, more);
    container["envFrom"] = json!([
        {"configMapRef": {"name": config.spec.config_map_name, "optional": true}},
        {"secretRef": {"name": config.spec.cloud_secret_name, "optional": true}},
    ]);
    Ok([node, of(&manifests.relay, config)])
}

/// A manifest under the PeerPodConfig's name, for its nodes, to go when it goes.
fn of(manifest: &Value, config: &PeerPodConfig) -> Value {
    let (mut set, name) = (manifest.clone(), config.name_any());
    set["metadata"]["name"] = json!(format!("{}-{name}", set["metadata"]["name"].as_str().unwrap_or("")));
    set["metadata"]["namespace"] = json!(config.namespace());
    set["metadata"]["labels"][LABEL] = json!(name);
    set["metadata"]["ownerReferences"] = json!([{
        "apiVersion": "confidentialcontainers.org/v1alpha1", "kind": "PeerPodConfig", "name": name,
        "uid": config.uid().unwrap_or_default(), "controller": true, "blockOwnerDeletion": true,
    }]);
    set["spec"]["selector"]["matchLabels"][LABEL] = json!(name);
    set["spec"]["template"]["metadata"]["labels"][LABEL] = json!(name);
    set["spec"]["template"]["spec"]["nodeSelector"] = json!(node_selector(config));
    set
}

/// Puts variables in, in place of those of the same name.
fn put_env(container: &mut Value, more: BTreeMap<String, String>) {
    let mut env = container["env"].as_array().cloned().unwrap_or_default();
    env.retain(|one| !one["name"].as_str().is_some_and(|name| more.contains_key(name)));
    env.extend(more.into_iter().map(|(name, value)| json!({"name": name, "value": value})));
    container["env"] = Value::Array(env);
}

/// Whether a ConfigMap's data are the replaced system's, none of which we read.
pub fn is_foreign(data: &BTreeMap<String, String>) -> bool {
    data.contains_key("CLOUD_PROVIDER") && !data.keys().any(|name| name.starts_with("PEERPOD_"))
}

#[cfg(test)]
mod tests;
