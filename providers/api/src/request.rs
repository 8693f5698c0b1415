//! What is asked of a provider and what it answers. Plain data: serialisable, because the caller's ledger keeps a
//! request until the VM exists, and a repeated request must be the same byte for byte.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::id::hex;
use crate::{IdempotencyKey, InstanceId};

/// One VM to make. A field that the provider's [`crate::Capabilities`] do not cover must be empty.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CreateRequest {
    /// For people: the VM's name where the cloud shows one. Not an identity; the key is.
    pub name: String,
    /// What the VM finds when it boots, raw (the provider encodes it as its cloud wants). Holds the birth ticket:
    /// never printed, never in an error.
    pub user_data: String,
    /// At least this much machine.
    pub size: Size,
    /// Exactly this type, when somebody chose one.
    pub instance_type: Option<String>,
    /// Another image than the configured one.
    pub image: Option<String>,
    /// Disks that exist already and belong to the pod; attached, never created or deleted with the VM.
    pub disks: Vec<DiskRequest>,
    /// Marks on the VM (cluster, namespace, pod …) for people and for cost reports.
    pub labels: BTreeMap<String, String>,
}

impl CreateRequest {
    /// SHA-256 over the whole request, as hex: what a provider keeps to recognise a key that comes back with
    /// another request, without keeping the request (and its ticket).
    pub fn digest(&self) -> String {
        let json = serde_json::to_vec(self).expect("strings and numbers always serialise");
        hex(&Sha256::digest(&json))
    }
}

impl fmt::Debug for CreateRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CreateRequest")
            .field("name", &self.name)
            .field("user_data", &format_args!("({} bytes)", self.user_data.len()))
            .field("size", &self.size)
            .field("instance_type", &self.instance_type)
            .field("image", &self.image)
            .field("disks", &self.disks)
            .field("labels", &self.labels)
            .finish()
    }
}

/// How much machine is wanted, at least. 0 means no wish.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Size {
    /// Virtual CPUs.
    pub vcpus: u32,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// GPUs.
    pub gpus: u32,
    /// Which GPU, by the cloud's name, compared without case; `None` for any.
    pub gpu_model: Option<String>,
}

/// A disk the pod brings along.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskRequest {
    /// The cloud's id of the disk, as its CSI driver calls it.
    pub volume: String,
    /// Attach it for reading only.
    pub read_only: bool,
}

/// How the guest recognises a disk: what the hardware says, never its order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DiskIdentity {
    /// The serial number that the block device reports (virtio, NVMe controller).
    Serial(String),
    /// The name below `/dev/disk/by-id/`.
    ById(String),
    /// The SCSI logical unit or NVMe namespace that the attach was given.
    Lun(u32),
    /// The World Wide Name.
    Wwn(String),
}

/// A VM that exists, or is about to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Created {
    /// The cloud's id.
    pub id: InstanceId,
    /// Its addresses when the answer already said them; empty is normal, then ask [`crate::Provider::addresses`].
    pub addresses: Vec<IpAddr>,
    /// The type that was chosen, when the cloud has types.
    pub instance_type: Option<String>,
    /// For each disk of the request that is attached already: volume id and identity.
    pub disks: Vec<(String, DiskIdentity)>,
}

/// A VM that [`crate::Provider::list_owned`] found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owned {
    /// The cloud's id.
    pub id: InstanceId,
    /// The key it was made with; `None` when the mark was lost (then only age and name tell whose it is).
    pub key: Option<IdempotencyKey>,
    /// The name it was made with.
    pub name: Option<String>,
    /// Where it is in its life.
    pub state: OwnedState,
    /// Its addresses, as far as known.
    pub addresses: Vec<IpAddr>,
    /// When it was made, when the cloud says so.
    pub created: Option<SystemTime>,
}

/// Where a VM is in its life, as far as anybody who wants to keep or delete it must know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OwnedState {
    /// Being made; perhaps never finished, when its creator died.
    Pending,
    /// Running.
    Running,
    /// Ended by itself, with remains (console, disk) that `delete` removes.
    Ended,
    /// Deletion accepted, not finished.
    Deleting,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> CreateRequest {
        CreateRequest {
            name: "a".into(),
            user_data: "the secret ticket".into(),
            size: Size { vcpus: 1, memory_mib: 2048, ..Size::default() },
            instance_type: None,
            image: None,
            disks: vec![],
            labels: BTreeMap::new(),
        }
    }

    #[test]
    fn debug_hides_user_data() {
        let text = format!("{:?}", request());
        assert!(!text.contains("secret"), "{text}");
        assert!(text.contains("(17 bytes)"), "{text}");
    }

    #[test]
    fn the_digest_sees_every_field() {
        let base = request().digest();
        assert_eq!(base, request().digest());
        let changes: [fn(&mut CreateRequest); 7] = [
            |r| r.name.push('x'),
            |r| r.user_data.push('x'),
            |r| r.size.gpus = 1,
            |r| r.instance_type = Some("t".into()),
            |r| r.image = Some("i".into()),
            |r| r.disks.push(DiskRequest { volume: "v".into(), read_only: false }),
            |r| drop(r.labels.insert("k".into(), "v".into())),
        ];
        for (index, change) in changes.iter().enumerate() {
            let mut other = request();
            change(&mut other);
            assert_ne!(base, other.digest(), "change {index}");
        }
    }

    #[test]
    fn a_request_survives_the_ledger() {
        let json = serde_json::to_string(&request()).unwrap();
        let back: CreateRequest = serde_json::from_str(&json).unwrap();
        assert_eq!(back.digest(), request().digest());
    }
}
