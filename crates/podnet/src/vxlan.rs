//! Makes the node's end of a tunnel: a VXLAN device in the pod's namespace with its UDP socket in the node's namespace.
//!
//! A reservation makes the device down and without a remote. From then on the kernel refuses a second device with the
//! same VNI, port and family on this node, in any namespace, until the device or its namespace ends. The device's MAC
//! address identifies its sandbox ([`super::mark`]): unlike the alias, it is set in the message that makes the device.
//!
//! Settings that are left at the default, and why:
//! * IPv6 tunnels keep their UDP checksum. Without it both ends need `udp6zerocsumrx`, one of the settings in which all
//!   devices of a port must agree. A CNI's device on the same port, or the tunnel's, would then not come up.
//! * The GSO size stays the kernel's 64 KiB. Half of it costs 0.58 of the throughput of one TCP stream, and a VXLAN
//!   device refuses more (measured on kernel 6.18). `make bench` measures both sizes and the checksum (`choice_*`).

use std::net::{IpAddr, Ipv6Addr};
use std::os::fd::{AsFd, AsRawFd};

use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{AfSpecInet6, AfSpecUnspec, In6AddrGenMode, InfoKind, LinkAttribute};
use rtnetlink::{LinkMessageBuilder, LinkUnspec, LinkVxlan};

mod probe;
mod reserve;
mod vnis;

pub use probe::probe;
pub use reserve::{Reservation, Slot, reserve};
pub use vnis::Vnis;

use super::Error;
use super::link::{self, endpoints};
use super::netlink::Client;
use super::netns::Netns;

/// Name prefix of this program's devices in a pod's namespace.
pub const PREFIX: &str = "pp-vx";

/// Returns the name of a device in a pod's namespace.
pub fn device(slot: u32) -> String {
    format!("{PREFIX}{slot}")
}

/// Returns whether a device of this name is this program's.
pub fn is_device(name: &str) -> bool {
    name.strip_prefix(PREFIX).is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_digit()))
}

/// Settings that are fixed when the device is made.
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
    /// Returns the bytes that the tunnel adds to a packet: Ethernet 14, VXLAN 8, UDP 8, IP 20 or 40.
    pub fn overhead(&self) -> u32 {
        if self.v6 { 70 } else { 50 }
    }

    pub(crate) fn fits(&self, vxlan: &link::Vxlan) -> bool {
        self.port == vxlan.port
            && self.v6 == vxlan.is_v6()
            && (self.v6 || self.udp_checksum == vxlan.udp_checksum)
    }
}

/// Device that holds a VNI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// The VNI.
    pub vni: u32,
    /// The device's index in the pod's namespace.
    pub ifindex: u32,
}

/// Builds the message that keeps the kernel from giving a device a link-local address.
pub(crate) fn no_v6_address(index: u32) -> RouteNetlinkMessage {
    let mode = AfSpecUnspec::Inet6(vec![AfSpecInet6::AddrGenMode(In6AddrGenMode::None)]);
    let device = LinkUnspec::new_with_index(index);
    link::set(device.append_extra_attribute(LinkAttribute::AfSpecUnspec(vec![mode])))
}

/// Builds the message that makes a device of this name and index (0 = the kernel chooses).
fn creation(
    netns: &Netns,
    (name, index): (String, u32),
    vni: u32,
    mac: [u8; 6],
    (shape, source_ports): (Shape, Option<(u16, u16)>),
) -> RouteNetlinkMessage {
    let mut tunnel = tunnel(netns, &name, vni, mac, shape).index(index);
    if let Some((first, last)) = source_ports {
        tunnel = tunnel.port_range(first, last);
    }
    if shape.v6 {
        // A device without any address stays an IPv4 one; this placeholder makes it IPv6 until the remote is known.
        tunnel = tunnel.remote6(Ipv6Addr::LOCALHOST);
    }
    RouteNetlinkMessage::NewLink(tunnel.build())
}

/// Starts the message that makes a tunnel device, with the settings of every device of this program.
pub(crate) fn tunnel(
    netns: &Netns,
    name: &str,
    vni: u32,
    mac: [u8; 6],
    shape: Shape,
) -> LinkMessageBuilder<LinkVxlan> {
    let tunnel = LinkVxlan::new(name, vni).address(mac.to_vec()).setns_by_fd(netns.as_fd().as_raw_fd());
    let tunnel = tunnel.port(shape.port).learning(false);
    if shape.v6 { tunnel } else { tunnel.udp_csum(shape.udp_checksum) }
}

/// Starts the message that sets a device's endpoints. The kernel refuses it unless the device has this VNI.
pub(crate) fn connection(held: Held, remote: IpAddr, local: Option<IpAddr>) -> LinkMessageBuilder<LinkVxlan> {
    let device = LinkMessageBuilder::<LinkVxlan>::new_with_info_kind(InfoKind::Vxlan).index(held.ifindex);
    endpoints(device.id(held.vni), remote, local)
}

/// Deletes a device; takes some 20 ms. A missing device is no error.
pub(crate) fn remove(client: &mut Client, index: u32) -> Result<(), Error> {
    match client.tell(0, link::delete(index)) {
        Err(e) if e.is_gone() => Ok(()),
        other => other.map_err(Error::kernel("delete a tunnel device")),
    }
}
