//! The folder of records: writing so that a crash leaves the old or the new, never half; reading so that one bad
//! file costs one sandbox.

use std::{
    ffi::OsStr,
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use nix::fcntl::Flock;
use serde::Deserialize;

use super::{Error, MAX_FILE, Record, VERSION};
use crate::spec::SandboxId;

/// The records of this node's sandboxes.
#[derive(Clone, Debug)]
pub struct Ledger {
    records: PathBuf,
    quarantine: PathBuf,
    /// Held until the last clone is gone, and with it the last write.
    _guard: Option<Arc<Flock<File>>>,
}

/// What was found at start.
#[derive(Debug, Default)]
pub struct Loaded {
    /// Every record that could be read, tombstones included.
    pub records: Vec<Record>,
    /// What could not, and is out of the way now.
    pub quarantined: Vec<Quarantined>,
}

/// A file that could not be understood.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quarantined {
    /// The sandbox, if the file's name tells it.
    pub id: Option<SandboxId>,
    /// Where it lay.
    pub file: PathBuf,
    /// Where it lies now; the old place when it could not be moved.
    pub moved_to: PathBuf,
    /// Why, in words.
    pub why: String,
}

impl Ledger {
    /// Makes the folders (0700) and proves that they can be written to.
    ///
    /// # Errors
    /// When they cannot.
    pub fn open(state_dir: &Path) -> Result<Ledger, Error> {
        let ledger = Ledger {
            records: state_dir.join("sandboxes"),
            quarantine: state_dir.join("quarantine"),
            _guard: None,
        };
        for dir in [state_dir, &ledger.records, &ledger.quarantine] {
            make_dir(dir)?;
        }
        let probe = ledger.records.join(".probe");
        let tried = write_new(&probe, b"probe").and_then(|()| fs::remove_file(&probe));
        tried.map_err(|source| Error::Directory { path: ledger.records.clone(), source })?;
        Ok(ledger)
    }

    /// Holds the lock of the state directory for as long as anybody has this ledger, or a write of it is under way.
    #[must_use]
    pub fn guarded_by(self, lock: Flock<File>) -> Ledger {
        Ledger { _guard: Some(Arc::new(lock)), ..self }
    }

    /// Makes the record durable: when this returns, no crash loses it.
    ///
    /// # Errors
    /// When it could not be; the old record (or none) stands then, except that a failing disk may have kept the new.
    pub fn save(&self, record: &Record) -> Result<(), Error> {
        let path = self.path(&record.id);
        // An id never begins with a dot, so no record's name is another one's temporary name.
        let temporary = self.records.join(format!(".{}.tmp", record.id));
        let written = serde_json::to_vec(record)
            .map_err(io::Error::other)
            .and_then(|bytes| match bytes.len() as u64 {
                // What could not be read again is not kept.
                too_long @ MAX_FILE.. => Err(io::Error::other(format!("the record has {too_long} bytes"))),
                _ => write_new(&temporary, &bytes),
            })
            .and_then(|()| fs::rename(&temporary, &path))
            .and_then(|()| sync_dir(&self.records));
        written.map_err(|source| {
            // Best effort: what is left of it is swept at the next start.
            drop(fs::remove_file(&temporary));
            Error::Write { path, source }
        })
    }

    /// One record as it is now; `None`: there is none.
    ///
    /// # Errors
    /// When it cannot be read or understood; it stays where it is.
    pub fn read(&self, id: &SandboxId) -> Result<Option<Record>, Error> {
        let path = self.path(id);
        let source = match read_record(&path, Some(id)) {
            Ok(record) => return Ok(Some(record)),
            Err(Unread::Io(error)) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(Unread::Io(error)) => error,
            Err(Unread::Content(why)) => io::Error::new(io::ErrorKind::InvalidData, why),
        };
        Err(Error::Read { path, source })
    }

    /// Removes the record, durably. No record is fine.
    ///
    /// # Errors
    /// When it is still there.
    pub fn remove(&self, id: &SandboxId) -> Result<(), Error> {
        let path = self.path(id);
        let removed = match fs::remove_file(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        };
        removed.and_then(|()| sync_dir(&self.records)).map_err(|source| Error::Remove { path, source })
    }

    /// Reads every record; what cannot be understood is moved to quarantine. Sweeps temporary files.
    ///
    /// # Errors
    /// When the folder itself cannot be read.
    pub fn load(&self) -> Result<Loaded, Error> {
        let unreadable = |source| Error::Directory { path: self.records.clone(), source };
        let mut loaded = Loaded::default();
        for entry in fs::read_dir(&self.records).map_err(unreadable)? {
            let path = entry.map_err(unreadable)?.path();
            let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default().to_owned();
            if name.starts_with('.') {
                // Of a write that a crash cut short: the record it would have replaced stands.
                drop(fs::remove_file(&path));
                continue;
            }
            let id = name.strip_suffix(".json").and_then(|id| id.parse::<SandboxId>().ok());
            match read_record(&path, id.as_ref()) {
                Ok(record) => loaded.records.push(record),
                Err(Unread::Io(error)) if error.kind() == io::ErrorKind::NotFound => {}
                // The disk's fault, perhaps for a moment: the file stays where the next start finds it.
                Err(Unread::Io(error)) => loaded.quarantined.push(Quarantined {
                    id,
                    moved_to: path.clone(),
                    file: path,
                    why: format!("it cannot be read now, and stays: {error}"),
                }),
                Err(Unread::Content(why)) => loaded.quarantined.push(self.set_aside(path, id, why)),
            }
        }
        Ok(loaded)
    }

    /// Whose records were ever set aside, by the names of the files in quarantine: until a person takes the files away,
    /// these sandboxes' VMs may be somebody's.
    ///
    /// # Errors
    /// When the folder cannot be read.
    pub fn in_quarantine(&self) -> Result<Vec<SandboxId>, Error> {
        let unreadable = |source| Error::Directory { path: self.quarantine.clone(), source };
        let mut ids = Vec::new();
        for entry in fs::read_dir(&self.quarantine).map_err(unreadable)? {
            let name = entry.map_err(unreadable)?.file_name();
            // `<id>.json.<when>`; an id may have dots of its own.
            let id = name.to_str().and_then(|name| name.rsplit_once(".json.")).map(|(id, _)| id);
            ids.extend(id.and_then(|id| id.parse::<SandboxId>().ok()));
        }
        Ok(ids)
    }

    /// Moves a file that is not ours to read out of the way, without losing it.
    pub(super) fn set_aside(&self, file: PathBuf, id: Option<SandboxId>, why: String) -> Quarantined {
        set_aside(&self.quarantine, file, id, why)
    }

    fn path(&self, id: &SandboxId) -> PathBuf {
        self.records.join(format!("{id}.json"))
    }
}

/// Why a file was not read: the disk's fault, or what it says.
pub(super) enum Unread {
    Io(io::Error),
    Content(String),
}

impl From<String> for Unread {
    fn from(why: String) -> Unread {
        Unread::Content(why)
    }
}

fn read_record(path: &Path, id: Option<&SandboxId>) -> Result<Record, Unread> {
    #[derive(Deserialize)]
    struct Versioned {
        version: u32,
    }
    let id = id.ok_or_else(|| "the file's name is not a sandbox id with .json behind it".to_owned())?;
    let bytes = read_bounded(path, MAX_FILE)?;
    let Versioned { version } =
        serde_json::from_slice(&bytes).map_err(|error| format!("not a versioned record: {error}"))?;
    if version == 0 || version > VERSION {
        let why = format!("version {version} is unknown to this program, which reads up to {VERSION}");
        return Err(Unread::Content(why));
    }
    let record: Record = serde_json::from_slice(&bytes).map_err(|error| format!("not a record: {error}"))?;
    if record.id != *id {
        return Err(Unread::Content(format!("it is the record of {}", record.id)));
    }
    Ok(record)
}

pub(super) fn read_bounded(path: &Path, limit: u64) -> Result<Vec<u8>, Unread> {
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(Unread::Io)?;
    if !file.metadata().map_err(Unread::Io)?.is_file() {
        return Err(Unread::Content("not a regular file".into()));
    }
    file.take(limit + 1).read_to_end(&mut bytes).map_err(Unread::Io)?;
    if bytes.len() as u64 > limit {
        return Err(Unread::Content(format!("longer than {limit} bytes")));
    }
    Ok(bytes)
}

pub(super) fn set_aside(dir: &Path, file: PathBuf, id: Option<SandboxId>, why: String) -> Quarantined {
    let stamp = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
    let name = file.file_name().and_then(OsStr::to_str).unwrap_or("unnamed");
    let target = dir.join(format!("{name}.{stamp}"));
    let moved = fs::rename(&file, &target).and_then(|()| sync_dir(dir));
    match moved {
        Ok(()) => Quarantined { id, file, moved_to: target, why },
        Err(error) => {
            let why = format!("{why} (and it could not be moved to {}: {error})", target.display());
            Quarantined { id, moved_to: file.clone(), file, why }
        }
    }
}

/// Makes a folder with its parents, 0700; one that exists keeps its contents but not a wider mode.
pub(super) fn make_dir(path: &Path) -> Result<(), Error> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(path).and_then(|()| {
        let mode = fs::metadata(path)?.permissions().mode();
        if mode & 0o077 == 0 { Ok(()) } else { fs::set_permissions(path, fs::Permissions::from_mode(0o700)) }
    });
    made.map_err(|source| Error::Directory { path: path.into(), source })
}

fn write_new(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

pub(super) fn sync_dir(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}
