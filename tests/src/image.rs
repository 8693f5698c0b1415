//! Finds the images that `make image` built, and makes a copy of the minimal one with tools in it: the image itself has
//! no shell for tests to look around.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use peerpod_world::binary;
use serde_json::Value;

/// Commands that busybox provides in the VM.
const TOOLS: &[&str] = &[
    "cat",
    "cp",
    "cut",
    "dd",
    "df",
    "dirname",
    "echo",
    "grep",
    "head",
    "ls",
    "mkdir",
    "mount",
    "nsenter",
    "ping",
    "rm",
    "sh",
    "sha256sum",
    "sleep",
    "sync",
    "tee",
    "touch",
    "tr",
    "umount",
    "unshare",
    "wc",
    "wget",
];

/// Returns the folder of the minimal image: `PEERPOD_TEST_IMAGE`, or the output folder of `make image`.
pub fn minimal() -> anyhow::Result<PathBuf> {
    if let Some(folder) = std::env::var_os("PEERPOD_TEST_IMAGE") {
        return Ok(folder.into());
    }
    built("minimal")
}

/// Returns the disk image, as qcow2. Tests boot it unmodified: its root is verified, so nothing can be added to it.
pub fn disk() -> anyhow::Result<PathBuf> {
    let folder = built("disk")?;
    let about = folder.join("image.json");
    let text = fs::read(&about).with_context(|| format!("{}: build it (make image)", about.display()))?;
    let json: Value = serde_json::from_slice(&text)?;
    ensure!(
        json["test_agent"] == true,
        "{}: its agent is not the test agent; build it without a real agent (make image)",
        folder.display()
    );
    let disk = folder.join("peerpod.qcow2");
    ensure!(disk.is_file(), "{}: build it (make image, with all formats)", disk.display());
    Ok(disk)
}

/// Returns the folder to which `make image` writes an image of this kind.
fn built(kind: &str) -> anyhow::Result<PathBuf> {
    let node = binary("peerpod-node")?;
    Ok(node.ancestors().nth(2).context("a target folder")?.join("image").join(kind))
}

/// Copies the minimal image to `folder`, and appends busybox and `files` to its initramfs.
///
/// The paths of `files` are relative to the root, in folders that the image has. The kernel unpacks one archive after
/// the other, so the later entries replace the earlier ones.
pub fn with_tools(folder: &Path, files: &[(&str, &[u8])]) -> anyhow::Result<PathBuf> {
    let (image, copy) = (minimal()?, folder.join("image"));
    fs::create_dir_all(&copy)?;
    let read = |name: &str| {
        fs::read(image.join(name)).with_context(|| format!("{}: build it (make image)", image.display()))
    };
    let mut json: Value = serde_json::from_slice(&read("image.json")?)?;
    let (kernel, initrd) =
        (json["kernel"].as_str().context("a kernel")?, json["initrd"].as_str().context("an initrd")?);
    fs::write(copy.join(kernel), read(kernel)?)?;
    let mut bytes = read(initrd)?;
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    let busybox = fs::read("/bin/busybox").context("/bin/busybox: install busybox-static (scripts/setup)")?;
    let mut archive = Vec::new();
    // Replaces the link to /usr/bin: /usr is a separate file system that is mounted when the guest starts.
    add(&mut archive, "bin", 0o040_755, b"");
    add(&mut archive, "bin/busybox", 0o100_755, &busybox);
    for tool in TOOLS {
        add(&mut archive, &format!("bin/{tool}"), 0o120_777, b"busybox");
    }
    for (path, content) in files {
        add(&mut archive, path, 0o100_644, content);
    }
    add(&mut archive, "TRAILER!!!", 0, b"");
    bytes.extend(archive);
    fs::write(copy.join(initrd), bytes)?;
    json["sha256"] = Value::Null;
    fs::write(copy.join("image.json"), serde_json::to_vec(&json)?)?;
    Ok(copy)
}

/// Appends an entry of a `newc` archive.
fn add(archive: &mut Vec<u8>, name: &str, mode: u32, data: &[u8]) {
    let number = u32::try_from(archive.len()).unwrap_or(0) + 1_000_000;
    let (length, name_length) = (data.len(), name.len() + 1);
    let fields = [number, mode, 0, 0, 1, 0, length as u32, 0, 0, 0, 0, name_length as u32, 0];
    archive.extend(b"070701");
    for field in fields {
        archive.extend(format!("{field:08X}").bytes());
    }
    archive.extend(name.bytes());
    archive.push(0);
    archive.resize(archive.len().next_multiple_of(4), 0);
    archive.extend(data);
    archive.resize(archive.len().next_multiple_of(4), 0);
}
