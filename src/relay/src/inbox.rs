//! Writes the inbox: stops that the node did not accept in time, on disk, one file per sandbox. The node reads and
//! unlinks the files before anything else at its start, and on ReadInbox.

use std::io;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use peerpod_common::files;
use serde::Serialize;

use crate::id::SandboxId;

/// Version of the file's format.
const VERSION: u32 = 1;

/// Folder `<state-dir>/inbox`.
#[derive(Debug, Clone)]
pub(crate) struct Inbox {
    folder: PathBuf,
}

#[derive(Serialize)]
struct Entry<'a> {
    version: u32,
    op: &'static str,
    id: &'a str,
    at_ms: u64,
}

impl Inbox {
    pub(crate) fn open(state_dir: &Path) -> io::Result<Inbox> {
        let folder = state_dir.join("inbox");
        files::make_folder(&folder)?;
        Ok(Inbox { folder })
    }

    /// Removes half-written files of a process that died; must not run while another process writes.
    pub(crate) fn sweep(&self) -> io::Result<()> {
        files::sweep(&self.folder)
    }

    /// Records a stop of `id`; when this returns, the record survives a power cut. Blocking.
    pub(crate) fn stop(&self, id: &SandboxId, now: SystemTime) -> io::Result<()> {
        let at_ms = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
        let entry = Entry { version: VERSION, op: "stop", id: id.as_str(), at_ms };
        files::write(&self.folder.join(format!("{id}.json")), &serde_json::to_vec(&entry)?)
    }
}
