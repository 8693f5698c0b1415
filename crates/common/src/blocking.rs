//! Runs blocking work beside the tasks of a runtime.

use std::io;

/// Runs work that waits for a disk or the kernel on a thread that may block, so that no other task waits. The work runs
/// to its end even if the caller leaves.
///
/// # Errors
/// Those of the work, and its panic.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| Err(io::Error::other(error)))
}
