//! Serves the metrics of node and relay on the node's address, over TLS, to callers that the API server permits: a
//! TokenReview names the caller of a bearer token, a SubjectAccessReview permits it to `get` the URL `/metrics`.
//!
//! The relay keeps its own port on loopback and has no access to Kubernetes. May touch: its socket, the relay's port.

use std::collections::HashMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result};
use bytes::Bytes;
use http_body_util::{BodyExt, Empty, Full, Limited};
use hyper::body::Incoming;
use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST, HeaderMap, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, UserInfo};
use k8s_openapi::api::authorization::v1::{
    NonResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::Api;
use kube::api::PostParams;
use parking_lot::Mutex;
use peerpod_base::admin;
use peerpod_base::chain::chain;
use peerpod_base::listen::listen;
use peerpod_common::accept::Acceptor;
use peerpod_common::limit::ConnectionLimit;
use peerpod_kube::client::Error;
use peerpod_pki::Authority;
use prometheus_client::registry::Registry;
use rustls::ServerConfig;
use sha2::{Digest, Sha256};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tracing::{debug, info};

use super::calls::Calls;

/// Validity of the certificate, which no scraper verifies: it is made at the start, and its key is in memory alone.
const VALID: Duration = Duration::from_secs(3650 * 86_400);
/// Limits of open connections, in total and per address.
const CONNECTIONS: (usize, usize) = (64, 16);
const HANDSHAKE_WITHIN: Duration = Duration::from_secs(5);
const HEADERS_WITHIN: Duration = Duration::from_secs(5);
const CONNECTION_WITHIN: Duration = Duration::from_secs(60);
/// Size limit of a request's head in bytes. A token has one to two kilobytes.
const MOST_HEAD: usize = 32 * 1024;
/// Time limit and size limit of the relay's answer.
const RELAY_WITHIN: Duration = Duration::from_secs(5);
const MOST_RELAY: usize = 16 << 20;
/// Time for which an answer of the API server counts, and so for which a revoked right still works.
const REMEMBER: Duration = Duration::from_secs(60);
/// The same for a refusal.
const REMEMBER_REFUSED: Duration = Duration::from_secs(10);
/// Limit of remembered tokens, and of reviews in flight; beyond the latter a caller is refused for now.
const MOST: usize = 256;
const AT_ONCE: usize = 8;

/// A port that is bound and not served yet.
pub(crate) struct Scrape {
    listener: TcpListener,
    tls: TlsAcceptor,
    desk: Arc<Desk>,
}

/// Answers requests.
struct Desk {
    registry: Arc<Registry>,
    /// Address of the relay's `/metrics`.
    relay: SocketAddr,
    calls: Calls,
    places: Semaphore,
    /// Status of the answer by the token's SHA-256, with its end.
    known: Mutex<HashMap<[u8; 32], (Instant, StatusCode)>>,
}

impl Scrape {
    /// Binds the port and makes its certificate.
    pub(super) async fn bind(
        address: SocketAddr,
        relay: SocketAddr,
        (registry, calls, node): (Arc<Registry>, Calls, &str),
    ) -> Result<Scrape> {
        let what =
            || format!("listen for scrapers on {address} (node.metrics-listen); choose another address");
        let listener = listen(address).await.with_context(what)?;
        let now = SystemTime::now();
        let authority = Authority::make("peerpod metrics", now, VALID)?;
        let identity = authority.server(node, &[node.to_owned()], now, authority.not_after)?;
        let crypto = Arc::new(rustls::crypto::ring::default_provider());
        let mut tls = ServerConfig::builder_with_provider(crypto)
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(identity.chain, identity.key)?;
        tls.alpn_protocols = vec![b"http/1.1".to_vec()];
        info!(%address, "metrics are served to permitted callers");
        let (places, known) = (Semaphore::new(AT_ONCE), Mutex::default());
        let desk = Arc::new(Desk { registry, relay, calls, places, known });
        Ok(Scrape { listener, tls: TlsAcceptor::from(Arc::new(tls)), desk })
    }

    /// Serves for ever.
    pub(super) async fn run(self) {
        let limit = ConnectionLimit::new(CONNECTIONS.0, CONNECTIONS.1);
        let mut acceptor = Acceptor::new("metrics port");
        let mut open = JoinSet::new();
        loop {
            let (stream, address) = acceptor.next(|| self.listener.accept()).await;
            while open.try_join_next().is_some() {}
            let Some(counted) = limit.enter(address.ip()) else { continue };
            let (tls, desk) = (self.tls.clone(), self.desk.clone());
            open.spawn(async move {
                connection(stream, &tls, desk).await;
                drop(counted);
            });
        }
    }
}

async fn connection(stream: TcpStream, tls: &TlsAcceptor, desk: Arc<Desk>) {
    let Ok(Ok(stream)) = timeout(HANDSHAKE_WITHIN, tls.accept(stream)).await else {
        return debug!("TLS handshake of a scraper failed");
    };
    let service = hyper::service::service_fn(move |request: Request<Incoming>| {
        let desk = desk.clone();
        async move { Ok::<_, Infallible>(desk.answer(&request).await) }
    });
    let served = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADERS_WITHIN)
        .max_buf_size(MOST_HEAD)
        .serve_connection(TokioIo::new(stream), service);
    if let Ok(Err(why)) = timeout(CONNECTION_WITHIN, served).await {
        debug!(error = chain(&why), "connection of a scraper ended");
    }
}

impl Desk {
    async fn answer(&self, request: &Request<Incoming>) -> Response<Full<Bytes>> {
        let path = request.uri().path();
        if !matches!(path, "/metrics" | "/relay/metrics") {
            return text(StatusCode::NOT_FOUND, "try /metrics or /relay/metrics");
        }
        if request.method() != Method::GET {
            return text(StatusCode::METHOD_NOT_ALLOWED, "only GET");
        }
        match self.permission(request.headers()).await {
            StatusCode::OK => {}
            StatusCode::UNAUTHORIZED => {
                return text(StatusCode::UNAUTHORIZED, "a valid bearer token is needed");
            }
            StatusCode::FORBIDDEN => {
                return text(
                    StatusCode::FORBIDDEN,
                    "the caller may not get the URL /metrics; bind it to a role that may",
                );
            }
            other => return text(other, "the API server does not answer; try again"),
        }
        if path == "/metrics" {
            return admin::metrics(request.headers(), &self.registry);
        }
        match timeout(RELAY_WITHIN, self.of_relay(request.headers().get(ACCEPT))).await {
            Ok(Ok(answer)) => answer,
            failed => {
                debug!(?failed, "no metrics of the relay");
                text(StatusCode::BAD_GATEWAY, "peerpod-relay does not answer")
            }
        }
    }

    /// Returns `OK` for a permitted caller, else the status of the refusal.
    async fn permission(&self, headers: &HeaderMap) -> StatusCode {
        let token = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok()?.strip_prefix("Bearer "));
        let Some(token) = token.filter(|token| !token.is_empty()) else { return StatusCode::UNAUTHORIZED };
        let digest: [u8; 32] = Sha256::digest(token).into();
        let known = self.known.lock().get(&digest).copied();
        if let Some((_, status)) = known.filter(|(until, _)| *until > Instant::now()) {
            return status;
        }
        let Ok(_place) = self.places.try_acquire() else { return StatusCode::SERVICE_UNAVAILABLE };
        let status = match self.ask(token).await {
            Ok(status) => status,
            Err(error) => {
                debug!(%error, "a scraper is refused for now");
                return StatusCode::SERVICE_UNAVAILABLE;
            }
        };
        let remember = if status == StatusCode::OK { REMEMBER } else { REMEMBER_REFUSED };
        let (mut known, now) = (self.known.lock(), Instant::now());
        if known.len() >= MOST {
            known.retain(|_, (until, _)| *until > now);
        }
        if known.len() < MOST {
            known.insert(digest, (now + remember, status));
        }
        status
    }

    /// Asks the API server for the token's user, and whether it may get the URL.
    async fn ask(&self, token: &str) -> Result<StatusCode, Error> {
        let client = || self.calls.client.clone();
        let spec = TokenReviewSpec { token: Some(token.to_owned()), audiences: None };
        let review = TokenReview { spec, ..TokenReview::default() };
        let (reviews, params): (Api<TokenReview>, _) = (Api::all(client()), PostParams::default());
        let asked = reviews.create(&params, &review);
        let reviewed = self.calls.call("token_review", "review the token of a scraper", asked).await?;
        let status = reviewed.status.unwrap_or_default();
        if status.authenticated != Some(true) {
            return Ok(StatusCode::UNAUTHORIZED);
        }
        let UserInfo { username, uid, groups, extra } = status.user.unwrap_or_default();
        let (path, verb) = (Some("/metrics".to_owned()), Some("get".to_owned()));
        let non_resource_attributes = Some(NonResourceAttributes { path, verb });
        let spec = SubjectAccessReviewSpec {
            user: username,
            uid,
            groups,
            extra,
            non_resource_attributes,
            resource_attributes: None,
        };
        let review = SubjectAccessReview { spec, ..SubjectAccessReview::default() };
        let reviews: Api<SubjectAccessReview> = Api::all(client());
        let asked = reviews.create(&params, &review);
        let reviewed = self.calls.call("access_review", "review the rights of a scraper", asked).await?;
        let is_allowed = reviewed.status.is_some_and(|status| status.allowed && status.denied != Some(true));
        Ok(if is_allowed { StatusCode::OK } else { StatusCode::FORBIDDEN })
    }

    /// Passes the relay's answer on.
    async fn of_relay(&self, accept: Option<&HeaderValue>) -> Result<Response<Full<Bytes>>> {
        let stream = TcpStream::connect(self.relay).await?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        // A dropped set aborts its task.
        let _connection = JoinSet::from_iter([async move { drop(connection.await) }]);
        let mut request = Request::get("/metrics").header(HOST, "peerpod-relay");
        if let Some(accept) = accept {
            request = request.header(ACCEPT, accept);
        }
        let (head, body) = sender.send_request(request.body(Empty::<Bytes>::new())?).await?.into_parts();
        let body = Limited::new(body, MOST_RELAY).collect().await.map_err(anyhow::Error::from_boxed)?;
        let mut answer = Response::new(Full::new(body.to_bytes()));
        *answer.status_mut() = head.status;
        if let Some(kind) = head.headers.get(CONTENT_TYPE) {
            answer.headers_mut().insert(CONTENT_TYPE, kind.clone());
        }
        Ok(answer)
    }
}

fn text(status: StatusCode, text: &str) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(format!("{text}\n"))));
    *response.status_mut() = status;
    response
}
