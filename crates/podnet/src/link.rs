//! Reads network devices, and the path to another machine, from the kernel.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use netlink_packet_route::link::{
    AfSpecInet, AfSpecInet6, AfSpecUnspec, Inet6DevConf, InetDevConf, InfoData, InfoKind, InfoVxlan,
    LinkAttribute, LinkExtentMask, LinkFlags, LinkInfo, LinkLayerType, LinkMessage,
};
use netlink_packet_route::neighbour::{NeighbourAttribute, NeighbourMessage, NeighbourState};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteMessage, RouteMetric, RouteType, RouteVia,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use nix::errno::Errno;
use rtnetlink::{LinkMessageBuilder, LinkUnspec, LinkVxlan, RouteMessageBuilder};

use super::Error;
use super::netlink::{self, Client};

/// Network device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Link {
    /// Its index.
    pub index: u32,
    pub(crate) name: String,
    /// The hardware address; `None` for a device that is not Ethernet.
    pub mac: Option<[u8; 6]>,
    /// Its MTU, in bytes.
    pub mtu: u32,
    pub(crate) tx_queue_len: Option<u32>,
    pub(crate) flags: DeviceFlags,
    pub(crate) alias: Option<String>,
    /// Kind of a device of this kernel's own; `None` for hardware.
    pub(crate) kind: Option<InfoKind>,
    /// Whether the device below it, or its other end, is in another namespace.
    pub(crate) elsewhere: bool,
    /// Number of its losses of carrier since it was made.
    pub(crate) losses: u32,
    /// Index of the device of which it is a port: a bridge, a bond.
    pub(crate) controller: Option<u32>,
    /// Index of the device below it in the same namespace, as a VLAN has one.
    pub(crate) lower: Option<u32>,
    /// IPv4 and IPv6 settings, where the kernel reports them.
    pub(crate) v4: Option<Box<InetDevConf>>,
    pub(crate) v6: Option<Box<Inet6DevConf>>,
    pub(crate) vxlan: Option<Vxlan>,
}

/// Flags of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DeviceFlags {
    pub(crate) up: bool,
    pub(crate) loopback: bool,
    pub(crate) no_arp: bool,
    pub(crate) promiscuous: bool,
    pub(crate) all_multicast: bool,
}

impl DeviceFlags {
    fn of(flags: LinkFlags) -> DeviceFlags {
        DeviceFlags {
            up: flags.contains(LinkFlags::Up),
            loopback: flags.contains(LinkFlags::Loopback),
            no_arp: flags.contains(LinkFlags::Noarp),
            promiscuous: flags.contains(LinkFlags::Promisc),
            all_multicast: flags.contains(LinkFlags::Allmulti),
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Vxlan {
    pub(crate) vni: u32,
    pub(crate) port: u16,
    pub(crate) remote: Option<IpAddr>,
    pub(crate) local: Option<IpAddr>,
    pub(crate) udp_checksum: bool,
    pub(crate) collect_metadata: bool,
}

impl Vxlan {
    /// Returns whether the underlay is IPv6. A device without any address counts as IPv4.
    pub(crate) fn is_v6(&self) -> bool {
        self.remote.or(self.local).is_some_and(|a| a.is_ipv6())
    }
}

/// Returns the device of this name.
pub fn by_name(client: &mut Client, name: &str) -> Result<Option<Link>, netlink::Error> {
    one(client, LinkUnspec::new_with_name(name))
}

pub(crate) fn by_index(client: &mut Client, index: u32) -> Result<Option<Link>, netlink::Error> {
    one(client, LinkUnspec::new_with_index(index))
}

/// Builds the request for a device, or for all of them, without counters.
fn request(which: LinkMessageBuilder<LinkUnspec>) -> RouteNetlinkMessage {
    let lean = which.append_extra_attribute(LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]));
    RouteNetlinkMessage::GetLink(lean.build())
}

fn one(client: &mut Client, which: LinkMessageBuilder<LinkUnspec>) -> Result<Option<Link>, netlink::Error> {
    match client.ask(request(which)) {
        Ok(RouteNetlinkMessage::NewLink(link)) => Ok(Some(read(link))),
        Ok(_) => Err(netlink::Error::Garbled("another answer than a link".to_owned())),
        Err(e) if e.is_gone() => Ok(None),
        Err(e) => Err(e),
    }
}

/// Returns all devices of the namespace, at most `limit`.
pub(crate) fn all(client: &mut Client, limit: usize) -> Result<Vec<Link>, netlink::Error> {
    all_that(client, limit, |_| true)
}

/// Returns the devices of the namespace for which `are` is true, at most `limit`; other devices do not count.
pub(crate) fn all_that(
    client: &mut Client,
    limit: usize,
    are: impl Fn(&Link) -> bool,
) -> Result<Vec<Link>, netlink::Error> {
    client.dump(&request(LinkMessageBuilder::default()), limit, |answer| match answer {
        RouteNetlinkMessage::NewLink(link) => Some(read(link)).filter(&are),
        _ => None,
    })
}

fn read(message: LinkMessage) -> Link {
    let header = &message.header;
    // The other end of a veth pair is reported as a link as well, and may be in the same namespace.
    let mut lower = None;
    let mut link = Link { index: header.index, flags: DeviceFlags::of(header.flags), ..Link::default() };
    let ethernet = header.link_layer_type == LinkLayerType::Ether;
    for attribute in message.attributes {
        match attribute {
            LinkAttribute::IfName(name) => link.name = name,
            LinkAttribute::Mtu(mtu) => link.mtu = mtu,
            LinkAttribute::TxQueueLen(length) => link.tx_queue_len = Some(length),
            LinkAttribute::Address(bytes) if ethernet => link.mac = bytes.try_into().ok(),
            LinkAttribute::IfAlias(alias) => link.alias = Some(alias),
            LinkAttribute::Controller(index) => link.controller = Some(index).filter(|index| *index != 0),
            LinkAttribute::Link(index) => {
                lower = Some(index).filter(|lower| *lower != 0 && *lower != link.index)
            }
            LinkAttribute::LinkNetNsId(_) => link.elsewhere = true,
            LinkAttribute::CarrierDownCount(count) => link.losses = count,
            LinkAttribute::AfSpecUnspec(families) => {
                families.into_iter().for_each(|f| settings_of(&mut link, f))
            }
            LinkAttribute::LinkInfo(infos) => {
                for info in infos {
                    match info {
                        LinkInfo::Kind(kind) => link.kind = Some(kind),
                        LinkInfo::Data(InfoData::Vxlan(settings)) => link.vxlan = Some(vxlan(settings)),
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    let pair = matches!(link.kind, Some(InfoKind::Veth | InfoKind::Netkit));
    link.lower = lower.filter(|_| !link.elsewhere && !pair);
    link
}

fn settings_of(link: &mut Link, family: AfSpecUnspec) {
    match family {
        AfSpecUnspec::Inet(all) => {
            link.v4 = all.into_iter().find_map(|one| match one {
                AfSpecInet::DevConf(settings) => Some(Box::new(settings)),
                _ => None,
            });
        }
        AfSpecUnspec::Inet6(all) => {
            link.v6 = all.into_iter().find_map(|one| match one {
                AfSpecInet6::DevConf(settings) => Some(Box::new(settings)),
                _ => None,
            });
        }
        _ => {}
    }
}

fn vxlan(settings: Vec<InfoVxlan>) -> Vxlan {
    let mut vxlan = Vxlan::default();
    for setting in settings {
        match setting {
            InfoVxlan::Id(vni) => vxlan.vni = vni,
            InfoVxlan::Port(port) => vxlan.port = port,
            InfoVxlan::Group(a) if !a.is_unspecified() => vxlan.remote = Some(a.into()),
            InfoVxlan::Group6(a) if !a.is_unspecified() => vxlan.remote = Some(a.into()),
            InfoVxlan::Local(a) if !a.is_unspecified() => vxlan.local = Some(a.into()),
            InfoVxlan::Local6(a) if !a.is_unspecified() => vxlan.local = Some(a.into()),
            InfoVxlan::UDPCsum(on) => vxlan.udp_checksum = on,
            InfoVxlan::CollectMetadata(on) => vxlan.collect_metadata = on,
            _ => {}
        }
    }
    vxlan
}

pub(crate) fn endpoints(
    tunnel: LinkMessageBuilder<LinkVxlan>,
    remote: IpAddr,
    local: Option<IpAddr>,
) -> LinkMessageBuilder<LinkVxlan> {
    let tunnel = match remote {
        IpAddr::V4(a) => tunnel.remote(a),
        IpAddr::V6(a) => tunnel.remote6(a),
    };
    match local {
        Some(IpAddr::V4(a)) => tunnel.local(a),
        Some(IpAddr::V6(a)) => tunnel.local6(a),
        None => tunnel,
    }
}

pub(crate) fn set(device: LinkMessageBuilder<LinkUnspec>) -> RouteNetlinkMessage {
    RouteNetlinkMessage::SetLink(device.build())
}

pub(crate) fn delete(index: u32) -> RouteNetlinkMessage {
    RouteNetlinkMessage::DelLink(LinkUnspec::new_with_index(index).build())
}

/// Builds the entry that resolves an address of a device for ever.
pub(crate) fn neighbour(index: u32, address: IpAddr, mac: Option<[u8; 6]>) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    message.header.family = family(address);
    message.header.ifindex = index;
    message.header.state = NeighbourState::Permanent;
    message.attributes.push(NeighbourAttribute::Destination(address.into()));
    message.attributes.extend(mac.map(|mac| NeighbourAttribute::LinkLayerAddress(mac.to_vec())));
    message
}

/// Starts the route of a family's every address by this gateway.
pub(crate) fn default_route(gateway: IpAddr) -> Result<RouteMessageBuilder<IpAddr>, Error> {
    RouteMessageBuilder::<IpAddr>::new()
        .destination_prefix(unspecified(gateway.is_ipv6()), 0)
        .and_then(|route| route.gateway(gateway))
        .map_err(Error::plan)
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct IpPath {
    pub(crate) source: IpAddr,
    pub(crate) device: String,
    pub(crate) mtus: Mtus,
}

/// MTUs of the path to another machine as this machine's kernel knows them, in bytes of a whole IP packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mtus {
    /// MTU of the outgoing device: the upper bound of a search.
    pub device: u32,
    /// MTU by configuration, that of the route included.
    pub route: u32,
    /// MTU learnt from routers (path MTU discovery). The kernel drops it after ten minutes, without notice.
    pub learnt: u32,
}

/// Returns whether an address is this namespace's own and ready. It is not ready during duplicate address detection.
pub(crate) fn is_own(client: &mut Client, address: IpAddr) -> bool {
    matches!(route_to(client, address, RouteFlags::empty()), Ok(route) if route.header.kind == RouteType::Local)
}

fn route_to(client: &mut Client, peer: IpAddr, how: RouteFlags) -> Result<RouteMessage, netlink::Error> {
    // Not by the builder: it presets table, protocol and type, which the kernel refuses in this request.
    let mut message = RouteMessage::default();
    message.header.flags = how;
    message.header.address_family = family(peer);
    message.header.destination_prefix_length = bits(peer);
    message.attributes.push(RouteAttribute::Destination(peer.into()));
    match client.ask(RouteNetlinkMessage::GetRoute(message))? {
        RouteNetlinkMessage::NewRoute(route) => Ok(route),
        _ => Err(netlink::Error::Garbled("another answer than a route".to_owned())),
    }
}

pub(crate) fn mtu_of(route: &RouteMessage) -> Option<u32> {
    let of_metrics = |attribute: &RouteAttribute| match attribute {
        RouteAttribute::Metrics(metrics) => metrics.iter().find_map(|metric| match metric {
            RouteMetric::Mtu(mtu) => Some(*mtu).filter(|mtu| *mtu > 0),
            _ => None,
        }),
        _ => None,
    };
    route.attributes.iter().find_map(of_metrics)
}

pub(crate) fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(a) => Some((*a).into()),
        RouteAddress::Inet6(a) => Some((*a).into()),
        _ => None,
    }
}

/// Returns the gateway in an attribute of a route or a next hop, where it is one.
pub(crate) fn gateway(attribute: &RouteAttribute) -> Option<IpAddr> {
    match attribute {
        RouteAttribute::Gateway(a) => ip(a),
        RouteAttribute::Via(RouteVia::Inet(a)) => Some((*a).into()),
        RouteAttribute::Via(RouteVia::Inet6(a)) => Some((*a).into()),
        _ => None,
    }
}

/// Queries the kernel for the path to `peer`. Source address and MTU come from the kernel, never from a guess.
pub(crate) fn path_to(client: &mut Client, peer: IpAddr) -> Result<IpPath, Error> {
    let broken = |why: &str| Error::Path { peer, why: why.to_owned() };
    if peer.is_unspecified() || peer.is_loopback() || peer.is_multicast() {
        return Err(broken("this is no address of another machine"));
    }
    let route = route_to(client, peer, RouteFlags::empty()).map_err(|e| match e.errno() {
        Some(Errno::ENETUNREACH | Errno::EHOSTUNREACH) => broken("there is no route to it"),
        _ => Error::kernel(format!("ask for the route to {peer}"))(e),
    })?;
    match route.header.kind {
        RouteType::Unicast => {}
        RouteType::Local => return Err(broken("it is an address of this machine itself")),
        kind => return Err(broken(&format!("the route to it is of type {kind:?}"))),
    }
    let (mut source, mut device) = (None, None);
    for attribute in &route.attributes {
        match attribute {
            RouteAttribute::PrefSource(address) => source = ip(address),
            RouteAttribute::Oif(index) => device = Some(*index),
            _ => {}
        }
    }
    let source = source.ok_or_else(|| broken("no address of this machine is fit to talk to it"))?;
    let device = device.ok_or_else(|| broken("the route to it has no device"))?;
    let link = by_index(client, device)
        .map_err(Error::kernel(format!("look at the device towards {peer}")))?
        .ok_or_else(|| broken("the device towards it vanished"))?;
    let mut mtus = Mtus { device: link.mtu, route: link.mtu, learnt: link.mtu };
    if let Some(said) = mtu_of(&route) {
        mtus.learnt = said.min(link.mtu);
        // This MTU is the route's own, or that of the exception that the kernel keeps for this address.
        let own = route_to(client, peer, RouteFlags::FibMatch)
            .map_err(Error::kernel(format!("ask for the route to {peer} as it is configured")))?;
        mtus.route = mtu_of(&own).map_or(link.mtu, |mtu| mtu.min(link.mtu));
    }
    Ok(IpPath { source, device: link.name, mtus })
}

pub(crate) fn family(address: IpAddr) -> AddressFamily {
    if address.is_ipv6() { AddressFamily::Inet6 } else { AddressFamily::Inet }
}

/// Returns the number of bits of an address.
pub(crate) fn bits(address: IpAddr) -> u8 {
    if address.is_ipv6() { 128 } else { 32 }
}

pub(crate) fn unspecified(v6: bool) -> IpAddr {
    if v6 { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() }
}

pub(crate) fn mac_text(mac: [u8; 6]) -> String {
    let [a, b, c, d, e, f] = mac;
    format!("{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}")
}

/// Parses a MAC address as [`mac_text`] writes it; capitals are accepted.
pub(crate) fn mac_of(text: &str) -> Option<[u8; 6]> {
    let mut mac = [0; 6];
    let mut parts = text.split(':');
    for byte in &mut mac {
        let part = parts.next().filter(|p| p.len() == 2 && p.bytes().all(|b| b.is_ascii_hexdigit()))?;
        *byte = u8::from_str_radix(part, 16).ok()?;
    }
    parts.next().is_none().then_some(mac)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mac_address_is_parsed_as_it_is_formatted_and_other_texts_are_refused() {
        let mac = [0x02, 0x00, 0xab, 0xcd, 0xef, 0x09];
        assert_eq!(mac_text(mac), "02:00:ab:cd:ef:09");
        assert_eq!(mac_of("02:00:AB:cd:ef:09"), Some(mac));
        for wrong in [
            "",
            "02:00:ab:cd:ef",
            "02:00:ab:cd:ef:09:11",
            "2:0:ab:cd:ef:9",
            "+2:00:ab:cd:ef:09",
            "zz:00:ab:cd:ef:09",
        ] {
            assert_eq!(mac_of(wrong), None, "{wrong}");
        }
    }
}
