//! Serialises work per key. May touch: nothing.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};

use parking_lot::Mutex;
use tokio::sync::{Mutex as Turn, OwnedMutexGuard};

/// Locks in use, by key.
#[derive(Debug, Default)]
pub struct Locks(Mutex<HashMap<String, Weak<Turn<()>>>>);

impl Locks {
    /// Waits for the lock of this key, which is held until the result is dropped.
    pub async fn turn(&self, key: &str) -> OwnedMutexGuard<()> {
        let turn = {
            let mut all = self.0.lock();
            all.retain(|_, turn| turn.strong_count() > 0);
            match all.get(key).and_then(Weak::upgrade) {
                Some(turn) => turn,
                None => {
                    let turn = Arc::new(Turn::new(()));
                    all.insert(key.to_owned(), Arc::downgrade(&turn));
                    turn
                }
            }
        };
        turn.lock_owned().await
    }
}
