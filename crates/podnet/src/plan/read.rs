//! Parses the message into a valid plan. An invalid message is refused as a whole, by the name of the field.

use std::net::IpAddr;

use super::{KIND, MAX_INTERFACES, OLD_VERSION, Planned, Underlay, VERSION, wire};
use crate::Error;
use crate::inspect::{
    Address, FibPlace, Hop, Interface, Neighbour, PodNetworkState, Prefix, Route, Rule, RuleFlow,
    RuleSelector, Sysctl, TABLE_MAIN, UNICAST, usual_broadcast,
};
use crate::link::{bits, mac_of, mac_text};

/// Maximum of addresses, routes, neighbours, rules and sysctls together.
const MAX_ENTRIES: usize = 16_384;
const MAX_HOPS: usize = 64;
const MAX_METRICS: usize = 17;
const MAX_OVERHEAD: u32 = 256;
/// rtnetlink's route types: unicast, local, blackhole, unreachable, prohibit, throw.
const ROUTE_KINDS: [u8; 6] = [UNICAST, 2, 6, 7, 8, 9];
/// rtnetlink's rule actions: table, goto, nop, blackhole, unreachable, prohibit.
const RULE_ACTIONS: [u8; 6] = [1, 2, 3, 6, 7, 8];
/// Length limit of a sysctl's name and value. A value is a few numbers, or a name of at most 15 bytes.
const MAX_SYSCTL: usize = 128;

/// Parses a plan; refuses an invalid one and names the cause.
pub fn read(plan: &wire::NetworkPlan) -> Result<Planned, Error> {
    known(plan.version, VERSION)?;
    let underlay = read_underlay(plan)?;
    if plan.interfaces.is_empty() || plan.interfaces.len() > MAX_INTERFACES {
        return Err(wrong(format!("it has {} interfaces, not 1 to {MAX_INTERFACES}", plan.interfaces.len())));
    }
    let of_interface =
        |i: &wire::Interface| i.addresses.len() + i.routes.len() + i.neighbours.len() + i.sysctls.len();
    let own = plan.routes.len() + plan.rules.len() + plan.sysctls.len() + plan.loopback.len();
    let entries = plan.interfaces.iter().map(of_interface).sum::<usize>() + own;
    if entries > MAX_ENTRIES {
        return Err(wrong(format!(
            "{entries} addresses, routes and the like; at most {MAX_ENTRIES} are taken"
        )));
    }
    let old = plan.version == OLD_VERSION;
    let interfaces = all(&plan.interfaces, |from| read_interface(from, old))?;
    let twice = |(n, i): &(usize, &wire::Interface)| {
        let mut before = plan.interfaces.iter().take(*n);
        before.any(|b| b.name == i.name || b.vni == i.vni || (i.index != 0 && b.index == i.index))
    };
    if let Some((_, wire::Interface { name, .. })) = plan.interfaces.iter().enumerate().find(twice) {
        return Err(wrong(format!("interface {name} has the name, the index or the VNI of another one")));
    }
    let network = PodNetworkState {
        routes: all(&plan.routes, read_route)?,
        rules: all(&plan.rules, read_rule)?,
        sysctls: all(&plan.sysctls, read_sysctl)?,
        loopback: all(&plan.loopback, |from| read_address(from, old))?,
        interfaces,
        left_out: Vec::new(),
    };
    let known = |name: &str| name == "lo" || network.interfaces.iter().any(|i| i.name == name);
    let mut hops = network.routes.iter().flat_map(|route| &route.hops);
    if let Some(hop) = hops.find(|hop| !known(&hop.interface)) {
        return Err(wrong(format!("a route leads through {:?}, which is no interface of it", hop.interface)));
    }
    Ok(Planned { underlay, network, vnis: plan.interfaces.iter().map(|i| i.vni).collect() })
}

/// Refuses a version that a guest with the newest version `newest` does not support.
pub(super) fn known(version: u32, newest: u32) -> Result<(), Error> {
    if (OLD_VERSION..=newest).contains(&version) {
        return Ok(());
    }
    Err(wrong(format!(
        "version {version} is unknown, this guest knows {OLD_VERSION} to {newest}; node and VM image must be upgraded together"
    )))
}

fn all<F, T>(from: &[F], read: impl FnMut(&F) -> Result<T, Error>) -> Result<Vec<T>, Error> {
    from.iter().map(read).collect()
}

fn read_underlay(plan: &wire::NetworkPlan) -> Result<Underlay, Error> {
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
    Ok(underlay)
}

fn read_interface(from: &wire::Interface, old: bool) -> Result<Interface, Error> {
    // `lo` exists in every namespace and is never a tunnel.
    if !is_name(&from.name) || from.name == "lo" {
        return Err(wrong(format!("{:?} is no name for an interface", from.name)));
    }
    let mac = mac_of(&from.mac)
        .filter(|mac| mac[0] & 1 == 0 && mac != &[0; 6])
        .ok_or_else(|| wrong(format!("{:?} is no MAC address for an interface", from.mac)))?;
    if !(1..=0xff_ffff).contains(&from.vni) {
        return Err(wrong(format!("VNI {} is not 1 to 16777215", from.vni)));
    }
    // Index 1 is that of lo, and the kernel's index is signed.
    if from.index == 1 || from.index > i32::MAX as u32 {
        return Err(wrong(format!("{} is no index for an interface", from.index)));
    }
    if let Some(route) = from.routes.iter().find(|route| !route.hops.is_empty()) {
        return Err(wrong(format!("route {} of {} has its own next hops", route.destination, from.name)));
    }
    Ok(Interface {
        name: from.name.clone(),
        index: from.index,
        mac: mac_text(mac),
        mtu: from.mtu,
        tx_queue_len: from.tx_queue_len,
        no_arp: from.no_arp,
        promiscuous: from.promiscuous,
        all_multicast: from.all_multicast,
        down: from.down,
        addresses: all(&from.addresses, |from| read_address(from, old))?,
        routes: all(&from.routes, read_route)?,
        neighbours: all(&from.neighbours, read_neighbour)?,
        sysctls: all(&from.sysctls, read_sysctl)?,
    })
}

/// Returns whether the kernel accepts the name.
fn is_name(name: &str) -> bool {
    (1..16).contains(&name.len())
        && !matches!(name, "." | "..")
        && name.bytes().all(|b| b.is_ascii_graphic() && !matches!(b, b'/' | b':' | b'%'))
}

fn read_address(from: &wire::Address, old: bool) -> Result<Address, Error> {
    let (own, prefix) = prefix("address", &from.prefix)?;
    if own.is_unspecified() || own.is_multicast() {
        return Err(wrong(format!("{own} is no address for an interface")));
    }
    let peer = optional("an address's peer", &from.peer)?;
    if peer.is_some_and(|peer| peer.is_ipv4() != own.is_ipv4()) {
        return Err(wrong(format!("address {own} has a peer of the other family, {}", from.peer)));
    }
    let broadcast = match optional("a broadcast address", &from.broadcast)? {
        Some(IpAddr::V4(broadcast)) if own.is_ipv4() => Some(broadcast),
        Some(other) => return Err(wrong(format!("address {own} has the broadcast address {other}"))),
        None if old => usual_broadcast(own, prefix),
        None => None,
    };
    if from.label.len() > 15 || from.label.contains('\0') {
        return Err(wrong(format!("{:?} is no label for an address", from.label)));
    }
    Ok(Address {
        address: own,
        prefix,
        scope: small("an address's scope", from.scope)?,
        peer,
        broadcast,
        label: Some(from.label.clone()).filter(|label| !label.is_empty()),
        valid: from.valid,
        preferred: from.preferred,
        protocol: small("an address's protocol", from.protocol)?,
        flags: from.flags,
    })
}

fn read_route(from: &wire::Route) -> Result<Route, Error> {
    let (destination, prefix) = prefix("route", &from.destination)?;
    let name = || format!("route {}", from.destination);
    if from.table == 0 {
        return Err(wrong(format!("{} is for table 0; {TABLE_MAIN} is the main one", name())));
    }
    let kind = if from.kind == 0 { UNICAST } else { small("a route's type", from.kind)? };
    if !ROUTE_KINDS.contains(&kind) || from.hops.len() > MAX_HOPS || from.metrics.len() > MAX_METRICS {
        let (hops, metrics) = (from.hops.len(), from.metrics.len());
        return Err(wrong(format!("{} has the type {kind}, {hops} next hops, {metrics} metrics", name())));
    }
    let source = optional("a route's source", &from.source)?;
    if source.is_some_and(|source| source.is_ipv4() != destination.is_ipv4()) {
        return Err(wrong(format!("{} has the source {}", name(), from.source)));
    }
    let gateway = gateway(&from.gateway, destination)?;
    Ok(Route {
        destination,
        prefix,
        gateway,
        source,
        metric: from.metric,
        protocol: small("a route's protocol", from.protocol)?,
        scope: small("a route's scope", from.scope)?,
        onlink: from.onlink,
        mtu: from.mtu,
        fib: FibPlace { table: from.table, kind, tos: small("a route's type of service", from.tos)? },
        advmss: from.advmss,
        hops: all(&from.hops, |hop| read_hop(hop, destination))?,
        metrics: all(&from.metrics, read_metric)?,
        preference: small("a route's preference", from.preference)?,
        expires: from.expires,
    })
}

/// Parses a gateway. It may be an IPv6 one for an IPv4 destination, not the other way round.
fn gateway(text: &str, destination: IpAddr) -> Result<Option<IpAddr>, Error> {
    let gateway = optional("a route's gateway", text)?;
    match gateway {
        Some(IpAddr::V4(_)) if destination.is_ipv6() => {
            Err(wrong(format!("the route to {destination} has the gateway {text}")))
        }
        gateway => Ok(gateway),
    }
}

fn read_hop(from: &wire::Hop, destination: IpAddr) -> Result<Hop, Error> {
    if !is_name(&from.interface) || !(1..=256).contains(&from.weight) {
        return Err(wrong(format!("next hop {:?} with weight {}", from.interface, from.weight)));
    }
    Ok(Hop {
        gateway: gateway(&from.gateway, destination)?,
        interface: from.interface.clone(),
        weight: small("a next hop's weight", from.weight)?,
        onlink: from.onlink,
    })
}

fn read_metric(from: &wire::Metric) -> Result<(u16, u32), Error> {
    // RTAX_CC_ALGO (16) is a text; numbers above 17 are not defined yet.
    match from.kind {
        kind @ (1..=15 | 17) => Ok((small("a metric", kind)?, from.value)),
        kind => Err(wrong(format!("a route's metric {kind} is unknown"))),
    }
}

fn read_neighbour(from: &wire::Neighbour) -> Result<Neighbour, Error> {
    let mac = match (from.proxy, from.mac.as_str()) {
        (true, "") => String::new(),
        (_, text) => {
            mac_of(text).map(mac_text).ok_or_else(|| wrong(format!("{text:?} is no MAC address")))?
        }
    };
    Ok(Neighbour {
        address: address("a neighbour", &from.address)?,
        mac,
        no_arp: from.no_arp,
        proxy: from.proxy,
        flags: small("a neighbour's flags", from.flags)?,
        protocol: small("a neighbour's protocol", from.protocol)?,
    })
}

fn read_rule(from: &wire::Rule) -> Result<Rule, Error> {
    let name = || format!("the rule of priority {}", from.priority);
    let side = |text: &str| {
        if text.is_empty() {
            return Ok(None);
        }
        let (address, length) = prefix("a rule's side", text)?;
        if address.is_ipv6() != from.v6 {
            return Err(wrong(format!("{} is about {text}, of the other family", name())));
        }
        Ok(Some(Prefix { address, length }))
    };
    if let Some(text) = [&from.iif, &from.oif].into_iter().find(|text| !text.is_empty() && !is_name(text)) {
        return Err(wrong(format!("{} is about interface {text:?}", name())));
    }
    let action = small("a rule's action", from.action)?;
    if !RULE_ACTIONS.contains(&action) {
        return Err(wrong(format!("{} has the action {action}", name())));
    }
    let ports = |range: &wire::Range| -> Result<(u16, u16), Error> {
        Ok((small("a rule's port", range.first)?, small("a rule's port", range.last)?))
    };
    Ok(Rule {
        v6: from.v6,
        priority: from.priority,
        invert: from.invert,
        selector: RuleSelector {
            from: side(&from.from)?,
            to: side(&from.to)?,
            iif: from.iif.clone(),
            oif: from.oif.clone(),
            fwmark: from.fwmark,
            fwmask: from.fwmask,
            tos: small("a rule's type of service", from.tos)?,
        },
        table: from.table,
        action,
        goto: from.goto,
        protocol: small("a rule's protocol", from.protocol)?,
        suppress_prefix_length: from.suppress_prefix_length,
        suppress_group: from.suppress_group,
        flow: RuleFlow {
            uids: from.uids.as_ref().map(|range| (range.first, range.last)),
            ip_protocol: small("a rule's IP protocol", from.ip_protocol)?,
            source_ports: from.source_ports.as_ref().map(ports).transpose()?,
            destination_ports: from.destination_ports.as_ref().map(ports).transpose()?,
        },
    })
}

fn read_sysctl(from: &wire::Sysctl) -> Result<Sysctl, Error> {
    let fit =
        |text: &str| (1..MAX_SYSCTL).contains(&text.len()) && text.bytes().all(|b| (b' '..0x7f).contains(&b));
    // The code that writes sysctls selects them by name.
    if !fit(&from.name) || !fit(&from.value) {
        return Err(wrong(format!("sysctl {:?} with the value {:?}", from.name, from.value)));
    }
    Ok(Sysctl { name: from.name.clone(), value: from.value.clone() })
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

pub(crate) fn prefix(what: &str, text: &str) -> Result<(IpAddr, u8), Error> {
    let parsed = text.split_once('/').and_then(|(address, length)| {
        let address: IpAddr = address.parse().ok()?;
        let length: u8 = length.parse().ok()?;
        (length <= bits(address)).then_some((address, length))
    });
    parsed.ok_or_else(|| wrong(format!("{what} {text:?} is no prefix")))
}

fn small<T: TryFrom<u32>>(what: &str, number: u32) -> Result<T, Error> {
    number.try_into().map_err(|_| wrong(format!("{what} {number} is too large")))
}
