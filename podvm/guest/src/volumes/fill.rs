//! How full a volume is, and its growth while it is used.

use std::time::Duration;

use nix::sys::statvfs::statvfs;
use peerpod_proto::guest::VolumeFill;
use peerpod_volume::Mode;
use tokio::{
    task::spawn_blocking,
    time::{Instant, sleep},
};

use super::{Fault, Known, Volumes, find, make, moment, mount_point};
use crate::intercept::Ready;

/// A disk that the cloud made larger may show it a little later.
const GROWN: Duration = Duration::from_secs(30);
const LOOK: Duration = Duration::from_millis(100);
/// Growing writes little beside group descriptors.
const GROW: Duration = Duration::from_secs(180);

impl Volumes {
    /// How full a volume is.
    pub(crate) async fn stats(&self, id: &str) -> Result<VolumeFill, Fault> {
        let known = self.get(id)?;
        let _turn = known.turn.lock().await;
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
        let (ready, id) = (self.to_look_at(known).await?, known.volume.id.clone());
        let seen = spawn_blocking(move || {
            moment::with(&id, &ready, |root| {
                statvfs(root).map_err(|errno| Fault::not_now(format!("look how full it is: {errno}")))
            })
        });
        let seen = seen.await.map_err(|error| Fault::not_now(error.to_string()))??;
        let unit = seen.fragment_size();
        fill.total_bytes = seen.blocks() * unit;
        fill.available_bytes = seen.blocks_available() * unit;
        fill.used_bytes = seen.blocks().saturating_sub(seen.blocks_free()) * unit;
        fill.total_inodes = seen.files();
        fill.free_inodes = seen.files_free();
        fill.used_inodes = seen.files().saturating_sub(seen.files_free());
        Ok(fill)
    }

    /// What is needed to mount it; little, where a container has it mounted.
    async fn to_look_at(&self, known: &Known) -> Result<Ready, Fault> {
        if moment::is_mounted(&mount_point(&known.volume.id)) {
            return Ok(Ready::default());
        }
        self.ready(known, Vec::new()).await
    }

    /// Grows a volume's file system to its disk. Already so large is fine.
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
                    "its disk {} has {} bytes and not yet {bytes}: the provider's or driver's part of the expansion is not \
                     done, or not seen by the VM",
                    disk.name, disk.size
                )));
            }
            sleep(LOOK).await;
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
        // Growing is done on a mounted one, in one way for all.
        let (id, runtime) = (known.volume.id.clone(), tokio::runtime::Handle::current());
        let grown = spawn_blocking(move || {
            moment::with(&id, &ready, |root| runtime.block_on(grow_mounted(&ready, root)))
        });
        grown.await.map_err(|error| Fault::not_now(error.to_string()))?
    }
}

async fn grow_mounted(ready: &Ready, root: &std::path::Path) -> Result<(), Fault> {
    let (program, argument) = match ready.fstype.as_str() {
        "ext2" | "ext3" | "ext4" => ("resize2fs", ready.source.clone()),
        "xfs" => ("xfs_growfs", root.display().to_string()),
        other => return Err(Fault::never(format!("{other} cannot be grown here; ext4 and xfs can"))),
    };
    make::run(&make::find_program(program)?, &[argument], GROW).await
}
