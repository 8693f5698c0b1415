//! The network plan: from what the node saw to the message for the guest, and back with everything checked. Pure.

use std::net::IpAddr;

use peerpod_proto::guest as wire;

use super::Error;
use super::link::{mac_of, mac_text};
use super::look::{Address, Neighbour, Route, Seen};

const VERSION: u32 = 1;
const KIND: &str = "vxlan";
const MAIN_TABLE: u32 = 254;
const MAX_INTERFACES: usize = 8;
const MAX_ENTRIES: usize = 8192;
const MAX_OVERHEAD: u32 = 256;

/// What the guest needs to know about the node's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Underlay {
    /// The node's address as the VM reaches it.
    pub node: IpAddr,
    /// The VM's address as the node reaches it, and the only source the node accepts.
    pub vm: Option<IpAddr>,
    /// UDP port of both ends.
    pub port: u16,
    /// Whether IPv4 packets carry a UDP checksum.
    pub udp_checksum: bool,
    /// Bytes the tunnel adds to a packet.
    pub overhead: u32,
}

/// A plan that makes sense.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Planned {
    /// The node's end.
    pub underlay: Underlay,
    /// The pod's interfaces, at least one.
    pub interfaces: Vec<Interface>,
}

/// One interface to make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// Its name in the pod.
    pub name: String,
    /// Its MAC address.
    pub mac: [u8; 6],
    /// The most its MTU may be, in bytes.
    pub mtu: u32,
    /// The tunnel's VNI.
    pub vni: u32,
    /// Addresses.
    pub addresses: Vec<Address>,
    /// Main-table routes.
    pub routes: Vec<Route>,
    /// Permanent neighbours, with MAC.
    pub neighbours: Vec<Neighbour>,
}

/// The message for the guest. `mtu` is what fits through the tunnel as the node sees it.
pub fn write(seen: &Seen, vni: u32, mtu: u32, underlay: &Underlay) -> wire::NetworkPlan {
    let text = |address: Option<IpAddr>| address.map(|a| a.to_string()).unwrap_or_default();
    let from = &seen.interface;
    let mut interface = wire::Interface::new();
    interface.name.clone_from(&from.name);
    interface.mac.clone_from(&from.mac);
    interface.mtu = mtu;
    interface.vni = vni;
    for address in &from.addresses {
        let mut to = wire::Address::new();
        to.prefix = format!("{}/{}", address.address, address.prefix);
        to.scope = address.scope.into();
        interface.addresses.push(to);
    }
    for route in &from.routes {
        let mut to = wire::Route::new();
        to.destination = format!("{}/{}", route.destination, route.prefix);
        to.gateway = text(route.gateway);
        to.source = text(route.source);
        to.metric = route.metric;
        to.table = MAIN_TABLE;
        to.protocol = route.protocol.into();
        to.scope = route.scope.into();
        to.onlink = route.onlink;
        to.mtu = route.mtu;
        interface.routes.push(to);
    }
    for neighbour in &from.neighbours {
        let mut to = wire::Neighbour::new();
        to.address = neighbour.address.to_string();
        to.mac.clone_from(&neighbour.mac);
        interface.neighbours.push(to);
    }
    let mut end = wire::Underlay::new();
    end.kind = KIND.to_owned();
    end.node_address = underlay.node.to_string();
    end.vm_address = text(underlay.vm);
    end.port = underlay.port.into();
    end.udp_checksum = underlay.udp_checksum;
    end.overhead = underlay.overhead;
    let mut plan = wire::NetworkPlan::new();
    plan.version = VERSION;
    plan.interfaces.push(interface);
    plan.underlay = Some(end).into();
    plan
}

/// Reads a plan and refuses what makes no sense, naming it.
///
/// # Errors
/// [`Error::Plan`].
pub fn read(plan: &wire::NetworkPlan) -> Result<Planned, Error> {
    if plan.version != VERSION {
        return Err(wrong(format!("version {} is unknown, this guest knows {VERSION}", plan.version)));
    }
    let end = plan.underlay.as_ref().ok_or_else(|| wrong("it has no underlay".to_owned()))?;
    if end.kind != KIND {
        return Err(wrong(format!("underlay {:?} is unknown, this guest knows {KIND:?}", end.kind)));
    }
    let underlay = Underlay {
        node: address("the node's address", &end.node_address)?,
        vm: optional("the VM's address", &end.vm_address)?,
        port: small("the port", end.port)?,
        udp_checksum: end.udp_checksum,
        overhead: end.overhead,
    };
    if underlay.port == 0 || underlay.overhead > MAX_OVERHEAD {
        return Err(wrong(format!("port {} with an overhead of {} bytes", end.port, end.overhead)));
    }
    if plan.interfaces.is_empty() || plan.interfaces.len() > MAX_INTERFACES {
        return Err(wrong(format!("it has {} interfaces, not 1 to {MAX_INTERFACES}", plan.interfaces.len())));
    }
    let interfaces = plan.interfaces.iter().map(read_interface).collect::<Result<Vec<_>, _>>()?;
    Ok(Planned { underlay, interfaces })
}

fn read_interface(from: &wire::Interface) -> Result<Interface, Error> {
    let entries = from.addresses.len() + from.routes.len() + from.neighbours.len();
    if entries > MAX_ENTRIES {
        return Err(wrong(format!(
            "{entries} addresses, routes and neighbours; at most {MAX_ENTRIES} are taken"
        )));
    }
    // As the kernel has it, and never one that is in every namespace.
    let fit = (1..16).contains(&from.name.len())
        && !matches!(from.name.as_str(), "." | ".." | "lo")
        && from.name.bytes().all(|b| b.is_ascii_graphic() && !matches!(b, b'/' | b':' | b'%'));
    if !fit {
        return Err(wrong(format!("{:?} is no name for an interface", from.name)));
    }
    let mac = mac_of(&from.mac)
        .filter(|mac| mac[0] & 1 == 0 && mac != &[0; 6])
        .ok_or_else(|| wrong(format!("{:?} is no MAC address for an interface", from.mac)))?;
    if !(1..=0xff_ffff).contains(&from.vni) {
        return Err(wrong(format!("VNI {} is not 1 to 16777215", from.vni)));
    }
    Ok(Interface {
        name: from.name.clone(),
        mac,
        mtu: from.mtu,
        vni: from.vni,
        addresses: from.addresses.iter().map(read_address).collect::<Result<_, _>>()?,
        routes: from.routes.iter().map(read_route).collect::<Result<_, _>>()?,
        neighbours: from.neighbours.iter().map(read_neighbour).collect::<Result<_, _>>()?,
    })
}

fn read_address(from: &wire::Address) -> Result<Address, Error> {
    let (address, prefix) = prefix("address", &from.prefix)?;
    if address.is_unspecified() || address.is_multicast() {
        return Err(wrong(format!("{address} is no address for an interface")));
    }
    Ok(Address { address, prefix, scope: small("an address's scope", from.scope)? })
}

fn read_route(from: &wire::Route) -> Result<Route, Error> {
    let (destination, prefix) = prefix("route", &from.destination)?;
    if from.table != MAIN_TABLE {
        return Err(wrong(format!(
            "route {} is for table {}, not {MAIN_TABLE}",
            from.destination, from.table
        )));
    }
    Ok(Route {
        destination,
        prefix,
        gateway: optional("a route's gateway", &from.gateway)?,
        source: optional("a route's source", &from.source)?,
        metric: from.metric,
        protocol: small("a route's protocol", from.protocol)?,
        scope: small("a route's scope", from.scope)?,
        onlink: from.onlink,
        mtu: from.mtu,
    })
}

fn read_neighbour(from: &wire::Neighbour) -> Result<Neighbour, Error> {
    let mac = mac_of(&from.mac).ok_or_else(|| wrong(format!("{:?} is no MAC address", from.mac)))?;
    Ok(Neighbour { address: address("a neighbour", &from.address)?, mac: mac_text(mac) })
}

fn wrong(why: String) -> Error {
    Error::Plan(why)
}

fn address(what: &str, text: &str) -> Result<IpAddr, Error> {
    text.parse().map_err(|_| wrong(format!("{what} {text:?} is no IP address")))
}

fn optional(what: &str, text: &str) -> Result<Option<IpAddr>, Error> {
    if text.is_empty() { Ok(None) } else { address(what, text).map(Some) }
}

fn prefix(what: &str, text: &str) -> Result<(IpAddr, u8), Error> {
    let parsed = text.split_once('/').and_then(|(address, bits)| {
        let address: IpAddr = address.parse().ok()?;
        let bits: u8 = bits.parse().ok()?;
        (bits <= super::link::bits(address)).then_some((address, bits))
    });
    parsed.ok_or_else(|| wrong(format!("{what} {text:?} is no prefix")))
}

fn small<T: TryFrom<u32>>(what: &str, number: u32) -> Result<T, Error> {
    number.try_into().map_err(|_| wrong(format!("{what} {number} is too large")))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::look;
    use super::*;

    fn seen() -> Seen {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let route = |destination: &str, prefix, gateway: Option<&str>| Route {
            destination: ip(destination),
            prefix,
            gateway: gateway.map(ip),
            source: None,
            metric: 100,
            protocol: 4,
            scope: 0,
            onlink: true,
            mtu: 1400,
        };
        Seen {
            interface: look::Interface {
                name: "eth0".to_owned(),
                index: 2,
                mac: "02:11:22:33:44:55".to_owned(),
                mtu: 1450,
                addresses: vec![
                    Address { address: ip("10.244.1.7"), prefix: 24, scope: 0 },
                    Address { address: ip("fd10::7"), prefix: 64, scope: 0 },
                ],
                routes: vec![
                    route("0.0.0.0", 0, Some("10.244.1.1")),
                    route("::", 0, Some("fd10::1")),
                    route("192.168.0.0", 16, None),
                    route("10.9.0.0", 16, Some("fe80::1")),
                ],
                neighbours: vec![Neighbour {
                    address: ip("169.254.1.1"),
                    mac: "ee:ee:ee:ee:ee:ee".to_owned(),
                }],
            },
            left_out: Vec::new(),
        }
    }

    fn underlay() -> Underlay {
        Underlay {
            node: "10.0.0.1".parse().unwrap(),
            vm: "10.0.0.2".parse().ok(),
            port: 4789,
            udp_checksum: false,
            overhead: 50,
        }
    }

    #[test]
    fn a_plan_that_was_written_reads_as_what_was_seen() {
        let seen = seen();
        let planned = read(&write(&seen, 77, 1400, &underlay())).unwrap();
        assert_eq!(planned.underlay, underlay());
        let [interface] = planned.interfaces.as_slice() else { panic!("one interface") };
        assert_eq!((interface.mtu, interface.vni, interface.name.as_str()), (1400, 77, "eth0"));
        assert_eq!(interface.addresses, seen.interface.addresses);
        assert_eq!(interface.routes, seen.interface.routes);
        assert_eq!(interface.neighbours, seen.interface.neighbours);
    }

    #[test]
    fn each_wrong_field_is_refused_by_its_name() {
        type Change = fn(&mut wire::NetworkPlan);
        let cases: [(Change, &str); 14] = [
            (|p| p.version = 2, "version 2"),
            (|p| p.underlay.mut_or_insert_default().kind = "gre".into(), "\"gre\""),
            (|p| p.underlay = None.into(), "underlay"),
            (|p| p.underlay.mut_or_insert_default().port = 70_000, "70000"),
            (|p| p.underlay.mut_or_insert_default().overhead = u32::MAX, "overhead"),
            (|p| p.underlay.mut_or_insert_default().node_address = "node".into(), "\"node\""),
            (|p| p.interfaces.clear(), "0 interfaces"),
            (|p| p.interfaces[0].name = "a/b".into(), "a/b"),
            (|p| p.interfaces[0].name = "lo".into(), "lo"),
            (|p| p.interfaces[0].mac = "01:00:5e:00:00:01".into(), "01:00:5e"),
            (|p| p.interfaces[0].vni = 1 << 24, "16777216"),
            (|p| p.interfaces[0].addresses[0].prefix = "10.0.0.1/33".into(), "10.0.0.1/33"),
            (|p| p.interfaces[0].routes[0].gateway = "gw".into(), "gw"),
            (|p| p.interfaces[0].routes[0].table = 7, "table 7"),
        ];
        for (change, named) in cases {
            let mut plan = write(&seen(), 77, 1400, &underlay());
            change(&mut plan);
            let text = read(&plan).unwrap_err().to_string();
            assert!(text.contains(named), "{text:?} does not name {named:?}");
        }
    }

    proptest! {
        #[test]
        fn no_plan_makes_the_reader_panic(
            name in ".{0,20}", mac in ".{0,20}", prefix in ".{0,20}", port: u32, vni: u32,
        ) {
            let mut plan = write(&seen(), vni, 1400, &underlay());
            plan.underlay.mut_or_insert_default().port = port;
            let interface = &mut plan.interfaces[0];
            interface.name = name;
            interface.mac = mac;
            interface.addresses[0].prefix = prefix.clone();
            interface.routes[0].destination = prefix;
            drop(read(&plan));
        }
    }
}
