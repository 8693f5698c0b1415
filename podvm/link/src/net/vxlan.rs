//! The node's end of a tunnel: a VXLAN device in the pod's namespace whose UDP socket is in the node's.
//!
//! Reserving makes the device down and without a remote. From then on the kernel itself guards the VNI: a second
//! device with it, for the same port and family on this node, is refused, wherever the first one lives, across any
//! crash of ours, until the device or its namespace is gone. Which sandbox a device belongs to is in its MAC address,
//! because that is set in the very message that makes it; the alias, which people read, comes a message later.

use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::{AsFd, AsRawFd};

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{
    AfSpecInet6, AfSpecUnspec, In6AddrGenMode, InfoVxlan, LinkAttribute, LinkFlags, LinkMessage,
};
use nix::errno::Errno;
use sha2::{Digest, Sha256};

use super::Error;
use super::link::{self, Link, endpoints, vxlan_info};
use super::netlink::{self, Client};
use super::netns::Netns;

/// The device's name in every pod's namespace.
pub const DEVICE: &str = "pp-vx0";
/// Random VNIs that are tried; with 10 000 tunnels on a node one in 1 700 collides.
const TRIES: u32 = 16;
const MAX_VNI: u32 = 0xff_ffff;

/// What is fixed when the device is made and cannot be changed later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// UDP port.
    pub port: u16,
    /// Whether the other end will have an IPv6 address.
    pub v6: bool,
    /// Whether IPv4 packets carry a UDP checksum.
    pub udp_checksum: bool,
}

impl Shape {
    /// What the tunnel adds to a packet, in bytes: Ethernet 14, VXLAN 8, UDP 8, IP 20 or 40.
    pub fn overhead(&self) -> u32 {
        if self.v6 { 70 } else { 50 }
    }

    fn fits(&self, vxlan: &link::Vxlan) -> bool {
        self.port == vxlan.port
            && self.v6 == vxlan.is_v6()
            && (self.v6 || self.udp_checksum == vxlan.udp_checksum)
    }
}

/// A device that holds a VNI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// The VNI.
    pub vni: u32,
    /// The device's index in the pod's namespace.
    pub ifindex: u32,
}

/// The MAC address that marks a device as this sandbox's.
pub fn owner_mac(sandbox: &str) -> [u8; 6] {
    let digest = Sha256::digest(format!("peerpod tunnel of {sandbox}"));
    let mut mac = [0; 6];
    for (to, from) in mac.iter_mut().zip(digest) {
        *to = from;
    }
    // Locally administered, unicast.
    mac[0] = (mac[0] & 0xfc) | 0x02;
    mac
}

/// Makes sure that the pod's namespace has this sandbox's device, of this shape. `wanted` is the VNI of an earlier
/// reservation; it is taken if the kernel still has it to give. `host` is a socket of the node's namespace.
///
/// # Errors
/// [`Error::Claimed`] when another sandbox's device is there, [`Error::Kernel`], [`Error::Netns`].
pub fn reserve(
    host: &mut Client,
    netns: &Netns,
    sandbox: &str,
    shape: Shape,
    wanted: Option<u32>,
) -> Result<Held, Error> {
    let mut pod = netns.netlink()?;
    let held = reserve_with(host, &mut pod, netns, sandbox, shape, wanted)?;
    netns.keep(pod);
    Ok(held)
}

fn reserve_with(
    host: &mut Client,
    pod: &mut Client,
    netns: &Netns,
    sandbox: &str,
    shape: Shape,
    wanted: Option<u32>,
) -> Result<Held, Error> {
    let mac = owner_mac(sandbox);
    let mut wish = wanted.filter(|vni| (1..=MAX_VNI).contains(vni));
    let mut refused = None;
    for _ in 0..TRIES {
        let vni = match wish {
            Some(vni) => vni,
            None => random_vni()?,
        };
        match host.tell(NLM_F_CREATE | NLM_F_EXCL, creation(netns, vni, mac, shape)) {
            Ok(()) => {
                let held = find(pod, netns)?.map(|link| Held { vni, ifindex: link.index });
                let held = held.ok_or_else(|| Error::Gone { netns: netns.path().to_owned(), vni })?;
                return name(pod, sandbox, held);
            }
            Err(netlink::Error::Refused(no)) if no.errno == Errno::EEXIST => match find(pod, netns)? {
                Some(there) => {
                    if let Some(held) = adopt(pod, netns, &there, mac, shape, wish)? {
                        return name(pod, sandbox, held);
                    }
                }
                // No device of that name in the way, so it was the VNI: draw another one.
                None => {
                    wish = None;
                    refused = Some(no);
                }
            },
            Err(e) => {
                return Err(Error::kernel(format!("make the tunnel device in {}", netns.path().display()))(
                    e,
                ));
            }
        }
    }
    let no = refused.unwrap_or(netlink::Refusal { errno: Errno::EEXIST, text: None });
    Err(Error::kernel(format!("find a free VNI on UDP port {} in {TRIES} tries", shape.port))(no.into()))
}

/// A device of the name is there: takes it if it is what we would make, removes it if it is ours and different.
fn adopt(
    pod: &mut Client,
    netns: &Netns,
    there: &Link,
    mac: [u8; 6],
    shape: Shape,
    wish: Option<u32>,
) -> Result<Option<Held>, Error> {
    if there.mac != Some(mac) {
        let other = match &there.alias {
            Some(alias) => alias.strip_prefix("peerpod:").unwrap_or(alias).to_owned(),
            None => format!("an unnamed device {DEVICE}"),
        };
        return Err(Error::Claimed { netns: netns.path().to_owned(), other });
    }
    match &there.vxlan {
        Some(vxlan) if shape.fits(vxlan) && wish.is_none_or(|vni| vni == vxlan.vni) => {
            Ok(Some(Held { vni: vxlan.vni, ifindex: there.index }))
        }
        _ => {
            remove(pod, there.index)?;
            Ok(None)
        }
    }
}

fn find(pod: &mut Client, netns: &Netns) -> Result<Option<Link>, Error> {
    link::by_name(pod, DEVICE)
        .map_err(Error::kernel(format!("look for {DEVICE} in {}", netns.path().display())))
}

/// The alias, and no IPv6 address of its own: what the device itself said would only disturb the VM.
fn name(pod: &mut Client, sandbox: &str, held: Held) -> Result<Held, Error> {
    let mut alias = LinkMessage::default();
    alias.header.index = held.ifindex;
    alias.attributes.push(LinkAttribute::IfAlias(format!("peerpod:{sandbox}")));
    let messages = [
        (0, RouteNetlinkMessage::SetLink(alias)),
        (0, RouteNetlinkMessage::SetLink(no_v6_address(held.ifindex))),
    ];
    let answers = pod.batch(&messages).map_err(Error::kernel(format!("name {DEVICE}")))?;
    let mut answers = answers.into_iter();
    if let Some(Err(no)) = answers.next() {
        return Err(Error::kernel(format!("name {DEVICE}"))(no.into()));
    }
    // The second is refused where the kernel has no IPv6; then there is nothing to switch off.
    Ok(held)
}

/// Tells the kernel not to give a device a link-local address by itself.
pub(crate) fn no_v6_address(index: u32) -> LinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = index;
    let mode = AfSpecInet6::AddrGenMode(In6AddrGenMode::None);
    message.attributes.push(LinkAttribute::AfSpecUnspec(vec![AfSpecUnspec::Inet6(vec![mode])]));
    message
}

fn creation(netns: &Netns, vni: u32, mac: [u8; 6], shape: Shape) -> RouteNetlinkMessage {
    let mut settings = settings(vni, shape);
    if shape.v6 {
        // A device without any address is an IPv4 one for good; this says IPv6 until the remote is known.
        settings.append(&mut endpoints(IpAddr::V6(Ipv6Addr::LOCALHOST), None));
    }
    let mut message = LinkMessage::default();
    message.attributes = vec![
        LinkAttribute::IfName(DEVICE.to_owned()),
        LinkAttribute::Address(mac.to_vec()),
        LinkAttribute::NetNsFd(netns.as_fd().as_raw_fd()),
        vxlan_info(settings),
    ];
    RouteNetlinkMessage::NewLink(message)
}

/// The settings every VXLAN device of ours is made with.
pub(crate) fn settings(vni: u32, shape: Shape) -> Vec<InfoVxlan> {
    let mut settings = vec![InfoVxlan::Id(vni), InfoVxlan::Port(shape.port), InfoVxlan::Learning(false)];
    if !shape.v6 {
        settings.push(InfoVxlan::UDPCsum(shape.udp_checksum));
    }
    settings
}

/// The message that gives a reserved device its ends and takes it up. Refused by the kernel unless the device has this
/// VNI.
pub(crate) fn connection(held: Held, remote: IpAddr, local: IpAddr) -> RouteNetlinkMessage {
    let mut settings = vec![InfoVxlan::Id(held.vni)];
    settings.append(&mut endpoints(remote, Some(local)));
    let mut message = LinkMessage::default();
    message.header.index = held.ifindex;
    message.header.flags = LinkFlags::Up;
    message.header.change_mask = LinkFlags::Up;
    message.attributes = vec![vxlan_info(settings)];
    RouteNetlinkMessage::NewLink(message)
}

/// The message that sets a device's MTU; with VXLAN settings in one message the kernel refuses it.
pub(crate) fn with_mtu(index: u32, mtu: u32) -> RouteNetlinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.attributes.push(LinkAttribute::Mtu(mtu));
    RouteNetlinkMessage::SetLink(message)
}

/// Deletes a device; takes some 20 ms. Gone is fine.
pub(crate) fn remove(client: &mut Client, index: u32) -> Result<(), Error> {
    match client.tell(0, link::delete(index)) {
        Err(e) if e.is_gone() => Ok(()),
        other => other.map_err(Error::kernel("delete a tunnel device")),
    }
}

fn random_vni() -> Result<u32, Error> {
    loop {
        let random = getrandom::u32().map_err(|e| {
            Error::kernel("draw a random VNI")(netlink::Error::Socket(std::io::Error::other(e)))
        })?;
        match random & MAX_VNI {
            0 => {} // VNI 0 is what devices without one say
            vni => return Ok(vni),
        }
    }
}

/// Makes sure that tunnels on this port work here: makes a device of each family in a throw-away namespace, takes it
/// up, and deletes it again (some 40 ms). `host` is a socket of the node's namespace.
///
/// # Errors
/// [`Error::Port`] naming the device that is in the way, where it is one; [`Error::Kernel`].
pub fn probe(host: &mut Client, shape: Shape) -> Result<(), Error> {
    let scratch = Netns::scratch()?;
    let mut inside = scratch.netlink()?;
    for v6 in [false, true] {
        let shape = Shape { v6, ..shape };
        let made = host
            .tell(NLM_F_CREATE | NLM_F_EXCL, creation(&scratch, random_vni()?, owner_mac("probe"), shape));
        match made {
            Err(e) if v6 && e.errno() == Some(Errno::EAFNOSUPPORT) => continue, // a kernel without IPv6
            Err(e) if e.errno() == Some(Errno::EOPNOTSUPP) => {
                let why = "the kernel has no VXLAN; load the module `vxlan`".to_owned();
                return Err(Error::Port { port: shape.port, why });
            }
            made => made.map_err(Error::kernel("make a tunnel device to try the port"))?,
        }
        let link = link::by_name(&mut inside, DEVICE).map_err(Error::kernel("look at a tunnel device"))?;
        let Some(link) = link else { continue };
        let mut up = LinkMessage::default();
        up.header.index = link.index;
        up.header.flags = LinkFlags::Up;
        up.header.change_mask = LinkFlags::Up;
        let answer = inside.tell(0, RouteNetlinkMessage::SetLink(up));
        remove(&mut inside, link.index)?;
        match answer {
            Err(e) if e.errno() == Some(Errno::EADDRINUSE) => {
                return Err(Error::Port { port: shape.port, why: culprit(host, shape.port) });
            }
            Err(e) if v6 && e.errno() == Some(Errno::EAFNOSUPPORT) => {}
            answer => answer.map_err(Error::kernel(format!("open UDP port {} for tunnels", shape.port)))?,
        }
    }
    Ok(())
}

/// Who holds the port, in words.
fn culprit(host: &mut Client, port: u16) -> String {
    let links = link::all(host, 4096).unwrap_or_default();
    let there = links.into_iter().find(|l| l.vxlan.as_ref().is_some_and(|v| v.port == port && l.up));
    match there {
        Some(link) if link.vxlan.as_ref().is_some_and(|v| v.collect_metadata) => format!(
            "the device {} has it for all VNIs (collect-metadata, as Open vSwitch and Cilium do)",
            link.name
        ),
        Some(link) => format!("the device {} has it with other settings", link.name),
        None => "another program or a device of another namespace has it".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sandboxs_mac_is_its_own_local_and_unicast() {
        let (a, b) = (owner_mac("a"), owner_mac("b"));
        assert_ne!(a, b);
        assert_eq!(a, owner_mac("a"));
        assert_eq!((a[0] & 0x03, b[0] & 0x03), (0x02, 0x02));
    }
}
