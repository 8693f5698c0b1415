//! Implements the part of gRPC over HTTP/2 that the proxy needs: statuses, messages with their prefix, deadlines.

use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{HeaderMap, Response};
use percent_encoding::{AsciiSet, CONTROLS, percent_decode, utf8_percent_encode};
use protobuf::Message;

use crate::body::Body;
use crate::proxy::Answered;

/// Defines the enum and the list of all its values.
macro_rules! codes {
    ($($code:ident = $number:literal,)*) => {
        /// gRPC's status codes.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub(crate) enum Code { $($code = $number),* }
        const CODES: [Code; 16] = [$(Code::$code),*];
    };
}

codes! {
    Cancelled = 1,
    Unknown = 2,
    InvalidArgument = 3,
    DeadlineExceeded = 4,
    NotFound = 5,
    AlreadyExists = 6,
    PermissionDenied = 7,
    ResourceExhausted = 8,
    FailedPrecondition = 9,
    Aborted = 10,
    OutOfRange = 11,
    Unimplemented = 12,
    Internal = 13,
    Unavailable = 14,
    DataLoss = 15,
    Unauthenticated = 16,
}

/// Characters of a message that are escaped, beside those outside of ASCII.
const ESCAPED: &AsciiSet = &CONTROLS.add(b'%');

const STATUS: &str = "grpc-status";
const MESSAGE: &str = "grpc-message";
const DETAILS: &str = "grpc-status-details-bin";
const TIMEOUT: &str = "grpc-timeout";

#[derive(Clone, Debug, thiserror::Error)]
#[error("{code:?}: {message}")]
pub(crate) struct Status {
    pub(crate) code: Code,
    /// The attempted operation and its object, the cause, and a remedy.
    pub(crate) message: String,
    /// `grpc-status-details-bin`, where the driver sent it.
    pub(crate) details: Option<HeaderValue>,
}

impl Code {
    /// Returns the code of this number.
    pub(crate) fn numbered(number: usize) -> Code {
        CODES.into_iter().find(|code| *code as usize == number).unwrap_or(Code::Unknown)
    }

    pub(crate) fn status(self, message: impl Into<String>) -> Status {
        Status { code: self, message: message.into(), details: None }
    }
}

impl Status {
    /// Reads the status of an answer's headers or trailers: `Ok` for success, `None` without a status.
    pub(crate) fn of(headers: &HeaderMap) -> Option<Result<(), Status>> {
        let number: usize = headers.get(STATUS)?.to_str().ok()?.parse().unwrap_or(2);
        if number == 0 {
            return Some(Ok(()));
        }
        let code = Code::numbered(number);
        let message = headers.get(MESSAGE).map(HeaderValue::as_bytes).unwrap_or_default();
        let message = percent_decode(message).decode_utf8_lossy().into_owned();
        Some(Err(Status { code, message, details: headers.get(DETAILS).cloned() }))
    }

    /// Writes the status as headers of an answer without a message, or as trailers after one.
    pub(crate) fn put(&self, headers: &mut HeaderMap) {
        headers.insert(STATUS, HeaderValue::from(u16::from(self.code as u8)));
        // The escaped text is always a valid header value.
        if let Ok(text) = HeaderValue::from_str(&utf8_percent_encode(&self.message, ESCAPED).to_string()) {
            headers.insert(MESSAGE, text);
        }
        if let Some(details) = &self.details {
            headers.insert(DETAILS, details.clone());
        }
    }

    pub(crate) fn answer(&self) -> Response<Body> {
        let mut response = Response::new(Body::whole(None, None));
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        self.put(response.headers_mut());
        response
    }
}

pub(crate) fn success(message: &impl Message) -> Answered {
    let mut trailers = HeaderMap::with_capacity(1);
    trailers.insert(STATUS, HeaderValue::from_static("0"));
    let mut response = Response::new(Body::whole(Some(frame(&encode(message)?)), Some(trailers)));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    Ok(response)
}

/// Returns a message with its five-byte prefix.
pub(crate) fn frame(message: &[u8]) -> Bytes {
    let mut framed = BytesMut::with_capacity(message.len() + 5);
    framed.put_u8(0);
    // Longer messages were never accepted.
    framed.put_u32(u32::try_from(message.len()).unwrap_or(u32::MAX));
    framed.put_slice(message);
    framed.freeze()
}

/// Returns the one message of a unary call. Fails if the message is compressed, or if there is not exactly one.
pub(crate) fn unframe(mut body: Bytes) -> Result<Bytes, Status> {
    let broken = |why: &str| Code::Internal.status(format!("a unary call's message: {why}"));
    if body.len() < 5 {
        return Err(broken("shorter than its header"));
    }
    let header = body.split_to(5);
    if header[0] != 0 {
        let why = "compressed messages are not understood here; do not compress calls to a CSI driver";
        return Err(Code::Unimplemented.status(why));
    }
    let length = u32::from_be_bytes([header[1], header[2], header[3], header[4]]);
    if usize::try_from(length).ok() != Some(body.len()) {
        return Err(broken("its length differs from its header"));
    }
    Ok(body)
}

pub(crate) fn encode(message: &impl Message) -> Result<Bytes, Status> {
    let bytes = message.write_to_bytes();
    bytes.map(Bytes::from).map_err(|why| Code::Internal.status(format!("write a message: {why}")))
}

/// Returns the caller's deadline, counted from now; `None` when there is none or it is invalid.
pub(crate) fn timeout(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get(TIMEOUT)?.to_str().ok()?;
    let (number, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if number.len() > 8 {
        return None;
    }
    let number: u64 = number.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(number * 3600),
        "M" => Duration::from_secs(number * 60),
        "S" => Duration::from_secs(number),
        "m" => Duration::from_millis(number),
        "u" => Duration::from_micros(number),
        "n" => Duration::from_nanos(number),
        _ => return None,
    })
}

/// Writes a deadline for the driver.
pub(crate) fn put_timeout(headers: &mut HeaderMap, within: Duration) {
    let millis = within.as_millis().clamp(1, 99_999_999);
    if let Ok(text) = HeaderValue::from_str(&format!("{millis}m")) {
        headers.insert(TIMEOUT, text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_survives_its_headers_whatever_its_text() {
        for text in ["", "plain", "50 % \n of it: ü", "%zz %4", "a%20b"] {
            let mut headers = HeaderMap::new();
            Code::NotFound.status(text).put(&mut headers);
            let back = Status::of(&headers).unwrap().unwrap_err();
            assert_eq!((back.code, back.message.as_str()), (Code::NotFound, text));
        }
        let mut headers = HeaderMap::new();
        assert!(Status::of(&headers).is_none());
        headers.insert(STATUS, HeaderValue::from_static("0"));
        assert!(Status::of(&headers).unwrap().is_ok());
        headers.insert(STATUS, HeaderValue::from_static("99"));
        assert_eq!(Status::of(&headers).unwrap().unwrap_err().code, Code::Unknown);
    }

    #[test]
    fn codes_stand_at_their_numbers() {
        for (index, code) in CODES.iter().enumerate() {
            assert_eq!(*code as usize, index + 1);
        }
    }

    #[test]
    fn a_message_is_one_whole_uncompressed_one() {
        assert_eq!(unframe(frame(b"abc")).unwrap(), "abc");
        assert_eq!(unframe(frame(b"")).unwrap(), "");
        for bad in [&b""[..], b"\0\0\0\0", b"\0\0\0\0\x02a", b"\0\0\0\0\x01ab"] {
            assert_eq!(unframe(Bytes::copy_from_slice(bad)).unwrap_err().code, Code::Internal);
        }
        assert_eq!(unframe(Bytes::from_static(b"\x01\0\0\0\0")).unwrap_err().code, Code::Unimplemented);
    }

    #[test]
    fn deadlines_are_read_in_each_unit() {
        for (text, millis) in
            [("5S", Some(5000)), ("250m", Some(250)), ("2M", Some(120_000)), ("1H", Some(3_600_000))]
        {
            let mut headers = HeaderMap::new();
            headers.insert(TIMEOUT, HeaderValue::from_static(text));
            assert_eq!(timeout(&headers), millis.map(Duration::from_millis), "{text}");
        }
        for text in ["", "S", "5", "5x", "123456789S", "-1S"] {
            let mut headers = HeaderMap::new();
            headers.insert(TIMEOUT, HeaderValue::from_static(text));
            assert_eq!(timeout(&headers), None, "{text}");
        }
    }
}
