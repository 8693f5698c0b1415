//! The local provider's settings, `provider.local.*`. Reads configuration, touches nothing else.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use peerpod_base::config::{Reader, Section};

/// What clouds have and the path's probe tries, in bytes; the least is IPv6's.
const MTUS: std::ops::RangeInclusive<u32> = 1280..=peerpod_link::path_mtu::LARGEST;

/// A segment of the "cloud": a bridge in the node's network namespace, and the addresses there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Network {
    /// The bridge's name.
    pub bridge: String,
    /// The IPv4 subnet; its first address is the node's.
    pub subnet4: Subnet<Ipv4Addr>,
    /// The IPv6 subnet; its first address is the node's.
    pub subnet6: Subnet<Ipv6Addr>,
}

/// Everything the provider can be told.
#[derive(Debug, Clone)]
pub struct LocalConfig {
    /// Where it keeps what it knows; `<paths.state-dir>/local`.
    pub state_dir: PathBuf,
    /// `peerpod-local-vm`.
    pub helper_binary: PathBuf,
    /// What runs as the VM's pid 1: `peerpod-guest`, or in tests any program or script.
    pub guest_binary: PathBuf,
    /// The kata-agent, or what plays it.
    pub agent_binary: PathBuf,
    /// The "cloud network" that each VM is on.
    pub network: Network,
    /// The one of second network cards.
    pub second: Network,
    /// MTU of both, in bytes.
    pub mtu: u32,
    /// Whether VMs have IPv4 addresses; without, node and VMs reach each other over IPv6 alone.
    pub ipv4: bool,
    /// How long a VM "boots" before its pid 1 runs; for tests.
    pub boot_delay: Duration,
    /// Most VMs by one call; 0: each by one of its own.
    pub max_batch: u32,
    /// Where the files of disks are that are called by a name.
    pub volumes_dir: PathBuf,
}

impl LocalConfig {
    /// Reads `provider.local.*`; mistakes stay with the reader.
    pub fn read(reader: &mut Reader, state_dir: &Path) -> LocalConfig {
        let mut section = reader.section("provider.local");
        let helper = "the helper that makes one VM's namespaces; default: beside our own program";
        let guest = "what runs as pid 1 of a VM; default: peerpod-guest beside our own program";
        let agent = "the kata-agent of a VM; default: peerpod-test-agent beside our own program";
        let helper_binary = section.optional("helper-binary", helper);
        let guest_binary = section.optional("guest-binary", guest);
        let agent_binary = section.optional("agent-binary", agent);
        let network = Network::read(&mut section, &FIRST);
        let second = Network::read(&mut section, &SECOND);
        if network.bridge == second.bridge {
            section.mistake(
                "second-bridge",
                "the same as provider.local.bridge; a second card is on a network of its own",
            );
        }
        let mtu: u32 = section.get("mtu", "1500", "the largest packet of the VMs' networks, in bytes");
        if !MTUS.contains(&mtu) {
            let (least, most) = (MTUS.start(), MTUS.end());
            section.mistake("mtu", format!("not an MTU that a cloud has; {least} to {most} would do"));
        }
        let ipv4 = section.get(
            "ipv4",
            "true",
            "give VMs IPv4 addresses; false: IPv6 is all there is between node and VMs",
        );
        let boot_delay = section.get("boot-delay", "0ms", "pretend that a VM takes this long to boot");
        let max_batch = section.get("max-batch", "0", "most VMs by one call; 0: one by one");
        let volumes_dir = section.optional(
            "volumes-dir",
            "files here are disks, called by their names; <paths.state-dir>/local/volumes when not set",
        );
        LocalConfig {
            volumes_dir: volumes_dir.unwrap_or_else(|| state_dir.join("local/volumes")),
            state_dir: state_dir.join("local"),
            helper_binary: helper_binary.unwrap_or_else(|| beside_us("peerpod-local-vm")),
            guest_binary: guest_binary.unwrap_or_else(|| beside_us("peerpod-guest")),
            agent_binary: agent_binary.unwrap_or_else(|| beside_us("peerpod-test-agent")),
            network,
            second,
            mtu,
            ipv4,
            boot_delay,
            max_batch,
        }
    }

    /// How many VMs the subnets hold at once; also one more than the greatest index.
    pub(crate) fn room(&self) -> u32 {
        let bits = self.network.bits().min(self.second.bits()).min(20);
        // The last one is IPv4's broadcast address.
        (1 << bits) - 1
    }
}

/// How a network's keys are called, and their defaults and meanings.
struct Keys {
    bridge: (&'static str, &'static str, &'static str),
    subnet4: (&'static str, &'static str, &'static str),
    subnet6: (&'static str, &'static str, &'static str),
}

const FIRST: Keys = Keys {
    bridge: ("bridge", "pplocal0", "name of the bridge the VMs hang on"),
    subnet4: ("subnet4", "10.99.0.0/16", "the VMs' IPv4 addresses"),
    subnet6: ("subnet6", "fd99::/64", "the VMs' IPv6 addresses"),
};

const SECOND: Keys = Keys {
    bridge: ("second-bridge", "pplocal1", "name of the bridge that second network cards hang on"),
    subnet4: ("second-subnet4", "10.98.0.0/16", "the IPv4 addresses of second network cards"),
    subnet6: ("second-subnet6", "fd98::/64", "the IPv6 addresses of second network cards"),
};

impl Network {
    fn read(section: &mut Section<'_>, keys: &Keys) -> Network {
        let (key, default, help) = keys.bridge;
        let bridge: String = section.get(key, default, help);
        if bridge.is_empty() || bridge.len() > 15 || bridge.contains(['/', ' ', ':']) {
            section.mistake(key, "not a name for a network device; use 1 to 15 letters and digits");
        }
        Network {
            bridge,
            subnet4: Subnet::read(section, keys.subnet4),
            subnet6: Subnet::read(section, keys.subnet6),
        }
    }

    /// Of an address of its smaller subnet, those that tell VMs apart.
    fn bits(&self) -> u32 {
        (32 - u32::from(self.subnet4.prefix)).min(128 - u32::from(self.subnet6.prefix))
    }
}

/// A program that lies where ours lies.
fn beside_us(name: &str) -> PathBuf {
    let us = std::env::current_exe().unwrap_or_default();
    us.parent().unwrap_or(Path::new("/usr/bin")).join(name)
}

/// An address without host bits, and how many bits are the network's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Subnet<A> {
    /// The network's address.
    pub base: A,
    /// Length of the network part, in bits.
    pub prefix: u8,
}

impl<A: Family> Subnet<A> {
    fn read(section: &mut Section<'_>, (key, default, help): (&str, &str, &str)) -> Subnet<A> {
        let text: String = section.get(key, default, help);
        Subnet::parse(&text).unwrap_or_else(|why| {
            section.mistake(key, why);
            // Nothing is started with a mistake; any would do.
            Subnet { base: A::from_number(0), prefix: 8 }
        })
    }

    /// Reads `base/prefix` with room for at least two VMs.
    ///
    /// # Errors
    /// Why it is none, and what would do.
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

    /// The address with this host part; 1 is the node's.
    pub fn address(&self, index: u32) -> A {
        A::from_number(self.base.bits() | u128::from(index))
    }
}

/// What IPv4 and IPv6 addresses share here.
pub trait Family: Copy + fmt::Display + std::str::FromStr + Into<IpAddr> {
    /// Bits of an address.
    const BITS: u8;
    /// How a subnet of this family is written.
    const EXAMPLE: &'static str;
    /// The address as a number.
    fn bits(self) -> u128;
    /// The address with this number; the caller sees to it that it fits.
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
