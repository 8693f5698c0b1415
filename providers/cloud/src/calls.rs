//! The API calls of one cloud account, each in its turn.
//!
//! Clouds count calls per account, region and kind of call, and refuse what is too fast; a refused call is lost time
//! and still a call. So every call takes a token first. Which calls share a bucket, how fast it fills and how much it
//! holds is a [`Table`]; the seeds are the cloud's published figures, and what the account really has is learned from
//! its throttle replies ([`Adaptive`]).
//!
//! * **Fair between pods**: calls wait by owner, and owners take turns. A pod with twenty disks does not
//!   stand before another's first call.
//! * **Deadlines**: who cannot get a token before its deadline hears so at once, with the wait and the action named;
//!   the time is spent better elsewhere. Who is overtaken by slower times hears it at its deadline.
//! * **May be dropped** at any await: the place in the line, the token and the slot are given back.
//! * Where tokens come from is a trait ([`TokenSource`]): an account's rate that is shared between nodes (a lease in
//!   the cluster, a service that alone makes the calls) is another source behind the same line.

mod line;
mod metrics;
mod table;
mod tokens;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use peerpod_provider_api::Error;
use prometheus_client::registry::Registry;
use tokio::time::Instant;

pub use table::{Limits, Table};
pub use tokens::{Adaptive, TokenSource};

use line::{Lines, Permit, Refusal};
use metrics::Metrics;

/// One call, as the scheduler must know it.
#[derive(Debug, Clone, Copy)]
pub struct Call<'c> {
    /// The API action, e.g. `RunInstances`; also the metrics' label.
    pub action: &'static str,
    /// On whose behalf: calls of one owner wait behind each other, not before other owners'. The VM's id or its
    /// idempotency key; a batch has one of its own.
    pub owner: &'c str,
    /// For people: what is done to what, e.g. `create of web-0`.
    pub what: &'c str,
    /// When the answer is worth nothing any more.
    pub deadline: Instant,
}

/// The scheduler of one account. Clones share it.
#[derive(Clone)]
pub struct Scheduler {
    table: Arc<Table>,
    lines: Arc<Lines>,
    metrics: Metrics,
}

impl Scheduler {
    /// A scheduler that owns its account's buckets alone, as far as it knows.
    pub fn new(table: Table) -> Scheduler {
        let source = Arc::new(Adaptive::new(&table));
        Scheduler::with_source(table, source)
    }

    /// A scheduler whose tokens come from elsewhere.
    pub fn with_source(table: Table, source: Arc<dyn TokenSource>) -> Scheduler {
        Scheduler { table: Arc::new(table), lines: Lines::new(source), metrics: Metrics::default() }
    }

    /// Registers `peerpod_cloud_*`; from `Provider::register_metrics`.
    pub fn register(&self, registry: &mut Registry) {
        self.metrics.register(registry);
    }

    /// Makes the call when its turn comes, and again, in a later turn, while the cloud throttles it. `ask` makes the
    /// API call once and nothing else; its deadline is kept here.
    ///
    /// # Errors
    /// What `ask` says; [`Error::Transient`] when no turn comes before the deadline, or there was no answer before it.
    pub async fn run<T, F>(&self, call: Call<'_>, ask: impl Fn() -> F) -> Result<T, Error>
    where
        F: Future<Output = Result<T, Error>>,
    {
        loop {
            let permit = self.turn(call).await?;
            self.metrics.called(call.action);
            let permit = permit.sent();
            match tokio::time::timeout_at(call.deadline, ask()).await {
                Err(_) => {
                    return Err(Error::transient(format!(
                        "{}: {} had no answer when its time was over; what it did is unknown",
                        call.what, call.action
                    )));
                }
                Ok(Err(Error::Throttled { after, text })) => {
                    permit.throttled(after);
                    self.metrics.throttled(call.action);
                    tracing::debug!(action = call.action, what = call.what, ?after, "throttled: {text}");
                }
                Ok(answer) => {
                    permit.answered();
                    return answer;
                }
            }
        }
    }

    /// Waits for the call's turn.
    async fn turn(&self, call: Call<'_>) -> Result<Permit, Error> {
        let (bucket, limits) = self.table.bucket(call.action);
        let start = Instant::now();
        let turn = self.lines.turn(bucket, limits, call.owner, call.deadline).await;
        self.metrics.waited(call.action, start.elapsed());
        turn.map_err(|refusal| {
            self.metrics.refused(call.action);
            no_turn(call, limits, start, &refusal)
        })
    }
}

/// That a call's turn does not come in time: which, how long it would be, and what would help.
fn no_turn(call: Call<'_>, limits: &Limits, start: Instant, refusal: &Refusal) -> Error {
    let Call { action, what, deadline, .. } = call;
    let (left, rate) = (short(deadline.saturating_duration_since(start)), limits.per_second);
    let text = match refusal {
        Refusal::TooLong { ahead, wait } => format!(
            "{what}: {ahead} other calls wait for {action}, which this account may call {rate} times a second at \
             most; the turn comes in {}, and the caller waits {left}, for the answer, too; create fewer pods at once, have the cloud raise \
             the limit, or set a longer deadline",
            short(*wait)
        ),
        Refusal::TimeIsOver { ahead } => format!(
            "{what}: the turn of {action} did not come within {left}, {ahead} other calls still wait before it; the \
             cloud throttles this account: create fewer pods at once, or have it raise the limit"
        ),
    };
    // Not `Throttled`: the cloud did not say so, and the decorator would slow down everybody's calls for it.
    Error::transient(text)
}

/// To a tenth of a second: what a person wants to know.
fn short(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

#[cfg(test)]
mod tests;
