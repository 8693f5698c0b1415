//! Carries out one job, from the name to the mount.

use std::cell::Cell;
use std::fs::{self, File};
use std::io;
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, Instant};

use futures_util::stream::{self, LocalBoxStream, StreamExt, TryStreamExt};
use tokio::sync::{mpsc, oneshot};

use crate::cause::{Cause, Error, disk};
use crate::process::say;
use crate::progress::Progress;
use crate::registry::{self, Image, Layer, Process, Registry};
use crate::store::{ImageRecord, ImageStore, chain};
use crate::stream::{Counted, open};
use crate::{Event, Job, Outcome, mount, unpack};

/// Limit of layers that are fetched at the same time.
const AT_ONCE: usize = 3;
/// Limit of attempts for one layer, and for the requests before.
const TRIES: u32 = 4;
/// Directory of the kata-agent's bundles.
const BUNDLES: &str = "/run/kata-containers";

/// Does the job. The caller's working directory becomes the store.
pub(crate) async fn pull(job: &Job) -> Result<Outcome, Error> {
    let reference = registry::parse(&job.image)?;
    job.bundle.as_deref().map_or(Ok(()), check_bundle)?;
    let store = ImageStore::open(&job.store)?;
    std::env::set_current_dir(store.path()).map_err(disk("entering", store.path()))?;
    store.sweep(|| fs::read_to_string("/proc/self/mountinfo"));
    let name = reference.whole();
    let pinned = reference.digest().is_some();
    let (record, outcome) = match store.recall(&name) {
        Some(record) if pinned => known(record),
        before => match fresh(job, &reference, &store).await {
            Ok(image) => image,
            // A restart of a container must not depend on a registry that is away at the moment.
            Err(error) => {
                let record = before.filter(|_| error.cause.is_transient()).ok_or_else(|| error.clone())?;
                say(&Event::Warning { text: format!("{error}; the image that is here is used") });
                known(record)
            }
        },
    };
    if let Some(bundle) = &job.bundle {
        mount_bundle(&store, &record, bundle)?;
    }
    Ok(outcome)
}

fn known(record: ImageRecord) -> (ImageRecord, Outcome) {
    let outcome =
        Outcome { manifest_digest: record.digest.clone(), layers: record.layers.len(), ..Outcome::default() };
    (record, outcome)
}

/// Asks the registry, and fetches missing layers.
async fn fresh(
    job: &Job,
    reference: &oci_client::Reference,
    store: &ImageStore,
) -> Result<(ImageRecord, Outcome), Error> {
    let began = Instant::now();
    let (registry, image) = retried(async || Registry::find(job, reference).await).await?;
    let name = reference.whole();
    let (fetched, bytes) = layers(job, &registry, &image, store).await?;
    store.remember(&name, &image)?;
    let outcome =
        Outcome { manifest_digest: image.digest.clone(), layers: image.layers.len(), fetched, bytes };
    let (layers, kib, ms) = (outcome.layers, bytes >> 10, began.elapsed().as_millis());
    let text = format!("{name} is here: {layers} layers, {fetched} fetched, {kib} KiB in {ms} ms");
    say(&Event::Progress { text });
    let record = store
        .recall(&name)
        .ok_or_else(|| Error::new(Cause::Internal, "a layer vanished from the store while it was used"))?;
    Ok((record, outcome))
}

/// Repeats an attempt after transient failures.
async fn retried<T>(attempt: impl AsyncFn() -> Result<T, Error>) -> Result<T, Error> {
    let mut failures = 0;
    loop {
        match attempt().await {
            Err(error) if error.cause.is_transient() && failures + 1 < TRIES => {
                say(&Event::Warning { text: format!("{error}; tried again") });
                tokio::time::sleep(Duration::from_millis(500 << failures)).await;
                failures += 1;
            }
            other => return other,
        }
    }
}

/// Fetches and unpacks the missing layers; returns their number, and their bytes.
async fn layers(
    job: &Job,
    registry: &Registry,
    image: &Image,
    store: &ImageStore,
) -> Result<(usize, u64), Error> {
    let ids = chain(image.layers.iter().map(|layer| layer.diff_id.as_str()));
    store.remove_remains(&ids);
    // The maker of a layer holds its lock from the first byte on, so that concurrent pulls fetch shared layers once.
    // Locks are taken in the order of the layers, the lowest first, which excludes a deadlock.
    let missing: Vec<(usize, &Layer)> =
        image.layers.iter().enumerate().filter(|(at, _)| !store.has(&ids[*at])).collect();
    let all = missing.iter().map(|(_, layer)| layer.size).fold(0, u64::saturating_add);
    let progress = &Progress::new(image.layers.len(), all);
    let (unpacker, done) = Unpacker::start(job, store.clone(), ids.clone())?;
    let ids = &ids;
    let fetched = stream::iter(missing)
        .then(|(at, layer)| async move {
            let (store, id) = (store.clone(), ids[at].clone());
            let locked = tokio::task::spawn_blocking(move || store.lock(&id)).await;
            let locked = locked.unwrap_or_else(|e| Err(Error::new(Cause::Internal, e.to_string())));
            (at, layer, locked)
        })
        .map(|(at, layer, locked)| async move {
            let lock = locked?;
            let told = |bytes| progress.set(at, bytes);
            if store.has(&ids[at]) {
                told(layer.size);
                return Ok(None); // another process was faster
            }
            let path = store.blob(&ids[at]);
            retried(async || registry.save(layer, &path, &told).await).await?;
            let text = format!("layer {} of {}: {} KiB", at + 1, image.layers.len(), layer.size >> 10);
            say(&Event::Progress { text });
            Ok(Some(Work { at, blob: Blob(path), layer: layer.clone(), _lock: lock }))
        })
        .buffered(AT_ONCE)
        .boxed_local();
    let sent = send_all(fetched, unpacker).await;
    let unpacked = done.await.map_err(|_| Error::new(Cause::Internal, "unpacking ended without a result"))?;
    let sent = sent?;
    for text in unpacked? {
        say(&Event::Warning { text });
    }
    Ok(sent)
}

/// Sends the fetched layers to the unpacker. Returns their number and their bytes. If the unpacker has ended, its own
/// result has the reason.
async fn send_all(
    mut fetched: LocalBoxStream<'_, Result<Option<Work>, Error>>,
    unpacker: mpsc::Sender<Work>,
) -> Result<(usize, u64), Error> {
    let (mut count, mut bytes) = (0, 0);
    while let Some(work) = fetched.try_next().await? {
        let Some(work) = work else { continue };
        (count, bytes) = (count + 1, bytes + work.layer.size);
        if unpacker.send(work).await.is_err() {
            break;
        }
    }
    Ok((count, bytes))
}

/// File of a whole layer's packed bytes. It is removed with its owner.
struct Blob(PathBuf);

impl Drop for Blob {
    fn drop(&mut self) {
        drop(fs::remove_file(&self.0));
    }
}

struct Work {
    at: usize,
    blob: Blob,
    layer: Layer,
    _lock: File,
}

type Unpacked = Result<Vec<String>, Error>;

/// Thread that unpacks, with mounts of its own.
struct Unpacker {
    store: ImageStore,
    ids: Vec<String>,
    bytes: Cell<u64>,
    entries: u64,
}

impl Unpacker {
    fn start(
        job: &Job,
        store: ImageStore,
        ids: Vec<String>,
    ) -> Result<(mpsc::Sender<Work>, oneshot::Receiver<Unpacked>), Error> {
        let (sender, work) = mpsc::channel(1);
        let (told, done) = oneshot::channel();
        let bytes = Cell::new(job.limits.unpacked_bytes);
        let mut unpacker = Unpacker { store, ids, bytes, entries: job.limits.entries };
        std::thread::Builder::new()
            .name("unpack".into())
            .spawn(move || drop(told.send(unpacker.run(work))))
            .map_err(|e| Error::new(Cause::Internal, format!("starting a thread: {e}")))?;
        Ok((sender, done))
    }

    fn run(&mut self, mut work: mpsc::Receiver<Work>) -> Unpacked {
        mount::apart()
            .and_then(|()| std::env::set_current_dir(self.store.path()))
            .map_err(disk("taking mounts apart for", self.store.path()))?;
        let mut warnings = Vec::new();
        while let Some(work) = work.blocking_recv() {
            warnings.extend(self.layer(work)?);
        }
        Ok(warnings)
    }

    fn layer(&mut self, work: Work) -> Result<Option<String>, Error> {
        let id = self.ids[work.at].clone();
        let place = self.store.begin(&id)?;
        let made = self.make(&work, &place);
        if made.is_err() {
            self.store.abandon(&id);
        }
        let left = made?;
        self.store.finish(&id)?;
        let (number, unpack::LeftOut { devices, xattrs }) = (work.at + 1, left);
        Ok((left != unpack::LeftOut::default()).then(|| {
            format!("layer {number}: left out {devices} device nodes and {xattrs} extended attributes")
        }))
    }

    fn make(&mut self, work: &Work, place: &Path) -> Result<unpack::LeftOut, Error> {
        let id = &self.ids[work.at];
        let below = &self.ids[..work.at];
        let (root, mounted) = if below.is_empty() {
            (place.join("fs"), false)
        } else {
            let merged = place.join("merged");
            mount::overlay(below, &format!("t/{id}"), &merged, true)
                .map_err(|e| overlay_failed(&merged, e))?;
            (merged, true)
        };
        let unpacked = self.archive(work, &root);
        if mounted {
            mount::unmount_all(&root).map_err(disk("unmounting", &root))?;
        }
        unpacked
    }

    fn archive(&mut self, work: &Work, root: &Path) -> Result<unpack::LeftOut, Error> {
        let blob = &work.blob.0;
        let source = open(blob, work.layer.packing).map_err(disk("opening", blob))?;
        let mut counted = Counted::new(source, &self.bytes);
        let left = unpack::unpack(&mut counted, root, &mut self.entries, &self.bytes)?;
        let diff_id = counted
            .finish()
            .map_err(|e| Error::new(Cause::Malformed, format!("reading layer {}: {e}", work.at + 1)))?;
        if diff_id != work.layer.diff_id {
            let (number, named) = (work.at + 1, &work.layer.diff_id);
            let text = format!(
                "layer {number}: unpacked it is {diff_id}, and the image's configuration names {named}"
            );
            return Err(Error::new(Cause::Digest, text));
        }
        Ok(left)
    }
}

fn overlay_failed(target: &Path, error: io::Error) -> Error {
    let mut error = disk("mounting an overlay on", target)(error);
    if error.cause == Cause::Internal {
        error.text += "; does the kernel have overlayfs, and is the store (images.store) on a disk or tmpfs?";
    }
    error
}

/// Checks a bundle's path: absolute, below the kata-agent's own folder, without steps upwards.
fn check_bundle(bundle: &Path) -> Result<(), Error> {
    let plain = bundle.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
    if plain && bundle.starts_with(BUNDLES) && bundle != Path::new(BUNDLES) {
        return Ok(());
    }
    Err(Error::new(Cause::Malformed, format!("the bundle {} is not below {BUNDLES}", bundle.display())))
}

/// Mounts the container's root: all layers, and a writable one. Removes the mounts of an earlier attempt.
fn mount_bundle(store: &ImageStore, record: &ImageRecord, bundle: &Path) -> Result<(), Error> {
    let rootfs = bundle.join("rootfs");
    fs::create_dir_all(&rootfs).map_err(disk("making", &rootfs))?;
    mount::unmount_all(&rootfs).map_err(disk("unmounting", &rootfs))?;
    let (upper, _lock) = store.container(bundle)?;
    like_top(store, record, &upper.join("fs"))?;
    let name = upper.file_name().unwrap_or_default().to_string_lossy();
    mount::overlay(&record.layers, &format!("c/{name}"), &rootfs, false)
        .map_err(|e| overlay_failed(&rootfs, e))?;
    let config = bundle.join("config.json");
    fs::write(&config, runtime_config(&record.process).to_string()).map_err(disk("writing", &config))
}

/// Gives the root folder the owner and mode of the uppermost layer.
fn like_top(store: &ImageStore, record: &ImageRecord, upper: &Path) -> Result<(), Error> {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
    let Some(top) = record.layers.last() else { return Ok(()) };
    let like = || -> io::Result<()> {
        let found = fs::metadata(store.layer(top))?;
        chown(upper, Some(found.uid()), Some(found.gid()))?;
        fs::set_permissions(upper, fs::Permissions::from_mode(found.mode() & 0o7777))
    };
    like().map_err(disk("making", upper))
}

/// Returns the image's process as a runtime's configuration. The kata-agent takes that of the pod.
fn runtime_config(process: &Process) -> serde_json::Value {
    let args: Vec<&String> =
        process.entrypoint.iter().flatten().chain(process.cmd.iter().flatten()).collect();
    let cwd = process.working_dir.as_deref().filter(|cwd| !cwd.is_empty()).unwrap_or("/");
    serde_json::json!({
        "ociVersion": "1.0.2",
        "process": { "args": args, "env": process.env.clone().unwrap_or_default(), "cwd": cwd, "user": { "uid": 0, "gid": 0 } },
        "root": { "path": "rootfs" },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bundle_is_below_the_agents_folder() {
        assert!(check_bundle(Path::new("/run/kata-containers/abc/images")).is_ok());
        for wrong in
            ["/run/kata-containers", "/etc", "run/kata-containers/x", "/run/kata-containers/../../etc"]
        {
            assert!(check_bundle(Path::new(wrong)).is_err(), "{wrong}");
        }
    }
}
