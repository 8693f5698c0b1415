//! Reads and writes libvirt's messages: a length, a header of six numbers, a payload. Pure.

use super::xdr::{Garbled, MAX_TEXT, Reader, Writer};

/// Longest message, with its header, without its length.
pub const MAX_MESSAGE: usize = 32 << 20;
/// Size of the length and the header.
pub const HEADER: usize = 28;
/// Longest piece of a stream to send; every version accepts it.
pub const STREAM_PIECE: usize = 256 * 1024 - 24;

/// Program of libvirt's own calls.
pub const REMOTE: u32 = 0x2000_8086;
/// Program of the pings.
pub const KEEPALIVE: u32 = 0x6b65_6570;
/// Version of both programs.
const VERSION: u32 = 1;
/// Ping procedure of [`KEEPALIVE`].
pub const PING: i32 = 1;
/// Pong procedure of [`KEEPALIVE`].
pub const PONG: i32 = 2;

/// Kind of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MessageKind {
    /// Call by the client.
    Call,
    /// Answer of libvirtd.
    Reply,
    /// Event.
    DomainEvent,
    /// Piece of a stream.
    Stream,
}

/// Status of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MessageStatus {
    /// Success; in a stream: its end.
    Ok,
    /// Failure; the payload contains the error.
    Error,
    /// In a stream: more follows.
    Continue,
}

/// A message's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MessageHeader {
    /// Program: [`REMOTE`] or [`KEEPALIVE`].
    pub program: u32,
    /// Number of the procedure.
    pub procedure: i32,
    /// Kind of message.
    pub kind: MessageKind,
    /// Serial of the call that the message belongs to.
    pub serial: u32,
    /// Status.
    pub status: MessageStatus,
}

/// Returns a message as it is sent: length, header, payload.
pub fn write(header: &MessageHeader, payload: &[u8]) -> Vec<u8> {
    let kind = match header.kind {
        MessageKind::Call => 0,
        MessageKind::Reply => 1,
        MessageKind::DomainEvent => 2,
        MessageKind::Stream => 3,
    };
    let status = match header.status {
        MessageStatus::Ok => 0,
        MessageStatus::Error => 1,
        MessageStatus::Continue => 2,
    };
    let length = u32::try_from(HEADER + payload.len()).unwrap_or(u32::MAX);
    let head = Writer::new().u32(length).u32(header.program).u32(VERSION).i32(header.procedure);
    let mut message = head.u32(kind).u32(header.serial).u32(status).done();
    message.extend_from_slice(payload);
    message
}

/// Returns the length of the message after these four bytes.
///
/// # Errors
/// When no message is so short or so long.
pub fn length(prefix: [u8; 4]) -> Result<usize, Garbled> {
    let length = (u32::from_be_bytes(prefix) as usize).saturating_sub(4);
    if length < HEADER - 4 {
        return Err(Garbled::Short(length));
    }
    if length > MAX_MESSAGE {
        return Err(Garbled::Long { length, limit: MAX_MESSAGE });
    }
    Ok(length)
}

/// Parses a message without its length; `None`: its program, version, kind or status is unknown and was never
/// requested.
///
/// # Errors
/// When it ends too early.
pub fn read(body: &[u8]) -> Result<Option<(MessageHeader, &[u8])>, Garbled> {
    let mut reader = Reader::new(body);
    let (program, version, procedure) = (reader.u32()?, reader.u32()?, reader.i32()?);
    let (kind, serial, status) = (reader.u32()?, reader.u32()?, reader.u32()?);
    let kind = match kind {
        0 => MessageKind::Call,
        1 => MessageKind::Reply,
        2 => MessageKind::DomainEvent,
        3 => MessageKind::Stream,
        _ => return Ok(None),
    };
    let status = match status {
        0 => MessageStatus::Ok,
        1 => MessageStatus::Error,
        2 => MessageStatus::Continue,
        _ => return Ok(None),
    };
    if version != VERSION || (program != REMOTE && program != KEEPALIVE) {
        return Ok(None);
    }
    let payload = body.get(HEADER - 4..).unwrap_or_default();
    Ok(Some((MessageHeader { program, procedure, kind, serial, status }, payload)))
}

/// Error of libvirt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Error number, `VIR_ERR_…`.
    pub code: i32,
    /// Error text.
    pub text: String,
}

/// Parses the payload of a message with [`MessageStatus::Error`].
///
/// # Errors
/// When the payload is not an error.
pub fn failure(payload: &[u8]) -> Result<Failure, Garbled> {
    let mut reader = Reader::new(payload);
    let (code, _domain) = (reader.i32()?, reader.i32()?);
    let text = reader.optional_text()?.unwrap_or_else(|| format!("error {code}"));
    debug_assert!(text.len() <= MAX_TEXT);
    Ok(Failure { code, text })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_read_as_it_was_written() {
        let header = MessageHeader {
            program: REMOTE,
            procedure: 66,
            kind: MessageKind::Stream,
            serial: 3,
            status: MessageStatus::Continue,
        };
        let message = write(&header, b"data");
        let (prefix, body) = message.split_first_chunk().unwrap();
        assert_eq!(length(*prefix), Ok(body.len()));
        assert_eq!(read(body), Ok(Some((header, &b"data"[..]))));
    }

    #[test]
    fn impossible_lengths_are_refused() {
        assert!(length(0u32.to_be_bytes()).is_err());
        assert!(length(27u32.to_be_bytes()).is_err());
        assert_eq!(length(28u32.to_be_bytes()), Ok(24));
        assert!(length(u32::MAX.to_be_bytes()).is_err());
        assert!(read(&[0; 23]).is_err());
        assert_eq!(read(&[0; 24]), Ok(None));
    }
}
