//! Describes the settings of a NIC, from a lease or the kernel command line, as plain data, and applies them to the
//! kernel. Applying also removes unwanted settings of before: addresses that end, routes of DHCP. Settings of other
//! programs stay.

use std::net::{IpAddr, Ipv4Addr};

use mozim::{DhcpV4Lease, DhcpV6Lease};
use netlink_packet_core::{NLM_F_CREATE, NLM_F_REPLACE};
use netlink_packet_route::address::{AddressAttribute, AddressFlags, AddressMessage, CacheInfo};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use peerpod_podnet::netlink::{Client, Error};
use peerpod_podnet::underlay::network;
use rtnetlink::{LinkUnspec, RouteMessageBuilder};

/// Longest lifetime in seconds. The kernel marks an endless address as permanent, and the guest treats a permanent
/// address as one of another program.
const LONGEST: u32 = 10 * 365 * 24 * 3600;
/// Least MTU: IPv4 does not work below it, and IPv6 needs 1280.
const LEAST_MTU: u32 = 1280;
/// Route metric of the first NIC; those of further NICs are worse.
const METRIC: u32 = 1000;
const MOST_ROUTES: usize = 64;
const MOST_SERVERS: usize = 3;
const MOST_ENTRIES: usize = 4096;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WantedRoute {
    pub(crate) destination: (IpAddr, u8),
    pub(crate) gateway: Option<IpAddr>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WantedNic {
    pub(crate) address: IpAddr,
    pub(crate) prefix: u8,
    pub(crate) broadcast: Option<Ipv4Addr>,
    /// Valid and preferred lifetime in seconds; the latter counts for new connections. `None` means for ever.
    pub(crate) lifetime: Option<(u32, u32)>,
    pub(crate) routes: Vec<WantedRoute>,
    pub(crate) mtu: Option<u32>,
    pub(crate) dns: Vec<IpAddr>,
    pub(crate) search: Vec<String>,
}

impl WantedNic {
    /// Converts a lease. Its host name is ignored: the pod's name is not up to the cloud.
    pub(crate) fn of_v4(lease: &DhcpV4Lease) -> WantedNic {
        let any = (IpAddr::from(Ipv4Addr::UNSPECIFIED), 0);
        let default = |gateway: &Ipv4Addr| WantedRoute { destination: any, gateway: Some((*gateway).into()) };
        let routes = lease.classless_routes.iter().flatten().take(MOST_ROUTES);
        let routes = routes.map(|route| WantedRoute {
            destination: network(route.destination.into(), route.prefix_length),
            gateway: Some(route.router).filter(|router| !router.is_unspecified()).map(IpAddr::from),
        });
        let wanted_routes = match &lease.classless_routes {
            // RFC 3442: with these, the router option does not count.
            Some(_) => routes.collect(),
            None => lease.gateways.iter().flatten().take(1).map(default).collect(),
        };
        let time = lease.lease_time_sec.min(LONGEST);
        let search = lease.domain_search.clone().or(lease.domain_name.clone().map(|one| vec![one]));
        WantedNic {
            address: lease.yiaddr.into(),
            prefix: lease.subnet_mask.to_bits().leading_ones() as u8,
            broadcast: lease.broadcast_addr,
            lifetime: Some((time, time)),
            routes: wanted_routes,
            mtu: lease.mtu.map(u32::from).filter(|mtu| *mtu >= LEAST_MTU),
            dns: lease.dns_srvs.iter().flatten().take(MOST_SERVERS).map(|server| (*server).into()).collect(),
            search: search.unwrap_or_default(),
        }
    }

    /// Converts a lease. It has no routes: a router announces them.
    pub(crate) fn of_v6(lease: &DhcpV6Lease) -> WantedNic {
        let (valid, preferred) = (lease.valid_time_sec.min(LONGEST), lease.preferred_time_sec.min(LONGEST));
        WantedNic {
            address: lease.address.into(),
            prefix: 128,
            broadcast: None,
            lifetime: Some((valid, preferred.min(valid))),
            routes: Vec::new(),
            mtu: None,
            dns: lease.dns_srvs.iter().take(MOST_SERVERS).map(|server| (*server).into()).collect(),
            search: lease.domain_list.clone(),
        }
    }

    /// Applies the settings to a NIC. `rank` is the number of the NIC, from 0. The error names the failed step.
    pub(crate) fn apply(&self, client: &mut Client, index: u32, rank: u32) -> Result<(), String> {
        if let Some(mtu) = self.mtu {
            let link = LinkUnspec::new_with_index(index).mtu(mtu);
            // A NIC may carry less than its network does.
            if let Err(error) = client.tell(0, RouteNetlinkMessage::SetLink(link.build())) {
                tracing::warn!(mtu, %error, "the NIC does not take the MTU that the network announces");
            }
        }
        let replace = NLM_F_CREATE | NLM_F_REPLACE;
        let failed = |what: String| move |error: Error| format!("{what}: {error}");
        let give = |client: &mut Client| {
            let message = RouteNetlinkMessage::NewAddress(self.address_message(index));
            let what = format!("give the NIC {}/{}", self.address, self.prefix);
            client.tell(replace, message).map_err(failed(what))
        };
        give(client)?;
        let mut went = false;
        for message in self.left_over(client, index)? {
            went |= matches!(message, RouteNetlinkMessage::DelAddress(_));
            // It may have gone together with another entry.
            if let Err(error) = client.tell(0, message) {
                tracing::debug!(%error, "cannot remove an entry of an earlier lease");
            }
        }
        if went {
            // With the first address of a network the kernel removes all others of it, even the new one.
            give(client)?;
        }
        // Routes without a gateway first: they may lead to a gateway.
        let (direct, by_gateway): (Vec<_>, Vec<_>) =
            self.routes.iter().partition(|route| route.gateway.is_none());
        for wanted in direct.into_iter().chain(by_gateway) {
            let (to, bits) = wanted.destination;
            let attempt = format!("make the route to {to}/{bits}");
            let route = self.route(wanted, index, rank).map_err(|why| format!("{attempt}: {why}"))?;
            client.tell(replace, RouteNetlinkMessage::NewRoute(route)).map_err(failed(attempt))?;
        }
        Ok(())
    }

    /// Not by rtnetlink's builder: it adds a broadcast address of its own choice, and has no lifetimes.
    fn address_message(&self, index: u32) -> AddressMessage {
        let mut message = AddressMessage::default();
        message.header.family = family(self.address);
        message.header.prefix_len = self.prefix;
        message.header.index = index;
        let attributes = &mut message.attributes;
        attributes.extend([AddressAttribute::Local(self.address), AddressAttribute::Address(self.address)]);
        attributes.extend(self.broadcast.map(AddressAttribute::Broadcast));
        if let Some((valid, preferred)) = self.lifetime {
            let mut times = CacheInfo::default();
            (times.ifa_valid, times.ifa_preferred) = (valid, preferred);
            attributes.push(AddressAttribute::CacheInfo(times));
        }
        message
    }

    fn route(&self, wanted: &WantedRoute, index: u32, rank: u32) -> Result<RouteMessage, String> {
        let (to, bits) = wanted.destination;
        let route = RouteMessageBuilder::<IpAddr>::new()
            .protocol(RouteProtocol::Dhcp)
            .output_interface(index)
            .priority(METRIC + rank)
            .destination_prefix(to, bits)
            .and_then(|route| route.pref_source(self.address))
            .map_err(|e| e.to_string())?;
        let Some(gateway) = wanted.gateway else { return Ok(route.scope(RouteScope::Link).build()) };
        // Clouds assign addresses without a network, and no route leads to their gateway.
        let is_near = network(gateway, self.prefix) == network(self.address, self.prefix);
        let is_routed = self.routes.iter().any(|other| {
            let (_, bits) = other.destination;
            other.gateway.is_none() && network(gateway, bits) == other.destination
        });
        let route = route.gateway(gateway).map_err(|e| e.to_string())?;
        Ok(if is_near || is_routed { route.build() } else { route.onlink().build() })
    }

    /// Returns the messages that remove unwanted addresses and routes of earlier leases.
    fn left_over(&self, client: &mut Client, index: u32) -> Result<Vec<RouteNetlinkMessage>, String> {
        let wants = |to: IpAddr, bits: u8| self.routes.iter().any(|route| route.destination == (to, bits));
        let mut all = Vec::new();
        if self.address.is_ipv4() {
            let mut ask = RouteMessage::default();
            ask.header.address_family = AddressFamily::Inet;
            let routes =
                client.dump(&RouteNetlinkMessage::GetRoute(ask), MOST_ENTRIES, |answer| match answer {
                    RouteNetlinkMessage::NewRoute(route) => is_ours(&route, index).then_some(route),
                    _ => None,
                });
            for route in routes.map_err(|error| format!("read the routes: {error}"))? {
                let (to, bits) = destination(&route);
                if !wants(to, bits) {
                    all.push(RouteNetlinkMessage::DelRoute(route));
                }
            }
        }
        for address in addresses(client, index)? {
            let is_v4 = address.header.family == AddressFamily::Inet;
            // Only IPv4: routers, too, assign addresses of IPv6.
            let is_other = local(&address).is_some_and(|local| local != self.address);
            if is_v4 && self.address.is_ipv4() && is_other && !is_permanent(&address) {
                all.push(RouteNetlinkMessage::DelAddress(address));
            }
        }
        Ok(all)
    }
}

/// Removes an address that its server does not grant any more.
pub(crate) fn remove(client: &mut Client, index: u32, gone: IpAddr) -> Result<(), String> {
    for address in addresses(client, index)?.into_iter().filter(|address| local(address) == Some(gone)) {
        let removed = client.tell(0, RouteNetlinkMessage::DelAddress(address));
        removed.map_err(|error| format!("remove {gone}: {error}"))?;
    }
    Ok(())
}

pub(crate) fn bring_up(client: &mut Client, index: u32) -> Result<(), Error> {
    client.tell(0, RouteNetlinkMessage::SetLink(LinkUnspec::new_with_index(index).up().build()))
}

pub(crate) fn addresses(client: &mut Client, index: u32) -> Result<Vec<AddressMessage>, String> {
    let read = |answer| match answer {
        RouteNetlinkMessage::NewAddress(address) => (address.header.index == index).then_some(address),
        _ => None,
    };
    client
        .dump(&RouteNetlinkMessage::GetAddress(AddressMessage::default()), MOST_ENTRIES, read)
        .map_err(|error| format!("read the addresses: {error}"))
}

/// Returns the address of a message.
pub(crate) fn local(message: &AddressMessage) -> Option<IpAddr> {
    let of = |want_local: bool| {
        message.attributes.iter().find_map(|attribute| match attribute {
            AddressAttribute::Local(address) if want_local => Some(*address),
            AddressAttribute::Address(address) if !want_local => Some(*address),
            _ => None,
        })
    };
    of(true).or(of(false))
}

/// Returns whether an address never ends, and so comes from no lease.
pub(crate) fn is_permanent(message: &AddressMessage) -> bool {
    has_flag(message, AddressFlags::Permanent)
}

pub(crate) fn has_flag(message: &AddressMessage, flag: AddressFlags) -> bool {
    let has = |attribute: &AddressAttribute| matches!(attribute, AddressAttribute::Flags(all) if all.contains(flag));
    message.attributes.iter().any(has)
}

fn is_ours(route: &RouteMessage, index: u32) -> bool {
    route.attributes.contains(&RouteAttribute::Oif(index))
        && route.header.protocol == RouteProtocol::Dhcp
        && route.header.table == RouteHeader::RT_TABLE_MAIN
}

fn destination(route: &RouteMessage) -> (IpAddr, u8) {
    let to = route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Destination(RouteAddress::Inet(to)) => Some(IpAddr::V4(*to)),
        RouteAttribute::Destination(RouteAddress::Inet6(to)) => Some(IpAddr::V6(*to)),
        _ => None,
    });
    (to.unwrap_or(Ipv4Addr::UNSPECIFIED.into()), route.header.destination_prefix_length)
}

fn family(address: IpAddr) -> AddressFamily {
    if address.is_ipv6() { AddressFamily::Inet6 } else { AddressFamily::Inet }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use peerpod_podnet::netns::Netns;

    use super::*;

    fn lease() -> DhcpV4Lease {
        let mut lease = DhcpV4Lease::default();
        lease.yiaddr = "10.7.0.9".parse().unwrap();
        lease.subnet_mask = "255.255.255.0".parse().unwrap();
        lease.lease_time_sec = u32::MAX;
        lease.gateways = Some(vec!["10.7.0.1".parse().unwrap(), "10.7.0.2".parse().unwrap()]);
        lease.dns_srvs = Some(vec!["10.7.0.53".parse().unwrap(); 9]);
        lease.mtu = Some(68);
        lease.host_name = Some("intruder".into());
        lease
    }

    #[test]
    fn values_of_a_lease_are_bounded() {
        let wanted = WantedNic::of_v4(&lease());
        assert_eq!((wanted.prefix, wanted.mtu, wanted.dns.len()), (24, None, MOST_SERVERS));
        assert_eq!(wanted.lifetime, Some((LONGEST, LONGEST)), "an entry without a lifetime looks foreign");
        assert_eq!(wanted.routes.len(), 1);
        assert!(!format!("{wanted:?}").contains("intruder"));
    }

    #[test]
    fn masks_are_those_of_networks() {
        for (address, bits, expected) in [
            ("10.7.3.9", 24, "10.7.3.0"),
            ("10.7.3.9", 0, "0.0.0.0"),
            ("10.7.3.9", 32, "10.7.3.9"),
            ("fd00::9", 64, "fd00::"),
        ] {
            assert_eq!(network(address.parse().unwrap(), bits), (expected.parse().unwrap(), bits));
        }
    }

    fn ip(netns: &Netns, arguments: &str) -> String {
        let run = || Command::new("ip").args(arguments.split(' ')).output().unwrap();
        let output = netns.run(run).unwrap();
        assert!(output.status.success(), "ip {arguments}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    #[test]
    fn a_new_address_of_the_same_network_survives_the_old_ones_removal() {
        let netns = Netns::scratch().unwrap();
        ip(&netns, "link add c0 type veth peer name c1");
        ip(&netns, "link set c1 up");
        let mut client = netns.netlink().unwrap();
        let index: u32 = ip(&netns, "-o link show c0").split(':').next().unwrap().parse().unwrap();
        bring_up(&mut client, index).unwrap();
        for own in ["10.7.0.9", "10.7.0.77"] {
            let wanted = WantedNic { address: own.parse().unwrap(), ..WantedNic::of_v4(&lease()) };
            wanted.apply(&mut client, index, 0).unwrap();
            let addresses = ip(&netns, "-4 addr show c0");
            assert!(addresses.contains(&format!("inet {own}/24")), "{addresses}");
            assert_eq!(addresses.matches("inet ").count(), 1, "{addresses}");
            let routes = ip(&netns, "route");
            let default = format!("default via 10.7.0.1 dev c0 proto dhcp src {own} metric 1000");
            assert!(routes.contains(&default) && routes.contains("10.7.0.0/24 dev c0"), "{routes}");
        }
    }

    #[test]
    fn the_kernel_has_the_last_lease_and_nothing_of_the_previous_one() {
        let netns = Netns::scratch().unwrap();
        ip(&netns, "link add c0 type veth peer name c1");
        ip(&netns, "link set c1 up");
        ip(&netns, "addr add 10.99.0.1/24 dev c0"); // of another program
        let mut client = netns.netlink().unwrap();
        let index: u32 = ip(&netns, "-o link show c0").split(':').next().unwrap().parse().unwrap();
        bring_up(&mut client, index).unwrap();

        let mut wanted = WantedNic::of_v4(&lease());
        wanted.mtu = Some(1400);
        wanted.apply(&mut client, index, 0).unwrap();
        let addresses = ip(&netns, "addr show c0");
        assert!(addresses.contains("10.7.0.9/24") && addresses.contains("mtu 1400"), "{addresses}");
        assert!(
            ip(&netns, "route").contains("default via 10.7.0.1 dev c0 proto dhcp src 10.7.0.9 metric 1000")
        );

        // Settings of a cloud: no network, a gateway beside it, another route, and one without a gateway.
        let route = |to: &str, bits, gateway: Option<&str>| WantedRoute {
            destination: (to.parse().unwrap(), bits),
            gateway: gateway.map(|gateway| gateway.parse().unwrap()),
        };
        let cloud = WantedNic {
            address: "10.8.0.9".parse().unwrap(),
            prefix: 32,
            routes: vec![
                route("0.0.0.0", 0, Some("10.8.0.1")),
                route("10.8.0.1", 32, None),
                route("192.168.0.0", 16, Some("10.8.7.7")),
            ],
            ..wanted
        };
        for _ in 0..2 {
            cloud.apply(&mut client, index, 0).unwrap();
            let routes = ip(&netns, "route");
            assert!(routes.contains("default via 10.8.0.1 dev c0 proto dhcp"), "{routes}");
            assert!(routes.contains("10.8.0.1 dev c0 proto dhcp scope link"), "{routes}");
            assert!(routes.contains("192.168.0.0/16 via 10.8.7.7"), "{routes}");
            assert!(!routes.contains("10.7.0"), "{routes}");
            let addresses = ip(&netns, "addr show c0");
            assert!(!addresses.contains("10.7.0.9") && addresses.contains("10.99.0.1/24"), "{addresses}");
        }
        remove(&mut client, index, cloud.address).unwrap();
        assert!(!ip(&netns, "addr show c0").contains("10.8.0.9"));
    }
}
