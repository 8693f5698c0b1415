//! The guest's half of the pod's network: in the pod's namespace of the VM the tunnel devices, with the pod's names,
//! MACs, addresses, routes, rules, neighbours and settings.
//!
//! All of it or nothing, and again as often as one likes: what is as planned is left alone, what is missing is added,
//! what an older plan had and this one has not is removed. What others put there (the pod, a mesh's sidecar) is not
//! touched. Touches the pod's namespace, the tunnel's socket, and (where the VM's kernel has nftables) one table that
//! accepts tunnel packets from the node only.

use std::net::IpAddr;
use std::path::Path;

use peerpod_proto::guest::NetworkPlan;

use super::Error;
use super::link;
use super::look::Picture;
use super::netlink::{self, Client};
use super::netns::Netns;
use super::nft::{Filter, Peer};
use super::plan::{self, Interface, Planned};
use super::uplink;
use contents::Contents;
use device::Devices;
use transaction::Transaction;

mod contents;
mod device;
mod message;
mod settings;
mod transaction;

/// A change of one thing may take another with it (an address its routes): so often is looked again.
const ROUNDS: usize = 4;

/// What [`apply`] made or found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applied {
    /// The MTU of the pod's (first) interface, in bytes.
    pub mtu: u32,
    /// False where all of it was already as planned.
    pub changed: bool,
    /// Why tunnel packets from others than the node are not filtered, where they are not: a kernel without nftables.
    pub unfiltered: Option<String>,
    /// What this VM's kernel could not be made to have, in words: sysctls it does not know.
    pub left_out: Vec<String>,
}

/// Makes the pod's network in the namespace at `podns` as the plan says: all of it or nothing. Called again with the
/// same plan it verifies, adds what is missing and leaves the rest alone. Must be called from a thread in the VM's own
/// network namespace: that is where the tunnel's packets leave.
///
/// `previous` is the plan that was applied before, if any: what it had and this one has not is removed.
///
/// # Errors
/// [`Error::Plan`] for a plan that makes no sense, [`Error::Path`] where the node cannot be reached, [`Error::Kernel`].
pub fn apply(plan: &NetworkPlan, previous: Option<&NetworkPlan>, podns: &Path) -> Result<Applied, Error> {
    let planned = plan::read(plan)?;
    let mut host = Client::route().map_err(socket)?;
    let unfiltered = filter(&planned).err().map(|e| e.to_string());
    let applied = make(&mut host, &planned, previous, podns)?;
    if let Some(Ok(before)) = previous.map(plan::read) {
        // Nobody sends from there any more; if it stays, it lets one address too many in.
        drop(unfilter(&before, &peers(&planned)));
    }
    Ok(Applied { unfiltered, ..applied })
}

/// As [`apply`] for a tunnel whose packets do not leave by the VM's own namespace: `host` is a socket of the one where
/// they do, and who may send into it is somebody else's matter (an inner network that only the node is in).
///
/// # Errors
/// As [`apply`].
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
    let way = link::way_to(host, node)?;
    let room = way.mtu.saturating_sub(planned.underlay.overhead);
    let source = match planned.underlay.vm {
        Some(vm) if vm.is_ipv6() == node.is_ipv6() && is_source(host, vm, way.source, node) => vm,
        _ => way.source,
    };
    let wanted = fitted(planned, room)?;
    // A plan this program cannot read was not applied by it either.
    let previous = previous.and_then(|plan| plan::read(plan).ok());
    let netns = Netns::open(podns)?;
    let mut pod = netns.netlink()?;
    let mut transaction = Transaction::new(&mut pod);
    let made = follow(&mut transaction, host, &netns, source, &wanted, previous.as_ref());
    match made {
        Ok(left_out) => {
            let mtu = wanted.interfaces.first().map_or(0, |interface| interface.mtu);
            Ok(Applied { mtu, changed: transaction.changed(), unfiltered: None, left_out })
        }
        Err(e) => {
            transaction.undo();
            Err(e)
        }
    }
}

/// Whether the tunnel's packets are to come from the address that the node knows of the VM, not from what the kernel would
/// take. A VM may have several addresses, and the node accepts packets from one. Behind a NAT the VM does not have it.
fn is_source(host: &mut Client, vm: IpAddr, kernels: IpAddr, node: IpAddr) -> bool {
    // The cloud may know the VM's address before the VM does, or the kernel still looks for duplicates: then there is
    // none yet that a tunnel to the node could be made from, and this one will do when it has come.
    let is_to_come = || !uplink::reaches_far(kernels) && uplink::reaches_far(node);
    link::is_own(host, vm) || is_to_come()
}

/// Makes what is wanted of what is there; returns what could not be had.
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
    devices.make(transaction, host, &mut picture, &wanted.interfaces)?;
    let left_out = settings::write(transaction, netns, wanted, previous)?;
    devices.take_up(transaction, &picture, &wanted.interfaces)?;

    let target = Contents::planned(wanted);
    let before = previous.map(Contents::planned).unwrap_or_default();
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
            break; // what was only added is as the kernel acknowledged it
        }
        picture = Picture::take(transaction.pod())?;
    }
    // Last of all: it cannot be taken back.
    for interface in previous.map(|p| p.interfaces.as_slice()).unwrap_or_default() {
        if !wanted.interfaces.iter().any(|i| i.vni == interface.vni) {
            transaction.remove_device(&interface.name, interface.vni)?;
        }
    }
    Ok(left_out)
}

/// Removes what [`apply`] made. Gone is fine; everything is tried.
///
/// # Errors
/// All that failed.
pub fn remove(plan: &NetworkPlan, podns: &Path) -> Result<(), Vec<Error>> {
    let planned = plan::read(plan).map_err(|e| vec![e])?;
    let mut errors = Vec::new();
    match Netns::open(podns).and_then(|netns| netns.netlink()) {
        Ok(mut pod) => clear(&mut pod, &planned, &mut errors),
        Err(e) if e.is_gone() => {}
        Err(e) => errors.push(e),
    }
    if let Err(e) = unfilter(&planned, &[]) {
        errors.push(e);
    }
    if errors.is_empty() { Ok(()) } else { Err(errors) }
}

/// The devices, with which their addresses and routes go, and what is of no device.
fn clear(pod: &mut Client, planned: &Planned, errors: &mut Vec<Error>) {
    for interface in &planned.interfaces {
        for name in [interface.name.clone(), device::temporary_name(interface.vni)] {
            if let Err(e) = device::remove(pod, &name, interface.vni) {
                errors.push(e);
            }
        }
    }
    let rest = Picture::take(pod).and_then(|picture| {
        let change = Contents::default().change(&Contents::found(&picture), &Contents::planned(planned));
        Transaction::new(pod).apply(&picture, change)
    });
    errors.extend(rest.err());
}

fn socket(source: std::io::Error) -> Error {
    Error::kernel("open a netlink socket")(netlink::Error::Socket(source))
}

/// The plan with MTUs that fit, or what is too small.
fn fitted(planned: &Planned, room: u32) -> Result<Planned, Error> {
    let mut wanted = planned.clone();
    for interface in &mut wanted.interfaces {
        let v6 = interface.addresses.iter().any(|a| a.address.is_ipv6());
        interface.mtu = plan::fit(interface.mtu, room, v6, planned.underlay.node)?;
        for route in &mut interface.routes {
            narrow(route, interface.mtu);
        }
    }
    let mtu_of = |name: &str| wanted.interfaces.iter().find(|i: &&Interface| i.name == name).map(|i| i.mtu);
    for route in &mut wanted.routes {
        if let Some(mtu) = route.hops.iter().filter_map(|hop| mtu_of(&hop.interface)).min() {
            narrow(route, mtu);
        }
    }
    Ok(wanted)
}

/// A route must not promise more than its interface carries.
fn narrow(route: &mut super::look::Route, mtu: u32) {
    // TCP and IP headers without options.
    let headers = if route.destination.is_ipv6() { 60 } else { 40 };
    route.mtu = route.mtu.min(mtu);
    route.advmss = route.advmss.min(mtu.saturating_sub(headers));
}

/// Only the node may send into the tunnels.
fn filter(planned: &Planned) -> Result<(), Error> {
    let mut client = Client::netfilter().map_err(socket)?;
    Filter::new(planned.underlay.port).add(&mut client, &peers(planned), &Vec::new)
}

/// Takes a plan's peers out of the filter, but for those to keep.
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
    planned.interfaces.iter().map(|i| Peer { address: planned.underlay.node, vni: i.vni }).collect()
}
