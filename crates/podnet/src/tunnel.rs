//! Connects and removes the reserved tunnel devices on the node: it finds the path to the VM, connects the devices with
//! all redirects, and undoes all of it. One pod takes as few exchanges with the kernel as possible.

use std::net::IpAddr;
use std::thread::sleep;

use netlink_packet_route::RouteNetlinkMessage;
use nix::errno::Errno;
use rtnetlink::LinkUnspec;

use super::Error;
use super::link::{self, Link};
use super::mark::Mark;
use super::netlink::{self, Ack, Client};
use super::netns::Netns;
use super::redirect::{self, BUSY_PAUSE, BUSY_TRIES, Classifiers, Maker, Taken};
use super::vxlan::{self, Held, Shape};

const MAX_DEVICES: usize = 256;

/// Path from the node to a VM, and the packet size that it leaves for the pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TunnelPath {
    /// The node's address towards the VM.
    pub source: IpAddr,
    /// The largest inner packet that fits without fragments, in bytes.
    pub mtu: u32,
}

/// Queries the kernel for the path to the VM and its configured MTU. The guest measures the rest of the path MTU,
/// because this kernel sends no notification when it drops a learnt value. `host` is a socket of the node's namespace.
///
/// # Errors
/// [`Error::Path`] where there is no path, or the VM's address is of another family than the reservation.
pub fn path(host: &mut Client, shape: Shape, vm: IpAddr) -> Result<TunnelPath, Error> {
    if vm.is_ipv6() != shape.v6 {
        let family = if shape.v6 { "IPv6" } else { "IPv4" };
        return Err(Error::Path { peer: vm, why: format!("the tunnel was reserved for {family}") });
    }
    let path = link::path_to(host, vm)?;
    Ok(TunnelPath { source: path.source, mtu: path.mtus.route.saturating_sub(shape.overhead()) })
}

/// One of the pod's interfaces and its tunnel device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pair {
    /// The reserved device.
    pub held: Held,
    /// Index of the pod's interface.
    pub interface: u32,
    /// The pod interface's MTU in bytes; the device gets the same.
    pub mtu: u32,
}

/// Parameters of [`connect`].
#[derive(Clone, Copy, Debug)]
pub struct Connection<'a> {
    /// Owner and sandbox of the devices.
    pub mark: Mark<'a>,
    /// The VM's address.
    pub remote: IpAddr,
    /// The node's address.
    pub local: IpAddr,
    /// Classifiers of new redirects.
    pub by: Classifiers,
    /// The interfaces and their devices.
    pub pairs: &'a [Pair],
}

/// Number of messages per pair before its redirects, and the position of the one that may be refused.
const PER_PAIR: usize = 3;
const OPTIONAL: usize = 1;

/// Sets the devices' endpoints, sets the devices up, and redirects each interface of the pod into its tunnel and back:
/// one datagram with six messages per pair. A repeated call repairs differences of devices, qdiscs and filters, and
/// changes nothing else. Returns, as text, filters of other owners before the redirect.
///
/// # Errors
/// [`Error::Gone`] when a device does not exist (any more), [`Error::Kernel`], [`Error::CannotCarry`] where another
/// owner already redirects the pod's traffic. Completed steps stay; [`undo`] removes them.
pub fn connect(netns: &Netns, connection: &Connection<'_>) -> Result<Vec<String>, Error> {
    let mut pod = netns.netlink()?;
    let maker = Maker { by: connection.by, tag: connection.mark.tag() };
    let ways: Vec<(u32, u32)> = connection.pairs.iter().map(|p| (p.interface, p.held.ifindex)).collect();
    let attempt = || Error::kernel(format!("connect the tunnel in {}", netns.path().display()));
    // Setting a device to its present values causes a notification: a watcher would repeat this call for ever.
    let mut due = Vec::new();
    for pair in connection.pairs {
        let there = link::by_index(&mut pod, pair.held.ifindex).map_err(attempt())?;
        if !there.is_some_and(|link| is_connected(&link, pair, connection)) {
            due.push(pair);
        }
    }
    let mut messages = Vec::with_capacity(6 * connection.pairs.len());
    for pair in &due {
        // The kernel refuses the MTU together with VXLAN settings.
        messages.push((0, link::set(LinkUnspec::new_with_index(pair.held.ifindex).mtu(pair.mtu))));
        // Set at the reservation; an MTU that was too small for IPv6 made the kernel drop it. Refused without IPv6.
        messages.push((0, vxlan::no_v6_address(pair.held.ifindex)));
        let ends = vxlan::connection(pair.held, connection.remote, Some(connection.local));
        messages.push((0, RouteNetlinkMessage::NewLink(ends.up().build())));
    }
    let own = messages.len();
    // The programs in the messages must stay open until the kernel has accepted the filters.
    let mut redirects = maker.messages(&ways)?;
    messages.append(&mut redirects.messages);
    for left in (0..BUSY_TRIES).rev() {
        let answers = pod.batch(&messages).map_err(attempt())?;
        let (devices, redirects) = answers.split_at(own.min(answers.len()));
        match first_refusal(devices) {
            None => return maker.complete(&mut pod, &ways, redirects),
            Some((_, no)) if no.errno == Errno::EBUSY && left > 0 => sleep(BUSY_PAUSE),
            Some((at, no)) => {
                Maker::abandon(&mut pod, &ways, redirects);
                // Gone, or another device has its index now (the kernel then refuses to change kind or VNI).
                if let Some(pair) = due.get(at / PER_PAIR) {
                    let there = link::by_index(&mut pod, pair.held.ifindex).map_err(attempt())?;
                    if there.is_none_or(|l| l.vxlan.is_none_or(|v| v.vni != pair.held.vni)) {
                        return Err(Error::Gone(netns.path().to_owned(), pair.held.vni));
                    }
                }
                return Err(attempt()(no.clone().into()));
            }
        }
    }
    Ok(Vec::new())
}

fn is_connected(link: &link::Link, pair: &Pair, connection: &Connection<'_>) -> bool {
    let ends = |vxlan: &link::Vxlan| {
        vxlan.vni == pair.held.vni
            && (vxlan.remote, vxlan.local) == (Some(connection.remote), Some(connection.local))
    };
    link.flags.up && link.mtu == pair.mtu && link.vxlan.as_ref().is_some_and(ends)
}

fn first_refusal(answers: &[Ack]) -> Option<(usize, &netlink::Refusal)> {
    let must = |(at, _): &(usize, &Ack)| at % PER_PAIR != OPTIONAL;
    let mut answers = answers.iter().enumerate().filter(must);
    answers.find_map(|(at, answer)| answer.as_ref().err().map(|no| (at, no)))
}

/// Returns the pod's interfaces that have an ingress-side qdisc of another owner. It must stay, even if empty. Certain
/// only before [`connect`].
pub fn shared(netns: &Netns, mark: Mark<'_>, interfaces: &[u32]) -> Result<Vec<u32>, Error> {
    let mut pod = netns.netlink()?;
    let mut there: Vec<u32> = redirect::qdiscs(&mut pod)?.into_iter().map(|(device, _)| device).collect();
    there.retain(|device| interfaces.contains(device));
    if !there.is_empty() {
        // A qdisc with this sandbox's redirect on it comes from a connection that was never recorded.
        let tagged = redirect::tagged(&mut pod, mark.owner)?;
        there.retain(|device| !tagged.contains(&(*device, mark.tag())));
    }
    netns.keep(pod);
    Ok(there)
}

/// Removes the redirects and the devices with this mark in the pod's namespace, and the recorded devices: those with the
/// VNIs of `held` on this UDP port. `shared` are interfaces with an ingress qdisc from before the redirect ([`shared`]).
/// Every step is tried, and failures are added to `errors`. A missing object is no error. Takes some 20 ms per device.
pub fn undo(
    netns: &Netns,
    mark: Mark<'_>,
    (held, port): (&[Held], u16),
    shared: &[u32],
    errors: &mut Vec<Error>,
) {
    let mut pod = match netns.netlink() {
        Ok(pod) => pod,
        Err(e) => return errors.push(e),
    };
    let is_ours = |link: &&Link| {
        let recorded = |v: &link::Vxlan| v.port == port && held.iter().any(|h| h.vni == v.vni);
        mark.is_on(link) || link.vxlan.as_ref().is_some_and(recorded)
    };
    let devices = ours_by_name(&mut pod).unwrap_or_else(|e| {
        errors.push(Error::kernel(format!("look for the tunnel in {}", netns.path().display()))(e));
        Vec::new()
    });
    let doomed: Vec<u32> = devices.iter().filter(is_ours).map(|link| link.index).collect();
    let taken = Taken { tag: mark.tag(), only: None, doomed: &doomed, shared };
    redirect::take_back(&mut pod, &taken, errors);
    remove_all(&mut pod, &doomed, errors);
}

/// Removes some of a sandbox's tunnels: these devices, and the redirects to them. Every step is tried; fails with the
/// first failure.
pub fn retire(netns: &Netns, mark: Mark<'_>, held: &[Held], port: u16) -> Result<(), Error> {
    let mut pod = netns.netlink()?;
    let devices = ours_by_name(&mut pod)
        .map_err(Error::kernel(format!("look for the tunnel in {}", netns.path().display())))?;
    let is_it = |link: &&Link| {
        let held = |vni| held.iter().any(|h| h.vni == vni && h.ifindex == link.index);
        link.vxlan.as_ref().is_some_and(|v| v.port == port && held(v.vni))
    };
    let doomed: Vec<u32> = devices.iter().filter(is_it).map(|link| link.index).collect();
    let taken = Taken { tag: mark.tag(), only: Some(&doomed), doomed: &doomed, shared: &[] };
    let mut errors = Vec::new();
    redirect::take_back(&mut pod, &taken, &mut errors);
    remove_all(&mut pod, &doomed, &mut errors);
    errors.into_iter().next().map_or(Ok(()), Err)
}

/// Returns the VXLAN devices with a name of this program's form.
pub(super) fn ours_by_name(pod: &mut Client) -> Result<Vec<Link>, netlink::Error> {
    link::all_that(pod, MAX_DEVICES, |link| link.vxlan.is_some() && vxlan::is_device(&link.name))
}

/// Deletes devices, all in one datagram; takes some 20 ms each.
pub(super) fn remove_all(pod: &mut Client, devices: &[u32], errors: &mut Vec<Error>) {
    let attempt = || Error::kernel("delete the tunnel's devices");
    let messages: Vec<(u16, RouteNetlinkMessage)> =
        devices.iter().map(|index| (0, link::delete(*index))).collect();
    match pod.batch(&messages) {
        Ok(answers) => {
            let refused = answers.into_iter().filter_map(Result::err).filter(|no| !no.is_gone());
            errors.extend(refused.map(|no| attempt()(no.into())));
        }
        Err(e) => errors.push(attempt()(e)),
    }
}
