//! Metrics of calls, waits and throttle replies by action. Labels are the provider's own constants, never from a
//! request.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

/// The label `action`.
pub(super) type Action = [(&'static str, &'static str); 1];

#[derive(Clone)]
pub(super) struct ApiCallMetrics {
    pub(super) calls: Family<Action, Counter>,
    pub(super) throttles: Family<Action, Counter>,
    pub(super) refusals: Family<Action, Counter>,
    pub(super) waits: Family<Action, Histogram, fn() -> Histogram>,
}

impl Default for ApiCallMetrics {
    fn default() -> ApiCallMetrics {
        // Buckets from 1 ms (no wait) to 262 s.
        let histogram: fn() -> Histogram = || Histogram::new(exponential_buckets(0.001, 4.0, 10));
        ApiCallMetrics {
            calls: Family::default(),
            throttles: Family::default(),
            refusals: Family::default(),
            waits: Family::new_with_constructor(histogram),
        }
    }
}

impl ApiCallMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        let help = "API calls sent to the cloud, repeated ones too";
        registry.register("peerpod_cloud_calls", help, self.calls.clone());
        let help = "API calls that the cloud throttled";
        registry.register("peerpod_cloud_throttles", help, self.throttles.clone());
        let help = "API calls that were not sent because their turn would come after their deadline";
        registry.register("peerpod_cloud_calls_given_up", help, self.refusals.clone());
        let help = "How long API calls waited for their turn, in seconds";
        registry.register("peerpod_cloud_call_wait_seconds", help, self.waits.clone());
    }
}

#[cfg(test)]
mod tests {
    use peerpod_test_reference as reference;

    use super::*;

    #[test]
    fn documented_metrics_are_up_to_date() {
        let mut registry = Registry::default();
        let metrics = ApiCallMetrics::default();
        metrics.register(&mut registry);
        for counter in [&metrics.calls, &metrics.throttles, &metrics.refusals] {
            counter.get_or_create(&[("action", "x")]).inc();
        }
        metrics.waits.get_or_create(&[("action", "x")]).observe(0.0);
        let text = reference::metrics(&registry).unwrap();
        reference::section("metrics.md", "cloud", &text).unwrap();
    }
}
