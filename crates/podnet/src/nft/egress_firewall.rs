//! Builds the egress firewall around the pod's way out by the VM's own network: one nftables table in the VM's own
//! namespace. It lets the pod's packets out and their answers in, rewrites their source to the VM's address, and drops
//! the rest.
//!
//! ```text
//! table inet peerpod-external {
//!   chain in      { hook input;    iifname DOOR drop }                         # nothing of the VM itself is reached
//!   chain forward { hook forward;  iifname DOOR  saddr of the pod  goto from   # packets of the pod only
//!                                  iifname DOOR  drop
//!                                  oifname DOOR  ct state established,related accept;  oifname DOOR drop
//!                                  nfproto FAMILY drop }                       # if forwarding is on for the pod only
//!   chain from    { daddr ALLOWED accept ...;  daddr DENIED drop ...;  oifname UPLINK accept;  drop }
//!   chain nat     { hook postrouting, srcnat;  saddr of the pod  oifname UPLINK  masquerade }
//! }
//! ```
//!
//! One transaction makes the whole table and replaces an existing one. Touches only its own table, in the namespace of
//! the given socket. Starts no nft process.

use std::net::IpAddr;

use netlink_packet_core::{DefaultNla, NLM_F_APPEND, NLM_F_CREATE};
use netlink_packet_netfilter::NetfilterMessage;
use netlink_packet_netfilter::nftables::{
    Bitwise, ChainAttribute, ChainMessage, Cmp, DataAttribute, Expressions, Hook, Immediate, InetHookNumber,
    Meta, MetaKey, NfTablesMessage, Operator, Register, RuleAttribute, RuleMessage, TableAttribute,
    TableMessage, Verdict, VerdictAttribute,
};
use nix::errno::Errno;

use super::parts::{Family, begin, end, equals, inet, load, verdict};
use super::{BASE_NETWORK, NF_ACCEPT, NF_DROP};
use crate::Error;
use crate::netlink::Client;

const TABLE: &str = "peerpod-external";
const PRIORITY_FILTER: i32 = 0;
const PRIORITY_SOURCE_NAT: i32 = 100;
const NFTA_CT_DREG: u16 = 1;
const NFTA_CT_KEY: u16 = 2;
const NFT_CT_STATE: u32 = 0;
/// ESTABLISHED (1 << 1) and RELATED (1 << 2) in the kernel's own byte order.
const KNOWN_STATES: u32 = 0b110;
/// Length of an interface's name in the kernel's comparison.
const NAME: usize = 16;

/// Address and prefix length.
pub type Prefix = (IpAddr, u8);

/// Configuration of the egress firewall.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EgressFirewall {
    /// Name of the VM's end of the veth pair.
    pub door: String,
    /// The pod's addresses.
    pub pod: Vec<IpAddr>,
    /// Names of the VM's devices that lead out.
    pub uplinks: Vec<String>,
    /// Prefixes that are reachable although they are denied.
    pub allow: Vec<Prefix>,
    /// Prefixes that are never reachable.
    pub deny: Vec<Prefix>,
    /// Whether all other packets are barred from forwarding: those of IPv4, those of IPv6.
    pub alone: (bool, bool),
}

type Rule = (u16, NetfilterMessage);

impl EgressFirewall {
    /// Makes the table and replaces an existing one.
    ///
    /// # Errors
    /// [`Error::Kernel`], also where the kernel has no nftables or no NAT.
    pub fn raise(&self, client: &mut Client) -> Result<(), Error> {
        // Deleting requires an existing table.
        let mut all = vec![(NLM_F_CREATE, table()), (0, delete()), (NLM_F_CREATE, table())];
        all.push(hooked("in", "filter", InetHookNumber::LocalIn, PRIORITY_FILTER));
        all.push(hooked("forward", "filter", InetHookNumber::Forward, PRIORITY_FILTER));
        all.push(hooked("nat", "nat", InetHookNumber::PostRouting, PRIORITY_SOURCE_NAT));
        all.push(chain(vec![ChainAttribute::Name("from".to_owned())]));
        all.push(rule("in", self.comes(vec![verdict(NF_DROP)])));
        all.extend(self.forward());
        all.extend(self.from());
        all.extend(self.nat());
        client
            .transaction(&begin(None), &all, &end())
            .map_err(Error::kernel(format!("make the nftables table {TABLE} for the pod's external network")))
    }

    fn forward(&self) -> Vec<Rule> {
        let mut all = Vec::new();
        for address in &self.pod {
            let mut what = source(*address);
            what.push(go_to("from"));
            all.push(rule("forward", self.comes(what)));
        }
        all.push(rule("forward", self.comes(vec![verdict(NF_DROP)])));
        let mut known = known_connection();
        known.push(verdict(NF_ACCEPT));
        all.push(rule("forward", self.leaves(known)));
        all.push(rule("forward", self.leaves(vec![verdict(NF_DROP)])));
        for (alone, family) in [(self.alone.0, Family::V4), (self.alone.1, Family::V6)] {
            if alone {
                let mut what = of_family(family);
                what.push(verdict(NF_DROP));
                all.push(rule("forward", what));
            }
        }
        all
    }

    fn from(&self) -> Vec<Rule> {
        let mut all = Vec::new();
        for (prefixes, code) in [(&self.allow, NF_ACCEPT), (&self.deny, NF_DROP)] {
            for prefix in prefixes {
                let mut what = destination(*prefix);
                what.push(verdict(code));
                all.push(rule("from", what));
            }
        }
        for uplink in &self.uplinks {
            let mut what = named(MetaKey::Oifname, uplink);
            what.push(verdict(NF_ACCEPT));
            all.push(rule("from", what));
        }
        all.push(rule("from", vec![verdict(NF_DROP)]));
        all
    }

    fn nat(&self) -> Vec<Rule> {
        let mut all = Vec::new();
        for address in &self.pod {
            for uplink in &self.uplinks {
                let mut what = source(*address);
                what.extend(named(MetaKey::Oifname, uplink));
                what.push(Expressions::Other { expression_type: "masq".to_owned(), attributes: Vec::new() });
                all.push(rule("nat", what));
            }
        }
        all
    }

    fn comes(&self, then: Vec<Expressions>) -> Vec<Expressions> {
        named(MetaKey::Iifname, &self.door).into_iter().chain(then).collect()
    }

    fn leaves(&self, then: Vec<Expressions>) -> Vec<Expressions> {
        named(MetaKey::Oifname, &self.door).into_iter().chain(then).collect()
    }
}

/// Removes the table. A missing table is no error.
///
/// # Errors
/// [`Error::Kernel`].
pub fn raze(client: &mut Client) -> Result<(), Error> {
    match client.transaction(&begin(None), &[(0, delete())], &end()) {
        Err(e) if e.errno() == Some(Errno::ENOENT) => Ok(()),
        other => other.map_err(Error::kernel(format!("remove the nftables table {TABLE}"))),
    }
}

fn table() -> NetfilterMessage {
    inet(NfTablesMessage::NewTable(TableMessage { attributes: vec![TableAttribute::Name(TABLE.to_owned())] }))
}

fn delete() -> NetfilterMessage {
    inet(NfTablesMessage::DeleteTable(TableMessage {
        attributes: vec![TableAttribute::Name(TABLE.to_owned())],
    }))
}

fn hooked(name: &str, kind: &str, hook: InetHookNumber, priority: i32) -> Rule {
    chain(vec![
        ChainAttribute::Name(name.to_owned()),
        ChainAttribute::Type(kind.to_owned()),
        ChainAttribute::Hook(vec![Hook::Number(hook.into()), Hook::Priority(priority as _)]),
        ChainAttribute::Policy(NF_ACCEPT),
    ])
}

fn chain(mut attributes: Vec<ChainAttribute>) -> Rule {
    attributes.insert(0, ChainAttribute::Table(TABLE.to_owned()));
    (NLM_F_CREATE, inet(NfTablesMessage::NewChain(ChainMessage { attributes })))
}

fn rule(chain: &str, what: Vec<Expressions>) -> Rule {
    let attributes = vec![
        RuleAttribute::Table(TABLE.to_owned()),
        RuleAttribute::Chain(chain.to_owned()),
        RuleAttribute::Expressions(what.into_iter().map(Into::into).collect()),
    ];
    (NLM_F_CREATE | NLM_F_APPEND, inet(NfTablesMessage::NewRule(RuleMessage { attributes })))
}

/// `iifname NAME` or `oifname NAME`
fn named(key: MetaKey, name: &str) -> Vec<Expressions> {
    let mut padded = name.as_bytes().to_vec();
    padded.resize(NAME, 0);
    vec![meta(key), equals(padded)]
}

fn meta(key: MetaKey) -> Expressions {
    Expressions::Meta(vec![Meta::Key(key), Meta::DestinationRegister(Register::Reg1)])
}

fn of_family(family: Family) -> Vec<Expressions> {
    vec![meta(MetaKey::Nfproto), equals(vec![family.number()])]
}

fn source(address: IpAddr) -> Vec<Expressions> {
    let family = family_of(address);
    let (offset, length) = family.source();
    let mut what = of_family(family);
    what.push(load(BASE_NETWORK, offset, length, Register::Reg1));
    what.push(equals(octets(address)));
    what
}

/// `daddr PREFIX`
fn destination((address, prefix): Prefix) -> Vec<Expressions> {
    let family = family_of(address);
    let (offset, length) = family.destination();
    let mask: Vec<u8> = (0..length)
        .map(|byte| {
            let bits = u32::from(prefix).saturating_sub(byte * 8).min(8);
            // The upper `bits` of a byte.
            0xff_u16.checked_shl(8 - bits).unwrap_or(0).to_be_bytes()[1]
        })
        .collect();
    let wanted = octets(address).iter().zip(&mask).map(|(a, m)| a & m).collect();
    let mut what = of_family(family);
    what.push(load(BASE_NETWORK, offset, length, Register::Reg1));
    what.push(masked(length, mask));
    what.push(equals(wanted));
    what
}

fn masked(length: u32, mask: Vec<u8>) -> Expressions {
    let nothing = vec![0; mask.len()];
    Expressions::Bitwise(vec![
        Bitwise::SourceRegister(Register::Reg1),
        Bitwise::DestinationRegister(Register::Reg1),
        Bitwise::Length(length),
        Bitwise::Mask(DataAttribute::Value(mask)),
        Bitwise::Xor(DataAttribute::Value(nothing)),
    ])
}

/// `ct state established,related`
fn known_connection() -> Vec<Expressions> {
    let state = Expressions::Other {
        expression_type: "ct".to_owned(),
        attributes: vec![
            DefaultNla::new(NFTA_CT_KEY, NFT_CT_STATE.to_be_bytes().to_vec()),
            DefaultNla::new(NFTA_CT_DREG, u32::from(Register::Reg1).to_be_bytes().to_vec()),
        ],
    };
    let is_known = Expressions::Cmp(vec![
        Cmp::SourceRegister(Register::Reg1),
        Cmp::Op(Operator::NotEqual),
        Cmp::Data(DataAttribute::Value(vec![0; 4])),
    ]);
    vec![state, masked(4, KNOWN_STATES.to_ne_bytes().to_vec()), is_known]
}

fn go_to(chain: &str) -> Expressions {
    Expressions::Immediate(vec![
        Immediate::DestinationRegister(Register::Verdict),
        Immediate::Data(DataAttribute::Verdict(vec![
            VerdictAttribute::Code(Verdict::Goto),
            VerdictAttribute::Chain(chain.to_owned()),
        ])),
    ])
}

fn family_of(address: IpAddr) -> Family {
    if address.is_ipv6() { Family::V6 } else { Family::V4 }
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(a) => a.octets().to_vec(),
        IpAddr::V6(a) => a.octets().to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netns::Netns;

    fn nft(netns: &Netns) -> String {
        let list = || std::process::Command::new("nft").args(["list", "ruleset"]).output().unwrap();
        String::from_utf8(netns.run(list).unwrap().stdout).unwrap()
    }

    #[test]
    fn the_table_matches_the_documented_one_after_every_setup() {
        let netns = Netns::scratch().unwrap();
        let mut client = netns.netfilter().unwrap();
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let wall = EgressFirewall {
            door: "pp-ext".to_owned(),
            pod: vec![ip("10.244.1.7"), ip("fd10::7")],
            uplinks: vec!["eth0".to_owned()],
            allow: vec![(ip("169.254.20.10"), 32)],
            deny: vec![(ip("169.254.0.0"), 16), (ip("fd00:ec2::"), 32), (ip("10.9.64.0"), 18)],
            alone: (true, false),
        };
        wall.raise(&mut client).unwrap();
        let once = nft(&netns);
        wall.raise(&mut client).unwrap();
        assert_eq!(nft(&netns), once);
        for line in [
            "iifname \"pp-ext\" drop",
            "iifname \"pp-ext\" ip saddr 10.244.1.7 goto from",
            "iifname \"pp-ext\" ip6 saddr fd10::7 goto from",
            "oifname \"pp-ext\" ct state established,related accept",
            "meta nfproto ipv4 drop",
            "ip daddr 169.254.20.10 accept",
            "ip daddr 169.254.0.0/16 drop",
            "ip6 daddr fd00:ec2::/32 drop",
            "ip daddr 10.9.64.0/18 drop",
            "oifname \"eth0\" accept",
            "ip saddr 10.244.1.7 oifname \"eth0\" masquerade",
            "ip6 saddr fd10::7 oifname \"eth0\" masquerade",
        ] {
            assert!(once.contains(line), "{line} in\n{once}");
        }
        assert!(!once.contains("meta nfproto ipv6 drop"), "{once}");
        raze(&mut client).unwrap();
        assert_eq!(nft(&netns), "");
        raze(&mut client).unwrap();
    }
}
