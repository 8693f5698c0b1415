//! Processes records from the peer and checks every rule of the protocol.

use bytes::Bytes;

use super::stream::Stream;
use super::{ACK_STEP, Session};
use crate::endpoint::Role;
use crate::record::{BadRecord, CloseReason, HEADER_LEN, Line, MORE, RecordHeader, RecordKind, StreamKind};

/// Effect of a record on the owner of the session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Received<'a> {
    /// None; the session handled the record.
    Nothing,
    /// The peer opened a stream.
    Opened(u32, StreamKind),
    /// Bytes of a stream; call [`Session::consumed`] after the local side took them.
    Data(u32, &'a [u8]),
    /// The peer closed a stream that this end had not closed. The answer is queued; the stream is over.
    Closed(u32, CloseReason),
    /// A control message.
    Control(Bytes),
    /// The peer connected a stream that this end dialled.
    Connected(u32),
    /// The peer sends no more bytes on this stream.
    Finished(u32),
    /// A record of the guest's log.
    Line(Line<'a>),
}

/// Violation of the protocol by the peer. The owner must close the transport and reset the session.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// Bytes that are not a record.
    #[error(transparent)]
    Record(#[from] BadRecord),
    /// A handshake record inside a session.
    #[error("a {0:?} record inside a session")]
    Misplaced(RecordKind),
    /// A sequence number out of order.
    #[error("record number {got} where {due} was due", due = .0, got = .1)]
    Sequence(u64, u64),
    /// An acknowledgement of a record that was never sent.
    #[error("number {got} acknowledged, {sent} was the last one sent", sent = .0, got = .1)]
    Ack(u64, u64),
    /// A payload that does not fit its kind.
    #[error("a {0:?} record with an invalid payload")]
    Payload(RecordKind),
    /// A stream number that the peer may not use.
    #[error("a {0:?} record for stream {1}, which is not open")]
    Stream(RecordKind, u32),
    /// A stream number that the peer may not open.
    #[error("stream {0} opened: wrong side, or a number that was used before")]
    Open(u32),
    /// More streams than allowed.
    #[error("more than {0} streams opened")]
    Streams(usize),
    /// More data than the stream had credit for.
    #[error("stream {0} sent beyond its window")]
    Window(u32),
    /// A Credit of 0, or credit above 64 MiB.
    #[error("stream {0} was given too much credit")]
    Credit(u32),
    /// A control message above the limit.
    #[error("a control message longer than {0} bytes")]
    Control(usize),
    /// No link protocol that both ends support.
    #[error("the peer speaks link protocol {0} to {1}, this program {own}; upgrade the older one", own = crate::record::VERSION)]
    Version(u16, u16),
    /// A handshake answer that contradicts the state of the session.
    #[error("the handshake contradicts the session: {0}")]
    Handshake(&'static str),
}

impl Session {
    /// Processes one record from the peer; `payload` is exactly `header.length` bytes long.
    pub fn receive<'a>(
        &mut self,
        header: &RecordHeader,
        payload: &'a [u8],
    ) -> Result<Received<'a>, Violation> {
        let sent = self.log.sent();
        if header.ack > sent {
            return Err(Violation::Ack(sent, header.ack));
        }
        self.log.ack(header.ack);
        if !header.kind.is_sequenced() {
            return self.receive_plain(header, payload);
        }
        let due = self.inbound.recv + 1;
        if header.seq != due {
            return Err(Violation::Sequence(due, header.seq));
        }
        self.inbound.recv = due;
        self.counts.received += 1;
        self.inbound.unacked += HEADER_LEN + payload.len();
        self.urgent.want.ack |= self.inbound.unacked >= ACK_STEP;
        match header.kind {
            RecordKind::Open => self.receive_open(header.stream, payload),
            RecordKind::Data => self.receive_data(header.stream, payload),
            RecordKind::Close => self.receive_close(header.stream, payload),
            RecordKind::Credit => self.receive_credit(header.stream, payload),
            RecordKind::Finish => self.receive_finish(header.stream, payload),
            RecordKind::Line => self.receive_line(header.stream, payload),
            _ => self.receive_control(header, payload),
        }
    }

    fn receive_plain<'a>(
        &mut self,
        header: &RecordHeader,
        payload: &[u8],
    ) -> Result<Received<'a>, Violation> {
        if header.seq != 0 {
            return Err(Violation::Sequence(0, header.seq));
        }
        if !payload.is_empty() || header.stream != 0 {
            return Err(Violation::Payload(header.kind));
        }
        match header.kind {
            RecordKind::Ping => self.urgent.want.pong = true,
            RecordKind::Pong | RecordKind::Ack => {}
            other => return Err(Violation::Misplaced(other)),
        }
        Ok(Received::Nothing)
    }

    fn receive_open<'a>(&mut self, id: u32, payload: &[u8]) -> Result<Received<'a>, Violation> {
        let kind = StreamKind::decode(payload).ok_or(Violation::Payload(RecordKind::Open))?;
        if id < self.next_peer || id % 2 != self.next_peer % 2 {
            return Err(Violation::Open(id));
        }
        if self.streams.len() >= self.limits.streams {
            return Err(Violation::Streams(self.limits.streams));
        }
        // A number without a successor is refused.
        self.next_peer = id.checked_add(2).ok_or(Violation::Open(id))?;
        self.streams.insert(id, Stream::answered(kind));
        Ok(Received::Opened(id, kind))
    }

    fn receive_data<'a>(&mut self, id: u32, payload: &'a [u8]) -> Result<Received<'a>, Violation> {
        let stream = self.peers_stream(RecordKind::Data, id)?;
        if payload.is_empty() {
            return Err(Violation::Payload(RecordKind::Data));
        }
        if !stream.received(payload.len() as u32) {
            return Err(Violation::Window(id));
        }
        // This end has closed the stream, and the peer has not received that yet: the bytes are dropped.
        Ok(if stream.is_open() { Received::Data(id, payload) } else { Received::Nothing })
    }

    fn receive_close<'a>(&mut self, id: u32, payload: &[u8]) -> Result<Received<'a>, Violation> {
        let reason = match payload {
            [number] => CloseReason::from_u8(*number),
            _ => None,
        };
        let reason = reason.ok_or(Violation::Payload(RecordKind::Close))?;
        let stream = self.peers_stream(RecordKind::Close, id)?;
        let (over, news) = stream.end();
        if over {
            self.streams.remove(&id);
        } else if stream.may_queue() {
            self.turns.ready.push_back(id);
        }
        Ok(if news { Received::Closed(id, reason) } else { Received::Nothing })
    }

    fn receive_credit<'a>(&mut self, id: u32, payload: &[u8]) -> Result<Received<'a>, Violation> {
        let credit =
            payload.try_into().map(u32::from_be_bytes).map_err(|_| Violation::Payload(RecordKind::Credit))?;
        let stream = self.peers_stream(RecordKind::Credit, id)?;
        if !stream.credited(credit) {
            return Err(Violation::Credit(id));
        }
        let answer = std::mem::take(&mut stream.kept.calling);
        // The answer to a dial that this end has given up is dropped.
        let wanted = answer && stream.is_open();
        if stream.may_queue() {
            self.turns.ready.push_back(id);
        }
        Ok(if wanted { Received::Connected(id) } else { Received::Nothing })
    }

    fn receive_finish<'a>(&mut self, id: u32, payload: &[u8]) -> Result<Received<'a>, Violation> {
        if !payload.is_empty() {
            return Err(Violation::Payload(RecordKind::Finish));
        }
        let stream = self.peers_stream(RecordKind::Finish, id)?;
        if std::mem::replace(&mut stream.kept.finished, true) {
            return Err(Violation::Stream(RecordKind::Finish, id));
        }
        Ok(if stream.is_open() { Received::Finished(id) } else { Received::Nothing })
    }

    fn receive_line<'a>(&self, stream: u32, payload: &'a [u8]) -> Result<Received<'a>, Violation> {
        if self.role == Role::Guest || !self.speaks_lines() {
            return Err(Violation::Misplaced(RecordKind::Line));
        }
        if stream != 0 {
            return Err(Violation::Payload(RecordKind::Line));
        }
        Ok(Received::Line(Line::decode(payload)?))
    }

    fn receive_control<'a>(
        &mut self,
        header: &RecordHeader,
        payload: &[u8],
    ) -> Result<Received<'a>, Violation> {
        let most = self.limits.control_message;
        if header.stream != 0 {
            return Err(Violation::Payload(RecordKind::Control));
        }
        if self.inbound.assembly.len() + payload.len() > most {
            return Err(Violation::Control(most));
        }
        if header.flags & MORE != 0 {
            if payload.is_empty() {
                return Err(Violation::Payload(RecordKind::Control));
            }
            self.inbound.assembly.extend_from_slice(payload);
            return Ok(Received::Nothing);
        }
        let message = if self.inbound.assembly.is_empty() {
            Bytes::copy_from_slice(payload)
        } else {
            self.inbound.assembly.extend_from_slice(payload);
            Bytes::from(std::mem::take(&mut self.inbound.assembly))
        };
        Ok(Received::Control(message))
    }

    /// Returns a stream for which the peer may still send records.
    fn peers_stream(&mut self, kind: RecordKind, id: u32) -> Result<&mut Stream, Violation> {
        self.streams.get_mut(&id).filter(|stream| !stream.kept.ended).ok_or(Violation::Stream(kind, id))
    }
}
