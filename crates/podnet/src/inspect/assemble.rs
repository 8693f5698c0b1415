//! Extracts the pod's network from the contents of a namespace. Pure.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::parse::{IndexedRoute, Picture};
use super::seen::{Interface, PodNetworkState, Route};
use super::sysctl::{self, Defaults, SysctlFiles};
use crate::link::{Link, mac_text};
use crate::plan::MAX_INTERFACES;
use crate::{Error, external, vxlan};

/// Maximum number of notes on omitted objects; one more note counts the rest.
const MAX_LEFT_OUT: usize = 32;
const RTPROT_KERNEL: u8 = 2;

/// Returns whether it is one of this program's own devices, which are not part of a pod's network.
fn is_ours(link: &Link) -> bool {
    link.name.starts_with(vxlan::PREFIX) || link.name == external::INSIDE
}

/// Returns the pod's network. `files` are the namespace's sysctls, `None` where they could not be read.
pub(super) fn assemble(
    picture: Picture,
    files: Option<&SysctlFiles>,
    defaults: &Defaults,
) -> Result<PodNetworkState, Error> {
    if let Some(why) = picture.impossible {
        return Err(Error::CannotCarry(why));
    }
    let mut left_out = picture.strange.clone();
    let primary = primary(&picture)?;
    let order = order(&picture, primary, &mut left_out)?;
    let sysctls = files.map(|files| sysctl::changed(&files.namespace, defaults)).unwrap_or_default();
    if files.is_none() {
        left_out.push("the namespace's sysctls, which could not be read".to_owned());
    }
    let mut seen = PodNetworkState {
        interfaces: Vec::with_capacity(order.len()),
        routes: Vec::new(),
        rules: picture.rules.clone(),
        loopback: loopback(&picture),
        left_out: Vec::new(),
        sysctls,
    };
    for link in &order {
        let mut interface = interface(link, &picture);
        let neighbours = files.and_then(|files| files.neighbours.get(&link.name));
        interface.sysctls = sysctl::changed_of(link, neighbours, &seen.sysctls, defaults);
        seen.interfaces.push(interface);
    }
    if seen.primary().addresses.is_empty() {
        let name = &seen.primary().name;
        return Err(Error::CannotCarry(format!("interface {name} has no address; has the CNI finished?")));
    }
    for found in &picture.routes {
        place(found, &picture, &order, &mut seen, &mut left_out);
    }
    for interface in &mut seen.interfaces {
        let narrow = interface.routes.iter().filter(|route| route.is_default() && route.mtu > 0);
        interface.mtu = narrow.map(|route| route.mtu).fold(interface.mtu, u32::min);
    }
    let more = left_out.len().saturating_sub(MAX_LEFT_OUT);
    left_out.truncate(MAX_LEFT_OUT);
    if more > 0 {
        left_out.push(format!("and {more} more"));
    }
    seen.left_out = left_out;
    Ok(seen)
}

/// Returns the interface with the best default route of the main table (IPv4 first), else the first with an address.
fn primary(picture: &Picture) -> Result<&Link, Error> {
    let of_route = |found: &IndexedRoute| found.device.or(found.hops.first().copied());
    let defaults =
        picture.routes.iter().filter(|f| f.route.is_default() && f.route.fib.table == super::TABLE_MAIN);
    let best = defaults
        .filter_map(|found| Some((found.route.destination.is_ipv6(), found.route.metric, of_route(found)?)))
        .filter(|(_, _, index)| {
            picture.link(*index).is_some_and(|link| !link.flags.loopback && !is_ours(link))
        })
        .min();
    let link = match best {
        Some((_, _, index)) => picture.link(index),
        None => {
            let addressed = |link: &&Link| {
                let global = |(of, a): &(u32, super::Address)| *of == link.index && a.scope < 253;
                (!picture.addresses.iter().any(global), link.index)
            };
            picture.links.iter().filter(|link| why_not(link, picture).is_none()).min_by_key(addressed)
        }
    };
    let missing = "there is no interface but lo; has the CNI finished, and is it the pod's namespace?";
    let link = link.ok_or_else(|| Error::CannotCarry(missing.to_owned()))?;
    match why_not(link, picture) {
        None => Ok(link),
        Some(why) => Err(Error::CannotCarry(format!("interface {} {why}", link.name))),
    }
}

/// Returns why an interface cannot be carried into the VM; `None` where it can.
fn why_not(link: &Link, picture: &Picture) -> Option<String> {
    let name = |index| picture.link(index).map_or("another", |link| link.name.as_str());
    match (link.mac, link.controller, link.lower) {
        (None | Some([0, 0, 0, 0, 0, 0]), _, _) => Some("has no Ethernet address".to_owned()),
        (_, Some(controller), _) => Some(format!("is a port of {}", name(controller))),
        (_, _, Some(lower)) => Some(format!("lies on {}", name(lower))),
        _ => None,
    }
}

/// Returns the interfaces to carry: the primary one, then the others by their indexes.
fn order<'a>(
    picture: &'a Picture,
    primary: &'a Link,
    left_out: &mut Vec<String>,
) -> Result<Vec<&'a Link>, Error> {
    let mut others = Vec::new();
    for link in &picture.links {
        // sit0, tunl0 and the like exist in every namespace where their module is loaded; down, without address.
        let used = link.flags.up || picture.addresses.iter().any(|(of, _)| *of == link.index);
        if !used || link.flags.loopback || is_ours(link) || link.index == primary.index {
            continue;
        }
        match why_not(link, picture) {
            None => others.push(link),
            Some(why) => left_out.push(format!("interface {}, which {why}", link.name)),
        }
    }
    others.sort_by_key(|link| link.index);
    if others.len() >= MAX_INTERFACES {
        return Err(Error::TooMany("interfaces", MAX_INTERFACES));
    }
    Ok(std::iter::once(primary).chain(others).collect())
}

fn interface(link: &Link, picture: &Picture) -> Interface {
    let of = |index: &u32| *index == link.index;
    // The kernel lists neighbours in hash order.
    let mut neighbours: Vec<_> =
        picture.neighbours.iter().filter(|(index, _)| of(index)).map(|(_, n)| n.clone()).collect();
    neighbours.sort_by_key(|neighbour| (neighbour.address, neighbour.proxy));
    Interface {
        name: link.name.clone(),
        index: link.index,
        mac: mac_text(link.mac.unwrap_or_default()),
        mtu: link.mtu,
        tx_queue_len: link.tx_queue_len.map(queue),
        no_arp: link.flags.no_arp,
        promiscuous: link.flags.promiscuous,
        all_multicast: link.flags.all_multicast,
        down: !link.flags.up,
        addresses: picture.addresses.iter().filter(|(index, _)| of(index)).map(|(_, a)| a.clone()).collect(),
        neighbours,
        routes: Vec::new(),
        sysctls: Vec::new(),
    }
}

/// Returns the queue length to record. Some plugins write 0 for "no queue". The kernel replaces it with the default
/// when a program attaches a qdisc. The record must not seem to change then.
fn queue(length: u32) -> u32 {
    const DEFAULT: u32 = 1000;
    if length == 0 { DEFAULT } else { length }
}

fn loopback(picture: &Picture) -> Vec<super::Address> {
    let Some(lo) = picture.links.iter().find(|link| link.flags.loopback) else { return Vec::new() };
    let own = |a: &super::Address| match a.address {
        IpAddr::V4(address) => address == Ipv4Addr::LOCALHOST && a.prefix == 8,
        IpAddr::V6(address) => address == Ipv6Addr::LOCALHOST,
    };
    let of_lo = picture.addresses.iter().filter(|(index, a)| *index == lo.index && !own(a));
    of_lo.map(|(_, address)| address.clone()).collect()
}

/// Adds a route to its interface, to the routes of no interface or several, or to the omitted objects.
fn place(
    found: &IndexedRoute,
    picture: &Picture,
    carried: &[&Link],
    seen: &mut PodNetworkState,
    left_out: &mut Vec<String>,
) {
    let devices = found.device.iter().chain(&found.hops);
    // A route into this program's own tunnel is not the pod's route.
    if devices.clone().any(|index| picture.link(*index).is_some_and(is_ours)) {
        return;
    }
    let is_carried = |index: u32| {
        carried.iter().any(|link| link.index == index)
            || picture.link(index).is_some_and(|link| link.flags.loopback)
    };
    if let Some(other) = devices.copied().find(|index| !is_carried(*index)) {
        let name = picture.link(other).map_or_else(|| format!("number {other}"), |link| link.name.clone());
        let Route { destination, prefix, .. } = &found.route;
        left_out.push(format!("the route to {destination}/{prefix} through interface {name}"));
        return;
    }
    match picture.named(found) {
        Ok((Some(device), route)) => {
            let of = seen.interfaces.iter_mut().find(|interface| interface.index == device.index);
            of.into_iter().for_each(|interface| interface.routes.push(route.clone()));
        }
        // The kernel makes the route of ::1 itself. For lo's other addresses a copy needs it.
        Ok((None, route)) if route.protocol == RTPROT_KERNEL && route.destination == Ipv6Addr::LOCALHOST => {}
        Ok((None, route)) => seen.routes.push(route),
        Err(index) => left_out.push(format!("a route through interface number {index}, which is gone")),
    }
}
