//! The inbox: stops that the node could not take in time, on disk, one file a sandbox. The relay writes, the node
//! reads and unlinks (before anything else, and when it is told to).

use std::{
    io,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use peerpod_common::files;
use serde::Serialize;

use crate::id::SandboxId;

/// Version of the file's format.
const VERSION: u32 = 1;

/// `<state-dir>/inbox`.
#[derive(Debug, Clone)]
pub(crate) struct Inbox {
    folder: PathBuf,
}

#[derive(Serialize)]
struct Entry<'a> {
    version: u32,
    op: &'static str,
    id: &'a str,
    /// Milliseconds since the epoch.
    at_ms: u64,
}

impl Inbox {
    /// Makes the folder when it is missing.
    pub(crate) fn open(state_dir: &Path) -> io::Result<Inbox> {
        let folder = state_dir.join("inbox");
        files::make_folder(&folder)?;
        Ok(Inbox { folder })
    }

    /// Clears away what a process that died left half-written; not while another one writes.
    pub(crate) fn sweep(&self) -> io::Result<()> {
        files::sweep(&self.folder)
    }

    /// Records that `id` is to be stopped; on return it will be found after a power cut. Blocking.
    pub(crate) fn stop(&self, id: &SandboxId, now: SystemTime) -> io::Result<()> {
        let at_ms = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
        let entry = Entry { version: VERSION, op: "stop", id: id.as_str(), at_ms };
        files::write(&self.folder.join(format!("{id}.json")), &serde_json::to_vec(&entry)?)
    }
}
