//! Connects the node to Kubernetes: watches its pods ([`pods`]), and shows their VMs to users. `writer` keeps one
//! PeerPod for each VM, `events` posts failures, `capacity` advertises the number that fits, and `heartbeat` shows that
//! this daemon lives.
//!
//! A pod waits at most 900 ms for this module. The state to show is one desired PeerPod per sandbox; one task writes it
//! in the background and retries until it holds. An API server that is unreachable for hours delays records and nothing
//! else. A node without a name in a cluster (`cluster.node-name`) does not use this module.
//!
//! Rights that it needs, of its service account:
//!
//! | group | resource | verbs | on |
//! |---|---|---|---|
//! | core | nodes | get, list, watch, patch | its own node (`metadata.name`; annotation [`capacity::OWNER`]) |
//! | core | nodes/status | patch | its own node |
//! | core | pods | list, watch | all namespaces, filtered by `spec.nodeName`; RBAC cannot restrict that |
//! | core | events | create, patch | all namespaces |
//! | confidentialcontainers.org | peerpods | get, list, create, patch, delete | all namespaces |
//! | confidentialcontainers.org | peerpods/status | patch | all namespaces |
//! | coordination.k8s.io | leases | get, create, update | `cluster.namespace` |
//!
//! It needs no right to secrets. May touch: the API server. It reads records, and has no access to the sandboxes'
//! tasks.

pub(crate) mod capacity;
pub(crate) mod config;
pub(crate) mod pods;
pub(crate) mod show;

mod calls;
mod events;
mod heartbeat;
mod queue;
mod writer;

use std::sync::Arc;
use std::time::Duration;

use peerpod_base::admin::Ready;
use peerpod_kube::client;
use tokio::time::timeout;
use tracing::{info, warn};

pub(crate) use config::ClusterConfig;
pub(crate) use show::Shown;
pub(crate) use writer::Recorded;

use crate::app::{Tasks, spawn};
use crate::metrics::Metrics;
use crate::sandbox::ports::PodEvent;
use crate::spec::PodRef;
use calls::Calls;
use capacity::Capacity;
use events::Events;
use pods::Reflector;
use writer::Writer;

/// Longest time that a VM waits for its record: the pod's lookup and the write together.
const ANNOUNCE: Duration = Duration::from_millis(900);
/// Time that the removal of the capacity may take at exit.
const FAREWELL: Duration = Duration::from_secs(3);

/// Client of the cluster. Clones share one state.
#[derive(Clone)]
pub(crate) struct Cluster {
    config: Arc<ClusterConfig>,
    calls: Calls,
    pods: Reflector,
    writer: Writer,
    events: Events,
    capacity: Capacity,
}

impl Cluster {
    /// Opens a client of the API server of this configuration. It makes no call yet.
    pub(crate) async fn open(
        config: ClusterConfig,
        metrics: Metrics,
        ready: Ready,
    ) -> Result<Cluster, client::Error> {
        let client = client::connect(config.kubeconfig.as_deref()).await?;
        let calls = Calls::new(client, metrics.clone(), ready);
        let pods = Reflector::new(calls.clone(), &config.node_name);
        Ok(Cluster {
            writer: Writer::new(calls.clone(), pods.clone(), metrics.clone()),
            events: Events::new(calls.clone(), pods.clone(), &config.node_name, metrics),
            capacity: Capacity::new(calls.clone(), &config),
            config: Arc::new(config),
            pods,
            calls,
        })
    }

    /// Runs the tasks of the whole life of the daemon: the watch of the pods, and the writers.
    pub(crate) fn run(&self, tasks: &mut Tasks) {
        let (pods, writer, events) = (self.pods.clone(), self.writer.clone(), self.events.clone());
        spawn(tasks, "reflector of pods", async move { pods.run().await });
        spawn(tasks, "writer of PeerPods", async move { writer.run().await });
        spawn(tasks, "writer of Events", async move { events.run().await });
    }

    /// Claims the node's capacity for this daemon before it serves: a predecessor that exits then leaves it in place.
    pub(crate) fn claim(&self, tasks: &mut Tasks) {
        let capacity = self.capacity.clone();
        spawn(tasks, "claim of the capacity", async move {
            capacity.claim().await;
            // The end of a task counts as a fault, and this one has completed.
            std::future::pending().await
        });
    }

    /// Runs the tasks that show that this daemon serves: capacity and heartbeat.
    pub(crate) fn serve(&self, tasks: &mut Tasks) {
        let (capacity, calls, config) = (self.capacity.clone(), self.calls.clone(), self.config.clone());
        spawn(tasks, "capacity", async move { capacity.run().await });
        spawn(tasks, "heartbeat", async move { heartbeat::run(calls, &config).await });
    }

    /// Removes the capacity at exit, if it still belongs to this daemon.
    pub(crate) async fn farewell(&self) {
        match timeout(FAREWELL, self.capacity.give_back()).await {
            Ok(Ok(true)) => info!("the node's capacity for peer pods is removed"),
            Ok(Ok(false)) => info!("the node's capacity for peer pods belongs to another daemon and stays"),
            Ok(Err(error)) => warn!(%error, "cannot remove the node's capacity for peer pods"),
            Err(_) => warn!("cannot remove the node's capacity for peer pods: no answer within {FAREWELL:?}"),
        }
    }

    /// Returns the watch of this node's pods.
    pub(crate) fn pods(&self) -> &Reflector {
        &self.pods
    }

    /// Whether this very pod is known to name no pull secrets. The API server adds the service account's secrets to the
    /// pod when the pod is made; as for a kubelet, only the pod's own list counts.
    pub(crate) fn has_no_pull_secrets(&self, pod: &PodRef) -> bool {
        let found = self.pods.newest(&pod.namespace, &pod.name);
        found.is_some_and(|found| pod.uid.as_ref() == Some(&found.uid) && found.image_pull_secrets.is_empty())
    }

    /// Writes the PeerPod before its VM is requested. Returns when it is written, or after 900 ms; the write then
    /// continues in the background. Returns the pod's UID, if it is known by then.
    pub(crate) async fn announce(&self, shown: Shown) -> Option<String> {
        let mut shown = shown;
        let known = async {
            if shown.uid.is_none() {
                let pod = (shown.namespace.clone(), shown.pod.clone());
                let found = self.pods.find(&pod.0, &pod.1, &shown.sandbox).await;
                shown.uid = Some(found.uid);
            }
        };
        let began = tokio::time::Instant::now();
        // Without a UID the record is written without an owner, which is added when it is known. The watch's lookup
        // also works while the API server is unreachable, so it needs no wait then.
        let patience = if self.calls.is_away() { Duration::ZERO } else { ANNOUNCE * 2 / 3 };
        drop(timeout(patience, known).await);
        let uid = shown.uid.clone();
        let (sandbox, written) = (shown.sandbox.clone(), self.writer.want(shown));
        if let Some(uid) = &uid {
            self.pods.take(uid, &sandbox);
        }
        if !self.calls.is_away() {
            drop(timeout(ANNOUNCE.saturating_sub(began.elapsed()), written).await);
        }
        uid
    }

    /// Sets the state to show from now on. Never waits.
    pub(crate) fn show(&self, shown: Shown) {
        if let Some(uid) = &shown.uid {
            self.pods.take(uid, &shown.sandbox);
        }
        // No caller waits for the write.
        drop(self.writer.want(shown));
    }

    /// Posts an Event on the pod. Never waits; beyond a pod's rate limit, Events are dropped.
    pub(crate) fn tell(&self, pod: &PodRef, said: PodEvent) {
        self.events.tell(pod, said);
    }

    /// Lists every PeerPod of this node.
    pub(crate) async fn recorded(&self) -> Result<Vec<Recorded>, client::Error> {
        self.writer.recorded(&self.config.node_name).await
    }

    /// Removes a PeerPod after its VM is gone, in the background.
    pub(crate) fn remove(&self, recorded: &Recorded) {
        self.writer.remove(recorded);
    }
}
