//! Reads and writes user-data: the JSON that a VM gets from its provider. It holds a ticket for one use.
//!
//! The node writes this type and the guest reads it. The reader handles untrusted bytes: it bounds sizes and lists,
//! and errors never repeat the input, which could contain the ticket's secret.

use std::fmt;
use std::net::SocketAddr;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Version of the format that this program writes and reads.
pub const VERSION: u32 = 1;
/// Longest accepted user-data in bytes. Clouds carry 16 KiB; the node writes well under 2 KiB.
pub const MAX_LEN: usize = 64 << 10;
const MAX_ADDRESSES: usize = 64;
const MAX_CAS: usize = 16;

/// Contents of user-data. JSON; unknown fields are ignored, another version is refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserData {
    /// Version of the format, [`VERSION`].
    #[serde(rename = "peerpod")]
    pub version: u32,
    /// Ticket with which the VM claims its identity.
    pub ticket: UserDataTicket,
    /// Addresses of the node and fingerprints of its CAs.
    pub node: UserDataNode,
    /// Seconds of silence on the link after which the VM powers itself off, until Personalise sets another.
    pub lease_seconds: u32,
}

/// One-time ticket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserDataTicket {
    /// Name of the ticket in logs, not secret: 32 lower-case hex digits.
    pub id: String,
    /// Secret that authenticates the claim.
    pub secret: TicketSecret,
    /// Number of VMs that may claim it: 1 unless it was made for a batch.
    pub claims: u32,
}

/// Addresses of the node and CAs that authenticate it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserDataNode {
    /// Addresses on which the relay listens; the guest may try all of them.
    pub addresses: Vec<SocketAddr>,
    /// SHA-256 of the DER of each CA that may have issued the relay's certificate; 64 hex digits each in JSON.
    #[serde(with = "fingerprints")]
    pub ca_sha256: Vec<[u8; 32]>,
    /// TCP port on which the VM waits for the node to dial. `None`: the VM dials the addresses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub listen: Option<u16>,
}

/// Secret of a ticket. Neither `Debug` nor an error shows it; in JSON it is 64 hex digits.
#[derive(Clone, PartialEq, Eq)]
pub struct TicketSecret([u8; 32]);

impl TicketSecret {
    /// Wraps 32 random bytes.
    pub fn new(bytes: [u8; 32]) -> TicketSecret {
        TicketSecret(bytes)
    }

    /// Returns the bytes, for use in the Claim only.
    pub fn expose(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Debug for TicketSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

impl Serialize for TicketSecret {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&hex::encode(self.0))
    }
}

impl<'de> Deserialize<'de> for TicketSecret {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        from_hex(&text).map(TicketSecret).ok_or_else(|| D::Error::custom("not 64 hex digits"))
    }
}

/// Error in user-data. No variant repeats the data.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum UserDataError {
    /// No data yet: some platforms mount the file before they fill it.
    #[error("user-data is empty")]
    Empty,
    /// Larger than [`MAX_LEN`], so not written by a node.
    #[error("user-data has {0} bytes, more than the limit of {MAX_LEN}; is this image meant for it?")]
    TooLarge(usize),
    /// Not JSON, or of another shape.
    #[error("user-data is not in the format of version {VERSION}: {0} at line {1}, column {2}")]
    Malformed(&'static str, usize, usize),
    /// Written by a node with another format version than this image.
    #[error(
        "user-data has version {0}, this guest reads {VERSION}; the VM image and the node must be upgraded together"
    )]
    Version(u32),
    /// The value of a field breaks a rule.
    #[error("user-data: {0}: {1}")]
    Field(&'static str, &'static str),
}

impl UserData {
    /// Parses and checks user-data. Never panics, and errors never repeat the input.
    pub fn parse(bytes: &[u8]) -> Result<UserData, UserDataError> {
        /// Parsed first, so that a later version may have an entirely different shape.
        #[derive(Deserialize)]
        struct Versioned {
            peerpod: u32,
        }
        if bytes.len() > MAX_LEN {
            return Err(UserDataError::TooLarge(bytes.len()));
        }
        if bytes.iter().all(|b| b.is_ascii_whitespace() || *b == 0) {
            return Err(UserDataError::Empty);
        }
        let versioned: Versioned = serde_json::from_slice(bytes).map_err(malformed)?;
        if versioned.peerpod != VERSION {
            return Err(UserDataError::Version(versioned.peerpod));
        }
        let data: UserData = serde_json::from_slice(bytes).map_err(malformed)?;
        data.check()?;
        Ok(data)
    }

    /// Returns the JSON that [`UserData::parse`] reads. It contains the ticket's secret.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("strings, numbers and lists always serialise")
    }

    fn check(&self) -> Result<(), UserDataError> {
        let wrong = |field, why| Err(UserDataError::Field(field, why));
        if self.ticket.id.len() != 32
            || !self.ticket.id.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
        {
            return wrong("ticket.id", "not 32 lower-case hex digits");
        }
        if self.ticket.claims == 0 {
            return wrong("ticket.claims", "a ticket that no VM may claim");
        }
        if self.node.addresses.is_empty() || self.node.addresses.len() > MAX_ADDRESSES {
            return wrong("node.addresses", "must hold 1 to 64 addresses");
        }
        if self.node.addresses.iter().any(|a| a.port() == 0 || a.ip().is_unspecified()) {
            return wrong("node.addresses", "an address that cannot be dialled");
        }
        if self.node.listen == Some(0) {
            return wrong("node.listen", "a port that cannot be dialled");
        }
        if self.node.ca_sha256.is_empty() || self.node.ca_sha256.len() > MAX_CAS {
            return wrong("node.ca_sha256", "must hold 1 to 16 fingerprints");
        }
        if self.lease_seconds == 0 {
            return wrong("lease_seconds", "must be above 0: 0 would power the VM off at once");
        }
        Ok(())
    }
}

/// Reduces a parse error to its kind and position: serde_json's text quotes values, and a value may be the secret.
fn malformed(error: serde_json::Error) -> UserDataError {
    let what = match error.classify() {
        serde_json::error::Category::Io => "read error",
        serde_json::error::Category::Syntax => "not JSON",
        serde_json::error::Category::Data => "a field is missing or of the wrong kind",
        serde_json::error::Category::Eof => "it ends early",
    };
    UserDataError::Malformed(what, error.line(), error.column())
}

/// Parses 64 hex digits of either case; returns `None` for any other text.
pub fn from_hex(text: &str) -> Option<[u8; 32]> {
    let mut bytes = [0; 32];
    hex::decode_to_slice(text, &mut bytes).ok().map(|()| bytes)
}

/// Serialises fingerprints as hexadecimal digits: `#[serde(with = "fingerprints")]`.
pub mod fingerprints {
    use super::*;

    /// Writes fingerprints as texts.
    pub fn serialize<S: Serializer>(list: &[[u8; 32]], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(list.iter().map(hex::encode))
    }

    /// Reads fingerprints from texts.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<[u8; 32]>, D::Error> {
        Vec::<String>::deserialize(deserializer)?
            .iter()
            .map(|text| from_hex(text).ok_or_else(|| D::Error::custom("a fingerprint is not 64 hex digits")))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECRET: &str = "5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e5e";

    fn sample() -> UserData {
        UserData {
            version: VERSION,
            ticket: UserDataTicket {
                id: "0123456789abcdef0123456789abcdef".into(),
                secret: TicketSecret::new([0x5e; 32]),
                claims: 1,
            },
            node: UserDataNode {
                addresses: vec!["10.99.0.1:15151".parse().unwrap(), "[fd99::1]:15151".parse().unwrap()],
                ca_sha256: vec![[7; 32]],
                listen: None,
            },
            lease_seconds: 900,
        }
    }

    #[test]
    fn written_user_data_is_read_and_is_small() {
        let json = sample().to_json();
        assert!(json.starts_with(r#"{"peerpod":1,"ticket":{"id":"0123"#), "{json}");
        assert!(json.len() < 2048);
        assert_eq!(UserData::parse(json.as_bytes()).unwrap(), sample());
    }

    #[test]
    fn unknown_fields_are_ignored() {
        let json = sample().to_json().replacen('{', r#"{"later":{"x":[1,2]},"#, 1);
        assert_eq!(UserData::parse(json.as_bytes()).unwrap(), sample());
    }

    #[test]
    fn another_version_is_refused_with_any_content() {
        assert_eq!(UserData::parse(br#"{"peerpod":2,"tickets":[]}"#), Err(UserDataError::Version(2)));
        assert_eq!(UserData::parse(br#"{"peerpod":0}"#), Err(UserDataError::Version(0)));
    }

    #[test]
    fn garbage_empty_and_oversize_data_are_distinguished() {
        assert_eq!(UserData::parse(b" \n\0"), Err(UserDataError::Empty));
        assert_eq!(UserData::parse(&vec![b' '; MAX_LEN + 1]), Err(UserDataError::TooLarge(MAX_LEN + 1)));
        for bytes in [&b"#cloud-config\n"[..], b"[1]", b"{", b"\xff\xfe", br#"{"peerpod":"1"}"#] {
            assert!(matches!(UserData::parse(bytes), Err(UserDataError::Malformed(..))), "{bytes:?}");
        }
    }

    #[test]
    fn values_that_cannot_work_are_named() {
        let broken = |change: fn(&mut UserData)| {
            let mut data = sample();
            change(&mut data);
            match UserData::parse(data.to_json().as_bytes()) {
                Err(UserDataError::Field(field, _)) => field,
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(broken(|d| d.ticket.id.push('0')), "ticket.id");
        assert_eq!(broken(|d| d.ticket.id = "../../../../../../etc/passwd0000".into()), "ticket.id");
        assert_eq!(broken(|d| d.ticket.claims = 0), "ticket.claims");
        assert_eq!(broken(|d| d.node.addresses.clear()), "node.addresses");
        assert_eq!(broken(|d| d.node.addresses[0].set_port(0)), "node.addresses");
        assert_eq!(broken(|d| d.node.ca_sha256.clear()), "node.ca_sha256");
        assert_eq!(broken(|d| d.node.listen = Some(0)), "node.listen");
        assert_eq!(broken(|d| d.lease_seconds = 0), "lease_seconds");
    }

    #[test]
    fn the_secret_is_in_no_debug_text_and_in_no_error() {
        assert!(!format!("{:?}", sample()).contains("5e5e"));
        let json = sample().to_json();
        for wrong in [
            json.replace(SECRET, &format!("{SECRET}00")),
            json.replace("\"claims\":1", &format!("\"claims\":\"{SECRET}\"")),
            json.replace(&format!("\"{SECRET}\""), "94949494"),
        ] {
            let error = UserData::parse(wrong.as_bytes()).unwrap_err();
            let text = format!("{error} {error:?}");
            assert!(!text.contains("5e5e") && !text.contains("9494"), "{text}");
        }
    }

    #[test]
    fn hex_goes_both_ways() {
        let bytes: [u8; 32] = std::array::from_fn(|i| (i * 37) as u8);
        assert_eq!(from_hex(&hex::encode(bytes)), Some(bytes));
        assert_eq!(from_hex(&"0".repeat(63)), None);
        assert_eq!(from_hex(&"g".repeat(64)), None);
        assert_eq!(from_hex(&"é".repeat(32)), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_handled(bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
            drop(UserData::parse(&bytes));
        }

        #[test]
        fn damaged_data_is_handled(at in 0usize..400, with in any::<u8>()) {
            let mut json = sample().to_json().into_bytes();
            let at = at % json.len();
            json[at] = with;
            drop(UserData::parse(&json));
        }
    }
}
