//! Holds the peers and processes packets without any IO: datagrams and packets come in as arguments and go out
//! through a [`Sink`]. Two threads may use an engine at once, one per direction; a peer's session is locked for the
//! time of one packet.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use boringtun::noise::errors::WireGuardError;
use boringtun::noise::handshake::parse_handshake_anon;
use boringtun::noise::rate_limiter::RateLimiter;
use boringtun::noise::{Packet, Tunn, TunnResult};
use parking_lot::RwLock;

use crate::key::{PrivateKey, PublicKey};
use crate::lane;
use crate::peer::{Peer, PeerConfig, PeerState};
use crate::stats::{Reason, Stats, add};

/// Most peers of one engine; a node has a few hundred.
const MAX_PEERS: usize = 65_536;
/// Handshakes per second without a cookie. After a restart of the relay, all VMs of a node begin handshakes at once.
const HANDSHAKES_PER_SECOND: u64 = 500;
/// Limit of the kernel and of the WireGuard paper: a session ends before its counter does.
const LAST_COUNTER: u64 = u64::MAX - (1 << 13);
const COUNTER_AT: usize = 8;
const INITIATION: u8 = 1;
const RESPONSE: u8 = 2;
const COOKIE: u8 = 3;
const DATA: u8 = 4;
/// Extra bytes of a sealed packet, and size of the largest handshake message.
const SEAL: usize = 32;
const LARGEST_HANDSHAKE: usize = 148;

/// Path to a peer, including the own address that the peer uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Path {
    /// Address and port of the peer.
    pub peer: SocketAddr,
    /// Own address, if known: answers must be sent from it.
    pub local: Option<IpAddr>,
}

/// Receiver of an engine's output.
pub trait Sink {
    /// Sends a datagram to the network.
    fn network(&mut self, path: &Path, datagram: &[u8]);
    /// Writes a packet to the TUN device.
    fn tunnel(&mut self, packet: &[u8]);
}

/// Reason to refuse a peer, as text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Error(pub(crate) String);

#[derive(Default)]
struct Table {
    by_name: HashMap<String, Arc<Peer>>,
    by_key: HashMap<PublicKey, Arc<Peer>>,
    by_index: HashMap<u32, Arc<Peer>>,
    by_inner: HashMap<Ipv4Addr, Arc<Peer>>,
    next_index: u32,
}

/// The peers of one end of the tunnel.
pub struct Engine {
    key: PrivateKey,
    table: RwLock<Table>,
    /// Rate limiter for all handshakes; it answers with cookies when there are too many.
    door: RateLimiter,
    /// Rate limiter for the sessions; it never refuses, because `door` has already checked.
    open: Arc<RateLimiter>,
    stats: Stats,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("key", &self.key).field("stats", &self.stats).finish_non_exhaustive()
    }
}

impl Engine {
    /// Returns an engine without peers.
    pub fn new(key: PrivateKey) -> Engine {
        Engine::with_limit(key, HANDSHAKES_PER_SECOND)
    }

    pub(crate) fn with_limit(key: PrivateKey, handshakes_per_second: u64) -> Engine {
        let public = key.public().to_x25519();
        Engine {
            table: RwLock::default(),
            door: RateLimiter::new(&public, handshakes_per_second),
            open: Arc::new(RateLimiter::new(&public, u64::MAX)),
            key,
            stats: Stats::default(),
        }
    }

    /// Returns the public key of this end.
    pub fn public_key(&self) -> PublicKey {
        self.key.public()
    }

    #[cfg(test)]
    pub(crate) fn key_bytes(&self) -> zeroize::Zeroizing<[u8; 32]> {
        self.key.expose()
    }

    /// Returns the counters.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// Returns the number of peers.
    pub fn peers(&self) -> usize {
        self.table.read().by_name.len()
    }

    /// Returns the last known path of a peer.
    pub fn path_of(&self, name: &str) -> Option<Path> {
        let peer = self.table.read().by_name.get(name).cloned();
        peer.and_then(|peer| peer.lock().path)
    }

    /// Adopts the last known paths of peers from another engine with the same key. This engine replaces the other
    /// one, and the sessions of that engine are lost: a packet to such a peer begins a new session at its path.
    pub fn take_places(&self, from: &Engine) {
        for peer in self.all() {
            let place = from.path_of(&peer.name);
            let mut state = peer.lock();
            state.path = state.path.or(place);
        }
    }

    /// Sets the address at which another process found a peer. An address known here is newer and stays.
    pub fn place(&self, name: &str, peer: SocketAddr) {
        if let Some(known) = self.table.read().by_name.get(name) {
            let mut state = known.lock();
            state.path = state.path.or(Some(Path { peer, local: None }));
        }
    }

    /// Adds a peer. A repetition with the same key and address keeps the session; other values make it another peer.
    /// Fails if another peer has the key or the address, or if there are too many peers.
    pub fn put_peer(&self, config: &PeerConfig) -> Result<(), Error> {
        let mut table = self.table.write();
        let name = &config.name;
        let other =
            |peer: Option<&Arc<Peer>>| peer.map(|peer| peer.name.clone()).filter(|other| other != name);
        // Two peers with one key would be indistinguishable.
        if let Some(other) = other(table.by_key.get(&config.key)) {
            let text =
                format!("the tunnel key of {name} already belongs to {other}; every VM makes its own key");
            return Err(Error(text));
        }
        let inner = config.lane.theirs;
        if let Some(other) = other(table.by_inner.get(&inner)) {
            return Err(Error(format!("the tunnel address {inner} of {name} already belongs to {other}")));
        }
        if let Some(known) = table.by_name.get(name)
            && known.key == config.key
            && known.inner == inner
        {
            known.lock().update(config);
            return Ok(());
        }
        table.remove(name);
        if table.by_name.len() >= MAX_PEERS {
            return Err(Error(format!("more than {MAX_PEERS} tunnel peers")));
        }
        let index = table.free_index();
        let peer = Arc::new(Peer::new(config, &self.key, index, self.open.clone(), Instant::now()));
        table.by_name.insert(name.clone(), peer.clone());
        table.by_key.insert(config.key, peer.clone());
        table.by_index.insert(index, peer.clone());
        table.by_inner.insert(inner, peer);
        Ok(())
    }

    /// Removes a peer. An unknown name is no error.
    pub fn remove_peer(&self, name: &str) {
        self.table.write().remove(name);
    }

    /// Returns the size of `scratch` for packets and datagrams of this size.
    pub fn room(largest: usize) -> usize {
        (largest + SEAL).max(LARGEST_HANDSHAKE)
    }

    /// Processes a packet from the TUN device. `scratch` must have [`Engine::room`] for it.
    pub fn outgoing(&self, packet: &[u8], scratch: &mut [u8], sink: &mut impl Sink) {
        let peer =
            lane::destination(packet).and_then(|inner| self.table.read().by_inner.get(&inner).cloned());
        let Some(peer) = peer else { return self.stats.drop(Reason::NoPeer) };
        if scratch.len() < Engine::room(packet.len()) {
            return self.stats.drop(Reason::Malformed);
        }
        let mut state = peer.lock();
        let Some(path) = state.path else { return self.stats.drop(Reason::NoEndpoint) };
        state.sent = true;
        match state.tunn.encapsulate(packet, scratch) {
            TunnResult::WriteToNetwork(datagram) => {
                drop(state);
                if datagram.first() == Some(&DATA) {
                    self.stats.sent(packet.len());
                }
                sink.network(&path, datagram);
            }
            TunnResult::Err(_) => self.stats.drop(Reason::NoSession),
            // Queued until the handshake is finished.
            _ => {}
        }
    }

    /// Processes a datagram from the network. `scratch` must have [`Engine::room`] for it.
    pub fn incoming(&self, path: &Path, datagram: &[u8], scratch: &mut [u8], sink: &mut impl Sink) {
        if scratch.len() < Engine::room(datagram.len()) {
            return self.stats.drop(Reason::Malformed);
        }
        let kind = datagram.first().copied().unwrap_or_default();
        let peer = match self.peer_of(path, datagram, scratch, sink) {
            Ok(Some(peer)) => peer,
            Ok(None) => return, // answered with a cookie
            Err(why) => return self.stats.drop(why),
        };
        let mut state = peer.lock();
        match state.tunn.decapsulate(None, datagram, scratch) {
            TunnResult::Err(error) => self.stats.drop(reason_of(kind, &error)),
            TunnResult::Done => {
                if kind == DATA {
                    self.proved(&peer, &mut state, path);
                    // The first packet of a session releases the packets that waited for it.
                    self.send_queued(&mut state, path, scratch, sink);
                }
            }
            TunnResult::WriteToNetwork(answer) => {
                self.proved(&peer, &mut state, path);
                add(&self.stats.handshakes, 1);
                sink.network(path, answer);
                if kind == RESPONSE {
                    self.send_queued(&mut state, path, scratch, sink);
                }
            }
            TunnResult::WriteToTunnelV4(packet, _) => {
                self.proved(&peer, &mut state, path);
                let admitted = state.lane.admits(packet);
                drop(state);
                match admitted {
                    Ok(()) => {
                        self.stats.received(packet.len());
                        sink.tunnel(packet);
                    }
                    Err(why) => self.stats.drop(why),
                }
            }
            TunnResult::WriteToTunnelV6(..) => {
                self.proved(&peer, &mut state, path);
                self.stats.drop(Reason::NotAllowed);
            }
        }
    }

    /// Runs the timers: rekeys, keepalives, repeated handshakes. Call it about four times per second.
    pub fn tick(&self, now: Instant, sink: &mut impl Sink) {
        self.door.reset_count();
        self.open.reset_count();
        let mut scratch = [0; Engine::SCRATCH];
        for peer in self.all() {
            let mut state = peer.lock();
            let result = if state.is_deaf(now) {
                state.begin(now, true, &mut scratch)
            } else {
                match state.tunn.update_timers(&mut scratch) {
                    // boringtun gave up after 90 s; the end that begins must continue.
                    TunnResult::Err(WireGuardError::ConnectionExpired) if state.begins() => {
                        state.begin(now, true, &mut [0; LARGEST_HANDSHAKE]);
                        state.tunn.format_handshake_initiation(&mut scratch, true)
                    }
                    result => result,
                }
            };
            if let (TunnResult::WriteToNetwork(datagram), Some(path)) = (result, state.path) {
                sink.network(&path, datagram);
            }
        }
    }

    /// Begins a handshake with every peer that has a configured endpoint, as after the other end was replaced.
    pub fn begin(&self, now: Instant, sink: &mut impl Sink) {
        let mut scratch = [0; Engine::SCRATCH];
        for peer in self.all() {
            let mut state = peer.lock();
            if state.begins()
                && let TunnResult::WriteToNetwork(datagram) = state.begin(now, false, &mut scratch)
                && let Some(path) = state.path
            {
                sink.network(&path, datagram);
            }
        }
    }

    const SCRATCH: usize = 256;

    fn all(&self) -> Vec<Arc<Peer>> {
        self.table.read().by_name.values().cloned().collect()
    }

    /// Returns the peer that a datagram claims to come from. A handshake must prove here that its sender knows this
    /// end's public key; above the rate limit it gets a cookie.
    fn peer_of(
        &self,
        path: &Path,
        datagram: &[u8],
        scratch: &mut [u8],
        sink: &mut impl Sink,
    ) -> Result<Option<Arc<Peer>>, Reason> {
        let by_index = |index: u32| {
            self.table.read().by_index.get(&(index >> 8)).cloned().ok_or(Reason::Unknown).map(Some)
        };
        match datagram.first() {
            Some(&(INITIATION | RESPONSE)) => {
                match self.door.verify_packet(Some(path.peer.ip()), datagram, scratch) {
                    Ok(Packet::HandshakeInit(init)) => {
                        let public = self.key.public().to_x25519();
                        let key = parse_handshake_anon(self.key.secret(), &public, &init)
                            .ok()
                            .and_then(|half| PublicKey::from_bytes(&half.peer_static_public).ok())
                            .ok_or(Reason::Handshake)?;
                        self.table.read().by_key.get(&key).cloned().ok_or(Reason::Unknown).map(Some)
                    }
                    Ok(Packet::HandshakeResponse(response)) => by_index(response.receiver_idx),
                    Ok(_) => Err(Reason::Malformed),
                    Err(TunnResult::WriteToNetwork(cookie)) => {
                        add(&self.stats.cookies, 1);
                        sink.network(path, cookie);
                        Ok(None)
                    }
                    Err(TunnResult::Err(WireGuardError::InvalidMac)) => Err(Reason::Handshake),
                    Err(_) => Err(Reason::Malformed),
                }
            }
            Some(&(COOKIE | DATA)) => match Tunn::parse_incoming_packet(datagram) {
                Ok(Packet::PacketData(data)) => {
                    // boringtun counts one further; a peer with the session's keys could make the counter overflow.
                    let counter = datagram.get(COUNTER_AT..).and_then(|rest| rest.first_chunk());
                    if counter.is_none_or(|bytes| u64::from_le_bytes(*bytes) >= LAST_COUNTER) {
                        return Err(Reason::Malformed);
                    }
                    by_index(data.receiver_idx)
                }
                Ok(Packet::PacketCookieReply(reply)) => by_index(reply.receiver_idx),
                _ => Err(Reason::Malformed),
            },
            _ => Err(Reason::Malformed),
        }
    }

    fn proved(&self, peer: &Peer, state: &mut PeerState, path: &Path) {
        if state.proved(path) {
            add(&self.stats.roams, 1);
            // Debug level only, beside the counter: a hostile guest can cause this with every packet.
            tracing::debug!(peer = peer.name, at = %path.peer, "tunnel peer is found at another address");
        }
    }

    fn send_queued(&self, state: &mut PeerState, path: &Path, scratch: &mut [u8], sink: &mut impl Sink) {
        while let TunnResult::WriteToNetwork(datagram) = state.tunn.decapsulate(None, &[], scratch) {
            let sealed = datagram.first() == Some(&DATA);
            if sealed {
                self.stats.sent(datagram.len().saturating_sub(SEAL));
            }
            sink.network(path, datagram);
            if !sealed {
                break; // no session: boringtun began a handshake and keeps the rest
            }
        }
    }
}

fn reason_of(kind: u8, error: &WireGuardError) -> Reason {
    match error {
        WireGuardError::InvalidAeadTag if kind == DATA => Reason::Forged,
        WireGuardError::InvalidCounter | WireGuardError::DuplicateCounter => Reason::Replayed,
        WireGuardError::NoCurrentSession | WireGuardError::WrongIndex => Reason::Unknown,
        WireGuardError::InvalidPacket if kind == DATA => Reason::NotAllowed,
        WireGuardError::InvalidPacket | WireGuardError::IncorrectPacketLength => Reason::Malformed,
        _ => Reason::Handshake,
    }
}

impl Table {
    fn remove(&mut self, name: &str) {
        if let Some(gone) = self.by_name.remove(name) {
            self.by_key.remove(&gone.key);
            self.by_index.remove(&gone.index);
            self.by_inner.remove(&gone.inner);
        }
    }

    fn free_index(&mut self) -> u32 {
        // Terminates, because there are far fewer peers than numbers.
        loop {
            self.next_index = self.next_index.wrapping_add(1) & 0xff_ffff;
            if !self.by_index.contains_key(&self.next_index) {
                return self.next_index;
            }
        }
    }
}
