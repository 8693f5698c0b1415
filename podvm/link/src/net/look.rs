//! Looks at a pod's network namespace once and copies the pod's interface as plain data: addresses, routes and
//! neighbours of both families, MAC and MTU. Reads only.
//!
//! What cannot be carried into the VM and changes what the pod reaches is an error that names it; what is merely
//! left out (another interface, a rule) is listed in [`Seen::left_out`] for a log line or an Event.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::Error;
use super::link::{self, Link, mac_text};
use super::netlink::{self, Client};
use super::netns::Netns;
use super::vxlan::DEVICE;
use netlink_packet_route::address::{AddressAttribute, AddressFlags, AddressMessage};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourFlags, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteMetric, RouteType, RouteVia,
};
use netlink_packet_route::rule::{RuleAttribute, RuleMessage};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

mod seen;

pub(crate) use seen::usual_broadcast;
pub use seen::{
    Address, Hop, Interface, Neighbour, Prefix, Route, Rule, Seen, Sysctl, TABLE_LOCAL, TABLE_MAIN, UNICAST,
};

/// Copies the pod's interface.
///
/// # Errors
/// [`Error::CannotCarry`] with the thing named, [`Error::TooMany`], [`Error::Kernel`], [`Error::Netns`].
pub fn look(netns: &Netns) -> Result<Seen, Error> {
    let mut client = netns.netlink()?;
    let seen = look_with(&mut client)?;
    netns.keep(client);
    Ok(seen)
}

fn look_with(client: &mut Client) -> Result<Seen, Error> {
    let routes = routes(client)?;
    let link = primary(client, &routes)?;
    let mac = link
        .mac
        .filter(|mac| mac != &[0; 6])
        .ok_or_else(|| cannot(format!("interface {} has no Ethernet address", link.name)))?;
    let addresses = addresses(client, link.index)?;
    if addresses.is_empty() {
        return Err(cannot(format!("interface {} has no address; has the CNI finished?", link.name)));
    }
    let neighbours = neighbours(client, link.index)?;
    let mut left_out = other_links(client, &link)?;
    let mut interface = Interface {
        name: link.name,
        index: link.index,
        mac: mac_text(mac),
        mtu: link.mtu,
        addresses,
        tx_queue_len: link.tx_queue_len,
        neighbours,
        ..Interface::default()
    };
    for found in routes {
        match found {
            Found::Route(index, route) if index == interface.index => {
                if route.prefix == 0 && route.mtu > 0 {
                    interface.mtu = interface.mtu.min(route.mtu);
                }
                interface.routes.push(route);
            }
            Found::Route(index, route) => {
                left_out.push(format!(
                    "route to {}/{} through another interface (index {index})",
                    route.destination, route.prefix
                ));
            }
            Found::Strange(what) => return Err(cannot(what)),
        }
    }
    left_out.extend(rules(client)?);
    left_out.truncate(MAX_LEFT_OUT);
    Ok(Seen {
        interfaces: vec![interface],
        routes: Vec::new(),
        rules: Vec::new(),
        sysctls: Vec::new(),
        loopback: Vec::new(),
        left_out,
    })
}

/// What one device has, as [`look`] reads it.
pub(crate) struct Contents {
    pub(crate) addresses: Vec<Address>,
    pub(crate) routes: Vec<Route>,
    pub(crate) neighbours: Vec<Neighbour>,
}

/// The addresses, main-table routes and permanent neighbours of one device.
pub(crate) fn contents(client: &mut Client, index: u32) -> Result<Contents, Error> {
    let routes = routes(client)?.into_iter().filter_map(|found| match found {
        Found::Route(device, route) if device == index => Some(route),
        _ => None,
    });
    let routes = routes.collect();
    Ok(Contents { addresses: addresses(client, index)?, routes, neighbours: neighbours(client, index)? })
}

const MAX_ROUTES: usize = 4096;
const MAX_ADDRESSES: usize = 256;
const MAX_NEIGHBOURS: usize = 4096;
const MAX_LINKS: usize = 256;
const MAX_RULES: usize = 256;
const MAX_LEFT_OUT: usize = 32;

fn cannot(what: String) -> Error {
    Error::CannotCarry(what)
}

fn asking(what: &'static str, limit: usize) -> impl FnOnce(netlink::Error) -> Error {
    move |e| match e {
        netlink::Error::TooMany(_) => Error::TooMany { what, limit },
        e => Error::kernel(format!("read the pod's {what}"))(e),
    }
}

enum Found {
    /// Interface index and route.
    Route(u32, Route),
    /// A route the VM cannot have, in words.
    Strange(String),
}

/// The main table of both families.
fn routes(client: &mut Client) -> Result<Vec<Found>, Error> {
    let mut all = Vec::new();
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        let mut message = RouteMessage::default();
        message.header.address_family = family;
        message.header.table = RouteHeader::RT_TABLE_MAIN;
        message.attributes.push(RouteAttribute::Table(u32::from(RouteHeader::RT_TABLE_MAIN)));
        let found = client.dump(&RouteNetlinkMessage::GetRoute(message), MAX_ROUTES, |answer| match answer {
            // A kernel without IPv6 answers with IPv4 again.
            RouteNetlinkMessage::NewRoute(route) if route.header.address_family == family => {
                read_route(&route)
            }
            _ => None,
        });
        match found {
            Ok(mut found) => all.append(&mut found),
            // A table nobody has put a route into does not exist.
            Err(e) if e.is_gone() => {}
            Err(e) => return Err(asking("routes", MAX_ROUTES)(e)),
        }
    }
    if all.len() > MAX_ROUTES {
        return Err(Error::TooMany { what: "routes", limit: MAX_ROUTES });
    }
    Ok(all)
}

/// A route of the main table, or `None` for what the kernel makes by itself everywhere.
fn read_route(message: &RouteMessage) -> Option<Found> {
    let header = &message.header;
    let family = header.address_family;
    let nowhere = match family {
        AddressFamily::Inet => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        _ => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    };
    let mut route = Route {
        protocol: header.protocol.into(),
        scope: header.scope.into(),
        onlink: header.flags.contains(RouteFlags::Onlink),
        ..Route::new(nowhere, header.destination_prefix_length)
    };
    let (mut device, mut table, mut strange) = (None, u32::from(header.table), None);
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Destination(a) => route.destination = ip(a)?,
            RouteAttribute::Gateway(a) => route.gateway = ip(a),
            RouteAttribute::Via(RouteVia::Inet(a)) => route.gateway = Some((*a).into()),
            RouteAttribute::Via(RouteVia::Inet6(a)) => route.gateway = Some((*a).into()),
            RouteAttribute::PrefSource(a) => route.source = ip(a),
            RouteAttribute::Priority(metric) => route.metric = *metric,
            RouteAttribute::Oif(index) => device = Some(*index),
            RouteAttribute::Table(number) => table = *number,
            RouteAttribute::MultiPath(_) => strange = Some("has several next hops"),
            RouteAttribute::Encap(_) | RouteAttribute::EncapType(_) => strange = Some("encapsulates"),
            RouteAttribute::Source(_) => strange = Some("is for some sources only"),
            RouteAttribute::Metrics(metrics) => {
                route.mtu = metrics.iter().find_map(mtu_of).unwrap_or(0);
            }
            _ => {}
        }
    }
    if table != u32::from(RouteHeader::RT_TABLE_MAIN) || header.flags.contains(RouteFlags::Cloned) {
        return None;
    }
    match header.kind {
        RouteType::Unicast => {}
        RouteType::Local | RouteType::Broadcast | RouteType::Anycast | RouteType::Multicast => return None,
        _ => strange = Some("is not unicast"),
    }
    if header.tos != 0 {
        strange = Some("is for one type of service only");
    }
    Some(match (strange, device) {
        (Some(what), _) => Found::Strange(format!(
            "the route to {}/{} (type {:?}) {what}, which cannot be carried into the VM",
            route.destination, route.prefix, header.kind
        )),
        (None, Some(device)) => Found::Route(device, route),
        (None, None) => {
            Found::Strange(format!("the route to {}/{} has no interface", route.destination, route.prefix))
        }
    })
}

fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(a) => Some((*a).into()),
        RouteAddress::Inet6(a) => Some((*a).into()),
        _ => None,
    }
}

fn mtu_of(metric: &RouteMetric) -> Option<u32> {
    match metric {
        RouteMetric::Mtu(mtu) => Some(*mtu),
        _ => None,
    }
}

/// The interface with the best default route (IPv4 before IPv6), else the first Ethernet one.
fn primary(client: &mut Client, routes: &[Found]) -> Result<Link, Error> {
    let best = routes.iter().filter_map(|found| match found {
        Found::Route(index, route) if route.prefix == 0 => {
            Some((route.destination.is_ipv6(), route.metric, *index))
        }
        _ => None,
    });
    if let Some((_, _, index)) = best.min() {
        return link::by_index(client, index)
            .map_err(asking("interface", 1))?
            .ok_or_else(|| cannot(format!("the interface of the default route (index {index}) vanished")));
    }
    if let Some(Found::Strange(what)) = routes.iter().find(|f| matches!(f, Found::Strange(_))) {
        return Err(cannot(what.clone()));
    }
    link::all(client, MAX_LINKS)
        .map_err(asking("interfaces", MAX_LINKS))?
        .into_iter()
        .filter(|link| !link.loopback && link.mac.is_some() && link.name != DEVICE)
        .min_by_key(|link| link.index)
        .ok_or_else(|| {
            cannot(
                "there is no interface but lo; has the CNI finished, and is it the pod's namespace?".into(),
            )
        })
}

fn other_links(client: &mut Client, primary: &Link) -> Result<Vec<String>, Error> {
    let links = link::all(client, MAX_LINKS).map_err(asking("interfaces", MAX_LINKS))?;
    // sit0, tunl0 and the like are in every namespace where their module is loaded; they are down.
    let others =
        links.into_iter().filter(|l| l.up && !l.loopback && l.index != primary.index && l.name != DEVICE);
    Ok(others.map(|l| format!("interface {}", l.name)).collect())
}

fn addresses(client: &mut Client, index: u32) -> Result<Vec<Address>, Error> {
    let mut message = AddressMessage::default();
    message.header.index = index;
    let read = |answer| match answer {
        RouteNetlinkMessage::NewAddress(a) if a.header.index == index => read_address(&a),
        _ => None,
    };
    client
        .dump(&RouteNetlinkMessage::GetAddress(message), MAX_ADDRESSES, read)
        .map_err(asking("addresses", MAX_ADDRESSES))
}

fn read_address(message: &AddressMessage) -> Option<Address> {
    let mut flags = AddressFlags::from_bits_retain(u32::from(message.header.flags.bits()));
    let (mut address, mut local) = (None, None);
    for attribute in &message.attributes {
        match attribute {
            AddressAttribute::Address(a) => address = Some(*a),
            AddressAttribute::Local(a) => local = Some(*a),
            AddressAttribute::Flags(all) => flags = *all,
            _ => {}
        }
    }
    // On a point-to-point link ADDRESS is the peer's; LOCAL, where it is given, is always ours.
    let address = local.or(address)?;
    // Somebody else has it, or it is one of the kernel's short-lived privacy addresses (bit 0 in IPv6).
    let temporary = address.is_ipv6() && flags.contains(AddressFlags::Secondary);
    if temporary || flags.contains(AddressFlags::Dadfailed) {
        return None;
    }
    Some(Address::new(address, message.header.prefix_len, message.header.scope.into()))
}

fn neighbours(client: &mut Client, index: u32) -> Result<Vec<Neighbour>, Error> {
    let mut message = NeighbourMessage::default();
    message.attributes.push(NeighbourAttribute::IfIndex(index));
    let read = |answer| match answer {
        RouteNetlinkMessage::NewNeighbour(n)
            if n.header.ifindex == index
                && n.header.state == NeighbourState::Permanent
                && !n.header.flags.contains(NeighbourFlags::Proxy) =>
        {
            read_neighbour(&n)
        }
        _ => None,
    };
    client
        .dump(&RouteNetlinkMessage::GetNeighbour(message), MAX_NEIGHBOURS, read)
        .map_err(asking("neighbours", MAX_NEIGHBOURS))
}

fn read_neighbour(message: &NeighbourMessage) -> Option<Neighbour> {
    let (mut address, mut mac) = (None, None);
    for attribute in &message.attributes {
        match attribute {
            NeighbourAttribute::Destination(NeighbourAddress::Inet(a)) => address = Some(IpAddr::V4(*a)),
            NeighbourAttribute::Destination(NeighbourAddress::Inet6(a)) => address = Some(IpAddr::V6(*a)),
            NeighbourAttribute::LinkLayerAddress(bytes) => mac = <[u8; 6]>::try_from(bytes.as_slice()).ok(),
            _ => {}
        }
    }
    Some(Neighbour::new(address?, mac_text(mac?)))
}

/// Policy rules beyond the kernel's own are not carried; a note says so.
fn rules(client: &mut Client) -> Result<Option<String>, Error> {
    let own = |answer| match answer {
        RouteNetlinkMessage::NewRule(rule) => {
            let priority = rule.attributes.iter().find_map(|a| match a {
                RuleAttribute::Priority(p) => Some(*p),
                _ => None,
            });
            (!matches!(priority.unwrap_or(0), 0 | 32_766 | 32_767)).then_some(())
        }
        _ => None,
    };
    match client.dump(&RouteNetlinkMessage::GetRule(RuleMessage::default()), MAX_RULES, own) {
        Ok(extra) if extra.is_empty() => Ok(None),
        Ok(extra) => Ok(Some(format!("{} policy routing rules", extra.len()))),
        // A kernel without policy routing, or a rule of a kind this program does not know.
        Err(netlink::Error::Refused(_)) => Ok(None),
        Err(netlink::Error::Garbled(_) | netlink::Error::TooMany(_)) => {
            Ok(Some("policy routing rules".to_owned()))
        }
        Err(e) => Err(asking("rules", MAX_RULES)(e)),
    }
}
