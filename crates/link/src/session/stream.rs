//! Tracks one stream of a session at this end.

use serde::{Deserialize, Serialize};

use super::state::{BadState, StreamState};
use super::{CREDIT_STEP, WINDOW};
use crate::base64_bytes;
use crate::record::{CloseReason, StreamKind};

/// Number of sent bytes in front of the waiting ones at which the buffer is compacted.
const COMPACT: usize = 64 << 10;

/// A stream apart from the lists of its session.
#[derive(Default)]
pub(super) struct Stream {
    /// Open that has not been sent yet.
    pub(super) open: Option<StreamKind>,
    /// Whether the stream is in the session's list of streams with data to send.
    pub(super) queued: bool,
    credit_queued: bool,
    /// Number of the waiting bytes that are sent.
    gone: usize,
    /// Close that this end requested.
    close: Option<CloseReason>,
    pub(super) kept: Kept,
}

/// Part of a stream that another process continues from as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Kept {
    /// Bytes that may be sent.
    pub(super) credit: u32,
    /// Bytes that the peer may still send.
    window: u32,
    /// Bytes taken by the local side with unreturned credit.
    owed: u32,
    /// Bytes without credit or room.
    #[serde(with = "base64_bytes")]
    waiting: Vec<u8>,
    pub(super) close_sent: bool,
    /// The peer's Close was received.
    pub(super) ended: bool,
    /// Finish of this end: requested, sent.
    finish: bool,
    pub(super) finish_sent: bool,
    /// The peer's Finish was received.
    pub(super) finished: bool,
    /// This end dialled and has no answer yet.
    pub(super) calling: bool,
}

impl Stream {
    /// Returns a stream that this end opens.
    pub(super) fn opened(kind: StreamKind) -> Stream {
        let calling = matches!(kind, StreamKind::Dial(_));
        let credit = if calling { 0 } else { WINDOW };
        let kept = Kept { credit, window: WINDOW, calling, ..Kept::default() };
        Stream { open: Some(kind), kept, ..Stream::default() }
    }

    /// Returns a stream that the peer opened.
    pub(super) fn answered(kind: StreamKind) -> Stream {
        let window = if matches!(kind, StreamKind::Dial(_)) { 0 } else { WINDOW };
        Stream { kept: Kept { credit: WINDOW, window, ..Kept::default() }, ..Stream::default() }
    }

    /// Returns the serialised state.
    pub(super) fn state(&self, id: u32) -> StreamState {
        let open = self.open.map(|kind| {
            let (payload, length) = kind.encode();
            payload[..length].to_vec()
        });
        let kept = Kept { waiting: self.kept.waiting[self.gone..].to_vec(), ..self.kept.clone() };
        StreamState { id, open, close: self.close.map(|reason| reason as u8), kept }
    }

    /// Restores a stream, the inverse of [`Stream::state`]; it is in no list of its session yet.
    pub(super) fn restore(StreamState { open, close, kept, .. }: StreamState) -> Result<Stream, BadState> {
        if kept.owed.checked_add(kept.window).is_none_or(|sum| sum > WINDOW) {
            return Err(BadState("a stream's window is larger than the limit"));
        }
        let kind =
            |payload: &[u8]| StreamKind::decode(payload).ok_or(BadState("a stream's target is unreadable"));
        let open = open.map(|payload| kind(&payload));
        let reason =
            |number| CloseReason::from_u8(number).ok_or(BadState("a closed stream's reason is unknown"));
        Ok(Stream {
            open: open.transpose()?,
            close: close.map(reason).transpose()?,
            kept,
            ..Stream::default()
        })
    }

    /// Records that the stream is in the list of those with an Open or a Credit to send.
    pub(super) fn signalled(&mut self) {
        self.credit_queued = self.kept.owed >= CREDIT_STEP;
    }

    /// Returns whether neither side has closed the stream.
    pub(super) fn is_open(&self) -> bool {
        self.close.is_none() && !self.kept.ended
    }

    /// Returns whether bytes may still be sent on the stream.
    pub(super) fn may_send(&self) -> bool {
        self.is_open() && !self.kept.finish
    }

    /// Requests a Finish after the waiting bytes; returns false if there is one already, or the stream has ended.
    pub(super) fn finish(&mut self) -> bool {
        let first = self.may_send();
        self.kept.finish |= first;
        first
    }

    pub(super) fn finish_due(&self) -> bool {
        self.kept.finish && !self.kept.finish_sent && !self.kept.ended && self.waiting() == 0
    }

    /// Returns the number of bytes that wait for credit or room.
    pub(super) fn waiting(&self) -> usize {
        self.kept.waiting.len() - self.gone
    }

    pub(super) fn append(&mut self, data: &[u8]) {
        self.kept.waiting.extend_from_slice(data);
    }

    /// Returns the next bytes to send, at most `most`.
    pub(super) fn next_part(&self, most: usize) -> &[u8] {
        let waiting = &self.kept.waiting[self.gone..];
        &waiting[..waiting.len().min(most)]
    }

    /// Removes the first `bytes` of the waiting ones after they were sent.
    pub(super) fn sent(&mut self, bytes: usize) {
        self.kept.credit -= bytes as u32; // next_part() returned no more than the credit
        self.gone += bytes;
        if self.gone == self.kept.waiting.len() {
            self.kept.waiting = Vec::new();
            self.gone = 0;
        } else if self.gone >= COMPACT && self.gone >= self.kept.waiting.len() / 2 {
            self.kept.waiting.drain(..self.gone);
            self.gone = 0;
        }
    }

    /// Marks the stream as listed if it has data to send and is not listed yet; returns whether to list it.
    pub(super) fn may_queue(&mut self) -> bool {
        let due = if self.waiting() > 0 {
            self.kept.credit > 0
        } else {
            self.finish_due() || self.close_due().is_some()
        };
        let queue = due && !self.queued;
        self.queued |= queue;
        queue
    }

    /// Requests a Close after the waiting bytes; returns false if there is one already.
    pub(super) fn close(&mut self, reason: CloseReason) -> bool {
        let first = self.close.is_none();
        self.close.get_or_insert(reason);
        first
    }

    pub(super) fn close_due(&self) -> Option<CloseReason> {
        self.close.filter(|_| !self.kept.close_sent && self.waiting() == 0)
    }

    /// Processes the peer's Close and drops the waiting bytes. Returns whether the stream is over; if not, a Close of
    /// this end is due. The second value is true if the owner did not close the stream before.
    pub(super) fn end(&mut self) -> (bool, bool) {
        self.kept.ended = true;
        self.kept.waiting = Vec::new();
        self.gone = 0;
        let news = self.close(CloseReason::Closed);
        (self.kept.close_sent, news)
    }

    /// Counts bytes that the local side took; returns whether to queue a Credit.
    pub(super) fn consumed(&mut self, bytes: usize) -> bool {
        // No more bytes can be taken than were received, and those were counted against the window.
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        self.kept.owed = self.kept.owed.saturating_add(bytes).min(WINDOW - self.kept.window);
        let queue = self.kept.owed >= CREDIT_STEP && !self.credit_queued && self.is_open();
        self.credit_queued |= queue;
        queue
    }

    /// Returns the credit to send now.
    pub(super) fn take_credit(&mut self) -> Option<u32> {
        if !std::mem::take(&mut self.credit_queued) || !self.is_open() {
            return None;
        }
        let credit = std::mem::take(&mut self.kept.owed);
        self.kept.window += credit;
        (credit > 0).then_some(credit)
    }

    /// Counts bytes from the peer; returns false if it had no credit for them, or has sent its Finish.
    pub(super) fn received(&mut self, bytes: u32) -> bool {
        match self.kept.window.checked_sub(bytes) {
            Some(left) if !self.kept.finished => {
                self.kept.window = left;
                true
            }
            _ => false,
        }
    }

    /// Adds credit from the peer; returns false if it is 0 or exceeds the limit.
    pub(super) fn credited(&mut self, bytes: u32) -> bool {
        const MOST: u32 = 64 << 20;
        match self.kept.credit.checked_add(bytes) {
            Some(credit) if bytes > 0 && credit <= MOST => {
                self.kept.credit = credit;
                true
            }
            _ => false,
        }
    }
}
