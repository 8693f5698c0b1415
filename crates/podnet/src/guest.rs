//! Makes the pod's network in the VM: tunnel devices with the pod's names, addresses, routes and settings.
//!
//! A plan is applied as a whole or not at all, and may be applied again: missing parts are added, and parts that only
//! an older plan had are removed. Additions by other programs stay. Touches the pod's namespace, the tunnel's socket,
//! and one nftables table that accepts tunnel packets only from the node.

use std::net::IpAddr;
use std::path::Path;

use peerpod_proto::guest::NetworkPlan;

use super::Error;
use super::inspect::{Picture, PodNetworkState};
use super::link;
use super::netlink::Client;
use super::netns::Netns;
use super::nft::{Filter, Peer};
use super::plan::{self, Planned};
use super::underlay;
use contents::Contents;
use device::Devices;
use transaction::Transaction;

mod contents;
mod device;
mod message;
mod settings;
mod transaction;

/// Maximum number of comparisons with the plan: a removal may take other entries along (an address its routes).
const ROUNDS: usize = 4;

/// Result of [`apply`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applied {
    /// The MTU of the pod's (first) interface, in bytes.
    pub mtu: u32,
    /// False where everything was already as planned.
    pub changed: bool,
    /// Why tunnel packets of hosts other than the node pass, if they do: a kernel without nftables has no filter.
    pub unfiltered: Option<String>,
    /// Settings that this VM's kernel does not support, as text: unknown sysctls.
    pub left_out: Vec<String>,
}

/// Makes the pod's network in the namespace at `podns` according to the plan, as a whole or not at all. Must be called
/// from a thread in the VM's own network namespace, by which the tunnel's packets leave.
///
/// `previous` is the plan applied before, if any: parts that only it had are removed.
///
/// # Errors
/// [`Error::Plan`] for an invalid plan, [`Error::Path`] where the node cannot be reached.
pub fn apply(plan: &NetworkPlan, previous: Option<&NetworkPlan>, podns: &Path) -> Result<Applied, Error> {
    let planned = plan::read(plan)?;
    let mut host = Client::route().map_err(Error::socket)?;
    let unfiltered = filter(&planned).err().map(|e| e.to_string());
    let applied = make(&mut host, &planned, previous, podns)?;
    if let Some(Ok(before)) = previous.map(plan::read) {
        // The former node address sends no packets any more; an entry that stays accepts one address too many.
        drop(unfilter(&before, &peers(&planned)));
    }
    Ok(Applied { unfiltered, ..applied })
}

/// Like [`apply`], for a tunnel with packets that do not leave by the VM's own namespace. `host` is a socket of the
/// namespace by which they leave. The caller restricts the senders there (an inner network that only the node is in).
pub fn apply_from(
    host: &mut Client,
    plan: &NetworkPlan,
    previous: Option<&NetworkPlan>,
    podns: &Path,
) -> Result<Applied, Error> {
    make(host, &plan::read(plan)?, previous, podns)
}

fn make(
    host: &mut Client,
    planned: &Planned,
    previous: Option<&NetworkPlan>,
    podns: &Path,
) -> Result<Applied, Error> {
    let node = planned.underlay.node;
    let path = link::path_to(host, node)?;
    let room = path.mtus.route.saturating_sub(planned.underlay.overhead);
    let source = match planned.underlay.vm {
        Some(vm) if vm.is_ipv6() == node.is_ipv6() && is_source(host, vm, path.source, node) => vm,
        _ => path.source,
    };
    let wanted = fitted(planned, room)?;
    // This program did not apply a plan that it cannot read.
    let previous = previous.and_then(|plan| plan::read(plan).ok());
    let netns = Netns::open(podns)?;
    let mut pod = netns.netlink()?;
    let mut transaction = Transaction::new(&mut pod);
    let made = follow(&mut transaction, host, &netns, source, &wanted, previous.as_ref());
    match made {
        Ok(left_out) => {
            let mtu = wanted.network.interfaces.first().map_or(0, |interface| interface.mtu);
            Ok(Applied { mtu, changed: transaction.changed(), unfiltered: None, left_out })
        }
        Err(e) => {
            transaction.undo();
            Err(e)
        }
    }
}

/// Returns whether the tunnel's source address is the VM's address as the node knows it, instead of the kernel's
/// choice. The node accepts packets from one of the VM's addresses. Behind a NAT the VM lacks it.
fn is_source(host: &mut Client, vm: IpAddr, kernels: IpAddr, node: IpAddr) -> bool {
    // The cloud may know the VM's address before the VM does, or duplicate address detection may still run. Then no
    // address can reach the node yet, and this one will once it is there.
    let is_to_come = || !underlay::reaches_far(kernels) && underlay::reaches_far(node);
    link::is_own(host, vm) || is_to_come()
}

/// Changes the namespace to the wanted state; returns the settings that could not be made.
fn follow(
    transaction: &mut Transaction<'_>,
    host: &mut Client,
    netns: &Netns,
    source: IpAddr,
    wanted: &Planned,
    previous: Option<&Planned>,
) -> Result<Vec<String>, Error> {
    let mut picture = Picture::take(transaction.pod())?;
    let devices = Devices::new(netns, &wanted.underlay, source);
    devices.make(transaction, host, &mut picture, wanted)?;
    let left_out = settings::write(transaction, netns, &wanted.network, previous.map(|plan| &plan.network))?;
    devices.take_up(transaction, &picture, &wanted.network.interfaces)?;

    let target = Contents::planned(&wanted.network);
    let before = previous.map(|plan| Contents::planned(&plan.network)).unwrap_or_default();
    for round in 1.. {
        let has = Contents::found(&picture);
        let change = target.change(&has, &before);
        if change.is_empty() {
            break;
        }
        if round == ROUNDS {
            let what = change.first_in_words();
            return Err(Error::Plan(format!("the pod's namespace does not keep {what}")));
        }
        let removed = transaction.apply(&picture, change)?;
        if !removed {
            break; // the kernel acknowledged every addition
        }
        picture = Picture::take(transaction.pod())?;
    }
    // Last, because it cannot be undone.
    for (vni, interface) in previous.into_iter().flat_map(Planned::tunnels) {
        if !wanted.vnis.contains(&vni) {
            transaction.remove_device(&interface.name, vni)?;
        }
    }
    Ok(left_out)
}

/// Removes everything that [`apply`] made. A missing part is no error, and every step is tried.
pub fn remove(plan: &NetworkPlan, podns: &Path) -> Result<(), Vec<Error>> {
    let planned = plan::read(plan).map_err(|e| vec![e])?;
    let mut errors = Vec::new();
    match Netns::open(podns).and_then(|netns| netns.netlink()) {
        Ok(mut pod) => clear(&mut pod, &planned, &mut errors),
        Err(e) if e.is_gone() => {}
        Err(e) => errors.push(e),
    }
    errors.extend(unfilter(&planned, &[]).err());
    if errors.is_empty() { Ok(()) } else { Err(errors) }
}

/// Removes the devices, with their addresses and routes, and the entries without a device.
fn clear(pod: &mut Client, planned: &Planned, errors: &mut Vec<Error>) {
    for (vni, interface) in planned.tunnels() {
        for name in [interface.name.clone(), device::temporary_name(vni)] {
            errors.extend(device::remove(pod, &name, vni).err());
        }
    }
    let rest = Picture::take(pod).and_then(|picture| {
        let change =
            Contents::default().change(&Contents::found(&picture), &Contents::planned(&planned.network));
        Transaction::new(pod).apply(&picture, change)
    });
    errors.extend(rest.err());
}

/// Returns the plan with MTUs that fit into `room`, or an error where that leaves too little.
fn fitted(planned: &Planned, room: u32) -> Result<Planned, Error> {
    let mut wanted = planned.clone();
    for interface in &mut wanted.network.interfaces {
        interface.mtu = plan::fit(interface.mtu, room, interface.has_v6(), planned.underlay.node)?;
        for route in &mut interface.routes {
            narrow(route, interface.mtu);
        }
    }
    let PodNetworkState { interfaces, routes, .. } = &mut wanted.network;
    for route in routes {
        let through = |name: &String| interfaces.iter().find(|i| i.name == *name).map(|i| i.mtu);
        if let Some(mtu) = route.hops.iter().filter_map(|hop| through(&hop.interface)).min() {
            narrow(route, mtu);
        }
    }
    Ok(wanted)
}

/// Limits a route's MTU and segment size to its interface's MTU.
fn narrow(route: &mut super::inspect::Route, mtu: u32) {
    // TCP and IP headers without options.
    let headers = if route.destination.is_ipv6() { 60 } else { 40 };
    route.mtu = route.mtu.min(mtu);
    route.advmss = route.advmss.min(mtu.saturating_sub(headers));
}

/// Restricts tunnel packets to those from the node.
fn filter(planned: &Planned) -> Result<(), Error> {
    let mut client = Client::netfilter().map_err(Error::socket)?;
    Filter::new(planned.underlay.port).add(&mut client, &peers(planned), &Vec::new)
}

/// Removes a plan's peers from the filter, except those in `keep`.
fn unfilter(planned: &Planned, keep: &[Peer]) -> Result<(), Error> {
    let gone: Vec<Peer> = peers(planned).into_iter().filter(|peer| !keep.contains(peer)).collect();
    if gone.is_empty() {
        return Ok(());
    }
    let Ok(mut client) = Client::netfilter() else { return Ok(()) }; // no netfilter, no table
    let filter = Filter::new(planned.underlay.port);
    for peer in gone {
        filter.remove(&mut client, peer)?;
    }
    filter.remove_if_empty(&mut client).map(drop)
}

fn peers(planned: &Planned) -> Vec<Peer> {
    planned.vnis.iter().map(|vni| Peer { address: planned.underlay.node, vni: *vni }).collect()
}
