//! What the provider knows of its VMs, on disk: one directory per VM.
//!
//! ```text
//! <state-dir>/lock              held by the one provider object that uses this directory
//! <state-dir>/disks/<hash>.json  a disk that a VM has; see disks.rs
//! <state-dir>/vms/<id>/
//!     record.json               what was asked and which address it has; written before anything is made
//!     machine.json              the processes, by number, start time and boot; written by the hypervisor process
//!     exit.json                 how the VM ended by itself
//!     lock                      held by the hypervisor process for its life, and by a deletion
//!     console.log, console.log.1, hypervisor.log
//!     root/                     an empty place for the VM's root; mounted in the VM's own mount namespace only
//! ```
//! The directory exists before any effect and is removed after the last, so whatever a crash leaves is found by its
//! directory. User-data is not among the files: it reaches the VM through a pipe.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read};
use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use peerpod_common::files;
use peerpod_provider_api::{IdempotencyKey, InstanceId};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::process::{ProcessId, boot_id};

/// The version of all files here.
pub(crate) const VERSION: u32 = 1;
/// None of our files is anywhere near this long.
const MAX_FILE: u64 = 1 << 20;

/// What was asked, and what was set aside for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) version: u32,
    pub(crate) key: IdempotencyKey,
    /// [`peerpod_provider_api::CreateRequest::digest`], to recognise the key with another request.
    pub(crate) request: String,
    pub(crate) name: String,
    /// The VM's number in the subnets; its host part.
    pub(crate) index: u32,
    pub(crate) v4: Option<Ipv4Addr>,
    pub(crate) v6: Option<Ipv6Addr>,
    pub(crate) created_ms: u64,
    /// Deletion was accepted.
    pub(crate) deleting: bool,
}

/// The VM's processes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Machine {
    pub(crate) version: u32,
    /// The boot they belong to.
    pub(crate) boot: String,
    /// `peerpod-local-vm`.
    pub(crate) hypervisor: ProcessId,
    /// The VM's pid 1, once there is one. It runs nothing of the guest's before this is written.
    pub(crate) guest: Option<ProcessId>,
}

/// How a VM ended by itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Exit {
    pub(crate) version: u32,
    /// The exit status of its pid 1, for people.
    pub(crate) status: String,
}

/// Where a VM is in its life, as its directory and `/proc` tell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Status {
    /// No directory.
    Absent,
    /// Not made yet; perhaps nobody is making it.
    Pending(Option<Record>),
    /// Its pid 1 is alive.
    Running(Record),
    /// It ran and has ended.
    Ended(Record, String),
    /// Deletion was accepted.
    Deleting(Record),
    /// The record is damaged or of a newer version.
    Unreadable(String),
}

/// The directory of all VMs.
#[derive(Debug, Clone)]
pub(crate) struct Store {
    root: PathBuf,
}

impl Store {
    /// Opens the store, making its directories if they are not there, and takes its lock for as long as the
    /// returned lock lives. `None` if another holds it.
    pub(crate) fn open(root: &Path) -> io::Result<(Store, Option<Flock<File>>)> {
        let store = Store { root: root.to_owned() };
        for folder in ["vms", "disks"] {
            DirBuilder::new().recursive(true).mode(0o700).create(root.join(folder))?;
        }
        let lock = try_lock(&root.join("lock"), true)?;
        Ok((store, lock))
    }

    /// The VM's directory. Ids are checked by [`is_ours`] before they become a path.
    pub(crate) fn dir(&self, id: &InstanceId) -> PathBuf {
        self.root.join("vms").join(id.as_str())
    }

    /// Makes the VM's directory and writes its record there, durably.
    pub(crate) fn begin(&self, id: &InstanceId, record: &Record) -> io::Result<()> {
        let begun = self.write_first(id, record);
        if begun.is_err() && self.dir(id).exists() {
            // Nothing refers to it; if this fails too it is listed, and can be deleted.
            drop(self.remove(id));
        }
        begun
    }

    fn write_first(&self, id: &InstanceId, record: &Record) -> io::Result<()> {
        let dir = self.dir(id);
        match DirBuilder::new().mode(0o700).create(&dir) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        DirBuilder::new().recursive(true).mode(0o700).create(dir.join("root"))?;
        File::options().create(true).append(true).mode(0o600).open(dir.join("lock"))?;
        write_json(&dir.join("record.json"), record)?;
        File::open(self.root.join("vms"))?.sync_all()
    }

    /// Writes the record anew, durably.
    pub(crate) fn write(&self, id: &InstanceId, record: &Record) -> io::Result<()> {
        write_json(&self.dir(id).join("record.json"), record)
    }

    /// Where the VM is in its life.
    pub(crate) fn status(&self, id: &InstanceId) -> io::Result<Status> {
        let dir = self.dir(id);
        let record = match read_json::<Record>(&dir.join("record.json")) {
            Ok(Some(record)) => record,
            Ok(None) if dir.exists() => return Ok(Status::Pending(None)),
            Ok(None) => return Ok(Status::Absent),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                return Ok(Status::Unreadable(error.to_string()));
            }
            Err(error) => return Err(error),
        };
        if record.deleting {
            return Ok(Status::Deleting(record));
        }
        let Some(machine) = self.machine(id)? else { return Ok(Status::Pending(Some(record))) };
        match machine.guest {
            None => Ok(Status::Pending(Some(record))),
            Some(guest) if machine.boot == boot_id()? && guest.alive()? => Ok(Status::Running(record)),
            Some(_) => {
                let how = read_json::<Exit>(&dir.join("exit.json")).ok().flatten();
                let how = how.map_or_else(|| "its processes are gone".to_owned(), |exit| exit.status);
                Ok(Status::Ended(record, how))
            }
        }
    }

    /// The VM's processes, as last written; `None` before there are any.
    pub(crate) fn machine(&self, id: &InstanceId) -> io::Result<Option<Machine>> {
        match read_json(&self.dir(id).join("machine.json")) {
            // A damaged one tells nothing; the lock still tells whether a hypervisor process lives.
            Err(error) if error.kind() == io::ErrorKind::InvalidData => Ok(None),
            other => other,
        }
    }

    /// The lock of one VM: whoever holds it is the only one who makes or unmakes it. `None` if another holds it,
    /// or if the directory is not there any more.
    pub(crate) fn lock(&self, id: &InstanceId) -> io::Result<Option<Flock<File>>> {
        // Made again if it is missing: a removal may have been cut short after it took the lock file away.
        lock_in(&self.dir(id), true)
    }

    /// Removes the VM's directory. Call with its lock held.
    pub(crate) fn remove(&self, id: &InstanceId) -> io::Result<()> {
        let dir = self.dir(id);
        // The record goes last: without it the rest would not say that it is being deleted.
        for entry in fs::read_dir(&dir)? {
            let entry = entry?;
            if entry.file_name() == "record.json" {
                continue;
            }
            if entry.file_type()?.is_dir() {
                fs::remove_dir(entry.path())?
            } else {
                fs::remove_file(entry.path())?
            }
        }
        fs::remove_dir_all(&dir)
    }

    /// Every VM that has a directory.
    pub(crate) fn list(&self) -> io::Result<Vec<InstanceId>> {
        let mut ids = Vec::new();
        for entry in fs::read_dir(self.root.join("vms"))? {
            let id = entry?.file_name().into_string().ok().and_then(|name| InstanceId::new(name).ok());
            ids.extend(id.filter(is_ours));
        }
        Ok(ids)
    }
}

/// Whether this is an id that we give: everything else is nobody's VM, and never becomes a path.
pub(crate) fn is_ours(id: &InstanceId) -> bool {
    id.as_str().strip_prefix("local-").is_some_and(|rest| {
        rest.len() == 32 && rest.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
    })
}

/// [`Store::lock`] for a VM's directory.
pub(crate) fn lock_in(dir: &Path, create: bool) -> io::Result<Option<Flock<File>>> {
    let path = dir.join("lock");
    let lock = match try_lock(&path, create) {
        Ok(Some(lock)) => lock,
        Ok(None) => return Ok(None),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    // Between open and lock the directory may have been deleted, and perhaps made again.
    let (mine, there) = (lock.metadata()?, fs::metadata(&path));
    Ok(there.is_ok_and(|there| there.ino() == mine.ino() && there.dev() == mine.dev()).then_some(lock))
}

fn try_lock(path: &Path, create: bool) -> io::Result<Option<Flock<File>>> {
    let file = OpenOptions::new().write(true).create(create).truncate(false).mode(0o600).open(path)?;
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(Some(lock)),
        Err((_, Errno::EWOULDBLOCK)) => Ok(None),
        Err((_, errno)) => Err(errno.into()),
    }
}

/// Writes a file durably, as JSON.
pub(crate) fn write_json<T: Serialize>(path: &Path, value: &T) -> io::Result<()> {
    files::write(path, &serde_json::to_vec(value)?)
}

/// Reads a file of ours; `None` if it is not there, `InvalidData` if it is damaged or of another version.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> io::Result<Option<T>> {
    #[derive(Deserialize)]
    struct Versioned {
        version: u32,
    }
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut bytes = Vec::new();
    file.take(MAX_FILE).read_to_end(&mut bytes)?;
    let damaged = |why: String| {
        io::Error::new(io::ErrorKind::InvalidData, format!("{} is damaged: {why}", path.display()))
    };
    let Versioned { version } = serde_json::from_slice(&bytes).map_err(|error| damaged(error.to_string()))?;
    if version != VERSION {
        let text = format!("{} has version {version}; this program knows {VERSION}", path.display());
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    serde_json::from_slice(&bytes).map(Some).map_err(|error| damaged(error.to_string()))
}
