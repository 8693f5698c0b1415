//! Answers the kata-agent's `PullImage` requests if the VM has no confidential data hub, on the hub's own socket. A
//! child process, `peerpod-pull`, does the work, one per image.
//!
//! A pull outlives its caller: the kata-agent asks again, and joins it. Prefetching of the images that the node names
//! begins as soon as the VM is assigned to a pod.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use async_trait::async_trait;
use parking_lot::Mutex;
use peerpod_common::unix_socket::{self, Bound};
use peerpod_image_job::{Cause, Error, Job, Outcome, quote};
use peerpod_proto::guest;
use peerpod_proto::hub::{ImagePullRequest, ImagePullResponse};
use peerpod_proto::hub_ttrpc::{ImagePullService, create_image_pull_service};
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, timeout, timeout_at};
use ttrpc::Code;
use ttrpc::asynchronous::transport::Listener;
use ttrpc::asynchronous::{Server, TtrpcContext};

use crate::config;
use crate::status::Status;

mod child;
mod progress;

use self::progress::Pull;

const VERSION: u32 = 1;
/// Limit of concurrent processes.
const AT_ONCE: usize = 2;
/// Limit of images to prefetch, of pulls in flight, and of known deadlines.
const MOST: usize = 64;
/// Time limit of the store's preparation. Making its disk ready has time limits of its own, which are shorter.
const OPENS: Duration = Duration::from_secs(90);
/// Bounds of the time between the answer to a late request and the end of the shim's patience, which is a tenth of it.
const LEAST_MARGIN: Duration = Duration::from_secs(1);
const MOST_MARGIN: Duration = Duration::from_secs(5);
/// Time of a pull before its first report to the node. Each further report comes after twice the time.
const FIRST_REPORT: Duration = Duration::from_secs(10);
/// Length limit of a name, in bytes: a registry, a repository and a digest.
const MAX_NAME: usize = 1024;

/// Pulls in flight by image and bundle (no bundle: prefetch).
type Running = HashMap<(String, Option<PathBuf>), watch::Receiver<Pull>>;

/// Images of this VM. Clones share their state.
#[derive(Clone)]
pub(crate) struct Images(Arc<Inner>);

struct Inner {
    settings: config::Images,
    /// Latest settings of the node; pulls wait for the first ones.
    access: watch::Sender<Option<guest::Images>>,
    /// Whether the store is in its final state, or the reason for a missing one; pulls wait for that, too.
    is_open: watch::Sender<Option<Result<(), String>>>,
    running: Mutex<Running>,
    /// Ends of the callers' patience, by the container's id.
    deadlines: Mutex<HashMap<String, Instant>>,
    places: Semaphore,
    /// Counts the pulls.
    status: Arc<Status>,
}

impl Images {
    /// Makes the service. No pull begins before [`Images::access`] and [`Images::open`].
    pub(crate) fn new(settings: &config::Images, status: Arc<Status>) -> Images {
        drop(status.images.set(settings.store.clone()));
        Images(Arc::new(Inner {
            settings: settings.clone(),
            access: watch::Sender::new(None),
            is_open: watch::Sender::new(None),
            running: Mutex::default(),
            deadlines: Mutex::default(),
            places: Semaphore::new(AT_ONCE),
            status,
        }))
    }

    pub(crate) fn store(&self) -> &Path {
        &self.0.settings.store
    }

    /// Reports the final state of the store: usable, with or without its disk, or unusable. In the latter case every
    /// pull fails with this reason.
    pub(crate) fn open(&self, is_there: Result<(), String>) {
        self.0.is_open.send_replace(Some(is_there));
    }

    /// Serves the kata-agent for as long as the returned server and name live; `None` if the settings disable it.
    pub(crate) async fn serve(&self) -> anyhow::Result<Option<(Server, Bound)>> {
        if !self.0.settings.serve {
            return Ok(None);
        }
        let socket = &self.0.settings.socket;
        let folder = socket.parent().map_or(Ok(()), std::fs::create_dir_all);
        let (listener, bound) = folder
            .and_then(|()| unix_socket::bind(socket))
            .with_context(|| format!("listening on {}", socket.display()))?;
        let services = create_image_pull_service(Arc::new(self.clone()));
        let mut server = Server::new().add_listener(Listener::from(listener)).register_service(services);
        server.start().await.with_context(|| format!("serving {}", socket.display()))?;
        Ok(Some((server, bound)))
    }

    /// Takes the node's settings of the pod's images, and begins to prefetch.
    pub(crate) fn access(&self, access: Option<&guest::Images>) -> Result<(), String> {
        let none = || guest::Images { version: VERSION, ..guest::Images::default() };
        let access = access.cloned().unwrap_or_else(none);
        let version = access.version;
        if version != VERSION {
            return Err(format!(
                "the image settings have version {version}, this guest reads {VERSION}; node and VM image must be \
                 upgraded together"
            ));
        }
        let early = access.prefetch.clone();
        self.0.access.send_replace(Some(access));
        for image in early.into_iter().take(MOST).filter(|_| self.0.settings.serve) {
            drop(self.begin(&image, None));
        }
        Ok(())
    }

    /// Sets the time within which the shim wants a container.
    pub(crate) fn expect(&self, container: &str, within: Duration) {
        let mut deadlines = self.0.deadlines.lock();
        let now = Instant::now();
        deadlines.retain(|_, deadline| *deadline > now);
        if deadlines.len() < MOST && container.len() <= MAX_NAME {
            let margin = (within / 10).clamp(LEAST_MARGIN, MOST_MARGIN);
            deadlines.insert(container.to_owned(), now + within.saturating_sub(margin));
        }
    }

    /// Returns the time for the answer to the request with this bundle.
    fn deadline(&self, bundle: &Path) -> Option<Instant> {
        let deadlines = self.0.deadlines.lock();
        let mut parts = bundle.iter().filter_map(|part| deadlines.get(part.to_str()?));
        parts.next().copied()
    }

    /// Joins a pull in flight, or begins one.
    fn begin(&self, image: &str, bundle: Option<PathBuf>) -> Result<watch::Receiver<Pull>, Error> {
        if image.len() > MAX_NAME {
            return Err(Error::new(Cause::Malformed, "an image's name of more than 1024 bytes"));
        }
        let key = (image.to_owned(), bundle);
        let mut running = self.0.running.lock();
        if let Some(under_way) = running.get(&key) {
            return Ok(under_way.clone());
        }
        if running.len() >= MOST {
            return Err(Error::new(Cause::Internal, format!("{MOST} pulls are under way; more are refused")));
        }
        let (tell, told) = watch::channel(Pull::new());
        running.insert(key.clone(), told.clone());
        drop(running);
        let images = self.clone();
        tokio::spawn(async move {
            let result = images.pull(&key.0, key.1.clone(), &tell).await;
            let (image, early) = (&key.0, key.1.is_none());
            match &result {
                Ok(Outcome { manifest_digest: digest, layers, fetched, bytes }) => {
                    tracing::info!(image, digest, layers, fetched, bytes, early, "image is here");
                }
                Err(error) => tracing::error!(image, %error, early, "cannot pull"),
            }
            // A later pull that works is the cure.
            images
                .0
                .status
                .note("image", result.as_ref().err().map(|error| format!("image {image}: {error}")));
            images.0.status.pulled(image, result.is_ok());
            images.0.running.lock().remove(&key);
            tell.send_modify(|pull| pull.result = Some(result));
        });
        Ok(told)
    }

    /// Returns a pull in flight of the image, for any container.
    fn of_image(&self, image: &str, bundle: Option<&Path>) -> Option<watch::Receiver<Pull>> {
        let running = self.0.running.lock();
        let mut others = running.iter().filter(|((name, other), _)| {
            name == image && bundle.is_none_or(|bundle| other.as_deref() != Some(bundle))
        });
        others.next().map(|(_, pull)| pull.clone())
    }

    /// Pulls an image for a container. A pull for another container, which may have failed meanwhile, goes first: its
    /// layers are then in the store.
    async fn wait(&self, image: &str, bundle: &Path) -> Result<Outcome, Error> {
        while let Some(mut other) = self.of_image(image, Some(bundle)) {
            drop(other.wait_for(Pull::is_over).await);
        }
        let mut pull = self.begin(image, Some(bundle.to_owned()))?;
        let pull = pull.wait_for(Pull::is_over).await.map(|pull| pull.result.clone());
        let ended = || Err(Error::new(Cause::Internal, "the pull ended without a result"));
        pull.ok().flatten().unwrap_or_else(ended)
    }

    /// Pulls an image for a container, and returns an error if the caller would wait no longer.
    async fn answer(&self, image: &str, bundle: &Path) -> Result<Outcome, Error> {
        let wait = self.wait(image, bundle);
        match self.deadline(bundle) {
            Some(deadline) => timeout_at(deadline, wait).await.unwrap_or_else(|_| Err(self.late(image))),
            None => wait.await,
        }
    }

    /// Returns the error of a request whose caller waits no longer.
    fn late(&self, image: &str) -> Error {
        let pull = self.of_image(image, None).map(|pull| pull.borrow().clone()).unwrap_or_else(Pull::new);
        let far = pull.text().unwrap_or_else(|| "it has not begun".to_owned());
        let text = format!(
            "pulling {}: {far}, and the shim waits no longer; the pull goes on, and the container's next start \
             continues it; to wait longer raise create_container_timeout of Kata's configuration and kubelet's \
             runtimeRequestTimeout",
            quote(image)
        );
        Error::new(Cause::Late, text)
    }

    async fn pull(
        &self,
        image: &str,
        bundle: Option<PathBuf>,
        tell: &watch::Sender<Pull>,
    ) -> Result<Outcome, Error> {
        let settings = &self.0.settings;
        let mut access = self.0.access.subscribe();
        let gone = || Error::new(Cause::Internal, "the guest program ends");
        let access = access.wait_for(Option::is_some).await.map_err(|_| gone())?.clone().unwrap_or_default();
        let mut is_open = self.0.is_open.subscribe();
        let is_open = timeout(OPENS, is_open.wait_for(Option::is_some)).await;
        let late = |_| Error::new(Cause::Internal, format!("the image store was not open after {OPENS:?}"));
        let is_open = is_open.map_err(late)?.map_err(|_| gone())?.clone();
        is_open.transpose().map_err(|why| Error::new(Cause::Internal, why))?;
        let _place = self.0.places.acquire().await.map_err(|_| gone())?;
        let mut plain_http = settings.plain_http.clone();
        plain_http.extend(access.plain_http);
        let job = Job {
            image: image.to_owned(),
            store: settings.store.clone(),
            bundle,
            credentials: access.pull_secret,
            plain_http,
            ca_files: settings.ca_files.clone(),
            ca_pem: access.ca_pem,
            limits: settings.limits,
        };
        tell.send_modify(|pull| pull.began = Instant::now());
        let mut next = FIRST_REPORT;
        let told = |fetched| {
            tell.send_modify(|pull| pull.add(fetched));
            let elapsed = tell.borrow().began.elapsed();
            if elapsed >= next {
                next = elapsed * 2;
                let pull = tell.borrow();
                tracing::info!(image, text = pull.text(), "pull");
                self.0.status.pulling(pull.report(image));
            }
        };
        child::run(&job, told).await
    }
}

#[async_trait]
impl ImagePullService for Images {
    async fn pull_image(
        &self,
        _: &TtrpcContext,
        request: ImagePullRequest,
    ) -> ttrpc::Result<ImagePullResponse> {
        let result = self.answer(&request.image_url, Path::new(&request.bundle_path)).await;
        let Outcome { manifest_digest, .. } = result.map_err(|error| status(&error))?;
        Ok(ImagePullResponse { manifest_digest, ..ImagePullResponse::default() })
    }
}

/// Converts an error to the status that the kata-agent passes on to the pod's users.
fn status(error: &Error) -> ttrpc::Error {
    let code = match error.cause {
        Cause::NotFound => Code::NOT_FOUND,
        Cause::Denied => Code::PERMISSION_DENIED,
        Cause::NoSpace | Cause::TooLarge => Code::RESOURCE_EXHAUSTED,
        Cause::Unreachable | Cause::Untrusted => Code::UNAVAILABLE,
        Cause::Digest => Code::DATA_LOSS,
        Cause::Malformed => Code::INVALID_ARGUMENT,
        Cause::Unsupported => Code::FAILED_PRECONDITION,
        Cause::Late => Code::DEADLINE_EXCEEDED,
        Cause::Internal => Code::INTERNAL,
    };
    ttrpc::Error::RpcStatus(ttrpc::get_status(code, error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_late_request_is_answered_before_the_shims_deadline() {
        let status = Arc::new(Status::new(Path::new("/nonexistent"), true));
        let images = Images::new(&config::Images::default(), status);
        images.expect("abc", Duration::from_secs(110));
        images.expect("def", Duration::from_secs(5));
        for (container, seconds) in [("abc", 105), ("def", 4)] {
            let began = Instant::now();
            let bundle = format!("/run/kata-containers/{container}/images");
            // Without settings of the node the pull waits.
            let error = images.answer("r.example/a:1", Path::new(&bundle)).await.unwrap_err();
            assert_eq!((error.cause, began.elapsed()), (Cause::Late, Duration::from_secs(seconds)));
            for word in ["r.example/a:1", "it has not begun", "create_container_timeout"] {
                assert!(error.text.contains(word), "{error}");
            }
            images.expect("def", Duration::from_secs(5));
        }
        let other = images.answer("r.example/a:1", Path::new("/run/kata-containers/xyz/images"));
        assert!(timeout(Duration::from_secs(3600), other).await.is_err(), "no deadline");
    }
}
