//! Locks by key: one piece of work at a time for each key. A key without users takes no memory.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{Mutex as Turn, OwnedMutexGuard};

type Turns<K> = Arc<Mutex<HashMap<K, Arc<Turn<()>>>>>;

/// Locks in use, by key. Clones share them.
#[derive(Clone, Debug)]
pub struct KeyedLocks<K>(Turns<K>);

/// Lock of one key, held until it is dropped.
#[derive(Debug)]
pub struct KeyGuard<K: Eq + Hash> {
    turns: Turns<K>,
    key: K,
    guard: Option<OwnedMutexGuard<()>>,
}

impl<K> Default for KeyedLocks<K> {
    fn default() -> KeyedLocks<K> {
        KeyedLocks(Arc::default())
    }
}

impl<K: Clone + Eq + Hash> KeyedLocks<K> {
    /// Waits for the lock of this key. Waiters get it in the order in which they came.
    pub async fn lock(&self, key: &K) -> KeyGuard<K> {
        let turn = Arc::clone(self.0.lock().entry(key.clone()).or_default());
        // Made before the wait: a caller that is dropped while it waits also removes an unused key.
        let mut guard = KeyGuard { turns: Arc::clone(&self.0), key: key.clone(), guard: None };
        guard.guard = Some(turn.lock_owned().await);
        guard
    }
}

impl<K: Eq + Hash> Drop for KeyGuard<K> {
    fn drop(&mut self) {
        self.guard = None;
        let mut turns = self.turns.lock();
        // New users come only through the table, which is locked here: a count of 1 is the table's own.
        if turns.get(&self.key).is_some_and(|turn| Arc::strong_count(turn) == 1) {
            turns.remove(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task;

    use super::*;

    #[test]
    fn a_key_has_one_holder_and_leaves_nothing_behind() {
        let locks = KeyedLocks::<&str>::default();
        let context = &mut task::Context::from_waker(task::Waker::noop());
        let mut first = pin!(locks.lock(&"a"));
        let task::Poll::Ready(held) = first.as_mut().poll(context) else { panic!("the lock is free") };
        let mut second = Box::pin(locks.lock(&"a"));
        assert!(second.as_mut().poll(context).is_pending());
        assert!(pin!(locks.lock(&"b")).poll(context).is_ready());
        drop(held);
        assert!(matches!(second.as_mut().poll(context), task::Poll::Ready(_)));
        drop(second);
        assert!(locks.0.lock().is_empty());
        let mut third = Box::pin(locks.lock(&"a"));
        let task::Poll::Ready(held) = third.as_mut().poll(context) else { panic!("the lock is free") };
        let mut left = Box::pin(locks.lock(&"a"));
        assert!(left.as_mut().poll(context).is_pending());
        drop(held);
        drop(left);
        assert!(locks.0.lock().is_empty(), "a waiter that left");
    }
}
