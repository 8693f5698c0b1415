//! The splitter's counterpart: frames of two sources on one stream.

use bytes::BytesMut;

use super::{FrameReader, Header, MAX_PAYLOAD};

/// The most bytes of own frames that wait, more than all the answers that a relay's calls may have open at once.
const MAX_WAITING: usize = MAX_PAYLOAD;

/// Decides what is written to one side of a connection, and when. The frames of the other side go out as their bytes
/// come. Whole frames of our own go out between two of them, never into one, and keep their order.
///
/// Own frames that wait are at most 4 MiB; more are dropped. Who reads from outside stops before that, see
/// [`FrameWriter::waiting`].
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
    /// A frame has begun that is not complete.
    under_way: bool,
    /// Own frames that wait for its end.
    waiting: Vec<u8>,
}

impl FrameWriter {
    /// A writer that goes on where another one stood: whether a frame was under way, and the own frames that
    /// [`FrameWriter::waiting`] gave there. `None`: no writer stands so.
    pub fn resume(under_way: bool, waiting: Vec<u8>) -> Option<FrameWriter> {
        let (mut reader, mut rest) = (FrameReader::new(), &waiting[..]);
        while reader.next(&mut rest).is_some() {}
        let sound = reader.at_boundary() && waiting.len() <= MAX_WAITING && (under_way || waiting.is_empty());
        sound.then_some(FrameWriter { under_way, waiting })
    }

    /// A frame of the other side begins; its payload follows as it comes.
    pub fn begin(&mut self, header: &Header, out: &mut BytesMut) {
        self.under_way = true;
        out.extend_from_slice(&header.encode());
    }

    /// The next bytes of its payload.
    pub fn body(&mut self, bytes: &[u8], out: &mut BytesMut) {
        out.extend_from_slice(bytes);
    }

    /// It is complete; the own frames that waited for it follow.
    pub fn end(&mut self, out: &mut BytesMut) {
        self.under_way = false;
        out.extend_from_slice(&std::mem::take(&mut self.waiting));
    }

    /// A whole frame: at once, or behind the one that is under way.
    pub fn whole(&mut self, frame: &[u8], out: &mut BytesMut) {
        if !self.under_way {
            out.extend_from_slice(frame);
        } else if self.waiting.len() + frame.len() <= MAX_WAITING {
            self.waiting.extend_from_slice(frame);
        }
    }

    /// Whether a frame has begun that is not complete: what is written now is a part of it.
    pub fn is_under_way(&self) -> bool {
        self.under_way
    }

    /// The own frames that wait, for another process's writer and for bounds.
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
    fn a_writer_that_makes_no_sense_is_refused() {
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
