//! Queries a registry: for the manifest of a name, its layers, and the layers' bytes.
//!
//! The client checks digests of manifests and of streams; sizes, types, counts and the choice among platforms are
//! checked here. The client reads small answers whole, so the memory limit of the process is the bound there.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use futures_util::StreamExt;
use oci_client::client::{
    BlobResponse, Certificate, CertificateEncoding, ClientConfig, ClientProtocol, SizedStream,
};
use oci_client::errors::OciDistributionError;
use oci_client::manifest::{ImageIndexEntry, OciDescriptor, OciManifest};
use oci_client::secrets::RegistryAuth;
use oci_client::{Client, Reference, RegistryOperation};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::Job;
use crate::cause::{Cause, Error, disk, quote};
use crate::credentials;
use crate::stream::Packing;

/// Limit of layers per image; an overlay has no more.
const MAX_LAYERS: usize = 128;
/// Size limit of an image's configuration in bytes.
const MAX_CONFIG: i64 = 8 << 20;
const MAX_CA: u64 = 16 << 20;
const CONNECT: Duration = Duration::from_secs(10);
/// Time limit of all small requests of one attempt together.
const QUESTIONS: Duration = Duration::from_secs(60);

/// Image, as described by its manifest and configuration.
#[derive(Clone, Debug)]
pub(crate) struct Image {
    pub(crate) digest: String,
    pub(crate) layers: Vec<Layer>,
    pub(crate) process: Process,
}

#[derive(Clone, Debug)]
pub(crate) struct Layer {
    pub(crate) descriptor: OciDescriptor,
    pub(crate) packing: Packing,
    /// Digest of the unpacked archive.
    pub(crate) diff_id: String,
    pub(crate) size: u64,
}

/// Process in the image's configuration, for a runtime to start.
#[derive(Clone, Debug, Default, Deserialize, serde::Serialize, PartialEq, Eq)]
#[serde(default, rename_all = "PascalCase")]
pub(crate) struct Process {
    pub(crate) env: Option<Vec<String>>,
    pub(crate) entrypoint: Option<Vec<String>>,
    pub(crate) cmd: Option<Vec<String>>,
    pub(crate) working_dir: Option<String>,
}

#[derive(Deserialize)]
struct Config {
    #[serde(default)]
    config: Option<Process>,
    rootfs: Rootfs,
}

#[derive(Deserialize)]
struct Rootfs {
    #[serde(default)]
    diff_ids: Vec<String>,
}

pub(crate) struct Registry {
    client: Client,
    pub(crate) reference: Reference,
    silence: Duration,
}

/// Parses an image's name in the forms that people write.
pub(crate) fn parse(image: &str) -> Result<Reference, Error> {
    let image = image.strip_prefix("docker://").unwrap_or(image);
    image.parse().map_err(|error| {
        let image = quote(image);
        let text =
            format!("the image's name {image:?}: {error}; it is written like registry.example/app:tag");
        Error::new(Cause::Malformed, text)
    })
}

impl Registry {
    /// Requests the manifest of the name, with each of the matching credentials, and without any.
    pub(crate) async fn find(job: &Job, reference: &Reference) -> Result<(Registry, Image), Error> {
        let registry = reference.resolve_registry();
        let secrets = credentials::for_image(&job.credentials, registry, reference.repository())
            .map_err(|error| Error::new(Cause::Denied, error))?;
        let mut denied = None;
        for auth in secrets.iter().chain([&RegistryAuth::Anonymous]) {
            let registry = Registry {
                client: client(job)?,
                reference: reference.clone(),
                silence: Duration::from_secs(job.limits.silence_seconds),
            };
            match tokio::time::timeout(QUESTIONS, registry.ask(auth)).await {
                Ok(Ok(image)) => return Ok((registry, image)),
                Ok(Err(error)) if error.cause == Cause::Denied => {
                    // The reply to the first credential is more useful than the reply to an anonymous request.
                    denied.get_or_insert(error);
                }
                Ok(Err(error)) => return Err(error),
                Err(_) => {
                    let name = reference.resolve_registry();
                    let text =
                        format!("asking {name} for the manifest: no whole answer within {QUESTIONS:?}");
                    return Err(Error::new(Cause::Unreachable, text));
                }
            }
        }
        let mut error = denied.unwrap_or_else(|| Error::new(Cause::Denied, "no credentials"));
        error.text.push_str(&match secrets.len() {
            0 => format!(" (no pull secret for {registry} reached this VM)"),
            1 => format!(" (the pull secret for {registry} was tried)"),
            n => format!(" ({n} pull secrets for {registry} were tried)"),
        });
        Err(error)
    }

    async fn ask(&self, auth: &RegistryAuth) -> Result<Image, Error> {
        let reference = &self.reference;
        let what = format!("asking {} for the manifest of {reference}", reference.resolve_registry());
        let failed = |error: OciDistributionError| crate::cause::registry(&what, &error);
        self.client.auth(reference, auth, RegistryOperation::Pull).await.map_err(failed)?;
        let (mut manifest, mut digest) = self.client.pull_manifest(reference, auth).await.map_err(failed)?;
        if let OciManifest::ImageIndex(index) = &manifest {
            let chosen = reference.clone_with_digest(choose(&index.manifests)?.to_owned());
            (manifest, digest) = self.client.pull_manifest(&chosen, auth).await.map_err(failed)?;
        }
        let OciManifest::Image(manifest) = manifest else {
            return Err(Error::new(Cause::Unsupported, "an index of indexes; name the image itself"));
        };
        let config = self.config(&manifest.config).await?;
        let layers = pair(manifest.layers, &config.rootfs.diff_ids)?;
        Ok(Image { digest, layers, process: config.config.unwrap_or_default() })
    }

    async fn config(&self, descriptor: &OciDescriptor) -> Result<Config, Error> {
        if !(0..=MAX_CONFIG).contains(&descriptor.size) {
            let text = format!("the image's configuration has {} bytes", descriptor.size);
            return Err(Error::new(Cause::Malformed, text));
        }
        let mut bytes = Vec::new();
        self.blob(descriptor, |part| {
            bytes.extend_from_slice(part);
            Ok(())
        })
        .await?;
        serde_json::from_slice(&bytes).map_err(|error| {
            let text = format!("the image's configuration cannot be read: {error}; is it a container image?");
            Error::new(Cause::Unsupported, text)
        })
    }

    /// Writes a layer's packed bytes to `path`; they have the digest of the manifest. An earlier attempt's bytes in the
    /// file count, and those of an attempt that a later one can continue stay. `told` gets the number of bytes.
    pub(crate) async fn save(&self, layer: &Layer, path: &Path, told: &impl Fn(u64)) -> Result<(), Error> {
        let saved = self.continue_file(layer, path, told).await;
        if saved.as_ref().is_err_and(|error| !error.cause.is_transient()) {
            drop(fs::remove_file(path));
        }
        saved
    }

    async fn continue_file(&self, layer: &Layer, path: &Path, told: &impl Fn(u64)) -> Result<(), Error> {
        let failed = disk("writing", path);
        let opened = File::options().create(true).truncate(false).read(true).write(true).open(path);
        let mut file = opened.map_err(&failed)?;
        let mut have = file.metadata().map_err(&failed)?.len();
        if have > layer.size {
            have = 0;
        }
        let stream = if have < layer.size { Some(self.open(&layer.descriptor, have).await?) } else { None };
        if matches!(stream, Some(Opened { offset: 0, .. })) {
            have = 0;
        }
        file.set_len(have).map_err(&failed)?;
        let mut hash = None;
        if have > 0 {
            // The client checks whole streams only.
            let hashing = tokio::task::spawn_blocking(move || hash_of(file)).await;
            let hashing = hashing.map_err(|error| Error::new(Cause::Internal, error.to_string()))?;
            let (hashed, read) = hashing.map_err(&failed)?;
            (hash, file) = (Some(hashed), read);
        }
        told(have);
        if let Some(opened) = stream {
            let take = |part: &[u8]| {
                file.write_all(part).map_err(&failed)?;
                hash.iter_mut().for_each(|hash| hash.update(part));
                have += part.len() as u64;
                told(have);
                Ok(())
            };
            self.drain(&layer.descriptor, opened, take).await?;
        }
        let found = hash.map(|hash| format!("sha256:{}", hex::encode(hash.finalize())));
        if found.is_some_and(|found| found != layer.descriptor.digest) {
            let digest = &layer.descriptor.digest;
            return Err(Error::new(Cause::Digest, format!("the continued layer {digest} has other bytes")));
        }
        Ok(())
    }

    /// Streams a blob; an error unless it has exactly the expected size and digest.
    async fn blob(
        &self,
        descriptor: &OciDescriptor,
        take: impl FnMut(&[u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let opened = self.open(descriptor, 0).await?;
        self.drain(descriptor, opened, take).await
    }

    /// Requests a blob from an offset on. A registry may send the whole blob instead.
    async fn open(&self, descriptor: &OciDescriptor, offset: u64) -> Result<Opened, Error> {
        let attempt = self.attempt(descriptor);
        // Without addresses of third parties: they come from the manifest's author.
        let descriptor = OciDescriptor { urls: None, ..descriptor.clone() };
        let opening = async {
            if offset == 0 {
                let stream = self.client.pull_blob_stream(&self.reference, &descriptor).await?;
                return Ok(Opened { stream, offset });
            }
            let opening = self.client.pull_blob_stream_partial(&self.reference, &descriptor, offset, None);
            Ok(match opening.await? {
                BlobResponse::Full(stream) => Opened { stream, offset: 0 },
                BlobResponse::Partial(stream) => Opened { stream, offset },
            })
        };
        let opened = tokio::time::timeout(self.silence, opening).await.map_err(|_| self.late(&attempt))?;
        opened.map_err(|error| crate::cause::registry(&attempt, &error))
    }

    /// Reads an open blob to its end.
    async fn drain(
        &self,
        descriptor: &OciDescriptor,
        opened: Opened,
        mut take: impl FnMut(&[u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let Opened { mut stream, offset } = opened;
        let attempt = self.attempt(descriptor);
        let mut left = u64::try_from(descriptor.size).unwrap_or(0).saturating_sub(offset);
        let late = |_| self.late(&attempt);
        while let Some(part) = tokio::time::timeout(self.silence, stream.next()).await.map_err(late)? {
            let failed = |error| crate::cause::registry(&attempt, &OciDistributionError::IoError(error));
            let part = part.map_err(failed)?;
            left = left.checked_sub(part.len() as u64).ok_or_else(|| {
                let size = descriptor.size;
                let text = format!("{attempt}: more bytes than the {size} that the manifest names");
                Error::new(Cause::Digest, text)
            })?;
            take(&part)?;
        }
        if left > 0 {
            let text = format!("{attempt}: {left} bytes of {} are missing", descriptor.size);
            return Err(Error::new(Cause::Digest, text));
        }
        Ok(())
    }

    fn attempt(&self, descriptor: &OciDescriptor) -> String {
        format!("fetching {} from {}", descriptor.digest, self.reference.resolve_registry())
    }

    fn late(&self, attempt: &str) -> Error {
        let text = format!("{attempt}: the registry is silent for {:?}", self.silence);
        Error::new(Cause::Unreachable, text)
    }
}

/// Blob that the registry sends from this offset on.
struct Opened {
    stream: SizedStream,
    offset: u64,
}

/// Returns the hash of a file's bytes, and the file at its end.
fn hash_of(mut file: File) -> io::Result<(Sha256, File)> {
    let mut hash = Sha256::new();
    io::copy(&mut file, &mut hash)?;
    Ok((hash, file))
}

/// Returns the digest of the entry for this machine.
fn choose(entries: &[ImageIndexEntry]) -> Result<&str, Error> {
    let ours = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    let fits = |entry: &&ImageIndexEntry| {
        entry.platform.as_ref().is_some_and(|platform| {
            platform.os.to_string() == "linux"
                && platform.architecture.to_string() == ours
                // arm64 has one variant; later ones of amd64 (v2 …) need newer processors.
                && matches!(platform.variant.as_deref(), None | Some("" | "v1" | "v8"))
        })
    };
    entries.iter().find(fits).map(|entry| entry.digest.as_str()).ok_or_else(|| {
        let platforms = entries.iter().filter_map(|entry| entry.platform.as_ref()).take(10);
        let there: Vec<String> =
            platforms.map(|platform| format!("{}/{}", platform.os, platform.architecture)).collect();
        let text = format!("the image is for {}, not for linux/{ours}", quote(&there.join(", ")));
        Error::new(Cause::Unsupported, text)
    })
}

/// Pairs the layers of manifest and configuration, which must agree.
fn pair(layers: Vec<OciDescriptor>, diff_ids: &[String]) -> Result<Vec<Layer>, Error> {
    let malformed = |text: String| Error::new(Cause::Malformed, text);
    if layers.len() != diff_ids.len() {
        let text = format!("the manifest has {} layers, the configuration {}", layers.len(), diff_ids.len());
        return Err(malformed(text));
    }
    if layers.is_empty() || layers.len() > MAX_LAYERS {
        let text = format!("the image has {} layers; 1 to {MAX_LAYERS} are possible", layers.len());
        return Err(malformed(text));
    }
    let is_sha256 = |text: &str| {
        text.strip_prefix("sha256:")
            .is_some_and(|hex| hex.len() == 64 && hex.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')))
    };
    let pairs = layers.into_iter().zip(diff_ids).map(|(descriptor, diff_id)| {
        if !is_sha256(&descriptor.digest) || !is_sha256(diff_id) {
            return Err(Error::new(Cause::Unsupported, "a layer's digest is not a sha256"));
        }
        let size =
            u64::try_from(descriptor.size).map_err(|_| malformed("a layer of negative size".into()))?;
        let packing = Packing::of(&descriptor.media_type)?;
        Ok(Layer { descriptor, packing, diff_id: diff_id.clone(), size })
    });
    pairs.collect()
}

fn client(job: &Job) -> Result<Client, Error> {
    let config = ClientConfig {
        protocol: ClientProtocol::HttpsExcept(job.plain_http.clone()),
        tls_certs_only: roots(job),
        connect_timeout: Some(CONNECT),
        // Longer than the time limit of this module, which reports a clearer error.
        read_timeout: Some(Duration::from_secs(job.limits.silence_seconds.saturating_add(5))),
        user_agent: concat!("peerpod-guest/", env!("CARGO_PKG_VERSION")),
        platform_resolver: None,
        ..ClientConfig::default()
    };
    Client::try_from(config).map_err(|error| {
        let text = format!("making the registry client: {error}; does the VM image have CA certificates?");
        Error::new(Cause::Internal, text)
    })
}

/// Returns all readable certificates. An unreadable one is not trusted, which shows where it is missed.
fn roots(job: &Job) -> Vec<Certificate> {
    let read = |path: &PathBuf| -> Vec<u8> {
        let small = fs::metadata(path).is_ok_and(|found| found.len() <= MAX_CA);
        if small { fs::read(path).unwrap_or_default() } else { Vec::new() }
    };
    let texts = job.ca_files.iter().map(read).chain([job.ca_pem.clone().into_bytes()]);
    let certificates =
        texts.flat_map(|text| CertificateDer::pem_slice_iter(&text).flatten().collect::<Vec<_>>());
    certificates.map(|der| Certificate { encoding: CertificateEncoding::Der, data: der.to_vec() }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_names_are_parsed_and_completed() {
        assert_eq!(parse("docker://busybox").unwrap().whole(), "docker.io/library/busybox:latest");
        assert_eq!(parse("r.example:5000/a/b:v1").unwrap().resolve_registry(), "r.example:5000");
        let error = parse("UPPER case").unwrap_err();
        assert!(error.cause == Cause::Malformed && error.text.contains("app:tag"), "{error}");
    }

    #[test]
    fn manifest_and_configuration_must_agree() {
        let id = |n: u8| format!("sha256:{}", format!("{n:02x}").repeat(32));
        let layer = |n: u8, size: i64, kind: &str| OciDescriptor {
            media_type: format!("application/vnd.oci.image.layer.v1.{kind}"),
            digest: id(n),
            size,
            ..OciDescriptor::default()
        };
        assert_eq!(pair(vec![layer(1, 10, "tar")], &[id(2)]).unwrap()[0].size, 10);
        let cause = |layers, ids: &[String]| pair(layers, ids).unwrap_err().cause;
        assert_eq!(cause(vec![layer(1, 10, "tar")], &[]), Cause::Malformed);
        assert_eq!(cause(Vec::new(), &[]), Cause::Malformed);
        assert_eq!(cause(vec![layer(1, -1, "tar")], &[id(2)]), Cause::Malformed);
        assert_eq!(cause(vec![layer(1, 1, "tar+lz4")], &[id(2)]), Cause::Unsupported);
        assert_eq!(cause(vec![layer(1, 1, "tar")], &["md5:x".into()]), Cause::Unsupported);
        assert_eq!(cause(vec![layer(1, 1, "tar"); 129], &vec![id(2); 129]), Cause::Malformed);
    }
}
