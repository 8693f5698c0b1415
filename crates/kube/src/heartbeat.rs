//! Names the heartbeat of a node: a Lease `peerpod-node-<node>` in the project's namespace, which the node renews as
//! long as it maintains its ledger.
//!
//! While the Lease is fresh, the controller leaves that node's VMs to the node, which compares the provider's list with
//! its ledger itself. The Lease has no owner reference and outlives its Kubernetes node: the controller learns from it
//! that the node belonged to this cluster. May touch: nothing.

/// Prefix of the Lease's name, before the node's name.
pub const PREFIX: &str = "peerpod-node-";

/// Returns the name of a node's Lease.
pub fn name_of(node: &str) -> String {
    format!("{PREFIX}{node}")
}

/// Returns the node of a heartbeat Lease of this name.
pub fn node_of(lease: &str) -> Option<&str> {
    lease.strip_prefix(PREFIX).filter(|node| !node.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leases_name_names_its_owner() {
        assert_eq!(node_of(&name_of("worker-1.example")), Some("worker-1.example"));
        assert_eq!(node_of("peerpod-controller"), None);
        assert_eq!(node_of("peerpod-node-"), None);
    }
}
