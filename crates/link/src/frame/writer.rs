//! Merges the frames of two sources into one stream.

use bytes::BytesMut;

use super::{FrameReader, Header, MAX_PAYLOAD};

/// Most bytes of own frames that wait; more than all the answers to the calls that a relay may have open at once.
const MAX_WAITING: usize = MAX_PAYLOAD;

/// Decides when frames go to one side of a connection. The frames of the other side go out as their bytes arrive. Own
/// frames (frames that this process makes) go out whole between two of them, and keep their order.
///
/// At most 4 MiB of own frames wait; more are dropped. A caller with external input stops before that.
///
/// ```
/// use bytes::BytesMut;
/// use peerpod_link::frame::{FrameWriter, Header, RESPONSE, error_response};
///
/// let (mut writer, mut out) = (FrameWriter::default(), BytesMut::new());
/// let head = Header { length: 2, stream: 1, kind: RESPONSE, flags: 0 };
/// writer.begin(&head, &mut out);
/// writer.whole(&error_response(3, 5, "no"), &mut out);
/// writer.body(b"ok", &mut out);
/// writer.end(&mut out);
/// assert_eq!(out[..], [&head.encode()[..], b"ok", &error_response(3, 5, "no")].concat());
/// ```
#[derive(Clone, Debug, Default)]
pub struct FrameWriter {
    /// Whether a frame has begun and is not complete.
    under_way: bool,
    /// Own frames that wait for its end.
    waiting: Vec<u8>,
}

impl FrameWriter {
    /// Returns a writer in the state of another one: whether a frame was under way, and the bytes of
    /// [`FrameWriter::waiting`]. Returns `None` if no writer can be in this state.
    pub fn resume(under_way: bool, waiting: Vec<u8>) -> Option<FrameWriter> {
        let (mut reader, mut rest) = (FrameReader::new(), &waiting[..]);
        while reader.next(&mut rest).is_some() {}
        let sound = reader.at_boundary() && waiting.len() <= MAX_WAITING && (under_way || waiting.is_empty());
        sound.then_some(FrameWriter { under_way, waiting })
    }

    /// Begins a frame of the other side; [`FrameWriter::body`] adds its payload.
    pub fn begin(&mut self, header: &Header, out: &mut BytesMut) {
        self.under_way = true;
        out.extend_from_slice(&header.encode());
    }

    /// Writes the next bytes of the payload.
    pub fn body(&mut self, bytes: &[u8], out: &mut BytesMut) {
        out.extend_from_slice(bytes);
    }

    /// Ends the frame and writes the own frames that waited for it.
    pub fn end(&mut self, out: &mut BytesMut) {
        self.under_way = false;
        out.extend_from_slice(&std::mem::take(&mut self.waiting));
    }

    /// Writes a whole own frame, at once or after the frame that is under way.
    pub fn whole(&mut self, frame: &[u8], out: &mut BytesMut) {
        if !self.under_way {
            out.extend_from_slice(frame);
        } else if self.waiting.len() + frame.len() <= MAX_WAITING {
            self.waiting.extend_from_slice(frame);
        }
    }

    /// Returns whether a frame has begun and is not complete. Bytes written now would become part of it.
    pub fn is_under_way(&self) -> bool {
        self.under_way
    }

    /// Own frames that wait, for handover and for limits.
    pub fn waiting(&self) -> &[u8] {
        &self.waiting
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::{RESPONSE, error_response};

    #[test]
    fn own_frames_that_wait_are_bounded_and_whole() {
        let (mut writer, mut out) = (FrameWriter::default(), BytesMut::new());
        let head = Header { length: 3, stream: 1, kind: RESPONSE, flags: 0 };
        writer.begin(&head, &mut out);
        let own = error_response(3, 8, &"x".repeat(10_000));
        for _ in 0..1000 {
            writer.whole(&own, &mut out);
        }
        let fit = MAX_WAITING / own.len();
        assert_eq!((writer.waiting().len(), out.len()), (fit * own.len(), 10));
        writer.body(b"end", &mut out);
        writer.end(&mut out);
        assert!(writer.waiting().is_empty() && !writer.is_under_way());
        assert_eq!(out.len(), 13 + fit * own.len());
        writer.whole(&own, &mut out);
        assert!(out.ends_with(&own));
    }

    #[test]
    fn an_invalid_writer_state_is_refused() {
        let own = error_response(3, 8, "no");
        for (under_way, waiting, sound) in [
            (true, own.clone(), true),
            (true, own.repeat(2), true),
            (true, Vec::new(), true),
            (false, Vec::new(), true),
            (false, own.clone(), false),
            (true, own[1..].to_vec(), false),
            (true, own[..own.len() - 1].to_vec(), false),
            (true, own.repeat(MAX_WAITING / own.len() + 1), false),
        ] {
            let many = waiting.len();
            assert_eq!(FrameWriter::resume(under_way, waiting).is_some(), sound, "{under_way} {many}");
        }
    }
}
