//! Converts the pod's network to the node's steps and to the message for the guest, and parses that message with every
//! field checked. Pure.

use std::net::IpAddr;

use peerpod_proto::guest as wire;

use super::Error;
use super::inspect::{self, Address, Neighbour, PodNetworkState, Route, Rule, Sysctl};

mod read;
#[cfg(test)]
mod tests;
mod write;

pub use read::read;
pub use write::write;

/// Version that this program writes. It reads [`OLD_VERSION`] as well.
const VERSION: u32 = 2;
const OLD_VERSION: u32 = 1;
const KIND: &str = "vxlan";
/// Maximum number of the pod's interfaces that are carried.
pub const MAX_INTERFACES: usize = 16;
/// Minimum MTU of IPv4 and of IPv6, in bytes.
const LEAST_MTU: u32 = 576;
const LEAST_MTU_V6: u32 = 1280;

/// One tunnel and the pod interface it carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tunnel {
    /// Index of the pod's interface.
    pub interface: u32,
    /// The tunnel's VNI.
    pub vni: u32,
    /// MTU of the tunnel as the node knows it, at most the interface's own, in bytes.
    pub mtu: u32,
}

/// The node's work for one of the pod's interfaces: a device of this MTU, and both redirects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Carry {
    /// Number of the tunnel device; 0 is the primary interface's device.
    pub slot: usize,
    /// Index of the pod's interface.
    pub interface: u32,
    /// The interface's name, for messages.
    pub name: String,
    /// MTU of the device in the pod's namespace, in bytes: the interface's own, so that the device accepts the same
    /// packets.
    pub device_mtu: u32,
    /// MTU of the interface in the VM, in bytes.
    pub mtu: u32,
}

/// Returns the node's side: one [`Carry`] per interface, in the order of [`PodNetworkState::interfaces`]. `room` is the largest
/// inner packet that fits through the tunnel to `vm`, in bytes.
///
/// # Errors
/// [`Error::Path`] where `room` is too small for an interface's families.
pub fn node(seen: &PodNetworkState, room: u32, vm: IpAddr) -> Result<Vec<Carry>, Error> {
    let carry = |(slot, interface): (usize, &inspect::Interface)| {
        let mtu = fit(interface.mtu, room, interface.has_v6(), vm)?;
        Ok(Carry {
            slot,
            interface: interface.index,
            name: interface.name.clone(),
            device_mtu: interface.mtu,
            mtu,
        })
    };
    seen.interfaces.iter().enumerate().map(carry).collect()
}

/// Returns the smaller of an interface's MTU and `room`, or an error where that is below the families' minimum.
pub(crate) fn fit(mtu: u32, room: u32, v6: bool, peer: IpAddr) -> Result<u32, Error> {
    let least = if v6 { LEAST_MTU_V6 } else { LEAST_MTU };
    match mtu.min(room) {
        mtu if mtu >= least => Ok(mtu),
        mtu => {
            let why = format!("only {mtu} bytes of a packet are left for the pod, it needs {least}");
            Err(Error::Path { peer, why })
        }
    }
}

/// The node's end of the tunnel, as the guest needs it.
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
    /// Bytes that the tunnel adds to a packet.
    pub overhead: u32,
}

/// A valid plan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Planned {
    /// The node's end of the tunnel.
    pub underlay: Underlay,
    /// The pod's interfaces, at least one.
    pub interfaces: Vec<Interface>,
    /// Routes that do not belong to one interface.
    pub routes: Vec<Route>,
    /// Policy rules.
    pub rules: Vec<Rule>,
    /// The namespace's sysctls.
    pub sysctls: Vec<Sysctl>,
    /// `lo`'s own addresses.
    pub loopback: Vec<Address>,
}

/// Interface to be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// Its name in the pod.
    pub name: String,
    /// Its index in the pod, 0 = any.
    pub index: u32,
    /// Its MAC address.
    pub mac: [u8; 6],
    /// Upper limit of its MTU, in bytes.
    pub mtu: u32,
    /// The tunnel's VNI.
    pub vni: u32,
    /// Its transmit queue's length, in packets.
    pub tx_queue_len: Option<u32>,
    /// Whether it does no ARP.
    pub no_arp: bool,
    /// Whether it receives every frame.
    pub promiscuous: bool,
    /// Whether it receives every multicast frame.
    pub all_multicast: bool,
    /// Whether it is to be down.
    pub down: bool,
    /// Addresses.
    pub addresses: Vec<Address>,
    /// Routes through it.
    pub routes: Vec<Route>,
    /// Its static neighbour entries.
    pub neighbours: Vec<Neighbour>,
    /// Its sysctls.
    pub sysctls: Vec<Sysctl>,
}

impl Planned {
    /// Returns the plan as the state that [`inspect::inspect`] would report, without omitted objects. Objects that were
    /// planned for other interfaces are not included.
    pub fn as_seen(&self) -> PodNetworkState {
        let interface = |i: &Interface| inspect::Interface {
            name: i.name.clone(),
            index: i.index,
            mac: super::link::mac_text(i.mac),
            mtu: i.mtu,
            tx_queue_len: i.tx_queue_len,
            no_arp: i.no_arp,
            promiscuous: i.promiscuous,
            all_multicast: i.all_multicast,
            down: i.down,
            addresses: i.addresses.clone(),
            routes: i.routes.clone(),
            neighbours: i.neighbours.clone(),
            sysctls: i.sysctls.clone(),
        };
        PodNetworkState {
            interfaces: self.interfaces.iter().map(interface).collect(),
            routes: self.routes.clone(),
            rules: self.rules.clone(),
            sysctls: self.sysctls.clone(),
            loopback: self.loopback.clone(),
            left_out: Vec::new(),
        }
    }
}
