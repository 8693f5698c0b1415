//! Wraps a provider with the capability check, a deadline per call, retry with the same key and pacing learned from
//! throttling. It also writes one log line and the metrics of each call. No provider implements these itself.
//!
//! May touch the clock, the log and the metrics registry. Retry depends on [`Error::retry`] and nothing else.

mod metrics;
mod pace;

use std::collections::HashMap;
use std::future::Future;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::IpAddr;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::stream::BoxStream;
use parking_lot::Mutex;
use prometheus_client::registry::Registry;
use tokio::time::Instant;

use crate::{
    Batch, Capabilities, Console, CreateRequest, Created, CreatedMany, DiskIdentity, DiskRequest, Error,
    Extensions, IdempotencyKey, InstanceId, Owned, Placement, Preflight, Provider, ProviderEvent, Retry,
    Volumes, with_deadline,
};
use metrics::{CallMetrics, CallOutcome};
use pace::Pace;

/// Longest pause between two tries of one call, unless the cloud asks for more.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// Operation that has no deadline here.
const ADDRESSES: &str = "addresses";

/// Settings of the decorator.
#[derive(Debug, Clone)]
pub struct DecoratorConfig {
    /// Longest wait for one answer. `addresses` has none: its caller sets the deadline by dropping the future.
    pub call_deadline: Duration,
    /// Time after its first failure during which a call is repeated on `Throttled` and `Transient`. Zero: never.
    pub retry_for: Duration,
}

impl Default for DecoratorConfig {
    fn default() -> DecoratorConfig {
        DecoratorConfig { call_deadline: Duration::from_secs(60), retry_for: Duration::from_secs(120) }
    }
}

/// Adds capability check, deadline, retry, pacing, log and metrics to a provider. Call it once per registry.
pub fn decorate(
    provider: Arc<dyn Provider>,
    config: DecoratorConfig,
    registry: &mut Registry,
) -> Arc<dyn Provider> {
    let metrics = CallMetrics::register(provider.name(), registry);
    provider.register_metrics(registry);
    Arc::new(Decorated { inner: provider, config, metrics, paces: Mutex::default() })
}

struct Decorated {
    inner: Arc<dyn Provider>,
    config: DecoratorConfig,
    metrics: CallMetrics,
    /// Rate limits by operation, because clouds count each kind of call in its own bucket.
    paces: Mutex<HashMap<&'static str, Arc<Pace>>>,
}

impl Decorated {
    /// Repeats the call until it succeeds, fails for good or runs out of time. The second argument is the VM's name or
    /// id, for the log.
    async fn call<T, F>(&self, operation: &'static str, what: &str, ask: impl Fn() -> F) -> Result<T, Error>
    where
        F: Future<Output = Result<T, Error>>,
    {
        self.call_for(self.config.retry_for, operation, what, ask).await
    }

    /// Repeats the call for this time after its first failure.
    async fn call_for<T, F>(
        &self,
        retry_for: Duration,
        operation: &'static str,
        what: &str,
        ask: impl Fn() -> F,
    ) -> Result<T, Error>
    where
        F: Future<Output = Result<T, Error>>,
    {
        let provider = self.inner.name();
        let mut outcome = CallOutcome::start(&self.metrics, operation);
        let start = Instant::now();
        let mut first_failure: Option<Instant> = None;
        let mut tries = 0u32;
        let result = loop {
            tries = tries.saturating_add(1);
            let error = match self.once(operation, what, &ask).await {
                Ok(answer) => break Ok(answer),
                Err(error) => error,
            };
            let Retry::After(least) = error.retry() else { break Err(error) };
            let pause = pause(least, tries);
            let since = first_failure.get_or_insert_with(Instant::now).elapsed();
            if since + pause > retry_for {
                break Err(error);
            }
            self.metrics.retried(operation, error.class());
            tracing::debug!(provider, operation, what, class = error.class(), ?pause, "asked again: {error}");
            tokio::time::sleep(pause).await;
        };
        let took_ms = u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX);
        match &result {
            Ok(_) => {
                outcome.end("ok");
                tracing::debug!(provider, operation, what, tries, took_ms, "provider call done");
            }
            Err(error) => {
                outcome.end(error.class());
                tracing::warn!(
                    provider,
                    operation,
                    what,
                    tries,
                    took_ms,
                    class = error.class(),
                    "provider call failed: {error}"
                );
            }
        }
        result
    }

    /// Makes one try, with its turn and its deadline.
    async fn once<T, F>(&self, operation: &'static str, what: &str, ask: &impl Fn() -> F) -> Result<T, Error>
    where
        F: Future<Output = Result<T, Error>>,
    {
        let pace = Arc::clone(self.paces.lock().entry(operation).or_default());
        let turn = pace.turn().await;
        let answer = match operation {
            ADDRESSES => ask().await,
            _ => {
                let deadline = self.config.call_deadline;
                let asked = with_deadline(Instant::now() + deadline, ask());
                tokio::time::timeout(deadline, asked).await.unwrap_or_else(|_| {
                    let provider = self.inner.name();
                    Err(Error::transient(format!(
                        "{operation} of {what}: provider {provider} gave no answer within {deadline:?}; its \
                         effect is unknown, so only the same call may be repeated"
                    )))
                })
            }
        };
        match &answer {
            Err(Error::Throttled { after, .. }) => pace.slower(turn, *after),
            Ok(_) => pace.faster(),
            Err(_) => {}
        }
        answer
    }
}

/// Returns the pause before the next try: the error's own pause, doubled with each try up to [`LONGEST_PAUSE`], plus up
/// to half of that at random. The random part keeps calls that failed together from returning together.
fn pause(least: Duration, tries: u32) -> Duration {
    let doubled = least.saturating_mul(1 << tries.saturating_sub(1).min(10)).min(LONGEST_PAUSE.max(least));
    // The fresh keys of a hasher are the standard library's source of randomness.
    let chance = RandomState::new().build_hasher().finish() % 1024;
    doubled + doubled.mul_f64(chance as f64 / 2048.0)
}

#[async_trait]
impl Provider for Decorated {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn preflight(&self) -> Result<Preflight, Error> {
        // Its caller repeats it, and shows each failure at once.
        self.call_for(Duration::ZERO, "preflight", "provider", || self.inner.preflight()).await
    }

    async fn place(&self, request: &CreateRequest) -> Result<Option<Placement>, Error> {
        self.capabilities().check(request, self.name())?;
        self.call("place", &request.name, || self.inner.place(request)).await
    }

    async fn create(&self, request: &CreateRequest, key: &IdempotencyKey) -> Result<Created, Error> {
        self.capabilities().check(request, self.name())?;
        self.call("create", &request.name, || self.inner.create(request, key)).await
    }

    async fn addresses(&self, id: &InstanceId) -> Result<Vec<IpAddr>, Error> {
        self.call(ADDRESSES, id.as_str(), || self.inner.addresses(id)).await
    }

    async fn delete(&self, id: &InstanceId) -> Result<(), Error> {
        self.call("delete", id.as_str(), || self.inner.delete(id)).await
    }

    async fn list_owned(&self) -> Result<Vec<Owned>, Error> {
        self.call("list", "all VMs", || self.inner.list_owned()).await
    }

    fn extensions(&self) -> Extensions<'_> {
        let inner = self.inner.extensions();
        Extensions {
            batch: inner.batch.map(|_| self as &dyn Batch),
            volumes: inner.volumes.map(|_| self as &dyn Volumes),
            console: inner.console.map(|_| self as &dyn Console),
        }
    }

    fn events(&self) -> Option<BoxStream<'static, ProviderEvent>> {
        self.inner.events()
    }

    fn health(&self) -> Option<BoxStream<'static, Option<String>>> {
        self.inner.health()
    }
}

/// Returned only where the provider itself has batches.
#[async_trait]
impl Batch for Decorated {
    async fn create_many(
        &self,
        request: &CreateRequest,
        count: NonZeroU32,
        key: &IdempotencyKey,
    ) -> Result<CreatedMany, Error> {
        let Some(batch) = self.inner.extensions().batch else { return Err(lost("batches")) };
        self.capabilities().check_batch(request, count, self.name())?;
        self.call("create_many", &request.name, || batch.create_many(request, count, key)).await
    }
}

/// Returned only where the provider itself has volumes.
#[async_trait]
impl Volumes for Decorated {
    async fn attach(&self, id: &InstanceId, disk: &DiskRequest) -> Result<DiskIdentity, Error> {
        let Some(volumes) = self.inner.extensions().volumes else { return Err(lost("volumes")) };
        self.call("attach", id.as_str(), || volumes.attach(id, disk)).await
    }

    async fn detach(&self, id: &InstanceId, volume: &str) -> Result<(), Error> {
        let Some(volumes) = self.inner.extensions().volumes else { return Err(lost("volumes")) };
        self.call("detach", id.as_str(), || volumes.detach(id, volume)).await
    }

    async fn grown(&self, id: &InstanceId, disk: &DiskRequest, bytes: u64) -> Result<(), Error> {
        let Some(volumes) = self.inner.extensions().volumes else { return Err(lost("volumes")) };
        self.call("grown", id.as_str(), || volumes.grown(id, disk, bytes)).await
    }
}

/// Returned only where the provider itself has a console.
#[async_trait]
impl Console for Decorated {
    async fn tail(&self, id: &InstanceId, limit: usize) -> Result<Vec<u8>, Error> {
        let Some(console) = self.inner.extensions().console else { return Err(lost("console")) };
        self.call("console", id.as_str(), || console.tail(id, limit)).await
    }
}

fn lost(field: &str) -> Error {
    Error::unsupported(field, format!("this provider has no {field} any more"))
}

#[cfg(test)]
mod tests;
