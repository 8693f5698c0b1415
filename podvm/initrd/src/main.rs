//! `peerpod-initrd` is the first program of the disk image, pid 1 of its initramfs. It loads the disk drivers and
//! finds the partition with the root. It sets dm-verity up with the hash on the kernel's command line, and executes
//! systemd.
//!
//! It supports only the layout of the builder (podvm/vm-image) and takes no other input. A failure ends the VM with a
//! line on the console. The host or a pod may have written any data on the disks: only the hash makes data trusted.

mod disks;
mod mapper;
mod modules;
mod verity;

use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};
use std::{fs, io, thread};

use nix::mount::{MsFlags, mount};
use nix::sys::reboot::{RebootMode, reboot};
use nix::unistd::{chdir, chroot};

/// Time limit for a cloud's disk to appear.
const PATIENCE: Duration = Duration::from_secs(60);
const INTERVAL: Duration = Duration::from_millis(10);
/// Mount point of the root until it becomes `/`.
const ROOT: &str = "/sysroot";
const INIT: &str = "/usr/lib/systemd/systemd";
/// File systems that this program mounts and then moves to mount points of the root.
const MOVED: [(&str, &str); 3] = [("/dev", "devtmpfs"), ("/proc", "proc"), ("/sys", "sysfs")];

fn main() -> ExitCode {
    if std::process::id() != 1 {
        eprintln!("peerpod-initrd is the first program of a VM; it does nothing elsewhere");
        return ExitCode::from(2);
    }
    let Err(why) = start();
    eprintln!("peerpod-initrd: {why}; powering off");
    thread::sleep(Duration::from_millis(200)); // the serial line is slow, and unsent output is lost
    // A successful call does not return. After a failed one, the exit of pid 1 ends the VM.
    let Err(error) = reboot(RebootMode::RB_POWER_OFF);
    eprintln!("peerpod-initrd: power off: {error}");
    ExitCode::FAILURE
}

fn start() -> Result<std::convert::Infallible, String> {
    for (target, kind) in MOVED {
        fs::create_dir_all(target).map_err(|error| format!("make {target}: {error}"))?;
        mount(Some(kind), target, Some(kind), MsFlags::MS_NOSUID, None::<&str>)
            .map_err(|error| format!("mount {target}: {error}"))?;
    }
    modules::load()?;
    let line = fs::read_to_string("/proc/cmdline").map_err(|error| format!("read /proc/cmdline: {error}"))?;
    mount_root(verity::root_hash(&line)?)?;
    for (target, _) in MOVED {
        mount(Some(target), &*format!("{ROOT}{target}"), None::<&str>, MsFlags::MS_MOVE, None::<&str>)
            .map_err(|error| format!("move {target}: {error}"))?;
    }
    // Otherwise the initramfs stays in memory for as long as the VM runs.
    if let Err(error) = remove_files() {
        eprintln!("peerpod-initrd: free the initramfs: {error}");
    }
    enter().map_err(|error| format!("enter the root: {error}"))?;
    let error = Command::new(INIT).exec();
    Err(format!("start {INIT}: {error}"))
}

/// Tries the candidates for the root until one is valid or the time limit has passed.
fn mount_root(hash: Option<&str>) -> Result<(), String> {
    fs::create_dir_all(ROOT).map_err(|error| format!("make {ROOT}: {error}"))?;
    let deadline = Instant::now() + PATIENCE;
    let mut said = Vec::new();
    loop {
        let found = disks::candidates().map_err(|error| format!("read /sys/class/block: {error}"))?;
        match (hash, &found[..]) {
            (Some(hash), candidates) => {
                for candidate in candidates {
                    let Err(why) = verified(candidate, hash) else { return Ok(()) };
                    let line = format!("{}: {why}", candidate.root);
                    if !said.contains(&line) {
                        eprintln!("peerpod-initrd: {line}");
                        said.push(line);
                    }
                }
            }
            (None, [candidate]) => return mount_at(&format!("/dev/{}", candidate.root)),
            (None, []) => {}
            (None, several) => {
                let names = several.iter().map(|one| one.root.as_str()).collect::<Vec<_>>().join(", ");
                return Err(format!("several disks have a root ({names}), and no root hash selects one"));
            }
        }
        if Instant::now() > deadline {
            let why = match said.is_empty() {
                true => "no disk has a partition with the label peerpod-root",
                false => "no root matches",
            };
            return Err(format!("{why}, after {PATIENCE:?}"));
        }
        thread::sleep(INTERVAL);
    }
}

fn verified(candidate: &disks::Candidate, hash: &str) -> Result<(), String> {
    let hashes =
        candidate.hashes.as_ref().ok_or("its disk has no partition with the label peerpod-verity")?;
    let header = verity::Header::read(Path::new(&format!("/dev/{hashes}")))?;
    let device = mapper::create(header.sectors(), &header.table(&candidate.root, hashes, hash))?;
    mount_at(&device).inspect_err(|_| mapper::remove())
}

fn mount_at(device: &str) -> Result<(), String> {
    mount(Some(device), ROOT, Some("erofs"), MsFlags::MS_RDONLY, None::<&str>)
        .map_err(|error| format!("mount {device}: {error}"))
}

fn enter() -> nix::Result<()> {
    chdir(ROOT)?;
    mount(Some("."), "/", None::<&str>, MsFlags::MS_MOVE, None::<&str>)?;
    chroot(".")?;
    chdir("/")
}

/// Removes the files of the initramfs; mounted file systems are other devices and stay.
fn remove_files() -> io::Result<()> {
    fn remove(folder: &Path, device: u64) -> io::Result<()> {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            let about = fs::symlink_metadata(&path)?;
            if about.dev() != device {
                continue;
            }
            if about.is_dir() {
                remove(&path, device)?;
                match fs::remove_dir(&path).map_err(|error| (error.kind(), error)) {
                    Ok(()) | Err((ErrorKind::DirectoryNotEmpty | ErrorKind::ResourceBusy, _)) => {}
                    Err((_, error)) => return Err(error),
                }
            } else {
                fs::remove_file(&path)?;
            }
        }
        Ok(())
    }
    remove(Path::new("/"), fs::metadata("/")?.dev())
}
