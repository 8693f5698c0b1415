//! Blocks the clouds' metadata services for the pod, by policy rules before all others in its namespace (`Permission
//! denied`). Else a pod would reach its worker node's service and credentials by the tunnel.
//!
//! The module uses rules, not routes: a CNI's plan and a program in the pod add routes, and a better one would win. A
//! container with CAP_NET_ADMIN can remove the rules, but not the egress firewall ([`super::external`]).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::rule::{RuleAction, RuleAttribute, RuleMessage};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use nix::errno::Errno;

use super::external::covers;
use super::netlink::Client;
use super::netns::Netns;
use super::nft::egress_firewall::Prefix;
use super::{Error, link};

/// Directly after the local table's rule.
const PRIORITY: u32 = 1;
const MOST: usize = 4096;

/// Services with well-known addresses, in any cloud. No pod is known to use these addresses itself. (Link-local
/// networks as a whole are not blocked: CNIs have their gateways there.)
pub const KNOWN: [IpAddr; 5] = [
    IpAddr::V4(Ipv4Addr::new(169, 254, 169, 254)),
    IpAddr::V4(Ipv4Addr::new(168, 63, 129, 16)),
    IpAddr::V4(Ipv4Addr::new(100, 100, 100, 200)),
    IpAddr::V6(Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254)),
    IpAddr::V6(Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254)),
];

/// Returns the services that stay closed: all except those opened by an address or by a network around it.
pub fn closed(more: &[IpAddr], open: &[Prefix]) -> Vec<IpAddr> {
    let is_open =
        |address: &IpAddr| open.iter().any(|network| covers(*network, (*address, link::bits(*address))));
    let mut all: Vec<IpAddr> =
        KNOWN.iter().chain(more).copied().filter(|address| !is_open(address)).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// Blocks exactly these addresses for the pod. May be repeated; opens others. A family that the kernel lacks is no
/// error.
pub fn close(podns: &Path, addresses: &[IpAddr]) -> Result<(), Error> {
    let mut client = Netns::open(podns)?.netlink()?;
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        let wanted: Vec<IpAddr> =
            addresses.iter().copied().filter(|address| link::family(*address) == family).collect();
        match follow(&mut client, family, &wanted) {
            Err(Error::Kernel { source, .. })
                if matches!(source.errno(), Some(Errno::EAFNOSUPPORT | Errno::EOPNOTSUPP)) => {}
            other => other?,
        }
    }
    Ok(())
}

fn follow(client: &mut Client, family: AddressFamily, wanted: &[IpAddr]) -> Result<(), Error> {
    let mut ask = RuleMessage::default();
    ask.header.family = family;
    let read = |answer| match answer {
        RouteNetlinkMessage::NewRule(rule) => ours(&rule).map(|address| (address, rule)),
        _ => None,
    };
    let has = client.dump(&RouteNetlinkMessage::GetRule(ask), MOST, read);
    let has = has.map_err(Error::kernel("read the pod's rules"))?;
    for (address, rule) in &has {
        if !wanted.contains(address) {
            let what = format!("open {address} to the pod");
            client.tell(0, RouteNetlinkMessage::DelRule(rule.clone())).map_err(Error::kernel(what))?;
        }
    }
    for address in wanted.iter().filter(|address| !has.iter().any(|(has, _)| has == *address)) {
        let message = RouteNetlinkMessage::NewRule(rule(*address));
        match client.tell(NLM_F_CREATE | NLM_F_EXCL, message) {
            Err(e) if e.errno() == Some(Errno::EEXIST) => {}
            other => other.map_err(Error::kernel(format!("close {address} to the pod")))?,
        }
    }
    Ok(())
}

fn rule(address: IpAddr) -> RuleMessage {
    let mut message = RuleMessage::default();
    message.header.family = link::family(address);
    message.header.dst_len = link::bits(address);
    message.header.action = RuleAction::Prohibit;
    message.attributes = vec![RuleAttribute::Priority(PRIORITY), RuleAttribute::Destination(address)];
    message
}

/// Returns the address that a rule of this module closes.
fn ours(rule: &RuleMessage) -> Option<IpAddr> {
    let has_priority = rule.attributes.contains(&RuleAttribute::Priority(PRIORITY));
    let address = rule.attributes.iter().find_map(|attribute| match attribute {
        RuleAttribute::Destination(address) => Some(*address),
        _ => None,
    })?;
    let is_ours = has_priority && rule.header.action == RuleAction::Prohibit;
    (is_ours && rule.header.dst_len == link::bits(address)).then_some(address)
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;
    use std::net::{SocketAddr, TcpStream};
    use std::process::Command;
    use std::time::Duration;

    use super::*;

    fn ip(netns: &Netns, arguments: &str) -> String {
        let run = || Command::new("ip").args(arguments.split(' ')).output().unwrap();
        let output = netns.run(run).unwrap();
        assert!(output.status.success(), "ip {arguments}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    #[test]
    fn an_allowed_address_is_open() {
        let address = |text: &str| text.parse::<IpAddr>().unwrap();
        assert_eq!(closed(&[], &[]).len(), KNOWN.len());
        assert!(closed(&[address("10.9.9.9")], &[]).contains(&address("10.9.9.9")));
        let open = closed(&[], &[(address("169.254.0.0"), 16), (address("fd00:ec2::254"), 128)]);
        assert!(!open.contains(&address("169.254.169.254")) && !open.contains(&address("fd00:ec2::254")));
        assert!(open.contains(&address("168.63.129.16")));
    }

    /// A service beside the pod, as with `dev` routes on a cloud's network: reached, closed, refused at once, opened.
    #[test]
    fn a_service_is_closed_for_every_route_to_it() {
        let name = format!("/run/netns/pp-md-{}", std::process::id());
        let pod = crate::netns::create_named(&name).unwrap();
        ip(&pod, "link add eth0 type veth peer name far");
        let service = "169.254.169.254";
        ip(&pod, "link set eth0 up");
        ip(&pod, "link set lo up");
        ip(&pod, "addr add 10.3.0.2/24 dev eth0");
        ip(&pod, "link set far up");
        ip(&pod, &format!("route add {service}/32 dev eth0"));
        let lookup = || {
            let run = || Command::new("ip").args(["route", "get", service]).output().unwrap();
            let output = pod.run(run).unwrap();
            (output.status.success(), String::from_utf8(output.stderr).unwrap())
        };
        assert!(lookup().0, "{:?}", lookup());
        let closed = closed(&[], &[]);
        for _ in 0..2 {
            close(Path::new(&name), &closed).unwrap();
            let rules = ip(&pod, "rule");
            assert_eq!(rules.matches("prohibit").count(), 3, "{rules}");
            assert_eq!(ip(&pod, "-6 rule").matches("prohibit").count(), 2);
            assert!(lookup().1.contains("denied"), "{:?}", lookup());
        }
        let connect = || {
            let target: SocketAddr = format!("{service}:80").parse().unwrap();
            TcpStream::connect_timeout(&target, Duration::from_secs(5)).unwrap_err().kind()
        };
        assert_eq!(
            pod.run(connect).unwrap(),
            ErrorKind::PermissionDenied,
            "at once, and not after a timeout"
        );
        close(Path::new(&name), &[]).unwrap();
        assert!(lookup().0, "{:?}", lookup());
        crate::netns::delete_named(&name).unwrap();
    }
}
