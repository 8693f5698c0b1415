//! The namespace that the encrypted tunnel ends in: private to us, with one TUN device and one address, where the
//! pods' VXLAN devices have their UDP socket. Nothing else lives there: no other route, no rule, no conntrack.
//!
//! Its name is a file in a folder of ours, and its device persists: the tunnels of pods live in it, and survive every
//! process of ours. Who holds the device's descriptor carries its packets.

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_REPLACE};
use netlink_packet_route::address::{AddressAttribute, AddressMessage};
use netlink_packet_route::link::{
    AfSpecInet6, AfSpecUnspec, In6AddrGenMode, LinkAttribute, LinkFlags, LinkMessage,
};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteMessage, RouteMetric, RouteProtocol, RouteScope, RouteType,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use peerpod_link::net::Error;
use peerpod_link::net::netlink::Client;
use peerpod_link::net::netns::{Netns, create_named, delete_named};

use crate::sys::{Tun, open_tun};

/// The TUN device's name.
pub const DEVICE: &str = "pp-wg0";
/// All inner addresses.
const INNER_PREFIX: u8 = 8;

/// The namespace and its device.
#[derive(Clone, Debug)]
pub struct Inner {
    netns: Netns,
    index: u32,
}

/// What opening found.
#[derive(Debug)]
pub struct Opened {
    /// The namespace, ready for VXLAN devices.
    pub inner: Inner,
    /// The device; `None` where another process carries its packets already.
    pub tun: Option<Tun>,
}

impl Inner {
    /// Makes namespace and device at `path`, or finds them; `address` is ours, `mtu` the device's.
    ///
    /// # Errors
    /// [`Error::Netns`], [`Error::Kernel`]: no right to it, or a kernel without TUN devices.
    pub fn open(path: &Path, address: Ipv4Addr, mtu: u32) -> Result<Opened, Error> {
        let netns = create_named(path)?;
        let failed = |e: io::Error| Error::Kernel {
            attempt: format!("open the TUN device {DEVICE} for the encrypted tunnel (kernel module tun)"),
            source: e.into(),
        };
        let tun = match netns.run(|| open_tun(DEVICE)).and_then(|opened| opened) {
            Ok(tun) => Some(tun),
            Err(e) if e.kind() == io::ErrorKind::ResourceBusy => None,
            Err(e) => return Err(failed(e)),
        };
        let mut client = netns.netlink()?;
        let index = netns
            .run(|| nix::net::if_::if_nametoindex(DEVICE))
            .map_err(failed)?
            .map_err(|e| failed(e.into()))?;
        let attempt = |what: &str| format!("{what} {DEVICE} in {}", path.display());
        // Optional: a kernel without IPv6 has nothing to switch off.
        drop(client.tell(0, RouteNetlinkMessage::SetLink(quiet(index))));
        client
            .tell(0, RouteNetlinkMessage::SetLink(up(index, Some(mtu))))
            .map_err(kernel(attempt("take up")))?;
        client
            .tell(NLM_F_CREATE | NLM_F_REPLACE, RouteNetlinkMessage::NewAddress(address_of(index, address)))
            .map_err(kernel(attempt("give an address to")))?;
        Ok(Opened { inner: Inner { netns, index }, tun })
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
        let message = RouteNetlinkMessage::NewRoute(self.route(peer, Some(mtu)));
        self.client()?
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
        message.attributes =
            vec![RouteAttribute::Destination(RouteAddress::Inet(peer)), RouteAttribute::Oif(self.index)];
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

fn kernel(attempt: String) -> impl FnOnce(peerpod_link::net::netlink::Error) -> Error {
    move |source| Error::Kernel { attempt, source }
}
