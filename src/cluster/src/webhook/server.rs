//! The webhook's server: one path behind [`crate::serve`].

use std::{
    io,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use hyper::{Method, Request, StatusCode, body::Incoming};
use peerpod_base::{
    admin::{self, Ready},
    lifecycle::{Drain, Shutdown},
    listen::listen,
};
use prometheus_client::registry::Registry;
use rustls::server::ResolvesServerCert;
use tokio::{net::TcpListener, sync::watch, task::JoinSet};
use tracing::{debug, info, warn};

use super::{
    certificate::{Certificate, CertificateError},
    config::{Certificates, WebhookConfig},
    metrics::{Metrics, Outcome},
    mutate::Profile,
    review,
};
use crate::{
    authority::served::Served,
    serve::{self, Answer, Peer, Reply, reply, text},
};

/// Where the API server posts; the path of the replaced webhook.
pub const PATH: &str = "/mutate-v1-pod";

/// An object is at most 3 MiB in the API server; a review of a creation holds one.
const MOST_BODY: usize = 4 * 1024 * 1024;
/// Requests still come for a moment after we are told to end: until then nobody has taken us off the list.
const LEAVE_AFTER: Duration = Duration::from_secs(3);
/// For what is under way at the end.
const DRAIN: Duration = Duration::from_secs(10);

/// Why the webhook does not start, or ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Its certificate.
    #[error(transparent)]
    Certificate(#[from] CertificateError),
    /// The way to the API server, for certificates of our own.
    #[error("webhook.certificates = self-managed: {0}")]
    Client(#[from] peerpod_kube::client::Error),
    /// Settings of TLS that exclude each other.
    #[error("webhook.tls-…: {0}")]
    Tls(rustls::Error),
    /// Its port.
    #[error("listen for admission reviews on {address}: {why}; choose another address or free this one")]
    Listen {
        /// `webhook.listen`.
        address: SocketAddr,
        /// Why not.
        why: io::Error,
    },
    /// The admin port.
    #[error(transparent)]
    Admin(#[from] admin::Error),
    /// A part ended that never should.
    #[error("a part of the webhook ended: {0}")]
    Ended(String),
}

/// A webhook whose ports are bound.
pub struct Bound {
    /// Where reviews are answered, as bound.
    pub address: SocketAddr,
    /// The admin port, as bound.
    pub admin: SocketAddr,
    listener: TcpListener,
    tls: Arc<rustls::ServerConfig>,
    /// Keep the certificate up to date.
    keeping: JoinSet<()>,
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
pub async fn build(config: WebhookConfig) -> Result<Bound, Error> {
    let mut registry = Registry::default();
    let metrics = Metrics::register(&mut registry);
    let ready = Ready::new();
    let mut keeping = JoinSet::new();
    let reloads = metrics.reloads.clone();
    let resolver: Arc<dyn ResolvesServerCert> = match config.certificates {
        Certificates::Mounted { certificate_file, key_file } => {
            let certificate = Certificate::load(&certificate_file, &key_file, config.crypto.clone())?;
            keeping.spawn(certificate.clone().follow(move || {
                reloads.inc();
            }));
            Arc::new(certificate)
        }
        Certificates::SelfManaged(managed) => {
            let leaf = managed.policy.leaf;
            let (keeper, authority, names) = managed.open().await?;
            let served = Served::new(names, leaf, config.crypto.clone());
            let none_yet = std::sync::Mutex::new(Some(ready.block("certificate")));
            keeping.spawn(keeper);
            keeping.spawn(served.clone().follow(authority, move || {
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
    Ok(Bound { address, admin, listener, tls: Arc::new(tls), keeping, shared: Arc::new(shared), ready })
}

impl Bound {
    /// Answers until told to stop; then a moment longer, and finishes what is under way.
    ///
    /// # Errors
    /// A part ended that never should.
    pub async fn run(self, shutdown: &Shutdown) -> Result<(), Error> {
        info!(address = %self.address, admin = %self.admin, "webhook answers");
        let drain = Drain::new();
        let mut parts = self.keeping;
        // Nobody sends: this one is for ever.
        let (_sender, tls) = watch::channel(self.tls);
        parts.spawn(serve::accept(self.listener, tls, self.shared, drain.clone()));
        tokio::select! {
            () = shutdown.wait() => {}
            ended = parts.join_next() => return Err(Error::Ended(format!("{ended:?}"))),
        }
        self.ready.not_ready("shutdown", "told to stop");
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

impl Answer for Shared {
    async fn answer(&self, request: Request<Incoming>, _: &Peer) -> Reply {
        respond(request, self).await
    }

    /// An API server has up to 200 changes under way at once, and a connection for each; several may stand behind one
    /// address.
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
