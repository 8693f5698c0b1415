//! Stores the publications and stagings of this proxy on this node. Some calls name only a volume and a path; the files
//! identify them as calls for a peer pod's volume, at a constant cost and after any crash:
//!
//! ```text
//! <volumes-dir>/targets/<volume id>/<hash of the target>.json    Publication
//! <volumes-dir>/staged/<volume id>/<hash of the staging path>    empty
//! <volumes-dir>/staged/<volume id>/<that hash>.secret.json       Given, what is needed of the secret of NodeStageVolume
//! <volumes-dir>/devices/<volume id>-<hash of the target>         a raw device's marker
//! <volumes-dir>/owners/<volume id>.json                          Owner, where no cluster says whose a disk is
//! ```
//!
//! All files are 0600 in folders of 0700, and only `.secret.json` holds a secret. May touch: those folders.

use std::path::{Path, PathBuf};
use std::{fs, io};

use peerpod_volume::VolumeId;
use peerpod_volume::files::{self, gone, names, read_json, remove_emptied, sync_dir, write, write_json};
use peerpod_volume::records::Pod;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::capability::Capability;
use crate::secrets::Given;

/// Version of the files' format.
pub(crate) const VERSION: u32 = 1;

/// Namespace of volumes without a pod.
pub(crate) const NO_NAMESPACE: &str = "-";

/// Limit of one file in bytes, when written and when read.
pub(crate) const MAX_FILE: u64 = 64 << 10;

/// One target of one volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Publication {
    pub(crate) version: u32,
    pub(crate) volume: VolumeId,
    /// The driver's name: several proxies share the folder.
    pub(crate) driver: String,
    pub(crate) handle: String,
    /// Name of the volume for people.
    pub(crate) name: String,
    pub(crate) pod: Pod,
    pub(crate) target: PathBuf,
    pub(crate) wanted: Capability,
    pub(crate) read_only: bool,
    pub(crate) marker: String,
    /// Whether only one pod at a time may have it.
    pub(crate) exclusive: bool,
    /// Whether the driver attaches the disk, so that the cluster's object must name the VM.
    pub(crate) driver_attached: bool,
    /// The target is gone; the rest is kept until the VM is gone.
    pub(crate) leaving: bool,
}

impl Publication {
    pub(crate) fn of_kubernetes(&self) -> bool {
        self.pod.namespace != NO_NAMESPACE
    }

    /// Returns the fields that the controller role needs for its request to the driver, as JSON without secrets.
    pub(crate) fn request(&self) -> serde_json::Value {
        serde_json::json!({
            "volumeId": self.handle, "targetPath": self.target, "readonly": self.read_only, "capability": self.wanted,
        })
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Owner {
    version: u32,
    holder: String,
}

#[derive(Clone, Debug)]
pub(crate) struct Publications {
    pub(super) root: PathBuf,
}

impl Publications {
    pub(crate) fn put(&self, publication: &Publication) -> io::Result<()> {
        let name = format!("{}.json", hash(&publication.target));
        write_json(&self.targets(&publication.volume), &name, publication, MAX_FILE)
    }

    pub(crate) fn get(&self, volume: &VolumeId, target: &Path) -> io::Result<Option<Publication>> {
        read_json(&self.targets(volume).join(format!("{}.json", hash(target))), MAX_FILE)
    }

    pub(crate) fn of(&self, volume: &VolumeId) -> io::Result<Vec<Publication>> {
        let folder = self.targets(volume);
        let mut found = Vec::new();
        for name in names(&folder)? {
            found.extend(read_json::<Publication>(&folder.join(name), MAX_FILE)?);
        }
        Ok(found)
    }

    /// Returns all publications, for a start, and the errors of unreadable ones, which block no other.
    pub(crate) fn all(&self) -> io::Result<(Vec<Publication>, Vec<io::Error>)> {
        let (mut found, mut bad) = (Vec::new(), Vec::new());
        let root = self.root.join("targets");
        for folder in names(&root)?.into_iter().filter(|name| name.parse::<VolumeId>().is_ok()) {
            let folder = root.join(folder);
            let files = names(&folder).unwrap_or_else(|why| {
                bad.push(io::Error::new(why.kind(), format!("{}: {why}", folder.display())));
                Vec::new()
            });
            for file in files {
                match read_json::<Publication>(&folder.join(file), MAX_FILE) {
                    Ok(publication) => found.extend(publication),
                    Err(why) => bad.push(why),
                }
            }
        }
        Ok((found, bad))
    }

    /// Removes a publication. A missing one is no error.
    pub(crate) fn remove(&self, publication: &Publication) -> io::Result<()> {
        let folder = self.targets(&publication.volume);
        gone(fs::remove_file(folder.join(format!("{}.json", hash(&publication.target)))))?;
        // The volume may have another target.
        drop(remove_emptied(&folder));
        sync_dir(&self.root.join("targets"))
    }

    /// Removes the volume's folder if it has no publication any more. The caller holds the volume's lock.
    pub(crate) fn remove_unused(&self, volume: &VolumeId) -> io::Result<()> {
        match remove_emptied(&self.targets(volume)) {
            Err(why) if why.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
            done => done,
        }
    }

    /// Records that a volume was staged at this path. For a peer pod's volume, staging does nothing else.
    pub(crate) fn put_staged(&self, volume: &VolumeId, path: &Path) -> io::Result<()> {
        write(&self.staged(volume), &hash(path), b"")
    }

    pub(crate) fn is_staged(&self, volume: &VolumeId, path: &Path) -> bool {
        self.staged(volume).join(hash(path)).exists()
    }

    /// Stores the secret of a staging until the volume is unstaged; with `None`, deletes it. For a peer pod's volume it
    /// follows [`Publications::put_staged`].
    pub(crate) fn put_staged_secret(
        &self,
        volume: &VolumeId,
        path: &Path,
        given: Option<&Given>,
    ) -> io::Result<()> {
        let (folder, name) = (self.staged(volume), secret(path));
        match given {
            Some(given) => write(&folder, &name, &given.to_bytes()),
            None => files::remove(&folder, &name),
        }
    }

    /// Returns the secret of this staging; `None`: there is none. An error contains no part of it.
    pub(crate) fn staged_secret(&self, volume: &VolumeId, path: &Path) -> io::Result<Option<Given>> {
        Given::read_file(&self.staged(volume).join(secret(path)))
    }

    /// Removes the staging and its secret. A missing one is no error.
    pub(crate) fn remove_staged(&self, volume: &VolumeId, path: &Path) -> io::Result<()> {
        self.put_staged_secret(volume, path, None)?;
        gone(fs::remove_file(self.staged(volume).join(hash(path))))?;
        drop(remove_emptied(&self.staged(volume)));
        Ok(())
    }

    /// Takes a disk for a pod, where no cluster records the owner. Returns the holder if it is another pod.
    pub(crate) fn take(&self, volume: &VolumeId, uid: &str) -> io::Result<Result<(), String>> {
        if let Some(Owner { holder, .. }) = self.owner(volume)? {
            return Ok(if holder == uid { Ok(()) } else { Err(holder) });
        }
        let owner = Owner { version: VERSION, holder: uid.to_owned() };
        write_json(&self.owners(), &format!("{volume}.json"), &owner, MAX_FILE).map(Ok)
    }

    /// Releases a pod's disk and deletes its owner file. A disk of another pod is no error.
    pub(crate) fn give_back(&self, volume: &VolumeId, uid: &str) -> io::Result<()> {
        if self.owner(volume)?.is_some_and(|owner| owner.holder != uid) {
            return Ok(());
        }
        files::remove(&self.owners(), &format!("{volume}.json"))
    }

    /// Returns the file of a raw device's publication, which begins with its marker: kubelet maps a loop device of it.
    pub(crate) fn device_file(&self, volume: &VolumeId, target: &Path) -> PathBuf {
        self.root.join("devices").join(format!("{volume}-{}", hash(target)))
    }

    fn owner(&self, volume: &VolumeId) -> io::Result<Option<Owner>> {
        read_json(&self.owners().join(format!("{volume}.json")), MAX_FILE)
    }

    fn owners(&self) -> PathBuf {
        self.root.join("owners")
    }

    fn targets(&self, volume: &VolumeId) -> PathBuf {
        self.root.join("targets").join(volume.as_str())
    }

    fn staged(&self, volume: &VolumeId) -> PathBuf {
        self.root.join("staged").join(volume.as_str())
    }
}

fn secret(path: &Path) -> String {
    format!("{}.secret.json", hash(path))
}

/// Returns a path's hash as a file name.
fn hash(path: &Path) -> String {
    use std::os::unix::ffi::OsStrExt;
    let digest = Sha256::digest(path.as_os_str().as_bytes());
    hex::encode(&digest[..16])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn publication(target: &str, handle: &str) -> Publication {
        Publication {
            version: VERSION,
            volume: VolumeId::of("driver", handle),
            driver: "driver".into(),
            handle: handle.into(),
            name: handle.into(),
            pod: Pod { uid: "u-1".into(), namespace: "shop".into(), name: "web-0".into() },
            target: target.into(),
            wanted: Capability::default(),
            read_only: false,
            marker: "m".into(),
            exclusive: true,
            driver_attached: false,
            leaving: false,
        }
    }

    #[test]
    fn one_bad_file_holds_up_its_own_volume_and_no_other() {
        let root = std::env::temp_dir().join(format!("peerpod-publications-{}", std::process::id()));
        let files = Publications { root: root.clone() };
        let (good, bad) = (publication("/t/1", "good"), publication("/t/2", "bad"));
        for one in [&good, &bad] {
            files.put(one).unwrap();
        }
        let path = root.join("targets").join(bad.volume.as_str()).join(format!("{}.json", hash(&bad.target)));
        for text in ["{".to_owned(), " ".repeat(MAX_FILE as usize + 1)] {
            fs::write(&path, text).unwrap();
            let (found, failed) = files.all().unwrap();
            assert_eq!(found, std::slice::from_ref(&good));
            assert!(
                failed.len() == 1 && failed[0].to_string().contains(&*path.to_string_lossy()),
                "{failed:?}"
            );
            assert!(files.of(&bad.volume).is_err() && files.of(&good.volume).is_ok());
        }
        let mut large = good.clone();
        large.wanted.mount_options = vec!["x".repeat(MAX_FILE as usize)];
        assert_eq!(files.put(&large).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        assert_eq!(files.of(&good.volume).unwrap(), [good]);
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn a_staged_secret_is_private_and_goes_with_the_staging() {
        use std::os::unix::fs::MetadataExt;
        let root = std::env::temp_dir().join(format!("peerpod-staged-{}", std::process::id()));
        let (files, volume) = (Publications { root: root.clone() }, VolumeId::of("smb.csi.k8s.io", "v"));
        let path = Path::new("/staging");
        let mut secrets = std::collections::HashMap::from([("password".to_owned(), "hidden".to_owned())]);
        let given = Given::take(&mut secrets, crate::drivers::login("smb.csi.k8s.io")).unwrap();
        files.put_staged(&volume, path).unwrap();
        files.put_staged_secret(&volume, path, Some(&given)).unwrap();
        assert!(files.is_staged(&volume, path) && !files.is_staged(&volume, Path::new("/other")));
        let file = root.join("staged").join(volume.as_str()).join(secret(path));
        assert_eq!(fs::metadata(&file).unwrap().mode() & 0o7777, 0o600);
        assert!(files.staged_secret(&volume, path).unwrap() == Some(given));
        assert!(files.staged_secret(&volume, Path::new("/other")).unwrap().is_none());
        fs::write(&file, "hidden").unwrap();
        let why = files.staged_secret(&volume, path).unwrap_err().to_string();
        assert!(!why.contains("hidden") && why.contains(&*file.to_string_lossy()), "{why}");
        files.remove_staged(&volume, path).unwrap();
        assert_eq!(names(&root.join("staged")).unwrap(), [""; 0]);
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn a_disk_has_one_owner_and_no_state_without_one() {
        let root = std::env::temp_dir().join(format!("peerpod-owners-{}", std::process::id()));
        let (files, volume) = (Publications { root: root.clone() }, VolumeId::of("driver", "v"));
        assert_eq!(files.take(&volume, "u-1").unwrap(), Ok(()));
        assert_eq!(files.take(&volume, "u-1").unwrap(), Ok(()));
        assert_eq!(files.take(&volume, "u-2").unwrap(), Err("u-1".to_owned()));
        files.give_back(&volume, "u-2").unwrap();
        assert_eq!(files.take(&volume, "u-2").unwrap(), Err("u-1".to_owned()));
        let left = || fs::read_dir(root.join("owners")).unwrap().count();
        for (uid, next) in [("u-1", "u-2"), ("u-2", "u-1")] {
            // A writer was killed here.
            fs::write(root.join("owners").join(format!(".{volume}.json.new")), "{").unwrap();
            for _ in 0..2 {
                files.give_back(&volume, uid).unwrap();
            }
            assert_eq!(left(), 0);
            assert_eq!(files.take(&volume, next).unwrap(), Ok(()));
        }
        fs::remove_dir_all(root).unwrap();
    }
}
