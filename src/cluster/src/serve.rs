//! HTTP/1.1 over TLS for a role's own port: bounded in connections, in time, and in what a body may hold. What is
//! answered is the role's matter ([`Answer`]). May touch: its socket.

use std::{convert::Infallible, future::Future, io, net::SocketAddr, sync::Arc, time::Duration};

use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::{
    Request, Response, StatusCode,
    body::{Body, Incoming},
    header::{CONTENT_TYPE, HeaderValue},
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use peerpod_base::lifecycle::{Busy, Drain};
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
/// For a request's body, once its headers are there. The API server itself gives up after 10 s, by default.
const BODY_WITHIN: Duration = Duration::from_secs(5);
/// A connection without a request for so long is closed. The API server keeps idle ones for 90 s at the most.
const IDLE: Duration = Duration::from_secs(120);
/// Connections at once; more wait in the kernel's queue.
const CONNECTIONS: usize = 1024;

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
    loop {
        // Fails only for a closed semaphore, and nobody closes it.
        let Ok(place) = room.clone().acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, address)) => {
                let tls = TlsAcceptor::from(tls.borrow().clone());
                let (role, busy) = (role.clone(), drain.busy("connection"));
                tokio::spawn(async move {
                    connection(stream, address, &tls, role, &busy).await;
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
    let service = service_fn(move |request| {
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
        ended = served.as_mut() => ended,
        () = async { tokio::select! { () = busy.draining() => {}, () = old => {} } } => {
            served.as_mut().graceful_shutdown();
            served.await
        }
    };
    if let Err(why) = ended {
        debug!(error = %why, "connection ended");
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
        Ok(Err(why)) => Err((StatusCode::BAD_REQUEST, why.to_string())),
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
