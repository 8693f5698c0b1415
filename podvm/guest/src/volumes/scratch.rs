//! Room for containers' images on a disk that the VM has for itself, where pid 1 is ours: whoever makes the VM gives it an
//! empty disk and says its serial number on the kernel's line (`peerpod.scratch=`). Without one that is memory, apart from
//! the root's. Nothing on it outlives the VM. (In an image with systemd a unit does this.)
//!
//! May look at disks, run mke2fs on one that is provably empty, and mount on [`PATH`].

use std::{fs, path::Path, time::Duration};

use nix::mount::{MsFlags, mount as mount_at};
use peerpod_volume::{Identity, VolumeId};
use tokio::{task::spawn_blocking, time::timeout};

use super::{
    Fault,
    content::{self, Content},
    find::{Disk, Places},
    make,
    moment::is_mounted,
};
use crate::files;

/// Where it is mounted; the image's settings have their store below it.
const PATH: &str = "/var/lib/peerpod";
const WORD: &str = "peerpod.scratch=";
/// In the state directory, from before anything is written to the disk: what is on it is then ours.
const BEGUN: &str = "scratch";
/// The VM was made with it.
const COMES: Duration = Duration::from_secs(10);
/// From the look to the mount. Pulls wait for it, and shims wait a minute for a container.
const LIMIT: Duration = Duration::from_secs(40);
const FLAGS: MsFlags = MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV).union(MsFlags::MS_NOATIME);
const FILESYSTEM: &str = "ext4";
/// A crash takes all of it: nothing has to be on the disk before something else.
const OPTIONS: &str = "nobarrier";

/// Mounts the disk that the kernel's line names, or memory, unless a run before this did.
///
/// # Errors
/// In words, when that disk cannot be used and memory has to do.
pub(crate) async fn mount(state_dir: &Path) -> Result<(), String> {
    if is_mounted(Path::new(PATH)) {
        return Ok(());
    }
    let line = fs::read_to_string("/proc/cmdline").unwrap_or_default();
    let Some(serial) = serial(&line) else { return memory() };
    let late = || Err(Fault::not_now(format!("it was not ready within {LIMIT:?}")));
    let mounted = timeout(LIMIT, disk(serial, state_dir)).await.unwrap_or_else(|_| late());
    let Err(fault) = mounted else { return Ok(()) };
    memory()?;
    Err(format!(
        "the VM's own disk (serial number {serial:?}) is not used, images are kept in memory: {fault}"
    ))
}

/// The last one that is said counts, as with the kernel's own words.
fn serial(kernel_line: &str) -> Option<&str> {
    let said = kernel_line.split_ascii_whitespace().rev().find_map(|word| word.strip_prefix(WORD));
    said.filter(|serial| !serial.is_empty())
}

async fn disk(serial: &str, state_dir: &Path) -> Result<(), Fault> {
    let disk = Places::default().wait(&Identity::Serial(serial.to_owned()), COMES).await?;
    ready(&disk, serial, state_dir).await?;
    let node = disk.node.display().to_string();
    tracing::info!(disk = node, bytes = disk.size, "images are kept on the VM's own disk");
    let mounted = spawn_blocking(move || mounted(&node, FILESYSTEM, OPTIONS)).await;
    mounted.unwrap_or_else(|error| Err(error.to_string())).map_err(Fault::not_now)
}

/// Makes the file system. What somebody else put on the disk is not written over, nor believed.
async fn ready(disk: &Disk, serial: &str, state_dir: &Path) -> Result<(), Fault> {
    let begun = state_dir.join(BEGUN);
    let (node, size) = (disk.node.clone(), disk.size);
    let failed = |error: std::io::Error| Fault::not_now(format!("read {}: {error}", disk.node.display()));
    if !begun.exists() {
        let found = spawn_blocking(move || content::look(&node, size)).await;
        let found = found.map_err(|error| failed(std::io::Error::other(error)))?.map_err(failed)?;
        if found != Content::Empty {
            return Err(Fault::never("it is not empty; give the VM a new one".into()));
        }
        files::write_private(&begun, serial.as_bytes())
            .map_err(|error| Fault::not_now(format!("write {}: {error}", begun.display())))?;
    }
    let id = VolumeId::of("peerpod", serial);
    make::filesystem(disk, &id, Some(FILESYSTEM), false).await.map(drop)
}

fn memory() -> Result<(), String> {
    mounted("tmpfs", "tmpfs", "mode=0700")
}

fn mounted(source: &str, kind: &str, options: &str) -> Result<(), String> {
    let failed = |error: String| format!("mount {source} on {PATH}: {error}");
    fs::create_dir_all(PATH).map_err(|error| failed(error.to_string()))?;
    mount_at(Some(source), PATH, Some(kind), FLAGS, Some(options)).map_err(|error| failed(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::{super::tests::zeros, *};
    use crate::files::testing::TempDir;

    #[test]
    fn the_kernels_line_says_which_disk() {
        assert_eq!(serial("quiet peerpod.scratch=one peerpod.scratch=two panic=1\n"), Some("two"));
        for none in ["", "quiet", "peerpod.scratch=", "xpeerpod.scratch=one"] {
            assert_eq!(serial(none), None, "{none}");
        }
    }

    #[tokio::test]
    async fn an_empty_disk_is_taken_and_taken_again_by_the_next_run_of_the_same_boot() {
        let (dir, other_boot) = (TempDir::new(), TempDir::new());
        let disk = zeros(&dir, 64 << 20);
        for _ in 0..2 {
            ready(&disk, "s", dir.path()).await.unwrap();
            let found = content::look(&disk.node, disk.size).unwrap();
            assert!(matches!(&found, Content::Is(ext4) if ext4.name == FILESYSTEM), "{found:?}");
        }
        let before = fs::read(&disk.node).unwrap();
        let error = ready(&disk, "s", other_boot.path()).await.unwrap_err().to_string();
        assert!(error.contains("not empty"), "{error}");
        assert!(fs::read(&disk.node).unwrap() == before, "nothing was written");
    }
}
