//! Deadline of the current provider call, and work that goes on when its caller drops it.
//!
//! A provider that queues calls for its cloud needs to find out whether a place in the queue is still useful. The
//! decorator sets the deadline beside the call, not in its arguments, because most providers never read it.

use std::future::Future;

use tokio::time::Instant;

use crate::Error;

tokio::task_local! {
    static DEADLINE: Instant;
}

/// Returns the time at which the caller of this provider call stops waiting. `None` when no deadline is set: with a
/// bare provider, or in [`crate::Provider::addresses`], where the caller drops the future instead. A task spawned by
/// the call does not inherit the deadline; read it before the spawn.
pub fn deadline() -> Option<Instant> {
    DEADLINE.try_with(|at| *at).ok()
}

/// Runs a call with a deadline that its provider can read. Does not end the call at the deadline.
pub async fn with_deadline<F: Future>(at: Instant, call: F) -> F::Output {
    DEADLINE.scope(at, call).await
}

/// Runs the work of a call in a task of its own. A caller that drops the call then leaves a whole VM, not half of one.
///
/// # Errors
/// The error of the work; [`Error::Transient`] when it panicked or the runtime ended.
pub async fn detached<T: Send + 'static>(
    work: impl Future<Output = Result<T, Error>> + Send + 'static,
) -> Result<T, Error> {
    let done = tokio::spawn(work).await;
    done.unwrap_or_else(|error| Err(Error::transient(format!("the call broke off: {error}"))))
}
