//! Small private files, each written whole: a reader sees the old or the new content. Files have mode 0600 from the
//! first byte on, folders 0700. All functions block, and return the errors of the system calls.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use nix::libc::{ENOENT, ENXIO, O_NOFOLLOW, O_NONBLOCK};

/// Makes a folder and its missing parents, with mode 0700, and their entries durable. An existing folder is no error.
pub fn make_folders(folder: &Path) -> io::Result<()> {
    make_synced(folder, sync_folder)
}

fn make_synced(folder: &Path, sync: impl Fn(&Path) -> io::Result<()>) -> io::Result<()> {
    let missing = folder.ancestors().take_while(|path| !path.as_os_str().is_empty() && !path.exists());
    let missing: Vec<&Path> = missing.collect();
    if let Some(lowest) = folder.ancestors().nth(missing.len()) {
        // The process that made it may have been killed before the sync. Folders above belong to others, and may not be
        // readable.
        drop(sync(folder_of(lowest)));
    }
    for path in missing.into_iter().rev() {
        match DirBuilder::new().mode(0o700).create(path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists && path.is_dir() => {}
            made => made?,
        }
        sync(folder_of(path))?;
    }
    if folder.is_dir() { Ok(()) } else { Err(ErrorKind::NotADirectory.into()) }
}

/// Makes a folder as [`make_folders`] does, and narrows the mode of an existing one to 0700.
pub fn make_folder(folder: &Path) -> io::Result<()> {
    make_folders(folder)?;
    if fs::metadata(folder)?.permissions().mode() & 0o077 == 0 {
        return Ok(());
    }
    fs::set_permissions(folder, Permissions::from_mode(0o700))
}

/// Writes a file that survives a power cut: temporary file, fsync, rename, fsync of the folder. After an error the old
/// content is unchanged, except where only the last fsync failed.
pub fn write(path: &Path, content: &[u8]) -> io::Result<()> {
    replace(path, content, File::sync_all)?;
    sync_folder(folder_of(path))
}

/// Writes a file that need not survive a power cut, as on a tmpfs: no fsync. An error leaves the old content.
pub fn write_volatile(path: &Path, content: &[u8]) -> io::Result<()> {
    replace(path, content, |_| Ok(()))
}

fn replace(path: &Path, content: &[u8], sync: impl Fn(&File) -> io::Result<()>) -> io::Result<()> {
    let temporary = temporary(path)?;
    let mut file = open_temporary(&temporary)?;
    let written = (|| {
        file.set_len(0)?;
        file.write_all(content)?;
        sync(&file)?;
        fs::rename(&temporary, path)
    })();
    if written.is_err() {
        // Best effort: the next write of this file uses the temporary file again, and the first error is the one to report.
        drop(fs::remove_file(&temporary));
    }
    written
}

/// Opens the temporary file, and holds its lock until it is closed: two processes may write the same file.
fn open_temporary(path: &Path) -> io::Result<File> {
    loop {
        // A killed writer may have left it: its content goes once the lock is held.
        let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)?;
        file.lock()?;
        let ours = file.metadata()?;
        match fs::symlink_metadata(path) {
            Ok(there) if (there.dev(), there.ino()) == (ours.dev(), ours.ino()) => return Ok(file),
            // The writer before renamed it in the meantime.
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
}

/// Hidden name beside `path`. The same for each write, so that killed writers leave at most one.
fn temporary(path: &Path) -> io::Result<PathBuf> {
    let mut name = OsString::from(".");
    name.push(path.file_name().ok_or(ErrorKind::InvalidInput)?);
    name.push(".new");
    Ok(folder_of(path).join(name))
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Reads a file of at most `limit` bytes; `None` without such a file.
///
/// # Errors
/// `FileTooLarge` beyond `limit`.
pub fn read(path: &Path, limit: u64) -> io::Result<Option<Vec<u8>>> {
    let file = match File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    read_open(file, limit).map(Some)
}

/// Reads a file of another program, of at most `limit` bytes. It follows no link, and no FIFO blocks it.
///
/// # Errors
/// `InvalidInput` for anything but a file, `FileTooLarge` beyond `limit`.
pub fn read_plain(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let file = OpenOptions::new().read(true).custom_flags(O_NOFOLLOW | O_NONBLOCK).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(ErrorKind::InvalidInput, "not a file"));
    }
    read_open(file, limit)
}

/// Opens a device. `None` if there is none, or if it has nothing behind it.
///
/// # Errors
/// Returns any other error of the open.
pub fn open_device(path: &Path) -> io::Result<Option<File>> {
    match File::open(path) {
        Err(error) if matches!(error.raw_os_error(), Some(ENOENT | ENXIO)) => Ok(None),
        opened => opened.map(Some),
    }
}

/// Reads an open file of at most `limit` bytes.
///
/// # Errors
/// `FileTooLarge` beyond `limit`.
pub fn read_open(file: File, limit: u64) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    file.take(limit + 1).read_to_end(&mut content)?;
    if content.len() as u64 > limit {
        return Err(io::Error::new(ErrorKind::FileTooLarge, format!("more than {limit} bytes")));
    }
    Ok(content)
}

/// Removes a file durably. A missing file is no error.
pub fn remove(path: &Path) -> io::Result<()> {
    if remove_volatile(path)? { sync_folder(folder_of(path)) } else { Ok(()) }
}

/// Removes a file whose return after a power cut does no harm, such as a socket. Returns whether there was one.
pub fn remove_volatile(path: &Path) -> io::Result<bool> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        removed => removed.map(|()| true),
    }
}

/// Removes the temporary files that killed writers left in a folder. No writer may be active there.
pub fn sweep(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let temporary = entry.file_name().to_str().is_some_and(is_temporary);
        if temporary && entry.file_type()?.is_file() {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// Whether a file name is one of a temporary file, of this version or an earlier one.
pub fn is_temporary(name: &str) -> bool {
    name.starts_with('.') && (name.ends_with(".new") || name.ends_with(".tmp"))
}

/// Makes the entries of a folder durable.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        path.metadata().unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn a_written_file_is_whole_and_private_without_temporary_files() {
        let base = std::env::temp_dir().join(format!("peerpod-files-{}", std::process::id()));
        let folder = base.join("a/b");
        fs::create_dir_all(&folder).unwrap();
        fs::set_permissions(&folder, Permissions::from_mode(0o755)).unwrap();
        make_folder(&folder).unwrap();
        let file = folder.join("x.json");
        fs::write(&file, "wide").unwrap();
        fs::set_permissions(&file, Permissions::from_mode(0o644)).unwrap();
        write(&file, b"one").unwrap();
        assert_eq!((mode(&folder), mode(&file)), (0o700, 0o600));
        write_volatile(&file, b"two").unwrap();
        assert_eq!(read(&file, 3).unwrap().unwrap(), b"two");
        fs::write(folder.join(".x.json.new"), "half of a longer content").unwrap();
        write(&file, b"two").unwrap();
        assert_eq!(read(&file, 3).unwrap().unwrap(), b"two");
        for killed in [".y.json.new", ".x.tmp"] {
            fs::write(folder.join(killed), "half").unwrap();
        }
        sweep(&folder).unwrap();
        let names: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["x.json"]);
        remove(&file).unwrap();
        remove(&file).unwrap();
        assert!(write(&base.join("missing/x"), b"").is_err());
        fs::remove_dir_all(base).unwrap();
    }

    #[test]
    fn the_entry_of_each_folder_is_synced_before_the_next_is_made_and_again_after_a_kill() {
        let base = std::env::temp_dir().join(format!("peerpod-files-made-{}", std::process::id()));
        make_folders(&base).unwrap();
        let (a, c) = (base.join("a"), base.join("a/b/c"));
        let synced = std::cell::RefCell::new(Vec::new());
        let sync = |path: &Path| {
            synced.borrow_mut().push(path.to_owned());
            // The process is killed here.
            if path == a { Err(ErrorKind::Interrupted.into()) } else { sync_folder(path) }
        };
        assert_eq!(make_synced(&c, sync).unwrap_err().kind(), ErrorKind::Interrupted);
        assert_eq!(synced.take(), [base.parent().unwrap().to_owned(), base.clone(), a.clone()]);
        assert!(a.join("b").exists() && !c.exists());
        let sync = |path: &Path| {
            synced.borrow_mut().push(path.to_owned());
            sync_folder(path)
        };
        make_synced(&c, sync).unwrap();
        assert_eq!(synced.take(), [a.clone(), a.join("b")]);
        make_synced(&c, sync).unwrap();
        assert_eq!((synced.take(), mode(&c)), (vec![a.join("b")], 0o700));
        fs::write(base.join("file"), "").unwrap();
        assert!(make_folders(&base.join("file")).is_err());
        fs::remove_dir_all(base).unwrap();
    }

    #[test]
    fn a_read_is_bounded_and_distinguishes_absence_from_failure() {
        let folder = std::env::temp_dir().join(format!("peerpod-files-read-{}", std::process::id()));
        make_folder(&folder).unwrap();
        let file = folder.join("f");
        assert_eq!(read(&file, 4).unwrap(), None);
        fs::write(&file, "1234").unwrap();
        assert_eq!(read(&file, 4).unwrap().unwrap(), b"1234");
        assert_eq!(read(&file, 3).unwrap_err().kind(), ErrorKind::FileTooLarge);
        assert!(read(&folder, 4).is_err());
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn writers_of_one_file_do_not_mix() {
        let folder = std::env::temp_dir().join(format!("peerpod-files-mixed-{}", std::process::id()));
        make_folder(&folder).unwrap();
        let file = folder.join("f");
        std::thread::scope(|scope| {
            for writer in b'a'..b'e' {
                let file = &file;
                scope.spawn(move || {
                    for length in 0..200 {
                        write_volatile(file, &vec![writer; 4000 + length]).unwrap();
                        let content = read(file, 1 << 20).unwrap().unwrap();
                        assert!(content.len() >= 4000 && content.iter().all(|byte| *byte == content[0]));
                    }
                });
            }
        });
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
        fs::remove_dir_all(folder).unwrap();
    }
}
