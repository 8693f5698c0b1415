//! Finds a disk by the identity that its hardware reports, never by its order or name: names are reused after a
//! removal, so each use searches anew. Inspects sysfs first, then waits for the kernel's events, with a deadline. May
//! read `/sys/class/block` and `/dev/disk/by-id`.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io};

use peerpod_common::reactor;
use peerpod_volume::Identity;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::Fault;
use crate::init::uevents::Uevents;

/// Bytes of a serial number that a virtio disk keeps.
const VIRTIO_SERIAL: usize = 20;
/// Interval of inspections between events: programs other than the kernel make links, after its event.
const LOOK: Duration = Duration::from_millis(100);
/// Size limit: a file of sysfs is a page.
const MAX_ATTRIBUTE: u64 = 4096;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Disk {
    /// Name in the kernel: `vdb`.
    pub(super) name: String,
    /// Device node: `/dev/vdb`.
    pub(super) node: PathBuf,
    /// Size in bytes.
    pub(super) size: u64,
}

#[derive(Clone, Debug)]
pub(super) struct Places {
    pub(super) block: PathBuf,
    pub(super) dev: PathBuf,
}

impl Default for Places {
    fn default() -> Self {
        Places { block: "/sys/class/block".into(), dev: "/dev".into() }
    }
}

impl Places {
    pub(super) async fn wait(&self, identity: &Identity, limit: Duration) -> Result<Disk, Fault> {
        let deadline = Instant::now() + limit;
        // Subscribe first, then inspect: so no disk falls between the two.
        let ear = listen().ok();
        loop {
            if let Some(disk) = self.inspect(identity)? {
                return Ok(disk);
            }
            if Instant::now() >= deadline {
                let (wanted, there) = (words(identity), self.there());
                let text = format!("no disk with {wanted} came within {limit:?}; there are {there}");
                return Err(Fault::not_now(text));
            }
            let next = deadline.min(Instant::now() + LOOK);
            match &ear {
                Some((uevents, ear)) => {
                    if let Ok(Ok(mut ready)) = timeout_at(next, ear.readable()).await {
                        drop(uevents.take());
                        ready.clear_ready();
                    }
                }
                None => sleep_until(next).await,
            }
        }
    }

    /// Returns the one disk with this identity. Two are an error: one of them does not belong to the pod.
    pub(super) fn inspect(&self, identity: &Identity) -> Result<Option<Disk>, Fault> {
        let names = match identity {
            Identity::ById(name) => self.by_id(name)?.into_iter().collect(),
            _ => self.disks().into_iter().filter(|name| self.is(name, identity)).collect::<Vec<_>>(),
        };
        match &names[..] {
            [] => Ok(None),
            [name] => Ok(self.disk(name)),
            several => {
                Err(Fault::never(format!("several disks have {}: {}", words(identity), several.join(", "))))
            }
        }
    }

    fn disk(&self, name: &str) -> Option<Disk> {
        let node = self.dev.join(name);
        let sectors: u64 = self.attribute(name, "size")?.parse().ok()?;
        // A disk that is just coming has no size, or no node yet.
        (sectors > 0 && node.exists()).then(|| Disk { name: name.to_owned(), node, size: sectors * 512 })
    }

    fn by_id(&self, name: &str) -> Result<Option<String>, Fault> {
        if name.is_empty() || name.starts_with('.') || name.contains(['/', '\0']) {
            return Err(Fault::never(format!("{name:?} is no name below /dev/disk/by-id")));
        }
        match fs::read_link(self.dev.join("disk/by-id").join(name)) {
            Ok(target) => Ok(target.file_name().and_then(|name| name.to_str()).map(str::to_owned)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(Fault::not_now(format!("read /dev/disk/by-id/{name}: {error}"))),
        }
    }

    fn disks(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.block).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries
            .filter_map(|entry| entry.file_name().to_str().map(str::to_owned))
            .filter(|name| !self.block.join(name).join("partition").exists())
            .collect();
        names.sort();
        names
    }

    fn is(&self, name: &str, identity: &Identity) -> bool {
        match identity {
            Identity::Serial(wanted) => {
                let has = self.one_of(name, ["serial", "device/serial"]);
                let cut = name.starts_with("vd").then(|| wanted.as_bytes().get(..VIRTIO_SERIAL)).flatten();
                !has.is_empty() && (has == *wanted || cut == Some(has.as_bytes()))
            }
            Identity::Wwn(wanted) => {
                let has = bare(&self.one_of(name, ["wwid", "device/wwid"]));
                !has.is_empty() && has == bare(wanted)
            }
            Identity::Lun(wanted) => self.lun(name) == Some(*wanted) && !self.has_partitions(name),
            Identity::ById(_) => false,
        }
    }

    /// Returns the logical unit of a SCSI disk: the last part of `host:channel:target:lun`. The number of an NVMe
    /// namespace does not count. Clouds count namespaces from different starts, and a disk of the VM itself would be
    /// taken for one of the pod.
    fn lun(&self, name: &str) -> Option<u32> {
        let device = fs::read_link(self.block.join(name).join("device")).ok()?;
        device.file_name()?.to_str()?.rsplit_once(':')?.1.parse().ok()
    }

    /// Returns whether a disk has partitions. A logical unit's number is unique per controller only; the VM's own disk,
    /// which has partitions, may have the same.
    fn has_partitions(&self, name: &str) -> bool {
        let entries = fs::read_dir(self.block.join(name)).into_iter().flatten().flatten();
        entries.into_iter().any(|entry| entry.path().join("partition").exists())
    }

    fn attribute(&self, name: &str, file: &str) -> Option<String> {
        let content = crate::files::read(&self.block.join(name).join(file), MAX_ATTRIBUTE).ok()??;
        Some(String::from_utf8_lossy(&content).trim_matches(['\0', ' ', '\n', '\t']).to_owned())
    }

    /// Returns the first of these attributes; empty without any.
    fn one_of(&self, name: &str, files: [&str; 2]) -> String {
        files.iter().find_map(|file| self.attribute(name, file)).unwrap_or_default()
    }

    /// Describes the present disks for error messages.
    fn there(&self) -> String {
        let disks = self.disks().into_iter().take(32).filter(|name| self.disk(name).is_some());
        let words = disks.map(|name| match self.one_of(&name, ["serial", "device/serial"]) {
            serial if serial.is_empty() => name,
            serial => format!("{name} (serial {serial})"),
        });
        let words = words.collect::<Vec<_>>().join(", ");
        if words.is_empty() { "no disk".to_owned() } else { words }
    }
}

fn listen() -> io::Result<(Uevents, AsyncFd<OwnedFd>)> {
    let uevents = Uevents::listen()?;
    let ear = reactor::register(uevents.fd().try_clone_to_owned()?, Interest::READABLE)?;
    Ok((uevents, ear))
}

/// Returns a World Wide Name without its type prefix.
fn bare(wwn: &str) -> String {
    let lower = wwn.trim().to_ascii_lowercase();
    let cut = ["naa.", "eui.", "nvme.", "uuid.", "wwn-", "0x"];
    cut.iter().fold(lower, |text, prefix| text.strip_prefix(prefix).unwrap_or(&text).to_owned())
}

fn words(identity: &Identity) -> String {
    match identity {
        Identity::Serial(serial) => format!("serial number {serial:?}"),
        Identity::ById(name) => format!("name {name:?} in /dev/disk/by-id"),
        Identity::Lun(lun) => format!("logical unit {lun} (of SCSI disks)"),
        Identity::Wwn(wwn) => format!("World Wide Name {wwn:?}"),
    }
}

pub(super) fn size_of(name: &str) -> Option<u64> {
    Places::default().disk(name).map(|disk| disk.size)
}

/// Makes the kernel read the size of a SCSI disk; other disks announce it themselves.
pub(super) fn rescan(name: &str) {
    let path = Path::new("/sys/class/block").join(name).join("device/rescan");
    if path.exists()
        && let Err(error) = fs::write(&path, "1")
    {
        tracing::warn!(%error, disk = name, "cannot ask for the disk's new size");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::testing::TempDir;

    fn disk(dir: &TempDir, name: &str, files: &[(&str, &str)]) {
        let folder = dir.path().join("block").join(name);
        for (file, content) in [("size", "2048\n")].iter().chain(files) {
            let path = folder.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        fs::create_dir_all(dir.path().join("dev")).unwrap();
        fs::write(dir.path().join("dev").join(name), "").unwrap();
    }

    fn places(dir: &TempDir) -> Places {
        Places { block: dir.path().join("block"), dev: dir.path().join("dev") }
    }

    fn name(places: &Places, identity: Identity) -> Option<String> {
        places.inspect(&identity).unwrap().map(|disk| disk.name)
    }

    #[test]
    fn disks_are_found_by_their_identifiers() {
        let dir = TempDir::new();
        disk(&dir, "vda", &[("serial", "pvc-0123456789abcdef")]);
        disk(&dir, "vdb", &[("serial", "other\n")]);
        disk(
            &dir,
            "nvme1n1",
            &[("device/serial", "vol0abc   \n"), ("wwid", "nvme.1d0f-aa\n"), ("nsid", "7\n")],
        );
        disk(&dir, "nvme1n1p1", &[("partition", "1")]);
        let places = places(&dir);
        let long = Identity::Serial("pvc-0123456789abcdef-and-more".into());
        assert_eq!(name(&places, long).as_deref(), Some("vda"), "virtio shows 20 bytes");
        assert_eq!(name(&places, Identity::Serial("vol0abc".into())).as_deref(), Some("nvme1n1"));
        assert_eq!(name(&places, Identity::Serial("vol0".into())), None);
        assert_eq!(name(&places, Identity::Wwn("0x1D0F-AA".into())).as_deref(), Some("nvme1n1"));
        assert_eq!(name(&places, Identity::Lun(7)), None, "an NVMe namespace has no logical unit's number");
        disk(&dir, "sda", &[]);
        std::os::unix::fs::symlink("../../0:0:1:7", dir.path().join("block/sda/device")).unwrap();
        assert_eq!(name(&places, Identity::Lun(7)).as_deref(), Some("sda"));
        assert_eq!(name(&places, Identity::Lun(1)), None);

        fs::create_dir_all(dir.path().join("dev/disk/by-id")).unwrap();
        std::os::unix::fs::symlink("../../vdb", dir.path().join("dev/disk/by-id/mine")).unwrap();
        assert_eq!(name(&places, Identity::ById("mine".into())).as_deref(), Some("vdb"));
        assert!(places.inspect(&Identity::ById("../vda".into())).is_err());
    }

    #[test]
    fn two_disks_of_one_name_are_an_error() {
        let dir = TempDir::new();
        disk(&dir, "vda", &[("serial", "same")]);
        disk(&dir, "vdb", &[("serial", "same")]);
        let error = places(&dir).inspect(&Identity::Serial("same".into())).unwrap_err().to_string();
        assert!(error.contains("vda, vdb"), "{error}");
    }

    #[tokio::test]
    async fn a_late_disk_is_waited_for_until_a_limit() {
        let dir = TempDir::new();
        disk(&dir, "vda", &[]);
        let places = places(&dir);
        let wanted = Identity::Serial("late".into());
        let error = places.wait(&wanted, Duration::from_millis(150)).await.unwrap_err().to_string();
        assert!(error.contains("\"late\"") && error.contains("vda"), "{error}");
        let waiting = tokio::spawn(async move { places.wait(&wanted, Duration::from_secs(20)).await });
        disk(&dir, "vdb", &[("serial", "late")]);
        assert_eq!(waiting.await.unwrap().unwrap().name, "vdb");
    }
}
