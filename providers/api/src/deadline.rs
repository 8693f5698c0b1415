//! Deadline of the current provider call.
//!
//! A provider that queues calls for its cloud needs to find out whether a place in the queue is still useful. The
//! decorator sets the deadline beside the call, not in its arguments, because most providers never read it.

use std::future::Future;

use tokio::time::Instant;

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
