//! Small files of our own on the state directory (a tmpfs): written whole, readable by root alone.
//!
//! No fsync: what is here does not outlive the VM anyway; a rename is all that a killed program needs.

use std::{
    fs::{self, DirBuilder, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt},
    path::Path,
};

/// Makes the directory, for root alone, also when it was there with other permissions.
pub(crate) fn make_private_dir(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o700))
}

/// Writes a file, 0600 from its first byte on; readers see the old content or the new one.
pub(crate) fn write_private(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".new");
    let new = path.with_file_name(name);
    match fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
    file.write_all(content)?;
    fs::rename(new, path)
}

/// A file's content if it is there and not larger than `limit` bytes.
pub(crate) fn read_bounded(path: &Path, limit: u64) -> io::Result<Option<Vec<u8>>> {
    let file = match fs::File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut content = Vec::new();
    file.take(limit + 1).read_to_end(&mut content)?;
    if content.len() as u64 > limit {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("more than {limit} bytes")));
    }
    Ok(Some(content))
}

#[cfg(test)]
pub(crate) mod testing {
    use std::{
        path::{Path, PathBuf},
        sync::atomic::{AtomicU32, Ordering},
    };

    /// A directory of a test's own, removed with it.
    pub(crate) struct TempDir(PathBuf);

    impl TempDir {
        pub(crate) fn new() -> TempDir {
            static NEXT: AtomicU32 = AtomicU32::new(0);
            let n = NEXT.fetch_add(1, Ordering::Relaxed);
            let path = std::env::temp_dir().join(format!("peerpod-guest-{}-{n}", std::process::id()));
            std::fs::create_dir(&path).unwrap();
            TempDir(path)
        }

        pub(crate) fn path(&self) -> &Path {
            &self.0
        }
    }

    impl Drop for TempDir {
        fn drop(&mut self) {
            drop(std::fs::remove_dir_all(&self.0));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{testing::TempDir, *};

    #[test]
    fn files_and_folders_are_for_root_alone_even_if_they_were_not() {
        let dir = TempDir::new();
        let state = dir.path().join("a/b");
        fs::create_dir_all(&state).unwrap();
        fs::set_permissions(&state, fs::Permissions::from_mode(0o755)).unwrap();
        make_private_dir(&state).unwrap();
        assert_eq!(fs::metadata(&state).unwrap().permissions().mode() & 0o777, 0o700);

        let file = state.join("key");
        fs::write(&file, "old").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
        fs::write(state.join("key.new"), "left behind").unwrap();
        write_private(&file, b"new").unwrap();
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read(&file).unwrap(), b"new");
        assert!(!state.join("key.new").exists());
    }

    #[test]
    fn reading_is_bounded_and_tells_absence_from_failure() {
        let dir = TempDir::new();
        let file = dir.path().join("f");
        assert_eq!(read_bounded(&file, 4).unwrap(), None);
        fs::write(&file, "1234").unwrap();
        assert_eq!(read_bounded(&file, 4).unwrap().unwrap(), b"1234");
        assert!(read_bounded(&file, 3).is_err());
        assert!(read_bounded(dir.path(), 4).is_err());
    }
}
