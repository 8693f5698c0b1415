//! Reads resource ids of Azure, and builds the names of a VM's parts. Azure compares ids without case and changes the
//! case in its answers, so all ids here are in lower case. Pure.
//!
//! Azure gives no tags to the interfaces that it makes with a VM. Their names therefore carry the mark: the VM's name,
//! which follows from cluster, node, installation and key, and 80 bits of a hash of cluster and installation.

use peerpod_provider_api::Owner;
use peerpod_provider_cloud::names;

/// Kind of virtual machines.
pub(crate) const VM: &str = "microsoft.compute/virtualmachines";
/// Kind of managed disks.
pub(crate) const DISK: &str = "microsoft.compute/disks";
/// Characters of a VM's name ([`names::unique`]).
const VM_NAME: usize = 38;
/// Longest id.
const MAX_ID: usize = 512;

/// Id of a resource in a resource group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ResourceId {
    pub subscription: String,
    pub group: String,
    /// Namespace and types, like `microsoft.compute/virtualmachines`.
    pub kind: String,
    /// Names, one for each type.
    pub names: Vec<String>,
}

impl ResourceId {
    /// Parses an id; `None`: the text is none.
    pub(crate) fn parse(text: &str) -> Option<ResourceId> {
        if text.len() > MAX_ID {
            return None;
        }
        let text = text.to_ascii_lowercase();
        let mut parts = text.strip_prefix('/')?.split('/');
        let mut word = |wanted: &str| parts.next().filter(|part| *part == wanted);
        word("subscriptions")?;
        let subscription = parts.next().filter(|part| is_segment(part))?.to_owned();
        parts.next().filter(|part| *part == "resourcegroups")?;
        let group = parts.next().filter(|part| is_segment(part))?.to_owned();
        parts.next().filter(|part| *part == "providers")?;
        let mut kind = parts.next().filter(|part| is_segment(part))?.to_owned();
        let mut names = Vec::new();
        while let Some(one) = parts.next() {
            let name = parts.next()?;
            if !is_segment(one) || !is_segment(name) {
                return None;
            }
            kind = format!("{kind}/{one}");
            names.push(name.to_owned());
        }
        (!names.is_empty()).then_some(ResourceId { subscription, group, kind, names })
    }

    /// Parses the id of a resource of this kind.
    pub(crate) fn of_kind(text: &str, kind: &str) -> Option<ResourceId> {
        ResourceId::parse(text).filter(|id| id.kind == kind)
    }

    /// Returns the last name.
    pub(crate) fn name(&self) -> &str {
        self.names.last().map_or("", String::as_str)
    }

    /// Returns the id as text.
    pub(crate) fn text(&self) -> String {
        let ResourceId { subscription, group, kind, names } = self;
        let mut text = format!("/subscriptions/{subscription}/resourcegroups/{group}/providers/");
        let (namespace, types) = kind.split_once('/').unwrap_or((kind, ""));
        text.push_str(namespace);
        for (one, name) in types.split('/').zip(names) {
            text.push_str(&format!("/{one}/{name}"));
        }
        text
    }
}

/// Whether a part of an id has only characters that names of Azure's resources have.
pub(crate) fn is_segment(part: &str) -> bool {
    let fits = |c: char| c.is_ascii_alphanumeric() || "-_.()".contains(c);
    !part.is_empty() && part.len() <= 128 && part.chars().all(fits) && !part.starts_with('.')
}

/// Returns the name of a part of a VM, like its first interface (`nic0`).
pub(crate) fn part(owner: &Owner, vm: &str, part: &str) -> String {
    format!("{vm}-{}-{part}", names::proof(owner))
}

/// Returns the VM of a part with this name if the name has the owner's mark. Azure may append to the name.
pub(crate) fn vm_of_part(owner: &Owner, name: &str) -> Option<String> {
    let name = name.to_ascii_lowercase();
    let (vm, rest) = name.split_at_checked(VM_NAME)?;
    let rest = rest.strip_prefix('-')?.strip_prefix(names::proof(owner).as_str())?;
    (vm.starts_with(&names::prefix(owner)) && rest.starts_with('-')).then(|| vm.to_owned())
}

#[cfg(test)]
mod tests {
    use peerpod_provider_api::IdempotencyKey;

    use super::*;

    fn owner(cluster: &str, node: &str, installation: &str) -> Owner {
        Owner { cluster_id: cluster.into(), node_name: node.into(), installation: installation.into() }
    }

    #[test]
    fn an_id_is_read_in_any_case() {
        let text =
            "/subscriptions/S-1/resourceGroups/My.Group_(1)/providers/Microsoft.Compute/virtualMachines/PP-a";
        let id = ResourceId::of_kind(text, VM).unwrap();
        assert_eq!((id.group.as_str(), id.name()), ("my.group_(1)", "pp-a"));
        assert_eq!(id.text(), text.to_ascii_lowercase());
        let nested =
            "/subscriptions/s/resourceGroups/g/providers/Microsoft.Network/virtualNetworks/n/subnets/d";
        let id = ResourceId::parse(nested).unwrap();
        assert_eq!((id.kind.as_str(), id.name()), ("microsoft.network/virtualnetworks/subnets", "d"));
        assert_eq!(id.text(), nested.to_ascii_lowercase());
    }

    #[test]
    fn a_text_that_is_no_id_is_refused() {
        for bad in [
            "",
            "pp-a",
            "/subscriptions/s",
            "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute",
            "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/virtualMachines",
            "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/virtualMachines/",
            "/subscriptions/s/resourceGroups/../providers/Microsoft.Compute/virtualMachines/a",
            "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/virtualMachines/a?b=c",
            "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/virtualMachines/a b",
            "https://x/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/virtualMachines/a",
        ] {
            assert_eq!(ResourceId::parse(bad), None, "{bad}");
        }
        let long = format!("/subscriptions/s/resourceGroups/g/providers/a/b/{}", "x".repeat(600));
        assert_eq!(ResourceId::parse(&long), None);
        let disk = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Compute/disks/d";
        assert!(ResourceId::of_kind(disk, VM).is_none() && ResourceId::of_kind(disk, DISK).is_some());
    }

    #[test]
    fn a_part_shows_its_vm_to_its_owner_alone() {
        let ours = owner("c", "n", "i");
        let vm = names::unique(&ours, &IdempotencyKey::derive("c", "s", 0));
        let nic = part(&ours, &vm, "nic0");
        assert!(nic.len() <= 80 - 9, "Azure may append eight characters: {nic}");
        assert_eq!(vm_of_part(&ours, &nic), Some(vm.clone()));
        assert_eq!(vm_of_part(&ours, &format!("{}-1a2b3c4d", nic.to_uppercase())), Some(vm.clone()));
        assert_eq!(vm_of_part(&owner("c", "", "i"), &nic), Some(vm.clone()), "the controller's");
        for other in [owner("c", "m", "i"), owner("d", "n", "i"), owner("c", "n", "j"), owner("c", "", "j")] {
            assert_eq!(vm_of_part(&other, &nic), None, "{other:?}");
        }
        for bad in [
            "",
            "pp-",
            &vm,
            &format!("{vm}-nic0"),
            &nic[..nic.len() - 5],
            "päppäpäppäpäppäpäppäpäppäpäppäpäppä",
        ] {
            assert_eq!(vm_of_part(&ours, bad), None, "{bad}");
        }
    }
}
