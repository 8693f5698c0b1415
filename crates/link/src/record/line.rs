//! Encodes and decodes a record of the guest's log on its way to the node.
//!
//! Layout: `level u8 | lost u32 | uptime in ms u64 | length of the target u8 | target | text`, numbers big endian.

use super::BadRecord;

/// Longest text of one log record, in bytes; [`Line::encode`] truncates longer text.
pub const MAX_TEXT: usize = 4 << 10;

/// Longest target of a log record, in bytes.
pub const MAX_TARGET: usize = 64;

/// Severity of a log record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Level {
    /// A failure.
    Error = 1,
    /// An unexpected state.
    Warn = 2,
    /// A normal event.
    Info = 3,
    /// A detail for debugging.
    Debug = 4,
    /// The finest detail.
    Trace = 5,
}

impl Level {
    fn from_u8(number: u8) -> Option<Level> {
        use Level::{Debug, Error, Info, Trace, Warn};
        [Error, Warn, Info, Debug, Trace].into_iter().find(|level| *level as u8 == number)
    }

    /// Returns the name of the level, in lower case.
    pub fn name(self) -> &'static str {
        match self {
            Level::Error => "error",
            Level::Warn => "warn",
            Level::Info => "info",
            Level::Debug => "debug",
            Level::Trace => "trace",
        }
    }
}

/// One log record. The guest chooses its contents: a program that writes it to a log must escape control characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Line<'a> {
    /// Severity.
    pub level: Level,
    /// Number of log records dropped right before this one because they were not fetched in time.
    pub lost: u32,
    /// Milliseconds from the start of the VM's kernel to the log call.
    pub uptime_ms: u64,
    /// Source of the log record: a module of the guest program, or `kata-agent`. At most [`MAX_TARGET`] bytes.
    pub target: &'a str,
    /// Message. At most [`MAX_TEXT`] bytes.
    pub text: &'a str,
}

impl<'a> Line<'a> {
    /// Encodes the payload of a Line record; truncates a target or text that is too long.
    pub fn encode(&self) -> Vec<u8> {
        let (target, text) = (cut(self.target, MAX_TARGET), cut(self.text, MAX_TEXT));
        let (level, length) = ([self.level as u8], [target.len() as u8]); // at most MAX_TARGET
        let (lost, uptime) = (self.lost.to_be_bytes(), self.uptime_ms.to_be_bytes());
        [&level[..], &lost, &uptime, &length, target.as_bytes(), text.as_bytes()].concat()
    }

    /// Decodes the payload of a Line record.
    pub fn decode(bytes: &'a [u8]) -> Result<Line<'a>, BadRecord> {
        let bad = |why| BadRecord::Payload("Line", why);
        let short = || bad("it is too short");
        let (&[level], rest) = bytes.split_first_chunk().ok_or_else(short)?;
        let (lost, rest) = rest.split_first_chunk().ok_or_else(short)?;
        let (uptime, rest) = rest.split_first_chunk().ok_or_else(short)?;
        let (&[length], rest) = rest.split_first_chunk().ok_or_else(short)?;
        let (target, text) = rest.split_at_checked(usize::from(length)).ok_or_else(short)?;
        if target.len() > MAX_TARGET || text.len() > MAX_TEXT {
            return Err(bad("it is too long"));
        }
        let read = |bytes| std::str::from_utf8(bytes).map_err(|_| bad("it is not text"));
        Ok(Line {
            level: Level::from_u8(level).ok_or_else(|| bad("its level is unknown"))?,
            lost: u32::from_be_bytes(*lost),
            uptime_ms: u64::from_be_bytes(*uptime),
            target: read(target)?,
            text: read(text)?,
        })
    }
}

/// Returns the beginning of the text: at most `most` bytes of whole characters.
pub fn cut(text: &str, most: usize) -> &str {
    &text[..(0..=text.len().min(most)).rfind(|at| text.is_char_boundary(*at)).unwrap_or(0)]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_line_survives_encoding(lost: u32, uptime_ms: u64, level in 1u8..=5, target in ".{0,16}", text in ".{0,200}") {
            let line = Line { level: Level::from_u8(level).unwrap(), lost, uptime_ms, target: &target, text: &text };
            let bytes = line.encode();
            prop_assert_eq!(Line::decode(&bytes), Ok(line));
        }

        #[test]
        fn any_bytes_are_refused_or_have_one_meaning(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            if let Ok(line) = Line::decode(&bytes) {
                prop_assert_eq!(line.encode(), bytes);
            }
        }
    }

    #[test]
    fn a_long_line_is_cut_by_the_writer_and_refused_by_the_reader() {
        let (target, text) = ("ü".repeat(40), "ü".repeat(3000));
        let line = Line { level: Level::Info, lost: 0, uptime_ms: 1, target: &target, text: &text };
        let bytes = line.encode();
        let read = Line::decode(&bytes).unwrap();
        assert_eq!((read.target.len(), read.text.len()), (MAX_TARGET, MAX_TEXT));
        let longer = [&bytes[..], b"x"].concat();
        assert!(matches!(Line::decode(&longer), Err(BadRecord::Payload("Line", "it is too long"))));
    }
}
