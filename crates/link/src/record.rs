//! Encodes and decodes records, the units of a link's TLS stream.
//!
//! A record is a 28-byte header and a payload of at most 64 KiB:
//! `len u32 BE | kind u8 | flags u8 | reserved u16 = 0 | stream u32 BE | seq u64 BE | ack u64 BE`.
//!
//! This module covers headers and the two handshake payloads; the session checks the order of records. Pure.

mod hello;
mod line;

pub use self::hello::{Hello, SessionId, Welcome};
pub use self::line::{Level, Line, MAX_TARGET, MAX_TEXT, cut};

/// Length of a record's header in bytes.
pub const HEADER_LEN: usize = 28;

/// Longest payload of one record in bytes.
pub const MAX_PAYLOAD: usize = 64 << 10;

/// Newest version of this protocol, offered in Hello and answered in Welcome. Version 2 added dialled streams
/// ([`StreamKind::Dial`], [`RecordKind::Finish`]), version 3 the guest's log records ([`RecordKind::Line`]).
pub const VERSION: u16 = 3;

/// Oldest supported version.
pub const OLDEST: u16 = 1;

/// Flag of a Control record: the message continues in the next record.
pub const MORE: u8 = 1;

/// Kind of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum RecordKind {
    /// Ticket of a guest without a certificate (protobuf `Claim`).
    Claim = 1,
    /// Answer to a Claim (protobuf `ClaimReply`).
    ClaimReply = 2,
    /// Guest to relay: the guest's session.
    Hello = 3,
    /// Relay to guest: session resumed or new.
    Welcome = 4,
    /// Start of a stream; the payload is its [`StreamKind`].
    Open = 10,
    /// Bytes of a stream.
    Data = 11,
    /// End of a stream; the payload is a [`CloseReason`]. Each side sends one.
    Close = 12,
    /// The receiver took bytes off a stream; the sender may send as many more (u32 BE).
    Credit = 13,
    /// Message between node and guest, or a part of it.
    Control = 14,
    /// End of one direction of a stream: this side sends no more bytes, the other side may.
    Finish = 15,
    /// Guest to relay: a record of the guest's log ([`Line`]).
    Line = 16,
    /// Acknowledgement only.
    Ack = 20,
    /// Liveness probe.
    Ping = 21,
    /// Answer to a Ping.
    Pong = 22,
}

impl RecordKind {
    /// Returns the kind with this number.
    pub fn from_u8(number: u8) -> Option<RecordKind> {
        Some(match number {
            1 => RecordKind::Claim,
            2 => RecordKind::ClaimReply,
            3 => RecordKind::Hello,
            4 => RecordKind::Welcome,
            10 => RecordKind::Open,
            11 => RecordKind::Data,
            12 => RecordKind::Close,
            13 => RecordKind::Credit,
            14 => RecordKind::Control,
            15 => RecordKind::Finish,
            16 => RecordKind::Line,
            20 => RecordKind::Ack,
            21 => RecordKind::Ping,
            22 => RecordKind::Pong,
            _ => return None,
        })
    }

    /// Returns whether records of this kind are numbered, kept until acknowledged and replayed.
    pub fn is_sequenced(self) -> bool {
        (10..20).contains(&(self as u8))
    }
}

/// Destination of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamKind {
    /// A connection to the agent's socket.
    Agent,
    /// A TCP connection to a port on the pod's localhost. The opener starts without credit: the first Credit reports
    /// that the connection is established, a Close before it that it failed.
    Dial(Target),
}

/// Port on the pod's localhost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Target {
    /// `::1` if true, else `127.0.0.1`.
    pub v6: bool,
    /// The TCP port.
    pub port: u16,
}

impl Target {
    /// Returns the socket address to connect to.
    pub fn address(self) -> std::net::SocketAddr {
        if self.v6 {
            (std::net::Ipv6Addr::LOCALHOST, self.port).into()
        } else {
            (std::net::Ipv4Addr::LOCALHOST, self.port).into()
        }
    }
}

impl StreamKind {
    /// Returns the payload of an Open, `1` or `2 | 4 or 6 | port u16 BE`, and its length in bytes.
    pub fn encode(self) -> ([u8; 4], usize) {
        match self {
            StreamKind::Agent => ([1, 0, 0, 0], 1),
            StreamKind::Dial(Target { v6, port }) => {
                let [high, low] = port.to_be_bytes();
                ([2, if v6 { 6 } else { 4 }, high, low], 4)
            }
        }
    }

    /// Decodes the payload of an Open; the inverse of [`StreamKind::encode`].
    pub fn decode(payload: &[u8]) -> Option<StreamKind> {
        match *payload {
            [1] => Some(StreamKind::Agent),
            [2, family @ (4 | 6), high, low] => {
                let port = u16::from_be_bytes([high, low]);
                Some(StreamKind::Dial(Target { v6: family == 6, port })).filter(|_| port != 0)
            }
            _ => None,
        }
    }
}

/// Reason why a stream ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum CloseReason {
    /// The local side closed its connection (or the peer did, and this is the answer).
    Closed = 0,
    /// The local end could not be opened: there is no listener.
    Refused = 1,
    /// Broken off: not every byte of either side was delivered. Only for dialled streams.
    Failed = 2,
}

impl CloseReason {
    /// Returns the reason with this number.
    pub fn from_u8(number: u8) -> Option<CloseReason> {
        use CloseReason::{Closed, Failed, Refused};
        [Closed, Refused, Failed].into_iter().find(|reason| *reason as u8 == number)
    }
}

/// Header of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordHeader {
    /// Bytes of payload.
    pub length: u32,
    /// Kind of the record.
    pub kind: RecordKind,
    /// [`MORE`] or 0.
    pub flags: u8,
    /// Stream of the record; 0 = none.
    pub stream: u32,
    /// Sequence number from 1, per direction and session; 0 in records that are not sequenced.
    pub seq: u64,
    /// Highest sequence number received in order.
    pub ack: u64,
}

/// Error for bytes that are not a record of this protocol. The receiver must close the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadRecord {
    /// Unknown number in the place of the kind.
    #[error("record of unknown kind {0}; the peer is newer, or not a peerpod link at all")]
    Kind(u8),
    /// Payload longer than [`MAX_PAYLOAD`].
    #[error("record announces {0} bytes of payload, at most {MAX_PAYLOAD} are allowed")]
    Length(u32),
    /// Bits that must be zero are not.
    #[error("record has unknown flags or a reserved field in use")]
    Reserved,
    /// Payload that cannot be decoded: its type and the reason.
    #[error("{0} cannot be read: {1}")]
    Payload(&'static str, &'static str),
}

impl RecordHeader {
    /// Returns a header without sequence number and acknowledgement.
    pub fn new(kind: RecordKind, length: u32) -> RecordHeader {
        RecordHeader { length, kind, flags: 0, stream: 0, seq: 0, ack: 0 }
    }

    /// Returns the header of a record of a stream; the session fills in the length and the numbers.
    pub(crate) fn of_stream(kind: RecordKind, stream: u32) -> RecordHeader {
        RecordHeader { stream, ..RecordHeader::new(kind, 0) }
    }

    /// Decodes a header and makes the checks that need no session.
    pub fn decode(b: &[u8; HEADER_LEN]) -> Result<RecordHeader, BadRecord> {
        let u32_at = |at: usize| u32::from_be_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]]);
        let u64_at = |at: usize| u64::from(u32_at(at)) << 32 | u64::from(u32_at(at + 4));
        let length = u32_at(0);
        if length as usize > MAX_PAYLOAD {
            return Err(BadRecord::Length(length));
        }
        let kind = RecordKind::from_u8(b[4]).ok_or(BadRecord::Kind(b[4]))?;
        let flags = b[5];
        let allowed = if kind == RecordKind::Control { MORE } else { 0 };
        if flags & !allowed != 0 || b[6] != 0 || b[7] != 0 {
            return Err(BadRecord::Reserved);
        }
        Ok(RecordHeader { length, kind, flags, stream: u32_at(8), seq: u64_at(12), ack: u64_at(20) })
    }

    /// Encodes a header; the inverse of [`RecordHeader::decode`].
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let mut b = [0; HEADER_LEN];
        b[0..4].copy_from_slice(&self.length.to_be_bytes());
        b[4] = self.kind as u8;
        b[5] = self.flags;
        b[8..12].copy_from_slice(&self.stream.to_be_bytes());
        b[12..20].copy_from_slice(&self.seq.to_be_bytes());
        b[20..28].copy_from_slice(&self.ack.to_be_bytes());
        b
    }
}

/// Takes the first record off the front of `input`; returns `None` if it is incomplete. The header is checked as soon
/// as it is complete, so that no bytes are collected for an invalid record.
pub fn split<'a>(input: &mut &'a [u8]) -> Result<Option<(RecordHeader, &'a [u8])>, BadRecord> {
    let Some((head, rest)) = input.split_first_chunk() else { return Ok(None) };
    let header = RecordHeader::decode(head)?;
    let Some((payload, rest)) = rest.split_at_checked(header.length as usize) else { return Ok(None) };
    *input = rest;
    Ok(Some((header, payload)))
}

/// Returns a whole record that is not sequenced, for exchanges outside a session.
pub fn plain(kind: RecordKind, payload: &[u8]) -> Result<Vec<u8>, BadRecord> {
    let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
    if payload.len() > MAX_PAYLOAD {
        return Err(BadRecord::Length(length));
    }
    let mut bytes = Vec::with_capacity(HEADER_LEN + payload.len());
    bytes.extend_from_slice(&RecordHeader::new(kind, length).encode());
    bytes.extend_from_slice(payload);
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_header_survives_encoding(length in 0..=MAX_PAYLOAD as u32, kind in 0u8..30, stream: u32, seq: u64, ack: u64) {
            if let Some(kind) = RecordKind::from_u8(kind) {
                let header = RecordHeader { length, kind, flags: 0, stream, seq, ack };
                prop_assert_eq!(RecordHeader::decode(&header.encode()), Ok(header));
            }
        }

        #[test]
        fn any_bytes_are_refused_or_have_one_meaning(bytes: [u8; HEADER_LEN]) {
            if let Ok(header) = RecordHeader::decode(&bytes) {
                prop_assert_eq!(header.encode(), bytes);
            }
        }
    }

    #[test]
    fn the_error_names_the_defect_of_a_record() {
        let good = RecordHeader::new(RecordKind::Data, 5).encode();
        let with = |at: usize, value: u8| {
            let mut bytes = good;
            bytes[at] = value;
            RecordHeader::decode(&bytes)
        };
        assert_eq!(with(4, 99), Err(BadRecord::Kind(99)));
        assert_eq!(with(0, 0xff), Err(BadRecord::Length(0xff00_0005)));
        assert_eq!(with(5, MORE), Err(BadRecord::Reserved), "only Control goes on");
        assert_eq!(with(6, 1), Err(BadRecord::Reserved));
        assert!(
            RecordHeader::decode(
                &RecordHeader { flags: MORE, ..RecordHeader::new(RecordKind::Control, 1) }.encode()
            )
            .is_ok()
        );
    }
}
