//! The node's end of `relay.sock`: finds the relay again whenever it is another one, gives it its identity, and keeps
//! what it says of the guests.
//!
//! Descriptors go another way: `hand_in`.
//!
//! One connection. A task dials it (every 50 ms until it is there), configures the relay, and then long-polls Watch;
//! calls share the connection and wait a moment for one. Nothing here retries a call: that is the sandbox's decision.

mod hand_in;

use std::{collections::HashMap, path::PathBuf, sync::Arc, time::Duration};

use parking_lot::{Mutex, MutexGuard};
use peerpod_proto::{
    guest::{Reply, Request},
    relay::{
        ConfigureRequest, DeleteSandboxRequest, GuestCallRequest, PutSandboxRequest, SandboxState,
        WatchRequest,
    },
    relay_ttrpc::RelayClient as Stub,
};
use protobuf::Message;
use tokio::{
    net::UnixStream,
    sync::{Semaphore, watch},
    time::timeout,
};
use tracing::{debug, info, warn};
use ttrpc::{asynchronous::transport::Socket, context::with_duration};

use crate::{
    metrics::Metrics,
    sandbox::effects::{Guest, RelayError},
    spec::SandboxId,
};

/// How often a relay that is not there is looked for.
const DIAL_EVERY: Duration = Duration::from_millis(50);
/// How long a call waits for a connection before it says that the relay is away.
const AWAY: Duration = Duration::from_secs(5);
/// How long the relay may take for what it does by itself.
const CALL: Duration = Duration::from_secs(10);
/// How long a Watch may take: the relay answers after 30 s at the latest.
const WATCH: Duration = Duration::from_secs(40);

/// Makes what Configure says: the relay's certificate and key, and whom to trust.
pub type Identity = Arc<dyn Fn() -> Result<ConfigureRequest, String> + Send + Sync>;

/// The relay as the node sees it. Clones are the same one.
#[derive(Clone)]
pub struct RelayClient(Arc<Shared>);

struct Shared {
    socket: PathBuf,
    identity: Identity,
    metrics: Metrics,
    stub: watch::Sender<Option<Stub>>,
    /// Whether there is one.
    connected: watch::Sender<bool>,
    /// Counts relay processes met.
    epoch: watch::Sender<u64>,
    /// The TCP address that guests dial, as the relay bound it.
    listen: watch::Sender<Option<std::net::SocketAddr>>,
    guests: Mutex<HashMap<String, watch::Sender<Guest>>>,
    /// Turns to hand something in.
    turns: Arc<Semaphore>,
}

impl RelayClient {
    /// A client of the relay at this socket. Nothing happens before [`RelayClient::run`].
    pub fn new(socket: PathBuf, identity: Identity, metrics: Metrics) -> RelayClient {
        RelayClient(Arc::new(Shared {
            socket,
            identity,
            metrics,
            stub: watch::Sender::new(None),
            connected: watch::Sender::new(false),
            epoch: watch::Sender::new(0),
            listen: watch::Sender::new(None),
            guests: Mutex::default(),
            turns: Arc::new(Semaphore::new(hand_in::AT_A_TIME)),
        }))
    }

    /// Keeps the connection, for ever.
    pub async fn run(self) {
        let mut said = false;
        loop {
            match self.connected().await {
                Ok(()) => {}
                Err(error) if !said => {
                    warn!(error = error.text, "peerpod-relay is away; looking for it");
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

    /// One connection, from its beginning to its end.
    async fn connected(&self) -> Result<(), RelayError> {
        // Dialled by tokio: the library's own way blocks a thread when the relay's queue is full.
        let dialled = timeout(CALL, UnixStream::connect(&self.0.socket)).await;
        let stream = dialled.map_err(|_| away("it does not accept"))?.map_err(away)?;
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
                self.heard(state);
            }
        }
    }

    async fn configure_at(&self, stub: &Stub) -> Result<String, RelayError> {
        let request = (self.0.identity)().map_err(|text| RelayError { text })?;
        let answer = stub.configure(with_duration(CALL), &request).await.map_err(away)?;
        self.0.listen.send_replace(answer.listen_address.parse().ok());
        Ok(answer.epoch)
    }

    /// Gives the relay its identity anew, after the CA changed.
    ///
    /// # Errors
    /// When it could not be given; then it will be at the next connection.
    pub async fn configure(&self) -> Result<(), RelayError> {
        let stub = self.stub().await?;
        self.configure_at(&stub).await.map(drop)
    }

    /// Everything that was known of the guests was said by another process.
    fn another_relay(&self, states: &[SandboxState]) {
        self.0.metrics.relay_epochs.inc();
        for (id, guest) in self.guests().iter() {
            if !states.iter().any(|state| state.id == *id) {
                guest.send_modify(|guest| guest.connected = false);
            }
        }
        self.0.epoch.send_modify(|epoch| *epoch += 1);
    }

    fn heard(&self, state: SandboxState) {
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
        // Every step leaves the map whole.
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

    /// Whether the relay is there, and when that changes.
    pub fn connection(&self) -> watch::Receiver<bool> {
        self.0.connected.subscribe()
    }

    /// See [`crate::sandbox::effects::Effects::relay_epoch`].
    pub fn epoch(&self) -> watch::Receiver<u64> {
        self.0.epoch.subscribe()
    }

    /// The TCP address that guests dial, once the relay said it.
    pub fn listen(&self) -> Option<std::net::SocketAddr> {
        *self.0.listen.borrow()
    }

    /// The same, and when it changes.
    pub fn listening(&self) -> watch::Receiver<Option<std::net::SocketAddr>> {
        self.0.listen.subscribe()
    }

    /// Whether there is a connection now.
    pub fn is_connected(&self) -> bool {
        self.0.stub.borrow().is_some()
    }

    /// What the relay says of a sandbox's guest.
    pub fn guest(&self, id: &SandboxId) -> watch::Receiver<Guest> {
        self.sender(id.as_str()).subscribe()
    }

    /// PutSandbox.
    ///
    /// # Errors
    /// The relay is away, or says no.
    pub async fn put(&self, request: &PutSandboxRequest) -> Result<(), RelayError> {
        let stub = self.stub().await?;
        stub.put_sandbox(with_duration(CALL), request).await.map(drop).map_err(away)
    }

    /// DeleteSandbox; what was known of its guest is forgotten.
    ///
    /// # Errors
    /// The relay is away, or says no.
    pub async fn remove(&self, id: &SandboxId) -> Result<(), RelayError> {
        let stub = self.stub().await?;
        let request = DeleteSandboxRequest { id: id.to_string(), ..DeleteSandboxRequest::default() };
        stub.delete_sandbox(with_duration(CALL), &request).await.map_err(away)?;
        self.guests().remove(id.as_str());
        Ok(())
    }

    /// GuestCall.
    ///
    /// # Errors
    /// The relay or the guest is away, or does not answer in time.
    pub async fn call(
        &self,
        id: &SandboxId,
        request: &Request,
        limit: Duration,
    ) -> Result<Reply, RelayError> {
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
