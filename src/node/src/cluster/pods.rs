//! Watches this node's pods, so that lookups for sandboxes need no call to the API server. A pod's name may have
//! belonged to another pod a moment ago. Only if a sandbox asks for a terminating pod, or for one that another sandbox
//! has taken, it may be ahead of the watch, and the API server is asked for that one pod.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::ListParams;
use kube::runtime::{WatchStreamExt, watcher};
use parking_lot::Mutex;
use peerpod_kube::client::explain;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tracing::{debug, info, warn};

use super::calls::Calls;
use crate::spec::SandboxId;

/// Seconds after which the API server ends a watch: the longest time that a dead connection goes unnoticed.
const WATCH: u32 = 60;
const LIST: Duration = Duration::from_secs(60);
/// Pause before the API server is asked again for one pod.
const RETRY: Duration = Duration::from_secs(1);
/// Limit of a pod's list of pull secrets: further entries are ignored.
const MOST: usize = 256;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct KnownPod {
    pub uid: String,
    pub namespace: String,
    pub name: String,
    /// With a resolution of one second.
    pub created: Option<Timestamp>,
    pub terminating: bool,
    /// Names of its own pull secrets (`spec.imagePullSecrets`).
    pub image_pull_secrets: Vec<String>,
}

/// The watch and its state. Clones share it.
#[derive(Clone)]
pub(crate) struct Reflector {
    calls: Calls,
    node: String,
    state: Arc<Mutex<State>>,
    /// Counts changes, for waiting callers.
    news: watch::Sender<u64>,
}

#[derive(Default)]
struct State {
    pods: HashMap<(String, String), Vec<KnownPod>>,
    /// Sandboxes by the UID of the pod that they have taken.
    taken: HashMap<String, SandboxId>,
    /// UIDs that the list in progress has named.
    listed: Option<HashSet<String>>,
}

#[derive(Debug, PartialEq, Eq)]
enum Look {
    Found(KnownPod),
    /// A pod has the name, but it may not be the pod that is meant.
    Doubtful,
    Unknown,
}

impl State {
    fn apply(&mut self, found: KnownPod) {
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

    /// Begins a list; the pods that it does not name are gone.
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

    /// Returns the newest pod of this name; of those made in the same second, the one that was seen last.
    fn newest(&self, namespace: &str, name: &str, terminating: bool) -> Option<&KnownPod> {
        let pods = self.pods.get(&(namespace.to_owned(), name.to_owned()))?;
        pods.iter().filter(|pod| pod.terminating == terminating).max_by_key(|pod| pod.created)
    }

    fn inspect(&self, namespace: &str, name: &str, sandbox: &SandboxId) -> Look {
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

    /// Returns the newest pod of this name that is not terminating, or else the newest one.
    pub(crate) fn newest(&self, namespace: &str, name: &str) -> Option<KnownPod> {
        let state = self.state.lock();
        let live = state.newest(namespace, name, false);
        live.or_else(|| state.newest(namespace, name, true)).cloned()
    }

    pub(super) fn take(&self, uid: &str, sandbox: &SandboxId) {
        let mut state = self.state.lock();
        // A pod that the watch does not know is never looked up.
        if state.pods.values().flatten().any(|pod| pod.uid == uid) {
            state.taken.insert(uid.to_owned(), sandbox.clone());
        }
    }

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
            let listing = self.state.lock().listed.is_some();
            let next = events.next();
            let event = match if listing { timeout(LIST, next).await } else { Ok(next.await) } {
                Ok(Some(event)) => event,
                Ok(None) => return,
                Err(_) => {
                    warn!("the API server does not answer the list of this node's pods; trying again");
                    return;
                }
            };
            match event {
                Ok(event) => {
                    self.on_event(event);
                    said = false;
                }
                Err(error) => {
                    if !std::mem::replace(&mut said, true) {
                        warn!(error = explain(&error), "the watch of this node's pods failed; trying again");
                    }
                }
            }
        }
    }

    fn on_event(&self, event: watcher::Event<Pod>) {
        let mut state = self.state.lock();
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
                debug!(pods = state.pods.len(), "listed this node's pods");
            }
        }
        drop(state);
        self.news.send_modify(|count| *count += 1);
    }

    /// Asks the API server for the one pod of this name that is on this node now.
    async fn ask(&self, namespace: &str, name: &str) -> Option<KnownPod> {
        let pods: Api<Pod> = Api::namespaced(self.calls.client.clone(), namespace);
        let only = ListParams::default().fields(&format!("metadata.name={name},spec.nodeName={}", self.node));
        let listed =
            self.calls.call("pod", format!("look for Pod {namespace}/{name}"), pods.list(&only)).await;
        match listed {
            Ok(listed) => listed.items.first().and_then(read),
            Err(error) => {
                debug!(%error, "cannot look up the pod of a sandbox");
                None
            }
        }
    }

    /// Returns the pod that this sandbox is made for, once it is known. The wait may be dropped.
    pub(super) async fn find(&self, namespace: &str, name: &str, sandbox: &SandboxId) -> KnownPod {
        let mut news = self.news.subscribe();
        loop {
            news.borrow_and_update();
            let inspect = self.state.lock().inspect(namespace, name, sandbox);
            match inspect {
                Look::Found(found) => return found,
                Look::Doubtful => {
                    if let Some(found) = self.ask(namespace, name).await {
                        info!(%sandbox, pod = format!("{namespace}/{name}"), uid = found.uid, "looked up the pod of the sandbox");
                        self.state.lock().apply(found.clone());
                        return found;
                    }
                    // The old pod no longer exists, and the new one does not yet or the API server did not answer.
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

/// Reads the fields that are kept; `None`: the pod has no identity.
fn read(pod: &Pod) -> Option<KnownPod> {
    let meta = &pod.metadata;
    let secrets = pod.spec.as_ref().and_then(|spec| spec.image_pull_secrets.as_deref()).unwrap_or_default();
    Some(KnownPod {
        uid: meta.uid.clone()?,
        namespace: meta.namespace.clone()?,
        name: meta.name.clone()?,
        created: meta.creation_timestamp.as_ref().map(|time| time.0),
        terminating: meta.deletion_timestamp.is_some(),
        image_pull_secrets: secrets.iter().take(MOST).map(|secret| secret.name.clone()).collect(),
    })
}

#[cfg(test)]
mod tests;
