//! Checks ports, other nodes, and the MTU of the node's network. Opens sockets only, and asks the node for its VMs.

mod path;
pub(super) mod vms;

use std::fs::read_to_string;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::thread::sleep;
use std::time::Duration;

use serde_json::Value;

use super::config::Config;
use crate::item::{Area, Item, Outcome, failed, skipped, warning};

/// Time limit of a connection.
const CONNECT: Duration = Duration::from_secs(3);
/// Time for the report of a machine or firewall that refuses a UDP packet.
const REPORT: Duration = Duration::from_millis(500);
/// Size limit of an answer of `/readyz`.
const MOST_ANSWER: u64 = 64 << 10;
/// Most other nodes that are dialled.
pub(super) const MOST_PEERS: usize = 16;
/// Smallest MTU: 1280 of IPv6 within the tunnel, and 70 of its headers.
const LEAST_MTU: u32 = 1350;
/// Listening addresses of the daemons.
const PORTS: [&str; 3] = ["relay.listen", "relay.admin-listen", "node.admin-listen"];

/// Checks the network before the installation (`pre`) or with the daemons.
pub(super) fn check(config: &Config, pre: bool, peers: &[IpAddr]) -> Vec<Item> {
    let mut items = Vec::new();
    for key in PORTS.into_iter().filter(|_| pre) {
        let bound = config.text(key).parse::<SocketAddr>().map(TcpListener::bind);
        let bound = bound.unwrap_or_else(|why| Err(io::Error::other(why.to_string())));
        items.push(Area::Network.item(key, free(key, &config.text(key), bound.map(drop))));
    }
    if !pre {
        let (answering, outcome) = others(config, peers);
        items.push(Area::Network.item("other-nodes", outcome));
        items.push(Area::Network.item("path-mtu", path::check(&answering, uplink())));
    }
    items.push(Area::Network.item("mtu", mtu(uplink())));
    items
}

/// Checks what the daemons report, and the socket of the shims.
pub(super) fn daemons(config: &Config) -> Vec<Item> {
    let socket = format!("{}/hypervisor.sock", config.text("paths.run-dir"));
    let reached = std::os::unix::net::UnixStream::connect(&socket).map(drop);
    let reached = reached.map(|()| format!("peerpod-relay answers at {socket}")).or_else(|why| {
        let remedy =
            "start peerpod-relay on this node; its pods need the label katacontainers.io/kata-runtime=true";
        failed(format!("connect to {socket}, which shims dial: {why}"), remedy)
    });
    let mut items = vec![Area::Daemons.item("hypervisor-socket", reached)];
    for (name, key) in [("relay", "relay.admin-listen"), ("node", "node.admin-listen")] {
        items.extend(ready(name, key, readyz(&config.text(key))));
    }
    items
}

/// Whether peerpod-node answers on this node.
pub(super) fn is_running(config: &Config) -> bool {
    readyz(&config.text("node.admin-listen")).is_ok()
}

/// Returns `/readyz` of a daemon. An address that means all is dialled at the loopback.
fn readyz(address: &str) -> io::Result<Value> {
    let mut address: SocketAddr = address.parse().map_err(|_| io::Error::from(ErrorKind::InvalidInput))?;
    if address.ip().is_unspecified() {
        address.set_ip(Ipv4Addr::LOCALHOST.into());
    }
    let mut stream = TcpStream::connect_timeout(&address, CONNECT)?;
    stream.set_read_timeout(Some(CONNECT))?;
    stream.write_all(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.take(MOST_ANSWER).read_to_string(&mut answer)?;
    let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    serde_json::from_str(body).map_err(io::Error::other)
}

/// Makes one item per reason why the daemon is not ready, and per warning.
fn ready(name: &str, key: &str, answer: io::Result<Value>) -> Vec<Item> {
    let answer = match answer {
        Ok(answer) => answer,
        Err(why) => {
            let outcome = failed(
                format!("ask peerpod-{name} at {key}: {why}"),
                format!("start peerpod-{name}; see its log"),
            );
            return vec![Area::Daemons.item(name, outcome)];
        }
    };
    let reasons = |field: &str| {
        let all = answer[field].as_object().into_iter().flatten();
        all.map(|(name, why)| (name.clone(), why.as_str().unwrap_or_default().to_owned())).collect::<Vec<_>>()
    };
    let remedy = format!("follow the text; the log of peerpod-{name} has more");
    let waiting = reasons("waiting").into_iter().map(|(reason, why)| (reason, failed(why, &remedy)));
    let warned = reasons("warnings").into_iter().map(|(reason, why)| (reason, warning(why, &remedy)));
    let mut items: Vec<Item> = waiting
        .chain(warned)
        .map(|(reason, outcome)| Area::Daemons.item(&format!("{name} {reason}"), outcome))
        .collect();
    if answer["ready"] == true {
        items.insert(0, Area::Daemons.item(name, Ok(format!("peerpod-{name} is ready"))));
    }
    items
}

fn free(key: &str, address: &str, bound: io::Result<()>) -> Outcome {
    match bound {
        Ok(()) => Ok(format!("TCP {address} is free")),
        Err(why) if why.kind() == ErrorKind::AddrInUse => {
            let remedy =
                format!("end the program that `ss -ltnp` shows at that port, or set {key} to another one");
            failed(format!("TCP {address} is in use"), remedy)
        }
        Err(why) => {
            failed(format!("listen on {address}: {why}"), format!("set {key} to an address of this node"))
        }
    }
}

/// Dials the relays of other nodes by TCP, and sends each a UDP packet. Each node's check does that, so both ways are
/// tried. Returns the relays that answer TCP. A relay answers UDP to its own VMs only, so only a refusal shows here.
fn others(config: &Config, peers: &[IpAddr]) -> (Vec<SocketAddr>, Outcome) {
    if peers.is_empty() {
        return (Vec::new(), skipped("no other node with peer pods is known here"));
    }
    let port = config.port("relay.listen").unwrap_or_default();
    let relays: Vec<SocketAddr> = peers.iter().map(|peer| SocketAddr::new(*peer, port)).collect();
    let (mut answering, mut faults) = (Vec::new(), Vec::new());
    for relay in &relays {
        match TcpStream::connect_timeout(relay, CONNECT) {
            Ok(_) => answering.push(*relay),
            Err(why) => faults.push(format!("TCP {relay} ({why})")),
        }
    }
    faults.extend(refusals(&relays).into_iter().map(|(relay, why)| format!("UDP {relay} ({why})")));
    let outcome = if faults.is_empty() {
        Ok(format!(
            "the relays of {} other nodes answer at TCP port {port}, and UDP is not refused",
            peers.len()
        ))
    } else {
        failed(format!("no way to {}", faults.join(", ")), open_ports(config))
    };
    (answering, outcome)
}

/// Remedy of a closed way between nodes and VMs.
fn open_ports(config: &Config) -> String {
    let (port, tunnel) = (config.port("relay.listen").unwrap_or_default(), config.text("tunnel.port"));
    format!("open TCP and UDP {port} and UDP {tunnel} between nodes and VMs in security groups and firewalls")
}

/// Sends each address a UDP packet. Returns those for which this or another machine reports that it does not arrive.
fn refusals(relays: &[SocketAddr]) -> Vec<(SocketAddr, io::Error)> {
    let send = |relay: &SocketAddr| {
        let any: IpAddr =
            if relay.is_ipv6() { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() };
        let socket = UdpSocket::bind((any, 0))?;
        socket.connect(relay)?;
        // No question of a guest, so the relay is silent.
        socket.send(&[0])?;
        io::Result::Ok(socket)
    };
    let sent: Vec<(SocketAddr, io::Result<UdpSocket>)> =
        relays.iter().map(|relay| (*relay, send(relay))).collect();
    sleep(REPORT);
    let refusal =
        |(relay, socket): (SocketAddr, io::Result<UdpSocket>)| match socket.map(|one| one.take_error()) {
            Ok(Ok(None)) => None,
            Ok(Ok(Some(why)) | Err(why)) | Err(why) => Some((relay, why)),
        };
    sent.into_iter().filter_map(refusal).collect()
}

/// Returns the device of the default route, and its MTU.
fn uplink() -> Option<(String, u32)> {
    let v4 = read_to_string("/proc/net/route").unwrap_or_default();
    let v6 = read_to_string("/proc/net/ipv6_route").unwrap_or_default();
    let device = default_device(&v4, &v6)?;
    let mtu = read_to_string(format!("/sys/class/net/{device}/mtu")).ok()?;
    Some((device, mtu.trim().parse().ok()?))
}

/// Finds the device of the default route in the kernel's tables.
fn default_device(v4: &str, v6: &str) -> Option<String> {
    let column = |line: &str, number: usize| line.split_whitespace().nth(number).map(str::to_owned);
    let v4 = v4.lines().find(|line| {
        column(line, 1).is_some_and(|to| to == "00000000") && column(line, 7).as_deref() == Some("00000000")
    });
    let v6 = v6.lines().find(|line| {
        column(line, 1).as_deref() == Some("00") && column(line, 9).is_some_and(|device| device != "lo")
    });
    v4.and_then(|line| column(line, 0)).or_else(|| v6.and_then(|line| column(line, 9)))
}

fn mtu(uplink: Option<(String, u32)>) -> Outcome {
    match uplink {
        None => skipped("this network namespace has no default route"),
        Some((device, mtu)) if mtu < LEAST_MTU => failed(
            format!("{device} has MTU {mtu}, and pods need {LEAST_MTU}"),
            format!("raise the MTU of {device} and of the path to the VMs"),
        ),
        Some((device, mtu)) => Ok(format!("{device} has MTU {mtu}; each VM measures its own path, too")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::item::Verdict;

    #[test]
    fn ports_that_are_in_use_are_named() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = taken.local_addr().unwrap();
        let item = Area::Network
            .item("x", free("relay.listen", &address.to_string(), TcpListener::bind(address).map(drop)));
        assert!(item.verdict == Verdict::Failed && item.cause.ends_with("is in use"), "{item:?}");
        assert!(item.remedy.contains("relay.listen"), "{item:?}");
    }

    #[test]
    fn a_refused_udp_packet_is_named() {
        let open = UdpSocket::bind("127.0.0.1:0").unwrap();
        let closed = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let found = refusals(&[open.local_addr().unwrap(), closed]);
        let found: Vec<_> = found.into_iter().map(|(relay, why)| (relay, why.kind())).collect();
        assert_eq!(found, [(closed, ErrorKind::ConnectionRefused)]);
    }

    #[test]
    fn each_reason_of_a_daemon_is_an_item() {
        let answer = serde_json::json!({"ready": false, "waiting": {"relay": "away"}, "warnings": {"provider": "low"}});
        let items = ready("node", "node.admin-listen", Ok(answer));
        let shown: Vec<_> = items.iter().map(|item| (item.name.as_str(), item.verdict)).collect();
        assert_eq!(
            shown,
            [("daemons/node relay", Verdict::Failed), ("daemons/node provider", Verdict::Warning)]
        );
        assert_eq!(ready("relay", "k", Ok(serde_json::json!({"ready": true})))[0].verdict, Verdict::Ok);
        assert_eq!(ready("relay", "k", Err(ErrorKind::ConnectionRefused.into()))[0].verdict, Verdict::Failed);
    }

    #[test]
    fn the_default_route_names_the_device_and_a_small_mtu_fails() {
        let v4 = "Iface Destination Gateway Flags RefCnt Use Metric Mask\ndocker0 0000FEA9 0 1 0 0 0 0000FFFF\neth0 00000000 0101A8C0 3 0 0 0 00000000\n";
        assert_eq!(default_device(v4, "").as_deref(), Some("eth0"));
        let zero = "0".repeat(32);
        let v6 = format!(
            "{zero} 00 {zero} 00 {zero} ffffffff 1 0 00200200 lo\n{zero} 00 {zero} 00 fe80 400 1 0 3 eth1\n"
        );
        assert_eq!(default_device("", &v6).as_deref(), Some("eth1"));
        let verdict = |uplink| Area::Network.item("mtu", mtu(uplink)).verdict;
        assert_eq!(verdict(Some(("eth0".to_owned(), 1280))), Verdict::Failed);
        assert_eq!(verdict(Some(("eth0".to_owned(), 1500))), Verdict::Ok);
        assert_eq!(verdict(None), Verdict::Skipped);
    }
}
