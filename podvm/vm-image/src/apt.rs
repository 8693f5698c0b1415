//! Fetches Debian packages with apt's own tools. Lists, cache and sources are in a folder of the build, so no root is
//! needed and the machine's package state is neither read nor changed.
//!
//! apt verifies each package against the archive's signature. [`PackageCache`] then verifies it against the lock and
//! keeps it under its digest.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail, ensure};

use crate::arch::Arch;
use crate::lock::{Lock, Package, words};
use crate::report::sha256;
use crate::run;

const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
const RELEASE: &str = "bookworm";
/// Source lists of the machine's own apt.
const OWN_SOURCES: [&str; 2] = ["/etc/apt/sources.list", "/etc/apt/sources.list.d"];

/// URLs of Debian's packages and of their security updates; none: the sources that this machine's apt uses.
pub(crate) type Archive = Option<(String, String)>;

/// Package cache, and the archive that fills it.
pub(crate) struct PackageCache {
    folder: PathBuf,
    pub(crate) arch: Arch,
    archive: Archive,
    /// URL of an archive of old packages.
    snapshots: Option<String>,
    _lock: File,
}

impl PackageCache {
    /// Opens the cache folder, and waits until no other process holds its lock.
    pub(crate) fn open(
        folder: &Path,
        arch: Arch,
        archive: Archive,
        snapshots: Option<String>,
    ) -> anyhow::Result<PackageCache> {
        let what = || format!("make the cache folder {}", folder.display());
        for sub in ["apt/lists/partial", "apt/archives/partial", "debs"] {
            fs::create_dir_all(folder.join(sub)).with_context(what)?;
        }
        let folder = folder.canonicalize()?;
        let lock = File::create(folder.join("lock")).with_context(what)?;
        lock.lock().with_context(what)?;
        Ok(PackageCache { folder, arch, archive, snapshots, _lock: lock })
    }

    /// Returns the files of all packages of a lock, in its order; fetches those that are not in the cache.
    pub(crate) fn packages(&self, lock: &Lock) -> anyhow::Result<Vec<PathBuf>> {
        let missing: Vec<&Package> = lock.packages.iter().filter(|package| !self.has(package)).collect();
        if !missing.is_empty() {
            let exact: Vec<String> =
                missing.iter().map(|Package { name, version, .. }| format!("{name}={version}")).collect();
            if let Err(now) = self.update(&self.archive).and_then(|()| self.download(&exact)) {
                // Debian's archive has only the newest version of a package; the snapshots have all versions.
                let what = format!(
                    "fetch the locked packages (`make image-lock ARCH={}` writes the lock anew, with newer ones)",
                    self.arch.name()
                );
                let Some(snapshots) = &self.snapshots else { return Err(now).context(what) };
                let [main, security] =
                    ["debian", "debian-security"].map(|part| format!("{snapshots}/{part}/{}", lock.snapshot));
                self.update(&Some((main, security)))
                    .and_then(|()| self.download(&exact))
                    .with_context(|| format!("{now:#}; and from {snapshots}"))
                    .context(what)?;
            }
        }
        let fetched = |package: &Package| {
            let Package { name, version, sha256 } = package;
            ensure!(
                self.has(package),
                "{name} {version}: the fetched package does not have the digest {sha256}"
            );
            Ok(self.path(package))
        };
        lock.packages.iter().map(fetched).collect()
    }

    /// Returns a lock of the newest versions of the packages of a list (packages.txt).
    pub(crate) fn newest(&self, list: &str) -> anyhow::Result<Lock> {
        self.update(&self.archive)?;
        let mut wanted = Vec::new();
        for name in words(list, &[self.arch.name()]) {
            // The kernel's metapackage depends on the real one, which has the release in its name.
            wanted.push(if name.starts_with("linux-image-") { self.depends(name)? } else { name.to_owned() });
        }
        let listed = run::output(self.apt("apt-get").args(["--print-uris", "download"]).args(&wanted))?;
        let mut lock = Lock::default();
        for line in String::from_utf8_lossy(&listed).lines() {
            // 'URL' name_version_arch.deb SIZE SHA256:DIGEST
            let words: Vec<&str> = line.split_whitespace().collect();
            let [_, file, _, digest] = words[..] else { bail!("apt-get printed {line:?}") };
            let (Some((name, rest)), Some(sha256)) = (file.split_once('_'), digest.strip_prefix("SHA256:"))
            else {
                bail!("apt-get printed {line:?}");
            };
            let version = rest.rsplit_once('_').map_or(rest, |(version, _)| version).replace("%3a", ":");
            lock.packages.push(Package { name: name.into(), version, sha256: sha256.into() });
        }
        lock.packages.sort_by(|a, b| a.name.cmp(&b.name));
        let (asked, listed) = (wanted.len(), lock.packages.len());
        ensure!(asked == listed, "asked for {asked} packages, apt-get listed {listed}");
        let now = String::from_utf8(run::output(run::tool("date").args(["-u", "+%s %Y%m%dT%H%M%SZ"]))?)?;
        let (epoch, snapshot) = now.trim().split_once(' ').context("date printed nothing")?;
        lock.epoch = epoch.parse()?;
        snapshot.clone_into(&mut lock.snapshot);
        Ok(lock)
    }

    fn depends(&self, name: &str) -> anyhow::Result<String> {
        let shown = run::output(self.apt("apt-cache").args(["show", "--no-all-versions", name]))?;
        let shown = String::from_utf8_lossy(&shown);
        let depends = shown.lines().find_map(|line| line.strip_prefix("Depends: "));
        let real =
            depends.and_then(|line| line.split([',', ' ']).find(|word| word.starts_with("linux-image-")));
        Ok(real.with_context(|| format!("{name} does not depend on a kernel"))?.to_owned())
    }

    fn update(&self, archive: &Archive) -> anyhow::Result<()> {
        let (list, parts) = (self.folder.join("apt/sources.list"), self.folder.join("apt/sources.list.d"));
        fs::create_dir_all(&parts)?;
        for old in fs::read_dir(&parts)? {
            fs::remove_file(old?.path())?;
        }
        match archive {
            Some((main, security)) => {
                let options =
                    format!("[arch={} check-valid-until=no signed-by={KEYRING}]", self.arch.facts().debian);
                let sources = format!(
                    "deb {options} {main} {RELEASE} main\ndeb {options} {main} {RELEASE}-updates main\n\
                     deb {options} {security} {RELEASE}-security main\n"
                );
                fs::write(list, sources)?;
            }
            None => copy_own_sources(&list, &parts)?,
        }
        run::output(self.apt("apt-get").args(["update", "--error-on=any"])).map(drop)
    }

    fn download(&self, exact: &[String]) -> anyhow::Result<()> {
        let folder = self.folder.join("debs/partial");
        if folder.exists() {
            fs::remove_dir_all(&folder)?;
        }
        fs::create_dir(&folder)?;
        run::output(self.apt("apt-get").arg("download").args(exact).current_dir(&folder))?;
        for entry in fs::read_dir(&folder)? {
            let path = entry?.path();
            let digest = sha256(&fs::read(&path)?);
            fs::rename(&path, self.folder.join("debs").join(format!("{digest}.deb")))?;
        }
        Ok(())
    }

    fn path(&self, package: &Package) -> PathBuf {
        self.folder.join("debs").join(format!("{}.deb", package.sha256))
    }

    /// Returns whether the cache has the package, whole.
    fn has(&self, package: &Package) -> bool {
        fs::read(self.path(package)).is_ok_and(|content| sha256(&content) == package.sha256)
    }

    fn apt(&self, program: &str) -> Command {
        let mut command = run::tool(program);
        let apt = self.folder.join("apt");
        let places = [
            ("Dir::State", ""),
            ("Dir::State::lists", "lists"),
            ("Dir::State::status", "status"),
            ("Dir::Cache", ""),
            ("Dir::Cache::archives", "archives"),
            ("Dir::Etc::sourcelist", "sources.list"),
            ("Dir::Etc::sourceparts", "sources.list.d"),
        ];
        for (key, place) in places {
            command.arg("-o").arg(format!("{key}={}", apt.join(place).display()));
        }
        let others = [
            "Dir::Etc::preferences=/dev/null",
            "Dir::Etc::preferencesparts=/dev/null",
            "APT::Sandbox::User=root", // apt may not change to another user here
            "APT::Get::List-Cleanup=false",
            "Acquire::Languages=none",
            "Acquire::Retries=3",
            "Acquire::http::Timeout=30",
        ];
        for option in others {
            command.args(["-o", option]);
        }
        for key in ["APT::Architecture", "APT::Architectures"] {
            command.arg("-o").arg(format!("{key}={}", self.arch.facts().debian));
        }
        command.arg("-q");
        command
    }
}

/// Copies the source lists of this machine's apt, if the machine runs the images' release.
fn copy_own_sources(list: &Path, parts: &Path) -> anyhow::Result<()> {
    let release = fs::read_to_string("/etc/os-release").context("read /etc/os-release")?;
    let is_ours = |line: &str| line.trim() == format!("VERSION_CODENAME={RELEASE}");
    ensure!(
        release.lines().any(is_ours),
        "this machine is no Debian 12, so its apt does not know the images' packages: name an archive by --mirror and \
         --security-mirror"
    );
    let [own_list, own_parts] = OWN_SOURCES;
    fs::write(list, fs::read(own_list).unwrap_or_default())?;
    let Ok(entries) = fs::read_dir(own_parts) else { return Ok(()) };
    for entry in entries {
        let entry = entry?;
        fs::write(parts.join(entry.file_name()), fs::read(entry.path())?)
            .with_context(|| format!("copy {}", entry.path().display()))?;
    }
    Ok(())
}
