//! Manages the network namespace in which the encrypted tunnel ends. It is private, has one TUN device and one
//! address, and holds the UDP sockets of the pods' VXLAN devices. It has no other routes, no rules and no conntrack.
//!
//! Its name is a file in a private folder, and its device is persistent: the pods' tunnels in it survive every process.
//! The process that holds the device's descriptor carries its packets. [`Inner::mend`] repairs it.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use netlink_packet_core::{NLM_F_CREATE, NLM_F_REPLACE};
use netlink_packet_route::address::{AddressAttribute, AddressMessage};
use netlink_packet_route::route::{RouteAddress, RouteAttribute, RouteMessage, RouteMetric, RouteScope};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use nix::errno::Errno;
use peerpod_common::tun::{Tun, open_tun};
use rtnetlink::{AddressMessageBuilder, LinkUnspec, RouteMessageBuilder};

use crate::link::{self, Link};
use crate::netlink::{Client, Error as Netlink};
use crate::netns::{Netns, NetnsId, create_named, name_again};
use crate::{Error, vxlan};

/// Name of the TUN device.
pub const DEVICE: &str = "pp-wg0";
/// Prefix length that covers all inner addresses.
const INNER_PREFIX: u8 = 8;
/// Most addresses and routes that are read in the namespace; many times the number that this module creates.
const MAX_ENTRIES: usize = 1 << 18;

/// The namespace and its device. Clones refer to the same ones.
#[derive(Clone, Debug)]
pub struct Inner {
    netns: Netns,
    address: Ipv4Addr,
    mtu: u32,
    /// Index of the device; it changes when the device is created again.
    index: Arc<AtomicU32>,
}

/// Result of [`Inner::open`].
#[derive(Debug)]
pub struct Opened {
    /// The namespace, ready for VXLAN devices.
    pub inner: Inner,
    /// The device; `None` if another process already carries its packets.
    pub tun: Option<Tun>,
}

/// Repairs made by [`Inner::mend`].
#[derive(Debug, Default)]
pub struct Mended {
    /// The name of the namespace was missing.
    pub name: bool,
    /// The device, its address or a route was missing.
    pub device: bool,
    /// The device, if no process held it and this call opened it.
    pub tun: Option<Tun>,
}

impl Inner {
    /// Creates or finds the namespace at `path` and its device, with this own inner address and MTU. `carried` is the
    /// device of the process that carries its packets: its namespace gets the name if that leads to none, as in another
    /// container. If the kernel does not report it (before 5.7, or the device was deleted), another one is created.
    /// Fails on a kernel without TUN devices.
    pub fn open(path: &Path, carried: Option<&Tun>, address: Ipv4Addr, mtu: u32) -> Result<Opened, Error> {
        if let Some(carried) = carried.filter(|_| NetnsId::of(path).is_none()) {
            match carried.netns() {
                Ok(found) => name_again(found.as_fd(), path)?,
                Err(error) => {
                    tracing::warn!(%error, device = DEVICE, "the kernel does not name the namespace of the \
                                                             passed device; another is made")
                }
            }
        }
        let inner = Inner { netns: create_named(path)?, address, mtu, index: Arc::default() };
        let tun = inner.prepare(&mut inner.netns.netlink()?)?;
        Ok(Opened { inner, tun })
    }

    fn prepare(&self, client: &mut Client) -> Result<Option<Tun>, Error> {
        let failed = |e: io::Error| match e.raw_os_error().map(Errno::from_raw) {
            // Without the node, and with a node that leads to no driver.
            Some(Errno::ENOENT | Errno::ENODEV | Errno::ENXIO) => Error::NoTun(e),
            _ => Error::kernel(format!("open the TUN device {DEVICE} for the encrypted tunnel"))(e.into()),
        };
        let opened = self.netns.run(|| {
            let opened = open_tun(DEVICE);
            (opened, nix::net::if_::if_nametoindex(DEVICE))
        });
        let (tun, index) = opened.map_err(failed)?;
        let tun = match tun {
            Ok(tun) => Some(tun),
            Err(e) if e.kind() == io::ErrorKind::ResourceBusy => None,
            Err(e) => return Err(failed(e)),
        };
        let index = index.map_err(|e| failed(e.into()))?;
        let attempt = |what: &str| format!("{what} {DEVICE} in {}", self.netns.path().display());
        // Optional: a kernel without IPv6 has no such setting.
        drop(client.tell(0, vxlan::no_v6_address(index)));
        let up = link::set(LinkUnspec::new_with_index(index).up().mtu(self.mtu));
        client.tell(0, up).map_err(Error::kernel(attempt("set up")))?;
        let address =
            AddressMessageBuilder::<Ipv4Addr>::new().index(index).address(self.address, INNER_PREFIX);
        client
            .tell(NLM_F_CREATE | NLM_F_REPLACE, RouteNetlinkMessage::NewAddress(address.build()))
            .map_err(Error::kernel(attempt("give an address to")))?;
        self.index.store(index, Ordering::Release);
        Ok(tun)
    }

    /// Checks that the namespace has its name, the device its address, and each peer of `routes` its route
    /// ([`Inner::fit`]) with this MTU. Restores missing parts alone; those restored before an error stay. `client` is
    /// of the namespace.
    pub fn mend(&self, client: &mut Client, routes: &HashMap<Ipv4Addr, u32>) -> Result<Mended, Error> {
        let mut mended = Mended { name: !self.netns.is_still_there(), ..Mended::default() };
        if mended.name {
            name_again(self.netns.as_fd(), self.netns.path())?;
        }
        mended.device = !self.is_whole(client, routes).map_err(Error::kernel(format!("check {DEVICE}")))?;
        if mended.device {
            mended.tun = self.prepare(client)?;
            for (peer, mtu) in routes {
                self.route_to(client, *peer, *mtu)?;
            }
        }
        Ok(mended)
    }

    fn is_whole(&self, client: &mut Client, routes: &HashMap<Ipv4Addr, u32>) -> Result<bool, Netlink> {
        let index = self.index.load(Ordering::Acquire);
        let ready = |link: Link| link.name == DEVICE && link.flags.up;
        if !link::by_index(client, index)?.is_some_and(ready) {
            return Ok(false);
        }
        let ours = AddressAttribute::Local(IpAddr::V4(self.address));
        let all = RouteNetlinkMessage::GetAddress(AddressMessage::default());
        let addresses = client.dump(&all, MAX_ENTRIES, |answer| match answer {
            RouteNetlinkMessage::NewAddress(of) if of.header.index == index => Some(of),
            _ => None,
        })?;
        let has_address = addresses.iter().any(|address| address.attributes.contains(&ours));
        if !has_address || routes.is_empty() {
            return Ok(has_address);
        }
        let mut main = RouteMessage::default();
        main.header.address_family = AddressFamily::Inet;
        let there =
            client.dump(&RouteNetlinkMessage::GetRoute(main), MAX_ENTRIES, |answer| match answer {
                RouteNetlinkMessage::NewRoute(route) => read_route(&route, index),
                _ => None,
            })?;
        let there: HashMap<Ipv4Addr, u32> = there.into_iter().collect();
        Ok(routes.iter().all(|(peer, mtu)| there.get(peer) == Some(mtu)))
    }

    /// Returns the namespace. VXLAN devices created through a socket of it send through the tunnel.
    pub fn netns(&self) -> &Netns {
        &self.netns
    }

    /// Sets the largest packet size to this peer: larger ones are fragmented here, not on the path.
    pub fn fit(&self, peer: Ipv4Addr, mtu: u32) -> Result<(), Error> {
        self.route_to(&mut self.netns.netlink()?, peer, mtu)
    }

    fn route_to(&self, client: &mut Client, peer: Ipv4Addr, mtu: u32) -> Result<(), Error> {
        let message = RouteNetlinkMessage::NewRoute(self.route(peer, Some(mtu)));
        client
            .tell(NLM_F_CREATE | NLM_F_REPLACE, message)
            .map_err(Error::kernel(format!("route the inner address {peer} into {DEVICE}")))
    }

    /// Removes the route of [`Inner::fit`]. A missing route is no error.
    pub fn unfit(&self, peer: Ipv4Addr) -> Result<(), Error> {
        match self.netns.netlink()?.tell(0, RouteNetlinkMessage::DelRoute(self.route(peer, None))) {
            Err(e) if !e.is_gone() => Err(Error::kernel(format!("remove the route to {peer}"))(e)),
            _ => Ok(()),
        }
    }

    fn route(&self, peer: Ipv4Addr, mtu: Option<u32>) -> RouteMessage {
        let mut route = RouteMessageBuilder::<Ipv4Addr>::new()
            .destination_prefix(peer, 32)
            .output_interface(self.index.load(Ordering::Acquire))
            .scope(RouteScope::Link)
            .build();
        route.attributes.extend(mtu.map(|mtu| RouteAttribute::Metrics(vec![RouteMetric::Mtu(mtu)])));
        route
    }
}

/// Returns peer and MTU of a route that [`Inner::fit`] made.
fn read_route(route: &RouteMessage, device: u32) -> Option<(Ipv4Addr, u32)> {
    let to = route.attributes.iter().find_map(|attribute| match attribute {
        RouteAttribute::Destination(RouteAddress::Inet(peer)) => Some(*peer),
        _ => None,
    })?;
    let is_ours = route.header.destination_prefix_length == 32
        && route.attributes.contains(&RouteAttribute::Oif(device));
    link::mtu_of(route).filter(|_| is_ours).map(|mtu| (to, mtu))
}
