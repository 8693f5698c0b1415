//! Checks the finished tree of an image for files that no image may have. Supplied components are checked too. The
//! build fails with a list of all findings.

use anyhow::bail;

use crate::arch::Arch;
use crate::program::{Program, is_program};
use crate::tree::{Node, Tree};

/// Programs that let a user log in, and the shells that a login would start.
const PROGRAMS: &str = "agetty ash bash busybox csh dash dropbear fish getty ksh login mksh nologin-shell rbash rlogind \
                        scp sh ssh sshd su sudo sulogin telnetd zsh";
/// Shells that refuse every login.
const NO_SHELL: [&str; 2] = ["/usr/sbin/nologin", "/bin/false"];
/// Parts of names of units that ask for a login or open a shell.
const UNITS: [&str; 6] =
    ["getty", "debug-shell", "emergency.service", "rescue.service", "ssh", "console-shell"];
/// Files that a machine makes once for itself. In an image they would be the same on every machine.
const OWN: [&str; 7] = [
    "etc/machine-id",
    "var/lib/dbus/machine-id",
    "var/lib/systemd/random-seed",
    "var/lib/systemd/credential.secret",
    "etc/hostname",
    "etc/ssh",
    "root/.ssh",
];
/// Content with which systemd makes an identifier at the first boot; with an empty file, at each boot in memory.
const UNINITIALIZED: &str = "uninitialized";
/// Text that begins a private key.
const KEY: &[u8] = b"PRIVATE KEY-----";

/// Fails with a list of the files that an image for `arch` may not have.
pub(crate) fn check(tree: &Tree, arch: Arch) -> anyhow::Result<()> {
    let found = findings(tree, arch);
    if found.is_empty() {
        return Ok(());
    }
    bail!("the image fails the audit:\n  {}", found.join("\n  "))
}

fn findings(tree: &Tree, arch: Arch) -> Vec<String> {
    let mut found = Vec::new();
    for (path, node) in tree.iter() {
        let name = path.rsplit('/').next().unwrap_or_default();
        let bundle = path.starts_with("pause_bundle/");
        if PROGRAMS.split(' ').any(|program| program == name)
            && !matches!(node, Node::Directory { .. })
            && !bundle
        {
            found.push(format!("/{path}: a shell, a login or a remote login"));
        }
        if path.contains("/systemd/") && UNITS.iter().any(|unit| name.contains(unit)) && !is_mask(node) {
            found.push(format!("/{path}: a unit that asks for a login or opens a shell"));
        }
        if OWN.contains(&path) && !matches!(tree.text(path).map(str::trim), Some("" | UNINITIALIZED)) {
            found.push(format!("/{path}: the file belongs to one machine, not to an image"));
        }
        if name == "authorized_keys" || name.starts_with("ssh_host_") {
            found.push(format!("/{path}: a key"));
        }
        match node {
            Node::File { mode, content } => found.extend(file(tree, arch, path, *mode, content)),
            Node::Directory { mode } if mode & 0o002 != 0 && mode & 0o1000 == 0 => {
                found.push(format!("/{path}: a world-writable folder"));
            }
            _ => {}
        }
    }
    accounts(tree, &mut found);
    found
}

fn file(tree: &Tree, arch: Arch, path: &str, mode: u32, content: &[u8]) -> Vec<String> {
    let mut found = Vec::new();
    if mode & 0o7002 != 0 {
        found.push(format!("/{path}: mode {mode:o}: set-id, or world-writable"));
    }
    if path.ends_with(".ko") {
        return found;
    }
    if !is_program(content) {
        if content.windows(KEY.len()).any(|window| window == KEY) {
            found.push(format!("/{path}: a private key"));
        }
        return found;
    }
    match Program::read(content, arch) {
        // The root directory of a container, with its own libraries.
        Ok(_) if path.starts_with("pause_bundle/") => {}
        Ok(program) => {
            let missing = program.missing(tree);
            if !missing.is_empty() {
                found.push(format!("/{path}: needs {}", missing.join(", ")));
            }
        }
        Err(error) => found.push(format!("/{path}: {error:#}")),
    }
    found
}

fn is_mask(node: &Node) -> bool {
    matches!(node, Node::Link { target } if target == "/dev/null")
}

/// Finds accounts that permit a login.
fn accounts(tree: &Tree, found: &mut Vec<String>) {
    for line in tree.text("etc/passwd").unwrap_or_default().lines() {
        let fields: Vec<&str> = line.split(':').collect();
        let [name, password, .., shell] = fields[..] else {
            found.push(format!("/etc/passwd: {line}"));
            continue;
        };
        if !NO_SHELL.contains(&shell) {
            found.push(format!("/etc/passwd: {name} has the shell {shell:?}"));
        }
        if !matches!(password, "x" | "!" | "*" | "!*") {
            found.push(format!("/etc/passwd: {name} has a password, or needs none"));
        }
    }
    for line in tree.text("etc/shadow").unwrap_or_default().lines() {
        let mut fields = line.split(':');
        let (name, password) = (fields.next().unwrap_or_default(), fields.next().unwrap_or_default());
        if !matches!(password, "!" | "*" | "!*") {
            found.push(format!("/etc/shadow: {name} has a password, or needs none"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(path: &str, mode: u32, content: &str) -> String {
        let mut tree = Tree::merged();
        tree.file("etc/passwd", 0o644, *b"root:x:0:0:root:/:/usr/sbin/nologin\n");
        tree.file("etc/machine-id", 0o444, *b"uninitialized\n");
        assert_eq!(findings(&tree, Arch::X86_64), Vec::<String>::new());
        tree.file(path, mode, content.as_bytes());
        findings(&tree, Arch::X86_64).join("; ")
    }

    #[test]
    fn each_login_and_key_is_found() {
        for (path, mode, content, part) in [
            ("usr/sbin/sshd", 0o755, "", "remote login"),
            ("usr/local/bin/bash", 0o755, "", "a shell"),
            ("usr/lib/systemd/system/serial-getty@.service", 0o644, "", "asks for a login"),
            ("etc/systemd/system/debug-shell.service", 0o644, "", "opens a shell"),
            ("etc/machine-id", 0o444, "0123456789abcdef0123456789abcdef\n", "belongs to one machine"),
            ("etc/hostname", 0o644, "builder\n", "belongs to one machine"),
            ("root/.ssh/authorized_keys", 0o600, "ssh-ed25519 AAAA", "a key"),
            ("etc/tls.pem", 0o600, "-----BEGIN EC PRIVATE KEY-----", "a private key"),
            ("etc/passwd", 0o644, "root:x:0:0:root:/root:/bin/bash\n", "root has the shell \"/bin/bash\""),
            ("etc/passwd", 0o644, "root::0:0:root:/root:/bin/false\n", "needs none"),
            ("etc/passwd", 0o644, "root:x:0:0:root:/root:\n", "has the shell \"\""),
            ("etc/shadow", 0o600, "root:$6$abc:1::::::\n", "has a password"),
            ("usr/bin/mount", 0o4755, "", "set-id"),
            ("etc/motd", 0o666, "", "world-writable"),
            ("usr/bin/agent", 0o755, "\x7fELF", "/usr/bin/agent: "),
            ("pause_bundle/rootfs/pause", 0o755, "\x7fELF", "/pause_bundle/rootfs/pause: "),
        ] {
            let found = one(path, mode, content);
            assert!(found.contains(part), "{path}: {found}");
        }
    }

    #[test]
    fn a_masked_unit_is_accepted() {
        let mut tree = Tree::merged();
        tree.link("etc/systemd/system/getty.target", "/dev/null");
        assert_eq!(findings(&tree, Arch::X86_64), Vec::<String>::new());
    }
}
