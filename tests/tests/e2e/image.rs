//! Boots the images that `make image` built, in software emulation as on a host without KVM. A boot succeeds when the
//! guest waits for its user-data.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;
use std::time::Duration;

use peerpod_tests::long;
use peerpod_world::qemu::{self, Machine};

static PATIENCE: LazyLock<Duration> = LazyLock::new(|| qemu::patience(&images().join("minimal")).unwrap());
const LOOKS: &str = "waiting for user-data";

/// Returns `target/image`, beside the folder of the profile that this test was built in.
fn images() -> PathBuf {
    let us = std::env::current_exe().unwrap();
    us.ancestors().nth(3).unwrap().join("image")
}

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("peerpod-boot-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

/// Copies the disk and enlarges it, as a cloud does.
fn disk(folder: &Folder, images: &Path) -> PathBuf {
    let path = folder.0.join("disk.raw");
    let built = images.join("disk/peerpod.raw");
    fs::copy(&built, &path)
        .unwrap_or_else(|error| panic!("{}: {error}: `make image` (ARCH=aarch64)", built.display()));
    File::options().write(true).open(&path).unwrap().set_len(1 << 30).unwrap();
    path
}

/// Returns start and length of a partition in bytes.
fn partition(disk: &Path, label: &str) -> Option<(u64, u64)> {
    let output = Command::new("sfdisk").arg("--json").arg(disk).output().unwrap();
    let table: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let part =
        table["partitiontable"]["partitions"].as_array()?.iter().find(|part| part["name"] == label)?.clone();
    Some((part["start"].as_u64()? * 512, part["size"].as_u64()? * 512))
}

#[test]
fn the_minimal_image_boots_to_the_guest_program() {
    let folder = Folder::new("minimal");
    let machine = Machine::new(512).minimal_image(&images().join("minimal"), "").unwrap();
    let mut machine = machine.start(&folder.0).unwrap();
    machine.line_blocking(LOOKS, *PATIENCE).unwrap();
    machine.line_blocking("it is not for production", *PATIENCE).unwrap();
    let console = machine.console();
    assert!(console.contains("pid=1\r\n") || console.contains("pid=1\n"), "{console}");
}

#[test]
fn the_minimal_image_locks_the_kernel_down_when_it_has_its_drivers() {
    let folder = Folder::new("lockdown");
    let image = images().join("minimal");
    for (word, by) in [("", "securityfs"), ("lockdown=integrity", "command line")] {
        // With signatures, the kernel loads the drivers that the guest needs to reach the node only from /usr. That
        // costs time and nothing else.
        let machine = Machine::new(512).user_network("");
        let machine = machine.minimal_image(&image, &format!("{word} loglevel=6")).unwrap();
        let mut machine = machine.start(&folder.0).unwrap();
        machine.line_blocking(&format!("Kernel is locked down from {by}"), *PATIENCE).unwrap();
        machine.line_blocking("DHCP lease", *PATIENCE).unwrap();
        let console = machine.console();
        assert_eq!(console.matches("Kernel is locked down").count(), 1, "{console}");
        assert!(!console.contains("ERROR"), "{console}");
    }
}

#[test]
fn the_disk_boots_by_uefi_with_systemd_and_uses_its_whole_size() {
    boots_the_disk(&Folder::new("disk"), &images(), Machine::new(1024));
}

/// Boots the disk of `make image ARCH=aarch64`, in long runs. The guest's tests boot its minimal image.
#[test]
fn the_disk_for_aarch64_boots_by_uefi_with_systemd() {
    if !long() {
        println!("not run without PEERPOD_TEST_LONG");
        return;
    }
    boots_the_disk(&Folder::new("aarch64"), &images().join("aarch64"), Machine::aarch64(1024));
}

/// Boots the disk image on a machine without a disk.
fn boots_the_disk(folder: &Folder, images: &Path, machine: Machine) {
    let path = disk(folder, images);
    let machine = machine.firmware().disk(&path, "raw", false).user_network("");
    let mut machine = machine.start(&folder.0).unwrap();
    let line = machine.line_blocking(LOOKS, *PATIENCE).unwrap();
    assert!(line.contains("peerpod-guest["), "not by systemd: {line}");
    machine.line_blocking("it is not for production", *PATIENCE).unwrap();
    let console = machine.console();
    assert!(!console.contains("FAILED"), "{console}");
    drop(machine);
    let (start, size) = partition(&path, "peerpod-scratch").expect("no scratch partition");
    assert!(size > 800 << 20, "{size} bytes");
    // Magic number of ext4.
    let mut magic = [0; 2];
    File::open(&path).unwrap().read_exact_at(&mut magic, start + 1024 + 56).unwrap();
    assert_eq!(magic, [0x53, 0xef]);
}

#[test]
fn a_root_with_one_wrong_bit_is_not_booted() {
    // In the file system's header, and in the block at the root of the hash tree.
    for (label, at) in [("peerpod-root", 1024 + 40), ("peerpod-verity", 4096 + 5)] {
        let folder = Folder::new(label);
        let path = disk(&folder, &images());
        let (start, _) = partition(&path, label).unwrap();
        let file = File::options().read(true).write(true).open(&path).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, start + at).unwrap();
        file.write_all_at(&[byte[0] ^ 1], start + at).unwrap();
        let mut machine = Machine::new(1024).firmware().disk(&path, "raw", true).start(&folder.0).unwrap();
        machine.line_blocking("dm-verity device corrupted", *PATIENCE).unwrap();
        machine.off_blocking(*PATIENCE).unwrap();
        let console = machine.console();
        assert!(!console.contains("peerpod-guest"), "{console}");
    }
}
