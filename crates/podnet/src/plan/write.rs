//! Builds the message for the guest from the pod's network.

use std::net::IpAddr;

use super::{KIND, Tunnel, Underlay, VERSION, wire};
use crate::inspect::{Address, Hop, Interface, Neighbour, PodNetworkState, Prefix, Route, Rule, Sysctl};

/// Returns the message for the guest, without interfaces that have no tunnel and without routes through them.
pub fn write(seen: &PodNetworkState, tunnels: &[Tunnel], underlay: &Underlay) -> wire::NetworkPlan {
    let mut plan = wire::NetworkPlan::new();
    plan.version = VERSION;
    let mut without = Vec::new();
    for interface in &seen.interfaces {
        match tunnels.iter().find(|t| t.interface == interface.index) {
            Some(tunnel) => plan.interfaces.push(written_interface(interface, tunnel)),
            None => without.push(interface.name.as_str()),
        }
    }
    let carried = |r: &&Route| !r.hops.iter().any(|hop| without.contains(&hop.interface.as_str()));
    plan.routes = seen.routes.iter().filter(carried).map(written_route).collect();
    plan.rules = seen.rules.iter().map(written_rule).collect();
    plan.sysctls = seen.sysctls.iter().map(written_sysctl).collect();
    plan.loopback = seen.loopback.iter().map(written_address).collect();
    plan.underlay = Some(written_underlay(underlay)).into();
    plan
}

fn written_underlay(underlay: &Underlay) -> wire::Underlay {
    wire::Underlay {
        kind: KIND.to_owned(),
        node_address: underlay.node.to_string(),
        vm_address: text(underlay.vm),
        port: underlay.port.into(),
        udp_checksum: underlay.udp_checksum,
        overhead: underlay.overhead,
        ..Default::default()
    }
}

fn written_interface(from: &Interface, tunnel: &Tunnel) -> wire::Interface {
    let mut to = wire::Interface::new();
    to.name.clone_from(&from.name);
    to.index = from.index;
    to.mac.clone_from(&from.mac);
    to.mtu = tunnel.mtu;
    to.vni = tunnel.vni;
    to.tx_queue_len = from.tx_queue_len;
    to.no_arp = from.no_arp;
    to.promiscuous = from.promiscuous;
    to.all_multicast = from.all_multicast;
    to.down = from.down;
    to.addresses = from.addresses.iter().map(written_address).collect();
    to.routes = from.routes.iter().map(written_route).collect();
    to.neighbours = from.neighbours.iter().map(written_neighbour).collect();
    to.sysctls = from.sysctls.iter().map(written_sysctl).collect();
    to
}

fn text<T: ToString>(value: Option<T>) -> String {
    value.map(|value| value.to_string()).unwrap_or_default()
}

fn prefix(address: IpAddr, length: u8) -> String {
    format!("{address}/{length}")
}

fn written_address(from: &Address) -> wire::Address {
    let mut to = wire::Address::new();
    to.prefix = prefix(from.address, from.prefix);
    to.scope = from.scope.into();
    to.peer = text(from.peer);
    to.broadcast = text(from.broadcast);
    to.label = text(from.label.as_ref());
    to.valid = from.valid;
    to.preferred = from.preferred;
    to.protocol = from.protocol.into();
    to.flags = from.flags;
    to
}

fn written_route(from: &Route) -> wire::Route {
    let mut to = wire::Route::new();
    to.destination = prefix(from.destination, from.prefix);
    to.gateway = text(from.gateway);
    to.source = text(from.source);
    to.metric = from.metric;
    to.table = from.fib.table;
    to.protocol = from.protocol.into();
    to.scope = from.scope.into();
    to.onlink = from.onlink;
    to.mtu = from.mtu;
    to.kind = from.fib.kind.into();
    to.tos = from.fib.tos.into();
    to.advmss = from.advmss;
    to.preference = from.preference.into();
    to.expires = from.expires;
    let hop = |hop: &Hop| wire::Hop {
        gateway: text(hop.gateway),
        interface: hop.interface.clone(),
        weight: hop.weight.into(),
        onlink: hop.onlink,
        ..Default::default()
    };
    to.hops = from.hops.iter().map(hop).collect();
    let metric = |(kind, value): &(u16, u32)| wire::Metric {
        kind: u32::from(*kind),
        value: *value,
        ..Default::default()
    };
    to.metrics = from.metrics.iter().map(metric).collect();
    to
}

fn written_neighbour(from: &Neighbour) -> wire::Neighbour {
    let mut to = wire::Neighbour::new();
    to.address = from.address.to_string();
    to.mac.clone_from(&from.mac);
    to.no_arp = from.no_arp;
    to.proxy = from.proxy;
    to.flags = from.flags.into();
    to.protocol = from.protocol.into();
    to
}

fn written_rule(from: &Rule) -> wire::Rule {
    let side = |side: Option<Prefix>| text(side.map(|p| prefix(p.address, p.length)));
    let ports = |(first, last): (u16, u16)| range(first.into(), last.into());
    let (selector, flow) = (&from.selector, &from.flow);
    let mut to = wire::Rule::new();
    to.v6 = from.v6;
    to.priority = from.priority;
    to.invert = from.invert;
    to.from = side(selector.from);
    to.to = side(selector.to);
    to.iif.clone_from(&selector.iif);
    to.oif.clone_from(&selector.oif);
    to.fwmark = selector.fwmark;
    to.fwmask = selector.fwmask;
    to.tos = selector.tos.into();
    to.table = from.table;
    to.action = from.action.into();
    to.goto = from.goto;
    to.protocol = from.protocol.into();
    to.suppress_prefix_length = from.suppress_prefix_length;
    to.suppress_group = from.suppress_group;
    to.uids = flow.uids.map(|(first, last)| range(first, last)).into();
    to.ip_protocol = flow.ip_protocol.into();
    to.source_ports = flow.source_ports.map(ports).into();
    to.destination_ports = flow.destination_ports.map(ports).into();
    to
}

fn range(first: u32, last: u32) -> wire::Range {
    wire::Range { first, last, ..Default::default() }
}

fn written_sysctl(from: &Sysctl) -> wire::Sysctl {
    wire::Sysctl { name: from.name.clone(), value: from.value.clone(), ..Default::default() }
}
