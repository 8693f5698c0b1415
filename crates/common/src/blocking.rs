//! Runs blocking work beside the tasks of the runtime.

use std::io;

/// The work panicked, or the runtime ended before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the operation was interrupted; the program is stopping, or its log names a panic")]
pub struct Interrupted;

impl From<Interrupted> for io::Error {
    fn from(interrupted: Interrupted) -> io::Error {
        io::Error::other(interrupted)
    }
}

/// Runs `work` on a thread for blocking work.
///
/// # Errors
/// The error of the work, or [`Interrupted`]. The work is not stopped if the future is dropped.
pub async fn blocking<T, E>(work: impl FnOnce() -> Result<T, E> + Send + 'static) -> Result<T, E>
where
    T: Send + 'static,
    E: From<Interrupted> + Send + 'static,
{
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|_| Err(Interrupted.into()))
}
