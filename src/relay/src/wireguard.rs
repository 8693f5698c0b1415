//! Data plane of the encrypted tunnel. It combines the TUN device, the UDP socket and the key of the node with the
//! peers in the sandboxes' records. Threads of its own carry the packets, never those of the links. The node's private
//! key is held in memory only; a new relay process gets it with the descriptors.

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use async_trait::async_trait;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use parking_lot::Mutex;
use peerpod_wireguard::{
    DataPlane, Engine, Lane, NODE_INNER, PeerConfig, PrivateKey, PublicKey, Reason, Tun,
};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use serde_json::{Value, json};
use zeroize::Zeroizing;

use crate::fd_handoff::{Kind, Passed};
use crate::id::SandboxId;
use crate::store::TunnelPeer;

/// Limit of VXLAN networks of one pod: one for each of its interfaces.
const MAX_VNIS: usize = 64;

#[derive(Default)]
struct State {
    /// The sessions, which continue in the next data plane of the same key. `None` before the first one.
    engine: Option<Arc<Engine>>,
    /// Engine that panicked. Its sessions may be inconsistent, but it still has the guests' addresses.
    broken: Option<Arc<Engine>>,
    plane: Option<Plane>,
    /// Peers by sandbox; kept without a data plane, too.
    peers: HashMap<SandboxId, PeerConfig>,
    /// Number of data planes that ended by themselves.
    failures: u64,
}

struct Plane {
    threads: DataPlane,
    /// Duplicate for a node that passes another device: the port is taken by this socket.
    socket: UdpSocket,
    /// Duplicate of the device, and the key, for another relay process.
    tun: OwnedFd,
    key: Zeroizing<[u8; 32]>,
    port: u16,
    /// Namespace of the device, as the node names it.
    inside: String,
}

impl State {
    /// Releases everything held by a data plane that ended by itself: the node opens the device and binds the port
    /// anew. Blocks until the threads of that data plane have ended, which is imminent.
    fn keep_counters(&mut self) {
        let Some(dead) = self.plane.take_if(|plane| !plane.threads.is_running()) else { return };
        let panicked = dead.threads.has_panicked();
        if panicked {
            self.broken = self.engine.take();
        }
        self.failures += 1;
        drop(dead);
        tracing::error!(
            panicked,
            "the encrypted tunnel carries no packets until the node has restarted its data plane"
        );
    }
}

#[derive(Default)]
pub(crate) struct WireGuard {
    state: Mutex<State>,
}

impl WireGuard {
    /// Makes a sandbox's guest a peer, or removes it if `peer` is `None`. Repeating the call changes nothing.
    pub(crate) fn put(&self, id: &SandboxId, peer: Option<&TunnelPeer>) -> Result<(), String> {
        let Some(peer) = peer else {
            self.delete(id);
            return Ok(());
        };
        let config = config(id, peer)?;
        let mut state = self.state.lock();
        let taken = |other: &PeerConfig| other.key == config.key || other.lane.theirs == config.lane.theirs;
        if let Some((other, _)) = state.peers.iter().find(|(other, known)| *other != id && taken(known)) {
            return Err(format!("the key or the inner address already belongs to sandbox {other}"));
        }
        if let Some(engine) = &state.engine {
            engine.put_peer(&config).map_err(|error| error.to_string())?;
        }
        state.peers.insert(id.clone(), config);
        Ok(())
    }

    pub(crate) fn delete(&self, id: &SandboxId) {
        let mut state = self.state.lock();
        if state.peers.remove(id).is_some()
            && let Some(engine) = &state.engine
        {
            engine.remove_peer(id.as_str());
        }
    }

    /// Starts the new threads, then ends the old ones. On an error the old ones continue.
    ///
    /// In this order a failure loses nothing, and the old threads do not prevent a success. A TUN device has one
    /// opener, but the relay does not open it: the node did so before it passed the descriptor. That is possible only
    /// if no data plane here holds the device (an ended one has released it, see [`State::keep_counters`]) or if both share the
    /// descriptor. Two data planes on one device or socket each receive some of the packets while both run.
    fn start(
        &self,
        key: PrivateKey,
        tun: Tun,
        socket: Option<UdpSocket>,
        inside: String,
    ) -> Result<Value, String> {
        let unusable = |error| format!("the UDP socket: {error}");
        let mut state = self.state.lock();
        state.keep_counters();
        let held =
            state.plane.as_ref().map(|plane| plane.socket.try_clone()).transpose().map_err(unusable)?;
        let socket = socket.or(held).ok_or("the relay has no UDP socket yet")?;
        let port = socket.local_addr().map_err(unusable)?.port();
        let kept = socket.try_clone().map_err(unusable)?;
        let device = tun.as_fd().try_clone_to_owned().map_err(|error| format!("the TUN device: {error}"))?;
        let secret = key.expose();
        let same = state.engine.clone().filter(|engine| engine.public_key() == key.public());
        let engine = same.unwrap_or_else(|| Arc::new(Engine::new(key)));
        for (id, config) in &state.peers {
            if let Err(error) = engine.put_peer(config) {
                tracing::error!(sandbox = %id, %error, "cannot add the guest as a peer of the encrypted tunnel");
            }
        }
        if let Some(broken) = &state.broken {
            engine.take_places(broken);
        }
        let threads = DataPlane::start(engine.clone(), tun, socket, "wireguard", || ())
            .map_err(|error| format!("start the data plane: {error}"))?;
        tracing::info!(port, peers = state.peers.len(), "the encrypted tunnel's data plane is running");
        let plane = Plane { threads, socket: kept, tun: device, key: secret, port, inside };
        let detail = describe(&plane);
        (state.engine, state.broken) = (Some(engine), None);
        drop(state.plane.replace(plane));
        Ok(detail)
    }

    /// Returns the state for another relay process: the node's descriptors, and the guests' present addresses. Sessions
    /// are not handed over; both ends begin new ones.
    pub(crate) fn show(&self) -> io::Result<Option<Passed>> {
        let state = self.state.lock();
        let Some(plane) = state.plane.as_ref().filter(|plane| plane.threads.is_running()) else {
            return Ok(None);
        };
        let place = |id: &SandboxId| {
            let path = plane.threads.engine().path_of(id.as_str())?;
            Some((id.to_string(), path.peer.to_string()))
        };
        let places: HashMap<String, String> = state.peers.keys().filter_map(place).collect();
        let key = Zeroizing::new(BASE64_STANDARD.encode(&plane.key[..]));
        let detail = json!({ "private_key": &*key, "inside": plane.inside, "places": places });
        let socket = plane.socket.as_fd().try_clone_to_owned()?;
        let tun = plane.tun.try_clone()?;
        let descriptors = vec![("tun".to_owned(), tun), ("udp".to_owned(), socket)];
        Ok(Some(Passed { detail, descriptors }))
    }

    /// Continues the data plane of another process.
    pub(crate) fn go_on(&self, mut handed: Passed) -> Result<(), String> {
        let detail = handed.detail.clone();
        self.take_handed(&mut handed)?;
        let state = self.state.lock();
        let Some(engine) = &state.engine else { return Ok(()) };
        for (id, place) in detail.get("places").and_then(Value::as_object).into_iter().flatten() {
            if let Some(place) = place.as_str().and_then(|place| place.parse::<SocketAddr>().ok()) {
                engine.place(id, place);
            }
        }
        Ok(())
    }

    fn take_handed(&self, handed: &mut Passed) -> Result<Value, String> {
        let text = handed.detail.get("private_key").and_then(Value::as_str).unwrap_or_default();
        let bytes = BASE64_STANDARD.decode(text).map(Zeroizing::new);
        let bytes = bytes.map_err(|_| "the private key is not base64".to_owned())?;
        let key = PrivateKey::from_bytes(&bytes).map_err(|error| error.to_string())?;
        let inside = handed.detail.get("inside").and_then(Value::as_str).unwrap_or_default().to_owned();
        let tun = handed.descriptor("tun")?;
        let socket = if handed.has("udp") { Some(handed.descriptor("udp")?.into()) } else { None };
        handed.finish()?;
        // Ending and starting threads takes microseconds and waits for nothing.
        self.start(key, tun.into(), socket, inside)
    }

    /// Returns the figures for the metrics; `None` before the first data plane.
    fn figures(&self) -> Option<Figures> {
        let state = self.state.lock();
        if state.engine.is_none() && state.failures == 0 {
            return None;
        }
        Some(Figures {
            running: state.plane.as_ref().is_some_and(|plane| plane.threads.is_running()),
            peers: state.peers.len(),
            failures: state.failures,
            counters: state.engine.as_ref().map(|engine| engine.stats().snapshot()).unwrap_or_default(),
        })
    }
}

struct Figures {
    running: bool,
    peers: usize,
    failures: u64,
    counters: peerpod_wireguard::Snapshot,
}

fn describe(plane: &Plane) -> Value {
    let key = plane.threads.engine().public_key().to_string();
    json!({ "key": key, "port": plane.port, "inside": plane.inside })
}

fn config(id: &SandboxId, peer: &TunnelPeer) -> Result<PeerConfig, String> {
    let key = PublicKey::from_bytes(&peer.key).map_err(|error| error.to_string())?;
    if peer.vnis.is_empty() || peer.vnis.len() > MAX_VNIS {
        return Err(format!("{} VXLAN networks; 1 to {MAX_VNIS} are allowed", peer.vnis.len()));
    }
    if peer.inner == NODE_INNER || peer.inner.octets()[0] != NODE_INNER.octets()[0] {
        return Err(format!("{} is not an inner address of a VM", peer.inner));
    }
    let (theirs, port, vnis) = (peer.inner, peer.vxlan_port, peer.vnis.clone());
    let lane = Lane { ours: NODE_INNER, theirs, port, vnis, fragments: false };
    let name = id.to_string();
    Ok(PeerConfig { name, key, lane, endpoints: Vec::new(), keepalive: None })
}

#[async_trait]
impl Kind for WireGuard {
    fn name(&self) -> &'static str {
        "wireguard"
    }

    async fn held(&self, sandbox: Option<&SandboxId>) -> Option<Value> {
        if sandbox.is_some() {
            return None;
        }
        let mut state = self.state.lock();
        // The node asks every second, and so detects a failed data plane soon.
        state.keep_counters();
        state.plane.as_ref().map(describe)
    }

    /// Duplicates the TUN device, by which another node process finds the private namespace.
    fn copies(&self, names: &[String]) -> io::Result<Vec<(String, OwnedFd)>> {
        let state = self.state.lock();
        let running = state.plane.as_ref().filter(|plane| plane.threads.is_running());
        match running.filter(|_| names.iter().any(|name| name == "tun")) {
            Some(plane) => Ok(vec![("tun".to_owned(), plane.tun.try_clone()?)]),
            None => Ok(Vec::new()),
        }
    }

    async fn take(&self, sandbox: Option<&SandboxId>, mut handed: Passed) -> Result<Value, String> {
        if sandbox.is_some() {
            return Err("the encrypted tunnel belongs to the node, not to a sandbox".to_owned());
        }
        self.take_handed(&mut handed)
    }
}

#[derive(Clone)]
pub(crate) struct WireGuardCollector(pub(crate) Arc<WireGuard>);

impl std::fmt::Debug for WireGuardCollector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WireGuard").finish_non_exhaustive()
    }
}

impl Collector for WireGuardCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let Some(Figures { running, peers, failures, counters }) = self.0.figures() else { return Ok(()) };
        for (name, help, value) in [
            ("wireguard_running", "1 while the encrypted tunnel's data plane runs", i64::from(running)),
            ("wireguard_peers", "Guests of the encrypted tunnel", i64::try_from(peers).unwrap_or(i64::MAX)),
        ] {
            let gauge = ConstGauge::new(value);
            let metric = encoder.encode_descriptor(name, help, None, gauge.metric_type())?;
            gauge.encode(metric)?;
        }
        for (name, help, value) in [
            ("wireguard_failures", "Times the encrypted tunnel's data plane ended by itself", failures),
            ("wireguard_handshakes", "Handshakes with guests that were completed", counters.handshakes),
            ("wireguard_cookies", "Handshakes answered with a cookie", counters.cookies),
            ("wireguard_roams", "Address changes of guests", counters.roams),
            ("wireguard_bytes_to_guest", "Bytes encrypted for guests", counters.bytes_sent),
            ("wireguard_bytes_from_guest", "Bytes decrypted from guests", counters.bytes_received),
            ("wireguard_packets_to_guest", "Packets encrypted for guests", counters.packets_sent),
            ("wireguard_packets_from_guest", "Packets decrypted from guests", counters.packets_received),
        ] {
            let counter = ConstCounter::new(value);
            let metric = encoder.encode_descriptor(name, help, None, counter.metric_type())?;
            counter.encode(metric)?;
        }
        let help = "Packets of the encrypted tunnel that were dropped, by reason";
        let mut family = encoder.encode_descriptor(
            "wireguard_dropped",
            help,
            None,
            ConstCounter::new(0u64).metric_type(),
        )?;
        for (reason, label) in Reason::ALL {
            let labels = [("reason", label)];
            ConstCounter::new(counters.dropped(reason)).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
