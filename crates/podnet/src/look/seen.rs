//! What a pod's network looks like, as plain data. Goes into the ledger, so what older versions wrote is still read.

use std::net::{IpAddr, Ipv4Addr};

use serde::{Deserialize, Serialize};

/// rtnetlink's number of the main table.
pub const TABLE_MAIN: u32 = 254;
/// rtnetlink's number of the table that the kernel fills itself.
pub const TABLE_LOCAL: u32 = 255;
/// rtnetlink's type of an ordinary route.
pub const UNICAST: u8 = 1;

/// What a pod's network looks like.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Stored")]
pub struct Seen {
    /// The pod's interfaces: the one with the best default route first (else the first with an address), the others in
    /// the order of their indexes. At least one.
    pub interfaces: Vec<Interface>,
    /// Routes that are not of one interface: blackhole and the like, several next hops, through `lo`.
    pub routes: Vec<Route>,
    /// Policy rules besides the kernel's own, in their order.
    pub rules: Vec<Rule>,
    /// The namespace's sysctls where they are not as in a new one.
    pub sysctls: Vec<Sysctl>,
    /// `lo`'s addresses besides 127.0.0.1/8 and ::1/128.
    pub loopback: Vec<Address>,
    /// What the VM will not have, in words; usually empty.
    pub left_out: Vec<String>,
}

impl Seen {
    /// The pod's primary interface.
    pub fn primary(&self) -> &Interface {
        static NONE: Interface = Interface::none();
        // Neither `look` nor the ledger gives one without interfaces.
        self.interfaces.first().unwrap_or(&NONE)
    }
}

/// As the ledger has it: version 1 had one `interface`.
#[derive(Deserialize)]
struct Stored {
    interface: Option<Interface>,
    #[serde(default)]
    interfaces: Vec<Interface>,
    #[serde(default)]
    routes: Vec<Route>,
    #[serde(default)]
    rules: Vec<Rule>,
    #[serde(default)]
    sysctls: Vec<Sysctl>,
    #[serde(default)]
    loopback: Vec<Address>,
    #[serde(default)]
    left_out: Vec<String>,
}

impl TryFrom<Stored> for Seen {
    type Error = &'static str;

    fn try_from(stored: Stored) -> Result<Seen, &'static str> {
        let mut interfaces = stored.interfaces;
        interfaces.extend(stored.interface.map(|mut interface| {
            // It did not say, and its guest took the network's last one.
            interface.addresses.iter_mut().for_each(|a| a.broadcast = usual_broadcast(a.address, a.prefix));
            interface
        }));
        if interfaces.is_empty() {
            return Err("what was seen of the pod's network has no interface");
        }
        let Stored { routes, rules, sysctls, loopback, left_out, .. } = stored;
        Ok(Seen { interfaces, routes, rules, sysctls, loopback, left_out })
    }
}

/// One interface of the pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
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
    #[serde(default)]
    pub tx_queue_len: Option<u32>,
    /// It does not ask for neighbours.
    #[serde(default)]
    pub no_arp: bool,
    /// It takes every frame.
    #[serde(default)]
    pub promiscuous: bool,
    /// It takes every multicast frame.
    #[serde(default)]
    pub all_multicast: bool,
    /// It is not up.
    #[serde(default)]
    pub down: bool,
    /// Its addresses, in the kernel's order.
    pub addresses: Vec<Address>,
    /// The routes through it alone, of all tables, in the kernel's order.
    pub routes: Vec<Route>,
    /// What was written down for good about its neighbours.
    pub neighbours: Vec<Neighbour>,
    /// Its sysctls where they are not as a new interface's; names without the interface: `ipv4/rp_filter`.
    #[serde(default)]
    pub sysctls: Vec<Sysctl>,
}

impl Interface {
    const fn none() -> Interface {
        Interface {
            name: String::new(),
            index: 0,
            mac: String::new(),
            mtu: 0,
            tx_queue_len: None,
            no_arp: false,
            promiscuous: false,
            all_multicast: false,
            down: false,
            addresses: Vec::new(),
            routes: Vec::new(),
            neighbours: Vec::new(),
            sysctls: Vec::new(),
        }
    }

    /// Whether it has an IPv6 address.
    pub fn has_v6(&self) -> bool {
        self.addresses.iter().any(|a| a.address.is_ipv6())
    }
}

impl Default for Interface {
    fn default() -> Interface {
        Interface::none()
    }
}

/// An address with its prefix length.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Address {
    /// The address.
    pub address: IpAddr,
    /// Bits of the network.
    pub prefix: u8,
    /// rtnetlink's scope: 0 universe, 200 site, 253 link, 254 host.
    pub scope: u8,
    /// The other end's address, where it is a point-to-point one.
    #[serde(default)]
    pub peer: Option<IpAddr>,
    /// Its broadcast address.
    #[serde(default)]
    pub broadcast: Option<Ipv4Addr>,
    /// Its label, where that is not the interface's name.
    #[serde(default)]
    pub label: Option<String>,
    /// How many seconds it was still valid when it was seen; `None` = for ever.
    #[serde(default)]
    pub valid: Option<u32>,
    /// How many seconds it was still preferred; `None` = for ever, 0 = deprecated.
    #[serde(default)]
    pub preferred: Option<u32>,
    /// Who put it there: `IFAPROT_*`, 0 = not said.
    #[serde(default)]
    pub protocol: u8,
    /// `IFA_F_HOMEADDRESS` and `IFA_F_MCAUTOJOIN`, as rtnetlink has them.
    #[serde(default)]
    pub flags: u32,
}

impl Address {
    /// An address without anything special.
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

    /// Whether it is the same but for the time it has left.
    pub fn is_same(&self, other: &Address) -> bool {
        let timeless = |a: &Address| Address {
            valid: a.valid.map(|_| 0),
            preferred: a.preferred.map(|left| left.min(1)),
            ..a.clone()
        };
        timeless(self) == timeless(other)
    }
}

/// The broadcast address that an IPv4 network has unless somebody says otherwise.
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
    /// Bits of the destination.
    pub prefix: u8,
    /// Next hop; may be IPv6 for an IPv4 destination.
    pub gateway: Option<IpAddr>,
    /// Preferred source address.
    pub source: Option<IpAddr>,
    /// Priority; less is better.
    pub metric: u32,
    /// rtnetlink's protocol number (2 kernel, 3 boot, 4 static ...).
    pub protocol: u8,
    /// rtnetlink's scope.
    pub scope: u8,
    /// The gateway need not be in a connected network.
    pub onlink: bool,
    /// Path MTU of the route; 0 = the interface's.
    pub mtu: u32,
    /// rtnetlink's table number.
    #[serde(default = "main_table")]
    pub table: u32,
    /// rtnetlink's type: 1 unicast, 2 local, 6 blackhole, 7 unreachable, 8 prohibit, 9 throw.
    #[serde(default = "unicast")]
    pub kind: u8,
    /// Only for packets of this type of service; 0 = all.
    #[serde(default)]
    pub tos: u8,
    /// The segment size to announce; 0 = from the MTU.
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
    /// How many seconds it was still valid when it was seen; `None` = for ever.
    #[serde(default)]
    pub expires: Option<u32>,
}

fn main_table() -> u32 {
    TABLE_MAIN
}

fn unicast() -> u8 {
    UNICAST
}

impl Route {
    /// An ordinary route of the main table, by rtnetlink's protocol "boot" as `ip route add` makes it.
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
            table: TABLE_MAIN,
            kind: UNICAST,
            tos: 0,
            advmss: 0,
            hops: Vec::new(),
            metrics: Vec::new(),
            preference: 0,
            expires: None,
        }
    }

    /// Whether it is the same but for the time it has left.
    pub fn is_same(&self, other: &Route) -> bool {
        let timeless = |r: &Route| Route { expires: r.expires.map(|_| 0), ..r.clone() };
        timeless(self) == timeless(other)
    }

    /// Whether it is for everything its table is asked for.
    pub fn is_default(&self) -> bool {
        self.prefix == 0 && self.kind == UNICAST
    }
}

/// One of a route's next hops.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Hop {
    /// The gateway.
    pub gateway: Option<IpAddr>,
    /// The interface's name.
    pub interface: String,
    /// How much of the traffic it gets, relative to the others; 1 and up.
    pub weight: u16,
    /// The gateway need not be in a connected network.
    pub onlink: bool,
}

/// A neighbour that somebody wrote down for good (no ARP).
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Neighbour {
    /// Its address.
    pub address: IpAddr,
    /// Its MAC address, `aa:bb:cc:dd:ee:ff`; empty with `proxy`.
    pub mac: String,
    /// State "noarp" instead of "permanent".
    #[serde(default)]
    pub no_arp: bool,
    /// Not a neighbour, but an address to answer for.
    #[serde(default)]
    pub proxy: bool,
    /// `NTF_ROUTER` and `NTF_EXT_LEARNED`, as rtnetlink has them.
    #[serde(default)]
    pub flags: u8,
    /// Who put it there: a route's protocol number, 0 = not said.
    #[serde(default)]
    pub protocol: u8,
}

impl Neighbour {
    /// A permanent one.
    pub fn new(address: IpAddr, mac: String) -> Neighbour {
        Neighbour { address, mac, no_arp: false, proxy: false, flags: 0, protocol: 0 }
    }
}

/// An address with the bits that count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Prefix {
    /// The address.
    pub address: IpAddr,
    /// How many bits of it.
    pub length: u8,
}

/// A rule of policy routing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct Rule {
    /// For IPv6, else IPv4.
    pub v6: bool,
    /// Less is asked first.
    pub priority: u32,
    /// For packets that do *not* match.
    pub invert: bool,
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
    /// The bits of the mark that count; 0 = no mark is looked at.
    pub fwmask: u32,
    /// Type of service; 0 = any.
    pub tos: u8,
    /// The table to ask.
    pub table: u32,
    /// rtnetlink's action: 1 table, 2 goto, 3 nop, 6 blackhole, 7 unreachable, 8 prohibit.
    pub action: u8,
    /// Priority of the rule to go on with (action 2).
    pub goto: u32,
    /// Who put it there: a route's protocol number.
    pub protocol: u8,
    /// Found routes of no more bits than this do not count.
    pub suppress_prefix_length: Option<u32>,
    /// Found routes through interfaces of this group do not count.
    pub suppress_group: Option<u32>,
    /// Users, first and last.
    pub uids: Option<(u32, u32)>,
    /// IP protocol; 0 = any.
    pub ip_protocol: u8,
    /// Source ports, first and last.
    pub source_ports: Option<(u16, u16)>,
    /// Destination ports, first and last.
    pub destination_ports: Option<(u16, u16)>,
}

/// A kernel setting of the pod's namespace.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Sysctl {
    /// Its path below `/proc/sys/net`.
    pub name: String,
    /// Its value, one blank between several numbers.
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
        let seen: Seen = serde_json::from_str(old).unwrap();
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
        let again: Seen = serde_json::from_str(&serde_json::to_string(&seen).unwrap()).unwrap();
        assert_eq!(again, seen);
    }

    #[test]
    fn a_record_without_an_interface_is_refused() {
        let error = serde_json::from_str::<Seen>(r#"{"interfaces":[]}"#).unwrap_err();
        assert!(error.to_string().contains("no interface"), "{error}");
    }

    #[test]
    fn the_time_that_is_left_makes_no_other_address() {
        let address =
            Address { valid: Some(60), preferred: Some(30), ..Address::new([10, 0, 0, 1].into(), 8, 0) };
        assert!(address.is_same(&Address { valid: Some(9), preferred: Some(3), ..address.clone() }));
        assert!(!address.is_same(&Address { valid: None, ..address.clone() }));
        assert!(!address.is_same(&Address { preferred: Some(0), ..address.clone() }), "it is deprecated");
        assert!(!address.is_same(&Address { prefix: 9, ..address.clone() }));
    }
}
