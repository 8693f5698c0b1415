//! Attaches files on the node to VMs as loop devices. The id of a disk is the path of the file, or its name in
//! `local/volumes` in `paths.state-dir`. In the VM, a disk has a name below `/dev/disk/by-id` that is derived from the id,
//! independent of the kernel's device number.
//!
//! The owner of a disk is recorded before any effect (`<state-dir>/disks/<hash>.json`), and the record is removed after
//! the last one. The rest of a crash is therefore found by its file. A writable disk is with one VM at a time. It is
//! free when the kernel has released its device, not when the release was requested.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use peerpod_common::files;
use peerpod_provider_api::{CreateRequest, DiskIdentity, DiskRequest, Error, InstanceId, Volumes};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::store::{VERSION, VmStatus, read_json, write_json};
use crate::{LocalProvider, Shared, blocking, disk as failed};

/// Major number of loop devices in Linux.
const LOOP: u64 = 7;

/// Longest time for one change of a loop device, in seconds.
const LIMIT: &str = "30";

/// Longest wait for the last close of a detached loop device. A mounted device is closed much later.
const RELEASE_LIMIT: Duration = Duration::from_secs(5);

/// Record of an attached disk.
#[derive(Debug, Serialize, Deserialize)]
struct Taken {
    version: u32,
    volume: String,
    file: PathBuf,
    read_only: bool,
    vms: Vec<String>,
}

impl Taken {
    fn is_with(&self, id: &InstanceId) -> bool {
        self.vms.iter().any(|vm| vm == id.as_str())
    }
}

#[async_trait]
impl Volumes for LocalProvider {
    async fn attach(&self, id: &InstanceId, disk: &DiskRequest) -> Result<DiskIdentity, Error> {
        Arc::clone(&self.shared).attach(id.clone(), disk.clone()).await
    }

    async fn detach(&self, id: &InstanceId, volume: &str) -> Result<(), Error> {
        let (vm, disk) = (id.clone(), volume.to_owned());
        let detached = Arc::clone(&self.shared).with_disks(move |shared| shared.detach_now(&vm, &disk)).await;
        detached.map_err(|error| error.during(format_args!("detach of {volume} from local VM {id}")))
    }

    async fn grown(&self, id: &InstanceId, disk: &DiskRequest, _bytes: u64) -> Result<(), Error> {
        let (vm, volume) = (id.clone(), disk.volume.clone());
        let grown = Arc::clone(&self.shared).with_disks(move |shared| shared.grown_now(&vm, &volume)).await;
        grown.map_err(|error| error.during(format_args!("growth of {} of local VM {id}", disk.volume)))
    }
}

impl Shared {
    /// Runs work that changes disks: one at a time, on a thread that may block.
    async fn with_disks<T: Send + 'static>(
        self: Arc<Shared>,
        work: impl FnOnce(&Shared) -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        let shared = Arc::clone(&self);
        let _turn = self.disks.lock().await;
        blocking(move || work(&shared)).await
    }

    /// Attaches the disk, or finds it attached.
    pub(crate) async fn attach(
        self: Arc<Shared>,
        id: InstanceId,
        disk: DiskRequest,
    ) -> Result<DiskIdentity, Error> {
        let attempt = format!("attach of {} to local VM {id}", disk.volume);
        let attached = self.with_disks(move |shared| shared.attach_now(&id, &disk)).await;
        attached.map_err(|error| error.during(attempt))
    }

    fn attach_now(&self, id: &InstanceId, disk: &DiskRequest) -> Result<DiskIdentity, Error> {
        match self.status(id)? {
            VmStatus::Running(_) => {}
            VmStatus::Pending(_) => return Err(Error::transient("the VM is still being made")),
            VmStatus::Unreadable(why) => return Err(Error::invalid(why)),
            VmStatus::Absent | VmStatus::Ended(..) | VmStatus::Deleting(_) => {
                return Err(Error::not_found("there is no such VM, or it has ended"));
            }
        }
        let file = self.file(&disk.volume).map_err(Error::not_found)?;
        self.refuse_second_name(&disk.volume, &file)?;
        let path = self.taken_path(&disk.volume);
        let mut taken = match read_json::<Taken>(&path).map_err(failed)? {
            Some(taken) => taken,
            None => {
                // The record is written before the device is made, so this device belongs to another program.
                if let Some(number) = loops_of(&file).map_err(Error::transient)?.first() {
                    let why = format!("it is in use on this machine, as /dev/loop{number}");
                    return Err(Error::transient(why));
                }
                Taken {
                    version: VERSION,
                    volume: disk.volume.clone(),
                    file: file.clone(),
                    read_only: disk.read_only,
                    vms: Vec::new(),
                }
            }
        };
        let others = taken.vms.iter().any(|vm| vm != id.as_str());
        if others && !(taken.read_only && disk.read_only) {
            return Err(Error::transient(format!("VM {} has it", taken.vms.join(", "))));
        }
        if !others {
            taken.read_only = disk.read_only;
        }
        if !taken.is_with(id) {
            taken.vms.push(id.to_string());
        }
        write_json(&path, &taken).map_err(failed)?;
        let number = loop_device(&file, taken.read_only).map_err(Error::transient)?;
        let name = name_of(&disk.volume);
        self.show(id, number, &name).map_err(failed)?;
        Ok(DiskIdentity::ById(name))
    }

    /// Refuses a file that is attached by another name: a file can have several names, but only one writer.
    fn refuse_second_name(&self, volume: &str, file: &Path) -> Result<(), Error> {
        let all = self.taken().map_err(failed)?;
        match all.into_iter().find(|taken| taken.file == file && taken.volume != volume) {
            Some(other) => Err(Error::transient(format!(
                "the same file is attached as {}, to VM {}",
                other.volume,
                other.vms.join(", ")
            ))),
            None => Ok(()),
        }
    }

    /// Creates the device node and its name in the VM's own /dev.
    fn show(&self, id: &InstanceId, number: u64, name: &str) -> io::Result<()> {
        let dev = self.dev_of(id)?.ok_or_else(|| io::Error::other("the VM's first process is gone"))?;
        let node = format!("loop{number}");
        let there = fs::symlink_metadata(dev.join(&node));
        let right = |found: &fs::Metadata| {
            found.file_type().is_block_device() && found.rdev() == makedev(LOOP, number)
        };
        if !there.as_ref().is_ok_and(right) {
            files::remove_volatile(&dev.join(&node))?;
            let mode = Mode::S_IRUSR | Mode::S_IWUSR;
            mknod(&dev.join(&node), SFlag::S_IFBLK, mode, makedev(LOOP, number))?;
        }
        let names = dev.join("disk/by-id");
        fs::create_dir_all(&names)?;
        let target = Path::new("../..").join(&node);
        if fs::read_link(names.join(name)).ok().as_ref() != Some(&target) {
            files::remove_volatile(&names.join(name))?;
            symlink(target, names.join(name))?;
        }
        Ok(())
    }

    /// Makes the kernel read the new length of the file, which it does only on request.
    fn grown_now(&self, id: &InstanceId, volume: &str) -> Result<(), Error> {
        let Some(taken) = self.taken_by(id, volume)? else { return Ok(()) };
        for number in loops_of(&taken.file).map_err(Error::transient)? {
            losetup(&["--set-capacity", &format!("/dev/loop{number}")]).map_err(Error::transient)?;
        }
        Ok(())
    }

    fn detach_now(&self, id: &InstanceId, volume: &str) -> Result<(), Error> {
        let Some(mut taken) = self.taken_by(id, volume)? else { return Ok(()) };
        let last = taken.vms.len() == 1;
        if last && let Some(number) = loops_of(&taken.file).map_err(Error::transient)?.first().copied() {
            detach_loop(number, &taken.file).map_err(Error::transient)?;
        }
        if let Ok(Some(dev)) = self.dev_of(id) {
            let link = dev.join("disk/by-id").join(name_of(volume));
            files::remove_volatile(&link).map_err(failed)?;
        }
        taken.vms.retain(|vm| vm != id.as_str());
        let path = self.taken_path(volume);
        let written = if taken.vms.is_empty() { files::remove(&path) } else { write_json(&path, &taken) };
        written.map_err(failed)
    }

    /// Detaches all disks of a VM that has no processes left. Its mounts go with its mount namespace, a little later.
    pub(crate) async fn detach_all(self: Arc<Shared>, id: InstanceId) -> Result<(), Error> {
        self.with_disks(move |shared| {
            let all = shared.taken().map_err(|error| failed(error).during("list the disks"))?;
            all.iter().filter(|taken| taken.is_with(&id)).try_for_each(|taken| {
                let detached = shared.detach_now(&id, &taken.volume);
                detached.map_err(|error| error.during(format_args!("detach of {}", taken.volume)))
            })
        })
        .await
    }

    /// Returns the record of a disk that the VM has.
    fn taken_by(&self, id: &InstanceId, volume: &str) -> Result<Option<Taken>, Error> {
        let taken: Option<Taken> = read_json(&self.taken_path(volume)).map_err(failed)?;
        Ok(taken.filter(|taken| taken.is_with(id)))
    }

    fn taken(&self) -> io::Result<Vec<Taken>> {
        let entries = match fs::read_dir(self.config.state_dir.join("disks")) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut all = Vec::new();
        for entry in entries {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "json") {
                all.extend(read_json(&path)?);
            }
        }
        Ok(all)
    }

    fn taken_path(&self, volume: &str) -> PathBuf {
        self.config.state_dir.join("disks").join(format!("{}.json", hash(volume)))
    }

    /// Checks that all disks of the request exist, before a VM is made for them.
    pub(crate) fn look_for_disks(&self, request: &CreateRequest) -> Result<(), Error> {
        for disk in &request.disks {
            self.file(&disk.volume)
                .map_err(|why| Error::not_found(format!("there is no disk {}: {why}", disk.volume)))?;
        }
        Ok(())
    }

    /// Returns the file of the disk.
    fn file(&self, volume: &str) -> Result<PathBuf, String> {
        let path = match Path::new(volume) {
            path if path.is_absolute() => path.to_owned(),
            _ if volume.is_empty() || volume.starts_with('.') || volume.contains('/') => {
                return Err("neither a path nor a name in local/volumes of paths.state-dir".to_owned());
            }
            name => self.config.volumes_dir.join(name),
        };
        let path = path.canonicalize().map_err(|error| format!("{}: {error}", path.display()))?;
        let kind = fs::metadata(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        if kind.is_file() { Ok(path) } else { Err(format!("{} is not a file", path.display())) }
    }

    /// Returns the VM's own /dev, through its first process; `None` if that process is gone.
    fn dev_of(&self, id: &InstanceId) -> io::Result<Option<PathBuf>> {
        let Some(guest) = self.store.machine(id)?.and_then(|machine| machine.guest) else { return Ok(None) };
        Ok(guest.alive()?.then(|| PathBuf::from(format!("/proc/{}/root/dev", guest.pid))))
    }
}

/// Returns the name by which the guest finds the disk.
fn name_of(volume: &str) -> String {
    let fits = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    match volume {
        plain if plain.len() <= 128 && plain.bytes().all(fits) => format!("peerpod-{plain}"),
        other => format!("peerpod-{}", hash(other)),
    }
}

fn hash(volume: &str) -> String {
    hex::encode(&Sha256::digest(volume)[..16])
}

/// Returns the loop device of the file. Creates one if there is none.
fn loop_device(file: &Path, read_only: bool) -> Result<u64, String> {
    let wanted = u8::from(read_only).to_string();
    if let Some(number) = loops_of(file)?.into_iter().next() {
        let path = format!("/sys/block/loop{number}/ro");
        if fs::read_to_string(&path).is_ok_and(|ro| ro.trim() == wanted) {
            return Ok(number);
        }
        return Err(format!(
            "{} is /dev/loop{number} already, and that is not read-only as asked",
            file.display()
        ));
    }
    let path = file.to_str().ok_or("its path is not UTF-8")?;
    let mut arguments = vec!["--find", "--show", "--nooverlap"];
    if read_only {
        arguments.push("--read-only");
    }
    arguments.push(path);
    let made = losetup(&arguments)?;
    number(made.trim()).ok_or_else(|| format!("losetup answered {made:?}"))
}

/// Returns the loop devices of a file. They are matched by the file itself, not by its name.
fn loops_of(file: &Path) -> Result<Vec<u64>, String> {
    if !file.exists() {
        return Ok(Vec::new());
    }
    let path = file.to_str().ok_or("its path is not UTF-8")?;
    let listed = losetup(&["--associated", path, "--output", "NAME", "--noheadings"])?;
    Ok(listed.lines().filter_map(|line| number(line.trim())).collect())
}

/// Detaches a loop device if it belongs to the file still. Waits until the kernel has released it.
fn detach_loop(number: u64, file: &Path) -> Result<(), String> {
    let device = format!("/dev/loop{number}");
    // The kernel gives an open device to no other file. Between a look and the detach, it could give it away.
    let held = files::open_device(Path::new(&device)).map_err(|error| format!("open {device}: {error}"))?;
    if held.is_some() && loops_of(file)?.contains(&number) {
        losetup(&["--detach", &device])?;
    }
    drop(held);
    // The kernel releases the device at its last close. Each `losetup` of another program opens it for a moment.
    let end = Instant::now() + RELEASE_LIMIT;
    while loops_of(file)?.contains(&number) {
        if Instant::now() >= end {
            return Err(format!("{device} is in use, is it mounted?"));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

fn number(device: &str) -> Option<u64> {
    device.strip_prefix("/dev/loop")?.parse().ok()
}

/// Runs `losetup` of util-linux, because its ioctls would be unsafe code here. The time limit keeps a hanging device or
/// file system from blocking the disks of all other VMs.
fn losetup(arguments: &[&str]) -> Result<String, String> {
    let output = Command::new("timeout").args(["--signal=KILL", LIMIT, "losetup"]).args(arguments).output();
    let output = output.map_err(|error| format!("run losetup: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    Err(format!("losetup {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes a loop device for a new file in a folder of its own.
    fn made(folder: &str) -> (PathBuf, u64) {
        let folder = std::env::temp_dir().join(format!("{folder}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let file = folder.join("disk");
        fs::write(&file, [0; 4096]).unwrap();
        let number = loop_device(&file, false).unwrap();
        (file, number)
    }

    #[test]
    fn a_loop_device_of_another_file_is_not_detached() {
        let (theirs, device) = made("peerpod-loops");
        let ours = theirs.with_file_name("ours");
        fs::write(&ours, [0; 4096]).unwrap();
        detach_loop(device, &ours).unwrap();
        assert_eq!(loops_of(&theirs), Ok(vec![device]));
        detach_loop(device, &theirs).unwrap();
        assert_eq!(loops_of(&theirs), Ok(Vec::new()));
        fs::remove_dir_all(theirs.parent().unwrap()).unwrap();
    }

    #[test]
    fn a_detach_waits_for_another_programs_close() {
        let (file, device) = made("peerpod-last-close");
        let other = fs::File::open(format!("/dev/loop{device}")).unwrap();
        let flag = format!("/sys/block/loop{device}/loop/autoclear");
        // The other program closes the device half a second after the detach was requested.
        let closer = std::thread::spawn(move || {
            while fs::read_to_string(&flag).is_ok_and(|requested| requested.trim() == "0") {
                std::thread::sleep(Duration::from_millis(10));
            }
            std::thread::sleep(Duration::from_millis(500));
            drop(other);
        });
        detach_loop(device, &file).unwrap();
        assert_eq!(loops_of(&file), Ok(Vec::new()));
        closer.join().unwrap();
        fs::remove_dir_all(file.parent().unwrap()).unwrap();
    }

    #[test]
    fn a_detach_of_a_disk_in_use_fails_and_is_finished_later() {
        let (file, device) = made("peerpod-in-use");
        let other = fs::File::open(format!("/dev/loop{device}")).unwrap();
        let error = detach_loop(device, &file).unwrap_err();
        assert_eq!(error, format!("/dev/loop{device} is in use, is it mounted?"));
        drop(other);
        detach_loop(device, &file).unwrap();
        assert_eq!(loops_of(&file), Ok(Vec::new()));
        fs::remove_dir_all(file.parent().unwrap()).unwrap();
    }

    #[test]
    fn a_disks_name_follows_from_its_id() {
        assert_eq!(name_of("pvc-1.x"), "peerpod-pvc-1.x");
        let odd = name_of("/var/lib/disks/a b");
        assert_eq!(odd, name_of("/var/lib/disks/a b"));
        assert_ne!(odd, name_of("/var/lib/disks/a c"));
        assert!(!odd["peerpod-".len()..].contains(['/', ' ']));
        assert_eq!(number("/dev/loop12"), Some(12));
        assert_eq!(number("/dev/loop12p1"), None);
    }
}
