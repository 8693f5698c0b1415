//! Reads the controller's settings: section `controller`, and the shared keys of `kubernetes`, `cluster.namespace` and
//! `node.cluster-id`.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use peerpod_base::config::Reader;

/// Settings of the whole process; each part reads its own.
#[derive(Clone, Debug)]
pub struct ControllerConfig {
    /// `kubernetes.kubeconfig`; `None`: the pod's service account.
    pub kubeconfig: Option<PathBuf>,
    /// `cluster.namespace`; `None`: the service account's namespace.
    pub namespace: Option<String>,
    /// `controller.admin-listen`: address of metrics and health.
    pub admin_listen: SocketAddr,
    /// `controller.identity`: name of this replica.
    pub identity: String,
    /// `controller.lease-name`.
    pub lease_name: String,
    /// `controller.lease-duration`.
    pub lease_duration: Duration,
    /// `controller.lease-renew-deadline`.
    pub lease_renew_deadline: Duration,
    /// `controller.lease-retry`.
    pub lease_retry: Duration,
}

impl ControllerConfig {
    /// Reads the keys.
    pub fn read(reader: &mut Reader) -> ControllerConfig {
        let config = ControllerConfig {
            kubeconfig: reader.optional(
                "kubernetes.kubeconfig",
                "how the API server is reached; the pod's service account when not set",
            ),
            namespace: reader.optional(
                "cluster.namespace",
                "namespace of the Leases, our own and those of the nodes; the service account's namespace \
                 when not set",
            ),
            admin_listen: reader.get(
                "controller.admin-listen",
                "[::]:8081",
                "address and port of /metrics, /healthz and /readyz",
            ),
            identity: reader
                .optional(
                    "controller.identity",
                    "this replica's name in the Lease: its pod's name; the host's name when not set, which \
                     is the same in a pod",
                )
                .unwrap_or_else(hostname),
            lease_name: reader.get(
                "controller.lease-name",
                "peerpod-controller",
                "the Lease that names the leading replica",
            ),
            lease_duration: reader.get(
                "controller.lease-duration",
                "15s",
                "how long the other replicas wait for a leader that does not renew its Lease; whole seconds",
            ),
            lease_renew_deadline: reader.get(
                "controller.lease-renew-deadline",
                "10s",
                "how long a leader acts that cannot renew its Lease; shorter than the Lease's duration",
            ),
            lease_retry: reader.get(
                "controller.lease-retry",
                "2s",
                "how often the Lease is renewed, or looked at",
            ),
        };
        config.check(reader);
        config
    }

    fn check(&self, reader: &mut Reader) {
        let (duration, deadline, retry) = (self.lease_duration, self.lease_renew_deadline, self.lease_retry);
        if duration < Duration::from_secs(1) || duration.subsec_nanos() != 0 {
            reader.mistake("controller.lease-duration", "not whole seconds; a Lease has no fractions");
        }
        if deadline >= duration {
            reader.mistake(
                "controller.lease-renew-deadline",
                "not shorter than controller.lease-duration: another would begin while this one acts; make it shorter",
            );
        }
        if retry.is_zero() || retry * 2 > deadline {
            reader.mistake(
                "controller.lease-retry",
                "a Lease needs at least two tries within controller.lease-renew-deadline; make it shorter, above 0",
            );
        }
        if self.identity.is_empty() {
            reader.mistake("controller.identity", "empty, and the host has no name; write one");
        }
    }
}

fn hostname() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map(|name| name.trim().to_owned())
        .unwrap_or_default()
}
