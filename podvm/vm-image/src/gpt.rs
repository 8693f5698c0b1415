//! Writes the disk: a partition table by sfdisk, and the partitions at their places. The root's partitions have the
//! types and UUIDs of the Discoverable Partitions Specification: their UUIDs are the halves of the root hash.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::arch::Arch;
use crate::report::sha256;
use crate::run;

const SECTOR: usize = 512;
const MIB: usize = 1 << 20;
const ESP: &str = "c12a7328-f81f-11d2-ba4b-00a0c93ec93b";

/// Returns the first 128 bits of a hexadecimal hash, unchanged, as a UUID.
pub(crate) fn uuid(hash: &str) -> String {
    format!("{}-{}-{}-{}-{}", &hash[..8], &hash[8..12], &hash[12..16], &hash[16..20], &hash[20..32])
}

/// Writes the disk to a file in `work` and returns its path.
pub(crate) fn disk(
    esp: &[u8],
    root: &[u8],
    hashes: Option<&[u8]>,
    identity: &str,
    arch: Arch,
    work: &Path,
) -> anyhow::Result<PathBuf> {
    let path = work.join("disk.raw");
    let what = || format!("write {}", path.display());
    let partitions = [
        Some(("peerpod-efi", ESP, uuid(&sha256(format!("{identity} efi").as_bytes())), esp)),
        Some(("peerpod-root", arch.facts().root, uuid(identity), root)),
        hashes.map(|hashes| ("peerpod-verity", arch.facts().verity, uuid(&identity[32..]), hashes)),
    ];
    let (id, first) = (uuid(&sha256(format!("{identity} disk").as_bytes())), MIB / SECTOR);
    let mut script = format!("label: gpt\nlabel-id: {id}\nunit: sectors\nfirst-lba: {first}\n");
    let file = File::create(&path).with_context(what)?;
    let mut at = MIB;
    for (name, kind, uuid, content) in partitions.into_iter().flatten() {
        let size = content.len().next_multiple_of(MIB);
        // Bit 60: the partition is to be mounted read-only.
        let attributes = if kind == ESP { "" } else { ", attrs=\"GUID:60\"" };
        let place = format!("start={}, size={}", at / SECTOR, size / SECTOR);
        script += &format!("{place}, type={kind}, uuid={uuid}, name=\"{name}\"{attributes}\n");
        write_at(&file, at, content).with_context(what)?;
        at += size;
    }
    // The table's backup is at the end. Some clouds take only disks of whole MiB.
    file.set_len((at + MIB) as u64).with_context(what)?;
    drop(file);
    run::with_input(
        run::tool("sfdisk").args(["--quiet", "--no-reread", "--no-tell-kernel"]).arg(&path),
        script.as_bytes(),
    )?;
    Ok(path)
}

/// Writes content, with holes in place of zeros.
fn write_at(file: &File, at: usize, content: &[u8]) -> std::io::Result<()> {
    for (number, piece) in content.chunks(64 << 10).enumerate() {
        if piece.iter().any(|byte| *byte != 0) {
            file.write_all_at(piece, (at + number * (64 << 10)) as u64)?;
        }
    }
    Ok(())
}

/// Writes a file, with holes in place of zeros.
pub(crate) fn write_sparse(to: &Path, content: &[u8]) -> anyhow::Result<()> {
    let file = File::create(to).and_then(|file| file.set_len(content.len() as u64).map(|()| file));
    file.and_then(|file| write_at(&file, 0, content)).with_context(|| format!("write {}", to.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_makes_two_uuids() {
        let hash = "00112233445566778899aabbccddeeff".repeat(2);
        assert_eq!(uuid(&hash), "00112233-4455-6677-8899-aabbccddeeff");
        assert_eq!(uuid(&hash[32..]), uuid(&hash));
    }

    #[test]
    fn the_partitions_have_the_types_of_the_architecture() {
        let work = std::env::temp_dir().join(format!("peerpod-gpt-{}", std::process::id()));
        std::fs::create_dir_all(&work).unwrap();
        for (arch, name) in [(Arch::X86_64, "x86-64"), (Arch::Aarch64, "ARM-64")] {
            let path = disk(&[1], &[2], Some(&[3]), &"ab".repeat(32), arch, &work).unwrap();
            let listed =
                run::output(run::tool("sfdisk").args(["--list", "--output", "Type"]).arg(&path)).unwrap();
            let listed = String::from_utf8(listed).unwrap();
            let types: Vec<&str> = listed.lines().skip_while(|line| *line != "Type").collect();
            let (root, verity) = (format!("Linux root ({name})"), format!("Linux root verity ({name})"));
            assert_eq!(types, ["Type", "EFI System", &root, &verity]);
        }
        std::fs::remove_dir_all(&work).unwrap();
    }
}
