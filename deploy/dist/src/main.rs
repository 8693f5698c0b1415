//! `peerpod-dist` is the last step of `make dist`. It puts built programs into the tree of a container image (`tree`)
//! and writes their bill of materials (`bill`, CycloneDX). The same programs and sources give the same bytes.
//!
//! This program replaces the usual tools because it is small. `cargo metadata` has all data of a bill of materials. The
//! tools that wrap it take longer to compile than the rest of this. May touch: its output folder; calls
//! `cargo metadata` and `ldd`.

mod bill;
mod tree;

use std::env::consts::ARCH;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Parser;

/// Puts programs into the tree of a container image, with their bill of materials.
#[derive(Parser)]
#[command(version)]
struct Words {
    /// Folder of the built programs.
    #[arg(long)]
    from: PathBuf,
    /// Folder to make, with `rootfs` and `sbom.cdx.json` in it; earlier ones are replaced.
    #[arg(long)]
    out: PathBuf,
    /// Program and its package, as PROGRAM=PACKAGE; without PACKAGE the names are equal.
    #[arg(long = "program", value_parser = pair, required = true)]
    programs: Vec<(String, String)>,
    /// Folder of the workspace.
    #[arg(long, default_value = ".")]
    workspace: PathBuf,
    /// Features that the programs were built with.
    #[arg(long, default_value = "")]
    features: String,
    /// Target that the programs were built for; the default is this machine. The bill has no crates of other systems.
    #[arg(long, default_value_t = format!("{ARCH}-unknown-linux-gnu"))]
    target: String,
    /// File of CA certificates for the clouds' services.
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
    let bill = bill::bill(&words, &rootfs)?;
    let text = format!("{bill:#}\n");
    for path in [words.out.join("sbom.cdx.json"), rootfs.join("usr/share/peerpod/sbom.cdx.json")] {
        std::fs::create_dir_all(path.parent().context("no folder")?)?;
        tree::write(&path, text.as_bytes(), 0o644)?;
    }
    for (path, size) in &sizes {
        println!("{size:>12} {path}");
    }
    let all: u64 = sizes.iter().map(|(_, size)| size).sum();
    println!("{all:>12} in all, and a bill of {} parts", bill["components"].as_array().map_or(0, Vec::len));
    Ok(())
}
