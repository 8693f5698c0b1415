//! The minimal image: the distribution's kernel and an initramfs in which peerpod-guest is init. Nothing else runs.

use std::{fs, path::Path};

use anyhow::Context;

use crate::{
    audit, cmdline,
    content::{self, Parts},
    cpio,
    inputs::Inputs,
    lock::words,
    modules, program,
    report::Report,
    run,
    tree::Tree,
};

const FILES: &str = include_str!("../data/minimal.files");
const KERNEL: &str = "vmlinuz";
const INITRD: &str = "initrd.img";
/// Mount points and places that are written to.
const FOLDERS: [&str; 7] = ["dev", "etc", "proc", "root", "run", "sys", "var/lib/peerpod"];

/// Builds it in the folder `out`.
///
/// # Errors
/// When an input is missing or wrong, a tool fails, or the audit finds something.
pub(crate) fn build(inputs: &Inputs, parts: &Parts, out: &Path) -> anyhow::Result<()> {
    let release = modules::release(&inputs.packages)?;
    let mut report = Report::new("minimal", &release, &inputs.lock.packages);
    let mut tree = Tree::merged();
    for folder in FOLDERS {
        tree.directory(folder, 0o755);
    }
    tree.directory("tmp", 0o1777);
    content::accounts(&mut tree);
    content::certificates(&mut tree, &inputs.packages)?;
    for file in words(FILES) {
        tree.take(&inputs.packages, file)?;
    }
    parts.add(&mut tree, "init", &inputs.packages, &mut report)?;
    tree.link("usr/local/bin/peerpod-guest", "/init");
    program::complete(&mut tree, &inputs.packages)?;
    let work = inputs.work("modules")?;
    modules::add(&mut tree, &inputs.packages, &release, &work)?;
    fs::remove_dir_all(&work)?;
    let folder = format!("usr/lib/modules/{release}");
    let tables: Vec<String> = tree
        .iter()
        .filter_map(|(path, _)| path.strip_prefix(&format!("{folder}/")))
        .filter(|name| name.starts_with("modules.") && !modules::TEXT_TABLES.contains(name))
        .map(str::to_owned)
        .collect();
    for table in tables {
        tree.remove(&format!("{folder}/{table}"));
    }
    audit::check(&tree)?;

    fs::create_dir_all(out).with_context(|| format!("make {}", out.display()))?;
    let vmlinuz = inputs.file(&format!("boot/vmlinuz-{release}"))?;
    report.write(out, KERNEL, vmlinuz)?;
    report.write(out, INITRD, &compress(&cpio::archive(&tree, inputs.lock.epoch))?)?;
    report.kernel = Some(KERNEL.to_owned());
    report.initrd = Some(INITRD.to_owned());
    report.cmdline = cmdline::line(&[]);
    report.cmdline_emulated = cmdline::line(&["emulated"]);
    report.contents(&tree);
    report.finish(out)
}

/// zstd, on one thread: with more the bytes depend on their number. The kernel does without the checksum.
pub(crate) fn compress(content: &[u8]) -> anyhow::Result<Vec<u8>> {
    run::with_input(
        run::tool("zstd").args(["-19", "--single-thread", "--no-check", "-q", "-c", "-"]),
        content,
    )
}
