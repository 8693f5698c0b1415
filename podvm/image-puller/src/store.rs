//! Stores layers by the content of themselves and all below them, each unpacked once per VM.
//!
//! ```text
//! l/<id>      a whole layer; the id is the beginning of its chain id, short so that many fit one mount
//! t/<id>/     a layer that is being fetched (blob) and unpacked (fs, work); not used before it is renamed
//! i/<hash>    the last meaning of an image's name, for when its registry cannot be reached
//! c/<hash>/   the writable layer of a container (fs, work); locked until it is mounted, and while it is removed
//! k/<id>      locks: the maker of a layer holds its lock, and a killed process holds none
//! ```

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::cause::{Error, disk};
use crate::registry::{Image, Process};
use crate::unpack::remove_tree;

const VERSION: u32 = 1;
const MAX_RECORD: u64 = 1 << 20;
/// Length of an id in hex digits.
const ID: usize = 16;

/// Meaning of an image's name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ImageRecord {
    version: u32,
    pub(crate) reference: String,
    pub(crate) digest: String,
    /// Ids of the layers, the lowest first.
    pub(crate) layers: Vec<String>,
    pub(crate) process: Process,
}

#[derive(Clone, Debug)]
pub(crate) struct ImageStore(PathBuf);

impl ImageStore {
    /// Opens the store; makes missing directories.
    pub(crate) fn open(path: &Path) -> Result<ImageStore, Error> {
        for folder in ["l", "t", "i", "c", "k"] {
            let path = path.join(folder);
            let made = DirBuilder::new().recursive(true).mode(0o700).create(&path);
            made.map_err(disk("making", &path))?;
        }
        Ok(ImageStore(path.to_owned()))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn layer(&self, id: &str) -> PathBuf {
        self.0.join("l").join(id)
    }

    pub(crate) fn has(&self, id: &str) -> bool {
        self.layer(id).is_dir()
    }

    pub(crate) fn making(&self, id: &str) -> PathBuf {
        self.0.join("t").join(id)
    }

    /// Returns an empty writable layer of a container, and its lock, which is to be held until the layer is mounted.
    /// Blocks.
    pub(crate) fn container(&self, bundle: &Path) -> Result<(PathBuf, File), Error> {
        let hash = Sha256::digest(bundle.as_os_str().as_encoded_bytes());
        let path = self.0.join("c").join(&hex::encode(hash)[..ID]);
        let lock = lock_folder(&path).map_err(disk("locking", &path))?;
        for folder in ["fs", "work"] {
            let folder = path.join(folder);
            remove_tree(&folder).map_err(disk("removing", &folder))?;
            fs::create_dir(&folder).map_err(disk("making", &folder))?;
        }
        Ok((path, lock))
    }

    /// Locks a layer until its file is closed; waits until no other process makes it. Blocks.
    pub(crate) fn lock(&self, id: &str) -> Result<File, Error> {
        let path = self.0.join("k").join(id);
        let opened = OpenOptions::new().create(true).truncate(false).write(true).mode(0o600).open(&path);
        opened.and_then(|file| file.lock().map(|()| file)).map_err(disk("locking", &path))
    }

    /// Returns an empty directory for a new layer; removes the remains of a killed process.
    pub(crate) fn begin(&self, id: &str) -> Result<PathBuf, Error> {
        let path = self.making(id);
        remove_tree(&path).map_err(disk("removing", &path))?;
        for folder in ["fs", "work", "merged"] {
            let folder = path.join(folder);
            let mode = if folder.ends_with("fs") { 0o755 } else { 0o700 };
            let made = DirBuilder::new().recursive(true).mode(mode).create(&folder);
            made.map_err(disk("making", &folder))?;
        }
        Ok(path)
    }

    /// Moves a whole layer to its final name.
    pub(crate) fn finish(&self, id: &str) -> Result<(), Error> {
        let (from, to) = (self.making(id).join("fs"), self.layer(id));
        fs::rename(&from, &to).map_err(disk("renaming to", &to))?;
        self.abandon(id);
        Ok(())
    }

    /// Removes a begun layer. If that fails, it is removed when the layer is begun again.
    pub(crate) fn abandon(&self, id: &str) {
        drop(remove_tree(&self.making(id)));
    }

    /// Removes the remains of processes that were killed in the last moment from layers that are whole.
    pub(crate) fn remove_remains(&self, ids: &[String]) {
        for id in ids.iter().filter(|id| self.has(id)) {
            drop(fs::remove_file(self.blob(id)));
            self.abandon(id);
        }
    }

    /// Returns the path of a layer's packed bytes while it is made.
    pub(crate) fn blob(&self, id: &str) -> PathBuf {
        self.0.join("t").join(format!("{id}.blob"))
    }

    /// Removes writable layers of containers that are gone: those without a mount and without a process that makes it.
    /// The mounts are read under each layer's lock, because other processes mount at the same time.
    pub(crate) fn sweep(&self, mountinfo: impl Fn() -> io::Result<String>) {
        for entry in fs::read_dir(self.0.join("c")).into_iter().flatten().flatten() {
            let path = entry.path();
            let Ok(folder) = File::open(&path) else { continue };
            let upper = format!("upperdir=c/{}/fs", entry.file_name().to_string_lossy());
            let is_ours = folder.try_lock().is_ok() && is_at(&folder, &path).unwrap_or(false);
            if is_ours && mountinfo().is_ok_and(|mounts| !mounts.contains(&upper)) {
                drop(remove_tree(&path));
            }
        }
    }

    pub(crate) fn remember(&self, reference: &str, image: &Image) -> Result<(), Error> {
        let record = ImageRecord {
            version: VERSION,
            reference: reference.to_owned(),
            digest: image.digest.clone(),
            layers: chain(image.layers.iter().map(|layer| layer.diff_id.as_str())),
            process: image.process.clone(),
        };
        let path = self.record(reference);
        // Each pull is a process of its own, and two may be for one image.
        let new = path.with_extension(format!("{}.new", std::process::id()));
        let failed = disk("writing", &path);
        let text = serde_json::to_vec(&record).map_err(|error| failed(error.into()))?;
        fs::write(&new, text).and_then(|()| fs::rename(&new, &path)).map_err(|error| {
            // Half a record on a full disk is of no use to the next pull, which has another name.
            drop(fs::remove_file(&new));
            failed(error)
        })
    }

    /// Returns the last meaning of the name, if all of its layers are still here.
    pub(crate) fn recall(&self, reference: &str) -> Option<ImageRecord> {
        let path = self.record(reference);
        let small = fs::metadata(&path).is_ok_and(|found| found.len() <= MAX_RECORD);
        let text = small.then(|| fs::read(&path).ok()).flatten()?;
        let record: ImageRecord = serde_json::from_slice(&text).ok()?;
        let good = record.version == VERSION
            && record.reference == reference
            && !record.layers.is_empty()
            && record.layers.iter().all(|id| is_id(id) && self.has(id));
        good.then_some(record)
    }

    fn record(&self, reference: &str) -> PathBuf {
        self.0.join("i").join(hex::encode(Sha256::digest(reference.as_bytes())))
    }
}

/// Makes a missing folder and locks it until the returned file is closed. Blocks.
fn lock_folder(path: &Path) -> io::Result<File> {
    loop {
        match DirBuilder::new().mode(0o700).create(path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            Ok(()) | Err(_) => {}
        }
        let folder = match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            folder => folder?,
        };
        folder.lock()?;
        if is_at(&folder, path)? {
            return Ok(folder);
        }
    }
}

/// Returns whether an open folder is still at its path: another process may have removed it before it was locked.
fn is_at(folder: &File, path: &Path) -> io::Result<bool> {
    match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        there => Ok(there?.ino() == folder.metadata()?.ino()),
    }
}

fn is_id(text: &str) -> bool {
    text.len() == ID && text.bytes().all(|b| b.is_ascii_hexdigit())
}

/// Returns the id of each layer. It covers all layers up to this one: a layer's meaning depends on those below.
pub(crate) fn chain<'a>(diff_ids: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut below: Option<String> = None;
    let ids = diff_ids.map(|diff_id| {
        let id = match &below {
            None => diff_id.to_owned(),
            Some(below) => format!("sha256:{}", hex::encode(Sha256::digest(format!("{below} {diff_id}")))),
        };
        // 64 bits suffice: a collision needs two images of one VM, and the author of such images gains nothing by it.
        below.insert(id).trim_start_matches("sha256:").chars().take(ID).collect()
    });
    ids.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_depends_on_all_layers_below_it() {
        let id = |byte: &str| format!("sha256:{}", byte.repeat(32));
        let (a, b) = (id("aa"), id("bb"));
        let one = chain([a.as_str(), b.as_str()].into_iter());
        assert_eq!(one[0], "a".repeat(16));
        assert_eq!(chain([b.as_str()].into_iter())[0], "b".repeat(16));
        assert_ne!(one[1], "b".repeat(16), "on another layer it is another");
        assert!(one.iter().all(|id| is_id(id)));
    }

    #[test]
    fn a_container_that_is_being_mounted_is_not_swept() {
        let folder = std::env::temp_dir().join(format!("pp-store-{}", std::process::id()));
        let store = ImageStore::open(&folder).unwrap();
        let (upper, lock) = store.container(Path::new("/run/kata-containers/a/rootfs")).unwrap();
        fs::write(upper.join("fs/written"), "").unwrap();
        let unmounted = || Ok(String::new());
        store.sweep(unmounted);
        assert!(upper.join("fs/written").exists(), "the maker holds its lock");
        drop(lock);
        // The container is mounted after the sweep has begun.
        let line = format!("… upperdir=c/{}/fs,workdir=…", upper.file_name().unwrap().display());
        store.sweep(|| {
            assert!(File::open(&upper).unwrap().try_lock().is_err(), "the mounts are read under the lock");
            Ok(line.clone())
        });
        store.sweep(|| Err(io::Error::other("the mounts cannot be read")));
        assert!(upper.join("fs/written").exists());
        store.sweep(unmounted);
        assert!(!upper.exists());
        let (again, _lock) = store.container(Path::new("/run/kata-containers/a/rootfs")).unwrap();
        assert_eq!((&again, fs::read_dir(again.join("fs")).unwrap().count()), (&upper, 0));
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn containers_are_made_while_other_processes_sweep() {
        let folder = std::env::temp_dir().join(format!("pp-store-race-{}", std::process::id()));
        let store = ImageStore::open(&folder).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| (0..5000).for_each(|_| store.sweep(|| Ok(String::new()))));
            }
            for _ in 0..500 {
                let (upper, _lock) = store.container(Path::new("/run/kata-containers/a")).unwrap();
                fs::write(upper.join("fs/file"), "").unwrap();
                assert!(upper.join("fs/file").exists() && upper.join("work").exists());
            }
        });
        fs::remove_dir_all(folder).unwrap();
    }
}
