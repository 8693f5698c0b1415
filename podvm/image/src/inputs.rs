//! What an image is built from, read once: the locked packages, as one tree.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, bail};

use crate::{
    apt::Store,
    deb,
    lock::Lock,
    tree::{Node, Tree},
};

/// The locked packages and a place to work in.
pub(crate) struct Inputs {
    pub(crate) lock: Lock,
    /// All files of all packages.
    pub(crate) packages: Tree,
    work: PathBuf,
}

impl Inputs {
    /// Fetches what is not in the cache and reads all packages.
    ///
    /// # Errors
    /// When a package cannot be had or read.
    pub(crate) fn read(store: &Store, lock: Lock, work: &Path) -> anyhow::Result<Inputs> {
        let mut packages = Tree::merged();
        for package in store.packages(&lock)? {
            deb::add(&mut packages, &package)?;
        }
        Ok(Inputs { lock, packages, work: work.to_owned() })
    }

    /// A file of a package.
    ///
    /// # Errors
    /// When no package has it.
    pub(crate) fn file(&self, path: &str) -> anyhow::Result<&[u8]> {
        match self.packages.get(path) {
            Some(Node::File { content, .. }) => Ok(content),
            _ => bail!("no package has a file {path}"),
        }
    }

    /// An empty folder of this run's own.
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
