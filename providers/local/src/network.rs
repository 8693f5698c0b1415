//! Sets up the simulated cloud networks: bridges in the node's network namespace and a veth into each VM. Uses netlink
//! in the namespace of the calling thread; runs no program.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, BorrowedFd};

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::address::AddressHeaderFlags;
use netlink_packet_route::link::{InfoData, InfoVeth};
use netlink_packet_route::route::RouteProtocol;
use nix::errno::Errno;
use peerpod_podnet::link::{self, Link};
use peerpod_podnet::netlink::{Client, Error as NetlinkError};
use rtnetlink::{AddressMessageBuilder, LinkBridge, LinkUnspec, LinkVeth, RouteMessageBuilder};
use sha2::{Digest, Sha256};

use crate::config::{LocalConfig, LocalNetwork};

/// NICs of a VM, in order.
pub(crate) const VM_LINKS: [&str; 2] = ["eth0", "eth1"];
/// Metric of the second NIC's default routes, which rank behind those of the first, as in many images.
const SECOND_METRIC: u32 = 4000;

/// Failed step and its cause.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Netlink(#[from] peerpod_podnet::Error),
    #[error("bridge {0} exists and is not ours; delete it")]
    Foreign(String),
}

fn at<T>(attempt: impl FnOnce() -> String, result: Result<T, NetlinkError>) -> Result<T, Error> {
    Ok(result.map_err(|source| peerpod_podnet::Error::kernel(attempt())(source))?)
}

/// Opens a netlink socket in the namespace of the calling thread.
pub(crate) fn client() -> Result<Client, Error> {
    at(|| "open a netlink socket".to_owned(), Client::route().map_err(NetlinkError::from))
}

/// Whether this network namespace has IPv6.
pub(crate) fn has_v6() -> bool {
    fs::read_to_string("/proc/sys/net/ipv6/conf/all/disable_ipv6").is_ok_and(|text| text.trim() == "0")
}

/// Creates the bridge of the network with the node's addresses, or finds it. Idempotent.
pub(crate) fn ensure_bridge(config: &LocalConfig, network: &LocalNetwork) -> Result<(), Error> {
    let name = &network.bridge;
    let mut client = client()?;
    let mac = bridge_mac(name);
    // A fixed address. Otherwise it would change when a port with a lower one is added, and break the VMs' neighbour
    // entries.
    let bridge = LinkBridge::new(name).mtu(config.mtu).address(mac.to_vec()).up();
    let made = client.tell(NLM_F_CREATE | NLM_F_EXCL, RouteNetlinkMessage::NewLink(bridge.build()));
    at(|| format!("make bridge {name}"), found(made, Errno::EEXIST))?;
    let Some(bridge) = inspect(&mut client, name)? else {
        return at(
            || format!("find bridge {name}"),
            Err(NetlinkError::Garbled("it is not there".to_owned())),
        );
    };
    if bridge.mac != Some(mac) {
        return Err(Error::Foreign(name.clone()));
    }
    if bridge.mtu != config.mtu {
        let device = LinkUnspec::new_with_index(bridge.index).mtu(config.mtu);
        let told = client.tell(0, RouteNetlinkMessage::SetLink(device.build()));
        at(|| format!("give bridge {name} the MTU {}", config.mtu), told)?;
    }
    for (ip, prefix) in node_addresses(config, network) {
        let told = client.tell(NLM_F_CREATE | NLM_F_EXCL, address(bridge.index, ip, prefix));
        at(|| format!("give bridge {name} the address {ip}"), found(told, Errno::EEXIST))?;
    }
    Ok(())
}

/// Returns the node's addresses on a network, with their prefix lengths.
pub(crate) fn node_addresses(config: &LocalConfig, network: &LocalNetwork) -> Vec<(IpAddr, u8)> {
    let v4 = config.ipv4.then(|| (network.v4(1).into(), network.subnet4.prefix_len()));
    let v6 = has_v6().then(|| (network.v6(1).into(), network.subnet6.prefix_len()));
    v4.into_iter().chain(v6).collect()
}

/// Removes the bridge if it exists and was made by this provider.
pub(crate) fn remove_bridge(name: &str) -> Result<(), Error> {
    let mut client = client()?;
    match inspect(&mut client, name)? {
        Some(bridge) if bridge.mac == Some(bridge_mac(name)) => remove(&mut client, name),
        _ => Ok(()),
    }
}

/// Removes a network device by name. A device that is gone is fine.
pub(crate) fn remove(client: &mut Client, name: &str) -> Result<(), Error> {
    let told = client.tell(0, RouteNetlinkMessage::DelLink(LinkUnspec::new_with_name(name).build()));
    at(|| format!("remove link {name}"), found(told, Errno::ENODEV))
}

/// Returns the names of the node's ends of a VM's veths, whether it has one or two. They contain the hash part of the
/// instance id, so that they are unique on any bridge.
pub(crate) fn host_links(id: &str) -> [String; 2] {
    let hash = id.strip_prefix("local-").unwrap_or(id);
    ["ppl", "ppm"].map(|prefix| format!("{prefix}{}", hash.get(..12).unwrap_or(hash)))
}

/// NIC of a VM.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct LocalNic {
    pub(crate) bridge: String,
    pub(crate) mtu: u32,
    pub(crate) interfaces: Vec<Interface>,
}

/// Creates the veth between a NIC's bridge (in the namespace of `node`) and the namespace `vm`. The end in the node is
/// called `name`, the end in the VM `inside`.
pub(crate) fn plug(
    node: &mut Client,
    nic: &LocalNic,
    name: &str,
    inside: &str,
    vm: BorrowedFd<'_>,
) -> Result<(), Error> {
    let LocalNic { bridge, mtu, .. } = nic;
    let Some(bridge_link) = inspect(node, bridge)? else { return Err(Error::Foreign(bridge.clone())) };
    // Left by an earlier attempt with a namespace that is not torn down yet.
    remove(node, name)?;
    let peer = LinkUnspec::new_with_name(inside).setns_by_fd(vm.as_raw_fd()).mtu(*mtu);
    let pair = LinkVeth::new(name, inside)
        .set_info_data(InfoData::Veth(InfoVeth::Peer(peer.build())))
        .controller(bridge_link.index)
        .mtu(*mtu)
        .up();
    let told = node.tell(NLM_F_CREATE | NLM_F_EXCL, RouteNetlinkMessage::NewLink(pair.build()));
    at(|| format!("make veth {name} on bridge {bridge}"), told)
}

/// Address of a VM with its gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Interface {
    pub(crate) address: IpAddr,
    pub(crate) prefix: u8,
    pub(crate) gateway: IpAddr,
}

/// Configures the VM's network as DHCP does in a cloud: `lo` and the NICs up, addresses, default routes. Works in the
/// namespace of the calling thread.
pub(crate) fn configure(nics: &[LocalNic]) -> Result<(), Error> {
    let mut client = client()?;
    // `lo` has index 1 in every namespace.
    let mut messages = vec![(0, up(1))];
    for (nic, (name, metric)) in nics.iter().zip(VM_LINKS.into_iter().zip([0, SECOND_METRIC])) {
        let Some(link) = inspect(&mut client, name)? else { return Err(Error::Foreign(name.to_owned())) };
        messages.push((0, up(link.index)));
        for interface in &nic.interfaces {
            messages.push((NLM_F_CREATE, address(link.index, interface.address, interface.prefix)));
            messages.push((NLM_F_CREATE, default_route(link.index, interface.gateway, metric)));
        }
    }
    let answers = at(|| "set up the NICs".to_owned(), client.batch(&messages))?;
    for (step, answer) in answers.into_iter().enumerate() {
        at(|| format!("set up the NICs, step {step}"), answer.map_err(NetlinkError::from))?;
    }
    Ok(())
}

fn inspect(client: &mut Client, name: &str) -> Result<Option<Link>, Error> {
    at(|| format!("look for link {name}"), link::by_name(client, name))
}

/// Returns the MAC address of a bridge. It is locally administered and derived from the name, and identifies the
/// provider's own bridge.
fn bridge_mac(name: &str) -> [u8; 6] {
    let hash = Sha256::digest(name.as_bytes());
    [0x02, b'p', b'p', hash[0], hash[1], hash[2]]
}

fn up(index: u32) -> RouteNetlinkMessage {
    RouteNetlinkMessage::SetLink(LinkUnspec::new_with_index(index).up().build())
}

fn address(index: u32, ip: IpAddr, prefix: u8) -> RouteNetlinkMessage {
    RouteNetlinkMessage::NewAddress(match ip {
        IpAddr::V4(ip) => AddressMessageBuilder::<Ipv4Addr>::new().index(index).address(ip, prefix).build(),
        IpAddr::V6(ip) => {
            let mut message =
                AddressMessageBuilder::<Ipv6Addr>::new().index(index).address(ip, prefix).build();
            // This provider assigned the address; duplicate address detection would add a second to the boot.
            message.header.flags = AddressHeaderFlags::Nodad;
            message
        }
    })
}

fn default_route(index: u32, gateway: IpAddr, metric: u32) -> RouteNetlinkMessage {
    match gateway {
        IpAddr::V4(ip) => by_dhcp(RouteMessageBuilder::<Ipv4Addr>::new().gateway(ip), index, metric),
        IpAddr::V6(ip) => by_dhcp(RouteMessageBuilder::<Ipv6Addr>::new().gateway(ip), index, metric),
    }
}

fn by_dhcp<T>(route: RouteMessageBuilder<T>, index: u32, metric: u32) -> RouteNetlinkMessage {
    let route = route.protocol(RouteProtocol::Dhcp).output_interface(index).priority(metric);
    RouteNetlinkMessage::NewRoute(route.build())
}

/// Treats one errno as success, because the state is already as requested.
fn found(result: Result<(), NetlinkError>, fine: Errno) -> Result<(), NetlinkError> {
    match result {
        Err(error) if error.errno() == Some(fine) => Ok(()),
        other => other,
    }
}

/// Returns the NICs of a VM with this index. The first has the addresses of the VM's record.
pub(crate) fn nics(
    config: &LocalConfig,
    index: u32,
    v4: Option<Ipv4Addr>,
    v6: Option<Ipv6Addr>,
    second: bool,
) -> Vec<LocalNic> {
    let interface = |address: IpAddr, prefix: u8, gateway: IpAddr| Interface { address, prefix, gateway };
    let nic = |network: &LocalNetwork, v4: Option<Ipv4Addr>, v6: Option<Ipv6Addr>| {
        let LocalNetwork { bridge, subnet4, subnet6 } = network;
        let v4 = v4.map(|own| interface(own.into(), subnet4.prefix_len(), network.v4(1).into()));
        let v6 = v6.map(|own| interface(own.into(), subnet6.prefix_len(), network.v6(1).into()));
        LocalNic { bridge: bridge.clone(), mtu: config.mtu, interfaces: v4.into_iter().chain(v6).collect() }
    };
    let mut nics = vec![nic(&config.network, v4, v6)];
    if second {
        let network = &config.second;
        nics.push(nic(network, v4.map(|_| network.v4(index)), v6.map(|_| network.v6(index))));
    }
    nics
}
