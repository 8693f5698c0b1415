//! The encrypted tunnel's data plane: what the node handed in (a TUN device, a UDP socket, a key) and the peers that
//! sandboxes' records name, put together. The packets are carried by threads of their own, never by those of the
//! links. The node's private key is held in memory alone: another relay process gets it with the descriptors.

use std::{
    collections::HashMap,
    net::UdpSocket,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use async_trait::async_trait;
use base64::{Engine as _, prelude::BASE64_STANDARD};
use peerpod_wireguard::{
    DataPlane, Engine, Lane, NODE_INNER, PeerConfig, PrivateKey, PublicKey, Reason, Tun,
};
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{counter::ConstCounter, gauge::ConstGauge},
};
use serde_json::{Value, json};
use zeroize::Zeroizing;

use crate::{
    handin::{Handed, Kind},
    id::SandboxId,
    store::TunnelPeer,
};

/// The word in the hand-in's header.
const KIND: &str = "wireguard";
/// VXLAN networks of one pod: one for each of its interfaces.
const MAX_VNIS: usize = 64;

#[derive(Default)]
struct State {
    plane: Option<Plane>,
    /// By sandbox; also while there is no data plane.
    peers: HashMap<SandboxId, PeerConfig>,
}

struct Plane {
    threads: DataPlane,
    /// Kept for a node that hands in another device: the port is taken, by us.
    socket: UdpSocket,
    port: u16,
    /// Which namespace the device is in, in the node's words.
    inside: String,
}

/// The data plane and its peers.
#[derive(Default)]
pub(crate) struct WireGuard {
    state: Mutex<State>,
}

impl WireGuard {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Each step leaves it usable.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a sandbox's guest a peer, or with `None` none. Again it changes nothing.
    pub(crate) fn put(&self, id: &SandboxId, peer: Option<&TunnelPeer>) -> Result<(), String> {
        let Some(peer) = peer else {
            self.delete(id);
            return Ok(());
        };
        let config = config(id, peer)?;
        let mut state = self.lock();
        let taken = |other: &PeerConfig| other.key == config.key || other.lane.theirs == config.lane.theirs;
        if let Some((other, _)) = state.peers.iter().find(|(other, known)| *other != id && taken(known)) {
            return Err(format!("key or inner address belong to sandbox {other} already"));
        }
        if let Some(plane) = &state.plane {
            plane.threads.engine().put_peer(&config).map_err(|error| error.to_string())?;
        }
        state.peers.insert(id.clone(), config);
        Ok(())
    }

    /// Forgets a sandbox's guest.
    pub(crate) fn delete(&self, id: &SandboxId) {
        let mut state = self.lock();
        if state.peers.remove(id).is_some()
            && let Some(plane) = &state.plane
        {
            plane.threads.engine().remove_peer(&id.to_string());
        }
    }

    /// Starts the threads, instead of those that run. Blocks until these have ended.
    fn start(
        &self,
        key: PrivateKey,
        tun: Tun,
        socket: Option<UdpSocket>,
        inside: String,
    ) -> Result<Value, String> {
        let unusable = |error| format!("the UDP socket: {error}");
        let mut state = self.lock();
        let held =
            state.plane.as_ref().map(|plane| plane.socket.try_clone()).transpose().map_err(unusable)?;
        let socket = socket.or(held).ok_or("there is no UDP socket yet")?;
        let port = peerpod_wireguard::port_of(&socket).map_err(unusable)?;
        let kept = socket.try_clone().map_err(unusable)?;
        // The same node handed in anew: its sessions go on.
        let before = state.plane.take().map(|plane| plane.threads.engine().clone());
        let engine = before.filter(|engine| engine.public_key() == key.public());
        let engine = engine.unwrap_or_else(|| Arc::new(Engine::new(key)));
        for (id, config) in &state.peers {
            if let Err(error) = engine.put_peer(config) {
                tracing::error!(sandbox = %id, %error, "guest is no peer of the encrypted tunnel");
            }
        }
        let threads =
            DataPlane::start(engine, tun, socket, "wireguard").map_err(|error| error.to_string())?;
        tracing::info!(port, peers = state.peers.len(), "the encrypted tunnel's data plane runs");
        let plane = Plane { threads, socket: kept, port, inside };
        let detail = describe(&plane);
        state.plane = Some(plane);
        Ok(detail)
    }

    /// What there is to see, when there is a data plane.
    fn figures(&self) -> Option<Figures> {
        let state = self.lock();
        let plane = state.plane.as_ref()?;
        let engine = plane.threads.engine();
        Some(Figures {
            running: plane.threads.is_running(),
            peers: engine.peers(),
            counters: engine.stats().snapshot(),
        })
    }
}

struct Figures {
    running: bool,
    peers: usize,
    counters: peerpod_wireguard::Snapshot,
}

fn describe(plane: &Plane) -> Value {
    let key = plane.threads.engine().public_key().to_string();
    json!({ "key": key, "port": plane.port, "inside": plane.inside })
}

fn config(id: &SandboxId, peer: &TunnelPeer) -> Result<PeerConfig, String> {
    let key = PublicKey::from_bytes(&peer.key).map_err(|error| error.to_string())?;
    if peer.vnis.is_empty() || peer.vnis.len() > MAX_VNIS {
        return Err(format!("{} VXLAN networks; 1 to {MAX_VNIS} make sense", peer.vnis.len()));
    }
    if peer.inner == NODE_INNER || peer.inner.octets()[0] != NODE_INNER.octets()[0] {
        return Err(format!("{} is no inner address of a VM", peer.inner));
    }
    let lane = Lane { ours: NODE_INNER, theirs: peer.inner, port: peer.vxlan_port, vnis: peer.vnis.clone() };
    let name = id.to_string();
    Ok(PeerConfig { name, key, lane, endpoints: Vec::new(), keepalive: None })
}

#[async_trait]
impl Kind for WireGuard {
    fn name(&self) -> &'static str {
        KIND
    }

    async fn held(&self, sandbox: Option<&SandboxId>) -> Option<Value> {
        if sandbox.is_some() {
            return None;
        }
        let state = self.lock();
        // One whose device is gone holds nothing that is of use.
        let plane = state.plane.as_ref().filter(|plane| plane.threads.is_running())?;
        Some(describe(plane))
    }

    async fn take(&self, sandbox: Option<&SandboxId>, mut handed: Handed) -> Result<Value, String> {
        if sandbox.is_some() {
            return Err("the encrypted tunnel is the node's, not a sandbox's".to_owned());
        }
        let text = handed.detail.get("private_key").and_then(Value::as_str).unwrap_or_default();
        let bytes = BASE64_STANDARD.decode(text).map(Zeroizing::new);
        let bytes = bytes.map_err(|_| "the private key is not base64".to_owned())?;
        let key = PrivateKey::from_bytes(&bytes).map_err(|error| error.to_string())?;
        let inside = handed.detail.get("inside").and_then(Value::as_str).unwrap_or_default().to_owned();
        let tun = handed.descriptor("tun")?;
        let socket = if handed.has("udp") { Some(handed.descriptor("udp")?.into()) } else { None };
        handed.finish()?;
        // Ends threads and starts others: microseconds, and they do not wait for anything.
        self.start(key, tun.into(), socket, inside)
    }
}

/// Shows the counters to the metrics' registry.
#[derive(Clone)]
pub(crate) struct Shown(pub(crate) Arc<WireGuard>);

impl std::fmt::Debug for Shown {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WireGuard").finish_non_exhaustive()
    }
}

impl Collector for Shown {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let Some(Figures { running, peers, counters }) = self.0.figures() else { return Ok(()) };
        for (name, help, value) in [
            ("wireguard_running", "1 while the encrypted tunnel's data plane runs", i64::from(running)),
            ("wireguard_peers", "Guests of the encrypted tunnel", i64::try_from(peers).unwrap_or(i64::MAX)),
        ] {
            let gauge = ConstGauge::new(value);
            let metric = encoder.encode_descriptor(name, help, None, gauge.metric_type())?;
            gauge.encode(metric)?;
        }
        for (name, help, value) in [
            ("wireguard_handshakes", "Handshakes with guests that were completed", counters.handshakes),
            ("wireguard_cookies", "Handshakes put off with a cookie", counters.cookies),
            ("wireguard_roams", "Times a guest was found at another address", counters.roams),
            ("wireguard_bytes_to_guest", "Bytes sealed for guests", counters.bytes_sent),
            ("wireguard_bytes_from_guest", "Bytes of guests that came out", counters.bytes_received),
            ("wireguard_packets_to_guest", "Packets sealed for guests", counters.packets_sent),
            ("wireguard_packets_from_guest", "Packets of guests that came out", counters.packets_received),
        ] {
            let counter = ConstCounter::new(value);
            let metric = encoder.encode_descriptor(name, help, None, counter.metric_type())?;
            counter.encode(metric)?;
        }
        let help = "Packets of the encrypted tunnel that went no further, by reason";
        let mut family = encoder.encode_descriptor(
            "wireguard_dropped",
            help,
            None,
            ConstCounter::new(0u64).metric_type(),
        )?;
        for reason in Reason::ALL {
            let labels = [("reason", reason.label())];
            ConstCounter::new(counters.dropped(reason)).encode(family.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(text: &str) -> SandboxId {
        SandboxId::parse(text).unwrap()
    }

    fn peer(last: u8) -> TunnelPeer {
        TunnelPeer {
            key: vec![last; 32],
            inner: [10, 0, 1, last].into(),
            vnis: vec![256 + u32::from(last)],
            vxlan_port: 4789,
        }
    }

    #[test]
    fn a_peer_waits_for_the_data_plane_and_belongs_to_one_sandbox() {
        let plane = WireGuard::default();
        plane.put(&id("a"), Some(&peer(2))).unwrap();
        plane.put(&id("a"), Some(&peer(2))).unwrap();
        let error = plane.put(&id("b"), Some(&peer(2))).unwrap_err();
        assert!(error.contains("sandbox a"), "{error}");
        plane.put(&id("b"), Some(&peer(3))).unwrap();
        assert!(plane.figures().is_none());
        plane.delete(&id("a"));
        plane.put(&id("b"), Some(&peer(2))).unwrap();
        plane.put(&id("b"), None).unwrap();
        assert!(plane.lock().peers.is_empty());
    }

    #[test]
    fn a_peer_that_makes_no_sense_is_refused() {
        let plane = WireGuard::default();
        for wrong in [
            TunnelPeer { key: vec![1; 31], ..peer(2) },
            TunnelPeer { key: vec![0; 32], ..peer(2) },
            TunnelPeer { vnis: vec![], ..peer(2) },
            TunnelPeer { inner: NODE_INNER, ..peer(2) },
            TunnelPeer { inner: [192, 0, 2, 1].into(), ..peer(2) },
        ] {
            plane.put(&id("a"), Some(&wrong)).unwrap_err();
        }
    }
}
