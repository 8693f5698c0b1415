//! Checks that a node may ask for a pod, and collects the pod's pull secrets.

use std::collections::BTreeSet;

use futures_util::{StreamExt, stream};
use hyper::StatusCode;
use k8s_openapi::api::core::v1::{LocalObjectReference, Pod, Secret, ServiceAccount};
use kube::{Api, Client};
use peerpod_kube::client::within;
use peerpod_kube::docker_config::{Form, Merged};
use serde::Serialize;
use zeroize::Zeroizing;

use super::answer::PullSecretRequest;
use super::metrics::SecretsOutcome;
use super::refusal::{No, no};

/// Limit of pull secrets per pod. A kubelet has no limit, but no real pod has so many.
const MOST: usize = 64;
/// Concurrent reads of secrets for one request.
const AT_ONCE: usize = 8;
/// Annotation of mirror pods. A node makes them itself, without an account.
const MIRROR: &str = "kubernetes.io/config.mirror";

/// Pull secrets of a pod, in the form of an answer.
#[derive(Serialize)]
pub(super) struct PullSecretAnswer {
    pod_uid: String,
    /// Empty: the pod has none.
    dockerconfigjson: Zeroizing<String>,
    /// Number of secrets in it.
    #[serde(skip)]
    pub(super) secrets: usize,
    /// Descriptions of missing and malformed secrets.
    pub(super) notes: Vec<String>,
}

/// Returns the pod, if it is a peer pod of this node.
pub(super) async fn of_node(
    client: &Client,
    node: &str,
    wanted: &PullSecretRequest,
    classes: &[String],
) -> Result<Pod, No> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), &wanted.namespace);
    let name = format!("{}/{}", wanted.namespace, wanted.name);
    let pod = within(format!("read pod {name}"), pods.get_opt(&wanted.name)).await?;
    // A node need not know whether such a pod exists elsewhere.
    let forbidden =
        |said, why| No { why: Some(why), ..no(StatusCode::FORBIDDEN, SecretsOutcome::Refused, said) };
    let elsewhere = |why| forbidden(format!("there is no pod {name} on node {node}"), why);
    let Some(pod) = pod else { return Err(elsewhere("there is no such pod")) };
    let Some(spec) = &pod.spec else { return Err(elsewhere("it has no spec")) };
    if spec.node_name.as_deref() != Some(node) {
        return Err(elsewhere("it is on another node, or on none"));
    }
    if !wanted.uid.is_empty() && pod.metadata.uid.as_deref() != Some(&wanted.uid) {
        let uid = &wanted.uid;
        let said = format!(
            "pod {name} has another uid than {uid}: it was replaced; ask for the pod that is there now"
        );
        return Err(no(StatusCode::CONFLICT, SecretsOutcome::Refused, said));
    }
    if spec.runtime_class_name.as_ref().is_none_or(|class| !classes.contains(class)) {
        let said = format!(
            "pod {name} is no peer pod: its RuntimeClass is {:?}, and webhook.runtime-classes has {}",
            spec.runtime_class_name.as_deref().unwrap_or(""),
            classes.join(", ")
        );
        return Err(forbidden(said, "no peer pod"));
    }
    if pod.metadata.annotations.as_ref().is_some_and(|annotations| annotations.contains_key(MIRROR)) {
        let said = format!(
            "pod {name} is a mirror pod, which the node made itself; create it through the API server instead"
        );
        return Err(forbidden(said, "a mirror pod"));
    }
    Ok(pod)
}

/// Merges the pod's own secrets, then its service account's secrets; of one registry the first entry counts. Missing
/// and malformed secrets are left out and noted, as a kubelet would continue without them.
pub(super) async fn secrets(client: &Client, pod: Pod) -> Result<PullSecretAnswer, No> {
    let namespace = pod.metadata.namespace.unwrap_or_default();
    let spec = pod.spec.unwrap_or_default();
    let mut notes = Vec::new();
    let mut of_account = Vec::new();
    // The API server gives every pod an account, except those that a node makes itself.
    if let Some(account) = spec.service_account_name.filter(|name| !name.is_empty()) {
        let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), &namespace);
        let what = format!("read service account {namespace}/{account}");
        match within(what, accounts.get_opt(&account)).await? {
            Some(found) => of_account = found.image_pull_secrets.unwrap_or_default(),
            None => notes.push(format!("there is no service account {namespace}/{account}")),
        }
    }
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
    let pod_uid = pod.metadata.uid.unwrap_or_default();
    Ok(PullSecretAnswer { pod_uid, dockerconfigjson: merged.write()?, secrets, notes })
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
