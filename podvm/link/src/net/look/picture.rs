//! A namespace as the kernel describes it: six dumps (links, addresses, routes, rules, neighbours, and those that are
//! answered for), each of both families and all devices. Nothing is judged here but what the kernel makes by itself.

use std::net::IpAddr;

use netlink_packet_core::{DefaultNla, Nla};
use netlink_packet_route::address::{AddressAttribute, AddressFlags, AddressMessage};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteMessage, RouteMetric, RouteNextHop, RouteNextHopFlags,
    RouteType, RouteVia,
};
use netlink_packet_route::rule::{RuleAttribute, RuleFlags, RuleMessage};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use super::seen::{Address, Hop, Neighbour, Prefix, Route, Rule, TABLE_LOCAL, UNICAST};
use crate::net::Error;
use crate::net::link::{self, Link, mac_text, unspecified};
use crate::net::netlink::{self, Client};

const MAX_LINKS: usize = 256;
const MAX_ADDRESSES: usize = 1024;
const MAX_ROUTES: usize = 4096;
const MAX_RULES: usize = 1024;
const MAX_NEIGHBOURS: usize = 4096;
/// A lifetime without an end.
const FOR_EVER: u32 = u32::MAX;
/// The kernel's clock ticks in a second, towards programs.
const TICKS: u32 = 100;
const RTPROT_KERNEL: u8 = 2;
/// What is carried of an address's flags: IFA_F_HOMEADDRESS, IFA_F_MCAUTOJOIN. The others say what the kernel does.
const ADDRESS_FLAGS: u32 = 0x10 | 0x400;

/// What is in a namespace.
#[derive(Clone, Debug, Default)]
pub(crate) struct Picture {
    pub(crate) links: Vec<Link>,
    /// Device and address.
    pub(crate) addresses: Vec<(u32, Address)>,
    pub(crate) routes: Vec<Found>,
    pub(crate) rules: Vec<Rule>,
    /// Device and neighbour.
    pub(crate) neighbours: Vec<(u32, Neighbour)>,
    /// What was met and cannot be described, in words.
    pub(crate) strange: Vec<String>,
    /// The same, where leaving it out would change what the pod reaches.
    pub(crate) impossible: Option<String>,
}

/// A route as found: devices by number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    /// Its device, where it has one of its own.
    pub(crate) device: Option<u32>,
    /// Its next hops' devices, in the order of `route.hops`, whose names are empty.
    pub(crate) hops: Vec<u32>,
    pub(crate) route: Route,
}

impl Picture {
    /// Takes one. What the kernel has in every namespace is not in it: its local table, its three rules.
    pub(crate) fn take(client: &mut Client) -> Result<Picture, Error> {
        let mut picture = Picture {
            links: link::all(client, MAX_LINKS).map_err(asking("interfaces", MAX_LINKS))?,
            ..Picture::default()
        };
        picture.addresses(client)?;
        picture.routes(client)?;
        picture.rules(client)?;
        picture.neighbours(client, false)?;
        picture.neighbours(client, true)?;
        Ok(picture)
    }

    /// The device of this number.
    pub(crate) fn link(&self, index: u32) -> Option<&Link> {
        self.links.iter().find(|link| link.index == index)
    }

    /// A route with its devices' names: the one it goes through alone (not `lo`), and those of its hops in it.
    ///
    /// # Errors
    /// The index of a device that is not there.
    pub(crate) fn named(&self, found: &Found) -> Result<(Option<&Link>, Route), u32> {
        let mut route = found.route.clone();
        let device = match found.device {
            Some(index) => Some(self.link(index).ok_or(index)?),
            None => None,
        };
        for (hop, index) in route.hops.iter_mut().zip(&found.hops) {
            hop.interface.clone_from(&self.link(*index).ok_or(*index)?.name);
        }
        match device {
            Some(lo) if lo.loopback => {
                let (gateway, onlink) = (route.gateway.take(), std::mem::take(&mut route.onlink));
                route.hops = vec![Hop { gateway, interface: lo.name.clone(), weight: 1, onlink }];
                Ok((None, route))
            }
            device => Ok((device, route)),
        }
    }

    /// Forgets devices and what is theirs.
    pub(crate) fn forget(&mut self, gone: impl Fn(&Link) -> bool) {
        let (gone, left) = std::mem::take(&mut self.links).into_iter().partition(|link| gone(link));
        let gone: Vec<Link> = gone;
        self.links = left;
        let is_gone = |index: &u32| gone.iter().any(|link| link.index == *index);
        self.addresses.retain(|(of, _)| !is_gone(of));
        self.neighbours.retain(|(of, _)| !is_gone(of));
        self.routes.retain(|found| !found.device.iter().chain(&found.hops).any(is_gone));
    }

    fn addresses(&mut self, client: &mut Client) -> Result<(), Error> {
        let request = RouteNetlinkMessage::GetAddress(AddressMessage::default());
        let all = dump(client, &request, "addresses", MAX_ADDRESSES, |answer| match answer {
            Ok(RouteNetlinkMessage::NewAddress(message)) => Ok(Some(message)),
            Ok(_) => Ok(None),
            Err(e) => Err(e),
        })?;
        for message in all {
            let index = message.header.index;
            let name = self.link(index).map(|link| link.name.clone()).unwrap_or_default();
            match read_address(&message, &name) {
                Some(Ok(address)) => self.addresses.push((index, address)),
                Some(Err(why)) => self.strange.push(why),
                None => {}
            }
        }
        Ok(())
    }

    fn routes(&mut self, client: &mut Client) -> Result<(), Error> {
        let request = RouteNetlinkMessage::GetRoute(RouteMessage::default());
        let all = dump(client, &request, "routes", MAX_ROUTES, |answer| match answer {
            Ok(RouteNetlinkMessage::NewRoute(message)) => Ok(read_route(&message)),
            Ok(_) => Ok(None),
            Err(e) => Err(e),
        })?;
        for found in all {
            match found {
                Ok(found) => self.routes.push(found),
                Err(Strange::Detail(found, why)) => {
                    self.strange.push(why);
                    self.routes.push(*found);
                }
                Err(Strange::Whole(why)) => self.impossible = self.impossible.take().or(Some(why)),
            }
        }
        Ok(())
    }

    fn rules(&mut self, client: &mut Client) -> Result<(), Error> {
        let request = RouteNetlinkMessage::GetRule(RuleMessage::default());
        let all = dump(client, &request, "rules", MAX_RULES, |answer| match answer {
            Ok(RouteNetlinkMessage::NewRule(message)) => Ok(read_rule(&message)),
            Ok(_) => Ok(None),
            // A rule of a kind this program does not know is no reason to give up.
            Err(e) => Ok(Some(Err(format!("a policy rule that cannot be read ({e})")))),
        });
        let all = match all {
            // A kernel without policy routing.
            Err(Error::Kernel { source: netlink::Error::Refused(_), .. }) => return Ok(()),
            all => all?,
        };
        for rule in all {
            match rule {
                Ok(rule) => self.rules.push(rule),
                Err(why) => self.strange.push(why),
            }
        }
        Ok(())
    }

    fn neighbours(&mut self, client: &mut Client, proxies: bool) -> Result<(), Error> {
        let mut message = NeighbourMessage::default();
        if proxies {
            message.header.flags = NeighbourFlags::Proxy;
        }
        let request = RouteNetlinkMessage::GetNeighbour(message);
        let mut all = dump(client, &request, "neighbours", MAX_NEIGHBOURS, |answer| match answer {
            Ok(RouteNetlinkMessage::NewNeighbour(message)) => Ok(read_neighbour(&message)),
            Ok(_) => Ok(None),
            Err(e) => Err(e),
        })?;
        self.neighbours.append(&mut all);
        Ok(())
    }
}

fn asking(what: &'static str, limit: usize) -> impl FnOnce(netlink::Error) -> Error {
    move |e| match e {
        netlink::Error::TooMany(_) => Error::TooMany { what, limit },
        e => Error::kernel(format!("read the pod's {what}"))(e),
    }
}

/// One dump of both families. A request for all families is also answered by those that nobody here knows (MPLS,
/// multicast routing, CAN); their messages are skipped unread.
fn dump<T>(
    client: &mut Client,
    request: &RouteNetlinkMessage,
    what: &'static str,
    limit: usize,
    mut read: impl FnMut(Result<RouteNetlinkMessage, netlink::Error>) -> Result<Option<T>, netlink::Error>,
) -> Result<Vec<T>, Error> {
    let families = [u8::from(AddressFamily::Inet), u8::from(AddressFamily::Inet6)];
    let each = |kind, payload: &[u8]| match payload.first() {
        Some(family) if families.contains(family) => read(netlink::parse_route(kind, payload)),
        _ => Ok(None),
    };
    client.dump_raw(request, limit, each).map_err(asking(what, limit))
}

fn read_address(message: &AddressMessage, device: &str) -> Option<Result<Address, String>> {
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
    // On a point-to-point link ADDRESS is the peer's; LOCAL, where it is given, is always ours.
    seen.address = local.or(address)?;
    seen.peer = address.filter(|peer| *peer != seen.address);
    seen.label = label.map(str::to_owned);
    seen.valid = Some(valid).filter(|left| *left != FOR_EVER);
    seen.preferred = Some(preferred).filter(|left| *left != FOR_EVER);
    seen.flags = flags.bits() & ADDRESS_FLAGS;
    // One of the kernel's short-lived privacy addresses (bit 0 in IPv6).
    if seen.address.is_ipv6() && flags.contains(AddressFlags::Secondary) {
        return None;
    }
    if flags.contains(AddressFlags::Dadfailed) {
        return Some(Err(format!("address {} of {device}: somebody else has it", seen.address)));
    }
    Some(Ok(seen))
}

/// Why a route cannot be described as it is.
enum Strange {
    /// Without a detail, in words.
    Detail(Box<Found>, String),
    /// Not at all.
    Whole(String),
}

/// A route, or `None` for what the kernel makes by itself everywhere.
fn read_route(message: &RouteMessage) -> Option<Result<Found, Strange>> {
    let header = &message.header;
    let nowhere = unspecified(header.address_family == AddressFamily::Inet6);
    let mut route = Route {
        protocol: header.protocol.into(),
        scope: header.scope.into(),
        onlink: header.flags.contains(RouteFlags::Onlink),
        table: u32::from(header.table),
        kind: header.kind.into(),
        tos: header.tos,
        ..Route::new(nowhere, header.destination_prefix_length)
    };
    let (mut device, mut hops, mut whole, mut detail) = (None, Vec::new(), None, None);
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Destination(a) => route.destination = ip(a)?,
            RouteAttribute::Gateway(_) | RouteAttribute::Via(_) => route.gateway = gateway(attribute),
            RouteAttribute::PrefSource(a) => route.source = ip(a),
            RouteAttribute::Priority(metric) => route.metric = *metric,
            RouteAttribute::Oif(index) => device = Some(*index),
            RouteAttribute::Table(number) => route.table = *number,
            RouteAttribute::MultiPath(all) => {
                hops = all.iter().map(|hop| read_hop(hop, &mut whole)).collect()
            }
            RouteAttribute::Encap(_) | RouteAttribute::EncapType(_) => whole = Some("encapsulates"),
            RouteAttribute::Source(_) => whole = Some("is for some sources only"),
            RouteAttribute::Realm(_) => detail = Some("its realm"),
            RouteAttribute::Preference(preference) => route.preference = (*preference).into(),
            RouteAttribute::CacheInfo(times) => route.expires = expiry(times.expires),
            RouteAttribute::Metrics(all) => {
                for metric in all {
                    match metric {
                        RouteMetric::Mtu(mtu) => route.mtu = *mtu,
                        RouteMetric::Advmss(bytes) => route.advmss = *bytes,
                        RouteMetric::CcAlgo(_) => detail = Some("its congestion control"),
                        other => route.metrics.extend(number(other)),
                    }
                }
            }
            _ => {}
        }
    }
    let kernels_own = route.table == TABLE_LOCAL && route.protocol <= RTPROT_KERNEL
        || header.flags.contains(RouteFlags::Cloned)
        // Old kernels have this one in every namespace, in no table.
        || route.table == 0
        || matches!(header.kind, RouteType::Broadcast | RouteType::Anycast | RouteType::Multicast);
    if kernels_own {
        return None;
    }
    let name = || format!("the route to {}/{} (table {})", route.destination, route.prefix, route.table);
    match header.kind {
        RouteType::Unicast | RouteType::Local => {}
        RouteType::BlackHole | RouteType::Unreachable | RouteType::Prohibit | RouteType::Throw => {
            // IPv6 says `lo`, which means nothing.
            (device, route.gateway) = (None, None);
        }
        _ => whole = Some("is of an unknown type"),
    }
    if route.kind == UNICAST && device.is_none() && hops.is_empty() {
        whole = Some("has no interface");
    }
    if let Some(why) = whole {
        return Some(Err(Strange::Whole(format!("{} {why}, which cannot be carried into the VM", name()))));
    }
    let note = detail.map(|what| format!("{what} of {}", name()));
    let (hops, described) = hops.into_iter().unzip();
    route.hops = described;
    let found = Found { device: device.filter(|_| route.hops.is_empty()), hops, route };
    Some(match note {
        Some(note) => Err(Strange::Detail(Box::new(found), note)),
        None => Ok(found),
    })
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

fn gateway(attribute: &RouteAttribute) -> Option<IpAddr> {
    match attribute {
        RouteAttribute::Gateway(a) => ip(a),
        RouteAttribute::Via(RouteVia::Inet(a)) => Some((*a).into()),
        RouteAttribute::Via(RouteVia::Inet6(a)) => Some((*a).into()),
        _ => None,
    }
}

fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(a) => Some((*a).into()),
        RouteAddress::Inet6(a) => Some((*a).into()),
        _ => None,
    }
}

/// From ticks (a number with a sign; 0 = never) to seconds, at least one.
fn expiry(ticks: u32) -> Option<u32> {
    match ticks {
        0 => None,
        ticks if ticks > i32::MAX as u32 => Some(1),
        ticks => Some((ticks / TICKS).max(1)),
    }
}

/// RTAX_* number and value of a metric that is a number.
fn number(metric: &RouteMetric) -> Option<(u16, u32)> {
    Some(match metric {
        RouteMetric::Lock(v) => (1, *v),
        RouteMetric::Window(v) => (3, *v),
        RouteMetric::Rtt(v) => (4, *v),
        RouteMetric::RttVar(v) => (5, *v),
        RouteMetric::SsThresh(v) => (6, *v),
        RouteMetric::Cwnd(v) => (7, *v),
        RouteMetric::Reordering(v) => (9, *v),
        RouteMetric::Hoplimit(v) => (10, *v),
        RouteMetric::InitCwnd(v) => (11, *v),
        RouteMetric::Features(v) => (12, *v),
        RouteMetric::RtoMin(v) => (13, *v),
        RouteMetric::InitRwnd(v) => (14, *v),
        RouteMetric::QuickAck(v) => (15, *v),
        RouteMetric::FastopenNoCookie(v) => (17, *v),
        _ => return None,
    })
}

fn read_rule(message: &RuleMessage) -> Option<Result<Rule, String>> {
    let header = &message.header;
    let v6 = header.family == AddressFamily::Inet6;
    let mut rule = Rule {
        v6,
        tos: header.tos,
        table: u32::from(header.table),
        action: header.action.into(),
        invert: header.flags.contains(RuleFlags::Invert),
        ..Rule::default()
    };
    let side = |address: &IpAddr, length| Some(Prefix { address: *address, length });
    let mut strange = None;
    for attribute in &message.attributes {
        match attribute {
            RuleAttribute::Source(a) => rule.from = side(a, header.src_len),
            RuleAttribute::Destination(a) => rule.to = side(a, header.dst_len),
            RuleAttribute::Iifname(name) => rule.iif.clone_from(name),
            RuleAttribute::Oifname(name) => rule.oif.clone_from(name),
            RuleAttribute::Priority(priority) => rule.priority = *priority,
            RuleAttribute::FwMark(mark) => rule.fwmark = *mark,
            RuleAttribute::FwMask(mask) => rule.fwmask = *mask,
            RuleAttribute::Table(table) => rule.table = *table,
            RuleAttribute::Goto(priority) => rule.goto = *priority,
            RuleAttribute::Protocol(who) => rule.protocol = u8::from(*who),
            RuleAttribute::SuppressPrefixLen(u32::MAX) | RuleAttribute::SuppressIfGroup(u32::MAX) => {}
            RuleAttribute::SuppressPrefixLen(length) => rule.suppress_prefix_length = Some(*length),
            RuleAttribute::SuppressIfGroup(group) => rule.suppress_group = Some(*group),
            RuleAttribute::UidRange(range) => rule.uids = Some((range.start, range.end)),
            RuleAttribute::IpProtocol(protocol) => rule.ip_protocol = u8::from(*protocol),
            RuleAttribute::SourcePortRange(range) => rule.source_ports = Some((range.start, range.end)),
            RuleAttribute::DestinationPortRange(range) => {
                rule.destination_ports = Some((range.start, range.end))
            }
            RuleAttribute::L3MDev(false) => {}
            RuleAttribute::L3MDev(true) => strange = Some("about a VRF"),
            RuleAttribute::TunId(0) => {}
            RuleAttribute::TunId(_) => strange = Some("about a tunnel's id"),
            RuleAttribute::Realm(_) => strange = Some("about a realm"),
            // FRA_SPORT_MASK and FRA_DPORT_MASK of newer kernels, which count all bits of a port.
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

/// The three that are in every namespace.
fn is_kernels(rule: &Rule) -> bool {
    let bare = |priority, table| Rule {
        v6: rule.v6,
        priority,
        table,
        action: 1,
        protocol: rule.protocol,
        ..Rule::default()
    };
    [(0, 255), (32_766, 254), (32_767, 253)]
        .into_iter()
        .any(|(priority, table)| *rule == bare(priority, table))
}

fn read_neighbour(message: &NeighbourMessage) -> Option<(u32, Neighbour)> {
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
    // What the kernel itself writes as "noarp" is about multicast and broadcast addresses.
    let no_arp = header.state == NeighbourState::Noarp && header.kind == RouteType::Unicast;
    if !proxy && !no_arp && header.state != NeighbourState::Permanent {
        return None;
    }
    let mac = if proxy { String::new() } else { mac_text(mac?) };
    let flags = (header.flags & (NeighbourFlags::Router | NeighbourFlags::ExtLearned)).bits();
    Some((
        header.ifindex,
        Neighbour { address: address?, mac, no_arp: no_arp && !proxy, proxy, flags, protocol },
    ))
}
