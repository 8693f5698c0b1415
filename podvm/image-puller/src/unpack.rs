//! Unpacks one layer's tar archive into a directory: an overlay over the layers below, or the bare directory of the
//! first.
//!
//! The kernel resolves every name with that directory as the root (`RESOLVE_IN_ROOT`), so links of a hostile layer,
//! even absolute ones, lead nowhere else. No image needs `..` in a name, a device node that would stand for a removal,
//! or attributes that steer overlayfs. The first is refused; the others are left out and reported.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::ffi::{CString, OsStr, OsString};
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use rustix::fs::{
    AtFlags, CWD, FileType, Gid, Mode, OFlags, ResolveFlags, Timespec, Timestamps, Uid, XattrFlags, chownat,
    fchmod, fchown, fsetxattr, futimens, linkat, mkdirat, mknodat, open, openat, openat2, symlinkat,
    utimensat,
};
use rustix::io::Errno;
use tar::{Entry, EntryType};

use crate::cause::{Cause, Error, disk, quote};

mod remove;

/// Limit of the parts of a path; more have no use.
const MAX_DEPTH: usize = 255;
const WHITEOUT: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
/// Extended attributes that an image may set; others belong to overlayfs or to the host.
const XATTRS: [&str; 2] = ["user.", "security.capability"];
const XATTR_KEY: &str = "SCHILY.xattr.";
const MAX_XATTRS: usize = 64;

/// Number of things left out of a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeftOut {
    /// Device nodes: the kata-agent provides those of containers.
    pub devices: u64,
    /// Extended attributes that an image may not set, or that the filesystem does not take.
    pub xattrs: u64,
}

/// Unpacks a tar archive into `root`. `entries` and `bytes` are the rest of the image's permitted number of entries and
/// of bytes. The archive itself counts the bytes that are read from it; holes of sparse files are counted here.
pub fn unpack(
    archive: impl Read,
    root: &Path,
    entries: &mut u64,
    bytes: &Cell<u64>,
) -> Result<LeftOut, Error> {
    let directory = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd = open(root, directory, Mode::empty()).map_err(|e| disk("opening", root)(e.into()))?;
    let mut unpacker =
        Unpacker { root: fd, bytes, made: BTreeSet::new(), times: Vec::new(), left: LeftOut::default() };
    let mut archive = tar::Archive::new(archive);
    let broken = |error| of_archive("reading the layer's archive", error);
    for entry in archive.entries().map_err(broken)? {
        *entries = entries.checked_sub(1).ok_or_else(|| {
            Error::new(Cause::TooLarge, "the image has more files than are permitted (images.limits.entries)")
        })?;
        unpacker.entry(entry.map_err(broken)?)?;
    }
    unpacker.finish()
}

/// Classifies an error of reading an archive, or of writing its content.
fn of_archive(what: &str, error: io::Error) -> Error {
    if crate::stream::is_too_much(&error) {
        return too_large();
    }
    match error.raw_os_error() {
        Some(_) => disk("unpacking to", Path::new("the store"))(error),
        None => malformed(format!("{what}: {}", quote(&error.to_string()))),
    }
}

fn too_large() -> Error {
    let text = "unpacked, the image has more bytes than are permitted (images.limits.unpacked_bytes)";
    Error::new(Cause::TooLarge, text)
}

fn malformed(text: impl Into<String>) -> Error {
    Error::new(Cause::Malformed, text)
}

struct Unpacker<'a> {
    root: OwnedFd,
    bytes: &'a Cell<u64>,
    /// Entries of this layer: removals concern the layers below alone.
    made: BTreeSet<Vec<u8>>,
    /// Directories that get their time at the end, when nothing in them changes any more.
    times: Vec<(Vec<u8>, Timestamps)>,
    left: LeftOut,
}

/// Name of an entry, with checked parts.
struct Name {
    whole: Vec<u8>,
    /// Offset of the last part.
    last: usize,
}

impl Name {
    /// Parses a name; `None`: the root itself.
    fn parse(bytes: &[u8]) -> Result<Option<Name>, Error> {
        let refuse = |why: &str| {
            let shown = quote(&String::from_utf8_lossy(bytes));
            Err(malformed(format!("the layer has an entry {shown:?}: {why}")))
        };
        if bytes.contains(&0) {
            return refuse("a zero byte in a name");
        }
        let parts: Vec<&[u8]> =
            bytes.split(|byte| *byte == b'/').filter(|part| !part.is_empty() && *part != b".").collect();
        if parts.iter().any(|part| *part == b"..") {
            return refuse("names that lead upwards are refused");
        }
        if parts.len() > MAX_DEPTH {
            return refuse("too deep");
        }
        let Some(last) = parts.last() else { return Ok(None) };
        let (whole, length) = (parts.join(&b'/'), last.len());
        Ok(Some(Name { last: whole.len() - length, whole }))
    }

    fn parent(&self) -> &[u8] {
        &self.whole[..self.last.saturating_sub(1)]
    }

    fn file(&self) -> &[u8] {
        &self.whole[self.last..]
    }

    /// Returns the path of another file in the same folder.
    fn beside(&self, file: &[u8]) -> Vec<u8> {
        [&self.whole[..self.last], file].concat()
    }

    fn failed(&self, what: &str) -> impl Fn(Errno) -> Error {
        move |error| match error {
            Errno::LOOP | Errno::NOTDIR | Errno::EXIST | Errno::XDEV => {
                malformed(format!("the layer's entry {}: {what}: {error}", shown(self)))
            }
            other => disk(what, Path::new(OsStr::from_bytes(&self.whole)))(other.into()),
        }
    }
}

impl Unpacker<'_> {
    fn entry(&mut self, mut entry: Entry<'_, impl Read>) -> Result<(), Error> {
        let kind = entry.header().entry_type();
        if kind == EntryType::XGlobalHeader {
            return Ok(());
        }
        let Some(name) = Name::parse(&entry.path_bytes())? else {
            return match kind {
                EntryType::Directory => self.root_itself(&mut entry),
                _ => Err(malformed("the layer has an entry without a name")),
            };
        };
        if name.file().starts_with(WHITEOUT) {
            return self.removal(&name);
        }
        let parent = self.parent(&name)?;
        if kind == EntryType::Directory {
            return self.directory(&parent, &name, &mut entry);
        }
        if matches!(kind, EntryType::Block | EntryType::Char) {
            self.left.devices += 1;
            return Ok(());
        }
        remove::tree(parent.as_fd(), OsStr::from_bytes(name.file())).map_err(name.failed("replacing"))?;
        match kind {
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                self.file(&parent, &name, &mut entry)?;
            }
            EntryType::Symlink => symlink(&parent, &name, &entry)?,
            EntryType::Link => self.hard_link(&parent, &name, &entry)?,
            EntryType::Fifo => {
                mknodat(&parent, name.file(), FileType::Fifo, mode(&entry), 0)
                    .map_err(name.failed("making the named pipe"))?;
                owner_at(&parent, &name, &entry)?;
            }
            other => {
                let kind = other.as_byte();
                return Err(malformed(format!(
                    "the layer has an entry of type {kind:?}, which no image needs"
                )));
            }
        }
        self.made.insert(name.whole);
        Ok(())
    }

    /// Opens a path below the root, with all links within it.
    fn open(&self, path: &[u8], flags: OFlags) -> rustix::io::Result<OwnedFd> {
        let path = if path.is_empty() { &b"."[..] } else { path };
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        // Repeated if something was renamed meanwhile, which does not happen for long.
        for _ in 0..8 {
            match openat2(&self.root, path, flags | OFlags::CLOEXEC, Mode::empty(), resolve) {
                Err(Errno::AGAIN) => {}
                other => return other,
            }
        }
        Err(Errno::AGAIN)
    }

    /// Returns the folder that holds the entry; makes it if it has no entry.
    fn parent(&mut self, name: &Name) -> Result<OwnedFd, Error> {
        let directory = OFlags::PATH | OFlags::DIRECTORY;
        match self.open(name.parent(), directory) {
            Err(Errno::NOENT) => {}
            other => return other.map_err(name.failed("opening its folder")),
        }
        let parent = name.parent();
        let ends = parent.iter().enumerate().filter(|(_, byte)| **byte == b'/').map(|(at, _)| at);
        let mut above = self.open(b"", directory).map_err(name.failed("opening the root"))?;
        for end in ends.chain([parent.len()]) {
            let path = &parent[..end];
            above = match self.open(path, directory) {
                Err(Errno::NOENT) => {
                    let part = path.rsplit(|byte| *byte == b'/').next().unwrap_or(path);
                    mkdirat(&above, part, Mode::from_raw_mode(0o755))
                        .and_then(|()| self.open(path, directory))
                        .map_err(name.failed("making its folder"))?
                }
                other => other.map_err(name.failed("opening its folder"))?,
            };
        }
        Ok(above)
    }

    fn root_itself(&mut self, entry: &mut Entry<'_, impl Read>) -> Result<(), Error> {
        let name = Name { whole: b".".to_vec(), last: 0 };
        let fd =
            self.open(b"", OFlags::RDONLY | OFlags::DIRECTORY).map_err(name.failed("opening the root"))?;
        self.attributes(&fd, &name, entry)?;
        self.times.push((Vec::new(), times(entry)));
        Ok(())
    }

    fn directory(
        &mut self,
        parent: &OwnedFd,
        name: &Name,
        entry: &mut Entry<'_, impl Read>,
    ) -> Result<(), Error> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let open = || openat(parent, name.file(), flags, Mode::empty());
        let fd = match open() {
            Ok(fd) => fd,
            // It does not exist, or is no folder.
            Err(_) => remove::tree(parent.as_fd(), OsStr::from_bytes(name.file()))
                .and_then(|_| mkdirat(parent, name.file(), Mode::from_raw_mode(0o700)))
                .and_then(|()| open())
                .map_err(name.failed("making the folder"))?,
        };
        self.attributes(&fd, name, entry)?;
        self.times.push((name.whole.clone(), times(entry)));
        self.made.insert(name.whole.clone());
        Ok(())
    }

    fn file(&mut self, parent: &OwnedFd, name: &Name, entry: &mut Entry<'_, impl Read>) -> Result<(), Error> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = openat(parent, name.file(), flags, Mode::from_raw_mode(0o600))
            .map_err(name.failed("making the file"))?;
        let mut file = std::fs::File::from(fd);
        let (size, before) = (entry.size(), self.bytes.get());
        if size > before {
            return Err(too_large());
        }
        let copied =
            io::copy(entry, &mut file).map_err(|e| of_archive(&format!("the file {}", shown(name)), e))?;
        if copied != size {
            return Err(malformed(format!("the layer ends within {}", shown(name))));
        }
        // Reading has counted the content. A sparse file has been written with its holes, which the archive lacks.
        self.bytes.set(self.bytes.get().min(before - size));
        self.attributes(&file, name, entry)?;
        futimens(&file, &times(entry)).map_err(name.failed("setting the time of"))
    }

    /// Sets owner, extended attributes and mode: in this order, because each step clears part of the next.
    fn attributes(
        &mut self,
        fd: &impl AsFd,
        name: &Name,
        entry: &mut Entry<'_, impl Read>,
    ) -> Result<(), Error> {
        let (uid, gid) = owner(entry)?;
        fchown(fd, Some(uid), Some(gid)).map_err(name.failed("setting the owner of"))?;
        for (key, value) in xattrs(entry) {
            if !XATTRS.iter().any(|permitted| key.starts_with(permitted)) {
                self.left.xattrs += 1;
                continue;
            }
            match fsetxattr(fd, &*key, &value, XattrFlags::empty()) {
                Ok(()) => {}
                Err(Errno::NOTSUP | Errno::INVAL | Errno::PERM) => self.left.xattrs += 1,
                Err(error) => return Err(name.failed("setting an extended attribute of")(error)),
            }
        }
        fchmod(fd, mode(entry)).map_err(name.failed("setting the mode of"))
    }

    fn hard_link(&self, parent: &OwnedFd, name: &Name, entry: &Entry<'_, impl Read>) -> Result<(), Error> {
        let missing = |why: &str| malformed(format!("the hard link {}: {why}", shown(name)));
        let target = entry.link_name_bytes().ok_or_else(|| missing("without a target"))?;
        let target = Name::parse(&target)?.ok_or_else(|| missing("to the root"))?;
        let folder = match self.open(target.parent(), OFlags::PATH | OFlags::DIRECTORY) {
            Err(Errno::NOENT) => return Err(missing("its target is not there")),
            other => other.map_err(name.failed("opening its target's folder"))?,
        };
        match linkat(&folder, target.file(), parent, name.file(), AtFlags::empty()) {
            Err(Errno::NOENT) => Err(missing("its target is not there")),
            Err(Errno::PERM) => Err(missing("its target is a folder")),
            other => other.map_err(name.failed("making the hard link")),
        }
    }

    /// Handles an entry that stands for a removal: the layers below have the name, and this image does not.
    fn removal(&mut self, name: &Name) -> Result<(), Error> {
        // A missing folder has nothing to remove.
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let folder = match self.open(name.parent(), flags) {
            Ok(folder) => folder,
            Err(Errno::NOENT | Errno::NOTDIR) => return Ok(()),
            Err(error) => return Err(name.failed("opening the folder of a removal")(error)),
        };
        if name.file() == OPAQUE {
            return remove::below(folder.as_fd(), name.parent(), &self.made)
                .map_err(name.failed("emptying the folder of"));
        }
        let file = &name.file()[WHITEOUT.len()..];
        if file.starts_with(WHITEOUT) {
            return Ok(()); // marks of aufs, without a meaning here
        }
        if file.is_empty() || file == b"." || file == b".." {
            return Err(malformed(format!("the layer has a removal {} of nothing", shown(name))));
        }
        remove::unmade(folder.as_fd(), OsStr::from_bytes(file), &name.beside(file), &self.made)
            .map_err(name.failed("removing the object of"))
    }

    fn finish(self) -> Result<LeftOut, Error> {
        for (path, times) in self.times.iter().rev() {
            // A later entry may have removed the folder again.
            if let Ok(fd) = self.open(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW) {
                let name = Name { whole: path.clone(), last: 0 };
                futimens(&fd, times).map_err(name.failed("setting the time of"))?;
            }
        }
        Ok(self.left)
    }
}

fn symlink(parent: &OwnedFd, name: &Name, entry: &Entry<'_, impl Read>) -> Result<(), Error> {
    let target = entry.link_name_bytes().unwrap_or_default();
    let target = CString::new(target.into_owned())
        .map_err(|_| malformed(format!("the link {}: a zero byte", shown(name))))?;
    symlinkat(&*target, parent, name.file()).map_err(name.failed("making the link"))?;
    owner_at(parent, name, entry)?;
    utimensat(parent, name.file(), &times(entry), AtFlags::SYMLINK_NOFOLLOW)
        .map_err(name.failed("setting the time of"))
}

fn owner_at(parent: &OwnedFd, name: &Name, entry: &Entry<'_, impl Read>) -> Result<(), Error> {
    let (uid, gid) = owner(entry)?;
    chownat(parent, name.file(), Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)
        .map_err(name.failed("setting the owner of"))
}

/// Returns the owner. All ones mean "unchanged" to the kernel, which an archive cannot mean.
fn owner(entry: &Entry<'_, impl Read>) -> Result<(Uid, Gid), Error> {
    let number = |value: io::Result<u64>| {
        let number = value.ok().and_then(|n| u32::try_from(n).ok()).filter(|n| *n != u32::MAX);
        number.ok_or_else(|| malformed("the layer has an owner that is not a number of 32 bits"))
    };
    Ok((Uid::from_raw(number(entry.header().uid())?), Gid::from_raw(number(entry.header().gid())?)))
}

fn mode(entry: &Entry<'_, impl Read>) -> Mode {
    Mode::from_raw_mode(entry.header().mode().unwrap_or(0o644) & 0o7777)
}

fn times(entry: &Entry<'_, impl Read>) -> Timestamps {
    let seconds = entry.header().mtime().ok().and_then(|n| i64::try_from(n).ok()).unwrap_or(0);
    let time = Timespec { tv_sec: seconds, tv_nsec: 0 };
    Timestamps { last_access: time, last_modification: time }
}

/// Returns the attributes of the entry's pax header; unreadable ones are left out.
fn xattrs(entry: &mut Entry<'_, impl Read>) -> Vec<(String, Vec<u8>)> {
    let Ok(Some(extensions)) = entry.pax_extensions() else { return Vec::new() };
    let attributes = extensions.flatten().filter_map(|extension| {
        let key = extension.key().ok()?.strip_prefix(XATTR_KEY)?;
        (!key.contains('\0')).then(|| (key.to_owned(), extension.value_bytes().to_vec()))
    });
    attributes.take(MAX_XATTRS).collect()
}

fn shown(name: &Name) -> String {
    format!("{:?}", quote(&String::from_utf8_lossy(&name.whole)))
}

/// Returns a directory's names.
fn names(folder: rustix::fd::BorrowedFd<'_>) -> rustix::io::Result<Vec<OsString>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let reading = openat(folder, ".", flags, Mode::empty())?;
    let mut names = Vec::new();
    for entry in rustix::fs::Dir::new(reading)? {
        let name = entry?.file_name().to_bytes().to_vec();
        if name != b"." && name != b".." {
            names.push(OsString::from_vec(name));
        }
    }
    Ok(names)
}

/// Removes a tree of any depth, without following links; a missing one is fine.
pub(crate) fn remove_tree(path: &Path) -> io::Result<()> {
    let (Some(parent), Some(file)) = (path.parent(), path.file_name()) else { return Ok(()) };
    let directory = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    match openat(CWD, parent, directory, Mode::empty()) {
        Err(Errno::NOENT) => Ok(()),
        other => Ok(remove::tree(other?.as_fd(), file)?),
    }
}

#[cfg(test)]
mod tests;
