//! This node's pods, by a watch of them alone: what a sandbox is asked about is looked up here, never at the API server.
//! Of each pod only what somebody needs is kept.
//!
//! A shim names its pod, and a name may have been another pod's a moment ago (a StatefulSet's, deleted by force and made
//! again): who asks for a pod that another sandbox has taken, or that is on its way out, may be ahead of the watch. Then,
//! and only then, the API server is asked for that one pod.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use futures_util::StreamExt;
use k8s_openapi::{api::core::v1::Pod, jiff::Timestamp};
use kube::{
    Api,
    api::ListParams,
    runtime::{WatchStreamExt, watcher},
};
use parking_lot::{Mutex, MutexGuard};
use peerpod_kube::client::explain;
use tokio::{
    sync::watch,
    time::{sleep, timeout},
};
use tracing::{debug, info, warn};

use super::calls::Calls;
use crate::spec::SandboxId;

/// Seconds after which the API server ends a watch, which is begun again: so long a dead connection may go unnoticed.
const WATCH: u32 = 60;
/// How long the first list may take.
const LIST: Duration = Duration::from_secs(60);
/// Before the API server is asked again for one pod.
const RETRY: Duration = Duration::from_secs(1);
/// Of each list of a pod: more are not looked at.
const MOST: usize = 256;

/// What is kept of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Tells it from every other pod there ever was.
    pub uid: String,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// When it was made; a second is the finest.
    pub created: Option<Timestamp>,
    /// It is being deleted.
    pub terminating: bool,
    /// Names of its own pull secrets (`spec.imagePullSecrets`).
    pub image_pull_secrets: Vec<String>,
    /// Its service account.
    pub service_account: Option<String>,
    /// Its runtime class.
    pub runtime_class: Option<String>,
    /// Its volumes that are claims.
    pub claims: Vec<Claim>,
}

/// A volume of a pod that is a PersistentVolumeClaim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The volume's name in the pod.
    pub volume: String,
    /// The claim's name, in the pod's namespace.
    pub claim: String,
}

/// Which pod a name means.
#[async_trait]
pub trait Pods: Send + Sync {
    /// The pod that this sandbox is made for. Waits until one is known: bound it by dropping it, nothing is changed.
    async fn find(&self, namespace: &str, name: &str, sandbox: &SandboxId) -> Found;
}

/// The watch's own picture. Clones are the same.
#[derive(Clone)]
pub struct Reflector {
    calls: Calls,
    node: String,
    state: Arc<Mutex<State>>,
    /// Counts changes, for who waits.
    news: watch::Sender<u64>,
}

#[derive(Default)]
struct State {
    pods: HashMap<(String, String), Vec<Found>>,
    /// Whose each pod is, of the sandboxes.
    taken: HashMap<String, SandboxId>,
    /// What the list that is under way has named.
    listed: Option<HashSet<String>>,
}

/// What the picture says of a name.
#[derive(Debug, PartialEq, Eq)]
enum Look {
    Found(Found),
    /// There is one, and whether it is the one that is meant is not sure.
    Doubtful,
    Unknown,
}

impl State {
    fn apply(&mut self, found: Found) {
        if let Some(listed) = &mut self.listed {
            listed.insert(found.uid.clone());
        }
        let pods = self.pods.entry((found.namespace.clone(), found.name.clone())).or_default();
        match pods.iter_mut().find(|pod| pod.uid == found.uid) {
            Some(pod) => *pod = found,
            None => pods.push(found),
        }
    }

    fn remove(&mut self, namespace: &str, name: &str, uid: &str) {
        let key = (namespace.to_owned(), name.to_owned());
        if let Some(pods) = self.pods.get_mut(&key) {
            pods.retain(|pod| pod.uid != uid);
            if pods.is_empty() {
                self.pods.remove(&key);
            }
        }
        self.taken.remove(uid);
    }

    /// A list begins: what it does not name is gone.
    fn list(&mut self) {
        self.listed = Some(HashSet::new());
    }

    fn listed(&mut self) {
        let Some(listed) = self.listed.take() else { return };
        for pods in self.pods.values_mut() {
            pods.retain(|pod| listed.contains(&pod.uid));
        }
        self.pods.retain(|_, pods| !pods.is_empty());
        self.taken.retain(|uid, _| listed.contains(uid));
    }

    /// The newest of this name; the one that was seen last, of those that were made in the same second.
    fn newest(&self, namespace: &str, name: &str, terminating: bool) -> Option<&Found> {
        let pods = self.pods.get(&(namespace.to_owned(), name.to_owned()))?;
        pods.iter().filter(|pod| pod.terminating == terminating).max_by_key(|pod| pod.created)
    }

    fn look(&self, namespace: &str, name: &str, sandbox: &SandboxId) -> Look {
        match self.newest(namespace, name, false) {
            Some(pod) if self.taken.get(&pod.uid).is_none_or(|owner| owner == sandbox) => {
                Look::Found(pod.clone())
            }
            Some(_) => Look::Doubtful,
            None if self.newest(namespace, name, true).is_some() => Look::Doubtful,
            None => Look::Unknown,
        }
    }
}

impl Reflector {
    pub(super) fn new(calls: Calls, node: &str) -> Reflector {
        Reflector { calls, node: node.to_owned(), state: Arc::default(), news: watch::Sender::new(0) }
    }

    /// How many pods are known.
    pub fn count(&self) -> usize {
        self.state().pods.values().map(Vec::len).sum()
    }

    /// What the picture says of this name now: the newest that is not on its way out, or else the newest.
    pub fn newest(&self, namespace: &str, name: &str) -> Option<Found> {
        let state = self.state();
        let live = state.newest(namespace, name, false);
        live.or_else(|| state.newest(namespace, name, true)).cloned()
    }

    /// Notes whose a pod is.
    pub(super) fn take(&self, uid: &str, sandbox: &SandboxId) {
        let mut state = self.state();
        // One that the watch does not know is nobody's question.
        if state.pods.values().flatten().any(|pod| pod.uid == uid) {
            state.taken.insert(uid.to_owned(), sandbox.clone());
        }
    }

    /// Watches for ever.
    pub(super) async fn run(&self) {
        loop {
            self.watch().await;
        }
    }

    async fn watch(&self) {
        let config =
            watcher::Config::default().fields(&format!("spec.nodeName={}", self.node)).timeout(WATCH);
        let pods: Api<Pod> = Api::all(self.calls.client.clone());
        let mut events = watcher(pods, config).default_backoff().boxed();
        let mut said = false;
        loop {
            let listing = self.state().listed.is_some();
            let next = events.next();
            let event = match if listing { timeout(LIST, next).await } else { Ok(next.await) } {
                Ok(Some(event)) => event,
                Ok(None) => return,
                Err(_) => {
                    warn!("the list of this node's pods does not come; asking anew");
                    return;
                }
            };
            match event {
                Ok(event) => {
                    self.heard(event);
                    said = false;
                }
                Err(error) => {
                    if !std::mem::replace(&mut said, true) {
                        warn!(
                            error = explain(&error),
                            "the watch of this node's pods is broken; trying again"
                        );
                    }
                }
            }
        }
    }

    fn heard(&self, event: watcher::Event<Pod>) {
        {
            let mut state = self.state();
            match event {
                watcher::Event::Apply(pod) | watcher::Event::InitApply(pod) => {
                    if let Some(found) = read(&pod) {
                        state.apply(found);
                    }
                }
                watcher::Event::Delete(pod) => {
                    if let Some(found) = read(&pod) {
                        state.remove(&found.namespace, &found.name, &found.uid);
                    }
                }
                watcher::Event::Init => state.list(),
                watcher::Event::InitDone => {
                    state.listed();
                    debug!(pods = state.pods.len(), "this node's pods are known");
                }
            }
        }
        self.news.send_modify(|count| *count += 1);
    }

    /// Asks for the one pod of this name that is on this node now.
    async fn ask(&self, namespace: &str, name: &str) -> Option<Found> {
        let pods: Api<Pod> = Api::namespaced(self.calls.client.clone(), namespace);
        let only = ListParams::default().fields(&format!("metadata.name={name},spec.nodeName={}", self.node));
        let listed =
            self.calls.call("pod", format!("look for Pod {namespace}/{name}"), pods.list(&only)).await;
        match listed {
            Ok(listed) => listed.items.first().and_then(read),
            Err(error) => {
                debug!(%error, "which pod a sandbox is of cannot be asked");
                None
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Never held across an await, and nothing in here leaves it half changed.
        self.state.lock()
    }
}

#[async_trait]
impl Pods for Reflector {
    async fn find(&self, namespace: &str, name: &str, sandbox: &SandboxId) -> Found {
        let mut news = self.news.subscribe();
        loop {
            news.borrow_and_update();
            let look = self.state().look(namespace, name, sandbox);
            match look {
                Look::Found(found) => return found,
                Look::Doubtful => {
                    if let Some(found) = self.ask(namespace, name).await {
                        info!(%sandbox, pod = format!("{namespace}/{name}"), uid = found.uid, "asked which pod is meant");
                        self.state().apply(found.clone());
                        return found;
                    }
                    // It does not exist any more, and the one that is meant not yet; or nobody answered.
                    drop(timeout(RETRY, news.changed()).await);
                }
                Look::Unknown => {
                    if news.changed().await.is_err() {
                        sleep(RETRY).await;
                    }
                }
            }
        }
    }
}

/// What is kept of it; `None`: it has no identity.
fn read(pod: &Pod) -> Option<Found> {
    let (meta, spec) = (&pod.metadata, pod.spec.as_ref());
    let name = meta.name.clone()?;
    let secrets = spec.and_then(|spec| spec.image_pull_secrets.as_deref()).unwrap_or_default();
    let volumes = spec.and_then(|spec| spec.volumes.as_deref()).unwrap_or_default();
    let claims = volumes.iter().filter_map(|volume| {
        let named = volume.persistent_volume_claim.as_ref().map(|claim| claim.claim_name.clone());
        // Kubernetes makes the claim of an ephemeral volume under this name.
        let made = volume.ephemeral.as_ref().map(|_| format!("{name}-{}", volume.name));
        Some(Claim { volume: volume.name.clone(), claim: named.or(made)? })
    });
    Some(Found {
        uid: meta.uid.clone()?,
        namespace: meta.namespace.clone()?,
        created: meta.creation_timestamp.as_ref().map(|time| time.0),
        terminating: meta.deletion_timestamp.is_some(),
        image_pull_secrets: secrets.iter().take(MOST).map(|secret| secret.name.clone()).collect(),
        service_account: spec.and_then(|spec| spec.service_account_name.clone()),
        runtime_class: spec.and_then(|spec| spec.runtime_class_name.clone()),
        claims: claims.take(MOST).collect(),
        name,
    })
}

#[cfg(test)]
mod tests;
