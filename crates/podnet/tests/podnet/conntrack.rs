//! Tests that tunnel packets do not fill the node's conntrack table.

use super::world;
use std::collections::BTreeSet;
use std::os::fd::AsRawFd;

use netlink_packet_core::{DefaultNla, NLM_F_APPEND, NLM_F_CREATE, NetlinkMessage};
use netlink_packet_netfilter::nftables::{
    ChainAttribute, ChainMessage, Expressions, Hook, InetHookNumber, NfTablesMessage, RuleAttribute,
    RuleMessage, TableAttribute, TableMessage,
};
use netlink_packet_netfilter::none::ControlMessage;
use netlink_packet_netfilter::{NetfilterHeader, NetfilterMessage, NetfilterProtoFamily};
use nix::sys::socket::{MsgFlags, recv, send};
use peerpod_podnet::netns::Netns;
use peerpod_podnet::nft::{Filter, Peer};
use world::{SHAPE4, World};

/// Returns the tunnel's entries in the node's conntrack table.
fn entries(world: &World) -> BTreeSet<String> {
    let all = world.within("node", || std::fs::read_to_string("/proc/thread-self/net/nf_conntrack").unwrap());
    let flow = |line: &str| line.split_whitespace().filter(|word| word.contains("port=")).collect::<String>();
    all.lines().filter(|line| line.contains("dport=4789 ")).map(flow).collect()
}

/// Sends one UDP flow from each of fifty ports through the whole tunnel.
fn flows(world: &World) {
    world.within("other", || {
        for _ in 0..50 {
            let socket = std::net::UdpSocket::bind("10.244.1.20:0").unwrap();
            socket.send_to(b"x", "10.244.1.7:9").unwrap();
        }
    });
}

#[test]
fn tunnel_packets_are_no_conntrack_entries() {
    let mut world = World::new();
    let node = world.open("node");
    // A rule that matches on the state makes the kernel track connections in this namespace.
    track(&node);
    let mut client = node.netfilter().unwrap();
    let filter = Filter::new(SHAPE4.port);
    let pod = world.pod("pod", 7);
    let seen = peerpod_podnet::inspect::inspect(&pod).unwrap();
    let held = world.reserve(&pod, "sandbox", SHAPE4, None).unwrap();
    filter
        .add(&mut client, &[Peer { address: "10.77.0.2".parse().unwrap(), vni: held.vni }], &Vec::new)
        .unwrap();
    // Packets that the kernel sent by itself through the new device, before the filter existed.
    let before = entries(&world);
    let plan = world.connect(&pod, held, SHAPE4, &seen).unwrap();
    world.apply(&plan).unwrap();
    world.ping("other", "10.244.1.7", 56);
    flows(&world);
    assert_eq!(entries(&world).difference(&before).count(), 0, "{:?}", entries(&world));
    filter.delete(&mut client).unwrap();
    flows(&world);
    assert!(entries(&world).len() > 10, "without the filter there are entries, so the test can find them");
}

/// Makes the kernel track connections in a namespace, as any stateful firewall does.
fn track(netns: &Netns) {
    let table = || "firewall".to_owned();
    let chain = || "state".to_owned();
    let state = vec![
        DefaultNla::new(1, 1_u32.to_be_bytes().to_vec()),
        DefaultNla::new(2, 0_u32.to_be_bytes().to_vec()),
    ];
    let rule = Expressions::Other { expression_type: "ct".to_owned(), attributes: state };
    let inet = |m| NetfilterMessage::new(NetfilterHeader::new(NetfilterProtoFamily::Inet, 0, 0), m);
    let frame = |m| NetfilterMessage::new(NetfilterHeader::new(NetfilterProtoFamily::Unspec, 0, 10), m);
    let hook = vec![Hook::Number(InetHookNumber::LocalIn.into()), Hook::Priority(0)];
    let messages = [
        (0, frame(ControlMessage::BatchBegin)),
        (
            NLM_F_CREATE,
            inet(NfTablesMessage::NewTable(TableMessage { attributes: vec![TableAttribute::Name(table())] })),
        ),
        (
            NLM_F_CREATE,
            inet(NfTablesMessage::NewChain(ChainMessage {
                attributes: vec![
                    ChainAttribute::Table(table()),
                    ChainAttribute::Name(chain()),
                    ChainAttribute::Type("filter".to_owned()),
                    ChainAttribute::Hook(hook),
                ],
            })),
        ),
        (
            NLM_F_CREATE | NLM_F_APPEND,
            inet(NfTablesMessage::NewRule(RuleMessage {
                attributes: vec![
                    RuleAttribute::Table(table()),
                    RuleAttribute::Chain(chain()),
                    RuleAttribute::Expressions(vec![rule.into()]),
                ],
            })),
        ),
        (0, frame(ControlMessage::BatchEnd)),
    ];
    let mut datagram = Vec::new();
    for (number, (flags, message)) in (1..).zip(messages) {
        let mut message = NetlinkMessage::from(message);
        message.header.flags = flags | 1 | 4;
        message.header.sequence_number = number;
        message.finalize();
        let start = datagram.len();
        datagram.resize(start + message.buffer_len().next_multiple_of(4), 0);
        message.serialize(&mut datagram[start..start + message.buffer_len()]);
    }
    netns
        .run(|| {
            let mut socket = netlink_sys::Socket::new(netlink_sys::protocols::NETLINK_NETFILTER).unwrap();
            socket.bind_auto().unwrap();
            send(socket.as_raw_fd(), &datagram, MsgFlags::empty()).unwrap();
            let mut answers = vec![0; 8192];
            while let Ok(length) = recv(socket.as_raw_fd(), &mut answers, MsgFlags::MSG_DONTWAIT) {
                for (at, part) in answers[..length].chunks(4).enumerate() {
                    assert!(at != 4 || part == [0; 4], "the rule was refused: {:?}", &answers[..length]);
                }
            }
        })
        .unwrap();
}
