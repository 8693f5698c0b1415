//! Lists the planned parts of the pod's network that are missing in the VM, as text. A program in the pod or the VM
//! removed them. Only reads, over netlink; `guest::apply` restores the missing parts.

use std::path::Path;

use peerpod_proto::guest::NetworkPlan;

use super::inspect::{Address, Route, inspect};
use super::netns::Netns;
use super::{Error, plan};

const MOST: usize = 16;

/// Returns the planned interfaces, addresses and routes that are missing. Additional ones belong to the pod.
pub fn drift(wire: &NetworkPlan, podns: &Path) -> Result<Vec<String>, Error> {
    let planned = plan::read(wire)?.network;
    let seen = match inspect(&Netns::open(podns)?) {
        Ok(seen) => seen,
        // The namespace has no usable interface left.
        Err(Error::CannotCarry(why)) => return Ok(vec![why]),
        Err(e) => return Err(e),
    };
    let mut lacks = Vec::new();
    for wanted in &planned.interfaces {
        let Some(has) = seen.interfaces.iter().find(|interface| interface.name == wanted.name) else {
            lacks.push(format!("{} is gone", wanted.name));
            continue;
        };
        if has.down && !wanted.down {
            lacks.push(format!("{} is down", wanted.name));
        }
        // Lifetimes, MTUs and the like may legitimately differ: the VM's own path narrows them.
        let has_address =
            |a: &Address| has.addresses.iter().any(|b| (b.address, b.prefix) == (a.address, a.prefix));
        let has_route = |a: &Route| has.routes.iter().any(|b| key(b) == key(a));
        for address in wanted.addresses.iter().filter(|address| !has_address(address)) {
            lacks.push(format!("{} lacks the address {}/{}", wanted.name, address.address, address.prefix));
        }
        for route in wanted.routes.iter().filter(|route| !has_route(route)) {
            lacks.push(format!("{} lacks the route to {}/{}", wanted.name, route.destination, route.prefix));
        }
    }
    lacks.truncate(MOST);
    Ok(lacks)
}

fn key(route: &Route) -> impl PartialEq {
    (route.destination, route.prefix, route.gateway, route.metric, route.fib)
}
