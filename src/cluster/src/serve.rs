//! Serves HTTP/1.1 over TLS on a role's own port, with limits on connections, time and body size. The role computes the
//! answers ([`Answer`]). May touch: its socket.

use std::{
    collections::HashMap,
    convert::Infallible,
    future::Future,
    io,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::{
    Request, Response, StatusCode,
    body::{Body, Incoming},
    header::{CONTENT_TYPE, HeaderValue},
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use peerpod_base::{
    chain::chain,
    lifecycle::{Busy, Drain},
};
use rustls::ServerConfig;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
};
use tokio_rustls::TlsAcceptor;
use tracing::{debug, warn};

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
pub trait Answer: Send + Sync + 'static {
    /// Answers one request. `peer` is the source address of its connection.
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
pub async fn accept<A: Answer>(listener: TcpListener, tls: Arc<ServerConfig>, role: Arc<A>, drain: Drain) {
    let tls = TlsAcceptor::from(tls);
    let room = Arc::new(Semaphore::new(CONNECTIONS));
    let callers = Callers::default();
    loop {
        // Fails only when the semaphore is closed, which never happens.
        let Ok(place) = room.clone().acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, address)) => {
                let Some(counted) = callers.enter(address.ip(), role.connections_per_address()) else {
                    debug!(%address, "connection closed: its address reached its limit");
                    continue;
                };
                let (tls, role, busy) = (tls.clone(), role.clone(), drain.busy("connection"));
                tokio::spawn(async move {
                    connection(stream, address, &tls, role, &busy).await;
                    drop((busy, place, counted));
                });
            }
            Err(why) => {
                // Most likely the process is out of descriptors: other connections need time to release some.
                warn!(error = %why, "connection not accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// Number of connections by address. Clones share the counts.
#[derive(Clone, Debug, Default)]
struct Callers(Arc<Mutex<HashMap<IpAddr, usize>>>);

/// One counted connection; dropping it ends the count.
#[derive(Debug)]
struct Counted {
    callers: Callers,
    address: IpAddr,
}

impl Callers {
    /// Counts one connection; `None`: the address has reached its limit.
    fn enter(&self, address: IpAddr, most: usize) -> Option<Counted> {
        // An IPv4 caller of a dual-stack socket has a mapped address.
        let address = address.to_canonical();
        let mut all = self.0.lock();
        let count = all.entry(address).or_default();
        if *count >= most {
            return None;
        }
        *count += 1;
        Some(Counted { callers: self.clone(), address })
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut all = self.callers.0.lock();
        let left = all.get_mut(&self.address).map_or(0, |count| {
            *count = count.saturating_sub(1);
            *count
        });
        if left == 0 {
            all.remove(&self.address);
        }
    }
}

async fn connection<A: Answer>(
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_per_address_are_limited() {
        let callers = Callers::default();
        let (first, second): (IpAddr, IpAddr) = ("10.0.0.7".parse().unwrap(), "fd00::7".parse().unwrap());
        let mut held: Vec<Counted> =
            (0..PER_ADDRESS).map(|_| callers.enter(first, PER_ADDRESS).unwrap()).collect();
        assert!(callers.enter(first, PER_ADDRESS).is_none());
        assert!(callers.enter("::ffff:10.0.0.7".parse().unwrap(), PER_ADDRESS).is_none(), "the same caller");
        let other = callers.enter(second, PER_ADDRESS).unwrap();
        held.pop();
        held.push(callers.enter(first, PER_ADDRESS).unwrap());
        assert!(callers.enter(first, PER_ADDRESS).is_none());
        drop((held, other));
        assert!(callers.0.lock().is_empty(), "nothing is kept of those that have gone");
    }
}
