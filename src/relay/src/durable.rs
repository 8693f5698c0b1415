//! Files that must be there after a power cut: written whole under another name, synced, renamed, and the folder
//! synced. Readable by nobody else (0600 in folders of 0700). Blocking; callers in async code use a blocking thread.

use std::{
    fs::{DirBuilder, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt},
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
};

/// Larger files than this are not ours.
pub(crate) const MAX_FILE: u64 = 4 << 20;

static TEMPORARY: AtomicU64 = AtomicU64::new(0);

/// Makes `folder` and what is missing above it, for its owner alone.
pub(crate) fn make_folder(folder: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    let mut rights = folder.metadata()?.permissions();
    if rights.mode() & 0o077 != 0 {
        rights.set_mode(0o700);
        std::fs::set_permissions(folder, rights)?;
    }
    Ok(())
}

/// Puts `content` at `folder`/`name`, durably and all or nothing.
pub(crate) fn write(folder: &Path, name: &str, content: &[u8]) -> io::Result<()> {
    // Unlike any name of ours: they begin with a letter or digit.
    let nth = TEMPORARY.fetch_add(1, Ordering::Relaxed);
    let temporary = folder.join(format!(".{}-{nth}.tmp", std::process::id()));
    let written = (|| {
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
        file.write_all(content)?;
        file.sync_all()?;
        std::fs::rename(&temporary, folder.join(name))?;
        sync_folder(folder)
    })();
    if written.is_err() {
        // Best effort: what is left would only be clutter, and the first error is the one to tell.
        drop(std::fs::remove_file(&temporary));
    }
    written
}

/// Removes `folder`/`name`; gone is fine.
pub(crate) fn remove(folder: &Path, name: &str) -> io::Result<()> {
    match std::fs::remove_file(folder.join(name)) {
        Ok(()) => sync_folder(folder),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

/// The content of a file of at most [`MAX_FILE`] bytes; `None` when there is none.
pub(crate) fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut content = Vec::new();
    file.take(MAX_FILE + 1).read_to_end(&mut content)?;
    if content.len() as u64 > MAX_FILE {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, "larger than anything we write"));
    }
    Ok(Some(content))
}

/// Removes what a process that died in [`write()`] left.
pub(crate) fn sweep(folder: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let ours = name.to_str().is_some_and(|name| name.starts_with('.') && name.ends_with(".tmp"));
        if ours && entry.file_type()?.is_file() {
            std::fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_whole_private_and_leaves_nothing_beside_it() {
        let base = std::env::temp_dir().join(format!("peerpod-durable-{}", std::process::id()));
        let folder = base.join("a/b");
        make_folder(&folder).unwrap();
        write(&folder, "x.json", b"one").unwrap();
        write(&folder, "x.json", b"two").unwrap();
        assert_eq!(read(&folder.join("x.json")).unwrap().unwrap(), b"two");
        assert_eq!(read(&folder.join("y.json")).unwrap(), None);
        let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&folder), mode(&folder.join("x.json"))), (0o700, 0o600));
        std::fs::write(folder.join(".1-2.tmp"), b"torn").unwrap();
        sweep(&folder).unwrap();
        let names: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names, ["x.json"]);
        remove(&folder, "x.json").unwrap();
        remove(&folder, "x.json").unwrap();
        assert!(write(&base.join("missing"), "x", b"").is_err());
        std::fs::remove_dir_all(base).unwrap();
    }
}
