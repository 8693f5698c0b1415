//! Reads the controller's settings: section `controller`, and the shared keys of `kubernetes`, `cluster.namespace` and
//! `node.cluster-id`.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use peerpod_base::config::Reader;

/// Lease that names the leading replica.
const LEASE_NAME: &str = "peerpod-controller";
/// Time that other replicas wait for a leader that does not renew its Lease: whole seconds, as a Lease has them.
const LEASE_DURATION: Duration = Duration::from_secs(15);
/// Time for which a leader acts that cannot renew its Lease: shorter than `LEASE_DURATION`.
const LEASE_RENEW_DEADLINE: Duration = Duration::from_secs(10);
/// Interval at which a replica renews the Lease, or reads it: several times within `LEASE_RENEW_DEADLINE`.
const LEASE_RETRY: Duration = Duration::from_secs(2);

/// Address of /metrics, /healthz and /readyz.
const ADMIN_LISTEN: SocketAddr = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 8081);

/// Settings of the whole process; each part reads its own.
#[derive(Clone, Debug)]
pub struct ControllerConfig {
    /// `kubernetes.kubeconfig`; `None`: the pod's service account.
    pub kubeconfig: Option<PathBuf>,
    /// `cluster.namespace`; `None`: the service account's namespace.
    pub namespace: Option<String>,
    /// Address of metrics and health.
    pub admin_listen: SocketAddr,
    /// Name of this replica: the host's name, which is the pod's.
    pub identity: String,
    /// `LEASE_NAME`.
    pub lease_name: String,
    /// `LEASE_DURATION`.
    pub lease_duration: Duration,
    /// `LEASE_RENEW_DEADLINE`.
    pub lease_renew_deadline: Duration,
    /// `LEASE_RETRY`.
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
            admin_listen: reader.constant("controller.admin-listen", "ADMIN_LISTEN", ADMIN_LISTEN),
            identity: reader.derived("controller.identity", "the host's name", hostname()),
            lease_name: reader.constant("controller.lease-name", "LEASE_NAME", LEASE_NAME.to_owned()),
            lease_duration: reader.constant("controller.lease-duration", "LEASE_DURATION", LEASE_DURATION),
            lease_renew_deadline: reader.constant(
                "controller.lease-renew-deadline",
                "LEASE_RENEW_DEADLINE",
                LEASE_RENEW_DEADLINE,
            ),
            lease_retry: reader.constant("controller.lease-retry", "LEASE_RETRY", LEASE_RETRY),
        };
        config.check(reader);
        config
    }

    fn check(&self, reader: &mut Reader) {
        if self.identity.is_empty() {
            reader.mistake(
                "controller.identity",
                "the host has no name, which separates the replicas; give it one",
            );
        }
    }
}

fn hostname() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map(|name| name.trim().to_owned())
        .unwrap_or_default()
}
