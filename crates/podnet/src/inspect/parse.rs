//! Reads a namespace from the kernel with six dumps (devices, addresses, routes, rules, neighbours, proxy neighbours),
//! each of both families and all devices. It leaves out only objects that the kernel makes by itself.

use netlink_packet_route::address::AddressMessage;
use netlink_packet_route::neighbour::{NeighbourFlags, NeighbourMessage};
use netlink_packet_route::route::RouteMessage;
use netlink_packet_route::rule::RuleMessage;
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use super::seen::{Address, Hop, Neighbour, Route, Rule};
use crate::Error;
use crate::link::{self, Link};
use crate::netlink::{self, Client};
use read::{Strange, read_address, read_neighbour, read_route, read_rule};

mod read;

const MAX_LINKS: usize = 256;
const MAX_ADDRESSES: usize = 1024;
const MAX_ROUTES: usize = 4096;
const MAX_RULES: usize = 1024;
const MAX_NEIGHBOURS: usize = 4096;

/// Contents of a namespace.
#[derive(Clone, Debug, Default)]
pub(crate) struct Picture {
    pub(crate) links: Vec<Link>,
    /// Device index and address.
    pub(crate) addresses: Vec<(u32, Address)>,
    pub(crate) routes: Vec<IndexedRoute>,
    pub(crate) rules: Vec<Rule>,
    /// Device index and neighbour.
    pub(crate) neighbours: Vec<(u32, Neighbour)>,
    /// Objects that were found and cannot be described, as text.
    pub(crate) strange: Vec<String>,
    /// The first such object that must not be omitted, because the pod would reach other networks without it.
    pub(crate) impossible: Option<String>,
}

/// Route as found: devices by index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct IndexedRoute {
    /// Index of its device, where it has one of its own.
    pub(crate) device: Option<u32>,
    /// Devices of its next hops, in the order of `route.hops`; the names in the hops are empty.
    pub(crate) hops: Vec<u32>,
    pub(crate) route: Route,
}

impl Picture {
    /// Reads a namespace, without the objects that the kernel has in every one: the local table, three rules.
    pub(crate) fn take(client: &mut Client) -> Result<Picture, Error> {
        let mut picture = Picture {
            links: link::all(client, MAX_LINKS).map_err(asking("interfaces", MAX_LINKS))?,
            ..Picture::default()
        };
        picture.addresses(client)?;
        picture.routes(client)?;
        picture.rules(client)?;
        picture.neighbours(client, false)?;
        picture.neighbours(client, true)?;
        Ok(picture)
    }

    pub(crate) fn link(&self, index: u32) -> Option<&Link> {
        self.links.iter().find(|link| link.index == index)
    }

    /// Returns a route with the names of its only device (not `lo`) and of its hops'. Fails with the index of a missing
    /// one.
    pub(crate) fn named(&self, found: &IndexedRoute) -> Result<(Option<&Link>, Route), u32> {
        let mut route = found.route.clone();
        let device = found.device.map(|index| self.link(index).ok_or(index)).transpose()?;
        for (hop, index) in route.hops.iter_mut().zip(&found.hops) {
            hop.interface.clone_from(&self.link(*index).ok_or(*index)?.name);
        }
        match device {
            Some(lo) if lo.flags.loopback => {
                let (gateway, onlink) = (route.gateway.take(), std::mem::take(&mut route.onlink));
                route.hops = vec![Hop { gateway, interface: lo.name.clone(), weight: 1, onlink }];
                Ok((None, route))
            }
            device => Ok((device, route)),
        }
    }

    /// Removes devices with their addresses, neighbours and routes.
    pub(crate) fn forget(&mut self, gone: impl Fn(&Link) -> bool) {
        let gone: Vec<u32> = self.links.extract_if(.., |link| gone(link)).map(|link| link.index).collect();
        let is_gone = |index: &u32| gone.contains(index);
        self.addresses.retain(|(of, _)| !is_gone(of));
        self.neighbours.retain(|(of, _)| !is_gone(of));
        self.routes.retain(|found| !found.device.iter().chain(&found.hops).any(is_gone));
    }

    fn addresses(&mut self, client: &mut Client) -> Result<(), Error> {
        let request = RouteNetlinkMessage::GetAddress(AddressMessage::default());
        let all = dump(client, &request, "addresses", MAX_ADDRESSES, |answer| match answer? {
            RouteNetlinkMessage::NewAddress(message) => Ok(Some(message)),
            _ => Ok(None),
        })?;
        for message in all {
            let index = message.header.index;
            let name = self.link(index).map(|link| link.name.clone()).unwrap_or_default();
            match read_address(&message, &name) {
                Some(Ok(address)) => self.addresses.push((index, address)),
                Some(Err(why)) => self.strange.push(why),
                None => {}
            }
        }
        Ok(())
    }

    fn routes(&mut self, client: &mut Client) -> Result<(), Error> {
        let request = RouteNetlinkMessage::GetRoute(RouteMessage::default());
        let all = dump(client, &request, "routes", MAX_ROUTES, |answer| match answer? {
            RouteNetlinkMessage::NewRoute(message) => Ok(read_route(&message)),
            _ => Ok(None),
        })?;
        for found in all {
            match found {
                Ok(found) => self.routes.push(found),
                Err(Strange::Detail(found, why)) => {
                    self.strange.push(why);
                    self.routes.push(*found);
                }
                Err(Strange::Whole(why)) => self.impossible = self.impossible.take().or(Some(why)),
            }
        }
        Ok(())
    }

    fn rules(&mut self, client: &mut Client) -> Result<(), Error> {
        let request = RouteNetlinkMessage::GetRule(RuleMessage::default());
        let all = dump(client, &request, "rules", MAX_RULES, |answer| match answer {
            Ok(RouteNetlinkMessage::NewRule(message)) => Ok(read_rule(&message)),
            Ok(_) => Ok(None),
            // A rule of an unknown kind does not fail the inspection.
            Err(e) => Ok(Some(Err(format!("a policy rule that cannot be read ({e})")))),
        });
        let all = match all {
            // A kernel without policy routing.
            Err(Error::Kernel { source: netlink::Error::Refused(_), .. }) => return Ok(()),
            all => all?,
        };
        for rule in all {
            match rule {
                Ok(rule) => self.rules.push(rule),
                Err(why) => self.strange.push(why),
            }
        }
        Ok(())
    }

    fn neighbours(&mut self, client: &mut Client, proxies: bool) -> Result<(), Error> {
        let mut message = NeighbourMessage::default();
        if proxies {
            message.header.flags = NeighbourFlags::Proxy;
        }
        let request = RouteNetlinkMessage::GetNeighbour(message);
        let mut all = dump(client, &request, "neighbours", MAX_NEIGHBOURS, |answer| match answer? {
            RouteNetlinkMessage::NewNeighbour(message) => Ok(read_neighbour(&message)),
            _ => Ok(None),
        })?;
        self.neighbours.append(&mut all);
        Ok(())
    }
}

fn asking(what: &'static str, limit: usize) -> impl FnOnce(netlink::Error) -> Error {
    move |e| match e {
        netlink::Error::TooMany(_) => Error::TooMany(what, limit),
        e => Error::kernel(format!("read the pod's {what}"))(e),
    }
}

/// Dumps one kind of object for both families. Messages of further families (MPLS, CAN) are skipped.
fn dump<T>(
    client: &mut Client,
    request: &RouteNetlinkMessage,
    what: &'static str,
    limit: usize,
    mut read: impl FnMut(Result<RouteNetlinkMessage, netlink::Error>) -> Result<Option<T>, netlink::Error>,
) -> Result<Vec<T>, Error> {
    let families = [u8::from(AddressFamily::Inet), u8::from(AddressFamily::Inet6)];
    let each = |kind, payload: &[u8]| match payload.first() {
        Some(family) if families.contains(family) => read(netlink::parse_route(kind, payload)),
        _ => Ok(None),
    };
    client.dump_raw(request, limit, each).map_err(asking(what, limit))
}
