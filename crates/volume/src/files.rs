//! Reads and writes small JSON files that survive a crash whole or not at all, 0600 in folders of 0700. Reads and
//! writes are bounded. All functions return the errors of the system calls. May touch: the paths that the caller passes.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

use peerpod_common::files;
use serde::Serialize;
use serde::de::DeserializeOwned;
use zeroize::Zeroizing;

/// Writes a value as a whole file of JSON. More than `limit` bytes are an error (`InvalidInput`), and no file changes.
pub fn write_json(folder: &Path, name: &str, value: &impl Serialize, limit: u64) -> io::Result<()> {
    let bytes = serde_json::to_vec(value).map_err(io::Error::other)?;
    if bytes.len() as u64 > limit {
        let text = format!("{}: {} bytes, more than {limit}", folder.join(name).display(), bytes.len());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
    }
    write(folder, name, &bytes)
}

/// Writes a whole file, durably, and makes its folder where it is missing.
pub fn write(folder: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    files::make_folders(folder)?;
    files::write(&folder.join(name), bytes)
}

/// Removes a file that [`write()`] wrote, durably, and the temporary file of a killed writer. A missing file is no error.
pub fn remove(folder: &Path, name: &str) -> io::Result<()> {
    gone(fs::remove_file(folder.join(format!(".{name}.new"))))?;
    gone(fs::remove_file(folder.join(name)))?;
    sync_dir(folder)
}

/// Returns a value with secrets as JSON. Nothing but the result holds them: a buffer that grew would leave copies. A
/// value of more than `limit` bytes becomes an empty result, which no reader accepts.
pub fn secret_json(value: &impl Serialize, limit: usize) -> Zeroizing<Vec<u8>> {
    let mut bytes = Zeroizing::new(vec![0; limit]);
    let mut free = &mut bytes[..];
    let written = serde_json::to_writer(&mut free, value).map_or(0, |()| limit - free.len());
    bytes.truncate(written);
    bytes
}

/// Reads a file that holds secrets, at most the first `limit` + 1 bytes; returns `None` if it does not exist.
pub fn read_secret(path: &Path, limit: usize) -> io::Result<Option<Zeroizing<Vec<u8>>>> {
    let file = match File::open(path) {
        Err(why) if why.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    // The buffer has room for one byte more, so that the reader sees the end without making it grow.
    let mut bytes = Zeroizing::new(Vec::with_capacity(limit + 2));
    file.take(limit as u64 + 1).read_to_end(&mut bytes)?;
    Ok(Some(bytes))
}

/// Reads a value; returns `None` if the file does not exist. More than `limit` bytes, or no such value, are an error
/// (`InvalidData`).
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

/// Returns the visible entries of a folder; none if the folder does not exist.
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

/// Removes a folder that holds no files except those of a killed writer. A missing folder is no error, one with other
/// files is (`DirectoryNotEmpty`).
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

/// Makes a folder's entries durable. A missing folder is no error.
pub fn sync_dir(folder: &Path) -> io::Result<()> {
    gone(File::open(folder).and_then(|folder| folder.sync_all()))
}

/// Turns a missing file, which was to be removed, into success.
pub fn gone(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(why) if why.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// Returns the error for a file that exists and cannot be used.
pub(crate) fn unusable(path: &Path, why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{}: {why}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_oversize_file_is_not_written() {
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
