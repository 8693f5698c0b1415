//! Writes one disk in the formats of hypervisors and clouds. The same disk gives the same bytes: identifiers and times
//! that a converter would invent are set to fixed values.

use std::fs;
use std::path::Path;

use anyhow::{Context, ensure};

use crate::report::Report;
use crate::{gpt, run};

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Format {
    /// Unconverted (AWS, GCP)
    Raw,
    /// QEMU's format, compressed (libvirt, OpenStack)
    Qcow2,
    /// Fixed size, a whole number of MiB (Azure)
    Vhd,
    /// Stream-optimised (vSphere)
    Vmdk,
}

const MIB: u64 = 1 << 20;

pub(crate) fn write(
    raw: &Path,
    formats: &[Format],
    identity: &str,
    out: &Path,
    report: &mut Report,
) -> anyhow::Result<()> {
    for format in formats {
        let name = format!("peerpod.{format:?}").to_lowercase();
        let to = out.join(&name);
        let content = match format {
            Format::Raw | Format::Vhd => {
                let mut content = fs::read(raw).with_context(|| format!("read {}", raw.display()))?;
                if let Format::Vhd = format {
                    ensure!((content.len() as u64).is_multiple_of(MIB), "the disk is not of whole MiB");
                    content.extend_from_slice(&vhd_footer(content.len() as u64, identity));
                }
                gpt::write_sparse(&to, &content)?;
                content
            }
            Format::Qcow2 => {
                convert(raw, &to, &["-O", "qcow2", "-c", "-o", "compat=1.1,lazy_refcounts=off"])?;
                fs::read(&to)?
            }
            Format::Vmdk => {
                convert(raw, &to, &["-O", "vmdk", "-o", "subformat=streamOptimized"])?;
                let content = with_content_id(fs::read(&to)?, identity)?;
                fs::write(&to, &content)?;
                content
            }
        };
        report.note(&name, &content);
    }
    Ok(())
}

/// Converts by qemu-img, with one request at a time: with more, the order of the clusters is not deterministic.
fn convert(raw: &Path, to: &Path, options: &[&str]) -> anyhow::Result<()> {
    let mut command = run::tool("qemu-img");
    run::output(command.args(["convert", "-f", "raw", "-m", "1"]).args(options).args([raw, to])).map(drop)
}

/// Returns the footer that makes a raw disk a fixed VHD (Virtual Hard Disk Image Format Specification 1.0).
fn vhd_footer(size: u64, identity: &str) -> [u8; 512] {
    let mut footer = [0; 512];
    let mut put = |at: usize, bytes: &[u8]| footer[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, b"conectix");
    put(8, &2u32.to_be_bytes()); // features: the reserved bit
    put(12, &0x0001_0000u32.to_be_bytes());
    put(16, &u64::MAX.to_be_bytes()); // no dynamic header
    // Offset 24: the creation time stays zero.
    put(28, b"qem2"); // creator for which readers take the size, not the geometry
    put(32, &0x0001_0000u32.to_be_bytes());
    put(36, b"Wi2k");
    put(40, &size.to_be_bytes());
    put(48, &size.to_be_bytes());
    put(56, &geometry(size / 512));
    put(60, &2u32.to_be_bytes()); // fixed
    let id: Vec<u8> =
        (0..16).filter_map(|at| u8::from_str_radix(identity.get(at * 2..at * 2 + 2)?, 16).ok()).collect();
    put(68, &id);
    let sum: u32 = footer.iter().map(|byte| u32::from(*byte)).sum();
    footer[64..68].copy_from_slice(&(!sum).to_be_bytes());
    footer
}

/// Returns cylinders, heads and sectors as the specification's appendix computes them.
fn geometry(sectors: u64) -> [u8; 4] {
    let sectors = sectors.min(65535 * 16 * 255);
    let (per_track, heads, tracks) = if sectors >= 65535 * 16 * 63 {
        (255, 16, sectors / 255)
    } else {
        let tracks = sectors / 17;
        let heads = tracks.div_ceil(1024).max(4);
        if tracks < heads * 1024 && heads <= 16 {
            (17, heads, tracks)
        } else if sectors / 31 < 16 * 1024 {
            (31, 16, sectors / 31)
        } else {
            (63, 16, sectors / 63)
        }
    };
    let cylinders = (tracks / heads) as u16;
    let [high, low] = cylinders.to_be_bytes();
    [high, low, heads as u8, per_track as u8]
}

/// Replaces the identifier that qemu-img drew in the descriptor's text. qemu-img writes it without leading zeros, so
/// the length of the text differs between builds. Zeros follow the text in its sectors; they absorb the difference.
fn with_content_id(mut vmdk: Vec<u8>, identity: &str) -> anyhow::Result<Vec<u8>> {
    const KEY: &[u8] = b"\nCID=";
    const DIGITS: usize = 8;
    let id = identity.get(..DIGITS).context("the disk's identity is too short for a VMDK's CID")?;
    let head = &vmdk[..vmdk.len().min(MIB as usize)];
    let at =
        head.windows(KEY.len()).position(|window| window == KEY).context("the VMDK has no CID")? + KEY.len();
    let find = |wanted: u8| head[at..].iter().position(|byte| *byte == wanted).map(|found| at + found);
    let end = find(b'\n').filter(|end| *end <= at + DIGITS).context("the VMDK's CID does not end")?;
    let missing = at + DIGITS - end;
    if missing > 0 {
        let padding = find(0).context("the VMDK's descriptor does not end")?;
        let spare = head.get(padding..padding + missing).context("the VMDK's descriptor fills its place")?;
        ensure!(spare.iter().all(|byte| *byte == 0), "the VMDK's descriptor has no end");
        vmdk.copy_within(end..padding, end + missing);
    }
    vmdk[at..at + DIGITS].copy_from_slice(id.as_bytes());
    Ok(vmdk)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identifier_of_any_length_gives_the_same_descriptor() {
        let vmdk = |id: &str, zeros: usize| {
            format!("KDMV\nversion=1\nCID={id}\nparentCID=ffffffff\n{}clusters", "\0".repeat(zeros))
                .into_bytes()
        };
        let told = vmdk("0a1b2c3d", 20);
        for (id, zeros) in [("89abcdef", 20), ("9abcdef", 21), ("1", 27)] {
            assert_eq!(with_content_id(vmdk(id, zeros), "0a1b2c3d99").unwrap(), told, "{id}");
        }
        for (id, zeros) in [("9abcdef", 0), ("123456789", 20)] {
            assert!(with_content_id(vmdk(id, zeros), "0a1b2c3d99").is_err(), "{id}");
        }
        assert!(with_content_id(b"no disk".to_vec(), "0a1b2c3d99").is_err());
    }

    #[test]
    fn qemu_reads_our_vhd() {
        let path = std::env::temp_dir().join(format!("peerpod-vhd-{}", std::process::id()));
        let size = 136 * MIB;
        let mut disk = vec![0; size as usize];
        disk[4711] = 1;
        let raw = path.with_extension("raw");
        fs::write(&raw, &disk).unwrap();
        disk.extend_from_slice(&vhd_footer(size, &"ab".repeat(32)));
        fs::write(&path, disk).unwrap();
        let (vhd, raw) = (path.to_str().unwrap(), raw.to_str().unwrap());
        let about = run::output(run::tool("qemu-img").args(["info", "-f", "vpc", vhd])).unwrap();
        let about = String::from_utf8(about).unwrap();
        assert!(about.contains(&format!("({size} bytes)")), "{about}");
        run::output(run::tool("qemu-img").args(["compare", "-f", "vpc", "-F", "raw", vhd, raw])).unwrap();
        fs::remove_file(vhd).unwrap();
        fs::remove_file(raw).unwrap();
    }

    #[test]
    fn geometries_are_the_specifications() {
        assert_eq!(geometry(64 * 2048), [3, 195, 8, 17]); // 963 × 8 × 17
        assert_eq!(geometry(136 * 2048), [2, 49, 16, 31]); // 561 × 16 × 31
        assert_eq!(geometry(30 * 1024 * 2048)[2..], [16, 63]);
    }

    #[test]
    fn a_vmdks_identifier_is_set() {
        let vmdk = b"KDMV...\n# Disk DescriptorFile\nversion=1\nCID=1234abcd\nparentCID=ffffffff\n".to_vec();
        let set = String::from_utf8(with_content_id(vmdk, &"5e".repeat(32)).unwrap()).unwrap();
        assert!(set.contains("\nCID=5e5e5e5e\nparentCID=ffffffff\n"), "{set}");
        with_content_id(b"nothing".to_vec(), "5e").unwrap_err();
    }
}
