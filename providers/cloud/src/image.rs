//! Describes the upload of a built disk image: the request, the verified file, and the progress. Reads the image's
//! folder and touches nothing else.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{self, Read as _};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use peerpod_provider_api::Error;
use serde::Deserialize;
use sha2::{Digest as _, Sha256};

/// Largest `image.json` that is read, in bytes.
const LARGEST: u64 = 4 << 20;
/// Version of `image.json` that is understood.
const VERSION: u32 = 1;
/// Size of the pieces in which a disk is read, in bytes.
const PIECE: usize = 1 << 20;

/// Request to upload a disk image.
#[derive(Clone)]
pub struct Upload {
    /// Folder of the image: the disk, and `image.json` with its digest.
    pub folder: PathBuf,
    /// Number of images that stay, the uploaded one included; `None`: all stay.
    pub keep: Option<NonZeroUsize>,
    /// Whether VMs of the image get a TPM 2.0.
    pub tpm: bool,
    /// Receives lines for people about the progress.
    pub say: Say,
}

impl fmt::Debug for Upload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Upload { folder, keep, tpm, say: _ } = self;
        f.debug_struct("Upload").field("folder", folder).field("keep", keep).field("tpm", tpm).finish()
    }
}

/// Receiver of lines for people.
pub type Say = Arc<dyn Fn(&str) + Send + Sync>;

/// Settings below `provider.KIND` that select an uploaded image, by key.
pub type ImageSettings = BTreeMap<&'static str, String>;

/// Disk of a built image, compared with its `image.json`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BuiltDisk {
    /// Path of the disk.
    pub path: PathBuf,
    /// SHA-256 of the disk, as hex.
    pub sha256: String,
    /// Size of the file in bytes.
    pub bytes: u64,
    /// Architecture, like `x86_64`.
    pub arch: String,
}

/// The part of `image.json` that is read here.
#[derive(Deserialize)]
struct About {
    version: u32,
    arch: String,
    sha256: BTreeMap<String, String>,
}

impl BuiltDisk {
    /// Finds the disk with this file name in the folder of an image, and compares its digest with that of `image.json`.
    ///
    /// # Errors
    /// There is no such image, its builder has not finished, or the disk was changed since.
    pub async fn open(folder: &Path, name: &str) -> Result<BuiltDisk, Error> {
        let (folder, name) = (folder.to_owned(), name.to_owned());
        let opened = tokio::task::spawn_blocking(move || open(&folder, &name)).await;
        opened.map_err(|error| Error::transient(format!("read the image: {error}")))?
    }

    /// Returns this many hex digits of the digest, for names.
    pub fn short(&self, digits: usize) -> &str {
        self.sha256.get(..digits).unwrap_or(&self.sha256)
    }
}

fn open(folder: &Path, name: &str) -> Result<BuiltDisk, Error> {
    let about = folder.join("image.json");
    let bad = |path: &Path, why: String| {
        Error::invalid(format!(
            "read the image {}: {why}; build it (peerpod image build), or name its folder (--image)",
            path.display()
        ))
    };
    let text = read(&about).map_err(|error| bad(&about, error.to_string()))?;
    let About { version, arch, sha256 } =
        serde_json::from_slice(&text).map_err(|error| bad(&about, error.to_string()))?;
    if version != VERSION {
        return Err(bad(&about, format!("its version is {version}, not {VERSION}")));
    }
    let path = folder.join(name);
    let Some(expected) = sha256.get(name) else {
        return Err(bad(&path, "image.json does not list this file".to_owned()));
    };
    let (found, bytes) = digest(&path).map_err(|error| bad(&path, error.to_string()))?;
    if found != *expected {
        return Err(bad(&path, format!("its SHA-256 is {found}, and image.json has {expected}")));
    }
    Ok(BuiltDisk { path, sha256: found, bytes, arch })
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    File::open(path)?.take(LARGEST).read_to_end(&mut text)?;
    Ok(text)
}

/// Returns SHA-256 and size of a file.
fn digest(path: &Path) -> io::Result<(String, u64)> {
    let (mut file, mut hash, mut bytes) = (File::open(path)?, Sha256::new(), 0);
    let mut piece = vec![0; PIECE];
    loop {
        let count = file.read(&mut piece)?;
        let Some(part) = piece.get(..count).filter(|part| !part.is_empty()) else { break };
        hash.update(part);
        bytes += count as u64;
    }
    Ok((hex::encode(hash.finalize()), bytes))
}

/// Progress of an upload, reported at each tenth.
pub struct Progress {
    say: Say,
    total: u64,
    done: AtomicU64,
}

impl Progress {
    /// Creates the progress of this many bytes.
    pub fn new(say: Say, total: u64) -> Progress {
        Progress { say, total, done: AtomicU64::new(0) }
    }

    /// Records that this many bytes more are sent.
    pub fn add(&self, bytes: u64) {
        let before = self.done.fetch_add(bytes, Ordering::Relaxed);
        let tenth = |done: u64| done.saturating_mul(10).checked_div(self.total).unwrap_or(10);
        let now = tenth(before.saturating_add(bytes));
        if now > tenth(before) {
            (self.say)(&format!("uploaded {} % of {} MiB", now * 10, self.total.div_ceil(1 << 20)));
        }
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;

    #[tokio::test]
    async fn a_disk_that_is_not_the_one_of_image_json_is_refused() {
        let folder = std::env::temp_dir().join(format!("peerpod-built-disk-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let refused = async |part: &str| {
            let why = BuiltDisk::open(&folder, "a.raw").await.unwrap_err().to_string();
            assert!(why.contains(part) && why.contains("peerpod image build"), "{part} in {why}");
        };
        refused("image.json").await;
        let about = |version: u32, digest: &str| {
            let text =
                format!(r#"{{"version": {version}, "arch": "x86_64", "sha256": {{"a.raw": "{digest}"}}}}"#);
            std::fs::write(folder.join("image.json"), text).unwrap();
        };
        let digest = hex::encode(Sha256::digest(b"disk"));
        about(2, &digest);
        refused("its version is 2").await;
        about(1, &digest);
        refused("a.raw: No such file").await;
        std::fs::write(folder.join("a.raw"), "dis").unwrap();
        refused("and image.json has").await;
        std::fs::write(folder.join("a.raw"), "disk").unwrap();
        let disk = BuiltDisk::open(&folder, "a.raw").await.unwrap();
        assert_eq!((disk.bytes, disk.sha256.as_str(), disk.short(4)), (4, digest.as_str(), &digest[..4]));
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn each_tenth_is_reported_once() {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let to = Arc::clone(&lines);
        let progress = Progress::new(Arc::new(move |line: &str| to.lock().push(line.to_owned())), 100 << 20);
        for _ in 0..400 {
            progress.add(1 << 18);
        }
        let lines = lines.lock();
        assert_eq!(lines.len(), 10, "{lines:?}");
        assert_eq!(lines.last().map(String::as_str), Some("uploaded 100 % of 100 MiB"));
    }
}
