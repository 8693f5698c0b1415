//! Reports the built image: `image.json` beside it, and a short text on standard output.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::Path;

use anyhow::Context;
use serde::Serialize;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::inputs::Inputs;
use crate::lock::Package;
use crate::memory::GuestMemory;
use crate::tree::{Node, Tree};

/// Version of `image.json`; readers refuse any other.
const VERSION: u32 = 1;

/// Content of `image.json`.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Report {
    version: u32,
    /// `minimal` or `disk`.
    kind: &'static str,
    arch: &'static str,
    #[serde(flatten)]
    pub(crate) boot: BootParameters,
    /// The root's dm-verity hash, for comparison with a measured boot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) root_hash: Option<String>,
    /// Memory that the guest needs besides its pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) guest_memory: Option<GuestMemory>,
    /// Whether the agent is the project's test agent; such an image is unfit for production.
    pub(crate) test_agent: bool,
    /// Bytes per file beside this one.
    sizes: BTreeMap<String, u64>,
    sha256: BTreeMap<String, String>,
    packages: Vec<Package>,
    /// Digests of the user's parts, by name in the image.
    pub(crate) supplied: BTreeMap<&'static str, String>,
    /// Every file of the image: the size of a file in bytes, or the target of a link.
    contents: BTreeMap<String, Value>,
}

/// Kernel of the image, and parameters of its boot.
#[derive(Debug, Default, Serialize)]
pub(crate) struct BootParameters {
    kernel_release: String,
    /// Names of files beside `image.json`, for a boot without a disk's boot loader.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) kernel: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) initrd: Option<String>,
    /// Kernel command line; a disk already contains it.
    pub(crate) cmdline: String,
    /// The same for a machine with an emulated processor.
    pub(crate) cmdline_emulated: String,
}

impl Report {
    pub(crate) fn new(kind: &'static str, kernel_release: &str, inputs: &Inputs) -> Report {
        Report {
            version: VERSION,
            kind,
            arch: inputs.arch.name(),
            boot: BootParameters { kernel_release: kernel_release.to_owned(), ..BootParameters::default() },
            packages: inputs.lock.packages.clone(),
            ..Report::default()
        }
    }

    pub(crate) fn contents(&mut self, tree: &Tree) {
        for (path, node) in tree.iter() {
            let content = match node {
                Node::Directory { .. } => continue,
                Node::File { content, .. } => content.len().into(),
                Node::Link { target } => target.clone().into(),
            };
            self.contents.insert(format!("/{path}"), content);
        }
    }

    /// Writes one of the image's files and notes its size and digest.
    pub(crate) fn write(&mut self, folder: &Path, name: &str, content: &[u8]) -> anyhow::Result<()> {
        let path = folder.join(name);
        fs::write(&path, content).with_context(|| format!("write {}", path.display()))?;
        self.note(name, content);
        Ok(())
    }

    /// Notes size and digest of a file that exists.
    pub(crate) fn note(&mut self, name: &str, content: &[u8]) {
        self.sizes.insert(name.to_owned(), content.len() as u64);
        self.sha256.insert(name.to_owned(), sha256(content));
    }

    /// Writes `image.json`, last: where it exists, the image is complete.
    pub(crate) fn finish(&self, folder: &Path) -> anyhow::Result<()> {
        let text = serde_json::to_string_pretty(self)?;
        fs::write(folder.join("image.json"), text + "\n").context("write image.json")?;
        // A reader may close standard output early; that is no failure.
        match self.print(folder, &mut std::io::stdout().lock()) {
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
            printed => printed.context("print the report"),
        }
    }

    fn print(&self, folder: &Path, out: &mut impl Write) -> std::io::Result<()> {
        writeln!(out, "{} image for {} in {}", self.kind, self.arch, folder.display())?;
        for (name, size) in &self.sizes {
            let mib = *size as f64 / f64::from(1 << 20);
            writeln!(out, "  {name:<16} {mib:>8.1} MiB  sha256 {}", self.sha256[name])?;
        }
        let (packages, files) = (self.packages.len(), self.contents.len());
        writeln!(out, "  kernel {}, {packages} packages, {files} files", self.boot.kernel_release)?;
        let mut folders: BTreeMap<&str, u64> = BTreeMap::new();
        for (path, size) in self.contents.iter().filter_map(|(path, content)| Some((path, content.as_u64()?)))
        {
            *folders.entry(top(path)).or_default() += size;
        }
        for (folder, size) in folders {
            writeln!(out, "  {:>8.1} MiB  {folder}", size as f64 / f64::from(1 << 20))?;
        }
        let unfit = if self.test_agent {
            Some("the agent is the project's test agent (--kata supplies a real one)")
        } else if !self.contents.contains_key("/pause_bundle/config.json") {
            Some(
                "no pod starts, because the kata-agent has no pause bundle (--kata or --pause-bundle supplies one)",
            )
        } else {
            None
        };
        if let Some(why) = unfit {
            writeln!(out, "  NOT FOR PRODUCTION: {why}")?;
        }
        Ok(())
    }
}

/// Returns the first components of a path.
fn top(path: &str) -> &str {
    let end = path.match_indices('/').map(|(at, _)| at).nth(if path.starts_with("/usr/") { 3 } else { 2 });
    &path[..end.unwrap_or(path.len())]
}

pub(crate) fn sha256(content: &[u8]) -> String {
    hex::encode(Sha256::digest(content))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_and_folders() {
        assert!(sha256(b"").starts_with("e3b0c44298fc1c14"));
        assert_eq!(top("/usr/lib/modules/6/a.ko"), "/usr/lib/modules");
        assert_eq!(top("/etc/ssl/certs/x"), "/etc/ssl");
        assert_eq!(top("/init"), "/init");
    }
}
