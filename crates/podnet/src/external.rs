//! Routes the pod's external traffic out by the VM's own network. Cluster traffic stays in the tunnel.
//!
//! ```text
//!   podns                                      the VM's own namespace
//!   eth0 (tunnel): cluster, nodes, the pod's   pp-ext: no address; a route and a neighbour for each pod address;
//!   routes that are not default                the egress firewall (`nft::egress_firewall`): out by the uplink under the VM's
//!   pp-ext0: default, source = the pod's       address, but not to the VM itself, its networks, the cloud's own
//!   own address, a neighbour as gateway        services, or the networks inside the tunnel
//! ```
//!
//! Neither end of the veth pair has an address, so none can collide with the cluster's addresses. No program in the VM
//! is reachable through the pair. The egress firewall is in the VM's namespace, out of the pod's reach.
//!
//! Where the VM has a second NIC for this purpose (way "second-nic"), the pod leaves by that NIC alone (`nic`). Packets
//! from the veth pair have a routing table of their own (`policy_route`), and the egress firewall drops those that
//! would leave by the first NIC. The NIC stays in the VM's namespace: in `podns`, containers with CAP_NET_ADMIN could
//! use it to reach the cloud's metadata service, and the program that assigns the NIC's address would lose it.
//!
//! [`read`] and [`split`] are pure. [`apply`] and [`undo`] may be repeated and must be called from a thread in the VM's
//! namespace. They touch the veth pair, the egress firewall, the policy route and the forwarding sysctls there.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use peerpod_proto::guest::{NetworkPlan, Route};

use super::Error;
use super::nft::egress_firewall::Prefix;

mod nic;
mod policy_route;
mod veth;

pub(crate) use veth::INSIDE;
pub use veth::{Applied, apply, leaves, undo};

/// Maximum number of entries of each list; a cluster has a handful.
const MOST: usize = 64;
const MAIN_TABLE: u32 = 254;
const UNICAST: u32 = 1;

/// Networks that clouds offer to their VMs alone: IPv4 link-local, Azure's host, Alibaba, AWS and GCP over IPv6.
const CLOUDS_OWN: [Prefix; 5] = [
    (IpAddr::V4(Ipv4Addr::new(169, 254, 0, 0)), 16),
    (IpAddr::V4(Ipv4Addr::new(168, 63, 129, 16)), 32),
    (IpAddr::V4(Ipv4Addr::new(100, 100, 100, 200)), 32),
    (IpAddr::V6(Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0)), 32),
    (IpAddr::V6(Ipv6Addr::new(0xfd20, 0xce, 0, 0, 0, 0, 0, 0x254)), 128),
];

/// The node's configuration of the external network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct External {
    /// Whether the pod leaves only by a second NIC, one that does not lead to the node.
    pub second: bool,
    /// Prefixes that stay in the tunnel: pods, services, nodes.
    pub cluster: Vec<Prefix>,
    /// The node's own addresses, which stay in the tunnel as well. The one towards the VM comes first.
    pub nodes: Vec<IpAddr>,
    /// Prefixes that are reachable although they are link-local or the VM's own network.
    pub allow: Vec<Prefix>,
    /// The pod's addresses; the source address of external traffic comes first.
    pub pod: Vec<IpAddr>,
    /// Networks of the pod's addresses and non-default routes. Packets to them never leave by the VM.
    pub inside: Vec<Prefix>,
}

impl External {
    /// Returns why a family cannot leave, as text.
    pub fn lacks(&self) -> &'static str {
        if self.second {
            "the VM has no second NIC that is up and has an address and a gateway for it"
        } else {
            "the VM has no default route for it"
        }
    }

    /// Returns the prefixes that the pod never reaches by the VM's own network. `uplinks` are the VM's own networks.
    pub fn denied(&self, uplinks: impl IntoIterator<Item = Prefix>) -> Vec<Prefix> {
        let whole = |address: &IpAddr| (*address, super::link::bits(*address));
        let mut all: Vec<Prefix> = CLOUDS_OWN.to_vec();
        all.extend(self.nodes.iter().map(whole));
        all.extend(self.cluster.iter().chain(&self.inside));
        all.extend(uplinks);
        all.sort_unstable();
        all.dedup();
        all
    }
}

/// Reads the external network from the plan; `None` = all traffic takes the tunnel.
pub fn read(plan: &NetworkPlan) -> Result<Option<External>, Error> {
    let Some(wire) = plan.external.as_ref() else { return Ok(None) };
    let second = match wire.way.as_str() {
        "" | "tunnel" => return Ok(None),
        "vm" => false,
        "second-nic" => true,
        other => return Err(Error::Plan(format!("external network by {other:?} is unknown to this guest"))),
    };
    let prefixes = |what: &str, texts: &[String]| {
        if texts.len() > MOST {
            return Err(Error::Plan(format!("{} {what}; at most {MOST} are taken", texts.len())));
        }
        texts.iter().map(|text| prefix(what, text)).collect::<Result<Vec<_>, _>>()
    };
    let nodes = prefixes("node addresses", &wire.node_addresses)?;
    let mut pod = Vec::new();
    let mut inside = Vec::new();
    for interface in &plan.interfaces {
        for address in &interface.addresses {
            let (ip, bits) = prefix("address", &address.prefix)?;
            if address.scope == 0 {
                pod.push(ip);
            }
            if bits > 0 {
                inside.push(super::underlay::network(ip, bits));
            }
        }
        for route in interface.routes.iter().filter(|route| !is_default(route)) {
            let (ip, bits) = prefix("route", &route.destination)?;
            inside.push(super::underlay::network(ip, bits));
        }
    }
    if pod.len() > MOST || inside.len() > MOST * 16 {
        return Err(Error::Plan(format!(
            "{} addresses and {} routes of the pod are too many for an external network by the VM",
            pod.len(),
            inside.len()
        )));
    }
    inside.sort_unstable();
    inside.dedup();
    Ok(Some(External {
        second,
        cluster: prefixes("cluster CIDRs", &wire.cluster_cidrs)?,
        nodes: nodes.into_iter().map(|(address, _)| address).collect(),
        allow: prefixes("allowed prefixes", &wire.allow)?,
        pod,
        inside,
    }))
}

/// Removes the default routes of the families that leave by the VM from the plan. Routes to the cluster's prefixes and
/// the node's addresses take their place, each with the same gateway. A covered prefix gets no new route.
pub fn split(plan: &mut NetworkPlan, external: &External, leaves: impl Fn(bool) -> bool) {
    let known: Vec<Prefix> = plan
        .interfaces
        .iter()
        .flat_map(|interface| &interface.routes)
        .chain(&plan.routes)
        .filter(|route| !is_default(route) && is_main(route))
        .filter_map(|route| prefix("route", &route.destination).ok())
        .collect();
    let bits = |address: &IpAddr| super::link::bits(*address);
    let instead: Vec<Prefix> = external
        .cluster
        .iter()
        .copied()
        .chain(external.nodes.iter().map(|address| (*address, bits(address))))
        .filter(|wanted| !known.iter().any(|route| covers(*route, *wanted)))
        .collect();
    let lists = plan.interfaces.iter_mut().map(|interface| &mut interface.routes).chain([&mut plan.routes]);
    for routes in lists {
        let (defaults, mut stay): (Vec<Route>, Vec<Route>) =
            std::mem::take(routes).into_iter().partition(|route| {
                is_default(route) && is_main(route) && leaves(route.destination.contains(':'))
            });
        for default in defaults {
            let v6 = default.destination.contains(':');
            for (address, bits) in instead.iter().filter(|(address, _)| address.is_ipv6() == v6) {
                let mut route = default.clone();
                route.destination = format!("{address}/{bits}");
                if !stay.contains(&route) {
                    stay.push(route);
                }
            }
        }
        *routes = stay;
    }
}

fn is_default(route: &Route) -> bool {
    route.destination.ends_with("/0")
}

/// Returns whether it is a unicast route of the main table. Other tables are the CNI's.
fn is_main(route: &Route) -> bool {
    route.table == MAIN_TABLE && matches!(route.kind, 0 | UNICAST)
}

pub(crate) fn covers(outside: Prefix, inner: Prefix) -> bool {
    outside.0.is_ipv6() == inner.0.is_ipv6()
        && outside.1 <= inner.1
        && super::underlay::network(inner.0, outside.1) == super::underlay::network(outside.0, outside.1)
}

/// Parses a prefix, or an address alone.
fn prefix(what: &str, text: &str) -> Result<Prefix, Error> {
    match text.parse::<IpAddr>() {
        Ok(address) => Ok((address, super::link::bits(address))),
        Err(_) => super::plan::prefix(what, text),
    }
}

#[cfg(test)]
mod tests {
    use peerpod_proto::guest as wire;

    use super::*;

    fn route(destination: &str, gateway: &str, table: u32) -> Route {
        Route { destination: destination.into(), gateway: gateway.into(), table, ..Default::default() }
    }

    fn plan() -> NetworkPlan {
        let address = |prefix: &str| wire::Address { prefix: prefix.into(), ..Default::default() };
        let interface = wire::Interface {
            addresses: vec![address("10.244.1.7/24"), address("fd10::7/64")],
            routes: vec![
                route("0.0.0.0/0", "10.244.1.1", 254),
                route("10.244.1.0/24", "", 254),
                route("10.96.0.0/12", "10.244.1.1", 254),
                route("0.0.0.0/0", "10.244.1.9", 100),
                route("::/0", "fd10::1", 254),
            ],
            ..Default::default()
        };
        let external = wire::External {
            way: "vm".into(),
            cluster_cidrs: ["10.244.0.0/16", "10.96.0.0/16", "fd10::/48"].map(str::to_owned).into(),
            node_addresses: ["192.168.0.1", "10.244.1.1"].map(str::to_owned).into(),
            allow: vec!["169.254.20.10".into()],
            ..Default::default()
        };
        NetworkPlan {
            version: 1,
            interfaces: vec![interface],
            external: Some(external).into(),
            ..Default::default()
        }
    }

    fn routes(plan: &NetworkPlan) -> Vec<String> {
        plan.interfaces[0]
            .routes
            .iter()
            .map(|r| format!("{} via {} table {}", r.destination, r.gateway, r.table))
            .collect()
    }

    #[test]
    fn default_routes_use_the_vm_and_cluster_routes_keep_their_gateway() {
        let mut plan = plan();
        let external = read(&plan).unwrap().unwrap();
        split(&mut plan, &external, |_| true);
        assert_eq!(
            routes(&plan),
            [
                "10.244.1.0/24 via  table 254",
                "10.96.0.0/12 via 10.244.1.1 table 254",
                "0.0.0.0/0 via 10.244.1.9 table 100",
                "10.244.0.0/16 via 10.244.1.1 table 254",
                "192.168.0.1/32 via 10.244.1.1 table 254",
                "fd10::/48 via fd10::1 table 254",
            ],
            "covered destinations (services, the gateway itself) have their routes already"
        );
        let before = plan.clone();
        split(&mut plan, &external, |_| true);
        assert_eq!(plan, before, "again it changes nothing");
    }

    #[test]
    fn a_family_without_egress_by_the_vm_stays_in_the_tunnel() {
        let mut plan = plan();
        let external = read(&plan).unwrap().unwrap();
        split(&mut plan, &external, |v6| !v6);
        let routes = routes(&plan);
        assert!(routes.contains(&"::/0 via fd10::1 table 254".to_owned()), "{routes:?}");
        assert!(!routes.contains(&"fd10::/48 via fd10::1 table 254".to_owned()), "{routes:?}");
        assert!(!routes.contains(&"0.0.0.0/0 via 10.244.1.1 table 254".to_owned()), "{routes:?}");
    }

    #[test]
    fn metadata_nodes_the_cluster_and_the_vms_network_are_denied() {
        let external = read(&plan()).unwrap().unwrap();
        let uplink = ("10.9.0.0".parse().unwrap(), 16);
        let denied = external.denied([uplink]);
        for (what, is) in [
            ("169.254.169.254", true),
            ("fd00:ec2::254", true),
            ("168.63.129.16", true),
            ("192.168.0.1", true),
            ("10.244.7.7", true),
            ("10.96.0.10", true),
            ("10.9.3.4", true),
            ("fd10::99", true),
            ("192.168.0.2", false),
            ("203.0.113.7", false),
            ("2001:db8::1", false),
        ] {
            let address: IpAddr = what.parse().unwrap();
            let whole = (address, crate::link::bits(address));
            assert_eq!(denied.iter().any(|prefix| covers(*prefix, whole)), is, "{what}");
        }
    }

    #[test]
    fn no_external_equals_the_tunnel_and_bad_values_are_named() {
        let mut plan = plan();
        plan.external.as_mut().unwrap().way = "tunnel".into();
        assert_eq!(read(&plan).unwrap(), None);
        for (way, second) in [("vm", false), ("second-nic", true)] {
            plan.external.as_mut().unwrap().way = way.into();
            assert_eq!(read(&plan).unwrap().unwrap().second, second);
        }
        plan.external = None.into();
        assert_eq!(read(&plan).unwrap(), None);
        type Change = fn(&mut wire::External);
        let cases: [(Change, &str); 4] = [
            (|e| e.way = "moon".into(), "\"moon\""),
            (|e| e.cluster_cidrs[0] = "10.0.0.0/33".into(), "10.0.0.0/33"),
            (|e| e.allow[0] = "x".into(), "\"x\""),
            (|e| e.allow = vec!["10.0.0.1".into(); 65], "65"),
        ];
        for (change, named) in cases {
            let mut plan = self::plan();
            change(plan.external.as_mut().unwrap());
            let text = read(&plan).unwrap_err().to_string();
            assert!(text.contains(named), "{text}");
        }
    }
}
