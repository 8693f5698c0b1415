//! Serves the admin port: `/metrics` (OpenMetrics or the text format 0.0.4, as the scraper accepts), `/healthz` (the
//! process answers), `/readyz` (JSON: the reasons why the process is not ready, and warnings that do not stop its work).
//!
//! Each process answers for itself. The port is for the node's own network: it shows no secret and changes nothing.
//! [`local`] serves the same and more on a Unix socket.

pub mod local;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt::Display;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ACCEPT, CONTENT_TYPE, HeaderMap, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use peerpod_common::accept::Acceptor;
use prometheus_client::registry::Registry;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::chain::chain;
use crate::listen::listen;
use crate::metrics::plain;

/// Time limit for the headers of a request.
const HEADERS_WITHIN: Duration = Duration::from_secs(5);

/// Longest life of a connection; scrapers open another one.
const CONNECTION_WITHIN: Duration = Duration::from_secs(60);

/// Interval of the questions of [`wait_for`].
const ASK_AGAIN: Duration = Duration::from_secs(2);

/// Limit of open connections; more wait in the kernel's queue.
const CONNECTIONS: usize = 64;

/// Reasons why a process is not ready yet. Clones share the list.
#[derive(Clone, Debug, Default)]
pub struct Ready {
    waiting: Arc<Mutex<BTreeMap<String, String>>>,
    warnings: Arc<Mutex<BTreeMap<String, String>>>,
}

/// Keeps the process from being ready until this is dropped.
#[derive(Debug)]
pub struct BlockReady {
    ready: Ready,
    name: String,
}

impl Ready {
    /// Keeps the process from being ready until the result is dropped. A start makes it first.
    pub fn block(&self, name: &str) -> BlockReady {
        self.not_ready(name, "starting");
        BlockReady { ready: self.clone(), name: name.to_owned() }
    }

    /// Adds the reason `why`, until [`Ready::ready`] is called with the same name.
    pub fn not_ready(&self, name: &str, why: &str) {
        self.waiting.lock().insert(name.to_owned(), why.to_owned());
    }

    /// Removes the reason of this name.
    pub fn ready(&self, name: &str) {
        self.waiting.lock().remove(name);
    }

    /// Returns the reasons by name.
    pub fn waiting(&self) -> BTreeMap<String, String> {
        self.waiting.lock().clone()
    }

    /// Adds a warning, until [`Ready::settled`] is called with the same name. A warning does not affect readiness.
    pub fn warn(&self, name: &str, why: &str) {
        self.warnings.lock().insert(name.to_owned(), why.to_owned());
    }

    /// Removes the warning of this name.
    pub fn settled(&self, name: &str) {
        self.warnings.lock().remove(name);
    }

    /// Returns the warnings by name.
    pub fn warnings(&self) -> BTreeMap<String, String> {
        self.warnings.lock().clone()
    }
}

impl BlockReady {
    /// Replaces the reason by a more precise one.
    pub fn because(&self, why: &str) {
        self.ready.not_ready(&self.name, why);
    }
}

impl Drop for BlockReady {
    fn drop(&mut self) {
        self.ready.ready(&self.name);
    }
}

/// The admin port could not be opened.
#[derive(Debug, thiserror::Error)]
#[error("listen for admin requests on {address}: {why}; choose another address or free this one")]
pub struct Error {
    address: SocketAddr,
    why: std::io::Error,
}

/// Binds the port and serves it until the runtime ends. Returns the bound address (port 0 becomes a real one).
pub async fn serve(address: SocketAddr, registry: Arc<Registry>, ready: Ready) -> Result<SocketAddr, Error> {
    let failed = |why| Error { address, why };
    let listener = listen(address).await.map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    serve_on(listener, registry, ready);
    Ok(bound)
}

/// Serves a port that is bound already, until the runtime ends.
pub fn serve_on(listener: TcpListener, registry: Arc<Registry>, ready: Ready) {
    tokio::spawn(accept(listener, registry, ready));
}

/// Asks until there is an answer that the start needs. From the first failure until then, the port answers without
/// metrics, and names the failure: a liveness probe must not end a start that waits. The port is free afterwards.
pub async fn wait_for<T, E: Display, F: Future<Output = Result<T, E>>>(
    name: &str,
    (address, ready): (SocketAddr, &Ready),
    ask: impl Fn() -> F,
) -> Result<T, Error> {
    let error = match ask().await {
        Ok(answer) => return Ok(answer),
        Err(error) => error.to_string(),
    };
    tracing::warn!(error, name, "the start waits for an answer; asking again");
    let blocked = ready.block(name);
    blocked.because(&error);
    let listener = listen(address).await.map_err(|why| Error { address, why })?;
    let mut serving = JoinSet::new();
    serving.spawn(accept(listener, Arc::default(), ready.clone()));
    loop {
        tokio::time::sleep(ASK_AGAIN).await;
        match ask().await {
            Ok(answer) => {
                serving.shutdown().await;
                return Ok(answer);
            }
            Err(error) => blocked.because(&error.to_string()),
        }
    }
}

/// Makes the error of a port that cannot be used.
pub fn refused(address: SocketAddr, why: std::io::Error) -> Error {
    Error { address, why }
}

async fn accept(listener: TcpListener, registry: Arc<Registry>, ready: Ready) {
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    let mut acceptor = Acceptor::new("admin port");
    loop {
        // Fails only for a closed semaphore, and this one is never closed.
        let Ok(place) = places.clone().acquire_owned().await else { return };
        let (stream, _) = acceptor.next(|| listener.accept()).await;
        let (registry, ready) = (registry.clone(), ready.clone());
        tokio::spawn(async move {
            let answer =
                |request: Request<Incoming>| std::future::ready(respond(&request, &registry, &ready));
            connection(stream, answer).await;
            drop(place);
        });
    }
}

/// Serves one connection.
async fn connection<S, A, F>(stream: S, answer: A)
where
    S: AsyncRead + AsyncWrite + Unpin,
    A: Fn(Request<Incoming>) -> F,
    F: Future<Output = Response<Full<Bytes>>>,
{
    let answer = hyper::service::service_fn(|request: Request<Incoming>| {
        let response = answer(request);
        async { Ok::<_, Infallible>(response.await) }
    });
    let served = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADERS_WITHIN)
        .max_buf_size(16 * 1024)
        .serve_connection(TokioIo::new(stream), answer);
    match tokio::time::timeout(CONNECTION_WITHIN, served).await {
        Ok(Ok(())) | Err(_) => {}
        Ok(Err(why)) => tracing::debug!(error = chain(&why), "admin connection ended"),
    }
}

const TEXT: &str = "text/plain; charset=utf-8";

fn respond(request: &Request<Incoming>, registry: &Registry, ready: &Ready) -> Response<Full<Bytes>> {
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        return response(StatusCode::METHOD_NOT_ALLOWED, TEXT, "only GET\n".to_owned());
    }
    match request.uri().path() {
        "/healthz" => response(StatusCode::OK, TEXT, "ok\n".to_owned()),
        "/readyz" => {
            let waiting = ready.waiting();
            let status = if waiting.is_empty() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
            let warnings = ready.warnings();
            let mut body = serde_json::json!({"ready": waiting.is_empty(), "waiting": waiting});
            if !warnings.is_empty() {
                body["warnings"] = serde_json::json!(warnings);
            }
            response(status, "application/json", format!("{body}\n"))
        }
        "/metrics" => metrics(request.headers(), registry),
        _ => response(StatusCode::NOT_FOUND, TEXT, "try /metrics, /healthz or /readyz\n".to_owned()),
    }
}

/// Answers a scraper in OpenMetrics, if it accepts that at least as gladly as the text format 0.0.4; else in the latter.
pub fn metrics(headers: &HeaderMap, registry: &Registry) -> Response<Full<Bytes>> {
    let mut text = String::new();
    if prometheus_client::encoding::text::encode(&mut text, registry).is_err() {
        return response(StatusCode::INTERNAL_SERVER_ERROR, TEXT, "a metric has no text\n".to_owned());
    }
    let openmetrics = weight(headers, "application/openmetrics-text");
    if openmetrics > 0.0 && openmetrics >= weight(headers, "text/plain") {
        response(StatusCode::OK, "application/openmetrics-text; version=1.0.0; charset=utf-8", text)
    } else {
        response(StatusCode::OK, "text/plain; version=0.0.4; charset=utf-8", plain(&text))
    }
}

/// Returns the weight (`q`) of a media type in the `Accept` header; 0 if the header does not name it.
fn weight(headers: &HeaderMap, kind: &str) -> f64 {
    let accepted = headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let weights = accepted.flat_map(|value| value.split(',')).filter_map(|range| {
        let mut parts = range.split(';').map(str::trim);
        parts.next()?.eq_ignore_ascii_case(kind).then_some(())?;
        Some(parts.find_map(|part| part.strip_prefix("q=")?.parse().ok()).unwrap_or(1.0))
    });
    weights.fold(0.0, f64::max)
}

fn response(status: StatusCode, kind: &'static str, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

#[cfg(test)]
mod tests;
