//! The node's end of a tunnel: a VXLAN device in the pod's namespace whose UDP socket is in the node's.
//!
//! Reserving makes the device down and without a remote. From then on the kernel itself guards the VNI: a second
//! device with it, for the same port and family on this node, is refused, wherever the first one lives, across any
//! crash of ours, until the device or its namespace is gone. Which sandbox a device belongs to is in its MAC address
//! ([`super::mark`]), because that is set in the very message that makes it; the alias comes a message later.
//!
//! What is not set, and why:
//! * IPv6 tunnels keep their UDP checksum. Without it both ends need `udp6zerocsumrx`, one of the settings in which all
//!   devices of a port must agree: a CNI's device on the same port would no longer come up, or ours would not.
//! * The GSO size stays the kernel's 64 KiB: half of it costs 0.58 of the throughput of one TCP stream, and more than
//!   that a VXLAN device refuses (measured on kernel 6.18). `make bench` measures both sizes and the checksum (`choice_*`).

use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::{AsFd, AsRawFd};

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{
    AfSpecInet6, AfSpecUnspec, In6AddrGenMode, InfoVxlan, LinkAttribute, LinkFlags, LinkMessage,
};

mod probe;
mod reserve;
mod vnis;

pub use probe::probe;
pub use reserve::{Slot, Wanted, reserve};
pub use vnis::Vnis;

use super::Error;
use super::link::{self, endpoints, vxlan_info};
use super::netlink::Client;
use super::netns::Netns;

/// What the names of our devices in a pod's namespace begin with.
pub const PREFIX: &str = "pp-vx";

/// The first device's name.
pub const DEVICE: &str = "pp-vx0";

/// The name of a device in a pod's namespace.
pub fn device(slot: u32) -> String {
    format!("{PREFIX}{slot}")
}

/// Whether a device of this name is ours.
pub fn is_device(name: &str) -> bool {
    name.strip_prefix(PREFIX).is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_digit()))
}

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

/// Tells the kernel not to give a device a link-local address by itself.
pub(crate) fn no_v6_address(index: u32) -> LinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = index;
    let mode = AfSpecInet6::AddrGenMode(In6AddrGenMode::None);
    message.attributes.push(LinkAttribute::AfSpecUnspec(vec![AfSpecUnspec::Inet6(vec![mode])]));
    message
}

/// The message that makes a device, of this name and index (0: the kernel chooses).
fn creation(
    netns: &Netns,
    (name, index): (String, u32),
    vni: u32,
    mac: [u8; 6],
    (shape, source_ports): (Shape, Option<(u16, u16)>),
) -> RouteNetlinkMessage {
    let mut settings = settings(vni, shape);
    settings.extend(source_ports.map(InfoVxlan::PortRange));
    if shape.v6 {
        // A device without any address is an IPv4 one for good; this says IPv6 until the remote is known.
        settings.append(&mut endpoints(IpAddr::V6(Ipv6Addr::LOCALHOST), None));
    }
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.attributes = vec![
        LinkAttribute::IfName(name),
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
