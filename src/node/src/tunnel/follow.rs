//! Decides which changes of a running pod's network its VM follows. Pure: compares the recorded state with the present
//! one. Changes by the CNI are followed. Entries that are missing because an interface was down are not: the kernel
//! drops them then, and the VM still has them. As long as the kernel counts no lost carrier, missing entries were
//! removed on purpose. An address with a lifetime may expire here although the VM keeps it alive: it stays.

use std::fmt;

use peerpod_podnet::inspect::{Address, Interface, Neighbour, PodNetworkState, Route};

/// Number of changes that are listed; more are counted.
const LISTED: usize = 8;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Merged {
    /// The network that the VM must have now.
    pub seen: PodNetworkState,
    /// The differences from the record, as text; empty: none.
    pub changes: Vec<String>,
    /// The differences from the record that the VM does not follow, as text.
    pub left: Vec<String>,
    /// Interfaces that lost entries by losing their carrier, by index.
    pub kept: Vec<u32>,
}

/// Merges `now` into `recorded`. `fell` returns whether the interface of this index lost its carrier meanwhile.
pub(crate) fn merge(recorded: &PodNetworkState, now: PodNetworkState, fell: &dyn Fn(u32) -> bool) -> Merged {
    let mut changes = Changes::default();
    let mut left = Changes::default();
    let (mut interfaces, mut kept) = (Vec::with_capacity(now.interfaces.len()), Vec::new());
    for before in &recorded.interfaces {
        let is_primary = before.index == recorded.primary().index;
        match now.interfaces.iter().find(|interface| interface.index == before.index) {
            Some(after) => {
                let fell = after.down || fell(before.index);
                let merged = interface(before, after, fell, &mut changes, &mut left);
                if fell && (after.down || !has_all(after, before)) {
                    kept.push(before.index);
                }
                interfaces.push(merged);
            }
            None if is_primary => {
                left.note(|| format!("interface {} is gone", before.name));
                interfaces.push(before.clone());
            }
            None => changes.note(|| format!("interface {} is gone", before.name)),
        }
    }
    for after in &now.interfaces {
        if !recorded.interfaces.iter().any(|before| before.index == after.index) {
            changes.note(|| format!("interface {} is new", after.name));
            interfaces.push(after.clone());
        }
    }
    let routes = timeless(&recorded.routes, now.routes, Route::is_same);
    let loopback = timeless(&recorded.loopback, now.loopback, Address::is_same);
    changes.differ("routes without a single interface", &recorded.routes, &routes);
    changes.differ("rules", &recorded.rules, &now.rules);
    changes.differ("sysctls", &recorded.sysctls, &now.sysctls);
    changes.differ("addresses of lo", &recorded.loopback, &loopback);
    let seen = PodNetworkState {
        interfaces,
        routes,
        rules: now.rules,
        sysctls: now.sysctls,
        loopback,
        left_out: now.left_out,
    };
    for what in &seen.left_out {
        if !recorded.left_out.contains(what) {
            left.note(|| what.clone());
        }
    }
    Merged { seen, changes: changes.texts(), left: left.texts(), kept }
}

/// Whether nothing that was recorded is missing.
fn has_all(now: &Interface, recorded: &Interface) -> bool {
    recorded.addresses.iter().all(|old| now.addresses.iter().any(|new| old.is_same(new)))
        && recorded.routes.iter().all(|old| now.routes.iter().any(|new| old.is_same(new)))
        && recorded.neighbours.iter().all(|old| now.neighbours.contains(old))
}

fn interface(
    before: &Interface,
    after: &Interface,
    fell: bool,
    changes: &mut Changes,
    left: &mut Changes,
) -> Interface {
    let name = &after.name;
    let mut merged = after.clone();
    merged.addresses = timeless(&before.addresses, merged.addresses, Address::is_same);
    merged.routes = timeless(&before.routes, merged.routes, Route::is_same);
    keep(&before.addresses, &mut merged.addresses, Address::is_same, |gone| {
        let stays = fell || gone.valid.is_some();
        let word = if stays { &mut *left } else { &mut *changes };
        word.note(|| format!("{name}: address {}/{} is gone", gone.address, gone.prefix));
        stays
    });
    keep(&before.routes, &mut merged.routes, Route::is_same, |gone| {
        let stays = fell || gone.expires.is_some();
        let word = if stays { &mut *left } else { &mut *changes };
        word.note(|| format!("{name}: route {}/{} is gone", gone.destination, gone.prefix));
        stays
    });
    keep(&before.neighbours, &mut merged.neighbours, PartialEq::eq, |gone: &Neighbour| {
        let word = if fell { &mut *left } else { &mut *changes };
        word.note(|| format!("{name}: neighbour {} is gone", gone.address));
        fell
    });
    for address in &merged.addresses {
        if !before.addresses.contains(address) {
            changes.note(|| format!("{name}: address {}/{} is new", address.address, address.prefix));
        }
    }
    for route in &merged.routes {
        if !before.routes.contains(route) {
            changes.note(|| format!("{name}: route {}/{} is new", route.destination, route.prefix));
        }
    }
    for neighbour in &merged.neighbours {
        if !before.neighbours.contains(neighbour) {
            changes.note(|| format!("{name}: neighbour {} is new", neighbour.address));
        }
    }
    // The VM's interface is not taken down when the node's interface goes down.
    merged.down = before.down;
    let bare = |interface: &Interface| Interface {
        addresses: Vec::new(),
        routes: Vec::new(),
        neighbours: Vec::new(),
        ..interface.clone()
    };
    if bare(&merged) != bare(before) {
        changes.note(|| format!("{name}: settings changed (MTU {} to {})", before.mtu, after.mtu));
    }
    merged
}

/// Returns the present entries with the recorded lifetimes: time passing is no change.
fn timeless<T: Clone>(before: &[T], after: Vec<T>, is_same: fn(&T, &T) -> bool) -> Vec<T> {
    let old = |new: &T| before.iter().find(|old| is_same(old, new)).cloned();
    after.into_iter().map(|new| old(&new).unwrap_or(new)).collect()
}

/// Puts back the missing entries for which `stays` returns true.
fn keep<T: Clone>(
    before: &[T],
    after: &mut Vec<T>,
    is_same: impl Fn(&T, &T) -> bool,
    mut stays: impl FnMut(&T) -> bool,
) {
    let gone: Vec<&T> = before.iter().filter(|old| !after.iter().any(|new| is_same(old, new))).collect();
    after.extend(gone.into_iter().filter(|gone| stays(gone)).cloned());
}

#[derive(Default)]
struct Changes {
    listed: Vec<String>,
    more: usize,
}

impl Changes {
    fn note(&mut self, what: impl FnOnce() -> String) {
        if self.listed.len() < LISTED { self.listed.push(what()) } else { self.more += 1 }
    }

    fn differ<T: PartialEq + fmt::Debug>(&mut self, what: &str, before: &[T], after: &[T]) {
        if before != after {
            self.note(|| format!("{what}: {} instead of {}", after.len(), before.len()));
        }
    }

    fn texts(mut self) -> Vec<String> {
        if self.more > 0 {
            self.listed.push(format!("{} more", self.more));
        }
        self.listed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> Address {
        Address::new(text.parse().unwrap(), 24, 0)
    }

    fn route(text: &str) -> Route {
        Route::new(text.parse().unwrap(), 16)
    }

    fn seen() -> PodNetworkState {
        let eth0 = Interface {
            name: "eth0".into(),
            index: 2,
            mtu: 1450,
            addresses: vec![address("10.1.0.2")],
            routes: vec![route("10.2.0.0"), route("10.3.0.0")],
            ..Interface::default()
        };
        let net1 =
            Interface { name: "net1".into(), index: 3, addresses: vec![address("10.9.0.2")], ..eth0.clone() };
        PodNetworkState {
            interfaces: vec![eth0, net1],
            routes: vec![],
            rules: vec![],
            sysctls: vec![],
            loopback: vec![],
            left_out: vec![],
        }
    }

    fn stayed(_: u32) -> bool {
        false
    }

    #[test]
    fn an_equal_state_is_no_change() {
        let merged = merge(&seen(), seen(), &stayed);
        assert_eq!(merged, Merged { seen: seen(), changes: vec![], left: vec![], kept: vec![] });
    }

    #[test]
    fn changes_by_the_cni_are_followed() {
        let mut now = seen();
        now.interfaces[0].routes = vec![route("10.2.0.0"), route("10.4.0.0")];
        now.interfaces[0].mtu = 1400;
        let merged = merge(&seen(), now.clone(), &stayed);
        assert_eq!(merged.seen, now);
        assert_eq!(merged.left, [""; 0]);
        let text = merged.changes.join("; ");
        for word in ["10.3.0.0/16 is gone", "10.4.0.0/16 is new", "MTU 1450 to 1400"] {
            assert!(text.contains(word), "{text}");
        }
    }

    #[test]
    fn state_lost_by_a_device_going_down_stays_in_the_vm() {
        let mut now = seen();
        now.interfaces[0].routes.clear();
        now.interfaces[0].addresses.clear();
        now.interfaces[0].down = true;
        let merged = merge(&seen(), now.clone(), &stayed);
        assert_eq!((merged.seen, merged.changes), (seen(), vec![]));
        assert_eq!(merged.left.len(), 3);
        now.interfaces[0].down = false;
        now.interfaces[0].addresses = vec![address("10.1.0.2"), address("10.1.0.3")];
        let merged = merge(&seen(), now, &|index| index == 2);
        assert_eq!(merged.kept, [2], "its routes are still missing");
        assert_eq!(merged.seen.primary().routes, seen().primary().routes);
        assert_eq!(merged.changes, ["eth0: address 10.1.0.3/24 is new"]);
    }

    #[test]
    fn a_device_with_its_state_restored_is_like_any_other() {
        let merged = merge(&seen(), seen(), &|_| true);
        assert_eq!(merged, Merged { seen: seen(), changes: vec![], left: vec![], kept: vec![] });
    }

    #[test]
    fn elapsed_lifetime_is_no_change_and_an_expired_address_stays() {
        let mut before = seen();
        before.interfaces[0].addresses[0].valid = Some(100);
        let mut now = before.clone();
        now.interfaces[0].addresses[0].valid = Some(40);
        assert_eq!(
            merge(&before, now.clone(), &stayed),
            Merged { seen: before.clone(), changes: vec![], left: vec![], kept: vec![] }
        );
        now.interfaces[0].addresses.clear();
        let merged = merge(&before, now, &stayed);
        assert_eq!((&merged.seen, merged.left.len()), (&before, 1));
    }

    #[test]
    fn an_interface_comes_and_goes_and_the_primary_one_does_not_go() {
        let mut now = seen();
        let mut net2 = now.interfaces.remove(1);
        (net2.name, net2.index) = ("net2".into(), 4);
        now.interfaces.push(net2);
        let merged = merge(&seen(), now.clone(), &stayed);
        assert_eq!(merged.seen, now);
        assert_eq!(merged.changes, ["interface net1 is gone", "interface net2 is new"]);
        now.interfaces.remove(0);
        let merged = merge(&seen(), now, &stayed);
        assert_eq!(merged.seen.primary().name, "eth0");
        assert_eq!(merged.left, ["interface eth0 is gone"]);
    }

    #[test]
    fn a_thousand_changes_are_counted() {
        let mut now = seen();
        now.interfaces[0].routes.extend((0..1000).map(|n| Route { metric: n, ..route("10.5.0.0") }));
        let merged = merge(&seen(), now, &stayed);
        assert_eq!(merged.changes.len(), LISTED + 1);
        assert_eq!(merged.changes.last().unwrap(), "992 more");
    }
}
