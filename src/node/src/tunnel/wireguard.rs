//! Implements the encrypted kind: VXLAN inside WireGuard, which works where the VM is behind a NAT or reached over a
//! public network. The sockets of the VXLAN devices are in a private namespace with a TUN device as the only exit. The
//! relay, which survives this daemon, carries the packets of the TUN device. This module holds the key, the namespace,
//! the relay's descriptors, and the inner address of each VM. It makes anew what other programs delete (`mend`).

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use parking_lot::Mutex;
use peerpod_base::fd_handoff;
use peerpod_podnet::netns::Netns;
use peerpod_podnet::nft::Peer;
use peerpod_podnet::plan::Underlay;
use peerpod_podnet::vxlan::Shape;
use peerpod_podnet::wireguard::{self, Inner, Mended};
use peerpod_podnet::{Error, netlink, tunnel};
use peerpod_proto::guest::{NetworkPlan, WireGuard};
use peerpod_proto::relay::TunnelPeer;
use peerpod_wireguard::{NODE_INNER, OVERHEAD_V4, OVERHEAD_V6, PublicKey, Tun, bind, inner_of};
use serde_json::{Value, json};
use tokio::sync::watch;

use super::Reserved;
use super::backend::{Backend, ConnectedTunnel, Host, VmPath};
use key::Key;

mod key;

/// Name of the encrypted kind in plans and in handoffs.
pub(crate) const KIND: &str = "wireguard";
/// Overhead of the inner VXLAN, over IPv4.
const VXLAN_OVERHEAD: u32 = 50;
/// Path MTU to a VM behind a NAT, to which no route leads: the size that every network carries.
const UNKNOWN_PATH: u32 = 1280;
/// MTU of the TUN device: each VM has a route with the size that fits on its own path.
const DEVICE_MTU: u32 = 65_000;
/// Interval of the guests' keepalives, shorter than the timeout of any NAT.
const KEEPALIVE_SECONDS: u32 = 15;
/// Time that a relay may take to name the device that it carries; it answers at once unless it is stuck.
const RELAY_PATIENCE: Duration = Duration::from_secs(5);

/// Settings of the encrypted tunnel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WireguardConfig {
    /// UDP port of the node; 0: the kernel chooses it, once.
    pub port: u16,
    /// Folder of the key.
    pub key_dir: PathBuf,
    /// The file that the private namespace is bound to.
    pub netns: PathBuf,
    /// Path of `relay-fds.sock`: a relay that carries the tunnel's packets identifies the private namespace.
    pub relay: PathBuf,
}

/// The encrypted kind, which also supplies the relay with the descriptors that it needs.
#[derive(Debug)]
pub struct Wireguard {
    host: Host,
    /// The node's own namespace, for the path to a VM.
    outside: Host,
    inner: Inner,
    config: WireguardConfig,
    vxlan_port: u16,
    key: Key,
    /// Size that fits on each VM's path, by inner address: the existing routes. Locked before `state`.
    routed: Mutex<HashMap<Ipv4Addr, u32>>,
    state: Mutex<State>,
    /// Ticks when guests must use another endpoint of the relay.
    news: watch::Sender<u64>,
}

#[derive(Debug, Default)]
struct State {
    /// The device that this process opened itself; passed again to each relay.
    tun: Option<Tun>,
    /// The relay must receive `tun` even if it reports that it holds a device: this one was made anew.
    owed: bool,
    socket: Option<UdpSocket>,
    port: Option<u16>,
    endpoints: Vec<IpAddr>,
}

/// Descriptors and data that the relay must receive. Without Debug, so that no log shows the key.
pub struct FdHandoff {
    /// Data that accompany the descriptors, with the private key.
    pub detail: Value,
    /// The descriptors with their names.
    pub descriptors: Vec<(String, OwnedFd)>,
}

fn failed(attempt: impl Into<String>) -> impl FnOnce(io::Error) -> Error {
    let attempt = attempt.into();
    move |why| Error::Kernel { attempt, source: netlink::Error::Socket(why) }
}

/// Returns the TUN device that the relay carries; `None` where no relay answers, or it carries none.
fn carried(relay: &Path) -> Option<Tun> {
    match fd_handoff::copy_of(relay, KIND, "tun", RELAY_PATIENCE) {
        Ok(tun) => tun.map(Tun::from),
        Err(fd_handoff::Error::Io { why, .. })
            if matches!(why.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) =>
        {
            None
        }
        Err(error) => {
            tracing::warn!(%error, "peerpod-relay does not report the encrypted tunnel's namespace; the node may make another");
            None
        }
    }
}

impl Wireguard {
    /// Opens it in the network namespace of the calling thread.
    pub(super) fn open(config: &WireguardConfig, vxlan_port: u16) -> Result<Wireguard, Error> {
        let key = Key::open(&config.key_dir)?;
        let opened = Inner::open(&config.netns, carried(&config.relay).as_ref(), NODE_INNER, DEVICE_MTU)?;
        Ok(Wireguard {
            host: Host::new(opened.inner.netns().clone()),
            outside: Host::new(Netns::current()?),
            inner: opened.inner,
            config: config.clone(),
            vxlan_port,
            key,
            routed: Mutex::default(),
            state: Mutex::new(State { tun: opened.tun, ..State::default() }),
            news: watch::Sender::new(0),
        })
    }

    pub(super) fn public_key(&self) -> PublicKey {
        self.key.private.public()
    }

    /// Returns the private namespace, to watch for changes by other programs.
    pub(crate) fn inside(&self) -> &Netns {
        self.inner.netns()
    }

    /// Returns the private namespace's identity, which the relay repeats while it carries the packets of this one.
    fn inside_id(&self) -> String {
        let id = self.inner.netns().id();
        format!("{}:{}", id.dev, id.inode)
    }

    /// Repairs the private namespace, and compares it with the state that the relay reports. Returns the descriptors
    /// that the relay must receive instead, or `None` where its state is right. Fails if another program holds the
    /// device or the port. Blocks.
    pub fn wanted(&self, held: Option<&Value>) -> Result<Option<FdHandoff>, Error> {
        self.mend(&self.routed.lock())?;
        let text = |field: &str| held.and_then(|held| held.get(field)).and_then(Value::as_str);
        let same =
            text("key") == Some(&self.public_key().to_string()) && text("inside") == Some(&self.inside_id());
        if same && !self.state.lock().owed {
            self.carried(held.unwrap_or(&Value::Null));
            return Ok(None);
        }
        let mut state = self.state.lock();
        if state.tun.is_none() {
            state.tun = Inner::open(&self.config.netns, None, NODE_INNER, DEVICE_MTU)?.tun;
        }
        let copy = |fd: std::os::fd::BorrowedFd<'_>| {
            fd.try_clone_to_owned().map_err(failed("copy a descriptor of the encrypted tunnel"))
        };
        let Some(tun) = &state.tun else {
            let why = "another process, not a relay of this node, holds it";
            let attempt = format!("open the TUN device in {}", self.config.netns.display());
            return Err(failed(attempt)(io::Error::new(io::ErrorKind::ResourceBusy, why)));
        };
        let mut descriptors = vec![("tun".to_owned(), copy(tun.as_fd())?)];
        if state.socket.is_none() {
            match self.socket() {
                Ok(socket) => state.socket = Some(socket),
                // The relay has the socket, from an earlier node process.
                Err(e) if e.kind() == io::ErrorKind::AddrInUse && held.is_some() => {}
                Err(e) => return Err(failed(self.no_port())(e)),
            }
        }
        if let Some(socket) = &state.socket {
            descriptors.push(("udp".to_owned(), copy(socket.as_fd())?));
        }
        let private = self.key.private.expose();
        let detail =
            json!({ "private_key": BASE64_STANDARD.encode(private.as_slice()), "inside": self.inside_id() });
        Ok(Some(FdHandoff { detail, descriptors }))
    }

    /// Restores state that other programs deleted: the namespace's name, the device, its address, routes to VMs.
    fn mend(&self, routed: &HashMap<Ipv4Addr, u32>) -> Result<(), Error> {
        let Mended { name, device, tun } = self.host.with(|client| self.inner.mend(client, routed))?;
        if name {
            tracing::warn!(path = %self.config.netns.display(), "the encrypted tunnel's namespace had lost its name; the node restored it");
        }
        if device {
            let (device, anew) = (wireguard::DEVICE, tun.is_some());
            tracing::warn!(
                device,
                anew,
                "the encrypted tunnel's device, address or routes were deleted; the node restored them"
            );
        }
        if tun.is_some() {
            let mut state = self.state.lock();
            (state.tun, state.owed) = (tun, true);
        }
        Ok(())
    }

    /// Records that the relay took the descriptors, and the state that it reported then.
    pub fn taken(&self, held: &Value) {
        self.state.lock().owed = false;
        self.carried(held);
    }

    /// Records the port that the relay reported.
    fn carried(&self, held: &Value) {
        let port = held.get("port").and_then(Value::as_u64).and_then(|port| u16::try_from(port).ok());
        if let Some(port) = port
            && let Err(error) = self.key.keep_port(port)
        {
            tracing::warn!(%error, "cannot record the encrypted tunnel's port; after a restart, guests may use a wrong port");
            // Guests must not receive a port that a restart would forget.
            if self.config.port == 0 {
                return;
            }
        }
        let before = std::mem::replace(&mut self.state.lock().port, port);
        if before != port {
            self.news.send_modify(|count| *count += 1);
        }
    }

    /// Returns the configured port, or else the one that was chosen once: guests know it. 0: none was chosen yet.
    fn port(&self) -> u16 {
        match self.config.port {
            0 => self.key.port().unwrap_or_default(),
            port => port,
        }
    }

    fn socket(&self) -> io::Result<UdpSocket> {
        let port = self.port();
        let socket = self.outside.netns().run(|| bind(port)).and_then(|opened| opened)?;
        socket.local_addr()?;
        Ok(socket)
    }

    fn no_port(&self) -> String {
        match (self.config.port, self.port()) {
            (0, 0) => {
                "open a UDP port for the encrypted tunnel; set tunnel.wireguard-port to a free one".into()
            }
            (0, port) => format!(
                "open UDP port {port} for the encrypted tunnel, which the kernel chose earlier and guests \
                 use; free it, or set tunnel.wireguard-port"
            ),
            (port, _) => format!(
                "open UDP port {port} for the encrypted tunnel; set tunnel.wireguard-port to a free one"
            ),
        }
    }

    /// Sets the node's addresses at which guests find the relay, best first. Another order is no change.
    pub(crate) fn found_at(&self, addresses: Vec<IpAddr>) {
        let set = |addresses: &[IpAddr]| addresses.iter().copied().collect::<BTreeSet<_>>();
        let mut state = self.state.lock();
        if set(&state.endpoints) != set(&addresses) {
            state.endpoints = addresses;
            drop(state);
            self.news.send_modify(|count| *count += 1);
        }
    }

    /// Receiver that ticks when the plans of encrypted tunnels change: another port or address of the node.
    pub(super) fn news(&self) -> watch::Receiver<u64> {
        self.news.subscribe()
    }

    /// Returns the guest's end, in the form for the relay.
    pub(super) fn peer(reserved: &Reserved, key: &[u8]) -> Option<TunnelPeer> {
        let inner = inner_of(reserved.vni()?)?;
        Some(TunnelPeer {
            key: key.to_vec(),
            inner_address: inner.to_string(),
            vnis: reserved.devices.iter().map(|device| device.vni).collect(),
            vxlan_port: reserved.port.into(),
            ..TunnelPeer::default()
        })
    }

    fn inner_of(reserved: &Reserved, vm: IpAddr) -> Result<Ipv4Addr, Error> {
        reserved.vni().and_then(inner_of).ok_or_else(|| Error::Path {
            peer: vm,
            why: "its VNI has no address inside the encrypted tunnel".to_owned(),
        })
    }
}

/// Returns the overhead of the path to the VM below VXLAN.
fn outer_overhead(vm: IpAddr) -> u32 {
    if vm.is_ipv6() { OVERHEAD_V6 } else { OVERHEAD_V4 }
}

impl Backend for Wireguard {
    fn host(&self) -> &Host {
        &self.host
    }

    fn shape(&self, _v6: bool) -> Shape {
        // The inner network is always IPv4, independent of the outer one.
        Shape { port: self.vxlan_port, v6: false, udp_checksum: false }
    }

    fn source_ports(&self) -> Option<(u16, u16)> {
        None
    }

    fn path(&self, reserved: &Reserved, vm: IpAddr) -> Result<VmPath, Error> {
        let inner = Wireguard::inner_of(reserved, vm)?;
        let shape = Shape { v6: vm.is_ipv6(), ..self.shape(false) };
        let (node, outer) = match self.outside.with(|client| tunnel::path(client, shape, vm)) {
            Ok(path) => (path.source, path.mtu + shape.overhead()),
            // Behind a NAT: the guest finds the node.
            Err(Error::Path { .. }) => {
                let known = self.state.lock().endpoints.first().copied();
                (known.unwrap_or(IpAddr::V4(NODE_INNER)), UNKNOWN_PATH)
            }
            Err(e) => return Err(e),
        };
        let mtu = outer.saturating_sub(outer_overhead(vm) + VXLAN_OVERHEAD);
        Ok(VmPath { remote: inner.into(), local: NODE_INNER.into(), node, mtu })
    }

    fn admit(&self, connected: &ConnectedTunnel) -> Result<(), Error> {
        let inner = Wireguard::inner_of(&connected.reserved, connected.vm)?;
        let mtu = self.path(&connected.reserved, connected.vm)?.mtu + VXLAN_OVERHEAD;
        let mut routed = self.routed.lock();
        routed.insert(inner, mtu);
        match self.inner.fit(inner, mtu) {
            // Another program deleted the device just now; the repair restores all routes, including this one.
            Err(e) if e.is_gone() => self.mend(&routed),
            fitted => fitted,
        }
    }

    fn dismiss(&self, reserved: Option<&Reserved>, _vm: Option<IpAddr>) -> Result<(), Error> {
        let Some(inner) = reserved.and_then(Reserved::vni).and_then(inner_of) else { return Ok(()) };
        let mut routed = self.routed.lock();
        self.inner.unfit(inner)?;
        routed.remove(&inner);
        Ok(())
    }

    fn reconcile(&self, connected: &[ConnectedTunnel], _stay: &[Peer]) -> Result<usize, Error> {
        for connected in connected {
            self.admit(connected)?;
        }
        Ok(0)
    }

    fn underlay(&self, connected: &ConnectedTunnel, path: &VmPath) -> Underlay {
        Underlay {
            node: path.local,
            vm: Some(path.remote),
            port: connected.reserved.port,
            udp_checksum: false,
            overhead: outer_overhead(connected.vm) + VXLAN_OVERHEAD,
        }
    }

    fn finish(&self, plan: &mut NetworkPlan, path: &VmPath) -> Result<(), Error> {
        let state = self.state.lock();
        let port = state.port.ok_or_else(|| Error::Path {
            peer: path.remote,
            why: "peerpod-relay does not run the encrypted tunnel yet; start peerpod-relay".to_owned(),
        })?;
        let mut addresses = vec![path.node];
        addresses.extend(state.endpoints.iter().filter(|address| **address != path.node));
        let endpoints = addresses.into_iter().map(|ip| SocketAddr::new(ip, port).to_string()).collect();
        let underlay = plan.underlay.mut_or_insert_default();
        underlay.kind = KIND.to_owned();
        underlay.wireguard = Some(WireGuard {
            node_key: self.public_key().as_bytes().to_vec(),
            endpoints,
            keepalive_seconds: KEEPALIVE_SECONDS,
            ..WireGuard::default()
        })
        .into();
        Ok(())
    }
}

/// Returns the path that names the private namespace.
pub(crate) fn netns_in(run_dir: &Path) -> PathBuf {
    run_dir.join("wireguard.netns")
}
