//! Binds Unix listeners under fixed names, by a temporary name and a rename, so that the fixed name always accepts
//! connections. Its file is unlinked only while it is that listener's: a new process may have replaced it.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::net::UnixListener;

/// Longest path that a client can connect to, in bytes (`sun_path` less its terminator).
const MAX_PATH: usize = 107;

static TEMPORARY: AtomicU64 = AtomicU64::new(0);

/// Name of a listener; dropping it unlinks the file if it still belongs to that listener.
#[derive(Debug)]
pub struct Bound {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl Bound {
    /// Returns the name of a listener that another process bound.
    pub fn of(path: &Path) -> io::Result<Bound> {
        let there = std::fs::symlink_metadata(path)?;
        Ok(Bound { path: path.to_owned(), device: there.dev(), inode: there.ino() })
    }

    /// Returns the fixed name.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns whether the file still belongs to the listener.
    pub fn is_there(&self) -> bool {
        std::fs::symlink_metadata(&self.path)
            .is_ok_and(|now| (now.dev(), now.ino()) == (self.device, self.inode))
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        if self.is_there()
            && let Err(error) = std::fs::remove_file(&self.path)
        {
            tracing::warn!(socket = %self.path.display(), %error, "cannot unlink the socket");
        }
    }
}

/// Binds `path` for the owner alone; a listener bound there before gets no more connections.
pub fn bind(path: &Path) -> io::Result<(UnixListener, Bound)> {
    place(path, |short| UnixListener::bind(short))
}

/// Binds a listener of any kind as [`bind`] does; `listen` binds it to the name that it receives.
pub fn place<L>(path: &Path, listen: impl FnOnce(&Path) -> io::Result<L>) -> io::Result<(L, Bound)> {
    if path.as_os_str().as_bytes().len() > MAX_PATH {
        let what = format!("the path has more than {MAX_PATH} bytes; choose a shorter one");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    }
    let (Some(folder), Some(_)) = (path.parent(), path.file_name()) else {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the path names no file"));
    };
    match std::fs::symlink_metadata(path) {
        Ok(there) if !there.file_type().is_socket() => {
            let what = "the path exists and is not a socket; move it away";
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, what));
        }
        _ => {}
    }
    // The temporary name is relative to the folder's descriptor, so it is short for a folder of any length.
    let opened = File::open(folder)?;
    let name = format!(".{}-{}", std::process::id(), TEMPORARY.fetch_add(1, Ordering::Relaxed));
    let short = PathBuf::from(format!("/proc/self/fd/{}/{name}", opened.as_raw_fd()));
    match std::fs::remove_file(&short) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = listen(&short)?;
    let placed: io::Result<Bound> = (|| {
        std::fs::set_permissions(&short, PermissionsExt::from_mode(0o600))?;
        let there = std::fs::symlink_metadata(&short)?;
        std::fs::rename(&short, path)?;
        Ok(Bound { path: path.to_owned(), device: there.dev(), inode: there.ino() })
    })();
    if placed.is_err() {
        drop(std::fs::remove_file(&short)); // Best effort; the first error is the one to report.
    }
    Ok((listener, placed?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_socket_is_replaced_and_only_its_own_name_unlinked() {
        let folder = std::env::temp_dir().join(format!("peerpod-socket-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let long = folder.join("x".repeat(MAX_PATH - folder.as_os_str().len() - 1));
        for path in [folder.join("a.sock"), long.clone()] {
            let (first, bound_first) = bind(&path).unwrap();
            let (second, bound_second) = bind(&path).unwrap();
            drop(first);
            drop(bound_first);
            assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
            let (_client, accepted) = tokio::join!(tokio::net::UnixStream::connect(&path), second.accept());
            accepted.unwrap();
            drop(bound_second);
            assert!(!path.exists());
        }
        assert!(bind(&folder.join("x".repeat(MAX_PATH))).is_err());
        std::fs::write(folder.join("file"), "").unwrap();
        assert!(bind(&folder.join("file")).is_err());
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1);
        std::fs::remove_dir_all(folder).unwrap();
    }
}
