//! Reads the locked packages into one tree.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

use crate::apt::Store;
use crate::deb;
use crate::lock::Lock;
use crate::tree::{Node, Tree};

/// Locked packages, and a folder to work in.
pub(crate) struct Inputs {
    pub(crate) lock: Lock,
    /// Files of all packages.
    pub(crate) packages: Tree,
    work: PathBuf,
}

impl Inputs {
    /// Fetches the packages that are not in the cache and reads all of them.
    ///
    /// # Errors
    /// When a package cannot be fetched or read.
    pub(crate) fn read(store: &Store, lock: Lock, work: &Path) -> anyhow::Result<Inputs> {
        let mut packages = Tree::merged();
        for package in store.packages(&lock)? {
            deb::add(&mut packages, &package)?;
        }
        Ok(Inputs { lock, packages, work: work.to_owned() })
    }

    /// Returns the content of a package's file.
    ///
    /// # Errors
    /// When no package has the file.
    pub(crate) fn file(&self, path: &str) -> anyhow::Result<&[u8]> {
        match self.packages.get(path) {
            Some(Node::File { content, .. }) => Ok(content),
            _ => bail!("no package has a file {path}"),
        }
    }

    /// Returns an empty folder of this run.
    ///
    /// # Errors
    /// When it cannot be made.
    pub(crate) fn work(&self, name: &str) -> anyhow::Result<PathBuf> {
        let folder = self.work.join(format!("{name}.{}", std::process::id()));
        if folder.exists() {
            fs::remove_dir_all(&folder)?;
        }
        fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
        Ok(folder)
    }
}
