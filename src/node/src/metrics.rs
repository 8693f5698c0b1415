//! Defines the node's metrics. Names begin with `peerpod_node_` once registered under that prefix.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use parking_lot::Mutex;
use peerpod_base::metrics::{Labelled, register};
use peerpod_provider_api::Chosen;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Metric, Registry};

use crate::sandbox::phase::Phase;

/// Limit of VMs' types, zones and markets with series of their own.
const MAX_OFFERINGS: usize = 64;

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
    /// By result: sent, failed.
    pub traces: Labelled,
    /// Anything but 0 is a bug.
    pub panics: Counter,
}

#[derive(Clone, Debug)]
pub(crate) struct SandboxMetrics {
    phases: Family<Label, Gauge>,
    stages: Histograms,
    pub stops: Counters,
    pub failures: Counters,
    pub start_failures: Counters,
    vms: Family<[(&'static str, String); 3], Gauge>,
    /// Choices that have series of their own. A choice keeps its series, so that each VM leaves the series that it entered.
    offerings: Arc<Mutex<HashSet<Chosen>>>,
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
    /// By result: done, failed.
    pub image_pulls: Labelled,
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
            traces: register(node, "traces", "Traces of pods' starts, by result: sent, failed"),
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
            start_failures: by(
                node,
                "cause",
                "start_failures",
                "Sandboxes that could not be started, by cause: the class of the provider's error, late (a time limit), \
                 network, guest, ended (the VM), lost_request",
            ),
            offerings: Arc::default(),
            vms: register(node, "vms", "VMs by type, zone and market, as far as the provider reports them"),
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

    /// Counts a sandbox's VM by the choices for it; `None`: it has no VM.
    pub(crate) fn vm(&self, from: Option<Chosen>, to: Option<Chosen>) {
        if let Some(from) = from {
            self.vms.get_or_create(&self.offering(from)).dec();
        }
        if let Some(to) = to {
            self.vms.get_or_create(&self.offering(to)).inc();
        }
    }

    fn offering(&self, chosen: Chosen) -> [(&'static str, String); 3] {
        let chosen = Chosen { image: None, price: None, ..chosen };
        let mut known = self.offerings.lock();
        if !known.contains(&chosen) && (known.len() >= MAX_OFFERINGS || !known.insert(chosen.clone())) {
            return ["type", "zone", "market"].map(|label| (label, "other".to_owned()));
        }
        let market = chosen.market.map(|market| market.word().to_owned());
        [
            ("type", chosen.instance_type.unwrap_or_default()),
            ("zone", chosen.zone.unwrap_or_default()),
            ("market", market.unwrap_or_default()),
        ]
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
            image_pulls: register(node, "image_pulls", "Images that guests pulled, by result: done, failed"),
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
    use crate::vm_metrics::{VmMetrics, sample};

    #[test]
    fn documented_metrics_are_up_to_date() {
        let mut registry = Registry::default();
        let Metrics { sandboxes, guests, cluster, traces, .. } = Metrics::new(&mut registry);
        sandboxes.stage("x", 0);
        sandboxes.stops.count("x");
        traces.get_or_create(&[("result", "sent")]).inc();
        sandboxes.failures.count("x");
        sandboxes.start_failures.count("x");
        sandboxes.vm(None, Some(Chosen::default()));
        guests.image_pulls.get_or_create(&[("result", "done")]).inc();
        sandboxes.notices.count("x");
        sandboxes.recoveries.count("x");
        guests.stage("x", 0);
        guests.claims_refused.count("x");
        guests.paths.count("x");
        cluster.call("x", "x");
        registry.register_collector(Box::new(VmMetrics::new(|| vec![sample()])));
        let text = reference::metrics(&registry).unwrap();
        reference::section("metrics.md", "peerpod-node", &text).unwrap();
    }

    #[test]
    fn vms_are_counted_in_a_bounded_number_of_series() {
        let metrics = Metrics::default().sandboxes;
        let chosen = |number: usize| {
            let instance_type = Some(format!("type-{number}"));
            Some(Chosen { instance_type, image: Some("an image".to_owned()), ..Chosen::default() })
        };
        let count = |kind: &str, zone: &str| {
            let labels = [("type", kind), ("zone", zone), ("market", zone)];
            metrics.vms.get_or_create(&labels.map(|(label, value)| (label, value.to_owned()))).get()
        };
        (0..100).for_each(|number| metrics.vm(None, chosen(number)));
        assert_eq!((count("type-3", ""), count("type-63", ""), count("other", "other")), (1, 1, 36));
        (0..100).for_each(|number| metrics.vm(chosen(number), None));
        assert_eq!((count("type-3", ""), count("other", "other")), (0, 0));
    }
}
