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

/// Limit of kept stops that are continued.
const MOST_KEPT: usize = 8192;

/// Folder `<state-dir>/inbox`, and beside the sockets a folder for stops that the state's disk holds up.
#[derive(Debug, Clone)]
pub(crate) struct Inbox {
    folder: PathBuf,
    /// `<run-dir>/stops`: an empty file per sandbox. It survives this process, not the machine.
    kept: PathBuf,
}

#[derive(Serialize)]
struct Entry<'a> {
    version: u32,
    op: &'static str,
    id: &'a str,
    at_ms: u64,
}

impl Inbox {
    pub(crate) fn open(state_dir: &Path, run_dir: &Path) -> io::Result<Inbox> {
        let (folder, kept) = (state_dir.join("inbox"), run_dir.join("stops"));
        files::make_folder(&folder)?;
        files::make_folder(&kept)?;
        Ok(Inbox { folder, kept })
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

    /// Keeps a stop of `id` until it is recorded, without a wait for the state's disk. Blocking.
    pub(crate) fn keep(&self, id: &SandboxId) -> io::Result<()> {
        files::write_volatile(&self.kept.join(id.as_str()), b"")
    }

    /// Removes a kept stop. Blocking.
    pub(crate) fn forget(&self, id: &SandboxId) {
        // One that stays is continued again by the next relay, and is then a stop of a sandbox that is gone.
        std::fs::remove_file(self.kept.join(id.as_str())).ok();
    }

    /// Returns the sandboxes with kept stops.
    pub(crate) fn kept(&self) -> Vec<SandboxId> {
        let names = std::fs::read_dir(&self.kept).into_iter().flatten().flatten();
        let named = names.filter_map(|entry| SandboxId::new(entry.file_name().to_str()?).ok());
        named.take(MOST_KEPT).collect()
    }
}
