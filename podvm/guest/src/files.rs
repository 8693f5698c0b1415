//! Reads and writes the guest's small files in the state directory (a tmpfs): written whole, readable by root alone.
//!
//! No fsync: the files do not outlive the VM anyway, and a rename suffices for a killed program.

use std::io;
use std::path::Path;

pub(crate) use peerpod_common::files::{make_folder, read, remove_volatile, write_volatile as write};

pub(crate) fn write_json(path: &Path, value: &impl serde::Serialize) -> io::Result<()> {
    write(path, &serde_json::to_vec(value)?)
}

#[cfg(test)]
pub(crate) mod testing {
    use std::path::{Path, PathBuf};
    use std::sync::atomic::{AtomicU32, Ordering};

    /// Directory of one test, removed with it.
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
