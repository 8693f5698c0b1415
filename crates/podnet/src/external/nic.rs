//! Selects the NICs of the VM by which the pod leaves. [`choose`] is pure; [`inspect`] reads over netlink.

use std::net::IpAddr;

use super::{External, policy_route};
use crate::Error;
use crate::link;
use crate::netlink::Client;
use crate::underlay::{self, UnderlayDevice};

/// Returns all present uplinks of the VM, and those by which the pod leaves: none where there is no way out.
pub(super) fn inspect(
    client: &mut Client,
    external: &External,
) -> Result<(Vec<UnderlayDevice>, Vec<UnderlayDevice>), Error> {
    let mut all = underlay::inspect(client)?;
    if !external.second {
        let out = all.iter().filter(|u| goes_out(u, false) || goes_out(u, true)).cloned().collect();
        return Ok((all, out));
    }
    let first = match external.nodes.first().map(|node| underlay::towards(client, *node)) {
        Some(Ok(name)) => name,
        // Without a route to the node the first NIC is unknown, and so is the second.
        None | Some(Err(Error::Path { .. })) => return Ok((all, Vec::new())),
        Some(Err(e)) => return Err(e),
    };
    let mut others = all.clone();
    for uplink in others.iter_mut().filter(|uplink| uplink.name != first) {
        uplink.gateways = underlay::gateways(client, uplink.index, policy_route::TABLE)?;
    }
    let out: Vec<UnderlayDevice> = choose(&first, &others).into_iter().collect();
    // A gateway found only in the NIC's own table is as near to the VM as one of the main table.
    for uplink in &mut all {
        let same = out.iter().filter(|nic| nic.index == uplink.index);
        let gateways = same.flat_map(|nic| &nic.gateways);
        uplink.near.extend(gateways.map(|gateway| (*gateway, link::bits(*gateway))));
    }
    Ok((all, out))
}

/// Returns the second NIC: the one with the lowest index, other than `first`, that leads out. A NIC without a gateway
/// of its own that shares a network with the first NIC leads out by the first NIC's gateway.
fn choose(first: &str, uplinks: &[UnderlayDevice]) -> Option<UnderlayDevice> {
    let home = uplinks.iter().find(|uplink| uplink.name == first)?;
    let mut others: Vec<UnderlayDevice> =
        uplinks.iter().filter(|uplink| uplink.name != first).cloned().collect();
    others.sort_unstable_by_key(|uplink| uplink.index);
    for uplink in &mut others {
        for v6 in [false, true] {
            let is_of = |address: &&IpAddr| address.is_ipv6() == v6;
            if uplink.gateways.iter().any(|gateway| gateway.is_ipv6() == v6)
                || !shares_network(uplink, home, v6)
            {
                continue;
            }
            uplink.gateways.extend(home.gateways.iter().find(is_of));
        }
        uplink.is_default = !uplink.gateways.is_empty();
    }
    others.into_iter().find(|uplink| goes_out(uplink, false) || goes_out(uplink, true))
}

fn shares_network(one: &UnderlayDevice, other: &UnderlayDevice, v6: bool) -> bool {
    let networks = |uplink: &UnderlayDevice| {
        let of = uplink.addresses.iter().filter(|(address, _)| address.is_ipv6() == v6);
        of.map(|(address, prefix)| underlay::network(*address, *prefix)).collect::<Vec<_>>()
    };
    let others = networks(other);
    networks(one).iter().any(|network| others.contains(network))
}

/// Returns whether the VM itself could send packets of this family out by the device.
pub(super) fn goes_out(uplink: &UnderlayDevice, v6: bool) -> bool {
    let routed = uplink.gateways.iter().any(|gateway| gateway.is_ipv6() == v6);
    uplink.up && uplink.is_default && routed && uplink.has(v6)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uplink(name: &str, index: u32, addresses: &[&str], gateways: &[&str]) -> UnderlayDevice {
        let address = |text: &&str| {
            let (address, prefix) = text.split_once('/').unwrap();
            (address.parse().unwrap(), prefix.parse().unwrap())
        };
        UnderlayDevice {
            name: name.to_owned(),
            index,
            mac: [2, 0, 0, 0, 0, index as u8],
            mtu: 1500,
            up: true,
            addresses: addresses.iter().map(address).collect(),
            gateways: gateways.iter().map(|text| text.parse().unwrap()).collect(),
            is_default: !gateways.is_empty(),
            near: Vec::new(),
        }
    }

    fn chosen(uplinks: &[UnderlayDevice]) -> Option<(String, Vec<String>)> {
        let chosen = choose("eth0", uplinks)?;
        Some((chosen.name, chosen.gateways.iter().map(ToString::to_string).collect()))
    }

    fn is(name: &str, gateways: &[&str]) -> Option<(String, Vec<String>)> {
        Some((name.to_owned(), gateways.iter().map(|text| (*text).to_owned()).collect()))
    }

    #[test]
    fn the_egress_nic_is_not_the_nic_towards_the_node() {
        let home = uplink("eth0", 2, &["10.9.0.5/24", "fd09::5/64"], &["10.9.0.1", "fd09::1"]);
        let own = uplink("eth1", 3, &["10.8.0.5/24"], &["10.8.0.1"]);
        let beside = uplink("eth1", 3, &["10.9.0.6/24", "fd09::6/64"], &[]);
        let lost = uplink("eth1", 3, &["10.8.0.5/24"], &[]);
        let bare = uplink("eth1", 3, &[], &["10.8.0.1"]);
        let down = UnderlayDevice { up: false, ..own.clone() };
        let third = uplink("eth2", 4, &["10.7.0.5/24"], &["10.7.0.1"]);
        assert_eq!(chosen(&[home.clone(), own.clone()]), is("eth1", &["10.8.0.1"]));
        assert_eq!(
            chosen(&[home.clone(), beside]),
            is("eth1", &["10.9.0.1", "fd09::1"]),
            "the first one's gateway"
        );
        assert_eq!(
            chosen(&[third.clone(), own.clone(), home.clone()]),
            is("eth1", &["10.8.0.1"]),
            "one, always the same"
        );
        for unfit in [lost, bare, down] {
            assert_eq!(chosen(&[home.clone(), unfit.clone()]), None, "{unfit:?}");
            assert_eq!(chosen(&[home.clone(), unfit, third.clone()]), is("eth2", &["10.7.0.1"]));
        }
        assert_eq!(chosen(std::slice::from_ref(&home)), None, "never the first");
        assert_eq!(chosen(&[own]), None, "without a first there is no second");
    }
}
