//! Converts between the types of the trait and of the protocol, in both directions, for both ends. Received data is
//! checked here and nowhere else: the code behind this module can rely on every id, address and length. Pure.

mod error;
mod reply;
mod request;

use peerpod_proto::provider as proto;
use protobuf::MessageField;

pub(crate) use error::{error_from, error_to, status_error};
pub(crate) use reply::{
    addresses_from, capabilities_from, capabilities_to, created_from, created_many_from, created_many_to,
    created_to, event_from, event_to, identity_from, identity_to, owned_from, owned_to, preflight_from,
    preflight_to,
};
pub(crate) use request::{disk_from, disk_to, key_from, owner_from, owner_to, request_from, request_to};

/// Protocol version of both ends.
pub(crate) const VERSION: u32 = 1;
/// Longest human-readable text.
pub(crate) const TEXT: usize = 2000;
/// Longest short text: an offering, a field, a type.
pub(crate) const WORD: usize = 200;
/// Longest cursor or page mark.
pub(crate) const MARK: usize = 1024;
/// Most bytes of a console in one answer.
pub(crate) const CONSOLE: usize = 1 << 20;

/// Answer that may be an error instead.
pub(crate) trait FallibleAnswer: Default + Send + 'static {
    fn error(&mut self) -> &mut MessageField<proto::Error>;
}

macro_rules! answers {
    ($($answer:ident)*) => {$(
        impl FallibleAnswer for proto::$answer {
            fn error(&mut self) -> &mut MessageField<proto::Error> {
                &mut self.error
            }
        }
    )*};
}
answers! {
    HandshakeResponse PreflightResponse PlaceResponse CreateResponse CreateManyResponse AddressesResponse DeleteResponse
    ListOwnedResponse AttachResponse DetachResponse GrownResponse ConsoleResponse EventsResponse
}

/// Makes foreign text safe for logs and errors: one line, no control characters, at most `most` characters.
pub(crate) fn clipped(text: &str, most: usize) -> String {
    let text = text.trim_matches(|c: char| c.is_whitespace() || c.is_control());
    let plain = |c: char| if c.is_control() { ' ' } else { c };
    let mut clipped: String = text.chars().take(most).map(plain).collect();
    if text.chars().nth(most).is_some() {
        clipped.push('…');
    }
    clipped
}

/// Whether the text can be a name: 1 to `most` printable ASCII characters.
fn printable(text: &str, most: usize) -> bool {
    (1..=most).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic())
}

#[cfg(test)]
mod tests;
