//! Until when a caller of a provider waits.
//!
//! A provider that queues calls for its cloud must know whether a place in the queue is still worth having. The
//! decorator says it beside the call, not in the call's arguments: most providers never ask.

use std::future::Future;

use tokio::time::Instant;

tokio::task_local! {
    static DEADLINE: Instant;
}

/// When the caller of this provider call stops waiting; `None` when nobody said so (a bare provider, or
/// [`crate::Provider::addresses`], whose caller drops it). A task spawned by the call does not inherit it: read it
/// before.
pub fn deadline() -> Option<Instant> {
    DEADLINE.try_with(|at| *at).ok()
}

/// Runs a call whose provider can ask for its deadline. Ends nothing by itself.
pub async fn with_deadline<F: Future>(at: Instant, call: F) -> F::Output {
    DEADLINE.scope(at, call).await
}
