//! Keeps the state of the provider's VMs on disk: one directory per VM.
//!
//! ```text
//! <state-dir>/lock              held by the one provider object that uses this directory
//! <state-dir>/disks/<hash>.json  an attached disk; see disks.rs
//! <state-dir>/vms/<id>/
//!     record.json               digest of the request, and the VM's addresses; written before any effect
//!     machine.json              the processes, by pid, start time and boot; written by the hypervisor process
//!     exit.json                 the exit status of a VM that ended by itself
//!     lock                      held by the hypervisor process for its life, and by a deletion
//!     console.log, console.log.1, hypervisor.log
//!     root/                     an empty mount point for the VM's root; used in the VM's own mount namespace only
//! ```
//! The directory exists before any effect and is removed after the last, so the rest of a crash is found by its
//! directory. User-data is not among the files: it reaches the VM through a pipe.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use peerpod_common::files;
use peerpod_provider_api::{IdempotencyKey, InstanceId};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::process::{ProcessId, boot_id};

/// Version of all files here.
pub(crate) const VERSION: u32 = 1;
/// Most bytes read of a file; no file here is anywhere near this long.
const MAX_FILE: u64 = 1 << 20;

/// Request of a VM, and the index and addresses reserved for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct VmRecord {
    pub(crate) version: u32,
    pub(crate) key: IdempotencyKey,
    /// [`peerpod_provider_api::CreateRequest::digest`], to recognise the key with another request.
    pub(crate) request: String,
    pub(crate) name: String,
    /// Number of the VM in the subnets, which is its host part.
    pub(crate) index: u32,
    pub(crate) v4: Option<Ipv4Addr>,
    pub(crate) v6: Option<Ipv6Addr>,
    pub(crate) created_ms: u64,
    /// Whether the deletion was accepted.
    pub(crate) deleting: bool,
}

/// Processes of a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Machine {
    pub(crate) version: u32,
    /// Boot that they belong to.
    pub(crate) boot: String,
    /// Process of `peerpod-local-vm`.
    pub(crate) hypervisor: ProcessId,
    /// Pid 1 of the VM, once it exists. It runs no guest code before this is written.
    pub(crate) guest: Option<ProcessId>,
}

/// End of a VM that ended by itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Exit {
    pub(crate) version: u32,
    /// Exit status of its pid 1, human-readable.
    pub(crate) status: String,
}

/// State of a VM, according to its directory and `/proc`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum VmStatus {
    Absent,
    /// Not made yet; possibly no process is making it.
    Pending(Option<VmRecord>),
    /// Its pid 1 is alive.
    Running(VmRecord),
    /// It ran and has ended.
    Ended(VmRecord, String),
    /// Deletion was accepted.
    Deleting(VmRecord),
    /// The record is damaged or of a newer version.
    Unreadable(String),
}

/// Directory of all VMs.
#[derive(Debug, Clone)]
pub(crate) struct VmStore {
    root: PathBuf,
}

impl VmStore {
    /// Opens the store, creates missing directories, and locks the store for the life of the returned lock. `None` if
    /// another holder has the lock.
    pub(crate) fn open(root: &Path) -> io::Result<(VmStore, Option<Flock<File>>)> {
        let store = VmStore { root: root.to_owned() };
        for folder in ["vms", "disks"] {
            files::make_folders(&root.join(folder))?;
        }
        let lock = try_lock(&root.join("lock"), true)?;
        Ok((store, lock))
    }

    /// Returns the VM's directory. [`is_ours`] checks ids before they become a path.
    pub(crate) fn dir(&self, id: &InstanceId) -> PathBuf {
        self.root.join("vms").join(id.as_str())
    }

    /// Creates the VM's directory and writes its record there, durably.
    pub(crate) fn begin(&self, id: &InstanceId, record: &VmRecord) -> io::Result<()> {
        let begun = self.write_first(id, record);
        if begun.is_err() && self.dir(id).exists() {
            // Nothing refers to it. If this fails too, the VM is listed and can be deleted.
            drop(self.remove(id));
        }
        begun
    }

    fn write_first(&self, id: &InstanceId, record: &VmRecord) -> io::Result<()> {
        let dir = self.dir(id);
        files::make_folders(&dir.join("root"))?;
        File::options().create(true).append(true).mode(0o600).open(dir.join("lock"))?;
        write_json(&dir.join("record.json"), record)?;
        files::sync_folder(&self.root.join("vms"))
    }

    /// Replaces the record, durably.
    pub(crate) fn write(&self, id: &InstanceId, record: &VmRecord) -> io::Result<()> {
        write_json(&self.dir(id).join("record.json"), record)
    }

    pub(crate) fn status(&self, id: &InstanceId) -> io::Result<VmStatus> {
        let dir = self.dir(id);
        let record = match read_json::<VmRecord>(&dir.join("record.json")) {
            Ok(Some(record)) => record,
            Ok(None) if dir.exists() => return Ok(VmStatus::Pending(None)),
            Ok(None) => return Ok(VmStatus::Absent),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                return Ok(VmStatus::Unreadable(error.to_string()));
            }
            Err(error) => return Err(error),
        };
        if record.deleting {
            return Ok(VmStatus::Deleting(record));
        }
        let Some(machine) = self.machine(id)? else { return Ok(VmStatus::Pending(Some(record))) };
        match machine.guest {
            None => Ok(VmStatus::Pending(Some(record))),
            Some(guest) if machine.boot == boot_id()? && guest.alive()? => Ok(VmStatus::Running(record)),
            Some(_) => {
                let how = read_json::<Exit>(&dir.join("exit.json")).ok().flatten();
                let how = how.map_or_else(|| "its processes are gone".to_owned(), |exit| exit.status);
                Ok(VmStatus::Ended(record, how))
            }
        }
    }

    /// Returns the VM's processes, as last written; `None` before there are any.
    pub(crate) fn machine(&self, id: &InstanceId) -> io::Result<Option<Machine>> {
        match read_json(&self.dir(id).join("machine.json")) {
            // A damaged file has no information; the lock still shows whether a hypervisor process is running.
            Err(error) if error.kind() == io::ErrorKind::InvalidData => Ok(None),
            other => other,
        }
    }

    /// Locks one VM. Only the holder of the lock makes or removes the VM. `None` if another holder has it, or if the
    /// directory is gone.
    pub(crate) fn lock(&self, id: &InstanceId) -> io::Result<Option<Flock<File>>> {
        // Created again if it is missing: an interrupted removal may have removed the lock file already.
        lock_in(&self.dir(id), true)
    }

    /// Removes the VM's directory. The caller must hold its lock.
    pub(crate) fn remove(&self, id: &InstanceId) -> io::Result<()> {
        let dir = self.dir(id);
        // The record goes last, because without it the rest would not show that the VM is being deleted.
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

    /// Returns every VM that has a directory.
    pub(crate) fn list(&self) -> io::Result<Vec<InstanceId>> {
        let mut ids = Vec::new();
        for entry in fs::read_dir(self.root.join("vms"))? {
            let id = entry?.file_name().into_string().ok().and_then(|name| InstanceId::new(name).ok());
            ids.extend(id.filter(is_ours));
        }
        Ok(ids)
    }
}

/// Whether this provider gives ids of this form. Any other id is no VM here, and never becomes a path.
pub(crate) fn is_ours(id: &InstanceId) -> bool {
    id.as_str().strip_prefix("local-").is_some_and(|rest| {
        rest.len() == 32 && rest.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
    })
}

/// Implements [`VmStore::lock`] for a VM's directory.
pub(crate) fn lock_in(dir: &Path, create: bool) -> io::Result<Option<Flock<File>>> {
    let path = dir.join("lock");
    let lock = match try_lock(&path, create) {
        Ok(Some(lock)) => lock,
        Ok(None) => return Ok(None),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    // Between open and lock, the directory may have been deleted, and possibly created again.
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

/// Replaces a file atomically: temporary file, fsync, rename, fsync of the directory.
pub(crate) fn write_json<T: Serialize>(path: &Path, value: &T) -> io::Result<()> {
    files::write(path, &serde_json::to_vec(value)?)
}

/// Reads a file of the store; `None` if it does not exist, `InvalidData` if it is damaged or of another version.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> io::Result<Option<T>> {
    #[derive(Deserialize)]
    struct Versioned {
        version: u32,
    }
    let damaged = |why: String| {
        io::Error::new(io::ErrorKind::InvalidData, format!("{} is damaged: {why}", path.display()))
    };
    let bytes = match files::read(path, MAX_FILE) {
        Err(error) if error.kind() == io::ErrorKind::FileTooLarge => return Err(damaged(error.to_string())),
        bytes => bytes?,
    };
    let Some(bytes) = bytes else { return Ok(None) };
    let Versioned { version } = serde_json::from_slice(&bytes).map_err(|error| damaged(error.to_string()))?;
    if version != VERSION {
        let text = format!("{} has version {version}; this program knows {VERSION}", path.display());
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    serde_json::from_slice(&bytes).map(Some).map_err(|error| damaged(error.to_string()))
}
