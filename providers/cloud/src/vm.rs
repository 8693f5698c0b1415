//! Life-cycle states and addresses of a VM, the same for each cloud. Pure.

use std::net::IpAddr;

use peerpod_provider_api::OwnedState;

/// Life-cycle state of a VM. No cloud distinguishes all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VmState {
    /// The cloud has not decided on it, or the state is one that the provider does not know. The VM exists, so it must be
    /// listed to be deleted.
    Pending,
    /// The cloud has the resources for it, and starts it.
    Placed,
    /// It runs.
    Running,
    /// It stops, by itself or for a delete.
    Stopping,
    /// It powered itself off, or the cloud stopped it.
    Ended,
    /// The cloud refused it after it had accepted the create.
    Failed,
    /// The cloud deletes it.
    Deleting,
    /// The cloud has deleted it, and shows it for some time.
    Deleted,
}

impl VmState {
    /// Whether the VM lives, or is about to.
    pub fn lives(self) -> bool {
        matches!(self, VmState::Pending | VmState::Placed | VmState::Running)
    }

    /// Returns the state of the VM's entry in a list; `None`: it has no entry.
    pub fn owned(self) -> Option<OwnedState> {
        match self {
            VmState::Pending | VmState::Placed => Some(OwnedState::Pending),
            VmState::Running => Some(OwnedState::Running),
            VmState::Stopping | VmState::Ended | VmState::Failed => Some(OwnedState::Ended),
            VmState::Deleting => Some(OwnedState::Deleting),
            VmState::Deleted => None,
        }
    }
}

/// Returns the addresses of a VM, the preferred one first; empty if there are none yet. Where public addresses are
/// configured, the node cannot reach the VM without one.
pub fn addresses(private: &[IpAddr], public: Option<IpAddr>, use_public: bool) -> Vec<IpAddr> {
    match (use_public, public) {
        (false, _) => private.to_vec(),
        (true, Some(address)) => [address].into_iter().chain(private.iter().copied()).collect(),
        (true, None) => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_public_address_is_first_where_it_is_configured_and_no_vm_is_reached_without_it() {
        let private: Vec<IpAddr> = vec!["10.0.0.2".parse().unwrap(), "fd00::2".parse().unwrap()];
        let public: IpAddr = "192.0.2.1".parse().unwrap();
        assert_eq!(addresses(&private, Some(public), false), private);
        assert_eq!(addresses(&private, Some(public), true), [public, private[0], private[1]]);
        assert!(addresses(&private, None, true).is_empty());
    }

    #[test]
    fn only_a_deleted_vm_has_no_entry_in_a_list() {
        let all = [
            (VmState::Pending, true, Some(OwnedState::Pending)),
            (VmState::Placed, true, Some(OwnedState::Pending)),
            (VmState::Running, true, Some(OwnedState::Running)),
            (VmState::Stopping, false, Some(OwnedState::Ended)),
            (VmState::Ended, false, Some(OwnedState::Ended)),
            (VmState::Failed, false, Some(OwnedState::Ended)),
            (VmState::Deleting, false, Some(OwnedState::Deleting)),
            (VmState::Deleted, false, None),
        ];
        for (state, lives, owned) in all {
            assert_eq!((state.lives(), state.owned()), (lives, owned), "{state:?}");
        }
    }
}
