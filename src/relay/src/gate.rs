//! Before everything that the node changes here: closed while another process takes this one's place.

use std::sync::Arc;

use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};

/// Open, but for the time in which what the node's calls change stands still.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gate(Arc<RwLock<()>>);

impl Gate {
    /// Waits until it is open; it stays open for as long as the result lives.
    pub(crate) async fn pass(&self) -> OwnedRwLockReadGuard<()> {
        self.0.clone().read_owned().await
    }

    /// Closes it for as long as the result lives, once everybody is through.
    pub(crate) async fn close(&self) -> OwnedRwLockWriteGuard<()> {
        self.0.clone().write_owned().await
    }
}
