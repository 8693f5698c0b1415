//! Holds an image's files in memory. Root owns all of them, because nodes have no owner field; no node has a time.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail, ensure};

/// Limit of symbolic links that a path may go through.
const MAX_LINKS: usize = 16;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Node {
    Directory { mode: u32 },
    File { mode: u32, content: Arc<[u8]> },
    Link { target: String },
}

/// Files by path, without a leading slash. The parents of every file are present.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tree(BTreeMap<String, Node>);

impl Tree {
    /// Returns the top of a merged tree: /usr holds all programs and libraries, and the old names link to it.
    pub(crate) fn merged() -> Tree {
        let mut tree = Tree::default();
        for name in MERGED {
            tree.link(name, &format!("usr/{name}"));
            tree.directory(&format!("usr/{name}"), 0o755);
        }
        tree
    }

    pub(crate) fn directory(&mut self, path: &str, mode: u32) {
        self.insert(path, Node::Directory { mode });
    }

    pub(crate) fn file(&mut self, path: &str, mode: u32, content: impl Into<Arc<[u8]>>) {
        self.insert(path, Node::File { mode, content: content.into() });
    }

    pub(crate) fn link(&mut self, path: &str, target: &str) {
        self.insert(path, Node::Link { target: target.to_owned() });
    }

    /// Adds a node, in place of an older one, and its parent folders.
    pub(crate) fn insert(&mut self, path: &str, node: Node) {
        let path = place(path);
        for (end, _) in path.match_indices('/') {
            self.0.entry(path[..end].to_owned()).or_insert(Node::Directory { mode: 0o755 });
        }
        self.0.insert(path, node);
    }

    pub(crate) fn get(&self, path: &str) -> Option<&Node> {
        self.0.get(&place(path))
    }

    /// Removes the nodes whose path is not to be kept.
    pub(crate) fn retain(&mut self, keep: impl Fn(&str) -> bool) {
        self.0.retain(|path, _| keep(path));
    }

    /// Returns all nodes, parents first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, &Node)> {
        self.0.iter().map(|(path, node)| (path.as_str(), node))
    }

    pub(crate) fn files(&self) -> impl Iterator<Item = (&str, u32, &Arc<[u8]>)> {
        self.iter().filter_map(|(path, node)| match node {
            Node::File { mode, content } => Some((path, *mode, content)),
            _ => None,
        })
    }

    pub(crate) fn content(&self, path: &str) -> Option<&[u8]> {
        match self.get(path)? {
            Node::File { content, .. } => Some(content),
            _ => None,
        }
    }

    pub(crate) fn text(&self, path: &str) -> Option<&str> {
        std::str::from_utf8(self.content(path)?).ok()
    }

    /// Returns the path after following all links, those of folders too.
    pub(crate) fn resolve(&self, path: &str) -> Option<&str> {
        let mut wanted = place(path);
        for _ in 0..MAX_LINKS {
            let mut ends = wanted.match_indices('/').map(|(at, _)| at).chain([wanted.len()]);
            let link = ends.find_map(|end| match self.0.get(&wanted[..end])? {
                Node::Link { target } => Some((end, target.clone())),
                _ => None,
            });
            let Some((end, target)) = link else {
                return self.0.get_key_value(&wanted).map(|(path, _)| path.as_str());
            };
            let folder = wanted[..end].rsplit_once('/').map_or("", |(folder, _)| folder);
            let target = if target.starts_with('/') { target } else { format!("{folder}/{target}") };
            wanted = place(&format!("{target}{}", &wanted[end..]));
        }
        None
    }

    /// Copies a file, or a folder when `what` ends in a slash, from another tree. A link brings its target.
    pub(crate) fn take(&mut self, from: &Tree, what: &str) -> anyhow::Result<()> {
        let path = place(what);
        if what.ends_with('/') {
            let below = format!("{path}/");
            let mut range =
                from.0.range(below.clone()..).take_while(|(at, _)| at.starts_with(&below)).peekable();
            ensure!(range.peek().is_some(), "no package has a folder {what}");
            range.for_each(|(at, node)| self.insert(at, node.clone()));
            return Ok(());
        }
        let Some(node) = from.0.get(&path) else { bail!("no package has a file {what}") };
        self.insert(&path, node.clone());
        if let Node::Link { .. } = node
            && let Some(end) = from.resolve(&path)
        {
            self.insert(end, from.0[end].clone());
        }
        Ok(())
    }

    /// Adds a folder of this machine below `path`. Executables stay executable; other modes are 0644 and 0755.
    pub(crate) fn add_folder(&mut self, path: &str, folder: &Path) -> anyhow::Result<()> {
        let entries =
            fs::read_dir(folder).with_context(|| format!("read the folder {}", folder.display()))?;
        for entry in entries {
            let entry = entry?;
            let (from, kind) = (entry.path(), entry.file_type()?);
            let Some(name) = entry.file_name().to_str().map(str::to_owned) else {
                bail!("{}: the name is not UTF-8", from.display());
            };
            let to = format!("{path}/{name}");
            if kind.is_dir() {
                self.directory(&to, 0o755);
                self.add_folder(&to, &from)?;
            } else if kind.is_symlink() {
                let target = fs::read_link(&from)?;
                self.link(&to, target.to_str().with_context(|| format!("{}: not UTF-8", from.display()))?);
            } else if kind.is_file() {
                self.add_file(&to, &from)?;
            } else {
                bail!("{}: neither a file, a folder nor a link", from.display());
            }
        }
        Ok(())
    }

    pub(crate) fn add_file(&mut self, path: &str, from: &Path) -> anyhow::Result<()> {
        let what = || format!("read {}", from.display());
        let executable = fs::metadata(from).with_context(what)?.permissions().mode() & 0o111 != 0;
        let content = fs::read(from).with_context(what)?;
        self.file(path, if executable { 0o755 } else { 0o644 }, content);
        Ok(())
    }

    /// Writes all nodes below an empty folder, with their exact modes regardless of the umask.
    pub(crate) fn write(&self, folder: &Path) -> anyhow::Result<()> {
        for (path, node) in self.iter() {
            let to = folder.join(path);
            let what = || format!("write {}", to.display());
            match node {
                Node::Directory { .. } => fs::create_dir_all(&to).with_context(what)?,
                Node::File { content, .. } => fs::write(&to, content).with_context(what)?,
                Node::Link { target } => symlink(target, &to).with_context(what)?,
            }
        }
        // Children first: a folder's mode may forbid writing.
        for (path, node) in self.0.iter().rev() {
            if let Node::Directory { mode } | Node::File { mode, .. } = node {
                fs::set_permissions(folder.join(path), fs::Permissions::from_mode(*mode))?;
            }
        }
        // The top folder too: its mode becomes that of the root directory.
        fs::set_permissions(folder, fs::Permissions::from_mode(0o755))?;
        Ok(())
    }
}

const MERGED: [&str; 4] = ["bin", "lib", "lib64", "sbin"];

/// Returns the path in its canonical form: no slash at either end, no `.` and `..`, and /lib as /usr/lib.
fn place(path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    if parts.len() > 1 && MERGED.contains(&parts[0]) {
        parts.insert(0, "usr");
    }
    parts.join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Tree {
        let mut tree = Tree::merged();
        tree.file("/lib/x86_64-linux-gnu/libz.so.1.2", 0o644, *b"z");
        tree.link("./lib/x86_64-linux-gnu/libz.so.1", "libz.so.1.2");
        tree.link("usr/lib/systemd/resolved", "/bin/resolvectl");
        tree.file("bin/resolvectl", 0o755, *b"r");
        tree
    }

    #[test]
    fn the_old_folders_lead_into_usr() {
        let tree = sample();
        assert_eq!(tree.get("lib"), Some(&Node::Link { target: "usr/lib".to_owned() }));
        assert!(tree.get("usr/lib/x86_64-linux-gnu/libz.so.1.2").is_some());
        assert_eq!(
            tree.resolve("/lib/x86_64-linux-gnu/libz.so.1"),
            Some("usr/lib/x86_64-linux-gnu/libz.so.1.2")
        );
        assert_eq!(tree.resolve("/usr/lib/systemd/resolved"), Some("usr/bin/resolvectl"));
        assert_eq!(tree.resolve("usr/nothing"), None);
    }

    #[test]
    fn links_in_a_circle_end() {
        let mut tree = Tree::default();
        tree.link("a", "b");
        tree.link("b", "a");
        assert_eq!(tree.resolve("a"), None);
    }

    #[test]
    fn a_copied_link_brings_its_target() {
        let mut tree = Tree::default();
        tree.take(&sample(), "lib/x86_64-linux-gnu/libz.so.1").unwrap();
        assert!(tree.get("usr/lib/x86_64-linux-gnu/libz.so.1.2").is_some());
        assert!(tree.take(&sample(), "usr/bin/").is_ok());
        assert!(tree.take(&sample(), "usr/bin/sshd").unwrap_err().to_string().contains("usr/bin/sshd"));
        tree.retain(|path| !path.starts_with("usr/lib/x86_64-linux-gnu"));
        assert!(tree.get("usr/lib/x86_64-linux-gnu/libz.so.1").is_none());
    }
}
