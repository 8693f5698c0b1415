//! Looks at a pod's network namespace once and copies the pod's interface as plain data: addresses, routes and
//! neighbours of both families, MAC and MTU. Reads only.
//!
//! What cannot be carried into the VM and changes what the pod reaches is an error that names it; what is merely
//! left out (another interface, a rule) is listed in [`Seen::left_out`] for a log line or an Event.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::Error;
use super::netns::Netns;

/// What a pod's network looks like. Serialisable: it goes into the ledger.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Seen {
    /// The pod's interface: the one with the default route, else the first that is not `lo`.
    pub interface: Interface,
    /// What the VM will not have, in words; usually empty.
    #[serde(default)]
    pub left_out: Vec<String>,
}

/// One interface of the pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interface {
    /// Its name, `eth0` as a rule.
    pub name: String,
    /// Its index in the pod's namespace.
    pub index: u32,
    /// Its MAC address, `aa:bb:cc:dd:ee:ff`.
    pub mac: String,
    /// Its MTU in bytes, or the smallest of its default routes' where that is less.
    pub mtu: u32,
    /// Its addresses, in the kernel's order.
    pub addresses: Vec<Address>,
    /// The main table's routes through it, in the kernel's order.
    pub routes: Vec<Route>,
    /// Its permanent neighbours.
    pub neighbours: Vec<Neighbour>,
}

/// An address with its prefix length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Address {
    /// The address.
    pub address: IpAddr,
    /// Bits of the network.
    pub prefix: u8,
    /// rtnetlink's scope: 0 universe, 200 site, 253 link, 254 host.
    pub scope: u8,
}

/// A unicast route of the main table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// Destination; `0.0.0.0` or `::` with prefix 0 for the default.
    pub destination: IpAddr,
    /// Bits of the destination.
    pub prefix: u8,
    /// Next hop; may be IPv6 for an IPv4 destination.
    pub gateway: Option<IpAddr>,
    /// Preferred source address.
    pub source: Option<IpAddr>,
    /// Priority; less is better.
    pub metric: u32,
    /// rtnetlink's protocol number (2 kernel, 3 boot, 4 static ...).
    pub protocol: u8,
    /// rtnetlink's scope.
    pub scope: u8,
    /// The gateway need not be in a connected network.
    pub onlink: bool,
    /// Path MTU of the route; 0 = the interface's.
    pub mtu: u32,
}

/// A neighbour that somebody wrote down for good (no ARP).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Neighbour {
    /// Its address.
    pub address: IpAddr,
    /// Its MAC address, `aa:bb:cc:dd:ee:ff`.
    pub mac: String,
}

/// Copies the pod's interface.
///
/// # Errors
/// [`Error::CannotCarry`] with the thing named, [`Error::TooMany`], [`Error::Kernel`], [`Error::Netns`].
pub fn look(netns: &Netns) -> Result<Seen, Error> {
    let _ = netns.netlink()?;
    Err(Error::CannotCarry("not built yet".to_owned()))
}
