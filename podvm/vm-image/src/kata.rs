//! Takes the kata-agent and the pause bundle out of a Kata release: its archive, a guest image in it, or a folder.
//!
//! The archive has neither as a file: both are inside the root file system of its guest images. The tools of the file
//! system read them there, so nothing is mounted. The network is used for a release that is named by its version.

use std::fs::{self, File, Permissions};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use serde::Deserialize;

use crate::arch::Arch;
use crate::run;

/// Guest images of a release, best first: the confidential one has a pause bundle.
const IMAGES: [&str; 2] = ["kata-containers-confidential.img", "kata-containers.img"];
/// Folder of the guest images in an archive and in an installation.
const SHARE: &str = "share/kata-containers";
/// Names in the root file system of a guest image, and in a folder.
const AGENT: &str = "usr/bin/kata-agent";
const PAUSE_BUNDLE: &str = "pause_bundle";
const RELEASES: &str = "https://github.com/kata-containers/kata-containers/releases/download";
/// Endings of archives, newest first.
const ARCHIVES: [&str; 2] = ["tar.zst", "tar.xz"];
/// Copy of the root file system, in the folder of the work.
const ROOT_FS: &str = "root.fs";
const SECTOR: u64 = 512;

/// Parts of a Kata release, as files of this machine.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Kata {
    pub(crate) agent: PathBuf,
    pub(crate) pause_bundle: Option<PathBuf>,
}

impl Kata {
    /// Finds both parts in `source`: a folder, an archive, a guest image, or the version of a release for `arch` to
    /// download into `cache`. Unpacks into `work`, an empty folder.
    pub(crate) fn find(source: &str, arch: Arch, cache: &Path, work: &Path) -> anyhow::Result<Kata> {
        let path = PathBuf::from(source);
        let found = if path.is_dir() {
            unpacked(&path, work)
        } else if path.is_file() {
            file(&path, work)
        } else if is_version(source) {
            download(source, arch, cache).and_then(|archive| file(&archive, work))
        } else {
            bail!("--kata {source}: neither a file, a folder nor a version such as 4.1.0");
        };
        found.with_context(|| format!("take the kata-agent from --kata {source}"))
    }

    /// Returns the parts below the root directory of a guest image.
    fn below(root: &Path) -> anyhow::Result<Kata> {
        let (agent, bundle) = (root.join(AGENT), root.join(PAUSE_BUNDLE));
        ensure!(agent.is_file(), "the guest image has no /{AGENT}; use the guest image of another release");
        fs::set_permissions(&agent, Permissions::from_mode(0o755))?;
        Ok(Kata { agent, pause_bundle: Some(bundle).filter(|bundle| bundle.is_dir()) })
    }
}

fn is_version(text: &str) -> bool {
    text.starts_with(|first: char| first.is_ascii_digit())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b".-".contains(&byte))
}

/// A folder contains both parts (packed by xz or not), or is an unpacked archive.
fn unpacked(path: &Path, work: &Path) -> anyhow::Result<Kata> {
    let packed = path.join("kata-agent.xz");
    if path.join("kata-agent").is_file() || packed.is_file() {
        let mut agent = path.join("kata-agent");
        if packed.is_file() {
            agent = work.join("kata-agent");
            fs::write(&agent, run::output(run::tool("xz").arg("-dc").arg(&packed))?)?;
            fs::set_permissions(&agent, Permissions::from_mode(0o755))?;
        }
        let (mut bundle, archive) = (path.join(PAUSE_BUNDLE), path.join("pause_bundle.tar.xz"));
        if archive.is_file() {
            run::output(run::tool("tar").arg("-xf").arg(&archive).arg("-C").arg(work))?;
            bundle = work.join(PAUSE_BUNDLE);
        }
        return Ok(Kata { agent, pause_bundle: Some(bundle).filter(|bundle| bundle.is_dir()) });
    }
    let folders = ["", SHARE, "opt/kata/share/kata-containers"].map(|sub| path.join(sub));
    let image = IMAGES.iter().flat_map(|name| folders.iter().map(move |folder| folder.join(name)));
    match image.into_iter().find(|image| image.is_file()) {
        Some(image) => guest_image(&image, work),
        None => bail!("the folder has neither kata-agent nor a guest image ({})", IMAGES.join(", ")),
    }
}

fn file(path: &Path, work: &Path) -> anyhow::Result<Kata> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    if name.contains(".tar") { archive(path, work) } else { guest_image(path, work) }
}

/// Unpacks the one guest image of an archive that is used. Its usual name is a link to a name with the distribution.
fn archive(path: &Path, work: &Path) -> anyhow::Result<Kata> {
    let listed = run::output(run::tool("tar").arg("-tvf").arg(path))?;
    let listed = String::from_utf8_lossy(&listed);
    let Some((link, member)) = IMAGES.iter().find_map(|name| member(&listed, name)) else {
        bail!("the archive has no guest image ({}); use kata-static of a release", IMAGES.join(", "));
    };
    // The link itself is left out, because nothing below `work` shall lead out of it.
    let mut unpack = run::tool("tar");
    run::output(unpack.arg("-xf").arg(path).arg("-C").arg(work).args(["--no-same-owner", &member]))
        .with_context(|| format!("unpack {member}, the target of {link}"))?;
    guest_image(&work.join(member), work)
}

/// Finds an image in the list of an archive by its usual name. Returns that name and the member with the content.
fn member(listed: &str, name: &str) -> Option<(String, String)> {
    let suffix = format!("{SHARE}/{name}");
    listed.lines().find_map(|line| {
        let (entry, target) = line.split_once(" -> ").map_or((line, None), |(entry, to)| (entry, Some(to)));
        let path = entry.split_whitespace().last().filter(|path| path.ends_with(&suffix))?;
        let folder = path.strip_suffix(name)?;
        let target = target.unwrap_or(name);
        (!target.contains('/')).then(|| (path.to_owned(), format!("{folder}{target}")))
    })
}

/// Takes the parts out of the first partition of a guest image: the root file system. A second one has its hashes.
fn guest_image(path: &Path, work: &Path) -> anyhow::Result<Kata> {
    let system = work.join(ROOT_FS);
    let kind = first_partition(path, &system).with_context(|| format!("read {}", path.display()))?;
    let root = work.join("root");
    match kind {
        FileSystem::Ext => {
            fs::create_dir_all(root.join("usr/bin"))?;
            for request in [format!("dump /{AGENT} {AGENT}"), format!("rdump /{PAUSE_BUNDLE} .")] {
                // debugfs reports a missing file on its error output, and succeeds.
                let mut debugfs = run::tool("debugfs");
                run::output(debugfs.args(["-R", &request, &format!("../{ROOT_FS}")]).current_dir(&root))?;
            }
        }
        FileSystem::Erofs => {
            let extract = format!("--extract={}", root.display());
            run::output(run::tool("fsck.erofs").args(["--no-preserve", &extract]).arg(&system))?;
        }
    }
    fs::remove_file(&system)?;
    Kata::below(&root)
}

#[derive(Clone, Copy)]
enum FileSystem {
    Ext,
    Erofs,
}

/// Part of the answer of `sfdisk --json`.
#[derive(Deserialize)]
struct Disk {
    partitiontable: Table,
}

#[derive(Deserialize)]
struct Table {
    partitions: Vec<Partition>,
}

/// Place of a partition, in sectors.
#[derive(Deserialize)]
struct Partition {
    start: u64,
    size: u64,
}

/// Copies the first partition of a disk to a file, and returns the kind of its file system.
fn first_partition(disk: &Path, to: &Path) -> anyhow::Result<FileSystem> {
    let table = run::output(run::tool("sfdisk").arg("--json").arg(disk))?;
    let table: Disk = serde_json::from_slice(&table).context("sfdisk printed no partition table")?;
    let first = table.partitiontable.partitions.first().context("the disk has no partition")?;
    let (start, size) = first
        .start
        .checked_mul(SECTOR)
        .zip(first.size.checked_mul(SECTOR))
        .context("a partition of no size")?;
    let mut from = File::open(disk)?;
    from.seek(SeekFrom::Start(start))?;
    let copied = std::io::copy(&mut from.take(size), &mut File::create(to)?)?;
    ensure!(copied == size, "the disk ends within its first partition; download it again");
    let mut magic = [0; 64];
    let mut system = File::open(to)?;
    system.seek(SeekFrom::Start(1024))?;
    system.read_exact(&mut magic)?;
    match magic {
        [0xe2, 0xe1, 0xf5, 0xe0, ..] => Ok(FileSystem::Erofs),
        _ if magic.get(56..58) == Some(&[0x53, 0xef]) => Ok(FileSystem::Ext),
        _ => bail!("the root file system is neither ext4 nor erofs; copy the agent out, for --kata-agent"),
    }
}

/// Downloads the archive of a release once. Its connection is verified, its digest is not known: compare the archive
/// by other means and give its path, where that matters.
fn download(version: &str, arch: Arch, cache: &Path) -> anyhow::Result<PathBuf> {
    let folder = cache.join("kata");
    fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
    let mut failures = Vec::new();
    for ending in ARCHIVES {
        let name = format!("kata-static-{version}-{}.{ending}", arch.facts().debian);
        let (path, partial) = (folder.join(&name), folder.join(format!("{name}.partial")));
        if path.is_file() {
            return Ok(path);
        }
        let url = format!("{RELEASES}/{version}/{name}");
        let mut curl = run::tool("curl");
        curl.args(["--fail", "--silent", "--show-error", "--location", "--retry", "3", "--proto", "=https"]);
        match run::output(curl.arg("--output").arg(&partial).arg(&url)) {
            Ok(_) => {
                fs::rename(&partial, &path).with_context(|| format!("keep {}", path.display()))?;
                return Ok(path);
            }
            Err(error) => failures.push(format!("{error:#}")),
        }
    }
    bail!("download it ({}); or give the path of an archive that you have", failures.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inputs::folder;

    #[test]
    fn a_guest_image_is_found_by_its_link() {
        let listed = "drwxr-xr-x root/root 0 2026-01-01 00:00 ./opt/kata/\n\
                      lrwxrwxrwx root/root 0 2026-01-01 00:00 ./opt/kata/share/kata-containers/kata-containers.img -> k.image\n\
                      -rw-r--r-- root/root 9 2026-01-01 00:00 opt/kata/share/kata-containers/kata-containers-confidential.img\n\
                      lrwxrwxrwx root/root 0 2026-01-01 00:00 ./opt/kata/share/kata-containers/out.img -> ../../x\n";
        let found = |name: &str| member(listed, name).map(|(_, member)| member);
        assert_eq!(found("kata-containers.img").as_deref(), Some("./opt/kata/share/kata-containers/k.image"));
        let confidential = "opt/kata/share/kata-containers/kata-containers-confidential.img";
        assert_eq!(found("kata-containers-confidential.img").as_deref(), Some(confidential));
        assert_eq!((found("out.img"), found("containers.img")), (None, None));
    }

    /// Temporary folder, removed on drop.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let path = std::env::temp_dir().join(format!("peerpod-kata-{name}-{}", std::process::id()));
            fs::create_dir_all(path.join("work")).unwrap();
            Folder(path)
        }

        fn shell(&self, script: &str) {
            run::output(run::tool("sh").args(["-ec", script]).current_dir(&self.0)).unwrap();
        }

        fn find(&self, source: &str) -> anyhow::Result<Kata> {
            let source = self.0.join(source).display().to_string();
            Kata::find(&source, Arch::X86_64, &self.0.join("cache"), &folder(&self.0.join("work"), "kata")?)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    #[test]
    fn the_parts_are_found_in_a_folder_and_in_a_guest_image_with_erofs() {
        let here = Folder::new("sources");
        here.shell(
            "mkdir -p root/usr/bin root/pause_bundle/rootfs dir empty
             echo agent > root/usr/bin/kata-agent; echo {} > root/pause_bundle/config.json
             mkfs.erofs --quiet root.erofs root
             truncate -s 12M image; echo 'start=2048, size=16384' | sfdisk -q --label gpt image
             dd if=root.erofs of=image bs=1M seek=1 conv=notrunc status=none
             mkdir -p opt/kata/share/kata-containers
             cp image opt/kata/share/kata-containers/kata-containers.img
             xz -c root/usr/bin/kata-agent > dir/kata-agent.xz; tar -C root -cJf dir/pause_bundle.tar.xz pause_bundle
             truncate -s 2M blank",
        );
        for source in ["image", "dir", "opt/kata", "."] {
            let found = here.find(source).unwrap_or_else(|error| panic!("{source}: {error:#}"));
            assert_eq!(fs::read_to_string(&found.agent).unwrap(), "agent\n", "{source}");
            assert_ne!(fs::metadata(&found.agent).unwrap().permissions().mode() & 0o111, 0, "{source}");
            assert!(found.pause_bundle.unwrap().join("config.json").is_file(), "{source}");
        }
        for (source, part) in
            [("empty", "neither kata-agent nor"), ("absent", "nor a version"), ("blank", "blank")]
        {
            let error = format!("{:#}", here.find(source).unwrap_err());
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn a_version_is_no_path() {
        assert!(is_version("4.1.0") && is_version("4.2.0-rc1"));
        assert!(!is_version("./4.1.0") && !is_version("kata") && !is_version("4/1") && !is_version(""));
    }
}
