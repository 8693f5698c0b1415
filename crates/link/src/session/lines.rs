//! Sends records of the guest's log. They are numbered and replayed like all others, but go last: only while no other
//! data waits, a few at a time, and with few enough unacknowledged ones to leave the streams their room.

use super::{REPLAY, Session};
use crate::record::{RecordHeader, RecordKind};

/// Most unacknowledged bytes of log records; above this, they wait at their source.
const MOST_UNDER_WAY: usize = 64 << 10;

/// Most unsent bytes in front of a log record, so that data after it does not wait long.
const MOST_AHEAD: usize = 8 << 10;

#[derive(Default)]
pub(super) struct Lines {
    /// Upper bound of their bytes; all count until the last one is acknowledged.
    pub(super) under_way: usize,
    /// Sequence number of the last one.
    last: u64,
    /// Whether the peer was asked on this transport to acknowledge them.
    pub(super) asked: bool,
}

impl Session {
    /// Returns whether the peer supports log records; false before a handshake.
    pub fn speaks_lines(&self) -> bool {
        self.version >= 3
    }

    /// Returns whether a log record may be sent now.
    pub fn has_room_for_line(&mut self) -> bool {
        if self.log.acked() >= self.lines.last {
            (self.lines.under_way, self.lines.asked) = (0, false);
        }
        let room = self.log.unsent() < MOST_AHEAD && self.log.len() < REPLAY / 2;
        let few = self.lines.under_way < MOST_UNDER_WAY;
        if !few && !self.lines.asked && self.log.unsent() == 0 {
            // The Pong acknowledges them; otherwise the acknowledgement would wait for the next heartbeat.
            (self.lines.asked, self.urgent.want.ping) = (true, true);
        }
        self.speaks_lines() && self.is_idle() && room && few
    }

    /// Sends a log record; check [`Session::has_room_for_line`] first.
    pub fn line(&mut self, payload: &[u8]) {
        self.push(RecordHeader::new(RecordKind::Line, 0), payload);
        self.lines.under_way += payload.len();
        self.lines.last = self.log.last();
    }
}
