//! Keeps one PeerPod per sandbox in its desired state: made before its VM, changed with new facts, removed when the VM
//! is gone. One task makes a few calls at a time, and only one while the API server is unreachable. Only the last
//! desired state of a sandbox counts, and each is retried until it holds. An object is made only for a live sandbox.
//! Data of other writers (the controller's status, other finalizers) stays.

use std::collections::HashSet;
use std::future::Future;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use kube::Api;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, Preconditions};
use parking_lot::Mutex;
use peerpod_kube::client::Error;
use peerpod_kube::crds::{FINALIZER, PeerPod, PeerPodStatus, Phase};
use peerpod_provider_api::{IdempotencyKey, Owned};
use serde_json::{Value, json};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{debug, warn};

use super::calls::{AWAY, Calls, is_away};
use super::capacity::patch;
use super::pods::Reflector;
use super::queue::{Done, Queue};
use super::show::DesiredPeerPod;
use crate::metrics::Metrics;
use crate::sandbox::phase::MAX_ATTEMPTS;
use crate::spec::PodRef;

/// Field manager name of this program's fields.
const MANAGER: &str = "peerpod-node";
const AT_A_TIME: usize = 8;
/// Time that a record waits for its pod to become known; then it is written without an owner.
const POD: Duration = Duration::from_secs(2);
/// Interval and number of lookups of the owner of such a record.
const OWNER_EVERY: Duration = Duration::from_secs(30);
const OWNER_TRIES: u32 = 20;
/// Desired states that are kept. More are dropped; the pass over all PeerPods of the node finds their objects again.
const MOST: usize = 16 << 10;

type Key = (String, String);

/// A PeerPod as the API server has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Recorded {
    pub namespace: String,
    pub name: String,
    /// Its pod; `None`: it was not known when the PeerPod was written.
    pub pod: Option<PodRef>,
    pub sandbox: String,
    pub instance: Option<String>,
    pub key: Option<String>,
    /// Whether its sandbox was stopped, or it is being deleted and its pod is unknown: the controller leaves the VM of
    /// an unknown pod to a live node.
    pub is_over: bool,
}

impl Recorded {
    fn of(object: PeerPod) -> Option<Recorded> {
        let namespace = object.metadata.namespace?;
        let owners = object.metadata.owner_references.unwrap_or_default();
        let pod = owners.into_iter().find(|owner| owner.kind == "Pod").map(|owner| PodRef {
            namespace: namespace.clone(),
            name: owner.name,
            uid: Some(owner.uid),
        });
        let is_stopped = object.status.and_then(|status| status.phase).is_some_and(Phase::is_stopped);
        Some(Recorded {
            is_over: is_stopped || (pod.is_none() && object.metadata.deletion_timestamp.is_some()),
            pod,
            namespace,
            name: object.metadata.name?,
            sandbox: object.spec.sandbox_id?,
            instance: object.spec.instance_id,
            key: object.spec.idempotency_key,
        })
    }

    /// Whether the VM may belong to this PeerPod. A VM that lost its key may belong to any sandbox. The VMs of a batch
    /// share the batch's key, so that a key of another sandbox counts only until the VM is known.
    pub(crate) fn may_have(&self, vm: &Owned, cluster_id: &str) -> bool {
        let Some(key) = &vm.key else { return true };
        let mut attempts =
            (0..MAX_ATTEMPTS).map(|attempt| IdempotencyKey::derive(cluster_id, &self.sandbox, attempt));
        self.instance.as_deref() == Some(vm.id.as_str())
            || self.instance.is_none() && self.key.as_deref() == Some(key.as_str())
            || attempts.any(|other| other == *key)
    }
}

/// Desired object; `None`: the VM is gone, so the object must go.
type Update = Option<Arc<DesiredPeerPod>>;

/// Progress of an object towards its desired state, as far as this process knows.
#[derive(Clone, Default)]
struct Memory {
    spec: Option<u64>,
    status: Option<u64>,
    /// The pod's UID, if it was found after the desired state was set.
    uid: Option<String>,
    tries: u32,
}

#[derive(Clone)]
pub(super) struct Writer(Arc<Inner>);

struct Inner {
    calls: Calls,
    pods: Reflector,
    metrics: Metrics,
    state: Mutex<State>,
    wake: Notify,
    /// Counts objects that were written, for callers that wait for one.
    written: watch::Sender<u64>,
}

struct State {
    queue: Queue<Key, Update, Memory>,
    /// Objects that a caller waits for; an entry is removed when its object is written.
    announced: HashSet<Key>,
}

impl Writer {
    pub(super) fn new(calls: Calls, pods: Reflector, metrics: Metrics) -> Writer {
        let state = Mutex::new(State { queue: Queue::new(), announced: HashSet::new() });
        let (wake, written) = (Notify::new(), watch::Sender::new(0));
        Writer(Arc::new(Inner { calls, pods, metrics, state, wake, written }))
    }

    /// Sets the state to show from now on. The returned future completes when it is written, and may be dropped.
    pub(super) fn want(&self, shown: DesiredPeerPod) -> impl Future<Output = ()> + Send + use<> {
        let key = (shown.namespace.clone(), shown.name.clone());
        let update = (!shown.is_gone).then(|| Arc::new(shown));
        let wait = Announced { writer: self.clone(), key: key.clone() };
        {
            let mut state = self.0.state.lock();
            state.announced.insert(key.clone());
            self.put(&mut state, key, update);
        }
        async move {
            let mut written = wait.writer.0.written.subscribe();
            loop {
                written.borrow_and_update();
                let is_written = !wait.writer.0.state.lock().announced.contains(&wait.key);
                if is_written || written.changed().await.is_err() {
                    return;
                }
            }
        }
    }

    pub(super) fn remove(&self, recorded: &Recorded) {
        let key = (recorded.namespace.clone(), recorded.name.clone());
        let mut state = self.0.state.lock();
        // An object that already has a desired state is left to it.
        if state.queue.update(&key).is_none() {
            self.put(&mut state, key, None);
        }
    }

    fn put(&self, state: &mut State, key: Key, update: Update) {
        if state.queue.len() >= MOST && state.queue.update(&key).is_none() {
            let object = format!("{}/{}", key.0, key.1);
            warn!(object, "too many PeerPods wait to be written; this one is retried later");
            return;
        }
        state.queue.put(key, update);
        self.0.metrics.cluster.backlog.set(i64::try_from(state.queue.backlog()).unwrap_or(i64::MAX));
        self.0.wake.notify_one();
    }

    pub(super) async fn run(&self) {
        let mut under_way = FuturesUnordered::new();
        let mut backoff = AWAY;
        let mut closed_until: Option<Instant> = None;
        loop {
            let now = Instant::now();
            // While the API server is unreachable, one call at a time probes it.
            let most = if self.0.calls.is_away() { 1 } else { AT_A_TIME };
            while under_way.len() < most && closed_until.is_none_or(|until| until <= now) {
                let Some((key, update, memory)) = self.0.state.lock().queue.next(now) else { break };
                under_way.push(async move {
                    let (memory, result) = self.write(&key, &update, memory).await;
                    (key, memory, result)
                });
            }
            let due = match closed_until.filter(|until| *until > now) {
                Some(until) => Some(until),
                None => self.0.state.lock().queue.due(),
            };
            tokio::select! {
                Some((key, memory, result)) = under_way.next() => {
                    let now = Instant::now();
                    if self.finish(key, memory, result) {
                        // Other calls in progress fail alike, and must not lengthen the pause.
                        if closed_until.is_none_or(|until| until <= now) {
                            closed_until = Some(now + backoff.pause());
                        }
                    } else {
                        closed_until = None;
                        backoff.reset();
                    }
                }
                () = self.0.wake.notified() => {}
                () = sleep_until(due.unwrap_or(now)), if due.is_some() => {}
            }
        }
    }

    /// Ends a write. Returns whether the API server is unreachable.
    fn finish(&self, key: Key, memory: Memory, result: Result<Done, Error>) -> bool {
        let (done, error) = match result {
            Ok(done) => (done, None),
            Err(error) if is_away(&error) => (Done::Postponed, Some(error)),
            Err(error) => (Done::Failed, Some(error)),
        };
        let mut state = self.0.state.lock();
        let there = memory.spec.is_some();
        let failures = state.queue.done(&key, memory, done, Instant::now());
        if there || matches!(done, Done::Over) {
            state.announced.remove(&key);
            self.0.written.send_modify(|count| *count += 1);
        }
        self.0.metrics.cluster.backlog.set(i64::try_from(state.queue.backlog()).unwrap_or(i64::MAX));
        drop(state);
        let object = format!("{}/{}", key.0, key.1);
        match error {
            Some(error) if done == Done::Failed && failures == 1 => {
                warn!(object, %error, "cannot write a PeerPod; trying again");
            }
            Some(error) => debug!(object, %error, "cannot write a PeerPod yet"),
            None => {}
        }
        done == Done::Postponed
    }

    /// Makes the calls that are still missing, and records the progress.
    async fn write(&self, key: &Key, update: &Update, mut memory: Memory) -> (Memory, Result<Done, Error>) {
        let result = match update {
            None => self.erase(key).await.map(|()| Done::Over),
            Some(shown) if shown.is_live => self.keep(shown, &mut memory).await,
            Some(shown) => self.follow(shown, &mut memory).await,
        };
        (memory, result)
    }

    fn api(&self, namespace: &str) -> Api<PeerPod> {
        Api::namespaced(self.0.calls.client.clone(), namespace)
    }

    async fn patch(
        &self,
        shown: &DesiredPeerPod,
        how: &PatchParams,
        patch: Patch<Value>,
    ) -> Result<PeerPod, Error> {
        let (api, what) =
            (self.api(&shown.namespace), format!("write PeerPod {}/{}", shown.namespace, shown.name));
        self.0.calls.call("apply", what, api.patch(&shown.name, how, &patch)).await
    }

    /// Writes the object of a live sandbox; makes it if it is missing.
    async fn keep(&self, shown: &DesiredPeerPod, memory: &mut Memory) -> Result<Done, Error> {
        let uid = self.owner(shown, memory).await;
        let body = object(shown, uid.as_deref());
        let digest = digest(&body.to_string());
        if memory.spec != Some(digest) {
            self.patch(shown, &PatchParams::apply(MANAGER).force(), Patch::Apply(body)).await?;
            memory.spec = Some(digest);
        }
        if !self.status(shown, memory).await? {
            // Another client deleted the object of a live sandbox.
            *memory = Memory { uid: memory.uid.take(), tries: memory.tries, ..Memory::default() };
            return Ok(Done::Look(POD));
        }
        if uid.is_none() && memory.tries < OWNER_TRIES {
            memory.tries += 1;
            return Ok(Done::Look(OWNER_EVERY));
        }
        Ok(Done::Held)
    }

    /// Updates the object of a stopping sandbox, if it exists.
    async fn follow(&self, shown: &DesiredPeerPod, memory: &mut Memory) -> Result<Done, Error> {
        // The VM may have become known after the stop; a controller that has to delete it needs its id.
        if let Some(instance) = &shown.spec.instance_id {
            let digest = digest(&format!("leaving {instance}"));
            if memory.spec != Some(digest) {
                let spec =
                    json!({"spec": {"instanceID": instance, "idempotencyKey": shown.spec.idempotency_key}});
                match self.patch(shown, &PatchParams::apply(MANAGER), Patch::Merge(spec)).await {
                    Ok(_) => memory.spec = Some(digest),
                    Err(error) if error.is_not_found() => return Ok(Done::Held),
                    Err(error) => return Err(error),
                }
            }
        }
        self.status(shown, memory).await?;
        Ok(Done::Held)
    }

    /// Returns the UID of the pod that owns the object.
    async fn owner(&self, shown: &DesiredPeerPod, memory: &mut Memory) -> Option<String> {
        if let Some(uid) = shown.uid.clone().or_else(|| memory.uid.clone()) {
            return Some(uid);
        }
        let found = self.0.pods.find(&shown.namespace, &shown.pod, &shown.sandbox);
        let found = timeout(POD, found).await.ok()?;
        self.0.pods.take(&found.uid, &shown.sandbox);
        memory.uid = Some(found.uid);
        memory.uid.clone()
    }

    /// Writes the status. Returns whether the object exists.
    async fn status(&self, shown: &DesiredPeerPod, memory: &mut Memory) -> Result<bool, Error> {
        let digest = digest(&gist(&shown.status));
        if memory.status == Some(digest) {
            return Ok(true);
        }
        let body = json!({
            "apiVersion": "confidentialcontainers.org/v1alpha1",
            "kind": "PeerPod",
            "metadata": {"name": shown.name, "namespace": shown.namespace},
            "status": shown.status,
        });
        let force = PatchParams::apply(MANAGER).force();
        let what = format!("write the status of PeerPod {}/{}", shown.namespace, shown.name);
        let api = self.api(&shown.namespace);
        let patch = Patch::Apply(body);
        match self.0.calls.call("status", what, api.patch_status(&shown.name, &force, &patch)).await {
            Ok(_) => {
                memory.status = Some(digest);
                Ok(true)
            }
            Err(error) if error.is_not_found() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Removes the node's finalizer, if it is there, and then the object.
    async fn erase(&self, (namespace, name): &Key) -> Result<(), Error> {
        let api = self.api(namespace);
        let what = || format!("remove PeerPod {namespace}/{name}");
        // It is nearly always the only finalizer.
        let mut index = Some(0);
        let object = loop {
            if let Some(index) = index {
                let path = format!("/metadata/finalizers/{index}");
                let steps = vec![
                    json!({"op": "test", "path": path, "value": FINALIZER}),
                    json!({"op": "remove", "path": path}),
                ];
                let (params, patch) = (PatchParams::default(), patch(steps)?);
                match self.0.calls.call("finalizer", what(), api.patch(name, &params, &patch)).await {
                    Ok(object) => break object,
                    Err(error) if error.is_not_found() => return Ok(()),
                    // It is elsewhere in the list, or not in the list.
                    Err(error) if matches!(error.status(), Some(422 | 409)) => {}
                    Err(error) => return Err(error),
                }
            }
            let object = match self.0.calls.call("look", what(), api.get(name)).await {
                Ok(object) => object,
                Err(error) if error.is_not_found() => return Ok(()),
                Err(error) => return Err(error),
            };
            let finalizers = object.metadata.finalizers.as_deref().unwrap_or_default();
            index = finalizers.iter().position(|finalizer| finalizer == FINALIZER);
            if index.is_none() {
                break object;
            }
        };
        if object.metadata.deletion_timestamp.is_some() {
            return Ok(());
        }
        let preconditions = Some(Preconditions { uid: object.metadata.uid, resource_version: None });
        let params = DeleteParams { preconditions, ..DeleteParams::default() };
        match self.0.calls.call("delete", what(), api.delete(name, &params)).await {
            Ok(_) => Ok(()),
            Err(error) if error.is_not_found() || error.is_conflict() => Ok(()),
            Err(error) => Err(error),
        }
    }

    pub(super) async fn recorded(&self, node: &str) -> Result<Vec<Recorded>, Error> {
        let api: Api<PeerPod> = Api::all(self.0.calls.client.clone());
        let what = format!("list the PeerPods of node {node}");
        let (mut found, mut after) = (Vec::new(), None::<String>);
        loop {
            let mut params = ListParams::default().fields(&format!("spec.nodeName={node}")).limit(500);
            params.continue_token = after;
            let page = self.0.calls.call("list", what.clone(), api.list(&params)).await?;
            found.extend(page.items.into_iter().filter_map(Recorded::of));
            after = page.metadata.continue_.filter(|token| !token.is_empty());
            if after.is_none() {
                return Ok(found);
            }
        }
    }
}

/// Removes the caller's entry when it stops waiting.
struct Announced {
    writer: Writer,
    key: Key,
}

impl Drop for Announced {
    fn drop(&mut self) {
        self.writer.0.state.lock().announced.remove(&self.key);
    }
}

/// Returns the object's fields that this program owns, without the status.
fn object(shown: &DesiredPeerPod, uid: Option<&str>) -> Value {
    // It does not delay its pod's deletion: the node removes the VM, or the finalizer makes the controller do it.
    let owner = |uid| json!({"apiVersion": "v1", "kind": "Pod", "name": shown.pod, "uid": uid, "controller": true, "blockOwnerDeletion": false});
    let owners: Vec<Value> = uid.map(owner).into_iter().collect();
    json!({
        "apiVersion": "confidentialcontainers.org/v1alpha1",
        "kind": "PeerPod",
        "metadata": {
            "name": shown.name,
            "namespace": shown.namespace,
            "finalizers": [FINALIZER],
            "ownerReferences": owners,
        },
        "spec": shown.spec,
    })
}

/// Returns the parts of a status that are worth a call. Stages and times are sent along with them.
fn gist(status: &PeerPodStatus) -> String {
    let conditions = status.conditions.iter();
    let conditions: Vec<_> =
        conditions.map(|one| (&one.type_, &one.status, &one.reason, &one.message)).collect();
    format!("{:?} {:?} {conditions:?}", status.phase, status.addresses)
}

fn digest(text: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish()
}
