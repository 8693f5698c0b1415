//! Owner of VMs, and the comparison of its marks on a VM. Pure.

/// Owner of the VMs that a provider makes, lists and deletes. Each VM carries all three values as marks.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Owner {
    /// Name of the cluster, for people and for rights. Two clusters may have the same.
    pub cluster_id: String,
    /// Node of the VMs; empty: all nodes of the cluster.
    pub node_name: String,
    /// Id that no other cluster or state folder has. An owner without one has no VM.
    pub installation: String,
}

impl Owner {
    /// Whether a VM with these marks has this owner. A VM without one of them has another owner.
    pub fn owns(&self, cluster: Option<&str>, node: Option<&str>, installation: Option<&str>) -> bool {
        cluster == Some(self.cluster_id.as_str())
            && (self.node_name.is_empty() || node == Some(self.node_name.as_str()))
            && !self.installation.is_empty()
            && installation == Some(self.installation.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_names_are_one_owner_in_one_installation_only() {
        let owner = |node: &str, installation: &str| Owner {
            cluster_id: "c".into(),
            node_name: node.into(),
            installation: installation.into(),
        };
        let (one, all) = (owner("n", "1"), owner("", "1"));
        let owns = |owner: &Owner, node, installation| owner.owns(Some("c"), node, installation);
        assert!(
            owns(&one, Some("n"), Some("1"))
                && owns(&all, Some("m"), Some("1"))
                && owns(&all, None, Some("1"))
        );
        for installation in [Some("2"), Some(""), None] {
            assert!(!owns(&one, Some("n"), installation), "{installation:?}");
            assert!(!owns(&owner("n", ""), Some("n"), installation), "{installation:?}");
        }
        for node in [Some("m"), Some(""), None] {
            assert!(!owns(&one, node, Some("1")), "{node:?}");
        }
        assert!(!one.owns(None, Some("n"), Some("1")) && !one.owns(Some("d"), Some("n"), Some("1")));
    }
}
