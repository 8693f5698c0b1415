//! Reads CSI volume capabilities. May touch: nothing.

use peerpod_proto::csi::VolumeCapability;
use peerpod_proto::csi::volume_capability::Access_type;
use peerpod_volume::Source;
use serde::{Deserialize, Serialize};

/// CSI's numbers of the access modes.
pub(crate) const SINGLE_NODE_READER_ONLY: i32 = 2;
pub(crate) const MULTI_NODE_READER_ONLY: i32 = 3;
pub(crate) const MULTI_NODE_SINGLE_WRITER: i32 = 4;
pub(crate) const MULTI_NODE_MULTI_WRITER: i32 = 5;
pub(crate) const SINGLE_NODE_SINGLE_WRITER: i32 = 6;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Capability {
    pub(crate) block: bool,
    /// Filesystem type, where one is named.
    pub(crate) fs_type: Option<String>,
    /// Options as mount(8) takes them after `-o`.
    pub(crate) mount_options: Vec<String>,
    /// Group of the pod, where the driver is to apply it.
    pub(crate) group: Option<u32>,
    /// CSI's number of the access mode.
    pub(crate) access_mode: i32,
}

/// Reads a capability; `None` when it asks for neither block nor mount.
pub(crate) fn wanted(capability: Option<&VolumeCapability>) -> Result<Option<Capability>, String> {
    let Some(capability) = capability else { return Ok(None) };
    let access_mode = capability.access_mode.as_ref().map_or(0, |mode| mode.mode);
    match &capability.access_type {
        Some(Access_type::Block(_)) => {
            Ok(Some(Capability { block: true, access_mode, ..Capability::default() }))
        }
        Some(Access_type::Mount(mount)) => {
            let group = match mount.volume_mount_group.as_str() {
                "" => None,
                text => Some(
                    text.parse().map_err(|_| format!("volume_mount_group {text:?} is no group's number"))?,
                ),
            };
            let fs_type = Some(mount.fs_type.clone()).filter(|kind| !kind.is_empty());
            let mount_options = mount.mount_flags.clone();
            Ok(Some(Capability { block: false, fs_type, mount_options, group, access_mode }))
        }
        _ => Ok(None),
    }
}

impl Capability {
    /// Returns the capability as a CSI message.
    pub(crate) fn capability(&self) -> VolumeCapability {
        let mut capability = VolumeCapability::new();
        capability.access_mode.mut_or_insert_default().mode = self.access_mode;
        if self.block {
            capability.set_block(Default::default());
        } else {
            let mount = capability.mut_mount();
            mount.fs_type = self.fs_type.clone().unwrap_or_default();
            mount.mount_flags.clone_from(&self.mount_options);
        }
        capability
    }

    pub(crate) fn reads_only(&self) -> bool {
        matches!(self.access_mode, SINGLE_NODE_READER_ONLY | MULTI_NODE_READER_ONLY)
    }

    /// Whether only one pod at a time may have the volume: a disk that does not support several machines. Two pods of
    /// one worker are two machines.
    pub(crate) fn exclusive(&self, source: &Source, read_only: bool) -> bool {
        let disk = matches!(source, Source::AttachedBlock { .. } | Source::Iscsi { .. } | Source::Nbd { .. });
        let shared = match self.access_mode {
            MULTI_NODE_READER_ONLY | MULTI_NODE_MULTI_WRITER => true,
            MULTI_NODE_SINGLE_WRITER => read_only,
            _ => false,
        };
        disk && !shared
    }
}
