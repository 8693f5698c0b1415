//! Metrics of provider calls. Labels come from fixed sets, never from a request.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use tokio::time::Instant;

type Labels<const N: usize> = [(&'static str, &'static str); N];

pub(super) struct CallMetrics {
    provider: &'static str,
    calls: Family<Labels<3>, Counter>,
    retries: Family<Labels<3>, Counter>,
    seconds: Family<Labels<2>, Histogram, fn() -> Histogram>,
}

/// Buckets from 5 ms (the local provider) to 82 s.
fn histogram() -> Histogram {
    Histogram::new(exponential_buckets(0.005, 2.0, 15))
}

impl CallMetrics {
    pub(super) fn register(provider: &'static str, registry: &mut Registry) -> CallMetrics {
        let metrics = CallMetrics {
            provider,
            calls: Family::default(),
            retries: Family::default(),
            seconds: Family::new_with_constructor(histogram),
        };
        let help = "Provider calls by outcome: ok, the class of the error, or dropped by the caller";
        registry.register("peerpod_provider_calls", help, metrics.calls.clone());
        let help = "Tries after the first, by the class of the error before";
        registry.register("peerpod_provider_retries", help, metrics.retries.clone());
        let help = "Duration of provider calls in seconds, all tries and pauses included";
        registry.register("peerpod_provider_call_seconds", help, metrics.seconds.clone());
        metrics
    }

    pub(super) fn retried(&self, operation: &'static str, class: &'static str) {
        let labels = [("provider", self.provider), ("operation", operation), ("outcome", class)];
        self.retries.get_or_create(&labels).inc();
    }
}

/// Counts one call, even one that its caller drops.
pub(super) struct CallOutcome<'m> {
    metrics: &'m CallMetrics,
    operation: &'static str,
    start: Instant,
    outcome: &'static str,
}

impl<'m> CallOutcome<'m> {
    pub(super) fn start(metrics: &'m CallMetrics, operation: &'static str) -> CallOutcome<'m> {
        CallOutcome { metrics, operation, start: Instant::now(), outcome: "dropped" }
    }

    pub(super) fn end(&mut self, outcome: &'static str) {
        self.outcome = outcome;
    }
}

impl Drop for CallOutcome<'_> {
    fn drop(&mut self) {
        let CallOutcome { metrics, operation, outcome, .. } = *self;
        let [provider, operation] = [("provider", metrics.provider), ("operation", operation)];
        metrics.calls.get_or_create(&[provider, operation, ("outcome", outcome)]).inc();
        let seconds = self.start.elapsed().as_secs_f64();
        metrics.seconds.get_or_create(&[provider, operation]).observe(seconds);
    }
}

#[cfg(test)]
mod tests {
    use peerpod_test_reference as reference;

    use super::*;

    #[test]
    fn documented_metrics_are_up_to_date() {
        let mut registry = Registry::default();
        let metrics = CallMetrics::register("x", &mut registry);
        metrics.retried("x", "x");
        drop(CallOutcome::start(&metrics, "x"));
        let text = reference::metrics(&registry).unwrap();
        reference::section("metrics.md", "provider", &text).unwrap();
    }
}
