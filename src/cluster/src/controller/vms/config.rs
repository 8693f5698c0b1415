//! Reads the settings of the VMs' management: keys of the section `controller`.

use std::time::Duration;

use peerpod_base::config::Reader;

/// Treatment of orphaned VMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Orphans {
    /// Deletes them.
    Delete,
    /// Only reports them.
    Report,
}

/// Number of VMs that are deleted at once.
const CONCURRENCY: u16 = 50;
/// Limit of one answer of the provider.
const CALL_TIMEOUT: Duration = Duration::from_secs(60);
/// Longest pause between two tries to delete the same VM.
const LONGEST_PAUSE: Duration = Duration::from_secs(300);
/// Time for which a deleted PeerPod is left to its own node's daemon, while that one lives.
const NODE_FIRST: Duration = Duration::from_secs(30);
/// Time for which a deleted PeerPod without instanceID is looked for in the provider's list.
const SETTLE: Duration = Duration::from_secs(120);
/// Time for which a VM must have had no PeerPod, and its node's daemon been away: longer than an outage of an API server.
const ORPHAN_GRACE: Duration = Duration::from_secs(15 * 60);
/// Time for which a node must be gone, Node object and daemon, before its PeerPods are deleted.
const NODE_GONE_GRACE: Duration = Duration::from_secs(300);
/// Interval at which the provider's VMs are compared with the PeerPods.
const SWEEP_EVERY: Duration = Duration::from_secs(60);

/// Settings of both parts.
#[derive(Clone, Debug)]
pub struct VmsConfig {
    /// `node.cluster-id`: part of the idempotency keys.
    pub cluster_id: String,
    /// `CONCURRENCY`.
    pub concurrency: u16,
    /// `CALL_TIMEOUT`.
    pub call_timeout: Duration,
    /// `LONGEST_PAUSE`.
    pub longest_pause: Duration,
    /// `NODE_FIRST`.
    pub node_first: Duration,
    /// `SETTLE`.
    pub settle: Duration,
    /// `controller.cloud-providers`.
    pub also: Vec<String>,
    /// `controller.orphans`.
    pub orphans: Orphans,
    /// `ORPHAN_GRACE`.
    pub orphan_grace: Duration,
    /// `NODE_GONE_GRACE`.
    pub node_gone_grace: Duration,
    /// `SWEEP_EVERY`.
    pub sweep_every: Duration,
}

impl VmsConfig {
    /// Reads the keys.
    pub fn read(reader: &mut Reader, cluster_id: &str) -> VmsConfig {
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
            orphans: if orphans == "report" { Orphans::Report } else { Orphans::Delete },
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
