//! Counts the calls.

use std::time::Duration;

use peerpod_base::metrics::register;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use crate::grpc::Status;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    way: &'static str,
    method: &'static str,
    refused: String,
}

#[derive(Clone, Debug)]
pub(crate) struct CsiMetrics {
    calls: Family<Labels, Counter>,
    took: Histogram,
    pub(crate) published: Gauge,
    pub(crate) retries: Counter,
    /// Publications that cannot be read; their volumes are not released.
    pub(crate) unreadable: Gauge,
}

impl CsiMetrics {
    pub(crate) fn register(registry: &mut Registry) -> CsiMetrics {
        // 50 µs to 14 minutes, each four times the last.
        let took = Histogram::new(exponential_buckets(50e-6, 4.0, 13));
        registry.register("peerpod_csi_call_seconds", "To the headers of the answer", took.clone());
        CsiMetrics {
            calls: register(
                registry,
                "peerpod_csi_calls",
                "CSI calls; refused: the code, where peerpod-csi refused and not the driver",
            ),
            published: register(
                registry,
                "peerpod_csi_published",
                "Volumes of peer pods published on this node",
            ),
            retries: register(
                registry,
                "peerpod_csi_retries",
                "Steps of attaching and detaching that failed and are tried again",
            ),
            unreadable: register(
                registry,
                "peerpod_csi_unreadable",
                "Notes of published volumes that could not be read at the start; the log names them",
            ),
            took,
        }
    }

    pub(crate) fn answered(&self, method: Option<&'static str>, refused: Option<&Status>, took: Duration) {
        // An intercepted call may still have been forwarded.
        let way = if method.is_some() { "LookedInto" } else { "Passed" };
        // Only known method names become labels: callers may invent methods.
        let method = method.unwrap_or("other");
        let refused = refused.map_or_else(String::new, |status| format!("{:?}", status.code));
        self.calls.get_or_create(&Labels { way, method, refused }).inc();
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
        let metrics = CsiMetrics::register(&mut registry);
        metrics.answered(None, None, Duration::ZERO);
        let text = reference::metrics(&registry).unwrap();
        reference::section("metrics.md", "peerpod-csi", &text).unwrap();
    }
}
