//! Changes the pod's namespace and records how to undo each change, so that the whole can be undone.

use std::collections::HashMap;

use netlink_packet_core::{NLM_F_APPEND, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::route::{RouteAttribute, RouteFlags, RouteNextHopFlags};
use nix::errno::Errno;

use super::contents::{Change, Contents};
use super::device;
use super::message::{self, Names};
use crate::Error;
use crate::inspect::{Picture, Route};
use crate::netlink::{Answer, Client, Refusal};

/// One message with its purpose and the message that undoes it.
pub(super) struct Step {
    pub(super) flags: u16,
    pub(super) message: RouteNetlinkMessage,
    pub(super) back: Option<(u16, RouteNetlinkMessage)>,
    pub(super) what: String,
    /// Whether a refusal is ignored.
    pub(super) optional: bool,
}

pub(super) struct Transaction<'a> {
    pod: &'a mut Client,
    back: Vec<(u16, RouteNetlinkMessage)>,
    changed: bool,
}

impl<'a> Transaction<'a> {
    pub(super) fn new(pod: &'a mut Client) -> Transaction<'a> {
        Transaction { pod, back: Vec::new(), changed: false }
    }

    /// Returns the socket, for queries.
    pub(super) fn pod(&mut self) -> &mut Client {
        self.pod
    }

    /// Returns whether anything was changed.
    pub(super) fn changed(&self) -> bool {
        self.changed
    }

    /// Records a change that was made elsewhere.
    pub(super) fn note(&mut self, back: Option<(u16, RouteNetlinkMessage)>) {
        self.changed = true;
        self.back.extend(back);
    }

    /// Sends all steps and returns the refused ones, except optional steps and tolerated errors.
    fn send(&mut self, steps: Vec<Step>, tolerated: &[Errno]) -> Result<Vec<(Step, Refusal)>, Error> {
        let messages: Vec<(u16, RouteNetlinkMessage)> =
            steps.iter().map(|step| (step.flags, step.message.clone())).collect();
        let answers = self.pod.batch(&messages).map_err(Error::kernel("set up the pod's network"))?;
        let mut refused = Vec::new();
        for (step, answer) in steps.into_iter().zip(answers) {
            match answer {
                Ok(()) => self.note(step.back),
                Err(no) if step.optional || tolerated.contains(&no.errno) => {}
                Err(no) => refused.push((step, no)),
            }
        }
        Ok(refused)
    }

    /// Sends all steps; the first refusal is the error.
    pub(super) fn run(&mut self, steps: Vec<Step>, tolerated: &[Errno]) -> Result<(), Error> {
        if steps.is_empty() {
            return Ok(());
        }
        match self.send(steps, tolerated)?.into_iter().next() {
            None => Ok(()),
            Some((step, no)) => Err(Error::kernel(step.what)(no.into())),
        }
    }

    /// Makes a change. Returns whether anything was removed; the kernel may have removed more with it.
    pub(super) fn apply(&mut self, picture: &Picture, change: Change) -> Result<bool, Error> {
        let names = Names::of(picture);
        let removes = change.removes();
        let mut steps = removals(&names, &change.swap)?;
        let mut added = additions(&names, &change.add)?;
        steps.append(&mut added.addresses);
        self.run(steps, TOLERATED)?;
        if !added.routes.is_empty() {
            self.routes(added.routes)?;
        }
        let mut steps = added.rest;
        steps.append(&mut removals(&names, &change.remove)?);
        self.run(steps, TOLERATED)?;
        Ok(removes)
    }

    /// Adds routes. A route may be sent before one that it needs (a gateway's network), and may have outlived that one
    /// in the pod.
    fn routes(&mut self, steps: Vec<Step>) -> Result<(), Error> {
        let mut left = self.send(steps, TOLERATED)?;
        let mut before = usize::MAX;
        while !left.is_empty() && left.len() < before {
            before = left.len();
            left = self.send(left.into_iter().map(|(step, _)| step).collect(), TOLERATED)?;
        }
        // The pod has this route although no route leads to its gateway any more: the route is added with the on-link
        // flag.
        let lost = |(step, no): &(Step, Refusal)| {
            has_gateway(step) && matches!(no.errno, Errno::ENETUNREACH | Errno::EHOSTUNREACH | Errno::EINVAL)
        };
        let (lost, refused): (Vec<_>, Vec<_>) = left.into_iter().partition(lost);
        if let Some((step, no)) = refused.into_iter().next() {
            return Err(Error::kernel(step.what)(no.into()));
        }
        self.run(lost.into_iter().map(|(step, _)| onlink(step)).collect(), TOLERATED)
    }

    /// Deletes a tunnel's device. A missing device is no error. Cannot be undone.
    pub(super) fn remove_device(&mut self, name: &str, vni: u32) -> Result<(), Error> {
        self.changed |= device::remove(self.pod, name, vni)?;
        Ok(())
    }

    /// Undoes all changes, the last first. Failures are left to the next attempt; the error that counts is the one that
    /// led here.
    pub(super) fn undo(self) {
        let messages: Vec<(u16, RouteNetlinkMessage)> = self.back.into_iter().rev().collect();
        let answers: Vec<Answer> = self.pod.batch(&messages).unwrap_or_default();
        drop(answers);
    }
}

/// Errors of an object that already exists, or no longer exists.
const TOLERATED: &[Errno] = &[Errno::EEXIST, Errno::ENOENT, Errno::ESRCH, Errno::EADDRNOTAVAIL];

/// Steps in the order of their dependencies.
struct Additions {
    addresses: Vec<Step>,
    routes: Vec<Step>,
    /// Neighbours and rules.
    rest: Vec<Step>,
}

fn additions(names: &Names<'_>, add: &Contents) -> Result<Additions, Error> {
    let mut addresses = Vec::with_capacity(add.addresses.len());
    // The kernel inserts a new IPv6 address before its equals and prefers the first, so the last one is added first.
    let (v4, v6): (Vec<_>, Vec<_>) = add.addresses.iter().partition(|(_, address)| address.address.is_ipv4());
    for (device, address) in v4.into_iter().chain(v6.into_iter().rev()) {
        let message = message::address(names.index(device)?, address);
        addresses.push(Step {
            flags: NLM_F_CREATE | NLM_F_EXCL,
            back: Some((0, RouteNetlinkMessage::DelAddress(message.clone()))),
            message: RouteNetlinkMessage::NewAddress(message),
            what: format!("add address {}/{} to {device}", address.address, address.prefix),
            optional: false,
        });
    }
    // The kernel accepts an on-link gateway only while no other route covers it, so routes with one come first. Then
    // come routes to an interface's own networks, routes through gateways in them, and routes through several devices.
    // Routes that differ only in their target keep their order: the first one counts.
    let same = |r: &Route| (r.destination, r.prefix, r.table, r.metric, r.tos);
    let mut ranks = HashMap::new();
    for (device, route) in &add.routes {
        let rank = (device.is_none(), route.gateway.is_some() && !route.onlink, !route.onlink);
        let of_all = ranks.entry(same(route)).or_insert(rank);
        *of_all = rank.max(*of_all);
    }
    let mut sorted: Vec<&(Option<String>, Route)> = add.routes.iter().collect();
    sorted.sort_by_key(|(_, route)| ranks.get(&same(route)).copied());
    let mut routes = Vec::with_capacity(sorted.len());
    for (device, route) in sorted {
        routes.push(route_step(names, device.as_deref(), route)?);
    }
    let mut rest = Vec::with_capacity(add.neighbours.len() + add.rules.len());
    for (device, neighbour) in &add.neighbours {
        let message = message::neighbour(names.index(device)?, neighbour);
        rest.push(Step {
            flags: NLM_F_CREATE | NLM_F_REPLACE,
            back: Some((0, RouteNetlinkMessage::DelNeighbour(message.clone()))),
            message: RouteNetlinkMessage::NewNeighbour(message),
            what: format!("add neighbour {} of {device}", neighbour.address),
            optional: false,
        });
    }
    for rule in &add.rules {
        let message = message::rule(rule);
        rest.push(Step {
            flags: NLM_F_CREATE | NLM_F_EXCL,
            back: Some((0, RouteNetlinkMessage::DelRule(message.clone()))),
            message: RouteNetlinkMessage::NewRule(message),
            what: format!("add the policy rule of priority {}", rule.priority),
            optional: false,
        });
    }
    Ok(Additions { addresses, routes, rest })
}

fn route_step(names: &Names<'_>, device: Option<&str>, route: &Route) -> Result<Step, Error> {
    let message = message::route(names, device, route)?;
    Ok(Step {
        // Several routes may share destination and metric, and their order counts.
        flags: NLM_F_CREATE | NLM_F_APPEND,
        back: Some((0, RouteNetlinkMessage::DelRoute(message.clone()))),
        message: RouteNetlinkMessage::NewRoute(message),
        what: format!("add the route to {}/{} (table {})", route.destination, route.prefix, route.table),
        optional: false,
    })
}

fn has_gateway(step: &Step) -> bool {
    let RouteNetlinkMessage::NewRoute(message) = &step.message else { return false };
    let leads = |attribute: &RouteAttribute| {
        matches!(
            attribute,
            RouteAttribute::Gateway(_) | RouteAttribute::Via(_) | RouteAttribute::MultiPath(_)
        )
    };
    message.attributes.iter().any(leads)
}

/// Returns the same route with a gateway that need not be in a connected network.
fn onlink(mut step: Step) -> Step {
    if let RouteNetlinkMessage::NewRoute(message) = &mut step.message {
        message.header.flags |= RouteFlags::Onlink;
        for attribute in &mut message.attributes {
            if let RouteAttribute::MultiPath(hops) = attribute {
                hops.iter_mut().for_each(|hop| hop.flags |= RouteNextHopFlags::Onlink);
            }
        }
        step.back = Some((0, RouteNetlinkMessage::DelRoute(message.clone())));
    }
    step
}

fn removals(names: &Names<'_>, remove: &Contents) -> Result<Vec<Step>, Error> {
    let mut steps = Vec::new();
    let create = NLM_F_CREATE | NLM_F_REPLACE;
    for rule in &remove.rules {
        let message = message::rule(rule);
        steps.push(Step {
            flags: 0,
            back: Some((NLM_F_CREATE | NLM_F_EXCL, RouteNetlinkMessage::NewRule(message.clone()))),
            message: RouteNetlinkMessage::DelRule(message),
            what: format!("remove the policy rule of priority {}", rule.priority),
            optional: false,
        });
    }
    for (device, route) in &remove.routes {
        let message = message::route(names, device.as_deref(), route)?;
        steps.push(Step {
            flags: 0,
            back: Some((NLM_F_CREATE | NLM_F_APPEND, RouteNetlinkMessage::NewRoute(message.clone()))),
            message: RouteNetlinkMessage::DelRoute(message),
            what: format!("remove the route to {}/{}", route.destination, route.prefix),
            optional: false,
        });
    }
    for (device, neighbour) in &remove.neighbours {
        let message = message::neighbour(names.index(device)?, neighbour);
        steps.push(Step {
            flags: 0,
            back: Some((create, RouteNetlinkMessage::NewNeighbour(message.clone()))),
            message: RouteNetlinkMessage::DelNeighbour(message),
            what: format!("remove neighbour {} of {device}", neighbour.address),
            optional: false,
        });
    }
    for (device, address) in &remove.addresses {
        let message = message::address(names.index(device)?, address);
        steps.push(Step {
            flags: 0,
            back: Some((create, RouteNetlinkMessage::NewAddress(message.clone()))),
            message: RouteNetlinkMessage::DelAddress(message),
            what: format!("remove address {}/{} from {device}", address.address, address.prefix),
            optional: false,
        });
    }
    Ok(steps)
}
