//! Checks that a node may ask for a pod, and collects the pod's pull secrets.

use std::collections::BTreeSet;

use futures_util::{StreamExt, stream};
use k8s_openapi::api::core::v1::{LocalObjectReference, Pod, Secret, ServiceAccount};
use kube::{Api, Client};
use peerpod_kube::client::{self, within};
use peerpod_kube::docker_config::{Bad, Form, Merged};
use zeroize::Zeroizing;

use super::answer::Wanted;

/// Limit of pull secrets per pod. A kubelet has no limit, but no real pod has so many.
const MOST: usize = 64;
/// Concurrent reads of secrets for one request.
const AT_ONCE: usize = 8;

/// Reasons to refuse a request.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refused {
    /// The node may not ask for this pod. `said` contains no more than the node may know.
    #[error("{said}")]
    Pod {
        /// Text for the node.
        said: String,
        /// Text for the service's own log.
        why: &'static str,
    },
    /// Another pod has this name now.
    #[error("pod {pod} has another uid than {uid}: it was replaced; ask for the pod that is there now")]
    Replaced {
        /// namespace/name.
        pod: String,
        /// The uid that was asked for.
        uid: String,
    },
    /// The secrets cannot be merged.
    #[error(transparent)]
    Secrets(#[from] Bad),
    /// The API server failed.
    #[error(transparent)]
    Api(#[from] client::Error),
}

/// Pull secrets of a pod.
pub(super) struct Found {
    /// The pod's uid.
    pub(super) uid: String,
    /// A `.dockerconfigjson`; empty: none.
    pub(super) config: Zeroizing<String>,
    /// Number of secrets in it.
    pub(super) secrets: usize,
    /// Descriptions of missing and malformed secrets.
    pub(super) notes: Vec<String>,
}

/// Returns the pod, if it is a peer pod of this node.
pub(super) async fn of_node(
    client: &Client,
    node: &str,
    wanted: &Wanted,
    classes: &[String],
) -> Result<Pod, Refused> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), &wanted.namespace);
    let name = format!("{}/{}", wanted.namespace, wanted.name);
    let pod = within(format!("read pod {name}"), pods.get_opt(&wanted.name)).await?;
    // A node need not know whether such a pod exists elsewhere.
    let elsewhere = |why| Refused::Pod { said: format!("there is no pod {name} on node {node}"), why };
    let Some(pod) = pod else { return Err(elsewhere("there is no such pod")) };
    let Some(spec) = &pod.spec else { return Err(elsewhere("it has no spec")) };
    if spec.node_name.as_deref() != Some(node) {
        return Err(elsewhere("it is on another node, or on none"));
    }
    if !wanted.uid.is_empty() && pod.metadata.uid.as_deref() != Some(&wanted.uid) {
        return Err(Refused::Replaced { pod: name, uid: wanted.uid.clone() });
    }
    if spec.runtime_class_name.as_ref().is_none_or(|class| !classes.contains(class)) {
        let said = format!(
            "pod {name} is no peer pod: its RuntimeClass is {:?}, and webhook.runtime-classes has {}",
            spec.runtime_class_name.as_deref().unwrap_or(""),
            classes.join(", ")
        );
        return Err(Refused::Pod { said, why: "no peer pod" });
    }
    Ok(pod)
}

/// Merges the pod's own secrets, then its service account's secrets; of one registry the first entry counts. Missing
/// and malformed secrets are left out and noted, as a kubelet would continue without them.
pub(super) async fn secrets(client: &Client, pod: Pod) -> Result<Found, Refused> {
    let namespace = pod.metadata.namespace.unwrap_or_default();
    let spec = pod.spec.unwrap_or_default();
    let mut notes = Vec::new();
    let account =
        spec.service_account_name.filter(|name| !name.is_empty()).unwrap_or_else(|| "default".to_owned());
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), &namespace);
    let what = format!("read service account {namespace}/{account}");
    let found = within(what, accounts.get_opt(&account)).await?;
    if found.is_none() {
        notes.push(format!("there is no service account {namespace}/{account}"));
    }
    let of_account = found.and_then(|found| found.image_pull_secrets).unwrap_or_default();
    let names = names(spec.image_pull_secrets.unwrap_or_default(), of_account);
    if names.len() > MOST {
        notes.push(format!("the pod names {} pull secrets; the first {MOST} count", names.len()));
    }
    let api: Api<Secret> = Api::namespaced(client.clone(), &namespace);
    let read = |name: String| {
        let (api, what) = (api.clone(), format!("read secret {namespace}/{name}"));
        async move { within(what, api.get_opt(&name)).await.map(|secret| (name, secret)) }
    };
    // In the order of the names, not of the answers.
    let mut coming = stream::iter(names.into_iter().take(MOST)).map(read).buffered(AT_ONCE);
    let (mut merged, mut secrets) = (Merged::default(), 0);
    while let Some(read) = coming.next().await {
        let (name, secret) = read?;
        match secret.map_or_else(|| Err("it does not exist".to_owned()), |secret| add(&mut merged, secret)) {
            Ok(()) => secrets += 1,
            Err(why) => notes.push(format!("pull secret {namespace}/{name}: {why}")),
        }
    }
    Ok(Found { uid: pod.metadata.uid.unwrap_or_default(), config: merged.write()?, secrets, notes })
}

/// Returns each name once, in Kubernetes' order.
fn names(pod: Vec<LocalObjectReference>, account: Vec<LocalObjectReference>) -> Vec<String> {
    let mut seen = BTreeSet::new();
    let all = pod.into_iter().chain(account).map(|reference| reference.name);
    all.filter(|name| !name.is_empty() && seen.insert(name.clone())).collect()
}

fn add(merged: &mut Merged, secret: Secret) -> Result<(), String> {
    let kind = secret.type_.unwrap_or_default();
    // As in a kubelet, a secret of another type is ignored, regardless of its keys.
    let form =
        Form::of_type(&kind).ok_or_else(|| format!("its type is {kind:?}, and pull secrets have another"))?;
    let mut data = secret.data.unwrap_or_default();
    let bytes = data.remove(form.key()).ok_or_else(|| format!("it has no key {}", form.key()))?;
    let bytes = Zeroizing::new(bytes.0);
    merged.add(form, &bytes).map_err(|why| why.to_string())
}
