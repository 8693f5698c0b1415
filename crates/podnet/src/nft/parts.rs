//! Builds nftables messages and their parts. Pure except for [`commit`] and [`generation`].

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use netlink_packet_core::{DefaultNla, NLM_F_APPEND, NLM_F_CREATE, NetlinkDeserializable, NetlinkHeader};
use netlink_packet_netfilter::nftables::{
    Bitwise, ChainAttribute, ChainMessage, Cmp, DataAttribute, Expressions, GenAttribute, GenMessage, Hook,
    Immediate, InetHookNumber, ListAttribute, Meta, MetaKey, NfTablesMessage, Operator, Payload, Register,
    RuleAttribute, RuleMessage, SetElementAttribute, SetElementList, TableAttribute, TableMessage, Verdict,
    VerdictAttribute,
};
use netlink_packet_netfilter::none::ControlMessage;
use netlink_packet_netfilter::{
    NetfilterHeader, NetfilterMessage, NetfilterMessageInner, NetfilterProtoFamily,
};
use nix::errno::Errno;

use super::Peer;
use crate::netlink::{self, Client};

/// The kernel's number for nftables among the subsystems of netfilter's netlink.
const SUBSYSTEM: u16 = 10;
const BATCH_BEGIN: u8 = 16;
const BATCH_GENID: u16 = 1;
pub(crate) const NF_DROP: u32 = 0;
pub(crate) const NF_ACCEPT: u32 = 1;
const BASE_NETWORK: u32 = 1;
pub(crate) const BASE_TRANSPORT: u32 = 2;

pub(crate) type Message = (u16, NetfilterMessage);

/// Name of a table in family `inet`, for the messages about it.
#[derive(Clone, Copy)]
pub(crate) struct Table<'a>(pub(crate) &'a str);

impl Table<'_> {
    fn message(self) -> TableMessage {
        TableMessage { attributes: vec![TableAttribute::Name(self.0.to_owned())] }
    }

    pub(crate) fn make(self, flags: u16) -> Message {
        (NLM_F_CREATE | flags, inet(NfTablesMessage::NewTable(self.message())))
    }

    pub(crate) fn delete(self) -> Message {
        (0, inet(NfTablesMessage::DeleteTable(self.message())))
    }

    /// Returns the messages that make the table, in place of an existing one. Deleting requires an existing table.
    pub(crate) fn replace(self) -> Vec<Message> {
        vec![self.make(0), self.delete(), self.make(0)]
    }

    /// Removes the table. A missing table is no error.
    pub(crate) fn remove(self, client: &mut Client) -> Result<(), netlink::Error> {
        or_gone(commit(client, None, &[self.delete()]))
    }

    /// Makes a chain; `hook` has the type, the place and the priority of a chain that the kernel runs by itself.
    pub(crate) fn chain(self, name: &str, hook: Option<(&str, InetHookNumber, i32)>) -> Message {
        let mut attributes =
            vec![ChainAttribute::Table(self.0.to_owned()), ChainAttribute::Name(name.to_owned())];
        if let Some((kind, hook, priority)) = hook {
            let hook = vec![Hook::Number(hook.into()), Hook::Priority(priority as _)];
            attributes.push(ChainAttribute::Type(kind.to_owned()));
            attributes.push(ChainAttribute::Hook(hook));
            attributes.push(ChainAttribute::Policy(NF_ACCEPT));
        }
        (NLM_F_CREATE, inet(NfTablesMessage::NewChain(ChainMessage { attributes })))
    }

    pub(crate) fn rule(self, chain: &str, what: Vec<Expressions>) -> Message {
        let attributes = vec![
            RuleAttribute::Table(self.0.to_owned()),
            RuleAttribute::Chain(chain.to_owned()),
            RuleAttribute::Expressions(what.into_iter().map(Into::into).collect()),
        ];
        (NLM_F_CREATE | NLM_F_APPEND, inet(NfTablesMessage::NewRule(RuleMessage { attributes })))
    }
}

/// Executes the messages, all or none; with a generation only if the rules have not changed since.
pub(crate) fn commit(
    client: &mut Client,
    generation: Option<u32>,
    messages: &[Message],
) -> Result<(), netlink::Error> {
    client.transaction(&begin(generation), messages, &frame(ControlMessage::BatchEnd))
}

/// Turns the error for a missing object into success.
pub(crate) fn or_gone(result: Result<(), netlink::Error>) -> Result<(), netlink::Error> {
    match result {
        Err(e) if e.errno() == Some(Errno::ENOENT) => Ok(()),
        other => other,
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    V4,
    V6,
}

impl Family {
    pub(crate) fn of(address: IpAddr) -> Family {
        if address.is_ipv6() { Family::V6 } else { Family::V4 }
    }

    /// `meta nfproto FAMILY`
    pub(crate) fn expressions(self) -> Vec<Expressions> {
        vec![meta(MetaKey::Nfproto), equals(vec![self.number()])]
    }

    pub(super) fn named(self, set: &str) -> String {
        match self {
            Family::V4 => format!("{set}4"),
            Family::V6 => format!("{set}6"),
        }
    }

    /// The kernel's NFPROTO number.
    pub(crate) fn number(self) -> u8 {
        match self {
            Family::V4 => 2,
            Family::V6 => 10,
        }
    }

    /// Offset and length of the source address in the IP header.
    pub(crate) fn source(self) -> (u32, u32) {
        match self {
            Family::V4 => (12, 4),
            Family::V6 => (8, 16),
        }
    }

    pub(crate) fn destination(self) -> (u32, u32) {
        match self {
            Family::V4 => (16, 4),
            Family::V6 => (24, 16),
        }
    }

    /// Loads an address of the packet, by [`Family::source`] or [`Family::destination`].
    pub(crate) fn load(self, place: fn(Family) -> (u32, u32)) -> Expressions {
        let (offset, length) = place(self);
        load(BASE_NETWORK, offset, length, Register::Reg1)
    }

    /// The register directly after an address that starts in register 1.
    pub(super) fn behind_address(self) -> Register {
        match self {
            Family::V4 => Register::Reg32_01,
            Family::V6 => Register::Reg32_04,
        }
    }
}

fn frame(message: ControlMessage) -> NetfilterMessage {
    NetfilterMessage::new(NetfilterHeader::new(NetfilterProtoFamily::Unspec, 0, SUBSYSTEM), message)
}

fn begin(generation: Option<u32>) -> NetfilterMessage {
    frame(match generation {
        None => ControlMessage::BatchBegin,
        Some(id) => {
            ControlMessage::Other { message_type: BATCH_BEGIN, attributes: vec![number(BATCH_GENID, id)] }
        }
    })
}

pub(super) fn inet(message: NfTablesMessage) -> NetfilterMessage {
    NetfilterMessage::new(NetfilterHeader::new(NetfilterProtoFamily::Inet, 0, 0), message)
}

/// Returns the generation number of the namespace's rules; every change makes a new one.
pub(super) fn generation(client: &mut Client) -> Result<u32, netlink::Error> {
    let question = NetfilterMessage::new(
        NetfilterHeader::new(NetfilterProtoFamily::Unspec, 0, 0),
        NfTablesMessage::GetGen(GenMessage { attributes: Vec::new() }),
    );
    let mut id = None;
    client.ask_raw(0, &question, |kind, payload| {
        if let NetfilterMessageInner::NfTables(NfTablesMessage::NewGen(message)) = parse(kind, payload)?.inner
        {
            id = message.attributes.iter().find_map(|a| match a {
                GenAttribute::Id(id) => Some(*id),
                _ => None,
            });
        }
        Ok(())
    })?;
    id.ok_or_else(|| netlink::Error::Garbled("no generation of the nftables rules".to_owned()))
}

pub(super) fn parse(kind: u16, payload: &[u8]) -> Result<NetfilterMessage, netlink::Error> {
    let mut header = NetlinkHeader::default();
    header.message_type = kind;
    NetfilterMessage::deserialize(&header, payload).map_err(|e| netlink::Error::Garbled(e.to_string()))
}

/// Returns the name in one message of a dump of tables.
pub(super) fn table_in(kind: u16, payload: &[u8]) -> Result<Option<String>, netlink::Error> {
    let NetfilterMessageInner::NfTables(NfTablesMessage::NewTable(message)) = parse(kind, payload)?.inner
    else {
        return Ok(None);
    };
    Ok(message.attributes.into_iter().find_map(|a| match a {
        TableAttribute::Name(name) => Some(name),
        _ => None,
    }))
}

/// Returns the keys in one message of a dump of set elements.
pub(super) fn keys_in(kind: u16, payload: &[u8]) -> Result<Vec<Vec<u8>>, netlink::Error> {
    let mut keys = Vec::new();
    let NetfilterMessageInner::NfTables(NfTablesMessage::NewSetElement(message)) =
        parse(kind, payload)?.inner
    else {
        return Ok(keys);
    };
    for list in message.attributes {
        let SetElementList::Elements(elements) = list else { continue };
        for element in elements {
            let ListAttribute::Element(attributes) = element else { continue };
            keys.extend(attributes.into_iter().find_map(|a| match a {
                SetElementAttribute::Key(DataAttribute::Value(key)) => Some(key),
                _ => None,
            }));
        }
    }
    Ok(keys)
}

pub(crate) fn equals(value: Vec<u8>) -> Expressions {
    Expressions::Cmp(vec![
        Cmp::SourceRegister(Register::Reg1),
        Cmp::Op(Operator::Equal),
        Cmp::Data(DataAttribute::Value(value)),
    ])
}

/// `ACTION` at the end of the conditions.
pub(crate) fn then(mut what: Vec<Expressions>, action: Expressions) -> Vec<Expressions> {
    what.push(action);
    what
}

pub(crate) fn meta(key: MetaKey) -> Expressions {
    Expressions::Meta(vec![Meta::Key(key), Meta::DestinationRegister(Register::Reg1)])
}

/// An expression that the library does not know, with attributes of [`number`].
pub(crate) fn other(expression_type: &str, attributes: Vec<DefaultNla>) -> Expressions {
    Expressions::Other { expression_type: expression_type.to_owned(), attributes }
}

/// An attribute by the kernel's number (linux/netfilter/nf_tables.h).
pub(crate) fn number(kind: u16, value: u32) -> DefaultNla {
    DefaultNla::new(kind, value.to_be_bytes().to_vec())
}

/// Keeps the bits of `mask` of register 1.
pub(crate) fn masked(mask: Vec<u8>) -> Expressions {
    let nothing = vec![0; mask.len()];
    Expressions::Bitwise(vec![
        Bitwise::SourceRegister(Register::Reg1),
        Bitwise::DestinationRegister(Register::Reg1),
        Bitwise::Length(mask.len() as u32), // at most an address
        Bitwise::Mask(DataAttribute::Value(mask)),
        Bitwise::Xor(DataAttribute::Value(nothing)),
    ])
}

/// `saddr ADDRESS` or `daddr ADDRESS`, by [`Family::source`] or [`Family::destination`].
pub(crate) fn address_is(place: fn(Family) -> (u32, u32), address: IpAddr) -> Vec<Expressions> {
    let family = Family::of(address);
    then(then(family.expressions(), family.load(place)), equals(octets(address)))
}

pub(crate) fn load(base: u32, offset: u32, length: u32, register: Register) -> Expressions {
    Expressions::Payload(vec![
        Payload::DestinationRegister(register),
        Payload::Base(base),
        Payload::Offset(offset),
        Payload::Len(length),
    ])
}

pub(crate) fn verdict(code: u32) -> Expressions {
    Expressions::Immediate(vec![
        Immediate::DestinationRegister(Register::Verdict),
        Immediate::Data(DataAttribute::Verdict(vec![VerdictAttribute::Code(Verdict::Other(code))])),
    ])
}

/// Encodes a VNI as in the packet and the set: three bytes in network order, padded to a register.
pub(super) fn vni_key(vni: u32) -> [u8; 4] {
    (vni << 8).to_be_bytes()
}

pub(super) fn key_of_peer(peer: Peer) -> Vec<u8> {
    let mut key = octets(peer.address);
    key.extend(vni_key(peer.vni));
    key
}

pub(crate) fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(a) => a.octets().to_vec(),
        IpAddr::V6(a) => a.octets().to_vec(),
    }
}

pub(super) fn peer_of_key(key: &[u8]) -> Option<Peer> {
    let (address, vni) = key.split_last_chunk::<4>()?;
    let address = match address.len() {
        4 => IpAddr::V4(Ipv4Addr::from(*address.first_chunk::<4>()?)),
        16 => IpAddr::V6(Ipv6Addr::from(*address.first_chunk::<16>()?)),
        _ => return None,
    };
    Some(Peer { address, vni: u32::from_be_bytes(*vni) >> 8 })
}
