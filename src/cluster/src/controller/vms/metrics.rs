//! Counts the work of both parts. (The provider's decorator counts its calls.)

use std::hash::Hash;

use peerpod_base::metrics::register;
use prometheus_client::encoding::EncodeLabelValue;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// Result of one attempt to end a PeerPod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
pub(super) enum DeletionOutcome {
    Deleted,
    NoVm,
    /// The provider or the API server refused.
    Failed,
    /// It belongs to another provider.
    Foreign,
    LeftToNode,
    PodLives,
    /// The VM that it names belongs to another owner: its finalizer is removed, and the VM stays.
    NotOurs,
}

/// Result for an orphaned VM, a PeerPod of a lost node, or an old heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
pub(super) enum Removal {
    Deleted,
    Reported,
    Failed,
}

/// Counters with the label `outcome`.
type By<O> = Family<[(&'static str, O); 1], Counter>;

/// The registration describes each metric.
#[derive(Clone, Debug)]
pub(super) struct VmsMetrics {
    pub(super) peerpods: By<DeletionOutcome>,
    pub(super) orphans: By<Removal>,
    pub(super) lost: By<Removal>,
    pub(super) heartbeats: By<Removal>,
    pub(super) deleting: Gauge,
    pub(super) failing: Gauge,
    pub(super) unclaimed: Gauge,
    pub(super) unattributed: Gauge,
    pub(super) sweeps: Counter,
    pub(super) sweeps_failed: Counter,
}

impl VmsMetrics {
    pub(super) fn register(registry: &mut Registry) -> VmsMetrics {
        let registry = registry.sub_registry_with_prefix("peerpod_controller");
        VmsMetrics {
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
}

/// Adds one result.
pub(super) fn count<O: Clone + Eq + Hash>(by: &By<O>, outcome: O) {
    by.get_or_create(&[("outcome", outcome)]).inc();
}

#[cfg(test)]
mod tests {
    use peerpod_test_reference as reference;

    use super::*;

    #[test]
    fn documented_metrics_are_up_to_date() {
        let mut registry = Registry::default();
        crate::controller::app::leading(&mut registry);
        let metrics = VmsMetrics::register(&mut registry);
        count(&metrics.peerpods, DeletionOutcome::Deleted);
        count(&metrics.orphans, Removal::Deleted);
        count(&metrics.heartbeats, Removal::Deleted);
        count(&metrics.lost, Removal::Deleted);
        let text = reference::metrics(&registry).unwrap();
        reference::section("metrics.md", "controller", &text).unwrap();
    }
}
