//! Runs the guest's end of the encrypted tunnel: WireGuard between this VM and the relay of its node, and the private
//! namespace that holds the socket of the pod's VXLAN devices.
//!
//! The key is made here at the first start and stored beside the link's key, and only its public half is ever sent.
//! Namespace and device outlive this program: its next run takes them over, and the pod's interfaces stay untouched.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use parking_lot::Mutex;
use peerpod_podnet::netns::Netns;
use peerpod_podnet::underlay::mtus;
use peerpod_podnet::wireguard::{Inner, Opened};
use peerpod_proto::guest::NetworkPlan;
use peerpod_wireguard::{
    DataPlane, Engine, Lane, OVERHEAD_V4, OVERHEAD_V6, PeerConfig, PrivateKey, PublicKey, bind,
};
use tokio::sync::watch;

use crate::files;

/// Name of the tunnel kind in a plan.
pub(crate) const KIND: &str = "wireguard";
/// Name of the kind inside the tunnel.
const INSIDE: &str = "vxlan";
/// Overhead of VXLAN inside, over IPv4.
const VXLAN_OVERHEAD: u32 = 50;
const PEER: &str = "the encrypted tunnel's peer";
const KEY: &str = "tunnel.key";
const NETNS: &str = "tunnel.netns";
const MAX_ENDPOINTS: usize = 16;
/// Path MTU that every network with IPv6 carries.
const LEAST_PATH: u32 = 1280;
/// Path MTU while the kernel knows no route to any address of the node: Ethernet's.
const USUAL_PATH: u32 = 1500;

const HELD: &str =
    "another program of this VM holds the encrypted tunnel's device; is peerpod-guest running twice?";

pub(crate) struct Encrypted {
    dir: PathBuf,
    key: PrivateKey,
    running: Mutex<Option<Running>>,
    ended: watch::Sender<u64>,
}

struct Running {
    ours: Ipv4Addr,
    inner: Inner,
    plane: DataPlane,
}

impl Encrypted {
    /// Reads the key from the existing directory `dir`, or makes one and stores it before its use.
    pub(crate) fn load_or_make(dir: &Path) -> anyhow::Result<Encrypted> {
        let path = dir.join(KEY);
        let stored = files::read(&path, 32).with_context(|| format!("reading {}", path.display()))?;
        let key = match stored.map(|bytes| PrivateKey::from_bytes(&bytes)) {
            Some(Ok(key)) => key,
            damaged => {
                if damaged.is_some() {
                    tracing::warn!(path = %path.display(), "the stored tunnel key is damaged, making another one");
                }
                let key = PrivateKey::generate().context("making the tunnel's key")?;
                let written = files::write(&path, key.expose().as_ref());
                written.with_context(|| format!("writing {}", path.display()))?;
                key
            }
        };
        Ok(Encrypted { dir: dir.to_owned(), key, running: Mutex::new(None), ended: watch::Sender::new(0) })
    }

    /// Returns the number of tunnels that ended by themselves: by an error, a panic, a deleted device.
    pub(crate) fn ended(&self) -> watch::Receiver<u64> {
        self.ended.subscribe()
    }

    pub(crate) fn public_key(&self) -> PublicKey {
        self.key.public()
    }

    /// Starts the tunnel of a plan, unless it runs, and returns the namespace of its inside. Blocks.
    pub(crate) fn make(&self, plan: &NetworkPlan) -> anyhow::Result<Netns> {
        let wanted = Wanted::of(plan).context("the encrypted tunnel in the node's plan")?;
        let mut running = self.running.lock();
        if running.as_ref().is_none_or(|running| running.ours != wanted.ours || !running.plane.is_running()) {
            *running = None; // releases the device
            *running = Some(self.start(&wanted)?);
        }
        let Running { inner, plane, .. } = running.as_ref().context(HELD)?;
        plane.engine().put_peer(&wanted.peer).context(PEER)?;
        self.open(&wanted)?;
        Ok(inner.netns().clone())
    }

    fn open(&self, wanted: &Wanted) -> anyhow::Result<Opened> {
        Inner::open(&self.dir.join(NETNS), None, wanted.ours, wanted.mtu).map_err(anyhow::Error::msg)
    }

    fn start(&self, wanted: &Wanted) -> anyhow::Result<Running> {
        let opened = self.open(wanted)?;
        let tun = opened.tun.context(HELD)?;
        let engine = Engine::new(self.key.clone());
        engine.put_peer(&wanted.peer).context(PEER)?;
        let ended = self.ended.clone();
        let tell = move || ended.send_modify(|times| *times += 1);
        // Any port: the node learns it from received packets.
        let plane =
            bind(0).and_then(|socket| DataPlane::start(Arc::new(engine), tun, socket, "tunnel", tell));
        let plane = plane.context("starting the encrypted tunnel")?;
        tracing::info!(node = %wanted.peer.key, endpoints = ?wanted.peer.endpoints, "the encrypted tunnel runs");
        Ok(Running { ours: wanted.ours, inner: opened.inner, plane })
    }

    /// Begins a handshake after the link was made again: the relay may be another process without a session.
    pub(crate) fn linked(&self) {
        if let Some(running) = &*self.running.lock() {
            running.plane.begin();
        }
    }
}

/// Returns the plan of the tunnel's inside: VXLAN between two inner addresses.
pub(crate) fn inside(plan: &NetworkPlan) -> NetworkPlan {
    let mut inside = plan.clone();
    let underlay = inside.underlay.mut_or_insert_default();
    underlay.kind = INSIDE.to_owned();
    underlay.overhead = VXLAN_OVERHEAD;
    underlay.wireguard.clear();
    inside
}

/// Tunnel of a plan, checked.
struct Wanted {
    ours: Ipv4Addr,
    mtu: u32,
    peer: PeerConfig,
}

impl Wanted {
    fn of(plan: &NetworkPlan) -> anyhow::Result<Wanted> {
        let underlay = plan.underlay.as_ref().context("it has no underlay")?;
        let outside = underlay.wireguard.as_ref().context("it lacks the node's key")?;
        let inner = |text: &str| text.parse::<Ipv4Addr>().context("an inner address is no IPv4 address");
        let (ours, theirs) = (inner(&underlay.vm_address)?, inner(&underlay.node_address)?);
        // Unreadable ones are left out: the others may suffice.
        let endpoints = outside.endpoints.iter().take(MAX_ENDPOINTS).filter_map(|text| text.parse().ok());
        let endpoints: Vec<SocketAddr> = endpoints.collect();
        ensure!(!endpoints.is_empty(), "it names no address of the node");
        let port = u16::try_from(underlay.port).context("the VXLAN port is no port number")?;
        let vnis = plan.interfaces.iter().map(|interface| interface.vni).collect();
        let mtu = inner_mtu(&endpoints, |node| mtus(node).ok().map(|figures| figures.route));
        let peer = PeerConfig {
            name: "node".to_owned(),
            key: PublicKey::from_bytes(&outside.node_key).context("the node's tunnel key")?,
            lane: Lane { ours, theirs, port, vnis, fragments: true },
            endpoints,
            keepalive: Some(Duration::from_secs(outside.keepalive_seconds.into()))
                .filter(|time| !time.is_zero()),
        };
        Ok(Wanted { ours, mtu, peer })
    }
}

/// Returns the MTU inside the tunnel: the least of the paths to the node's addresses, in bytes. `path` is the kernel's MTU
/// of the path to an address.
///
/// An address without a route does not count: a VM has its IPv6 route seconds after its IPv4 route, or never.
fn inner_mtu(endpoints: &[SocketAddr], path: impl Fn(IpAddr) -> Option<u32>) -> u32 {
    let inside = |endpoint: &SocketAddr| {
        let overhead = if endpoint.ip().to_canonical().is_ipv4() { OVERHEAD_V4 } else { OVERHEAD_V6 };
        Some(path(endpoint.ip())?.max(LEAST_PATH).saturating_sub(overhead))
    };
    endpoints.iter().filter_map(inside).min().unwrap_or(USUAL_PATH.saturating_sub(OVERHEAD_V6))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use peerpod_proto::guest::{Interface, Underlay, WireGuard};

    use super::*;
    use crate::files::testing::TempDir;

    fn plan() -> NetworkPlan {
        let wireguard = WireGuard {
            node_key: vec![7; 32],
            endpoints: vec!["127.0.0.1:51820".into(), "nonsense".into()],
            keepalive_seconds: 15,
            ..Default::default()
        };
        let underlay = Underlay {
            kind: KIND.into(),
            node_address: "10.0.0.1".into(),
            vm_address: "10.0.1.2".into(),
            port: 4789,
            overhead: 110,
            wireguard: Some(wireguard).into(),
            ..Default::default()
        };
        let interface = Interface { vni: 258, ..Default::default() };
        NetworkPlan { interfaces: vec![interface], underlay: Some(underlay).into(), ..Default::default() }
    }

    #[test]
    fn the_tunnels_key_is_made_once_and_is_for_root_alone() {
        let dir = TempDir::new();
        let first = Encrypted::load_or_make(dir.path()).unwrap().public_key();
        assert_eq!(Encrypted::load_or_make(dir.path()).unwrap().public_key(), first);
        let path = dir.path().join(KEY);
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        std::fs::write(&path, "short").unwrap();
        assert_ne!(Encrypted::load_or_make(dir.path()).unwrap().public_key(), first);
    }

    #[test]
    fn a_plan_gives_a_tunnel_and_an_inner_plan() {
        let wanted = Wanted::of(&plan()).unwrap();
        assert_eq!(wanted.peer.endpoints, ["127.0.0.1:51820".parse().unwrap()]);
        assert_eq!(wanted.peer.lane.vnis, [258]);
        let inside = inside(&plan()).underlay.unwrap();
        assert_eq!((inside.kind.as_str(), inside.overhead), ("vxlan", 50));
        assert!(inside.wireguard.is_none());
    }

    #[test]
    fn an_address_without_a_route_does_not_narrow_the_tunnel() {
        let endpoints: [SocketAddr; 2] =
            ["10.97.0.1:51820".parse().unwrap(), "[fd97::1]:51820".parse().unwrap()];
        let only_v4 = |node: IpAddr| node.is_ipv4().then_some(1500);
        assert_eq!(inner_mtu(&endpoints, only_v4), 1440);
        assert_eq!(inner_mtu(&endpoints, |_| Some(1500)), 1420);
        assert_eq!(inner_mtu(&endpoints, |node| Some(if node.is_ipv4() { 1500 } else { 1300 })), 1220);
        assert_eq!(inner_mtu(&endpoints, |_| None), 1420);
        // Less than every network carries is nonsense of a peer.
        assert_eq!(inner_mtu(&endpoints, |_| Some(600)), 1200);
    }

    #[test]
    fn an_invalid_plan_is_refused() {
        let cases: [fn(&mut Underlay); 5] = [
            |u| u.wireguard.clear(),
            |u| u.vm_address = "fd00::1".into(),
            |u| u.wireguard.mut_or_insert_default().endpoints.clear(),
            |u| u.wireguard.mut_or_insert_default().node_key = vec![1; 31],
            |u| u.port = 70_000,
        ];
        for spoil in cases {
            let mut plan = plan();
            spoil(plan.underlay.mut_or_insert_default());
            assert!(Wanted::of(&plan).is_err());
        }
    }
}
