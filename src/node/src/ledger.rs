//! Records the intent for each sandbox on disk before the node carries it out.
//!
//! One versioned JSON file per sandbox below `<state-dir>/sandboxes`, and one per batch below `<state-dir>/batches`, is
//! written whole. Files 0600 in a folder 0700, because a record holds a ticket. A file that cannot be understood (torn,
//! or from a newer version) is moved to `quarantine/` and reported; the other sandboxes run. All calls block.

mod batch;
mod disk;
mod inbox;
mod record;

use std::io;
use std::path::PathBuf;

pub(crate) use batch::{BATCH_VERSION, Batch, Member, Rest};
pub(crate) use disk::{Ledger, Loaded, Quarantined};
pub(crate) use inbox::{Inbox, Note};
use peerpod_common::blocking::Interrupted;
pub(crate) use record::{
    Binding, Enrolment, MAX_FILE, NetnsRef, Network, RecordEnd, StartTrace, VERSION, WantedVm, batch_key,
};
pub use record::{Record, Stage};

/// Error of a ledger operation. The text names the file and reaches the user of the call.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("cannot use the state directory {}: {source}; it must be writable for root and survive reboots", path.display())]
    Directory { path: PathBuf, source: io::Error },
    /// A record could not be made durable. No step that depends on it was taken.
    #[error("cannot write {}: {source}; {}", path.display(), remedy(source))]
    Write { path: PathBuf, source: io::Error },
    #[error("cannot {attempt} {}: {source}", path.display())]
    Failed { attempt: &'static str, path: PathBuf, source: io::Error },
}

impl From<Interrupted> for Error {
    fn from(interrupted: Interrupted) -> Error {
        Error::Write { path: "the ledger".into(), source: interrupted.into() }
    }
}

impl Error {
    /// Whether the disk (or its quota) is full.
    pub(crate) fn is_full(&self) -> bool {
        let (Error::Directory { source, .. } | Error::Write { source, .. } | Error::Failed { source, .. }) =
            self;
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
