//! Tests of the encrypted kind's private namespace and port: deletions by other programs, and state that guests must
//! find again.

use std::io::ErrorKind;
use std::net::{Ipv6Addr, UdpSocket};
use std::path::PathBuf;
use std::time::Instant;

use peerpod_podnet::netns;
use serde_json::{Value, json};

use super::*;

struct Place {
    world: World,
    folder: PathBuf,
}

impl Place {
    fn new() -> Place {
        let world = World::new();
        let folder = std::env::temp_dir().join(format!("peerpod-encrypted-{}", world.name("x")));
        Place { world, folder }
    }

    fn open(&self, port: u16) -> Tunnel {
        let wireguard = WireguardConfig {
            port,
            key_dir: self.folder.join("key"),
            netns: self.folder.join("wireguard.netns"),
            relay: self.folder.join("relay-fds.sock"),
        };
        let config = TunnelConfig {
            kind: TunnelKind::Wireguard,
            wireguard: Some(wireguard),
            ..TunnelConfig::default()
        };
        open_with(&self.world, config)
    }

    fn netns(&self) -> PathBuf {
        self.folder.join("wireguard.netns")
    }

    /// Runs `ip` in the private namespace.
    fn inside(&self, arguments: &str) -> String {
        run(&format!("nsenter --net={} ip {arguments}", self.netns().display()))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        drop(netns::delete_named(self.netns()));
        drop(std::fs::remove_dir_all(&self.folder));
    }
}

/// Takes the node's descriptors as the relay would; returns the state that it then reports, and the descriptors that it
/// has.
fn take(wireguard: &Wireguard, held: Option<&Value>) -> (Value, Vec<std::os::fd::OwnedFd>) {
    let FdHandoff { detail, descriptors } =
        wireguard.wanted(held).unwrap().expect("the node passes descriptors");
    let mut kept = Vec::new();
    let mut port = held.and_then(|held| held["port"].as_u64());
    for (name, descriptor) in descriptors {
        if name == "udp" {
            let socket = UdpSocket::from(descriptor);
            port = Some(socket.local_addr().unwrap().port().into());
            kept.push(socket.into());
        } else {
            kept.push(descriptor);
        }
    }
    let key = wireguard.public_key().to_string();
    let said = json!({ "key": key, "port": port.unwrap(), "inside": detail["inside"] });
    wireguard.taken(&said);
    (said, kept)
}

#[test]
fn deleted_parts_of_the_private_namespace_are_restored_and_passed_to_the_relay() {
    let mut place = Place::new();
    let tunnel = place.open(0);
    let wireguard = tunnel.wireguard().unwrap();
    let (held, _relay) = take(wireguard, None);
    assert!(wireguard.wanted(Some(&held)).unwrap().is_none(), "all is well");
    let (pod, other) = (place.world.pod("pod", 7), place.world.pod("pod2", 8));
    let (_, reserved, _) = whole(&tunnel, &pod, "sandbox", ip(VM));
    let vm = peerpod_wireguard::inner_of(reserved.vni().unwrap()).unwrap();
    let sight = || {
        let (addresses, routes) = (place.inside("-4 -br addr show pp-wg0"), place.inside("route show"));
        let up = place.inside("-o link show up dev pp-wg0").contains("pp-wg0");
        (addresses.split_whitespace().last().map(str::to_owned), routes, up)
    };
    let before = sight();
    assert!(before.1.contains(&format!("{vm} dev pp-wg0")) && before.1.contains("mtu 1440"), "{}", before.1);
    for (change, anew) in [
        ("link del pp-wg0".to_owned(), true),
        ("link set pp-wg0 down".to_owned(), false),
        ("addr flush dev pp-wg0".to_owned(), false),
        (format!("route del {vm}"), false),
    ] {
        place.inside(&change);
        // The relay need not have noticed: it reports another device.
        if anew {
            let (_, _relay) = take(wireguard, Some(&held));
        }
        assert!(wireguard.wanted(Some(&held)).unwrap().is_none(), "after {change}");
        assert_eq!(sight(), before, "after {change}");
    }
    // Between two polls, the next pod's connection still works, and the relay gets the device.
    place.inside("link del pp-wg0");
    whole(&tunnel, &other, "sandbox2", ip("10.77.0.3"));
    let now = sight().1;
    assert!(before.1.lines().all(|line| now.lines().any(|now| now == line)), "{now}");
    assert!(now.lines().count() > before.1.lines().count(), "{now}");
    take(wireguard, Some(&held));

    // The name alone: the namespace is the same, with the pods' sockets in it.
    let id = NetnsId::of(&place.netns()).unwrap();
    netns::delete_named(place.netns()).unwrap();
    assert!(wireguard.wanted(Some(&held)).unwrap().is_none());
    assert_eq!(NetnsId::of(&place.netns()), Some(id));
    // Another program put another namespace in its place.
    netns::delete_named(place.netns()).unwrap();
    drop(netns::create_named(place.netns()).unwrap());
    assert!(wireguard.wanted(Some(&held)).unwrap().is_none());
    assert_eq!(NetnsId::of(&place.netns()), Some(id));
}

#[test]
fn a_port_that_the_kernel_chose_is_kept_or_refused_and_never_another_one() {
    let place = Place::new();
    let port = {
        let tunnel = place.open(0);
        let (held, _) = take(tunnel.wireguard().unwrap(), None);
        u16::try_from(held["port"].as_u64().unwrap()).unwrap()
    };
    // Another process holds the port, and the relay holds nothing.
    // A process that another test forks has the tunnel's socket until its exec.
    let deadline = Instant::now() + Duration::from_secs(30);
    let taken = place.world.within("node", || {
        loop {
            match UdpSocket::bind((Ipv6Addr::UNSPECIFIED, port)) {
                Err(error) if error.kind() == ErrorKind::AddrInUse && Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                bound => break bound.unwrap(),
            }
        }
    });
    let tunnel = place.open(0);
    let wireguard = tunnel.wireguard().unwrap();
    let error = wireguard.wanted(None).err().unwrap().to_string();
    assert!(error.contains(&port.to_string()) && error.contains("tunnel.wireguard-port"), "{error}");
    drop(taken);
    let (held, _relay) = take(wireguard, None);
    assert_eq!(held["port"], port);
}
