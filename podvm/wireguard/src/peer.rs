//! Manages one peer: its session, its path, and the packets that it may send.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use boringtun::noise::rate_limiter::RateLimiter;
use boringtun::noise::{Tunn, TunnResult};
use parking_lot::{Mutex, MutexGuard};

use crate::engine::Path;
use crate::key::{PrivateKey, PublicKey};
use crate::lane::Lane;

/// Time without received packets, despite sent ones, after which the end that begins starts a new handshake: the
/// other end was replaced, or the path to it changed.
const SILENCE: Duration = Duration::from_secs(3);
/// Pause between two attempts to begin.
const ATTEMPT: Duration = Duration::from_secs(1);

/// Configuration of a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerConfig {
    /// Name of the peer: the sandbox at the node's end, "node" at the VM's.
    pub name: String,
    /// Public key of the peer.
    pub key: PublicKey,
    /// Packets that the peer may send.
    pub lane: Lane,
    /// Addresses at which the peer may be reached; if there are none, the peer begins.
    pub endpoints: Vec<SocketAddr>,
    /// Interval between packets on an idle tunnel, so that a NAT on the path keeps its mapping.
    pub keepalive: Option<Duration>,
}

pub(crate) struct Peer {
    pub(crate) name: String,
    pub(crate) key: PublicKey,
    /// 24 bits; the indexes of sessions begin with it.
    pub(crate) index: u32,
    pub(crate) inner: std::net::Ipv4Addr,
    state: Mutex<PeerState>,
}

pub(crate) struct PeerState {
    pub(crate) tunn: Tunn,
    pub(crate) path: Option<Path>,
    pub(crate) lane: Lane,
    endpoints: Vec<SocketAddr>,
    /// Whether a packet was received since the last tick, and one with content sealed since the last received one.
    received: bool,
    pub(crate) sent: bool,
    received_at: Instant,
    /// Time of the last handshake that this end began, and whether a packet was received since.
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
        let state = PeerState {
            tunn,
            path: config.endpoints.first().map(at),
            lane: config.lane.clone(),
            endpoints: config.endpoints.clone(),
            received: false,
            sent: false,
            received_at: now,
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

    pub(crate) fn lock(&self) -> MutexGuard<'_, PeerState> {
        self.state.lock()
    }
}

fn at(peer: &SocketAddr) -> Path {
    Path { peer: *peer, local: None }
}

impl PeerState {
    /// Changes the settings that may change during a session.
    pub(crate) fn update(&mut self, config: &PeerConfig) {
        self.lane = config.lane.clone();
        if self.endpoints != config.endpoints {
            self.endpoints = config.endpoints.clone();
            if let Some(first) = self.endpoints.first() {
                self.path = Some(at(first));
            }
        }
    }

    /// Processes an authenticated packet of the peer that came on this path; returns whether the peer was found at
    /// another address than before.
    pub(crate) fn proved(&mut self, path: &Path) -> bool {
        (self.received, self.answered, self.sent) = (true, true, false);
        let elsewhere = self.path.is_some_and(|known| known.peer != path.peer);
        // At the end that begins, the kernel chooses the source address, because the end's own address may change.
        // The other end must answer from the address that the packet was sent to, or a NAT drops the answer.
        let local = path.local.filter(|_| !self.begins());
        self.path = Some(Path { local, ..*path });
        elsewhere
    }

    /// Returns whether this end begins: it had an endpoint of the peer from the start.
    pub(crate) fn begins(&self) -> bool {
        !self.endpoints.is_empty()
    }

    /// Returns whether to begin (anew) now: sent packets, or the last attempt, got no answer.
    pub(crate) fn is_deaf(&mut self, now: Instant) -> bool {
        if std::mem::take(&mut self.received) || !self.sent {
            self.received_at = now;
        }
        let asked_lately = self.asked_at.is_some_and(|at| now.saturating_duration_since(at) < ATTEMPT);
        let silent = self.sent && now.saturating_duration_since(self.received_at) >= SILENCE;
        self.begins() && !asked_lately && (silent || !self.answered)
    }

    /// Begins a handshake. With `elsewhere`, it uses the next endpoint if the last attempt got no answer; a peer that
    /// answered and is merely silent keeps its path.
    pub(crate) fn begin<'b>(&mut self, now: Instant, elsewhere: bool, out: &'b mut [u8]) -> TunnResult<'b> {
        if elsewhere && !self.answered && self.endpoints.len() > 1 {
            let now_at = self.path.and_then(|path| self.endpoints.iter().position(|e| *e == path.peer));
            let next = now_at.map_or(0, |now_at| (now_at + 1) % self.endpoints.len());
            self.path = self.endpoints.get(next).map(at);
        }
        self.asked_at = Some(now);
        self.answered = false;
        self.tunn.format_handshake_initiation(out, true)
    }
}
