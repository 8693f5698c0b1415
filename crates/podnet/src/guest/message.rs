//! Converts plain data to the kernel's messages.

use std::collections::HashMap;
use std::net::IpAddr;

use netlink_packet_core::DefaultNla;
use netlink_packet_route::address::{AddressAttribute, AddressFlags, AddressMessage, CacheInfo};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::route::{
    RouteAttribute, RouteFlags, RouteMessage, RouteMetric, RouteNextHop, RouteNextHopFlags, RouteVia,
};
use netlink_packet_route::rule::{RuleAttribute, RuleFlags, RuleMessage, RulePortRange, RuleUidRange};
use netlink_packet_route::{AddressFamily, IpProtocol};

use crate::Error;
use crate::inspect::{Address, Hop, Neighbour, Picture, Route, Rule};
use crate::link::{family, mac_of};

/// Table byte in a header for a larger table number.
const TABLE_ELSEWHERE: u8 = 252;

/// Indexes of a namespace's devices by name.
pub(super) struct Names<'a>(HashMap<&'a str, u32>);

impl<'a> Names<'a> {
    pub(super) fn of(picture: &'a Picture) -> Names<'a> {
        Names(picture.links.iter().map(|link| (link.name.as_str(), link.index)).collect())
    }

    pub(super) fn index(&self, name: &str) -> Result<u32, Error> {
        let missing = || Error::Plan(format!("there is no interface {name} in the pod's namespace"));
        self.0.get(name).copied().ok_or_else(missing)
    }
}

pub(super) fn address(index: u32, from: &Address) -> AddressMessage {
    let mut message = AddressMessage::default();
    message.header.family = family(from.address);
    message.header.prefix_len = from.prefix;
    message.header.scope = from.scope.into();
    message.header.index = index;
    // Routes come from the plan alone, and the CNI already made sure that the address is unique.
    let mut flags = AddressFlags::Noprefixroute | AddressFlags::from_bits_retain(from.flags);
    if from.address.is_ipv6() {
        flags |= AddressFlags::Nodad;
    }
    let attributes = &mut message.attributes;
    attributes.push(AddressAttribute::Local(from.address));
    attributes.push(AddressAttribute::Address(from.peer.unwrap_or(from.address)));
    attributes.extend(from.broadcast.map(AddressAttribute::Broadcast));
    attributes.extend(from.label.clone().map(AddressAttribute::Label));
    if from.protocol != 0 {
        attributes.push(AddressAttribute::Protocol(from.protocol.into()));
    }
    if from.valid.is_some() || from.preferred.is_some() {
        let mut times = CacheInfo::default();
        times.ifa_valid = from.valid.unwrap_or(u32::MAX);
        times.ifa_preferred = from.preferred.unwrap_or(u32::MAX).min(times.ifa_valid);
        attributes.push(AddressAttribute::CacheInfo(times));
    }
    attributes.push(AddressAttribute::Flags(flags));
    message
}

pub(super) fn route(names: &Names<'_>, device: Option<&str>, from: &Route) -> Result<RouteMessage, Error> {
    let mut message = RouteMessage::default();
    let header = &mut message.header;
    header.address_family = family(from.destination);
    header.destination_prefix_length = from.prefix;
    header.table = u8::try_from(from.table).unwrap_or(TABLE_ELSEWHERE);
    header.protocol = from.protocol.into();
    header.scope = from.scope.into();
    header.kind = from.kind.into();
    header.tos = from.tos;
    if from.onlink {
        header.flags = RouteFlags::Onlink;
    }
    let attributes = &mut message.attributes;
    if from.prefix > 0 {
        attributes.push(RouteAttribute::Destination(from.destination.into()));
    }
    attributes.push(RouteAttribute::Table(from.table));
    match (device, from.hops.as_slice()) {
        (Some(device), _) => {
            attributes.push(RouteAttribute::Oif(names.index(device)?));
            attributes.extend(gateway(from.destination, from.gateway));
        }
        (None, []) => {}
        (None, [only]) => {
            attributes.push(RouteAttribute::Oif(names.index(&only.interface)?));
            attributes.extend(gateway(from.destination, only.gateway));
            if only.onlink {
                header.flags = RouteFlags::Onlink;
            }
        }
        (None, several) => {
            let hops = several.iter().map(|hop| next_hop(names, from.destination, hop));
            attributes.push(RouteAttribute::MultiPath(hops.collect::<Result<_, _>>()?));
        }
    }
    attributes.extend(from.source.map(|source| RouteAttribute::PrefSource(source.into())));
    if from.metric > 0 {
        attributes.push(RouteAttribute::Priority(from.metric));
    }
    if from.preference > 0 {
        attributes.push(RouteAttribute::Preference(from.preference.into()));
    }
    attributes.extend(from.expires.map(RouteAttribute::Expires));
    let metrics = metrics(from);
    if !metrics.is_empty() {
        attributes.push(RouteAttribute::Metrics(metrics));
    }
    Ok(message)
}

fn metrics(from: &Route) -> Vec<RouteMetric> {
    let mut metrics = Vec::new();
    if from.mtu > 0 {
        metrics.push(RouteMetric::Mtu(from.mtu));
    }
    if from.advmss > 0 {
        metrics.push(RouteMetric::Advmss(from.advmss));
    }
    let raw =
        |(kind, value): &(u16, u32)| RouteMetric::Other(DefaultNla::new(*kind, value.to_ne_bytes().to_vec()));
    metrics.extend(from.metrics.iter().map(raw));
    metrics
}

fn gateway(destination: IpAddr, gateway: Option<IpAddr>) -> Option<RouteAttribute> {
    Some(match (destination, gateway?) {
        (IpAddr::V4(_), IpAddr::V6(gateway)) => RouteAttribute::Via(RouteVia::Inet6(gateway)),
        (_, gateway) => RouteAttribute::Gateway(gateway.into()),
    })
}

fn next_hop(names: &Names<'_>, destination: IpAddr, from: &Hop) -> Result<RouteNextHop, Error> {
    let mut hop = RouteNextHop::default();
    hop.interface_index = names.index(&from.interface)?;
    hop.hops = u8::try_from(from.weight.saturating_sub(1)).unwrap_or(u8::MAX);
    if from.onlink {
        hop.flags = RouteNextHopFlags::Onlink;
    }
    hop.attributes.extend(gateway(destination, from.gateway));
    Ok(hop)
}

pub(super) fn neighbour(index: u32, from: &Neighbour) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    message.header.family = family(from.address);
    message.header.ifindex = index;
    message.header.state = if from.no_arp { NeighbourState::Noarp } else { NeighbourState::Permanent };
    message.header.flags = NeighbourFlags::from_bits_retain(from.flags);
    if from.proxy {
        message.header.flags |= NeighbourFlags::Proxy;
    }
    let address = match from.address {
        IpAddr::V4(address) => NeighbourAddress::Inet(address),
        IpAddr::V6(address) => NeighbourAddress::Inet6(address),
    };
    message.attributes.push(NeighbourAttribute::Destination(address));
    // The plan's reader accepts only a MAC, or none for a proxy.
    message
        .attributes
        .extend(mac_of(&from.mac).map(|mac| NeighbourAttribute::LinkLayerAddress(mac.to_vec())));
    if from.protocol != 0 {
        message.attributes.push(NeighbourAttribute::Protocol(from.protocol.into()));
    }
    message
}

pub(super) fn rule(from: &Rule) -> RuleMessage {
    let mut message = RuleMessage::default();
    let header = &mut message.header;
    header.family = if from.v6 { AddressFamily::Inet6 } else { AddressFamily::Inet };
    header.src_len = from.from.map_or(0, |side| side.length);
    header.dst_len = from.to.map_or(0, |side| side.length);
    header.tos = from.tos;
    header.table = u8::try_from(from.table).unwrap_or(TABLE_ELSEWHERE);
    header.action = from.action.into();
    if from.invert {
        header.flags = RuleFlags::Invert;
    }
    let attributes = &mut message.attributes;
    attributes.push(RuleAttribute::Priority(from.priority));
    attributes.extend(from.from.map(|side| RuleAttribute::Source(side.address)));
    attributes.extend(from.to.map(|side| RuleAttribute::Destination(side.address)));
    let name = |name: &String| Some(name.clone()).filter(|name| !name.is_empty());
    attributes.extend(name(&from.iif).map(RuleAttribute::Iifname));
    attributes.extend(name(&from.oif).map(RuleAttribute::Oifname));
    if from.fwmark != 0 || from.fwmask != 0 {
        attributes.push(RuleAttribute::FwMark(from.fwmark));
        attributes.push(RuleAttribute::FwMask(from.fwmask));
    }
    let number = |number: u32| Some(number).filter(|number| *number != 0);
    attributes.extend(number(from.table).map(RuleAttribute::Table));
    attributes.extend(number(from.goto).map(RuleAttribute::Goto));
    attributes.push(RuleAttribute::Protocol(from.protocol.into()));
    attributes.extend(from.suppress_prefix_length.map(RuleAttribute::SuppressPrefixLen));
    attributes.extend(from.suppress_group.map(RuleAttribute::SuppressIfGroup));
    attributes.extend(from.uids.map(|(start, end)| RuleAttribute::UidRange(RuleUidRange { start, end })));
    if from.ip_protocol != 0 {
        attributes.push(RuleAttribute::IpProtocol(IpProtocol::from(from.ip_protocol)));
    }
    let ports = |(start, end)| RulePortRange { start, end };
    attributes.extend(from.source_ports.map(ports).map(RuleAttribute::SourcePortRange));
    attributes.extend(from.destination_ports.map(ports).map(RuleAttribute::DestinationPortRange));
    message
}
