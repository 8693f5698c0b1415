//! Schedules the API calls of one cloud account.
//!
//! Clouds count calls per account, region and kind of call, and refuse calls above the rate. A refused call costs time
//! and still counts. Every call therefore takes a token first. A [`Table`] defines the calls that share a bucket, its
//! fill rate and its size. It starts with the cloud's published figures; `tokens` learns the actual rate of the
//! account from its throttle replies.
//!
//! * **Fair between pods**: calls queue by owner, and owners take turns. A pod with twenty disks does not delay the
//!   first call of another pod.
//! * **Deadlines**: a call that cannot get a token before its deadline fails at once. The error names the wait and the
//!   action, and the caller can use the time otherwise. A call that is delayed by a falling rate fails at its deadline.
//! * **May be dropped** at any await: the place in the queue, the token and the slot are given back.

mod metrics;
mod queue;
mod table;
mod tokens;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use peerpod_provider_api::{Error, deadline};
use prometheus_client::registry::Registry;
use tokio::time::Instant;

pub use table::{BucketLimits, Table};
pub use tokens::rest_of_minute;

use metrics::ApiCallMetrics;
use queue::{NoTurn, Permit, Queues};

/// Longest time that a call waits for its turn and its answer when its caller has set no deadline.
const PATIENCE: Duration = Duration::from_secs(120);

/// Returns the deadline of the provider's caller, or two minutes from now.
pub fn until() -> Instant {
    deadline().unwrap_or_else(|| Instant::now() + PATIENCE)
}

/// One call, as the scheduler sees it.
#[derive(Debug, Clone, Copy)]
pub struct ApiCall<'c> {
    /// API action, e.g. `RunInstances`; also the label in metrics.
    pub action: &'static str,
    /// Owner of the call: the VM's id or its idempotency key; a batch has its own. Calls of one owner wait behind each
    /// other, not before those of other owners.
    pub owner: &'c str,
    /// Operation and object for the log and errors, e.g. `create of web-0`.
    pub what: &'c str,
    /// Time after which the answer is useless.
    pub deadline: Instant,
}

impl<'c> ApiCall<'c> {
    /// Returns a call that ends at the deadline of the provider's caller.
    pub fn new(action: &'static str, owner: &'c str, what: &'c str) -> ApiCall<'c> {
        ApiCall { action, owner, what, deadline: until() }
    }

    /// Sets the deadline, for a call in a task of its own.
    #[must_use]
    pub fn until(self, deadline: Instant) -> ApiCall<'c> {
        ApiCall { deadline, ..self }
    }
}

/// Scheduler of one account. Clones share it.
#[derive(Clone)]
pub struct Scheduler {
    table: Arc<Table>,
    queues: Arc<Queues>,
    metrics: ApiCallMetrics,
}

impl Scheduler {
    /// Returns a scheduler for an account that, as far as known, no other process uses.
    pub fn new(table: Table) -> Scheduler {
        Scheduler { table: Arc::new(table), queues: Arc::default(), metrics: ApiCallMetrics::default() }
    }

    /// Registers `peerpod_cloud_*`; called by `Provider::register_metrics`.
    pub fn register(&self, registry: &mut Registry) {
        self.metrics.register(registry);
    }

    /// Makes the call when its turn comes, and again, in a later turn, while the cloud throttles it. `ask` makes the
    /// API call once and nothing else; this function enforces its deadline.
    ///
    /// # Errors
    /// The error of `ask`; [`Error::Transient`] when no turn or no answer comes before the deadline.
    pub async fn run<T, E, F>(&self, call: ApiCall<'_>, ask: impl Fn() -> F) -> Result<T, E>
    where
        E: From<Error> + AsRef<Error>,
        F: Future<Output = Result<T, E>>,
    {
        let action = [("action", call.action)];
        loop {
            let permit = self.turn(call).await?;
            self.metrics.calls.get_or_create(&action).inc();
            let permit = permit.sent();
            let answer = tokio::time::timeout_at(call.deadline, ask()).await.map_err(|_| {
                Error::transient(format!(
                    "{}: {} had no answer when its time was over; its effect is unknown",
                    call.what, call.action
                ))
            })?;
            if let Err(Error::Throttled { after, text }) = answer.as_ref().map_err(AsRef::<Error>::as_ref) {
                permit.throttled(*after);
                self.metrics.throttles.get_or_create(&action).inc();
                tracing::debug!(action = call.action, what = call.what, ?after, "throttled: {text}");
            } else {
                permit.answered();
                return answer;
            }
        }
    }

    /// Records that the cloud accepts only this many more calls like `action` for now, where its answers tell that
    /// (`x-ms-ratelimit-remaining-resource`).
    pub fn left(&self, action: &str, calls: u32) {
        let (bucket, limits) = self.table.bucket(action);
        self.queues.left(bucket, limits, calls);
    }

    /// Waits for the turn of the call.
    async fn turn(&self, call: ApiCall<'_>) -> Result<Permit, Error> {
        let (bucket, limits) = self.table.bucket(call.action);
        let start = Instant::now();
        let turn = self.queues.turn(bucket, limits, call.owner, call.deadline).await;
        let action = [("action", call.action)];
        self.metrics.waits.get_or_create(&action).observe(start.elapsed().as_secs_f64());
        turn.map_err(|refusal| {
            self.metrics.refusals.get_or_create(&action).inc();
            no_turn(call, limits, start, &refusal)
        })
    }
}

/// Error for a call that gets no turn in time: the action, the wait and the remedy.
fn no_turn(call: ApiCall<'_>, limits: &BucketLimits, start: Instant, refusal: &NoTurn) -> Error {
    let ApiCall { action, what, deadline, .. } = call;
    let (left, rate) = (short(deadline.saturating_duration_since(start)), limits.per_second);
    let ahead = refusal.ahead;
    let text = match refusal.wait {
        Some(wait) => format!(
            "{what}: {ahead} other calls wait for {action}, which this account may call {rate} times a second at \
             most; the turn comes in {}, and the caller waits {left}, for the answer, too; create fewer pods at once, have the cloud raise \
             the limit, or set a longer deadline",
            short(wait)
        ),
        None => format!(
            "{what}: the turn of {action} did not come within {left}, {ahead} other calls still wait before it; the \
             cloud throttles this account: create fewer pods at once, or have it raise the limit"
        ),
    };
    // Not `Throttled`: the cloud did not throttle this call, and the decorator would slow down all calls for it.
    Error::transient(text)
}

/// Formats a duration to a tenth of a second.
fn short(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

#[cfg(test)]
mod tests;
