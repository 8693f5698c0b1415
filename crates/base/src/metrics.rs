//! Makes metrics and registers them in one step.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::{Metric, Registry};

/// Counters that differ in one label, which has values from a fixed list.
pub type Labelled = Family<[(&'static str, &'static str); 1], Counter>;

/// Registers a new metric with its name and help text, and returns it.
pub fn register<M: Metric + Clone + Default>(registry: &mut Registry, name: &str, help: &str) -> M {
    let metric = M::default();
    registry.register(name, help, metric.clone());
    metric
}
