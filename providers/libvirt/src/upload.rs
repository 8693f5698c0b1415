//! Uploads a built disk image into the pool, as the volume of the setting `volume`, and deletes old images.
//!
//! The volume's name has 32 digits of the image's SHA-256. Its content is the proof that it is an image of ours: it has
//! this digest. No mark beside it could outlive its data, or be older than them. An unfinished upload has another
//! digest, and is a beginning of the image followed by zeros.

use std::path::Path;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use peerpod_provider_api::Error;
use peerpod_provider_cloud::image::{BuiltDisk, ImageSettings, Progress, Say, Upload};
use sha2::{Digest, Sha256};
use tokio::fs::File;
use tokio::io::{AsyncRead, AsyncReadExt, ReadBuf};
use tokio::time::{Instant, sleep};

use crate::config::LibvirtConfig;
use crate::create::format_of;
use crate::rpc::calls::{Named, Volume};
use crate::rpc::{LibvirtConnection, Redialer, RpcError, unless_absent};
use crate::store::{disk_format, is_there};
use crate::xml;

/// File of a built image that is uploaded.
const DISK: &str = "peerpod.qcow2";
/// Prefix of the volumes' names. It differs from the prefixes of VMs and of bases that a node uploads.
const PREFIX: &str = "peerpod-image-";
/// Ending of the volumes' names.
const SUFFIX: &str = ".qcow2";
/// Digits of the image's digest in the volume's name.
const DIGITS: usize = 32;
/// Interval of the looks at another process's upload.
const LOOK: Duration = Duration::from_millis(200);
/// Bytes of a volume that are read by one call.
const PIECE: usize = 4 << 20;

/// Uploads the disk image in `upload.folder` into the pool of the settings, unless the pool has it, and then deletes old
/// images as `upload.keep` permits. Returns the settings that select the image.
///
/// # Errors
/// There is no complete image in the folder, the pool has another volume of its name, or libvirtd refuses.
pub async fn upload(config: LibvirtConfig, upload: Upload) -> Result<ImageSettings, Error> {
    if upload.tpm {
        return Err(Error::invalid("upload to libvirt with a TPM: its VMs have none; leave --tpm out"));
    }
    let disk = BuiltDisk::open(&upload.folder, DISK).await?;
    check_arch(&disk)?;
    let name = format!("{PREFIX}{}{SUFFIX}", disk.short(DIGITS));
    let pool = config.pool.clone();
    let work = async {
        let libvirt = Redialer::new(config.address.clone(), config.call_timeout).get().await?;
        let pool = libvirt.pool(&config.pool).await?;
        // A process that uploads has an error, and ends, when libvirtd takes nothing for the time of one call.
        let stalled = config.call_timeout * 2;
        let placement =
            Placement { libvirt: &libvirt, pool: &pool, disk: &disk, name: &name, stalled, say: &upload.say };
        placement.place().await?;
        if let Some(keep) = upload.keep {
            prune(&libvirt, &pool, &name, keep.get(), &upload.say).await?;
        }
        Ok(())
    };
    let done: Result<(), Error> = work.await;
    done.map_err(|error| error.during(format_args!("upload of {} into pool {pool}", disk.path.display())))?;
    Ok([("pool", pool), ("volume", name)].into())
}

/// Image that must be in the pool.
struct Placement<'a> {
    libvirt: &'a LibvirtConnection,
    pool: &'a Named,
    disk: &'a BuiltDisk,
    name: &'a str,
    /// Time without growth after which an upload of another process counts as interrupted.
    stalled: Duration,
    say: &'a Say,
}

/// Content of a volume, compared with the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Content {
    Whole,
    /// The image's beginning, and zeros from there on.
    Beginning,
    Other,
}

impl Placement<'_> {
    /// Uploads the image unless the pool has it.
    async fn place(&self) -> Result<(), Error> {
        let Placement { libvirt, pool, name, say, .. } = *self;
        check_format(&self.disk.path).await?;
        loop {
            let Some(volume) = libvirt.find_volume(pool, name).await? else {
                if self.make().await? {
                    return self.is_usable().await;
                }
                continue;
            };
            match self.content(&volume).await? {
                Content::Whole => {
                    say(&format!("volume {name} has this image already; nothing is uploaded"));
                    return self.is_usable().await;
                }
                Content::Other => {
                    return Err(Error::invalid(format!(
                        "volume {name} exists and is not this image; rename or delete it (virsh vol-delete)"
                    )));
                }
                Content::Beginning => {
                    say(&format!("volume {name} is unfinished; waiting for the process that uploads it"));
                    if !self.grows(&volume).await? {
                        say(&format!("volume {name} stays unfinished; uploading it again"));
                        libvirt.delete_volume(&volume).await?;
                    }
                }
            }
        }
    }

    /// Makes the volume and uploads the image. Returns `false` if another process has made the volume meanwhile.
    async fn make(&self) -> Result<bool, Error> {
        let Placement { libvirt, pool, name, disk, say, .. } = *self;
        // libvirtd would write a header of its own into a new qcow2 volume.
        let volume = match libvirt.create_volume(pool, &xml::volume(name, "raw", disk.bytes, None)).await {
            Ok(volume) => volume,
            Err(error) if is_there(&error) => return Ok(false),
            Err(error) => return Err(error.into()),
        };
        say(&format!("uploading {} as volume {name}", disk.path.display()));
        let file = open(&disk.path).await?;
        let data = Counted { file, progress: Progress::new(Say::clone(say), disk.bytes) };
        libvirt.upload(&volume, disk.bytes, data).await?;
        Ok(true)
    }

    /// Returns once libvirtd knows the volume's format, which it finds by a scan of the pool.
    async fn is_usable(&self) -> Result<(), Error> {
        let Placement { libvirt, pool, name, .. } = *self;
        libvirt.refresh(pool).await?;
        let Some(volume) = libvirt.volume(pool, name).await? else {
            return Err(Error::transient(format!(
                "another process deleted volume {name}; repeat the upload"
            )));
        };
        match format_of(&libvirt.volume_xml(&volume).await?) {
            Some("qcow2") => Ok(()),
            _ => Err(Error::transient(format!(
                "libvirtd does not take volume {name} for a qcow2 image; repeat the upload"
            ))),
        }
    }

    async fn content(&self, volume: &Volume) -> Result<Content, Error> {
        let mut file = open(&self.disk.path).await?;
        let mut pieces = Pieces { libvirt: self.libvirt, volume, offset: 0 };
        let (mut equal, mut read) = (true, 0);
        loop {
            let piece = pieces.next().await?;
            if piece.is_empty() {
                break;
            }
            read += piece.len() as u64;
            let mut expected = Vec::with_capacity(piece.len());
            let taken = (&mut file).take(piece.len() as u64).read_to_end(&mut expected).await;
            taken.map_err(|error| unreadable(&self.disk.path, &error))?;
            if equal && piece == expected {
                continue;
            }
            let from =
                if equal { piece.iter().zip(&expected).take_while(|(a, b)| a == b).count() } else { 0 };
            equal = false;
            if piece.iter().skip(from).any(|byte| *byte != 0) {
                return Ok(Content::Other);
            }
        }
        Ok(if equal && read == self.disk.bytes { Content::Whole } else { Content::Beginning })
    }

    /// Whether another process writes to the volume. Waits until it has grown, or has not grown for a while.
    async fn grows(&self, volume: &Volume) -> Result<bool, Error> {
        let (since, mut first) = (Instant::now(), None);
        while since.elapsed() < self.stalled {
            let Some((.., allocation)) = unless_absent(self.libvirt.volume_sizes(volume).await)? else {
                return Ok(true);
            };
            if *first.get_or_insert(allocation) != allocation {
                return Ok(true);
            }
            sleep(LOOK).await;
        }
        Ok(false)
    }
}

/// Deletes the images of ours that no VM uses, except `current` and the newest others up to `keep` images in total.
async fn prune(
    libvirt: &LibvirtConnection,
    pool: &Named,
    current: &str,
    keep: usize,
    say: &Say,
) -> Result<(), Error> {
    let mut images = Vec::new();
    for volume in libvirt.volumes(pool).await?.0 {
        if volume.name != current && digits_of(&volume.name).is_some() {
            let Some(xml) = unless_absent(libvirt.volume_xml(&volume).await)? else { continue };
            images.push((modified(&xml), volume));
        }
    }
    images.sort_by(|(a, _), (b, _)| b.total_cmp(a));
    for (_, volume) in images.into_iter().skip(keep.saturating_sub(1)) {
        let name = &volume.name;
        if !is_ours(libvirt, &volume).await? {
            say(&format!(
                "kept {name}: its content has not the digest of its name, so it is no image of ours"
            ));
        } else if let Some(user) = user_of(libvirt, name).await? {
            say(&format!("kept {name}: {user} uses it"));
        } else {
            libvirt.delete_volume(&volume).await?;
            say(&format!("deleted {name}"));
        }
    }
    Ok(())
}

/// Returns the digits of the image's digest in a volume's name; `None`: not a name of an image.
fn digits_of(name: &str) -> Option<&str> {
    let digits = name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?;
    let is_hex = digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    (digits.len() == DIGITS && is_hex).then_some(digits)
}

/// Whether the volume's content has the digest of its name.
async fn is_ours(libvirt: &LibvirtConnection, volume: &Volume) -> Result<bool, RpcError> {
    let (mut pieces, mut hash) = (Pieces { libvirt, volume, offset: 0 }, Sha256::new());
    loop {
        let piece = pieces.next().await?;
        if piece.is_empty() {
            let digest = hex::encode(hash.finalize());
            return Ok(digits_of(&volume.name).is_some_and(|digits| digest.starts_with(digits)));
        }
        hash.update(piece);
    }
}

/// Returns the VM that names the volume, or the volume on top of it, in any active pool.
async fn user_of(libvirt: &LibvirtConnection, name: &str) -> Result<Option<String>, RpcError> {
    for domain in libvirt.domains().await?.0 {
        let xml = unless_absent(libvirt.domain_xml(&domain).await)?;
        if xml.is_some_and(|xml| xml.contains(name)) {
            return Ok(Some(format!("VM {}", domain.name)));
        }
    }
    for pool in libvirt.pools().await?.0 {
        for volume in libvirt.volumes(&pool).await?.0 {
            let Some(xml) = unless_absent(libvirt.volume_xml(&volume).await)? else { continue };
            if backing(&xml).is_some_and(|path| path.ends_with(name)) {
                return Ok(Some(format!("volume {} of pool {}", volume.name, pool.name)));
            }
        }
    }
    Ok(None)
}

/// Returns the path of a volume's backing file.
fn backing(xml: &str) -> Option<String> {
    let document = roxmltree::Document::parse(xml).ok()?;
    let backing = xml::child(document.root_element(), "backingStore")?;
    xml::child(backing, "path")?.text().map(str::to_owned)
}

/// Returns the time of a volume's last change, in seconds since 1970; 0 if libvirt does not know it.
fn modified(xml: &str) -> f64 {
    let find = || {
        let document = roxmltree::Document::parse(xml).ok()?;
        let target = xml::child(document.root_element(), "target")?;
        xml::child(xml::child(target, "timestamps")?, "mtime")?.text()?.parse().ok()
    };
    find().unwrap_or_default()
}

/// Content of a volume, piece by piece.
struct Pieces<'a> {
    libvirt: &'a LibvirtConnection,
    volume: &'a Volume,
    offset: u64,
}

impl Pieces<'_> {
    /// Returns the next piece; empty at the end.
    async fn next(&mut self) -> Result<Vec<u8>, RpcError> {
        let piece = self.libvirt.download(self.volume, self.offset, PIECE).await?;
        self.offset += piece.len() as u64;
        Ok(piece)
    }
}

/// File that reports its progress.
struct Counted {
    file: File,
    progress: Progress,
}

impl AsyncRead for Counted {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let before = buffer.filled().len();
        let read = ready!(Pin::new(&mut self.file).poll_read(context, buffer));
        self.progress.add((buffer.filled().len() - before) as u64);
        Poll::Ready(read)
    }
}

/// Refuses an image for other VMs than those of this provider.
fn check_arch(disk: &BuiltDisk) -> Result<(), Error> {
    if disk.arch == xml::ARCH {
        return Ok(());
    }
    let (path, arch, own) = (disk.path.display(), &disk.arch, xml::ARCH);
    Err(Error::invalid(format!(
        "upload {path} to libvirt: the image is for {arch}, and the VMs are {own}; build it for them (peerpod image \
         build --arch {own}), or name its folder (--image)"
    )))
}

/// Refuses a file that is no qcow2 image, or the overlay of another one.
async fn check_format(path: &Path) -> Result<(), Error> {
    let mut head = Vec::new();
    let read = open(path).await?.take(512).read_to_end(&mut head).await;
    read.map_err(|error| unreadable(path, &error))?;
    match disk_format(&head) {
        Ok("qcow2") => Ok(()),
        Ok(_) => Err(Error::invalid(format!("{}: it is no qcow2 image", path.display()))),
        Err(why) => Err(Error::invalid(format!("{}: {why}", path.display()))),
    }
}

async fn open(path: &Path) -> Result<File, Error> {
    File::open(path).await.map_err(|error| unreadable(path, &error))
}

fn unreadable(path: &Path, error: &std::io::Error) -> Error {
    Error::invalid(format!("read {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_for_another_architecture_is_refused() {
        let disk = |arch: &str| BuiltDisk {
            path: "d/peerpod.qcow2".into(),
            sha256: String::new(),
            bytes: 0,
            arch: arch.to_owned(),
        };
        check_arch(&disk("x86_64")).unwrap();
        let why = check_arch(&disk("aarch64")).unwrap_err().to_string();
        assert!(why.contains("d/peerpod.qcow2") && why.contains("for aarch64"), "{why}");
    }

    #[test]
    fn names_with_the_digits_of_a_digest_are_images() {
        let digits = "0123456789abcdef0123456789abcdef";
        assert_eq!(digits_of(&format!("peerpod-image-{digits}.qcow2")), Some(digits));
        let (upper, base) = (digits.to_uppercase(), format!("peerpod-base-{digits}.qcow2"));
        let wrong = [format!("peerpod-image-{upper}.qcow2"), base, format!("peerpod-image-{digits}0.qcow2")];
        for name in wrong.iter().map(String::as_str).chain(["peerpod.qcow2", "peerpod-image-.qcow2"]) {
            assert_eq!(digits_of(name), None, "{name}");
        }
    }

    #[test]
    fn a_volumes_description_has_its_backing_file_and_its_time() {
        let xml = "<volume><target><timestamps><mtime>17.25</mtime></timestamps></target>\
                   <backingStore><path>/pool/a.qcow2</path></backingStore></volume>";
        assert_eq!((backing(xml).as_deref(), modified(xml)), (Some("/pool/a.qcow2"), 17.25));
        for other in ["<volume/>", "<volume><target/><backingStore/></volume>", "<"] {
            assert_eq!((backing(other), modified(other)), (None, 0.0), "{other}");
        }
    }
}
