//! Handles a container's Storages and Devices like the real agent. It mounts each mount point once, counts its
//! containers, and unmounts with the last one. Mounts for a container that could not be made stay.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, lchown};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::stat::{Mode, SFlag, mknod};
use peerpod_proto::agent::{CreateContainerRequest, Device, FSGroup, Storage};

use crate::error;

/// Drivers that mount their source. The real agent's others make folders and images; this agent ignores them.
const MOUNTED: &[&str] = &["blk", "mmioblk", "virtio-fs"];

/// Mounted storages, with the number of containers of each.
#[derive(Default)]
pub(crate) struct Storages(Mutex<State>);

#[derive(Default)]
struct State {
    mounted: HashMap<PathBuf, usize>,
    of: HashMap<String, Vec<PathBuf>>,
}

impl Storages {
    /// Mounts the container's storages.
    pub(crate) fn add(&self, request: &CreateContainerRequest) -> ttrpc::Result<()> {
        request.devices.iter().try_for_each(device)?;
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let wanted = request.storages.iter().filter(|storage| MOUNTED.contains(&storage.driver.as_str()));
        for storage in wanted.filter(|storage| !storage.fstype.is_empty()) {
            let place = PathBuf::from(&storage.mount_point);
            let count = state.mounted.entry(place.clone()).or_default();
            if *count == 0 {
                mount_one(storage, &place)?;
            }
            *count += 1;
            state.of.entry(request.container_id.clone()).or_default().push(place);
        }
        Ok(())
    }

    /// Releases a container's mounts.
    pub(crate) fn remove(&self, container: &str) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for place in state.of.remove(container).unwrap_or_default() {
            let Some(count) = state.mounted.get_mut(&place) else { continue };
            *count -= 1;
            if *count == 0 {
                state.mounted.remove(&place);
                match umount2(&place, MntFlags::UMOUNT_NOFOLLOW) {
                    Ok(()) => drop(fs::remove_dir(&place)),
                    Err(error) => tracing::warn!(%error, place = %place.display(), "a storage stays mounted"),
                }
            }
        }
    }
}

fn mount_one(storage: &Storage, place: &Path) -> ttrpc::Result<()> {
    tracing::info!(source = storage.source, fstype = storage.fstype, options = ?storage.options, "storage");
    fs::create_dir_all(place).map_err(error::io)?;
    let (mut flags, mut data) = (MsFlags::empty(), Vec::new());
    for option in &storage.options {
        match option.as_str() {
            "ro" => flags |= MsFlags::MS_RDONLY,
            "noatime" => flags |= MsFlags::MS_NOATIME,
            "nodev" => flags |= MsFlags::MS_NODEV,
            "nosuid" => flags |= MsFlags::MS_NOSUID,
            "noexec" => flags |= MsFlags::MS_NOEXEC,
            "bind" => flags |= MsFlags::MS_BIND,
            "rw" | "defaults" => {}
            own => data.push(own),
        }
    }
    let (source, kind, data) = (storage.source.as_str(), storage.fstype.as_str(), data.join(","));
    mount(Some(source), place, Some(kind), flags, Some(data.as_str())).map_err(error::errno)?;
    match storage.fs_group.as_ref() {
        Some(group) => give(place, group).map_err(error::io),
        None => Ok(()),
    }
}

/// Mode bits of files (and of folders, below) with an fsGroup, as the real agent sets them.
const FILES: u32 = 0o660;
const FOLDERS: u32 = 0o2770;

fn give(root: &Path, group: &FSGroup) -> std::io::Result<()> {
    let found = fs::symlink_metadata(root)?;
    let matches = found.gid() == group.group_id && found.mode() & FOLDERS == FOLDERS;
    if group.group_change_policy.value() == 1 && matches {
        return Ok(());
    }
    let mut left = vec![root.to_owned()];
    while let Some(path) = left.pop() {
        let found = fs::symlink_metadata(&path)?;
        lchown(&path, None, Some(group.group_id))?;
        if found.is_symlink() {
            continue;
        }
        let mask = if found.is_dir() { FOLDERS } else { FILES };
        fs::set_permissions(&path, fs::Permissions::from_mode((found.mode() | mask) & 0o7777))?;
        if found.is_dir() {
            for entry in fs::read_dir(&path)? {
                left.push(entry?.path());
            }
        }
    }
    Ok(())
}

/// Makes the container's name of an existing device; here it is a name in the VM.
fn device(device: &Device) -> ttrpc::Result<()> {
    if device.type_ != "mmioblk" {
        return Err(error::invalid(format!("Failed to parse PCI path of {:?}", device.vm_path)));
    }
    let number = fs::metadata(&device.vm_path).map_err(error::io)?.rdev();
    let place = Path::new(&device.container_path);
    if let Some(folder) = place.parent() {
        fs::create_dir_all(folder).map_err(error::io)?;
    }
    match mknod(place, SFlag::S_IFBLK, Mode::from_bits_truncate(0o600), number) {
        Ok(()) => Ok(()),
        Err(Errno::EEXIST) if fs::metadata(place).is_ok_and(|there| there.rdev() == number) => Ok(()),
        Err(errno) => Err(error::errno(errno)),
    }
}
