//! Accepts the guests' TLS connections and serves those that `guest_dialer` opened. Every host that can reach the node
//! can reach this TCP listener. A guest without a certificate may only show its ticket and read the answer; a
//! certificate selects its sandbox. Before that, the relay limits connections, connections per address, and the time
//! for the handshake and the first record. The newest connection evicts the oldest, but for a moment none that has sent
//! its ClientHello. The addresses of served VMs have places of their own.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use parking_lot::RwLock;
use peerpod_common::accept::Acceptor;
use peerpod_common::caller_limits::CallerLimits;
use peerpod_common::crowd::{self, Crowd};
use peerpod_link::claim::{self, FIRST_RECORD_DEADLINE, First};
use peerpod_link::path_mtu::Token;
use peerpod_link::path_mtu::echo::Known;
use peerpod_link::{endpoint, tls};
use peerpod_proto::guest::{Claim, ClaimReply};
use peerpod_proto::node::ClaimRequest;
use rustls::server::Acceptor as HelloAcceptor;
use thiserror::Error;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tokio_rustls::LazyConfigAcceptor;
use tokio_rustls::server::TlsStream;

use crate::hypervisor::{ClaimError, HypervisorHandle};
use crate::id::SandboxId;
use crate::metrics::Metrics;
use crate::sandboxes::Sandboxes;

/// Time limit of the first message of a TLS handshake, which a guest sends at once.
const CLIENT_HELLO: Duration = Duration::from_secs(3);
/// Limit of unauthenticated connections from an address of served VMs, for each VM there.
const MOST_OF_ONE_VM: usize = 8;
/// Time limit of the rest of a guest's TLS handshake, also on busy machines.
const HANDSHAKE: Duration = Duration::from_secs(15);
/// Time limit for a guest to take the answer to its claim.
const REPLY: Duration = Duration::from_secs(5);
/// The only known version of a claim.
const CLAIM_VERSION: u32 = 1;

/// TLS configuration in force; a new one applies to new connections.
pub(crate) type Trust = RwLock<Option<Arc<rustls::ServerConfig>>>;

#[derive(Clone)]
pub(crate) struct GuestParts {
    pub(crate) trust: Arc<Trust>,
    pub(crate) sandboxes: Arc<Sandboxes>,
    pub(crate) hypervisor: HypervisorHandle,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) paths: Known,
    /// Log lines about a network's connections, of each kind and for each sandbox.
    pub(crate) lines: CallerLimits<(IpAddr, &'static str, String)>,
}

impl GuestParts {
    /// Whether another line of this kind may be logged. The metrics count what the log leaves out.
    fn may_log(&self, peer: SocketAddr, kind: &'static str, sandbox: &str) -> bool {
        self.lines.may_log(&(crowd::network(peer.ip()), kind, sandbox.to_owned()))
    }
}

/// Reason why a connection was refused. [`Refused::label`] is its label in the metric.
#[derive(Debug, Error)]
pub(crate) enum Refused {
    #[error("no ClientHello within {CLIENT_HELLO:?}")]
    NoClientHello,
    #[error("the TLS handshake took longer than {HANDSHAKE:?}")]
    HandshakeStalled,
    #[error("the TLS handshake failed: {0}")]
    Handshake(std::io::Error),
    #[error("no first record within {FIRST_RECORD_DEADLINE:?}")]
    Silent,
    #[error("{0}")]
    FirstRecord(claim::ClaimError),
    #[error("the session has no client certificate")]
    NoCertificate,
    #[error("its certificate belongs to no sandbox")]
    UnknownCertificate,
    #[error("the guest of sandbox {0} connects too often")]
    TooOften(SandboxId),
    #[error("it is the guest of sandbox {0}")]
    OtherSandbox(String),
    #[error("its ticket was refused: {0}")]
    Ticket(String),
    #[error("the node is away: {0}")]
    NodeAway(String),
    #[error("the node has not configured this relay yet")]
    NotConfigured,
}

#[derive(Debug)]
pub(crate) enum Met {
    /// The connection is a link.
    Attached,
    /// The ticket was answered.
    Claimed,
}

impl Refused {
    /// Whether the error shows an unexpected peer, rather than an absent one.
    pub(crate) fn is_strange(&self) -> bool {
        use Refused::{Handshake, NoCertificate, OtherSandbox, Ticket, UnknownCertificate};
        matches!(self, Handshake(_) | NoCertificate | OtherSandbox(_) | Ticket(_) | UnknownCertificate)
    }

    pub(crate) fn label(&self) -> &'static str {
        match self {
            Refused::NoClientHello => "no_client_hello",
            Refused::HandshakeStalled => "handshake_stalled",
            Refused::Handshake(_) => "handshake",
            Refused::Silent => "silent",
            Refused::FirstRecord(_) => "first_record",
            Refused::NoCertificate => "no_certificate",
            Refused::UnknownCertificate => "unknown_certificate",
            Refused::TooOften(_) => "too_often",
            Refused::OtherSandbox(_) => "other_sandbox",
            Refused::Ticket(_) => "ticket",
            Refused::NodeAway(_) => "node_away",
            Refused::NotConfigured => "not_configured",
        }
    }
}

/// Accepts guests until the future is dropped. `most` and `most_of_one` limit the connections that have no sandbox yet,
/// in total and from one network.
pub(crate) async fn accept(listener: TcpListener, parts: GuestParts, most: usize, most_of_one: usize) {
    let (mut strangers, mut vms) = (Crowd::new(most), Crowd::new(most));
    let mut acceptor = Acceptor::new("guests' port");
    loop {
        let (stream, peer) = tokio::select! {
            accepted = acceptor.next(|| listener.accept()) => accepted,
            _ = strangers.leave() => continue,
            _ = vms.leave() => continue,
        };
        parts.metrics.guests.connections.inc();
        let address = peer.ip().to_canonical();
        let spoke = Arc::<AtomicBool>::default();
        let serving = serve_stranger(stream, peer, spoke.clone(), parts.clone());
        let is_full = match parts.sandboxes.vms_at(&address) {
            0 => strangers.add(crowd::network(address), most_of_one, spoke, serving),
            there => vms.add(address, there.saturating_mul(MOST_OF_ONE_VM), spoke, serving),
        };
        if is_full {
            parts.metrics.guests.refused("too_many");
        }
    }
}

async fn serve_stranger(stream: TcpStream, peer: SocketAddr, spoke: Arc<AtomicBool>, parts: GuestParts) {
    if let Err(refused) = meet(stream, peer, None, &spoke, &parts).await {
        tracing::debug!(%peer, reason = refused.label(), error = %refused, "connection of a guest refused");
    }
}

/// Serves a connection of a guest. If the relay dialled it for a sandbox, the peer must be that sandbox's guest.
/// Sets `spoke` after the ClientHello.
pub(crate) async fn meet(
    stream: TcpStream,
    peer: SocketAddr,
    dialled: Option<&SandboxId>,
    spoke: &AtomicBool,
    parts: &GuestParts,
) -> Result<Met, Refused> {
    let met = serve(stream, peer, dialled, spoke, parts).await;
    if let Err(refused) = &met {
        parts.metrics.guests.refused(refused.label());
    }
    met
}

async fn serve(
    stream: TcpStream,
    peer: SocketAddr,
    dialled: Option<&SandboxId>,
    spoke: &AtomicBool,
    parts: &GuestParts,
) -> Result<Met, Refused> {
    let config = parts.trust.read().clone().ok_or(Refused::NotConfigured)?;
    endpoint::tune(&stream).map_err(Refused::Handshake)?;
    let hello = timeout(CLIENT_HELLO, LazyConfigAcceptor::new(HelloAcceptor::default(), stream)).await;
    let hello = hello.map_err(|_| Refused::NoClientHello)?.map_err(Refused::Handshake)?;
    spoke.store(true, Relaxed);
    let stream = timeout(HANDSHAKE, hello.into_stream(config)).await;
    let mut stream = stream.map_err(|_| Refused::HandshakeStalled)?.map_err(Refused::Handshake)?;
    let certificate = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
    if let Some(certificate) = certificate {
        // A certificate is in the list of at most one sandbox: that of another sandbox leads there, not here.
        let sandbox = parts.sandboxes.of_certificate(&tls::fingerprint(certificate));
        let sandbox = sandbox.ok_or(Refused::UnknownCertificate)?;
        if dialled.is_some_and(|dialled| *dialled != sandbox.id) {
            return Err(Refused::OtherSandbox(sandbox.id.to_string()));
        }
        if !sandbox.guest.may_link() {
            if parts.may_log(peer, "too_often", sandbox.id.as_str()) {
                tracing::warn!(sandbox = %sandbox.id, pod = sandbox.guest.pod(), %peer, "the guest connects too often; some of its connections are closed");
            }
            return Err(Refused::TooOften(sandbox.id));
        }
        tracing::debug!(sandbox = %sandbox.id, pod = sandbox.guest.pod(), %peer, "guest authenticated by its certificate");
        if let Some(token) = Token::of(stream.get_ref().1) {
            sandbox.guest.may_probe(parts.paths.admit(token));
        }
        sandbox.endpoint.attach(stream.into());
        return Ok(Met::Attached);
    }
    let first = timeout(FIRST_RECORD_DEADLINE, claim::first_record(&mut stream)).await;
    match first.map_err(|_| Refused::Silent)?.map_err(Refused::FirstRecord)? {
        First::Claim(claim) => answer_claim(stream, peer, *claim, dialled, parts).await,
        First::Hello(_) => Err(Refused::NoCertificate),
    }
}

async fn answer_claim(
    mut stream: TlsStream<TcpStream>,
    peer: SocketAddr,
    claim: Claim,
    dialled: Option<&SandboxId>,
    parts: &GuestParts,
) -> Result<Met, Refused> {
    let ticket: String = claim.ticket_id.chars().filter(char::is_ascii_hexdigit).take(32).collect();
    let (outcome, reply) = judge(claim, peer, dialled, &parts.hypervisor).await;
    parts.metrics.guests.claim(outcome);
    // The ticket's id is no secret, the ticket's secret is. A guest that must wait asks again many times a second.
    if reply.retry {
        tracing::debug!(%peer, ticket, error = reply.error, "ticket shown; the guest must retry");
    } else if parts.may_log(peer, outcome, &reply.sandbox_id) {
        let sandbox = SandboxId::new(&reply.sandbox_id).ok().and_then(|id| parts.sandboxes.get(&id));
        let pod = sandbox.map(|sandbox| sandbox.guest.pod());
        tracing::info!(%peer, ticket, outcome, sandbox = reply.sandbox_id, pod, error = reply.error, "ticket shown");
    }
    // A node of an earlier version ignores the dialled sandbox.
    if let Some(dialled) = dialled
        && outcome == "granted"
        && reply.sandbox_id != dialled.as_str()
    {
        return Err(Refused::OtherSandbox(reply.sandbox_id));
    }
    let replied = timeout(REPLY, claim::reply(&mut stream, &reply)).await;
    replied.map_err(|_| Refused::Silent)?.map_err(Refused::FirstRecord)?;
    // The guest closes after it has read the answer. Closing first, with unread data, could cut the answer off.
    let closed = async {
        stream.shutdown().await?;
        stream.read(&mut [0; 64]).await
    };
    drop(timeout(REPLY, closed).await);
    match outcome {
        "granted" => Ok(Met::Claimed),
        _ if dialled.is_none() => Ok(Met::Claimed),
        "retry" => Err(Refused::NodeAway(reply.error)),
        _ => Err(Refused::Ticket(reply.error)),
    }
}

async fn judge(
    claim: Claim,
    peer: SocketAddr,
    dialled: Option<&SandboxId>,
    hypervisor: &HypervisorHandle,
) -> (&'static str, ClaimReply) {
    let refused = |error: String| ClaimReply { error, ..Default::default() };
    if claim.version != CLAIM_VERSION {
        let error =
            format!("claim version {} is unknown to this relay; it supports {CLAIM_VERSION}", claim.version);
        return ("version", refused(error));
    }
    let request = ClaimRequest {
        ticket_id: claim.ticket_id,
        ticket_secret: claim.ticket_secret,
        csr: claim.csr,
        peer_address: peer.ip().to_canonical().to_string(),
        evidence: claim.evidence,
        guest_version: claim.guest_version,
        tunnel_key: claim.tunnel_key,
        dialled: dialled.map(ToString::to_string).unwrap_or_default(),
        ..Default::default()
    };
    match hypervisor.claim(request).await {
        Ok(granted) => {
            let reply = ClaimReply {
                sandbox_id: granted.sandbox_id,
                certificates: granted.certificates,
                ..Default::default()
            };
            ("granted", reply)
        }
        Err(error @ ClaimError::Away(_)) => {
            ("retry", ClaimReply { error: error.to_string(), retry: true, ..Default::default() })
        }
        Err(error @ ClaimError::Refused { .. }) => ("refused", refused(error.to_string())),
    }
}
