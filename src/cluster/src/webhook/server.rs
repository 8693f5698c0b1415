//! Runs the webhook's server: one path behind [`crate::serve`].

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use bytes::Bytes;
use hyper::body::Incoming;
use hyper::{Method, Request, StatusCode};
use parking_lot::Mutex;
use peerpod_base::admin::{self, Ready};
use peerpod_base::lifecycle::{Drain, Shutdown};
use peerpod_base::listen::listen;
use peerpod_base::metrics::{expiries, program};
use rustls::ServerConfig;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tracing::{debug, info, warn};

use super::certificate::Certificate;
use super::config::{Certificates, WebhookConfig};
use super::metrics::{ReviewOutcome, WebhookMetrics};
use super::mutate::Profile;
use super::review;
use crate::authority::served::ends;
use crate::serve::{self, Reply, Responder, Roomed, Rooms, reply, text};

/// Path that the API server posts to, as in the replaced webhook.
const PATH: &str = "/mutate-v1-pod";

/// Limit of a body in bytes. The API server limits an object to 3 MiB, and the review of a creation holds one.
const MOST_BODY: usize = 4 * 1024 * 1024;
/// Room for the bytes beyond the first of all bodies and answers together.
const ROOM: usize = 16 * 1024 * 1024;
/// Limit of pods that are evaluated at the same time. An evaluation takes up to 20 MiB.
const EVALUATIONS: usize = 4;
/// Longest reason of a refused body in characters.
const MOST_REASON: usize = 1024;
/// Time for which requests are still answered after a stop, until this replica is removed from the service's endpoints.
const LEAVE_AFTER: Duration = Duration::from_secs(3);
/// Limit for the requests in flight at the end.
const DRAIN: Duration = Duration::from_secs(10);

/// A webhook with bound ports.
pub(crate) struct BoundWebhook {
    address: SocketAddr,
    admin: SocketAddr,
    listener: TcpListener,
    tls: ServerConfig,
    /// Tasks that keep the certificate up to date.
    parts: JoinSet<()>,
    shared: Arc<Shared>,
    ready: Ready,
}

struct Shared {
    profile: Profile,
    excluded: Vec<String>,
    metrics: WebhookMetrics,
    rooms: Rooms,
    evaluations: Semaphore,
}

/// Reads the certificate and binds the ports. After an error nothing stays bound.
pub(crate) async fn build(config: WebhookConfig) -> Result<BoundWebhook> {
    let mut registry = program("peerpod-cluster", env!("CARGO_PKG_VERSION"));
    let metrics = WebhookMetrics::register(&mut registry);
    let ready = Ready::default();
    let mut parts = JoinSet::new();
    let reloads = metrics.reloads.clone();
    let mut authority = None;
    let certificate = match config.certificates {
        Certificates::Mounted(files) => {
            let certificate = Certificate::load(files, config.crypto.clone())?;
            let in_use = certificate.in_use();
            parts.spawn(certificate.follow(move || {
                reloads.inc();
            }));
            in_use
        }
        Certificates::SelfManaged(managed) => {
            let opened = managed.open().await.context("webhook.certificates = self-managed")?;
            let (maintainer, names) = opened;
            let none_yet = Mutex::new(Some(ready.block("certificate")));
            let (in_use, ca) = maintainer.serve(names, config.crypto.clone(), &mut parts, move || {
                reloads.inc();
                none_yet.lock().take();
            });
            authority = Some(ca);
            in_use
        }
    };
    let shown = certificate.clone();
    expiries(&mut registry, move || match &authority {
        Some(authority) => ends(&shown, authority, ["webhook", "webhook-ca"]),
        None => shown.not_after().into_iter().map(|end| ("webhook", end)).collect(),
    });
    let tls =
        serve::tls(config.crypto, &config.versions, certificate, config.callers).context("webhook.tls-…")?;
    let failed = |why: std::io::Error| {
        let address = config.listen;
        anyhow!("listen for admission reviews on {address}: {why}; choose another address or free this one")
    };
    let listener = listen(config.listen).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    let admin = admin::serve(config.admin_listen, Arc::new(registry), ready.clone()).await?;
    let shared = Shared {
        profile: config.profile,
        excluded: config.excluded,
        metrics,
        rooms: Rooms::new(ROOM),
        evaluations: Semaphore::new(EVALUATIONS),
    };
    Ok(BoundWebhook { address, admin, listener, tls, parts, shared: Arc::new(shared), ready })
}

impl BoundWebhook {
    /// Answers until 3 s after a shutdown, then finishes the requests in flight. Fails if a task ended that never
    /// should.
    pub(crate) async fn run(self, shutdown: &Shutdown) -> Result<()> {
        info!(address = %self.address, admin = %self.admin, "webhook answers");
        let drain = Drain::default();
        let mut parts = self.parts;
        parts.spawn(serve::accept(self.listener, self.tls, self.shared, drain.clone()));
        tokio::select! {
            () = shutdown.wait() => {}
            ended = parts.join_next() => bail!("a part of the webhook ended: {ended:?}"),
        }
        self.ready.not_ready("shutdown", "stopping");
        tokio::time::sleep(LEAVE_AFTER).await;
        parts.abort_all();
        if let Err(busy) = drain.drain(DRAIN).await {
            warn!(%busy, "reviews cut off");
        }
        Ok(())
    }
}

impl Responder for Shared {
    /// An API server has up to 200 changes in flight at once, with a connection for each. Several API servers may share
    /// one address.
    const PER_ADDRESS: usize = 768;

    async fn answer(&self, request: Request<Incoming>, peer: SocketAddr) -> Reply {
        if request.uri().path() != PATH {
            return text(StatusCode::NOT_FOUND, &format!("try {PATH}\n"));
        }
        if request.method() != Method::POST {
            return text(StatusCode::METHOD_NOT_ALLOWED, "post an AdmissionReview\n");
        }
        let began = Instant::now();
        match self.evaluate(request, peer).await {
            Ok((answer, outcome)) => {
                self.metrics.answered(outcome, began.elapsed());
                reply(StatusCode::OK, "application/json", answer)
            }
            Err((status, why)) => self.not_answered(status, &why),
        }
    }

    fn handshake_failed(&self) {
        self.metrics.handshakes_failed.inc();
    }
}

impl Shared {
    async fn evaluate(
        &self,
        request: Request<Incoming>,
        peer: SocketAddr,
    ) -> Result<(Bytes, ReviewOutcome), (StatusCode, String)> {
        let room = self.rooms.of(peer.ip());
        let body = serve::body(request, MOST_BODY, "a review", &room).await?;
        let (answer, outcome) = {
            // Fails only when the semaphore is closed, which never happens.
            let _turn = self.evaluations.acquire().await;
            let answer = review::answer(&body.bytes, &self.profile, &self.excluded);
            answer.map_err(|why| (StatusCode::BAD_REQUEST, why))?
        };
        drop(body);
        let mut roomed = Roomed::default();
        room.add(&mut roomed, answer.as_bytes()).await?;
        Ok((Bytes::from_owner(roomed), outcome))
    }

    fn not_answered(&self, status: StatusCode, why: &str) -> Reply {
        let busy = status == StatusCode::SERVICE_UNAVAILABLE;
        self.metrics
            .answered(if busy { ReviewOutcome::Limited } else { ReviewOutcome::Malformed }, Duration::ZERO);
        // The reason may repeat the body.
        let why: String = why.chars().take(MOST_REASON).collect();
        debug!(why, "no answer to an admission review");
        text(status, &format!("{why}\n"))
    }
}

#[cfg(test)]
mod tests;
