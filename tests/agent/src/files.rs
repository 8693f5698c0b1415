//! Implements CopyFile, which writes below one folder of the VM and nowhere else.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Component, Path};

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, openat};
use nix::sys::stat::{FchmodatFlags, Mode, SFlag, fchmod, fchmodat, mkdirat};
use nix::unistd::{Gid, Uid, UnlinkatFlags, fchown, fchownat, symlinkat, unlinkat};
use peerpod_proto::agent::CopyFileRequest;

use crate::error;

/// Prefix that every path of CopyFile must have, independent of the root.
const PREFIX: &str = "/run/kata-containers/shared/containers/";

/// Carries out the request below `<root>/shared/containers`. No component may be a symlink, so no path leads out.
pub(crate) fn copy(root: &Path, request: &CopyFileRequest) -> ttrpc::Result<()> {
    let relative = request
        .path
        .strip_prefix(PREFIX)
        .ok_or_else(|| error::invalid(format!("Path {:?} does not start with {PREFIX}", request.path)))?;
    let components = components(Path::new(relative))?;
    let (name, parents) = components.split_last().ok_or_else(|| error::errno(Errno::EINVAL))?;
    let top = root.join("shared/containers");
    fs::create_dir_all(&top).map_err(error::io)?;
    let folder = descend(&top, parents, request).map_err(error::errno)?;
    let owner = (Uid::from_raw(request.uid as u32), Gid::from_raw(request.gid as u32));
    let mode = Mode::from_bits_truncate(request.file_mode & 0o7777);
    let kind = request.file_mode & SFlag::S_IFMT.bits();
    if kind == SFlag::S_IFDIR.bits() {
        directory(&folder, name, mode, owner).map_err(error::errno)
    } else if kind == SFlag::S_IFLNK.bits() {
        link(&folder, name, OsStr::from_bytes(&request.data), owner).map_err(error::errno)
    } else {
        regular(&folder, name, mode, owner, request).map_err(error::io)
    }
}

fn components(path: &Path) -> ttrpc::Result<Vec<&OsStr>> {
    path.components()
        .map(|component| match component {
            Component::Normal(name) => Ok(name),
            _ => Err(error::invalid(format!("Path {path:?} leads out of its folder"))),
        })
        .collect()
}

/// Opens the parent folder and makes missing ones; the immediate parent gets the owner.
fn descend(top: &Path, parents: &[&OsStr], request: &CopyFileRequest) -> Result<OwnedFd, Errno> {
    let flags = OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let mut folder = nix::fcntl::open(top, flags, Mode::empty())?;
    for (index, name) in parents.iter().enumerate() {
        let made = match mkdirat(&folder, *name, Mode::from_bits_truncate(request.dir_mode & 0o777)) {
            Ok(()) => true,
            Err(Errno::EEXIST) => false,
            Err(error) => return Err(error),
        };
        folder = openat(&folder, *name, flags, Mode::empty())?;
        if made {
            // mkdir is subject to the umask.
            fchmod(&folder, Mode::from_bits_truncate(request.dir_mode & 0o777))?;
        }
        if index + 1 == parents.len() {
            fchown(
                &folder,
                Some(Uid::from_raw(request.uid as u32)),
                Some(Gid::from_raw(request.gid as u32)),
            )?;
        }
    }
    Ok(folder)
}

fn directory(folder: &OwnedFd, name: &OsStr, mode: Mode, owner: (Uid, Gid)) -> Result<(), Errno> {
    match mkdirat(folder, name, mode) {
        Ok(()) => {
            fchmodat(folder, name, mode, FchmodatFlags::FollowSymlink)?;
            fchownat(folder, name, Some(owner.0), Some(owner.1), AtFlags::AT_SYMLINK_NOFOLLOW)
        }
        // An existing directory is kept unchanged.
        Err(Errno::EEXIST) => {
            openat(folder, name, OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC, Mode::empty())
                .map(drop)
        }
        Err(error) => Err(error),
    }
}

fn link(folder: &OwnedFd, name: &OsStr, target: &OsStr, owner: (Uid, Gid)) -> Result<(), Errno> {
    remove(folder, name)?;
    symlinkat(target, folder, name)?;
    fchownat(folder, name, Some(owner.0), Some(owner.1), AtFlags::AT_SYMLINK_NOFOLLOW)
}

/// Writes a piece into a neighbour with the extension `tmp`; the last piece renames it to the file.
fn regular(
    folder: &OwnedFd,
    name: &OsStr,
    mode: Mode,
    owner: (Uid, Gid),
    request: &CopyFileRequest,
) -> io::Result<()> {
    let offset = u64::try_from(request.offset).map_err(|_| Errno::EINVAL)?;
    let size = u64::try_from(request.file_size).map_err(|_| Errno::EINVAL)?;
    let partial = Path::new(name).with_extension("tmp");
    let partial = partial.as_os_str();
    if offset == 0 {
        remove(folder, partial)?;
    }
    let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let file = File::from(openat(folder, partial, flags, Mode::S_IRUSR | Mode::S_IWUSR)?);
    file.write_all_at(&request.data, offset)?;
    if file.metadata()?.len() != size {
        return Ok(()); // more to come
    }
    fchown(&file, Some(owner.0), Some(owner.1))?;
    fchmod(&file, mode)?;
    nix::fcntl::renameat(folder, partial, folder, name)?;
    Ok(())
}

/// Removes a file. A missing file is fine; a directory is an error.
fn remove(folder: &OwnedFd, name: &OsStr) -> Result<(), Errno> {
    match unlinkat(folder, name, UnlinkatFlags::NoRemoveDir) {
        Ok(()) | Err(Errno::ENOENT) => Ok(()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    struct Scratch(std::path::PathBuf);

    impl Scratch {
        fn new(name: &str) -> Scratch {
            let path = std::env::temp_dir().join(format!("peerpod-agent-{}-{name}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Scratch(path)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            drop(fs::remove_dir_all(&self.0));
        }
    }

    fn request(path: &str, mode: u32, data: &[u8]) -> CopyFileRequest {
        let mut request = CopyFileRequest::new();
        request.path = format!("{PREFIX}{path}");
        request.file_size = data.len() as i64;
        request.file_mode = mode;
        request.dir_mode = 0o40750;
        request.data = data.into();
        request
    }

    #[test]
    fn a_file_in_pieces_appears_when_it_is_whole() {
        let scratch = Scratch::new("pieces");
        let file = scratch.0.join("shared/containers/c-1/hosts");
        let mut first = request("c-1/hosts", 0o100_640, b"one ");
        first.file_size = 7;
        copy(&scratch.0, &first).unwrap();
        assert!(!file.exists());
        let mut second = request("c-1/hosts", 0o100_640, b"two");
        (second.file_size, second.offset) = (7, 4);
        copy(&scratch.0, &second).unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"one two");
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o7777, 0o640);
        assert_eq!(file.parent().unwrap().metadata().unwrap().permissions().mode() & 0o7777, 0o750);
    }

    #[test]
    fn directories_and_links_are_made_and_links_replaced() {
        let scratch = Scratch::new("kinds");
        copy(&scratch.0, &request("c-1", 0o40755, b"")).unwrap();
        copy(&scratch.0, &request("c-1/..data", 0o120_000, b"..old")).unwrap();
        copy(&scratch.0, &request("c-1/..data", 0o120_000, b"..new")).unwrap();
        let link = fs::read_link(scratch.0.join("shared/containers/c-1/..data")).unwrap();
        assert_eq!(link, Path::new("..new"));
    }

    #[test]
    fn nothing_is_written_outside() {
        let scratch = Scratch::new("outside");
        let outside = scratch.0.join("outside");
        fs::create_dir_all(&outside).unwrap();
        for path in ["../x", "a/../../x", "./../x"] {
            let error = copy(&scratch.0, &request(path, 0o100_644, b"x")).unwrap_err();
            assert!(error.to_string().contains("leads out"), "{path}: {error}");
        }
        let mut elsewhere = request("x", 0o100_644, b"x");
        elsewhere.path = "/etc/passwd".into();
        assert!(copy(&scratch.0, &elsewhere).is_err());
        // A link that leads out is not followed, neither as a folder nor as the file.
        copy(&scratch.0, &request("link", 0o120_000, outside.as_os_str().as_bytes())).unwrap();
        assert!(copy(&scratch.0, &request("link/x", 0o100_644, b"x")).is_err());
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
    }
}
