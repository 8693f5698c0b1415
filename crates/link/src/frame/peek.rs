//! Reads and writes the few protobuf fields that a relay needs: service and method of a request, status of a response
//! (`Request{1 service, 2 method, 3 payload, …}`, `Response{1 Status{1 code, 2 message}, 2 payload}`).

use super::{HEADER_LEN, Header, RESPONSE};
use crate::record::cut;

/// Number of request bytes that suffice to find its method. [`Peek::More`] for this many means an unknown method.
pub const PEEK_LIMIT: usize = 512;

/// Longest text that [`error_response`] sends, in bytes; longer text is truncated.
const MAX_MESSAGE: usize = 16 << 10;

/// Result of [`peek`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peek<'a> {
    /// Both names were found.
    Method {
        /// Full service name, like `grpc.AgentService`.
        service: &'a str,
        /// Method name, like `CreateContainer`.
        method: &'a str,
    },
    /// Valid so far, but incomplete.
    More,
    /// Not a request of any ttrpc client; more bytes cannot make it one.
    Unknown,
}

/// Returns service and method of a request if both are among the first bytes of its payload ([`peek`]).
pub fn method_of(payload_start: &[u8]) -> Option<(&str, &str)> {
    match peek(payload_start) {
        Peek::Method { service, method } => Some((service, method)),
        Peek::More | Peek::Unknown => None,
    }
}

/// Reads service and method from the beginning of a request's payload, in either order. Stops at both. In protobuf a
/// later repetition wins: code that guards by the method must decode the whole request.
pub fn peek(bytes: &[u8]) -> Peek<'_> {
    match scan(bytes) {
        Ok((service, method)) => Peek::Method { service, method },
        Err(Stop::Short) => Peek::More,
        Err(Stop::Wrong) => Peek::Unknown,
    }
}

enum Stop {
    Short,
    Wrong,
}

fn scan(mut bytes: &[u8]) -> Result<(&str, &str), Stop> {
    let (mut service, mut method) = (None, None);
    loop {
        if let (Some(service), Some(method)) = (service, method) {
            return Ok((service, method));
        }
        let key = varint(&mut bytes)?;
        let number = key >> 3;
        if number == 0 || number > (1 << 29) - 1 {
            return Err(Stop::Wrong);
        }
        match (key & 7, number) {
            (2, 1) => service = Some(text(&mut bytes)?),
            (2, 2) => method = Some(text(&mut bytes)?),
            (_, 1 | 2) => return Err(Stop::Wrong),
            (0, _) => varint(&mut bytes).map(|_| ())?,
            (1, _) => take(&mut bytes, 8).map(|_| ())?,
            (2, _) => {
                let length = varint(&mut bytes)?;
                take(&mut bytes, length)?;
            }
            (5, _) => take(&mut bytes, 4).map(|_| ())?,
            _ => return Err(Stop::Wrong), // groups: no ttrpc peer writes them
        }
    }
}

fn text<'a>(bytes: &mut &'a [u8]) -> Result<&'a str, Stop> {
    let length = varint(bytes)?;
    std::str::from_utf8(take(bytes, length)?).map_err(|_| Stop::Wrong)
}

fn take<'a>(bytes: &mut &'a [u8], length: u64) -> Result<&'a [u8], Stop> {
    let length = usize::try_from(length).map_err(|_| Stop::Wrong)?;
    let (head, rest) = bytes.split_at_checked(length).ok_or(Stop::Short)?;
    *bytes = rest;
    Ok(head)
}

fn varint(bytes: &mut &[u8]) -> Result<u64, Stop> {
    let mut value = 0u64;
    for (at, byte) in bytes.iter().enumerate() {
        let bits = u64::from(byte & 0x7f);
        // The tenth byte may carry the 64th bit only.
        if at == 9 && bits > 1 {
            return Err(Stop::Wrong);
        }
        value |= bits << (7 * at);
        if byte & 0x80 == 0 {
            *bytes = &bytes[at + 1..];
            return Ok(value);
        }
        if at == 9 {
            return Err(Stop::Wrong);
        }
    }
    Err(Stop::Short)
}

/// Returns a whole response frame that ends call `stream` with the gRPC `code` and this text, truncated to 16 KiB.
pub fn error_response(stream: u32, code: i32, message: &str) -> Vec<u8> {
    let message = cut(message, MAX_MESSAGE);
    let mut status = Vec::with_capacity(message.len() + 32);
    status.push(1 << 3); // code, varint; protobuf writes negative numbers as 64 bits
    put_varint(&mut status, i64::from(code) as u64);
    status.push(2 << 3 | 2); // message, text
    put_varint(&mut status, message.len() as u64);
    status.extend_from_slice(message.as_bytes());

    let mut frame = vec![0; HEADER_LEN];
    frame.reserve(status.len() + 8);
    frame.push(1 << 3 | 2); // status, message
    put_varint(&mut frame, status.len() as u64);
    frame.extend_from_slice(&status);
    let length = (frame.len() - HEADER_LEN) as u32; // at most a few bytes above MAX_MESSAGE
    frame[..HEADER_LEN].copy_from_slice(&Header { length, stream, kind: RESPONSE, flags: 0 }.encode());
    frame
}

fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use protobuf::{CodedInputStream, CodedOutputStream};

    use super::*;

    fn request(fields: &[(u32, &[u8])]) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut out = CodedOutputStream::vec(&mut bytes);
        for (number, value) in fields {
            out.write_bytes(*number, value).unwrap();
        }
        out.flush().unwrap();
        drop(out);
        bytes
    }

    #[test]
    fn the_method_is_read_between_any_other_fields() {
        let usual = request(&[(1, b"grpc.AgentService"), (2, b"CreateContainer"), (3, &[7; 100])]);
        assert_eq!(method_of(&usual), Some(("grpc.AgentService", "CreateContainer")));
        let swapped = request(&[(9, b"later"), (2, b"Check"), (7, b""), (1, b"grpc.Health")]);
        assert_eq!(method_of(&swapped), Some(("grpc.Health", "Check")));
        let with_numbers =
            [&[4 << 3, 0x96, 0x01, 6 << 3 | 1, 1, 2, 3, 4, 5, 6, 7, 8, 8 << 3 | 5, 0, 0, 0, 0][..], &usual]
                .concat();
        assert_eq!(method_of(&with_numbers), Some(("grpc.AgentService", "CreateContainer")));
    }

    #[test]
    fn a_part_of_the_names_needs_more_bytes() {
        let whole = request(&[(1, b"grpc.AgentService"), (2, b"CreateContainer")]);
        for length in 0..whole.len() {
            assert_eq!(peek(&whole[..length]), Peek::More, "{length} bytes");
        }
        assert!(matches!(peek(&whole), Peek::Method { .. }));
    }

    #[test]
    fn an_invalid_request_is_detected_at_once() {
        for wrong in [
            &[0u8][..],                   // field number 0
            &[1 << 3, 1],                 // service as a number
            &[1 << 3 | 2, 2, 0xff, 0xfe], // not text
            &[3 << 3 | 3],                // group
            &[0xff; 11],                  // endless number
        ] {
            assert_eq!(peek(wrong), Peek::Unknown, "{wrong:?}");
        }
    }

    #[test]
    fn a_ttrpc_client_reads_an_error_response() {
        for (code, text) in [(14, "the guest is gone"), (-1, ""), (13, "ü")] {
            let frame = error_response(7, code, text);
            let header = Header::decode(frame[..HEADER_LEN].try_into().unwrap());
            assert_eq!((header.stream, header.kind, header.flags), (7, RESPONSE, 0));
            assert_eq!(header.length as usize, frame.len() - HEADER_LEN);
            let mut body = CodedInputStream::from_bytes(&frame[HEADER_LEN..]);
            assert_eq!(body.read_raw_varint32().unwrap(), 1 << 3 | 2);
            let status = body.read_bytes().unwrap();
            assert!(body.eof().unwrap());
            let mut status = CodedInputStream::from_bytes(&status);
            assert_eq!(status.read_raw_varint32().unwrap(), 1 << 3);
            assert_eq!(status.read_int32().unwrap(), code);
            assert_eq!(status.read_raw_varint32().unwrap(), 2 << 3 | 2);
            assert_eq!(status.read_string().unwrap(), text);
            assert!(status.eof().unwrap());
        }
    }

    #[test]
    fn a_long_text_is_cut_between_characters() {
        let frame = error_response(1, 2, &"ü".repeat(1 << 20));
        assert!(frame.len() < MAX_MESSAGE + 64);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_do_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = peek(&bytes);
        }

        #[test]
        fn more_bytes_never_change_a_verdict(bytes in prop::collection::vec(0u8..24, 0..64), cut: prop::sample::Index) {
            let part = peek(&bytes[..cut.index(bytes.len() + 1)]);
            if part != Peek::More {
                prop_assert_eq!(part, peek(&bytes));
            }
        }
    }
}
