//! Lines of the guest's log: numbered and replayed as everything is, but behind everything else. They go out only while
//! nothing waits, a few at a time, and no more of them are unacknowledged than leave the streams their room.

use super::Session;
use crate::record::{Header, Kind};

/// Unacknowledged bytes of lines; beyond, they wait where they were made.
const MOST_UNDER_WAY: usize = 64 << 10;

/// A line is not put behind more than this in the transport's way, so that what comes next has little in front of it.
const MOST_AHEAD: usize = 8 << 10;

/// Lines that the peer has not acknowledged.
#[derive(Default)]
pub(super) struct Lines {
    /// Their bytes, at most; all of them count until the last is acknowledged.
    pub(super) under_way: usize,
    /// The number of the last one.
    last: u64,
    /// The peer was asked to acknowledge them, on this transport.
    pub(super) asked: bool,
}

impl Session {
    /// Whether the peer knows lines of a log; false also before a handshake.
    pub fn speaks_lines(&self) -> bool {
        self.version >= 3
    }

    /// Whether a line may be sent now.
    pub fn has_room_for_line(&mut self) -> bool {
        if self.log.acked() >= self.lines.last {
            (self.lines.under_way, self.lines.asked) = (0, false);
        }
        let idle = self.control.is_empty() && self.signals.is_empty() && self.ready.is_empty();
        let room = self.log.unsent() < MOST_AHEAD && self.log.len() < self.limits.replay / 2;
        let few = self.lines.under_way < MOST_UNDER_WAY;
        if !few && !self.lines.asked && self.log.unsent() == 0 {
            // The answer acknowledges them; without it that would wait for the next heartbeat.
            (self.lines.asked, self.want.ping) = (true, true);
        }
        self.speaks_lines() && idle && room && few
    }

    /// Sends a line; to be asked first whether there is room.
    pub fn line(&mut self, payload: &[u8]) {
        self.push(Header::new(Kind::Line, 0), payload);
        self.lines.under_way += payload.len();
        self.lines.last = self.log.last();
    }
}
