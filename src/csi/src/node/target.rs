//! What kubelet finds at a target path: for a file system a tiny tmpfs with nothing but the marker, for a raw device a file
//! that begins with it. Made and removed any number of times; nothing is ever removed recursively. May touch: the target.

use std::{
    fs::{self, DirBuilder, OpenOptions},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::Path,
};

use nix::{
    errno::Errno,
    mount::{MntFlags, MsFlags, mount, umount2},
};
use peerpod_volume::records::MARKER;

/// Room for the marker, and for the folders that kubelet makes in it for subPaths.
const TMPFS: &str = "size=128k,nr_inodes=512,mode=0755";
/// A raw device's file: kubelet makes a loop device of it, which has whole sectors.
const BLOCK_BYTES: u64 = 4096;
/// Nothing mounts over itself more often than that; a loop must end.
const LAYERS: usize = 16;

/// What goes wrong with a target.
#[derive(Debug, thiserror::Error)]
#[error("{what} {path}: {why}", path = path.display())]
pub struct Error {
    what: &'static str,
    path: std::path::PathBuf,
    why: io::Error,
}

fn at<'a, W: Into<io::Error>>(what: &'static str, path: &'a Path) -> impl Fn(W) -> Error + use<'a, W> {
    move |why| Error { what, path: path.to_owned(), why: why.into() }
}

/// Makes a directory with the marker in a tmpfs of its own.
///
/// # Errors
/// It cannot be made; what was begun is found again.
pub fn publish_directory(target: &Path, marker: &str) -> Result<(), Error> {
    if let Some(parent) = target.parent() {
        let made = DirBuilder::new().recursive(true).mode(0o750).create(parent);
        made.map_err(at("make the folder of the target", parent))?;
    }
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
    write(&file, marker.as_bytes(), 0).map_err(at("write", &file))
}

/// Makes a file that begins with the marker.
///
/// # Errors
/// As [`publish_directory`].
pub fn publish_file(target: &Path, marker: &str) -> Result<(), Error> {
    if let Some(parent) = target.parent() {
        let made = DirBuilder::new().recursive(true).mode(0o750).create(parent);
        made.map_err(at("make the folder of the target", parent))?;
    }
    write(target, marker.as_bytes(), BLOCK_BYTES).map_err(at("write the target", target))
}

/// Takes away what was published, and the target with it.
///
/// # Errors
/// It is in use, or there is something in it that is not ours.
pub fn unpublish(target: &Path) -> Result<(), Error> {
    for _ in 0..LAYERS {
        match fs::symlink_metadata(target) {
            Err(why) if why.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(why) => return Err(at("look at the target", target)(why)),
            Ok(there) if there.is_dir() && is_mount_point(target)? => {
                match umount2(target, MntFlags::UMOUNT_NOFOLLOW) {
                    Ok(()) | Err(Errno::EINVAL | Errno::ENOENT) => {}
                    Err(why) => return Err(at("unmount", target)(why)),
                }
            }
            Ok(there) if there.is_dir() => {
                return gone(fs::remove_dir(target)).map_err(at("remove the folder", target));
            }
            Ok(_) => return gone(fs::remove_file(target)).map_err(at("remove the file", target)),
        }
    }
    Err(at("unmount", target)(io::Error::other("it is a mount point again and again")))
}

/// Whether something is mounted there: it is on another device than its folder. A tmpfs always is.
pub fn is_mount_point(target: &Path) -> Result<bool, Error> {
    let look = |path: &Path| fs::symlink_metadata(path).map_err(at("look at", path));
    let Some(parent) = target.parent() else { return Ok(true) };
    Ok(look(target)?.dev() != look(parent)?.dev())
}

fn write(path: &Path, bytes: &[u8], length: u64) -> io::Result<()> {
    // What is there may be half of it, after a crash.
    gone(fs::remove_file(path))?;
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o400).open(path)?;
    file.write_all(bytes)?;
    if length > bytes.len() as u64 {
        file.set_len(length)?;
    }
    Ok(())
}

fn gone(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(why) if why.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}
