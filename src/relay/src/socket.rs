//! Sockets of the relay: listeners for packets, and listeners that another process bound.

use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use peerpod_base::fd_handoff::{self, check_peer};
use peerpod_common::accept::Acceptor;
use peerpod_common::reactor;
use peerpod_common::unix_socket::place;
pub(crate) use peerpod_common::unix_socket::{Bound, bind};
use tokio::io::Interest;
use tokio::net::{TcpListener, UnixListener};
use tokio::task::JoinSet;

/// Binds a listener for packets as [`bind`] does.
pub(crate) fn bind_packets(path: &Path) -> io::Result<(OwnedFd, Bound)> {
    place(path, fd_handoff::listen)
}

/// Continues with a listener of another process.
pub(crate) fn unix_listener(listener: OwnedFd) -> io::Result<UnixListener> {
    let listener = std::os::unix::net::UnixListener::from(listener);
    listener.set_nonblocking(true)?;
    UnixListener::from_std(listener)
}

/// Continues with a listener of another process.
pub(crate) fn tcp_listener(listener: OwnedFd) -> io::Result<TcpListener> {
    let listener = std::net::TcpListener::from(listener);
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener)
}

/// Serves connections of this process's user, at most `limit` at once. Returns if the listener cannot be used.
pub(crate) async fn serve_packets<F>(
    listener: OwnedFd,
    name: &'static str,
    limit: usize,
    serve: impl Fn(OwnedFd) -> F,
) where
    F: Future<Output = ()> + Send + 'static,
{
    let listener = match reactor::register(listener, Interest::READABLE) {
        Ok(listener) => listener,
        Err(error) => {
            return tracing::error!(socket = name, %error, "the socket cannot be served");
        }
    };
    let accept_one = || listener.async_io(Interest::READABLE, |listener| fd_handoff::accept(listener));
    let mut open = JoinSet::new();
    let mut acceptor = Acceptor::new(name);
    loop {
        let connection = tokio::select! {
            connection = acceptor.next(accept_one) => connection,
            Some(_) = open.join_next() => continue,
        };
        match check_peer(&connection) {
            Ok(()) if open.len() < limit => drop(open.spawn(serve(connection))),
            Ok(()) => tracing::warn!(socket = name, limit, "connection refused: too many are open"),
            Err(error) => tracing::warn!(socket = name, %error, "connection refused"),
        }
    }
}
