//! Sets up the encrypted tunnel for the network's figures. It uses the node's real steps, and runs both data planes in
//! this process as the relay and the guest run them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use peerpod_node::tunnel::{FdHandoff, Netns, Tunnel, TunnelConfig, TunnelKind, WireguardConfig, inspect};
use peerpod_podnet::guest;
use peerpod_podnet::wireguard::Inner;
use peerpod_proto::guest::NetworkPlan;
use peerpod_wireguard::{
    DataPlane, Engine, Lane, NODE_INNER, OVERHEAD_V4, PeerConfig, PrivateKey, bind, inner_of,
};
use peerpod_world::{Namespace, World};
use serde_json::{Value, json};

/// Bytes that VXLAN adds inside the tunnel.
const VXLAN: u32 = 50;

/// Both data planes; drop ends them.
pub(crate) struct Encrypted {
    _node: DataPlane,
    _guest: DataPlane,
    _tunnel: Tunnel,
}

/// Gives the pod (its namespace on the node) an encrypted tunnel to `podns`. `vm` is the VM's own namespace.
/// `node` is the node's address as the VM reaches it, `vm_address` the VM's address as the node reaches it. `mtu` is
/// the path MTU between them.
pub(crate) fn connect(
    world: &World,
    (pod, id): (&Netns, &str),
    (vm, podns): (&Namespace, &Namespace),
    (node, vm_address): (std::net::Ipv4Addr, std::net::Ipv4Addr),
    mtu: u32,
) -> anyhow::Result<Encrypted> {
    let folder = world.folder().join("encrypted");
    let wireguard = WireguardConfig {
        port: 0,
        key_dir: folder.clone(),
        netns: folder.join("node.netns"),
        relay: folder.join("relay-fds.sock"),
    };
    let config =
        TunnelConfig { kind: TunnelKind::Wireguard, wireguard: Some(wireguard), ..TunnelConfig::default() };
    let tunnel = world.node().run(|| Tunnel::open(config))??;
    let wireguard = tunnel.wireguard().context("the encrypted kind is there")?;
    let seen = inspect(pod)?;
    let reserved = tunnel.reserve(pod, id, &seen, false, None)?;
    let vni = reserved.vni().context("a pod has an interface")?;
    let inner = inner_of(vni).context("an inner address")?;

    // The relay's part.
    let FdHandoff { detail, descriptors } = wireguard.wanted(None)?.context("no program carries it yet")?;
    let mut fds = descriptors.into_iter().map(|(_, fd)| fd);
    let (tun, socket) = (fds.next().context("a TUN device")?, fds.next().context("a socket")?);
    let socket = std::net::UdpSocket::from(socket);
    let port = socket.local_addr()?.port();
    wireguard.taken(&json!({ "port": port }));
    let node_key = key_of(&detail)?;
    let guest_key = PrivateKey::generate()?;
    let lane = |ours, theirs| {
        let fragments = ours != NODE_INNER;
        Lane { ours, theirs, port: reserved.port, vnis: vec![vni], fragments }
    };
    let peer = |name: &str, key: &PrivateKey, lane, endpoints| PeerConfig {
        name: name.to_owned(),
        key: key.public(),
        lane,
        endpoints,
        keepalive: Some(Duration::from_secs(15)),
    };
    let engine = Arc::new(Engine::new(node_key.clone()));
    engine.put_peer(&peer("pod", &guest_key, lane(NODE_INNER, inner), Vec::new()))?;
    let node_plane = DataPlane::start(engine, tun.into(), socket, "bench-node", || ())?;

    // The guest's part.
    let opened = Inner::open(&folder.join("vm.netns"), None, inner, mtu - OVERHEAD_V4)?;
    let socket = vm.run(|| bind(0))??;
    let engine = Arc::new(Engine::new(guest_key));
    let endpoint = SocketAddr::from((node, port));
    engine.put_peer(&peer("node", &node_key, lane(inner, NODE_INNER), vec![endpoint]))?;
    let guest_plane =
        DataPlane::start(engine, opened.tun.context("a new device")?, socket, "bench-guest", || ())?;
    let (plan, _) = tunnel.connect(pod, id, &reserved, &seen, vm_address.into())?;
    let mut host = opened.inner.netns().netlink()?;
    guest::apply_from(&mut host, &inside(plan), None, &podns.path())?;
    Ok(Encrypted { _node: node_plane, _guest: guest_plane, _tunnel: tunnel })
}

/// Returns the plan as `peerpod-guest` applies it inside the tunnel.
fn inside(mut plan: NetworkPlan) -> NetworkPlan {
    let underlay = plan.underlay.mut_or_insert_default();
    underlay.kind = "vxlan".to_owned();
    underlay.overhead = VXLAN;
    plan
}

fn key_of(detail: &Value) -> anyhow::Result<PrivateKey> {
    let text = detail["private_key"].as_str().context("the key that the relay gets")?;
    Ok(PrivateKey::from_bytes(&BASE64_STANDARD.decode(text)?)?)
}
