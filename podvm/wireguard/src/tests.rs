//! Tests two engines against each other: the test delivers, drops, delays, repeats or forges their datagrams.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use crate::engine::{Engine, Error, Path, Sink};
use crate::key::{PrivateKey, PublicKey};
use crate::lane::tests::vxlan;
use crate::lane::{Lane, NODE_INNER, inner_of};
use crate::peer::PeerConfig;
use crate::stats::Reason;

const PORT: u16 = 4789;
const VNI: u32 = 0x01_0203;
const GUEST_AT: &str = "192.0.2.7:40000";
const NODE_AT: &str = "198.51.100.1:51820";

#[derive(Default)]
struct Caught {
    network: Vec<(Path, Vec<u8>)>,
    tunnel: Vec<Vec<u8>>,
}

impl Sink for Caught {
    fn network(&mut self, path: &Path, datagram: &[u8]) {
        self.network.push((*path, datagram.to_vec()));
    }
    fn tunnel(&mut self, packet: &[u8]) {
        self.tunnel.push(packet.to_vec());
    }
}

fn at(text: &str) -> Path {
    Path { peer: text.parse().unwrap(), local: None }
}

fn inner(vni: u32) -> Ipv4Addr {
    inner_of(vni).unwrap()
}

fn guest_of(name: &str, key: PublicKey, vni: u32) -> PeerConfig {
    let lane = Lane { ours: NODE_INNER, theirs: inner(vni), port: PORT, vnis: vec![vni], fragments: false };
    PeerConfig { name: name.to_owned(), key, lane, endpoints: vec![], keepalive: None }
}

fn node_of(key: PublicKey, vni: u32, endpoints: &[&str]) -> PeerConfig {
    let lane = Lane { ours: inner(vni), theirs: NODE_INNER, port: PORT, vnis: vec![vni], fragments: true };
    let endpoints: Vec<SocketAddr> = endpoints.iter().map(|e| e.parse().unwrap()).collect();
    let keepalive = Some(Duration::from_secs(15));
    PeerConfig { name: "node".to_owned(), key, lane, endpoints, keepalive }
}

struct Pair {
    node: Engine,
    guest: Engine,
    guest_at: Path,
    scratch: Vec<u8>,
}

impl Pair {
    fn new() -> Pair {
        let node = Engine::new(PrivateKey::generate().unwrap());
        let guest = Engine::new(PrivateKey::generate().unwrap());
        node.put_peer(&guest_of("pod", guest.public_key(), VNI)).unwrap();
        guest.put_peer(&node_of(node.public_key(), VNI, &[NODE_AT])).unwrap();
        Pair { node, guest, guest_at: at(GUEST_AT), scratch: vec![0; 70_000] }
    }

    fn connected() -> Pair {
        let mut pair = Pair::new();
        let mut out = Caught::default();
        pair.guest.begin(Instant::now(), &mut out);
        pair.settle(out, Caught::default());
        assert_eq!(pair.node.stats().snapshot().handshakes, 1);
        pair
    }

    /// Delivers everything in both directions until both engines are silent; returns the packets that left the tunnel
    /// at the node and at the guest.
    fn settle(&mut self, mut from_guest: Caught, mut from_node: Caught) -> (Vec<Vec<u8>>, Vec<Vec<u8>>) {
        let (mut at_node, mut at_guest) = (Vec::new(), Vec::new());
        while !from_guest.network.is_empty() || !from_node.network.is_empty() {
            let (there, back) = (std::mem::take(&mut from_guest), std::mem::take(&mut from_node));
            for (_, datagram) in there.network {
                self.node.incoming(&self.guest_at, &datagram, &mut self.scratch, &mut from_node);
            }
            for (to, datagram) in back.network {
                assert_eq!(to.peer, self.guest_at.peer);
                self.guest.incoming(&at(NODE_AT), &datagram, &mut self.scratch, &mut from_guest);
            }
            at_node.append(&mut from_node.tunnel);
            at_guest.append(&mut from_guest.tunnel);
        }
        (at_node, at_guest)
    }

    fn seal_at_guest(&mut self, payload: &[u8]) -> Vec<u8> {
        let packet = vxlan(inner(VNI), NODE_INNER, PORT, VNI, payload);
        let mut out = Caught::default();
        self.guest.outgoing(&packet, &mut self.scratch, &mut out);
        assert_eq!(out.network.len(), 1);
        out.network.remove(0).1
    }

    /// Passes one datagram of the guest to the node and returns the packets that left the tunnel.
    fn node_hears(&mut self, datagram: &[u8]) -> Vec<Vec<u8>> {
        let from = self.guest_at;
        self.node_hears_from(&from, datagram)
    }

    fn node_hears_from(&mut self, from: &Path, datagram: &[u8]) -> Vec<Vec<u8>> {
        let mut out = Caught::default();
        self.node.incoming(from, datagram, &mut self.scratch, &mut out);
        out.tunnel
    }

    fn dropped(&self, why: Reason) -> u64 {
        self.node.stats().snapshot().dropped(why)
    }
}

#[test]
fn a_packet_that_waits_for_the_handshake_arrives_and_so_does_its_answer() {
    let mut pair = Pair::new();
    let asked = vxlan(inner(VNI), NODE_INNER, PORT, VNI, b"a frame");
    let mut out = Caught::default();
    pair.guest.outgoing(&asked, &mut pair.scratch, &mut out);
    let (at_node, _) = pair.settle(out, Caught::default());
    assert_eq!(at_node, [asked]);

    let answer = vxlan(NODE_INNER, inner(VNI), PORT, VNI, b"another");
    let mut out = Caught::default();
    pair.node.outgoing(&answer, &mut pair.scratch, &mut out);
    assert!(!out.network[0].1.windows(7).any(|w| w == b"another"), "it can be read on the wire");
    let (_, at_guest) = pair.settle(Caught::default(), out);
    assert_eq!(at_guest, [answer]);
}

#[test]
fn the_node_sends_nothing_to_a_guest_of_unknown_address() {
    let mut pair = Pair::new();
    let packet = vxlan(NODE_INNER, inner(VNI), PORT, VNI, b"x");
    let mut out = Caught::default();
    for _ in 0..1000 {
        pair.node.outgoing(&packet, &mut pair.scratch, &mut out);
    }
    assert!(out.network.is_empty());
    assert_eq!(pair.dropped(Reason::NoEndpoint), 1000, "and queues nothing");
    pair.node.outgoing(&vxlan(NODE_INNER, inner(9), PORT, 9, b"x"), &mut pair.scratch, &mut out);
    assert_eq!(pair.dropped(Reason::NoPeer), 1);
}

#[test]
fn lost_reordered_and_repeated_packets_are_each_handled_once() {
    let mut pair = Pair::connected();
    let mut sealed: Vec<Vec<u8>> = (0..200u8).map(|n| pair.seal_at_guest(&[n])).collect();
    sealed.retain(|d| d[8] % 10 != 3); // lost
    sealed.reverse();
    let mut arrived = 0;
    for datagram in &sealed {
        arrived += pair.node_hears(datagram).len();
    }
    assert_eq!(arrived, sealed.len());
    for datagram in &sealed {
        assert!(pair.node_hears(datagram).is_empty(), "a replay came through");
    }
    assert_eq!(pair.dropped(Reason::Replayed), sealed.len() as u64);
}

#[test]
fn a_forged_packet_is_dropped_and_changes_no_endpoint() {
    let mut pair = Pair::connected();
    let good = pair.seal_at_guest(b"frame");
    let elsewhere = at("203.0.113.9:9");
    for byte in [4, 20, good.len() - 1] {
        let mut bad = good.clone();
        bad[byte] ^= 1;
        assert!(pair.node_hears_from(&elsewhere, &bad).is_empty());
    }
    let mut last = good.clone();
    last[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
    assert!(pair.node_hears_from(&elsewhere, &last).is_empty());
    assert_eq!(pair.dropped(Reason::Forged), 2);
    assert_eq!(pair.node.path_of("pod").unwrap().peer, pair.guest_at.peer);
    assert_eq!(pair.node_hears(&good).len(), 1, "the true one still counts");
}

#[test]
fn a_guest_that_moves_is_followed_by_its_own_packets_only() {
    let mut pair = Pair::connected();
    let old = pair.seal_at_guest(b"1");
    let there = at("203.0.113.9:50000");
    let moved = pair.seal_at_guest(b"2");
    assert_eq!(pair.node_hears_from(&there, &moved).len(), 1);
    assert_eq!(pair.node.path_of("pod"), Some(there));
    assert_eq!(pair.node.stats().snapshot().roams, 1);
    pair.node_hears(&old); // late, but the newest authenticated packet
    assert_eq!(pair.node.path_of("pod"), Some(pair.guest_at));
    pair.node_hears_from(&there, &old);
    assert_eq!(pair.node.path_of("pod"), Some(pair.guest_at), "a replay moved it");
}

#[test]
fn the_node_answers_from_where_it_was_asked_and_a_guest_from_where_it_is() {
    let mut pair = Pair::new();
    let mut out = Caught::default();
    pair.guest.begin(Instant::now(), &mut out);
    let asked = Path { local: Some("198.51.100.1".parse().unwrap()), ..pair.guest_at };
    let mut answers = Caught::default();
    pair.node.incoming(&asked, &out.network[0].1, &mut pair.scratch, &mut answers);
    assert_eq!(pair.node.path_of("pod"), Some(asked));
    let answered = Path { local: Some("192.0.2.7".parse().unwrap()), ..at(NODE_AT) };
    pair.guest.incoming(&answered, &answers.network[0].1, &mut pair.scratch, &mut Caught::default());
    assert_eq!(pair.guest.path_of("node"), Some(at(NODE_AT)));
}

#[test]
fn another_key_gets_no_session() {
    let mut pair = Pair::new();
    let thief = Engine::new(PrivateKey::generate().unwrap());
    thief.put_peer(&node_of(pair.node.public_key(), VNI, &[NODE_AT])).unwrap();
    let mut out = Caught::default();
    thief.begin(Instant::now(), &mut out);
    assert!(pair.node_hears(&out.network[0].1).is_empty());
    assert_eq!(pair.dropped(Reason::Unknown), 1);
    // An engine that does not even have the node's key.
    let lost = Engine::new(PrivateKey::generate().unwrap());
    lost.put_peer(&node_of(thief.public_key(), VNI, &[NODE_AT])).unwrap();
    let mut out = Caught::default();
    lost.begin(Instant::now(), &mut out);
    assert!(pair.node_hears(&out.network[0].1).is_empty());
    assert_eq!(pair.dropped(Reason::Handshake), 1);
    assert_eq!(pair.node.stats().snapshot().handshakes, 0);
}

#[test]
fn a_replayed_handshake_changes_nothing() {
    let mut pair = Pair::new();
    let mut out = Caught::default();
    pair.guest.begin(Instant::now(), &mut out);
    let initiation = out.network[0].1.clone();
    pair.settle(out, Caught::default());
    let mut answers = Caught::default();
    pair.node.incoming(&at("203.0.113.9:9"), &initiation, &mut pair.scratch, &mut answers);
    assert!(answers.network.is_empty());
    assert_eq!(pair.dropped(Reason::Handshake), 1);
    assert_eq!(pair.node.path_of("pod"), Some(pair.guest_at));
}

#[test]
fn a_rekey_in_the_middle_of_traffic_loses_nothing() {
    let mut pair = Pair::connected();
    for round in 0..20u8 {
        let before = pair.seal_at_guest(&[round, 0]);
        let mut out = Caught::default();
        pair.guest.begin(Instant::now(), &mut out);
        let during = pair.seal_at_guest(&[round, 1]);
        pair.settle(out, Caught::default());
        let after = pair.seal_at_guest(&[round, 2]);
        assert_ne!(before[4..8], after[4..8], "the same session");
        for datagram in [after, before, during] {
            assert_eq!(pair.node_hears(&datagram).len(), 1);
        }
    }
    assert_eq!(pair.node.stats().snapshot().handshakes, 21);
}

#[test]
fn a_guest_unknown_to_its_node_starts_a_new_session_within_seconds() {
    let mut pair = Pair::connected();
    // Another process with the same key, as after a restart of the relay.
    let guest = pair.guest.public_key();
    let node = Engine::new(PrivateKey::from_bytes(pair.node.key_bytes().as_ref()).unwrap());
    node.put_peer(&guest_of("pod", guest, VNI)).unwrap();
    pair.node = node;
    let start = Instant::now();
    let lost = pair.seal_at_guest(b"x");
    assert!(pair.node_hears(&lost).is_empty());
    assert_eq!(pair.dropped(Reason::Unknown), 1);
    let mut healed = None;
    for ms in (0..10_000).step_by(250) {
        let mut out = Caught::default();
        pair.guest.tick(start + Duration::from_millis(ms), &mut out);
        pair.settle(out, Caught::default());
        if pair.node.stats().snapshot().handshakes == 1 {
            healed = Some(ms);
            break;
        }
    }
    assert!(healed.is_some_and(|ms| ms <= 4_000), "{healed:?}");
    let sealed = pair.seal_at_guest(b"y");
    assert_eq!(pair.node_hears(&sealed).len(), 1);
}

#[test]
fn an_engine_with_copied_endpoints_reaches_a_silent_guest() {
    let mut pair = Pair::connected();
    let node = Engine::new(PrivateKey::from_bytes(pair.node.key_bytes().as_ref()).unwrap());
    node.put_peer(&guest_of("pod", pair.guest.public_key(), VNI)).unwrap();
    let asked = vxlan(NODE_INNER, inner(VNI), PORT, VNI, b"are you there");
    let mut out = Caught::default();
    node.outgoing(&asked, &mut pair.scratch, &mut out);
    assert!(out.network.is_empty(), "the guest's place is unknown");
    node.take_places(&pair.node);
    assert_eq!(node.path_of("pod"), Some(pair.guest_at));
    pair.node = node;
    pair.node.outgoing(&asked, &mut pair.scratch, &mut out);
    let (_, at_guest) = pair.settle(Caught::default(), out);
    assert_eq!(at_guest, [asked]);
}

#[test]
fn a_silent_endpoint_is_replaced_by_the_next_one() {
    let node = Engine::new(PrivateKey::generate().unwrap());
    let guest = Engine::new(PrivateKey::generate().unwrap());
    guest.put_peer(&node_of(node.public_key(), VNI, &["192.0.2.1:1", "192.0.2.2:2"])).unwrap();
    let start = Instant::now();
    let mut out = Caught::default();
    guest.begin(start, &mut out);
    for ms in (0..5_000).step_by(250) {
        guest.tick(start + Duration::from_millis(ms), &mut out);
    }
    let tried: Vec<u16> = out.network.iter().map(|(path, _)| path.peer.port()).collect();
    assert!(tried.len() >= 4 && tried[0] == 1 && tried[1] == 2 && tried[2] == 1, "{tried:?}");
}

#[test]
fn too_many_handshakes_cost_a_cookie_and_an_honest_guest_pays_it() {
    let node = Engine::with_limit(PrivateKey::generate().unwrap(), 1);
    let mut scratch = vec![0; 2000];
    let flood = Engine::new(PrivateKey::generate().unwrap());
    flood.put_peer(&node_of(node.public_key(), 9, &[NODE_AT])).unwrap();
    let guest = Engine::new(PrivateKey::generate().unwrap());
    guest.put_peer(&node_of(node.public_key(), VNI, &[NODE_AT])).unwrap();
    node.put_peer(&guest_of("pod", guest.public_key(), VNI)).unwrap();
    let mut out = Caught::default();
    flood.begin(Instant::now(), &mut out);
    for _ in 0..50 {
        node.incoming(&at("203.0.113.9:9"), &out.network[0].1, &mut scratch, &mut Caught::default());
    }
    assert_eq!(node.stats().snapshot().cookies, 49);
    let mut honest = || {
        let (mut asked, mut answered) = (Caught::default(), Caught::default());
        guest.begin(Instant::now(), &mut asked);
        node.incoming(&at(GUEST_AT), &asked.network[0].1, &mut scratch, &mut answered);
        guest.incoming(&at(NODE_AT), &answered.network[0].1, &mut scratch, &mut Caught::default());
    };
    honest();
    assert_eq!(guest.stats().snapshot().handshakes, 0, "first it gets the cookie");
    honest();
    assert_eq!(guest.stats().snapshot().handshakes, 1);
}

#[test]
fn a_guest_cannot_send_into_another_pods_network() {
    let mut pair = Pair::connected();
    for packet in [
        vxlan(inner(VNI), NODE_INNER, PORT, VNI + 1, b"x"),
        vxlan(inner(VNI + 1), NODE_INNER, PORT, VNI, b"x"),
        vxlan(inner(VNI), inner(VNI + 1), PORT, VNI, b"x"),
    ] {
        let mut out = Caught::default();
        // A hostile guest writes past its own checks, but seals with its true keys.
        let everywhere = PeerConfig {
            lane: Lane {
                theirs: Ipv4Addr::from(<[u8; 4]>::try_from(&packet[16..20]).unwrap()),
                ..node_of(pair.node.public_key(), VNI, &[]).lane
            },
            ..node_of(pair.node.public_key(), VNI, &[NODE_AT])
        };
        pair.guest.put_peer(&everywhere).unwrap();
        pair.guest.outgoing(&packet, &mut pair.scratch, &mut out);
        pair.settle(out, Caught::default());
    }
    let snapshot = pair.node.stats().snapshot();
    assert_eq!((snapshot.dropped(Reason::NotAllowed), snapshot.packets_received), (3, 0));
}

#[test]
fn a_key_or_an_address_belongs_to_one_sandbox() {
    let node = Engine::new(PrivateKey::generate().unwrap());
    let keys: Vec<PublicKey> = (0..3).map(|_| PrivateKey::generate().unwrap().public()).collect();
    node.put_peer(&guest_of("a", keys[0], 5)).unwrap();
    node.put_peer(&guest_of("a", keys[0], 5)).unwrap();
    let taken = |text: &str| Err(Error(format!("the tunnel {text}")));
    let key = taken("key of b already belongs to a; every VM makes its own key");
    assert_eq!(node.put_peer(&guest_of("b", keys[0], 6)), key);
    let address = taken("address 10.0.0.5 of b already belongs to a");
    assert_eq!(node.put_peer(&guest_of("b", keys[1], 5)), address);
    node.put_peer(&guest_of("b", keys[1], 6)).unwrap();
    node.put_peer(&guest_of("a", keys[2], 7)).unwrap();
    node.put_peer(&guest_of("c", keys[0], 5)).unwrap();
    assert_eq!(node.peers(), 3, "the key and address of a are free again");
    for name in ["a", "b", "c", "d"] {
        node.remove_peer(name);
    }
    assert_eq!(node.peers(), 0);
}

#[test]
fn packets_of_a_removed_peer_are_dropped() {
    let mut pair = Pair::connected();
    let sealed = pair.seal_at_guest(b"x");
    pair.node.remove_peer("pod");
    assert!(pair.node_hears(&sealed).is_empty());
    let mut out = Caught::default();
    pair.guest.begin(Instant::now(), &mut out);
    pair.settle(out, Caught::default());
    assert_eq!(pair.dropped(Reason::Unknown), 2);
}

proptest::proptest! {
    #[test]
    fn any_datagram_is_handled(kind in 0u8..6, length in 0usize..200, seed: u8) {
        let pair = Pair::new();
        let mut datagram: Vec<u8> = (0..length).map(|n| seed.wrapping_mul(31).wrapping_add(n as u8)).collect();
        for (n, byte) in datagram.iter_mut().take(4).enumerate() {
            *byte = if n == 0 { kind } else { 0 };
        }
        let mut scratch = vec![0; 400];
        pair.node.incoming(&at(GUEST_AT), &datagram, &mut scratch, &mut Caught::default());
        pair.node.outgoing(&datagram, &mut scratch, &mut Caught::default());
        pair.node.outgoing(&datagram, &mut [], &mut Caught::default());
    }
}
