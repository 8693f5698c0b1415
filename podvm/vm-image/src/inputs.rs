//! Reads the locked packages into one tree.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::apt::PackageCache;
use crate::arch::Arch;
use crate::deb;
use crate::lock::Lock;
use crate::tree::Tree;

/// Locked packages, and a folder to work in.
pub(crate) struct Inputs {
    pub(crate) arch: Arch,
    pub(crate) lock: Lock,
    pub(crate) packages: Tree,
    work: PathBuf,
}

impl Inputs {
    /// Fetches the packages that are not in the cache and reads all of them.
    pub(crate) fn read(store: &PackageCache, lock: Lock, work: &Path) -> anyhow::Result<Inputs> {
        let mut packages = Tree::merged();
        for package in store.packages(&lock)? {
            deb::add(&mut packages, &package)?;
        }
        Ok(Inputs { arch: store.arch, lock, packages, work: work.to_owned() })
    }

    pub(crate) fn file(&self, path: &str) -> anyhow::Result<&[u8]> {
        self.packages.content(path).with_context(|| format!("no package has a file {path}"))
    }

    /// Returns an empty folder of this run, which `main` removes.
    pub(crate) fn work(&self, name: &str) -> anyhow::Result<PathBuf> {
        folder(&self.work, name)
    }
}

/// Makes an empty folder of this run in `work`.
pub(crate) fn folder(work: &Path, name: &str) -> anyhow::Result<PathBuf> {
    let folder = work.join(format!("{name}.{}", std::process::id()));
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
    Ok(folder)
}
