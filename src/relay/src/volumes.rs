//! Matches a container's mounts with the volumes of its pod, which the shim's request does not name. The shim copies a
//! folder that kubelet published into the VM like any other; data written to that copy would be lost silently.
//!
//! A mount is matched by the original source that the container's bundle has for its destination (`bundle.rs`), or by
//! the marker file copied from there just before; a raw device by the name that the container runtime gave it. The
//! order is never used. A volume that cannot be matched fails the container. Pure but for the bundle.

mod bundle;
mod rewrite;

use std::collections::BTreeMap;

use peerpod_proto::intercept::CopyFileRequest;
use serde::{Deserialize, Serialize};

pub(crate) use rewrite::create_container;

/// Limit of volumes of one pod.
pub(crate) const MOST: usize = 256;
/// Folder in the VM into which shims copy.
const COPIES: &str = "/run/kata-containers/shared/containers/";
/// Name of the marker file in a published target.
const MARKER: &str = ".peerpod-volume";
/// Limit of folders that a connection has copied and no container has mounted yet.
const FOLDERS: usize = 4096;
/// Mask of the file type in a mode.
const KIND: u32 = 0o170_000;
const FOLDER: u32 = 0o040_000;

/// Volume of the pod, as the node announced it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Volume {
    pub(crate) id: String,
    pub(crate) name: String,
    /// Path at which the volume is published on this node.
    pub(crate) target_path: String,
    #[serde(default)]
    pub(crate) marker: String,
    #[serde(default)]
    pub(crate) read_only: bool,
    #[serde(default)]
    pub(crate) block: bool,
}

/// Whether a name can be a volume's id: 32 hexadecimal digits.
pub(crate) fn is_volume_id(name: &str) -> bool {
    name.len() == 32 && name.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Content copied into a folder so far.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
enum Folder {
    /// Nothing yet.
    #[default]
    Empty,
    /// Files without a marker.
    Files,
    /// Marker of this volume.
    Volume(String),
    /// Marker of no volume of this pod.
    Stranger,
}

/// Folders that shims copied on one connection.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Copies(BTreeMap<String, Folder>);

impl Copies {
    pub(crate) fn note(&mut self, volumes: &[Volume], copied: &CopyFileRequest) {
        let path = copied.path.trim_end_matches('/');
        if !path.starts_with(COPIES) {
            return;
        }
        if copied.file_mode & KIND == FOLDER {
            // An empty folder may be a subPath only in a pod with volumes.
            if !volumes.is_empty() && self.0.len() < FOLDERS {
                self.0.entry(path.to_owned()).or_default();
            }
            return;
        }
        let Some((folder, name)) = path.rsplit_once('/') else { return };
        let is_marker = name == MARKER && copied.offset == 0;
        let found = is_marker.then(|| {
            let whole = i64::try_from(copied.data.len()) == Ok(copied.file_size);
            let of = |volume: &&Volume| !volume.marker.is_empty() && volume.marker.as_bytes() == copied.data;
            let volume = volumes.iter().find(of).filter(|_| whole);
            volume.map_or(Folder::Stranger, |volume| Folder::Volume(volume.id.clone()))
        });
        // A marker counts also if the copy of its folder was not recorded.
        let there = match &found {
            Some(_) if self.0.len() < FOLDERS => Some(self.0.entry(folder.to_owned()).or_default()),
            _ => self.0.get_mut(folder),
        };
        match (there, found) {
            (Some(there), Some(found)) => *there = found,
            (Some(there @ Folder::Empty), None) => *there = Folder::Files,
            _ => {}
        }
    }

    /// Whether a marker was copied that belongs to no volume of this pod.
    pub(crate) fn has_strangers(&self) -> bool {
        self.0.values().any(|seen| *seen == Folder::Stranger)
    }

    fn of(&self, source: &str) -> Option<&Folder> {
        self.0.get(source.trim_end_matches('/'))
    }

    /// Returns a folder with a marker, copied for this container, that is none of these sources.
    fn unused(&self, container: &str, sources: &[&str]) -> Option<&str> {
        let prefix = format!("{COPIES}{container}-");
        let markers = self.0.iter().filter(|(_, seen)| matches!(seen, Folder::Volume(_) | Folder::Stranger));
        let mut unused = markers.filter(|(folder, _)| folder.starts_with(&prefix));
        unused
            .find(|(folder, _)| !sources.iter().any(|source| source.trim_end_matches('/') == folder.as_str()))
            .map(|(folder, _)| folder.as_str())
    }

    /// Removes the folders copied for a container that has arrived.
    fn forget(&mut self, container: &str) {
        let prefix = format!("{COPIES}{container}-");
        self.0.retain(|folder, _| !folder.starts_with(&prefix));
    }
}

#[cfg(test)]
mod tests;
