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

/// Settings of both parts.
#[derive(Clone, Debug)]
pub struct VmsConfig {
    /// `node.cluster-id`: part of the idempotency keys.
    pub cluster_id: String,
    /// `controller.concurrency`.
    pub concurrency: u16,
    /// `controller.call-timeout`.
    pub call_timeout: Duration,
    /// `controller.longest-pause`.
    pub longest_pause: Duration,
    /// `controller.node-first`.
    pub node_first: Duration,
    /// `controller.settle`.
    pub settle: Duration,
    /// `controller.cloud-providers`.
    pub also: Vec<String>,
    /// `controller.orphans`.
    pub orphans: Orphans,
    /// `controller.orphan-grace`.
    pub orphan_grace: Duration,
    /// `controller.node-gone-grace`.
    pub node_gone_grace: Duration,
    /// `controller.sweep-every`.
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
        let config = VmsConfig {
            cluster_id: cluster_id.to_owned(),
            concurrency: reader.get("controller.concurrency", "50", "how many VMs are deleted at once"),
            call_timeout: reader.get("controller.call-timeout", "1m", "how long one answer of the provider may take"),
            longest_pause: reader.get(
                "controller.longest-pause",
                "5m",
                "the longest pause between two tries to delete the same VM",
            ),
            node_first: reader.get(
                "controller.node-first",
                "30s",
                "how long a deleted PeerPod is left to its own node's daemon, while that one lives",
            ),
            settle: reader.get(
                "controller.settle",
                "2m",
                "how long after its deletion a PeerPod without instanceID is looked for in the provider's list",
            ),
            also: also.unwrap_or_default(),
            orphans: if orphans == "report" { Orphans::Report } else { Orphans::Delete },
            orphan_grace: reader.get(
                "controller.orphan-grace",
                "15m",
                "how long a VM must have had no PeerPod, and its node's daemon been away; longer than any \
                 outage of an API server",
            ),
            node_gone_grace: reader.get(
                "controller.node-gone-grace",
                "5m",
                "how long a node must be gone, Node object and daemon, before its PeerPods are deleted",
            ),
            sweep_every: reader.get(
                "controller.sweep-every",
                "1m",
                "how often the provider's VMs are compared with the PeerPods",
            ),
        };
        config.check(reader);
        config
    }

    fn check(&self, reader: &mut Reader) {
        if self.concurrency == 0 || self.concurrency > 1000 {
            reader.mistake("controller.concurrency", "write a number from 1 to 1000");
        }
        for (key, time) in [
            ("call-timeout", self.call_timeout),
            ("longest-pause", self.longest_pause),
            ("sweep-every", self.sweep_every),
        ] {
            if time < Duration::from_millis(100) {
                reader.mistake(&format!("controller.{key}"), "too short; write at least 100ms");
            }
        }
    }
}
