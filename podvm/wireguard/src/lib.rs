//! WireGuard in user space: the encrypted layer below the pods' VXLAN. The protocol is `boringtun`'s; here are the
//! peers, the check of what comes out, and the threads that move packets between a TUN device and a UDP socket.
//!
//! Layer 2 survives because WireGuard carries nothing but VXLAN: node and VM have one inner IPv4 address each, and
//! what leaves the tunnel must be a VXLAN packet between these two, of a network the peer owns ([`Lane`]). The guest
//! begins; the node learns where it is from packets that prove who sent them, which is how it works through NAT and
//! when the VM moves.
//!
//! Knows no pods, no disk and no configuration: keys, peers and descriptors are handed in. Peers are hostile.

mod driver;
mod engine;
mod key;
mod lane;
mod merge;
mod peer;
mod stats;
mod sys;
#[cfg(test)]
mod tests;
mod udp;

pub use driver::DataPlane;
pub use engine::{Engine, Error, Path, Sink};
pub use key::{BadKey, PrivateKey, PublicKey};
pub use lane::{Lane, NODE_INNER, inner_of};
pub use peer::PeerConfig;
pub use stats::{Reason, Snapshot, Stats};
pub use sys::{Tun, open_tun};
pub use udp::{bind, port_of};

/// What WireGuard adds to a packet below an IPv4 underlay, in bytes: IP 20, UDP 8, header 16, tag 16.
pub const OVERHEAD_V4: u32 = 60;
/// The same below an IPv6 underlay.
pub const OVERHEAD_V6: u32 = 80;
