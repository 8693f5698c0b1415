//! Serves HTTP/2 on the socket of sidecars and kubelet, with limits on connections, streams and headers.

use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::anyhow;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use peerpod_base::chain::chain;
use peerpod_base::lifecycle::{Busy, Drain};
use peerpod_common::accept::Acceptor;
use peerpod_common::unix_socket::{self, Bound};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tracing::debug;

use crate::proxy::Proxy;
use crate::upstream::{CONNECTION_WINDOW, HEADERS, STREAM_WINDOW};

/// Limit of open connections; more wait in the kernel's queue.
const CONNECTIONS: usize = 256;
/// Limit of calls in flight per connection; HTTP/2 makes further calls wait.
const STREAMS: u32 = 256;
/// Interval of pings, which detect a peer that no longer reads (a frozen container).
const PING_EVERY: Duration = Duration::from_secs(60);
const PONG_WITHIN: Duration = Duration::from_secs(20);

/// Listens on this path in the place of an earlier process. Only the process's own user may connect. Dropping the name
/// removes the socket.
pub(crate) fn bind(path: &Path) -> anyhow::Result<(UnixListener, Bound)> {
    unix_socket::bind(path).map_err(|why| {
        let path = path.display();
        anyhow!(
            "listen for CSI calls on {path}: {why}; choose another csi.endpoint or find the program that made it"
        )
    })
}

/// Runs the accept loop until the task is aborted.
pub(crate) async fn serve(listener: UnixListener, proxy: Arc<Proxy>, drain: Drain) {
    let room = Arc::new(Semaphore::new(CONNECTIONS));
    let mut acceptor = Acceptor::new("csi.endpoint");
    loop {
        // Fails only when the semaphore is closed, which never happens.
        let Ok(place) = room.clone().acquire_owned().await else { return };
        let (stream, _) = acceptor.next(|| listener.accept()).await;
        let (proxy, busy) = (proxy.clone(), drain.busy("connection"));
        tokio::spawn(async move {
            connection(stream, proxy, &busy).await;
            drop((busy, place));
        });
    }
}

async fn connection(stream: UnixStream, proxy: Arc<Proxy>, busy: &Busy) {
    let service = service_fn(move |request| {
        let proxy = proxy.clone();
        async move { Ok::<_, Infallible>(proxy.answer(request).await) }
    });
    let served = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .max_concurrent_streams(STREAMS)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_header_list_size(HEADERS)
        .keep_alive_interval(PING_EVERY)
        .keep_alive_timeout(PONG_WITHIN)
        // The driver's answers have no date header.
        .auto_date_header(false)
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
        debug!(error = chain(&why), "connection ended");
    }
}
