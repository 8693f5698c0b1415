//! Metrics of the relay, under `peerpod_relay_`.

use peerpod_base::metrics::{Labelled, register};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// Counters and gauges of the relay.
#[derive(Debug)]
pub(crate) struct Metrics {
    pub(crate) hypervisor: HypervisorMetrics,
    pub(crate) sandboxes: SandboxMetrics,
    pub(crate) guests: GuestMetrics,
}

impl Metrics {
    /// Makes the metrics and registers them.
    pub(crate) fn new(registry: &mut Registry) -> Metrics {
        let relay = registry.sub_registry_with_prefix("peerpod_relay");
        Metrics {
            hypervisor: HypervisorMetrics::new(relay),
            sandboxes: SandboxMetrics::new(relay),
            guests: GuestMetrics::new(relay),
        }
    }
}

/// Metrics of the hypervisor proxy.
#[derive(Debug)]
pub(crate) struct HypervisorMetrics {
    pub(crate) connections: Gauge,
    pub(crate) queued_calls: Gauge,
    pub(crate) node_connected: Gauge,
    pub(crate) node_losses: Counter,
    pub(crate) inbox_writes: Counter,
    calls: Labelled,
}

impl HypervisorMetrics {
    fn new(relay: &mut Registry) -> HypervisorMetrics {
        HypervisorMetrics {
            connections: register(relay, "hypervisor_connections", "Open connections to hypervisor.sock"),
            queued_calls: register(relay, "queued_calls", "Calls that wait for the node or run in it"),
            node_connected: register(relay, "node_connected", "1 while the node answers"),
            node_losses: register(relay, "node_losses", "Connections to the node that ended"),
            inbox_writes: register(relay, "inbox_writes", "Stops written to the inbox"),
            calls: register(relay, "calls", "Calls from shims, by method"),
        }
    }

    /// Counts a call of a shim. Only known methods become labels.
    pub(crate) fn call(&self, method: &str) {
        let known = ["CreateVM", "StartVM", "StopVM", "Version", "GetInfo"];
        let method = known.into_iter().find(|known| *known == method).unwrap_or("other");
        self.calls.get_or_create(&[("method", method)]).inc();
    }
}

/// Metrics of the sandboxes: agent sockets, links, localhost.
#[derive(Debug)]
pub(crate) struct SandboxMetrics {
    pub(crate) served: Gauge,
    pub(crate) guests_connected: Gauge,
    pub(crate) agent_connections: Gauge,
    pub(crate) agent_connections_refused: Counter,
    pub(crate) reconnects: Counter,
    pub(crate) sessions_lost: Counter,
    pub(crate) panics: Counter,
    pub(crate) traffic: Traffic,
    localhost: Labelled,
}

impl SandboxMetrics {
    fn new(relay: &mut Registry) -> SandboxMetrics {
        let metrics = SandboxMetrics {
            served: register(relay, "sandboxes", "Sandboxes with an agent socket"),
            guests_connected: register(relay, "guests_connected", "Sandboxes whose guest is connected"),
            agent_connections: register(relay, "agent_connections", "Open connections to agent sockets"),
            agent_connections_refused: register(
                relay,
                "agent_connections_refused",
                "Connections to agent sockets refused over the limit of a sandbox",
            ),
            reconnects: register(relay, "reconnects", "Links that were resumed"),
            sessions_lost: register(relay, "sessions_lost", "Guest programs that were replaced"),
            panics: register(
                relay,
                "panics",
                "Agent endpoints and localhost tasks of pods that ended by a panic",
            ),
            traffic: Traffic::new(relay),
            localhost: register(
                relay,
                "localhost_connections",
                "Connections to pods' localhost by outcome: carried, refused in the VM, failed",
            ),
        };
        // Series that begin at zero exist from the start.
        for outcome in ["carried", "refused", "failed"] {
            drop(metrics.localhost.get_or_create(&[("outcome", outcome)]));
        }
        metrics
    }

    /// Counts a connection to a pod's localhost.
    pub(crate) fn localhost(&self, outcome: &'static str) {
        self.localhost.get_or_create(&[("outcome", outcome)]).inc();
    }
}

/// Bytes and frames of the shims' connections, over all sandboxes. Clones share the counters, which need no lock.
#[derive(Clone, Debug, Default)]
pub(crate) struct Traffic {
    pub(crate) bytes_to_guest: Counter,
    pub(crate) bytes_from_guest: Counter,
    pub(crate) frames_to_guest: Counter,
    pub(crate) frames_from_guest: Counter,
}

impl Traffic {
    fn new(relay: &mut Registry) -> Traffic {
        let bytes: Labelled = register(relay, "bytes", "Bytes between shims and agents");
        let frames: Labelled = register(relay, "frames", "Frames between shims and agents");
        let of = |family: &Labelled, direction| family.get_or_create(&[("direction", direction)]).clone();
        Traffic {
            bytes_to_guest: of(&bytes, "to_guest"),
            bytes_from_guest: of(&bytes, "from_guest"),
            frames_to_guest: of(&frames, "to_guest"),
            frames_from_guest: of(&frames, "from_guest"),
        }
    }
}

/// Metrics of the guests' connections, calls and logs.
#[derive(Debug)]
pub(crate) struct GuestMetrics {
    pub(crate) connections: Counter,
    pub(crate) calls: Counter,
    pub(crate) reports_dropped: Counter,
    refused: Labelled,
    claims: Labelled,
    log_lines: Labelled,
}

impl GuestMetrics {
    fn new(relay: &mut Registry) -> GuestMetrics {
        let metrics = GuestMetrics {
            connections: register(relay, "guest_connections", "TCP connections accepted from guests"),
            calls: register(relay, "guest_calls", "Calls from the node to guests"),
            reports_dropped: register(
                relay,
                "guest_words_dropped",
                "Unrequested messages from guests, dropped because they came too fast",
            ),
            refused: register(relay, "guests_refused", "Connections of guests that were refused, by reason"),
            claims: register(relay, "claims", "Tickets shown, by outcome"),
            log_lines: register(
                relay,
                "guest_log_lines",
                "Lines of guests' logs: written, left_out (too many), lost_in_guest (lost in the VM)",
            ),
        };
        for result in ["written", "left_out", "lost_in_guest"] {
            metrics.log(result, 0);
        }
        metrics
    }

    /// Counts a refused connection.
    pub(crate) fn refused(&self, reason: &'static str) {
        self.refused.get_or_create(&[("reason", reason)]).inc();
    }

    /// Counts lines of a log.
    pub(crate) fn log(&self, result: &'static str, lines: u64) {
        self.log_lines.get_or_create(&[("result", result)]).inc_by(lines);
    }

    /// Counts a ticket by its outcome.
    pub(crate) fn claim(&self, reason: &'static str) {
        self.claims.get_or_create(&[("reason", reason)]).inc();
    }
}

#[cfg(test)]
mod tests {
    use peerpod_test_reference as reference;

    use super::*;

    #[test]
    fn documented_metrics_are_up_to_date() {
        let mut registry = Registry::default();
        let metrics = Metrics::new(&mut registry);
        metrics.hypervisor.call("CreateVM");
        metrics.guests.refused("x");
        metrics.guests.claim("x");
        let text = reference::metrics(&registry).unwrap();
        reference::section("metrics.md", "peerpod-relay", &text).unwrap();
    }
}
