//! Makes the veth pair between the pod's and the VM's namespace, the egress firewall at its end, and forwarding.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{InfoData, InfoVeth};
use netlink_packet_route::route::RouteScope;
use nix::errno::Errno;
use rtnetlink::{LinkUnspec, LinkVeth, RouteMessageBuilder};

use super::{External, nic, policy_route};
use crate::inspect::sysctl;
use crate::link::{self, bits};
use crate::netlink::{self, Client};
use crate::netns::Netns;
use crate::nft::egress_firewall::{self, EgressFirewall};
use crate::underlay::{self, UnderlayDevice};
use crate::vxlan::no_v6_address;
use crate::{Error, vxlan};

const OUTSIDE: &str = "pp-ext";
pub(crate) const INSIDE: &str = "pp-ext0";
const OUTSIDE_MAC: [u8; 6] = [0x02, b'p', b'p', b'e', b'x', 0];
const INSIDE_MAC: [u8; 6] = [0x02, b'p', b'p', b'e', b'x', 1];
/// Gateways that exist only in the pair's own neighbour entries; no program ever resolves them.
const GATEWAY: IpAddr = IpAddr::V4(Ipv4Addr::new(169, 254, 1, 1));
const GATEWAY_V6: IpAddr = IpAddr::V6(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1));
/// Prefix of the alias. The rest records the families with forwarding off before: "4", "6", "46".
const ALIAS: &str = "peerpod:external:";

/// Result of [`apply`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applied {
    /// Whether IPv4 leaves by the VM.
    pub v4: bool,
    /// Whether IPv6 leaves by the VM.
    pub v6: bool,
    /// Names of the VM's devices by which the pod leaves.
    pub uplinks: Vec<String>,
}

/// Returns the families (IPv4, IPv6) that can leave by the VM with its present network.
pub fn leaves(external: &External) -> Result<(bool, bool), Error> {
    let (_, out) = nic::inspect(&mut Client::route().map_err(Error::socket)?, external)?;
    Ok((leaves_by(external, &out, false), leaves_by(external, &out, true)))
}

fn leaves_by(external: &External, out: &[UnderlayDevice], v6: bool) -> bool {
    let pod = external.pod.iter().any(|address| address.is_ipv6() == v6);
    pod && out.iter().any(|uplink| nic::goes_out(uplink, v6))
}

/// Makes the egress path as the VM's present network requires, the egress firewall first. Correct parts stay unchanged.
/// It serves the families with a default route and an address at the VM; the caller passes them to [`super::split`].
///
/// # Errors [`Error::Kernel`], also without nftables or NAT; [`Error::Path`] without a way out. [`undo`] removes made
/// parts.
pub fn apply(external: &External, podns: &Path) -> Result<Applied, Error> {
    let host = &mut Client::route().map_err(Error::socket)?;
    let (uplinks, out) = nic::inspect(host, external)?;
    let (v4, v6) = (leaves_by(external, &out, false), leaves_by(external, &out, true));
    if !v4 && !v6 {
        let peer = external.pod.first().copied().unwrap_or(GATEWAY);
        return Err(Error::Path { peer, why: external.lacks().to_owned() });
    }
    let names: Vec<String> = out.iter().map(|uplink| uplink.name.clone()).collect();
    let pod: Vec<IpAddr> =
        external.pod.iter().copied().filter(|address| if address.is_ipv6() { v6 } else { v4 }).collect();

    let there = link::by_name(host, OUTSIDE).map_err(Error::kernel(format!("look for {OUTSIDE}")))?;
    let ours = match there.as_ref().and_then(|link| link.alias.as_deref()?.strip_prefix(ALIAS)) {
        Some(switched) => (switched.contains('4'), switched.contains('6')),
        // Only this module uses that name. A half-made pair has no alias, and changed no sysctl.
        None => (!is_on("ipv4/ip_forward"), !is_on("ipv6/conf/all/forwarding")),
    };
    // The VM's own networks, and destinations that it reaches without a router from an address without a network.
    let own = uplinks.iter().flat_map(|uplink| uplink.addresses.iter().chain(&uplink.near));
    let firewall = EgressFirewall {
        outside: OUTSIDE.to_owned(),
        pod: pod.clone(),
        uplinks: names.clone(),
        allow: external.allow.clone(),
        deny: external.denied(own.map(|(address, prefix)| underlay::network(*address, *prefix))),
        alone: ours,
    };
    firewall.raise(&mut Client::netfilter().map_err(Error::socket)?)?;

    let netns = Netns::open(podns)?;
    let inside = &mut netns.netlink()?;
    let mtu = out.iter().map(|uplink| uplink.mtu).min().unwrap_or(1500);
    if there.is_none_or(|link| link.alias.is_none()) || !is_there(inside)? {
        make(host, inside, &netns, ours)?;
    }
    furnish(host, inside, &pod, mtu)?;
    match out.first().filter(|_| external.second) {
        Some(nic) => policy_route::make(host, OUTSIDE, nic)?,
        None => policy_route::remove(host, OUTSIDE)?,
    }
    forward(v4, v6, &names, &uplinks)?;
    Ok(Applied { v4, v6, uplinks: names })
}

/// Removes the egress path: policy route, veth pair, forwarding, firewall. A missing part is no error.
///
/// # Errors
/// The first failure. The remaining steps are still tried, unless the VM's devices cannot be read.
pub fn undo() -> Result<(), Error> {
    let host = &mut Client::route().map_err(Error::socket)?;
    let Some(outside) = link::by_name(host, OUTSIDE).map_err(Error::kernel(format!("look for {OUTSIDE}")))?
    else {
        return remove(); // a crash may leave the firewall without the pair
    };
    let rule = policy_route::remove(host, OUTSIDE);
    let switched = outside.alias.as_deref().and_then(|alias| alias.strip_prefix(ALIAS)).unwrap_or_default();
    let removed = vxlan::remove(host, outside.index);
    let mut off = Ok(());
    if switched.contains('4') {
        for uplink in underlay::inspect(host)? {
            off = off.and(switch(&format!("ipv4/conf/{}/forwarding", uplink.name), "0"));
        }
    }
    if switched.contains('6') {
        off = off.and(switch("ipv6/conf/all/forwarding", "0"));
    }
    rule.and(removed).and(off).and(remove())
}

fn remove() -> Result<(), Error> {
    match Client::netfilter() {
        Ok(mut client) => egress_firewall::remove(&mut client),
        Err(_) => Ok(()), // no netfilter, no table
    }
}

fn is_there(inside: &mut Client) -> Result<bool, Error> {
    let link = link::by_name(inside, INSIDE).map_err(Error::kernel(format!("look for {INSIDE}")))?;
    Ok(link.is_some_and(|link| link.mac == Some(INSIDE_MAC)))
}

/// Makes both ends, down and without an automatic IPv6 address. The alias comes last: it marks the pair as complete.
fn make(host: &mut Client, inside: &mut Client, netns: &Netns, ours: (bool, bool)) -> Result<(), Error> {
    let attempt =
        || Error::kernel(format!("make the veth pair {OUTSIDE} and {INSIDE} of the external network"));
    for client in [&mut *host, &mut *inside] {
        for name in [OUTSIDE, INSIDE] {
            if let Some(half) = link::by_name(client, name).map_err(attempt())? {
                vxlan::remove(client, half.index)?;
            }
        }
    }
    let peer =
        LinkUnspec::new_with_name(INSIDE).address(INSIDE_MAC.to_vec()).setns_by_fd(netns.as_fd().as_raw_fd());
    let pair = LinkVeth::new(OUTSIDE, INSIDE)
        .address(OUTSIDE_MAC.to_vec())
        .set_info_data(InfoData::Veth(InfoVeth::Peer(peer.build())));
    host.tell(NLM_F_CREATE | NLM_F_EXCL, RouteNetlinkMessage::NewLink(pair.build())).map_err(attempt())?;
    let (outside, own) = (index(host, OUTSIDE)?, index(inside, INSIDE)?);
    for (client, index) in [(&mut *host, outside), (&mut *inside, own)] {
        // A kernel without IPv6 has nothing to switch off.
        drop(client.tell(0, no_v6_address(index)));
    }
    let mut alias = ALIAS.to_owned();
    alias.extend([(ours.0, '4'), (ours.1, '6')].iter().filter(|(on, _)| *on).map(|(_, mark)| mark));
    host.tell(0, link::set(LinkUnspec::new_with_index(outside).alias(alias))).map_err(attempt())
}

fn index(client: &mut Client, name: &str) -> Result<u32, Error> {
    let link = link::by_name(client, name).map_err(Error::kernel(format!("look for {name}")))?;
    let gone = || netlink::Error::Garbled("it is not there".to_owned());
    link.map(|link| link.index).ok_or_else(|| Error::kernel(format!("look for {name}"))(gone()))
}

fn furnish(host: &mut Client, inside: &mut Client, pod: &[IpAddr], mtu: u32) -> Result<(), Error> {
    let (outside, own) = (index(host, OUTSIDE)?, index(inside, INSIDE)?);
    let up = |index| link::set(LinkUnspec::new_with_index(index).up().mtu(mtu));
    let mut out = vec![(0, up(outside))];
    for address in pod {
        out.push((NLM_F_CREATE | NLM_F_REPLACE, neighbour(outside, *address, INSIDE_MAC)));
        out.push((NLM_F_CREATE | NLM_F_REPLACE, route_to_pod(outside, *address)?));
    }
    let mut back = vec![(0, up(own))];
    for (gateway, v6) in [(GATEWAY, false), (GATEWAY_V6, true)] {
        // The pod's first address of the family is its source address.
        let Some(source) = pod.iter().find(|address| address.is_ipv6() == v6) else { continue };
        back.push((NLM_F_CREATE | NLM_F_REPLACE, neighbour(own, gateway, OUTSIDE_MAC)));
        // Replaces the tunnel's default route, which a running pod may already have.
        back.push((NLM_F_CREATE | NLM_F_REPLACE, default_route(own, gateway, *source)?));
    }
    for (client, messages, what) in [(host, out, OUTSIDE), (inside, back, INSIDE)] {
        let answers = client.batch(&messages).map_err(Error::kernel(format!("set {what} up")))?;
        for (step, answer) in answers.into_iter().enumerate() {
            match answer {
                Err(no) if no.errno != Errno::EEXIST => {
                    return Err(Error::kernel(format!("set {what} up, step {step}"))(no.into()));
                }
                _ => {}
            }
        }
    }
    Ok(())
}

fn neighbour(index: u32, address: IpAddr, mac: [u8; 6]) -> RouteNetlinkMessage {
    RouteNetlinkMessage::NewNeighbour(link::neighbour(index, address, Some(mac)))
}

fn route_to_pod(index: u32, address: IpAddr) -> Result<RouteNetlinkMessage, Error> {
    let scope = if address.is_ipv4() { RouteScope::Link } else { RouteScope::Universe };
    let route = RouteMessageBuilder::<IpAddr>::new()
        .output_interface(index)
        .scope(scope)
        .destination_prefix(address, bits(address))
        .map_err(Error::plan)?;
    Ok(RouteNetlinkMessage::NewRoute(route.build()))
}

fn default_route(index: u32, gateway: IpAddr, source: IpAddr) -> Result<RouteNetlinkMessage, Error> {
    let route =
        link::default_route(gateway)?.pref_source(source).map_err(Error::plan)?.output_interface(index);
    let route = if gateway.is_ipv4() { route.onlink() } else { route };
    Ok(RouteNetlinkMessage::NewRoute(route.build()))
}

/// Enables forwarding: for IPv4 on the pair and on the devices `out`, for IPv6 on all devices (it has no other switch;
/// the firewall drops foreign packets). A forwarding host ignores router advertisements unless `accept_ra` is 2.
fn forward(v4: bool, v6: bool, out: &[String], uplinks: &[UnderlayDevice]) -> Result<(), Error> {
    if v4 {
        for name in out.iter().map(String::as_str).chain([OUTSIDE]) {
            switch(&format!("ipv4/conf/{name}/forwarding"), "1")?;
        }
    }
    if v6 {
        for UnderlayDevice { name, .. } in uplinks {
            let accepts = format!("ipv6/conf/{name}/accept_ra");
            if is_on(&accepts) {
                switch(&accepts, "2")?;
            }
        }
        switch("ipv6/conf/all/forwarding", "1")?;
    }
    Ok(())
}

fn is_on(path: &str) -> bool {
    sysctl::read(Path::new(sysctl::ROOT), path).is_ok_and(|value| value == "1")
}

fn switch(path: &str, value: &str) -> Result<(), Error> {
    let attempt = format!("write {value} to {}/{path}", sysctl::ROOT);
    sysctl::ensure(path, value).map(drop).map_err(|e| Error::kernel(attempt)(e.into()))
}
