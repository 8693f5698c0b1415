//! Holds the sequenced records that the peer has not acknowledged, encoded for the wire, oldest first. A cursor
//! separates the bytes that the current transport has taken from the rest; a new transport resets it.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};

use super::CHUNK;
use super::pool::{self, Size};
use crate::record::{self, HEADER_LEN, RecordHeader};

/// Buffer of whole records; a record never crosses from one chunk to the next.
struct Chunk {
    buffer: Box<[u8]>,
    /// Start of the oldest record.
    start: usize,
    /// End of the youngest record.
    end: usize,
}

impl Chunk {
    /// Returns the number of full records that still fit.
    fn records(&self) -> usize {
        (self.buffer.len() - self.end) / FULL
    }
}

pub(super) struct Log {
    chunks: VecDeque<Chunk>,
    /// Number of the record at the front, or of the next one if there is none. Counts from 1.
    first: u64,
    next: u64,
    bytes: usize,
    cursor: Cursor,
    /// Highest number that was ever given to a transport completely.
    high_sent: u64,
    /// Chunk in which the places returned by [`Log::spaces`] begin.
    spaces_at: usize,
}

/// Size of the longest data record that this program sends.
const FULL: usize = HEADER_LEN + CHUNK;

#[derive(Clone, Copy, Default)]
struct Cursor {
    chunk: usize,
    offset: usize,
    /// Remaining bytes of a partly taken record; 0 = between two records.
    record_left: usize,
    /// Bytes of the log behind the cursor.
    unsent: usize,
    /// Number of the last complete record before the cursor.
    sent: u64,
}

impl Log {
    pub(super) fn new() -> Log {
        Log {
            chunks: VecDeque::new(),
            first: 1,
            next: 1,
            bytes: 0,
            cursor: Cursor::default(),
            high_sent: 0,
            spaces_at: 0,
        }
    }

    /// Returns all kept records, encoded for the wire.
    pub(super) fn records(&self) -> Vec<u8> {
        let mut all = Vec::with_capacity(self.bytes);
        self.chunks.iter().for_each(|chunk| all.extend_from_slice(&chunk.buffer[chunk.start..chunk.end]));
        all
    }

    /// Restores a log for a new transport. `None` = the records do not fit the numbers.
    pub(super) fn restore(first: u64, high_sent: u64, records: &[u8]) -> Option<Log> {
        let mut log = Log::new();
        (log.first, log.next) = (first, first);
        let mut rest = records;
        while !rest.is_empty() {
            let (header, payload) = record::split(&mut rest).ok()??;
            if header.seq != log.next || payload.len() > CHUNK {
                return None;
            }
            log.push(header, payload);
        }
        log.high_sent = high_sent;
        let plausible = first > 0 && (log.acked()..log.next).contains(&high_sent);
        plausible.then(|| {
            log.rewind();
            log
        })
    }

    pub(super) fn len(&self) -> usize {
        self.bytes
    }

    pub(super) fn unsent(&self) -> usize {
        self.cursor.unsent
    }

    /// Returns the highest number that the peer can have received.
    pub(super) fn sent(&self) -> u64 {
        self.cursor.sent
    }

    /// Returns the number of the youngest record, sent or not.
    pub(super) fn last(&self) -> u64 {
        self.next - 1
    }

    pub(super) fn acked(&self) -> u64 {
        self.first - 1
    }

    /// Adds a record: fills in its number and the length of `payload`, which is at most 64 KiB less a header.
    pub(super) fn push(&mut self, mut header: RecordHeader, payload: &[u8]) {
        let size = HEADER_LEN + payload.len();
        header.length = payload.len() as u32;
        header.seq = self.next;
        self.next += 1;
        let chunk = self.room(size);
        let (head, body) = chunk.buffer[chunk.end..chunk.end + size].split_at_mut(HEADER_LEN);
        head.copy_from_slice(&header.encode());
        body.copy_from_slice(payload);
        chunk.end += size;
        self.bytes += size;
        self.cursor.unsent += size;
    }

    fn room(&mut self, size: usize) -> &mut Chunk {
        let fits = self.chunks.back().is_some_and(|chunk| chunk.buffer.len() - chunk.end >= size);
        if !fits {
            // A few small calls at a time should not hold 64 KiB until they are acknowledged.
            let small = self.bytes == 0 && size <= Size::Small as usize;
            let buffer = pool::take(if small { Size::Small } else { Size::Large });
            self.chunks.push_back(Chunk { buffer, start: 0, end: 0 });
        }
        let last = self.chunks.len() - 1;
        &mut self.chunks[last]
    }

    /// Fills `out` with the places for the payloads of the next records: at most `most` bytes, each place but the
    /// last as long as a full payload. Returns the number of slices filled. The next call must be [`Log::fill`].
    pub(super) fn spaces<'a>(&'a mut self, most: usize, out: &mut [IoSliceMut<'a>]) -> usize {
        let fits = self.chunks.back().is_some_and(|chunk| chunk.records() > 0);
        self.spaces_at = self.chunks.len() - usize::from(fits);
        let wanted = most.div_ceil(CHUNK).min(out.len());
        let mut there: usize = self.chunks.range(self.spaces_at..).map(Chunk::records).sum();
        while there < wanted {
            let chunk = Chunk { buffer: pool::take(Size::Large), start: 0, end: 0 };
            there += chunk.records();
            self.chunks.push_back(chunk);
        }
        let (mut filled, mut left) = (0, most);
        for chunk in self.chunks.range_mut(self.spaces_at..) {
            for record in chunk.buffer[chunk.end..].chunks_exact_mut(FULL) {
                if filled == out.len() || left == 0 {
                    return filled;
                }
                let size = left.min(CHUNK);
                out[filled] = IoSliceMut::new(&mut record[HEADER_LEN..HEADER_LEN + size]);
                filled += 1;
                left -= size;
            }
        }
        filled
    }

    /// Turns the first `bytes` of the places, which hold payload now, into records.
    pub(super) fn fill(&mut self, header: RecordHeader, mut bytes: usize) {
        for chunk in self.chunks.range_mut(self.spaces_at.min(self.chunks.len())..) {
            while bytes > 0 && chunk.records() > 0 {
                let length = bytes.min(CHUNK);
                let header = RecordHeader { length: length as u32, seq: self.next, ..header };
                chunk.buffer[chunk.end..chunk.end + HEADER_LEN].copy_from_slice(&header.encode());
                chunk.end += HEADER_LEN + length;
                self.next += 1;
                self.bytes += HEADER_LEN + length;
                self.cursor.unsent += HEADER_LEN + length;
                bytes -= length;
            }
        }
        while self.chunks.back().is_some_and(|chunk| chunk.end == 0)
            && let Some(chunk) = self.chunks.pop_back()
        {
            pool::give(chunk.buffer);
        }
    }

    /// Drops the records up to `seq`, which the peer has received; the caller checked that they were sent.
    pub(super) fn ack(&mut self, seq: u64) {
        while self.first <= seq {
            let Some(front) = self.chunks.front_mut() else { return };
            let size = record_size(&front.buffer[front.start..]);
            front.start += size;
            self.bytes -= size;
            self.first += 1;
            if front.start == front.end
                && let Some(done) = self.chunks.pop_front()
            {
                pool::give(done.buffer);
                match self.cursor.chunk.checked_sub(1) {
                    Some(before) => self.cursor.chunk = before,
                    // The cursor stood at the end of this chunk, which is the beginning of the next one.
                    None => self.cursor.offset = 0,
                }
            }
        }
    }

    /// Resets the cursor for a new transport: all unacknowledged records are sent (again), from the beginning of the
    /// oldest. Returns the number of those records that an earlier transport has taken.
    pub(super) fn rewind(&mut self) -> u64 {
        let again = self.high_sent - self.acked();
        let offset = self.chunks.front().map_or(0, |chunk| chunk.start);
        self.cursor = Cursor { chunk: 0, offset, record_left: 0, unsent: self.bytes, sent: self.acked() };
        again
    }

    /// Returns the highest number ever sent over any transport.
    pub(super) fn high_sent(&self) -> u64 {
        self.high_sent
    }

    /// Returns the rest of the record that the transport has partly taken.
    pub(super) fn begun(&self) -> &[u8] {
        match self.chunks.get(self.cursor.chunk) {
            Some(chunk) if self.cursor.record_left > 0 => {
                &chunk.buffer[self.cursor.offset..self.cursor.offset + self.cursor.record_left]
            }
            _ => &[],
        }
    }

    /// Fills `out` with the unsent bytes after `skip`, which ends a record; returns the number of slices filled.
    pub(super) fn unsent_slices<'a>(&'a self, skip: usize, out: &mut [IoSlice<'a>]) -> usize {
        let mut filled = 0;
        let mut offset = self.cursor.offset + skip;
        for chunk in self.chunks.iter().skip(self.cursor.chunk) {
            if filled == out.len() {
                break;
            }
            if offset < chunk.end {
                out[filled] = IoSlice::new(&chunk.buffer[offset..chunk.end]);
                filled += 1;
            }
            // Later chunks are read from their beginning.
            offset = 0;
        }
        filled
    }

    /// Counts `n` bytes behind the cursor as taken by the transport. Returns the number of records sent first.
    pub(super) fn wrote(&mut self, mut n: usize) -> u64 {
        let before = self.high_sent;
        self.cursor.unsent -= n;
        while n > 0 {
            let Some(chunk) = self.chunks.get(self.cursor.chunk) else { break };
            if self.cursor.offset == chunk.end {
                self.cursor.chunk += 1;
                self.cursor.offset = 0;
                continue;
            }
            if self.cursor.record_left == 0 {
                self.cursor.record_left = record_size(&chunk.buffer[self.cursor.offset..]);
            }
            let step = n.min(self.cursor.record_left);
            self.cursor.offset += step;
            self.cursor.record_left -= step;
            n -= step;
            if self.cursor.record_left == 0 {
                self.cursor.sent += 1;
            }
        }
        self.high_sent = self.high_sent.max(self.cursor.sent);
        self.high_sent - before
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        self.chunks.drain(..).for_each(|chunk| pool::give(chunk.buffer));
    }
}

fn record_size(bytes: &[u8]) -> usize {
    HEADER_LEN + u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::record::RecordKind;

    /// Sends at most `most` unsent bytes of the log and returns them.
    fn take(log: &mut Log, most: usize) -> Vec<u8> {
        let mut slices = [IoSlice::new(&[]); 64];
        let filled = log.unsent_slices(0, &mut slices);
        let mut bytes = slices[..filled].iter().flat_map(|slice| slice.to_vec()).collect::<Vec<u8>>();
        bytes.truncate(most);
        log.wrote(bytes.len());
        bytes
    }

    proptest! {
        #[test]
        fn every_record_is_sent_once_for_any_reads_and_acknowledgements(
            steps in prop::collection::vec((0usize..20_000, 0usize..60_000, 0u64..4), 1..60),
        ) {
            let mut log = Log::new();
            let (mut wire, mut expected) = (Vec::new(), Vec::new());
            for (size, taken, behind) in steps {
                let payload = vec![size as u8; size];
                let header = RecordHeader { stream: 3, ..RecordHeader::new(RecordKind::Data, size as u32) };
                expected.extend_from_slice(&RecordHeader { seq: log.next, ..header }.encode());
                expected.extend_from_slice(&payload);
                log.push(header, &payload);
                wire.extend(take(&mut log, taken));
                prop_assert_eq!(log.unsent(), expected.len() - wire.len());
                let ack = log.sent().saturating_sub(behind).max(log.acked());
                log.ack(ack);
                prop_assert_eq!(log.acked(), ack);
            }
            wire.extend(take(&mut log, usize::MAX));
            prop_assert!(wire == expected);
            log.ack(log.sent());
            prop_assert_eq!((log.len(), log.chunks.len(), log.unsent()), (0, 0, 0));
        }
    }

    proptest! {
        #[test]
        fn records_that_were_read_in_place_are_those_that_were_pushed(
            steps in prop::collection::vec((0usize..150_000, 0usize..150_000, any::<bool>(), 0usize..200_000), 1..30),
        ) {
            let (mut copied, mut in_place) = (Log::new(), Log::new());
            let (mut left, mut right) = (Vec::new(), Vec::new());
            for (most, bytes, push, taken) in steps {
                let payload: Vec<u8> = (0..bytes.min(most)).map(|at| (at % 251) as u8).collect();
                let header = RecordHeader { stream: 3, ..RecordHeader::new(RecordKind::Data, 0) };
                payload.chunks(CHUNK).for_each(|part| copied.push(header, part));
                if push {
                    payload.chunks(CHUNK).for_each(|part| in_place.push(header, part));
                } else {
                    let mut slices: [_; 12] = std::array::from_fn(|_| IoSliceMut::new(&mut []));
                    let filled = in_place.spaces(most, &mut slices);
                    prop_assert_eq!(slices[..filled].iter().map(|slice| slice.len()).sum::<usize>(), most);
                    let mut rest = &payload[..];
                    for slice in &mut slices[..filled] {
                        let (part, after) = rest.split_at(rest.len().min(slice.len()));
                        slice[..part.len()].copy_from_slice(part);
                        rest = after;
                    }
                    in_place.fill(header, payload.len());
                }
                prop_assert_eq!(in_place.len(), copied.len());
                left.extend(take(&mut copied, taken));
                right.extend(take(&mut in_place, taken));
                let ack = copied.sent().min(in_place.sent());
                copied.ack(ack);
                in_place.ack(ack);
            }
            left.extend(take(&mut copied, usize::MAX));
            right.extend(take(&mut in_place, usize::MAX));
            prop_assert!(left == right);
            in_place.ack(in_place.sent());
            prop_assert_eq!((in_place.len(), in_place.chunks.len()), (0, 0));
        }
    }

    #[test]
    fn spaces_that_nothing_was_read_to_hold_no_memory() {
        let mut log = Log::new();
        let mut slices: [_; 8] = std::array::from_fn(|_| IoSliceMut::new(&mut []));
        assert_eq!(log.spaces(8 * CHUNK, &mut slices), 8);
        log.fill(RecordHeader::new(RecordKind::Data, 0), 0);
        assert_eq!((log.chunks.len(), log.len()), (0, 0));
    }

    #[test]
    fn unacknowledged_records_are_sent_again_after_a_rewind() {
        let mut log = Log::new();
        for at in 0..5u8 {
            log.push(RecordHeader::new(RecordKind::Data, 0), &[at; 10]);
        }
        let all = take(&mut log, usize::MAX);
        log.ack(2);
        assert_eq!(log.rewind(), 3);
        assert_eq!(log.sent(), 2);
        assert_eq!(take(&mut log, 50), all[2 * 38..2 * 38 + 50], "begins at a record");
        assert_eq!(log.begun().len(), 26, "a part of the fourth was taken");
        assert_eq!(log.rewind(), 3);
        assert_eq!(take(&mut log, usize::MAX), all[2 * 38..]);
    }
}
