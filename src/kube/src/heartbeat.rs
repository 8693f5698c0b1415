//! How a node's daemon says that it lives: a Lease `peerpod-node-<node>` in our own namespace, renewed for as long as the
//! daemon looks after its ledger.
//!
//! While it is fresh the cluster's controller leaves that node's VMs to it: the daemon compares the provider's list with
//! its ledger itself. May touch: that one Lease.

use std::time::Duration;

use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
    jiff::Timestamp,
};
use kube::{
    Api,
    api::{Patch, PatchParams},
};

use crate::client::{Error, within};

/// Before the node's name, in the Lease's.
const PREFIX: &str = "peerpod-node-";

/// How often a daemon renews it.
pub const EVERY: Duration = Duration::from_secs(10);

/// How long it is fresh.
pub const LASTS: Duration = Duration::from_secs(40);

/// The name of a node's Lease.
pub fn name_of(node: &str) -> String {
    format!("{PREFIX}{node}")
}

/// Whose heartbeat a Lease of this name is.
pub fn node_of(lease: &str) -> Option<&str> {
    lease.strip_prefix(PREFIX).filter(|node| !node.is_empty())
}

/// One beat: makes the Lease, or renews it. For [`EVERY`] so often.
///
/// # Errors
/// The API server refused or did not answer.
pub async fn beat(leases: &Api<Lease>, node: &str) -> Result<(), Error> {
    let name = name_of(node);
    let spec = LeaseSpec {
        holder_identity: Some(node.to_owned()),
        lease_duration_seconds: i32::try_from(LASTS.as_secs()).ok(),
        renew_time: Some(MicroTime(Timestamp::now())),
        ..LeaseSpec::default()
    };
    let metadata = ObjectMeta { name: Some(name.clone()), ..ObjectMeta::default() };
    let lease = Lease { metadata, spec: Some(spec) };
    // By server-side apply: one call whether there is one or not, and it needs no look before.
    let apply = PatchParams::apply("peerpod-node").force();
    within(format!("renew lease {name}"), leases.patch(&name, &apply, &Patch::Apply(&lease))).await.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leases_name_says_whose_it_is() {
        assert_eq!(node_of(&name_of("worker-1.example")), Some("worker-1.example"));
        assert_eq!(node_of("peerpod-controller"), None);
        assert_eq!(node_of("peerpod-node-"), None);
    }
}
