//! Defines the node's metrics. Names begin with `peerpod_node_` once registered under that prefix.

use std::collections::BTreeSet;
use std::sync::Arc;

use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Metric, Registry};

use crate::sandbox::phase::Phase;

/// Limit of the names of guests' stages, above the number of any valid guest.
const MAX_GUEST_STAGES: usize = 32;

/// One label.
type Label = [(&'static str, String); 1];
type Counters = Family<Label, Counter>;
type Histograms = Family<Label, Histogram, fn() -> Histogram>;

/// The node's metrics. Cheap to clone; all clones count together.
#[derive(Clone, Debug)]
pub struct Metrics {
    /// Sandboxes and their VMs.
    pub sandboxes: SandboxMetrics,
    /// Guests, and the network between them and their pods.
    pub guests: GuestMetrics,
    /// The cluster's side.
    pub cluster: ClusterMetrics,
    /// Relay processes that the node has connected to.
    pub relay_epochs: Counter,
    /// Tasks that ended by a panic. Anything but 0 is a bug.
    pub panics: Counter,
}

/// Metrics of the sandboxes and their VMs.
#[derive(Clone, Debug)]
pub struct SandboxMetrics {
    phases: Family<Label, Gauge>,
    stages: Histograms,
    stops: Counters,
    failures: Counters,
    recoveries: Counters,
    notices: Counters,
    batches: Histogram,
    /// Files that could not be understood and were set aside.
    pub quarantined: Counter,
    /// VMs of this node that had no record and were deleted.
    pub orphans: Counter,
    /// Writes of the ledger that failed.
    pub ledger_errors: Counter,
}

/// Metrics of the guests.
#[derive(Clone, Debug)]
pub struct GuestMetrics {
    stages: Histograms,
    stage_names: Arc<Mutex<BTreeSet<String>>>,
    claims_refused: Counters,
    paths: Counters,
    /// Pods without pull secrets at the moment they were needed.
    pub pull_secrets_missed: Counter,
    /// Guests that received their certificate.
    pub claims_granted: Counter,
    /// Guests that a CA rotation went on without.
    pub left_behind: Counter,
    /// Changes of running pods' networks that were followed.
    pub network_changes: Counter,
    /// Obstacles to running pods' traffic, above all filters of other programs.
    pub obstacles: Counter,
}

/// Metrics of the cluster's side.
#[derive(Clone, Debug)]
pub struct ClusterMetrics {
    calls: Family<[(&'static str, &'static str); 2], Counter>,
    /// PeerPods that differ from their desired state.
    pub backlog: Gauge,
    /// Events that were never written.
    pub events_dropped: Counter,
}

fn seconds() -> Histogram {
    // From a local namespace (ms) to a slow cloud (minutes).
    Histogram::new([
        0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0,
        160.0, 320.0, 640.0,
    ])
}

fn histograms() -> Histograms {
    Family::new_with_constructor(seconds)
}

/// A registry under the node's prefix.
struct Node<'a>(&'a mut Registry);

impl Node<'_> {
    fn add<M: Metric + Clone>(&mut self, name: &str, help: &str, metric: M) -> M {
        self.0.register(name, help, metric.clone());
        metric
    }

    /// Adds a metric that is zero at first.
    fn zero<M: Metric + Clone + Default>(&mut self, name: &str, help: &str) -> M {
        self.add(name, help, M::default())
    }
}

impl Default for Metrics {
    fn default() -> Metrics {
        Metrics::new(&mut Registry::default())
    }
}

impl Metrics {
    /// Makes the metrics and registers them.
    pub fn new(registry: &mut Registry) -> Metrics {
        let mut node = Node(registry.sub_registry_with_prefix("peerpod_node"));
        Metrics {
            sandboxes: SandboxMetrics::new(&mut node),
            guests: GuestMetrics::new(&mut node),
            cluster: ClusterMetrics::new(&mut node),
            relay_epochs: node.zero("relay_epochs", "Relay processes that the node connected to"),
            panics: node.zero("panics", "Tasks that panicked"),
        }
    }
}

impl SandboxMetrics {
    fn new(node: &mut Node<'_>) -> SandboxMetrics {
        let sizes = Histogram::new([2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1000.0]);
        let metrics = SandboxMetrics {
            phases: node.zero("sandboxes", "Sandboxes by phase"),
            stages: node.add("stage_seconds", "Time from CreateVM (or the stop) to each stage", histograms()),
            stops: node.zero("stops", "Sandboxes stopped, by reason"),
            failures: node.zero("failures", "Sandboxes that could not be started, by failed stage"),
            recoveries: node.zero("recoveries", "Sandboxes picked up from the ledger, by phase"),
            notices: node.zero(
                "vm_notices",
                "Events of pods' VMs from the provider: interruption (the cloud reclaims the VM), ended",
            ),
            batches: node.add("batch_size", "VMs requested by one call for several sandboxes", sizes),
            quarantined: node.zero("quarantined", "Ledger or inbox files set aside"),
            orphans: node.zero("orphans", "VMs without a record that were deleted"),
            ledger_errors: node.zero("ledger_errors", "Ledger writes that failed"),
        };
        for phase in Phase::NAMES {
            drop(metrics.phases.get_or_create(&[("phase", phase.into())]));
        }
        metrics
    }

    /// Counts a sandbox's change of phase; `None`: outside this process.
    pub fn moved(&self, from: Option<&Phase>, to: Option<&Phase>) {
        let label = |phase: &Phase| [("phase", phase.name().into())];
        if let Some(from) = from {
            self.phases.get_or_create(&label(from)).dec();
        }
        if let Some(to) = to {
            self.phases.get_or_create(&label(to)).inc();
        }
    }

    /// Records that a stage was reached, `ms` after its starting point.
    pub fn stage(&self, stage: &str, ms: u64) {
        self.stages.get_or_create(&[("stage", stage.into())]).observe(ms as f64 / 1000.0);
    }

    /// Counts a provider's event about a pod's VM.
    pub fn noticed(&self, kind: &'static str) {
        self.notices.get_or_create(&[("kind", kind.into())]).inc();
    }

    /// Returns the count of [`SandboxMetrics::noticed`] for this kind.
    #[cfg(test)]
    pub(crate) fn notices(&self, kind: &'static str) -> u64 {
        self.notices.get_or_create(&[("kind", kind.into())]).get()
    }

    /// Records the size of a batch.
    pub fn batch(&self, size: u32) {
        self.batches.observe(f64::from(size));
    }

    /// Counts a sandbox that was stopped.
    pub fn stopped(&self, reason: &str) {
        self.stops.get_or_create(&[("reason", reason.into())]).inc();
    }

    /// Counts a sandbox that could not be started.
    pub fn failed(&self, stage: &str) {
        self.failures.get_or_create(&[("stage", stage.into())]).inc();
    }

    /// Counts a sandbox that was recovered from the ledger.
    pub fn recovered(&self, phase: &Phase) {
        self.recoveries.get_or_create(&[("phase", phase.name().into())]).inc();
    }
}

impl GuestMetrics {
    fn new(node: &mut Node<'_>) -> GuestMetrics {
        GuestMetrics {
            stages: node.add("guest_stage_seconds", "Duration of each stage in the guest", histograms()),
            stage_names: Arc::default(),
            claims_refused: node.zero("claims_refused", "Claims refused"),
            paths: node.zero(
                "paths",
                "Results of guests' path-MTU probes: as_planned, narrow (the pod's MTU is smaller), untried",
            ),
            pull_secrets_missed: node
                .zero("pull_secrets_missed", "Times a pod went on without an answer about its pull secrets"),
            claims_granted: node.zero("claims_granted", "Claims granted a certificate"),
            left_behind: node.zero(
                "guests_left_behind",
                "Guests that had not followed when a step of the CA's rotation went on",
            ),
            network_changes: node
                .zero("network_changes", "Changes of running pods' networks that were followed"),
            obstacles: node.zero(
                "network_obstacles",
                "Obstacles to running pods' traffic: filters of other programs before Peerpod's redirects",
            ),
        }
    }

    /// Records the duration of a stage in the guest.
    pub fn stage(&self, stage: &str, us: u64) {
        // The name comes from a guest, which must not control the number of time series.
        let is_known = {
            let mut names = self.stage_names.lock();
            names.contains(stage)
                || (names.len() < MAX_GUEST_STAGES && stage.len() <= 32 && names.insert(stage.to_owned()))
        };
        if is_known {
            self.stages.get_or_create(&[("stage", stage.into())]).observe(us as f64 / 1e6);
        }
    }

    /// Counts a guest's path to the node by its kind.
    pub fn path(&self, kind: &'static str) {
        self.paths.get_or_create(&[("kind", kind.into())]).inc();
    }

    /// Returns the count of [`GuestMetrics::path`] for this kind.
    #[cfg(test)]
    pub(crate) fn paths(&self, kind: &'static str) -> u64 {
        self.paths.get_or_create(&[("kind", kind.into())]).get()
    }

    /// Counts a claim that was refused.
    pub fn claim_refused(&self, reason: &str) {
        self.claims_refused.get_or_create(&[("reason", reason.into())]).inc();
    }
}

impl ClusterMetrics {
    fn new(node: &mut Node<'_>) -> ClusterMetrics {
        ClusterMetrics {
            calls: node.zero("cluster_calls", "Calls to the API server, by operation and result"),
            backlog: node.zero("cluster_backlog", "PeerPods whose update is pending"),
            events_dropped: node.zero(
                "cluster_events_dropped",
                "Events on pods that were dropped: too many of one pod, or the API server was away for too long",
            ),
        }
    }

    /// Counts a call to the API server. `result` is `ok`, `not_found`, `conflict`, `refused` or `away`.
    pub fn call(&self, call: &'static str, result: &'static str) {
        self.calls.get_or_create(&[("call", call), ("result", result)]).inc();
    }
}

#[cfg(test)]
mod tests {
    use peerpod_test_reference as reference;

    use super::*;

    #[test]
    fn documented_metrics_are_up_to_date() {
        let mut registry = Registry::default();
        let Metrics { sandboxes, guests, cluster, .. } = Metrics::new(&mut registry);
        sandboxes.stage("x", 0);
        sandboxes.stopped("x");
        sandboxes.failed("x");
        sandboxes.noticed("x");
        sandboxes.recovered(&Phase::Gone);
        guests.stage("x", 0);
        guests.claim_refused("x");
        guests.path("x");
        cluster.call("x", "x");
        let text = reference::metrics(&registry).unwrap();
        reference::section("metrics.md", "peerpod-node", &text).unwrap();
    }
}
