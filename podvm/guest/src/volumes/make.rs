//! Makes the file system of a disk that is provably empty, once. A crash in the middle neither leaves the disk unusable
//! nor lets anything be formatted over.
//!
//! Before its maker runs, the guest writes a note near the end of the disk, into the last MiB. The file system is made
//! not to reach it. After the maker ends, the guest clears the note. Each step is on the disk before the next begins,
//! and nothing is mounted before the last. So a note means that a maker of the guest worked here and that the result
//! was never mounted since.
//!
//! Both makers set a mark last, after all else is on the disk (ext4: valid; XFS: not in progress). With the mark the
//! file system is whole. Without it and never mounted, or without any known signature, it is made again. A note beside
//! another signature never causes a new file system.
//!
//! A disk may have grown after a maker was killed. The note stays in its place, and the size in the superblock leads to
//! it.
//!
//! The MiB is not lost: growing the file system takes it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use peerpod_common::blocking::blocking;
use peerpod_volume::VolumeId;
use tokio::process::Command;
use tokio::time::timeout;

use super::Fault;
use super::content::{self, Content};
use super::find::Disk;

/// Bytes that the file system leaves free at the end.
const TAIL: u64 = 1 << 20;
/// Offset of the note from the end: beyond the part of a disk's end that makers clear.
const NOTE_FROM_END: u64 = 512 << 10;
const NOTE: usize = 4096;
/// Time limit of a maker, which writes little; a slow cloud disk takes long all the same.
const MAKE: Duration = Duration::from_secs(180);
/// Limit of a maker's error output that is passed on, in characters.
const WORDS: usize = 600;

/// Returns the file system to mount the disk as; makes it first if the disk is empty.
pub(super) async fn filesystem(
    disk: &Disk,
    id: &VolumeId,
    wanted: Option<&str>,
    read_only: bool,
) -> Result<String, Fault> {
    let (node, size, volume) = (disk.node.clone(), disk.size, id.clone());
    let looked =
        blocking(move || io::Result::Ok((content::inspect(&node, size)?, notes(&node, size, &volume)?)));
    let failed = |error| Fault::not_now(format!("read {}: {error}", disk.node.display()));
    let (content, notes) = looked.await.map_err(failed)?;
    match content {
        Content::Is(found) if !found.unfinished || notes.is_empty() => {
            check(found.name, wanted)?;
            for size in notes.into_iter().filter(|_| !read_only) {
                clear_note(disk, size).await?;
            }
            return Ok(found.name.to_owned());
        }
        // The note itself is in the last MiB.
        Content::Unknown if notes.is_empty() => {
            let text = "the disk has no known file system, and is not empty: it is not formatted over. Format it by \
                        hand, or clear its first and last MiB if its content is not needed";
            return Err(Fault::never(text.into()));
        }
        _ if read_only => {
            let text = "the disk is empty and the volume is read-only: no file system can be made on it";
            return Err(Fault::never(text.into()));
        }
        _ => {}
    }
    let kind = wanted.unwrap_or("ext4");
    make_one(disk, id, kind, &notes).await?;
    Ok(kind.to_owned())
}

fn check(found: &str, wanted: Option<&str>) -> Result<(), Fault> {
    let mountable = !found.contains(' ');
    match wanted {
        Some(wanted) if wanted != found => Err(Fault::never(format!(
            "the disk has {found} on it and the volume asks for {wanted}; it is not formatted over. Set the \
             volume's fsType to that file system"
        ))),
        None if !mountable => {
            Err(Fault::never(format!("the disk has {found} on it, which cannot be mounted")))
        }
        _ => Ok(()),
    }
}

/// Makes the file system. `notes`: the sizes of the disk of which it has notes.
async fn make_one(disk: &Disk, id: &VolumeId, kind: &str, notes: &[u64]) -> Result<(), Fault> {
    if disk.size <= 2 * TAIL {
        return Err(Fault::never(format!("the disk has {} bytes: too few for a file system", disk.size)));
    }
    let bytes = (disk.size - TAIL) / 4096 * 4096;
    let (program, mut arguments): (_, Vec<String>) = match kind {
        "ext4" => ("mke2fs", ["-t", "ext4", "-F", "-q", "-b", "4096"].map(String::from).into()),
        "xfs" => ("mkfs.xfs", ["-f", "-q", "-d"].map(String::from).into()),
        other => {
            let text =
                format!("the disk is empty and the volume asks for {other}; here ext4 and xfs can be made");
            return Err(Fault::never(text));
        }
    };
    let node = disk.node.display().to_string();
    match kind {
        "xfs" => arguments.extend([format!("size={bytes}"), node.clone()]),
        _ => arguments.extend([node.clone(), format!("{}", bytes / 4096)]),
    }
    let program = find_program(program)?;
    tracing::info!(disk = node, volume = %id, kind, "the disk is empty: making its file system");
    write_note(disk, disk.size, note(id, disk.size)).await?;
    for earlier in notes.iter().filter(|size| **size != disk.size) {
        clear_note(disk, *earlier).await?;
    }
    run(&program, &arguments, MAKE).await?;
    clear_note(disk, disk.size).await
}

/// Runs a program to its end; its error output is the error.
pub(super) async fn run(program: &Path, arguments: &[String], limit: Duration) -> Result<(), Fault> {
    let child = Command::new(program)
        .args(arguments)
        .current_dir("/")
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .output();
    let name = program.display();
    let output = timeout(limit, child)
        .await
        .map_err(|_| Fault::not_now(format!("{name} did not end within {limit:?}")))?
        .map_err(|error| Fault::not_now(format!("run {name}: {error}")))?;
    if output.status.success() {
        return Ok(());
    }
    let words = String::from_utf8_lossy(&output.stderr);
    let words: String = words.chars().map(|c| if c.is_control() { ' ' } else { c }).take(WORDS).collect();
    Err(Fault::not_now(format!("{name} {}: {}: {}", arguments.join(" "), output.status, words.trim())))
}

pub(super) fn find_program(name: &str) -> Result<std::path::PathBuf, Fault> {
    let folders = ["/usr/sbin", "/sbin", "/usr/bin", "/bin"];
    let found = folders.iter().map(|folder| Path::new(folder).join(name)).find(|path| path.exists());
    found.ok_or_else(|| Fault::never(format!("the VM's image has no {name}")))
}

fn note(id: &VolumeId, size: u64) -> Vec<u8> {
    let mut note =
        format!("peerpod 1: a file system is being made here. volume {id}, {size} bytes\n").into_bytes();
    note.resize(NOTE, 0);
    note
}

/// Returns the sizes of the disk of which it has notes: its size now, and the one from before it grew.
fn notes(node: &Path, size: u64, id: &VolumeId) -> io::Result<Vec<u64>> {
    let mut noted = Vec::new();
    if size <= 2 * TAIL {
        return Ok(noted);
    }
    // A file system is a whole number of blocks, a disk one of sectors.
    let made = content::filesystem_bytes(node)?.into_iter();
    let before = made.flat_map(|bytes| (0..4096 / 512).map(move |n| bytes.saturating_add(TAIL + n * 512)));
    for then in before.filter(|then| *then < size).chain([size]) {
        if read_note(node, then)? == note(id, then) {
            noted.push(then);
        }
    }
    Ok(noted)
}

fn read_note(node: &Path, size: u64) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; NOTE];
    File::open(node)?.read_exact_at(&mut bytes, size - NOTE_FROM_END)?;
    Ok(bytes)
}

async fn clear_note(disk: &Disk, size: u64) -> Result<(), Fault> {
    write_note(disk, size, vec![0; NOTE]).await
}

/// Writes the note of this size. When this returns, it is on the disk, with all earlier writes.
async fn write_note(disk: &Disk, size: u64, content: Vec<u8>) -> Result<(), Fault> {
    let (node, at) = (disk.node.clone(), size - NOTE_FROM_END);
    let written = blocking(move || {
        let file = OpenOptions::new().write(true).open(node)?;
        file.sync_all()?;
        file.write_all_at(&content, at)?;
        file.sync_all()
    });
    written.await.map_err(|error| Fault::not_now(format!("write to {}: {error}", disk.node.display())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::testing::TempDir;

    const SIZE: u64 = 64 << 20;

    fn disk(dir: &TempDir) -> Disk {
        let node = dir.path().join("disk");
        File::create(&node).unwrap().set_len(SIZE).unwrap();
        Disk { name: "disk".into(), node, size: SIZE }
    }

    fn id() -> VolumeId {
        VolumeId::of("driver", "volume")
    }

    #[tokio::test]
    async fn an_empty_disk_gets_its_file_system_once() {
        let dir = TempDir::new();
        let disk = disk(&dir);
        assert_eq!(filesystem(&disk, &id(), None, false).await.unwrap(), "ext4");
        let made = std::fs::read(&disk.node).unwrap();
        assert!(made[(SIZE - TAIL) as usize..].iter().all(|byte| *byte == 0), "the note is gone");
        assert_eq!(filesystem(&disk, &id(), Some("ext4"), false).await.unwrap(), "ext4");
        assert!(std::fs::read(&disk.node).unwrap() == made, "not a byte was changed");
        let error = filesystem(&disk, &id(), Some("xfs"), false).await.unwrap_err().to_string();
        assert!(error.contains("ext4") && error.contains("asks for xfs"), "{error}");
        assert!(std::fs::read(&disk.node).unwrap() == made);
    }

    #[tokio::test]
    async fn a_disk_with_other_content_stays_unchanged() {
        let dir = TempDir::new();
        for at in [0, 700, 500_000, SIZE - 1, SIZE - 600_000] {
            let disk = disk(&dir);
            let file = OpenOptions::new().write(true).open(&disk.node).unwrap();
            file.write_all_at(b"precious", at.min(SIZE - 8)).unwrap();
            let before = std::fs::read(&disk.node).unwrap();
            let error = filesystem(&disk, &id(), Some("ext4"), false).await.unwrap_err().to_string();
            assert!(error.contains("not formatted over"), "{error}");
            assert!(std::fs::read(&disk.node).unwrap() == before);
        }
        let disk = disk(&dir);
        assert!(filesystem(&disk, &id(), None, true).await.is_err(), "read-only");
        assert!(filesystem(&disk, &id(), Some("btrfs"), false).await.is_err());
    }

    #[tokio::test]
    async fn a_killed_mkfs_runs_again_and_a_finished_file_system_is_kept() {
        let dir = TempDir::new();
        let disk = disk(&dir);
        // Killed after the first bytes.
        write_note(&disk, SIZE, note(&id(), SIZE)).await.unwrap();
        let file = OpenOptions::new().write(true).open(&disk.node).unwrap();
        file.write_all_at(&[7; 5000], 200_000).unwrap();
        assert_eq!(filesystem(&disk, &id(), None, false).await.unwrap(), "ext4");
        // Killed between the last byte and the clearing of the note: nothing is made again.
        write_note(&disk, SIZE, note(&id(), SIZE)).await.unwrap();
        let before = std::fs::read(&disk.node).unwrap();
        assert_eq!(filesystem(&disk, &id(), None, false).await.unwrap(), "ext4");
        let after = std::fs::read(&disk.node).unwrap();
        assert!(before[..(SIZE - TAIL) as usize] == after[..(SIZE - TAIL) as usize]);
        assert!(after[(SIZE - TAIL) as usize..].iter().all(|byte| *byte == 0));
        // A superblock that is not valid yet, never mounted: made again, but only with the note.
        for (noted, made_again) in [(false, false), (true, true)] {
            let mut half = after.clone();
            half[1024 + 58] = 0;
            std::fs::write(&disk.node, &half).unwrap();
            if noted {
                write_note(&disk, SIZE, note(&id(), SIZE)).await.unwrap();
            }
            filesystem(&disk, &id(), None, false).await.unwrap();
            let now = std::fs::read(&disk.node).unwrap();
            assert_eq!(now[1024 + 58] == 1, made_again);
        }
        // The note of another volume does not count.
        let other = super::super::tests::zeros(&dir, SIZE);
        write_note(&other, SIZE, note(&VolumeId::of("d", "other"), SIZE)).await.unwrap();
        assert!(filesystem(&other, &id(), None, false).await.is_err());
    }

    #[tokio::test]
    async fn a_disk_that_grew_after_a_killed_mkfs_is_handled_like_one_that_did_not() {
        let dir = TempDir::new();
        // Not a whole number of the file system's blocks.
        let (then, now) = (SIZE - 512, SIZE + (16 << 20));
        let disk = Disk { size: then, ..disk(&dir) };
        for (unfinished, noted) in [(true, true), (true, false), (false, true)] {
            File::create(&disk.node).unwrap().set_len(then).unwrap();
            filesystem(&disk, &id(), None, false).await.unwrap();
            let file = OpenOptions::new().write(true).open(&disk.node).unwrap();
            if unfinished {
                file.write_all_at(&[0], 1024 + 58).unwrap();
            }
            if noted {
                write_note(&disk, then, note(&id(), then)).await.unwrap();
            }
            file.set_len(now).unwrap();
            let grown = Disk { size: now, name: disk.name.clone(), node: disk.node.clone() };
            assert_eq!(filesystem(&grown, &id(), None, false).await.unwrap(), "ext4");
            let made_again = content::filesystem_bytes(&disk.node).unwrap() == Some(now - TAIL);
            assert_eq!(made_again, unfinished && noted, "unfinished: {unfinished}, noted: {noted}");
            assert!(read_note(&disk.node, then).unwrap() != note(&id(), then), "the note is cleared");
            assert_eq!(notes(&disk.node, now, &id()).unwrap(), [0; 0]);
        }
    }
}
