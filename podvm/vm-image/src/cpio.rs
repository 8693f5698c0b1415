//! Writes the kernel's archive format for an initramfs ("newc",
//! Documentation/driver-api/early-userspace/buffer-format.rst). Root owns every file; inodes are numbered in order; all
//! files have the given time.

use crate::tree::{Node, Tree};

const DIRECTORY: u32 = 0o040_000;
const FILE: u32 = 0o100_000;
const LINK: u32 = 0o120_000;

/// Returns the archive of a tree. `time` is in seconds since 1970.
pub(crate) fn archive(tree: &Tree, time: u32) -> Vec<u8> {
    let mut out = Vec::new();
    for (number, (path, node)) in (1..).zip(tree.iter()) {
        let (mode, content): (u32, &[u8]) = match node {
            Node::Directory { mode } => (DIRECTORY | mode, &[]),
            Node::File { mode, content } => (FILE | mode, content),
            Node::Link { target } => (LINK | 0o777, target.as_bytes()),
        };
        entry(&mut out, number, mode, time, path, content);
    }
    entry(&mut out, 0, 0, 0, "TRAILER!!!", &[]);
    out
}

fn entry(out: &mut Vec<u8>, number: u32, mode: u32, time: u32, path: &str, content: &[u8]) {
    let links = if mode & DIRECTORY != 0 && mode & FILE == 0 { 2 } else { 1 };
    // Inode, mode, uid, gid, links, time, size, device and special device (each major, minor), name, checksum.
    let (size, name) = (content.len() as u32, path.len() as u32 + 1);
    let fields = [number, mode, 0, 0, links, time, size, 0, 0, 0, 0, name, 0];
    out.extend_from_slice(b"070701");
    for field in fields {
        out.extend_from_slice(format!("{field:08X}").as_bytes());
    }
    out.extend_from_slice(path.as_bytes());
    out.push(0);
    pad(out);
    out.extend_from_slice(content);
    pad(out);
}

fn pad(out: &mut Vec<u8>) {
    out.resize(out.len().next_multiple_of(4), 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_distributions_cpio_reads_it() {
        let mut tree = Tree::default();
        tree.directory("sub", 0o750);
        tree.file("sub/init", 0o755, *b"hello");
        tree.link("link", "sub/init");
        let archive = archive(&tree, 86_400);
        assert_eq!(archive.len() % 4, 0);
        let listed = crate::run::with_input(crate::run::tool("cpio").args(["--quiet", "-itvn"]), &archive);
        let listed = String::from_utf8(listed.unwrap()).unwrap();
        let lines: Vec<&str> = listed.lines().collect();
        assert_eq!(lines.len(), 3, "{listed}");
        for (line, parts) in lines.iter().zip([
            ["lrwxrwxrwx", "link -> sub/init"],
            ["drwxr-x---", "sub"],
            ["-rwxr-xr-x", "sub/init"],
        ]) {
            assert!(line.starts_with(parts[0]) && line.ends_with(parts[1]), "{line}");
            let owner: Vec<&str> = line.split_whitespace().skip(2).take(2).collect();
            assert_eq!(owner, ["0", "0"], "{line}");
            assert!(line.contains("Jan  2  1970"), "{line}");
        }
    }
}
