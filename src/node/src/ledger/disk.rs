//! Reads and writes the folder of records. A crash leaves the old record or the new one; a bad file costs one sandbox.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use nix::fcntl::Flock;
use peerpod_common::files;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{BATCH_VERSION, Batch, Error, MAX_FILE, Record, VERSION};
use crate::spec::SandboxId;

#[derive(Clone, Debug)]
pub(crate) struct Ledger {
    records: PathBuf,
    batches: PathBuf,
    quarantine: PathBuf,
    /// The lock, held until the last clone is gone, and with it the last write.
    _guard: Option<Arc<Flock<File>>>,
}

/// Suffix of a batch's id in its quarantined file name; no sandbox's record has such a name there.
const ASIDE: &str = ".batch";

#[derive(Debug, Default)]
pub(crate) struct Loaded {
    /// Every readable record, tombstones included.
    pub records: Vec<Record>,
    pub batches: Vec<Batch>,
    /// Ids of batches that cannot be read, now or since an earlier start: their VMs may belong to sandboxes.
    pub unread_batches: Vec<String>,
    /// Files that could not be read; those with bad content are in quarantine now.
    pub quarantined: Vec<Quarantined>,
}

/// A file that could not be understood.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Quarantined {
    /// The sandbox, if the file's name contains its id.
    pub id: Option<SandboxId>,
    pub file: PathBuf,
    /// The current path; the original one if the file was not moved.
    pub moved_to: PathBuf,
    pub why: String,
}

impl Ledger {
    /// Makes the folders (0700) and proves that they can be written to.
    pub(crate) fn open(state_dir: &Path) -> Result<Ledger, Error> {
        let ledger = Ledger {
            records: state_dir.join("sandboxes"),
            batches: state_dir.join("batches"),
            quarantine: state_dir.join("quarantine"),
            _guard: None,
        };
        for dir in [state_dir, &ledger.records, &ledger.batches, &ledger.quarantine] {
            make_dir(dir)?;
        }
        let probe = ledger.records.join(".probe");
        let tried = files::write(&probe, b"probe").and_then(|()| fs::remove_file(&probe));
        tried.map_err(|source| Error::Directory { path: ledger.records.clone(), source })?;
        Ok(ledger)
    }

    /// Holds the lock of the state directory until the last clone of this ledger is gone and no write is in progress.
    #[must_use]
    pub(crate) fn guarded_by(self, lock: Flock<File>) -> Ledger {
        Ledger { _guard: Some(Arc::new(lock)), ..self }
    }

    /// Makes the record durable. After an error, the old record stands, or the new one that a failing disk kept.
    pub(crate) fn save(&self, record: &Record) -> Result<(), Error> {
        // No id begins with a dot, so no record's name is another one's temporary name.
        write(&self.records, record.id.as_str(), record)
    }

    /// Makes the batch durable, as [`Ledger::save`] does a record.
    pub(crate) fn save_batch(&self, batch: &Batch) -> Result<(), Error> {
        write(&self.batches, &batch.ticket.id, batch)
    }

    /// Removes the batch durably. A missing batch is no error.
    pub(crate) fn remove_batch(&self, id: &str) -> Result<(), Error> {
        remove(&self.batches, id)
    }

    /// Returns the current record; `None`: there is none. A record that cannot be understood stays in place.
    pub(crate) fn read(&self, id: &SandboxId) -> Result<Option<Record>, Error> {
        let path = self.records.join(format!("{id}.json"));
        match read_record(&path, Some(id)) {
            Ok(record) => Ok(Some(record)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(source) => Err(Error::Failed { attempt: "read", path, source }),
        }
    }

    /// Removes the record durably. A missing record is no error.
    pub(crate) fn remove(&self, id: &SandboxId) -> Result<(), Error> {
        remove(&self.records, id.as_str())
    }

    /// Reads every record and batch, moves files with bad content to quarantine, and removes temporary files.
    pub(crate) fn load(&self) -> Result<Loaded, Error> {
        let mut loaded = Loaded::default();
        for (path, name) in files(&self.records)? {
            let id = name.strip_suffix(".json").and_then(|id| id.parse::<SandboxId>().ok());
            match read_record(&path, id.as_ref()) {
                Ok(record) => loaded.records.push(record),
                Err(unread) => loaded.quarantined.extend(self.unread(path, id, &name, unread)),
            }
        }
        for (path, name) in files(&self.batches)? {
            let id = name.strip_suffix(".json").unwrap_or(&name);
            match read_batch(&path, id) {
                Ok(batch) => loaded.batches.push(batch),
                Err(unread) => {
                    loaded.unread_batches.push(id.to_owned());
                    let aside = format!("{id}{ASIDE}");
                    loaded.quarantined.extend(self.unread(path, None, &aside, unread));
                }
            }
        }
        for name in self.set_aside_names()? {
            let id = name.rsplit_once('.').and_then(|(name, _)| name.strip_suffix(ASIDE));
            loaded.unread_batches.extend(id.map(str::to_owned));
        }
        loaded.unread_batches.sort();
        loaded.unread_batches.dedup();
        Ok(loaded)
    }

    fn unread(
        &self,
        file: PathBuf,
        id: Option<SandboxId>,
        name: &str,
        why: io::Error,
    ) -> Option<Quarantined> {
        if why.kind() == ErrorKind::NotFound {
            return None;
        }
        if is_unusable(&why) {
            return Some(set_aside(&self.quarantine, name, file, id, why.to_string()));
        }
        // A disk error, perhaps a temporary one: the file stays for the next start.
        let why = format!("the node cannot read it and leaves it in place: {why}");
        Some(Quarantined { id, moved_to: file.clone(), file, why })
    }

    fn set_aside_names(&self) -> Result<Vec<String>, Error> {
        let unreadable = |source| Error::Directory { path: self.quarantine.clone(), source };
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.quarantine).map_err(unreadable)? {
            names.extend(entry.map_err(unreadable)?.file_name().into_string().ok());
        }
        Ok(names)
    }

    /// Returns the sandboxes whose records are in quarantine: until a person removes the files, VMs may be in use.
    pub(crate) fn in_quarantine(&self) -> Result<Vec<SandboxId>, Error> {
        // `<id>.json.<when>`; an id may have dots of its own.
        let id = |name: &String| name.rsplit_once(".json.")?.0.parse().ok();
        Ok(self.set_aside_names()?.iter().filter_map(id).collect())
    }
}

/// Returns the error for a file with bad content.
pub(super) fn unusable(why: impl Into<String>) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, why.into())
}

/// Returns whether a file was not read because it is bad, and not by an error of the disk.
pub(super) fn is_unusable(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::InvalidData | ErrorKind::InvalidInput | ErrorKind::FileTooLarge)
}

fn read_record(path: &Path, id: Option<&SandboxId>) -> io::Result<Record> {
    let id = id.ok_or_else(|| unusable("the file's name is not a sandbox id followed by .json"))?;
    let record: Record = read_versioned(path, VERSION)?;
    if record.id != *id {
        return Err(unusable(format!("it contains the record of {}", record.id)));
    }
    Ok(record)
}

fn read_batch(path: &Path, id: &str) -> io::Result<Batch> {
    let batch: Batch = read_versioned(path, BATCH_VERSION)?;
    if batch.ticket.id != id {
        return Err(unusable(format!("it contains the record of batch {}", batch.ticket.id)));
    }
    if batch.members.is_empty() || batch.made.as_ref().is_some_and(|made| made.len() > batch.members.len()) {
        return Err(unusable("it has no members, or more VMs than members"));
    }
    Ok(batch)
}

fn read_versioned<T: DeserializeOwned>(path: &Path, newest: u32) -> io::Result<T> {
    #[derive(Deserialize)]
    struct Versioned {
        version: u32,
    }
    let bytes = files::read_plain(path, MAX_FILE)?;
    let Versioned { version } = serde_json::from_slice(&bytes)
        .map_err(|error| unusable(format!("not a versioned record: {error}")))?;
    if version == 0 || version > newest {
        let why = format!("version {version} is unknown to this program, which reads up to {newest}");
        return Err(unusable(why));
    }
    serde_json::from_slice(&bytes).map_err(|error| unusable(format!("not a record: {error}")))
}

/// Lists a folder's files by name. Removes temporary ones, which a crash left; the records that they replace stand.
fn files(dir: &Path) -> Result<Vec<(PathBuf, String)>, Error> {
    let unreadable = |source| Error::Directory { path: dir.to_owned(), source };
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default().to_owned();
        if name.starts_with('.') {
            drop(fs::remove_file(&path));
        } else {
            files.push((path, name));
        }
    }
    Ok(files)
}

/// Writes `<name>.json` whole or not at all, and durably.
fn write(dir: &Path, name: &str, record: &impl Serialize) -> Result<(), Error> {
    let path = dir.join(format!("{name}.json"));
    let written =
        serde_json::to_vec(record).map_err(io::Error::other).and_then(|bytes| match bytes.len() as u64 {
            // A longer record could not be read again, so it is not written.
            too_long @ MAX_FILE.. => Err(io::Error::other(format!("the record has {too_long} bytes"))),
            _ => files::write(&path, &bytes),
        });
    written.map_err(|source| Error::Write { path, source })
}

fn remove(dir: &Path, name: &str) -> Result<(), Error> {
    let path = dir.join(format!("{name}.json"));
    files::remove(&path).map_err(|source| Error::Failed { attempt: "remove", path, source })
}

/// Moves a file to quarantine under this name and the present time.
pub(super) fn set_aside(
    dir: &Path,
    name: &str,
    file: PathBuf,
    id: Option<SandboxId>,
    why: String,
) -> Quarantined {
    let stamp = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
    let target = dir.join(format!("{name}.{stamp}"));
    match fs::rename(&file, &target).and_then(|()| files::sync_folder(dir)) {
        Ok(()) => Quarantined { id, file, moved_to: target, why },
        Err(error) => {
            let why = format!("{why} (and the node could not move it to {}: {error})", target.display());
            Quarantined { id, moved_to: file.clone(), file, why }
        }
    }
}

/// Makes a folder with its parents, 0700. An existing folder keeps its contents; a wider mode is narrowed.
pub(super) fn make_dir(path: &Path) -> Result<(), Error> {
    files::make_folder(path).map_err(|source| Error::Directory { path: path.into(), source })
}
