//! Parses `ip=` of the kernel command line, as the kernel documents it (and brackets for IPv6, as in dracut):
//! `ip=<client>:<server>:<gateway>:<netmask>:<hostname>:<device>:<autoconf>:<dns0>:<dns1>:<ntp0>`. Pure.

use std::net::{IpAddr, Ipv4Addr};

use peerpod_podnet::underlay::network;

use super::wanted::{WantedNic, WantedRoute};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Static {
    /// Name of the NIC; `None` means the first one.
    pub(crate) device: Option<String>,
    pub(crate) wanted: WantedNic,
}

/// Network settings of the command line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Line {
    /// Whether all NICs stay without an address.
    pub(crate) off: bool,
    pub(crate) fixed: Vec<Static>,
    /// Name servers of `nameserver=`.
    pub(crate) dns: Vec<IpAddr>,
}

/// Limit of entries: more NICs than any VM has.
const MOST: usize = 16;

/// Parses the command line; the second value lists the faults.
pub(crate) fn parse(command_line: &str) -> (Line, Vec<String>) {
    let (mut line, mut wrong) = (Line::default(), Vec::new());
    for word in command_line.split_whitespace() {
        if let Some(server) = word.strip_prefix("nameserver=") {
            match address(server) {
                Some(server) if line.dns.len() < MOST => line.dns.push(server),
                _ => wrong.push(format!("{word:?} is no address of a name server")),
            }
        }
        let Some(value) = word.strip_prefix("ip=") else { continue };
        match value {
            "off" | "none" => line.off = true,
            "" | "on" | "any" | "dhcp" | "dhcp6" | "auto6" | "both" | "bootp" | "rarp" => {}
            value => match one(value) {
                Ok(Some(fixed)) if line.fixed.len() < MOST => line.fixed.push(fixed),
                Ok(_) => {}
                Err(why) => wrong.push(format!("{word:?}: {why}")),
            },
        }
    }
    (line, wrong)
}

/// Parses one value of `ip=`; `None` means DHCP, as without the parameter.
fn one(value: &str) -> Result<Option<Static>, String> {
    let fields = fields(value);
    let field = |at: usize| fields.get(at).map(String::as_str).filter(|field| !field.is_empty());
    // `ip=eth0:dhcp`
    if fields.len() == 2 && address(&fields[0]).is_none() {
        return Ok(None);
    }
    let Some(client) = field(0) else { return Ok(None) };
    let client_address = address(client).ok_or_else(|| format!("{client:?} is no address"))?;
    let gateway = |text: &str| address(text).ok_or_else(|| format!("gateway {text:?} is no address"));
    let gateway = field(2).map(gateway).transpose()?;
    if gateway.is_some_and(|gateway| gateway.is_ipv6() != client_address.is_ipv6()) {
        return Err("address and gateway are of two families".to_owned());
    }
    let is_v6 = client_address.is_ipv6();
    let prefix = |mask: &str| prefix(mask, is_v6).ok_or_else(|| format!("{mask:?} is no netmask"));
    let prefix = field(3).map_or(Ok(by_class(client_address)), prefix)?;
    let route = |gateway| WantedRoute { destination: network(client_address, 0), gateway: Some(gateway) };
    let wanted = WantedNic {
        address: client_address,
        prefix,
        broadcast: None,
        lifetime: None,
        routes: gateway.map(route).into_iter().collect(),
        mtu: None,
        dns: [field(7), field(8)].into_iter().flatten().filter_map(address).collect(),
        search: Vec::new(),
    };
    Ok(Some(Static { device: field(5).map(str::to_owned), wanted }))
}

/// Splits a value at the colons outside of brackets.
fn fields(value: &str) -> Vec<String> {
    let mut inside = false;
    let separates = |character| {
        inside = character == '[' || (inside && character != ']');
        character == ':' && !inside
    };
    value.split(separates).map(|field| field.replace(['[', ']'], "")).collect()
}

fn address(text: &str) -> Option<IpAddr> {
    text.trim_start_matches('[').trim_end_matches(']').parse().ok()
}

fn prefix(text: &str, v6: bool) -> Option<u8> {
    if let Ok(mask) = text.parse::<Ipv4Addr>() {
        let bits = mask.to_bits();
        return (!v6 && bits.leading_ones() + bits.trailing_zeros() == 32).then(|| bits.leading_ones() as u8);
    }
    text.parse().ok().filter(|bits| *bits <= if v6 { 128 } else { 32 })
}

/// Returns the prefix length of an address class, as the kernel guesses it.
fn by_class(address: IpAddr) -> u8 {
    match address {
        IpAddr::V6(_) => 64,
        IpAddr::V4(address) => match address.octets()[0] {
            0..128 => 8,
            128..192 => 16,
            _ => 24,
        },
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_kernels_own_syntax_is_read() {
        let (line, wrong) = parse(
            "quiet ip=10.0.0.5::10.0.0.1:255.255.255.0:host:eth0:off:10.0.0.2:8.8.8.8 console=ttyS0 \
             ip=[fd00::5]::[fd00::1]:64::eth1:none nameserver=9.9.9.9",
        );
        assert_eq!(wrong, [""; 0]);
        let [first, second] = &line.fixed[..] else { panic!("{line:?}") };
        let routes = |destination: &str, gateway: &str| {
            let destination = (destination.parse().unwrap(), 0);
            vec![WantedRoute { destination, gateway: Some(gateway.parse().unwrap()) }]
        };
        let (device, first, second) = (first.device.as_deref(), &first.wanted, &second.wanted);
        assert_eq!((first.address, first.prefix), ("10.0.0.5".parse().unwrap(), 24));
        assert_eq!((&first.routes, device), (&routes("0.0.0.0", "10.0.0.1"), Some("eth0")));
        assert_eq!(first.dns, ["10.0.0.2".parse::<IpAddr>().unwrap(), "8.8.8.8".parse().unwrap()]);
        assert_eq!((second.address, second.prefix), ("fd00::5".parse().unwrap(), 64));
        assert_eq!(second.routes, routes("::", "fd00::1"));
        assert_eq!(line.dns, ["9.9.9.9".parse::<IpAddr>().unwrap()]);
    }

    #[test]
    fn automatic_modes_equal_a_missing_parameter() {
        for words in ["", "ip=dhcp", "ip=eth0:dhcp", "ip=::::host:eth0:dhcp", "ip=on ip=any"] {
            assert_eq!(parse(words), (Line::default(), vec![]), "{words}");
        }
        assert!(parse("ip=off").0.off);
        assert_eq!(parse("ip=172.16.0.9").0.fixed[0].wanted.prefix, 16, "by its class");
    }

    #[test]
    fn mistakes_are_named() {
        for (words, named) in [
            ("ip=10.0.0.300::::::", "no address"),
            ("ip=10.0.0.3::10.0.0.1:255.0.255.0", "no netmask"),
            ("ip=10.0.0.3::[fd00::1]:24", "two families"),
            ("ip=10.0.0.3::x:24", "gateway"),
            ("nameserver=dns.example", "name server"),
        ] {
            let (line, wrong) = parse(words);
            assert!(wrong[0].contains(named) && line.fixed.is_empty(), "{words}: {wrong:?}");
        }
    }

    proptest! {
        #[test]
        fn any_line_is_handled(text in "(ip=|nameserver=)?[a-z0-9:.\\[\\] ]{0,60}") {
            let (line, _) = parse(&text);
            for fixed in line.fixed {
                let most = if fixed.wanted.address.is_ipv6() { 128 } else { 32 };
                prop_assert!(fixed.wanted.prefix <= most);
            }
        }
    }
}
