//! Client of `relay.sock`: connects to each relay process, configures it, and keeps its reports about the guests.
//!
//! Descriptors are passed over another socket: `hand_off`.
//!
//! There is one connection. A task dials it (every 50 ms until it succeeds), configures the relay, and then long-polls
//! Watch; calls share the connection and wait a moment for one. This module retries no call: the sandbox decides that.

mod hand_off;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::{Mutex, MutexGuard};
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
use crate::sandbox::ports::{Guest, Relay, RelayError};
use crate::spec::SandboxId;

/// Interval of attempts to connect to the relay.
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
pub struct RelayClient(Arc<Shared>);

struct Shared {
    socket: PathBuf,
    identity: RelayIdentity,
    metrics: Metrics,
    stub: watch::Sender<Option<Stub>>,
    /// Whether a connection exists.
    connected: watch::Sender<bool>,
    /// Counts the relay processes that the node has connected to.
    epoch: watch::Sender<u64>,
    /// The TCP address that guests dial, as the relay bound it.
    listen: watch::Sender<Option<std::net::SocketAddr>>,
    guests: Mutex<HashMap<String, watch::Sender<Guest>>>,
    /// Limits concurrent handoffs of descriptors.
    turns: Arc<Semaphore>,
}

impl RelayClient {
    /// Creates a client of the relay at this socket. It does nothing before [`RelayClient::run`].
    pub fn new(socket: PathBuf, identity: RelayIdentity, metrics: Metrics) -> RelayClient {
        RelayClient(Arc::new(Shared {
            socket,
            identity,
            metrics,
            stub: watch::Sender::new(None),
            connected: watch::Sender::new(false),
            epoch: watch::Sender::new(0),
            listen: watch::Sender::new(None),
            guests: Mutex::default(),
            turns: Arc::new(Semaphore::new(hand_off::AT_A_TIME)),
        }))
    }

    /// Maintains the connection, for ever.
    pub async fn run(self) {
        let mut said = false;
        loop {
            match self.connected().await {
                Ok(()) => {}
                Err(error) if !said => {
                    warn!(error = error.text, "peerpod-relay is away; dialling it again");
                    said = true;
                }
                Err(error) => debug!(error = error.text, "peerpod-relay is still away"),
            }
            if self.0.stub.send_replace(None).is_some() {
                self.0.connected.send_replace(false);
                said = false;
                info!("the connection to peerpod-relay ended");
            }
            tokio::time::sleep(DIAL_EVERY).await;
        }
    }

    /// Runs one connection, from its beginning to its end.
    async fn connected(&self) -> Result<(), RelayError> {
        // Dialled by tokio: the ttrpc library's own connect blocks a thread when the relay's queue is full.
        let dialled = timeout(CALL, UnixStream::connect(&self.0.socket)).await;
        let stream = dialled.map_err(|_| away("it accepts no connection"))?.map_err(away)?;
        let stub = Stub::new(ttrpc::r#async::Client::new(Socket::from(stream)));
        let epoch = self.configure_at(&stub).await?;
        info!(epoch, "connected to peerpod-relay");
        self.0.stub.send_replace(Some(stub.clone()));
        self.0.connected.send_replace(true);
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

    async fn configure_at(&self, stub: &Stub) -> Result<String, RelayError> {
        let request = (self.0.identity)().map_err(|text| RelayError { text })?;
        let answer = stub.configure(with_duration(CALL), &request).await.map_err(away)?;
        self.0.listen.send_replace(answer.listen_address.parse().ok());
        Ok(answer.epoch)
    }

    /// Configures the relay again, after the CA changed.
    ///
    /// # Errors
    /// The relay could not be configured; the next connection configures it.
    pub async fn configure(&self) -> Result<(), RelayError> {
        let stub = self.stub().await?;
        self.configure_at(&stub).await.map(drop)
    }

    /// Marks the guests that a new relay does not report as disconnected: their state came from another process.
    fn another_relay(&self, states: &[SandboxState]) {
        self.0.metrics.relay_epochs.inc();
        for (id, guest) in self.guests().iter() {
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
        };
        let sender = self.sender(&state.id);
        sender.send_if_modified(|guest| {
            let changed = *guest != new;
            *guest = new;
            changed
        });
    }

    fn sender(&self, id: &str) -> watch::Sender<Guest> {
        self.guests().entry(id.to_owned()).or_default().clone()
    }

    fn guests(&self) -> MutexGuard<'_, HashMap<String, watch::Sender<Guest>>> {
        // Every step leaves the map consistent.
        self.0.guests.lock()
    }

    async fn stub(&self) -> Result<Stub, RelayError> {
        let mut stub = self.0.stub.subscribe();
        let found = timeout(AWAY, stub.wait_for(Option::is_some)).await;
        match found {
            Ok(Ok(stub)) => stub.clone().ok_or_else(|| away("no connection")),
            _ => Err(away("no connection")),
        }
    }

    /// Receiver of whether the relay is connected.
    pub fn connection(&self) -> watch::Receiver<bool> {
        self.0.connected.subscribe()
    }

    /// Counts the relay processes that the node has connected to.
    pub fn epoch(&self) -> watch::Receiver<u64> {
        self.0.epoch.subscribe()
    }

    /// Returns the TCP address that guests dial, once the relay has reported it.
    pub fn listen(&self) -> Option<std::net::SocketAddr> {
        *self.0.listen.borrow()
    }

    /// Receiver of the TCP address that guests dial.
    pub fn listening(&self) -> watch::Receiver<Option<std::net::SocketAddr>> {
        self.0.listen.subscribe()
    }
}

#[async_trait]
impl Relay for RelayClient {
    fn relay_epoch(&self) -> watch::Receiver<u64> {
        self.epoch()
    }

    async fn put(&self, request: PutSandboxRequest) -> Result<(), RelayError> {
        let stub = self.stub().await?;
        stub.put_sandbox(with_duration(CALL), &request).await.map(drop).map_err(away)
    }

    /// Drops the state of the sandbox's guest, too.
    async fn remove(&self, id: &SandboxId) -> Result<(), RelayError> {
        let stub = self.stub().await?;
        let request = DeleteSandboxRequest { id: id.to_string(), ..DeleteSandboxRequest::default() };
        stub.delete_sandbox(with_duration(CALL), &request).await.map_err(away)?;
        self.guests().remove(id.as_str());
        Ok(())
    }

    fn guest(&self, id: &SandboxId) -> watch::Receiver<Guest> {
        self.sender(id.as_str()).subscribe()
    }

    async fn call(&self, id: &SandboxId, request: Request, limit: Duration) -> Result<Reply, RelayError> {
        let stub = self.stub().await?;
        let bytes = request.write_to_bytes().map_err(away)?;
        let request = GuestCallRequest { id: id.to_string(), request: bytes, ..GuestCallRequest::default() };
        let answer = stub.guest_call(with_duration(limit), &request).await.map_err(away)?;
        Reply::parse_from_bytes(&answer.reply).map_err(|error| away(format!("the guest's reply: {error}")))
    }
}

fn away(error: impl std::fmt::Display) -> RelayError {
    RelayError { text: format!("call peerpod-relay: {error}") }
}

#[cfg(test)]
mod tests;
