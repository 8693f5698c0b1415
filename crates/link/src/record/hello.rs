//! Encodes and decodes the handshake: Hello carries the guest's session, Welcome whether the relay still holds it.

use std::fmt;

use super::BadRecord;
use super::line::cut;

/// Longest version text accepted from a peer, in bytes.
const MAX_VERSION_TEXT: usize = 128;

/// Session of one run of the guest program: random, so that no other or restarted program matches it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(pub [u8; 16]);

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.0))
    }
}

impl fmt::Debug for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SessionId({self})")
    }
}

/// Payload of the guest's first record on a connection with a certificate:
/// `min u16 | max u16 | session 16 bytes | epoch u64 | recv u64 | version of the guest, text`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Oldest and newest link protocol that the guest supports.
    pub versions: (u16, u16),
    /// Session of the guest program.
    pub session: SessionId,
    /// Epoch of the relay's side of that session, from the last Welcome; 0 = the guest has received none.
    pub epoch: u64,
    /// Highest sequence number that the guest received in order.
    pub recv: u64,
    /// Version of the guest program, for display.
    pub program: String,
}

/// Payload of the relay's answer: `version u16 | resumed u8 | epoch u64 | recv u64 | version of the relay, text`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// Version of the link protocol for the rest of the connection.
    pub version: u16,
    /// Whether the relay still holds this session. If not, both sides begin anew and all streams are lost.
    pub resumed: bool,
    /// Identifies the relay's side of the session: a relay that restarted or began anew has another epoch.
    pub epoch: u64,
    /// Highest sequence number that the relay received in order.
    pub recv: u64,
    /// Version of the relay program, for display.
    pub program: String,
}

impl Hello {
    /// Encodes the payload of a Hello record.
    pub fn encode(&self) -> Vec<u8> {
        let ((min, max), program) = (self.versions, cut(&self.program, MAX_VERSION_TEXT));
        let (epoch, recv) = (self.epoch.to_be_bytes(), self.recv.to_be_bytes());
        [&min.to_be_bytes()[..], &max.to_be_bytes(), &self.session.0, &epoch, &recv, program.as_bytes()]
            .concat()
    }

    /// Decodes the payload of a Hello record.
    pub fn decode(bytes: &[u8]) -> Result<Hello, BadRecord> {
        let mut rest = Rest { what: "Hello", bytes };
        Ok(Hello {
            versions: (u16::from_be_bytes(rest.array()?), u16::from_be_bytes(rest.array()?)),
            session: SessionId(rest.array()?),
            epoch: u64::from_be_bytes(rest.array()?),
            recv: u64::from_be_bytes(rest.array()?),
            program: rest.text()?,
        })
    }
}

impl Welcome {
    /// Encodes the payload of a Welcome record.
    pub fn encode(&self) -> Vec<u8> {
        let (resumed, program) = ([u8::from(self.resumed)], cut(&self.program, MAX_VERSION_TEXT));
        let (epoch, recv) = (self.epoch.to_be_bytes(), self.recv.to_be_bytes());
        [&self.version.to_be_bytes()[..], &resumed, &epoch, &recv, program.as_bytes()].concat()
    }

    /// Decodes the payload of a Welcome record.
    pub fn decode(bytes: &[u8]) -> Result<Welcome, BadRecord> {
        let mut rest = Rest { what: "Welcome", bytes };
        let version = u16::from_be_bytes(rest.array()?);
        let resumed = match rest.array()? {
            [0] => false,
            [1] => true,
            _ => return Err(BadRecord::Payload("Welcome", "resumed is neither 0 nor 1")),
        };
        Ok(Welcome {
            version,
            resumed,
            epoch: u64::from_be_bytes(rest.array()?),
            recv: u64::from_be_bytes(rest.array()?),
            program: rest.text()?,
        })
    }
}

struct Rest<'a> {
    what: &'static str,
    bytes: &'a [u8],
}

impl Rest<'_> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N], BadRecord> {
        let (head, rest) =
            self.bytes.split_first_chunk().ok_or(BadRecord::Payload(self.what, "it is too short"))?;
        self.bytes = rest;
        Ok(*head)
    }

    /// Returns the remaining bytes as text for logs. Control characters could forge log lines.
    fn text(&mut self) -> Result<String, BadRecord> {
        match std::str::from_utf8(self.bytes) {
            Ok(text) if text.len() <= MAX_VERSION_TEXT && !text.contains(char::is_control) => {
                Ok(text.to_owned())
            }
            _ => Err(BadRecord::Payload(self.what, "its version is too long or not plain text")),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_handshake_survives_encoding(versions: (u16, u16), session: [u8; 16], epoch: u64, recv: u64, resumed: bool, program in "[a-z0-9.+-]{0,40}") {
            let hello = Hello { versions, session: SessionId(session), epoch, recv, program: program.clone() };
            prop_assert_eq!(Hello::decode(&hello.encode()), Ok(hello));
            let welcome = Welcome { version: versions.0, resumed, epoch, recv, program };
            prop_assert_eq!(Welcome::decode(&welcome.encode()), Ok(welcome));
        }

        #[test]
        fn arbitrary_bytes_do_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            drop((Hello::decode(&bytes), Welcome::decode(&bytes)));
        }
    }

    #[test]
    fn a_version_cannot_carry_a_log_line() {
        let mut hello = Hello {
            versions: (1, 1),
            session: SessionId([7; 16]),
            epoch: 0,
            recv: 0,
            program: "1\n2".into(),
        };
        assert!(Hello::decode(&hello.encode()).is_err());
        hello.program = "ü".repeat(100);
        assert!(Hello::decode(&hello.encode()).is_ok_and(|hello| hello.program.len() <= 128));
    }
}
