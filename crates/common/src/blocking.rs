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

/// Runs `work` on a thread for blocking work. It does not stop if the future is dropped. Fails as the work, or with
/// [`Interrupted`].
pub async fn blocking<T, E>(work: impl FnOnce() -> Result<T, E> + Send + 'static) -> Result<T, E>
where
    T: Send + 'static,
    E: From<Interrupted> + Send + 'static,
{
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|_| Err(Interrupted.into()))
}
