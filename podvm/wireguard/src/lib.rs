//! Implements the encrypted layer below the pods' VXLAN: WireGuard in user space. `boringtun` implements the
//! protocol; this crate holds the peers, checks the decrypted packets, and runs the threads that move packets between
//! a TUN device and a UDP socket.
//!
//! Layer 2 survives because WireGuard carries only VXLAN. Node and VM have one inner IPv4 address each. A packet that
//! leaves the tunnel must be VXLAN between these two, of a network that the peer owns ([`Lane`]). The guest begins.
//! The node learns the guest's address from authenticated packets, so the tunnel works through NAT and when the VM
//! moves.
//!
//! This crate accesses no pods, no disk and no configuration: callers pass in keys, peers and descriptors. Peers are
//! hostile.

mod driver;
mod engine;
mod key;
mod lane;
mod merge;
mod peer;
mod stats;
#[cfg(test)]
mod tests;
mod udp;

pub use driver::DataPlane;
pub use engine::{Engine, Error, Path, Sink};
pub use key::{BadKey, PrivateKey, PublicKey};
pub use lane::{Lane, NODE_INNER, inner_of};
pub use peer::PeerConfig;
pub use peerpod_common::tun::{Tun, open_tun};
pub use stats::{Counters, Reason, Snapshot, Stats};
pub use udp::bind;

/// Bytes that WireGuard adds to a packet over an IPv4 underlay: IP 20, UDP 8, header 16, tag 16.
pub const OVERHEAD_V4: u32 = 60;
/// Bytes that WireGuard adds to a packet over an IPv6 underlay.
pub const OVERHEAD_V6: u32 = 80;
