//! The shims' side of a sandbox: its `agent.ttrpc`. Connections are accepted and handed to the sandbox's endpoint;
//! a silent one costs nothing in the guest and is never timed out.

pub mod filter;

use std::{
    io,
    path::{Path, PathBuf},
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use peerpod_link::endpoint::EndpointHandle;
use tokio::{net::UnixListener, task::JoinHandle};

use crate::{
    durable,
    metrics::Metrics,
    sandboxes::guest::Guest,
    socket::{self, Bound},
};

/// Connections of shims to one sandbox.
pub(crate) const CONNECTIONS: usize = 1024;

/// A listening agent socket; dropping it unlinks the socket and its folder.
#[derive(Debug)]
pub(crate) struct AgentSocket {
    pub(crate) path: PathBuf,
    accepting: JoinHandle<()>,
    bound: Option<Bound>,
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
            durable::make_folder(folder)?;
        }
        let (listener, bound) = socket::bind(path)?;
        let accepting = tokio::spawn(accept(listener, endpoint, guest, metrics));
        Ok(AgentSocket { path: path.to_owned(), accepting, bound: Some(bound) })
    }

    /// Whether a shim that dials `path` would come out here.
    pub(crate) fn listens_on(&self, path: &Path) -> bool {
        self.path == path && self.bound.as_ref().is_some_and(Bound::is_there)
    }
}

impl Drop for AgentSocket {
    fn drop(&mut self) {
        self.accepting.abort();
        self.bound = None; // Unlinks, so that the folder is empty.
        if let Some(folder) = self.path.parent() {
            // Not empty means that it is not only ours.
            drop(std::fs::remove_dir(folder));
        }
    }
}

async fn accept(listener: UnixListener, endpoint: EndpointHandle, guest: Arc<Guest>, metrics: Arc<Metrics>) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) if guest.connections.load(Relaxed) < CONNECTIONS => endpoint.adopt(stream),
            Ok(_) => {
                metrics.agent_connections_refused.inc();
            }
            Err(error) => {
                tracing::warn!(%error, socket = %listener_name(&listener), "accept failed");
                // Out of descriptors, most likely: others need the time to give some back.
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

fn listener_name(listener: &UnixListener) -> String {
    listener.local_addr().ok().map(|address| format!("{address:?}")).unwrap_or_default()
}
