//! Serves a pod's `localhost`: connections to 127.0.0.1 and ::1 in the node's side of the pod's netns (port-forward,
//! probes) are carried to the same port in the VM, which the guest dials, or reset.
//!
//! `peerpod_podnet::localhost` has the rules that redirect connections to these listeners. The node passes the
//! listeners over `fd_handoff`; they close with the sandbox. May touch: these listeners, and the sandbox's link.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use peerpod_base::fd_handoff::LOCALHOST_LISTENERS as LISTEN;
use peerpod_common::accept::Acceptor;
use peerpod_link::endpoint::{Connected, DialError, EndpointHandle, Target};
use rustix::net::AddressFamily;
use rustix::net::sockopt::set_socket_linger;
use serde_json::Value;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};
use tracing::{Instrument, Span};

use crate::fd_handoff::{Kind, Passed};
use crate::id::SandboxId;
use crate::metrics::Metrics;
use crate::sandboxes::Sandboxes;
use crate::socket;

/// Ports of the listeners, IPv4 and IPv6, as the node's redirect rules have them. The relay keeps them for the next node.
pub(crate) type Ports = [Option<u16>; 2];

/// Limit of connections of one sandbox that the guest is dialling; further ones wait in the listener's queue.
const PENDING: usize = 512;

/// Takes the listeners of a sandbox that is served here.
pub(crate) struct Localhost {
    /// Table that holds the listeners and closes them with the sandbox.
    pub(crate) sandboxes: Weak<Sandboxes>,
    pub(crate) metrics: Arc<Metrics>,
}

#[async_trait]
impl Kind for Localhost {
    fn name(&self) -> &'static str {
        "localhost"
    }

    async fn held(&self, sandbox: Option<&SandboxId>) -> Option<Value> {
        let ports = self.sandboxes.upgrade()?.localhost(sandbox?).await?;
        serde_json::to_value(ports).ok()
    }

    async fn take(&self, sandbox: Option<&SandboxId>, mut handed: Passed) -> Result<Value, String> {
        let sandbox = sandbox.ok_or("the localhost descriptors name no sandbox")?;
        let ports: Ports = serde_json::from_value(handed.detail.clone())
            .map_err(|error| format!("the ports cannot be read: {error}"))?;
        let sandboxes = self.sandboxes.upgrade().ok_or("the relay is stopping")?;
        if sandboxes.get(sandbox).is_none() {
            return Err(format!("sandbox {sandbox} is not served here; put it first"));
        }
        let listeners = Listeners::take(&mut handed).map_err(|why| format!("sandbox {sandbox}: {why}"))?;
        handed.finish()?;
        let pod = sandboxes.states.pod(sandbox);
        let serving = Serving::of(&self.sandboxes, sandbox, &pod, ports, listeners, self.metrics.clone());
        sandboxes.keep_localhost(sandbox, serving).await?;
        tracing::info!(%sandbox, pod = &*pod, "the pod's localhost is served");
        serde_json::to_value(ports).map_err(|error| error.to_string())
    }
}

/// Listeners of one pod, passed by the node: IPv4, IPv6. A family that the kernel lacks has no listener.
#[derive(Debug)]
pub(crate) struct Listeners([Option<TcpListener>; 2]);

impl Listeners {
    /// Duplicates the listeners, each with its name.
    pub(crate) fn copies(&self) -> io::Result<Vec<(String, OwnedFd)>> {
        let named = self.0.iter().zip(LISTEN).filter_map(|(listener, name)| Some((listener.as_ref()?, name)));
        named.map(|(listener, name)| Ok((name.to_owned(), listener.as_fd().try_clone_to_owned()?))).collect()
    }

    /// Removes the listeners from the passed descriptors.
    pub(crate) fn take(handed: &mut Passed) -> Result<Listeners, String> {
        let mut listeners = [None, None];
        for (at, family) in [AddressFamily::INET, AddressFamily::INET6].into_iter().enumerate() {
            if !handed.has(LISTEN[at]) {
                continue;
            }
            let listener = socket::tcp_listener(handed.listener(LISTEN[at], family)?);
            listeners[at] = Some(listener.map_err(|error| format!("descriptor {}: {error}", LISTEN[at]))?);
        }
        Ok(Listeners(listeners))
    }
}

/// Task that serves one pod's localhost; dropping it ends the task and closes the listeners.
#[derive(Debug)]
pub(crate) struct Serving {
    pub(crate) ports: Ports,
    pub(crate) listeners: Arc<Listeners>,
    task: JoinHandle<()>,
}

impl Serving {
    pub(crate) fn of(
        table: &Weak<Sandboxes>,
        id: &SandboxId,
        pod: &str,
        ports: Ports,
        listeners: Listeners,
        metrics: Arc<Metrics>,
    ) -> Serving {
        // Looked up for each connection: a failed endpoint is replaced by another one.
        let (table, sandbox) = (table.clone(), id.clone());
        let endpoint = move || Some(table.upgrade()?.get(&sandbox)?.endpoint);
        let span = tracing::info_span!("localhost", pod);
        Serving::start(id.clone(), ports, listeners, endpoint, metrics, &span)
    }

    fn start(
        id: SandboxId,
        ports: Ports,
        listeners: Listeners,
        endpoint: impl Fn() -> Option<EndpointHandle> + Send + 'static,
        metrics: Arc<Metrics>,
        span: &Span,
    ) -> Serving {
        let listeners = Arc::new(listeners);
        let serve = serve(id, listeners.clone(), endpoint, metrics);
        Serving { ports, listeners, task: tokio::spawn(serve.instrument(span.clone())) }
    }

    pub(crate) fn is_running(&self) -> bool {
        !self.task.is_finished()
    }

    /// Ends the task; its listeners are closed on return.
    pub(crate) async fn stop(mut self) {
        self.task.abort();
        // The task's result is not needed.
        drop((&mut self.task).await);
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn serve(
    id: SandboxId,
    listeners: Arc<Listeners>,
    endpoint: impl Fn() -> Option<EndpointHandle>,
    metrics: Arc<Metrics>,
) {
    let [v4, v6] = &listeners.0;
    let mut pending = JoinSet::new();
    let [mut accept_v4, mut accept_v6] =
        ["IPv4", "IPv6"].map(|family| Acceptor::new(format!("localhost of {id}, {family}")));
    loop {
        let client = tokio::select! {
            client = accept_v4.next(|| accept(v4.as_ref())), if pending.len() < PENDING => client,
            client = accept_v6.next(|| accept(v6.as_ref())), if pending.len() < PENDING => client,
            Some(ended) = pending.join_next() => {
                // A panic is a bug of the relay and costs this one connection.
                if ended.is_err() {
                    metrics.sandboxes.panics.inc();
                }
                continue;
            }
        };
        let (id, endpoint, metrics) = (id.clone(), endpoint(), metrics.clone());
        pending.spawn(carry(id, client, endpoint, metrics).in_current_span());
    }
}

async fn accept(listener: Option<&TcpListener>) -> io::Result<TcpStream> {
    match listener {
        Some(listener) => listener.accept().await.map(|(socket, _)| socket),
        None => std::future::pending().await,
    }
}

/// Asks the guest to dial the client's port and joins both connections; resets the client's connection on failure.
async fn carry(id: SandboxId, client: TcpStream, endpoint: Option<EndpointHandle>, metrics: Arc<Metrics>) {
    let dialled = match (client.local_addr(), endpoint) {
        (Ok(local), Some(endpoint)) => dial(&endpoint, local.is_ipv6(), local.port()).await,
        _ => Err(DialError::Away),
    };
    match dialled {
        Ok(connected) => {
            metrics.sandboxes.localhost("carried");
            connected.join(client);
        }
        Err(error) => {
            let local = client.local_addr().ok();
            tracing::debug!(sandbox = %id, ?local, %error, "connection to the pod's localhost reset");
            metrics.sandboxes.localhost(if error == DialError::Refused { "refused" } else { "failed" });
            // With no time to linger, closing the socket resets the connection.
            if let Err(error) = set_socket_linger(&client, Some(Duration::ZERO)) {
                tracing::debug!(%error, "connection to the pod's localhost closed instead of reset");
            }
        }
    }
}

/// Dials the client's port in the client's family, then in the other one. A client that one family of localhost refuses
/// would try the other itself, but the relay's listener has accepted already.
async fn dial(endpoint: &EndpointHandle, v6: bool, port: u16) -> Result<Connected, DialError> {
    match endpoint.dial(Target { v6, port }).await {
        Err(DialError::Refused) => endpoint.dial(Target { v6: !v6, port }).await,
        dialled => dialled,
    }
}

#[cfg(test)]
mod tests;
