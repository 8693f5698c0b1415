//! Lends buffers: each thread keeps a bounded number. An idle session holds none, and a busy one uses the same warm
//! pages again; a fresh 64 KiB from the allocator costs page faults each time.

use std::cell::RefCell;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Size {
    /// For a few small calls.
    Small = 4 << 10,
    /// For a part of a bulk transfer.
    Large = 64 << 10,
    /// For one read from a socket, behind a carried-over record.
    Read = 160 << 10,
}

/// The sizes, and the number of unused buffers of each that a thread keeps.
const KEPT: [(Size, usize); 3] = [(Size::Small, 64), (Size::Large, 24), (Size::Read, 2)];

thread_local! {
    /// Unused buffers, in the order of `KEPT`.
    static POOL: RefCell<[Vec<Box<[u8]>>; 3]> = RefCell::default();
}

fn place(bytes: usize) -> Option<usize> {
    KEPT.iter().position(|(size, _)| *size as usize == bytes)
}

/// Takes a buffer of exactly this size. It holds arbitrary earlier contents of this process.
pub(crate) fn take(size: Size) -> Box<[u8]> {
    let bytes = size as usize;
    let kept = place(bytes).and_then(|at| POOL.with_borrow_mut(|pool| pool[at].pop()));
    kept.unwrap_or_else(|| vec![0; bytes].into_boxed_slice())
}

/// Gives a buffer back. A buffer of no pooled size is dropped.
pub(crate) fn give(buffer: Box<[u8]>) {
    let Some(at) = place(buffer.len()) else { return };
    // An ending thread has no pool any more; the buffer is freed then.
    let _ended = POOL.try_with(|pool| {
        let unused = &mut pool.borrow_mut()[at];
        if unused.len() < KEPT[at].1 {
            unused.push(buffer);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_returned_buffer_is_lent_again_and_few_are_kept() {
        let first = take(Size::Small);
        let address = first.as_ptr();
        give(first);
        let again = take(Size::Small);
        assert_eq!(again.as_ptr(), address);
        for _ in 0..3 {
            let many: Vec<_> = (0..100).map(|_| take(Size::Large)).collect();
            many.into_iter().for_each(give);
        }
        assert_eq!(POOL.with_borrow(|pool| pool[1].len()), KEPT[1].1);
        give(vec![0; 5].into_boxed_slice());
    }
}
