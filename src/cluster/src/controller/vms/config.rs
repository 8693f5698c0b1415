//! Reads the settings of the VMs' management: keys of the section `controller`.

use std::time::Duration;

use peerpod_base::config::Reader;

/// Number of VMs that are deleted at once.
const CONCURRENCY: u16 = 50;
/// Limit of one answer of the provider.
const CALL_TIMEOUT: Duration = Duration::from_secs(60);
/// Longest pause between two tries to delete the same VM.
const LONGEST_PAUSE: Duration = Duration::from_secs(300);
/// Time for which a deleted PeerPod is left to its own node's daemon, while that one lives.
const NODE_FIRST: Duration = Duration::from_secs(30);
/// Time for which the VM of a deleted PeerPod is looked for in the provider's list: longer than the list lags, or than a
/// create that is in flight takes.
const SETTLE: Duration = Duration::from_secs(120);
/// Time for which a VM must have had no PeerPod, and its node's daemon been away: longer than an outage of an API server.
const ORPHAN_GRACE: Duration = Duration::from_secs(15 * 60);
/// Time for which a node must be gone, Node object and daemon, before its PeerPods are deleted.
const NODE_GONE_GRACE: Duration = Duration::from_secs(300);
/// Interval at which the provider's VMs are compared with the PeerPods.
const SWEEP_EVERY: Duration = Duration::from_secs(60);

pub(in crate::controller) struct VmsConfig {
    /// `node.cluster-id`: part of the idempotency keys.
    pub(super) cluster_id: String,
    pub(in crate::controller) concurrency: u16,
    pub(super) call_timeout: Duration,
    pub(super) longest_pause: Duration,
    pub(super) node_first: Duration,
    pub(super) settle: Duration,
    /// `controller.cloud-providers`.
    pub(super) also: Vec<String>,
    /// `controller.orphans`; else they are only reported.
    pub(in crate::controller) delete_orphans: bool,
    pub(in crate::controller) orphan_grace: Duration,
    pub(super) node_gone_grace: Duration,
    pub(super) sweep_every: Duration,
}

impl VmsConfig {
    pub(in crate::controller) fn read(reader: &mut Reader, cluster_id: &str) -> VmsConfig {
        let orphans = reader.choice(
            "controller.orphans",
            "delete",
            &["delete", "report"],
            "action on VMs of lost nodes that no PeerPod names: delete, or report (Events and metrics only)",
        );
        let also: Option<Vec<String>> = reader.optional(
            "controller.cloud-providers",
            "other names in PeerPods' spec.cloudProvider that mean this provider, for objects of an earlier installation",
        );
        VmsConfig {
            cluster_id: cluster_id.to_owned(),
            concurrency: reader.constant("controller.concurrency", "CONCURRENCY", CONCURRENCY),
            call_timeout: reader.constant("controller.call-timeout", "CALL_TIMEOUT", CALL_TIMEOUT),
            longest_pause: reader.constant("controller.longest-pause", "LONGEST_PAUSE", LONGEST_PAUSE),
            node_first: reader.constant("controller.node-first", "NODE_FIRST", NODE_FIRST),
            settle: reader.constant("controller.settle", "SETTLE", SETTLE),
            also: also.unwrap_or_default(),
            delete_orphans: orphans == "delete",
            orphan_grace: reader.constant("controller.orphan-grace", "ORPHAN_GRACE", ORPHAN_GRACE),
            node_gone_grace: reader.constant(
                "controller.node-gone-grace",
                "NODE_GONE_GRACE",
                NODE_GONE_GRACE,
            ),
            sweep_every: reader.constant("controller.sweep-every", "SWEEP_EVERY", SWEEP_EVERY),
        }
    }
}
