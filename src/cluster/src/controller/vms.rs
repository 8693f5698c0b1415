//! Manages the cluster's VMs in two parts, both of the leader: [`peerpods`] deletes the VMs of deleted PeerPods,
//! [`sweep`] finds VMs that no PeerPod names.
//!
//! **Nothing alive is deleted, nothing is leaked.** A VM is made by its node (the daemon). The node records it in a
//! ledger on disk and in a PeerPod that exists from before the VM until after it. While the node is alive (it renews
//! its heartbeat, a Lease `peerpod-node-<node>` in the controller's namespace), it manages its VMs itself. The
//! controller acts in the other cases:
//!
//! *A PeerPod with a deletionTimestamp and the finalizer* (`decide`, in this order):
//! 1. Its `spec.cloudProvider` names another provider: the VM is left alone, and a condition reports it.
//! 2. Its node is alive, and the deletion is younger than `NODE_FIRST`: the VM is left to the node. (Both
//!    may delete: a second delete of the same VM has no effect.)
//! 3. Its pod is alive: the VM stays, even if a user deleted the object by hand, and a condition reports it. A pod is
//!    alive when the object of its uid exists, has not succeeded or failed, and is not past its deletion's grace period
//!    plus [`facts::LEAVING`]; and when its Node object exists or the node is alive. A PeerPod with a recorded stop
//!    (`Leaving`, `Gone`, `Unwanted`) skips this check: its pod may have got another sandbox, and another VM. A sandbox
//!    without an owner counts as a pod that is alive if its node is alive and has recorded no stop.
//! 4. Its VM is searched in a fresh list of the provider: by `spec.instanceID`, or without one by all keys that this
//!    sandbox may have asked with. A VM that is not listed is searched again until `SETTLE`, because the list may lag and
//!    a create may still be in flight. After that nothing is deleted, and the finalizer is removed. If the VM appears
//!    later, it is an orphan (below).
//! 5. Its VM belongs to another owner ([`find`]): the provider lists it with another node than `spec.nodeName` or with
//!    a key that its sandbox never had, or another PeerPod has the better claim. The VM stays, and the finalizer is
//!    removed. A condition and an Event (`VMNotOurs`) report this, and an id that is not listed.
//! 6. Otherwise the listed VM is deleted.
//!
//! *A VM of the provider's list that no PeerPod names*, by id or by key (`orphan`). It is deleted when all of these
//! have held for `ORPHAN_GRACE`, as one leader saw them by its own clock:
//! 1. Its node is known, and once ran in this cluster (its heartbeat's Lease exists). A VM of another cluster has no
//!    such Lease, and is never touched. The list does not contain it, unless an earlier release made it under the same
//!    cluster-id.
//! 2. That heartbeat was not renewed. A node that is alive compares the provider's list with its ledger itself. A node
//!    that cannot reach the API server may have made VMs before their records are written.
//! 3. The Node object is gone, or no pod with a RuntimeClass is bound to it: no pod is left that could run in the VM.
//!
//! *A PeerPod of a node that is gone*, Node object and heartbeat, for `NODE_GONE_GRACE`. It is deleted,
//! which leads to the finalizer; its pod is no longer a reason to wait.
//!
//! Rights: namespace kube-system (get), peerpods (get, list, watch, delete, patch), peerpods/status (patch), pods (get,
//! list), nodes (get, list), Leases of the controller's namespace (get, list, create, update, delete), events.k8s.io
//! events (create, patch). May touch: those, and the provider's `list_owned` and `delete`.

mod backoff;
mod config;
mod decide;
mod facts;
mod find;
mod metrics;
mod orphan;
pub(super) mod peerpods;
mod report;
pub(super) mod sweep;

use std::sync::Arc;
use std::time::Duration;

use peerpod_provider_api::{DecoratorConfig, Provider, decorate};
use prometheus_client::registry::Registry;

pub(super) use config::VmsConfig;
use find::Listing;
use metrics::VmsMetrics;

/// State that both parts share.
pub(super) struct Vms {
    config: VmsConfig,
    provider: Arc<dyn Provider>,
    /// `provider.kind`, as nodes write it into `spec.cloudProvider`.
    kind: String,
    listing: Listing,
    metrics: VmsMetrics,
}

impl Vms {
    pub(super) async fn open(
        config: VmsConfig,
        provider: peerpod_providers::ProviderSettings,
        installation: String,
        registry: &mut Registry,
    ) -> anyhow::Result<Arc<Vms>> {
        let kind = provider.kind().to_owned();
        let provider = provider.open(installation).await?;
        // The parts repeat failed calls: the object shows the provider's reason, and other objects get their turn
        // meanwhile.
        let treated = DecoratorConfig { call_deadline: config.call_timeout, retry_for: Duration::ZERO };
        let provider = decorate(provider, treated, registry);
        let metrics = VmsMetrics::register(registry);
        Ok(Arc::new(Vms { config, provider, kind, listing: Listing::default(), metrics }))
    }

    /// Whether a PeerPod's `spec.cloudProvider` names this controller's provider.
    fn is_ours(&self, name: Option<&str>) -> bool {
        let known = |name: &str| [self.kind.as_str(), self.provider.name()].contains(&name);
        name.is_none_or(|name| known(name) || self.config.also.iter().any(|also| also == name))
    }
}
