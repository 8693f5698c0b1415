//! Records the intent for each sandbox on disk before the node carries it out.
//!
//! One versioned JSON file per sandbox below `<state-dir>/sandboxes`, written whole: temporary file, fsync, rename,
//! fsync of the folder. Files 0600 in a folder 0700, because a record holds a ticket. A file that cannot be understood
//! (torn, or from a newer version) is moved to `quarantine/` and reported; the other sandboxes run.
//!
//! A batch of VMs that one call requests has its own file below `<state-dir>/batches`, written in the same way.
//!
//! Touches nothing but the state directory. All calls block; the caller must keep them off the async threads.

mod batch;
mod disk;
mod inbox;
mod record;

use std::io;
use std::path::PathBuf;

pub use batch::{BATCH_VERSION, Batch, Member, Rest};
pub use disk::{Ledger, Loaded, Quarantined};
pub use inbox::{Inbox, Note};
pub use record::{
    Assignment, Binding, Enrolment, MAX_FILE, NetnsRef, Network, Record, RecordEnd, Stage, VERSION, WantedVm,
    batch_key,
};

/// Error of a ledger operation. The text names the file and reaches the user of the call.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The state directory cannot be used at all.
    #[error("cannot use the state directory {}: {source}; it must be writable for root and survive reboots", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// A record could not be made durable. No step that depends on it was taken.
    #[error("cannot write {}: {source}; {}", path.display(), remedy(source))]
    Write {
        /// The record's file.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// A record could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The record's file.
        path: PathBuf,
        /// The kernel's error, or the fault in the content.
        source: io::Error,
    },
    /// A record could not be removed.
    #[error("cannot remove {}: {source}", path.display())]
    Remove {
        /// The record's file.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
}

impl Error {
    /// Whether the disk (or its quota) is full.
    pub fn is_full(&self) -> bool {
        let (Error::Directory { source, .. }
        | Error::Write { source, .. }
        | Error::Read { source, .. }
        | Error::Remove { source, .. }) = self;
        matches!(source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
    }
}

fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "free space on the state directory's disk"
        }
        io::ErrorKind::ReadOnlyFilesystem => "the state directory must be writable",
        _ => "the node started no operation",
    }
}

#[cfg(test)]
mod tests;
