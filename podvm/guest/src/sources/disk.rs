//! Reads user-data from a small disk, found by its file system's label and nothing else: NoCloud's `cidata`,
//! OpenStack's `config-2`. The disk is mounted read-only while one file is read.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, open, openat2};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::stat::Mode;
use peerpod_common::files::read_open;

use super::LIMIT;

/// Limit of inspected disks and partitions.
const MOST: usize = 256;
const SECTOR: usize = 512;
/// Offset of ISO 9660's primary volume descriptor.
const VOLUME: u64 = 0x8000;
/// Mount point of the disk while it is read.
const MOUNT: &str = "/run/peerpod/user-data-disk";

/// Returns the device with this label, and its file system.
pub(super) fn find(label: &str) -> Option<(PathBuf, &'static str)> {
    let entries = fs::read_dir("/sys/class/block").ok()?;
    let mut names: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.file_name())).take(MOST).collect();
    names.sort_unstable();
    names.into_iter().find_map(|name| {
        let device = Path::new("/dev").join(name);
        let (kind, found) = inspect(&File::open(&device).ok()?)?;
        found.eq_ignore_ascii_case(label).then_some((device, kind))
    })
}

/// Returns the file system of a disk and its label, if it is one of the known ones.
fn inspect(disk: &File) -> Option<(&'static str, String)> {
    let (mut sector, mut volume) = ([0; SECTOR], [0; SECTOR]);
    disk.read_exact_at(&mut sector, 0).ok()?;
    // A disk of fewer bytes is no CD.
    let volume = disk.read_exact_at(&mut volume, VOLUME).is_ok().then_some(&volume);
    label(&sector, volume.map(|volume| &volume[..]))
}

/// Parses the first sector, and the volume descriptor if there is one.
pub(super) fn label(sector: &[u8], volume: Option<&[u8]>) -> Option<(&'static str, String)> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end_matches(['\0', ' ']).to_owned();
    if let Some(volume) = volume
        && volume.get(..6) == Some(b"\x01CD001")
    {
        return Some(("iso9660", text(volume.get(40..72)?)));
    }
    if sector.get(510..512) != Some(&[0x55, 0xaa]) {
        return None;
    }
    // FAT32, and FAT12 or FAT16, have their names at different places, each behind the label.
    let fat = [(82, 71, &b"FAT32"[..]), (54, 43, &b"FAT1"[..])];
    fat.into_iter().find_map(|(kind, label, name)| {
        (sector.get(kind..kind + name.len()) == Some(name))
            .then(|| ("vfat", text(&sector[label..label + 11])))
    })
}

/// Reads the file at this path of the disk; `None` if there is no such disk or file.
pub(super) fn read(label: &str, path: &Path) -> Result<Option<Vec<u8>>, String> {
    let Some((device, kind)) = find(label) else { return Ok(None) };
    let flags = MsFlags::MS_RDONLY | MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    fs::create_dir_all(MOUNT).map_err(|error| format!("make {MOUNT}: {error}"))?;
    let none: Option<&str> = None;
    mount(Some(&device), MOUNT, Some(kind), flags, none)
        .map_err(|error| format!("mount {} ({kind}): {error}", device.display()))?;
    let read = read_below(path);
    // At worst only detached, which is harmless: the mount is read-only.
    if let Err(error) = umount2(MOUNT, MntFlags::MNT_DETACH) {
        tracing::warn!(%error, "cannot unmount the disk of user-data");
    }
    read.map_err(|error| error.to_string())
}

/// Reads a file below the mount. No link on the disk leads out of it.
fn read_below(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let root = open(MOUNT, OFlag::O_PATH | OFlag::O_CLOEXEC | OFlag::O_DIRECTORY, Mode::empty())?;
    let beneath = ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS;
    let how = OpenHow::new().flags(OFlag::O_RDONLY | OFlag::O_CLOEXEC).resolve(beneath);
    match openat2(&root, path, how) {
        Ok(file) => read_open(file.into(), LIMIT).map(Some),
        Err(Errno::ENOENT) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn labels_are_read_where_each_file_system_has_them() {
        let mut volume = vec![0; SECTOR];
        volume[..6].copy_from_slice(b"\x01CD001");
        volume[40..72].copy_from_slice(b"cidata                          ");
        assert_eq!(label(&[0; SECTOR], Some(&volume)), Some(("iso9660", "cidata".to_owned())));

        let mut sector = vec![0; SECTOR];
        sector[510..].copy_from_slice(&[0x55, 0xaa]);
        assert_eq!(label(&sector, None), None, "a boot sector of something else");
        sector[54..62].copy_from_slice(b"FAT16   ");
        sector[43..54].copy_from_slice(b"CIDATA     ");
        assert_eq!(label(&sector, Some(&[0; SECTOR])), Some(("vfat", "CIDATA".to_owned())));
        sector[82..90].copy_from_slice(b"FAT32   ");
        sector[71..82].copy_from_slice(b"CONFIG-2   ");
        assert_eq!(label(&sector, None), Some(("vfat", "CONFIG-2".to_owned())));
    }

    proptest! {
        #[test]
        fn any_disk_is_handled(sector in proptest::collection::vec(any::<u8>(), 0..600)) {
            let _maybe = label(&sector, Some(&sector));
            let mut signed = sector;
            signed.resize(SECTOR, 0);
            signed[510..].copy_from_slice(&[0x55, 0xaa]);
            let _maybe = label(&signed, None);
        }
    }
}
