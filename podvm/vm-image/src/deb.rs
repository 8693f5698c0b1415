//! Reads Debian packages without unpacking them to disk: `dpkg-deb` writes the archive inside to a pipe. Owners, times
//! and set-id bits are dropped.

use std::io::Read;
use std::path::Path;

use anyhow::{Context, bail};

use crate::run;
use crate::tree::{Node, Tree};

/// Folders that a VM does not need.
const LEFT_OUT: [&str; 9] = [
    "usr/share/bash-completion/",
    "usr/share/bug/",
    "usr/share/doc-base/",
    "usr/share/info/",
    "usr/share/lintian/",
    "usr/share/locale/",
    "usr/share/man/",
    "usr/share/zsh/",
    "var/lib/",
];

pub(crate) fn add(tree: &mut Tree, package: &Path) -> anyhow::Result<()> {
    let what = || format!("read the package {}", package.display());
    let archive = run::output(run::tool("dpkg-deb").arg("--fsys-tarfile").arg(package))?;
    add_archive(tree, &archive).with_context(what)
}

fn add_archive(tree: &mut Tree, archive: &[u8]) -> anyhow::Result<()> {
    for entry in tar::Archive::new(archive).entries()? {
        let mut entry = entry?;
        let path = entry.path()?.to_str().context("a name is not UTF-8")?.trim_start_matches("./").to_owned();
        if path.is_empty() || LEFT_OUT.iter().any(|folder| path.starts_with(folder)) {
            continue;
        }
        let mode = entry.header().mode()? & 0o777;
        let target = entry.link_name()?.map(|target| target.to_string_lossy().into_owned());
        let node = match entry.header().entry_type() {
            // Top-level folders, which packages without a merged /usr still have.
            tar::EntryType::Directory if path.split('/').filter(|part| !part.is_empty()).count() < 2 => {
                continue;
            }
            tar::EntryType::Directory => Node::Directory { mode },
            tar::EntryType::Regular => {
                let mut content = Vec::new();
                entry.read_to_end(&mut content)?;
                Node::File { mode, content: content.into() }
            }
            tar::EntryType::Symlink => Node::Link { target: target.context("a link to nothing")? },
            // A hard link gets the same content again.
            tar::EntryType::Link => {
                let target = target.context("a link to nothing")?;
                tree.get(&target).with_context(|| format!("{path} is {target}, which is not there"))?.clone()
            }
            other => bail!("{path}: a file of kind {other:?}"),
        };
        tree.insert(&path, node);
    }
    Ok(())
}
