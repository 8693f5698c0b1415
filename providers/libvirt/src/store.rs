//! Uploads base images, files of the node that VMs boot, into the pool: once, by digest.
//!
//! An image is two volumes: the data, named by their digest, and an empty mark beside it that is made when the last
//! byte has arrived. Data without a mark belong to an upload that is in progress or was interrupted.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use peerpod_provider_api::Error;
use sha2::{Digest, Sha256};
use tokio::io::AsyncReadExt;
use tokio::sync::Mutex;
use tokio::time::{Instant, sleep};

use crate::config::File;
use crate::rpc::calls::{Named, Volume};
use crate::rpc::{LibvirtConnection, RpcError, code};
use crate::xml;

/// Time without growth after which an upload of another process counts as interrupted. A host's disk may be busy for a
/// good while; a shorter time would delete data that are still being written.
const STALLED: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(200);
/// Attempts, besides the last one, in which a refresh of the pool may hide a volume that was just made.
const HIDDEN: u32 = 5;
/// First bytes of a qcow2 file.
const QCOW2: [u8; 4] = *b"QFI\xfb";

/// File of the node, identified by its contents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ImageInfo {
    pub(crate) sha256: String,
    pub(crate) bytes: u64,
    pub(crate) format: &'static str,
    /// Size of a disk as a guest sees it.
    pub(crate) disk_bytes: u64,
}

/// Known image files, and their uploads.
#[derive(Default)]
pub(crate) struct Images {
    known: Mutex<HashMap<PathBuf, (Stamp, ImageInfo)>>,
    /// Paths of images in the pool, by name. The lock allows one upload at a time.
    uploads: Mutex<HashMap<String, String>>,
}

type Stamp = (u64, Option<SystemTime>);

/// Purpose of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    Kernel,
    Initrd,
    Disk,
}

impl Use {
    fn key(self) -> &'static str {
        match self {
            Use::Kernel => "kernel",
            Use::Initrd => "initrd",
            Use::Disk => "image",
        }
    }
}

impl Images {
    /// Reads the file once and caches its properties until it changes.
    pub(crate) async fn know(&self, file: &File, what: Use) -> Result<ImageInfo, Error> {
        let key = what.key();
        let bad =
            |why: String| Error::invalid(format!("provider.libvirt.{key} = {}: {why}", file.path.display()));
        let metadata = tokio::fs::metadata(&file.path)
            .await
            .map_err(|error| bad(format!("{error}; build the image (make image) or set the path")))?;
        if !metadata.is_file() || metadata.len() == 0 {
            return Err(bad("it is empty, or no file".to_owned()));
        }
        let stamp = (metadata.len(), metadata.modified().ok());
        let mut known = self.known.lock().await;
        let now = match known.get(&file.path) {
            Some((then, now)) if *then == stamp => now.clone(),
            _ => {
                let now = read(&file.path, what).await.map_err(bad)?;
                known.insert(file.path.clone(), (stamp, now.clone()));
                now
            }
        };
        match &file.sha256 {
            Some(wanted) if *wanted != now.sha256 => Err(bad(format!(
                "its SHA-256 is {}, not {wanted} of provider.libvirt.{key}-sha256; it is another image, or \
                 damaged",
                now.sha256
            ))),
            _ => Ok(now),
        }
    }

    /// Returns the path of the image in the pool; uploads the image if it is missing.
    pub(crate) async fn place(
        &self,
        libvirt: &LibvirtConnection,
        pool: &Named,
        file: &File,
        what: Use,
    ) -> Result<(String, ImageInfo), Error> {
        for _ in 0..HIDDEN {
            match self.try_place(libvirt, pool, file, what).await {
                // Another node refreshed the pool: libvirtd does not know a new volume for a moment.
                Err(Error::NotFound { .. }) => sleep(LOOK).await,
                placed => return placed,
            }
        }
        self.try_place(libvirt, pool, file, what).await
    }

    async fn try_place(
        &self,
        libvirt: &LibvirtConnection,
        pool: &Named,
        file: &File,
        what: Use,
    ) -> Result<(String, ImageInfo), Error> {
        let known = self.know(file, what).await?;
        let name = format!(
            "peerpod-base-{}.{}",
            &known.sha256[..32],
            if what == Use::Disk { known.format } else { what.key() }
        );
        let mut uploads = self.uploads.lock().await;
        if let Some(path) = uploads.get(&name) {
            return Ok((path.clone(), known));
        }
        let mark = format!("{name}.complete");
        let upload = Upload { libvirt, pool, file: &file.path, bytes: known.bytes, name: &name, mark: &mark };
        let placed = async { Ok(libvirt.volume_path(&upload.finished().await?).await?) };
        let path = placed.await.map_err(|error: Error| {
            error.during(format_args!("upload of {} into pool {}", file.path.display(), pool.name))
        })?;
        uploads.insert(name, path.clone());
        Ok((path, known))
    }

    /// Drops the known paths, so that the next use checks the pool: libvirtd was away, and its files may be gone.
    pub(crate) async fn forget(&self) {
        self.uploads.lock().await.clear();
    }
}

/// Image that must be in the pool.
struct Upload<'a> {
    libvirt: &'a LibvirtConnection,
    pool: &'a Named,
    file: &'a Path,
    bytes: u64,
    /// Volume of the data.
    name: &'a str,
    /// Volume that exists when the data are complete.
    mark: &'a str,
}

impl Upload<'_> {
    /// Returns the volume with the whole image; uploads the image, or waits for the upload of another process.
    async fn finished(&self) -> Result<Volume, Error> {
        let mut growth: Option<(u64, Instant)> = None;
        loop {
            let Some(volume) = self.libvirt.volume(self.pool, self.name).await? else {
                match self.make().await? {
                    Some(volume) => return Ok(volume),
                    None => continue,
                }
            };
            if self.libvirt.volume(self.pool, self.mark).await?.is_some() {
                return Ok(volume);
            }
            let (.., allocation) = self.libvirt.volume_sizes(&volume).await?;
            match growth {
                Some((before, since)) if before == allocation && since.elapsed() > STALLED => {
                    tracing::warn!(name = self.name, "an unfinished upload starts again");
                    self.libvirt.delete_volume(&volume).await?;
                    continue;
                }
                Some((before, _)) if before == allocation => {}
                _ => growth = Some((allocation, Instant::now())),
            }
            sleep(LOOK).await;
        }
    }

    /// Makes the volume, uploads the image and sets the mark. `None`: the volume exists, and libvirtd knows it now.
    async fn make(&self) -> Result<Option<Volume>, Error> {
        let Upload { libvirt, pool, name, bytes, .. } = *self;
        let volume = match libvirt.create_volume(pool, &xml::volume(name, "raw", bytes, None)).await {
            Ok(volume) => volume,
            // Another process was faster, or libvirtd has not scanned the folder for long.
            Err(error) if is_there(&error) => {
                libvirt.refresh(pool).await?;
                return Ok(None);
            }
            Err(error) => return Err(error.into()),
        };
        let data = tokio::fs::File::open(self.file).await;
        let data = data.map_err(|error| Error::invalid(error.to_string()))?;
        if let Err(error) = libvirt.upload(&volume, bytes, data).await {
            // The volume has no mark; the next create uploads it anew.
            drop(libvirt.delete_volume(&volume).await);
            return Err(error.into());
        }
        match libvirt.create_volume(pool, &xml::volume(self.mark, "raw", 0, None)).await {
            Err(error) if is_there(&error) => {}
            made => drop(made?),
        }
        tracing::info!(name, bytes, "image is in the pool");
        Ok(Some(volume))
    }
}

/// Returns whether a volume could not be made because it exists.
pub(crate) fn is_there(error: &RpcError) -> bool {
    error.code() == Some(code::STORAGE_VOL_EXIST) || error.to_string().contains("File exists")
}

async fn read(path: &Path, what: Use) -> Result<ImageInfo, String> {
    let mut file = tokio::fs::File::open(path).await.map_err(|error| error.to_string())?;
    let (mut hash, mut head, mut bytes) = (Sha256::new(), Vec::new(), 0u64);
    let mut piece = vec![0; 1 << 20];
    loop {
        let count = file.read(&mut piece).await.map_err(|error| error.to_string())?;
        let Some(part) = piece.get(..count).filter(|part| !part.is_empty()) else { break };
        if head.len() < 512 {
            head.extend(part.iter().take(512 - head.len()));
        }
        hash.update(part);
        bytes += count as u64;
        // Hashing takes CPU time; other tasks on this thread get their turn.
        tokio::task::yield_now().await;
    }
    let format = if what == Use::Disk { disk_format(&head)? } else { "raw" };
    let disk_bytes = match (format, head.get(24..32).and_then(|size| size.try_into().ok())) {
        ("qcow2", Some(size)) => u64::from_be_bytes(size),
        _ => bytes,
    };
    Ok(ImageInfo { sha256: hex::encode(hash.finalize()), bytes, format, disk_bytes })
}

/// Returns the format of a disk image, from its first bytes.
pub(crate) fn disk_format(head: &[u8]) -> Result<&'static str, String> {
    if head.starts_with(&QCOW2) {
        // QEMU would open any file that the image names as its base.
        return match head.get(8..16) {
            Some(&[0, 0, 0, 0, 0, 0, 0, 0]) => Ok("qcow2"),
            _ => {
                Err("it is a qcow2 overlay of another file; flatten it (qemu-img convert -O qcow2)"
                    .to_owned())
            }
        };
    }
    match head.get(510..512) {
        Some(&[0x55, 0xaa]) => Ok("raw"),
        _ => Err("it is neither a qcow2 nor a raw disk with a partition table".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_known_by_their_first_bytes() {
        let mut qcow2 = [0; 512];
        qcow2[..4].copy_from_slice(&QCOW2);
        assert_eq!(disk_format(&qcow2), Ok("qcow2"));
        qcow2[15] = 1;
        assert!(disk_format(&qcow2).unwrap_err().contains("overlay"));
        let mut raw = [0; 512];
        raw[510..].copy_from_slice(&[0x55, 0xaa]);
        assert_eq!(disk_format(&raw), Ok("raw"));
        assert!(disk_format(b"<html>").unwrap_err().contains("neither"));
    }
}
