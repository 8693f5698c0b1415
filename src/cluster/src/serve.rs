//! Serves HTTP/1.1 over TLS on a role's own port, with limits on connections, time and body size. The role computes the
//! answers ([`Responder`]). May touch: its socket.

use std::collections::HashMap;
use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::{Mutex, RwLock};
use peerpod_base::chain::chain;
use peerpod_base::lifecycle::{Busy, Drain};
use peerpod_common::accept::Acceptor;
use peerpod_common::limit::ConnectionLimit;
use peerpod_pki::not_after;
use rustls::crypto::CryptoProvider;
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::{ServerConfig, SupportedProtocolVersion};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tracing::debug;

/// Limit for the TLS handshake.
const HANDSHAKE_WITHIN: Duration = Duration::from_secs(5);
/// Limit for the first request of a new connection, so that an unused connection does not hold a place.
const FIRST_WITHIN: Duration = Duration::from_secs(5);
/// Limit for a request's body, from the end of its headers. The API server itself gives up after 10 s by default.
const BODY_WITHIN: Duration = Duration::from_secs(5);
/// Bytes of a body, and of an answer, that need no room. Nearly all requests have less, so that long ones of other
/// callers do not delay them.
pub(crate) const SMALL: usize = 32 * 1024;
/// Limit for room to become free. Several long bodies may wait for each other; one gives up in time for the others.
const ROOM_WITHIN: Duration = Duration::from_secs(2);
/// Limit for the caller to take an answer, so that unread answers do not stay in memory.
const TAKEN_WITHIN: Duration = Duration::from_secs(10);
/// Limit of a connection's read buffer in bytes, and so of a request's head. A token in it has up to 16 KiB.
const MOST_BUFFER: usize = 32 * 1024;
/// Time without a request after which a connection is closed. The API server keeps idle connections for at most 90 s.
const IDLE: Duration = Duration::from_secs(120);
/// Limit of open connections; more wait in the kernel's queue.
const CONNECTIONS: usize = 1024;

/// Answer in text or JSON.
pub(crate) type Reply = Response<Bytes>;

/// Answers of a role.
pub(crate) trait Responder: Send + Sync + 'static {
    /// Limit of connections per address. More are closed at once, so that one caller leaves room for others.
    const PER_ADDRESS: usize = 64;
    /// Maximum lifetime of a connection, after which a caller must open another; `None`: no maximum.
    const LIFETIME: Option<Duration> = None;

    /// Answers one request. `peer` is the source address of its connection.
    fn answer(&self, request: Request<Incoming>, peer: SocketAddr) -> impl Future<Output = Reply> + Send;

    /// Notes a failed TLS handshake.
    fn handshake_failed(&self);
}

/// Certificate in use; handshakes fail while there is none. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct InUse(Arc<RwLock<Option<Arc<CertifiedKey>>>>);

impl InUse {
    pub(crate) fn set(&self, pair: CertifiedKey) {
        *self.0.write() = Some(Arc::new(pair));
    }

    /// Returns the end of the certificate; `None`: there is none.
    pub(crate) fn not_after(&self) -> Option<SystemTime> {
        not_after(self.get()?.cert.first()?)
    }

    pub(crate) fn get(&self) -> Option<Arc<CertifiedKey>> {
        self.0.read().clone()
    }
}

impl ResolvesServerCert for InUse {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.get()
    }
}

/// Returns the TLS settings of a port with this certificate. Callers need a certificate that `callers` accepts; `None`:
/// they need none.
pub(crate) fn tls(
    crypto: Arc<CryptoProvider>,
    versions: &[&'static SupportedProtocolVersion],
    certificate: InUse,
    callers: Option<Arc<dyn ClientCertVerifier>>,
) -> Result<ServerConfig, rustls::Error> {
    let tls = ServerConfig::builder_with_provider(crypto).with_protocol_versions(versions)?;
    let tls = match callers {
        Some(callers) => tls.with_client_cert_verifier(callers),
        None => tls.with_no_client_auth(),
    };
    let mut tls = tls.with_cert_resolver(Arc::new(certificate));
    tls.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(tls)
}

pub(crate) async fn accept<A: Responder>(
    listener: TcpListener,
    tls: ServerConfig,
    role: Arc<A>,
    drain: Drain,
) {
    let tls = TlsAcceptor::from(Arc::new(tls));
    let places = Arc::new(Semaphore::new(CONNECTIONS));
    let callers = ConnectionLimit::new(CONNECTIONS, A::PER_ADDRESS);
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
    let stream = match handshake(stream, tls).await {
        Ok(stream) => stream,
        Err(why) => {
            role.handshake_failed();
            debug!(error = %why, %address, "handshake failed");
            return;
        }
    };
    let due = Due::default();
    let late = late(due.by(FIRST_WITHIN).subscribe());
    let service = service_fn(move |request| {
        due.clear();
        let (role, due) = (role.clone(), due.clone());
        async move {
            let answer = role.answer(request, address).await;
            due.by(TAKEN_WITHIN);
            Ok::<_, Infallible>(answer.map(|bytes| Full::new(Bytes::from_owner(Untaken { bytes, due }))))
        }
    });
    let served = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(IDLE)
        .max_buf_size(MOST_BUFFER)
        .serve_connection(TokioIo::new(stream), service);
    let mut served = std::pin::pin!(served);
    let old = async {
        match A::LIFETIME {
            Some(lifetime) => sleep(lifetime).await,
            None => std::future::pending().await,
        }
    };
    let stop = async {
        tokio::select! { () = busy.draining() => {}, () = old => {} }
    };
    let (mut late, mut stop, mut stopping) = (std::pin::pin!(late), std::pin::pin!(stop), false);
    let ended = loop {
        tokio::select! {
            // A request that has arrived is read before its deadline is checked.
            biased;
            ended = served.as_mut() => break ended,
            () = late.as_mut() => {
                debug!(%address, "connection closed: the first request did not come, or an answer was not taken, in time");
                return;
            }
            () = stop.as_mut(), if !stopping => {
                served.as_mut().graceful_shutdown();
                stopping = true;
            }
        }
    };
    if let Err(why) = ended {
        debug!(error = chain(&why), "connection ended");
    }
}

async fn handshake(stream: TcpStream, tls: &TlsAcceptor) -> io::Result<TlsStream<TcpStream>> {
    if let Err(why) = stream.set_nodelay(true) {
        debug!(error = %why, "no TCP_NODELAY");
    }
    timeout(HANDSHAKE_WITHIN, tls.accept(stream)).await?
}

/// Moment by which the caller must act; `None`: it need not. Clones share it.
#[derive(Clone, Default)]
struct Due(Arc<watch::Sender<Option<Instant>>>);

impl Due {
    fn by(&self, within: Duration) -> &watch::Sender<Option<Instant>> {
        self.0.send_replace(Some(Instant::now() + within));
        &self.0
    }

    fn clear(&self) {
        self.0.send_replace(None);
    }
}

/// Answer that is not written yet. The server drops it after the last byte.
struct Untaken {
    bytes: Bytes,
    due: Due,
}

impl AsRef<[u8]> for Untaken {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Untaken {
    fn drop(&mut self) {
        self.due.clear();
    }
}

/// Returns when the caller is late.
async fn late(mut due: watch::Receiver<Option<Instant>>) {
    loop {
        let by = *due.borrow_and_update();
        let passed = async {
            match by {
                Some(by) => sleep_until(by).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = passed => return,
            changed = due.changed() => if changed.is_err() { std::future::pending().await },
        }
    }
}

/// Room in memory for long bodies and answers together. Each address gets half of it at most, so that one caller leaves
/// room for others. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Rooms {
    bytes: usize,
    all: Arc<Semaphore>,
    /// Room of each address with a request in flight. [`CONNECTIONS`] limits their number.
    by_address: Arc<Mutex<HashMap<IpAddr, Weak<Semaphore>>>>,
}

/// Room for the requests of one address.
#[derive(Debug)]
pub(crate) struct Room([Arc<Semaphore>; 2]);

/// Bytes with the room that they take.
#[derive(Debug, Default)]
pub(crate) struct Roomed {
    pub(crate) bytes: Vec<u8>,
    room: Vec<OwnedSemaphorePermit>,
}

impl AsRef<[u8]> for Roomed {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Rooms {
    /// Makes room for this many bytes, beyond the first [`SMALL`] of each body and answer.
    pub(crate) fn new(bytes: usize) -> Rooms {
        Rooms { bytes, all: Arc::new(Semaphore::new(bytes)), by_address: Arc::default() }
    }

    /// Returns the room of this address.
    pub(crate) fn of(&self, address: IpAddr) -> Room {
        let mut by_address = self.by_address.lock();
        by_address.retain(|_, room| room.strong_count() > 0);
        let room = by_address.entry(address.to_canonical()).or_default();
        let own = room.upgrade().unwrap_or_else(|| Arc::new(Semaphore::new(self.bytes / 2)));
        *room = Arc::downgrade(&own);
        Room([own, self.all.clone()])
    }
}

impl Room {
    /// Returns no room: a body has at most [`SMALL`] bytes.
    pub(crate) fn none() -> Room {
        let none = Arc::new(Semaphore::new(0));
        Room([none.clone(), none])
    }

    /// Waits for room for the bytes and `more` of them, and adds these.
    pub(crate) async fn add(&self, to: &mut Roomed, more: &[u8]) -> Result<(), (StatusCode, String)> {
        let held = to.room.first().map_or(0, OwnedSemaphorePermit::num_permits);
        let missing = (to.bytes.len() + more.len()).saturating_sub(SMALL + held);
        if missing > 0 {
            let wanted = u32::try_from(missing).unwrap_or(u32::MAX);
            let taken = async {
                let mut taken = Vec::new();
                for room in &self.0 {
                    taken.push(room.clone().acquire_many_owned(wanted).await?);
                }
                Ok::<_, AcquireError>(taken)
            };
            let Ok(Ok(taken)) = timeout(ROOM_WITHIN, taken).await else {
                let why = "too many long requests at once; ask again".to_owned();
                return Err((StatusCode::SERVICE_UNAVAILABLE, why));
            };
            if to.room.is_empty() {
                to.room = taken;
            } else {
                to.room.iter_mut().zip(taken).for_each(|(held, more)| held.merge(more));
            }
        }
        to.bytes.extend_from_slice(more);
        Ok(())
    }
}

/// Reads the body, or returns a status and a text for the caller if it is longer than `most` bytes, does not arrive
/// within 5 s, or finds no room. Bytes take room as they arrive.
pub(crate) async fn body(
    request: Request<Incoming>,
    most: usize,
    what: &str,
    room: &Room,
) -> Result<Roomed, (StatusCode, String)> {
    let long = || (StatusCode::PAYLOAD_TOO_LARGE, format!("the body is longer than {what} can be"));
    // Content-Length announces the size: the request is refused before the body arrives.
    if request.body().size_hint().lower() > most as u64 {
        return Err(long());
    }
    let read = async {
        let (mut body, mut read) = (request.into_body(), Roomed::default());
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|why| (StatusCode::BAD_REQUEST, chain(&why)))?;
            // Trailers have no use.
            let Ok(data) = frame.into_data() else { continue };
            if read.bytes.len() + data.len() > most {
                return Err(long());
            }
            room.add(&mut read, &data).await?;
        }
        Ok(read)
    };
    let late = || (StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time".to_owned());
    timeout(BODY_WITHIN, read).await.unwrap_or_else(|_| Err(late()))
}

pub(crate) fn text(status: StatusCode, body: &str) -> Reply {
    reply(status, "text/plain; charset=utf-8", body.as_bytes().to_vec())
}

pub(crate) fn reply(status: StatusCode, kind: &'static str, body: impl Into<Bytes>) -> Reply {
    let mut response = Response::new(body.into());
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn long_bytes_share_room_and_short_ones_need_none() {
        let rooms = Rooms::new(3 * SMALL);
        let of = |address: &str| rooms.of(address.parse().unwrap());
        let room = of("10.0.0.7");
        let [mut long, mut other, mut small, mut third] = std::array::from_fn(|_| Roomed::default());
        for _ in 0..5 {
            room.add(&mut long, &[0; SMALL / 2]).await.unwrap();
        }
        room.add(&mut small, &[0; SMALL]).await.unwrap();
        room.add(&mut other, &[0; SMALL]).await.unwrap();
        let same = of("::ffff:10.0.0.7");
        let (status, _) = same.add(&mut other, &[0]).await.unwrap_err();
        assert_eq!((status, other.bytes.len()), (StatusCode::SERVICE_UNAVAILABLE, SMALL));
        of("10.0.0.8").add(&mut other, &vec![0; SMALL * 3 / 2]).await.expect("half is left for others");
        let all_is_taken = of("10.0.0.9").add(&mut third, &[0; SMALL + 1]).await.unwrap_err();
        assert_eq!(all_is_taken.0, StatusCode::SERVICE_UNAVAILABLE);
        drop(long);
        of("10.0.0.9").add(&mut third, &[0; SMALL + 1]).await.unwrap();
        drop((room, same, other, third));
        of("10.0.0.10");
        assert_eq!(rooms.by_address.lock().len(), 1, "nothing is kept of those that have gone");
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_is_late_with_its_first_request_and_with_an_answer_that_it_does_not_take() {
        let due = Due::default();
        let mut late = std::pin::pin!(late(due.by(FIRST_WITHIN).subscribe()));
        let mut is_late = async |after| timeout(after, late.as_mut()).await.is_ok();
        assert!(!is_late(FIRST_WITHIN / 2).await);
        due.clear();
        assert!(!is_late(IDLE).await, "no request is due");
        due.by(TAKEN_WITHIN);
        let answer = Bytes::from_owner(Untaken { bytes: Bytes::from_static(b"x"), due: due.clone() });
        assert!(!is_late(TAKEN_WITHIN / 2).await);
        drop(answer);
        assert!(!is_late(IDLE).await, "the answer was taken");
        due.by(TAKEN_WITHIN);
        assert!(is_late(TAKEN_WITHIN).await);
    }
}
