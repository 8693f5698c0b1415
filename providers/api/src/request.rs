//! Requests to a provider and its answers. Plain serialisable data: the caller's ledger keeps a request until the VM
//! exists, and a repeated request must be the same byte for byte.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::id::text_type;
use crate::{IdempotencyKey, InstanceId};

/// Request for one VM. A field that the provider's [`crate::Capabilities`] do not cover must be empty.
///
/// Fields added later are absent from the JSON while they are empty. A request in an older ledger therefore keeps its
/// [`CreateRequest::digest`].
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CreateRequest {
    /// Human-readable name, shown where the cloud shows one. Not an identity; the key is.
    pub name: String,
    /// User-data of the VM, raw (the provider encodes it as its cloud requires). Holds the ticket: never printed, never
    /// in an error.
    pub user_data: String,
    /// Minimum size of the VM.
    pub size: Size,
    /// Exact instance type, if one was chosen.
    pub instance_type: Option<String>,
    /// Image other than the configured one.
    pub image: Option<String>,
    /// Existing disks that belong to the pod; attached, never created or deleted with the VM.
    pub disks: Vec<DiskRequest>,
    /// Second NIC, on the network that the provider's settings name for it. It has its own address and is made and
    /// deleted with the VM. The node reaches the VM by the first NIC only.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub second_nic: bool,
    /// Labels of the VM (cluster, namespace, pod …) for people and for cost reports.
    pub labels: BTreeMap<String, String>,
    /// Processor architecture; `None`: that of the configured image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arch: Option<Arch>,
    /// Technology that keeps the VM's memory from the host and the cloud; `None`: as configured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub confidential: Option<Confidential>,
    /// Pricing model of the VM; `None`: as configured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub market: Option<Market>,
    /// Allowed zones, by the cloud's names; empty: any zone that the configuration allows.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub zones: Vec<String>,
    /// Whether the VM gets a public IP address in addition to the private one.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub public_ip: bool,
    /// Answer of [`crate::Provider::place`] for this attempt; `None` where it was not called or had no choice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<Placement>,
}

impl CreateRequest {
    /// Returns the SHA-256 over the whole request, as hex. A provider keeps it to recognise a key that comes back with
    /// another request, without keeping the request and its ticket.
    pub fn digest(&self) -> String {
        let json = serde_json::to_vec(self).expect("strings and numbers always serialise");
        hex::encode(Sha256::digest(&json))
    }
}

impl fmt::Debug for CreateRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The JSON, without the secret.
        let shown = CreateRequest { user_data: format!("({} bytes)", self.user_data.len()), ..self.clone() };
        write!(f, "CreateRequest {}", serde_json::to_string(&shown).map_err(|_| fmt::Error)?)
    }
}

/// Minimum size of a VM. 0: no minimum.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Size {
    /// Virtual CPUs.
    pub vcpus: u32,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// GPUs.
    pub gpus: u32,
    /// GPU model, by the cloud's name, compared without case; `None` for any.
    pub gpu_model: Option<String>,
}

/// Disk of the pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskRequest {
    /// Cloud's id of the disk, as its CSI driver names it.
    pub volume: String,
    /// Whether to attach it read-only.
    pub read_only: bool,
    /// Zone of the disk, if the caller has it (from a volume's topology); otherwise the provider asks its cloud. The VM
    /// must be in the same zone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zone: Option<String>,
}

/// Processor architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arch {
    /// `amd64` in Go.
    X86_64,
    /// `arm64` in Go.
    Aarch64,
    /// IBM Z.
    S390x,
    /// POWER, little endian.
    Ppc64le,
}

/// Technology that keeps a VM's memory from its host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Confidential {
    /// AMD SEV.
    Sev,
    /// AMD SEV-SNP.
    SevSnp,
    /// Intel TDX.
    Tdx,
    /// IBM Secure Execution (s390x).
    SecureExecution,
}

/// Pricing model of a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Market {
    /// Spare capacity at a low price; the cloud may reclaim it ([`crate::EventKind::Interruption`]).
    Spot,
    /// List price, without a time limit.
    OnDemand,
}

macro_rules! words {
    ($name:ident { $($variant:ident = $word:literal),* $(,)? }) => {
        impl $name {
            /// All values.
            pub const ALL: &'static [$name] = &[$($name::$variant),*];

            /// Returns the word used in configurations, labels and errors; the same as in JSON.
            pub const fn word(self) -> &'static str {
                match self {
                    $($name::$variant => $word),*
                }
            }

            /// Returns the value that this word names.
            pub fn from_word(word: &str) -> Option<$name> {
                $name::ALL.iter().copied().find(|one| one.word() == word)
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.word())
            }
        }
    };
}
words!(Arch { X86_64 = "x86_64", Aarch64 = "aarch64", S390x = "s390x", Ppc64le = "ppc64le" });
words!(Confidential {
    Sev = "sev",
    SevSnp = "sev_snp",
    Tdx = "tdx",
    SecureExecution = "secure_execution",
});
words!(Market { Spot = "spot", OnDemand = "on_demand" });
words!(OwnedState { Pending = "pending", Running = "running", Ended = "ended", Deleting = "deleting" });

/// Place of one attempt, as the provider chose it: the instance types, zones and markets that the call names. Opaque to
/// all but that provider. Not secret. At most 16 KiB.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Placement(String);

impl Placement {
    /// Most bytes of a placement. A fleet call's list of offerings fits several times, and a ledger keeps one placement
    /// per sandbox.
    pub const MAX: usize = 16 << 10;

    /// Wraps the provider's own text.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] when it is longer than [`Placement::MAX`].
    pub fn new(text: impl Into<String>) -> Result<Placement, crate::Error> {
        let text = text.into();
        if text.len() > Placement::MAX {
            return Err(crate::Error::invalid(format!(
                "a placement of {} bytes is more than the {} that are kept",
                text.len(),
                Placement::MAX
            )));
        }
        Ok(Placement(text))
    }

    /// Returns the provider's own text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

text_type!(Placement, Placement::new, crate::Error);

/// Hardware identity by which the guest recognises a disk; never its order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DiskIdentity {
    /// Serial number that the block device reports (virtio, NVMe controller, page 0x80 of a SCSI disk).
    Serial(String),
    /// Name below `/dev/disk/by-id/`. The hardware reports Google's (`google-` and the device name): no VM image has
    /// Google's udev rules.
    ById(String),
    /// Logical unit that the attach was given. In Azure: on a SCSI controller of data disks, or the NVMe namespace
    /// `Lun + 2`. Elsewhere: on any SCSI controller, and the disk has no partitions.
    Lun(u32),
    /// World Wide Name.
    Wwn(String),
}

/// VM that exists or is about to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Created {
    /// Cloud's id of the VM.
    pub id: InstanceId,
    /// Addresses, if the create returned them. Empty is normal; then call [`crate::Provider::addresses`].
    pub addresses: Vec<IpAddr>,
    /// Choices of provider and cloud for this VM.
    pub chosen: Chosen,
    /// Volume id and identity of each requested disk that is already attached.
    pub disks: Vec<(String, DiskIdentity)>,
}

/// Choices of provider and cloud for one VM, for people and metrics. A field is `None` where the cloud has no such choice,
/// or the answer to the create does not name it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Chosen {
    /// Instance type.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance_type: Option<String>,
    /// Zone, by the cloud's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zone: Option<String>,
    /// Pricing model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub market: Option<Market>,
    /// Image, by the cloud's name or id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// Price per hour that the provider knew at the create, in millionths of the currency of its prices.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub price: Option<u64>,
}

/// Result of one call for several VMs. See [`crate::Batch`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CreatedMany {
    /// VMs, in the order of their ids, so that a repeated call gives the same list.
    pub made: Vec<Created>,
    /// Reason why there are fewer VMs than requested. `None` exactly when there are as many.
    pub rest: Option<crate::Error>,
}

/// VM that [`crate::Provider::list_owned`] found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owned {
    /// Cloud's id of the VM.
    pub id: InstanceId,
    /// Key of its create; `None` when the mark was lost (then only age and name identify the owner). All VMs of a batch
    /// have the key of the batch.
    pub key: Option<IdempotencyKey>,
    /// Name of its create request.
    pub name: Option<String>,
    /// State of the VM.
    pub state: OwnedState,
    /// Addresses, as far as known.
    pub addresses: Vec<IpAddr>,
    /// Creation time, if the cloud reports one.
    pub created: Option<SystemTime>,
    /// Node that made it (its request's label `peerpod.node`), if the provider keeps that. A cluster-wide collector
    /// leaves a VM of an unknown node alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
}

/// State of a VM, as far as it matters for keeping or deleting it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OwnedState {
    /// Being made; possibly never finished, if its creator died.
    Pending,
    /// Running.
    Running,
    /// Ended by itself; `delete` removes the rest (console, disk).
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
            ..CreateRequest::default()
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
        let changes: [fn(&mut CreateRequest); 15] = [
            |r| r.name.push('x'),
            |r| r.user_data.push('x'),
            |r| r.size.gpus = 1,
            |r| r.instance_type = Some("t".into()),
            |r| r.image = Some("i".into()),
            |r| r.disks.push(DiskRequest { volume: "v".into(), ..DiskRequest::default() }),
            |r| r.disks.push(DiskRequest { zone: Some("z".into()), ..DiskRequest::default() }),
            |r| drop(r.labels.insert("k".into(), "v".into())),
            |r| r.arch = Some(Arch::Aarch64),
            |r| r.confidential = Some(Confidential::Tdx),
            |r| r.market = Some(Market::Spot),
            |r| r.zones.push("z".into()),
            |r| r.public_ip = true,
            |r| r.second_nic = true,
            |r| r.placement = Placement::new("p").ok(),
        ];
        for (index, change) in changes.iter().enumerate() {
            let mut other = request();
            change(&mut other);
            assert_ne!(base, other.digest(), "change {index}");
        }
    }

    #[test]
    fn a_request_of_an_older_ledger_has_its_old_digest() {
        // Format from before requests had the fields that follow `labels`.
        let old = r#"{"name":"a","user_data":"u","size":{"vcpus":1,"memory_mib":2,"gpus":0,"gpu_model":null},"instance_type":null,"image":null,"disks":[{"volume":"v","read_only":true}],"labels":{}}"#;
        let read: CreateRequest = serde_json::from_str(old).unwrap();
        assert_eq!(serde_json::to_string(&read).unwrap(), old);
        assert_eq!(read.digest(), hex::encode(Sha256::digest(old.as_bytes())));
    }

    #[test]
    fn names_are_the_same_in_json_and_in_text() {
        for arch in Arch::ALL {
            assert_eq!(serde_json::to_value(arch).unwrap(), arch.word());
            assert_eq!(Arch::from_word(arch.word()), Some(*arch));
        }
        for one in Confidential::ALL {
            assert_eq!(serde_json::to_value(one).unwrap(), one.word());
        }
        for market in Market::ALL {
            assert_eq!(serde_json::to_value(market).unwrap(), market.word());
        }
        for state in OwnedState::ALL {
            assert_eq!(serde_json::to_value(state).unwrap(), state.word());
        }
        assert_eq!(Market::from_word("free"), None);
    }

    #[test]
    fn a_too_large_placement_is_refused_also_from_json() {
        let long = "x".repeat(Placement::MAX + 1);
        assert!(Placement::new(long.clone()).is_err());
        assert!(serde_json::from_value::<Placement>(long.into()).is_err());
    }

    #[test]
    fn a_request_survives_the_ledger() {
        let json = serde_json::to_string(&request()).unwrap();
        let back: CreateRequest = serde_json::from_str(&json).unwrap();
        assert_eq!(back.digest(), request().digest());
    }
}
