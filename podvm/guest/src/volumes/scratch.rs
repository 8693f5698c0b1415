//! Mounts the store of container images on a disk that the VM has for itself, if pid 1 is peerpod-guest. The maker of
//! the VM attaches an empty disk and puts its serial number on the kernel command line (`peerpod.scratch=`). Without
//! one, the store is memory, separate from that of the root. Nothing on it outlives the VM. (In a VM image with systemd
//! a unit does this.) The host can write to the disk, so a confidential VM does without.
//!
//! May inspect disks, run mke2fs on one that is provably empty, and mount on [`PATH`].

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::mount::{MsFlags, mount as mount_at};
use peerpod_common::blocking::blocking;
use peerpod_proto::guest::VolumeFault;
use peerpod_volume::{Identity, VolumeId};
use tokio::time::{Instant, sleep, timeout_at};

use super::content::{self, Content};
use super::find::{Disk, Places};
use super::moment::is_mounted;
use super::{Fault, make};
use crate::{confidential, config, files};

/// Mount point; the VM image's settings have their store below it.
const PATH: &str = "/var/lib/peerpod";
const WORD: &str = "peerpod.scratch=";
/// File in the state directory, made before any write to the disk: later content of the disk is the guest's own.
const BEGUN: &str = "scratch";
/// File in the state directory with the reason for which the disk is not used, for later runs.
const FAULT: &str = "scratch-fault";
/// Folder in the state directory in which the disk is mounted first. A mount that comes too late stays here unused.
const STAGE: &str = "scratch-disk";
/// Time limit for the disk to appear: the VM was made with it.
const COMES: Duration = Duration::from_secs(10);
/// Time limit from the inspection to the mount. Pulls wait for it, and shims wait a minute for a container.
const LIMIT: Duration = Duration::from_secs(40);
/// Pause before a retry: a maker of the previous run may still have the disk open.
const AGAIN: Duration = Duration::from_millis(200);
const FLAGS: MsFlags = MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV).union(MsFlags::MS_NOATIME);
const FILESYSTEM: &str = "ext4";
/// Mount options. A crash loses everything, so the order of writes does not matter.
const OPTIONS: &str = "nobarrier";

/// Returns the store for a configured one.
pub(crate) fn store(said: &Path) -> PathBuf {
    if said.starts_with(PATH) && confidential::is_vm() {
        tracing::info!("a confidential VM: images are kept in memory, not on the host's disk");
        return config::STORE.into();
    }
    said.to_owned()
}

/// Returns whether a store at this path is on the mount of this module.
pub(crate) fn is_wanted(store: &Path) -> bool {
    store.starts_with(PATH)
}

/// Mounts the disk that the kernel command line names, or memory, unless a previous run did. Returns the reason for
/// which that disk is not used, if it is not. Fails if nothing could be mounted: there is no place for images then.
pub(crate) async fn mount(state_dir: &Path) -> Result<Option<String>, String> {
    let note = state_dir.join(FAULT);
    if is_mounted(Path::new(PATH)) {
        return Ok(fs::read_to_string(note).ok());
    }
    let line = fs::read_to_string("/proc/cmdline").unwrap_or_default();
    let Some(serial) = serial(&line) else { return memory().map(|()| None) };
    let Err(fault) = disk(serial, state_dir).await else { return Ok(None) };
    let text = format!("the VM's own disk (serial number {serial:?}) is not used: {fault}");
    memory().map_err(|error| format!("{text}; nor can images be kept in memory: {error}"))?;
    let text = format!("{text}; images are kept in memory");
    if let Err(error) = files::write(&note, text.as_bytes()) {
        tracing::warn!(path = %note.display(), %error, "cannot note why the VM's own disk is not used");
    }
    Ok(Some(text))
}

/// Returns the serial number. The last one counts, as with the kernel's own parameters.
fn serial(kernel_line: &str) -> Option<&str> {
    let said = kernel_line.split_ascii_whitespace().rev().find_map(|word| word.strip_prefix(WORD));
    said.filter(|serial| !serial.is_empty())
}

async fn disk(serial: &str, state_dir: &Path) -> Result<(), Fault> {
    let until = Instant::now() + LIMIT;
    let disk = Places::default().wait(&Identity::Serial(serial.to_owned()), COMES).await?;
    while let Err(fault) = staged(&disk, serial, state_dir, until).await {
        if fault.kind != VolumeFault::VOLUME_FAULT_NOT_NOW || Instant::now() >= until {
            return Err(fault);
        }
        sleep(AGAIN).await;
    }
    fs::create_dir_all(PATH)
        .and_then(|()| Ok(mount_at(Some(&state_dir.join(STAGE)), PATH, NONE, MsFlags::MS_MOVE, NONE)?))
        .map_err(|error| Fault::not_now(format!("move its mount to {PATH}: {error}")))?;
    tracing::info!(disk = disk.name, bytes = disk.size, "images are kept on the VM's own disk");
    Ok(())
}

const NONE: Option<&str> = None;

/// Makes the disk ready and mounts it in the state directory.
async fn staged(disk: &Disk, serial: &str, state_dir: &Path, until: Instant) -> Result<(), Fault> {
    let stage = state_dir.join(STAGE);
    if is_mounted(&stage) {
        return Ok(());
    }
    let late =
        |what: &str| Fault::not_now(format!("{what} {} took longer than {LIMIT:?}", disk.node.display()));
    let made = timeout_at(until, ready(disk, serial, state_dir)).await;
    made.unwrap_or_else(|_| Err(late("to make a file system on")))?;
    let node = disk.node.display().to_string();
    let mounting = blocking(move || mounted(&node, &stage, FILESYSTEM, OPTIONS).map_err(Fault::not_now));
    timeout_at(until, mounting).await.map_err(|_| late("to mount"))?
}

/// Makes the file system. Foreign content of the disk is neither overwritten nor trusted.
async fn ready(disk: &Disk, serial: &str, state_dir: &Path) -> Result<(), Fault> {
    let begun = state_dir.join(BEGUN);
    let (node, size) = (disk.node.clone(), disk.size);
    let failed = |error: std::io::Error| Fault::not_now(format!("read {}: {error}", disk.node.display()));
    if !begun.exists() {
        if blocking(move || content::inspect(&node, size)).await.map_err(failed)? != Content::Empty {
            return Err(Fault::never("it is not empty; give the VM a new one".into()));
        }
        files::write(&begun, serial.as_bytes())
            .map_err(|error| Fault::not_now(format!("write {}: {error}", begun.display())))?;
    }
    let id = VolumeId::of("peerpod", serial);
    make::filesystem(disk, &id, Some(FILESYSTEM), false).await.map(drop)
}

fn memory() -> Result<(), String> {
    mounted("tmpfs", Path::new(PATH), "tmpfs", "mode=0700")
}

fn mounted(source: &str, target: &Path, kind: &str, options: &str) -> Result<(), String> {
    let failed = |error: String| format!("mount {source} on {}: {error}", target.display());
    fs::create_dir_all(target).map_err(|error| failed(error.to_string()))?;
    mount_at(Some(source), target, Some(kind), FLAGS, Some(options))
        .map_err(|error| failed(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::super::tests::zeros;
    use super::*;
    use crate::files::testing::TempDir;

    #[test]
    fn the_kernel_line_names_the_disk() {
        assert_eq!(serial("quiet peerpod.scratch=one peerpod.scratch=two panic=1\n"), Some("two"));
        for none in ["", "quiet", "peerpod.scratch=", "xpeerpod.scratch=one"] {
            assert_eq!(serial(none), None, "{none}");
        }
    }

    #[tokio::test]
    async fn an_empty_disk_is_used_also_by_the_next_run_of_the_same_boot() {
        let (dir, other_boot) = (TempDir::new(), TempDir::new());
        let disk = zeros(&dir, 64 << 20);
        for _ in 0..2 {
            ready(&disk, "s", dir.path()).await.unwrap();
            let found = content::inspect(&disk.node, disk.size).unwrap();
            assert!(matches!(&found, Content::Is(ext4) if ext4.name == FILESYSTEM), "{found:?}");
        }
        let before = fs::read(&disk.node).unwrap();
        let error = ready(&disk, "s", other_boot.path()).await.unwrap_err().to_string();
        assert!(error.contains("not empty"), "{error}");
        assert!(fs::read(&disk.node).unwrap() == before, "nothing was written");
    }
}
