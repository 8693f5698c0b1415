//! Reads the direct-volume files of CSI drivers that support Kata (Kata's `direct-volume` design; both shims read the
//! same). There is one folder for each published volume, named by the path in base64 (URL-safe, padded), with a
//! `mountInfo.json` in it. Read only. The path names the pod; folders of other pods are not read.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

use base64::Engine;
use base64::prelude::BASE64_URL_SAFE;
use peerpod_common::files;
use peerpod_volume::descriptor::{Attach, VERSION};
use peerpod_volume::{FsGroup, FsGroupPolicy, GuestVolume, Mode, Source, VolumeId};
use serde::Deserialize;

use super::PodVolume;

const FILE: &str = "mountInfo.json";
/// Size limit of a description, which has some hundred bytes.
const MAX_FILE: u64 = 64 << 10;
/// Limit of published volumes of one node; a kubelet's pods have some hundred.
const MOST: usize = 16 << 10;
/// Stands for the driver, which the file does not name.
const DRIVER: &str = "kata-direct-volume";

/// Content of a driver's file. Go reads the keys in any case; drivers write them as here.
#[derive(Deserialize)]
struct MountInfo {
    device: String,
    #[serde(default)]
    fstype: String,
    metadata: Option<BTreeMap<String, String>>,
    options: Option<Vec<String>>,
}

/// Returns the pod's direct volumes. One that cannot be understood is an error: no pod starts with fewer volumes.
pub(super) fn of_pod(folder: &Path, uid: &str) -> Result<Vec<PodVolume>, String> {
    let failed = |error: io::Error| format!("read direct volumes in {}: {error}", folder.display());
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed)?,
    };
    let mut found = Vec::new();
    for (number, entry) in entries.enumerate() {
        if number == MOST {
            return Err(failed(io::Error::other(format!("more than {MOST} entries"))));
        }
        let entry = entry.map_err(failed)?;
        let Some((target, name)) = entry.file_name().to_str().and_then(|name| target_of(name, uid)) else {
            continue;
        };
        let path = entry.path().join(FILE);
        match read(&path).and_then(|info| volume(info, target, &name)) {
            // A folder that was made for another purpose, or that is being removed.
            Err(why) if why == GONE => {}
            Err(why) => return Err(format!("direct volume {name} ({}): {why}", path.display())),
            Ok(volume) => found.push(volume),
        }
    }
    found.sort_by(|one, other| one.volume.id.cmp(&other.volume.id));
    Ok(found)
}

const GONE: &str = "it is gone";

/// Returns the published path that a folder's name encodes, and the volume's name in it, if it belongs to this pod.
fn target_of(folder: &str, uid: &str) -> Option<(PathBuf, String)> {
    let path = String::from_utf8(BASE64_URL_SAFE.decode(folder).ok()?).ok()?;
    let target = PathBuf::from(path);
    let plain = target.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
    if !plain || !target.is_absolute() {
        return None;
    }
    let parts: Vec<&str> = target.iter().filter_map(|part| part.to_str()).collect();
    match parts[..] {
        [.., "pods", of, "volumes", "kubernetes.io~csi", name, "mount"] if of == uid => {
            let name = name.to_owned();
            Some((target, name))
        }
        _ => None,
    }
}

fn read(path: &Path) -> Result<MountInfo, String> {
    let bytes = files::read_plain(path, MAX_FILE).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => GONE.to_owned(),
        _ => error.to_string(),
    })?;
    serde_json::from_slice(&bytes).map_err(|error| error.to_string())
}

fn volume(info: MountInfo, target_path: PathBuf, name: &str) -> Result<PodVolume, String> {
    let metadata = info.metadata.unwrap_or_default();
    for key in ["encrypt-type", "encryptionKey"] {
        if metadata.get(key).is_some_and(|value| !value.is_empty()) {
            let why = "which this version does not support; leave it out";
            return Err(format!("it is to be encrypted ({key}), {why}"));
        }
    }
    let disk = metadata.get("cloud-volume-path").filter(|path| !path.is_empty()).unwrap_or(&info.device);
    if disk.is_empty() {
        return Err("it names no device".to_owned());
    }
    let gid = metadata
        .get("fsGroup")
        .map(|gid| gid.parse().map_err(|_| format!("fsGroup {gid:?} is not a number")));
    let policy = match metadata.get("fsGroupChangePolicy").map(String::as_str) {
        Some("OnRootMismatch") => FsGroupPolicy::OnRootMismatch,
        _ => FsGroupPolicy::Always,
    };
    let options = info.options.unwrap_or_default();
    let read_only = options.iter().any(|option| option == "ro");
    let mode = Mode::Filesystem {
        fs_type: Some(info.fstype).filter(|kind| !kind.is_empty()),
        mount_options: options.into_iter().filter(|option| option != "ro" && option != "rw").collect(),
        fs_group: gid.transpose()?.map(|gid| FsGroup { gid, policy }),
    };
    let source = Source::AttachedBlock { volume: disk.clone(), zone: None, attach: Attach::Provider };
    Ok(PodVolume {
        volume: GuestVolume {
            version: VERSION,
            // The id derives from the disk: two pods that name one disk are two writers.
            id: VolumeId::of(DRIVER, disk),
            name: name.to_owned(),
            source,
            mode,
            read_only,
        },
        target_path,
        marker: String::new(),
        fence: (!read_only).then_some(0),
        identity: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            Folder(std::env::temp_dir().join(format!("peerpod-direct-{}-{name}", std::process::id())))
        }

        fn publish(&self, uid: &str, volume: &str, info: &str) {
            let target = format!("/var/lib/kubelet/pods/{uid}/volumes/kubernetes.io~csi/{volume}/mount");
            let folder = self.0.join(BASE64_URL_SAFE.encode(target));
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("0123456789abcdef"), "").unwrap();
            fs::write(folder.join(FILE), info).unwrap();
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).ok();
        }
    }

    #[test]
    fn a_drivers_own_file_is_a_volume_of_its_pod_alone() {
        let folder = Folder::new("own");
        assert_eq!(of_pod(&folder.0, "u-1"), Ok(Vec::new()), "no driver writes any");
        let info = r#"{"volume-type":"directvol","device":"/dev/zero","fstype":"xfs","options":["noatime","ro"],
            "metadata":{"cloud-volume-path":"disk-7","fsGroup":"2000","fsGroupChangePolicy":"OnRootMismatch"}}"#;
        folder.publish("u-1", "pvc-7", info);
        folder.publish(
            "u-2",
            "pvc-8",
            r#"{"volume-type":"directvol","device":"disk-8","fstype":"","metadata":null}"#,
        );
        fs::create_dir_all(folder.0.join("not base64!")).unwrap();
        let all = of_pod(&folder.0, "u-1").unwrap();
        let [one] = &all[..] else { panic!("{all:?}") };
        assert_eq!(one.volume.name, "pvc-7");
        assert!(one.target_path.ends_with("u-1/volumes/kubernetes.io~csi/pvc-7/mount"));
        assert!(matches!(&one.volume.source, Source::AttachedBlock { volume, .. } if volume == "disk-7"));
        assert!(one.volume.read_only && one.fence.is_none());
        let Mode::Filesystem { fs_type, mount_options, fs_group } = &one.volume.mode else { panic!() };
        assert_eq!((fs_type.as_deref(), &mount_options[..]), (Some("xfs"), &["noatime".to_owned()][..]));
        assert_eq!(*fs_group, Some(FsGroup { gid: 2000, policy: FsGroupPolicy::OnRootMismatch }));
        let other = of_pod(&folder.0, "u-2").unwrap().remove(0);
        assert!(other.fence.is_some() && other.disk().unwrap().volume == "disk-8");
        assert_eq!(of_pod(&folder.0, "u"), Ok(Vec::new()));
    }

    #[test]
    fn an_invalid_volume_fails_its_pod_only() {
        let folder = Folder::new("bad");
        for (uid, info, said) in [
            ("u-1", "{", "EOF"),
            ("u-2", r#"{"device":"","fstype":"ext4"}"#, "names no device"),
            ("u-3", r#"{"device":"d","metadata":{"encrypt-type":"luks2"}}"#, "encrypted"),
            ("u-4", r#"{"device":"d","metadata":{"fsGroup":"x"}}"#, "not a number"),
        ] {
            folder.publish(uid, "pvc", info);
            let why = of_pod(&folder.0, uid).unwrap_err();
            assert!(why.contains(said) && why.contains("pvc"), "{why}");
        }
        assert_eq!(of_pod(&folder.0, "u-5"), Ok(Vec::new()));
    }
}
