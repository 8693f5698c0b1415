//! Defines the node's metrics. Names begin with `peerpod_node_` once registered under that prefix.

use std::{collections::BTreeSet, sync::Arc};

use parking_lot::Mutex;
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};

use crate::sandbox::phase::Phase;

/// Limit of the names of guests' stages, above the number of any valid guest.
const MAX_GUEST_STAGES: usize = 32;

/// Labels by phase.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ByPhase {
    /// [`Phase::name`].
    pub phase: String,
}

/// Labels by stage of a sandbox's life.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ByStage {
    /// The stage's name, as in the sandbox's final log record.
    pub stage: String,
}

/// Labels by reason.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ByReason {
    /// One word.
    pub reason: String,
}

/// Labels of a call to the API server.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ByCall {
    /// The kind of call.
    pub call: &'static str,
    /// `ok`, `not_found`, `conflict`, `refused`, `away`.
    pub result: &'static str,
}

/// Labels by kind.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ByKind {
    /// One word.
    pub kind: &'static str,
}

type Histograms = Family<ByStage, Histogram, fn() -> Histogram>;

/// The node's metrics. Cheap to clone; all clones count together.
#[derive(Clone, Debug)]
pub struct Metrics {
    phases: Family<ByPhase, Gauge>,
    stages: Histograms,
    guest_stages: Histograms,
    guest_stage_names: Arc<Mutex<BTreeSet<String>>>,
    stops: Family<ByReason, Counter>,
    failures: Family<ByStage, Counter>,
    claims_refused: Family<ByReason, Counter>,
    /// Pods without pull secrets at the moment they were needed.
    pub pull_secrets_missed: Counter,
    /// Guests that received their certificate.
    pub claims_granted: Counter,
    /// Files that could not be understood and were set aside.
    pub quarantined: Counter,
    recoveries: Family<ByPhase, Counter>,
    /// VMs of this node that had no record and were deleted.
    pub orphans: Counter,
    /// Guests that a CA rotation went on without.
    pub left_behind: Counter,
    /// Writes of the ledger that failed.
    pub ledger_errors: Counter,
    /// Relay processes that the node has connected to.
    pub relay_epochs: Counter,
    /// Changes of running pods' networks that were followed.
    pub network_changes: Counter,
    /// Obstacles to running pods' traffic, above all filters of other programs.
    pub obstacles: Counter,
    paths: Family<ByKind, Counter>,
    notices: Family<ByKind, Counter>,
    cluster_calls: Family<ByCall, Counter>,
    /// PeerPods that differ from their desired state.
    pub cluster_backlog: Gauge,
    /// Events that were never written.
    pub cluster_events_dropped: Counter,
    batches: Histogram,
    /// Tasks that ended by a panic. Anything but 0 is a bug.
    pub panics: Counter,
}

fn seconds() -> Histogram {
    // From a local namespace (ms) to a slow cloud (minutes).
    Histogram::new([
        0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0,
        160.0, 320.0, 640.0,
    ])
}

impl Default for Metrics {
    fn default() -> Metrics {
        Metrics {
            phases: Family::default(),
            stages: Family::new_with_constructor(seconds),
            guest_stages: Family::new_with_constructor(seconds),
            guest_stage_names: Arc::default(),
            stops: Family::default(),
            failures: Family::default(),
            claims_refused: Family::default(),
            pull_secrets_missed: Counter::default(),
            claims_granted: Counter::default(),
            quarantined: Counter::default(),
            recoveries: Family::default(),
            orphans: Counter::default(),
            left_behind: Counter::default(),
            ledger_errors: Counter::default(),
            relay_epochs: Counter::default(),
            network_changes: Counter::default(),
            obstacles: Counter::default(),
            paths: Family::default(),
            notices: Family::default(),
            cluster_calls: Family::default(),
            cluster_backlog: Gauge::default(),
            cluster_events_dropped: Counter::default(),
            batches: Histogram::new([2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1000.0]),
            panics: Counter::default(),
        }
    }
}

impl Metrics {
    /// Registers the metrics.
    pub fn register(&self, registry: &mut Registry) {
        let node = registry.sub_registry_with_prefix("peerpod_node");
        node.register("sandboxes", "Sandboxes by phase", self.phases.clone());
        node.register("stage_seconds", "Time from CreateVM (or the stop) to each stage", self.stages.clone());
        node.register(
            "guest_stage_seconds",
            "Duration of each stage in the guest",
            self.guest_stages.clone(),
        );
        node.register("stops", "Sandboxes stopped, by reason", self.stops.clone());
        node.register(
            "failures",
            "Sandboxes that could not be started, by failed stage",
            self.failures.clone(),
        );
        node.register(
            "pull_secrets_missed",
            "Times a pod went on without an answer about its pull secrets",
            self.pull_secrets_missed.clone(),
        );
        node.register("claims_refused", "Claims refused", self.claims_refused.clone());
        node.register("claims_granted", "Claims granted a certificate", self.claims_granted.clone());
        node.register("quarantined", "Ledger or inbox files set aside", self.quarantined.clone());
        node.register("recoveries", "Sandboxes picked up from the ledger, by phase", self.recoveries.clone());
        node.register("orphans", "VMs without a record that were deleted", self.orphans.clone());
        node.register(
            "guests_left_behind",
            "Guests that had not followed when a step of the CA's rotation went on",
            self.left_behind.clone(),
        );
        node.register("ledger_errors", "Ledger writes that failed", self.ledger_errors.clone());
        node.register(
            "relay_epochs",
            "Relay processes that the node connected to",
            self.relay_epochs.clone(),
        );
        node.register(
            "network_changes",
            "Changes of running pods' networks that were followed",
            self.network_changes.clone(),
        );
        node.register(
            "network_obstacles",
            "Obstacles to running pods' traffic: filters of other programs before Peerpod's redirects",
            self.obstacles.clone(),
        );
        node.register(
            "paths",
            "Results of guests' path-MTU probes: as_planned, narrow (the pod's MTU is smaller), untried",
            self.paths.clone(),
        );
        node.register(
            "vm_notices",
            "Events of pods' VMs from the provider: interruption (the cloud reclaims the VM), ended",
            self.notices.clone(),
        );
        node.register("batch_size", "VMs requested by one call for several sandboxes", self.batches.clone());
        node.register(
            "cluster_calls",
            "Calls to the API server, by operation and result",
            self.cluster_calls.clone(),
        );
        node.register("cluster_backlog", "PeerPods whose update is pending", self.cluster_backlog.clone());
        node.register(
            "cluster_events_dropped",
            "Events on pods that were dropped: too many of one pod, or the API server was away for too long",
            self.cluster_events_dropped.clone(),
        );
        node.register("panics", "Tasks that panicked", self.panics.clone());
        for phase in Phase::NAMES {
            drop(self.phases.get_or_create(&ByPhase { phase: phase.into() }));
        }
    }

    /// Counts a sandbox's change of phase; `None`: outside this process.
    pub fn moved(&self, from: Option<&Phase>, to: Option<&Phase>) {
        let by = |phase: &Phase| ByPhase { phase: phase.name().into() };
        if let Some(from) = from {
            self.phases.get_or_create(&by(from)).dec();
        }
        if let Some(to) = to {
            self.phases.get_or_create(&by(to)).inc();
        }
    }

    /// Records that a stage was reached, `ms` after its starting point.
    pub fn stage(&self, stage: &str, ms: u64) {
        self.stages.get_or_create(&ByStage { stage: stage.into() }).observe(ms as f64 / 1000.0);
    }

    /// Records the duration of a stage in the guest.
    pub fn guest_stage(&self, stage: &str, us: u64) {
        // The name comes from a guest, which must not control the number of time series.
        if self.guest_stage_is_known(stage) {
            self.guest_stages.get_or_create(&ByStage { stage: stage.into() }).observe(us as f64 / 1e6);
        }
    }

    fn guest_stage_is_known(&self, stage: &str) -> bool {
        let mut names = self.guest_stage_names.lock();
        names.contains(stage)
            || (names.len() < MAX_GUEST_STAGES && stage.len() <= 32 && names.insert(stage.to_owned()))
    }

    /// Counts a guest's path to the node by its kind.
    pub fn path(&self, kind: &'static str) {
        self.paths.get_or_create(&ByKind { kind }).inc();
    }

    /// Returns the count of [`Metrics::path`] for this kind.
    pub fn paths(&self, kind: &'static str) -> u64 {
        self.paths.get_or_create(&ByKind { kind }).get()
    }

    /// Counts a provider's event about a pod's VM.
    pub fn noticed(&self, kind: &'static str) {
        self.notices.get_or_create(&ByKind { kind }).inc();
    }

    /// Counts a call to the API server and its result.
    pub fn cluster_call(&self, call: &'static str, result: &'static str) {
        self.cluster_calls.get_or_create(&ByCall { call, result }).inc();
    }

    /// Returns the count of [`Metrics::noticed`] for this kind.
    pub fn notices(&self, kind: &'static str) -> u64 {
        self.notices.get_or_create(&ByKind { kind }).get()
    }

    /// Records the size of a batch.
    pub fn batch(&self, size: u32) {
        self.batches.observe(f64::from(size));
    }

    /// Counts a sandbox that was stopped.
    pub fn stopped(&self, reason: &str) {
        self.stops.get_or_create(&ByReason { reason: reason.into() }).inc();
    }

    /// Counts a sandbox that could not be started.
    pub fn failed(&self, stage: &str) {
        self.failures.get_or_create(&ByStage { stage: stage.into() }).inc();
    }

    /// Counts a claim that was refused.
    pub fn claim_refused(&self, reason: &str) {
        self.claims_refused.get_or_create(&ByReason { reason: reason.into() }).inc();
    }

    /// Counts a sandbox that was recovered from the ledger.
    pub fn recovered(&self, phase: &Phase) {
        self.recoveries.get_or_create(&ByPhase { phase: phase.name().into() }).inc();
    }
}

#[cfg(test)]
mod tests {
    use peerpod_base::reference;

    use super::*;

    #[test]
    fn documented_metrics_are_up_to_date() {
        let mut registry = Registry::default();
        let metrics = Metrics::default();
        metrics.register(&mut registry);
        metrics.stage("x", 0);
        metrics.guest_stage("x", 0);
        metrics.stopped("x");
        metrics.failed("x");
        metrics.claim_refused("x");
        metrics.path("x");
        metrics.noticed("x");
        metrics.cluster_call("x", "x");
        metrics.recoveries.get_or_create(&ByPhase { phase: "x".to_owned() }).inc();
        let text = reference::metrics(&registry).unwrap();
        reference::section("metrics.md", "peerpod-node", &text).unwrap();
    }
}
