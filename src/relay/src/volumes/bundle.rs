//! Reads a container's bundle on this node: the specification as the container runtime wrote it, with the original host
//! sources of its mounts. The size is limited, and only plain files are read.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use peerpod_common::files::read_plain;
use serde::Deserialize;

use super::Volume;

/// Largest specification in bytes; a large one has some ten kilobytes.
const MAX_SPEC: u64 = 4 << 20;
/// Largest mountinfo in bytes; a node with a thousand pods has some ten thousand mounts.
const MAX_MOUNTS: u64 = 32 << 20;

/// The used part of a specification.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Spec {
    #[serde(default)]
    mounts: Vec<Mount>,
    #[serde(default)]
    linux: Linux,
}

#[derive(Debug, Deserialize)]
struct Mount {
    destination: String,
    #[serde(default)]
    source: String,
}

#[derive(Debug, Default, Deserialize)]
struct Linux {
    #[serde(default)]
    devices: Option<Vec<Device>>,
}

#[derive(Debug, Deserialize)]
struct Device {
    path: String,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct VolumePath {
    pub(super) volume: usize,
    /// Path below the volume's root; empty for the whole volume.
    pub(super) path: PathBuf,
}

impl Spec {
    pub(super) fn read(bundle: &str) -> Result<Spec, String> {
        let path = Path::new(bundle).join("config.json");
        if !is_plain(&path) {
            return Err(format!("{bundle:?} is not an absolute path of a bundle"));
        }
        let failed = |why: String| format!("read {}: {why}", path.display());
        let bytes = read_plain(&path, MAX_SPEC).map_err(|error| match error.kind() {
            ErrorKind::PermissionDenied => failed(format!("{error}; its folder must be in relay.bundles")),
            _ => failed(error.to_string()),
        })?;
        serde_json::from_slice(&bytes).map_err(|error| failed(error.to_string()))
    }

    /// Returns the original source of the mount at `destination`; `None` if there is none, or if there are two.
    pub(super) fn source(&self, destination: &str) -> Option<&Path> {
        let mut of = self.mounts.iter().filter(|mount| mount.destination == destination);
        let first = of.next()?;
        of.next().is_none().then_some(Path::new(&first.source))
    }

    pub(super) fn devices(&self) -> impl Iterator<Item = &str> {
        self.linux.devices.iter().flatten().map(|device| device.path.as_str())
    }
}

/// Finds the volume of a host path, by the path, or by its file system: kubelet bind-mounts a subPath elsewhere.
pub(super) fn place(volumes: &[Volume], source: &Path) -> Result<Option<VolumePath>, String> {
    if !is_plain(source) {
        return Ok(None);
    }
    for (volume, one) in volumes.iter().enumerate().filter(|(_, one)| !one.block) {
        if let Ok(path) = source.strip_prefix(&one.target_path) {
            return Ok(Some(VolumePath { volume, path: path.to_owned() }));
        }
    }
    let device = |path: &Path| fs::symlink_metadata(path).map(|found| found.dev()).ok();
    let Some(of) = device(source) else { return Ok(None) };
    let same = |(_, one): &(usize, &Volume)| {
        let target = Path::new(&one.target_path);
        !one.block && device(target) == Some(of) && is_mount(target, of)
    };
    let mut found = volumes.iter().enumerate().filter(same).map(|(at, _)| at);
    let Some(volume) = found.next() else { return Ok(None) };
    if found.next().is_some() {
        return Err(format!("{} is on a file system that two volumes share", source.display()));
    }
    let path = root_of(source)?;
    Ok(Some(VolumePath { volume, path }))
}

/// Whether a published target is a mount of its own, not just a folder on the node's disk.
fn is_mount(target: &Path, device: u64) -> bool {
    let parent = target.parent().and_then(|parent| fs::symlink_metadata(parent).ok());
    parent.is_some_and(|parent| parent.dev() != device)
}

/// Returns the part of the file system that is mounted at a path, from the kernel's list of mounts.
fn root_of(mounted: &Path) -> Result<PathBuf, String> {
    let failed =
        |why: &str| format!("find the part of the volume that is mounted at {}: {why}", mounted.display());
    let list =
        read_plain(Path::new("/proc/self/mountinfo"), MAX_MOUNTS).map_err(|e| failed(&e.to_string()))?;
    let list = String::from_utf8_lossy(&list);
    // The last mount at a path lies on top.
    let root = list.lines().rev().find_map(|line| {
        let mut fields = line.split(' ').skip(3);
        let (root, place) = (fields.next()?, fields.next()?);
        (unescape(place) == mounted.as_os_str().as_encoded_bytes()).then(|| unescape(root))
    });
    let root =
        root.and_then(|root| String::from_utf8(root).ok()).ok_or_else(|| failed("it is not a mount"))?;
    let path = PathBuf::from(root.trim_start_matches('/'));
    if path.components().all(|part| matches!(part, Component::Normal(_))) {
        Ok(path)
    } else {
        Err(failed(&format!("{root:?} is not a path in the volume")))
    }
}

/// Decodes a mountinfo field: the kernel writes space, tab, newline and backslash as three octal digits.
fn unescape(field: &str) -> Vec<u8> {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field.as_bytes();
    while let [first, after @ ..] = rest {
        let digits = after.get(..3).and_then(|digits| std::str::from_utf8(digits).ok());
        match digits.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) if *first == b'\\' => {
                out.push(byte);
                rest = &after[3..];
            }
            _ => {
                out.push(*first);
                rest = after;
            }
        }
    }
    out
}

/// Whether a path is absolute and without `..`.
fn is_plain(path: &Path) -> bool {
    path.is_absolute()
        && path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_paths_are_followed() {
        for bad in ["", "relative", "/a/../b"] {
            assert!(Spec::read(bad).is_err(), "{bad}");
            assert_eq!(place(&[], Path::new(bad)), Ok(None));
        }
        assert_eq!(unescape("/a\\040b\\134\\9"), b"/a b\\\\9");
    }

    #[test]
    fn a_source_below_a_target_belongs_to_that_volume() {
        let volume = |path: &str| Volume { target_path: path.into(), ..Volume::default() };
        let volumes = [volume("/pods/u/v1/mount"), volume("/pods/u/v10/mount")];
        let of = |path: &str| place(&volumes, Path::new(path)).unwrap();
        assert_eq!(of("/pods/u/v10/mount"), Some(VolumePath { volume: 1, path: "".into() }));
        assert_eq!(of("/pods/u/v1/mount/a/b"), Some(VolumePath { volume: 0, path: "a/b".into() }));
        assert_eq!(of("/pods/u/v1/mountain"), None);
        assert_eq!(of("/pods/u/v2/mount"), None);
    }
}
