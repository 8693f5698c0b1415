//! Connects the node to Kubernetes: watches its pods ([`pods`]), and shows their VMs to users. A pod waits at most
//! 900 ms for this module: one task writes the desired PeerPods in the background, so an API server that is unreachable
//! for hours delays records and nothing else. A node without `cluster.node-name` does not use this module. It needs the
//! rights in `deploy/chart/files/rbac` (`node.yaml`, `node-own.yaml`), and none to secrets.

pub(crate) mod capacity;
pub(crate) mod config;
pub(crate) mod pods;
pub(crate) mod show;

mod calls;
mod events;
mod health;
mod heartbeat;
mod queue;
mod scrape;
mod writer;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use peerpod_base::admin::Ready;
use peerpod_kube::client;
use prometheus_client::registry::Registry;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tracing::{info, warn};

pub(crate) use config::ClusterConfig;
pub(crate) use show::DesiredPeerPod;
pub(crate) use writer::Recorded;

use crate::app::{Tasks, spawn};
use crate::metrics::Metrics;
use crate::spec::PodRef;
use calls::Calls;
use capacity::Capacity;
use events::Events;
use health::Offer;
use pods::Reflector;
use scrape::Scrape;
use writer::Writer;

/// Pause before a taken metrics port is tried again.
const PORT_AGAIN: Duration = Duration::from_secs(10);
/// Longest time that a VM waits for its record: the pod's lookup and the write together.
const ANNOUNCE: Duration = Duration::from_millis(900);
/// Time that the removal of the capacity may take at exit.
const FAREWELL: Duration = Duration::from_secs(3);

/// Client of the cluster. Clones share one state.
#[derive(Clone)]
pub(crate) struct Cluster {
    config: Arc<ClusterConfig>,
    calls: Calls,
    pub pods: Reflector,
    writer: Writer,
    pub events: Events,
    capacity: Capacity,
    /// Whether the node offers peer pods.
    offered: watch::Sender<Option<bool>>,
    ready: Ready,
}

impl Cluster {
    /// Opens a client of the API server of this configuration. It makes no call yet.
    pub(crate) async fn open(
        config: ClusterConfig,
        metrics: Metrics,
        ready: Ready,
    ) -> Result<Cluster, client::Error> {
        let client = client::connect(config.kubeconfig.as_deref()).await?;
        let calls = Calls::new(client, metrics.clone(), ready.clone());
        let offered = watch::Sender::new(None);
        let pods = Reflector::new(calls.clone(), &config.node_name);
        Ok(Cluster {
            writer: Writer::new(calls.clone(), pods.clone(), metrics.clone()),
            events: Events::new(calls.clone(), pods.clone(), &config.node_name, metrics),
            capacity: Capacity::new(calls.clone(), &config, offered.subscribe()),
            offered,
            ready,
            config: Arc::new(config),
            pods,
            calls,
        })
    }

    /// Returns the UID of the cluster.
    pub(crate) async fn uid(&self) -> Result<String, client::Error> {
        client::cluster_uid(&self.calls.client).await
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

    /// Notes that no other daemon of this node runs.
    pub(crate) fn is_alone(&self) {
        self.capacity.is_alone();
    }

    /// Undoes the claim of a daemon that will not serve.
    pub(crate) async fn unclaim(&self) {
        match timeout(FAREWELL, self.capacity.unclaim()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => warn!(%error, "cannot withdraw the claim on the node's capacity for peer pods"),
            Err(_) => {
                warn!(
                    "cannot withdraw the claim on the node's capacity for peer pods: no answer within {FAREWELL:?}"
                )
            }
        }
    }

    /// Runs the tasks that show that this daemon serves: capacity, condition and heartbeat.
    pub(crate) fn serve(&self, tasks: &mut Tasks) {
        let (capacity, calls, config) = (self.capacity.clone(), self.calls.clone(), self.config.clone());
        if capacity.is_advertised() {
            let offer = Offer::new(config.withdraw_after);
            let shown = health::run(capacity.clone(), self.ready.clone(), offer, self.offered.clone());
            spawn(tasks, "offer of peer pods", shown);
        }
        spawn(tasks, "capacity", async move { capacity.run().await });
        spawn(tasks, "heartbeat", async move { heartbeat::run(calls, &config).await });
    }

    /// Serves the metrics of node and relay to permitted callers. A port that is taken stops no pod: the readiness has a
    /// warning until the port is free.
    pub(crate) fn serve_metrics(
        &self,
        tasks: &mut Tasks,
        registry: Arc<Registry>,
        (address, relay): (SocketAddr, SocketAddr),
    ) {
        let (calls, node, ready) = (self.calls.clone(), self.config.node_name.clone(), self.ready.clone());
        spawn(tasks, "metrics port", async move {
            loop {
                match Scrape::bind(address, relay, (registry.clone(), calls.clone(), &node)).await {
                    Ok(scrape) => {
                        ready.settled("metrics-port");
                        return scrape.run().await;
                    }
                    Err(error) => {
                        warn!("{error:#}");
                        ready.warn("metrics-port", &format!("{error:#}"));
                    }
                }
                sleep(PORT_AGAIN).await;
            }
        });
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

    /// Whether this very pod is known to name no pull secrets; those of its service account are in the pod's own list.
    pub(crate) fn has_no_pull_secrets(&self, pod: &PodRef) -> bool {
        let found = self.pods.newest(&pod.namespace, &pod.name);
        found.is_some_and(|found| pod.uid.as_ref() == Some(&found.uid) && found.image_pull_secrets.is_empty())
    }

    /// Writes the PeerPod before its VM is requested. Returns when it is written, or after 900 ms; the write then
    /// continues in the background. Returns the pod's UID, if it is known by then.
    pub(crate) async fn announce(&self, mut shown: DesiredPeerPod) -> Option<String> {
        let began = tokio::time::Instant::now();
        if shown.uid.is_none() {
            // Without a UID the record is written without an owner, which is added when it is known. The watch's lookup
            // also works while the API server is unreachable, so it needs no wait then.
            let patience = if self.calls.is_away() { Duration::ZERO } else { ANNOUNCE * 2 / 3 };
            let found = self.pods.find(&shown.namespace, &shown.pod, &shown.sandbox);
            shown.uid = timeout(patience, found).await.ok().map(|found| found.uid);
        }
        let uid = shown.uid.clone();
        let written = self.show(shown);
        if !self.calls.is_away() {
            drop(timeout(ANNOUNCE.saturating_sub(began.elapsed()), written).await);
        }
        uid
    }

    /// Sets the state to show from now on. The returned future completes when it is written, and may be dropped.
    pub(crate) fn show(&self, shown: DesiredPeerPod) -> impl Future<Output = ()> + Send + use<> {
        if let Some(uid) = &shown.uid {
            self.pods.take(uid, &shown.sandbox);
        }
        self.writer.want(shown)
    }

    pub(crate) async fn recorded(&self) -> Result<Vec<Recorded>, client::Error> {
        self.writer.recorded(&self.config.node_name).await
    }

    /// Removes a PeerPod after its VM is gone, in the background.
    pub(crate) fn remove(&self, recorded: &Recorded) {
        self.writer.remove(recorded);
    }
}
