//! Sends packets from the pod's veth pair out by the second NIC with a policy route, regardless of the VM's own default
//! route. Its routes are in [`TABLE`] and its rules lead there; it touches nothing else, over the given socket.
//!
//! The table holds a default route per family, and a rule leads from the veth pair to it. Without a route in the table,
//! a packet falls through to the VM's main table and towards the first NIC, where the egress firewall drops it.

use std::net::IpAddr;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};
use netlink_packet_route::route::{RouteAttribute, RouteMessage, RouteProtocol};
use netlink_packet_route::rule::{RuleAction, RuleAttribute, RuleMessage};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use nix::errno::Errno;

use crate::Error;
use crate::link;
use crate::netlink::{self, Client};
use crate::underlay::UnderlayDevice;

/// "pp" in ASCII; above the numbers of one byte, which administrators and clouds use.
pub(super) const TABLE: u32 = 0x7070;
/// Before all rules except the local table's, which holds the VM's own addresses.
const PRIORITY: u32 = 0x70;
/// Table byte in the header for a number that does not fit.
const ELSEWHERE: u8 = 252;

/// Routes packets that arrive by `outside` out by `nic`, in the families for which it has a gateway. May be repeated.
pub(super) fn make(host: &mut Client, outside: &str, nic: &UnderlayDevice) -> Result<(), Error> {
    for v6 in [false, true] {
        let gateway = nic.gateways.iter().find(|gateway| gateway.is_ipv6() == v6 && nic.has(v6));
        let Some(gateway) = gateway else {
            remove_family(host, outside, v6)?;
            continue;
        };
        let attempt = || Error::kernel(format!("route the pod out through {} and {gateway}", nic.name));
        host.tell(NLM_F_CREATE | NLM_F_REPLACE, route(nic.index, *gateway)?).map_err(attempt())?;
        match host.tell(NLM_F_CREATE | NLM_F_EXCL, RouteNetlinkMessage::NewRule(rule(outside, v6))) {
            Err(e) if e.errno() != Some(Errno::EEXIST) => return Err(attempt()(e)),
            _ => {}
        }
    }
    Ok(())
}

/// Undoes [`make`]. A missing rule or route is no error.
pub(super) fn remove(host: &mut Client, outside: &str) -> Result<(), Error> {
    remove_family(host, outside, false).and(remove_family(host, outside, true))
}

fn remove_family(host: &mut Client, outside: &str, v6: bool) -> Result<(), Error> {
    let mut routes = RouteMessage::default();
    routes.header.address_family = of(v6);
    routes.header.table = ELSEWHERE;
    routes.attributes.push(RouteAttribute::Table(TABLE));
    for message in [RouteNetlinkMessage::DelRule(rule(outside, v6)), RouteNetlinkMessage::DelRoute(routes)] {
        match host.tell(0, message) {
            Err(e) if !is_gone(&e) => return Err(Error::kernel("remove the pod's policy route")(e)),
            _ => {}
        }
    }
    Ok(())
}

/// Returns whether the rule, route or table does not exist, or the kernel lacks the address family.
fn is_gone(error: &netlink::Error) -> bool {
    matches!(error.errno(), Some(Errno::ENOENT | Errno::ESRCH | Errno::EAFNOSUPPORT | Errno::EOPNOTSUPP))
}

fn of(v6: bool) -> AddressFamily {
    if v6 { AddressFamily::Inet6 } else { AddressFamily::Inet }
}

fn route(nic: u32, gateway: IpAddr) -> Result<RouteNetlinkMessage, Error> {
    // On-link: this table has no route to the gateway's network.
    let route = link::default_route(gateway)?.onlink();
    Ok(RouteNetlinkMessage::NewRoute(route.table_id(TABLE).output_interface(nic).build()))
}

fn rule(outside: &str, v6: bool) -> RuleMessage {
    let mut message = RuleMessage::default();
    message.header.family = of(v6);
    message.header.table = ELSEWHERE;
    message.header.action = RuleAction::ToTable;
    message.attributes = vec![
        RuleAttribute::Priority(PRIORITY),
        RuleAttribute::Iifname(outside.to_owned()),
        RuleAttribute::Table(TABLE),
        RuleAttribute::Protocol(RouteProtocol::Static),
    ];
    message
}
