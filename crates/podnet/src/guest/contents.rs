//! Computes the changes between the wanted, the present and the formerly wanted contents of a namespace. Contents are
//! addresses, routes, rules and neighbours, each with its device's name, but no devices. Pure.

use std::collections::HashSet;
use std::hash::Hash;
use std::net::IpAddr;

use crate::inspect::{Address, Neighbour, Picture, PodNetworkState, Route, Rule};

/// Metric and protocol that the kernel gives to an IPv6 route without them.
const USUAL_METRIC_V6: u32 = 1024;
const RTPROT_BOOT: u8 = 3;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Contents {
    pub(super) addresses: Vec<(String, Address)>,
    /// `None` for a route of no device or of several.
    pub(super) routes: Vec<(Option<String>, Route)>,
    pub(super) neighbours: Vec<(String, Neighbour)>,
    pub(super) rules: Vec<Rule>,
}

/// Changes to be made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Change {
    /// Removed before the additions: the kernel would treat an addition as the same object.
    pub(super) swap: Contents,
    pub(super) add: Contents,
    pub(super) remove: Contents,
}

impl Contents {
    /// Returns the contents that a plan wants.
    pub(super) fn planned(plan: &PodNetworkState) -> Contents {
        let mut all = Contents { rules: plan.rules.clone(), ..Contents::default() };
        let lo = || "lo".to_owned();
        all.addresses.extend(plan.loopback.iter().map(|address| (lo(), address.clone())));
        for interface in &plan.interfaces {
            let name = || interface.name.clone();
            all.addresses.extend(interface.addresses.iter().map(|address| (name(), address.clone())));
            all.neighbours.extend(interface.neighbours.iter().map(|neighbour| (name(), neighbour.clone())));
            all.routes.extend(interface.routes.iter().map(|route| (Some(name()), as_kept(route))));
        }
        all.routes.extend(plan.routes.iter().map(|route| (None, as_kept(route))));
        all
    }

    /// Returns the contents of a namespace.
    pub(super) fn found(picture: &Picture) -> Contents {
        let name = |index: &u32| picture.link(*index).map(|link| link.name.clone());
        let addresses = picture.addresses.iter().filter_map(|(of, a)| Some((name(of)?, a.clone())));
        let neighbours = picture.neighbours.iter().filter_map(|(of, n)| Some((name(of)?, n.clone())));
        let routes = picture.routes.iter().filter_map(|found| {
            let (device, route) = picture.named(found).ok()?;
            Some((device.map(|link| link.name.clone()), route))
        });
        Contents {
            addresses: addresses.collect(),
            routes: routes.collect(),
            neighbours: neighbours.collect(),
            rules: picture.rules.clone(),
        }
    }

    /// Returns the change from `has` to `self`. Entries in neither `self` nor `before` stay.
    pub(super) fn change(&self, has: &Contents, before: &Contents) -> Change {
        let mut change = Change::default();
        let Change { swap, add, remove } = &mut change;
        // An entry that the kernel let expire is not restored by the plan that brought it.
        let expires = |(_, a): &(String, Address)| a.valid.is_some();
        let all = [&self.addresses, &has.addresses, &before.addresses];
        (swap.addresses, add.addresses, remove.addresses) =
            difference(all, address_exact, address_kind, expires);
        let expires = |(_, r): &(Option<String>, Route)| r.expires.is_some();
        let all = [&self.routes, &has.routes, &before.routes];
        (swap.routes, add.routes, remove.routes) = difference(all, route_exact, route_kind, expires);
        // The kernel replaces a neighbour in one step, and a rule is identified by its whole content.
        let key = |(of, n): &(String, Neighbour)| (of.clone(), n.address, n.proxy);
        let exact = |(of, n): &(String, Neighbour)| (of.clone(), Neighbour { protocol: 0, ..n.clone() });
        let all = [&self.neighbours, &has.neighbours, &before.neighbours];
        (_, add.neighbours, remove.neighbours) = difference(all, exact, key, |_| false);
        let all = [&self.rules, &has.rules, &before.rules];
        (_, add.rules, remove.rules) = difference(all, Rule::clone, Rule::clone, |_| false);
        change
    }

    fn is_empty(&self) -> bool {
        *self == Contents::default()
    }
}

impl Change {
    pub(super) fn is_empty(&self) -> bool {
        self.swap.is_empty() && self.add.is_empty() && self.remove.is_empty()
    }

    /// Returns whether anything is removed.
    pub(super) fn removes(&self) -> bool {
        !self.swap.is_empty() || !self.remove.is_empty()
    }

    pub(super) fn first_in_words(&self) -> String {
        let Contents { addresses, routes, neighbours, rules } = &self.add;
        if let Some((device, address)) = addresses.first() {
            return format!("address {} of {device}", address.address);
        }
        if let Some((_, route)) = routes.first() {
            return format!("the route to {}/{}", route.destination, route.prefix);
        }
        match (neighbours.first(), rules.first()) {
            (Some((device, neighbour)), _) => format!("neighbour {} of {device}", neighbour.address),
            (None, Some(rule)) => format!("the rule of priority {}", rule.priority),
            (None, None) => "the removed entries away".to_owned(),
        }
    }
}

/// Returns a route in the form in which the kernel reports it.
fn as_kept(route: &Route) -> Route {
    let mut route = route.clone();
    if route.destination.is_ipv6() {
        route.scope = 0;
        route.metric = if route.metric == 0 { USUAL_METRIC_V6 } else { route.metric };
        route.protocol = if route.protocol == 0 { RTPROT_BOOT } else { route.protocol };
    }
    route
}

/// Returns all significant fields; older kernels do not keep an address's protocol.
fn address_exact((device, a): &(String, Address)) -> (String, Address) {
    let timeless =
        Address { valid: a.valid.map(|_| 0), preferred: a.preferred.map(|_| 0), protocol: 0, ..a.clone() };
    (device.clone(), timeless)
}

/// Returns the fields by which the kernel identifies an address.
fn address_kind((device, a): &(String, Address)) -> (String, IpAddr, u8) {
    (device.clone(), a.address, if a.address.is_ipv6() { 0 } else { a.prefix })
}

/// Returns all significant fields. `onlink` is not one: this program sets it on gateways that the kernel would refuse.
fn route_exact((device, r): &(Option<String>, Route)) -> (Option<String>, Route) {
    let mut route = Route { expires: r.expires.map(|_| 0), onlink: false, ..r.clone() };
    route.hops.iter_mut().for_each(|hop| hop.onlink = false);
    (device.clone(), route)
}

/// Returns the significant fields without those that a path or a lifetime changes.
fn route_kind(of: &(Option<String>, Route)) -> (Option<String>, Route) {
    let (device, mut kind) = route_exact(of);
    (kind.expires, kind.mtu, kind.advmss) = (None, 0, 0);
    kind.metrics.clear();
    (device, kind)
}

/// Returns the entries to remove before an addition in another form, the ones to add, and the others to remove.
fn difference<T: Clone, K: Hash + Eq, L: Hash + Eq>(
    [target, has, before]: [&Vec<T>; 3],
    exact: impl Fn(&T) -> K,
    kind: impl Fn(&T) -> L,
    expires: impl Fn(&T) -> bool,
) -> (Vec<T>, Vec<T>, Vec<T>) {
    let all = |entries: &[T]| entries.iter().map(&exact).collect::<HashSet<K>>();
    let (wanted, there, old) = (all(target), all(has), all(before));
    let ours: HashSet<L> = target.iter().chain(before).map(&kind).collect();
    let gone_by_itself = |t: &T| expires(t) && old.contains(&exact(t));
    let missing = target.iter().filter(|t| !there.contains(&exact(t)) && !gone_by_itself(t));
    let add: Vec<T> = missing.cloned().collect();
    let added: HashSet<L> = add.iter().map(&kind).collect();
    let surplus = has.iter().filter(|h| !wanted.contains(&exact(h)) && ours.contains(&kind(h)));
    let (swap, remove) = surplus.cloned().partition(|t| added.contains(&kind(t)));
    (swap, add, remove)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn address(text: &str, prefix: u8) -> (String, Address) {
        ("eth0".to_owned(), Address::new(ip(text), prefix, 0))
    }

    fn route(to: &str, gateway: &str, mtu: u32) -> (Option<String>, Route) {
        (Some("eth0".to_owned()), Route { gateway: gateway.parse().ok(), mtu, ..Route::new(ip(to), 24) })
    }

    fn contents(addresses: &[(String, Address)], routes: &[(Option<String>, Route)]) -> Contents {
        Contents { addresses: addresses.to_vec(), routes: routes.to_vec(), ..Contents::default() }
    }

    #[test]
    fn foreign_entries_stay_and_entries_of_an_older_plan_are_removed() {
        let (ours, old, theirs) = (address("10.0.0.1", 24), address("10.0.0.2", 24), address("10.0.0.3", 24));
        let (near, far) = (route("10.1.0.0", "10.0.0.254", 0), route("10.2.0.0", "10.0.0.254", 0));
        let has = contents(&[old.clone(), theirs], &[near.clone(), far.clone()]);
        let before = contents(std::slice::from_ref(&old), std::slice::from_ref(&near));
        let change = contents(std::slice::from_ref(&ours), &[]).change(&has, &before);
        assert_eq!(change.add, contents(&[ours], &[]));
        assert_eq!(change.remove, contents(&[old], &[near]));
        assert!(change.swap.is_empty() && change.removes() && !change.is_empty());
    }

    #[test]
    fn a_route_with_a_changed_mtu_is_replaced() {
        let (then, now) = (route("10.1.0.0", "10.0.0.254", 1450), route("10.1.0.0", "10.0.0.254", 1400));
        let change = contents(&[], std::slice::from_ref(&now))
            .change(&contents(&[], std::slice::from_ref(&then)), &Contents::default());
        assert_eq!((change.swap, change.add), (contents(&[], &[then]), contents(&[], &[now])));
        assert!(change.remove.is_empty());
    }

    #[test]
    fn an_expired_address_is_not_restored_by_the_same_plan() {
        let mut brief = address("fd00::1", 64);
        brief.1.valid = Some(60);
        let target = contents(std::slice::from_ref(&brief), &[]);
        assert_eq!(target.change(&Contents::default(), &Contents::default()).add, target);
        assert!(target.change(&Contents::default(), &target).is_empty());
        let mut older = target.clone();
        older.addresses[0].1.valid = Some(9);
        assert!(target.change(&older, &target).is_empty(), "it has less time left, and is the same");
    }
}
