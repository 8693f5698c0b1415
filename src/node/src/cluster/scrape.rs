//! Serves the metrics of node and relay on the node's address, over TLS, to callers that the API server permits: a
//! TokenReview names the caller of a bearer token, a SubjectAccessReview permits it to `get` the URL `/metrics`.
//!
//! The relay keeps its own port on loopback and has no access to Kubernetes. May touch: its socket, the relay's port.

use std::collections::HashMap;
use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
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
use peerpod_common::caller_limits::{CallerLimits, Rate};
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
/// Limit of remembered tokens of each kind, and of reviews in flight; beyond the latter a caller is refused for now.
const MOST: usize = 256;
const AT_ONCE: usize = 8;
/// Limits of one address: its requests, and reviews of tokens that are not known.
const REQUESTS: Rate = Rate { burst: 30.0, per_second: 5.0, at_once: 8 };
const REVIEWS: Rate = Rate { burst: 6.0, per_second: 0.5, at_once: 2 };

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
    requests: CallerLimits<IpAddr>,
    reviews: CallerLimits<IpAddr>,
    /// Answers of the API server. Refusals take no place of a permitted token.
    permitted: Mutex<Answers>,
    refused: Mutex<Answers>,
}

/// Status of the answer by the token's SHA-256, with its end.
type Answers = HashMap<[u8; 32], (Instant, StatusCode)>;

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
        let desk = Arc::new(Desk::new(registry, relay, calls));
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
                connection(stream, address.ip(), &tls, desk).await;
                drop(counted);
            });
        }
    }
}

async fn connection(stream: TcpStream, from: IpAddr, tls: &TlsAcceptor, desk: Arc<Desk>) {
    let Ok(Ok(stream)) = timeout(HANDSHAKE_WITHIN, tls.accept(stream)).await else {
        return debug!("TLS handshake of a scraper failed");
    };
    let service = hyper::service::service_fn(move |request: Request<Incoming>| {
        let desk = desk.clone();
        async move { Ok::<_, Infallible>(desk.answer(&request, from).await) }
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
    fn new(registry: Arc<Registry>, relay: SocketAddr, calls: Calls) -> Desk {
        let [requests, reviews] = [REQUESTS, REVIEWS].map(CallerLimits::new);
        let (places, permitted, refused) = (Semaphore::new(AT_ONCE), Mutex::default(), Mutex::default());
        Desk { registry, relay, calls, places, requests, reviews, permitted, refused }
    }

    async fn answer(&self, request: &Request<Incoming>, from: IpAddr) -> Response<Full<Bytes>> {
        let Some(_place) = self.requests.enter(&from, Instant::now()) else {
            return text(StatusCode::TOO_MANY_REQUESTS, "too many requests of this address; ask less often");
        };
        let path = request.uri().path();
        if !matches!(path, "/metrics" | "/relay/metrics") {
            return text(StatusCode::NOT_FOUND, "try /metrics or /relay/metrics");
        }
        if request.method() != Method::GET {
            return text(StatusCode::METHOD_NOT_ALLOWED, "only GET");
        }
        match self.permission(request.headers(), from).await {
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
            StatusCode::TOO_MANY_REQUESTS => {
                return text(
                    StatusCode::TOO_MANY_REQUESTS,
                    "too many unknown tokens of this address; try again later",
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
    async fn permission(&self, headers: &HeaderMap, from: IpAddr) -> StatusCode {
        let token = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok()?.strip_prefix("Bearer "));
        let Some(token) = token.filter(|token| !token.is_empty()) else { return StatusCode::UNAUTHORIZED };
        let digest: [u8; 32] = Sha256::digest(token).into();
        let known = [&self.permitted, &self.refused].into_iter().find_map(|known| {
            known.lock().get(&digest).copied().filter(|(until, _)| *until > Instant::now())
        });
        if let Some((_, status)) = known {
            return status;
        }
        let Some(_turn) = self.reviews.enter(&from, Instant::now()) else {
            return StatusCode::TOO_MANY_REQUESTS;
        };
        let Ok(_place) = self.places.try_acquire() else { return StatusCode::SERVICE_UNAVAILABLE };
        let status = match self.ask(token).await {
            Ok(status) => status,
            Err(error) => {
                debug!(%error, "a scraper is refused for now");
                return StatusCode::SERVICE_UNAVAILABLE;
            }
        };
        let (known, remember) = match status {
            StatusCode::OK => (&self.permitted, REMEMBER),
            _ => (&self.refused, REMEMBER_REFUSED),
        };
        let (mut known, now) = (known.lock(), Instant::now());
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

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use kube::client::Body;
    use peerpod_base::admin::Ready;
    use serde_json::json;

    use super::*;
    use crate::metrics::Metrics;

    const GOOD: &str = "good";

    /// Makes a desk before an API server that permits one token. Returns also the number of its reviews.
    fn desk() -> (Desk, Arc<AtomicUsize>) {
        let reviews = Arc::new(AtomicUsize::new(0));
        let counted = reviews.clone();
        let server = tower::service_fn(move |request: Request<Body>| {
            let counted = counted.clone();
            async move {
                let body = request.into_body().collect().await.map_err(std::io::Error::other)?.to_bytes();
                let text = String::from_utf8_lossy(&body).into_owned();
                let answer = if text.contains("TokenReview") {
                    counted.fetch_add(1, Ordering::Relaxed);
                    let is_good = text.contains(&format!("\"{GOOD}\""));
                    json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {},
                        "status": {"authenticated": is_good, "user": {"username": "prometheus"}}})
                } else {
                    json!({"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": {},
                        "status": {"allowed": true}})
                };
                Ok::<_, std::io::Error>(Response::new(Body::from(answer.to_string().into_bytes())))
            }
        });
        let metrics = Metrics::new(&mut Registry::default());
        let calls = Calls::new(kube::Client::new(server, "default"), metrics, Ready::default());
        (Desk::new(Arc::default(), SocketAddr::from(([127, 0, 0, 1], 1)), calls), reviews)
    }

    async fn ask(desk: &Desk, token: &str, from: u8) -> StatusCode {
        let value = HeaderValue::from_str(&format!("Bearer {token}")).unwrap();
        let headers = HeaderMap::from_iter([(AUTHORIZATION, value)]);
        desk.permission(&headers, IpAddr::from([10, 0, 0, from])).await
    }

    #[tokio::test]
    async fn one_address_with_many_tokens_costs_few_reviews_and_shuts_nobody_out() {
        let (desk, reviews) = desk();
        assert_eq!(ask(&desk, GOOD, 1).await, StatusCode::OK);
        for number in 0..1000 {
            let status = ask(&desk, &format!("bad-{number}"), 2).await;
            assert!(matches!(status, StatusCode::UNAUTHORIZED | StatusCode::TOO_MANY_REQUESTS), "{status}");
        }
        let asked = reviews.load(Ordering::Relaxed);
        assert!(asked < 50, "{asked} reviews");
        assert_eq!(ask(&desk, "bad-0", 2).await, StatusCode::UNAUTHORIZED, "a refusal is remembered");
        // Refusals of many addresses fill their own places alone.
        for number in 0..MOST * 2 {
            let from = 3 + u8::try_from(number / 4 % 250).unwrap();
            ask(&desk, &format!("other-{number}"), from).await;
        }
        let asked = reviews.load(Ordering::Relaxed);
        assert_eq!(ask(&desk, GOOD, 2).await, StatusCode::OK);
        assert_eq!(reviews.load(Ordering::Relaxed), asked, "a permitted token is still known");
        assert_eq!(ask(&desk, GOOD, 254).await, StatusCode::OK);
    }
}
