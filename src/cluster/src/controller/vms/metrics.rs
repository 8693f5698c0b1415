//! Counts the work of both parts. (The provider's decorator counts its calls.)

use peerpod_base::metrics::register;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// Result of one attempt to end a PeerPod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
pub(super) enum Outcome {
    /// Its VM is deleted and its finalizer is removed.
    Deleted,
    /// There was no VM.
    NoVm,
    /// The provider or the API server refused.
    Failed,
    /// It belongs to another provider.
    Foreign,
    /// It was left to its node.
    LeftToNode,
    /// Its pod runs.
    PodLives,
    /// The VM that it names belongs to another owner: its finalizer is removed, and the VM stays.
    NotOurs,
}

/// Result for an orphaned VM or a PeerPod of a lost node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
pub(super) enum Removal {
    /// It was deleted.
    Deleted,
    /// It was only reported.
    Reported,
    /// It could not be deleted.
    Failed,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Ended {
    outcome: Outcome,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Removed {
    outcome: Removal,
}

/// The registration describes each metric.
#[derive(Clone, Debug)]
pub(super) struct Metrics {
    peerpods: Family<Ended, Counter>,
    orphans: Family<Removed, Counter>,
    lost: Family<Removed, Counter>,
    heartbeats: Family<Removed, Counter>,
    pub(super) deleting: Gauge,
    pub(super) failing: Gauge,
    pub(super) unclaimed: Gauge,
    pub(super) unattributed: Gauge,
    pub(super) sweeps: Counter,
    pub(super) sweeps_failed: Counter,
}

impl Metrics {
    pub(super) fn register(registry: &mut Registry) -> Metrics {
        let registry = registry.sub_registry_with_prefix("peerpod_controller");
        Metrics {
            peerpods: register(registry, "peerpods", "Tries to end a deleted PeerPod, by result"),
            orphans: register(registry, "orphans", "VMs of lost nodes that no PeerPod names, by action"),
            lost: register(registry, "lost_peerpods", "PeerPods of nodes that are gone, by action"),
            heartbeats: register(
                registry,
                "old_heartbeats",
                "Heartbeats of nodes that are long gone, by action",
            ),
            deleting: register(registry, "peerpods_deleting", "PeerPods that wait for their VM's deletion"),
            failing: register(registry, "peerpods_failing", "PeerPods whose VM could not be deleted yet"),
            unclaimed: register(registry, "vms_unclaimed", "VMs that no PeerPod names"),
            unattributed: register(
                registry,
                "vms_unattributed",
                "VMs that no PeerPod names and no known node made; they are left alone",
            ),
            sweeps: register(registry, "sweeps", "Comparisons of the provider's VMs with the PeerPods"),
            sweeps_failed: register(
                registry,
                "sweeps_failed",
                "Comparisons of the provider's VMs with the PeerPods that failed",
            ),
        }
    }

    pub(super) fn ended(&self, outcome: Outcome) {
        self.peerpods.get_or_create(&Ended { outcome }).inc();
    }

    pub(super) fn orphan(&self, outcome: Removal) {
        self.orphans.get_or_create(&Removed { outcome }).inc();
    }

    pub(super) fn heartbeat(&self, outcome: Removal) {
        self.heartbeats.get_or_create(&Removed { outcome }).inc();
    }

    pub(super) fn lost(&self, outcome: Removal) {
        self.lost.get_or_create(&Removed { outcome }).inc();
    }
}

#[cfg(test)]
mod tests {
    use peerpod_test_reference as reference;

    use super::*;

    #[test]
    fn documented_metrics_are_up_to_date() {
        let mut registry = Registry::default();
        crate::controller::app::leading(&mut registry);
        let metrics = Metrics::register(&mut registry);
        metrics.ended(Outcome::Deleted);
        metrics.orphan(Removal::Deleted);
        metrics.heartbeat(Removal::Deleted);
        metrics.lost(Removal::Deleted);
        let text = reference::metrics(&registry).unwrap();
        reference::section("metrics.md", "controller", &text).unwrap();
    }
}
