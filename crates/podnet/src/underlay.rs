//! Reads the VM's own network devices, which the cloud provides. The guest watches them, reports them to the node, and
//! uses them as the way out. Reads over netlink, in the namespace of the given socket, and changes nothing.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use netlink_packet_route::address::{AddressAttribute, AddressFlags, AddressMessage};
use netlink_packet_route::link::InfoKind;
use netlink_packet_route::route::{RouteAttribute, RouteHeader, RouteMessage, RouteNextHop, RouteType};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use super::Error;
pub use super::link::Mtus;
use super::link::{self, Link, gateway, ip};
use super::netlink::{self, Client};

/// Maximum number of devices. A VM has one or two; containers of its image may add some.
const MAX_LINKS: usize = 256;
const MAX_ADDRESSES: usize = 1024;
const MAX_ROUTES: usize = 4096;
/// Name prefix of this program's own devices, which are no uplinks.
const OURS: &str = "pp-";
const SCOPE_LINK: u8 = 253;
const MAIN: u32 = RouteHeader::RT_TABLE_MAIN as u32;

/// Network device of the VM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnderlayDevice {
    /// Its name.
    pub name: String,
    /// Its index.
    pub index: u32,
    /// Its MAC address.
    pub mac: [u8; 6],
    /// Its MTU, in bytes.
    pub mtu: u32,
    /// Whether it is up.
    pub up: bool,
    /// Its addresses with their prefix lengths, sorted and without link-local ones.
    pub addresses: Vec<(IpAddr, u8)>,
    /// Gateways of its default routes, the best first.
    pub gateways: Vec<IpAddr>,
    /// Whether it has a default route, with a gateway or without one.
    pub is_default: bool,
    /// Networks directly connected to the VM, sorted: the routes without a gateway, and the gateways of all routes.
    /// Where the cloud gives an address without its network (a /32), only these routes show the network.
    pub near: Vec<(IpAddr, u8)>,
}

impl UnderlayDevice {
    /// Returns whether it has an address of this family.
    pub fn has(&self, v6: bool) -> bool {
        self.addresses.iter().any(|(address, _)| address.is_ipv6() == v6)
    }
}

/// Returns all Ethernet devices that could lead out, without their addresses and routes.
pub fn nics(client: &mut Client) -> Result<Vec<UnderlayDevice>, Error> {
    let all = link::all_that(client, MAX_LINKS, is_nic).map_err(asking("devices"))?;
    let of = |link: Link| UnderlayDevice {
        name: link.name,
        index: link.index,
        mac: link.mac.unwrap_or_default(),
        mtu: link.mtu,
        up: link.flags.up,
        ..UnderlayDevice::default()
    };
    Ok(all.into_iter().map(of).collect())
}

/// Returns all Ethernet devices that have an address or a default route, by index.
pub fn inspect(client: &mut Client) -> Result<Vec<UnderlayDevice>, Error> {
    let mut uplinks = nics(client)?;
    for (index, address, prefix) in addresses(client)? {
        if let Some(uplink) = uplinks.iter_mut().find(|uplink| uplink.index == index) {
            uplink.addresses.push((address, prefix));
        }
    }
    let mut hops = hops(client, false)?;
    hops.sort_unstable_by_key(|hop| (hop.v6, hop.metric));
    for hop in hops {
        let Some(uplink) = uplinks.iter_mut().find(|uplink| uplink.index == hop.index) else { continue };
        if hop.is_default() {
            uplink.is_default = true;
            uplink.gateways.extend(hop.gateway);
        }
        uplink.near.extend(hop.near());
    }
    uplinks.retain(|uplink| uplink.is_default || !uplink.addresses.is_empty());
    for uplink in &mut uplinks {
        uplink.addresses.sort_unstable();
        uplink.near.sort_unstable();
        uplink.near.dedup();
    }
    uplinks.sort_unstable_by_key(|uplink| uplink.index);
    Ok(uplinks)
}

/// Returns the gateways of default routes through the device of this index, in any table but `without`. Those of the
/// main table come first. Clouds' own tools give each further NIC a table of its own.
pub(super) fn gateways(client: &mut Client, index: u32, without: u32) -> Result<Vec<IpAddr>, Error> {
    let mut all = hops(client, true)?;
    all.retain(|hop| hop.is_default() && hop.index == index && hop.table != without);
    all.sort_unstable_by_key(|hop| (hop.table != MAIN, hop.table, hop.metric));
    let mut gateways = Vec::new();
    for gateway in all.into_iter().filter_map(|hop| hop.gateway) {
        if !gateways.contains(&gateway) {
            gateways.push(gateway);
        }
    }
    Ok(gateways)
}

/// Returns the name of the device that leads to `peer`.
///
/// # Errors
/// [`Error::Path`] where there is no path to it.
pub fn towards(client: &mut Client, peer: IpAddr) -> Result<String, Error> {
    Ok(link::path_to(client, peer)?.device)
}

/// Returns whether an address is usable beyond its own network segment: it is not link-local.
pub fn reaches_far(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(own) => !own.is_link_local(),
        IpAddr::V6(own) => !own.is_unicast_link_local(),
    }
}

fn asking(what: &'static str) -> impl FnOnce(netlink::Error) -> Error {
    Error::kernel(format!("read the VM's {what}"))
}

/// Returns whether it is a device that the cloud provides: Ethernet, and no virtual device of this kernel (bridge,
/// tunnel, ...). A veth counts only if its other end is in another namespace, as in a VM made of namespaces.
fn is_nic(link: &Link) -> bool {
    let fit = match link.kind {
        // A bond or a VLAN may lead to the cloud's network.
        None | Some(InfoKind::Bond | InfoKind::Vlan) => true,
        Some(InfoKind::Veth) => link.elsewhere,
        Some(_) => false,
    };
    fit && link.mac.is_some() && !link.flags.loopback && !link.name.starts_with(OURS)
}

/// Returns whether an address is ready. It is not ready during duplicate address detection, or if that failed. Its
/// later readiness is a change of the VM's network, which a watcher sees.
fn is_ready(flags: AddressFlags) -> bool {
    !flags.contains(AddressFlags::Dadfailed)
        && (!flags.contains(AddressFlags::Tentative) || flags.contains(AddressFlags::Optimistic))
}

fn addresses(client: &mut Client) -> Result<Vec<(u32, IpAddr, u8)>, Error> {
    let read = |answer| match answer {
        RouteNetlinkMessage::NewAddress(message) => {
            if u8::from(message.header.scope) >= SCOPE_LINK {
                return None;
            }
            let (mut address, mut local) = (None, None);
            for attribute in &message.attributes {
                match attribute {
                    AddressAttribute::Address(a) => address = Some(*a),
                    AddressAttribute::Local(a) => local = Some(*a),
                    AddressAttribute::Flags(flags) if !is_ready(*flags) => return None,
                    _ => {}
                }
            }
            Some((message.header.index, local.or(address)?, message.header.prefix_len))
        }
        _ => None,
    };
    client
        .dump(&RouteNetlinkMessage::GetAddress(AddressMessage::default()), MAX_ADDRESSES, read)
        .map_err(asking("addresses"))
}

#[derive(Clone, Debug)]
struct Hop {
    v6: bool,
    table: u32,
    destination: Option<(IpAddr, u8)>,
    metric: u32,
    index: u32,
    gateway: Option<IpAddr>,
}

impl Hop {
    fn is_default(&self) -> bool {
        self.destination.is_none()
    }

    /// Returns the network or gateway of the hop that is directly connected to the VM. Link-local addresses are
    /// omitted: every machine has them beside it, and no packet to one is ever forwarded.
    fn near(&self) -> Option<(IpAddr, u8)> {
        let near = match self.gateway {
            Some(gateway) => Some((gateway, link::bits(gateway))),
            None => self.destination,
        };
        near.filter(|(address, _)| !matches!(address, IpAddr::V6(a) if a.is_unicast_link_local()))
    }
}

/// Returns the hops of the main table, or of every table.
fn hops(client: &mut Client, everywhere: bool) -> Result<Vec<Hop>, Error> {
    let mut all = Vec::new();
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        let mut message = RouteMessage::default();
        message.header.address_family = family;
        if !everywhere {
            message.header.table = RouteHeader::RT_TABLE_MAIN;
            message.attributes.push(RouteAttribute::Table(MAIN));
        }
        let found = client.dump(&RouteNetlinkMessage::GetRoute(message), MAX_ROUTES, |answer| match answer {
            RouteNetlinkMessage::NewRoute(route) if route.header.address_family == family => {
                Some(read_hops(&route)).filter(|hops| everywhere || hops.iter().all(|hop| hop.table == MAIN))
            }
            _ => None,
        });
        match found {
            Ok(found) => all.extend(found.into_iter().flatten()),
            // A table without routes does not exist, and a kernel without IPv6 has no such routes.
            Err(netlink::Error::Refused(_)) => {}
            Err(e) => return Err(asking("routes")(e)),
        }
    }
    Ok(all)
}

fn read_hops(route: &RouteMessage) -> Vec<Hop> {
    let header = &route.header;
    if header.kind != RouteType::Unicast {
        return Vec::new();
    }
    let v6 = header.address_family == AddressFamily::Inet6;
    let bits = header.destination_prefix_length;
    let table = u32::from(header.table);
    let mut hop = Hop { v6, table, destination: None, metric: 0, index: 0, gateway: None };
    let mut several = Vec::new();
    for attribute in &route.attributes {
        match attribute {
            RouteAttribute::Destination(a) => hop.destination = ip(a).map(|ip| (ip, bits)),
            RouteAttribute::Oif(oif) => hop.index = *oif,
            RouteAttribute::Table(number) => hop.table = *number,
            RouteAttribute::Priority(priority) => hop.metric = *priority,
            RouteAttribute::MultiPath(hops) => several.clone_from(hops),
            other => hop.gateway = gateway(other).or(hop.gateway),
        }
    }
    hop.destination = hop.destination.filter(|_| bits > 0);
    if several.is_empty() {
        return if hop.index == 0 { Vec::new() } else { vec![hop] };
    }
    let one = |next: &RouteNextHop| {
        let gateway = next.attributes.iter().find_map(gateway);
        Hop { index: next.interface_index, gateway, ..hop.clone() }
    };
    several.iter().map(one).collect()
}

/// Returns the network of an address.
pub fn network(address: IpAddr, prefix: u8) -> (IpAddr, u8) {
    match address {
        IpAddr::V4(a) => {
            let mask = u32::MAX.checked_shl(32 - u32::from(prefix.min(32))).unwrap_or(0);
            (Ipv4Addr::from(u32::from(a) & mask).into(), prefix.min(32))
        }
        IpAddr::V6(a) => {
            let mask = u128::MAX.checked_shl(128 - u32::from(prefix.min(128))).unwrap_or(0);
            (Ipv6Addr::from(u128::from(a) & mask).into(), prefix.min(128))
        }
    }
}

/// Reads the MTUs of the path to `peer` from the kernel, in the calling thread's namespace.
///
/// # Errors
/// [`Error::Path`] without a route to `peer`.
pub fn mtus(peer: IpAddr) -> Result<Mtus, Error> {
    let mut client = Client::route().map_err(Error::socket)?;
    Ok(link::path_to(&mut client, peer.to_canonical())?.mtus)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::netns::Netns;

    fn ip(netns: &Netns, arguments: &str) {
        let run = || Command::new("ip").args(arguments.split(' ')).status();
        assert!(netns.run(run).unwrap().unwrap().success(), "ip {arguments}");
    }

    #[test]
    fn addresses_of_the_cloud_are_distinguished_from_local_ones() {
        let (vm, cloud) = (Netns::scratch().unwrap(), Netns::scratch().unwrap());
        // Made in the cloud's namespace and moved over, as in a VM of the local provider.
        let target = format!("/proc/{}/fd/{}", std::process::id(), {
            use std::os::fd::{AsFd, AsRawFd};
            vm.as_fd().as_raw_fd()
        });
        ip(&cloud, &format!("link add c0 type veth peer name eth0 netns {target}"));
        ip(&vm, "link add docker0 type bridge");
        ip(&vm, "link add v0 type veth peer name v1");
        for (device, address) in
            [("eth0", "10.9.0.5/24"), ("docker0", "172.17.0.1/16"), ("v0", "10.8.0.1/24")]
        {
            ip(&vm, &format!("addr add {address} dev {device}"));
            ip(&vm, &format!("link set {device} up"));
        }
        ip(&vm, "addr add fd09::5/64 dev eth0 nodad");
        ip(&vm, "route add default via 10.9.0.1");
        ip(&vm, "route add default via 10.9.0.2 metric 50");
        ip(&vm, "route add 10.20.0.0/16 dev eth0");
        ip(&vm, "route add 10.30.0.0/16 nexthop via 10.9.0.3 nexthop via 10.9.0.4");
        ip(&vm, "route add 192.168.0.0/16 dev docker0");
        let seen = inspect(&mut vm.netlink().unwrap()).unwrap();
        let [uplink] = seen.as_slice() else { panic!("{seen:?}") };
        assert_eq!((uplink.name.as_str(), uplink.mtu, uplink.is_default), ("eth0", 1500, true));
        let addresses = [("10.9.0.5", 24), ("fd09::5", 64)].map(|(a, p)| (a.parse::<IpAddr>().unwrap(), p));
        assert_eq!(uplink.addresses, addresses);
        assert_eq!(uplink.gateways, ["10.9.0.1", "10.9.0.2"].map(|a| a.parse::<IpAddr>().unwrap()));
        let near = [
            ("10.9.0.0", 24),
            ("10.9.0.1", 32),
            ("10.9.0.2", 32),
            ("10.9.0.3", 32),
            ("10.9.0.4", 32),
            ("10.20.0.0", 16),
            ("fd09::", 64),
        ];
        assert_eq!(uplink.near, near.map(|(a, p)| (a.parse::<IpAddr>().unwrap(), p)));
        assert_eq!(towards(&mut vm.netlink().unwrap(), "10.9.0.77".parse().unwrap()).unwrap(), "eth0");
    }

    #[test]
    fn the_network_of_an_address_is_its_prefix() {
        let of = |text: &str, prefix| network(text.parse().unwrap(), prefix).0.to_string();
        assert_eq!(of("10.9.1.5", 16), "10.9.0.0");
        assert_eq!(of("10.9.1.5", 0), "0.0.0.0");
        assert_eq!(of("10.9.1.5", 32), "10.9.1.5");
        assert_eq!(of("fd09:1:2::5", 32), "fd09:1::");
        assert_eq!(of("fd09::5", 0), "::");
    }
}
