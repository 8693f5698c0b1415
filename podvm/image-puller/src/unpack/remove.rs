//! Removes entries of the layers below. Links are never followed, and depth costs no stack.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, openat, statat, unlinkat};
use rustix::io::{Errno, Result};

use super::names;

/// Removes the name and all below it; a missing one is fine.
pub(super) fn tree(folder: BorrowedFd<'_>, name: &OsStr) -> Result<()> {
    match unlinkat(folder, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => return Ok(()),
        Err(Errno::ISDIR | Errno::PERM) => {}
        Err(error) => return Err(error),
    }
    // Open folders on the way down, each with its remaining names.
    let top = enter(folder, name)?;
    let rest = names(top.as_fd())?;
    let mut stack: Vec<(OwnedFd, Vec<OsString>, OsString)> = vec![(top, rest, name.to_owned())];
    while let Some((here, rest, own)) = stack.last_mut() {
        let Some(next) = rest.pop() else {
            let own = std::mem::take(own);
            stack.pop();
            let above = stack.last().map_or(folder, |(above, _, _)| above.as_fd());
            unlinkat(above, own, AtFlags::REMOVEDIR)?;
            continue;
        };
        match unlinkat(&*here, &next, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(Errno::ISDIR | Errno::PERM) => {
                let below = enter(here.as_fd(), &next)?;
                let rest = names(below.as_fd())?;
                stack.push((below, rest, next));
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Removes the name unless this layer made it; in a folder that this layer made, removes the foreign entries.
pub(super) fn unmade(
    folder: BorrowedFd<'_>,
    name: &OsStr,
    path: &[u8],
    made: &BTreeSet<Vec<u8>>,
) -> Result<()> {
    if !made.contains(path) && !is_above(path, made) {
        return tree(folder, name);
    }
    match statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(found) if FileType::from_raw_mode(found.st_mode) == FileType::Directory => {
            below(enter(folder, name)?.as_fd(), path, made)
        }
        Ok(_) | Err(Errno::NOENT) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Removes the entries of the folder that this layer did not make.
pub(super) fn below(folder: BorrowedFd<'_>, path: &[u8], made: &BTreeSet<Vec<u8>>) -> Result<()> {
    // No deeper than names of entries can be: entries of this layer are at most that deep.
    for name in names(folder)? {
        let child =
            if path.is_empty() { name.as_bytes().to_vec() } else { [path, b"/", name.as_bytes()].concat() };
        unmade(folder, &name, &child, made)?;
    }
    Ok(())
}

/// Returns whether something below the path was made, though no entry was there for the path itself.
fn is_above(path: &[u8], made: &BTreeSet<Vec<u8>>) -> bool {
    let first = [path, b"/"].concat();
    made.range(first.clone()..).next().is_some_and(|other| other.starts_with(&first))
}

fn enter(folder: BorrowedFd<'_>, name: &OsStr) -> Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(folder, name, flags, Mode::empty())
}
