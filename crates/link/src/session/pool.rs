//! Lends buffers: each thread keeps a few, and code that holds bytes takes one and gives it back when it is empty. An
//! idle session therefore holds none. A busy one uses the same warm pages again; a fresh 64 KiB from the allocator
//! costs page faults each time. The kept memory is bounded per thread.

use std::cell::RefCell;

/// Size of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Size {
    /// For a few small calls: 4 KiB.
    Small,
    /// For a part of a bulk transfer: 64 KiB.
    Large,
    /// For one read from a socket, behind a carried-over record: 160 KiB.
    Read,
}

impl Size {
    pub(crate) const fn bytes(self) -> usize {
        match self {
            Size::Small => 4 << 10,
            Size::Large => 64 << 10,
            Size::Read => 160 << 10,
        }
    }

    const fn of(bytes: usize) -> Option<Size> {
        const SMALL: usize = Size::Small.bytes();
        const LARGE: usize = Size::Large.bytes();
        const READ: usize = Size::Read.bytes();
        match bytes {
            SMALL => Some(Size::Small),
            LARGE => Some(Size::Large),
            READ => Some(Size::Read),
            _ => None,
        }
    }

    /// Number of unused buffers that a thread keeps.
    const fn kept(self) -> usize {
        match self {
            Size::Small => 64,
            Size::Large => 24,
            Size::Read => 2,
        }
    }
}

#[derive(Default)]
struct Pool {
    small: Vec<Box<[u8]>>,
    large: Vec<Box<[u8]>>,
    read: Vec<Box<[u8]>>,
}

impl Pool {
    fn shelf(&mut self, size: Size) -> &mut Vec<Box<[u8]>> {
        match size {
            Size::Small => &mut self.small,
            Size::Large => &mut self.large,
            Size::Read => &mut self.read,
        }
    }
}

thread_local! {
    static POOL: RefCell<Pool> = RefCell::default();
}

/// Takes a buffer of exactly this size. It holds arbitrary earlier contents of this process.
pub(crate) fn take(size: Size) -> Box<[u8]> {
    POOL.with_borrow_mut(|pool| pool.shelf(size).pop())
        .unwrap_or_else(|| vec![0; size.bytes()].into_boxed_slice())
}

/// Gives a buffer back. A buffer of no pooled size is dropped.
pub(crate) fn give(buffer: Box<[u8]>) {
    let Some(size) = Size::of(buffer.len()) else { return };
    // An ending thread has no pool any more; the buffer is freed then.
    let _ended = POOL.try_with(|pool| {
        let mut pool = pool.borrow_mut();
        let shelf = pool.shelf(size);
        if shelf.len() < size.kept() {
            shelf.push(buffer);
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
        assert_eq!(POOL.with_borrow(|pool| pool.large.len()), Size::Large.kept());
        give(vec![0; 5].into_boxed_slice());
    }
}
