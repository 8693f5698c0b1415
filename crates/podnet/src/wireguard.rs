//! The namespace that the encrypted tunnel ends in: private to us, with one TUN device and one address, where the
//! pods' VXLAN devices have their UDP socket. Nothing else lives there: no other route, no rule, no conntrack.
//!
//! Its name is a file in a folder of ours, and its device persists: the tunnels of pods live in it, and survive every
//! process of ours. Who holds the device's descriptor carries its packets. What others delete of it is put back
//! ([`Inner::mend`]): the pods' VXLAN devices find it again by addresses and routes.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use netlink_packet_core::{NLM_F_CREATE, NLM_F_REPLACE};
use netlink_packet_route::address::{AddressAttribute, AddressMessage};
use netlink_packet_route::link::{
    AfSpecInet6, AfSpecUnspec, In6AddrGenMode, LinkAttribute, LinkFlags, LinkMessage,
};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteMessage, RouteMetric, RouteProtocol, RouteScope, RouteType,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use peerpod_wireguard::{Tun, open_tun};

use crate::Error;
use crate::netlink::{Client, Error as Netlink};
use crate::netns::{Netns, NetnsId, create_named, delete_named, name_again};

/// The TUN device's name.
pub const DEVICE: &str = "pp-wg0";
/// All inner addresses.
const INNER_PREFIX: u8 = 8;
/// Addresses and routes that are read there; many times what we make.
const MAX_ENTRIES: usize = 1 << 18;

/// The namespace and its device. Clones are the same one.
#[derive(Clone, Debug)]
pub struct Inner {
    netns: Netns,
    address: Ipv4Addr,
    mtu: u32,
    /// The device's; another one after it was made anew.
    index: Arc<AtomicU32>,
}

/// What opening found.
#[derive(Debug)]
pub struct Opened {
    /// The namespace, ready for VXLAN devices.
    pub inner: Inner,
    /// The device; `None` where another process carries its packets already.
    pub tun: Option<Tun>,
}

/// What [`Inner::mend`] did.
#[derive(Debug, Default)]
pub struct Mended {
    /// The namespace's name was gone.
    pub name: bool,
    /// The device, its address or a route was.
    pub device: bool,
    /// The device, where nobody held it: it was made anew.
    pub tun: Option<Tun>,
}

impl Inner {
    /// Makes namespace and device at `path`, or finds them; `address` is ours, `mtu` the device's. `carried` is the device
    /// of the process that carries its packets: its namespace gets the name where the name leads to none, as in
    /// another container's mount namespace. Where the kernel does not name that namespace (before 5.7, or the device was
    /// deleted), another one is made.
    ///
    /// # Errors
    /// [`Error::Netns`], [`Error::Kernel`]: no right to it, or a kernel without TUN devices.
    pub fn open(path: &Path, carried: Option<&Tun>, address: Ipv4Addr, mtu: u32) -> Result<Opened, Error> {
        if let Some(carried) = carried.filter(|_| NetnsId::of(path).is_none()) {
            match carried.netns() {
                Ok(found) => name_again(found.as_fd(), path)?,
                Err(error) => {
                    tracing::warn!(%error, device = DEVICE, "the kernel does not name the namespace of the carried device; another is made")
                }
            }
        }
        let inner = Inner { netns: create_named(path)?, address, mtu, index: Arc::default() };
        let tun = inner.prepare(&mut inner.netns.netlink()?)?;
        Ok(Opened { inner, tun })
    }

    fn prepare(&self, client: &mut Client) -> Result<Option<Tun>, Error> {
        let failed = |e: io::Error| Error::Kernel {
            attempt: format!("open the TUN device {DEVICE} for the encrypted tunnel (kernel module tun)"),
            source: e.into(),
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
        // Optional: a kernel without IPv6 has nothing to switch off.
        drop(client.tell(0, RouteNetlinkMessage::SetLink(quiet(index))));
        client
            .tell(0, RouteNetlinkMessage::SetLink(up(index, Some(self.mtu))))
            .map_err(kernel(attempt("take up")))?;
        let address = RouteNetlinkMessage::NewAddress(address_of(index, self.address));
        client.tell(NLM_F_CREATE | NLM_F_REPLACE, address).map_err(kernel(attempt("give an address to")))?;
        self.index.store(index, Ordering::Release);
        Ok(tun)
    }

    /// Looks whether the namespace has its name, the device its address, and each peer of `routes` its route
    /// ([`Inner::fit`]) with this MTU; puts back what is missing. Changes nothing where all is well. `client` is a
    /// socket of the namespace.
    ///
    /// # Errors
    /// [`Error::Netns`], [`Error::Kernel`]; what was put back by then stays.
    pub fn mend(&self, client: &mut Client, routes: &HashMap<Ipv4Addr, u32>) -> Result<Mended, Error> {
        let mut mended = Mended { name: !self.netns.is_still_there(), ..Mended::default() };
        if mended.name {
            name_again(self.netns.as_fd(), self.netns.path())?;
        }
        mended.device = !self.is_whole(client, routes).map_err(kernel(format!("look after {DEVICE}")))?;
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
        let mut message = LinkMessage::default();
        message.header.index = index;
        match client.ask(RouteNetlinkMessage::GetLink(message)) {
            Ok(RouteNetlinkMessage::NewLink(link)) => {
                let named = link.attributes.contains(&LinkAttribute::IfName(DEVICE.to_owned()));
                if !named || !link.header.flags.contains(LinkFlags::Up) {
                    return Ok(false);
                }
            }
            Ok(other) => return Err(Netlink::Garbled(format!("no link: {other:?}"))),
            Err(e) if e.is_gone() => return Ok(false),
            Err(e) => return Err(e),
        }
        let ours = AddressAttribute::Local(IpAddr::V4(self.address));
        let all = RouteNetlinkMessage::GetAddress(AddressMessage::default());
        let addresses = client.dump(&all, MAX_ENTRIES, |answer| match answer {
            RouteNetlinkMessage::NewAddress(of) if of.header.index == index => Some(of),
            _ => None,
        })?;
        if !addresses.iter().any(|address| address.attributes.contains(&ours)) {
            return Ok(false);
        }
        if routes.is_empty() {
            return Ok(true);
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

    /// The namespace. VXLAN devices made by a socket of it send through the tunnel.
    pub fn netns(&self) -> &Netns {
        &self.netns
    }

    /// Says how large packets to this peer may be: larger ones are cut here, inside, and not on the way.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn fit(&self, peer: Ipv4Addr, mtu: u32) -> Result<(), Error> {
        self.route_to(&mut self.client()?, peer, mtu)
    }

    fn route_to(&self, client: &mut Client, peer: Ipv4Addr, mtu: u32) -> Result<(), Error> {
        let message = RouteNetlinkMessage::NewRoute(self.route(peer, Some(mtu)));
        client
            .tell(NLM_F_CREATE | NLM_F_REPLACE, message)
            .map_err(kernel(format!("route the inner address {peer} into {DEVICE}")))
    }

    /// Takes [`Inner::fit`] back. Gone is fine.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn unfit(&self, peer: Ipv4Addr) -> Result<(), Error> {
        match self.client()?.tell(0, RouteNetlinkMessage::DelRoute(self.route(peer, None))) {
            Err(e) if !e.is_gone() => Err(kernel(format!("remove the route to {peer}"))(e)),
            _ => Ok(()),
        }
    }

    fn client(&self) -> Result<Client, Error> {
        self.netns.netlink()
    }

    fn route(&self, peer: Ipv4Addr, mtu: Option<u32>) -> RouteMessage {
        let mut message = RouteMessage::default();
        message.header.address_family = AddressFamily::Inet;
        message.header.destination_prefix_length = 32;
        message.header.table = 254;
        message.header.protocol = RouteProtocol::Static;
        message.header.scope = RouteScope::Link;
        message.header.kind = RouteType::Unicast;
        let index = self.index.load(Ordering::Acquire);
        message.attributes =
            vec![RouteAttribute::Destination(RouteAddress::Inet(peer)), RouteAttribute::Oif(index)];
        if let Some(mtu) = mtu {
            message.attributes.push(RouteAttribute::Metrics(vec![RouteMetric::Mtu(mtu)]));
        }
        message
    }
}

/// Removes the name; the namespace goes when nobody holds its device any more. Gone is fine.
///
/// # Errors
/// [`Error::Netns`].
pub fn remove(path: &Path) -> Result<(), Error> {
    delete_named(path)
}

/// Peer and MTU of a route that [`Inner::fit`] made.
fn read_route(route: &RouteMessage, device: u32) -> Option<(Ipv4Addr, u32)> {
    let (mut to, mut by, mut fits) = (None, None, None);
    for attribute in &route.attributes {
        match attribute {
            RouteAttribute::Destination(RouteAddress::Inet(peer)) => to = Some(*peer),
            RouteAttribute::Oif(index) => by = Some(*index),
            RouteAttribute::Metrics(metrics) => {
                fits = metrics.iter().find_map(|metric| match metric {
                    RouteMetric::Mtu(mtu) => Some(*mtu),
                    _ => None,
                });
            }
            _ => {}
        }
    }
    (route.header.destination_prefix_length == 32 && by == Some(device)).then_some((to?, fits?))
}

fn up(index: u32, mtu: Option<u32>) -> LinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.header.flags = LinkFlags::Up;
    message.header.change_mask = LinkFlags::Up;
    message.attributes.extend(mtu.map(LinkAttribute::Mtu));
    message
}

/// No IPv6 address of its own: the kernel would speak through the tunnel.
fn quiet(index: u32) -> LinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = index;
    let mode = AfSpecInet6::AddrGenMode(In6AddrGenMode::None);
    message.attributes.push(LinkAttribute::AfSpecUnspec(vec![AfSpecUnspec::Inet6(vec![mode])]));
    message
}

fn address_of(index: u32, address: Ipv4Addr) -> AddressMessage {
    let mut message = AddressMessage::default();
    message.header.family = AddressFamily::Inet;
    message.header.prefix_len = INNER_PREFIX;
    message.header.index = index;
    let address = IpAddr::V4(address);
    message.attributes = vec![AddressAttribute::Local(address), AddressAttribute::Address(address)];
    message
}

fn kernel(attempt: String) -> impl FnOnce(Netlink) -> Error {
    move |source| Error::Kernel { attempt, source }
}
