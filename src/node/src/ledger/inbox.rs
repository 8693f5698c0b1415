//! Reads the StopVM calls that the relay answered for the node: one note per stopped sandbox in `<state-dir>/inbox`
//! (`{"version":1,"op":"stop","id":…,"at_ms":…}`). The node carries it out durably and only then removes it.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::{fs, io};

use peerpod_common::files;
use serde::Deserialize;

use super::disk::{is_unusable, make_dir, set_aside, unusable};
use super::{Error, Quarantined};
use crate::spec::SandboxId;

/// Size limit of a note; a note is a hundred bytes.
const MAX_NOTE: u64 = 64 << 10;

#[derive(Clone, Debug)]
pub(crate) struct Inbox {
    dir: PathBuf,
    quarantine: PathBuf,
}

/// A stop that the relay has confirmed to a shim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Note {
    pub id: SandboxId,
    /// Time of the StopVM call, ms since 1970.
    pub at_ms: u64,
    pub file: PathBuf,
}

#[derive(Deserialize)]
struct Written {
    version: u32,
    op: String,
    id: SandboxId,
    #[serde(default)]
    at_ms: u64,
}

impl Inbox {
    /// Makes the folder (0700) if the relay has not.
    pub(crate) fn open(state_dir: &Path) -> Result<Inbox, Error> {
        let inbox = Inbox { dir: state_dir.join("inbox"), quarantine: state_dir.join("quarantine") };
        make_dir(&inbox.dir)?;
        make_dir(&inbox.quarantine)?;
        Ok(inbox)
    }

    /// Returns all notes, oldest first, and the files that are no notes, which are in quarantine now.
    pub(crate) fn read(&self) -> Result<(Vec<Note>, Vec<Quarantined>), Error> {
        let unreadable = |source| Error::Directory { path: self.dir.clone(), source };
        let (mut notes, mut bad) = (Vec::new(), Vec::new());
        for entry in fs::read_dir(&self.dir).map_err(unreadable)? {
            let file = entry.map_err(unreadable)?.path();
            let name = file.file_name().and_then(OsStr::to_str).unwrap_or_default().to_owned();
            // Other names are notes in progress; the relay renames them when they are complete.
            let Some(stem) = name.strip_suffix(".json").filter(|stem| !stem.starts_with('.')) else {
                continue;
            };
            let id = stem.parse::<SandboxId>().ok();
            match read_note(&file) {
                Ok(Written { id, at_ms, .. }) => notes.push(Note { id, at_ms, file }),
                // Another reader carried it out meanwhile.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(why) if is_unusable(&why) => {
                    bad.push(set_aside(&self.quarantine, &name, file, id, why.to_string()));
                }
                // A confirmed stop is not discarded because of a temporary disk error.
                Err(source) => return Err(Error::Directory { path: file, source }),
            }
        }
        notes.sort_by_key(|note| note.at_ms);
        Ok((notes, bad))
    }

    /// Removes a note that was carried out. If that fails, carrying it out again does no harm.
    pub(crate) fn done(&self, note: &Note) -> Result<(), Error> {
        let path = note.file.clone();
        files::remove(&path).map_err(|source| Error::Failed { attempt: "remove", path, source })
    }
}

fn read_note(file: &Path) -> io::Result<Written> {
    let bytes = files::read_plain(file, MAX_NOTE)?;
    let note: Written =
        serde_json::from_slice(&bytes).map_err(|error| unusable(format!("not a note: {error}")))?;
    if note.version != 1 {
        return Err(unusable(format!("version {} of a note is unknown to this program", note.version)));
    }
    if note.op != "stop" {
        return Err(unusable(format!("a note cannot request {:?}", note.op)));
    }
    Ok(note)
}
