//! Builds the disk image for clouds. UEFI starts one program (kernel, initramfs and command line). Its initramfs
//! verifies a read-only erofs root and starts systemd from it, which runs peerpod-guest.service.
//!
//! erofs is read-only by design and small, and mkfs.erofs gives every file to root without root rights. The initramfs
//! (podvm/initrd) replaces systemd's: it is one static program of a few hundred KiB with one task.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};

use crate::content::{self, SuppliedParts};
use crate::inputs::Inputs;
use crate::lock::words;
use crate::memory::GuestMemory;
use crate::minimal::compress;
use crate::report::{Report, sha256};
use crate::tree::Tree;
use crate::{audit, cmdline, cpio, formats, gpt, modules, program, run, uki, verity};

const FILES: &str = include_str!("../data/disk.files");
const INITRD_MODULES: &str = include_str!("../data/initrd.txt");
const UNIT: &str = include_str!("../../guest/peerpod-guest.service");
/// Mount points and writable folders.
const FOLDERS: [&str; 9] = ["dev", "media", "mnt", "proc", "root", "run", "sys", "tmp", "var"];
/// Hex digits of the hash that identifies a disk; the UUIDs of its partitions derive from it. Without dm-verity it is
/// the hash of the root's file system.
const IDENTITY_LEN: usize = 64;

/// Options of a disk besides those of every image.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// peerpod-initrd, a static build
    #[arg(long, value_name = "PATH", default_value_os_t = content::beside("peerpod-initrd"))]
    initrd: PathBuf,
    /// Configuration files of the image's root
    #[arg(long, value_name = "DIR", default_value_os_t = content::beside("podvm/vm-image/rootfs"))]
    rootfs: PathBuf,
    /// Leave the root unverified: no dm-verity
    #[arg(long)]
    no_verity: bool,
    /// Formats to write: raw, qcow2, vhd (fixed, for Azure), vmdk (stream-optimised)
    #[arg(long, value_delimiter = ',', default_value = "raw,qcow2,vhd,vmdk")]
    formats: Vec<formats::Format>,
}

pub(crate) fn build(
    inputs: &Inputs,
    parts: &SuppliedParts,
    options: &Options,
    out: &Path,
) -> anyhow::Result<()> {
    let release = modules::release(&inputs.packages)?;
    let mut report = Report::new("disk", &release, inputs);
    let work = inputs.work("disk")?;
    let root = root(inputs, parts, options, &release, &mut report)?;
    audit::check(&root, inputs.arch)?;
    let erofs = erofs(inputs, &root, &work)?;
    let verity = if options.no_verity { None } else { Some(verity::hashes(&erofs, &work)?) };

    report.boot.cmdline = cmdline::line(inputs.arch, &["disk"]);
    report.boot.cmdline_emulated = cmdline::line(inputs.arch, &["disk", "emulated"]);
    if let Some(verity) = &verity {
        for line in [&mut report.boot.cmdline, &mut report.boot.cmdline_emulated] {
            *line = format!("{line} roothash={}", verity.root_hash);
        }
        report.root_hash = Some(verity.root_hash.clone());
    }
    let initramfs = initramfs(inputs, options, &release)?;
    audit::check(&initramfs, inputs.arch)?;
    let initramfs = compress(&cpio::archive(&initramfs, inputs.lock.epoch))?;
    let program = uki::build(inputs, &release, &initramfs, &report.boot.cmdline, &work)?;

    let identity = verity.as_ref().map_or_else(|| sha256(&erofs), |verity| verity.root_hash.clone());
    ensure!(identity.len() == IDENTITY_LEN, "the root hash {identity} is no SHA-256 hash");
    let hashes = verity.as_ref().map(|verity| &*verity.tree);
    let raw =
        gpt::disk(&uki::partition(&program, inputs.arch)?, &erofs, hashes, &identity, inputs.arch, &work)?;
    fs::create_dir_all(out).with_context(|| format!("make {}", out.display()))?;
    formats::write(&raw, &options.formats, &identity, out, &mut report)?;
    let vmlinuz = inputs.file(&format!("boot/vmlinuz-{release}"))?;
    // systemd replaces the initramfs by the root, and the kernel frees it.
    report.guest_memory = Some(GuestMemory::of(vmlinuz, 0, &root, true)?);
    report.contents(&root);
    report.finish(out)
}

fn root(
    inputs: &Inputs,
    parts: &SuppliedParts,
    options: &Options,
    release: &str,
    report: &mut Report,
) -> anyhow::Result<Tree> {
    let mut tree = Tree::merged();
    for folder in FOLDERS {
        tree.directory(folder, 0o755);
    }
    tree.link("usr/sbin/init", "/usr/lib/systemd/systemd");
    content::certificates(&mut tree, &inputs.packages)?;
    for file in words(FILES, &[]) {
        tree.take(&inputs.packages, file)?;
    }
    tree.add_folder("", &options.rootfs).context("--rootfs")?;
    tree.file("etc/systemd/system/peerpod-guest.service", 0o644, UNIT.as_bytes());
    parts.add(&mut tree, "usr/local/bin/peerpod-guest", inputs, report)?;
    program::complete(&mut tree, &inputs.packages, inputs.arch)?;
    modules::add(&mut tree, inputs, release)?;
    Ok(tree)
}

/// Makes the root's file system: compressed, owned by root, all files with one time.
fn erofs(inputs: &Inputs, root: &Tree, work: &Path) -> anyhow::Result<Vec<u8>> {
    let (folder, image) = (work.join("root"), work.join("root.erofs"));
    fs::create_dir(&folder)?;
    root.write(&folder)?;
    let uuid = gpt::uuid(&sha256(b"peerpod root"));
    let (time, id) = (format!("-T{}", inputs.lock.epoch), format!("-U{uuid}"));
    run::output(
        run::tool("mkfs.erofs")
            .args(["-zlz4hc", "-C65536", "-x-1", "--all-root", "--quiet", &time, &id])
            .args([&image, &folder]),
    )?;
    let mut content = fs::read(&image)?;
    content.resize(content.len().next_multiple_of(verity::BLOCK), 0);
    Ok(content)
}

/// Makes the initramfs: one program, the disk drivers, and the order in which they load.
fn initramfs(inputs: &Inputs, options: &Options, release: &str) -> anyhow::Result<Tree> {
    let mut tree = Tree::default();
    for folder in ["dev", "proc", "sys", "sysroot"] {
        tree.directory(folder, 0o755);
    }
    content::add_static(&mut tree, "init", &options.initrd, inputs.arch)?;
    let wanted = words(INITRD_MODULES, &[inputs.arch.name()]);
    let list = modules::in_order(&mut tree, &inputs.packages, release, wanted)?;
    tree.file("etc/modules.list", 0o644, list.into_bytes());
    Ok(tree)
}
