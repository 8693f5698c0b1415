//! Waits for the decision of a cloud that accepts a call first and executes or refuses it later.

use std::future::Future;
use std::time::Duration;

use peerpod_provider_cloud::Wait;
use tokio::time::Instant;

use crate::dialect::Said;
use crate::failure::Failure;

/// Longest time before a deadline at which a wait ends, so that its caller still gets the id.
const RESERVE: Duration = Duration::from_secs(5);

/// State of an accepted call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision<T> {
    /// The cloud executes it, or has executed it.
    Made(T),
    /// The cloud has refused it after all.
    Refused(Said),
    /// The cloud has not decided.
    Open,
}

/// Returns the end of a wait whose caller has this deadline: five seconds before it, or a quarter of the rest.
pub fn end_of_wait(deadline: Instant) -> Instant {
    let left = deadline.saturating_duration_since(Instant::now());
    deadline.checked_sub(RESERVE.min(left / 4)).unwrap_or(deadline)
}

/// Looks until the cloud has decided, at least once. Returns [`Decision::Open`] when it has not decided before `end`.
/// Transient failures of a look are open, too: the call was accepted.
///
/// # Errors
/// The first failure of a look that a repetition does not cure.
pub async fn decide<T, F>(
    wait: &Wait,
    end: Instant,
    mut look: impl FnMut() -> F,
) -> Result<Decision<T>, Failure>
where
    F: Future<Output = Result<Decision<T>, Failure>>,
{
    let decided = wait.until(Some(end), || {
        let look = look();
        async move {
            match look.await {
                Ok(Decision::Open) => Ok(None),
                Ok(decided) => Ok(Some(decided)),
                Err(failure) if matches!(failure.error.class(), "transient" | "throttled") => {
                    tracing::debug!("the decision is not known yet: {}", failure.error);
                    Ok(None)
                }
                Err(failure) => Err(failure),
            }
        }
    });
    Ok(decided.await?.unwrap_or(Decision::Open))
}
