//! The webhook's server: TLS, one path, bounded in bytes, time and connections.

use std::{
    convert::Infallible,
    io,
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Body, Incoming},
    header::{CONTENT_TYPE, HeaderValue},
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use peerpod_base::{
    admin::{self, Ready},
    lifecycle::{Drain, Shutdown},
};
use prometheus_client::registry::Registry;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    task::JoinSet,
};
use tokio_rustls::TlsAcceptor;
use tracing::{debug, info, warn};

use super::{
    certificate::{Certificate, CertificateError},
    config::WebhookConfig,
    metrics::{Metrics, Outcome},
    mutate::Profile,
    review,
};

/// Where the API server posts; the path of the replaced webhook.
pub const PATH: &str = "/mutate-v1-pod";

/// An object is at most 3 MiB in the API server; a review of a creation holds one.
const MOST_BODY: usize = 4 * 1024 * 1024;
/// For the TLS handshake.
const HANDSHAKE_WITHIN: Duration = Duration::from_secs(5);
/// For a request's body, once its headers are there. The API server itself gives up after 10 s, by default.
const BODY_WITHIN: Duration = Duration::from_secs(5);
/// A connection without a request for so long is closed. The API server keeps idle ones for 90 s at the most.
const IDLE: Duration = Duration::from_secs(120);
/// Connections at once; more wait in the kernel's queue.
const CONNECTIONS: usize = 1024;
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
    tls: TlsAcceptor,
    certificate: Certificate,
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
    let certificate = Certificate::load(&config.certificate_file, &config.key_file, config.crypto.clone())?;
    let mut tls = rustls::ServerConfig::builder_with_provider(config.crypto.clone())
        .with_protocol_versions(&config.versions)
        .map_err(Error::Tls)?
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(certificate.clone()));
    tls.alpn_protocols = vec![b"http/1.1".to_vec()];
    let failed = |why| Error::Listen { address: config.listen, why };
    let listener = TcpListener::bind(config.listen).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    let ready = Ready::new();
    let admin = admin::serve(config.admin_listen, Arc::new(registry), ready.clone()).await?;
    let shared = Shared { profiles: config.profiles, excluded: config.excluded, metrics };
    let tls = TlsAcceptor::from(Arc::new(tls));
    Ok(Bound { address, admin, listener, tls, certificate, shared: Arc::new(shared), ready })
}

impl Bound {
    /// Answers until told to stop; then a moment longer, and finishes what is under way.
    ///
    /// # Errors
    /// A part ended that never should.
    pub async fn run(self, shutdown: &Shutdown) -> Result<(), Error> {
        info!(address = %self.address, admin = %self.admin, "webhook answers");
        let drain = Drain::new();
        let reloads = self.shared.metrics.reloads.clone();
        let mut parts = JoinSet::new();
        parts.spawn(self.certificate.follow(move || {
            reloads.inc();
        }));
        parts.spawn(accept(self.listener, self.tls, self.shared, drain.clone()));
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

async fn accept(listener: TcpListener, tls: TlsAcceptor, shared: Arc<Shared>, drain: Drain) {
    let room = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        // Fails only for a closed semaphore, and nobody closes it.
        let Ok(place) = room.clone().acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let (tls, shared, busy) = (tls.clone(), shared.clone(), drain.busy("connection"));
                tokio::spawn(async move {
                    connection(stream, &tls, shared, &busy).await;
                    drop((busy, place));
                });
            }
            Err(why) => {
                // Out of descriptors, most likely: others need the time to give some back.
                warn!(error = %why, "connection not accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn connection(
    stream: TcpStream,
    tls: &TlsAcceptor,
    shared: Arc<Shared>,
    busy: &peerpod_base::lifecycle::Busy,
) {
    if let Err(why) = stream.set_nodelay(true) {
        debug!(error = %why, "no TCP_NODELAY");
    }
    let shaken = tokio::time::timeout(HANDSHAKE_WITHIN, tls.accept(stream)).await;
    let stream = match shaken.map_err(|_| io::Error::from(io::ErrorKind::TimedOut)).and_then(|shaken| shaken)
    {
        Ok(stream) => stream,
        Err(why) => {
            shared.metrics.handshakes_failed.inc();
            debug!(error = %why, "handshake came to nothing");
            return;
        }
    };
    let service = service_fn(move |request| {
        let shared = shared.clone();
        async move { Ok::<_, Infallible>(respond(request, &shared).await) }
    });
    let served = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(IDLE)
        .max_buf_size(64 * 1024)
        .serve_connection(TokioIo::new(stream), service);
    let mut served = std::pin::pin!(served);
    let ended = tokio::select! {
        ended = served.as_mut() => ended,
        () = busy.draining() => {
            served.as_mut().graceful_shutdown();
            served.await
        }
    };
    if let Err(why) = ended {
        debug!(error = %why, "connection ended");
    }
}

async fn respond(request: Request<Incoming>, shared: &Shared) -> Response<Full<Bytes>> {
    if request.uri().path() != PATH {
        return text(StatusCode::NOT_FOUND, &format!("try {PATH}\n"));
    }
    if request.method() != Method::POST {
        return text(StatusCode::METHOD_NOT_ALLOWED, "post an AdmissionReview\n");
    }
    let began = Instant::now();
    // Said by Content-Length: refused before it arrives.
    if request.body().size_hint().lower() > MOST_BODY as u64 {
        return malformed(shared, StatusCode::PAYLOAD_TOO_LARGE, "the body is longer than a review can be");
    }
    let body = Limited::new(request.into_body(), MOST_BODY).collect();
    let body = match tokio::time::timeout(BODY_WITHIN, body).await {
        Ok(Ok(body)) => body.to_bytes(),
        Ok(Err(why)) => return malformed(shared, StatusCode::PAYLOAD_TOO_LARGE, &why.to_string()),
        Err(_) => return malformed(shared, StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time"),
    };
    match review::answer(&body, &shared.profiles, &shared.excluded) {
        Ok((answer, outcome)) => {
            shared.metrics.answered(outcome, began.elapsed());
            reply(StatusCode::OK, "application/json", answer)
        }
        Err(why) => malformed(shared, StatusCode::BAD_REQUEST, &why),
    }
}

fn malformed(shared: &Shared, status: StatusCode, why: &str) -> Response<Full<Bytes>> {
    shared.metrics.answered(Outcome::Malformed, Duration::ZERO);
    debug!(why, "no admission review");
    text(status, &format!("{why}\n"))
}

fn text(status: StatusCode, body: &str) -> Response<Full<Bytes>> {
    reply(status, "text/plain; charset=utf-8", body.as_bytes().to_vec())
}

fn reply(status: StatusCode, kind: &'static str, body: Vec<u8>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

#[cfg(test)]
mod tests;
