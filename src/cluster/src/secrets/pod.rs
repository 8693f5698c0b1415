//! Whether a pod is a node's to ask for, and what it pulls its images with.

use std::collections::BTreeSet;

use futures_util::{StreamExt, stream};
use k8s_openapi::api::core::v1::{LocalObjectReference, Pod, Secret, ServiceAccount};
use kube::{Api, Client};
use peerpod_kube::{
    client::{self, within},
    docker_config::{Bad, Form, Merged},
};
use zeroize::Zeroizing;

use super::{answer::Wanted, caller::Node};

/// Of one pod; a kubelet would take them all, and nobody has so many.
const MOST: usize = 64;
/// Secrets that are read at the same time, for one request.
const AT_ONCE: usize = 8;

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refused {
    /// Not a pod that this node may ask for. For it, `why` only says as much as it may know.
    #[error("{said}")]
    Pod {
        /// For the node.
        said: String,
        /// For our own log.
        why: &'static str,
    },
    /// The pod of that name is another one by now.
    #[error("pod {pod} has another uid than {uid}: it was replaced; ask for the pod that is there now")]
    Replaced {
        /// namespace/name.
        pod: String,
        /// As asked for.
        uid: String,
    },
    /// The secrets cannot be carried.
    #[error(transparent)]
    Secrets(#[from] Bad),
    /// The API server.
    #[error(transparent)]
    Api(#[from] client::Error),
}

/// What a pod pulls its images with.
pub(super) struct Found {
    /// Which pod of that name.
    pub(super) uid: String,
    /// A `.dockerconfigjson`; empty: none.
    pub(super) config: Zeroizing<String>,
    /// How many secrets are in it.
    pub(super) secrets: usize,
    /// What is missing or malformed, in words.
    pub(super) notes: Vec<String>,
}

/// The pod, if it is a peer pod of this node.
pub(super) async fn of_node(
    client: &Client,
    node: &Node,
    wanted: &Wanted,
    classes: &[String],
) -> Result<Pod, Refused> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), &wanted.namespace);
    let name = format!("{}/{}", wanted.namespace, wanted.name);
    let pod = within(format!("read pod {name}"), pods.get_opt(&wanted.name)).await?;
    // Whether there is such a pod elsewhere is nothing that a node needs to know.
    let elsewhere = |why| Refused::Pod { said: format!("there is no pod {name} on node {node}"), why };
    let Some(pod) = pod else { return Err(elsewhere("there is no such pod")) };
    let Some(spec) = &pod.spec else { return Err(elsewhere("it has no spec")) };
    if spec.node_name.as_deref() != Some(&node.name) {
        return Err(elsewhere("it is another node's, or none's"));
    }
    if !wanted.uid.is_empty() && pod.metadata.uid.as_deref() != Some(&wanted.uid) {
        return Err(Refused::Replaced { pod: name, uid: wanted.uid.clone() });
    }
    if spec.runtime_class_name.as_ref().is_none_or(|class| !classes.contains(class)) {
        let said = format!(
            "pod {name} is no peer pod: its RuntimeClass is {:?}, and secrets.runtime-classes has {}",
            spec.runtime_class_name.as_deref().unwrap_or(""),
            classes.join(", ")
        );
        return Err(Refused::Pod { said, why: "no peer pod" });
    }
    Ok(pod)
}

/// Its own secrets, then its service account's; of one registry the first entry counts. What is missing or malformed is
/// left out and noted, as a kubelet would go on without it.
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
    // In the order of the names, however they come.
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

/// Each once, in Kubernetes' order.
fn names(pod: Vec<LocalObjectReference>, account: Vec<LocalObjectReference>) -> Vec<String> {
    let mut seen = BTreeSet::new();
    let all = pod.into_iter().chain(account).map(|reference| reference.name);
    all.filter(|name| !name.is_empty() && seen.insert(name.clone())).collect()
}

fn add(merged: &mut Merged, secret: Secret) -> Result<(), String> {
    let kind = secret.type_.unwrap_or_default();
    // Of another type nothing is looked at, whatever keys it has: as a kubelet does it.
    let form =
        Form::of_type(&kind).ok_or_else(|| format!("its type is {kind:?}, and pull secrets have another"))?;
    let mut data = secret.data.unwrap_or_default();
    let bytes = data.remove(form.key()).ok_or_else(|| format!("it has no key {}", form.key()))?;
    let bytes = Zeroizing::new(bytes.0);
    merged.add(form, &bytes).map_err(|why| why.to_string())
}
