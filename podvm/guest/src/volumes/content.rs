//! Identifies the content of a disk. A disk counts as empty only when its first and its last MiB are all zeros. The
//! signatures of all file systems, partition tables, RAIDs and encryption lie there. Reads, never writes.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Bytes inspected at either end.
const END: u64 = 1 << 20;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// All zeros: the disk may get a file system.
    Empty,
    /// A file system, or other content with a known signature.
    Is(Signature),
    /// Content without a known signature, which belongs to another owner.
    Unknown,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Signature {
    /// Name as in mount(8); for content that cannot be mounted, its usual name.
    pub(super) name: &'static str,
    /// Whether it is a file system that its maker did not finish, and that was never mounted.
    pub(super) unfinished: bool,
}

/// Fixed bytes at a fixed offset.
const SIGNATURES: &[(usize, &[u8], &str)] = &[
    (0, b"XFSB", "xfs"),
    (0, b"LUKS\xba\xbe", "a LUKS container"),
    (0, b"hsqs", "squashfs"),
    (512, b"EFI PART", "a GPT partition table"),
    (512, b"LABELONE", "an LVM volume"),
    (3, b"NTFS    ", "ntfs"),
    (3, b"EXFAT   ", "exfat"),
    (1024, &[0xe2, 0xe1, 0xf5, 0xe0], "erofs"),
    (1024, &[0x10, 0x20, 0xf5, 0xf2], "f2fs"),
    (4086, b"SWAPSPACE2", "a swap area"),
    (32769, b"CD001", "iso9660"),
    (65600, b"_BHRfS_M", "btrfs"),
    (54, b"FAT1", "vfat"),
    (82, b"FAT32", "vfat"),
    (510, &[0x55, 0xaa], "a partition table or boot sector"),
];

pub(super) fn inspect(node: &Path, size: u64) -> io::Result<Content> {
    let file = File::open(node)?;
    let first = read(&file, 0, size.min(END))?;
    let last = read(&file, size.saturating_sub(END).max(first.len() as u64), size)?;
    Ok(of(&first, &last))
}

/// Returns the number of bytes that a file system takes of its disk; `None` for one other than ext2 to ext4 and XFS.
pub(super) fn filesystem_bytes(node: &Path) -> io::Result<Option<u64>> {
    let mut first = [0; 2048];
    File::open(node)?.read_exact_at(&mut first, 0)?;
    Ok(bytes_of(&first))
}

fn bytes_of(first: &[u8]) -> Option<u64> {
    if first.starts_with(b"XFSB") {
        let block = u32::from_be_bytes(*first.get(4..)?.first_chunk()?);
        let blocks = u64::from_be_bytes(*first.get(8..)?.first_chunk()?);
        return blocks.checked_mul(block.into());
    }
    let ext = first.get(1024..)?;
    if *ext.get(56..)?.first_chunk()? != [0x53, 0xef] {
        return None;
    }
    let word = |at: usize| ext.get(at..)?.first_chunk().map(|bytes| u32::from_le_bytes(*bytes));
    // INCOMPAT_64BIT: the upper half counts.
    let upper = if word(96)? & 0x80 == 0 { 0 } else { word(0x150)? };
    let blocks = u64::from(upper) << 32 | u64::from(word(4)?);
    blocks.checked_mul(1024_u64.checked_shl(word(24)?)?)
}

fn read(file: &File, from: u64, to: u64) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(to.saturating_sub(from)).unwrap_or(0).min(END as usize)];
    file.read_exact_at(&mut bytes, from)?;
    Ok(bytes)
}

fn of(first: &[u8], last: &[u8]) -> Content {
    if let Some(ext) = ext(first) {
        return Content::Is(ext);
    }
    let is_there = |(at, bytes, _): &&(usize, &[u8], &str)| first.get(*at..at + bytes.len()) == Some(*bytes);
    if let Some((_, _, name)) = SIGNATURES.iter().find(is_there) {
        let unfinished = *name == "xfs" && first.get(XFS_IN_PROGRESS).is_some_and(|byte| *byte != 0);
        return Content::Is(Signature { name, unfinished });
    }
    if first.iter().chain(last).all(|byte| *byte == 0) { Content::Empty } else { Content::Unknown }
}

/// Offset of `sb_inprogress` in XFS's superblock (`xfs_format.h`), which its maker sets first and clears last.
const XFS_IN_PROGRESS: usize = 126;

/// Identifies ext2 to ext4: the superblock begins at 1024. Its maker marks the file system as valid last.
fn ext(first: &[u8]) -> Option<Signature> {
    let block = first.get(1024..2048)?;
    let half = |at: usize| u16::from_le_bytes([block[at], block[at + 1]]);
    let word = |at: usize| u32::from(half(at)) | u32::from(half(at + 2)) << 16;
    if half(56) != 0xef53 {
        return None;
    }
    const HAS_JOURNAL: u32 = 4;
    // Features that ext3 does not have: extents, 64 bit, flexible block groups ….
    const ONLY_EXT4: u32 = 0x40 | 0x80 | 0x200;
    let name = match (word(96) & ONLY_EXT4 != 0, word(92) & HAS_JOURNAL != 0) {
        (true, _) => "ext4",
        (false, true) => "ext3",
        (false, false) => "ext2",
    };
    let (valid, mounted) = (half(58) & 1 != 0, word(44) != 0 || half(52) != 0);
    Some(Signature { name, unfinished: !valid && !mounted })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(at: usize, bytes: &[u8]) -> Vec<u8> {
        let mut disk = vec![0; 1 << 20];
        disk[at..at + bytes.len()].copy_from_slice(bytes);
        disk
    }

    #[test]
    fn only_zeros_count_as_empty() {
        let zeros = vec![0; 1 << 20];
        assert_eq!(of(&zeros, &zeros), Content::Empty);
        for at in [0, 511, 70_000, (1 << 20) - 1] {
            assert_eq!(of(&with(at, &[1]), &zeros), Content::Unknown, "{at}");
            assert_eq!(of(&zeros, &with(at, &[1])), Content::Unknown, "{at} of the end");
        }
        assert_eq!(of(&[0; 100], &[]), Content::Empty);
    }

    #[test]
    fn signatures_have_their_names() {
        for (at, bytes, name) in SIGNATURES {
            let found = of(&with(*at, bytes), &[]);
            assert_eq!(found, Content::Is(Signature { name, unfinished: false }));
        }
        let mut half_made = with(0, b"XFSB");
        half_made[XFS_IN_PROGRESS] = 1;
        assert_eq!(of(&half_made, &[]), Content::Is(Signature { name: "xfs", unfinished: true }));
    }

    #[test]
    fn a_file_system_of_mke2fs_is_recognised() {
        let file = std::env::temp_dir().join(format!("peerpod-content-{}", std::process::id()));
        for (kind, name) in [("ext4", "ext4"), ("ext3", "ext3"), ("ext2", "ext2")] {
            File::create(&file).unwrap().set_len(16 << 20).unwrap();
            assert_eq!(inspect(&file, 16 << 20).unwrap(), Content::Empty);
            let made =
                std::process::Command::new("mke2fs").args(["-q", "-F", "-t", kind]).arg(&file).status();
            assert!(made.unwrap().success());
            assert_eq!(inspect(&file, 16 << 20).unwrap(), Content::Is(Signature { name, unfinished: false }));
        }
        std::fs::remove_file(file).unwrap();
    }
}
