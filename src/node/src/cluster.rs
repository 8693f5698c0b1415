//! The node towards Kubernetes: what its pods are ([`pods`]), and what a user sees of their VMs (`writer`: one PeerPod
//! each; `events`: what went wrong; `capacity`: how many fit; `heartbeat`: that this daemon lives).
//!
//! Nothing here holds a pod up. What is to be shown is state, one wish per sandbox, written behind by one task that tries
//! again until it holds; an API server that is away for hours costs a late record and nothing else. A node that is not said
//! its name in a cluster (`cluster.node-name`) has no such room at all.
//!
//! Rights that it needs, of its service account:
//!
//! | group | resource | verbs | on |
//! |---|---|---|---|
//! | core | nodes | get, list, watch, patch | its own (`metadata.name`; annotation [`capacity::OWNER`]) |
//! | core | nodes/status | patch | its own |
//! | core | pods | list, watch | all namespaces, `spec.nodeName` its own; RBAC cannot say so |
//! | core | events | create, patch | all namespaces |
//! | confidentialcontainers.org | peerpods | get, list, create, patch, delete | all namespaces |
//! | confidentialcontainers.org | peerpods/status | patch | all namespaces |
//! | coordination.k8s.io | leases | get, create, update | `cluster.namespace` |
//!
//! No right on secrets. May touch: the API server. Knows records, and nothing of the sandboxes' tasks.

pub mod capacity;
pub mod config;
pub mod pods;
pub mod show;

mod calls;
mod events;
mod heartbeat;
mod queue;
mod writer;

use std::{sync::Arc, time::Duration};

use peerpod_base::admin::Ready;
use peerpod_kube::client;
use tokio::{task::JoinSet, time::timeout};
use tracing::{info, warn};

pub use config::ClusterConfig;
pub use pods::{Found, Pods};
pub use show::Shown;
pub use writer::Recorded;

use crate::{metrics::Metrics, sandbox::effects::Said, spec::PodRef};
use calls::Calls;
use capacity::Capacity;
use events::Events;
use pods::Reflector;
use writer::Writer;

/// How long a VM waits for its record, at the most: the pod's lookup and the write together.
const ANNOUNCE: Duration = Duration::from_millis(900);
/// How long the capacity may take to be taken back at the end.
const FAREWELL: Duration = Duration::from_secs(3);

/// Clones are the same room.
#[derive(Clone)]
pub struct Cluster {
    config: Arc<ClusterConfig>,
    calls: Calls,
    pods: Reflector,
    writer: Writer,
    events: Events,
    capacity: Capacity,
}

impl Cluster {
    /// A room that speaks with the API server of this configuration. Nobody is asked yet.
    ///
    /// # Errors
    /// There are no usable address and credentials.
    pub async fn open(
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

    /// Runs what runs from the start on: the pods' reflector, and the writers.
    pub fn run(&self, tasks: &mut JoinSet<&'static str>) {
        let (pods, writer, events) = (self.pods.clone(), self.writer.clone(), self.events.clone());
        tasks.spawn(async move {
            pods.run().await;
            "pods' reflector"
        });
        tasks.spawn(async move {
            writer.run().await;
            "writer of PeerPods"
        });
        tasks.spawn(async move {
            events.run().await;
            "writer of Events"
        });
    }

    /// Claims the node's capacity for this daemon, before it serves: a predecessor that leaves then leaves it standing.
    pub fn claim(&self, tasks: &mut JoinSet<&'static str>) {
        let capacity = self.capacity.clone();
        tasks.spawn(async move {
            capacity.claim().await;
            // A part of the node that ends is a fault; this one is done.
            std::future::pending().await
        });
    }

    /// Runs what says that this daemon serves: capacity and heartbeat.
    pub fn serve(&self, tasks: &mut JoinSet<&'static str>) {
        let capacity = self.capacity.clone();
        tasks.spawn(async move {
            capacity.run().await;
            "capacity"
        });
        let (calls, config) = (self.calls.clone(), self.config.clone());
        tasks.spawn(async move {
            heartbeat::run(calls, &config).await;
            "heartbeat"
        });
    }

    /// The end: takes the capacity back, if it is still this daemon's.
    pub async fn farewell(&self) {
        match timeout(FAREWELL, self.capacity.give_back()).await {
            Ok(Ok(true)) => info!("the node's capacity for peer pods is taken back"),
            Ok(Ok(false)) => info!("the node's capacity for peer pods is another daemon's; it stays"),
            Ok(Err(error)) => warn!(%error, "the node's capacity for peer pods stays"),
            Err(_) => warn!("the node's capacity for peer pods stays: no answer within {FAREWELL:?}"),
        }
    }

    /// This node's pods.
    pub fn pods(&self) -> &Reflector {
        &self.pods
    }

    /// Whether it is known that this very pod names no pull secrets. The API server adds the service account's to the pod
    /// when the pod is made; as for a kubelet, only the pod's count.
    pub fn has_no_pull_secrets(&self, pod: &PodRef) -> bool {
        let found = self.pods.newest(&pod.namespace, &pod.name);
        found.is_some_and(|found| pod.uid.as_ref() == Some(&found.uid) && found.image_pull_secrets.is_empty())
    }

    /// Has the intent shown before its VM is asked for. Returns when it is, and at the latest after a short while; the
    /// rest goes on behind. Answers the pod's UID, where it is known by then.
    pub async fn announce(&self, shown: Shown) -> Option<String> {
        let mut shown = shown;
        let known = async {
            if shown.uid.is_none() {
                let pod = (shown.namespace.clone(), shown.pod.clone());
                let found = self.pods.find(&pod.0, &pod.1, &shown.sandbox).await;
                shown.uid = Some(found.uid);
            }
        };
        let began = tokio::time::Instant::now();
        // Without it the record is written all the same, and gets its owner when that is known. What the watch knows is
        // known while the API server is away, too.
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

    /// Has this shown from now on. Never waits.
    pub fn show(&self, shown: Shown) {
        if let Some(uid) = &shown.uid {
            self.pods.take(uid, &shown.sandbox);
        }
        // Nobody waits for it.
        drop(self.writer.want(shown));
    }

    /// Says something on the pod. Never waits; says less to a pod of which much is said.
    pub fn tell(&self, pod: &PodRef, said: Said) {
        self.events.tell(pod, said);
    }

    /// Every PeerPod of this node.
    ///
    /// # Errors
    /// The API server does not say.
    pub async fn recorded(&self) -> Result<Vec<Recorded>, client::Error> {
        self.writer.recorded(&self.config.node_name).await
    }

    /// Has a PeerPod removed, whose VM is gone.
    pub fn remove(&self, recorded: &Recorded) {
        self.writer.remove(recorded);
    }
}
