//! Converts the pod's network to the node's steps and the guest's message, and parses that message. Pure.

use std::net::IpAddr;

use peerpod_proto::guest as wire;

use super::Error;
use super::inspect::{self, PodNetworkState};

mod read;
#[cfg(test)]
mod tests;
mod write;

pub(crate) use read::prefix;
pub use read::read;
pub use write::write;

/// Version that this program writes. It reads [`OLD_VERSION`] as well.
const VERSION: u32 = 2;
const OLD_VERSION: u32 = 1;
const KIND: &str = "vxlan";
/// Maximum number of the pod's interfaces that are carried.
pub const MAX_INTERFACES: usize = 16;
/// Returns the minimum MTU of IPv4 or of IPv6, in bytes.
pub(crate) const fn least_mtu(v6: bool) -> u32 {
    if v6 { 1280 } else { 576 }
}

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
    let (mtu, least) = (mtu.min(room), least_mtu(v6));
    if mtu >= least {
        return Ok(mtu);
    }
    let why = format!("only {mtu} bytes of a packet are left for the pod, it needs {least}");
    Err(Error::Path { peer, why })
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
    /// The pod's network as [`inspect::inspect`] would report it, without omitted objects. The MTU of an interface is
    /// an upper limit.
    pub network: PodNetworkState,
    /// VNI of each interface's tunnel, in the order of the interfaces.
    pub vnis: Vec<u32>,
}

/// Interface to be made, and the VNI of its tunnel.
pub(crate) type Tunnelled<'a> = (u32, &'a inspect::Interface);

impl Planned {
    pub(crate) fn tunnels(&self) -> impl Iterator<Item = Tunnelled<'_>> {
        self.vnis.iter().copied().zip(&self.network.interfaces)
    }
}

/// Lowers the MTUs of a plan so that the tunnel's packets fit into `path` bytes, but never below the minimum of the
/// pod's families. The returned note reports that the minimum does not fit: the tunnel's packets are fragmented.
pub fn fit_to_path(plan: &mut wire::NetworkPlan, path: u32) -> Option<String> {
    let room = path.saturating_sub(plan.underlay.as_ref().map_or(0, |underlay| underlay.overhead));
    let mut note = None;
    for interface in &mut plan.interfaces {
        let least = least_mtu(interface.addresses.iter().any(|address| address.prefix.contains(':')));
        if room < least && interface.mtu > room {
            note = Some(format!(
                "packets of at most {path} bytes pass between VM and node, which leaves {room} for the pod and it needs \
                 {least}: the tunnel's packets are cut into fragments"
            ));
        }
        interface.mtu = interface.mtu.min(room.max(least));
    }
    note
}
