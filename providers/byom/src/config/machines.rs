//! Parses the addresses of a pool, with ranges. Pure.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Port of SSH.
const PORT: u16 = 22;
/// Most machines of a pool. A range of a million addresses is a mistake.
const MAX_MACHINES: usize = 1024;

/// Address of a machine and of its SSH server. Its text is the machine's name: the address, and the port unless it is 22.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MachineAddress(SocketAddr);

impl MachineAddress {
    /// Parses an address with an optional port, like `10.0.0.7`, `10.0.0.7:2222` or `[fd00::7]:2222`.
    pub fn parse(text: &str) -> Option<MachineAddress> {
        let alone = text.parse::<IpAddr>().ok().map(|address| SocketAddr::new(address, PORT));
        alone.or_else(|| text.parse().ok()).map(MachineAddress)
    }

    /// Returns the address and the port of the SSH server.
    pub fn socket(&self) -> SocketAddr {
        self.0
    }
}

impl fmt::Display for MachineAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.port() {
            PORT => write!(f, "{}", self.0.ip()),
            _ => write!(f, "{}", self.0),
        }
    }
}

/// Parses addresses and ranges, each machine once and in order.
///
/// # Errors
/// The wrong entry and the remedy.
pub(super) fn parse(entries: &[String]) -> Result<Vec<MachineAddress>, String> {
    let mut known = BTreeSet::new();
    let mut machines = Vec::new();
    for entry in entries {
        for machine in one(entry.trim())? {
            if known.insert(machine) {
                machines.push(machine);
            }
        }
        if machines.len() > MAX_MACHINES {
            return Err(format!("more than {MAX_MACHINES} machines; make several node pools of them"));
        }
    }
    Ok(machines)
}

fn one(entry: &str) -> Result<Vec<MachineAddress>, String> {
    let Some((from, to)) = entry.split_once('-') else {
        let machine = MachineAddress::parse(entry);
        return machine.map(|machine| vec![machine]).ok_or_else(|| {
            format!("{entry} is no address; write it like 10.0.0.7, 10.0.0.7:2222 or 10.0.0.10-10.0.0.20")
        });
    };
    let (from, to) = (from.trim().parse(), to.trim().parse());
    let (first, last, is_v6) = match (from, to) {
        (Ok(IpAddr::V4(from)), Ok(IpAddr::V4(to))) => (from.to_bits().into(), to.to_bits().into(), false),
        (Ok(IpAddr::V6(from)), Ok(IpAddr::V6(to))) => (from.to_bits(), to.to_bits(), true),
        _ => return Err(format!("{entry} is no range; write it like 10.0.0.10-10.0.0.20")),
    };
    let Some(more) = u128::checked_sub(last, first) else {
        return Err(format!("{entry} ends before it begins; write the lower address first"));
    };
    if more >= MAX_MACHINES as u128 {
        return Err(format!("{entry} has more than {MAX_MACHINES} addresses; write a shorter range"));
    }
    let address = |bits: u128| match is_v6 {
        true => IpAddr::V6(Ipv6Addr::from_bits(bits)),
        // The bits lie between two addresses of this family.
        false => IpAddr::V4(Ipv4Addr::from_bits(u32::try_from(bits).unwrap_or_default())),
    };
    Ok((first..=last).map(|bits| MachineAddress(SocketAddr::new(address(bits), PORT))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(entries: &[&str]) -> Result<Vec<String>, String> {
        let entries: Vec<String> = entries.iter().map(|entry| (*entry).to_owned()).collect();
        parse(&entries).map(|machines| machines.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn addresses_and_ranges_are_expanded_once_and_in_order() {
        let found = names(&["10.0.0.9", "10.0.0.254-10.0.1.1", "10.0.0.255", "10.0.0.9:22", "10.0.0.9:2222"]);
        assert_eq!(
            found.unwrap(),
            ["10.0.0.9", "10.0.0.254", "10.0.0.255", "10.0.1.0", "10.0.1.1", "10.0.0.9:2222"]
        );
        assert_eq!(
            names(&["fd00::ffff-fd00::1:0", "[fd00::7]:2222"]).unwrap().join(" "),
            "fd00::ffff fd00::1:0 [fd00::7]:2222"
        );
        let full: Vec<String> = (0..4).map(|n| format!("10.0.{n}.0-10.0.{n}.255")).collect();
        assert_eq!(parse(&full).unwrap().len(), MAX_MACHINES);
    }

    #[test]
    fn a_mistake_is_named_with_its_remedy() {
        for (entry, part) in [
            ("", "is no address"),
            ("host.example", "is no address"),
            ("10.0.0.7:0x1", "is no address"),
            ("10.0.0.7-host", "is no range"),
            ("10.0.0.7-fd00::7", "is no range"),
            ("10.0.0.7-10.0.0.6", "the lower address first"),
            ("10.0.0.0-10.1.0.0", "a shorter range"),
            ("::-ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "a shorter range"),
        ] {
            let why = names(&[entry]).unwrap_err();
            assert!(why.contains(part), "{entry}: {why}");
        }
        assert!(names(&["10.0.0.0-10.0.3.255", "10.0.4.0"]).unwrap_err().contains("node pools"));
    }
}
