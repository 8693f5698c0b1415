//! Finds the path MTU between a VM and its node by trial. A router that drops large packets silently is in no table.
//!
//! The guest sends datagrams of several sizes that must not be fragmented (DF) to the relay. Their UDP port has the
//! number of the link's port. The relay answers with a datagram of the same size, so it passes both ways.
//!
//! ```text
//! "ppmt" | version u8 = 1 | kind u8: 1 question, 2 answer | length of the datagram u16 BE
//!        | nonce 8 bytes, random for each question | token 16 bytes | zeros up to the length
//! ```
//!
//! *Authentication.* The token is derived from the TLS connection of the link that is up (an exporter, RFC 8446 7.5),
//! at both ends, and ends with it. The relay answers no datagram without a valid token: no scan finds it, and no sender
//! with a forged address can use it. An observer could as well drop or forge the tunnel's packets; with a copied token
//! it makes the relay send as many bytes as it sent itself, at the rate of one guest. *Answers.* A guest accepts an
//! answer only from the address it asked, with its own token and nonce.
//!
//! [`Search`] is pure; [`ask`] is the guest's side and [`echo`] the relay's.

use std::fmt;

pub mod ask;
pub mod echo;

/// The largest IP packet that is tried or answered, in bytes; the largest MTU of the clouds is 9001.
pub const LARGEST: u32 = 9216;
/// Bytes of a datagram before its padding.
pub const HEADER: usize = 32;
const MAGIC: [u8; 4] = *b"ppmt";
const VERSION: u8 = 1;
const LABEL: &[u8] = b"EXPORTER-peerpod-path-probe";

/// Proof that a question comes from the guest of a link that is up.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Token([u8; 16]);

impl Token {
    /// Returns the token of a TLS connection with a finished handshake; it is the same at both ends.
    pub fn of<Side>(connection: &rustls::ConnectionCommon<Side>) -> Option<Token> {
        connection.export_keying_material([0; 16], LABEL, None).ok().map(Token)
    }

    /// Returns a token of these bytes.
    pub fn new(bytes: [u8; 16]) -> Token {
        Token(bytes)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// Direction of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DatagramKind {
    /// From the guest.
    Question = 1,
    /// From the relay.
    Answer = 2,
}

/// A datagram without its padding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Datagram {
    /// Its direction.
    pub kind: DatagramKind,
    /// Random number that ties an answer to its question.
    pub nonce: [u8; 8],
    /// Token of the link.
    pub token: Token,
}

impl Datagram {
    /// Returns the datagram with zeros up to `length` bytes; never shorter than its header.
    pub fn write(&self, length: u16) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(usize::from(length).max(HEADER));
        bytes.extend(MAGIC);
        bytes.extend([VERSION, self.kind as u8]);
        bytes.extend(length.to_be_bytes());
        bytes.extend(self.nonce);
        bytes.extend(self.token.0);
        bytes.resize(usize::from(length).max(HEADER), 0);
        bytes
    }

    /// Parses a whole datagram. Any other input, also one with another length than it states, returns `None`.
    pub fn read(bytes: &[u8]) -> Option<Datagram> {
        let (header, _) = bytes.split_first_chunk::<HEADER>()?;
        let [m0, m1, m2, m3, version, kind, l0, l1, rest @ ..] = *header;
        let whole = usize::from(u16::from_be_bytes([l0, l1])) == bytes.len();
        if [m0, m1, m2, m3] != MAGIC || version != VERSION || !whole {
            return None;
        }
        let kind = match kind {
            1 => DatagramKind::Question,
            2 => DatagramKind::Answer,
            _ => return None,
        };
        let (nonce, token) = rest.split_first_chunk::<8>()?;
        Some(Datagram { kind, nonce: *nonce, token: Token(*token.first_chunk()?) })
    }
}

/// Returns the bytes of an IP packet around a datagram: the IP header without options, and the UDP header.
pub const fn around(v6: bool) -> u32 {
    if v6 { 48 } else { 28 }
}

/// Common packet sizes: AWS, GRE or VXLAN in it, Ethernet, GCP, PPPoE and the like, and the minimum of IPv6 and IPv4.
const COMMON: [u32; 10] = [9001, 8951, 1500, 1460, 1454, 1440, 1400, 1350, 1280, 576];
/// Sizes tried at a time between two known ones.
const BETWEEN: u32 = 8;

/// Searches for the largest size that passes, in rounds of several sizes: a round costs a time-out, a datagram nothing.
/// The first round tries the common sizes, the others the range between passed and failed ones.
#[derive(Clone, Debug)]
pub struct Search {
    top: u32,
    passed: Option<u32>,
    /// The smallest size that did not pass (or cannot).
    failed: u32,
    begun: bool,
}

impl Search {
    /// Starts a search up to `top`, the MTU of the device that leads to the peer.
    pub fn new(top: u32) -> Search {
        let top = top.min(LARGEST);
        Search { top, passed: None, failed: top + 1, begun: false }
    }

    /// Returns the sizes to try next, in bytes of a whole IP packet; empty = the search is over.
    pub fn next(&self) -> Vec<u32> {
        if !self.begun {
            let smaller = COMMON.into_iter().filter(|size| *size < self.top);
            return std::iter::once(self.top).chain(smaller).collect();
        }
        let Some(passed) = self.passed.filter(|passed| passed + 1 < self.failed) else { return Vec::new() };
        let gap = self.failed.saturating_sub(passed + 1);
        let count = gap.min(BETWEEN);
        // One byte more first: a common size that passes is usually the maximum, and this confirms it.
        let even = (1..=count).map(|n| passed + 1 + gap * n / (count + 1));
        let mut sizes: Vec<u32> =
            std::iter::once(passed + 1).chain(even).filter(|size| *size < self.failed).collect();
        sizes.dedup();
        sizes
    }

    /// Records the result of a round: the sizes of [`Search::next`] that passed.
    pub fn round(&mut self, passed: &[u32]) {
        let tried = self.next();
        self.begun = true;
        self.passed = self.passed.max(passed.iter().copied().filter(|size| tried.contains(size)).max());
        let least = self.passed.unwrap_or(0);
        self.failed = tried.into_iter().filter(|size| *size > least).chain([self.failed]).min().unwrap_or(0);
    }

    /// Returns the largest size that passed so far.
    pub fn found(&self) -> Option<u32> {
        self.passed
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn search(top: u32, path: u32) -> (Option<u32>, usize) {
        let mut search = Search::new(top);
        for rounds in 0..16 {
            let sizes = search.next();
            if sizes.is_empty() {
                return (search.found(), rounds);
            }
            assert!(sizes.len() <= 11, "{sizes:?}");
            assert!(sizes.iter().all(|size| *size <= top.min(LARGEST)), "{sizes:?}");
            let passed: Vec<u32> = sizes.into_iter().filter(|size| *size <= path).collect();
            search.round(&passed);
        }
        panic!("a search from {top} for {path} does not end")
    }

    #[test]
    fn the_usual_paths_are_found_in_one_or_few_rounds() {
        assert_eq!(search(1500, 1500), (Some(1500), 1));
        assert_eq!(search(9001, 9001), (Some(9001), 1));
        assert_eq!(search(1460, 9001), (Some(1460), 1));
        for (top, path) in [(1500, 1460), (9001, 1500), (9001, 8951), (1500, 1454), (9001, 8896)] {
            let (found, rounds) = search(top, path);
            assert!(found == Some(path) && rounds <= 5, "{top} {path}: {found:?} in {rounds} rounds");
        }
    }

    #[test]
    fn a_search_without_answers_ends_at_once() {
        assert_eq!(search(1500, 0), (None, 1));
    }

    #[test]
    fn an_answer_of_an_unsent_size_is_ignored() {
        let mut search = Search::new(1500);
        search.round(&[1400, 1499, 9001]);
        assert_eq!(search.found(), Some(1400));
    }

    #[test]
    fn only_a_written_datagram_is_read() {
        let datagram = Datagram { kind: DatagramKind::Question, nonce: [7; 8], token: Token([9; 16]) };
        let bytes = datagram.write(1472);
        assert_eq!((bytes.len(), Datagram::read(&bytes)), (1472, Some(datagram)));
        assert_eq!(datagram.write(3).len(), HEADER);
        for change in [0, 4, 5, 6] {
            let mut bytes = bytes.clone();
            bytes[change] ^= 0x41;
            assert_eq!(Datagram::read(&bytes), None, "byte {change}");
        }
        assert_eq!(Datagram::read(&bytes[..1471]), None);
        assert_eq!(Datagram::read(&bytes[..HEADER - 1]), None);
    }

    proptest! {
        #[test]
        fn every_path_is_found_exactly(top in 576u32..9300, path in 576u32..9300) {
            let (found, rounds) = search(top, path);
            prop_assert_eq!(found, Some(path.min(top).min(LARGEST)));
            prop_assert!(rounds <= 6);
        }

        #[test]
        fn any_datagram_is_handled(bytes: Vec<u8>) {
            prop_assert!(Datagram::read(&bytes).is_none_or(|read| read.write(bytes.len() as u16) == bytes[..]) || bytes[HEADER..].iter().any(|b| *b != 0));
        }
    }
}
