//! The "cloud network": a bridge in the node's network namespace and a veth into each VM. Speaks netlink in the
//! namespace of the calling thread; runs no program.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, BorrowedFd};

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::address::{AddressAttribute, AddressHeaderFlags, AddressMessage};
use netlink_packet_route::link::{
    InfoData, InfoKind, InfoVeth, LinkAttribute, LinkFlags, LinkInfo, LinkMessage,
};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use nix::errno::Errno;
use peerpod_link::net::netlink::{Client, Error as NetlinkError};
use sha2::{Digest, Sha256};

use crate::config::LocalConfig;

/// MTU of the cloud network.
const MTU: u32 = 1500;
/// The VM's end of its veth.
pub(crate) const VM_LINK: &str = "eth0";

/// What stood in the way, and at which step.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("{attempt}: {source}")]
    Netlink { attempt: String, source: NetlinkError },
    #[error("bridge {0} exists and is not ours; set provider.local.bridge to another name")]
    Foreign(String),
}

fn at<T>(attempt: impl FnOnce() -> String, result: Result<T, NetlinkError>) -> Result<T, Error> {
    result.map_err(|source| Error::Netlink { attempt: attempt(), source })
}

/// A socket to the kernel, in the namespace of the calling thread.
pub(crate) fn client() -> Result<Client, Error> {
    at(|| "open a netlink socket".to_owned(), Client::route().map_err(NetlinkError::from))
}

/// Whether this network namespace has IPv6.
pub(crate) fn has_v6() -> bool {
    fs::read_to_string("/proc/sys/net/ipv6/conf/all/disable_ipv6").is_ok_and(|text| text.trim() == "0")
}

/// Makes the bridge with the node's addresses, or finds it. Idempotent.
pub(crate) fn ensure_bridge(config: &LocalConfig) -> Result<(), Error> {
    let name = &config.bridge;
    let mut client = client()?;
    let mac = bridge_mac(name);
    let mut message = LinkMessage::default();
    message.header.flags = LinkFlags::Up;
    message.header.change_mask = LinkFlags::Up;
    message.attributes = vec![
        LinkAttribute::IfName(name.clone()),
        LinkAttribute::Mtu(MTU),
        // Its own, or it would change whenever a port with a lower one comes, under the VMs' neighbour entries.
        LinkAttribute::Address(mac.to_vec()),
        LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Bridge)]),
    ];
    let made = client.tell(NLM_F_CREATE | NLM_F_EXCL, RouteNetlinkMessage::NewLink(message));
    at(|| format!("make bridge {name}"), found(made, Errno::EEXIST))?;
    let Some(bridge) = look(&mut client, name)? else {
        let source = NetlinkError::Garbled("it is not there".to_owned());
        return Err(Error::Netlink { attempt: format!("find bridge {name}"), source });
    };
    if bridge.mac != mac {
        return Err(Error::Foreign(name.clone()));
    }
    let v4 = IpAddr::from(config.subnet4.address(1));
    let v6 = has_v6().then(|| IpAddr::from(config.subnet6.address(1)));
    let prefixes = [Some((v4, config.subnet4.prefix)), v6.map(|v6| (v6, config.subnet6.prefix))];
    for (ip, prefix) in prefixes.into_iter().flatten() {
        let told = client.tell(NLM_F_CREATE | NLM_F_EXCL, address(bridge.index, ip, prefix));
        at(|| format!("give bridge {name} the address {ip}"), found(told, Errno::EEXIST))?;
    }
    Ok(())
}

/// Removes the bridge if it is there and ours.
pub(crate) fn remove_bridge(name: &str) -> Result<(), Error> {
    let mut client = client()?;
    match look(&mut client, name)? {
        Some(bridge) if bridge.mac == bridge_mac(name) => remove(&mut client, name),
        _ => Ok(()),
    }
}

/// Removes a link by name. Gone is fine.
pub(crate) fn remove(client: &mut Client, name: &str) -> Result<(), Error> {
    let mut message = LinkMessage::default();
    message.attributes = vec![LinkAttribute::IfName(name.to_owned())];
    let told = client.tell(0, RouteNetlinkMessage::DelLink(message));
    at(|| format!("remove link {name}"), found(told, Errno::ENODEV))
}

/// The host's end of a VM's veth. Made of the instance id's hash part, so that it is unique on any bridge.
pub(crate) fn host_link(id: &str) -> String {
    let hash = id.strip_prefix("local-").unwrap_or(id);
    format!("ppl{}", hash.get(..12).unwrap_or(hash))
}

/// Makes the veth between the bridge (in `node`'s namespace) and the namespace `vm`.
pub(crate) fn plug(node: &mut Client, bridge: &str, name: &str, vm: BorrowedFd<'_>) -> Result<(), Error> {
    let Some(bridge_link) = look(node, bridge)? else { return Err(Error::Foreign(bridge.to_owned())) };
    // Left by an earlier attempt whose namespace is not taken apart yet.
    remove(node, name)?;
    let mut peer = LinkMessage::default();
    peer.attributes = vec![
        LinkAttribute::IfName(VM_LINK.to_owned()),
        LinkAttribute::NetNsFd(vm.as_raw_fd()),
        LinkAttribute::Mtu(MTU),
    ];
    let mut message = LinkMessage::default();
    message.header.flags = LinkFlags::Up;
    message.header.change_mask = LinkFlags::Up;
    message.attributes = vec![
        LinkAttribute::IfName(name.to_owned()),
        LinkAttribute::Controller(bridge_link.index),
        LinkAttribute::Mtu(MTU),
        LinkAttribute::LinkInfo(vec![
            LinkInfo::Kind(InfoKind::Veth),
            LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(peer))),
        ]),
    ];
    let told = node.tell(NLM_F_CREATE | NLM_F_EXCL, RouteNetlinkMessage::NewLink(message));
    at(|| format!("make veth {name} on bridge {bridge}"), told)
}

/// One address of a VM with the way out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Interface {
    pub(crate) address: IpAddr,
    pub(crate) prefix: u8,
    pub(crate) gateway: IpAddr,
}

/// What DHCP does in a cloud: `lo` and `eth0` up, addresses, default routes. In the calling thread's namespace.
pub(crate) fn configure(interfaces: &[Interface]) -> Result<(), Error> {
    let mut client = client()?;
    let Some(eth0) = look(&mut client, VM_LINK)? else {
        return Err(Error::Foreign(VM_LINK.to_owned()));
    };
    // `lo` is 1 in every namespace.
    let mut messages = vec![(0, up(1)), (0, up(eth0.index))];
    for interface in interfaces {
        messages.push((NLM_F_CREATE, address(eth0.index, interface.address, interface.prefix)));
        messages.push((NLM_F_CREATE, default_route(eth0.index, interface.gateway)));
    }
    let answers = at(|| format!("set up {VM_LINK}"), client.batch(&messages))?;
    for (step, answer) in answers.into_iter().enumerate() {
        at(|| format!("set up {VM_LINK}, step {step}"), answer.map_err(NetlinkError::from))?;
    }
    Ok(())
}

struct Link {
    index: u32,
    mac: Vec<u8>,
}

fn look(client: &mut Client, name: &str) -> Result<Option<Link>, Error> {
    let mut message = LinkMessage::default();
    message.attributes = vec![LinkAttribute::IfName(name.to_owned())];
    let answer = match client.ask(RouteNetlinkMessage::GetLink(message)) {
        Err(error) if error.is_gone() => return Ok(None),
        other => at(|| format!("look for link {name}"), other)?,
    };
    let RouteNetlinkMessage::NewLink(link) = answer else { return Ok(None) };
    let mac = link.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::Address(mac) => Some(mac.clone()),
        _ => None,
    });
    Ok(Some(Link { index: link.header.index, mac: mac.unwrap_or_default() }))
}

/// Locally administered, the same for the same name: by it we know our bridge again.
fn bridge_mac(name: &str) -> [u8; 6] {
    let hash = Sha256::digest(name.as_bytes());
    [0x02, b'p', b'p', hash[0], hash[1], hash[2]]
}

fn up(index: u32) -> RouteNetlinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.header.flags = LinkFlags::Up;
    message.header.change_mask = LinkFlags::Up;
    RouteNetlinkMessage::SetLink(message)
}

fn address(index: u32, ip: IpAddr, prefix: u8) -> RouteNetlinkMessage {
    let mut message = AddressMessage::default();
    message.header.index = index;
    message.header.prefix_len = prefix;
    message.header.family = if ip.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    if ip.is_ipv6() {
        // We gave it out; waiting a second for nobody to object would be a second of boot.
        message.header.flags = AddressHeaderFlags::Nodad;
    }
    message.attributes = vec![AddressAttribute::Local(ip), AddressAttribute::Address(ip)];
    RouteNetlinkMessage::NewAddress(message)
}

fn default_route(index: u32, gateway: IpAddr) -> RouteNetlinkMessage {
    let (address_family, gateway) = match gateway {
        IpAddr::V4(ip) => (AddressFamily::Inet, RouteAddress::Inet(ip)),
        IpAddr::V6(ip) => (AddressFamily::Inet6, RouteAddress::Inet6(ip)),
    };
    let mut message = RouteMessage::default();
    message.header.address_family = address_family;
    message.header.table = RouteHeader::RT_TABLE_MAIN;
    message.header.protocol = RouteProtocol::Dhcp;
    message.header.scope = RouteScope::Universe;
    message.header.kind = RouteType::Unicast;
    message.attributes = vec![RouteAttribute::Gateway(gateway), RouteAttribute::Oif(index)];
    RouteNetlinkMessage::NewRoute(message)
}

/// Treats one errno as "is so already".
fn found(result: Result<(), NetlinkError>, fine: Errno) -> Result<(), NetlinkError> {
    match result {
        Err(error) if error.errno() == Some(fine) => Ok(()),
        other => other,
    }
}

/// The addresses a VM with this index has.
pub(crate) fn interfaces(config: &LocalConfig, v4: Ipv4Addr, v6: Option<Ipv6Addr>) -> Vec<Interface> {
    let first = Interface {
        address: v4.into(),
        prefix: config.subnet4.prefix,
        gateway: config.subnet4.address(1).into(),
    };
    let second = v6.map(|v6| Interface {
        address: v6.into(),
        prefix: config.subnet6.prefix,
        gateway: config.subnet6.address(1).into(),
    });
    [Some(first), second].into_iter().flatten().collect()
}
