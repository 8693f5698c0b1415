//! Serves the `agent.ttrpc` of a sandbox. Connections of shims are accepted and passed to the sandbox's endpoint. A
//! silent connection costs nothing in the guest and never times out.

pub mod filter;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use peerpod_common::accept::Acceptor;
use peerpod_common::files;
use peerpod_link::endpoint::EndpointHandle;
use tokio::net::UnixListener;
use tokio::task::JoinHandle;

use crate::metrics::Metrics;
use crate::sandboxes::guest::Guest;
use crate::socket::{self, Bound};

/// Limit of shim connections to one sandbox.
pub(crate) const CONNECTIONS: usize = 1024;

/// A listening agent socket; dropping it unlinks the socket and its folder.
#[derive(Debug)]
pub(crate) struct AgentSocket {
    pub(crate) path: PathBuf,
    listener: Arc<UnixListener>,
    serves: Serves,
    accepting: JoinHandle<()>,
    /// The accept loop is stopped, or about to be.
    held: bool,
    bound: Option<Bound>,
}

/// Destination of accepted connections.
#[derive(Clone, Debug)]
struct Serves {
    endpoint: EndpointHandle,
    guest: Arc<Guest>,
    metrics: Arc<Metrics>,
}

impl AgentSocket {
    /// Listens on `path`, in a folder of its own that is made for the owner alone.
    pub(crate) fn open(
        path: &Path,
        endpoint: EndpointHandle,
        guest: Arc<Guest>,
        metrics: Arc<Metrics>,
    ) -> io::Result<AgentSocket> {
        if let Some(folder) = path.parent() {
            files::make_folder(folder)?;
        }
        let (listener, bound) = socket::bind(path)?;
        Ok(AgentSocket::serve(path, listener, Some(bound), endpoint, guest, metrics))
    }

    /// Continues with the listener of another process.
    pub(crate) fn go_on(
        path: &Path,
        listener: UnixListener,
        endpoint: EndpointHandle,
        guest: Arc<Guest>,
        metrics: Arc<Metrics>,
    ) -> AgentSocket {
        // The node puts the sandbox again if the name is gone meanwhile.
        let bound = Bound::of(path).ok();
        AgentSocket::serve(path, listener, bound, endpoint, guest, metrics)
    }

    fn serve(
        path: &Path,
        listener: UnixListener,
        bound: Option<Bound>,
        endpoint: EndpointHandle,
        guest: Arc<Guest>,
        metrics: Arc<Metrics>,
    ) -> AgentSocket {
        let (listener, serves) = (Arc::new(listener), Serves { endpoint, guest, metrics });
        let accepting = tokio::spawn(accept(path, listener.clone(), serves.clone()));
        AgentSocket { path: path.to_owned(), listener, serves, accepting, held: false, bound }
    }

    /// Stops the accept loop and returns a duplicate of the listener. On return the endpoint owns every accepted
    /// connection.
    pub(crate) async fn hold(&mut self) -> io::Result<OwnedFd> {
        self.held = true;
        self.accepting.abort();
        // The task's result is not needed.
        drop((&mut self.accepting).await);
        self.listener.as_fd().try_clone_to_owned()
    }

    /// Restarts the accept loop.
    pub(crate) fn accept_again(&mut self) {
        if std::mem::take(&mut self.held) {
            self.accepting = tokio::spawn(accept(&self.path, self.listener.clone(), self.serves.clone()));
        }
    }

    /// Whether a shim that dials `path` reaches this listener.
    pub(crate) fn listens_on(&self, path: &Path) -> bool {
        self.path == path && self.bound.as_ref().is_some_and(Bound::is_there)
    }
}

impl Drop for AgentSocket {
    fn drop(&mut self) {
        self.accepting.abort();
        self.bound = None; // Unlinks, so that the folder is empty.
        if let Some(folder) = self.path.parent() {
            // A folder that is not empty is also used by another program.
            drop(std::fs::remove_dir(folder));
        }
    }
}

fn accept(path: &Path, listener: Arc<UnixListener>, serves: Serves) -> impl Future<Output = ()> + use<> {
    let Serves { endpoint, guest, metrics } = serves;
    let mut acceptor = Acceptor::new(path.display().to_string());
    async move {
        loop {
            let (stream, _) = acceptor.next(|| listener.accept()).await;
            if guest.connections.load(Relaxed) < CONNECTIONS {
                endpoint.adopt(stream);
            } else {
                metrics.sandboxes.agent_connections_refused.inc();
            }
        }
    }
}
