//! Makes the contents of a target path: a tiny tmpfs with only the marker and, for a raw volume, a placeholder.
//!
//! A container runtime lists each device below a folder that it is given as a device, at the container's path joined
//! with the device's name. The placeholder is named like the volume, so the relay recognises it in the container's
//! specification. It is a character device: Kata's shims pass character devices on and attach none. Kata's Go shim
//! refuses a block device, because its remote hypervisor cannot attach one ("HotplugAddDevice: not implemented").
//!
//! kubelet binds the target of a raw volume to a file of its own (`place::map_path`) and attaches a loop device to it,
//! unless a device exists there already. So a block device (`device`) is bound there first.
//!
//! Every step can be repeated; nothing is removed recursively. May touch: the target, kubelet's map path.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt, chown};
use std::path::Path;

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use peerpod_volume::VolumeId;
use peerpod_volume::files::gone;
use peerpod_volume::records::MARKER;

/// Options of the tmpfs, with room for the marker and the folders that kubelet makes for subPaths.
const TMPFS: &str = "size=128k,nr_inodes=512,mode=0755";
/// Limit of mounts on top of each other, so that a loop ends.
const LAYERS: usize = 16;

/// Adds the attempt and its object to an error.
fn at<W: Into<io::Error>>(what: &str, path: &Path) -> impl Fn(W) -> io::Error {
    move |why| {
        let why = why.into();
        io::Error::new(why.kind(), format!("{what} {}: {why}", path.display()))
    }
}

/// Makes a directory with the marker, on its own tmpfs. After an error, a repeated call continues from there.
pub(crate) fn publish_directory(target: &Path, marker: &str) -> io::Result<()> {
    make_parent(target)?;
    match DirBuilder::new().mode(0o750).create(target) {
        Err(why) if why.kind() == io::ErrorKind::AlreadyExists => {}
        made => made.map_err(at("make the target", target))?,
    }
    if !is_mount_point(target)? {
        let flags = MsFlags::MS_NODEV | MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC;
        mount(Some("peerpod"), target, Some("tmpfs"), flags, Some(TMPFS))
            .map_err(at("mount a tmpfs at", target))?;
    }
    let file = target.join(MARKER);
    if fs::read(&file).is_ok_and(|there| there == marker.as_bytes()) {
        return Ok(());
    }
    write(&file, marker.as_bytes()).map_err(at("write", &file))
}

/// Makes the placeholder of a raw volume in a published directory. The container's device gets the placeholder's owner
/// and permissions: those of `like`, else this process's owner and 0600.
pub(crate) fn make_placeholder(target: &Path, volume: &VolumeId, like: Option<&Path>) -> io::Result<()> {
    let path = target.join(volume.as_str());
    let is_there = |found: fs::Metadata| found.file_type().is_char_device() && found.rdev() == placeholder();
    if !fs::symlink_metadata(&path).is_ok_and(is_there) {
        gone(fs::remove_file(&path)).map_err(at("remove", &path))?;
        mknod(&path, SFlag::S_IFCHR, Mode::empty(), placeholder())
            .map_err(at("make the character device", &path))?;
    }
    let mut mode = 0o600;
    if let Some(like) = like {
        let like = fs::metadata(like).map_err(at("look at", like))?;
        chown(&path, Some(like.uid()), Some(like.gid())).map_err(at("set the owner of", &path))?;
        mode = like.mode() & 0o777;
    }
    fs::set_permissions(&path, fs::Permissions::from_mode(mode)).map_err(at("set the permissions of", &path))
}

/// Returns the numbers of `/dev/full`. Kata's Rust shim looks up a device's numbers in sysfs and fails without them,
/// and every kernel has these. A write to the placeholder itself fails.
fn placeholder() -> u64 {
    makedev(1, 7)
}

/// Makes a path a block device's node, by a bind mount of that device.
pub(crate) fn publish_device(target: &Path, device: &Path) -> io::Result<()> {
    let wanted = fs::metadata(device).map_err(at("look at", device))?;
    if !wanted.file_type().is_block_device() {
        return Err(at("look at", device)(io::Error::other("it is no block device")));
    }
    make_parent(target)?;
    for _ in 0..LAYERS {
        match fs::symlink_metadata(target) {
            Err(why) if why.kind() == io::ErrorKind::NotFound => {
                let made = OpenOptions::new().write(true).create_new(true).mode(0o640).open(target);
                made.map_err(at("make the target", target))?;
            }
            Err(why) => return Err(at("look at the target", target)(why)),
            Ok(there) if there.file_type().is_block_device() && there.rdev() == wanted.rdev() => {
                return Ok(());
            }
            Ok(there) if there.is_file() => {
                let none = None::<&str>;
                mount(Some(device), target, none, MsFlags::MS_BIND, none)
                    .map_err(at("mount a device's node at", target))?;
            }
            // A mount of an earlier device.
            Ok(_) if is_mount_point(target)? => unmount(target)?,
            Ok(_) => return Err(at("look at the target", target)(io::Error::other("it is no plain file"))),
        }
    }
    Err(at("mount a device's node at", target)(io::Error::other("something else is there again and again")))
}

/// Removes the published contents and the target. Fails if the target is in use, or contains a file of another program.
pub(crate) fn unpublish(target: &Path) -> io::Result<()> {
    for _ in 0..LAYERS {
        match fs::symlink_metadata(target) {
            Err(why) if why.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(why) => return Err(at("look at the target", target)(why)),
            Ok(_) if is_mount_point(target)? => unmount(target)?,
            Ok(there) if there.is_dir() => {
                return gone(fs::remove_dir(target)).map_err(at("remove the folder", target));
            }
            Ok(_) => return gone(fs::remove_file(target)).map_err(at("remove the file", target)),
        }
    }
    Err(at("unmount", target)(io::Error::other("it is a mount point again and again")))
}

/// Whether the path is a mount point: on another device than its folder, as a tmpfs and a device's node always are.
pub(crate) fn is_mount_point(target: &Path) -> io::Result<bool> {
    let inspect = |path: &Path| fs::symlink_metadata(path).map_err(at("look at", path));
    let Some(parent) = target.parent() else { return Ok(true) };
    Ok(inspect(target)?.dev() != inspect(parent)?.dev())
}

fn unmount(target: &Path) -> io::Result<()> {
    match umount2(target, MntFlags::UMOUNT_NOFOLLOW) {
        Ok(()) | Err(Errno::EINVAL | Errno::ENOENT) => Ok(()),
        Err(why) => Err(at("unmount", target)(why)),
    }
}

fn make_parent(target: &Path) -> io::Result<()> {
    let Some(parent) = target.parent() else { return Ok(()) };
    let made = DirBuilder::new().recursive(true).mode(0o750).create(parent);
    made.map_err(at("make the folder of the target", parent))
}

fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    // After a crash the file may be incomplete.
    gone(fs::remove_file(path))?;
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o400).open(path)?;
    file.write_all(bytes)
}
