//! Reads and writes `packages.ARCH.lock`, which fixes the version of every package that images of an architecture are
//! built from. With it, one revision of the project always gives the same image. The file is text, one package a line.

use std::fs;
use std::path::Path;

use anyhow::{Context, bail, ensure};

/// Package versions and time that an image is built from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Lock {
    /// Seconds since 1970: the time of every file in the images.
    pub(crate) epoch: u32,
    /// The same moment in the form that archives of old packages use in URLs.
    pub(crate) snapshot: String,
    pub(crate) packages: Vec<Package>,
}

#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) sha256: String,
}

impl Lock {
    pub(crate) fn read(path: &Path) -> anyhow::Result<Lock> {
        let text = fs::read_to_string(path)
            .with_context(|| format!("read {}; `make image-lock` makes it", path.display()))?;
        Lock::parse(&text).with_context(|| path.display().to_string())
    }

    fn parse(text: &str) -> anyhow::Result<Lock> {
        let mut lock = Lock::default();
        for (number, line) in (1..).zip(text.lines()) {
            let words: Vec<&str> = line.split_whitespace().collect();
            match words[..] {
                [] => {}
                [first, ..] if first.starts_with('#') => {}
                ["epoch", epoch] => {
                    lock.epoch = epoch.parse().with_context(|| format!("line {number}: epoch"))?
                }
                ["snapshot", stamp] => stamp.clone_into(&mut lock.snapshot),
                [name, version, sha256] => {
                    let plain = sha256.len() == 64 && sha256.bytes().all(|byte| byte.is_ascii_hexdigit());
                    ensure!(plain, "line {number}: {sha256} is not a SHA-256 digest");
                    let [name, version, sha256] = [name, version, sha256].map(str::to_owned);
                    lock.packages.push(Package { name, version, sha256 });
                }
                _ => bail!("line {number}: not `name version sha256`: {line}"),
            }
        }
        ensure!(lock.epoch != 0 && !lock.snapshot.is_empty(), "epoch and snapshot are missing");
        Ok(lock)
    }

    pub(crate) fn text(&self) -> String {
        let Lock { epoch, snapshot, packages } = self;
        let mut text = format!(
            "# Exact packages of the images. Written by `make image-lock`; packages.txt has the reasons.\n\
             epoch {epoch}\nsnapshot {snapshot}\n"
        );
        for Package { name, version, sha256 } in packages {
            text += &format!("{name} {version} {sha256}\n");
        }
        text
    }
}

/// Returns the words of a data file, without comments (from `#` to the end of the line). A line that begins with
/// conditions (`aarch64:`, `disk:`) counts if all of them hold.
pub(crate) fn words<'a>(text: &'a str, conditions: &[&str]) -> Vec<&'a str> {
    let mut words = Vec::new();
    for line in text.lines() {
        let mut line = line.split('#').next().unwrap_or_default().split_whitespace().peekable();
        let mut counts = true;
        while let Some(condition) = line.peek().and_then(|word| word.strip_suffix(':')) {
            counts &= conditions.contains(&condition);
            line.next();
        }
        words.extend(line.filter(|_| counts));
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_written_lock_is_read() {
        let package =
            Package { name: "libc6".into(), version: "2.36-9+deb12u14".into(), sha256: "ab".repeat(32) };
        let lock = Lock { epoch: 1, snapshot: "20260101T000000Z".into(), packages: vec![package] };
        assert_eq!(Lock::parse(&lock.text()).unwrap(), lock);
        for (text, part) in
            [("libc6 1", "line 1"), ("libc6 1 abc", "SHA-256"), ("", "epoch"), ("epoch x", "line 1: epoch")]
        {
            assert!(format!("{:#}", Lock::parse(text).unwrap_err()).contains(part), "{text}");
        }
    }

    #[test]
    fn words_count_if_all_conditions_of_their_line_hold() {
        let text = "# a\nlibc6  # libc\naarch64: disk: a b # c\ndisk: kmod\n";
        assert_eq!(words(text, &[]), ["libc6"]);
        assert_eq!(words(text, &["disk"]), ["libc6", "kmod"]);
        assert_eq!(words(text, &["disk", "aarch64"]), ["libc6", "a", "b", "kmod"]);
    }

    #[test]
    fn each_architecture_has_a_lock_of_the_listed_packages() {
        for arch in crate::arch::Arch::ALL {
            let path = format!("{}/packages.{}.lock", env!("CARGO_MANIFEST_DIR"), arch.name());
            let lock = Lock::read(Path::new(&path)).unwrap();
            let kernel = format!("-cloud-{}", arch.facts().debian);
            let is_kernel = |name: &&str| name.starts_with("linux-image-") && name.ends_with(&kernel);
            let locked: Vec<&str> = lock.packages.iter().map(|package| package.name.as_str()).collect();
            assert_eq!(locked.iter().copied().filter(is_kernel).count(), 1, "{path}");
            for name in words(crate::PACKAGES, &[arch.name()]) {
                assert!(name.starts_with("linux-image-") || locked.contains(&name), "{path} lacks {name}");
            }
        }
    }
}
