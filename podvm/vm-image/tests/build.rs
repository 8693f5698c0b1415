//! Builds images with the real program and the real packages, as a user without rights. Needs root (to change to that
//! user and to check the files' owners), the tools that scripts/setup installs, and the archive once.

#![allow(clippy::unwrap_used)] // test code outside of test functions

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const NOBODY: u32 = 65534;
const REPOSITORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// Temporary folder that an ordinary user may write; removed on drop.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        let path = std::env::temp_dir().join(format!("peerpod-image-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        let folder = Folder(path);
        fs::set_permissions(&folder.0, fs::Permissions::from_mode(0o755)).unwrap();
        folder.give_away(&folder.0);
        // A cache of this folder, filled from the repository's cache.
        let debs = folder.path("cache/debs");
        fs::create_dir_all(&debs).unwrap();
        if let Ok(known) = fs::read_dir(target().join("image/cache/debs")) {
            for file in known.map(|entry| entry.unwrap().path()).filter(|path| path.is_file()) {
                fs::copy(&file, debs.join(file.file_name().unwrap())).unwrap();
            }
        }
        for part in ["cache", "cache/debs"] {
            folder.give_away(&folder.path(part));
        }
        folder.program("guest");
        folder
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    fn give_away(&self, path: &Path) {
        chown(path, Some(NOBODY), Some(NOBODY)).unwrap();
    }

    /// Writes the smallest file with the headers of a static program; no test starts it.
    fn program(&self, name: &str) -> PathBuf {
        let mut elf = vec![0; 64 + 56];
        elf[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
        elf[16..24].copy_from_slice(&[2, 0, 62, 0, 1, 0, 0, 0]); // an executable, for x86-64, version 1
        elf[32] = 64; // the program headers are behind this one,
        (elf[52], elf[54], elf[56], elf[58]) = (64, 56, 1, 64); // and there is one,
        elf[64] = 1; // of a segment to load.
        let path = self.path(name);
        fs::write(&path, elf).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    /// Builds as an ordinary user without capabilities and without a way to another user.
    fn build(&self, kind: &str, out: &str, umask: &str, more: &[&str]) -> Output {
        let here = self.path(out);
        fs::create_dir_all(&here).unwrap();
        self.give_away(&here);
        let program = self.path("guest");
        let program = program.to_str().unwrap();
        let repository = Path::new(REPOSITORY).canonicalize().unwrap();
        let mut command = Command::new("setpriv");
        command
            .args(["--reuid", "65534", "--regid", "65534", "--clear-groups", "--no-new-privs"])
            .args(["--inh-caps=-all", "--bounding-set=-all"])
            .args(["sh", "-c", "umask $1; shift; exec \"$@\"", "sh", umask])
            .arg(env!("CARGO_BIN_EXE_peerpod-image"))
            .args([kind, "--newest-if-gone", "--guest", program, "--pull", program, "--cache"])
            .arg(self.path("cache"))
            .arg("--lock")
            .arg(repository.join("podvm/vm-image/packages.x86_64.lock"))
            .arg("--providers")
            .arg(repository.join("providers"))
            .arg("--out")
            .arg(here.join("image"));
        let path = std::env::var("PATH").unwrap();
        command.env("PATH", format!("{}:{path}", self.path("bin").display()));
        if !more.iter().any(|option| option.starts_with("--kata")) {
            command.args(["--test-agent", program]);
        }
        if kind == "disk" {
            command.args(["--initrd", program]).arg("--rootfs").arg(repository.join("podvm/vm-image/rootfs"));
        }
        command.args(more).current_dir(&here).output().unwrap()
    }

    fn built(&self, kind: &str, out: &str, umask: &str) -> BTreeMap<String, Vec<u8>> {
        let output = self.build(kind, out, umask, &[]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let files = fs::read_dir(self.path(out).join("image")).unwrap().map(|entry| entry.unwrap().path());
        files
            .map(|path| (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read(path).unwrap()))
            .collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

/// Returns the build's target folder: two levels above the test's binary.
fn target() -> PathBuf {
    Path::new(env!("CARGO_BIN_EXE_peerpod-image")).ancestors().nth(2).unwrap().to_owned()
}

fn run(program: &str, arguments: &[&str]) -> String {
    let output =
        Command::new(program).args(arguments).output().unwrap_or_else(|error| panic!("{program}: {error}"));
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn same(first: &BTreeMap<String, Vec<u8>>, second: &BTreeMap<String, Vec<u8>>) {
    assert_eq!(first.keys().collect::<Vec<_>>(), second.keys().collect::<Vec<_>>());
    for (name, content) in first {
        assert!(*content == second[name], "{name} is not the same twice");
    }
}

fn about(image: &BTreeMap<String, Vec<u8>>) -> serde_json::Value {
    serde_json::from_slice(&image["image.json"]).unwrap()
}

#[test]
fn the_minimal_image_is_the_same_twice_and_all_of_it_is_roots() {
    let folder = Folder::new("minimal");
    let first = folder.built("minimal", "one", "077");
    let second = folder.built("minimal", "somewhere/else", "000");
    same(&first, &second);
    let about = about(&first);
    assert_eq!((&about["version"], &about["test_agent"]), (&1.into(), &true.into()));
    assert!(about["cmdline_emulated"].as_str().unwrap().contains("no_timer_check"), "{about}");
    assert!(!about["cmdline"].as_str().unwrap().contains("no_timer_check"), "{about}");

    // The distribution's own programs list the archive.
    let initrd = folder.path("one/image/initrd.img");
    let script = format!("cpio --quiet -itvn < {}", initrd.display());
    let archive = run("sh", &["-c", &script]);
    // /usr is a file in the archive.
    let script = format!("cpio --quiet -i --to-stdout usr.squashfs < {} > usr", initrd.display());
    run("sh", &["-c", &format!("cd {}; {script}", folder.path("").display())]);
    let usr = folder.path("usr").display().to_string();
    let usr = run("unsquashfs", &["-lln", "-no-progress", "-d", "usr", &usr]);
    // unsquashfs prints the owner as one word, "0/0"; cpio prints two.
    let usr = usr.lines().filter(|line| line.contains(" usr")).map(|line| line.replacen("0/0", "1 0 0", 1));
    let listed = usr.fold(archive.clone(), |listed, line| listed + &line + "\n");
    for line in listed.lines() {
        assert_eq!(line.split_whitespace().skip(2).take(2).collect::<Vec<_>>(), ["0", "0"], "{line}");
    }
    let release = about["kernel_release"].as_str().unwrap();
    for path in
        ["init", "usr/local/bin/kata-agent", "etc/agent-config.toml", "etc/ssl/certs/ca-certificates.crt"]
    {
        assert!(listed.lines().any(|line| line.ends_with(&format!(" {path}"))), "no {path}: {listed}");
    }
    // The archive has the modules that the guest loads by name and their dependencies, and no others.
    for (module, there) in
        [("vxlan", true), ("udp_tunnel", true), ("dm-verity", true), ("snd", false), ("btrfs", false)]
    {
        assert_eq!(listed.contains(&format!("/{module}.ko")), there, "{module}");
    }
    let tables = format!("usr/lib/modules/{release}/modules.");
    for table in ["dep", "alias", "softdep", "builtin"] {
        assert!(listed.contains(&format!("{tables}{table}\n")), "no {table}");
    }
    assert!(!listed.contains("modules.dep.bin"), "{listed}");
}

#[test]
fn the_disk_is_the_same_twice_in_every_format_and_all_of_it_is_roots() {
    let folder = Folder::new("disk");
    let first = folder.built("disk", "one", "077");
    let second = folder.built("disk", "somewhere/else", "000");
    same(&first, &second);
    let names: Vec<&str> = first.keys().map(String::as_str).collect();
    assert_eq!(names, ["image.json", "peerpod.qcow2", "peerpod.raw", "peerpod.vhd", "peerpod.vmdk"]);

    // QEMU finds the same disk in all formats.
    let image = |name: &str| folder.path("one/image").join(name).display().to_string();
    for (name, format) in [("peerpod.qcow2", "qcow2"), ("peerpod.vhd", "vpc"), ("peerpod.vmdk", "vmdk")] {
        run("qemu-img", &["compare", "-f", "raw", "-F", format, &image("peerpod.raw"), &image(name)]);
    }
    assert_eq!(first["peerpod.raw"].len() % (1 << 20), 0);
    assert_eq!(first["peerpod.vhd"].len() % (1 << 20), 512, "a fixed VHD is whole MiB and a footer");

    // Check the partitions, their hashes, and the files of the root.
    let table: serde_json::Value =
        serde_json::from_str(&run("sfdisk", &["--json", &image("peerpod.raw")])).unwrap();
    let part = |label: &str| {
        let parts = table["partitiontable"]["partitions"].as_array().unwrap();
        let part =
            parts.iter().find(|part| part["name"] == label).unwrap_or_else(|| panic!("no {label}: {table}"));
        let (start, size) = (part["start"].as_u64().unwrap() * 512, part["size"].as_u64().unwrap() * 512);
        let path = folder.path(label);
        fs::write(&path, &first["peerpod.raw"][start as usize..(start + size) as usize]).unwrap();
        path.display().to_string()
    };
    let (root, hashes) = (part("peerpod-root"), part("peerpod-verity"));
    let about = about(&first);
    let hash = about["root_hash"].as_str().unwrap();
    run("veritysetup", &["verify", &root, &hashes, hash]);
    assert!(about["cmdline"].as_str().unwrap().ends_with(&format!(" roothash={hash}")), "{about}");

    let tree = folder.path("tree");
    run("fsck.erofs", &["--preserve", &format!("--extract={}", tree.display()), &root]);
    let others = run(
        "find",
        &[tree.to_str().unwrap(), "(", "!", "-uid", "0", "-o", "!", "-gid", "0", "-o", "-perm", "/6000", ")"],
    );
    assert_eq!(others, "", "not root's, or set-id");
    let settings = "{\"version\":1,\"images\":{\"store\":\"/var/lib/peerpod/images\"}}\n";
    for (path, content) in [("etc/machine-id", ""), ("etc/peerpod/guest.json", settings)] {
        assert_eq!(fs::read_to_string(tree.join(path)).unwrap(), content);
    }
    for line in fs::read_to_string(tree.join("etc/passwd")).unwrap().lines() {
        assert!(line.ends_with(":/usr/sbin/nologin"), "{line}");
    }
    let ways_in = run(
        "find",
        &[
            tree.to_str().unwrap(),
            "-regextype",
            "posix-extended",
            "-regex",
            ".*/(sshd?|dropbear|bash|dash|sh|busybox|login|agetty|sulogin|su)|.*(getty|authorized_keys|ssh_host).*",
        ],
    );
    assert_eq!(ways_in, "");
    run("systemd-analyze", &["verify", "--man=no", "--root", tree.to_str().unwrap(), "multi-user.target"]);
}

#[test]
fn what_must_not_be_in_an_image_fails_the_build() {
    let folder = Folder::new("refused");
    let components = folder.path("components");
    fs::create_dir_all(components.join("usr/sbin")).unwrap();
    fs::create_dir_all(components.join("etc")).unwrap();
    fs::copy(folder.path("guest"), components.join("usr/sbin/sshd")).unwrap();
    fs::write(components.join("etc/attestation.pem"), "-----BEGIN PRIVATE KEY-----\n").unwrap();
    let output = folder.build("minimal", "one", "022", &["--guest-components", components.to_str().unwrap()]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success());
    for part in ["/usr/sbin/sshd: a shell, a login or a remote login", "/etc/attestation.pem: a private key"]
    {
        assert!(said.contains(part), "{said}");
    }
    assert!(!folder.path("one/image/image.json").exists());
}

#[test]
fn an_agent_that_could_not_run_is_refused() {
    let folder = Folder::new("agents");
    let dynamic = env!("CARGO_BIN_EXE_peerpod-image");
    let text = folder.path("text");
    fs::write(&text, "#!/bin/sh\n").unwrap();
    for (agent, part) in [
        (Path::new("/usr/bin/qemu-img"), "is dynamically linked and the image does not have"),
        (&text, "not a program (no ELF header)"),
        (Path::new("/nonexistent/kata-agent"), "/nonexistent/kata-agent"),
    ] {
        let output = folder.build("minimal", "one", "022", &["--kata-agent", agent.to_str().unwrap()]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(part), "{said}");
    }
    // The image has the C library: such an agent would run, and the image is not a test image.
    let output = folder.build("minimal", "one", "022", &["--kata-agent", dynamic]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("NOT FOR PRODUCTION: no pod starts") && said.contains("--pause-bundle"), "{said}");
    let about: serde_json::Value =
        serde_json::from_slice(&fs::read(folder.path("one/image/image.json")).unwrap()).unwrap();
    assert_eq!(about["test_agent"], false);
    assert!(about["supplied"]["kata-agent"].as_str().is_some_and(|digest| digest.len() == 64), "{about}");
    assert!(about["contents"]["/etc/peerpod/test-agent"].is_null(), "{about}");
}

/// Makes the archive of a Kata release: a guest image with a partition of ext4, and its usual name as a link.
fn kata_release(folder: &Folder) -> PathBuf {
    let script = r#"
        set -e
        share=release/opt/kata/share/kata-containers
        mkdir -p root/usr/bin root/pause_bundle/rootfs $share
        cp guest root/usr/bin/kata-agent
        echo '{"ociVersion": "1.0.0"}' > root/pause_bundle/config.json
        cp guest root/pause_bundle/rootfs/pause
        PATH=$PATH:/usr/sbin:/sbin
        mke2fs -q -t ext4 -d root root.ext4 16M
        truncate -s 20M $share/kata-ubuntu-noble-confidential.image
        echo 'start=6144, size=32768, type=83' | sfdisk -q --label dos $share/kata-ubuntu-noble-confidential.image
        dd if=root.ext4 of=$share/kata-ubuntu-noble-confidential.image bs=1M seek=3 conv=notrunc status=none
        ln -s kata-ubuntu-noble-confidential.image $share/kata-containers-confidential.img
        tar --zstd -C release -cf release.tar.zst ./opt"#;
    run("sh", &["-c", &format!("cd {}; {script}", folder.path("").display())]);
    folder.path("release.tar.zst")
}

#[test]
fn agent_and_pause_bundle_come_out_of_a_kata_release_by_its_version() {
    let folder = Folder::new("kata");
    let archive = kata_release(&folder);
    // The test's own curl: it has the release 9.9.9 as an archive of zstd.
    fs::create_dir(folder.path("bin")).unwrap();
    let curl = folder.path("bin/curl");
    let script = format!(
        "#!/bin/sh\nwhile [ $# -gt 1 ]; do [ \"$1\" = --output ] && to=$2; shift; done\ncase $1 in\n\
         https://*/kata-static-9.9.9-amd64.tar.zst) cp {} \"$to\" ;;\n*) echo \"404 $1\" >&2; exit 22 ;;\nesac\n",
        archive.display()
    );
    fs::write(&curl, script).unwrap();
    fs::set_permissions(&curl, fs::Permissions::from_mode(0o755)).unwrap();

    let output = folder.build("minimal", "none", "022", &["--kata", "9.9.8"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("9.9.8") && said.contains("amd64.tar.xz"), "{said}");

    let output = folder.build("minimal", "one", "022", &["--kata", "9.9.9"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(!said.contains("NOT FOR PRODUCTION"), "{said}");
    let image =
        BTreeMap::from([("image.json".to_owned(), fs::read(folder.path("one/image/image.json")).unwrap())]);
    let about = about(&image);
    assert_eq!(about["test_agent"], false);
    for path in ["/usr/local/bin/kata-agent", "/pause_bundle/config.json", "/pause_bundle/rootfs/pause"] {
        assert!(about["contents"][path].is_u64(), "{path}: {}", about["supplied"]);
    }
}
