//! How a node's daemon says that it lives: a Lease `peerpod-node-<node>` in our own namespace, which it renews for as long
//! as it looks after its ledger.
//!
//! While it is fresh the cluster's controller leaves that node's VMs to it: the daemon compares the provider's list with
//! its ledger itself. The Lease outlives its node: by it the controller knows that the node was one of this cluster, so
//! it has no owner reference. Only names are here; touches nothing.

/// Before the node's name, in the Lease's.
pub const PREFIX: &str = "peerpod-node-";

/// The name of a node's Lease.
pub fn name_of(node: &str) -> String {
    format!("{PREFIX}{node}")
}

/// Whose heartbeat a Lease of this name is.
pub fn node_of(lease: &str) -> Option<&str> {
    lease.strip_prefix(PREFIX).filter(|node| !node.is_empty())
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
