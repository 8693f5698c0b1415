//! What is asked of a provider and what it answers. Plain data: serialisable, because the caller's ledger keeps a
//! request until the VM exists, and a repeated request must be the same byte for byte.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::{IdempotencyKey, InstanceId};

/// One VM to make. A field that the provider's [`crate::Capabilities`] do not cover must be empty.
///
/// Fields that came later are absent from the JSON while they are empty: a request that an older ledger holds has the
/// same [`CreateRequest::digest`] today.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
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
    /// A second network card, on the network that the provider's settings name for it: with an address of its own, made
    /// and deleted with the VM. The node speaks with the VM by the first one only.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub second_nic: bool,
    /// Marks on the VM (cluster, namespace, pod …) for people and for cost reports.
    pub labels: BTreeMap<String, String>,
    /// The processor architecture; `None`: what the configured image is for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arch: Option<Arch>,
    /// Memory that host and cloud cannot read, by this technology; `None`: what the configuration says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub confidential: Option<Confidential>,
    /// How the VM is paid for; `None`: what the configuration says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub market: Option<Market>,
    /// In one of these zones, by the cloud's names; empty: wherever the configuration allows.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub zones: Vec<String>,
    /// With an address of the internet beside the private one.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub public_ip: bool,
    /// What [`crate::Provider::place`] answered for this attempt; `None` where it was not asked or had no choice.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<Placement>,
}

impl CreateRequest {
    /// SHA-256 over the whole request, as hex: what a provider keeps to recognise a key that comes back with
    /// another request, without keeping the request (and its ticket).
    pub fn digest(&self) -> String {
        let json = serde_json::to_vec(self).expect("strings and numbers always serialise");
        hex::encode(&Sha256::digest(&json))
    }
}

impl fmt::Debug for CreateRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Everything but what is secret; a field that comes later must be thought of in `Capabilities::check`.
        f.debug_struct("CreateRequest")
            .field("name", &self.name)
            .field("user_data", &format_args!("({} bytes)", self.user_data.len()))
            .field("size", &self.size)
            .field("instance_type", &self.instance_type)
            .field("image", &self.image)
            .field("disks", &self.disks)
            .field("second_nic", &self.second_nic)
            .field("labels", &self.labels)
            .field("arch", &self.arch)
            .field("confidential", &self.confidential)
            .field("market", &self.market)
            .field("zones", &self.zones)
            .field("public_ip", &self.public_ip)
            .field("placement", &self.placement)
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
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskRequest {
    /// The cloud's id of the disk, as its CSI driver calls it.
    pub volume: String,
    /// Attach it for reading only.
    pub read_only: bool,
    /// Where the disk is, when the caller knows (a volume's topology); the provider asks its cloud otherwise. The VM
    /// must be in the same zone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zone: Option<String>,
}

/// A processor architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Arch {
    /// `amd64` in Go's words.
    X86_64,
    /// `arm64` in Go's words.
    Aarch64,
    /// IBM Z.
    S390x,
    /// POWER, little endian.
    Ppc64le,
}

/// A technology that keeps a VM's memory from its host.
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

/// How a VM is paid for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Market {
    /// What is left over, cheaply; the cloud may take it back ([`crate::EventKind::Interruption`]).
    Spot,
    /// At the list price, for as long as one wants.
    OnDemand,
}

macro_rules! words {
    ($name:ident { $($variant:ident = $word:literal),* $(,)? }) => {
        impl $name {
            /// All there are.
            pub const ALL: &'static [$name] = &[$($name::$variant),*];

            /// As it is written in configurations, labels and errors; the same as in JSON.
            pub const fn word(self) -> &'static str {
                match self {
                    $($name::$variant => $word),*
                }
            }

            /// The one that is written so.
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

/// Where one attempt is to be made, as the provider chose it: the instance types, zones and markets that the call
/// names. Only that provider reads it; everybody else keeps it. Not secret. At most 16 KiB.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Placement(String);

impl Placement {
    /// Most bytes of one: a fleet call's list of offerings fits several times, and a ledger keeps one per sandbox.
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

    /// The provider's own text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for Placement {
    type Error = crate::Error;
    fn try_from(text: String) -> Result<Placement, crate::Error> {
        Placement::new(text)
    }
}

impl From<Placement> for String {
    fn from(placement: Placement) -> String {
        placement.0
    }
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

/// What one call for several VMs made. See [`crate::Batch`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CreatedMany {
    /// The VMs, in the order of their ids, so that a repeated call gives the same list.
    pub made: Vec<Created>,
    /// Why there are fewer than asked for. `None` exactly when there are as many.
    pub rest: Option<crate::Error>,
}

/// A VM that [`crate::Provider::list_owned`] found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owned {
    /// The cloud's id.
    pub id: InstanceId,
    /// The key it was made with; `None` when the mark was lost (then only age and name tell whose it is). All VMs of
    /// one batch have the batch's.
    pub key: Option<IdempotencyKey>,
    /// The name it was made with.
    pub name: Option<String>,
    /// Where it is in its life.
    pub state: OwnedState,
    /// Its addresses, as far as known.
    pub addresses: Vec<IpAddr>,
    /// When it was made, when the cloud says so.
    pub created: Option<SystemTime>,
    /// The node that made it (its request's label `peerpod.node`), where the provider keeps that. Whoever collects for a
    /// whole cluster leaves a VM alone of which it does not know the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
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
        // As it was written before requests had the fields that follow `labels`.
        let old = r#"{"name":"a","user_data":"u","size":{"vcpus":1,"memory_mib":2,"gpus":0,"gpu_model":null},"instance_type":null,"image":null,"disks":[{"volume":"v","read_only":true}],"labels":{}}"#;
        let read: CreateRequest = serde_json::from_str(old).unwrap();
        assert_eq!(serde_json::to_string(&read).unwrap(), old);
        assert_eq!(read.digest(), hex::encode(&Sha256::digest(old.as_bytes())));
    }

    #[test]
    fn words_are_the_same_in_json_and_in_text() {
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
        assert_eq!(Market::from_word("free"), None);
    }

    #[test]
    fn a_placement_that_no_ledger_should_keep_is_refused_also_from_json() {
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
