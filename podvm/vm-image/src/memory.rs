//! Computes the memory that a VM's guest needs, for `image.json`; the size of a VM is this plus the pod's memory. The
//! figure derives from the image's own parts, so the same image always has the same one.
//! `tests/tests/machines/memory.rs` compares it with running machines.

use anyhow::Context;
use serde::Serialize;

use crate::tree::Tree;

/// MiB for slabs, stacks, page tables, the programs' own data, the page cache, and the kernel's free reserve.
const WORKING_MIB: u64 = 48;
/// The same for systemd and its services.
const SYSTEM_MIB: u64 = 64;
/// MiB for the unpacked images of a small pod's containers.
const IMAGES_MIB: u64 = 256;

/// `guest_memory` of `image.json`, in MiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct GuestMemory {
    /// Kernel, programs and their working memory.
    base_mib: u64,
    /// Share for container images, for a VM that has no disk for them and keeps them in memory.
    images_mib: u64,
}

impl GuestMemory {
    /// Returns the memory need of an image that keeps `kept` bytes of its initramfs in memory. Counts as programs the
    /// guest program, the agent and the supplied ones.
    pub(crate) fn of(
        kernel: &[u8],
        kept: usize,
        tree: &Tree,
        has_systemd: bool,
    ) -> anyhow::Result<GuestMemory> {
        let programs =
            tree.files().filter(|(path, ..)| *path == "init" || path.starts_with("usr/local/bin/"));
        let programs: u64 = programs.map(|(.., content)| content.len() as u64).sum();
        let bytes = kernel_size(kernel)? + kept as u64 + programs;
        let system = if has_systemd { SYSTEM_MIB } else { 0 };
        Ok(GuestMemory { base_mib: bytes.div_ceil(1 << 20) + WORKING_MIB + system, images_mib: IMAGES_MIB })
    }
}

/// Returns the bytes that a kernel needs to start, with its variables: `init_size` in the header of x86 (Linux' boot
/// protocol), or `image_size` in that of arm64 (Documentation/arm64/booting.rst).
fn kernel_size(kernel: &[u8]) -> anyhow::Result<u64> {
    const X86: (usize, &[u8], usize) = (0x202, b"HdrS", 0x260);
    const ARM64: (usize, &[u8], usize) = (0x38, b"ARMd", 16);
    let header = |(at, magic, size): (usize, &[u8], usize)| {
        let is_there = kernel.get(at..).is_some_and(|rest| rest.starts_with(magic));
        kernel.get(size..).filter(|_| is_there)?.first_chunk()
    };
    let bytes = header(X86).or_else(|| header(ARM64));
    let bytes = bytes.context("the kernel is neither a bzImage (HdrS) nor an arm64 Image (ARMd)")?;
    Ok(u64::from(u32::from_le_bytes(*bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_need_covers_kernel_archive_programs_and_work() {
        let mut kernel = vec![0; 0x300];
        kernel[0x202..0x206].copy_from_slice(b"HdrS");
        kernel[0x260..0x264].copy_from_slice(&(50_u32 << 20).to_le_bytes());
        let mut tree = Tree::default();
        tree.file("init", 0o755, vec![0; 5 << 20]);
        tree.file("usr/local/bin/agent", 0o755, vec![0; 2 << 20]);
        tree.file("usr/lib/modules/x.ko", 0o644, vec![0; 9 << 20]);
        let base = |kept, has_systemd| GuestMemory::of(&kernel, kept, &tree, has_systemd).unwrap().base_mib;
        assert_eq!(base(0, false), 50 + 5 + 2 + WORKING_MIB);
        assert_eq!(base((10 << 20) + 1, false), 50 + 11 + 5 + 2 + WORKING_MIB);
        assert_eq!(base(0, true), 50 + 5 + 2 + WORKING_MIB + SYSTEM_MIB);
    }

    #[test]
    fn the_header_of_an_arm64_kernel_has_its_size() {
        let mut kernel = vec![0; 64];
        kernel[0x38..0x3c].copy_from_slice(b"ARMd");
        kernel[16..24].copy_from_slice(&(28_u64 << 20).to_le_bytes());
        assert_eq!(kernel_size(&kernel).unwrap(), 28 << 20);
    }

    #[test]
    fn a_kernel_without_the_header_is_refused() {
        for kernel in [&b""[..], &[0; 0x300]] {
            assert!(GuestMemory::of(kernel, 0, &Tree::default(), false).is_err());
        }
    }
}
