//! Tracks one stream of a session at this end.

use super::state::{BadState, StreamState};
use super::{CREDIT_STEP, WINDOW};
use crate::record::{CloseReason, StreamKind};

/// Number of sent bytes in front of the waiting ones at which the buffer is compacted.
const COMPACT: usize = 64 << 10;

pub(super) struct Stream {
    /// Open that has not been sent yet.
    pub(super) open: Option<StreamKind>,
    /// Bytes that may be sent.
    pub(super) credit: u32,
    /// Whether the stream is in the session's list of streams with data to send.
    pub(super) queued: bool,
    /// Bytes that the peer may still send.
    window: u32,
    /// Bytes taken by the local side with unreturned credit, and whether a Credit is queued.
    owed: u32,
    credit_queued: bool,
    /// Bytes without credit or room; the first `gone` of them are sent.
    waiting: Vec<u8>,
    gone: usize,
    /// Close of this end: requested, sent.
    close: Option<CloseReason>,
    close_sent: bool,
    /// The peer's Close was received.
    ended: bool,
    /// Finish of this end: requested, sent.
    finish: bool,
    finish_sent: bool,
    /// The peer's Finish was received.
    finished: bool,
    /// This end dialled and has no answer yet.
    calling: bool,
}

impl Stream {
    /// Returns a stream that this end opens.
    pub(super) fn opened(kind: StreamKind) -> Stream {
        let calling = matches!(kind, StreamKind::Dial(_));
        let credit = if calling { 0 } else { WINDOW };
        Stream { open: Some(kind), calling, credit, ..Stream::new() }
    }

    /// Returns a stream that the peer opened.
    pub(super) fn answered(kind: StreamKind) -> Stream {
        let window = if matches!(kind, StreamKind::Dial(_)) { 0 } else { WINDOW };
        Stream { window, ..Stream::new() }
    }

    fn new() -> Stream {
        Stream {
            open: None,
            credit: WINDOW,
            queued: false,
            window: WINDOW,
            owed: 0,
            credit_queued: false,
            waiting: Vec::new(),
            gone: 0,
            close: None,
            close_sent: false,
            ended: false,
            finish: false,
            finish_sent: false,
            finished: false,
            calling: false,
        }
    }

    /// Returns the serialised state.
    pub(super) fn state(&self, id: u32) -> StreamState {
        StreamState {
            id,
            open: self.open.map(|kind| {
                let (payload, length) = kind.encode();
                payload[..length].to_vec()
            }),
            credit: self.credit,
            window: self.window,
            owed: self.owed,
            waiting: self.waiting[self.gone..].to_vec(),
            close: self.close.map(|reason| reason as u8),
            close_sent: self.close_sent,
            ended: self.ended,
            finish: self.finish,
            finish_sent: self.finish_sent,
            finished: self.finished,
            calling: self.calling,
        }
    }

    /// Restores a stream, the inverse of [`Stream::state`]; it is in no list of its session yet.
    pub(super) fn restore(state: StreamState) -> Result<Stream, BadState> {
        Stream::check(&state)?;
        Ok(Stream {
            open: state.open.as_deref().map(Stream::read_kind).transpose()?,
            credit: state.credit,
            queued: false,
            window: state.window,
            owed: state.owed,
            credit_queued: false,
            waiting: state.waiting,
            gone: 0,
            close: state.close.map(Stream::read_close).transpose()?,
            close_sent: state.close_sent,
            ended: state.ended,
            finish: state.finish,
            finish_sent: state.finish_sent,
            finished: state.finished,
            calling: state.calling,
        })
    }

    /// Records that the stream is in the list of those with an Open or a Credit to send.
    pub(super) fn signalled(&mut self) {
        self.credit_queued = self.owed >= CREDIT_STEP;
    }

    /// Returns whether neither side has closed the stream.
    pub(super) fn is_open(&self) -> bool {
        self.close.is_none() && !self.ended
    }

    /// Returns whether bytes may still be sent on the stream.
    pub(super) fn may_send(&self) -> bool {
        self.is_open() && !self.finish
    }

    /// Requests a Finish after the waiting bytes; returns false if there is one already, or the stream has ended.
    pub(super) fn finish(&mut self) -> bool {
        let first = self.may_send();
        self.finish |= first;
        first
    }

    pub(super) fn finish_due(&self) -> bool {
        self.finish && !self.finish_sent && !self.ended && self.waiting() == 0
    }

    pub(super) fn sent_finish(&mut self) {
        self.finish_sent = true;
    }

    /// Processes the peer's Finish; returns false if it is not the first.
    pub(super) fn peer_finished(&mut self) -> bool {
        !std::mem::replace(&mut self.finished, true)
    }

    /// Returns, once, whether this is the answer to this end's dial.
    pub(super) fn is_answer(&mut self) -> bool {
        std::mem::take(&mut self.calling)
    }

    /// Returns the number of bytes that wait for credit or room.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len() - self.gone
    }

    pub(super) fn append(&mut self, data: &[u8]) {
        self.waiting.extend_from_slice(data);
    }

    /// Returns the next bytes to send, at most `most`.
    pub(super) fn next_part(&self, most: usize) -> &[u8] {
        let waiting = &self.waiting[self.gone..];
        &waiting[..waiting.len().min(most)]
    }

    /// Removes the first `bytes` of the waiting ones after they were sent.
    pub(super) fn sent(&mut self, bytes: usize) {
        self.credit -= bytes as u32; // next_part() returned no more than the credit
        self.gone += bytes;
        if self.gone == self.waiting.len() {
            self.waiting = Vec::new();
            self.gone = 0;
        } else if self.gone >= COMPACT && self.gone >= self.waiting.len() / 2 {
            self.waiting.drain(..self.gone);
            self.gone = 0;
        }
    }

    /// Marks the stream as listed if it has data to send and is not listed yet; returns whether to list it.
    pub(super) fn may_queue(&mut self) -> bool {
        let due = if self.waiting() > 0 {
            self.credit > 0
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
        if first {
            self.close = Some(reason);
        }
        first
    }

    pub(super) fn close_due(&self) -> Option<CloseReason> {
        self.close.filter(|_| !self.close_sent && self.waiting() == 0)
    }

    /// Records that this end's Close was sent; returns whether the stream is over.
    pub(super) fn sent_close(&mut self) -> bool {
        self.close_sent = true;
        self.ended
    }

    /// Processes the peer's Close and drops the waiting bytes. Returns whether the stream is over; if not, a Close of
    /// this end is due. The second value is true if the owner did not close the stream before.
    pub(super) fn end(&mut self) -> (bool, bool) {
        self.ended = true;
        self.waiting = Vec::new();
        self.gone = 0;
        let news = self.close(CloseReason::Closed);
        (self.close_sent, news)
    }

    /// Returns whether the peer has closed the stream.
    pub(super) fn has_ended(&self) -> bool {
        self.ended
    }

    /// Counts bytes that the local side took; returns whether to queue a Credit.
    pub(super) fn consumed(&mut self, bytes: usize) -> bool {
        // No more bytes can be taken than were received, and those were counted against the window.
        self.owed =
            self.owed.saturating_add(u32::try_from(bytes).unwrap_or(u32::MAX)).min(WINDOW - self.window);
        let queue = self.owed >= CREDIT_STEP && !self.credit_queued && self.is_open();
        self.credit_queued |= queue;
        queue
    }

    /// Returns the credit to send now.
    pub(super) fn take_credit(&mut self) -> Option<u32> {
        if !std::mem::take(&mut self.credit_queued) || !self.is_open() {
            return None;
        }
        let credit = std::mem::take(&mut self.owed);
        self.window += credit;
        (credit > 0).then_some(credit)
    }

    /// Counts bytes from the peer; returns false if it had no credit for them, or has sent its Finish.
    pub(super) fn received(&mut self, bytes: u32) -> bool {
        match self.window.checked_sub(bytes) {
            Some(left) if !self.finished => {
                self.window = left;
                true
            }
            _ => false,
        }
    }

    /// Adds credit from the peer; returns false if it is 0 or exceeds the limit.
    pub(super) fn credited(&mut self, bytes: u32) -> bool {
        const MOST: u32 = 64 << 20;
        match self.credit.checked_add(bytes) {
            Some(credit) if bytes > 0 && credit <= MOST => {
                self.credit = credit;
                true
            }
            _ => false,
        }
    }
}
