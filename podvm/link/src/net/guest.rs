//! The guest's half of the pod's network: the tunnel device in the pod's namespace of the VM, with the pod's name,
//! MAC, addresses, routes and neighbours.
//!
//! All of it or nothing, and again as often as one likes: what is as planned is left alone, what is missing is added.
//! Touches the pod's namespace, the VM's tunnel socket, and (where the VM's kernel has nftables) one table that
//! accepts tunnel packets from the node only.

use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::address::{AddressAttribute, AddressFlags, AddressMessage};
use netlink_packet_route::link::{LinkAttribute, LinkFlags, LinkMessage};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::route::{
    RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteMetric, RouteType, RouteVia,
};
use nix::errno::Errno;
use peerpod_proto::guest::NetworkPlan;

use super::Error;
use super::link::{self, Link, endpoints, family, mac_of, vxlan_info};
use super::look::{self, Address, Neighbour, Route};
use super::netlink::{self, Client};
use super::netns::Netns;
use super::nft::{Filter, Peer};
use super::plan::{self, Interface, Planned, Underlay};
use super::vxlan::{self, Shape, no_v6_address};

/// What [`apply`] made or found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applied {
    /// The MTU of the pod's (first) interface, in bytes.
    pub mtu: u32,
    /// False where all of it was already as planned.
    pub changed: bool,
    /// Why tunnel packets from others than the node are not filtered, where they are not: a kernel without nftables.
    pub unfiltered: Option<String>,
}

/// Makes the pod's network in the namespace at `podns` as the plan says: all of it or nothing. Called again with the
/// same plan it verifies, adds what is missing and leaves the rest alone. Must be called from a thread in the VM's own
/// network namespace: that is where the tunnel's packets leave.
///
/// `previous` is the plan that was applied before, if any: what it had and this one has not is removed.
///
/// # Errors
/// [`Error::Plan`] for a plan that makes no sense, [`Error::Path`] where the node cannot be reached, [`Error::Kernel`].
pub fn apply(plan: &NetworkPlan, _previous: Option<&NetworkPlan>, podns: &Path) -> Result<Applied, Error> {
    let planned = plan::read(plan)?;
    let host = &mut Client::route().map_err(socket)?;
    let way = link::way_to(host, planned.underlay.node)?;
    let room = way.mtu.saturating_sub(planned.underlay.overhead);
    // A VM may have several addresses, and the node accepts packets from one. Behind a NAT the VM does not have it.
    let source = match planned.underlay.vm {
        Some(vm) if vm.is_ipv6() == way.source.is_ipv6() && link::is_own(host, vm) => vm,
        _ => way.source,
    };
    let netns = Netns::open(podns)?;
    let pod = &mut netns.netlink()?;
    loopback_up(pod)?;
    let unfiltered = filter(&planned).err().map(|e| e.to_string());
    let mut applied = Applied { mtu: 0, changed: false, unfiltered };
    let mut made = Vec::new();
    for interface in &planned.interfaces {
        let wanted = fitted(interface, room, planned.underlay.node)?;
        if applied.mtu == 0 {
            applied.mtu = wanted.mtu;
        }
        match ensure(host, pod, &netns, &planned.underlay, source, &wanted) {
            Ok(Outcome::Made(index)) => made.push(index),
            Ok(Outcome::Mended) => applied.changed = true,
            Ok(Outcome::AsPlanned) => {}
            Err(e) => {
                for index in made {
                    // The first error is the one that counts; a device that stays is found by the next attempt.
                    drop(vxlan::remove(pod, index));
                }
                return Err(e);
            }
        }
    }
    applied.changed |= !made.is_empty();
    Ok(applied)
}

/// Removes what [`apply`] made. Gone is fine; everything is tried.
///
/// # Errors
/// All that failed.
pub fn remove(plan: &NetworkPlan, podns: &Path) -> Result<(), Vec<Error>> {
    let planned = plan::read(plan).map_err(|e| vec![e])?;
    let mut errors = Vec::new();
    match Netns::open(podns).and_then(|netns| netns.netlink()) {
        Ok(mut pod) => {
            for interface in &planned.interfaces {
                for name in [interface.name.clone(), temporary_name(interface.vni)] {
                    if let Err(e) = remove_device(&mut pod, &name, interface.vni) {
                        errors.push(e);
                    }
                }
            }
        }
        Err(e) if e.is_gone() => {}
        Err(e) => errors.push(e),
    }
    if let Err(e) = unfilter(&planned) {
        errors.push(e);
    }
    if errors.is_empty() { Ok(()) } else { Err(errors) }
}

fn remove_device(pod: &mut Client, name: &str, vni: u32) -> Result<(), Error> {
    let there = link::by_name(pod, name).map_err(Error::kernel(format!("look for {name}")))?;
    match there {
        Some(link) if link.vxlan.as_ref().is_some_and(|v| v.vni == vni) => vxlan::remove(pod, link.index),
        _ => Ok(()),
    }
}

fn socket(source: std::io::Error) -> Error {
    Error::kernel("open a netlink socket")(netlink::Error::Socket(source))
}

/// The interface with an MTU that fits, or what is too small.
fn fitted(interface: &Interface, room: u32, node: IpAddr) -> Result<Interface, Error> {
    let mut wanted = interface.clone();
    let v6 = wanted.addresses.iter().any(|a| a.address.is_ipv6());
    wanted.mtu = plan::fit(wanted.mtu, room, v6, node)?;
    for route in &mut wanted.routes {
        route.mtu = route.mtu.min(wanted.mtu);
    }
    Ok(wanted)
}

enum Outcome {
    Made(u32),
    Mended,
    AsPlanned,
}

fn ensure(
    host: &mut Client,
    pod: &mut Client,
    netns: &Netns,
    underlay: &Underlay,
    source: IpAddr,
    wanted: &Interface,
) -> Result<Outcome, Error> {
    let there =
        link::by_name(pod, &wanted.name).map_err(Error::kernel(format!("look for {}", wanted.name)))?;
    if let Some(link) = there {
        if is_same_tunnel(&link, underlay, source, wanted) {
            return mend(pod, &link, wanted);
        }
        if link.vxlan.is_none() {
            return Err(Error::Plan(format!(
                "the pod's namespace already has an interface {} that is no tunnel",
                wanted.name
            )));
        }
        vxlan::remove(pod, link.index)?; // of an older plan
    }
    let index = create(host, pod, netns, underlay, source, wanted)?;
    let mut items = device_items(index, Some(&wanted.name), wanted);
    items.extend(content_items(index, &wanted.addresses, &wanted.routes, &wanted.neighbours, NLM_F_EXCL));
    match send(pod, items) {
        Ok(()) => Ok(Outcome::Made(index)),
        Err(e) => {
            drop(vxlan::remove(pod, index)); // all or nothing; the error that counts is the first
            Err(e)
        }
    }
}

fn is_same_tunnel(link: &Link, underlay: &Underlay, source: IpAddr, wanted: &Interface) -> bool {
    link.mac == Some(wanted.mac)
        && link.vxlan.as_ref().is_some_and(|vxlan| {
            vxlan.vni == wanted.vni
                && vxlan.port == underlay.port
                && vxlan.remote == Some(underlay.node)
                && vxlan.local == Some(source)
                && (underlay.node.is_ipv6() || vxlan.udp_checksum == underlay.udp_checksum)
        })
}

/// Adds what the interface lacks, and leaves alone what it has beyond the plan.
fn mend(pod: &mut Client, link: &Link, wanted: &Interface) -> Result<Outcome, Error> {
    let has = look::contents(pod, link.index)?;
    let addresses: Vec<Address> =
        wanted.addresses.iter().filter(|a| !has.addresses.contains(a)).cloned().collect();
    let routes: Vec<Route> = wanted.routes.iter().filter(|r| !has.routes.contains(r)).cloned().collect();
    let neighbours: Vec<Neighbour> =
        wanted.neighbours.iter().filter(|n| !has.neighbours.contains(n)).cloned().collect();
    let device_is_right = link.up && link.mtu == wanted.mtu;
    if device_is_right && addresses.is_empty() && routes.is_empty() && neighbours.is_empty() {
        return Ok(Outcome::AsPlanned);
    }
    let mut items = Vec::new();
    if !device_is_right {
        items.append(&mut device_items(link.index, None, wanted));
    }
    items.extend(content_items(link.index, &addresses, &routes, &neighbours, NLM_F_REPLACE));
    send(pod, items)?;
    Ok(Outcome::Mended)
}

/// The name a device has until it is whole. Made under the pod's name it would collide with the VM's own `eth0` on
/// kernels that look for the name in the sender's namespace.
fn temporary_name(vni: u32) -> String {
    format!("pp-{vni:06x}")
}

fn create(
    host: &mut Client,
    pod: &mut Client,
    netns: &Netns,
    underlay: &Underlay,
    source: IpAddr,
    wanted: &Interface,
) -> Result<u32, Error> {
    let shape =
        Shape { port: underlay.port, v6: underlay.node.is_ipv6(), udp_checksum: underlay.udp_checksum };
    let name = temporary_name(wanted.vni);
    let mut settings = vxlan::settings(wanted.vni, shape);
    settings.append(&mut endpoints(underlay.node, Some(source)));
    let mut message = LinkMessage::default();
    message.attributes = vec![
        LinkAttribute::IfName(name.clone()),
        LinkAttribute::Address(wanted.mac.to_vec()),
        LinkAttribute::Mtu(wanted.mtu),
        LinkAttribute::NetNsFd(netns.as_fd().as_raw_fd()),
        vxlan_info(settings),
    ];
    let message = RouteNetlinkMessage::NewLink(message);
    let attempt = || format!("make the tunnel device for {} (VNI {})", wanted.name, wanted.vni);
    let made = match host.tell(NLM_F_CREATE | NLM_F_EXCL, message.clone()) {
        Err(e) if e.errno() == Some(Errno::EEXIST) => {
            // Half of one, from before a crash; then once more.
            remove_device(pod, &name, wanted.vni)?;
            host.tell(NLM_F_CREATE | NLM_F_EXCL, message)
        }
        made => made,
    };
    made.map_err(Error::kernel(attempt()))?;
    let link = link::by_name(pod, &name).map_err(Error::kernel(attempt()))?;
    link.map(|link| link.index).ok_or_else(|| Error::Gone { netns: netns.path().to_owned(), vni: wanted.vni })
}

/// One message with what it is for and whether its refusal matters.
struct Item {
    flags: u16,
    message: RouteNetlinkMessage,
    what: String,
    optional: bool,
}

impl Item {
    fn new(what: String, flags: u16, message: RouteNetlinkMessage) -> Item {
        Item { flags, message, what, optional: false }
    }
}

/// Sends all items and returns the first refusal that matters.
fn send(pod: &mut Client, items: Vec<Item>) -> Result<(), Error> {
    let mut notes = Vec::with_capacity(items.len());
    let mut messages = Vec::with_capacity(items.len());
    for item in items {
        notes.push((item.what, item.optional));
        messages.push((item.flags, item.message));
    }
    let answers = pod.batch(&messages).map_err(Error::kernel("set up the pod's interface"))?;
    for (answer, (what, optional)) in answers.into_iter().zip(notes) {
        match answer {
            Err(no) if !optional && no.errno != Errno::EEXIST => return Err(Error::kernel(what)(no.into())),
            _ => {}
        }
    }
    Ok(())
}

/// Name, MTU, no address of the kernel's own, up.
fn device_items(index: u32, name: Option<&str>, wanted: &Interface) -> Vec<Item> {
    let mut settings = LinkMessage::default();
    settings.header.index = index;
    settings.attributes.push(LinkAttribute::Mtu(wanted.mtu));
    settings.attributes.extend(name.map(|name| LinkAttribute::IfName(name.to_owned())));
    let mut quiet = Item::new(String::new(), 0, RouteNetlinkMessage::SetLink(no_v6_address(index)));
    quiet.optional = true; // a kernel without IPv6 has nothing to switch off
    vec![
        Item::new(
            format!("give the tunnel device the name {} and the MTU {}", wanted.name, wanted.mtu),
            0,
            RouteNetlinkMessage::SetLink(settings),
        ),
        quiet,
        Item::new(format!("take {} up", wanted.name), 0, up(index)),
    ]
}

fn up(index: u32) -> RouteNetlinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.header.flags = LinkFlags::Up;
    message.header.change_mask = LinkFlags::Up;
    RouteNetlinkMessage::SetLink(message)
}

fn loopback_up(pod: &mut Client) -> Result<(), Error> {
    // Index 1 in every namespace.
    pod.tell(0, up(1)).map_err(Error::kernel("take lo up in the pod's namespace"))
}

/// Addresses, then routes without a gateway, then routes with one, then neighbours: each needs what is before it.
fn content_items(
    index: u32,
    addresses: &[Address],
    routes: &[Route],
    neighbours: &[Neighbour],
    mode: u16,
) -> Vec<Item> {
    let mut items = Vec::with_capacity(addresses.len() + routes.len() + neighbours.len());
    for address in addresses {
        let what = format!("add address {}/{}", address.address, address.prefix);
        let message = RouteNetlinkMessage::NewAddress(address_message(index, address));
        items.push(Item::new(what, NLM_F_CREATE | mode, message));
    }
    let (near, far): (Vec<&Route>, Vec<&Route>) = routes.iter().partition(|route| route.gateway.is_none());
    for route in near.into_iter().chain(far) {
        let what = format!("add the route to {}/{}", route.destination, route.prefix);
        let message = RouteNetlinkMessage::NewRoute(route_message(index, route));
        items.push(Item::new(what, NLM_F_CREATE | mode, message));
    }
    for neighbour in neighbours {
        let what = format!("add neighbour {}", neighbour.address);
        let message = RouteNetlinkMessage::NewNeighbour(neighbour_message(index, neighbour));
        items.push(Item::new(what, NLM_F_CREATE | NLM_F_REPLACE, message));
    }
    items
}

fn address_message(index: u32, from: &Address) -> AddressMessage {
    let mut message = AddressMessage::default();
    message.header.family = family(from.address);
    message.header.prefix_len = from.prefix;
    message.header.scope = from.scope.into();
    message.header.index = index;
    // The routes come from the plan alone; and the address was proved unique when the CNI gave it.
    let mut flags = AddressFlags::Noprefixroute;
    message.attributes = vec![AddressAttribute::Local(from.address), AddressAttribute::Address(from.address)];
    match from.address {
        IpAddr::V4(_) => {
            message.attributes.extend(from.broadcast.map(AddressAttribute::Broadcast));
        }
        IpAddr::V6(_) => flags |= AddressFlags::Nodad,
    }
    message.attributes.push(AddressAttribute::Flags(flags));
    message
}

fn route_message(index: u32, from: &Route) -> RouteMessage {
    let mut message = RouteMessage::default();
    message.header.address_family = family(from.destination);
    message.header.destination_prefix_length = from.prefix;
    message.header.table = RouteHeader::RT_TABLE_MAIN;
    message.header.protocol = from.protocol.into();
    message.header.scope = from.scope.into();
    message.header.kind = RouteType::Unicast;
    if from.onlink {
        message.header.flags = RouteFlags::Onlink;
    }
    let attributes = &mut message.attributes;
    if from.prefix > 0 {
        attributes.push(RouteAttribute::Destination(from.destination.into()));
    }
    attributes.push(RouteAttribute::Oif(index));
    match (from.destination, from.gateway) {
        (_, None) => {}
        (IpAddr::V4(_), Some(IpAddr::V6(gateway))) => {
            attributes.push(RouteAttribute::Via(RouteVia::Inet6(gateway)));
        }
        (_, Some(gateway)) => attributes.push(RouteAttribute::Gateway(gateway.into())),
    }
    attributes.extend(from.source.map(|source| RouteAttribute::PrefSource(source.into())));
    if from.metric > 0 {
        attributes.push(RouteAttribute::Priority(from.metric));
    }
    if from.mtu > 0 {
        attributes.push(RouteAttribute::Metrics(vec![RouteMetric::Mtu(from.mtu)]));
    }
    message
}

fn neighbour_message(index: u32, from: &Neighbour) -> NeighbourMessage {
    let mut message = NeighbourMessage::default();
    message.header.family = family(from.address);
    message.header.ifindex = index;
    message.header.state = NeighbourState::Permanent;
    let address = match from.address {
        IpAddr::V4(address) => NeighbourAddress::Inet(address),
        IpAddr::V6(address) => NeighbourAddress::Inet6(address),
    };
    message.attributes.push(NeighbourAttribute::Destination(address));
    let mac = mac_of(&from.mac).unwrap_or_default(); // the plan's reader let nothing else through
    message.attributes.push(NeighbourAttribute::LinkLayerAddress(mac.to_vec()));
    message
}

/// Only the node may send into the tunnels.
fn filter(planned: &Planned) -> Result<(), Error> {
    let mut client = Client::netfilter().map_err(socket)?;
    Filter::new(planned.underlay.port).add(&mut client, &peers(planned), &Vec::new)
}

fn unfilter(planned: &Planned) -> Result<(), Error> {
    let Ok(mut client) = Client::netfilter() else { return Ok(()) }; // no netfilter, no table
    let filter = Filter::new(planned.underlay.port);
    for peer in peers(planned) {
        filter.remove(&mut client, peer)?;
    }
    filter.remove_if_empty(&mut client).map(drop)
}

fn peers(planned: &Planned) -> Vec<Peer> {
    planned.interfaces.iter().map(|i| Peer { address: planned.underlay.node, vni: i.vni }).collect()
}
