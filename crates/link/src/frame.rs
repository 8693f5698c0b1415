//! Splits, merges and inspects ttrpc frames: the 10-byte header, an incremental splitter, a writer that merges two
//! sources into one stream, and the two or three protobuf fields that a relay needs.
//!
//! A frame is `length u32 BE | stream u32 BE | kind u8 | flags u8` and `length` bytes of payload, at most 4 MiB
//! (`ttrpc` protocol, PROTOCOL.md). No forwarded payload is buffered: a header that announces 4 GiB costs ten bytes.
//!
//! Pure: bytes in, values out. No sockets, no clock.

mod peek;
mod reader;
mod writer;

pub use self::peek::{PEEK_LIMIT, Peek, error_response, method_of, peek};
pub use self::reader::{FrameReader, Piece};
pub use self::writer::FrameWriter;

/// Length of a frame's header in bytes.
pub const HEADER_LEN: usize = 10;

/// Longest payload that a ttrpc peer accepts, envelope included. The codec does not enforce it: the owner of the
/// connection answers an oversize frame, skips it or ends the connection.
pub const MAX_PAYLOAD: usize = 4 << 20;

/// `kind` of a request, sent by the client.
pub const REQUEST: u8 = 1;
/// `kind` of a response, sent by the server.
pub const RESPONSE: u8 = 2;
/// `kind` of stream data; the agent's API has no streaming method, but the protocol has it.
pub const DATA: u8 = 3;

/// Header of a frame. Every value is representable, so decoding cannot fail and encoding returns the same ten bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Bytes of payload that follow.
    pub length: u32,
    /// Stream id of the call: odd and increasing when the client made it.
    pub stream: u32,
    /// [`REQUEST`], [`RESPONSE`], [`DATA`] or an unknown value.
    pub kind: u8,
    /// Bits: 1 remote closed, 2 remote open, 4 no data.
    pub flags: u8,
}

impl Header {
    /// Decodes a header.
    pub fn decode(b: &[u8; HEADER_LEN]) -> Header {
        Header {
            length: u32::from_be_bytes([b[0], b[1], b[2], b[3]]),
            stream: u32::from_be_bytes([b[4], b[5], b[6], b[7]]),
            kind: b[8],
            flags: b[9],
        }
    }

    /// Encodes a header; the inverse of [`Header::decode`].
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let [l0, l1, l2, l3] = self.length.to_be_bytes();
        let [s0, s1, s2, s3] = self.stream.to_be_bytes();
        [l0, l1, l2, l3, s0, s1, s2, s3, self.kind, self.flags]
    }
}
