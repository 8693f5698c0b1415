//! Pauses the node's changes while another relay process takes over.

use std::sync::Arc;

use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};

/// Lock that each change of the node takes shared, and that a handover takes exclusively.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pause(Arc<RwLock<()>>);

impl Pause {
    /// Waits for the end of a pause; no new pause begins as long as the returned guard lives.
    pub(crate) async fn pass(&self) -> OwnedRwLockReadGuard<()> {
        self.0.clone().read_owned().await
    }

    /// Waits for the changes in progress, then pauses further ones as long as the returned guard lives.
    pub(crate) async fn close(&self) -> OwnedRwLockWriteGuard<()> {
        self.0.clone().write_owned().await
    }
}
