//! Reports the usage of a volume, and grows it while it is used.

use std::time::Duration;

use nix::sys::statvfs::statvfs;
use peerpod_proto::guest::VolumeFill;
use peerpod_volume::Mode;
use tokio::time::{Instant, sleep, timeout};

use super::find::{self, Disk};
use super::{Fault, Known, LOOK, Volumes, content, make, moment, mount_point};
use crate::intercept::Ready;

/// Time for a disk to show the size to which the cloud enlarged it.
const GROWN: Duration = Duration::from_secs(30);
const SOON: Duration = Duration::from_millis(100);
/// Time limit for the turn: kubelet asks for statistics again in a minute.
const TURN: Duration = Duration::from_secs(5);
/// Bytes at its disk's end that a file system of the guest leaves free, and that makers round off.
const SLACK: u64 = 4 << 20;
/// Time limit of growing, which writes little beside group descriptors.
const GROW: Duration = Duration::from_secs(180);

impl Volumes {
    pub(crate) async fn stats(&self, id: &str) -> Result<VolumeFill, Fault> {
        let known = self.get(id)?;
        let busy = |_| Fault::not_now("it is being prepared for a container".into()).of(&known.volume);
        let _turn = timeout(TURN, known.turn.lock()).await.map_err(busy)?;
        self.fill(&known).await.map_err(|fault| fault.of(&known.volume))
    }

    async fn fill(&self, known: &Known) -> Result<VolumeFill, Fault> {
        let mut fill = VolumeFill::new();
        if known.identity.is_some() {
            fill.disk_bytes = self.disk(known).await?.size;
        }
        if let Mode::Block = known.volume.mode {
            self.disk(known).await?;
            (fill.block, fill.total_bytes) = (true, fill.disk_bytes);
            return Ok(fill);
        }
        // A volume that a container has mounted needs no preparation.
        let ready = match moment::is_mounted(&mount_point(&known.volume.id)) {
            true => Ready::default(),
            false => self.ready(known, Vec::new()).await?,
        };
        let id = known.volume.id.clone();
        let inspect = move || {
            moment::with(&id, &ready, |root| {
                statvfs(root).map_err(|errno| Fault::not_now(format!("read its usage: {errno}")))
            })
        };
        let seen = known.inspect(LOOK, inspect).await?;
        let unit = seen.fragment_size();
        fill.total_bytes = seen.blocks() * unit;
        fill.available_bytes = seen.blocks_available() * unit;
        fill.used_bytes = seen.blocks().saturating_sub(seen.blocks_free()) * unit;
        fill.total_inodes = seen.files();
        fill.free_inodes = seen.files_free();
        fill.used_inodes = seen.files().saturating_sub(seen.files_free());
        Ok(fill)
    }

    /// Grows a volume's file system to its disk. A sufficient size is no error.
    pub(crate) async fn expand(&self, id: &str, bytes: u64) -> Result<VolumeFill, Fault> {
        let known = self.get(id)?;
        let _turn = known.turn.lock().await;
        let grown = async {
            self.grow(&known, bytes).await?;
            self.fill(&known).await
        };
        grown.await.map_err(|fault| fault.of(&known.volume))
    }

    async fn grow(&self, known: &Known, bytes: u64) -> Result<(), Fault> {
        if known.identity.is_none() {
            return Ok(()); // a share grows at its server
        }
        let mut disk = self.disk(known).await?;
        find::rescan(&disk.name);
        let deadline = Instant::now() + GROWN;
        while disk.size < bytes {
            if Instant::now() > deadline {
                return Err(Fault::not_now(format!(
                    "its disk {} has {} bytes and not yet {bytes}: the provider or driver has not expanded \
                     it, or the VM has not noticed",
                    disk.name, disk.size
                )));
            }
            sleep(SOON).await;
            disk.size = find::size_of(&disk.name).unwrap_or(disk.size);
        }
        if let Mode::Block = known.volume.mode {
            return Ok(());
        }
        if known.volume.read_only {
            return Err(Fault::never("it is read-only".into()));
        }
        let mounted = moment::is_mounted(&mount_point(&known.volume.id));
        let ready = self.ready(known, Vec::new()).await?;
        if mounted {
            return grow_mounted(&ready, &mount_point(&known.volume.id)).await;
        }
        grow_for_a_moment(known, ready).await
    }

    /// Grows the file system of a disk that was enlarged while no VM had it. Kubelet requests the growth before there
    /// is a VM to do it, and does not ask again. A failure leaves the volume unchanged.
    pub(super) async fn catch_up(&self, known: &Known, disk: &Disk, ready: &Ready) {
        if moment::is_mounted(&mount_point(&known.volume.id)) {
            return;
        }
        let node = disk.node.clone();
        let inspect = move || {
            content::filesystem_bytes(&node)
                .map_err(|error| Fault::not_now(format!("read its size: {error}")))
        };
        let grown = match known.inspect(LOOK, inspect).await {
            Ok(Some(bytes)) if bytes.saturating_add(SLACK) < disk.size => {
                grow_for_a_moment(known, ready.clone()).await
            }
            Ok(_) => return,
            Err(fault) => Err(fault),
        };
        let volume = &known.volume.name;
        match grown {
            Ok(()) => tracing::info!(volume, "its disk had grown, and now it has"),
            Err(why) => tracing::warn!(volume, %why, "its disk has grown, and its file system cannot"),
        }
    }
}

/// Mounts the volume for a moment and grows it: growing works on a mounted file system, in one way for all.
async fn grow_for_a_moment(known: &Known, ready: Ready) -> Result<(), Fault> {
    let (id, runtime) = (known.volume.id.clone(), tokio::runtime::Handle::current());
    let grow = move || moment::with(&id, &ready, |root| runtime.block_on(grow_mounted(&ready, root)));
    known.inspect(GROW + LOOK, grow).await
}

async fn grow_mounted(ready: &Ready, root: &std::path::Path) -> Result<(), Fault> {
    let (program, argument) = match ready.fstype.as_str() {
        "ext2" | "ext3" | "ext4" => ("resize2fs", ready.source.clone()),
        "xfs" => ("xfs_growfs", root.display().to_string()),
        other => return Err(Fault::never(format!("{other} cannot be grown here; ext4 and xfs can"))),
    };
    make::run(&make::find_program(program)?, &[argument], GROW).await
}
