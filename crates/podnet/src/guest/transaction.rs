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
use crate::inspect::{Address, Neighbour, Picture, Route, Rule};
use crate::netlink::{Ack, Client, Refusal};

type Message = (u16, RouteNetlinkMessage);

/// One message with its purpose and the message that undoes it.
pub(super) struct Step {
    message: Message,
    back: Option<Message>,
    what: String,
    /// Whether a refusal is ignored.
    pub(super) optional: bool,
}

impl Step {
    /// Returns the step that changes a device.
    pub(super) fn change(
        message: RouteNetlinkMessage,
        back: Option<RouteNetlinkMessage>,
        what: String,
    ) -> Step {
        Step { message: (0, message), back: back.map(|back| (0, back)), what, optional: false }
    }
}

pub(super) struct Transaction<'a> {
    pod: &'a mut Client,
    back: Vec<Message>,
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
    pub(super) fn note(&mut self, back: Option<Message>) {
        self.changed = true;
        self.back.extend(back);
    }

    /// Sends all steps and returns the refused ones, except optional steps and tolerated errors.
    fn send(&mut self, steps: Vec<Step>, tolerated: &[Errno]) -> Result<Vec<(Step, Refusal)>, Error> {
        let messages: Vec<Message> = steps.iter().map(|step| step.message.clone()).collect();
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
        let [mut addresses, routes, mut rest] = additions(&names, &change.add)?;
        steps.append(&mut addresses);
        self.run(steps, TOLERATED)?;
        if !routes.is_empty() {
            self.routes(routes)?;
        }
        rest.append(&mut removals(&names, &change.remove)?);
        self.run(rest, TOLERATED)?;
        Ok(removes)
    }

    /// Adds routes. A route may be sent before one that it needs, and may have outlived that one in the pod.
    fn routes(&mut self, steps: Vec<Step>) -> Result<(), Error> {
        let mut left = self.send(steps, TOLERATED)?;
        let mut before = usize::MAX;
        while !left.is_empty() && left.len() < before {
            before = left.len();
            left = self.send(left.into_iter().map(|(step, _)| step).collect(), TOLERATED)?;
        }
        // The pod has this route without a route to its gateway: the on-link flag permits that.
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

    /// Undoes all changes, the last first. Failures are left to the next attempt.
    pub(super) fn undo(self) {
        let messages: Vec<Message> = self.back.into_iter().rev().collect();
        let answers: Vec<Ack> = self.pod.batch(&messages).unwrap_or_default();
        drop(answers);
    }
}

/// Errors of an object that already exists, or no longer exists.
const TOLERATED: &[Errno] = &[Errno::EEXIST, Errno::ENOENT, Errno::ESRCH, Errno::EADDRNOTAVAIL];

/// Returns the steps in the order of their dependencies: for addresses, for routes, for neighbours and rules.
fn additions(names: &Names<'_>, add: &Contents) -> Result<[Vec<Step>; 3], Error> {
    // The kernel inserts a new IPv6 address before its equals and prefers the first, so the last one is added first.
    let (v4, v6): (Vec<_>, Vec<_>) = add.addresses.iter().partition(|(_, address)| address.address.is_ipv4());
    let addresses = v4.into_iter().chain(v6.into_iter().rev());
    let addresses =
        addresses.map(|of| Ok(Object::address(names, of)?.add())).collect::<Result<_, Error>>()?;
    // The kernel accepts an on-link gateway only while no other route covers it, so routes with one come first. Then
    // come routes to an interface's own networks, routes through gateways in them, and routes through several devices.
    // Routes that differ only in their target keep their order: the first one counts.
    let same = |r: &Route| (r.destination, r.prefix, r.fib.table, r.metric, r.fib.tos);
    let mut ranks = HashMap::new();
    for (device, route) in &add.routes {
        let rank = (device.is_none(), route.gateway.is_some() && !route.onlink, !route.onlink);
        let of_all = ranks.entry(same(route)).or_insert(rank);
        *of_all = rank.max(*of_all);
    }
    let mut sorted: Vec<&(Option<String>, Route)> = add.routes.iter().collect();
    sorted.sort_by_key(|(_, route)| ranks.get(&same(route)).copied());
    let routes =
        sorted.into_iter().map(|of| Ok(Object::route(names, of)?.add())).collect::<Result<_, Error>>()?;
    let neighbours = add.neighbours.iter().map(|of| Object::neighbour(names, of));
    let rest = neighbours.chain(add.rules.iter().map(|rule| Ok(Object::rule(rule))));
    let rest = rest.map(|object| Ok(object?.add())).collect::<Result<_, Error>>()?;
    Ok([addresses, routes, rest])
}

fn removals(names: &Names<'_>, remove: &Contents) -> Result<Vec<Step>, Error> {
    let rules = remove.rules.iter().map(|rule| Ok(Object::rule(rule)));
    let routes = remove.routes.iter().map(|of| Object::route(names, of));
    let neighbours = remove.neighbours.iter().map(|of| Object::neighbour(names, of));
    let addresses = remove.addresses.iter().map(|of| Object::address(names, of));
    let all = rules.chain(routes).chain(neighbours).chain(addresses);
    all.map(|object| Ok(object?.remove())).collect()
}

/// Messages that make and remove an object, and its name.
struct Object {
    new: Message,
    old: Message,
    name: String,
}

impl Object {
    fn address(names: &Names<'_>, (device, address): &(String, Address)) -> Result<Object, Error> {
        let message = message::address(names.index(device)?, address);
        Ok(Object {
            new: (NLM_F_CREATE | NLM_F_EXCL, RouteNetlinkMessage::NewAddress(message.clone())),
            old: (0, RouteNetlinkMessage::DelAddress(message)),
            name: format!("address {}/{} of {device}", address.address, address.prefix),
        })
    }

    fn route(names: &Names<'_>, (device, route): &(Option<String>, Route)) -> Result<Object, Error> {
        let message = message::route(names, device.as_deref(), route)?;
        Ok(Object {
            // Several routes may share destination and metric, and their order counts.
            new: (NLM_F_CREATE | NLM_F_APPEND, RouteNetlinkMessage::NewRoute(message.clone())),
            old: (0, RouteNetlinkMessage::DelRoute(message)),
            name: format!("the route to {}/{} (table {})", route.destination, route.prefix, route.fib.table),
        })
    }

    fn neighbour(names: &Names<'_>, (device, neighbour): &(String, Neighbour)) -> Result<Object, Error> {
        let message = message::neighbour(names.index(device)?, neighbour);
        Ok(Object {
            new: (NLM_F_CREATE | NLM_F_REPLACE, RouteNetlinkMessage::NewNeighbour(message.clone())),
            old: (0, RouteNetlinkMessage::DelNeighbour(message)),
            name: format!("neighbour {} of {device}", neighbour.address),
        })
    }

    fn rule(rule: &Rule) -> Object {
        let message = message::rule(rule);
        Object {
            new: (NLM_F_CREATE | NLM_F_EXCL, RouteNetlinkMessage::NewRule(message.clone())),
            old: (0, RouteNetlinkMessage::DelRule(message)),
            name: format!("the policy rule of priority {}", rule.priority),
        }
    }

    fn add(self) -> Step {
        let what = format!("add {}", self.name);
        Step { message: self.new, back: Some(self.old), what, optional: false }
    }

    fn remove(self) -> Step {
        let what = format!("remove {}", self.name);
        // An address may be there again with other settings by then.
        let back = match self.new {
            (_, new @ RouteNetlinkMessage::NewAddress(_)) => (NLM_F_CREATE | NLM_F_REPLACE, new),
            new => new,
        };
        Step { message: self.old, back: Some(back), what, optional: false }
    }
}

fn has_gateway(step: &Step) -> bool {
    let RouteNetlinkMessage::NewRoute(message) = &step.message.1 else { return false };
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
    if let RouteNetlinkMessage::NewRoute(message) = &mut step.message.1 {
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
