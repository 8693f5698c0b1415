//! HTTP/1.1 over TLS for a role's own port: bounded in connections, in time, and in what a body may hold. What is
//! answered is the role's matter ([`Answer`]). May touch: its socket.

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
use rustls_pki_types::CertificateDer;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{Semaphore, watch},
};
use tokio_rustls::TlsAcceptor;
use tracing::{debug, warn};

/// For the TLS handshake.
const HANDSHAKE_WITHIN: Duration = Duration::from_secs(5);
/// For a new connection's first request; who only holds a place gives it back.
const FIRST_WITHIN: Duration = Duration::from_secs(5);
/// For a request's body, once its headers are there. The API server itself gives up after 10 s, by default.
const BODY_WITHIN: Duration = Duration::from_secs(5);
/// A connection without a request for so long is closed. The API server keeps idle ones for 90 s at the most.
const IDLE: Duration = Duration::from_secs(120);
/// Connections at once; more wait in the kernel's queue.
const CONNECTIONS: usize = 1024;
/// Of one address, where the role says nothing else; more are closed at once, so that one caller leaves room for others.
const PER_ADDRESS: usize = 64;

/// Answers that are text or JSON.
pub type Reply = Response<Full<Bytes>>;

/// Who asks.
#[derive(Clone, Debug)]
pub struct Peer {
    /// Where the connection comes from.
    pub address: SocketAddr,
    /// Its certificate, which the server's configuration has proved; `None`: it showed none.
    pub certificate: Option<CertificateDer<'static>>,
}

/// What a role answers.
pub trait Answer: Send + Sync + 'static {
    /// One request.
    fn answer(&self, request: Request<Incoming>, peer: &Peer) -> impl Future<Output = Reply> + Send;

    /// A TLS handshake came to nothing.
    fn handshake_failed(&self);

    /// How many connections one address has at once.
    fn connections_per_address(&self) -> usize {
        PER_ADDRESS
    }

    /// A connection lives no longer than this; who wants more opens another. `None`: as long as it is used.
    fn connection_within(&self) -> Option<Duration> {
        None
    }
}

/// Accepts for ever. Each new connection gets the TLS configuration of that moment.
pub async fn accept<A: Answer>(
    listener: TcpListener,
    tls: watch::Receiver<Arc<ServerConfig>>,
    role: Arc<A>,
    drain: Drain,
) {
    let room = Arc::new(Semaphore::new(CONNECTIONS));
    let callers = Callers::default();
    loop {
        // Fails only for a closed semaphore, and nobody closes it.
        let Ok(place) = room.clone().acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, address)) => {
                let Some(counted) = callers.enter(address.ip(), role.connections_per_address()) else {
                    debug!(%address, "connection closed: its address has as many as it may have");
                    continue;
                };
                let tls = TlsAcceptor::from(tls.borrow().clone());
                let (role, busy) = (role.clone(), drain.busy("connection"));
                tokio::spawn(async move {
                    connection(stream, address, &tls, role, &busy).await;
                    drop((busy, place, counted));
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

/// How many connections each address has. Clones are the same.
#[derive(Clone, Debug, Default)]
struct Callers(Arc<Mutex<HashMap<IpAddr, usize>>>);

/// One connection, until it is dropped.
#[derive(Debug)]
struct Counted {
    callers: Callers,
    address: IpAddr,
}

impl Callers {
    /// `None`: it has as many as it may.
    fn enter(&self, address: IpAddr, most: usize) -> Option<Counted> {
        // An IPv4 caller of a socket for both families.
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
            debug!(error = %why, %address, "handshake came to nothing");
            return;
        }
    };
    let shown = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
    let peer = Arc::new(Peer { address, certificate: shown.map(|shown| shown.clone().into_owned()) });
    let within = role.connection_within();
    let asked = Arc::new(AtomicBool::new(false));
    let first = silent(asked.clone());
    let service = service_fn(move |request| {
        asked.store(true, Ordering::Relaxed);
        let (role, peer) = (role.clone(), peer.clone());
        async move { Ok::<_, Infallible>(role.answer(request, &peer).await) }
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
        // A request that is there is read before its time is looked at.
        biased;
        ended = served.as_mut() => ended,
        () = first => {
            debug!(%address, "connection closed: it asked nothing in time");
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

/// Ends when the first request is late, and else never.
async fn silent(asked: Arc<AtomicBool>) {
    tokio::time::sleep(FIRST_WITHIN).await;
    if asked.load(Ordering::Relaxed) {
        std::future::pending().await
    }
}

/// Why there is no body; a status and words for who asked.
pub type NoBody = (StatusCode, String);

/// The body, of at most `most` bytes and not too late.
///
/// # Errors
/// It is longer, or does not come in time.
pub async fn body(request: Request<Incoming>, most: usize, what: &str) -> Result<Bytes, NoBody> {
    let long = || (StatusCode::PAYLOAD_TOO_LARGE, format!("the body is longer than {what} can be"));
    // Said by Content-Length: refused before it arrives.
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

/// An answer of words.
pub fn text(status: StatusCode, body: &str) -> Reply {
    reply(status, "text/plain; charset=utf-8", body.as_bytes().to_vec())
}

/// An answer of this kind.
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
    fn one_address_has_so_many_connections_and_leaves_the_rest_to_others() {
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
        assert!(callers.0.lock().unwrap().is_empty(), "nothing is kept of those that have gone");
    }
}
