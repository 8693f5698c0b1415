//! What this wrapper has published and staged on this node, so that calls which name only a volume and a path are known to
//! be ours, at a constant cost and after any crash:
//!
//! ```text
//! <volumes-dir>/targets/<volume id>/<hash of the target>.json    Publication
//! <volumes-dir>/staged/<volume id>/<hash of the staging path>    empty
//! <volumes-dir>/owners/<volume id>.json                          Owner, where no cluster says whose a disk is
//! ```
//!
//! No secret is in them. May touch: those folders.

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use peerpod_volume::{VolumeId, records::Pod};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use sha2::{Digest, Sha256};

use crate::capability::Wanted;

/// Of the files here.
pub const VERSION: u32 = 1;

/// The namespace of those that no pod has.
pub const NO_NAMESPACE: &str = "-";

/// The largest file that is read.
const MAX_FILE: u64 = 64 << 10;

/// One target of one volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Publication {
    /// [`VERSION`].
    pub version: u32,
    /// The volume.
    pub volume: VolumeId,
    /// The driver's name: several wrappers share the folder.
    pub driver: String,
    /// Its handle.
    pub handle: String,
    /// What people call it.
    pub name: String,
    /// Whose it is.
    pub pod: Pod,
    /// Where.
    pub target: PathBuf,
    /// In which way.
    pub wanted: Wanted,
    /// For reading alone.
    pub read_only: bool,
    /// The marker in it.
    pub marker: String,
    /// It has one pod at a time.
    pub exclusive: bool,
    /// The driver attaches the disk, so the cluster's object has to follow the VM.
    pub driver_attached: bool,
    /// The target is gone; what is left waits until the VM is.
    pub leaving: bool,
}

impl Publication {
    /// Whether kubelet published it, so that there is a pod.
    pub fn of_kubernetes(&self) -> bool {
        self.pod.namespace != NO_NAMESPACE
    }

    /// What the controller's role needs for asking the driver, as JSON without secrets.
    pub fn request(&self) -> serde_json::Value {
        serde_json::json!({
            "volumeId": self.handle, "targetPath": self.target, "readonly": self.read_only, "capability": self.wanted,
        })
    }
}

/// Whose a disk is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    /// [`VERSION`].
    pub version: u32,
    /// The pod's UID; none: nobody's.
    pub holder: Option<String>,
    /// Grows with each owner.
    pub fence: u64,
}

/// The folders.
#[derive(Clone, Debug)]
pub struct Publications {
    root: PathBuf,
}

impl Publications {
    /// In this folder.
    pub fn new(root: PathBuf) -> Publications {
        Publications { root }
    }

    /// Makes one durable.
    ///
    /// # Errors
    /// It could not be.
    pub fn put(&self, publication: &Publication) -> io::Result<()> {
        let folder = self.targets(&publication.volume);
        write(&folder, &format!("{}.json", hash(&publication.target)), &serde_json::to_vec(publication)?)
    }

    /// The one at this target.
    ///
    /// # Errors
    /// It cannot be read or understood.
    pub fn get(&self, volume: &VolumeId, target: &Path) -> io::Result<Option<Publication>> {
        read(&self.targets(volume).join(format!("{}.json", hash(target))))
    }

    /// All of a volume.
    ///
    /// # Errors
    /// One cannot be read or understood.
    pub fn of(&self, volume: &VolumeId) -> io::Result<Vec<Publication>> {
        let folder = self.targets(volume);
        let mut found = Vec::new();
        for name in names(&folder)? {
            found.extend(read::<Publication>(&folder.join(name))?);
        }
        Ok(found)
    }

    /// All of them: at a start.
    ///
    /// # Errors
    /// One cannot be read or understood.
    pub fn all(&self) -> io::Result<Vec<Publication>> {
        let mut found = Vec::new();
        for name in names(&self.root.join("targets"))? {
            if let Ok(volume) = name.parse() {
                found.extend(self.of(&volume)?);
            }
        }
        Ok(found)
    }

    /// Removes one. Not there is fine.
    ///
    /// # Errors
    /// It is still there.
    pub fn remove(&self, publication: &Publication) -> io::Result<()> {
        let folder = self.targets(&publication.volume);
        gone(fs::remove_file(folder.join(format!("{}.json", hash(&publication.target)))))?;
        // Another target of the volume may be there.
        drop(fs::remove_dir(&folder));
        sync_dir(&self.root.join("targets"))
    }

    /// Notes that a volume was staged there, which for a peer pod's means nothing else.
    ///
    /// # Errors
    /// It could not be made durable.
    pub fn put_staged(&self, volume: &VolumeId, path: &Path) -> io::Result<()> {
        write(&self.staged(volume), &hash(path), b"")
    }

    /// Whether it is noted.
    pub fn is_staged(&self, volume: &VolumeId, path: &Path) -> bool {
        self.staged(volume).join(hash(path)).exists()
    }

    /// Forgets it. Not there is fine.
    ///
    /// # Errors
    /// It is still there.
    pub fn remove_staged(&self, volume: &VolumeId, path: &Path) -> io::Result<()> {
        gone(fs::remove_file(self.staged(volume).join(hash(path))))?;
        drop(fs::remove_dir(self.staged(volume)));
        Ok(())
    }

    /// Whose a disk is, where no cluster says so.
    ///
    /// # Errors
    /// It cannot be read or understood.
    pub fn owner(&self, volume: &VolumeId) -> io::Result<Option<Owner>> {
        read(&self.root.join("owners").join(format!("{volume}.json")))
    }

    /// Says so.
    ///
    /// # Errors
    /// It could not be made durable.
    pub fn put_owner(&self, volume: &VolumeId, owner: &Owner) -> io::Result<()> {
        write(&self.root.join("owners"), &format!("{volume}.json"), &serde_json::to_vec(owner)?)
    }

    fn targets(&self, volume: &VolumeId) -> PathBuf {
        self.root.join("targets").join(volume.as_str())
    }

    fn staged(&self, volume: &VolumeId) -> PathBuf {
        self.root.join("staged").join(volume.as_str())
    }
}

/// A path as a file's name.
fn hash(path: &Path) -> String {
    use std::os::unix::ffi::OsStrExt;
    let digest = Sha256::digest(path.as_os_str().as_bytes());
    digest.iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

/// The visible entries of a folder; none when it is not there.
fn names(folder: &Path) -> io::Result<Vec<String>> {
    let entries = match fs::read_dir(folder) {
        Err(why) if why.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut names = Vec::new();
    for entry in entries {
        let name = entry?.file_name();
        names.extend(name.to_str().filter(|name| !name.starts_with('.')).map(str::to_owned));
    }
    Ok(names)
}

/// Whole: a temporary file, fsync, rename, fsync of the folder and, where that is new, of the one above.
fn write(folder: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    let new = !folder.exists();
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let temporary = folder.join(format!(".{name}.new"));
    gone(fs::remove_file(&temporary))?;
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&temporary, folder.join(name))?;
    sync_dir(folder)?;
    match folder.parent().filter(|_| new) {
        Some(parent) => sync_dir(parent),
        None => Ok(()),
    }
}

fn sync_dir(folder: &Path) -> io::Result<()> {
    gone(File::open(folder).and_then(|folder| folder.sync_all()))
}

fn read<T: DeserializeOwned>(path: &Path) -> io::Result<Option<T>> {
    let file = match File::open(path) {
        Err(why) if why.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    let mut bytes = Vec::new();
    file.take(MAX_FILE).read_to_end(&mut bytes)?;
    let value = serde_json::from_slice(&bytes);
    value.map(Some).map_err(|why| io::Error::other(format!("{}: {why}", path.display())))
}

fn gone(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(why) if why.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}
