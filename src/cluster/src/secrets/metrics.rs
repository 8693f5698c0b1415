//! Counts the calls of the secrets service.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use peerpod_base::metrics::{expiries, register};
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use crate::authority::maintainer::Authority;
use crate::authority::served::ends;
use crate::serve::InUse;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
pub(super) enum SecretsCall {
    PullSecrets,
    Other,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelValue)]
pub(super) enum SecretsOutcome {
    Answered,
    Malformed,
    /// The request has no acceptable token.
    Unknown,
    /// The object does not belong to the node.
    Refused,
    Limited,
    /// The API server or a part of the service failed.
    Failed,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    call: SecretsCall,
    outcome: SecretsOutcome,
}

/// Metrics of the service, registered once per process.
#[derive(Clone)]
pub(crate) struct SecretsMetrics {
    requests: Family<Labels, Counter>,
    took: Histogram,
    pub(super) handshakes_failed: Counter,
    pub(super) certificates: Counter,
    /// Certificate and CA, once the service has them.
    pub(super) in_use: Arc<OnceLock<(InUse, Authority)>>,
}

impl SecretsMetrics {
    pub(crate) fn register(registry: &mut Registry) -> SecretsMetrics {
        // 0.5 ms to 8 s, doubled each time.
        let took = Histogram::new(exponential_buckets(0.5e-3, 2.0, 15));
        registry.register(
            "peerpod_secrets_request_seconds",
            "From the arrival of a request's headers to its answer",
            took.clone(),
        );
        let in_use: Arc<OnceLock<(InUse, Authority)>> = Arc::default();
        let shown = in_use.clone();
        expiries(registry, move || {
            let names = ["secrets", "secrets-ca"];
            shown
                .get()
                .map(|(certificate, authority)| ends(certificate, authority, names))
                .unwrap_or_default()
        });
        SecretsMetrics {
            in_use,
            requests: register(
                registry,
                "peerpod_secrets_requests",
                "Requests of nodes to the secrets service, by result",
            ),
            handshakes_failed: register(
                registry,
                "peerpod_secrets_handshakes_failed",
                "TLS handshakes of nodes that failed",
            ),
            certificates: register(
                registry,
                "peerpod_secrets_certificates",
                "The service's own certificates that it took into use",
            ),
            took,
        }
    }

    pub(super) fn ended(&self, call: SecretsCall, outcome: SecretsOutcome, took: Duration) {
        self.requests.get_or_create(&Labels { call, outcome }).inc();
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
        let metrics = SecretsMetrics::register(&mut registry);
        metrics.ended(SecretsCall::PullSecrets, SecretsOutcome::Answered, Duration::ZERO);
        let text = reference::metrics(&registry).unwrap();
        reference::section("metrics.md", "secrets", &text).unwrap();
    }
}
