//! Derives the objects of a PeerPodConfig from the chart's manifests. Pure.

use std::collections::BTreeMap;

use kube::ResourceExt;
use peerpod_kube::crds::PeerPodConfig;
use serde_json::{Value, json};

/// Label of every object made for a PeerPodConfig; its value is the PeerPodConfig's name.
pub(super) const LABEL: &str = "peerpod.io/config";
/// Annotation of a pod with the version of the settings it started with. A change causes a rolling update.
const SETTINGS: &str = "peerpod.io/settings";
/// Label of the selected nodes where the PeerPodConfig has no selector.
const WORKERS: &str = "node.kubernetes.io/worker";
/// Longest value of a label, and so of a name that becomes a label, in characters.
const MOST: usize = 63;
/// Limit of a node's sandboxes, `MAX_SANDBOXES` of peerpod-node, which refuses to advertise more.
const MOST_SANDBOXES: u32 = 1000;

/// The chart's manifests from the ConfigMap.
#[derive(Clone, Debug)]
pub(super) struct Manifests {
    node: Value,
    relay: Value,
    runtime_class: Option<Value>,
    /// The webhook's registration, if pods are to pass through the webhook.
    pub(super) registration: Option<Value>,
}

impl Manifests {
    /// Reads a ConfigMap's data. Fails if it is not the chart's ConfigMap.
    pub(super) fn read(data: &BTreeMap<String, String>) -> Result<Manifests, String> {
        let wrong = |key: &str, why: &str| {
            format!("manifest {key}: {why}; install the chart with rollout.mode: config")
        };
        let one = |key: &str, kind: &str| {
            let text = data.get(key).ok_or_else(|| wrong(key, "missing"))?;
            let value: Value = serde_yaml::from_str(text).map_err(|why| wrong(key, &why.to_string()))?;
            if value["kind"] != kind || !value["metadata"]["name"].is_string() {
                return Err(wrong(key, &format!("not a {kind} with a name")));
            }
            Ok(value)
        };
        let set = |key| {
            let set = one(key, "DaemonSet")?;
            let containers = set["spec"]["template"]["spec"]["containers"].as_array();
            if containers.is_none_or(Vec::is_empty) {
                return Err(wrong(key, "it has no container"));
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

    /// Returns the RuntimeClass for the nodes of these PeerPodConfigs. Several PeerPodConfigs have no selector in
    /// common; then the extended resource alone decides where pods can run.
    pub(super) fn runtime_class(&self, configs: &[&PeerPodConfig]) -> Option<Value> {
        let mut class = self.runtime_class.clone()?;
        if let [config] = configs {
            class["scheduling"]["nodeSelector"] = json!(node_selector(config));
        } else if let Some(scheduling) = class["scheduling"].as_object_mut() {
            scheduling.remove("nodeSelector");
        }
        Some(class)
    }
}

/// Returns the labels of the nodes that a PeerPodConfig selects.
pub(super) fn node_selector(config: &PeerPodConfig) -> BTreeMap<String, String> {
    if config.spec.node_selector.is_empty() {
        return BTreeMap::from([(WORKERS.to_owned(), String::new())]);
    }
    config.spec.node_selector.clone()
}

/// Returns the DaemonSets of node and relay, or the reason why the PeerPodConfig is invalid. `instance_type` is the
/// environment variable of the provider's instance type, if it has one. `settings` are the versions of ConfigMap and
/// Secret.
pub(super) fn daemon_sets(
    manifests: &Manifests,
    config: &PeerPodConfig,
    instance_type: Option<&str>,
    settings: &str,
) -> Result<[Value; 2], String> {
    let [mut node, relay] = [of(&manifests.node, config), of(&manifests.relay, config)];
    if [&node, &relay]
        .iter()
        .any(|set| set["metadata"]["name"].as_str().is_some_and(|name| name.len() > MOST))
    {
        return Err(format!(
            "{:?} is too long for the name of a PeerPodConfig: with the DaemonSets' it has at most {MOST} characters",
            config.name_any()
        ));
    }
    let mut more = BTreeMap::new();
    if let Some(limit) = &config.spec.limit {
        if limit.parse::<u32>().is_ok_and(|limit| limit > MOST_SANDBOXES) {
            return Err(format!(
                "spec.limit {limit}: a node runs at most {MOST_SANDBOXES} peer pods; lower it"
            ));
        }
        more.insert("PEERPOD_CLUSTER_CAPACITY".to_owned(), limit.clone());
    }
    if let Some(wanted) = &config.spec.instance_type {
        let variable = instance_type.ok_or(
            "instanceType: this provider has no setting of that kind; describe the VMs in its own settings",
        )?;
        more.insert(variable.to_owned(), wanted.clone());
    }
    let pod = &mut node["spec"]["template"];
    pod["metadata"]["annotations"][SETTINGS] = json!(settings);
    let container = &mut pod["spec"]["containers"][0];
    put_env(container, more);
    container["envFrom"] = json!([
        {"configMapRef": {"name": config.spec.config_map_name, "optional": true}},
        {"secretRef": {"name": config.spec.cloud_secret_name, "optional": true}},
    ]);
    Ok([node, relay])
}

/// Returns a manifest under the PeerPodConfig's name, for its nodes, deleted together with it.
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

/// Sets variables, in place of those with the same names.
fn put_env(container: &mut Value, more: BTreeMap<String, String>) {
    let mut env = container["env"].as_array().cloned().unwrap_or_default();
    env.retain(|one| !one["name"].as_str().is_some_and(|name| more.contains_key(name)));
    env.extend(more.into_iter().map(|(name, value)| json!({"name": name, "value": value})));
    container["env"] = Value::Array(env);
}

/// Whether a ConfigMap holds the settings of the replaced system (cloud-api-adaptor), none of which are read.
pub(super) fn is_foreign(data: &BTreeMap<String, String>) -> bool {
    data.contains_key("CLOUD_PROVIDER") && !data.keys().any(|name| name.starts_with("PEERPOD_"))
}

#[cfg(test)]
mod tests;
