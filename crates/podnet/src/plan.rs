//! The network plan: from what the node saw to what the node does and to the message for the guest, and back with
//! everything checked. Pure.

use std::net::IpAddr;

use peerpod_proto::guest as wire;

use super::Error;
use super::look::{self, Address, Neighbour, Route, Rule, Seen, Sysctl};

mod read;
#[cfg(test)]
mod tests;
mod write;

pub use read::read;
pub use write::write;

/// What this program writes. It reads [`OLD_VERSION`] as well.
const VERSION: u32 = 2;
const OLD_VERSION: u32 = 1;
const KIND: &str = "vxlan";
/// More of the pod's interfaces than this are not carried.
pub const MAX_INTERFACES: usize = 16;
/// What IPv4 and what IPv6 need at least, in bytes.
const LEAST_MTU: u32 = 576;
const LEAST_MTU_V6: u32 = 1280;

/// One tunnel: which of the pod's interfaces it carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tunnel {
    /// Index of the pod's interface.
    pub interface: u32,
    /// The tunnel's VNI.
    pub vni: u32,
    /// What fits through the tunnel as the node sees it, at most the interface's own, in bytes.
    pub mtu: u32,
}

/// What the node does for one of the pod's interfaces: a device of this MTU, and both redirects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Carry {
    /// Which tunnel device it is; 0 is the primary interface's.
    pub slot: usize,
    /// Index of the pod's interface.
    pub interface: u32,
    /// The interface's name; for messages.
    pub name: String,
    /// The MTU of the device in the pod's namespace: the interface's own, so that it takes what the interface takes.
    pub device_mtu: u32,
    /// The MTU of the interface in the VM.
    pub mtu: u32,
}

/// The node's side: one [`Carry`] per interface, in the order of [`Seen::interfaces`]. `room` is the largest inner
/// packet that fits through the tunnel to `vm`.
///
/// # Errors
/// [`Error::Path`] where too little is left for an interface's families.
pub fn node(seen: &Seen, room: u32, vm: IpAddr) -> Result<Vec<Carry>, Error> {
    let carry = |(slot, interface): (usize, &look::Interface)| {
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

/// The smaller of an interface's MTU and the room there is, or what is too small.
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

/// What the guest needs to know about the node's end.
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
    /// Bytes the tunnel adds to a packet.
    pub overhead: u32,
}

/// A plan that makes sense.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Planned {
    /// The node's end.
    pub underlay: Underlay,
    /// The pod's interfaces, at least one.
    pub interfaces: Vec<Interface>,
    /// Routes that are not of one interface.
    pub routes: Vec<Route>,
    /// Policy rules.
    pub rules: Vec<Rule>,
    /// The namespace's sysctls.
    pub sysctls: Vec<Sysctl>,
    /// `lo`'s own addresses.
    pub loopback: Vec<Address>,
}

/// One interface to make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// Its name in the pod.
    pub name: String,
    /// Its index in the pod, 0 = any.
    pub index: u32,
    /// Its MAC address.
    pub mac: [u8; 6],
    /// The most its MTU may be, in bytes.
    pub mtu: u32,
    /// The tunnel's VNI.
    pub vni: u32,
    /// Its transmit queue's length, in packets.
    pub tx_queue_len: Option<u32>,
    /// It does not ask for neighbours.
    pub no_arp: bool,
    /// It takes every frame.
    pub promiscuous: bool,
    /// It takes every multicast frame.
    pub all_multicast: bool,
    /// It is not to be up.
    pub down: bool,
    /// Addresses.
    pub addresses: Vec<Address>,
    /// Routes through it.
    pub routes: Vec<Route>,
    /// What is written down about its neighbours.
    pub neighbours: Vec<Neighbour>,
    /// Its sysctls.
    pub sysctls: Vec<Sysctl>,
}

impl Planned {
    /// The plan as what [`look::look`] would see, without what it left out; what was planned for other interfaces than
    /// these is not in it.
    pub fn as_seen(&self) -> Seen {
        let interface = |i: &Interface| look::Interface {
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
        Seen {
            interfaces: self.interfaces.iter().map(interface).collect(),
            routes: self.routes.clone(),
            rules: self.rules.clone(),
            sysctls: self.sysctls.clone(),
            loopback: self.loopback.clone(),
            left_out: Vec::new(),
        }
    }
}
