//! Counts the webhook's requests.

use std::time::Duration;

use peerpod_base::metrics::register;
use prometheus_client::encoding::EncodeLabelValue;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

/// Result of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
pub(super) enum ReviewOutcome {
    Changed,
    Unchanged,
    /// The peer pod is invalid.
    Refused,
    /// The body is not an AdmissionReview.
    Malformed,
    /// Too many long bodies came at once.
    Limited,
}

#[derive(Clone, Debug)]
pub(super) struct WebhookMetrics {
    reviews: Family<[(&'static str, ReviewOutcome); 1], Counter>,
    took: Histogram,
    pub(super) handshakes_failed: Counter,
    pub(super) reloads: Counter,
}

impl WebhookMetrics {
    pub(super) fn register(registry: &mut Registry) -> WebhookMetrics {
        let registry = registry.sub_registry_with_prefix("peerpod_webhook");
        let reviews = register(registry, "reviews", "Admission reviews answered");
        // 50 µs to 1.3 s, each half more than the last.
        let took = Histogram::new(exponential_buckets(50e-6, 1.5, 26));
        let help = "From the arrival of a request's headers to its answer";
        registry.register("review_seconds", help, took.clone());
        WebhookMetrics {
            reviews,
            took,
            handshakes_failed: register(registry, "handshakes_failed", "TLS handshakes that failed"),
            reloads: register(registry, "certificate_reloads", "New certificates taken into use"),
        }
    }

    pub(super) fn answered(&self, outcome: ReviewOutcome, took: Duration) {
        self.reviews.get_or_create(&[("outcome", outcome)]).inc();
        self.took.observe(took.as_secs_f64());
    }
}

#[cfg(test)]
mod tests {
    use peerpod_test_reference as reference;

    use super::*;

    #[test]
    fn documented_metrics_are_up_to_date() {
        let mut registry = Registry::default();
        let metrics = WebhookMetrics::register(&mut registry);
        metrics.answered(ReviewOutcome::Changed, Duration::ZERO);
        let text = reference::metrics(&registry).unwrap();
        reference::section("metrics.md", "webhook", &text).unwrap();
    }
}
