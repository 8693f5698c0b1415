//! Builds the unified kernel image and its partition: kernel, initramfs and command line as sections of systemd's stub,
//! in one program that UEFI starts.

use std::fs;
use std::io::{Cursor, Write};
use std::path::Path;

use anyhow::{Context, ensure};

use crate::arch::Arch;
use crate::inputs::Inputs;
use crate::run;

const RELEASE: &str = "ID=peerpod\nPRETTY_NAME=\"Peerpod VM\"\n";
/// Alignment of sections.
const PAGE: u64 = 4096;
const MIB: usize = 1 << 20;
/// Fewest bytes of a FAT32 partition, by its minimum number of clusters. FAT32 is the one kind that every firmware must
/// read.
const SMALLEST: usize = 34 * MIB;

pub(crate) fn build(
    inputs: &Inputs,
    release: &str,
    initramfs: &[u8],
    cmdline: &str,
    work: &Path,
) -> anyhow::Result<Vec<u8>> {
    let (stub, out) = (work.join("stub.efi"), work.join("uki.efi"));
    let stub_path = format!("usr/lib/systemd/boot/efi/linux{}.efi.stub", inputs.arch.facts().uefi);
    let stub_content = inputs.file(&stub_path)?;
    fs::write(&stub, stub_content)?;
    let kernel = inputs.file(&format!("boot/vmlinuz-{release}"))?;
    // The kernel is last: the x86 kernel unpacks itself in place and would overwrite sections behind it.
    let sections: [(&str, &[u8]); 5] = [
        (".osrel", RELEASE.as_bytes()),
        (".uname", release.as_bytes()),
        (".cmdline", cmdline.as_bytes()),
        (".initrd", initramfs),
        (".linux", kernel),
    ];
    // objcopy of one architecture knows no UEFI programs of another one.
    let mut command = run::tool(&format!("{}-objcopy", inputs.arch.gnu()));
    let mut at = end(stub_content)?;
    for (name, content) in sections {
        let file = work.join(format!("section{name}"));
        fs::write(&file, content)?;
        at = at.next_multiple_of(PAGE);
        command.arg("--add-section").arg(format!("{name}={}", file.display()));
        command.arg("--change-section-vma").arg(format!("{name}={at:#x}"));
        at += content.len() as u64;
    }
    run::output(command.arg(&stub).arg(&out))?;
    let mut program = fs::read(&out)?;
    let header = header(&program)?;
    // objcopy writes the time, and a checksum over it that firmware does not check.
    program[header + 8..header + 12].fill(0);
    program[header + 88..header + 92].fill(0);
    Ok(program)
}

/// Returns the offset of a UEFI program's header, and ensures that the header reaches to its checksum.
fn header(program: &[u8]) -> anyhow::Result<usize> {
    let at = usize::try_from(number(program, 0x3c, 4)?)?;
    ensure!(
        program.get(at..at + 92).is_some_and(|header| header.starts_with(b"PE\0\0")),
        "not a program of UEFI"
    );
    Ok(at)
}

fn number(program: &[u8], at: usize, len: usize) -> anyhow::Result<u64> {
    let bytes = program.get(at..at + len).context("the program is cut off")?;
    Ok(bytes.iter().rev().fold(0, |all, byte| all << 8 | u64::from(*byte)))
}

/// Returns the address in memory at which the stub's last section ends.
fn end(stub: &[u8]) -> anyhow::Result<u64> {
    let header = header(stub).context("systemd's stub")?;
    let (sections, optional) = (number(stub, header + 6, 2)?, number(stub, header + 20, 2)?);
    let table = header + 24 + usize::try_from(optional)?;
    let ends = (0..usize::try_from(sections)?).map(|section| {
        let entry = table + 40 * section;
        Ok(number(stub, entry + 8, 4)? + number(stub, entry + 12, 4)?)
    });
    ends.collect::<anyhow::Result<Vec<u64>>>()?.into_iter().max().context("the stub has no sections")
}

/// Returns the path that UEFI starts on a disk without a boot entry.
fn path(arch: Arch) -> [String; 3] {
    let name = format!("BOOT{}.EFI", arch.facts().uefi.to_uppercase());
    ["EFI".to_owned(), "BOOT".to_owned(), name]
}

/// Makes the EFI system partition.
pub(crate) fn partition(program: &[u8], arch: Arch) -> anyhow::Result<Vec<u8>> {
    let size = (program.len() + program.len() / 16 + MIB).max(SMALLEST).next_multiple_of(MIB);
    let mut disk = Cursor::new(vec![0; size]);
    let options = fatfs::FormatVolumeOptions::new()
        .fat_type(fatfs::FatType::Fat32)
        .bytes_per_cluster(512)
        .volume_id(0x7065_6572)
        .volume_label(*b"PEERPOD EFI");
    fatfs::format_volume(&mut disk, options).context("make the EFI system partition")?;
    {
        // Without its feature chrono, the crate gives every file the time at which FAT begins.
        let system = fatfs::FileSystem::new(&mut disk, fatfs::FsOptions::new())?;
        let mut folder = system.root_dir();
        let [folders @ .., name] = path(arch);
        for name in folders {
            folder = folder.create_dir(&name)?;
        }
        folder.create_file(&name)?.write_all(program).context("write the EFI system partition")?;
    }
    Ok(disk.into_inner())
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn the_partition_has_the_program_and_is_the_same_each_time() {
        let program: Vec<u8> = (0..100_000u32).flat_map(u32::to_le_bytes).collect();
        for (arch, path) in [(Arch::X86_64, "EFI/BOOT/BOOTX64.EFI"), (Arch::Aarch64, "EFI/BOOT/BOOTAA64.EFI")]
        {
            let first = partition(&program, arch).unwrap();
            assert!(first == partition(&program, arch).unwrap());
            let system = fatfs::FileSystem::new(Cursor::new(first), fatfs::FsOptions::new()).unwrap();
            assert_eq!(system.fat_type(), fatfs::FatType::Fat32);
            let mut read = Vec::new();
            system.root_dir().open_file(path).unwrap().read_to_end(&mut read).unwrap();
            assert!(read == program);
        }
    }

    #[test]
    fn an_invalid_stub_is_refused() {
        for wrong in [vec![], vec![0; 100], vec![0xff; 100]] {
            end(&wrong).unwrap_err();
        }
    }
}
