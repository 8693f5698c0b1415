//! Defines the files of a machine, and the id of a VM. Pure.
//!
//! All files are in one folder, which is a tmpfs: they end with the boot. The guest program of the machine reads and
//! writes the same files (`podvm/guest/src/pool.rs`).

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use peerpod_provider_api::{CreateRequest, Error, IdempotencyKey, InstanceId, Owned, OwnedState, Owner};
use peerpod_provider_cloud::Marks;
use serde::{Deserialize, Serialize};

use crate::config::MachineAddress;

/// Claim of a pod. It is a link to a file that is complete, so it appears at once or not at all.
pub(crate) const CLAIM: &str = "claim";
/// User-data. The guest acts when it appears.
pub(crate) const USER_DATA: &str = "user-data";
/// Request for a reboot, which frees the machine.
pub(crate) const REBOOT: &str = "reboot";
/// The guest's description of the machine and its boot.
pub(crate) const MACHINE: &str = "machine";
/// Longest claim and description.
pub(crate) const MAX_FILE: usize = 8 << 10;

const VERSION: u32 = 1;

/// The machine in its present boot, as its guest program describes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Boot {
    version: u32,
    /// The kernel's id of the boot.
    pub(crate) boot_id: String,
    /// Number of processors.
    pub(crate) vcpus: u32,
    /// Memory in MiB, without the part that the kernel keeps.
    pub(crate) memory_mib: u64,
}

impl Boot {
    /// Reads a description; `None`: it is none.
    pub(crate) fn parse(text: &[u8]) -> Option<Boot> {
        let boot: Boot = serde_json::from_slice(text).ok()?;
        (boot.version == VERSION && is_boot_id(&boot.boot_id)).then_some(boot)
    }

    /// Returns the reason why the machine is too small for the request.
    pub(crate) fn lacks(&self, request: &CreateRequest) -> Option<String> {
        let size = &request.size;
        // A kernel keeps up to a sixteenth of the memory that a machine has by its name.
        let memory = self.memory_mib.saturating_add(self.memory_mib / 16);
        if self.vcpus < size.vcpus {
            return Some(format!("less than {} vCPUs", size.vcpus));
        }
        (memory < size.memory_mib).then(|| format!("less than {} MiB of memory", size.memory_mib))
    }
}

/// Claim of a pod on a machine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Claim {
    version: u32,
    /// Id of the boot for which it holds.
    pub(crate) boot_id: String,
    /// Time in seconds since 1970.
    created: u64,
    /// Owner, key, digest and name.
    pub(crate) marks: Marks,
}

impl Claim {
    /// Returns a new claim on a machine in this boot.
    pub(crate) fn new(request: &CreateRequest, key: &IdempotencyKey, owner: &Owner, boot: &Boot) -> Claim {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Claim {
            version: VERSION,
            boot_id: boot.boot_id.clone(),
            created: now.as_secs(),
            marks: Marks::new(request, key, owner),
        }
    }

    /// Reads a claim. A text that is none, or of another version, is the claim of another owner: it has no marks.
    pub(crate) fn parse(text: &[u8]) -> Claim {
        let claim: Claim = serde_json::from_slice(text).unwrap_or_default();
        if claim.version == VERSION && is_boot_id(&claim.boot_id) { claim } else { Claim::default() }
    }

    /// Returns the claim as JSON.
    pub(crate) fn text(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Whether the claim was made for this boot. A claim of another owner counts as such.
    pub(crate) fn is_of(&self, boot: &Boot) -> bool {
        self.boot_id.is_empty() || self.boot_id == boot.boot_id
    }

    /// Returns the entry of a list.
    pub(crate) fn owned(&self, machine: &MachineAddress, state: OwnedState) -> Option<Owned> {
        Some(Owned {
            id: VmId { machine: *machine, boot_id: self.boot_id.clone() }.id().ok()?,
            key: self.marks.key.clone(),
            name: self.marks.name.clone(),
            state,
            addresses: vec![machine.socket().ip()],
            created: UNIX_EPOCH.checked_add(Duration::from_secs(self.created)),
            node: self.marks.node.clone(),
        })
    }
}

/// Whether the text has the form of a boot's id.
fn is_boot_id(text: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_hexdigit() || byte == b'-';
    (1..=64).contains(&text.len()) && text.bytes().all(fits)
}

/// Id of a VM: a machine in one boot, `10.0.0.7/0f8e…`. In one boot a machine has one pod at most, so a late delete
/// reaches no later pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct VmId {
    /// The machine.
    pub(crate) machine: MachineAddress,
    /// Id of the boot.
    pub(crate) boot_id: String,
}

impl VmId {
    /// Reads an id; `None`: it is no VM of this provider.
    pub(crate) fn parse(id: &InstanceId) -> Option<VmId> {
        let (machine, boot_id) = id.as_str().split_once('/')?;
        let machine = MachineAddress::parse(machine)?;
        is_boot_id(boot_id).then(|| VmId { machine, boot_id: boot_id.to_owned() })
    }

    /// Returns the id as the caller gets it.
    pub(crate) fn id(&self) -> Result<InstanceId, Error> {
        Ok(InstanceId::new(format!("{}/{}", self.machine, self.boot_id))?)
    }
}

#[cfg(test)]
mod tests {
    use peerpod_provider_api::Size;

    use super::*;

    const BOOT: &[u8] = br#"{"version":1,"boot_id":"0f8e-1","vcpus":4,"memory_mib":7900}"#;

    #[test]
    fn a_claim_is_read_back_and_another_text_has_no_owner() {
        let boot = Boot::parse(BOOT).unwrap();
        let owner = Owner { cluster_id: "c".into(), node_name: "n".into(), installation: "i".into() };
        let key = IdempotencyKey::derive("c", "s", 0);
        let claim = Claim::new(&CreateRequest::default(), &key, &owner, &boot);
        assert_eq!(Claim::parse(&claim.text()), claim);
        assert!(claim.marks.are_of(&owner) && claim.is_of(&boot));
        let id = claim.owned(&MachineAddress::parse("10.0.0.7").unwrap(), OwnedState::Running).unwrap().id;
        assert_eq!(id.as_str(), "10.0.0.7/0f8e-1");
        assert_eq!(VmId::parse(&id).unwrap().id().unwrap(), id);
        for other in
            ["", "{}", "[1]", r#"{"version":2,"boot_id":"0","created":0,"marks":{"cluster":"c","node":"n"}}"#]
        {
            let claim = Claim::parse(other.as_bytes());
            assert!(!claim.marks.are_of(&owner) && claim.is_of(&boot), "{other}");
        }
        for foreign in ["i-0123", "10.0.0.7", "10.0.0.7/../x", "host/0f8e"] {
            assert_eq!(VmId::parse(&InstanceId::new(foreign).unwrap()), None, "{foreign}");
        }
    }

    #[test]
    fn a_machine_is_compared_with_the_size_of_a_request() {
        let boot = Boot::parse(BOOT).unwrap();
        let lacks = |vcpus, memory_mib| {
            let size = Size { vcpus, memory_mib, ..Size::default() };
            boot.lacks(&CreateRequest { size, ..CreateRequest::default() })
        };
        assert_eq!((lacks(0, 0), lacks(4, 8192)), (None, None));
        assert_eq!(lacks(5, 1).unwrap(), "less than 5 vCPUs");
        assert_eq!(lacks(1, 9000).unwrap(), "less than 9000 MiB of memory");
        for bad in ["", "{}", r#"{"version":1,"boot_id":"../x","vcpus":1,"memory_mib":1}"#] {
            assert_eq!(Boot::parse(bad.as_bytes()), None, "{bad}");
        }
    }
}
