//! A routing table for what comes out of the pod's door, and for nothing else: out by the second card, whatever the VM's own
//! default route is. Everything of it is in [`TABLE`] or leads there; touches nothing else, over the socket it is given.
//!
//! It holds a default route per family, and a rule leads from the door there. Without a route in it a packet goes on to the
//! VM's main table and towards the first card, where the wall stops it.

use std::net::IpAddr;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};
use netlink_packet_route::route::{RouteAttribute, RouteFlags, RouteMessage, RouteProtocol, RouteType};
use netlink_packet_route::rule::{RuleAction, RuleAttribute, RuleMessage};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use nix::errno::Errno;

use crate::Error;
use crate::link::family;
use crate::netlink::{self, Client};
use crate::uplink::Uplink;

/// "pp"; beyond the numbers that one byte holds, where administrators and clouds count.
pub(super) const TABLE: u32 = 0x7070;
/// Before everything but the VM's own addresses.
const PRIORITY: u32 = 0x70;
/// The header's byte for a table whose number does not fit.
const ELSEWHERE: u8 = 252;

/// Sends what comes in by `door` out by `card`, in the families it has a gateway for. Again as often as one likes.
///
/// # Errors
/// [`Error::Kernel`].
pub(super) fn make(host: &mut Client, door: &str, card: &Uplink) -> Result<(), Error> {
    for v6 in [false, true] {
        let gateway = card.gateways.iter().find(|gateway| gateway.is_ipv6() == v6 && card.has(v6));
        let Some(gateway) = gateway else {
            remove_family(host, door, v6)?;
            continue;
        };
        let attempt = || Error::kernel(format!("lead the pod out by {} and {gateway}", card.name));
        host.tell(NLM_F_CREATE | NLM_F_REPLACE, route(card.index, *gateway)).map_err(attempt())?;
        match host.tell(NLM_F_CREATE | NLM_F_EXCL, RouteNetlinkMessage::NewRule(rule(door, v6))) {
            Err(e) if e.errno() != Some(Errno::EEXIST) => return Err(attempt()(e)),
            _ => {}
        }
    }
    Ok(())
}

/// Takes [`make`] back. Not there is fine.
///
/// # Errors
/// [`Error::Kernel`].
pub(super) fn remove(host: &mut Client, door: &str) -> Result<(), Error> {
    remove_family(host, door, false).and(remove_family(host, door, true))
}

fn remove_family(host: &mut Client, door: &str, v6: bool) -> Result<(), Error> {
    let mut routes = RouteMessage::default();
    routes.header.address_family = of(v6);
    routes.header.table = ELSEWHERE;
    routes.attributes.push(RouteAttribute::Table(TABLE));
    for message in [RouteNetlinkMessage::DelRule(rule(door, v6)), RouteNetlinkMessage::DelRoute(routes)] {
        match host.tell(0, message) {
            Err(e) if !is_gone(&e) => return Err(Error::kernel("remove the pod's detour")(e)),
            _ => {}
        }
    }
    Ok(())
}

/// There is no such rule, route or table; or the kernel has not got the family.
fn is_gone(error: &netlink::Error) -> bool {
    matches!(error.errno(), Some(Errno::ENOENT | Errno::ESRCH | Errno::EAFNOSUPPORT | Errno::EOPNOTSUPP))
}

fn of(v6: bool) -> AddressFamily {
    if v6 { AddressFamily::Inet6 } else { AddressFamily::Inet }
}

fn route(card: u32, gateway: IpAddr) -> RouteNetlinkMessage {
    let mut message = RouteMessage::default();
    message.header.address_family = family(gateway);
    message.header.table = ELSEWHERE;
    message.header.protocol = RouteProtocol::Static;
    message.header.kind = RouteType::Unicast;
    // The network that the gateway is in is in no table that this one knows of.
    message.header.flags = RouteFlags::Onlink;
    message.attributes = vec![
        RouteAttribute::Table(TABLE),
        RouteAttribute::Oif(card),
        RouteAttribute::Gateway(gateway.into()),
    ];
    RouteNetlinkMessage::NewRoute(message)
}

fn rule(door: &str, v6: bool) -> RuleMessage {
    let mut message = RuleMessage::default();
    message.header.family = of(v6);
    message.header.table = ELSEWHERE;
    message.header.action = RuleAction::ToTable;
    message.attributes = vec![
        RuleAttribute::Priority(PRIORITY),
        RuleAttribute::Iifname(door.to_owned()),
        RuleAttribute::Table(TABLE),
        RuleAttribute::Protocol(RouteProtocol::Static),
    ];
    message
}
