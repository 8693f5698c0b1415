//! Reads the network state of a namespace from `ip -j`, and renders it so that the two sides of a pod can be compared.

use std::collections::BTreeSet;
use std::{fs, io};

use anyhow::Context;
use peerpod_podnet::netns::Netns;
use serde_json::{Map, Value};

use crate::command::run;

/// Output of `ip -N -j`, and some sysctls. Plain data.
#[derive(Debug, Clone, Default)]
pub struct Picture {
    /// Output of `ip addr`.
    pub interfaces: Value,
    /// Output of `ip route show table all`, one answer per family.
    pub routes: Vec<Value>,
    /// Output of `ip rule`, one answer per family.
    pub rules: Vec<Value>,
    /// Output of `ip neigh show nud permanent`.
    pub neighbours: Value,
    /// Names below `/proc/sys/net` and their values; `None` if the file does not exist.
    pub sysctls: Vec<(String, Option<String>)>,
}

/// Value that `ip` prints for an unlimited lifetime.
const FOR_EVER: u64 = u32::MAX as u64;
/// Name prefix of Peerpod's devices in the pod's netns on the node.
const OURS: &str = "pp-vx";

impl Picture {
    /// Reads the state of a namespace, and these sysctls.
    pub fn of(netns: &Netns, sysctls: &[&str]) -> anyhow::Result<Picture> {
        netns.run(|| Picture::here(sysctls))?
    }

    fn here(sysctls: &[&str]) -> anyhow::Result<Picture> {
        let ask = |words: &[&str]| -> anyhow::Result<Value> {
            let text = run("ip", &[&["-N", "-j"], words].concat(), "")?;
            if text.trim().is_empty() {
                return Ok(Value::Array(Vec::new()));
            }
            serde_json::from_str(&text).with_context(|| format!("ip -N -j {}: {text}", words.join(" ")))
        };
        let value = |name: &&str| -> anyhow::Result<(String, Option<String>)> {
            match fs::read_to_string(format!("/proc/sys/net/{name}")) {
                Ok(text) => Ok(((*name).to_owned(), Some(text.trim().to_owned()))),
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(((*name).to_owned(), None)),
                Err(error) => Err(error).with_context(|| format!("read the sysctl {name}")),
            }
        };
        let both = |words: &[&str]| -> anyhow::Result<Vec<Value>> {
            ["-4", "-6"].iter().map(|family| ask(&[&[*family], words].concat())).collect()
        };
        Ok(Picture {
            interfaces: ask(&["addr", "show"])?,
            routes: both(&["route", "show", "table", "all"])?,
            rules: both(&["rule", "show"])?,
            neighbours: ask(&["neigh", "show", "nud", "permanent"])?,
            sysctls: sysctls.iter().map(value).collect::<anyhow::Result<_>>()?,
        })
    }

    /// Returns the state that a program in this namespace sees, one line per thing: interfaces in their order,
    /// loopback, addresses, routes, rules, neighbours, sysctls.
    ///
    /// Left out are:
    ///
    /// * local, broadcast and multicast routes that the kernel makes for each address, but not the route of a whole
    ///   prefix;
    /// * flags that record how an entry was added;
    /// * Peerpod's devices.
    ///
    /// Every MTU is limited to `room`, the tunnel's MTU. Of a lifetime only its existence counts, not its end.
    pub fn lines(&self, room: u64) -> BTreeSet<String> {
        let mut lines = BTreeSet::new();
        let mut interfaces: Vec<&Value> = list(&self.interfaces).filter(|it| is_carried(it)).collect();
        interfaces.sort_by_key(|it| it["ifindex"].as_u64());
        for (place, it) in interfaces.into_iter().enumerate() {
            lines.insert(interface(place, it, room));
            lines.extend(addresses(it));
        }
        for lo in list(&self.interfaces).filter(|it| it["ifname"] == "lo") {
            let flags = list_of_words(&lo["flags"]);
            lines.insert(format!(
                "loopback {}",
                if flags.iter().any(|flag| flag == "UP") { "up" } else { "down" }
            ));
            lines.extend(addresses(lo));
        }
        let carried = |it: &&Value| it["dev"].as_str().is_none_or(|device| !device.starts_with(OURS));
        for (family, answer) in ["IPv4", "IPv6"].iter().zip(&self.routes) {
            lines.extend(list(answer).filter(carried).filter_map(|it| route(family, it, room)));
        }
        for (family, answer) in ["IPv4", "IPv6"].iter().zip(&self.rules) {
            lines.extend(list(answer).map(|it| format!("{family} rule {}", canonical(it, &[]))));
        }
        lines.extend(list(&self.neighbours).filter(carried).map(|it| {
            format!("neighbour {} {} {}", text(&it["dev"]), text(&it["dst"]), text(&it["lladdr"]))
        }));
        lines.extend(self.sysctls.iter().map(|(name, value)| match value {
            Some(value) => format!("sysctl {name} = {value}"),
            None => format!("sysctl {name} does not exist"),
        }));
        lines
    }

    /// Returns the lines that `other` lacks (`-`) and has in addition (`+`); empty if both are the same for a program.
    pub fn differences(&self, other: &Picture, room: u64) -> Vec<String> {
        let (ours, theirs) = (self.lines(room), other.lines(room));
        let lost = ours.difference(&theirs).map(|line| format!("- {line}"));
        let new = theirs.difference(&ours).map(|line| format!("+ {line}"));
        lost.chain(new).collect()
    }

    /// Returns the MTU of an interface.
    pub fn mtu(&self, interface: &str) -> Option<u64> {
        list(&self.interfaces).find(|it| it["ifname"] == interface)?["mtu"].as_u64()
    }

    /// Returns the global addresses in the kernel's order, each with its interface.
    pub fn addresses(&self) -> Vec<(String, std::net::IpAddr)> {
        let all = list(&self.interfaces).filter(|it| is_carried(it)).flat_map(|it| {
            let global = list(&it["addr_info"]).filter(|info| text(&info["scope"]) == "0");
            global.filter_map(|info| Some((text(&it["ifname"]), info["local"].as_str()?.parse().ok()?)))
        });
        all.collect()
    }
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    // iproute2 6.1 prints an empty object for an empty entry.
    value.as_array().into_iter().flatten().filter(|it| it.as_object().is_some_and(|it| !it.is_empty()))
}

/// Normalises numbers and names: with `-N` iproute2 prints some scopes and tables as a number, others as a name.
fn text(value: &Value) -> String {
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    match text.as_str() {
        "global" => "0".to_owned(),
        "link" => "253".to_owned(),
        "host" => "254".to_owned(),
        _ => text,
    }
}

fn is_carried(it: &Value) -> bool {
    let name = it["ifname"].as_str().unwrap_or_default();
    let up = list_of_words(&it["flags"]).iter().any(|flag| flag == "UP");
    // sit0 and similar devices are in every namespace once their module is loaded; they are down.
    name != "lo" && !name.starts_with(OURS) && (up || it["link_type"] == "ether")
}

fn list_of_words(value: &Value) -> Vec<String> {
    let mut words: Vec<String> = value.as_array().into_iter().flatten().map(text).collect();
    words.sort();
    words
}

fn interface(place: usize, it: &Value, room: u64) -> String {
    let name = text(&it["ifname"]);
    let flags: Vec<String> = list_of_words(&it["flags"])
        .into_iter()
        .filter(|flag| matches!(flag.as_str(), "UP" | "NOARP" | "PROMISC" | "ALLMULTI"))
        .collect();
    let mtu = it["mtu"].as_u64().unwrap_or(0).min(room);
    // 0 means none, which the kernel replaces by the default when a qdisc is added.
    let queue = it["txqlen"].as_u64().filter(|length| *length > 0).unwrap_or(1000);
    format!(
        "interface {place}: {name} {} MTU {mtu}, queue {queue}, {}",
        text(&it["address"]),
        flags.join(" ")
    )
}

fn addresses(it: &Value) -> Vec<String> {
    let name = text(&it["ifname"]);
    let mut lines = Vec::new();
    for info in list(&it["addr_info"]) {
        let peer = info["address"].as_str().map(|peer| format!(" peer {peer}")).unwrap_or_default();
        let broadcast =
            info["broadcast"].as_str().map(|address| format!(" broadcast {address}")).unwrap_or_default();
        lines.push(format!(
            "address {name} {}/{} scope {}{peer}{broadcast}{}{}",
            text(&info["local"]),
            info["prefixlen"],
            text(&info["scope"]),
            lifetime(info, "valid", "valid_life_time"),
            lifetime(info, "preferred", "preferred_life_time"),
        ));
    }
    lines
}

/// Describes whether an address has a lifetime, and whether it is over. The figure changes from one read to the next.
fn lifetime(info: &Value, word: &str, key: &str) -> String {
    match info[key].as_u64() {
        None | Some(FOR_EVER) => String::new(),
        Some(0) => format!(", no longer {word}"),
        Some(_) => format!(", {word} for a time"),
    }
}

fn route(family: &str, it: &Value, room: u64) -> Option<String> {
    let kind = it["type"].as_str().map(str::to_owned);
    // The kernel's own routes, from the addresses; by name or, with `-N`, by number.
    let own = ["local", "broadcast", "anycast", "multicast", "2", "3", "4", "5"];
    let destination = text(&it["dst"]);
    // For an IPv4 address of lo the kernel makes the whole prefix local; it does so for 127.0.0.1 in every namespace.
    let of_prefix = kind.as_deref().is_some_and(|kind| matches!(kind, "local" | "2"))
        && destination.contains('/')
        && destination != "127.0.0.0/8";
    let of_localhost = kind.is_none() && destination == "::1";
    if of_localhost || !of_prefix && kind.as_deref().is_some_and(|kind| own.contains(&kind)) {
        return None;
    }
    let mut it = it.clone();
    if let Some(metrics) = it.get_mut("metrics").and_then(Value::as_array_mut) {
        for metric in metrics.iter_mut().filter_map(Value::as_object_mut) {
            if let Some(mtu) = metric.get("mtu").and_then(Value::as_u64) {
                metric.insert("mtu".to_owned(), mtu.min(room).into());
            }
        }
    }
    let ends = if it["expires"].as_u64().is_some_and(|seconds| seconds > 0) { ", for a time" } else { "" };
    Some(format!("{family} route {}{ends}", canonical(&it, &["flags", "expires", "hoplimit"])))
}

/// Returns every key and value in the order of the keys; of the flags only `onlink`.
fn canonical(it: &Value, without: &[&str]) -> String {
    let empty = Map::new();
    let mut words: Vec<String> = it
        .as_object()
        .unwrap_or(&empty)
        .iter()
        .filter(|(key, _)| !without.contains(&key.as_str()))
        .filter(|(key, value)| !(*key == "table" && matches!(text(value).as_str(), "254" | "main")))
        .map(|(key, value)| match value {
            Value::Array(items) if items.iter().all(Value::is_object) => {
                let items: Vec<String> = items.iter().map(|item| canonical(item, without)).collect();
                format!("{key} [{}]", items.join("; "))
            }
            value => format!("{key} {}", text(value)),
        })
        .collect();
    if list_of_words(&it["flags"]).iter().any(|flag| flag == "onlink") {
        words.push("onlink".to_owned());
    }
    words.sort();
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn picture() -> Picture {
        Picture {
            interfaces: json!([
                {"ifindex": 1, "ifname": "lo", "flags": ["LOOPBACK", "UP"], "mtu": 65536, "addr_info": []},
                {"ifindex": 9, "ifname": "eth0", "flags": ["UP", "BROADCAST"], "mtu": 1500, "txqlen": 1000,
                 "address": "0a:00:00:00:00:01", "link_type": "ether", "addr_info": [
                    {"family": "inet", "local": "10.1.0.2", "prefixlen": 24, "scope": "global"}]},
            ]),
            routes: vec![
                json!([{"dst": "default", "gateway": "10.1.0.1", "dev": "eth0", "flags": ["onlink"],
                        "metrics": [{"mtu": 1480}]},
                       {"type": "local", "dst": "10.1.0.2", "dev": "eth0", "table": "local", "flags": []},
                       {"type": "blackhole", "dst": "10.9.0.0/16", "flags": []}]),
                json!([]),
            ],
            rules: vec![json!([{"priority": 0, "src": "all", "table": "255"}]), json!([])],
            neighbours: json!([{"dst": "169.254.1.1", "dev": "eth0", "lladdr": "ee:ee:ee:ee:ee:ee"}, {}]),
            sysctls: vec![("ipv4/conf/eth0/arp_notify".to_owned(), Some("1".to_owned()))],
        }
    }

    #[test]
    fn a_picture_describes_the_network_of_a_program() {
        let lines: Vec<String> = picture().lines(9000).into_iter().collect();
        let expected = [
            "IPv4 route dev eth0 dst default gateway 10.1.0.1 metrics [mtu 1480] onlink",
            "IPv4 route dst 10.9.0.0/16 type blackhole",
            "IPv4 rule priority 0 src all table 255",
            "address eth0 10.1.0.2/24 scope 0",
            "interface 0: eth0 0a:00:00:00:00:01 MTU 1500, queue 1000, UP",
            "loopback up",
            "neighbour eth0 169.254.1.1 ee:ee:ee:ee:ee:ee",
            "sysctl ipv4/conf/eth0/arp_notify = 1",
        ];
        assert_eq!(lines, expected);
    }

    #[test]
    fn a_prefix_on_lo_is_distinguished_from_default_routes() {
        let mut with = picture();
        let kernels = |it: serde_json::Value| {
            let mut it = it;
            it["protocol"] = json!("2");
            it["dev"] = json!("lo");
            it
        };
        with.routes = vec![
            json!([
                kernels(json!({"type": "2", "dst": "127.0.0.0/8", "table": "255"})),
                kernels(json!({"type": "2", "dst": "10.75.0.1", "table": "255"})),
                kernels(json!({"type": "2", "dst": "10.75.0.0/24", "table": "255"}))
            ]),
            json!([
                kernels(json!({"dst": "::1", "metric": 256})),
                kernels(json!({"dst": "fd00:abcd::/64", "metric": 256}))
            ]),
        ];
        let routes: Vec<String> =
            with.lines(9000).into_iter().filter(|line| line.contains(" route ")).collect();
        assert_eq!(
            routes,
            [
                "IPv4 route dev lo dst 10.75.0.0/24 protocol 2 table 255 type 2",
                "IPv6 route dev lo dst fd00:abcd::/64 metric 256 protocol 2",
            ]
        );
    }

    #[test]
    fn every_difference_is_named() {
        type Change = fn(&mut Picture);
        let cases: [(Change, &str); 14] = [
            (|it| it.interfaces[1]["mtu"] = json!(1400), "MTU 1400"),
            (|it| it.interfaces[1]["address"] = json!("0a:00:00:00:00:02"), "0a:00:00:00:00:02"),
            (|it| it.interfaces[1]["addr_info"][0]["prefixlen"] = json!(25), "10.1.0.2/25"),
            (|it| it.routes[0][0]["gateway"] = json!("10.1.0.9"), "10.1.0.9"),
            (|it| it.routes[0][0]["flags"] = json!([]), "metrics [mtu 1450]"),
            (|it| it.routes[0][2]["type"] = json!("unreachable"), "unreachable"),
            (|it| it.rules[0][0]["table"] = json!("7"), "table 7"),
            (|it| it.neighbours = json!([]), "neighbour"),
            (|it| it.sysctls[0].1 = None, "does not exist"),
            (|it| it.interfaces[0]["flags"] = json!(["LOOPBACK"]), "loopback down"),
            (
                |it| {
                    it.interfaces[0]["addr_info"] =
                        json!([{"local": "10.9.9.9", "prefixlen": 32, "scope": "global"}])
                },
                "address lo 10.9.9.9/32",
            ),
            (|it| it.interfaces[1]["addr_info"][0]["valid_life_time"] = json!(60), "valid for a time"),
            (|it| it.interfaces[1]["addr_info"][0]["preferred_life_time"] = json!(0), "no longer preferred"),
            (|it| it.routes[0][0]["expires"] = json!(60), "for a time"),
        ];
        assert!(picture().differences(&picture(), 1450).is_empty());
        for (change, named) in cases {
            let mut other = picture();
            change(&mut other);
            let found = picture().differences(&other, 1450);
            assert!(found.iter().any(|line| line.contains(named)), "{named} is not in {found:?}");
        }
    }

    #[test]
    fn a_required_change_of_the_tunnel_is_no_difference() {
        let mut inside = picture();
        inside.interfaces[1]["mtu"] = json!(1450);
        inside.interfaces[1]["ifindex"] = json!(2);
        inside.routes[0][0]["metrics"][0]["mtu"] = json!(1450);
        assert!(picture().differences(&inside, 1450).is_empty());
        assert!(!picture().differences(&inside, 1500).is_empty());
        // Peerpod's devices are no difference either.
        let ours = json!({"ifindex": 10, "ifname": "pp-vx0", "flags": ["UP"], "mtu": 1450, "addr_info": []});
        inside.interfaces.as_array_mut().unwrap().push(ours);
        assert!(picture().differences(&inside, 1450).is_empty());
    }
}
