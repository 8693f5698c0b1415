//! `peerpod-image` builds VM images from distribution packages, as any user and with the same bytes each time.
//! `make image` runs it. README.md in this folder lists the images' content and the reasons.
//!
//! It touches its output folder and its cache. It uses the network only for packages that the cache does not have.

mod apt;
mod arch;
mod audit;
mod cmdline;
mod content;
mod cpio;
mod deb;
mod disk;
mod formats;
mod gpt;
mod inputs;
mod kata;
mod lock;
mod memory;
mod minimal;
mod modules;
mod program;
mod report;
mod run;
mod tree;
mod uki;
mod verity;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Parser, Subcommand};

use crate::apt::PackageCache;
use crate::arch::Arch;
use crate::content::SuppliedParts;
use crate::inputs::Inputs;
use crate::lock::Lock;

const PACKAGES: &str = include_str!("../data/packages.txt");

/// Builds VM images from distribution packages.
#[derive(Parser)]
#[command(name = "peerpod-image")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// A kernel and an initramfs in which peerpod-guest is init
    Minimal {
        #[command(flatten)]
        source: Source,
        #[command(flatten)]
        parts: SuppliedParts,
        /// Folder for vmlinuz, initrd.img and image.json
        #[arg(long, value_name = "DIR", default_value = "target/image/minimal")]
        out: PathBuf,
    },
    /// A disk that boots by UEFI, with a verified root and systemd
    Disk {
        #[command(flatten)]
        source: Source,
        #[command(flatten)]
        parts: SuppliedParts,
        #[command(flatten)]
        options: disk::Options,
        /// Folder for the disk and image.json
        #[arg(long, value_name = "DIR", default_value = "target/image/disk")]
        out: PathBuf,
    },
    /// Writes the lock anew, with the newest versions of all packages
    Lock {
        #[command(flatten)]
        source: Source,
    },
}

#[derive(Args)]
struct Source {
    /// Processor architecture of the image, also on a machine of another one [default: that of this machine]
    #[arg(long, default_value = std::env::consts::ARCH, hide_default_value = true)]
    arch: Arch,
    /// File of the exact package versions [default: podvm/vm-image/packages.ARCH.lock]
    #[arg(long, value_name = "FILE")]
    lock: Option<PathBuf>,
    /// Folder of the package cache
    #[arg(long, value_name = "DIR", default_value = "target/image/cache")]
    cache: PathBuf,
    /// URL of Debian's archive [default: the sources of this machine's apt, if it is a Debian 12]
    #[arg(long, value_name = "URL", requires = "security_mirror")]
    mirror: Option<String>,
    /// URL of the archive of Debian's security updates
    #[arg(long, value_name = "URL", requires = "mirror")]
    security_mirror: Option<String>,
    /// URL of an archive of old packages, with the folders debian and debian-security by time, for locked versions that
    /// the archive no longer has
    #[arg(long, value_name = "URL")]
    snapshots: Option<String>,
    /// Build from the newest packages, with a warning, if locked versions are no longer available
    #[arg(long)]
    newest_if_gone: bool,
}

impl Source {
    fn store(&self) -> anyhow::Result<PackageCache> {
        let archive = self.mirror.clone().zip(self.security_mirror.clone());
        PackageCache::open(&self.cache, self.arch, archive, self.snapshots.clone())
    }

    fn lock(&self) -> PathBuf {
        let name = || content::beside(&format!("podvm/vm-image/packages.{}.lock", self.arch.name()));
        self.lock.clone().unwrap_or_else(name)
    }

    fn inputs(&self, out: &Path) -> anyhow::Result<Inputs> {
        let (store, work, lock) = (self.store()?, out.join("work"), self.lock());
        let locked = Lock::read(&lock)?;
        let gone = match Inputs::read(&store, locked.clone(), &work) {
            Err(gone) if self.newest_if_gone => gone,
            read => return read,
        };
        eprintln!("peerpod-image: {gone:#}");
        eprintln!(
            "peerpod-image: this image is built from the newest packages instead of those of {}",
            lock.display()
        );
        // The files' time stays, so that two builds remain identical.
        let newest = Lock { epoch: locked.epoch, ..store.newest(PACKAGES)? };
        Inputs::read(&store, newest, &work)
    }
}

fn main() -> ExitCode {
    match go(Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("peerpod-image: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn go(command: Command) -> anyhow::Result<()> {
    let out = match command {
        Command::Minimal { source, mut parts, out } => {
            parts.find_kata(source.arch, &source.cache, &out.join("work"))?;
            minimal::build(&source.inputs(&out)?, &parts, &out).context("build the minimal image")?;
            out
        }
        Command::Disk { source, mut parts, options, out } => {
            parts.find_kata(source.arch, &source.cache, &out.join("work"))?;
            disk::build(&source.inputs(&out)?, &parts, &options, &out).context("build the disk image")?;
            out
        }
        Command::Lock { source } => {
            let (lock, path) = (source.store()?.newest(PACKAGES)?, source.lock());
            std::fs::write(&path, lock.text()).with_context(|| format!("write {}", path.display()))?;
            println!("{}: {} packages, {}", path.display(), lock.packages.len(), lock.snapshot);
            return Ok(());
        }
    };
    let work = out.join("work");
    std::fs::remove_dir_all(&work).with_context(|| format!("remove {}", work.display()))
}
