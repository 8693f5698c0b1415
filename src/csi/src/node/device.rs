//! Makes the block device that kubelet maps for a raw volume (`target`): a loop device on a small file that begins with
//! the marker. It is found by its file, so every crash can be repaired; the file is removed last. Runs util-linux's
//! losetup, because the kernel's ioctls would be unsafe code here. May touch: the file, loop devices.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use std::{fs, io};

use peerpod_common::blocking::blocking;
use peerpod_volume::files;
use tokio::process::Command;
use tokio::time::timeout;

/// Size of the file, a whole number of sectors.
const BYTES: usize = 4096;
/// Limit for losetup, which only calls the kernel.
const WITHIN: Duration = Duration::from_secs(20);

/// Makes or finds the file and its loop device, and returns the device's path.
pub(super) async fn make(file: &Path, marker: &str) -> Result<PathBuf, String> {
    let found = of(file).await?;
    if begins_with(file, marker).await? {
        if let Some(device) = found.into_iter().next() {
            return Ok(device);
        }
    } else {
        // The old device does not belong to the new file.
        detach(file, &found).await?;
        write(file, marker).await?;
    }
    let made = losetup(&["--find", "--show", "--nooverlap"], file).await?;
    device(&made)
        .ok_or_else(|| format!("make a loop device of {}: losetup returned {made:?}", file.display()))
}

/// Removes the file and its loop devices. A missing file is no error.
pub(super) async fn remove(file: &Path) -> Result<(), String> {
    detach(file, &of(file).await?).await?;
    on_disk("remove", file, |path| files::gone(fs::remove_file(path))).await
}

/// Returns the loop devices of a file, compared by device and inode and not by name.
async fn of(file: &Path) -> Result<Vec<PathBuf>, String> {
    if !on_disk("look for", file, Path::try_exists).await? {
        return Ok(Vec::new());
    }
    let listed = losetup(&["--noheadings", "--output", "NAME", "--associated"], file).await?;
    Ok(listed.lines().filter_map(device).collect())
}

/// Detaches those of the devices that belong to the file still.
async fn detach(file: &Path, devices: &[PathBuf]) -> Result<(), String> {
    // The kernel gives an open device to no other file. Between a look and the detach, it could give it away.
    let mut held = Vec::new();
    for device in devices {
        held.extend(on_disk("open", device, peerpod_common::files::open_device).await?);
    }
    for device in of(file).await?.iter().filter(|device| devices.contains(device)) {
        losetup(&["--detach"], device).await?;
    }
    Ok(())
}

async fn begins_with(file: &Path, marker: &str) -> Result<bool, String> {
    let marker = marker.to_owned();
    let same = move |path: &Path| match fs::metadata(path) {
        Err(why) if why.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(why) => Err(why),
        Ok(there) if there.len() != BYTES as u64 => Ok(false),
        Ok(_) => fs::read(path).map(|bytes| bytes.starts_with(marker.as_bytes())),
    };
    on_disk("read", file, same).await
}

async fn write(file: &Path, marker: &str) -> Result<(), String> {
    let mut bytes = marker.as_bytes().to_vec();
    bytes.resize(BYTES, 0);
    let written = move |path: &Path| {
        let name = path.file_name().and_then(|name| name.to_str());
        let (folder, name) = path.parent().zip(name).ok_or(io::ErrorKind::InvalidInput)?;
        files::write(folder, name, &bytes)
    };
    on_disk("write", file, written).await
}

async fn on_disk<T: Send + 'static>(
    what: &str,
    file: &Path,
    work: impl FnOnce(&Path) -> io::Result<T> + Send + 'static,
) -> Result<T, String> {
    let path = file.to_owned();
    let done = blocking(move || work(&path)).await;
    done.map_err(|why| format!("{what} {}: {why}", file.display()))
}

fn device(line: &str) -> Option<PathBuf> {
    let line = line.trim();
    line.strip_prefix("/dev/loop")?.parse::<u32>().ok()?;
    Some(PathBuf::from(line))
}

async fn losetup(words: &[&str], path: &Path) -> Result<String, String> {
    let what = || format!("losetup {} {}", words.join(" "), path.display());
    let mut command = Command::new("losetup");
    command.args(words).arg(path).stdin(Stdio::null()).kill_on_drop(true);
    let run = timeout(WITHIN, command.output()).await;
    let output = run.map_err(|_| format!("{}: not done within {WITHIN:?}", what()))?.map_err(|why| {
        format!("{}: {why}; it belongs to util-linux, and must be there beside peerpod-csi", what())
    })?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let why = String::from_utf8_lossy(&output.stderr);
    Err(format!("{}: {}; the node's /dev must be there, and the right to use it", what(), why.trim()))
}
