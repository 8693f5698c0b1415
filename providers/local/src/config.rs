//! Settings `provider.local.*`. Reads configuration, touches nothing else.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use peerpod_base::config::Reader;

/// Largest packet of the VMs' networks, in bytes.
const MTU: u32 = 1500;
/// Whether VMs have IPv4 addresses.
const IPV4: bool = true;
/// Simulated boot time.
const BOOT_DELAY: Duration = Duration::ZERO;
/// VMs are made one by one.
const MAX_BATCH: u32 = 0;

/// Segment of the simulated cloud network: a bridge in the node's network namespace, and its subnets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalNetwork {
    /// Name of the bridge.
    pub bridge: String,
    /// IPv4 subnet; its first address belongs to the node.
    pub subnet4: Ipv4Net,
    /// IPv6 subnet; its first address belongs to the node.
    pub subnet6: Ipv6Net,
}

/// Settings of the provider.
#[derive(Debug, Clone)]
pub struct LocalConfig {
    /// Folder of the provider's state: `<paths.state-dir>/local`.
    pub state_dir: PathBuf,
    /// Path of `peerpod-local-vm`.
    pub helper_binary: PathBuf,
    /// Program that runs as pid 1 of the VM: `peerpod-guest`, or in tests any program or script.
    pub guest_binary: PathBuf,
    /// kata-agent, or its stand-in for tests.
    pub agent_binary: PathBuf,
    /// Simulated cloud network of each VM.
    pub network: LocalNetwork,
    /// Network of second NICs.
    pub second: LocalNetwork,
    /// MTU of both networks, in bytes.
    pub mtu: u32,
    /// Whether VMs have IPv4 addresses. Without them, node and VMs reach each other over IPv6 alone.
    pub ipv4: bool,
    /// Simulated boot time of a VM before its pid 1 runs; for tests.
    pub boot_delay: Duration,
    /// Most VMs by one call; 0: one per call.
    pub max_batch: u32,
    /// Folder of the disk files that requests refer to by name.
    pub volumes_dir: PathBuf,
}

impl LocalConfig {
    /// Reads `provider.local.*`; mistakes stay with the reader.
    pub fn read(reader: &mut Reader, state_dir: &Path) -> LocalConfig {
        reader.section("provider.local", |section| {
            let mut program = |key, name| section.derived(key, "this program's folder", beside_us(name));
            let helper_binary = program("helper-binary", "peerpod-local-vm");
            let guest_binary = program("guest-binary", "peerpod-guest");
            let agent_binary = program("agent-binary", "peerpod-test-agent");
            let network = LocalNetwork::read(section, FIRST);
            let second = LocalNetwork::read(section, SECOND);
            let mtu = section.constant("mtu", "MTU", MTU);
            let ipv4 = section.constant("ipv4", "IPV4", IPV4);
            let boot_delay = section.constant("boot-delay", "BOOT_DELAY", BOOT_DELAY);
            let max_batch = section.constant("max-batch", "MAX_BATCH", MAX_BATCH);
            let volumes_dir =
                section.derived("volumes-dir", "paths.state-dir", state_dir.join("local/volumes"));
            LocalConfig {
                volumes_dir,
                state_dir: state_dir.join("local"),
                helper_binary,
                guest_binary,
                agent_binary,
                network,
                second,
                mtu,
                ipv4,
                boot_delay,
                max_batch,
            }
        })
    }

    /// Number of VMs that the subnets hold at once; also one more than the greatest index.
    pub(crate) fn room(&self) -> u32 {
        let bits = self.network.bits().min(self.second.bits()).min(20);
        // The last address is the IPv4 broadcast address.
        (1 << bits) - 1
    }
}

/// Key, name and value.
type Constant = (&'static str, &'static str, &'static str);

/// Bridge, IPv4 subnet and IPv6 subnet of a network.
type Constants = [Constant; 3];

const FIRST: Constants = [
    ("bridge", "FIRST.bridge", "pplocal0"),
    ("subnet4", "FIRST.subnet4", "10.99.0.0/16"),
    ("subnet6", "FIRST.subnet6", "fd99::/64"),
];

const SECOND: Constants = [
    ("second-bridge", "SECOND.bridge", "pplocal1"),
    ("second-subnet4", "SECOND.subnet4", "10.98.0.0/16"),
    ("second-subnet6", "SECOND.subnet6", "fd98::/64"),
];

impl LocalNetwork {
    fn read(section: &mut Reader, [(key, name, bridge), subnet4, subnet6]: Constants) -> LocalNetwork {
        LocalNetwork {
            bridge: section.constant(key, name, bridge.to_owned()),
            subnet4: subnet(section, subnet4),
            subnet6: subnet(section, subnet6),
        }
    }

    /// Returns the IPv4 address with this host part; 1 is the node.
    pub(crate) fn v4(&self, index: u32) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.subnet4.network().to_bits() | index)
    }

    /// Returns the IPv6 address with this host part; 1 is the node.
    pub(crate) fn v6(&self, index: u32) -> Ipv6Addr {
        Ipv6Addr::from_bits(self.subnet6.network().to_bits() | u128::from(index))
    }

    /// Number of address bits in the smaller subnet that distinguish VMs.
    fn bits(&self) -> u8 {
        (32 - self.subnet4.prefix_len()).min(128 - self.subnet6.prefix_len())
    }
}

/// Returns the path of a program beside the current one.
fn beside_us(name: &str) -> PathBuf {
    let us = std::env::current_exe().unwrap_or_default();
    us.parent().unwrap_or(Path::new("/usr/bin")).join(name)
}

fn subnet<N: FromStr + Copy + Into<IpNet>>(section: &mut Reader, (key, name, value): Constant) -> N {
    let text = section.constant(key, name, value.to_owned());
    parse(&text, value).unwrap_or_else(|why| {
        section.mistake(key, why);
        // Nothing is started with a mistake, so any value works.
        parse(value, value).expect("the constant is a subnet")
    })
}

/// Parses a subnet without host bits, with space for at least two VMs. An error contains the example.
fn parse<N: FromStr + Copy + Into<IpNet>>(text: &str, example: &str) -> Result<N, String> {
    let subnet: N = text.parse().map_err(|_| format!("not a subnet; write it like {example}"))?;
    let any: IpNet = subnet.into();
    let longest = any.max_prefix_len() - 2;
    if !(8..=longest).contains(&any.prefix_len()) {
        return Err(format!("a prefix of 8 to {longest} bits is needed; write it like {example}"));
    }
    if any.addr() != any.network() {
        return Err(format!("there are bits set behind the prefix; write it like {example}"));
    }
    Ok(subnet)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subnets_are_checked() {
        let network = LocalNetwork {
            bridge: String::new(),
            subnet4: parse("10.99.0.0/16", "").unwrap(),
            subnet6: parse("fd99::/64", "").unwrap(),
        };
        assert_eq!(network.v4(1), Ipv4Addr::new(10, 99, 0, 1));
        assert_eq!(network.v4(300), Ipv4Addr::new(10, 99, 1, 44));
        assert_eq!(network.v6(0x102).to_string(), "fd99::102");
        for bad in ["", "10.99.0.0", "10.99.0.1/16", "10.0.0.0/31", "0.0.0.0/0", "fd99::/64", "10.99.0.0/x"] {
            assert!(parse::<Ipv4Net>(bad, "").is_err(), "{bad}");
        }
    }
}
