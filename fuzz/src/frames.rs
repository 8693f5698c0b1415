//! Fuzzes ttrpc frames from any peer. For any bytes and any cuts, the splitter returns its input, and the search for a
//! method never panics.

use peerpod_link::frame::{FrameReader, HEADER_LEN, Piece, method_of};

/// Splits `input`, cut after each `step` bytes, and joins the pieces again.
fn joined(input: &[u8], step: usize) -> Vec<u8> {
    let mut reader = FrameReader::new();
    let mut out = Vec::new();
    for mut part in input.chunks(step.max(1)) {
        while let Some(piece) = reader.next(&mut part) {
            match piece {
                Piece::Head(header) => out.extend_from_slice(&header.encode()),
                Piece::Body(body) => {
                    assert!(!body.is_empty());
                    out.extend_from_slice(body);
                }
                Piece::End => {}
            }
        }
        assert!(part.is_empty(), "bytes were left over");
    }
    out
}

pub(crate) fn run(input: &[u8]) {
    let whole = joined(input, input.len());
    // Only an incomplete header is kept back.
    assert!(input.starts_with(&whole) && whole.len() + HEADER_LEN > input.len());
    if let Some((&step, _)) = input.split_first() {
        assert_eq!(joined(input, usize::from(step)), whole);
    }
    if let Some((service, method)) = method_of(input) {
        assert!(service.len() + method.len() <= input.len());
    }
}
