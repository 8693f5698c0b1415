//! Describes one volume to the guest: its location, its contents and its mount. JSON, version 1.
//!
//! A descriptor never holds a secret, only a reference to one. Fields may be added with `#[serde(default)]`. An
//! unknown kind is refused by name, because a volume that is not understood must fail the pod, not lose its data.

use std::fmt;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Version that this program writes, and the only one that it reads.
pub const VERSION: u32 = 1;

/// Largest descriptor that is read, in bytes.
pub const MAX_BYTES: usize = 256 << 10;

/// A volume of a pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GuestVolume {
    /// [`VERSION`].
    pub version: u32,
    /// Identifier of the volume.
    pub id: VolumeId,
    /// Name for messages only: that of the PersistentVolume, or the driver's handle.
    pub name: String,
    /// Location of the data.
    pub source: Source,
    /// Form in which a container gets the volume.
    pub mode: Mode,
    /// No container may write to it, and the disk is attached for reading only.
    #[serde(default)]
    pub read_only: bool,
}

/// Identifier of a volume for wrapper, node, relay and guest: 32 lower-case hexadecimal digits, hashed from the CSI
/// driver's name and the volume's handle. Both inputs may contain any characters.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "String")]
#[schemars(with = "String")]
pub struct VolumeId(String);

impl VolumeId {
    /// Returns the identifier for this driver's volume.
    pub fn of(driver: &str, handle: &str) -> VolumeId {
        let digest = Sha256::new().chain_update(driver).chain_update([0]).chain_update(handle).finalize();
        VolumeId(hex::encode(&digest[..16]))
    }

    /// Returns the digits.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for VolumeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for VolumeId {
    type Err = String;
    fn from_str(text: &str) -> Result<VolumeId, String> {
        VolumeId::try_from(text.to_owned())
    }
}

impl TryFrom<String> for VolumeId {
    type Error = String;
    fn try_from(text: String) -> Result<VolumeId, String> {
        let digits = text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        if digits && text.len() == 32 {
            Ok(VolumeId(text))
        } else {
            Err(format!("{text:?} is no volume id: 32 hexadecimal digits"))
        }
    }
}

/// Location of a volume's data.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Source {
    /// A disk that is attached to the VM from outside.
    AttachedBlock {
        /// The cloud's id of the disk, in the form that the CSI driver uses.
        volume: String,
        /// Zone of the disk, if the volume's topology names it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        zone: Option<String>,
        /// Component that attaches the disk.
        #[serde(default)]
        attach: Attach,
    },
    /// An NFS export, mounted by the guest.
    Nfs {
        /// Name or address.
        server: String,
        /// The exported path.
        export: String,
    },
    /// An SMB share, mounted by the guest.
    Smb {
        /// Name or address.
        server: String,
        /// The share, optionally with a path below it.
        share: String,
        /// Secret with user and password.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        secret: Option<SecretRef>,
    },
    /// An iSCSI logical unit.
    Iscsi {
        /// `address:port`, tried in turn.
        portals: Vec<String>,
        /// The target's name.
        iqn: String,
        /// The logical unit.
        lun: u32,
        /// Secret with the CHAP credentials.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        secret: Option<SecretRef>,
    },
    /// A network block device.
    Nbd {
        /// Name or address.
        host: String,
        /// TCP port.
        port: u16,
        /// The export's name.
        #[serde(default)]
        export: String,
    },
}

/// Component that attaches a disk to the VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Attach {
    /// The node's provider, through the cloud's API.
    #[default]
    Provider,
    /// The CSI driver: its ControllerPublishVolume is called with the VM as the node.
    Driver,
}

/// A Kubernetes secret. Its contents never appear in a descriptor, record or object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct SecretRef {
    /// The secret's namespace.
    pub namespace: String,
    /// The secret's name.
    pub name: String,
}

/// Form in which a container gets a volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "mode", rename_all = "kebab-case")]
pub enum Mode {
    /// A directory.
    Filesystem {
        /// `ext4`, `xfs`, …; if absent: the file system on the disk, or ext4 on an empty disk.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        fs_type: Option<String>,
        /// Options, as mount(8) takes them after `-o`.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        mount_options: Vec<String>,
        /// Group that all files are to belong to.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        fs_group: Option<FsGroup>,
    },
    /// The raw device.
    Block,
}

/// The pod's fsGroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FsGroup {
    /// Group id.
    pub gid: u32,
    /// Condition for changing the files.
    #[serde(default)]
    pub policy: FsGroupPolicy,
}

/// Condition for giving the files of a volume to the pod's group, as Kubernetes' `fsGroupChangePolicy`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum FsGroupPolicy {
    /// At each mount.
    #[default]
    Always,
    /// If the root folder does not belong to the group yet.
    OnRootMismatch,
}

/// Property by which the guest recognises a disk: a value of the hardware, never the order of disks. The JSON is the
/// same as in a provider's answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Identity {
    /// The disk's serial number, as the guest's kernel reports it (a virtio disk: the first 20 bytes; a SCSI disk: page
    /// 0x80 of its vital product data).
    Serial(String),
    /// The name below `/dev/disk/by-id/`. The hardware reports Google's (`google-` and the device name): no image has
    /// Google's udev rules.
    ById(String),
    /// Logical unit that the attach gave the disk. In Azure: on a SCSI controller of data disks, or the NVMe namespace
    /// `Lun + 2`. Elsewhere: on any SCSI controller, and the disk has no partitions.
    Lun(u32),
    /// The World Wide Name.
    Wwn(String),
}

impl GuestVolume {
    /// Reads a descriptor. Fails for one of an unknown form; the text names an unknown kind.
    pub fn read(bytes: &[u8]) -> Result<GuestVolume, String> {
        let size = bytes.len();
        if size > MAX_BYTES {
            return Err(format!("the volume's descriptor has {size} bytes, more than {MAX_BYTES}"));
        }
        let volume: GuestVolume =
            serde_json::from_slice(bytes).map_err(|why| format!("the volume's descriptor: {why}"))?;
        let GuestVolume { name, version, .. } = &volume;
        if *version != VERSION {
            return Err(format!(
                "the descriptor of volume {name} has version {version}, this program reads {VERSION}: upgrade it"
            ));
        }
        Ok(volume)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NFS: &str = r#"{"version":1,"id":"0123456789abcdef0123456789abcdef","name":"pvc-1",
        "source":{"kind":"nfs","server":"10.0.0.2","export":"/e"},"mode":{"mode":"filesystem"}}"#;

    #[test]
    fn missing_fields_have_defaults_and_unknown_values_are_named() {
        let volume = GuestVolume::read(NFS.as_bytes()).unwrap();
        assert_eq!(
            volume.mode,
            Mode::Filesystem { fs_type: None, mount_options: Vec::new(), fs_group: None }
        );
        assert!(!volume.read_only);
        let error = GuestVolume::read(NFS.replace("\"nfs\"", "\"ceph\"").as_bytes()).unwrap_err();
        assert!(error.contains("ceph") && error.contains("attached-block"), "{error}");
        let error = GuestVolume::read(NFS.replace("\"version\":1", "\"version\":2").as_bytes()).unwrap_err();
        assert!(error.contains("pvc-1 has version 2"), "{error}");
        assert!(GuestVolume::read(NFS.replace("0123456789abcdef", "../../../../../..").as_bytes()).is_err());
    }

    #[test]
    fn a_volumes_id_is_of_driver_and_handle() {
        assert_eq!(VolumeId::of("d", "v"), VolumeId::of("d", "v"));
        assert_ne!(VolumeId::of("da", "b"), VolumeId::of("d", "ab"));
        assert!(VolumeId::try_from(VolumeId::of("d", "/a/../#b").to_string()).is_ok());
    }
}
