//! Builds the tree with the programs of this build. The programs start in it without other files, and the same programs
//! give the same tree. (`make dist` does the same with a release build.)

#![expect(clippy::unwrap_used, reason = "a test's helpers fail as the test does")]

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const PROGRAMS: [&str; 5] = ["peerpod-node", "peerpod-relay", "peerpod-cluster", "peerpod-csi", "peerpod"];

fn project(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.0));
    }
}

fn make(out: &Path) {
    let built = Path::new(env!("CARGO_BIN_EXE_peerpod-dist")).parent().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_peerpod-dist"));
    command.arg("--from").arg(built).arg("--out").arg(out).arg("--workspace").arg(project(""));
    for program in PROGRAMS {
        command.arg("--program").arg(program);
    }
    let done = command.output().unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

/// Collects every file's path, mode and bytes.
fn files(folder: &Path, found: &mut BTreeMap<PathBuf, (u32, Vec<u8>)>, top: &Path) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let about = fs::symlink_metadata(&path).unwrap();
        let name = path.strip_prefix(top).unwrap().to_owned();
        if about.is_dir() {
            found.insert(name, (about.permissions().mode(), Vec::new()));
            files(&path, found, top);
        } else if about.is_symlink() {
            found.insert(name, (0, fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes()));
        } else {
            found.insert(name, (about.permissions().mode(), fs::read(&path).unwrap()));
        }
    }
}

#[test]
fn the_tree_is_all_that_the_programs_need() {
    let folder = Folder(std::env::temp_dir().join(format!("peerpod-dist-{}", std::process::id())));
    let (first, second) = (folder.0.join("first"), folder.0.join("second"));
    make(&first);
    assert!(nix::unistd::geteuid().is_root(), "run as root: a chroot needs it");
    let version = format!("{}\n", env!("CARGO_PKG_VERSION"));
    for program in PROGRAMS {
        let inside = |word: &str| {
            let mut command = Command::new("chroot");
            command.arg(first.join("rootfs")).arg(format!("/usr/bin/{program}")).arg(word);
            command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
            command.output().unwrap()
        };
        let done = inside("--help");
        assert!(done.status.success(), "{program}: {}", String::from_utf8_lossy(&done.stderr));
        assert!(String::from_utf8_lossy(&inside("--version").stdout).ends_with(&version), "{program}");
        assert_eq!(inside("--no.such=1").status.code(), Some(2), "{program}: a mistake in the command");
    }
    let mut losetup = Command::new("chroot");
    losetup.arg(first.join("rootfs")).args(["/usr/sbin/losetup", "--version"]);
    assert!(losetup.output().unwrap().status.success(), "what peerpod-csi runs is there");
    make(&second);
    let all = [&first, &second].map(|tree| {
        let mut found = BTreeMap::new();
        files(tree, &mut found, tree);
        found
    });
    assert!(all[0].keys().eq(all[1].keys()));
    for (path, one) in &all[0] {
        assert!(all[1][path] == *one, "{}", path.display());
    }
    let bill: serde_json::Value = serde_json::from_slice(&all[0][Path::new("sbom.cdx.json")].1).unwrap();
    let components = bill["components"].as_array().unwrap();
    let named = |name: &str| components.iter().filter(|one| one["name"] == name).count();
    assert_eq!(
        (named("rustls"), named("kube"), named("peerpod-link")),
        (1, 1, 1),
        "what is linked is on the bill"
    );
    assert_eq!((named("proptest"), named("ttrpc-codegen")), (0, 0), "what only tests or builds is not");
    let dependencies = bill["dependencies"].as_array().unwrap();
    let is_list = |one: &&serde_json::Value| {
        one["dependsOn"].as_array().is_some_and(|on| on.iter().all(|on| on.is_string()))
    };
    assert_eq!(dependencies.iter().find(|one| !is_list(one)), None, "CycloneDX wants a list");
    for one in components
        .iter()
        .filter(|one| one["type"] == "library" && !one["name"].as_str().unwrap().starts_with("peerpod"))
    {
        assert!(one["hashes"][0]["content"].as_str().is_some_and(|sum| sum.len() == 64), "{one}");
        assert!(one["licenses"][0]["expression"].is_string(), "{one}");
    }
}

#[test]
fn what_the_dockerfile_copies_is_what_is_made() {
    let text = fs::read_to_string(project("deploy/Dockerfile")).unwrap();
    let copies: Vec<Vec<&str>> = text
        .lines()
        .filter(|line| line.starts_with("COPY "))
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert!(copies.iter().any(|words| words[1..] == ["target/dist/rootfs/", "/"]), "{copies:?}");
    let makefile = fs::read_to_string(project("Makefile")).unwrap();
    for words in copies {
        let source = words[words.len() - 2].trim_start_matches("/src/");
        let made = source.starts_with("target/dist/") && makefile.contains("--out $(TARGET)/dist");
        assert!(made || project(source).exists(), "{words:?}");
    }
    assert!(text.lines().any(|line| line == "USER 65532:65532"));
    // Without it the image has no provider for AWS.
    assert!(
        text.contains("\nARG CLOUDS=1\n") && text.contains("\nRUN make dist CLOUDS=\"$CLOUDS\" "),
        "{text}"
    );
}

#[test]
fn the_programs_of_a_checkout_know_their_commit() {
    let output = |program: &str, words: &[&str]| {
        String::from_utf8(Command::new(program).args(words).current_dir(project("")).output().unwrap().stdout)
            .unwrap()
    };
    let lines = |words: &[&str]| {
        let text = output("make", &[&["-n", "dist", "ARCH=x86_64"], words].concat());
        text.lines().filter(|line| line.contains("--profile dist")).collect::<String>()
    };
    let commit = output("git", &["rev-parse", "--short=12", "HEAD"]);
    // A source archive has no history.
    if !commit.is_empty() {
        assert!(lines(&[]).contains(&format!(" PEERPOD_COMMIT={} ", commit.trim())), "{}", lines(&[]));
    }
    let without = lines(&["COMMIT="]);
    assert!(!without.is_empty() && !without.contains("PEERPOD_COMMIT"), "{without}");
}
