//! Listens for nodes, and detects that the starter of the provider is gone.

use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream;
use peerpod_common::accept::Acceptor;
use peerpod_common::files;
use peerpod_provider_api::Error;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use ttrpc::asynchronous::transport::Listener;

use crate::{SOCKET_VARIABLE, TlsFiles, tls};

/// Longest TLS handshake of a node.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Most concurrent handshakes; further connections wait in the kernel's queue.
const HANDSHAKES: usize = 64;

/// Returns the socket path that the node gave to this program.
///
/// # Errors
/// When the variable is not set, because the program was started by hand.
pub fn socket_we_were_given() -> Result<PathBuf, Error> {
    std::env::var_os(SOCKET_VARIABLE).map(PathBuf::from).ok_or_else(|| {
        Error::invalid(format!("{SOCKET_VARIABLE} is not set; it names the socket to serve on"))
    })
}

/// Listens on a unix socket that only this process's user (and root) can reach. An existing socket is replaced.
///
/// # Errors
/// When the socket cannot be created.
pub fn listen_on_socket(path: &Path) -> Result<Listener, Error> {
    let bind = || -> io::Result<UnixListener> {
        files::remove_volatile(path)?;
        // Under another name first, so that a client never finds a socket with other permissions.
        let new = path.with_extension("new");
        files::remove_volatile(&new)?;
        let listener = UnixListener::bind(&new)?;
        std::fs::set_permissions(&new, std::fs::Permissions::from_mode(0o600))?;
        std::fs::rename(&new, path)?;
        Ok(listener)
    };
    let listener =
        bind().map_err(|error| Error::invalid(format!("listen on {}: {error}", path.display())))?;
    Ok(Listener::from(listener))
}

/// Accepts only nodes with a certificate of the CA in `files`. The files are read again for each connection.
///
/// # Errors
/// When the files cannot be used.
pub fn listen_with_tls(listener: TcpListener, files: &TlsFiles) -> Result<Listener, Error> {
    tls::server(files)?;
    let (sender, accepted) = mpsc::channel(16);
    tokio::spawn(accept_nodes(listener, files.clone(), sender));
    Ok(Listener::new(stream::unfold(accepted, |mut accepted| async move {
        accepted.recv().await.map(|stream: TlsStream<_>| (io::Result::Ok(stream), accepted))
    })))
}

/// Accepts connections until the receiver is dropped.
async fn accept_nodes(
    listener: TcpListener,
    files: TlsFiles,
    sender: mpsc::Sender<TlsStream<tokio::net::TcpStream>>,
) {
    let turns = Arc::new(Semaphore::new(HANDSHAKES));
    let mut acceptor = Acceptor::new("provider's port");
    loop {
        let Ok(turn) = Arc::clone(&turns).acquire_owned().await else { return };
        let (stream, from) = tokio::select! {
            () = sender.closed() => return,
            accepted = acceptor.next(|| listener.accept()) => accepted,
        };
        let config = match tls::server(&files) {
            Ok(config) => config,
            Err(error) => {
                tracing::warn!("refused a node: {error}");
                sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let sender = sender.clone();
        tokio::spawn(async move {
            if let Err(error) = stream.set_nodelay(true) {
                tracing::debug!(%error, "small frames will wait for each other");
            }
            match timeout(HANDSHAKE, TlsAcceptor::from(Arc::new(config)).accept(stream)).await {
                // Without a receiver, the server is ending.
                Ok(Ok(stream)) => drop(sender.send(stream).await),
                Ok(Err(error)) => tracing::warn!(%from, %error, "refused a node"),
                Err(_) => tracing::warn!(%from, "refused a node: no handshake in time"),
            }
            drop(turn);
        });
    }
}

/// Waits until the starter of this program is gone. Its end closes the pipe on standard input, which never has data.
pub async fn until_orphaned() {
    let (orphaned, told) = oneshot::channel::<()>();
    // A separate thread, because a runtime that ends waits for its readers.
    std::thread::spawn(move || {
        let mut input = io::stdin().lock();
        while input.read(&mut [0; 64]).is_ok_and(|read| read > 0) {}
        drop(orphaned);
    });
    // The closed channel is the signal.
    drop(told.await);
}
