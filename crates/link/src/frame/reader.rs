//! Splits a byte stream into frames incrementally.

use serde::{Deserialize, Serialize};

use super::{HEADER_LEN, Header};

/// Part of the current frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece<'a> {
    /// Start of a frame. Its payload may have any announced length, also above [`super::MAX_PAYLOAD`].
    Head(Header),
    /// Next bytes of the payload; never empty.
    Body(&'a [u8]),
    /// End of the payload, also of an empty one.
    End,
}

/// Splits a byte stream into frames, however the bytes are cut. It keeps at most an incomplete header.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FrameReader {
    state: State,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum State {
    Header { bytes: [u8; HEADER_LEN], have: usize },
    Body { left: u32 },
}

const START: State = State::Header { bytes: [0; HEADER_LEN], have: 0 };

impl Default for FrameReader {
    fn default() -> Self {
        FrameReader::new()
    }
}

impl FrameReader {
    /// Returns a reader at the beginning of a frame.
    pub const fn new() -> FrameReader {
        FrameReader { state: START }
    }

    /// Takes the next piece off the front of `input`; returns `None` at the end of `input`.
    ///
    /// ```
    /// use peerpod_link::frame::{FrameReader, Header, Piece, REQUEST};
    ///
    /// let head = Header { length: 2, stream: 1, kind: REQUEST, flags: 0 };
    /// let mut wire = head.encode().to_vec();
    /// wire.extend_from_slice(b"ok");
    ///
    /// let mut reader = FrameReader::new();
    /// let mut input = &wire[..];
    /// assert_eq!(reader.next(&mut input), Some(Piece::Head(head)));
    /// assert_eq!(reader.next(&mut input), Some(Piece::Body(b"ok")));
    /// assert_eq!(reader.next(&mut input), Some(Piece::End));
    /// assert_eq!(reader.next(&mut input), None);
    /// ```
    pub fn next<'a>(&mut self, input: &mut &'a [u8]) -> Option<Piece<'a>> {
        match &mut self.state {
            State::Body { left: 0 } => {
                self.state = START;
                Some(Piece::End)
            }
            State::Body { .. } if input.is_empty() => None,
            State::Body { left } => {
                let take = input.len().min(*left as usize);
                let (body, rest) = input.split_at(take);
                *left -= take as u32; // take <= left
                *input = rest;
                Some(Piece::Body(body))
            }
            State::Header { bytes, have } => {
                let take = input.len().min(HEADER_LEN - *have);
                let (part, rest) = input.split_at(take);
                bytes[*have..*have + take].copy_from_slice(part);
                *have += take;
                *input = rest;
                if *have < HEADER_LEN {
                    return None;
                }
                let header = Header::decode(bytes);
                self.state = State::Body { left: header.length };
                Some(Piece::Head(header))
            }
        }
    }

    /// Counts the next `bytes` as read if they lie wholly inside the current payload and more of it follows. Returns
    /// true in that case: a caller that only forwards bytes need not inspect them.
    pub fn pass(&mut self, bytes: usize) -> bool {
        match &mut self.state {
            State::Body { left } if (*left as usize) > bytes => {
                *left -= bytes as u32;
                true
            }
            State::Body { .. } | State::Header { .. } => false,
        }
    }

    /// Returns whether the state is valid; a state restored from another process may not be.
    pub fn is_sound(&self) -> bool {
        !matches!(self.state, State::Header { have: HEADER_LEN.., .. })
    }

    /// Returns whether the stream is between two frames, so that ending it here truncates nothing.
    pub fn at_boundary(&self) -> bool {
        matches!(self.state, State::Header { have: 0, .. })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns the frames in a form that does not depend on the cuts.
    fn read(chunks: &[&[u8]]) -> (Vec<(Header, Vec<u8>, bool)>, bool) {
        let mut reader = FrameReader::new();
        let mut frames: Vec<(Header, Vec<u8>, bool)> = Vec::new();
        for chunk in chunks {
            let mut input = *chunk;
            while let Some(piece) = reader.next(&mut input) {
                match piece {
                    Piece::Head(header) => frames.push((header, Vec::new(), false)),
                    Piece::Body(part) => {
                        assert!(!part.is_empty());
                        frames.last_mut().unwrap().1.extend_from_slice(part);
                    }
                    Piece::End => frames.last_mut().unwrap().2 = true,
                }
            }
            assert!(input.is_empty());
        }
        (frames, reader.at_boundary())
    }

    fn cut<'a>(wire: &'a [u8], cuts: &[prop::sample::Index]) -> Vec<&'a [u8]> {
        let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(wire.len() + 1)).collect();
        at.extend([0, wire.len()]);
        at.sort_unstable();
        at.windows(2).map(|pair| &wire[pair[0]..pair[1]]).collect()
    }

    proptest! {
        #[test]
        fn any_cut_of_the_bytes_gives_the_same_frames(
            frames in prop::collection::vec((any::<u32>(), any::<u8>(), any::<u8>(), prop::collection::vec(any::<u8>(), 0..200)), 0..8),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..20),
        ) {
            let mut wire = Vec::new();
            let mut expected = Vec::new();
            for (stream, kind, flags, body) in frames {
                let header = Header { length: body.len() as u32, stream, kind, flags };
                wire.extend_from_slice(&header.encode());
                wire.extend_from_slice(&body);
                expected.push((header, body, true));
            }
            prop_assert_eq!(read(&cut(&wire, &cuts)), (expected, true));
        }

        #[test]
        fn arbitrary_bytes_are_split_without_panic_and_alike(
            wire in prop::collection::vec(any::<u8>(), 0..400),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..20),
        ) {
            prop_assert_eq!(read(&cut(&wire, &cuts)), read(&[&wire]));
        }

        #[test]
        fn a_header_survives_encoding(bytes: [u8; 10]) {
            prop_assert_eq!(Header::decode(&bytes).encode(), bytes);
        }
    }
}
