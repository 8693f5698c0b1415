//! Reads and writes libvirt's messages: a length, a header of six numbers, a payload. Pure.

use super::xdr::{self, Garbled};

/// Longest message, with its header, without its length.
pub(crate) const MAX_MESSAGE: usize = 32 << 20;
/// Size of the length and the header.
pub(crate) const HEADER: usize = 28;
/// Longest piece of a stream to send; every version accepts it.
pub(crate) const STREAM_PIECE: usize = 256 * 1024 - 24;

/// Program of libvirt's own calls.
pub(crate) const REMOTE: u32 = 0x2000_8086;
/// Program of the pings.
pub(crate) const KEEPALIVE: u32 = 0x6b65_6570;
/// Version of both programs.
const VERSION: u32 = 1;
/// Ping procedure of [`KEEPALIVE`].
pub(crate) const PING: i32 = 1;
/// Pong procedure of [`KEEPALIVE`].
pub(crate) const PONG: i32 = 2;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MessageKind {
    Call,
    Reply,
    DomainEvent,
    Stream,
}

/// All kinds, by their numbers.
const KINDS: [MessageKind; 4] =
    [MessageKind::Call, MessageKind::Reply, MessageKind::DomainEvent, MessageKind::Stream];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MessageStatus {
    /// Success; in a stream: its end.
    Ok,
    /// Failure; the payload contains the error.
    Error,
    /// In a stream: more follows.
    Continue,
}

/// All statuses, by their numbers.
const STATUSES: [MessageStatus; 3] = [MessageStatus::Ok, MessageStatus::Error, MessageStatus::Continue];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MessageHeader {
    /// Program: [`REMOTE`] or [`KEEPALIVE`].
    pub(crate) program: u32,
    pub(crate) procedure: i32,
    pub(crate) kind: MessageKind,
    /// Serial of the call that the message belongs to.
    pub(crate) serial: u32,
    pub(crate) status: MessageStatus,
}

/// Returns a message as it is sent: length, header, payload.
pub(crate) fn write(header: &MessageHeader, payload: &[u8]) -> Vec<u8> {
    let MessageHeader { program, procedure, kind, serial, status } = *header;
    let length = u32::try_from(HEADER + payload.len()).unwrap_or(u32::MAX);
    let mut message = xdr::write(&(length, program, VERSION, procedure, kind as u32, serial, status as u32));
    message.extend_from_slice(payload);
    message
}

/// Returns the length of the message after these four bytes. Fails if no message is so short or so long.
pub(crate) fn length(prefix: [u8; 4]) -> Result<usize, Garbled> {
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
/// requested. Fails if it ends too early.
pub(crate) fn read(body: &[u8]) -> Result<Option<(MessageHeader, &[u8])>, Garbled> {
    let (program, version, procedure, kind, serial, status): (u32, u32, i32, u32, u32, u32) =
        xdr::read(body)?;
    let (Some(&kind), Some(&status)) = (KINDS.get(kind as usize), STATUSES.get(status as usize)) else {
        return Ok(None);
    };
    if version != VERSION || (program != REMOTE && program != KEEPALIVE) {
        return Ok(None);
    }
    let payload = body.get(HEADER - 4..).unwrap_or_default();
    Ok(Some((MessageHeader { program, procedure, kind, serial, status }, payload)))
}

/// Error of libvirt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LibvirtFailure {
    /// Error number, `VIR_ERR_…`.
    pub(crate) code: i32,
    pub(crate) text: String,
}

/// Parses the payload of a message with [`MessageStatus::Error`].
pub(crate) fn failure(payload: &[u8]) -> Result<LibvirtFailure, Garbled> {
    let (code, _domain, text): (i32, i32, Option<String>) = xdr::read(payload)?;
    Ok(LibvirtFailure { code, text: text.unwrap_or_else(|| format!("error {code}")) })
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
