//! Builds the minimal image: the distribution's kernel and an initramfs in which peerpod-guest is init. Nothing else
//! runs.
//!
//! Every file that the kernel unpacks at boot costs time and memory, whether it is used or not. So the archive holds
//! the guest program, the configuration, and everything below /usr (modules, agent, tools) as one squashfs file. The
//! guest program mounts it; files that are not read stay compressed.

use std::fs;
use std::path::Path;

use anyhow::Context;

use crate::content::{self, SuppliedParts};
use crate::inputs::Inputs;
use crate::lock::words;
use crate::memory::GuestMemory;
use crate::report::Report;
use crate::tree::Tree;
use crate::{audit, cmdline, cpio, modules, program, run};

const FILES: &str = include_str!("../data/minimal.files");
const KERNEL: &str = "vmlinuz";
const INITRD: &str = "initrd.img";
/// Squashfs of everything below /usr, where the guest program mounts it.
const USR: &str = "usr.squashfs";
/// Modules of /usr that the archive itself has, besides depmod's tables: the drivers with which a QEMU machine dials
/// the node before the mount. Other machines mount first. These modules have no signature here (`peerpod.lockdown`).
const FIRST_MODULES: [&str; 4] = ["virtio_pci", "virtio_net", "virtio_blk", "qemu_fw_cfg"];
/// Modules that the mount needs.
const MOUNT_MODULES: [&str; 2] = ["loop", "squashfs"];
/// Mount points and writable folders.
const FOLDERS: [&str; 7] = ["dev", "etc", "proc", "root", "run", "sys", "var/lib/peerpod"];

pub(crate) fn build(inputs: &Inputs, parts: &SuppliedParts, out: &Path) -> anyhow::Result<()> {
    let release = modules::release(&inputs.packages)?;
    let mut report = Report::new("minimal", &release, inputs);
    let mut tree = Tree::merged();
    for folder in FOLDERS {
        tree.directory(folder, 0o755);
    }
    tree.directory("tmp", 0o1777);
    content::accounts(&mut tree);
    content::certificates(&mut tree, &inputs.packages)?;
    for file in words(FILES, &[]) {
        tree.take(&inputs.packages, file)?;
    }
    parts.add(&mut tree, "init", inputs, &mut report)?;
    tree.link("usr/local/bin/peerpod-guest", "/init");
    program::complete(&mut tree, &inputs.packages, inputs.arch)?;
    modules::add(&mut tree, inputs, &release)?;
    let tables = format!("usr/lib/modules/{release}/modules.");
    tree.retain(|path| path.strip_prefix(&tables).is_none_or(|table| modules::TEXT_TABLES.contains(&table)));
    audit::check(&tree, inputs.arch)?;

    fs::create_dir_all(out).with_context(|| format!("make {}", out.display()))?;
    let vmlinuz = inputs.file(&format!("boot/vmlinuz-{release}"))?;
    report.write(out, KERNEL, vmlinuz)?;
    let initramfs = initramfs(inputs, &tree, &release)?;
    report.write(out, INITRD, &initramfs)?;
    // The archive is not compressed: its unpacked content stays in memory and is as large.
    report.guest_memory = Some(GuestMemory::of(vmlinuz, initramfs.len(), &tree, false)?);
    report.boot.kernel = Some(KERNEL.to_owned());
    report.boot.initrd = Some(INITRD.to_owned());
    report.boot.cmdline = cmdline::line(inputs.arch, &["minimal"]);
    report.boot.cmdline_emulated = cmdline::line(inputs.arch, &["minimal", "emulated"]);
    report.contents(&tree);
    report.finish(out)
}

/// Makes the archive, uncompressed: most of it is a program that is read at once, and a compressed file.
fn initramfs(inputs: &Inputs, tree: &Tree, release: &str) -> anyhow::Result<Vec<u8>> {
    let mut early = Tree::merged();
    modules::in_order(&mut early, &inputs.packages, release, FIRST_MODULES)?;
    modules::unsign(&mut early)?;
    modules::in_order(&mut early, &inputs.packages, release, MOUNT_MODULES)?;
    let tables = format!("usr/lib/modules/{release}/modules.");
    for (path, node) in tree.iter().filter(|(path, _)| !path.starts_with("usr/") || path.starts_with(&tables))
    {
        early.insert(path, node.clone());
    }
    early.file(USR, 0o600, squashfs(inputs, tree)?);
    Ok(cpio::archive(&early, inputs.lock.epoch))
}

/// Makes the squashfs of everything below /usr. Root owns every file, all have one time, and one thread packs them in
/// order, so the result is reproducible.
fn squashfs(inputs: &Inputs, tree: &Tree) -> anyhow::Result<Vec<u8>> {
    let work = inputs.work("usr")?;
    let (folder, image) = (work.join("root"), work.join(USR));
    fs::create_dir(&folder)?;
    tree.write(&folder)?;
    let time = inputs.lock.epoch.to_string();
    let options = "-comp zstd -Xcompression-level 19 -b 131072 -noappend -all-root -no-xattrs -no-exports -processors 1 \
                   -no-progress -quiet";
    run::output(
        run::tool("mksquashfs").args([&folder.join("usr"), &image]).args(options.split(' ')).args([
            "-mkfs-time",
            &time,
            "-all-time",
            &time,
        ]),
    )?;
    Ok(fs::read(&image)?)
}

/// Compresses with zstd on one thread, because the bytes depend on the number of threads. The kernel needs no checksum.
pub(crate) fn compress(content: &[u8]) -> anyhow::Result<Vec<u8>> {
    let mut command = run::tool("zstd");
    run::with_input(command.args(["-19", "--single-thread", "--no-check", "-q", "-c", "-"]), content)
}
