//! Keeps the link to the node: claims an identity, dials, attaches each new connection to the endpoint, and lets a beat
//! pass after each lost one.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use parking_lot::{Mutex, MutexGuard};
use peerpod_link::claim;
use peerpod_link::endpoint::{EndpointHandle, Filter, Handler, LinkEvent, Target, Transport};
use peerpod_link::user_data::UserData;
use peerpod_proto::guest::Claim;
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::{mpsc, watch};
use tokio::time::{sleep, timeout};
use tokio_rustls::client::TlsStream;

use crate::agent::Agent;
use crate::dial::{self, Dialler};
use crate::encrypted::Encrypted;
use crate::guest_listener::Waiter;
use crate::identity::{self, Identity};
use crate::intercept::{Intercept, Notice};
use crate::localhost::Localhost;
use crate::log::Ring;
use crate::power::Lease;
use crate::status::Status;
use crate::underlay;

/// Time limit of the node's answer to a claim.
const CLAIM: Duration = Duration::from_secs(15);
/// Pause after a refusal; doubled with each up to the maximum. The first refusal may only mean that the node does not
/// know this VM's address yet; the tenth is final, and the lease ends the VM.
const REFUSED: Duration = Duration::from_millis(250);
const LONGEST_REFUSED: Duration = Duration::from_secs(5);
/// Number of connections in a row without a link, after which the guest claims again. The node may not know the
/// certificate any more, and the ticket gives it to the same key again.
const CLAIM_AGAIN: u32 = 20;
/// Limit of queued control messages. The node sends one at a time.
const CONTROL_QUEUE: usize = 64;

/// Handler of the guest's endpoint.
pub(crate) struct GuestHandler {
    agent: Arc<Agent>,
    notice: Arc<dyn Notice>,
    podns: String,
    localhost: Arc<Localhost>,
    log: Ring,
    links: mpsc::UnboundedSender<LinkEvent>,
    controls: mpsc::Sender<Bytes>,
}

/// Events that [`GuestHandler`] passes on.
pub(crate) struct Events {
    pub(crate) links: mpsc::UnboundedReceiver<LinkEvent>,
    pub(crate) controls: mpsc::Receiver<Bytes>,
}

impl GuestHandler {
    /// Makes the handler. `podns` is the path of the network namespace that containers join.
    pub(crate) fn new(
        agent: Arc<Agent>,
        notice: Arc<dyn Notice>,
        podns: String,
        log: Ring,
    ) -> (GuestHandler, Events) {
        // Unbounded, but one connection causes three events, and connections come at the pace of `keep`.
        let (links, link_events) = mpsc::unbounded_channel();
        let (controls, control_messages) = mpsc::channel(CONTROL_QUEUE);
        (
            GuestHandler {
                localhost: Arc::new(Localhost::new(podns.clone().into())),
                agent,
                notice,
                podns,
                log,
                links,
                controls,
            },
            Events { links: link_events, controls: control_messages },
        )
    }
}

impl Handler for GuestHandler {
    fn filter(&mut self) -> Box<dyn Filter> {
        Box::new(Intercept::new(self.notice.clone(), self.podns.clone()))
    }

    fn dial(&mut self) -> BoxFuture<'static, io::Result<UnixStream>> {
        let agent = self.agent.clone();
        Box::pin(async move { agent.connect().await })
    }

    fn dial_pod(&mut self, target: Target) -> BoxFuture<'static, io::Result<TcpStream>> {
        let localhost = self.localhost.clone();
        Box::pin(async move { localhost.connect(target).await })
    }

    fn on_control(&mut self, message: Bytes) {
        if self.controls.try_send(message).is_err() {
            tracing::warn!("dropped a control message: {CONTROL_QUEUE} wait already");
        }
    }

    fn poll_line(&mut self, cx: &mut Context<'_>) -> Poll<Vec<u8>> {
        self.log.poll_next(cx)
    }

    fn on_link(&mut self, event: LinkEvent) {
        drop(self.links.send(event)); // the receiver is gone only when the program ends
    }

    fn on_connections(&mut self, open: usize) {
        tracing::debug!(open, "agent connections");
    }
}

/// Supervisor of the link, with all that a dial needs.
pub(crate) struct LinkSupervisor {
    pub(crate) user_data: UserData,
    pub(crate) identity: Arc<Mutex<Identity>>,
    /// Key of this VM in an encrypted tunnel.
    pub(crate) encrypted: Arc<Encrypted>,
    pub(crate) status: Arc<Status>,
    pub(crate) lease: Arc<Lease>,
    /// Sender of the last link that was up.
    pub(crate) uplink: underlay::Link,
    /// Addresses of the node besides those in user-data.
    pub(crate) node_endpoints: watch::Receiver<Vec<SocketAddr>>,
}

/// Direction of the dial.
enum Way {
    /// The guest dials.
    Dial(Dialler),
    /// The node dials.
    Wait(Waiter),
}

/// Failure of one claim.
#[derive(Debug, thiserror::Error)]
enum ClaimError {
    #[error("{0}")]
    Dial(#[from] dial::Error),
    #[error("{0}")]
    Exchange(#[from] claim::ClaimError),
    #[error("the node did not answer the claim within {CLAIM:?}")]
    Late,
    #[error("the node cannot answer yet: {0}")]
    Away(String),
    #[error("the node refuses ticket {ticket}: {why}")]
    Refused { ticket: String, why: String },
    #[error("{0}")]
    Identity(#[from] identity::Error),
}

impl LinkSupervisor {
    /// Keeps the link until the endpoint of `handle` ends.
    pub(crate) async fn run(&self, handle: &EndpointHandle, links: mpsc::UnboundedReceiver<LinkEvent>) {
        match self.user_data.node.listen {
            Some(port) => self.keep_waiting(port, handle, links).await,
            None => self.keep_dialling(handle, links).await,
        }
    }

    /// Waits for the node to dial. Its new connection replaces the previous one at once: the node dials when it has
    /// none.
    async fn keep_waiting(
        &self,
        port: u16,
        handle: &EndpointHandle,
        mut links: mpsc::UnboundedReceiver<LinkEvent>,
    ) {
        let (identity, pins) = (self.identity.clone(), self.user_data.node.ca_sha256.clone());
        let greeting = move |with_certificate| {
            let identity = identity.lock();
            let config = identity.tls(&pins, with_certificate);
            config
                .inspect_err(|error| tracing::error!(%error, "cannot make the TLS server for the node"))
                .ok()
        };
        let mut way = Way::Wait(Waiter::new(port, Arc::new(greeting)));
        self.status.calls();
        let mut said = Said::default();
        if !self.identity().is_granted() {
            self.claim(&mut way, &mut said).await;
        }
        let mut stage = Some(self.status.begin("link"));
        let (mut fruitless, mut linked) = (0, None);
        // Port on which the relay answers probes.
        let relay_port = self.user_data.node.addresses.first().map(SocketAddr::port);
        loop {
            let Way::Wait(waiter) = &way else { return };
            tokio::select! {
                biased;
                event = links.recv() => match event {
                    None => return,
                    Some(event) => {
                        if let Followed::Link = self.happened(event, &mut stage, &mut said, &mut linked) {
                            fruitless = 0;
                        }
                    }
                },
                stream = waiter.next(true) => {
                    fruitless += 1;
                    linked = underlay::Linked::of(&stream);
                    if let Some(port) = relay_port {
                        linked = linked.map(|linked| linked.at_port(port));
                    }
                    handle.attach(Transport::from(stream));
                }
            }
            if fruitless >= CLAIM_AGAIN {
                fruitless = 0;
                self.claim_again(&mut way, &mut said).await;
            }
        }
    }

    async fn claim_again(&self, way: &mut Way, said: &mut Said) {
        tracing::warn!("the node does not take our certificate, showing the ticket again");
        // The node dials at its own pace; the certificate may be good again before it does.
        match timeout(CLAIM, self.claim_once(way)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => said.once("claim failed", error.to_string()),
            Err(_) => said.once("claim failed", ClaimError::Late.to_string()),
        }
    }

    async fn keep_dialling(&self, handle: &EndpointHandle, mut links: mpsc::UnboundedReceiver<LinkEvent>) {
        let mut way =
            Way::Dial(Dialler::new(self.user_data.node.addresses.clone()).woken_by(self.status.addressed()));
        let mut said = Said::default();
        if !self.identity().is_granted() {
            self.claim(&mut way, &mut said).await;
        }
        let mut stage = Some(self.status.begin("link"));
        let mut fruitless = 0;
        loop {
            if let Way::Dial(dialler) = &mut way {
                dialler.learn(&self.node_endpoints.borrow());
            }
            match self.secure(&mut way, true).await.map_err(|error| error.to_string()) {
                Ok(stream) => {
                    let linked = underlay::Linked::of(&stream);
                    handle.attach(Transport::from(stream));
                    match self.follow(&mut links, &mut stage, &mut said, linked).await {
                        Followed::Link => fruitless = 0,
                        Followed::Nothing => fruitless += 1,
                        Followed::End => return,
                    }
                }
                Err(why) => said.once("cannot reach the node", why),
            }
            if fruitless >= CLAIM_AGAIN {
                fruitless = 0;
                self.claim_again(&mut way, &mut said).await;
            }
            sleep(dial::beat()).await;
        }
    }

    /// Follows a connection from its attachment to its end.
    async fn follow(
        &self,
        links: &mut mpsc::UnboundedReceiver<LinkEvent>,
        stage: &mut Option<crate::status::Stage>,
        said: &mut Said,
        mut linked: Option<underlay::Linked>,
    ) -> Followed {
        let mut followed = Followed::Nothing;
        loop {
            let Some(event) = links.recv().await else { return Followed::End };
            match self.happened(event, stage, said, &mut linked) {
                Followed::Link => followed = Followed::Link,
                Followed::End => return followed,
                Followed::Nothing => {}
            }
        }
    }

    /// Handles an event; returns `Link` when the link is up, `End` when it is down.
    fn happened(
        &self,
        event: LinkEvent,
        stage: &mut Option<crate::status::Stage>,
        said: &mut Said,
        linked: &mut Option<underlay::Linked>,
    ) -> Followed {
        match event {
            LinkEvent::Up { resumed, session, peer, version } => {
                self.lease.up();
                if let Some(stage) = stage.take() {
                    self.status.done(stage);
                }
                tracing::info!(%peer, %session, resumed, relay = version, "the link is up");
                *said = Said::default();
                if let Some(linked) = linked.take() {
                    self.uplink.send_replace(Some(linked));
                }
                Followed::Link
            }
            LinkEvent::Down { reason } => {
                self.lease.down();
                said.once("the link is down", reason);
                Followed::End
            }
            LinkEvent::SessionLost => {
                tracing::warn!("the node's relay was replaced: open connections to the agent end");
                Followed::Nothing
            }
        }
    }

    /// Shows the ticket until the node grants a certificate.
    async fn claim(&self, way: &mut Way, said: &mut Said) {
        let mut refused_pause = REFUSED;
        loop {
            let pause = match self.claim_once(way).await {
                Ok(()) => return,
                Err(error) => {
                    let refused = matches!(error, ClaimError::Refused { .. });
                    said.once("claim failed", error.to_string());
                    self.status.error(&error.to_string());
                    if refused {
                        let pause = refused_pause;
                        refused_pause = (pause * 2).min(LONGEST_REFUSED);
                        pause
                    } else {
                        dial::beat()
                    }
                }
            };
            sleep(pause).await;
        }
    }

    async fn claim_once(&self, way: &mut Way) -> Result<(), ClaimError> {
        let stage = self.status.begin("dial");
        let mut stream = self.secure(way, false).await?;
        self.status.done(stage);

        let stage = self.status.begin("claim");
        let mut claim = Claim::new();
        claim.version = 1;
        claim.ticket_id = self.user_data.ticket.id.clone();
        claim.ticket_secret = self.user_data.ticket.secret.expose().to_vec();
        claim.csr = self.identity().csr()?;
        claim.tunnel_key = self.encrypted.public_key().as_bytes().to_vec();
        claim.guest_version = env!("CARGO_PKG_VERSION").to_owned();
        let reply = timeout(CLAIM, claim::ask(&mut stream, &claim)).await.map_err(|_| ClaimError::Late)??;
        if !reply.error.is_empty() {
            return Err(if reply.retry {
                ClaimError::Away(reply.error)
            } else {
                ClaimError::Refused { ticket: self.user_data.ticket.id.clone(), why: reply.error }
            });
        }
        if reply.retry {
            return Err(ClaimError::Away("the node is away".to_owned()));
        }
        self.identity().grant(&reply.sandbox_id, &reply.certificates, &[])?;
        tracing::info!(sandbox = reply.sandbox_id, ticket = self.user_data.ticket.id, "claimed");
        self.status.done(stage);
        self.status.error("");
        Ok(())
    }

    /// Returns a connection to the node, after a check of its certificate, with or without the guest's own.
    async fn secure(
        &self,
        way: &mut Way,
        with_certificate: bool,
    ) -> Result<TlsStream<TcpStream>, ClaimError> {
        match way {
            Way::Dial(dialler) => {
                let config = self.tls(with_certificate)?;
                Ok(dialler.secure(config, || self.status.calls()).await?)
            }
            Way::Wait(waiter) => Ok(waiter.next(with_certificate).await),
        }
    }

    fn tls(&self, with_certificate: bool) -> Result<Arc<rustls::ClientConfig>, identity::Error> {
        self.identity().tls(&self.user_data.node.ca_sha256, with_certificate)
    }

    fn identity(&self) -> MutexGuard<'_, Identity> {
        self.identity.lock()
    }
}

enum Followed {
    /// The connection became a link.
    Link,
    /// The connection ended before it was a link.
    Nothing,
    /// The endpoint is gone; for a single event: the connection is gone.
    End,
}

/// Logs a reason only when it is a new one: a node that is away for an hour is one line and not twenty thousand.
#[derive(Default)]
struct Said(String);

impl Said {
    fn once(&mut self, what: &'static str, reason: String) {
        if self.0 != reason {
            tracing::warn!(reason, "{what}");
            self.0 = reason;
        }
    }
}
