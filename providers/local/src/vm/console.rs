//! Keeps the VM's console: the initial standard output and error of its programs. It is kept in two files of bounded
//! length, so that a guest with much output cannot fill the node's disk.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Length at which the current file becomes the older one, and the previous older one is dropped.
const LIMIT: u64 = 512 * 1024;

/// Names of the current file and of the older one.
pub(crate) const FILES: [&str; 2] = ["console.log", "console.log.1"];

/// Copies everything from `input` to the files in `dir` until the last writer is gone. Output that cannot be written
/// (disk full) is dropped: the guest must never wait for its console.
pub(super) fn keep(mut input: impl Read, dir: &Path) {
    let mut console = Console { path: dir.join(FILES[0]), older: dir.join(FILES[1]), file: None, length: 0 };
    let mut buffer = vec![0; 16 * 1024];
    loop {
        match input.read(&mut buffer) {
            Ok(0) => return,
            Ok(length) => console.write(buffer.get(..length).unwrap_or_default()),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

struct Console {
    path: PathBuf,
    older: PathBuf,
    file: Option<File>,
    length: u64,
}

impl Console {
    fn write(&mut self, bytes: &[u8]) {
        if self.length > LIMIT {
            self.file = None;
            self.length = 0;
            // The bound holds in any case: a log that cannot be kept is dropped.
            if fs::rename(&self.path, &self.older).is_err() {
                drop(fs::remove_file(&self.path));
            }
        }
        if self.file.is_none() {
            self.file = File::options().create(true).append(true).mode(0o600).open(&self.path).ok();
        }
        if let Some(file) = &mut self.file {
            match file.write_all(bytes) {
                Ok(()) => self.length += bytes.len() as u64,
                Err(_) => self.file = None,
            }
        }
    }
}

/// Returns at most the last `limit` bytes of the console, for the provider.
pub(crate) fn tail(dir: &Path, limit: usize) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    for name in FILES.iter().rev() {
        match File::open(dir.join(name)) {
            // Twice the limit, because one chunk may exceed it.
            Ok(file) => drop(file.take(2 * LIMIT).read_to_end(&mut bytes)?),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(bytes.split_off(bytes.len().saturating_sub(limit)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_console_is_bounded_and_ends_with_what_came_last() {
        let dir = std::env::temp_dir().join(format!("peerpod-console-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let mut all = Vec::new();
        for line in 0..400_000 {
            writeln!(all, "line {line}").unwrap();
        }
        keep(all.as_slice(), &dir);
        let kept: u64 = FILES.iter().map(|name| fs::metadata(dir.join(name)).unwrap().len()).sum();
        let end = tail(&dir, 11 + 12).unwrap();
        fs::remove_dir_all(&dir).unwrap();
        assert!(kept < 3 * LIMIT, "{kept}");
        assert_eq!(String::from_utf8(end).unwrap(), "ine 399998\nline 399999\n");
    }

    #[test]
    fn the_console_is_bounded_where_the_older_file_cannot_be_replaced() {
        let dir = std::env::temp_dir().join(format!("peerpod-console-kept-{}", std::process::id()));
        // A folder with an entry takes the place of the older file.
        fs::create_dir_all(dir.join(FILES[1]).join("x")).unwrap();
        keep(vec![b'x'; 4 * LIMIT as usize].as_slice(), &dir);
        let kept = fs::metadata(dir.join(FILES[0])).unwrap().len();
        fs::remove_dir_all(&dir).unwrap();
        assert!(kept < 2 * LIMIT, "{kept}");
    }
}
