//! Finds a disk by the identity that its hardware reports, never by its order or name: names are reused after a
//! removal, so each use searches anew. Inspects sysfs first, then waits for the kernel's events, with a deadline. May
//! read `/sys/class/block`, `/dev/disk/by-id` and NVMe disks.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io};

use peerpod_common::reactor;
use peerpod_volume::Identity;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::{Fault, hardware};
use crate::init::uevents::Uevents;

/// Bytes of a serial number that a virtio disk keeps.
const VIRTIO_SERIAL: usize = 20;
/// Interval of inspections between events: programs other than the kernel make links, after its event.
const LOOK: Duration = Duration::from_millis(100);
/// Size limit: a file of sysfs is a page.
const MAX_ATTRIBUTE: u64 = 4096;

/// Begin of the names of Google's disks below `/dev/disk/by-id`. The rest is the device name of the attachment.
const GOOGLE: &str = "google-";
/// Serial number of every NVMe controller of Google's persistent disks.
const GOOGLE_NVME: &str = "nvme_card-pd";

/// Model of the NVMe controller of Azure's disks. Namespace 1 is the VM's own disk, namespace `n` has LUN `n - 2`.
const AZURE_NVME: &str = "MSFT NVMe Accelerator v1.0";
const AZURE_FIRST_LUN: u32 = 2;
/// SCSI controllers of Azure's data disks, by the id of the Hyper-V device. The VM's own disks have other ones.
const AZURE_DATA: [&str; 3] = [
    "{f8b3781b-1e82-4818-a1c3-63d806ec15bb}",
    "{f8b3781c-1e82-4818-a1c3-63d806ec15bb}",
    "{f8b3781d-1e82-4818-a1c3-63d806ec15bb}",
];

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
    /// Returns the Identify data of an NVMe namespace: a device node and the namespace's number.
    pub(super) identify: fn(&Path, u32) -> io::Result<Vec<u8>>,
}

impl Default for Places {
    fn default() -> Self {
        Places {
            block: "/sys/class/block".into(),
            dev: "/dev".into(),
            identify: hardware::identify_namespace,
        }
    }
}

impl Places {
    pub(super) async fn wait(&self, identity: &Identity, limit: Duration) -> Result<Disk, Fault> {
        let deadline = Instant::now() + limit;
        // Subscribe first, then inspect: so no disk falls between the two.
        let watcher = listen().ok();
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
            match &watcher {
                Some((uevents, watcher)) => {
                    if let Ok(Ok(mut ready)) = timeout_at(next, watcher.readable()).await {
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
            Identity::ById(name) => self.by_name(name)?,
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

    /// Returns the disks with this name below `/dev/disk/by-id`. The hardware reports Google's names: the images have none
    /// of Google's udev rules, and the minimal image has no udev.
    fn by_name(&self, name: &str) -> Result<Vec<String>, Fault> {
        let mut names: Vec<String> = self.by_id(name)?.into_iter().collect();
        if let Some(wanted) = name.strip_prefix(GOOGLE) {
            names.extend(
                self.disks().into_iter().filter(|disk| self.google_name(disk).as_deref() == Some(wanted)),
            );
            names.sort();
            names.dedup();
        }
        Ok(names)
    }

    fn google_name(&self, name: &str) -> Option<String> {
        if self.serial(name) == GOOGLE_NVME {
            let nsid = self.attribute(name, "nsid")?.parse().ok()?;
            return hardware::google_nvme_name(&(self.identify)(&self.dev.join(name), nsid).ok()?);
        }
        hardware::google_scsi_name(&self.page(name, "device/vpd_pg83")?)
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
            // A path to an NVMe disk with several; the disk itself is another entry.
            .filter(|name| self.attribute(name, "hidden").is_none_or(|hidden| hidden != "1"))
            .collect();
        names.sort();
        names
    }

    fn is(&self, name: &str, identity: &Identity) -> bool {
        match identity {
            Identity::Serial(wanted) => {
                let has = self.serial(name);
                let cut = name.starts_with("vd").then(|| wanted.as_bytes().get(..VIRTIO_SERIAL)).flatten();
                !has.is_empty() && (has == *wanted || cut == Some(has.as_bytes()))
            }
            Identity::Wwn(wanted) => {
                let has = bare(&self.one_of(name, ["wwid", "device/wwid"]));
                !has.is_empty() && has == bare(wanted)
            }
            Identity::Lun(wanted) => self.lun(name) == Some(*wanted),
            Identity::ById(_) => false,
        }
    }

    /// Returns the number that the attach gave the disk; `None` for a disk of the VM itself.
    fn lun(&self, name: &str) -> Option<u32> {
        if self.attribute(name, "device/model").is_some_and(|model| model == AZURE_NVME) {
            return self.attribute(name, "nsid")?.parse::<u32>().ok()?.checked_sub(AZURE_FIRST_LUN);
        }
        let device = fs::read_link(self.block.join(name).join("device")).ok()?;
        // host:channel:target:lun
        let lun = device.file_name()?.to_str()?.rsplit_once(':')?.1.parse().ok()?;
        let is_data = match self.hyper_v_device(name) {
            Some(id) => AZURE_DATA.contains(&id.as_str()),
            None => !self.has_partitions(name),
        };
        is_data.then_some(lun)
    }

    /// Returns the id of the Hyper-V device (vmbus) that is the disk's controller.
    fn hyper_v_device(&self, name: &str) -> Option<String> {
        let device = fs::canonicalize(self.block.join(name).join("device")).ok()?;
        let read = |folder: &Path| read_text(&folder.join("device_id"));
        device.ancestors().skip(1).find_map(read).filter(|id| id.starts_with('{'))
    }

    /// Returns whether a disk has partitions. A logical unit's number is unique per controller only; the VM's own disk,
    /// which has partitions, may have the same on another controller.
    fn has_partitions(&self, name: &str) -> bool {
        let entries = fs::read_dir(self.block.join(name)).into_iter().flatten().flatten();
        entries.into_iter().any(|entry| entry.path().join("partition").exists())
    }

    fn attribute(&self, name: &str, file: &str) -> Option<String> {
        read_text(&self.block.join(name).join(file))
    }

    /// Returns the bytes of a page of SCSI's vital product data.
    fn page(&self, name: &str, file: &str) -> Option<Vec<u8>> {
        crate::files::read(&self.block.join(name).join(file), MAX_ATTRIBUTE).ok()?
    }

    /// Returns the serial number: of virtio and NVMe from an attribute, of SCSI from a page; empty without any.
    fn serial(&self, name: &str) -> String {
        let of_page = || hardware::scsi_serial(&self.page(name, "device/vpd_pg80")?);
        Some(self.one_of(name, ["serial", "device/serial"]))
            .filter(|serial| !serial.is_empty())
            .or_else(of_page)
            .unwrap_or_default()
    }

    /// Returns the first of these attributes; empty without any.
    fn one_of(&self, name: &str, files: [&str; 2]) -> String {
        files.iter().find_map(|file| self.attribute(name, file)).unwrap_or_default()
    }

    /// Describes the present disks for error messages.
    fn there(&self) -> String {
        let disks = self.disks().into_iter().take(32).filter(|name| self.disk(name).is_some());
        let words = disks.map(|name| match self.serial(&name) {
            serial if serial.is_empty() => name,
            serial => format!("{name} (serial {serial})"),
        });
        let words = words.collect::<Vec<_>>().join(", ");
        if words.is_empty() { "no disk".to_owned() } else { words }
    }
}

fn read_text(path: &Path) -> Option<String> {
    let content = crate::files::read(path, MAX_ATTRIBUTE).ok()??;
    Some(String::from_utf8_lossy(&content).trim_matches(['\0', ' ', '\n', '\t']).to_owned())
}

fn listen() -> io::Result<(Uevents, AsyncFd<OwnedFd>)> {
    let uevents = Uevents::listen()?;
    let watcher = reactor::register(uevents.fd().try_clone_to_owned()?, Interest::READABLE)?;
    Ok((uevents, watcher))
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
        Identity::Lun(lun) => format!("logical unit {lun}"),
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
    use super::hardware::testing;
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
        Places { block: dir.path().join("block"), dev: dir.path().join("dev"), identify }
    }

    /// Answers as a namespace of Google's: disk 2 of the attachments is `pp-two`.
    fn identify(node: &Path, nsid: u32) -> io::Result<Vec<u8>> {
        assert!(node.ends_with("nvme0n2") || node.ends_with("nvme0n1"), "{node:?}");
        match nsid {
            2 => Ok(testing::identify(br#"{"device_name":"pp-two","disk_type":"PERSISTENT"}"#)),
            _ => Err(io::Error::other("NVMe status 0x1")),
        }
    }

    /// Makes a SCSI disk at this `host:channel:target:lun`, on a controller with this Hyper-V id if there is one.
    fn scsi(dir: &TempDir, name: &str, controller: Option<&str>, address: &str, files: &[(&str, &[u8])]) {
        disk(dir, name, &[]);
        let bus = dir.path().join("devices").join(name);
        let device = bus.join("host/target").join(address);
        fs::create_dir_all(&device).unwrap();
        for (file, content) in files {
            fs::write(device.join(file), content).unwrap();
        }
        if let Some(id) = controller {
            fs::write(bus.join("device_id"), format!("{id}\n")).unwrap();
        }
        std::os::unix::fs::symlink(device, dir.path().join("block").join(name).join("device")).unwrap();
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

        fs::create_dir_all(dir.path().join("dev/disk/by-id")).unwrap();
        std::os::unix::fs::symlink("../../vdb", dir.path().join("dev/disk/by-id/mine")).unwrap();
        assert_eq!(name(&places, Identity::ById("mine".into())).as_deref(), Some("vdb"));
        assert!(places.inspect(&Identity::ById("../vda".into())).is_err());
    }

    #[test]
    fn a_logical_unit_of_azure_is_on_a_controller_of_data_disks() {
        let dir = TempDir::new();
        let places = places(&dir);
        let own = ["{f8b3781a-1e82-4818-a1c3-63d806ec15bb}", "{00000000-0000-8899-0000-000000000000}"];
        scsi(&dir, "sda", Some(own[0]), "0:0:0:0", &[]);
        scsi(&dir, "sdb", Some(own[0]), "0:0:0:1", &[]);
        scsi(&dir, "sdc", Some(own[1]), "1:0:0:0", &[]);
        for lun in 0..2 {
            assert_eq!(name(&places, Identity::Lun(lun)), None, "disks of the VM itself");
        }
        scsi(&dir, "sdd", Some(AZURE_DATA[0]), "2:0:0:0", &[]);
        scsi(&dir, "sde", Some(AZURE_DATA[2]), "4:0:0:63", &[]);
        assert_eq!(name(&places, Identity::Lun(0)).as_deref(), Some("sdd"));
        assert_eq!(name(&places, Identity::Lun(63)).as_deref(), Some("sde"));
        disk(&dir, "sdd", &[("sdd1/partition", "1")]);
        assert_eq!(name(&places, Identity::Lun(0)).as_deref(), Some("sdd"), "a disk with a partition table");
        scsi(&dir, "sdf", Some(AZURE_DATA[1]), "3:0:0:63", &[]);
        assert!(places.inspect(&Identity::Lun(63)).is_err());
    }

    #[test]
    fn a_logical_unit_of_azure_is_an_nvme_namespace_with_an_offset() {
        let dir = TempDir::new();
        let azure = |number: &'static str| {
            [("device/model", "MSFT NVMe Accelerator v1.0              \n"), ("nsid", number)]
        };
        disk(&dir, "nvme0n1", &azure("1\n"));
        disk(&dir, "nvme0n2", &azure("2\n"));
        disk(&dir, "nvme0n9", &azure("9\n"));
        disk(&dir, "nvme1n1", &[("device/model", "Microsoft NVMe Direct Disk v2\n"), ("nsid", "3\n")]);
        let places = places(&dir);
        assert_eq!(name(&places, Identity::Lun(0)).as_deref(), Some("nvme0n2"));
        assert_eq!(name(&places, Identity::Lun(7)).as_deref(), Some("nvme0n9"));
        assert_eq!(name(&places, Identity::Lun(1)), None, "a local disk");
        assert_eq!(name(&places, Identity::Lun(u32::MAX)), None, "the disk of the VM itself");
        disk(&dir, "nvme0c1n9", &[&azure("9\n")[..], &[("hidden", "1\n")]].concat());
        assert_eq!(name(&places, Identity::Lun(7)).as_deref(), Some("nvme0n9"), "a path is no disk");
    }

    #[test]
    fn a_logical_unit_of_another_cloud_is_a_disk_without_partitions() {
        let dir = TempDir::new();
        let places = places(&dir);
        scsi(&dir, "sda", None, "0:0:1:7", &[]);
        assert_eq!(name(&places, Identity::Lun(7)).as_deref(), Some("sda"));
        assert_eq!(name(&places, Identity::Lun(1)), None);
        disk(&dir, "sda", &[("sda1/partition", "1")]);
        assert_eq!(name(&places, Identity::Lun(7)), None, "the VM's own disk");
    }

    #[test]
    fn a_scsi_disk_is_found_by_its_serial_and_by_googles_name() {
        let dir = TempDir::new();
        let places = places(&dir);
        let names = |text: &str| testing::page(0x83, &testing::descriptor(1, text.as_bytes()));
        let pages: [(&str, &[u8]); 2] = [
            ("vpd_pg80", &testing::page(0x80, b"6000c29a")),
            ("vpd_pg83", &names("Google  PersistentDisk  pp-one")),
        ];
        scsi(&dir, "sda", None, "0:0:1:0", &pages);
        scsi(&dir, "sdb", None, "0:0:2:0", &[("vpd_pg83", &names("Google  PersistentDisk  pp-one-more"))]);
        assert_eq!(name(&places, Identity::Serial("6000c29a".into())).as_deref(), Some("sda"));
        assert_eq!(name(&places, Identity::ById("google-pp-one".into())).as_deref(), Some("sda"));
        assert_eq!(name(&places, Identity::ById("pp-one".into())), None, "no other names come of it");
        // udev's name of the same disk.
        fs::create_dir_all(dir.path().join("dev/disk/by-id")).unwrap();
        std::os::unix::fs::symlink("../../sda", dir.path().join("dev/disk/by-id/google-pp-one")).unwrap();
        assert_eq!(name(&places, Identity::ById("google-pp-one".into())).as_deref(), Some("sda"));
        scsi(&dir, "sdc", None, "0:0:3:0", &pages);
        let error = places.inspect(&Identity::ById("google-pp-one".into())).unwrap_err().to_string();
        assert!(error.contains("sda, sdc"), "{error}");
    }

    #[test]
    fn an_nvme_disk_is_found_by_googles_name() {
        let dir = TempDir::new();
        let google = |number: &'static str| [("device/serial", "nvme_card-pd        \n"), ("nsid", number)];
        disk(&dir, "nvme0n1", &google("1\n"));
        disk(&dir, "nvme0n2", &google("2\n"));
        disk(&dir, "nvme1n1", &[("device/serial", "nvme_card\n"), ("nsid", "2\n")]);
        let places = places(&dir);
        assert_eq!(name(&places, Identity::ById("google-pp-two".into())).as_deref(), Some("nvme0n2"));
        assert_eq!(name(&places, Identity::ById("google-pp-three".into())), None);
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
