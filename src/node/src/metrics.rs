//! Defines the node's metrics. Names begin with `peerpod_node_` once registered under that prefix.

use std::collections::BTreeSet;
use std::sync::Arc;

use parking_lot::Mutex;
use peerpod_base::metrics::register;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Metric, Registry};

use crate::sandbox::phase::Phase;

/// Limit of the names of guests' stages, above the number of any valid guest.
const MAX_GUEST_STAGES: usize = 32;

type Label = [(&'static str, String); 1];
type Histograms = Family<Label, Histogram, fn() -> Histogram>;

/// Counters that differ in the value of one label.
#[derive(Clone, Debug)]
pub(crate) struct Counters {
    label: &'static str,
    family: Family<Label, Counter>,
}

impl Counters {
    pub(crate) fn count(&self, value: &str) {
        self.family.get_or_create(&[(self.label, value.to_owned())]).inc();
    }

    #[cfg(test)]
    pub(crate) fn get(&self, value: &str) -> u64 {
        self.family.get_or_create(&[(self.label, value.to_owned())]).get()
    }
}

/// The node's metrics. Cheap to clone; all clones count together.
#[derive(Clone, Debug)]
pub(crate) struct Metrics {
    pub sandboxes: SandboxMetrics,
    pub guests: GuestMetrics,
    pub cluster: ClusterMetrics,
    pub relay_epochs: Counter,
    /// Anything but 0 is a bug.
    pub panics: Counter,
}

#[derive(Clone, Debug)]
pub(crate) struct SandboxMetrics {
    phases: Family<Label, Gauge>,
    stages: Histograms,
    pub stops: Counters,
    pub failures: Counters,
    pub recoveries: Counters,
    pub notices: Counters,
    pub batches: Histogram,
    pub quarantined: Counter,
    pub orphans: Counter,
    pub ledger_errors: Counter,
}

#[derive(Clone, Debug)]
pub(crate) struct GuestMetrics {
    stages: Histograms,
    stage_names: Arc<Mutex<BTreeSet<String>>>,
    pub claims_refused: Counters,
    pub paths: Counters,
    pub pull_secrets_missed: Counter,
    pub claims_granted: Counter,
    pub left_behind: Counter,
    pub network_changes: Counter,
    pub obstacles: Counter,
}

#[derive(Clone, Debug)]
pub(crate) struct ClusterMetrics {
    calls: Family<[(&'static str, &'static str); 2], Counter>,
    pub backlog: Gauge,
    pub events_dropped: Counter,
}

fn seconds() -> Histogram {
    // From a local namespace (ms) to a slow cloud (minutes).
    Histogram::new([
        0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0,
        160.0, 320.0, 640.0,
    ])
}

fn timings() -> Histograms {
    Family::new_with_constructor(seconds)
}

fn add<M: Metric + Clone>(node: &mut Registry, name: &str, help: &str, metric: M) -> M {
    node.register(name, help, metric.clone());
    metric
}

fn by(node: &mut Registry, label: &'static str, name: &str, help: &str) -> Counters {
    Counters { label, family: register(node, name, help) }
}

impl Default for Metrics {
    fn default() -> Metrics {
        Metrics::new(&mut Registry::default())
    }
}

impl Metrics {
    pub(crate) fn new(registry: &mut Registry) -> Metrics {
        let node = registry.sub_registry_with_prefix("peerpod_node");
        Metrics {
            sandboxes: SandboxMetrics::new(node),
            guests: GuestMetrics::new(node),
            cluster: ClusterMetrics::new(node),
            relay_epochs: register(node, "relay_epochs", "Relay processes that the node connected to"),
            panics: register(node, "panics", "Tasks that panicked"),
        }
    }
}

impl SandboxMetrics {
    fn new(node: &mut Registry) -> SandboxMetrics {
        let sizes = Histogram::new([2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1000.0]);
        let metrics = SandboxMetrics {
            phases: register(node, "sandboxes", "Sandboxes by phase"),
            stages: add(node, "stage_seconds", "Time from CreateVM (or the stop) to each stage", timings()),
            stops: by(node, "reason", "stops", "Sandboxes stopped, by reason"),
            failures: by(node, "stage", "failures", "Sandboxes that could not be started, by failed stage"),
            recoveries: by(node, "phase", "recoveries", "Sandboxes picked up from the ledger, by phase"),
            notices: by(
                node,
                "kind",
                "vm_notices",
                "Events of pods' VMs from the provider or the VM: interruption (the cloud reclaims the VM), ended",
            ),
            batches: add(node, "batch_size", "VMs requested by one call for several sandboxes", sizes),
            quarantined: register(node, "quarantined", "Ledger or inbox files set aside"),
            orphans: register(node, "orphans", "VMs without a record that were deleted"),
            ledger_errors: register(node, "ledger_errors", "Ledger writes that failed"),
        };
        for phase in Phase::NAMES {
            drop(metrics.phases.get_or_create(&[("phase", phase.into())]));
        }
        metrics
    }

    /// Counts a sandbox's change of phase; `None`: outside this process.
    pub(crate) fn moved(&self, from: Option<&Phase>, to: Option<&Phase>) {
        let label = |phase: &Phase| [("phase", phase.name().into())];
        if let Some(from) = from {
            self.phases.get_or_create(&label(from)).dec();
        }
        if let Some(to) = to {
            self.phases.get_or_create(&label(to)).inc();
        }
    }

    /// Records that a stage was reached, `ms` after its starting point.
    pub(crate) fn stage(&self, stage: &str, ms: u64) {
        self.stages.get_or_create(&[("stage", stage.into())]).observe(ms as f64 / 1000.0);
    }
}

impl GuestMetrics {
    fn new(node: &mut Registry) -> GuestMetrics {
        GuestMetrics {
            stages: add(node, "guest_stage_seconds", "Duration of each stage in the guest", timings()),
            stage_names: Arc::default(),
            claims_refused: by(node, "reason", "claims_refused", "Claims refused"),
            paths: by(
                node,
                "kind",
                "paths",
                "Results of guests' path-MTU probes: as_planned, narrow (the pod's MTU is smaller), untried",
            ),
            pull_secrets_missed: register(
                node,
                "pull_secrets_missed",
                "Times a pod went on without an answer about its pull secrets",
            ),
            claims_granted: register(node, "claims_granted", "Claims granted a certificate"),
            left_behind: register(
                node,
                "guests_left_behind",
                "Guests that had not followed when a step of the CA's rotation went on",
            ),
            network_changes: register(
                node,
                "network_changes",
                "Changes of running pods' networks that were followed",
            ),
            obstacles: register(
                node,
                "network_obstacles",
                "Obstacles to running pods' traffic: filters of other programs before Peerpod's redirects",
            ),
        }
    }

    /// Records the duration of a stage in the guest.
    pub(crate) fn stage(&self, stage: &str, us: u64) {
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
}

impl ClusterMetrics {
    fn new(node: &mut Registry) -> ClusterMetrics {
        ClusterMetrics {
            calls: register(node, "cluster_calls", "Calls to the API server, by operation and result"),
            backlog: register(node, "cluster_backlog", "PeerPods whose update is pending"),
            events_dropped: register(
                node,
                "cluster_events_dropped",
                "Events on pods that were dropped: too many of one pod, or the API server was away for too long",
            ),
        }
    }

    /// Counts a call to the API server. `result` is `ok`, `not_found`, `conflict`, `refused` or `away`.
    pub(crate) fn call(&self, call: &'static str, result: &'static str) {
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
        sandboxes.stops.count("x");
        sandboxes.failures.count("x");
        sandboxes.notices.count("x");
        sandboxes.recoveries.count("x");
        guests.stage("x", 0);
        guests.claims_refused.count("x");
        guests.paths.count("x");
        cluster.call("x", "x");
        let text = reference::metrics(&registry).unwrap();
        reference::section("metrics.md", "peerpod-node", &text).unwrap();
    }
}
