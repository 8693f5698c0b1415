//! Runs the webhook's server: one path behind [`crate::serve`].

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hyper::body::Incoming;
use hyper::{Method, Request, StatusCode};
use peerpod_base::admin::{self, Ready};
use peerpod_base::lifecycle::{Drain, Shutdown};
use peerpod_base::listen::listen;
use prometheus_client::registry::Registry;
use rustls::server::ResolvesServerCert;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tracing::{debug, info, warn};

use super::certificate::{Certificate, CertificateError};
use super::config::{Certificates, WebhookConfig};
use super::metrics::{Metrics, Outcome};
use super::mutate::Profile;
use super::review;
use crate::authority::served::Served;
use crate::serve::{self, Reply, Responder, reply, text};

/// Path that the API server posts to, as in the replaced webhook.
pub const PATH: &str = "/mutate-v1-pod";

/// Limit of a body in bytes. The API server limits an object to 3 MiB, and the review of a creation holds one.
const MOST_BODY: usize = 4 * 1024 * 1024;
/// Time for which requests are still answered after a stop, until this replica is removed from the service's endpoints.
const LEAVE_AFTER: Duration = Duration::from_secs(3);
/// Limit for the requests in flight at the end.
const DRAIN: Duration = Duration::from_secs(10);

/// Reasons why the webhook does not start, or ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The certificate is unusable.
    #[error(transparent)]
    Certificate(#[from] CertificateError),
    /// The client for self-managed certificates cannot be made.
    #[error("webhook.certificates = self-managed: {0}")]
    Client(#[from] peerpod_kube::client::Error),
    /// TLS settings exclude each other.
    #[error("webhook.tls-…: {0}")]
    Tls(rustls::Error),
    /// The port cannot be bound.
    #[error("listen for admission reviews on {address}: {why}; choose another address or free this one")]
    Listen {
        /// Address of the port.
        address: SocketAddr,
        /// The cause.
        why: io::Error,
    },
    /// The admin port cannot be bound.
    #[error(transparent)]
    Admin(#[from] admin::Error),
    /// A task ended that never should.
    #[error("a part of the webhook ended: {0}")]
    Ended(String),
}

/// A webhook with bound ports.
pub struct BoundWebhook {
    /// Bound address for reviews.
    pub address: SocketAddr,
    /// Bound address of the admin port.
    pub admin: SocketAddr,
    listener: TcpListener,
    tls: Arc<rustls::ServerConfig>,
    /// Tasks that keep the certificate up to date.
    parts: JoinSet<()>,
    shared: Arc<Shared>,
    ready: Ready,
}

struct Shared {
    profiles: Vec<Profile>,
    excluded: Vec<String>,
    metrics: Metrics,
}

/// Reads the certificate and binds the ports.
///
/// # Errors
/// See [`Error`]; nothing stays bound then.
pub async fn build(config: WebhookConfig) -> Result<BoundWebhook, Error> {
    let mut registry = Registry::default();
    let metrics = Metrics::register(&mut registry);
    let ready = Ready::new();
    let mut parts = JoinSet::new();
    let reloads = metrics.reloads.clone();
    let resolver: Arc<dyn ResolvesServerCert> = match config.certificates {
        Certificates::Mounted { certificate_file, key_file } => {
            let certificate = Certificate::load(&certificate_file, &key_file, config.crypto.clone())?;
            parts.spawn(certificate.clone().follow(move || {
                reloads.inc();
            }));
            Arc::new(certificate)
        }
        Certificates::SelfManaged(managed) => {
            let leaf = managed.policy.leaf;
            let (maintainer, authority, names) = managed.open().await?;
            let served = Served::new(names, leaf, config.crypto.clone());
            let none_yet = std::sync::Mutex::new(Some(ready.block("certificate")));
            parts.spawn(maintainer);
            parts.spawn(served.clone().follow(authority, move || {
                reloads.inc();
                drop(none_yet.lock().map(|mut blocked| blocked.take()));
            }));
            Arc::new(served)
        }
    };
    let mut tls = rustls::ServerConfig::builder_with_provider(config.crypto.clone())
        .with_protocol_versions(&config.versions)
        .map_err(Error::Tls)?
        .with_no_client_auth()
        .with_cert_resolver(resolver);
    tls.alpn_protocols = vec![b"http/1.1".to_vec()];
    let failed = |why| Error::Listen { address: config.listen, why };
    let listener = listen(config.listen).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    let admin = admin::serve(config.admin_listen, Arc::new(registry), ready.clone()).await?;
    let shared = Shared { profiles: config.profiles, excluded: config.excluded, metrics };
    Ok(BoundWebhook { address, admin, listener, tls: Arc::new(tls), parts, shared: Arc::new(shared), ready })
}

impl BoundWebhook {
    /// Answers until 3 s after a shutdown, then finishes the requests in flight.
    ///
    /// # Errors
    /// A task ended that never should.
    pub async fn run(self, shutdown: &Shutdown) -> Result<(), Error> {
        info!(address = %self.address, admin = %self.admin, "webhook answers");
        let drain = Drain::new();
        let mut parts = self.parts;
        parts.spawn(serve::accept(self.listener, self.tls, self.shared, drain.clone()));
        tokio::select! {
            () = shutdown.wait() => {}
            ended = parts.join_next() => return Err(Error::Ended(format!("{ended:?}"))),
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

async fn respond(request: Request<Incoming>, shared: &Shared) -> Reply {
    if request.uri().path() != PATH {
        return text(StatusCode::NOT_FOUND, &format!("try {PATH}\n"));
    }
    if request.method() != Method::POST {
        return text(StatusCode::METHOD_NOT_ALLOWED, "post an AdmissionReview\n");
    }
    let began = Instant::now();
    let body = match serve::body(request, MOST_BODY, "a review").await {
        Ok(body) => body,
        Err((status, why)) => return malformed(shared, status, &why),
    };
    match review::answer(&body, &shared.profiles, &shared.excluded) {
        Ok((answer, outcome)) => {
            shared.metrics.answered(outcome, began.elapsed());
            reply(StatusCode::OK, "application/json", answer)
        }
        Err(why) => malformed(shared, StatusCode::BAD_REQUEST, &why),
    }
}

impl Responder for Shared {
    async fn answer(&self, request: Request<Incoming>, _: SocketAddr) -> Reply {
        respond(request, self).await
    }

    /// An API server has up to 200 changes in flight at once, with a connection for each. Several API servers may share
    /// one address.
    fn connections_per_address(&self) -> usize {
        768
    }

    fn handshake_failed(&self) {
        self.metrics.handshakes_failed.inc();
    }
}

fn malformed(shared: &Shared, status: StatusCode, why: &str) -> Reply {
    shared.metrics.answered(Outcome::Malformed, Duration::ZERO);
    debug!(why, "no admission review");
    text(status, &format!("{why}\n"))
}

#[cfg(test)]
mod tests;
