//! Opens a volume's files in the VM for a moment: to make the folder of a subPath, to measure the usage. A mount of a
//! container is used if there is one; else the volume is mounted below a folder of the guest, and unmounted again.
//! Blocks. No path leads out of the volume, even by symbolic links that a container made.

use std::fs::{self, DirBuilder};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Component, Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, open, openat, openat2};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::stat::{Mode, fchmod, fstat, mkdirat};
use peerpod_volume::VolumeId;

use super::{Fault, MOMENT, mount_point};
use crate::intercept::Ready;

/// File system of a bind mount, as in the kata-agent's mount(2).
pub(super) const BIND: &str = "bind";

pub(super) fn is_mounted(path: &Path) -> bool {
    let device = |path: &Path| fs::symlink_metadata(path).map(|found| found.dev()).ok();
    let parent = path.parent().and_then(device);
    device(path).is_some_and(|own| Some(own) != parent)
}

/// Calls `inspect` with the volume's root.
pub(super) fn with<T>(
    id: &VolumeId,
    ready: &Ready,
    inspect: impl FnOnce(&Path) -> Result<T, Fault>,
) -> Result<T, Fault> {
    let mounted = mount_point(id);
    if is_mounted(&mounted) {
        return inspect(&mounted);
    }
    if ready.fstype == BIND {
        // The source is mounted already.
        return inspect(Path::new(&ready.source));
    }
    let own = Path::new(MOMENT).join(id.as_str());
    make_folder(&own)?;
    // Left by a run that was killed.
    leave(&own);
    let (flags, data) = split(&ready.options);
    let data = data.join(",");
    mount(Some(ready.source.as_str()), &own, Some(ready.fstype.as_str()), flags, Some(data.as_str()))
        .map_err(|errno| {
            let (Ready { source, fstype, .. }, own) = (ready, own.display());
            let why = format!("{errno}; the VM's console has the kernel's messages");
            Fault::not_now(format!("mount {source} as {fstype} on {own}: {why}"))
        })?;
    let result = inspect(&own);
    leave(&own);
    drop(fs::remove_dir(&own)); // a folder that stays is used the next time
    result
}

pub(super) fn make_folder(path: &Path) -> Result<(), Fault> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.map_err(|error| Fault::not_now(format!("make {}: {error}", path.display())))
}

fn leave(path: &Path) {
    if is_mounted(path)
        && let Err(error) = umount2(path, MntFlags::UMOUNT_NOFOLLOW)
    {
        let path = path.display();
        tracing::warn!(%error, %path, "cannot unmount a volume that was mounted for a moment");
    }
}

/// Splits the options of mount(8) into flags and options of the file system.
pub(super) fn split(options: &[String]) -> (MsFlags, Vec<&str>) {
    let (mut flags, mut data) = (MsFlags::MS_NOSUID | MsFlags::MS_NODEV, Vec::new());
    for option in options {
        match option.as_str() {
            "ro" => flags |= MsFlags::MS_RDONLY,
            "noatime" => flags |= MsFlags::MS_NOATIME,
            "nodiratime" => flags |= MsFlags::MS_NODIRATIME,
            "relatime" => flags |= MsFlags::MS_RELATIME,
            "strictatime" => flags |= MsFlags::MS_STRICTATIME,
            "lazytime" => flags |= MsFlags::MS_LAZYTIME,
            "sync" => flags |= MsFlags::MS_SYNCHRONOUS,
            "dirsync" => flags |= MsFlags::MS_DIRSYNC,
            "noexec" => flags |= MsFlags::MS_NOEXEC,
            "rw" | "defaults" | "nodev" | "nosuid" | "dev" | "suid" | "exec" | "async" | "atime"
            | "diratime" | "_netdev" | "nofail" | "auto" | "noauto" => {}
            own => data.push(own),
        }
    }
    (flags, data)
}

/// Returns a path below the root without symbolic links. If `may_make`, makes missing folders, with their parent's
/// mode.
pub(super) fn path_in(root: &Path, path: &Path, may_make: bool) -> Result<PathBuf, Fault> {
    let failed = |why: &str| Fault::never(format!("its subPath {}: {why}", path.display()));
    if path.as_os_str().is_empty() {
        return Ok(PathBuf::new());
    }
    if !path.components().all(|part| matches!(part, Component::Normal(_))) {
        return Err(failed("it leads out of the volume"));
    }
    let top = open(root, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty());
    let top = top.map_err(|errno| failed(errno.desc()))?;
    let found = match beneath(&top, path) {
        Err(Errno::ENOENT) if may_make => make(&top, path),
        other => other,
    };
    let found = found.map_err(|errno| match errno {
        Errno::EXDEV | Errno::ELOOP => failed("a symbolic link in it leads out of the volume"),
        Errno::ENOENT => failed("it does not exist, and the volume is read-only"),
        other => failed(other.desc()),
    })?;
    let real = |fd: &OwnedFd| fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()));
    let within = real(&found).and_then(|found| {
        let root = real(&top)?;
        found.strip_prefix(root).map(Path::to_owned).map_err(std::io::Error::other)
    });
    within.map_err(|error| failed(&error.to_string()))
}

fn beneath(top: &OwnedFd, path: &Path) -> Result<OwnedFd, Errno> {
    let resolve = ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_MAGICLINKS;
    openat2(top.as_fd(), path, OpenHow::new().flags(OFlag::O_PATH | OFlag::O_CLOEXEC).resolve(resolve))
}

fn make(top: &OwnedFd, path: &Path) -> Result<OwnedFd, Errno> {
    let mut so_far = PathBuf::new();
    let mut folder = top.try_clone().map_err(|_| Errno::EMFILE)?;
    for part in path.components() {
        so_far.push(part);
        folder = match beneath(top, &so_far) {
            Err(Errno::ENOENT) => {
                let rights = Mode::from_bits_truncate(fstat(&folder)?.st_mode & 0o7777);
                match mkdirat(&folder, part.as_os_str(), rights) {
                    Ok(()) | Err(Errno::EEXIST) => {}
                    Err(errno) => return Err(errno),
                }
                let made = beneath(top, &so_far)?;
                // The umask removed some of them. O_PATH has no fchmod: another descriptor of the folder serves.
                let flags = OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
                let own = openat(&folder, part.as_os_str(), flags, Mode::empty())?;
                fchmod(&own, rights)?;
                made
            }
            other => other?,
        };
    }
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::testing::TempDir;

    #[test]
    fn a_sub_path_is_made_and_never_leaves_the_volume() {
        let dir = TempDir::new();
        let root = dir.path().join("volume");
        let outside = dir.path().join("outside");
        fs::create_dir_all(&root).unwrap();
        fs::create_dir_all(&outside).unwrap();
        let ask = |path: &str, make| path_in(&root, Path::new(path), make);
        assert_eq!(ask("a/b", true).unwrap(), Path::new("a/b"));
        assert!(root.join("a/b").is_dir());
        assert_eq!(ask("a/b", false).unwrap(), Path::new("a/b"));
        assert!(ask("c", false).unwrap_err().text.contains("read-only"));
        std::os::unix::fs::symlink("a", root.join("inside")).unwrap();
        assert_eq!(
            ask("inside/b", true).unwrap(),
            Path::new("a/b"),
            "a link inside is followed and reported"
        );
        std::os::unix::fs::symlink(&outside, root.join("out")).unwrap();
        std::os::unix::fs::symlink("../outside", root.join("up")).unwrap();
        for way_out in ["out", "out/x", "up", "up/x", "../outside", "/etc"] {
            assert!(ask(way_out, true).is_err(), "{way_out}");
        }
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
    }

    #[test]
    fn options_are_split_into_the_kernels_and_the_file_systems() {
        let options = ["ro", "noatime", "defaults", "discard", "data=ordered"].map(String::from);
        let (flags, data) = split(&options);
        assert!(flags.contains(MsFlags::MS_RDONLY | MsFlags::MS_NOATIME));
        assert_eq!(data, ["discard", "data=ordered"]);
    }
}
