//! Converts the kernel's messages to plain data, without the objects that the kernel makes in every namespace.

use std::net::{IpAddr, Ipv4Addr};

use netlink_packet_core::{DefaultNla, Nla};
use netlink_packet_route::AddressFamily;
use netlink_packet_route::address::{AddressAttribute, AddressFlags, AddressMessage};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::route::{
    RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteMetric, RouteNextHop, RouteNextHopFlags,
    RouteType,
};
use netlink_packet_route::rule::{RuleAttribute, RuleFlags, RuleMessage};

use super::IndexedRoute;
use crate::inspect::seen::{
    Address, FibPlace, Hop, Neighbour, Prefix, Route, Rule, RuleFlow, RuleSelector, TABLE_LOCAL, UNICAST,
};
use crate::link::{self, gateway, ip, mac_text, unspecified};

const FOR_EVER: u32 = u32::MAX;
/// Largest RTAX_* number of a metric.
const MAX_METRIC: u16 = 17;
/// Ticks of the kernel's clock in a second, as programs see it.
const TICKS: u32 = 100;
const RTPROT_KERNEL: u8 = 2;
/// Network that is local in every namespace.
const LOCALHOST: (IpAddr, u8) = (IpAddr::V4(Ipv4Addr::new(127, 0, 0, 0)), 8);
/// Address flags that are carried: IFA_F_HOMEADDRESS, IFA_F_MCAUTOJOIN. The others report the kernel's own state.
const ADDRESS_FLAGS: u32 = 0x10 | 0x400;

pub(super) fn read_address(message: &AddressMessage, device: &str) -> Option<Result<Address, String>> {
    let mut flags = AddressFlags::from_bits_retain(u32::from(message.header.flags.bits()));
    let (mut address, mut local, mut label) = (None, None, None);
    let (mut valid, mut preferred) = (FOR_EVER, FOR_EVER);
    let mut seen = Address::new(IpAddr::from([0; 4]), message.header.prefix_len, message.header.scope.into());
    for attribute in &message.attributes {
        match attribute {
            AddressAttribute::Address(a) => address = Some(*a),
            AddressAttribute::Local(a) => local = Some(*a),
            AddressAttribute::Flags(all) => flags = *all,
            AddressAttribute::Label(text) => label = Some(text.as_str()).filter(|text| *text != device),
            AddressAttribute::Broadcast(a) => seen.broadcast = Some(*a),
            AddressAttribute::Protocol(who) => seen.protocol = (*who).into(),
            AddressAttribute::CacheInfo(times) => {
                (valid, preferred) = (times.ifa_valid, times.ifa_preferred);
            }
            _ => {}
        }
    }
    // On a point-to-point device ADDRESS is the peer's address; LOCAL, if present, is always the own address.
    seen.address = local.or(address)?;
    seen.peer = address.filter(|peer| *peer != seen.address);
    seen.label = label.map(str::to_owned);
    seen.valid = Some(valid).filter(|left| *left != FOR_EVER);
    seen.preferred = Some(preferred).filter(|left| *left != FOR_EVER);
    seen.flags = flags.bits() & ADDRESS_FLAGS;
    // A temporary privacy address made by the kernel (bit 0 in IPv6).
    if seen.address.is_ipv6() && flags.contains(AddressFlags::Secondary) {
        return None;
    }
    if flags.contains(AddressFlags::Dadfailed) {
        return Some(Err(format!("address {} of {device}: another machine has it", seen.address)));
    }
    Some(Ok(seen))
}

/// Why a route cannot be described in full.
pub(super) enum Strange {
    /// One detail cannot be described; the text names it.
    Detail(Box<IndexedRoute>, String),
    /// The route cannot be described; the text names the cause.
    Whole(String),
}

/// Attributes of a route, before it is judged.
struct Parts {
    route: Route,
    device: Option<u32>,
    hops: Vec<(u32, Hop)>,
    /// Reason why the whole route cannot be described.
    whole: Option<&'static str>,
    detail: Option<&'static str>,
}

fn read_parts(message: &RouteMessage) -> Option<Parts> {
    let header = &message.header;
    let nowhere = unspecified(header.address_family == AddressFamily::Inet6);
    let route = Route {
        protocol: header.protocol.into(),
        scope: header.scope.into(),
        onlink: header.flags.contains(RouteFlags::Onlink),
        fib: FibPlace { table: u32::from(header.table), kind: header.kind.into(), tos: header.tos },
        ..Route::new(nowhere, header.destination_prefix_length)
    };
    let mut parts = Parts { route, device: None, hops: Vec::new(), whole: None, detail: None };
    let Parts { route, device, hops, whole, detail } = &mut parts;
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Destination(a) => route.destination = ip(a)?,
            RouteAttribute::Gateway(_) | RouteAttribute::Via(_) => route.gateway = gateway(attribute),
            RouteAttribute::PrefSource(a) => route.source = ip(a),
            RouteAttribute::Priority(metric) => route.metric = *metric,
            RouteAttribute::Oif(index) => *device = Some(*index),
            RouteAttribute::Table(number) => route.fib.table = *number,
            RouteAttribute::MultiPath(all) => *hops = all.iter().map(|hop| read_hop(hop, whole)).collect(),
            RouteAttribute::Encap(_) | RouteAttribute::EncapType(_) => *whole = Some("encapsulates"),
            RouteAttribute::Source(_) => *whole = Some("is for some sources only"),
            RouteAttribute::Realm(_) => *detail = Some("its realm"),
            RouteAttribute::Preference(preference) => route.preference = (*preference).into(),
            RouteAttribute::CacheInfo(times) => route.expires = expiry(times.expires),
            RouteAttribute::Metrics(all) => {
                let unknown: Vec<_> = all.iter().filter_map(|metric| read_metric(metric, route)).collect();
                *detail = unknown.first().copied().or(*detail);
            }
            _ => {}
        }
    }
    Some(parts)
}

/// Returns a route, or `None` for one that the kernel makes by itself everywhere.
pub(super) fn read_route(message: &RouteMessage) -> Option<Result<IndexedRoute, Strange>> {
    let header = &message.header;
    let Parts { mut route, mut device, hops, mut whole, detail } = read_parts(message)?;
    if is_kernels_own(header, &route) {
        return None;
    }
    let name = || format!("the route to {}/{} (table {})", route.destination, route.prefix, route.fib.table);
    match header.kind {
        RouteType::Unicast | RouteType::Local => {}
        RouteType::BlackHole | RouteType::Unreachable | RouteType::Prohibit | RouteType::Throw => {
            // IPv6 reports `lo` here, which has no meaning.
            (device, route.gateway) = (None, None);
        }
        _ => whole = Some("is of an unknown type"),
    }
    if route.fib.kind == UNICAST && device.is_none() && hops.is_empty() {
        whole = Some("has no interface");
    }
    if let Some(why) = whole {
        return Some(Err(Strange::Whole(format!("{} {why}, which cannot be carried into the VM", name()))));
    }
    let note = detail.map(|what| format!("{what} of {}", name()));
    let (hops, described) = hops.into_iter().unzip();
    route.hops = described;
    let found = IndexedRoute { device: device.filter(|_| route.hops.is_empty()), hops, route };
    Some(match note {
        Some(note) => Err(Strange::Detail(Box::new(found), note)),
        None => Ok(found),
    })
}

/// Returns the name of a metric that cannot be described.
fn read_metric(metric: &RouteMetric, route: &mut Route) -> Option<&'static str> {
    match metric {
        RouteMetric::Mtu(mtu) => route.mtu = *mtu,
        RouteMetric::Advmss(bytes) => route.advmss = *bytes,
        RouteMetric::CcAlgo(_) => return Some("its congestion control"),
        other if other.value_len() == size_of::<u32>() && (1..=MAX_METRIC).contains(&other.kind()) => {
            let mut value = [0; size_of::<u32>()];
            other.emit_value(&mut value);
            route.metrics.push((other.kind(), u32::from_ne_bytes(value)));
        }
        _ => {}
    }
    None
}

/// Whether the kernel makes the route itself, wherever its address is.
fn is_kernels_own(header: &RouteHeader, route: &Route) -> bool {
    // For an IPv4 address of lo the kernel makes the whole prefix local. Its other ones are for single addresses.
    let of_prefix = header.kind == RouteType::Local
        && route.prefix < link::bits(route.destination)
        && (route.destination, route.prefix) != LOCALHOST;
    route.fib.table == TABLE_LOCAL && route.protocol <= RTPROT_KERNEL && !of_prefix
        || header.flags.contains(RouteFlags::Cloned)
        // Old kernels have this route in every namespace, in no table.
        || route.fib.table == 0
        || matches!(header.kind, RouteType::Broadcast | RouteType::Anycast | RouteType::Multicast)
}

fn read_hop(from: &RouteNextHop, whole: &mut Option<&'static str>) -> (u32, Hop) {
    let mut hop = Hop {
        gateway: None,
        interface: String::new(),
        weight: u16::from(from.hops) + 1,
        onlink: from.flags.contains(RouteNextHopFlags::Onlink),
    };
    for attribute in &from.attributes {
        match attribute {
            RouteAttribute::Gateway(_) | RouteAttribute::Via(_) => hop.gateway = gateway(attribute),
            RouteAttribute::Encap(_) | RouteAttribute::EncapType(_) => *whole = Some("encapsulates"),
            _ => {}
        }
    }
    (from.interface_index, hop)
}

/// Converts ticks (a signed number; 0 = never) to seconds, at least one.
fn expiry(ticks: u32) -> Option<u32> {
    match ticks {
        0 => None,
        ticks if ticks > i32::MAX as u32 => Some(1),
        ticks => Some((ticks / TICKS).max(1)),
    }
}

pub(super) fn read_rule(message: &RuleMessage) -> Option<Result<Rule, String>> {
    let header = &message.header;
    let v6 = header.family == AddressFamily::Inet6;
    let mut rule = Rule {
        v6,
        selector: RuleSelector { tos: header.tos, ..RuleSelector::default() },
        table: u32::from(header.table),
        action: header.action.into(),
        invert: header.flags.contains(RuleFlags::Invert),
        ..Rule::default()
    };
    let RuleSelector { from, to, iif, oif, fwmark, fwmask, .. } = &mut rule.selector;
    let RuleFlow { uids, ip_protocol, source_ports, destination_ports } = &mut rule.flow;
    let side = |address: &IpAddr, length| Some(Prefix { address: *address, length });
    let mut strange = None;
    for attribute in &message.attributes {
        match attribute {
            RuleAttribute::Source(a) => *from = side(a, header.src_len),
            RuleAttribute::Destination(a) => *to = side(a, header.dst_len),
            RuleAttribute::Iifname(name) => iif.clone_from(name),
            RuleAttribute::Oifname(name) => oif.clone_from(name),
            RuleAttribute::Priority(priority) => rule.priority = *priority,
            RuleAttribute::FwMark(mark) => *fwmark = *mark,
            RuleAttribute::FwMask(mask) => *fwmask = *mask,
            RuleAttribute::Table(table) => rule.table = *table,
            RuleAttribute::Goto(priority) => rule.goto = *priority,
            RuleAttribute::Protocol(who) => rule.protocol = u8::from(*who),
            RuleAttribute::SuppressPrefixLen(u32::MAX) | RuleAttribute::SuppressIfGroup(u32::MAX) => {}
            RuleAttribute::SuppressPrefixLen(length) => rule.suppress_prefix_length = Some(*length),
            RuleAttribute::SuppressIfGroup(group) => rule.suppress_group = Some(*group),
            RuleAttribute::UidRange(range) => *uids = Some((range.start, range.end)),
            RuleAttribute::IpProtocol(protocol) => *ip_protocol = u8::from(*protocol),
            RuleAttribute::SourcePortRange(range) => *source_ports = Some((range.start, range.end)),
            RuleAttribute::DestinationPortRange(range) => *destination_ports = Some((range.start, range.end)),
            RuleAttribute::L3MDev(false) => {}
            RuleAttribute::L3MDev(true) => strange = Some("about a VRF"),
            RuleAttribute::TunId(0) => {}
            RuleAttribute::TunId(_) => strange = Some("about a tunnel's id"),
            RuleAttribute::Realm(_) => strange = Some("about a realm"),
            // FRA_SPORT_MASK and FRA_DPORT_MASK of newer kernels, with all bits of a port significant.
            RuleAttribute::Other(other) if is_whole_port(other) => {}
            _ => strange = Some("of an unknown kind"),
        }
    }
    if is_kernels(&rule) {
        return None;
    }
    let family = if v6 { "IPv6" } else { "IPv4" };
    Some(match strange {
        Some(why) => Err(format!("the {family} policy rule of priority {}, which is {why}", rule.priority)),
        None => Ok(rule),
    })
}

fn is_whole_port(mask: &DefaultNla) -> bool {
    let mut value = [0; 2];
    matches!(mask.kind(), 28 | 29) && mask.value_len() == value.len() && {
        mask.emit_value(&mut value);
        value == [0xff; 2]
    }
}

/// Returns whether it is one of the three rules of every namespace.
fn is_kernels(rule: &Rule) -> bool {
    let Rule { v6, protocol, .. } = *rule;
    [(0, 255), (32_766, 254), (32_767, 253)].into_iter().any(|(priority, table)| {
        *rule == Rule { v6, priority, table, action: 1, protocol, ..Rule::default() }
    })
}

pub(super) fn read_neighbour(message: &NeighbourMessage) -> Option<(u32, Neighbour)> {
    let header = &message.header;
    let (mut address, mut mac, mut protocol) = (None, None, 0);
    for attribute in &message.attributes {
        match attribute {
            NeighbourAttribute::Destination(NeighbourAddress::Inet(a)) => address = Some(IpAddr::V4(*a)),
            NeighbourAttribute::Destination(NeighbourAddress::Inet6(a)) => address = Some(IpAddr::V6(*a)),
            NeighbourAttribute::LinkLayerAddress(bytes) => mac = <[u8; 6]>::try_from(bytes.as_slice()).ok(),
            NeighbourAttribute::Protocol(who) => protocol = (*who).into(),
            _ => {}
        }
    }
    let proxy = header.flags.contains(NeighbourFlags::Proxy);
    // "noarp" entries made by the kernel itself are for multicast and broadcast addresses.
    let no_arp = header.state == NeighbourState::Noarp && header.kind == RouteType::Unicast;
    if !proxy && !no_arp && header.state != NeighbourState::Permanent {
        return None;
    }
    let mac = if proxy { String::new() } else { mac_text(mac?) };
    let flags = (header.flags & (NeighbourFlags::Router | NeighbourFlags::ExtLearned)).bits();
    let no_arp = no_arp && !proxy;
    Some((header.ifindex, Neighbour { address: address?, mac, no_arp, proxy, flags, protocol }))
}
