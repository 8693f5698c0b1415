//! Builds the egress firewall around the pod's way out by the VM's own network: one nftables table in the VM's
//! namespace. It passes the pod's packets under the VM's address, and their answers, and drops the rest.
//!
//! ```text
//! table inet peerpod-external {
//!   chain in      { hook input;    iifname OUTSIDE drop }                         # nothing of the VM itself is reached
//!   chain forward { hook forward;  iifname OUTSIDE  saddr of the pod  goto from   # packets of the pod only
//!                                  iifname OUTSIDE  drop
//!                                  oifname OUTSIDE  ct state established,related accept;  oifname OUTSIDE drop
//!                                  nfproto FAMILY drop }                       # if forwarding is on for the pod only
//!   chain from    { daddr ALLOWED accept ...;  daddr DENIED drop ...;  oifname UPLINK accept;  drop }
//!   chain nat     { hook postrouting, srcnat;  saddr of the pod  oifname UPLINK  masquerade }
//! }
//! ```
//!
//! One transaction makes the whole table and replaces an existing one. Touches only its own table.

use std::net::{IpAddr, Ipv4Addr};

use netlink_packet_netfilter::nftables::{
    Cmp, DataAttribute, Expressions, Immediate, InetHookNumber, MetaKey, Operator, Register, Verdict,
    VerdictAttribute,
};

use super::parts::{
    Family, Message, NF_ACCEPT, NF_DROP, Table, address_is, commit, equals, masked, meta, number, octets,
    other, then, verdict,
};
use crate::Error;
use crate::netlink::Client;
use crate::underlay::network;

const TABLE: Table<'_> = Table("peerpod-external");
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
    pub outside: String,
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

impl EgressFirewall {
    /// Makes the table and replaces an existing one.
    ///
    /// # Errors
    /// [`Error::Kernel`], also where the kernel has no nftables or no NAT.
    pub fn raise(&self, client: &mut Client) -> Result<(), Error> {
        let mut all = TABLE.replace();
        all.push(TABLE.chain("in", Some(("filter", InetHookNumber::LocalIn, PRIORITY_FILTER))));
        all.push(TABLE.chain("forward", Some(("filter", InetHookNumber::Forward, PRIORITY_FILTER))));
        all.push(TABLE.chain("nat", Some(("nat", InetHookNumber::PostRouting, PRIORITY_SOURCE_NAT))));
        all.push(TABLE.chain("from", None));
        all.push(TABLE.rule("in", self.at_outside(MetaKey::Iifname, vec![verdict(NF_DROP)])));
        self.forward(&mut all);
        self.from(&mut all);
        self.nat(&mut all);
        let attempt = format!("make the nftables table {} for the pod's external network", TABLE.0);
        commit(client, None, &all).map_err(Error::kernel(attempt))
    }

    fn forward(&self, all: &mut Vec<Message>) {
        let mut add = |what| all.push(TABLE.rule("forward", what));
        for address in &self.pod {
            add(self.at_outside(MetaKey::Iifname, then(address_is(Family::source, *address), go_to("from"))));
        }
        add(self.at_outside(MetaKey::Iifname, vec![verdict(NF_DROP)]));
        add(self.at_outside(MetaKey::Oifname, then(known_connection(), verdict(NF_ACCEPT))));
        add(self.at_outside(MetaKey::Oifname, vec![verdict(NF_DROP)]));
        for (alone, family) in [(self.alone.0, Family::V4), (self.alone.1, Family::V6)] {
            if alone {
                add(then(family.expressions(), verdict(NF_DROP)));
            }
        }
    }

    fn from(&self, all: &mut Vec<Message>) {
        let mut add = |what| all.push(TABLE.rule("from", what));
        for (prefixes, code) in [(&self.allow, NF_ACCEPT), (&self.deny, NF_DROP)] {
            for prefix in prefixes {
                add(then(destination(*prefix), verdict(code)));
            }
        }
        for uplink in &self.uplinks {
            add(then(named(MetaKey::Oifname, uplink), verdict(NF_ACCEPT)));
        }
        add(vec![verdict(NF_DROP)]);
    }

    fn nat(&self, all: &mut Vec<Message>) {
        for address in &self.pod {
            for uplink in &self.uplinks {
                let mut what = address_is(Family::source, *address);
                what.extend(named(MetaKey::Oifname, uplink));
                what.push(other("masq", Vec::new()));
                all.push(TABLE.rule("nat", what));
            }
        }
    }

    /// Conditions of packets that come by the VM's end of the pair (`Iifname`) or leave by it (`Oifname`).
    fn at_outside(&self, key: MetaKey, then: Vec<Expressions>) -> Vec<Expressions> {
        named(key, &self.outside).into_iter().chain(then).collect()
    }
}

/// Removes the table. A missing table is no error.
pub fn remove(client: &mut Client) -> Result<(), Error> {
    TABLE.remove(client).map_err(Error::kernel(format!("remove the nftables table {}", TABLE.0)))
}

/// `iifname NAME` or `oifname NAME`
fn named(key: MetaKey, name: &str) -> Vec<Expressions> {
    let mut padded = name.as_bytes().to_vec();
    padded.resize(NAME, 0);
    vec![meta(key), equals(padded)]
}

/// `daddr PREFIX`
fn destination((address, prefix): Prefix) -> Vec<Expressions> {
    let family = Family::of(address);
    let ones = if address.is_ipv6() { [0xff; 16].into() } else { Ipv4Addr::BROADCAST.into() };
    let [mask, wanted] = [ones, address].map(|of| octets(network(of, prefix).0));
    let mut what = family.expressions();
    what.extend([family.load(Family::destination), masked(mask), equals(wanted)]);
    what
}

/// `ct state established,related`
fn known_connection() -> Vec<Expressions> {
    let register = number(NFTA_CT_DREG, Register::Reg1.into());
    let state = other("ct", vec![number(NFTA_CT_KEY, NFT_CT_STATE), register]);
    let is_known = Expressions::Cmp(vec![
        Cmp::SourceRegister(Register::Reg1),
        Cmp::Op(Operator::NotEqual),
        Cmp::Data(DataAttribute::Value(vec![0; 4])),
    ]);
    vec![state, masked(KNOWN_STATES.to_ne_bytes().to_vec()), is_known]
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
        let firewall = EgressFirewall {
            outside: "pp-ext".to_owned(),
            pod: vec![ip("10.244.1.7"), ip("fd10::7")],
            uplinks: vec!["eth0".to_owned()],
            allow: vec![(ip("169.254.20.10"), 32)],
            deny: vec![(ip("169.254.0.0"), 16), (ip("fd00:ec2::"), 32), (ip("10.9.64.0"), 18)],
            alone: (true, false),
        };
        firewall.raise(&mut client).unwrap();
        let once = nft(&netns);
        firewall.raise(&mut client).unwrap();
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
        remove(&mut client).unwrap();
        assert_eq!(nft(&netns), "");
        remove(&mut client).unwrap();
    }
}
