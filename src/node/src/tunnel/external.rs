//! Describes the pods' egress from the cluster (`tunnel.external`). The VM implements it.

use std::net::IpAddr;
use std::sync::Arc;

use parking_lot::Mutex;
use peerpod_podnet::Error;
use peerpod_podnet::netns::Netns;
use peerpod_podnet::underlay::network;
use peerpod_proto::guest;

/// Limit of the node's addresses in a plan; a node has a handful.
const MOST_ADDRESSES: usize = 32;

/// Egress of the pods' default routes where they do not take the tunnel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Egress {
    /// The VM's own network, by the VM's default routes.
    #[default]
    Vm,
    /// A second NIC of the VM, which must be requested from the provider.
    SecondNic,
}

impl Egress {
    /// Returns the name in the plan; a guest refuses a plan with an unknown name.
    fn name(self) -> &'static str {
        match self {
            Egress::Vm => "vm",
            Egress::SecondNic => "second-nic",
        }
    }
}

/// Egress of the pods' default routes by their VMs' own network, past the node and its NetworkPolicy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct External {
    pub egress: Egress,
    /// Prefixes that stay in the tunnel besides the pod's own routes: pods, services, nodes.
    pub cluster_cidrs: Vec<String>,
    /// Prefixes that pods may reach although they are link-local (metadata) or the VM's own network.
    pub allow: Vec<String>,
}

impl External {
    /// Writes it for a plan; `node` is the node's address towards the VM.
    pub(super) fn write(&self, node: IpAddr, own: &[IpAddr]) -> guest::External {
        let others = own.iter().filter(|address| **address != node);
        let node_addresses = [&node].into_iter().chain(others).take(MOST_ADDRESSES);
        guest::External {
            way: self.egress.name().to_owned(),
            cluster_cidrs: self.cluster_cidrs.clone(),
            allow: self.allow.clone(),
            node_addresses: node_addresses.map(ToString::to_string).collect(),
            ..guest::External::default()
        }
    }
}

/// The configured egress, and the node's own addresses, read at each change of its network and not per pod.
#[derive(Debug)]
pub(super) struct Outside {
    pub(super) wanted: External,
    host: Netns,
    own: Mutex<Arc<Vec<IpAddr>>>,
}

impl Outside {
    /// Opens it in the network namespace of the calling thread.
    pub(super) fn open(wanted: External) -> Result<Outside, Error> {
        let outside = Outside { wanted, host: Netns::current()?, own: Mutex::default() };
        outside.inspect()?;
        Ok(outside)
    }

    /// Reads the node's addresses; returns whether they have changed.
    pub(super) fn inspect(&self) -> Result<bool, Error> {
        let failed = |source| Error::Netns { attempt: "enter", path: self.host.path().to_owned(), source };
        let mut now = self.host.run(own_addresses).map_err(failed)?;
        now.sort_unstable();
        now.dedup();
        // Addresses within the cluster's prefixes keep to the tunnel anyway: a proxy may hold every service's.
        let cluster: Vec<_> = self.wanted.cluster_cidrs.iter().filter_map(|text| prefix(text)).collect();
        let covers = |of: &(IpAddr, u8), address: IpAddr| {
            of.0.is_ipv6() == address.is_ipv6() && network(of.0, of.1) == network(address, of.1)
        };
        now.retain(|address| !cluster.iter().any(|of| covers(of, *address)));
        let mut own = self.own.lock();
        let changed = **own != now;
        if changed {
            *own = Arc::new(now);
        }
        Ok(changed)
    }

    /// Returns the node's addresses as they were last read.
    pub(super) fn own(&self) -> Arc<Vec<IpAddr>> {
        self.own.lock().clone()
    }
}

/// Parses a prefix in the form of `tunnel.cluster-cidrs`: an address and the bits of its network.
pub(crate) fn prefix(text: &str) -> Option<(IpAddr, u8)> {
    let (address, bits) = text.split_once('/')?;
    let (address, bits) = (address.parse::<IpAddr>().ok()?, bits.parse().ok()?);
    let most = if address.is_ipv6() { 128 } else { 32 };
    (bits <= most).then_some((address, bits))
}

/// Returns this namespace's own addresses that other hosts can reach, in the kernel's order, which varies.
pub(crate) fn own_addresses() -> Vec<IpAddr> {
    let Ok(interfaces) = nix::ifaddrs::getifaddrs() else { return Vec::new() };
    let ips = interfaces.filter_map(|interface| {
        let address = interface.address?;
        let v4 = address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
        v4.or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())))
    });
    let outside = |ip: &IpAddr| match ip {
        IpAddr::V4(ip) => !ip.is_loopback() && !ip.is_link_local(),
        IpAddr::V6(ip) => !ip.is_loopback() && !ip.is_unicast_link_local(),
    };
    ips.filter(outside).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_towards_the_vm_comes_first_and_once() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let external = External { cluster_cidrs: vec!["10.0.0.0/8".into()], ..External::default() };
        let wire = external.write(ip("10.9.0.1"), &[ip("10.1.0.1"), ip("10.9.0.1"), ip("fd00::1")]);
        assert_eq!(wire.node_addresses, ["10.9.0.1", "10.1.0.1", "fd00::1"]);
        assert_eq!((wire.way.as_str(), wire.cluster_cidrs), ("vm", vec!["10.0.0.0/8".to_owned()]));
        let external = External { egress: Egress::SecondNic, ..external };
        assert_eq!(external.write(ip("10.9.0.1"), &[]).way, "second-nic");
    }

    #[test]
    fn a_prefix_has_an_address_and_bits() {
        for (text, is) in [
            ("10.0.0.0/8", true),
            ("fd00::/48", true),
            ("10.0.0.1", false),
            ("10.0.0.0/33", false),
            ("fd00::/129", false),
            ("x/8", false),
            ("", false),
        ] {
            assert_eq!(prefix(text).is_some(), is, "{text}");
        }
    }
}
