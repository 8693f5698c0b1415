//! Counts the machines by state, from the memory of this process: a scrape asks no machine.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Weak};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use super::Pool;
use super::known::{Known, Seen};

/// States of a machine. The first four are those of a machine that answers.
const STATES: [&str; 9] =
    ["free", "resting", "taken", "ours", "unreachable", "distrusted", "denied", "faulty", "unknown"];

/// Registers the metric of the pool.
pub(crate) fn register(pool: &Arc<Pool>, registry: &mut Registry) {
    registry.register_collector(Box::new(Machines(Arc::downgrade(pool))));
}

struct Machines(Weak<Pool>);

impl fmt::Debug for Machines {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Machines")
    }
}

impl Collector for Machines {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Some(pool) = self.0.upgrade() else { return Ok(()) };
        let mut counts: BTreeMap<&str, i64> = BTreeMap::new();
        for machine in &pool.machines {
            *counts.entry(state(&machine.known.lock())).or_default() += 1;
        }
        let metric = ConstGauge::new(0_i64);
        let help = "Machines of the pool, by the state that this program saw last";
        let mut family =
            encoder.encode_descriptor("peerpod_byom_machines", help, None, metric.metric_type())?;
        for state in STATES {
            let count = ConstGauge::new(counts.get(state).copied().unwrap_or(0));
            count.encode(family.encode_family(&[("state", state)])?)?;
        }
        Ok(())
    }
}

/// Returns the state of a machine as one word.
pub(crate) fn state(known: &Known) -> &'static str {
    match (known.down(), known.seen()) {
        (Some(down), _) => down.fault.word(),
        (None, Seen::Never) => "unknown",
        (None, Seen::Free(_)) => "free",
        (None, Seen::Resting(_)) => "resting",
        (None, Seen::Taken) => "taken",
        (None, Seen::Ours(..)) => "ours",
    }
}

#[cfg(test)]
mod tests {
    use peerpod_provider_api::{Owner, Provider};
    use peerpod_test_reference as reference;

    use super::*;
    use crate::{ByomConfig, ByomProvider};

    #[test]
    fn documented_metrics_are_up_to_date() {
        let flags = [("machines", "10.0.0.7"), ("private-key-file", "/key"), ("known-hosts-file", "/hosts")];
        let flags = flags.map(|(key, value)| (format!("provider.byom.{key}"), value.to_owned()));
        let sources = peerpod_base::config::Sources { flags: flags.into(), ..Default::default() };
        let mut reader = peerpod_base::config::Reader::load(sources, &["provider"], &[]).unwrap();
        let provider = ByomProvider::new(ByomConfig::read(&mut reader, true), Owner::default());
        let mut registry = Registry::default();
        provider.register_metrics(&mut registry);
        let text = reference::metrics(&registry).unwrap();
        reference::section("metrics.md", "byom", &text).unwrap();
    }
}
