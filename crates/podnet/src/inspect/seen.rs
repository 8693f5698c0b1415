//! State of a pod's network as plain data. The ledger stores it, so records of older versions are still read.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::LazyLock;

use serde::{Deserialize, Serialize};

/// rtnetlink's number of the main table.
pub const TABLE_MAIN: u32 = 254;
/// rtnetlink's number of the table that the kernel fills itself.
pub const TABLE_LOCAL: u32 = 255;
/// rtnetlink's type of an ordinary route.
pub const UNICAST: u8 = 1;

/// State of a pod's network.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Stored")]
pub struct PodNetworkState {
    /// The pod's interfaces: the one with the best default route (or an address) first, then by index. At least one.
    pub interfaces: Vec<Interface>,
    /// Routes that do not belong to one interface: blackhole and the like, several next hops, through `lo`.
    pub routes: Vec<Route>,
    /// Policy rules besides the kernel's own, in their order.
    pub rules: Vec<Rule>,
    /// The namespace's sysctls that differ from a new one's.
    pub sysctls: Vec<Sysctl>,
    /// `lo`'s addresses besides 127.0.0.1/8 and ::1/128.
    pub loopback: Vec<Address>,
    /// Objects that the VM will not have, as text; usually empty.
    pub left_out: Vec<String>,
}

impl PodNetworkState {
    /// Returns the pod's primary interface.
    pub fn primary(&self) -> &Interface {
        static NONE: LazyLock<Interface> = LazyLock::new(Interface::default);
        // Neither `inspect` nor the ledger returns a state without interfaces.
        self.interfaces.first().unwrap_or(&NONE)
    }
}

/// Form in the ledger: version 1 had one `interface`.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Stored {
    interface: Option<Interface>,
    interfaces: Vec<Interface>,
    routes: Vec<Route>,
    rules: Vec<Rule>,
    sysctls: Vec<Sysctl>,
    loopback: Vec<Address>,
    left_out: Vec<String>,
}

impl TryFrom<Stored> for PodNetworkState {
    type Error = &'static str;

    fn try_from(stored: Stored) -> Result<PodNetworkState, &'static str> {
        let mut interfaces = stored.interfaces;
        interfaces.extend(stored.interface.map(|mut interface| {
            // Version 1 did not record the broadcast address, and its guest took the network's last address.
            interface.addresses.iter_mut().for_each(|a| a.broadcast = usual_broadcast(a.address, a.prefix));
            interface
        }));
        if interfaces.is_empty() {
            return Err("the record of the pod's network has no interface");
        }
        let Stored { routes, rules, sysctls, loopback, left_out, .. } = stored;
        Ok(PodNetworkState { interfaces, routes, rules, sysctls, loopback, left_out })
    }
}

/// One interface of the pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interface {
    /// Its name, `eth0` as a rule.
    pub name: String,
    /// Its index in the pod's namespace.
    pub index: u32,
    /// Its MAC address, `aa:bb:cc:dd:ee:ff`.
    pub mac: String,
    /// Its MTU in bytes, or the smallest of its default routes' where that is less.
    pub mtu: u32,
    /// Its transmit queue's length, in packets; `None` = not known (an old record).
    pub tx_queue_len: Option<u32>,
    /// Whether it does no ARP.
    #[serde(default)]
    pub no_arp: bool,
    /// Whether it receives every frame.
    #[serde(default)]
    pub promiscuous: bool,
    /// Whether it receives every multicast frame.
    #[serde(default)]
    pub all_multicast: bool,
    /// Whether it is down.
    #[serde(default)]
    pub down: bool,
    /// Its addresses, in the kernel's order.
    pub addresses: Vec<Address>,
    /// The routes through it alone, of all tables, in the kernel's order.
    pub routes: Vec<Route>,
    /// Its static neighbour entries.
    pub neighbours: Vec<Neighbour>,
    /// Its sysctls that differ from a new interface's; names without the interface: `ipv4/rp_filter`.
    #[serde(default)]
    pub sysctls: Vec<Sysctl>,
}

impl Interface {
    /// Returns whether it has an IPv6 address.
    pub fn has_v6(&self) -> bool {
        self.addresses.iter().any(|a| a.address.is_ipv6())
    }
}

/// Address with its prefix length.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Address {
    /// The address.
    pub address: IpAddr,
    /// Prefix length, in bits.
    pub prefix: u8,
    /// rtnetlink's scope: 0 universe, 200 site, 253 link, 254 host.
    pub scope: u8,
    /// The peer's address, on a point-to-point interface.
    pub peer: Option<IpAddr>,
    /// Its broadcast address.
    pub broadcast: Option<Ipv4Addr>,
    /// Its label, where it differs from the interface's name.
    pub label: Option<String>,
    /// Valid lifetime that was left at inspection, in seconds; `None` = for ever.
    pub valid: Option<u32>,
    /// Preferred lifetime that was left, in seconds; `None` = for ever, 0 = deprecated.
    pub preferred: Option<u32>,
    /// Origin of the address: `IFAPROT_*`, 0 = not given.
    #[serde(default)]
    pub protocol: u8,
    /// `IFA_F_HOMEADDRESS` and `IFA_F_MCAUTOJOIN`, as rtnetlink has them.
    #[serde(default)]
    pub flags: u32,
}

impl Address {
    /// Returns an address without optional attributes.
    pub fn new(address: IpAddr, prefix: u8, scope: u8) -> Address {
        Address {
            address,
            prefix,
            scope,
            peer: None,
            broadcast: None,
            label: None,
            valid: None,
            preferred: None,
            protocol: 0,
            flags: 0,
        }
    }

    /// Returns whether both are equal except for the lifetimes left.
    pub fn is_same(&self, other: &Address) -> bool {
        let timeless = |a: &Address| Address {
            valid: a.valid.map(|_| 0),
            preferred: a.preferred.map(|left| left.min(1)),
            ..a.clone()
        };
        timeless(self) == timeless(other)
    }
}

/// Returns the default broadcast address of an IPv4 network.
pub(crate) fn usual_broadcast(address: IpAddr, prefix: u8) -> Option<Ipv4Addr> {
    match address {
        IpAddr::V4(address) if prefix < 31 => {
            let host_bits = u32::MAX.checked_shr(prefix.into()).unwrap_or(0);
            Some(Ipv4Addr::from(u32::from(address) | host_bits))
        }
        _ => None,
    }
}

/// A route.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Route {
    /// Destination; `0.0.0.0` or `::` with prefix 0 for the default.
    pub destination: IpAddr,
    /// Prefix length, in bits.
    pub prefix: u8,
    /// Next hop; may be IPv6 for an IPv4 destination.
    pub gateway: Option<IpAddr>,
    /// Preferred source address.
    pub source: Option<IpAddr>,
    /// Priority; lower is better.
    pub metric: u32,
    /// rtnetlink's protocol number (2 kernel, 3 boot, 4 static ...).
    pub protocol: u8,
    /// rtnetlink's scope.
    pub scope: u8,
    /// Whether the gateway need not be in a connected network.
    pub onlink: bool,
    /// Path MTU of the route, in bytes; 0 = the interface's MTU.
    pub mtu: u32,
    /// Its place in the kernel's forwarding tables.
    #[serde(flatten)]
    pub fib: FibPlace,
    /// TCP segment size to announce, in bytes; 0 = derived from the MTU.
    #[serde(default)]
    pub advmss: u32,
    /// Several next hops; or one, through an interface that is not the pod's (`lo`).
    #[serde(default)]
    pub hops: Vec<Hop>,
    /// The other metrics: `RTAX_*` number and value.
    #[serde(default)]
    pub metrics: Vec<(u16, u32)>,
    /// An IPv6 router's preference: 0 medium, 1 high, 3 low.
    #[serde(default)]
    pub preference: u8,
    /// Lifetime that was left at inspection, in seconds; `None` = for ever.
    pub expires: Option<u32>,
}

/// Place of a route in the kernel's forwarding tables (FIB), besides destination and priority.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct FibPlace {
    /// rtnetlink's table number.
    #[serde(default = "main_table")]
    pub table: u32,
    /// rtnetlink's type: 1 unicast, 2 local, 6 blackhole, 7 unreachable, 8 prohibit, 9 throw.
    #[serde(default = "unicast")]
    pub kind: u8,
    /// Type of service of matching packets; 0 = all.
    #[serde(default)]
    pub tos: u8,
}

impl Default for FibPlace {
    /// Returns the place of a unicast route in the main table.
    fn default() -> FibPlace {
        FibPlace { table: TABLE_MAIN, kind: UNICAST, tos: 0 }
    }
}

fn main_table() -> u32 {
    TABLE_MAIN
}

fn unicast() -> u8 {
    UNICAST
}

impl Route {
    /// Returns an ordinary route of the main table, with rtnetlink's protocol "boot", as `ip route add` makes it.
    pub fn new(destination: IpAddr, prefix: u8) -> Route {
        Route {
            destination,
            prefix,
            gateway: None,
            source: None,
            metric: 0,
            protocol: 3,
            scope: 0,
            onlink: false,
            mtu: 0,
            fib: FibPlace::default(),
            advmss: 0,
            hops: Vec::new(),
            metrics: Vec::new(),
            preference: 0,
            expires: None,
        }
    }

    /// Returns whether both are equal except for the lifetimes left.
    pub fn is_same(&self, other: &Route) -> bool {
        let timeless = |r: &Route| Route { expires: r.expires.map(|_| 0), ..r.clone() };
        timeless(self) == timeless(other)
    }

    /// Returns whether it is a unicast default route.
    pub fn is_default(&self) -> bool {
        self.prefix == 0 && self.fib.kind == UNICAST
    }
}

/// Next hop of a route.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Hop {
    /// The gateway.
    pub gateway: Option<IpAddr>,
    /// The interface's name.
    pub interface: String,
    /// Share of the traffic, relative to the other hops; 1 and up.
    pub weight: u16,
    /// Whether the gateway need not be in a connected network.
    pub onlink: bool,
}

/// Static neighbour entry (no ARP).
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Neighbour {
    /// Its address.
    pub address: IpAddr,
    /// Its MAC address, `aa:bb:cc:dd:ee:ff`; empty with `proxy`.
    pub mac: String,
    /// Whether the state is "noarp" instead of "permanent".
    #[serde(default)]
    pub no_arp: bool,
    /// Whether it is a proxy entry: an address for which the interface answers.
    #[serde(default)]
    pub proxy: bool,
    /// `NTF_ROUTER` and `NTF_EXT_LEARNED`, as rtnetlink has them.
    #[serde(default)]
    pub flags: u8,
    /// Origin of the entry: a route's protocol number, 0 = not given.
    #[serde(default)]
    pub protocol: u8,
}

impl Neighbour {
    /// Returns a permanent entry.
    pub fn new(address: IpAddr, mac: String) -> Neighbour {
        Neighbour { address, mac, no_arp: false, proxy: false, flags: 0, protocol: 0 }
    }
}

/// Address with a prefix length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Prefix {
    /// The address.
    pub address: IpAddr,
    /// Number of significant bits.
    pub length: u8,
}

/// Policy rule.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct Rule {
    /// Whether it is for IPv6, else IPv4.
    pub v6: bool,
    /// Priority; the kernel evaluates lower ones first.
    pub priority: u32,
    /// Whether it applies to packets that do *not* match.
    pub invert: bool,
    /// Addresses, interfaces, mark and type of service of matching packets.
    #[serde(flatten)]
    pub selector: RuleSelector,
    /// The table to look up.
    pub table: u32,
    /// rtnetlink's action: 1 table, 2 goto, 3 nop, 6 blackhole, 7 unreachable, 8 prohibit.
    pub action: u8,
    /// Priority of the rule to go on with (action 2).
    pub goto: u32,
    /// Origin of the rule: a route's protocol number.
    pub protocol: u8,
    /// Routes found with at most this prefix length do not count.
    pub suppress_prefix_length: Option<u32>,
    /// Routes found through interfaces of this group do not count.
    pub suppress_group: Option<u32>,
    /// Sender, protocol and ports of matching packets.
    #[serde(flatten)]
    pub flow: RuleFlow,
}

/// Addresses, interfaces, mark and type of service of the packets that a policy rule matches.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct RuleSelector {
    /// Source addresses.
    pub from: Option<Prefix>,
    /// Destination addresses.
    pub to: Option<Prefix>,
    /// Incoming interface's name; empty = any.
    pub iif: String,
    /// Outgoing interface's name; empty = any.
    pub oif: String,
    /// Firewall mark.
    pub fwmark: u32,
    /// Mask of the significant bits of the mark; 0 = the mark is ignored.
    pub fwmask: u32,
    /// Type of service; 0 = any.
    pub tos: u8,
}

/// Sender, protocol and ports of the packets that a policy rule matches.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct RuleFlow {
    /// User ids, first and last.
    pub uids: Option<(u32, u32)>,
    /// IP protocol; 0 = any.
    pub ip_protocol: u8,
    /// Source ports, first and last.
    pub source_ports: Option<(u16, u16)>,
    /// Destination ports, first and last.
    pub destination_ports: Option<(u16, u16)>,
}

/// Kernel setting of the pod's namespace.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Sysctl {
    /// Its path below `/proc/sys/net`.
    pub name: String,
    /// Its value; several numbers are separated by one blank.
    pub value: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_of_the_first_version_is_read() {
        let old = r#"{"interface":{"name":"eth0","index":2,"mac":"02:00:00:00:00:07","mtu":1450,
            "addresses":[{"address":"10.244.1.7","prefix":24,"scope":0}],
            "routes":[{"destination":"0.0.0.0","prefix":0,"gateway":"10.244.1.1","source":null,"metric":0,
                       "protocol":3,"scope":0,"onlink":false,"mtu":0}],
            "neighbours":[{"address":"169.254.1.1","mac":"ee:ee:ee:ee:ee:ee"}]},"left_out":["interface net1"]}"#;
        let seen: PodNetworkState = serde_json::from_str(old).unwrap();
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let expected = Interface {
            name: "eth0".to_owned(),
            index: 2,
            mac: "02:00:00:00:00:07".to_owned(),
            mtu: 1450,
            addresses: vec![Address {
                broadcast: Some([10, 244, 1, 255].into()),
                ..Address::new(ip("10.244.1.7"), 24, 0)
            }],
            routes: vec![Route { gateway: Some(ip("10.244.1.1")), ..Route::new(ip("0.0.0.0"), 0) }],
            neighbours: vec![Neighbour::new(ip("169.254.1.1"), "ee:ee:ee:ee:ee:ee".to_owned())],
            ..Interface::default()
        };
        assert_eq!(seen.interfaces, [expected]);
        assert_eq!(seen.left_out, ["interface net1"]);
        let again: PodNetworkState = serde_json::from_str(&serde_json::to_string(&seen).unwrap()).unwrap();
        assert_eq!(again, seen);
    }

    #[test]
    fn routes_and_rules_are_flat_in_the_ledger() {
        let (any4, length) = (IpAddr::from(Ipv4Addr::UNSPECIFIED), 0);
        let route = Route {
            fib: FibPlace { table: 7, kind: 6, tos: 8 },
            metrics: vec![(10, 4)],
            ..Route::new(any4, length)
        };
        let of_route = concat!(
            r#"{"destination":"0.0.0.0","prefix":0,"gateway":null,"source":null,"metric":0,"#,
            r#""protocol":3,"scope":0,"onlink":false,"mtu":0,"table":7,"kind":6,"tos":8,"#,
            r#""advmss":0,"hops":[],"metrics":[[10,4]],"preference":0,"expires":null}"#,
        );
        assert_eq!(serde_json::to_string(&route).unwrap(), of_route);
        assert_eq!(serde_json::from_str::<Route>(of_route).unwrap(), route);
        let rule = Rule {
            priority: 9,
            selector: RuleSelector {
                from: Some(Prefix { address: any4, length }),
                fwmark: 3,
                ..Default::default()
            },
            table: 7,
            flow: RuleFlow { source_ports: Some((1, 2)), ..RuleFlow::default() },
            ..Rule::default()
        };
        let of_rule = concat!(
            r#"{"v6":false,"priority":9,"invert":false,"from":{"address":"0.0.0.0","length":0},"to":null,"#,
            r#""iif":"","oif":"","fwmark":3,"fwmask":0,"tos":0,"#,
            r#""table":7,"action":0,"goto":0,"protocol":0,"#,
            r#""suppress_prefix_length":null,"suppress_group":null,"#,
            r#""uids":null,"ip_protocol":0,"source_ports":[1,2],"destination_ports":null}"#,
        );
        assert_eq!(serde_json::to_string(&rule).unwrap(), of_rule);
        assert_eq!(serde_json::from_str::<Rule>(of_rule).unwrap(), rule);
        assert_eq!(serde_json::from_str::<Rule>("{}").unwrap(), Rule::default());
    }

    #[test]
    fn a_record_without_an_interface_is_refused() {
        let error = serde_json::from_str::<PodNetworkState>(r#"{"interfaces":[]}"#).unwrap_err();
        assert!(error.to_string().contains("no interface"), "{error}");
    }

    #[test]
    fn a_remaining_lifetime_makes_no_difference_between_addresses() {
        let address =
            Address { valid: Some(60), preferred: Some(30), ..Address::new([10, 0, 0, 1].into(), 8, 0) };
        assert!(address.is_same(&Address { valid: Some(9), preferred: Some(3), ..address.clone() }));
        assert!(!address.is_same(&Address { valid: None, ..address.clone() }));
        assert!(!address.is_same(&Address { preferred: Some(0), ..address.clone() }), "it is deprecated");
        assert!(!address.is_same(&Address { prefix: 9, ..address.clone() }));
    }
}
