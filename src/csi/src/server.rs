//! The socket that sidecars and kubelet dial: HTTP/2, bounded in connections, streams and headers. May touch: that socket.

use std::{
    convert::Infallible,
    fs::{self, Permissions},
    io,
    os::unix::fs::{FileTypeExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use hyper::{server::conn::http2, service::service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use peerpod_base::{
    chain::chain,
    lifecycle::{Busy, Drain},
};
use tokio::{
    net::{UnixListener, UnixStream},
    sync::Semaphore,
};
use tracing::{debug, warn};

use crate::proxy::Proxy;

/// Connections at once; more wait in the kernel's queue.
const CONNECTIONS: usize = 256;
/// Calls at once on one connection; more are told to wait, as HTTP/2 has it.
const STREAMS: u32 = 256;
/// What may be under way in one stream and in all of a connection.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = 8 << 20;
/// Metadata of one call.
const HEADERS: u32 = 1 << 20;
/// A peer that is gone without a word (a frozen container) is noticed.
const PING_EVERY: Duration = Duration::from_secs(60);
const PONG_WITHIN: Duration = Duration::from_secs(20);

/// The socket cannot be had.
#[derive(Debug, thiserror::Error)]
#[error("listen for CSI calls on {path}: {why}; choose another csi.endpoint or see who made it", path = path.display())]
pub struct Error {
    path: PathBuf,
    why: io::Error,
}

/// Listens on this path; what a predecessor left there goes. For nobody but our own user.
///
/// # Errors
/// [`Error`].
pub fn bind(path: &Path) -> Result<UnixListener, Error> {
    let failed = |why| Error { path: path.to_owned(), why };
    match fs::symlink_metadata(path) {
        Ok(there) if there.file_type().is_socket() => fs::remove_file(path).map_err(failed)?,
        Ok(_) => return Err(failed(io::Error::other("there is a file that is no socket"))),
        Err(why) if why.kind() == io::ErrorKind::NotFound => {}
        Err(why) => return Err(failed(why)),
    }
    let listener = UnixListener::bind(path).map_err(failed)?;
    fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(failed)?;
    Ok(listener)
}

/// Answers until the task is aborted.
pub async fn serve(listener: UnixListener, proxy: Arc<Proxy>, drain: Drain) {
    let room = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        // Fails only for a closed semaphore, and nobody closes it.
        let Ok(place) = room.clone().acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let (proxy, busy) = (proxy.clone(), drain.busy("connection"));
                tokio::spawn(async move {
                    connection(stream, proxy, &busy).await;
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
        // The driver's answers have none.
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
