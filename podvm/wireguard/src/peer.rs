//! One peer: its session with us, where it is, and what it may send.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use boringtun::noise::rate_limiter::RateLimiter;
use boringtun::noise::{Tunn, TunnResult};
use parking_lot::{Mutex, MutexGuard};

use crate::engine::Path;
use crate::key::{PrivateKey, PublicKey};
use crate::lane::Lane;

/// A peer that began the conversation and sent something begins anew when it hears nothing for so long: the other
/// end is another process, or the way there is another one.
const SILENCE: Duration = Duration::from_secs(3);
/// The pause between two attempts to begin.
const ATTEMPT: Duration = Duration::from_secs(1);

/// What is told of a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerConfig {
    /// Whose it is: the sandbox at the node's end, "node" at the VM's.
    pub name: String,
    /// Who it is.
    pub key: PublicKey,
    /// What it may send.
    pub lane: Lane,
    /// Where it may be found; with none, it begins.
    pub endpoints: Vec<SocketAddr>,
    /// How often an idle tunnel is used, so that a NAT between does not forget it.
    pub keepalive: Option<Duration>,
}

pub(crate) struct Peer {
    pub(crate) name: String,
    pub(crate) key: PublicKey,
    /// 24 bits; the sessions' numbers begin with it.
    pub(crate) index: u32,
    pub(crate) inner: std::net::Ipv4Addr,
    state: Mutex<State>,
}

pub(crate) struct State {
    pub(crate) tunn: Tunn,
    pub(crate) path: Option<Path>,
    pub(crate) lane: Lane,
    endpoints: Vec<SocketAddr>,
    /// Whether anything came since the last tick, and whether anything was sent since something came.
    heard: bool,
    sent: bool,
    heard_at: Instant,
    /// When we began last, and whether anything came since.
    asked_at: Option<Instant>,
    answered: bool,
}

impl Peer {
    pub(crate) fn new(
        config: &PeerConfig,
        ours: &PrivateKey,
        index: u32,
        limiter: Arc<RateLimiter>,
        now: Instant,
    ) -> Peer {
        let keepalive =
            config.keepalive.map(|every| u16::try_from(every.as_secs()).unwrap_or(u16::MAX).max(1));
        let tunn =
            Tunn::new(ours.secret().clone(), config.key.to_x25519(), None, keepalive, index, Some(limiter));
        let state = State {
            tunn,
            path: config.endpoints.first().map(|peer| Path { peer: *peer, local: None }),
            lane: config.lane.clone(),
            endpoints: config.endpoints.clone(),
            heard: false,
            sent: false,
            heard_at: now,
            asked_at: None,
            answered: false,
        };
        Peer {
            name: config.name.clone(),
            key: config.key,
            index,
            inner: config.lane.theirs,
            state: Mutex::new(state),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

/// How a peer is found at another place than before.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Roamed(pub(crate) bool);

impl State {
    /// Changes what may change while a session goes on.
    pub(crate) fn update(&mut self, config: &PeerConfig) {
        self.lane = config.lane.clone();
        if self.endpoints != config.endpoints {
            self.endpoints = config.endpoints.clone();
            if let Some(first) = self.endpoints.first() {
                self.path = Some(Path { peer: *first, local: None });
            }
        }
    }

    /// A packet that only the peer can have made came on this path.
    pub(crate) fn proved(&mut self, path: &Path) -> Roamed {
        self.heard = true;
        self.answered = true;
        self.sent = false;
        let elsewhere = self.path.is_some_and(|known| known.peer != path.peer);
        // Who begins has the kernel choose where it sends from: its own address may change. The other end must answer
        // from the address it was asked at, or a NAT lets nothing through.
        let local = path.local.filter(|_| !self.begins());
        self.path = Some(Path { local, ..*path });
        Roamed(elsewhere)
    }

    /// A packet with content was sealed for the peer.
    pub(crate) fn used(&mut self) {
        self.sent = true;
    }

    /// Whether this end knew from the start where the other one is, and so is the one that begins.
    pub(crate) fn begins(&self) -> bool {
        !self.endpoints.is_empty()
    }

    /// Whether to begin (anew) now: because what was sent, or the last beginning, stays without an echo.
    pub(crate) fn is_deaf(&mut self, now: Instant) -> bool {
        if std::mem::take(&mut self.heard) || !self.sent {
            self.heard_at = now;
        }
        let asked_lately = self.asked_at.is_some_and(|at| now.saturating_duration_since(at) < ATTEMPT);
        let silent = self.sent && now.saturating_duration_since(self.heard_at) >= SILENCE;
        self.begins() && !asked_lately && (silent || !self.answered)
    }

    /// Begins a handshake, at the next place where the peer may be if the last beginning stayed without an answer. A
    /// peer that only has nothing to say is asked where it is.
    pub(crate) fn begin<'b>(&mut self, now: Instant, elsewhere: bool, out: &'b mut [u8]) -> TunnResult<'b> {
        if elsewhere && !self.answered && self.endpoints.len() > 1 {
            let at = self.path.and_then(|path| self.endpoints.iter().position(|e| *e == path.peer));
            let next = at.map_or(0, |at| (at + 1) % self.endpoints.len());
            self.path = self.endpoints.get(next).map(|peer| Path { peer: *peer, local: None });
        }
        self.asked_at = Some(now);
        self.answered = false;
        self.tunn.format_handshake_initiation(out, true)
    }
}
