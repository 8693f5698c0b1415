//! Metrics of the relay, under `peerpod_relay_`.

use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::Registry,
};

/// Label: a reason from a fixed list.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct Reason {
    reason: &'static str,
}

/// Label: an outcome from a fixed list.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct Outcome {
    outcome: &'static str,
}

/// Label: a method from a fixed list.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct Method {
    method: &'static str,
}

/// Label: a result from a fixed list.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct Fate {
    result: &'static str,
}

/// Label: `to_guest` or `from_guest`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct Direction {
    direction: &'static str,
}

/// Counters and gauges of the relay.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    pub(crate) hypervisor_connections: Gauge,
    pub(crate) queued_calls: Gauge,
    pub(crate) node_connected: Gauge,
    pub(crate) node_losses: Counter,
    pub(crate) inbox_writes: Counter,
    calls: Family<Method, Counter>,
    pub(crate) sandboxes: Gauge,
    pub(crate) guests_connected: Gauge,
    pub(crate) agent_connections: Gauge,
    pub(crate) agent_connections_refused: Counter,
    pub(crate) reconnects: Counter,
    pub(crate) sessions_lost: Counter,
    pub(crate) guest_connections: Counter,
    guests_refused: Family<Reason, Counter>,
    claims: Family<Reason, Counter>,
    pub(crate) guest_calls: Counter,
    pub(crate) guest_words_dropped: Counter,
    guest_log_lines: Family<Fate, Counter>,
    pub(crate) panics: Counter,
    localhost: Family<Outcome, Counter>,
    bytes: Family<Direction, Counter>,
    frames: Family<Direction, Counter>,
}

/// Bytes and frames of the shims' connections, over all sandboxes; clones share the counters.
#[derive(Clone, Debug, Default)]
pub(crate) struct Totals {
    pub(crate) bytes_to_guest: Counter,
    pub(crate) bytes_from_guest: Counter,
    pub(crate) frames_to_guest: Counter,
    pub(crate) frames_from_guest: Counter,
}

impl Metrics {
    /// Makes the metrics and registers them.
    pub(crate) fn new(registry: &mut Registry) -> Metrics {
        let metrics = Metrics::default();
        let relay = registry.sub_registry_with_prefix("peerpod_relay");
        let m = &metrics;
        relay.register(
            "hypervisor_connections",
            "Open connections to hypervisor.sock",
            m.hypervisor_connections.clone(),
        );
        relay.register("queued_calls", "Calls that wait for the node or run in it", m.queued_calls.clone());
        relay.register("node_connected", "1 while the node answers", m.node_connected.clone());
        relay.register("node_losses", "Connections to the node that ended", m.node_losses.clone());
        relay.register("inbox_writes", "Stops written to the inbox", m.inbox_writes.clone());
        relay.register("calls", "Calls from shims, by method", m.calls.clone());
        relay.register("sandboxes", "Sandboxes with an agent socket", m.sandboxes.clone());
        relay.register("guests_connected", "Sandboxes whose guest is connected", m.guests_connected.clone());
        relay.register("agent_connections", "Open connections to agent sockets", m.agent_connections.clone());
        relay.register(
            "agent_connections_refused",
            "Connections to agent sockets refused over the limit of a sandbox",
            m.agent_connections_refused.clone(),
        );
        relay.register("reconnects", "Links that were resumed", m.reconnects.clone());
        relay.register("sessions_lost", "Guest programs that were replaced", m.sessions_lost.clone());
        relay.register(
            "guest_connections",
            "TCP connections accepted from guests",
            m.guest_connections.clone(),
        );
        relay.register(
            "guests_refused",
            "Connections of guests that were refused, by reason",
            m.guests_refused.clone(),
        );
        relay.register("claims", "Tickets shown, by outcome", m.claims.clone());
        relay.register("guest_calls", "Calls from the node to guests", m.guest_calls.clone());
        relay.register(
            "guest_words_dropped",
            "Unrequested messages from guests, dropped because they came too fast",
            m.guest_words_dropped.clone(),
        );
        relay.register(
            "guest_log_lines",
            "Lines of guests' logs: written, left_out (too many), lost_in_guest (lost in the VM)",
            m.guest_log_lines.clone(),
        );
        relay.register(
            "panics",
            "Agent endpoints and localhost tasks of pods that ended by a panic",
            m.panics.clone(),
        );
        relay.register("bytes", "Bytes between shims and agents", m.bytes.clone());
        relay.register("frames", "Frames between shims and agents", m.frames.clone());
        relay.register(
            "localhost_connections",
            "Connections to pods' localhost by outcome: carried, refused in the VM, failed",
            m.localhost.clone(),
        );
        for result in ["written", "left_out", "lost_in_guest"] {
            metrics.guest_log(result, 0);
        }
        for outcome in ["carried", "refused", "failed"] {
            drop(m.localhost.get_or_create(&Outcome { outcome }));
        }
        // Series that begin at zero exist from the start.
        drop(metrics.totals());
        metrics
    }

    /// Returns the traffic counters, which are looked up once and then counted without a lock.
    pub(crate) fn totals(&self) -> Totals {
        let of = |family: &Family<Direction, Counter>, direction| {
            family.get_or_create(&Direction { direction }).clone()
        };
        Totals {
            bytes_to_guest: of(&self.bytes, "to_guest"),
            bytes_from_guest: of(&self.bytes, "from_guest"),
            frames_to_guest: of(&self.frames, "to_guest"),
            frames_from_guest: of(&self.frames, "from_guest"),
        }
    }

    /// Counts a call of a shim. Only known methods become labels.
    pub(crate) fn call(&self, method: &str) {
        let known = ["CreateVM", "StartVM", "StopVM", "Version", "GetInfo"];
        let method = known.into_iter().find(|known| *known == method).unwrap_or("other");
        self.calls.get_or_create(&Method { method }).inc();
    }

    /// Counts a connection to a pod's localhost.
    pub(crate) fn localhost(&self, outcome: &'static str) {
        self.localhost.get_or_create(&Outcome { outcome }).inc();
    }

    /// Counts a refused connection of a guest.
    pub(crate) fn refused(&self, reason: &'static str) {
        self.guests_refused.get_or_create(&Reason { reason }).inc();
    }

    /// Counts lines of a guest's log.
    pub(crate) fn guest_log(&self, result: &'static str, lines: u64) {
        self.guest_log_lines.get_or_create(&Fate { result }).inc_by(lines);
    }

    /// Counts a ticket by its outcome.
    pub(crate) fn claim(&self, reason: &'static str) {
        self.claims.get_or_create(&Reason { reason }).inc();
    }
}

#[cfg(test)]
mod tests {
    use peerpod_base::reference;

    use super::*;

    #[test]
    fn documented_metrics_are_up_to_date() {
        let mut registry = Registry::default();
        let metrics = Metrics::new(&mut registry);
        metrics.call("CreateVM");
        metrics.refused("x");
        metrics.claim("x");
        let text = reference::metrics(&registry).unwrap();
        reference::section("metrics.md", "peerpod-relay", &text).unwrap();
    }
}
