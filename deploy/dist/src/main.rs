//! `peerpod-dist`: the last step of `make dist`. Puts built programs into the tree of a container image (`tree`) and writes
//! what they are made of (`bill`, CycloneDX). The same programs and sources give the same bytes.
//!
//! Ours because it is small: `cargo metadata` knows everything a bill of materials says, and the tools that wrap it
//! take longer to compile than the rest of this. May touch: its output folder; asks `cargo metadata` and `ldd`.

mod bill;
mod tree;

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Parser;

/// Puts programs into the tree of a container image, with the bill of what they are made of.
#[derive(Parser)]
#[command(version)]
struct Words {
    /// Folder of the built programs.
    #[arg(long)]
    from: PathBuf,
    /// Folder to make: `rootfs` and `sbom.cdx.json` in it. What is there of before is replaced.
    #[arg(long)]
    out: PathBuf,
    /// Program, and the package it is of.
    #[arg(long = "program", value_parser = pair, required = true)]
    programs: Vec<(String, String)>,
    /// The workspace.
    #[arg(long, default_value = ".")]
    workspace: PathBuf,
    /// Features that the programs were built with.
    #[arg(long, default_value = "")]
    features: String,
    /// The target that they were built for.
    #[arg(long)]
    target: Option<String>,
    /// Certificates of the authorities that clouds' certificates come from.
    #[arg(long, default_value = "/etc/ssl/certs/ca-certificates.crt")]
    authorities: PathBuf,
}

fn pair(text: &str) -> Result<(String, String), String> {
    let (program, package) = text.split_once('=').unwrap_or((text, text));
    Ok((program.to_owned(), package.to_owned()))
}

fn main() -> Result<()> {
    let words = Words::parse();
    let names: Vec<&str> = words.programs.iter().map(|(program, _)| program.as_str()).collect();
    let rootfs = words.out.join("rootfs");
    let sizes = tree::make(&words.from, &names, &words.authorities, &rootfs)?;
    let bill = bill::bill(&bill::Of {
        workspace: &words.workspace,
        programs: &words.programs,
        features: &words.features,
        target: words.target.as_deref(),
        tree: &rootfs,
    })?;
    let text = format!("{bill:#}\n");
    for path in [words.out.join("sbom.cdx.json"), rootfs.join("usr/share/peerpod/sbom.cdx.json")] {
        std::fs::create_dir_all(path.parent().context("no folder")?)?;
        tree::write(&path, text.as_bytes(), 0o644)?;
    }
    for (path, size) in &sizes {
        println!("{size:>12} {path}");
    }
    println!(
        "{:>12} in all, and a bill of {} parts",
        sizes.iter().map(|(_, size)| size).sum::<u64>(),
        bill::count(&bill)
    );
    Ok(())
}
