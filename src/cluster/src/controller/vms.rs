//! The cluster's VMs: those of PeerPods that go are deleted, those that nobody wants are found. Two parts, both of the
//! leader: [`peerpods`] and [`sweep`].
//!
//! **Nothing alive is deleted, nothing is leaked.** A VM is made by its node's daemon, which has it in a ledger on disk and
//! in a PeerPod that exists from before the VM until after it. While that daemon lives (its heartbeat, a Lease
//! `peerpod-node-<node>` in our namespace, is renewed), its VMs are its own matter. We act where it does not:
//!
//! *A PeerPod with a deletionTimestamp and our finalizer* (`decide`, in this order):
//! 1. Its `spec.cloudProvider` is another than ours: left alone, and a condition says so.
//! 2. Its node's daemon lives, and the deletion is younger than `controller.node-first`: the daemon's turn. (Both may
//!    delete: a second delete of the same VM is nothing.)
//! 3. Its pod lives: the VM stays, whoever deleted the object by hand, and a condition says so. A pod lives when the
//!    object of its uid is there, has not succeeded or failed, and was not told to go longer ago than its own grace period
//!    and [`facts::LEAVING`]; and when its node is there or the node's daemon lives. A PeerPod whose node has recorded a
//!    stop (`Leaving`, `Gone`, `Unwanted`) is past this question: that pod may have got another sandbox, and another VM.
//!    Without an owner a sandbox whose daemon lives and has recorded no stop counts as a pod that lives.
//! 4. Its VM is another one's ([`find`]): by the provider's list it is of another node than `spec.nodeName`, or another
//!    PeerPod that names it has the better claim. The VM stays, the finalizer goes, and a condition and an Event say so.
//! 5. Else the VM is deleted: by `spec.instanceID`; without one, by all keys that this sandbox may have asked with. What is
//!    not found is gone; without an id only after `controller.settle`, as a create may still be under way.
//!
//! *A VM of the provider's list that no PeerPod names*, by id or by key (`orphan`): deleted when all of this has been so for
//! `controller.orphan-grace`, as one leader saw it by its own clock:
//! 1. its node is known, and once had a daemon here (its heartbeat's Lease exists: a VM of another cluster with the same
//!    cluster-id has none, and is never touched);
//! 2. that heartbeat was not renewed (a daemon that lives compares the provider's list with its ledger itself; one that
//!    cannot reach the API server may have made VMs whose record is still to follow);
//! 3. the Node object is gone, or no pod with a RuntimeClass is bound to it: nothing is left that the VM could be running.
//!
//! *A PeerPod whose node is gone* for `controller.node-gone-grace`, Node object and heartbeat: deleted, which brings it to
//! the finalizer; its pod is no reason to wait any more.
//!
//! Rights: peerpods (get, list, watch, delete, patch), peerpods/status (patch), pods (get, list), nodes (get, list), Leases
//! of our namespace (get, list, create, update, delete), events.k8s.io events (create, patch). May touch: those, and the provider's
//! `list_owned` and `delete`.

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

use peerpod_provider_api::{DecoratorConfig, Provider, decorate};
use prometheus_client::registry::Registry;

pub use config::{Orphans, VmsConfig};
use find::Listing;
use metrics::Metrics;

/// What both parts share.
pub(super) struct Vms {
    config: VmsConfig,
    provider: Arc<dyn Provider>,
    /// `provider.kind`, as nodes write it into `spec.cloudProvider`.
    kind: String,
    listing: Listing,
    metrics: Metrics,
}

impl Vms {
    /// Opens the provider.
    ///
    /// # Errors
    /// What it needs and does not find.
    pub(super) async fn open(
        config: VmsConfig,
        provider: peerpod_providers::Settings,
        registry: &mut Registry,
    ) -> anyhow::Result<Arc<Vms>> {
        let kind = provider.kind().to_owned();
        let provider = provider.open().await?;
        // Repeats are ours: with the provider's reason in the object, and another object's turn meanwhile.
        let treated =
            DecoratorConfig { call_deadline: config.call_timeout, retry_for: std::time::Duration::ZERO };
        let provider = decorate(provider, treated, registry);
        let metrics = Metrics::register(registry);
        Ok(Arc::new(Vms { config, provider, kind, listing: Listing::default(), metrics }))
    }

    /// Whether a PeerPod's `spec.cloudProvider` is the provider that we have.
    fn is_ours(&self, name: Option<&str>) -> bool {
        let known = |name: &str| [self.kind.as_str(), self.provider.name()].contains(&name);
        name.is_none_or(|name| known(name) || self.config.also.iter().any(|also| also == name))
    }
}
