//! Reads the controller's settings: section `controller`, and the shared keys of `kubernetes` and `cluster.namespace`.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use peerpod_base::config::Reader;
use peerpod_kube::lease::ElectionConfig;

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
pub(super) struct ControllerConfig {
    /// `None`: the pod's service account.
    pub(super) kubeconfig: Option<PathBuf>,
    /// `None`: the service account's namespace.
    pub(super) namespace: Option<String>,
    pub(super) admin_listen: SocketAddr,
    pub(super) election: ElectionConfig,
}

impl ControllerConfig {
    pub(super) fn read(reader: &mut Reader) -> ControllerConfig {
        let identity = reader.derived("controller.identity", "the host's name", hostname());
        if identity.is_empty() {
            reader.mistake(
                "controller.identity",
                "the host has no name, which separates the replicas; give it one",
            );
        }
        ControllerConfig {
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
            election: ElectionConfig {
                identity,
                name: reader.constant("controller.lease-name", "LEASE_NAME", LEASE_NAME.to_owned()),
                duration: reader.constant("controller.lease-duration", "LEASE_DURATION", LEASE_DURATION),
                renew_deadline: reader.constant(
                    "controller.lease-renew-deadline",
                    "LEASE_RENEW_DEADLINE",
                    LEASE_RENEW_DEADLINE,
                ),
                retry: reader.constant("controller.lease-retry", "LEASE_RETRY", LEASE_RETRY),
            },
        }
    }
}

/// Returns the host's name, which is the pod's.
fn hostname() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map(|name| name.trim().to_owned())
        .unwrap_or_default()
}
