//! Converts plain data to the kernel's messages.

use std::collections::HashMap;
use std::net::IpAddr;

use netlink_packet_core::DefaultNla;
use netlink_packet_route::address::{AddressAttribute, AddressFlags, AddressMessage, CacheInfo};
use netlink_packet_route::neighbour::{NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState};
use netlink_packet_route::route::{RouteAttribute, RouteMessage, RouteMetric, RouteNextHop};
use netlink_packet_route::rule::{RuleAttribute, RuleFlags, RuleMessage, RulePortRange, RuleUidRange};
use netlink_packet_route::{AddressFamily, IpProtocol};
use rtnetlink::{RouteMessageBuilder, RouteNextHopBuilder};

use crate::Error;
use crate::inspect::{Address, Hop, Neighbour, Picture, Route, Rule};
use crate::link::{self, family, mac_of};

/// Table byte in a rule's header for a larger table number.
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
    let (only, several) = match (device, from.hops.as_slice()) {
        (Some(device), _) => (Some((device, from.gateway, false)), &[][..]),
        (None, [only]) => (Some((only.interface.as_str(), only.gateway, only.onlink)), &[][..]),
        (None, several) => (None, several),
    };
    let mut builder = RouteMessageBuilder::<IpAddr>::new()
        .destination_prefix(from.destination, from.prefix)
        .map_err(Error::plan)?
        .table_id(from.fib.table)
        .protocol(from.protocol.into())
        .scope(from.scope.into())
        .kind(from.fib.kind.into())
        .tos(from.fib.tos);
    if from.onlink || only.is_some_and(|(_, _, onlink)| onlink) {
        builder = builder.onlink();
    }
    if let Some((device, gateway, _)) = only {
        builder = builder.output_interface(names.index(device)?);
        if let Some(gateway) = gateway {
            builder = builder.gateway(gateway).map_err(Error::plan)?;
        }
    }
    if !several.is_empty() {
        let hops = several.iter().map(|hop| next_hop(names, from.destination, hop));
        builder = builder.multipath(hops.collect::<Result<_, _>>()?);
    }
    if let Some(source) = from.source {
        builder = builder.pref_source(source).map_err(Error::plan)?;
    }
    if from.metric > 0 {
        builder = builder.priority(from.metric);
    }
    builder = from.expires.into_iter().fold(builder, RouteMessageBuilder::expires);
    let mut message = builder.build();
    if from.preference > 0 {
        message.attributes.push(RouteAttribute::Preference(from.preference.into()));
    }
    let metrics = metrics(from);
    if !metrics.is_empty() {
        message.attributes.push(RouteAttribute::Metrics(metrics));
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

fn next_hop(names: &Names<'_>, destination: IpAddr, from: &Hop) -> Result<RouteNextHop, Error> {
    let mut hop = RouteNextHopBuilder::new(family(destination))
        .interface(names.index(&from.interface)?)
        .weight(u8::try_from(from.weight.saturating_sub(1)).unwrap_or(u8::MAX));
    if from.onlink {
        hop = hop.onlink();
    }
    if let Some(gateway) = from.gateway {
        hop = hop.via(gateway).map_err(Error::plan)?;
    }
    Ok(hop.build())
}

pub(super) fn neighbour(index: u32, from: &Neighbour) -> NeighbourMessage {
    // The plan's reader accepts only a MAC, or none for a proxy.
    let mut message = link::neighbour(index, from.address, mac_of(&from.mac));
    if from.no_arp {
        message.header.state = NeighbourState::Noarp;
    }
    message.header.flags = NeighbourFlags::from_bits_retain(from.flags);
    if from.proxy {
        message.header.flags |= NeighbourFlags::Proxy;
    }
    if from.protocol != 0 {
        message.attributes.push(NeighbourAttribute::Protocol(from.protocol.into()));
    }
    message
}

pub(super) fn rule(from: &Rule) -> RuleMessage {
    let (selector, flow) = (&from.selector, &from.flow);
    let mut message = RuleMessage::default();
    let header = &mut message.header;
    header.family = if from.v6 { AddressFamily::Inet6 } else { AddressFamily::Inet };
    header.src_len = selector.from.map_or(0, |side| side.length);
    header.dst_len = selector.to.map_or(0, |side| side.length);
    header.tos = selector.tos;
    header.table = u8::try_from(from.table).unwrap_or(TABLE_ELSEWHERE);
    header.action = from.action.into();
    if from.invert {
        header.flags = RuleFlags::Invert;
    }
    let attributes = &mut message.attributes;
    attributes.push(RuleAttribute::Priority(from.priority));
    attributes.extend(selector.from.map(|side| RuleAttribute::Source(side.address)));
    attributes.extend(selector.to.map(|side| RuleAttribute::Destination(side.address)));
    let name = |name: &String| Some(name.clone()).filter(|name| !name.is_empty());
    attributes.extend(name(&selector.iif).map(RuleAttribute::Iifname));
    attributes.extend(name(&selector.oif).map(RuleAttribute::Oifname));
    if selector.fwmark != 0 || selector.fwmask != 0 {
        attributes.push(RuleAttribute::FwMark(selector.fwmark));
        attributes.push(RuleAttribute::FwMask(selector.fwmask));
    }
    let number = |number: u32| Some(number).filter(|number| *number != 0);
    attributes.extend(number(from.table).map(RuleAttribute::Table));
    attributes.extend(number(from.goto).map(RuleAttribute::Goto));
    attributes.push(RuleAttribute::Protocol(from.protocol.into()));
    attributes.extend(from.suppress_prefix_length.map(RuleAttribute::SuppressPrefixLen));
    attributes.extend(from.suppress_group.map(RuleAttribute::SuppressIfGroup));
    attributes.extend(flow.uids.map(|(start, end)| RuleAttribute::UidRange(RuleUidRange { start, end })));
    if flow.ip_protocol != 0 {
        attributes.push(RuleAttribute::IpProtocol(IpProtocol::from(flow.ip_protocol)));
    }
    let ports = |(start, end)| RulePortRange { start, end };
    attributes.extend(flow.source_ports.map(ports).map(RuleAttribute::SourcePortRange));
    attributes.extend(flow.destination_ports.map(ports).map(RuleAttribute::DestinationPortRange));
    message
}
