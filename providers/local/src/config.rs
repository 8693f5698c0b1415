//! Settings `provider.local.*`. Reads configuration, touches nothing else.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use peerpod_base::config::{Reader, Section};

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
pub struct Network {
    /// Name of the bridge.
    pub bridge: String,
    /// IPv4 subnet; its first address belongs to the node.
    pub subnet4: Subnet<Ipv4Addr>,
    /// IPv6 subnet; its first address belongs to the node.
    pub subnet6: Subnet<Ipv6Addr>,
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
    pub network: Network,
    /// Network of second NICs.
    pub second: Network,
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
        let mut section = reader.section("provider.local");
        let mut program = |key, name| section.derived(key, "this program's folder", beside_us(name));
        let helper_binary = program("helper-binary", "peerpod-local-vm");
        let guest_binary = program("guest-binary", "peerpod-guest");
        let agent_binary = program("agent-binary", "peerpod-test-agent");
        let network = Network::read(&mut section, &FIRST);
        let second = Network::read(&mut section, &SECOND);
        let mtu = section.constant("mtu", "MTU", MTU);
        let ipv4 = section.constant("ipv4", "IPV4", IPV4);
        let boot_delay = section.constant("boot-delay", "BOOT_DELAY", BOOT_DELAY);
        let max_batch = section.constant("max-batch", "MAX_BATCH", MAX_BATCH);
        let volumes_dir = section.derived("volumes-dir", "paths.state-dir", state_dir.join("local/volumes"));
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
    }

    /// Number of VMs that the subnets hold at once; also one more than the greatest index.
    pub(crate) fn room(&self) -> u32 {
        let bits = self.network.bits().min(self.second.bits()).min(20);
        // The last address is the IPv4 broadcast address.
        (1 << bits) - 1
    }
}

/// Constants of a network, each with its key and its name.
struct Constants {
    bridge: Constant,
    subnet4: Constant,
    subnet6: Constant,
}

/// Key, name and value.
type Constant = (&'static str, &'static str, &'static str);

const FIRST: Constants = Constants {
    bridge: ("bridge", "FIRST.bridge", "pplocal0"),
    subnet4: ("subnet4", "FIRST.subnet4", "10.99.0.0/16"),
    subnet6: ("subnet6", "FIRST.subnet6", "fd99::/64"),
};

const SECOND: Constants = Constants {
    bridge: ("second-bridge", "SECOND.bridge", "pplocal1"),
    subnet4: ("second-subnet4", "SECOND.subnet4", "10.98.0.0/16"),
    subnet6: ("second-subnet6", "SECOND.subnet6", "fd98::/64"),
};

impl Network {
    fn read(section: &mut Section<'_>, constants: &Constants) -> Network {
        let (key, name, value) = constants.bridge;
        let bridge = section.constant(key, name, value.to_owned());
        Network {
            bridge,
            subnet4: Subnet::read(section, constants.subnet4),
            subnet6: Subnet::read(section, constants.subnet6),
        }
    }

    /// Number of address bits in the smaller subnet that distinguish VMs.
    fn bits(&self) -> u32 {
        (32 - u32::from(self.subnet4.prefix)).min(128 - u32::from(self.subnet6.prefix))
    }
}

/// Returns the path of a program beside the current one.
fn beside_us(name: &str) -> PathBuf {
    let us = std::env::current_exe().unwrap_or_default();
    us.parent().unwrap_or(Path::new("/usr/bin")).join(name)
}

/// Network address without host bits, and the length of its prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Subnet<A> {
    /// Address of the network.
    pub base: A,
    /// Length of the network part, in bits.
    pub prefix: u8,
}

impl<A: Family> Subnet<A> {
    fn read(section: &mut Section<'_>, (key, name, value): Constant) -> Subnet<A> {
        let text = section.constant(key, name, value.to_owned());
        Subnet::parse(&text).unwrap_or_else(|why| {
            section.mistake(key, why);
            // Nothing is started with a mistake, so any value works.
            Subnet { base: A::from_number(0), prefix: 8 }
        })
    }

    /// Parses `base/prefix` with space for at least two VMs.
    ///
    /// # Errors
    /// The reason why the text is no such subnet, with an example.
    pub fn parse(text: &str) -> Result<Subnet<A>, String> {
        let example = A::EXAMPLE;
        let parsed = text.split_once('/').and_then(|(base, prefix)| {
            Some(Subnet { base: base.parse::<A>().ok()?, prefix: prefix.parse().ok()? })
        });
        let Some(subnet) = parsed else { return Err(format!("not a subnet; write it like {example}")) };
        if subnet.prefix < 8 || subnet.prefix > A::BITS - 2 {
            return Err(format!("a prefix of 8 to {} bits is needed; write it like {example}", A::BITS - 2));
        }
        let hosts = (1u128 << (A::BITS - subnet.prefix)) - 1;
        if subnet.base.bits() & hosts != 0 {
            return Err(format!("there are bits set behind the prefix; write it like {example}"));
        }
        Ok(subnet)
    }

    /// Returns the address with this host part; 1 is the node.
    pub fn address(&self, index: u32) -> A {
        A::from_number(self.base.bits() | u128::from(index))
    }
}

/// Common operations of IPv4 and IPv6 addresses.
pub trait Family: Copy + fmt::Display + std::str::FromStr + Into<IpAddr> {
    /// Bits of an address.
    const BITS: u8;
    /// Example of a subnet in this family.
    const EXAMPLE: &'static str;
    /// Returns the address as a number.
    fn bits(self) -> u128;
    /// Returns the address with this number. The caller ensures that it fits.
    fn from_number(number: u128) -> Self;
}

impl Family for Ipv4Addr {
    const BITS: u8 = 32;
    const EXAMPLE: &'static str = "10.99.0.0/16";
    fn bits(self) -> u128 {
        u128::from(self.to_bits())
    }
    fn from_number(number: u128) -> Ipv4Addr {
        Ipv4Addr::from_bits(number as u32)
    }
}

impl Family for Ipv6Addr {
    const BITS: u8 = 128;
    const EXAMPLE: &'static str = "fd99::/64";
    fn bits(self) -> u128 {
        self.to_bits()
    }
    fn from_number(number: u128) -> Ipv6Addr {
        Ipv6Addr::from_bits(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subnets_are_checked() {
        let subnet = Subnet::<Ipv4Addr>::parse("10.99.0.0/16").unwrap();
        assert_eq!(subnet.address(1), Ipv4Addr::new(10, 99, 0, 1));
        assert_eq!(subnet.address(300), Ipv4Addr::new(10, 99, 1, 44));
        let subnet = Subnet::<Ipv6Addr>::parse("fd99::/64").unwrap();
        assert_eq!(subnet.address(0x102).to_string(), "fd99::102");
        for bad in ["", "10.99.0.0", "10.99.0.1/16", "10.0.0.0/31", "0.0.0.0/0", "fd99::/64", "10.99.0.0/x"] {
            assert!(Subnet::<Ipv4Addr>::parse(bad).is_err(), "{bad}");
        }
    }
}
