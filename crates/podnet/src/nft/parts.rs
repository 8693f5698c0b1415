//! Builds the parts of nftables messages: the transaction's frame, expressions, set keys. Pure except for
//! [`generation`], which queries the kernel.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use netlink_packet_core::{DefaultNla, NetlinkDeserializable, NetlinkHeader};
use netlink_packet_netfilter::nftables::{
    Cmp, DataAttribute, Expressions, GenAttribute, GenMessage, Immediate, ListAttribute, NfTablesMessage,
    Operator, Payload, Register, SetElementAttribute, SetElementList, TableAttribute, Verdict,
    VerdictAttribute,
};
use netlink_packet_netfilter::none::ControlMessage;
use netlink_packet_netfilter::{
    NetfilterHeader, NetfilterMessage, NetfilterMessageInner, NetfilterProtoFamily,
};

use super::Peer;
use crate::netlink::{self, Client};

/// The kernel's number for nftables among the subsystems of netfilter's netlink.
const SUBSYSTEM: u16 = 10;
const BATCH_BEGIN: u8 = 16;
const BATCH_GENID: u16 = 1;

#[derive(Clone, Copy)]
pub(super) enum Family {
    V4,
    V6,
}

impl Family {
    pub(super) fn named(self, set: &str) -> String {
        match self {
            Family::V4 => format!("{set}4"),
            Family::V6 => format!("{set}6"),
        }
    }

    /// The kernel's NFPROTO number.
    pub(super) fn number(self) -> u8 {
        match self {
            Family::V4 => 2,
            Family::V6 => 10,
        }
    }

    /// Offset and length of the source address in the IP header.
    pub(super) fn source(self) -> (u32, u32) {
        match self {
            Family::V4 => (12, 4),
            Family::V6 => (8, 16),
        }
    }

    pub(super) fn destination(self) -> (u32, u32) {
        match self {
            Family::V4 => (16, 4),
            Family::V6 => (24, 16),
        }
    }

    /// The register directly after an address that starts in register 1.
    pub(super) fn behind_address(self) -> Register {
        match self {
            Family::V4 => Register::Reg32_01,
            Family::V6 => Register::Reg32_04,
        }
    }
}

pub(super) fn frame(message: ControlMessage) -> NetfilterMessage {
    NetfilterMessage::new(NetfilterHeader::new(NetfilterProtoFamily::Unspec, 0, SUBSYSTEM), message)
}

pub(crate) fn begin(generation: Option<u32>) -> NetfilterMessage {
    frame(match generation {
        None => ControlMessage::BatchBegin,
        Some(id) => ControlMessage::Other {
            message_type: BATCH_BEGIN,
            attributes: vec![DefaultNla::new(BATCH_GENID, id.to_be_bytes().to_vec())],
        },
    })
}

pub(crate) fn end() -> NetfilterMessage {
    frame(ControlMessage::BatchEnd)
}

pub(crate) fn inet(message: NfTablesMessage) -> NetfilterMessage {
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
    let mut key = match peer.address {
        IpAddr::V4(a) => a.octets().to_vec(),
        IpAddr::V6(a) => a.octets().to_vec(),
    };
    key.extend(vni_key(peer.vni));
    key
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
