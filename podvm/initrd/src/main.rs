//! `peerpod-initrd`, the first program of the disk image, pid 1 of its initramfs: loads the drivers of disks, finds the
//! partition with the root, has dm-verity check it against the hash on the kernel's command line, and becomes systemd.
//!
//! It knows one layout, the builder's (podvm/image); it asks nobody anything, and what it cannot do ends the VM with a
//! line on the console. Everything on the disks is the host's, or a pod's: nothing of it is believed but by the hash.

mod disks;
mod mapper;
mod modules;
mod verity;

use std::{
    fs, io,
    os::unix::{fs::MetadataExt, process::CommandExt},
    path::Path,
    process::{Command, ExitCode},
    thread,
    time::{Duration, Instant},
};

use nix::{
    mount::{MsFlags, mount},
    sys::reboot::{RebootMode, reboot},
    unistd::{chdir, chroot},
};

/// How long a cloud's disk may take to appear.
const PATIENCE: Duration = Duration::from_secs(60);
const INTERVAL: Duration = Duration::from_millis(10);
/// Where the root is mounted before it is one.
const ROOT: &str = "/sysroot";
const INIT: &str = "/usr/lib/systemd/systemd";
/// What the root has as mount points, and we have mounted.
const MOVED: [(&str, &str); 3] = [("/dev", "devtmpfs"), ("/proc", "proc"), ("/sys", "sysfs")];

fn main() -> ExitCode {
    if std::process::id() != 1 {
        eprintln!("peerpod-initrd is the first program of a VM; it does nothing elsewhere");
        return ExitCode::from(2);
    }
    let Err(why) = start();
    eprintln!("peerpod-initrd: {why}; powering off");
    thread::sleep(Duration::from_millis(200)); // the serial line is slow, and what it has not sent is lost
    // It does not come back when it succeeds; when it fails, the end of pid 1 is the end of the VM.
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
    let hash = verity::RootHash::of(&line)?;
    mount_root(hash.as_ref())?;
    for (target, _) in MOVED {
        mount(Some(target), &*format!("{ROOT}{target}"), None::<&str>, MsFlags::MS_MOVE, None::<&str>)
            .map_err(|error| format!("move {target}: {error}"))?;
    }
    // The initramfs stays in memory for as long as the VM lives otherwise.
    if let Err(error) = remove_files() {
        eprintln!("peerpod-initrd: free the initramfs: {error}");
    }
    enter().map_err(|error| format!("enter the root: {error}"))?;
    let error = Command::new(INIT).exec();
    Err(format!("start {INIT}: {error}"))
}

/// Tries what looks like the root until one is, or time is over.
fn mount_root(hash: Option<&verity::RootHash>) -> Result<(), String> {
    fs::create_dir_all(ROOT).map_err(|error| format!("make {ROOT}: {error}"))?;
    let deadline = Instant::now() + PATIENCE;
    let mut said = Vec::new();
    loop {
        let found = disks::candidates().map_err(|error| format!("read /sys/class/block: {error}"))?;
        match (hash, &found[..]) {
            (Some(hash), candidates) => {
                for candidate in candidates {
                    match verified(candidate, hash) {
                        Ok(()) => return Ok(()),
                        Err(why) => {
                            let line = format!("{}: {why}", candidate.root);
                            if !said.contains(&line) {
                                eprintln!("peerpod-initrd: {line}");
                                said.push(line);
                            }
                        }
                    }
                }
            }
            (None, [candidate]) => return mount_at(&format!("/dev/{}", candidate.root)),
            (None, []) => {}
            (None, several) => {
                let names: Vec<&str> = several.iter().map(|one| one.root.as_str()).collect();
                return Err(format!(
                    "several disks have a root ({}), and no root hash says which",
                    names.join(", ")
                ));
            }
        }
        if Instant::now() > deadline {
            let why = if said.is_empty() {
                "no disk has a partition with the label peerpod-root"
            } else {
                "no root is right"
            };
            return Err(format!("{why}, after {PATIENCE:?}"));
        }
        thread::sleep(INTERVAL);
    }
}

fn verified(candidate: &disks::Candidate, hash: &verity::RootHash) -> Result<(), String> {
    let hashes =
        candidate.hashes.as_ref().ok_or("its disk has no partition with the label peerpod-verity")?;
    let header = verity::Header::read(Path::new(&format!("/dev/{hashes}")))?;
    let device =
        mapper::create("root", header.sectors(), "verity", &header.table(&candidate.root, hashes, hash))?;
    mount_at(&device).inspect_err(|_| mapper::remove("root"))
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

/// Removes the initramfs's files; what is mounted is another device and stays.
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
                match fs::remove_dir(&path) {
                    Ok(()) => {}
                    Err(error)
                        if matches!(
                            error.kind(),
                            io::ErrorKind::DirectoryNotEmpty | io::ErrorKind::ResourceBusy
                        ) => {}
                    Err(error) => return Err(error),
                }
            } else {
                fs::remove_file(&path)?;
            }
        }
        Ok(())
    }
    remove(Path::new("/"), fs::metadata("/")?.dev())
}
