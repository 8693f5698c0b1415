//! Client of `relay.sock`: one task dials each relay process, configures it, and long-polls its reports about the
//! guests. Calls share the connection and wait a moment for one. This module retries no call: the sandbox decides that.

mod hand_off;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use peerpod_proto::guest::{Reply, Request};
use peerpod_proto::relay::{
    ConfigureRequest, DeleteSandboxRequest, GuestCallRequest, PutSandboxRequest, SandboxState, WatchRequest,
};
use peerpod_proto::relay_ttrpc::RelayClient as Stub;
use protobuf::Message;
use tokio::net::UnixStream;
use tokio::sync::{Semaphore, watch};
use tokio::time::timeout;
use tracing::{debug, info, warn};
use ttrpc::asynchronous::transport::Socket;
use ttrpc::context::with_duration;

use crate::metrics::Metrics;
use crate::sandbox::ports::{CallError, Guest, Relay};
use crate::spec::SandboxId;

const DIAL_EVERY: Duration = Duration::from_millis(50);
/// Time that a call waits for a connection before it fails.
const AWAY: Duration = Duration::from_secs(5);
/// Timeout of calls that the relay answers by itself.
const CALL: Duration = Duration::from_secs(10);
/// Timeout of a Watch: the relay answers after 30 s at the latest.
const WATCH: Duration = Duration::from_secs(40);

/// Makes the Configure request: the relay's certificate and key, and the trusted CAs.
pub(crate) type RelayIdentity = Arc<dyn Fn() -> Result<ConfigureRequest, String> + Send + Sync>;

/// Client of the relay. Clones share the connection.
#[derive(Clone)]
pub(crate) struct RelayClient(Arc<Shared>);

struct Shared {
    socket: PathBuf,
    identity: RelayIdentity,
    metrics: Metrics,
    /// `None` while the relay is disconnected.
    stub: watch::Sender<Option<Stub>>,
    /// Counts the relay processes that the node has connected to.
    epoch: watch::Sender<u64>,
    /// The TCP address that guests dial, as the relay bound it.
    listen: watch::Sender<Option<std::net::SocketAddr>>,
    guests: Mutex<HashMap<String, watch::Sender<Guest>>>,
    turns: Arc<Semaphore>,
}

impl RelayClient {
    /// Creates a client of the relay at this socket. It does nothing before [`RelayClient::run`].
    pub(crate) fn new(socket: PathBuf, identity: RelayIdentity, metrics: Metrics) -> RelayClient {
        RelayClient(Arc::new(Shared {
            socket,
            identity,
            metrics,
            stub: watch::Sender::new(None),
            epoch: watch::Sender::new(0),
            listen: watch::Sender::new(None),
            guests: Mutex::default(),
            turns: Arc::new(Semaphore::new(hand_off::AT_A_TIME)),
        }))
    }

    pub(crate) async fn run(self) {
        let mut said = false;
        loop {
            match self.connected().await {
                Ok(()) => {}
                Err(error) if !said => {
                    warn!(error, "peerpod-relay is away; dialling it again");
                    said = true;
                }
                Err(error) => debug!(error, "peerpod-relay is still away"),
            }
            if self.0.stub.send_if_modified(|stub| stub.take().is_some()) {
                said = false;
                info!("the connection to peerpod-relay ended");
            }
            tokio::time::sleep(DIAL_EVERY).await;
        }
    }

    async fn connected(&self) -> Result<(), String> {
        // Dialled by tokio: the ttrpc library's own connect blocks a thread when the relay's queue is full.
        let dialled = timeout(CALL, UnixStream::connect(&self.0.socket)).await;
        let stream = dialled.map_err(|_| away("it accepts no connection"))?.map_err(away)?;
        let stub = Stub::new(ttrpc::r#async::Client::new(Socket::from(stream)));
        let epoch = self.configure_at(&stub).await?;
        info!(epoch, "connected to peerpod-relay");
        self.0.stub.send_replace(Some(stub.clone()));
        let (mut since, mut watched) = (0, String::new());
        loop {
            let request = WatchRequest { epoch: watched.clone(), since, ..WatchRequest::default() };
            let answer = stub.watch(with_duration(WATCH), &request).await.map_err(away)?;
            if answer.epoch != watched {
                self.another_relay(&answer.changed);
                watched = answer.epoch;
            }
            since = answer.version;
            for state in answer.changed {
                self.on_state(state);
            }
        }
    }

    async fn configure_at(&self, stub: &Stub) -> Result<String, String> {
        let request = (self.0.identity)()?;
        let answer = stub.configure(with_duration(CALL), &request).await.map_err(away)?;
        self.0.listen.send_replace(answer.listen_address.parse().ok());
        Ok(answer.epoch)
    }

    /// Configures the relay again, after the CA changed. After a failure, the next connection configures it.
    pub(crate) async fn configure(&self) -> Result<(), String> {
        let stub = self.stub().await?;
        self.configure_at(&stub).await.map(drop)
    }

    /// Marks the guests that a new relay does not report as disconnected: their state came from another process.
    fn another_relay(&self, states: &[SandboxState]) {
        self.0.metrics.relay_epochs.inc();
        for (id, guest) in self.0.guests.lock().iter() {
            if !states.iter().any(|state| state.id == *id) {
                guest.send_modify(|guest| guest.connected = false);
            }
        }
        self.0.epoch.send_modify(|epoch| *epoch += 1);
    }

    fn on_state(&self, state: SandboxState) {
        let new = Guest {
            connected: state.guest_connected,
            session: state.guest_session,
            status: state.guest_status,
            address: state.guest_address.parse().ok(),
            shim_gone: state.shim_seen && state.shim_connections == 0 && !state.hypervisor_connected,
        };
        self.sender(&state.id).send_if_modified(|guest| std::mem::replace(guest, new) != *guest);
    }

    fn sender(&self, id: &str) -> watch::Sender<Guest> {
        self.0.guests.lock().entry(id.to_owned()).or_default().clone()
    }

    async fn stub(&self) -> Result<Stub, String> {
        let mut stub = self.0.stub.subscribe();
        let found = timeout(AWAY, stub.wait_for(Option::is_some)).await;
        found.ok().and_then(|stub| stub.ok()?.clone()).ok_or_else(|| away("no connection"))
    }

    /// Receiver of the connection; `None` while the relay is disconnected.
    pub(crate) fn connection(&self) -> watch::Receiver<Option<Stub>> {
        self.0.stub.subscribe()
    }

    /// Returns the TCP address that guests dial, once the relay has reported it.
    pub(crate) fn listen(&self) -> Option<std::net::SocketAddr> {
        *self.0.listen.borrow()
    }

    pub(crate) fn listening(&self) -> watch::Receiver<Option<std::net::SocketAddr>> {
        self.0.listen.subscribe()
    }
}

#[async_trait]
impl Relay for RelayClient {
    fn epoch(&self) -> watch::Receiver<u64> {
        self.0.epoch.subscribe()
    }

    async fn put(&self, request: PutSandboxRequest) -> Result<(), String> {
        let stub = self.stub().await?;
        stub.put_sandbox(with_duration(CALL), &request).await.map(drop).map_err(away)
    }

    /// Drops the state of the sandbox's guest, too.
    async fn remove(&self, id: &SandboxId) -> Result<(), String> {
        let stub = self.stub().await?;
        let request = DeleteSandboxRequest { id: id.to_string(), ..DeleteSandboxRequest::default() };
        stub.delete_sandbox(with_duration(CALL), &request).await.map_err(away)?;
        self.0.guests.lock().remove(id.as_str());
        Ok(())
    }

    fn guest(&self, id: &SandboxId) -> watch::Receiver<Guest> {
        self.sender(id.as_str()).subscribe()
    }

    async fn call(&self, id: &SandboxId, request: Request, limit: Duration) -> Result<Reply, CallError> {
        let stub = self.stub().await?;
        let bytes = request.write_to_bytes().map_err(away)?;
        let request = GuestCallRequest { id: id.to_string(), request: bytes, ..GuestCallRequest::default() };
        let failed = |error: ttrpc::Error| {
            let not_served =
                matches!(&error, ttrpc::Error::RpcStatus(status) if status.code() == ttrpc::Code::NOT_FOUND);
            CallError { text: away(error), not_served }
        };
        let answer = stub.guest_call(with_duration(limit), &request).await.map_err(failed)?;
        let reply = Reply::parse_from_bytes(&answer.reply);
        Ok(reply.map_err(|error| away(format!("the guest's reply: {error}")))?)
    }
}

fn away(error: impl std::fmt::Display) -> String {
    format!("call peerpod-relay: {error}")
}

#[cfg(test)]
mod tests;
