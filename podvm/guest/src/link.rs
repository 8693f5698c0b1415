//! Keeps the link to the node: claims an identity, dials, attaches each new connection to the endpoint, and lets a beat
//! pass after each lost one.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use anyhow::anyhow;
use bytes::Bytes;
use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use peerpod_common::backoff::Backoff;
use peerpod_link::claim;
use peerpod_link::endpoint::{EndpointHandle, Filter, Handler, LinkEvent, Target, Transport};
use peerpod_link::user_data::UserData;
use peerpod_proto::guest::Claim;
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::client::TlsStream;

use crate::agent::Agent;
use crate::dial::{self, Dialler};
use crate::encrypted::Encrypted;
use crate::guest_listener::Waiter;
use crate::identity::GuestIdentity;
use crate::intercept::{Intercept, Notice};
use crate::localhost::Localhost;
use crate::log::{self, Ring};
use crate::power::Lease;
use crate::status::{RunningStage, Status};
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
/// Limit of remembered reasons: each address of the node may fail for one of its own.
const MOST_REASONS: usize = 16;
/// Interval between log lines of the same reason.
const AGAIN: Duration = Duration::from_secs(60);
/// Limit of queued control messages. The node sends one at a time.
const CONTROL_QUEUE: usize = 64;

pub(crate) struct GuestHandler {
    agent: Arc<Agent>,
    notice: Arc<dyn Notice>,
    podns: String,
    localhost: Arc<Localhost>,
    log: Ring,
    links: mpsc::UnboundedSender<LinkEvent>,
    controls: mpsc::Sender<Bytes>,
}

impl GuestHandler {
    /// Makes the handler; returns also its events of the link and its control messages. `podns` is the path of the
    /// network namespace that containers join.
    pub(crate) fn new(
        agent: Arc<Agent>,
        notice: Arc<dyn Notice>,
        podns: String,
        log: Ring,
    ) -> (GuestHandler, mpsc::UnboundedReceiver<LinkEvent>, mpsc::Receiver<Bytes>) {
        // Unbounded, but one connection causes three events, and connections come at the pace of `keep`.
        let (links, link_events) = mpsc::unbounded_channel();
        let (controls, control_messages) = mpsc::channel(CONTROL_QUEUE);
        let localhost = Arc::new(Localhost::new(podns.clone().into()));
        let handler = GuestHandler { agent, notice, podns, localhost, log, links, controls };
        (handler, link_events, control_messages)
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

pub(crate) struct LinkSupervisor {
    pub(crate) user_data: UserData,
    pub(crate) identity: Arc<Mutex<GuestIdentity>>,
    pub(crate) encrypted: Arc<Encrypted>,
    pub(crate) status: Arc<Status>,
    pub(crate) lease: Arc<Lease>,
    pub(crate) uplink: underlay::Link,
    /// Addresses of the node besides those in user-data.
    pub(crate) node_endpoints: watch::Receiver<Vec<SocketAddr>>,
}

/// State of the link between two events.
#[derive(Default)]
struct Course {
    /// Stage that ends with the first link.
    stage: Option<RunningStage>,
    said: Said,
    /// Connection that may become the link.
    linked: Option<underlay::Linked>,
    /// Number of connections in a row without a link.
    fruitless: u32,
}

impl Course {
    /// Gives the endpoint a connection. `port` is that of the relay's answers to probes, if it is another one.
    fn attach(&mut self, handle: &EndpointHandle, stream: TlsStream<TcpStream>, port: Option<u16>) {
        self.fruitless += 1;
        self.linked = underlay::Linked::of(&stream, port);
        handle.attach(Transport::from(stream));
    }
}

/// Direction of the dial.
enum Connector {
    /// The guest dials.
    Dial(Dialler),
    /// The node dials.
    Wait(Waiter),
}

#[derive(Debug, thiserror::Error)]
enum ClaimError {
    #[error("the node refuses ticket {ticket}: {why}")]
    Refused { ticket: String, why: String },
    #[error("{0:#}")]
    Other(#[from] anyhow::Error),
}

impl LinkSupervisor {
    /// Keeps the link until the endpoint of `handle` ends.
    pub(crate) async fn run(&self, handle: &EndpointHandle, mut links: mpsc::UnboundedReceiver<LinkEvent>) {
        let node = &self.user_data.node;
        let mut connector = match node.listen {
            Some(port) => Connector::Wait(self.waiter(port)),
            None => Connector::Dial(Dialler::new(node.addresses.clone(), self.status.addressed.clone())),
        };
        let mut course = Course::default();
        if !self.identity.lock().is_granted() {
            self.claim(&mut connector, &mut course.said).await;
        }
        course.stage = Some(self.status.begin("link"));
        while self.step(&mut connector, &mut course, handle, &mut links).await.is_some() {
            self.claim_again(&mut connector, &mut course).await;
            if let Connector::Dial(_) = connector {
                sleep(dial::beat()).await;
            }
        }
    }

    fn waiter(&self, port: u16) -> Waiter {
        let (identity, pins) = (self.identity.clone(), self.user_data.node.ca_sha256.clone());
        let config_source = move |with_certificate| {
            let config = identity.lock().tls(&pins, with_certificate);
            let said = |error: &anyhow::Error| {
                tracing::error!(error = format!("{error:#}"), "cannot make the TLS server for the node");
            };
            config.inspect_err(said).ok()
        };
        let waiter = Waiter::new(port, Arc::new(config_source));
        self.status.called.set();
        waiter
    }

    /// Dials, and follows the connection to its end. Where the node dials, handles one event or connection: the node
    /// dials when it has no connection, and a new one replaces the previous one at once. `None`: the endpoint is gone.
    async fn step(
        &self,
        connector: &mut Connector,
        course: &mut Course,
        handle: &EndpointHandle,
        links: &mut mpsc::UnboundedReceiver<LinkEvent>,
    ) -> Option<()> {
        match connector {
            Connector::Wait(waiter) => tokio::select! {
                biased;
                event = links.recv() => self.happened(event?, course),
                stream = waiter.next(true) => {
                    // Port on which the relay answers probes.
                    let port = self.user_data.node.addresses.first().map(SocketAddr::port);
                    course.attach(handle, stream, port);
                }
            },
            Connector::Dial(dialler) => {
                dialler.learn(&self.node_endpoints.borrow());
                match self.secure(connector, true).await {
                    Ok(stream) => {
                        course.attach(handle, stream, None);
                        let mut is_down = false;
                        while !is_down {
                            let event = links.recv().await?;
                            is_down = matches!(event, LinkEvent::Down { .. });
                            self.happened(event, course);
                        }
                    }
                    Err(error) => course.said.cannot_join(format!("{error:#}")),
                }
            }
        }
        Some(())
    }

    fn happened(&self, event: LinkEvent, course: &mut Course) {
        match event {
            LinkEvent::Up { resumed, session, peer, version } => {
                self.lease.linked(true);
                if let Some(stage) = course.stage.take() {
                    self.status.done(stage);
                }
                tracing::info!(%peer, %session, resumed, relay = version, "the link is up");
                (course.said, course.fruitless) = (Said::default(), 0);
                if let Some(linked) = course.linked.take() {
                    self.uplink.send_replace(Some(linked));
                }
            }
            LinkEvent::Down { reason, .. } => {
                self.lease.linked(false);
                if course.said.is_new(&reason) {
                    tracing::warn!(reason, "the link is down");
                }
            }
            LinkEvent::SessionLost => {
                tracing::warn!("the node's relay was replaced: open connections to the agent end");
            }
        }
    }

    /// Shows the ticket again after many connections without a link.
    async fn claim_again(&self, connector: &mut Connector, course: &mut Course) {
        if course.fruitless < CLAIM_AGAIN {
            return;
        }
        course.fruitless = 0;
        tracing::warn!("the node does not take our certificate, showing the ticket again");
        // The node dials at its own pace; the certificate may be good again before it does.
        match timeout(CLAIM, self.claim_once(connector)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => course.said.cannot_join(error.to_string()),
            Err(_) => course.said.cannot_join(late().to_string()),
        }
    }

    /// Shows the ticket until the node grants a certificate.
    async fn claim(&self, connector: &mut Connector, said: &mut Said) {
        let mut refusals = Backoff::new(REFUSED, LONGEST_REFUSED);
        while let Err(error) = self.claim_once(connector).await {
            said.cannot_join(error.to_string());
            self.status.error(&error.to_string());
            sleep(match error {
                ClaimError::Refused { .. } => refusals.pause(),
                ClaimError::Other(_) => dial::beat(),
            })
            .await;
        }
    }

    async fn claim_once(&self, connector: &mut Connector) -> Result<(), ClaimError> {
        let stage = self.status.begin("dial");
        let mut stream = self.secure(connector, false).await?;
        self.status.done(stage);

        let stage = self.status.begin("claim");
        let ticket = &self.user_data.ticket;
        let claim = Claim {
            version: 1,
            ticket_id: ticket.id.clone(),
            ticket_secret: ticket.secret.expose().to_vec(),
            csr: self.identity.lock().csr()?,
            tunnel_key: self.encrypted.public_key().as_bytes().to_vec(),
            guest_version: env!("CARGO_PKG_VERSION").to_owned(),
            ..Claim::default()
        };
        let reply = timeout(CLAIM, claim::ask(&mut stream, &claim)).await.map_err(|_| late())?;
        let reply = reply.map_err(anyhow::Error::msg)?;
        match (reply.retry, reply.error) {
            (false, none) if none.is_empty() => {}
            (false, why) => return Err(ClaimError::Refused { ticket: ticket.id.clone(), why }),
            (true, none) if none.is_empty() => Err(anyhow!("the node cannot answer yet: the node is away"))?,
            (true, why) => Err(anyhow!("the node cannot answer yet: {why}"))?,
        }
        self.identity.lock().grant(&reply.sandbox_id, &reply.certificates, &[])?;
        tracing::info!(sandbox = reply.sandbox_id, ticket = ticket.id, "claimed");
        self.status.done(stage);
        self.status.error("");
        Ok(())
    }

    /// Returns a connection to the node, after a check of its certificate, with or without the guest's own.
    async fn secure(
        &self,
        connector: &mut Connector,
        with_certificate: bool,
    ) -> anyhow::Result<TlsStream<TcpStream>> {
        match connector {
            Connector::Dial(dialler) => {
                let config = self.identity.lock().tls(&self.user_data.node.ca_sha256, with_certificate)?;
                dialler.secure(config, || self.status.called.set()).await
            }
            Connector::Wait(waiter) => Ok(waiter.next(with_certificate).await),
        }
    }
}

fn late() -> anyhow::Error {
    anyhow!("the node did not answer the claim within {CLAIM:?}")
}

/// Reasons that were logged, with the times. A new one is logged at once, the same one again after [`AGAIN`]: a node that
/// is away for an hour is sixty lines and not twenty thousand, and the end of the console has one.
#[derive(Default)]
struct Said(Vec<(String, Instant)>);

impl Said {
    /// Returns whether the reason must be logged now.
    fn is_new(&mut self, reason: &str) -> bool {
        self.0.retain(|(_, at)| at.elapsed() < AGAIN);
        if self.0.iter().any(|(known, _)| known == reason) {
            return false;
        }
        if self.0.len() >= MOST_REASONS {
            self.0.remove(0);
        }
        self.0.push((reason.to_owned(), Instant::now()));
        true
    }

    fn cannot_join(&mut self, reason: String) {
        if self.is_new(&reason) {
            log::cannot_join(&reason);
        }
    }
}
