//! Small JSON files that survive a crash whole or not at all: a temporary file, fsync, rename, fsync of the folder. 0600 in
//! folders of 0700; read and written with a bound. May touch: what the caller names.

use std::{
    fs::{self, DirBuilder, File},
    io,
    os::unix::fs::DirBuilderExt,
    path::Path,
};

use peerpod_common::files;
use serde::{Serialize, de::DeserializeOwned};

/// Makes a folder and those above it. There already is fine.
///
/// # Errors
/// It cannot be made.
pub fn make_dir(folder: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)
}

/// Writes a value whole, as JSON.
///
/// # Errors
/// It has more than `limit` bytes (`InvalidInput`; nothing is changed then), or could not be made durable.
pub fn write_json(folder: &Path, name: &str, value: &impl Serialize, limit: u64) -> io::Result<()> {
    let bytes = serde_json::to_vec(value).map_err(io::Error::other)?;
    if bytes.len() as u64 > limit {
        let text = format!("{}: {} bytes, more than {limit}", folder.join(name).display(), bytes.len());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    write(folder, name, &bytes)
}

/// Writes a file whole, and where its folder is new makes that findable, too.
///
/// # Errors
/// It could not be made durable.
pub fn write(folder: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    let new = !folder.exists();
    make_dir(folder)?;
    files::write(&folder.join(name), bytes)?;
    match folder.parent().filter(|_| new) {
        Some(parent) => sync_dir(parent),
        None => Ok(()),
    }
}

/// Reads a value; none when there is no such file.
///
/// # Errors
/// It cannot be read, has more than `limit` bytes or is no such value (both `InvalidData`).
pub fn read_json<T: DeserializeOwned>(path: &Path, limit: u64) -> io::Result<Option<T>> {
    let bytes = match files::read(path, limit) {
        Err(why) if why.kind() == io::ErrorKind::FileTooLarge => {
            return Err(unusable(path, &why.to_string()));
        }
        Ok(None) => return Ok(None),
        read => read?.unwrap_or_default(),
    };
    serde_json::from_slice(&bytes).map(Some).map_err(|why| unusable(path, &why.to_string()))
}

/// The visible entries of a folder; none when it is not there.
///
/// # Errors
/// It cannot be read.
pub fn names(folder: &Path) -> io::Result<Vec<String>> {
    let entries = match fs::read_dir(folder) {
        Err(why) if why.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut names = Vec::new();
    for entry in entries {
        let name = entry?.file_name();
        names.extend(name.to_str().filter(|name| !name.starts_with('.')).map(str::to_owned));
    }
    Ok(names)
}

/// Removes a folder in which nothing is any more but what a writer left that was killed. Not there is fine.
///
/// # Errors
/// It is still there; `DirectoryNotEmpty`: something is in it.
pub fn remove_emptied(folder: &Path) -> io::Result<()> {
    match fs::remove_dir(folder) {
        Err(why) if why.kind() == io::ErrorKind::DirectoryNotEmpty => {}
        done => return gone(done),
    }
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name();
        if name.to_str().is_some_and(files::is_temporary) {
            gone(fs::remove_file(folder.join(name)))?;
        }
    }
    gone(fs::remove_dir(folder))
}

/// Makes a folder's entries durable. Not there is fine.
///
/// # Errors
/// It could not be done.
pub fn sync_dir(folder: &Path) -> io::Result<()> {
    gone(File::open(folder).and_then(|folder| folder.sync_all()))
}

/// What was to be removed was not there: fine.
///
/// # Errors
/// Any other failure.
pub fn gone(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(why) if why.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// A file that is there and cannot be used.
pub(crate) fn unusable(path: &Path, why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{}: {why}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_not_be_read_is_not_written() {
        let folder = std::env::temp_dir().join(format!("peerpod-files-{}", std::process::id()));
        write_json(&folder, "a", &"xx", 4).unwrap();
        let refused = write_json(&folder, "a", &"xxx", 4).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidInput);
        assert_eq!(read_json::<String>(&folder.join("a"), 4).unwrap().as_deref(), Some("xx"));
        let refused = read_json::<String>(&folder.join("a"), 3).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
        assert_eq!(read_json::<String>(&folder.join("b"), 3).unwrap(), None);
        assert_eq!(names(&folder).unwrap(), ["a"]);
        // A writer was killed here.
        fs::write(folder.join(".a.new"), "half").unwrap();
        let kept = remove_emptied(&folder).unwrap_err();
        assert_eq!(kept.kind(), io::ErrorKind::DirectoryNotEmpty);
        fs::remove_file(folder.join("a")).unwrap();
        fs::write(folder.join(".a.new"), "half").unwrap();
        remove_emptied(&folder).unwrap();
        assert!(!folder.exists());
        remove_emptied(&folder).unwrap();
    }
}
