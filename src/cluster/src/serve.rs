//! Serves HTTP/1.1 over TLS on a role's own port, with limits on connections, time and body size. The role computes the
//! answers ([`Responder`]). May touch: its socket.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Body, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use peerpod_base::chain::chain;
use peerpod_base::lifecycle::{Busy, Drain};
use peerpod_common::accept::Acceptor;
use peerpod_common::limit::ConnectionLimit;
use rustls::ServerConfig;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;
use tracing::debug;

/// Limit for the TLS handshake.
const HANDSHAKE_WITHIN: Duration = Duration::from_secs(5);
/// Limit for the first request of a new connection, so that an unused connection does not hold a place.
const FIRST_WITHIN: Duration = Duration::from_secs(5);
/// Limit for a request's body, from the end of its headers. The API server itself gives up after 10 s by default.
const BODY_WITHIN: Duration = Duration::from_secs(5);
/// Time without a request after which a connection is closed. The API server keeps idle connections for at most 90 s.
const IDLE: Duration = Duration::from_secs(120);
/// Limit of open connections; more wait in the kernel's queue.
const CONNECTIONS: usize = 1024;
/// Default limit of connections per address. More are closed at once, so that one caller leaves room for others.
const PER_ADDRESS: usize = 64;

/// Answer in text or JSON.
pub type Reply = Response<Full<Bytes>>;

/// Answers of a role.
pub trait Responder: Send + Sync + 'static {
    /// Responders one request. `peer` is the source address of its connection.
    fn answer(&self, request: Request<Incoming>, peer: SocketAddr) -> impl Future<Output = Reply> + Send;

    /// Notes a failed TLS handshake.
    fn handshake_failed(&self);

    /// Returns the limit of open connections per address.
    fn connections_per_address(&self) -> usize {
        PER_ADDRESS
    }

    /// Returns the maximum lifetime of a connection, after which a caller must open another; `None`: no maximum.
    fn connection_within(&self) -> Option<Duration> {
        None
    }
}

/// Runs the accept loop.
pub async fn accept<A: Responder>(listener: TcpListener, tls: Arc<ServerConfig>, role: Arc<A>, drain: Drain) {
    let tls = TlsAcceptor::from(tls);
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    let callers = ConnectionLimit::new(CONNECTIONS, role.connections_per_address());
    let mut acceptor = Acceptor::new("HTTPS port");
    loop {
        // Fails only when the semaphore is closed, which never happens.
        let Ok(place) = places.clone().acquire_owned().await else { return };
        let (stream, address) = acceptor.next(|| listener.accept()).await;
        let Some(counted) = callers.enter(address.ip()) else {
            debug!(%address, "connection closed: its address reached its limit");
            continue;
        };
        let (tls, role, busy) = (tls.clone(), role.clone(), drain.busy("connection"));
        tokio::spawn(async move {
            connection(stream, address, &tls, role, &busy).await;
            // The count ends before the next connection is admitted, which it could refuse otherwise.
            drop((busy, counted, place));
        });
    }
}

async fn connection<A: Responder>(
    stream: TcpStream,
    address: SocketAddr,
    tls: &TlsAcceptor,
    role: Arc<A>,
    busy: &Busy,
) {
    if let Err(why) = stream.set_nodelay(true) {
        debug!(error = %why, "no TCP_NODELAY");
    }
    let shaken = tokio::time::timeout(HANDSHAKE_WITHIN, tls.accept(stream)).await;
    let stream = match shaken.map_err(|_| io::Error::from(io::ErrorKind::TimedOut)).and_then(|shaken| shaken)
    {
        Ok(stream) => stream,
        Err(why) => {
            role.handshake_failed();
            debug!(error = %why, %address, "handshake failed");
            return;
        }
    };
    let within = role.connection_within();
    let asked = Arc::new(AtomicBool::new(false));
    let first = silent(asked.clone());
    let service = service_fn(move |request| {
        asked.store(true, Ordering::Relaxed);
        let role = role.clone();
        async move { Ok::<_, Infallible>(role.answer(request, address).await) }
    });
    let served = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(IDLE)
        .max_buf_size(64 * 1024)
        .serve_connection(TokioIo::new(stream), service);
    let mut served = std::pin::pin!(served);
    let old = async {
        match within {
            Some(within) => tokio::time::sleep(within).await,
            None => std::future::pending().await,
        }
    };
    let ended = tokio::select! {
        // A request that has arrived is read before its deadline is checked.
        biased;
        ended = served.as_mut() => ended,
        () = first => {
            debug!(%address, "connection closed: no request came in time");
            return;
        }
        () = async { tokio::select! { () = busy.draining() => {}, () = old => {} } } => {
            served.as_mut().graceful_shutdown();
            served.await
        }
    };
    if let Err(why) = ended {
        debug!(error = chain(&why), "connection ended");
    }
}

/// Returns when the first request is late, and otherwise never.
async fn silent(asked: Arc<AtomicBool>) {
    tokio::time::sleep(FIRST_WITHIN).await;
    if asked.load(Ordering::Relaxed) {
        std::future::pending().await
    }
}

/// Reason for a missing body: a status, and a text for the caller.
pub type NoBody = (StatusCode, String);

/// Reads the body, of at most `most` bytes.
///
/// # Errors
/// The body is longer than `most`, or does not arrive within 5 s.
pub async fn body(request: Request<Incoming>, most: usize, what: &str) -> Result<Bytes, NoBody> {
    let long = || (StatusCode::PAYLOAD_TOO_LARGE, format!("the body is longer than {what} can be"));
    // Content-Length announces the size: the request is refused before the body arrives.
    if request.body().size_hint().lower() > most as u64 {
        return Err(long());
    }
    match tokio::time::timeout(BODY_WITHIN, Limited::new(request.into_body(), most).collect()).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(why)) if why.is::<http_body_util::LengthLimitError>() => Err(long()),
        Ok(Err(why)) => Err((StatusCode::BAD_REQUEST, chain(why.as_ref()))),
        Err(_) => Err((StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time".to_owned())),
    }
}

/// Returns an answer in plain text.
pub fn text(status: StatusCode, body: &str) -> Reply {
    reply(status, "text/plain; charset=utf-8", body.as_bytes().to_vec())
}

/// Returns an answer of this content type.
pub fn reply(status: StatusCode, kind: &'static str, body: impl Into<Bytes>) -> Reply {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}
