//! Metrics of the relay, under `peerpod_relay_`.

use peerpod_base::metrics::{Labelled, register};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

#[derive(Debug)]
pub(crate) struct Metrics {
    pub(crate) hypervisor: HypervisorMetrics,
    pub(crate) sandboxes: SandboxMetrics,
    pub(crate) guests: GuestMetrics,
}

impl Metrics {
    pub(crate) fn new(registry: &mut Registry) -> Metrics {
        let relay = registry.sub_registry_with_prefix("peerpod_relay");
        let hypervisor = HypervisorMetrics::new(relay);
        let metrics =
            Metrics { hypervisor, sandboxes: SandboxMetrics::new(relay), guests: GuestMetrics::new(relay) };
        // Series that begin at zero exist from the start.
        metrics.sandboxes.traffic();
        for outcome in ["carried", "refused", "failed"] {
            drop(metrics.sandboxes.localhost.get_or_create(&[("outcome", outcome)]));
        }
        for result in ["written", "left_out", "lost_in_guest"] {
            metrics.guests.log(result, 0);
        }
        metrics
    }
}

/// Defines a group of metrics: the field, type, name and help text of each.
macro_rules! metrics {
    ($group:ident { $($field:ident: $kind:ty = $name:literal, $help:literal;)* }) => {
        #[derive(Debug)]
        pub(crate) struct $group {
            $(pub(crate) $field: $kind,)*
        }

        impl $group {
            fn new(relay: &mut Registry) -> $group {
                $group { $($field: register(relay, $name, $help),)* }
            }
        }
    };
}

metrics! { HypervisorMetrics {
    connections: Gauge = "hypervisor_connections", "Open connections to hypervisor.sock";
    queued_calls: Gauge = "queued_calls", "Calls that wait for the node or run in it";
    node_connected: Gauge = "node_connected", "1 while the node answers";
    node_losses: Counter = "node_losses", "Connections to the node that ended";
    inbox_writes: Counter = "inbox_writes", "Stops written to the inbox";
    calls: Labelled = "calls", "Calls from shims, by method";
} }

impl HypervisorMetrics {
    /// Counts a call of a shim. Only known methods become labels.
    pub(crate) fn call(&self, method: &str) {
        let known = ["CreateVM", "StartVM", "StopVM", "Version", "GetInfo"];
        let method = known.into_iter().find(|known| *known == method).unwrap_or("other");
        self.calls.get_or_create(&[("method", method)]).inc();
    }
}

metrics! { SandboxMetrics {
    served: Gauge = "sandboxes", "Sandboxes with an agent socket";
    guests_connected: Gauge = "guests_connected", "Sandboxes whose guest is connected";
    agent_connections: Gauge = "agent_connections", "Open connections to agent sockets";
    agent_connections_refused: Counter =
        "agent_connections_refused", "Connections to agent sockets refused over the limit of a sandbox";
    reconnects: Counter = "reconnects", "Links that were resumed";
    sessions_lost: Counter = "sessions_lost", "Guest programs that were replaced";
    panics: Counter = "panics", "Agent endpoints and localhost tasks of pods that ended by a panic";
    bytes: Labelled = "bytes", "Bytes between shims and agents";
    frames: Labelled = "frames", "Frames between shims and agents";
    localhost: Labelled =
        "localhost_connections", "Connections to pods' localhost by outcome: carried, refused in the VM, failed";
} }

impl SandboxMetrics {
    pub(crate) fn localhost(&self, outcome: &'static str) {
        self.localhost.get_or_create(&[("outcome", outcome)]).inc();
    }

    pub(crate) fn traffic(&self) -> Traffic {
        let of = |family: &Labelled, direction| family.get_or_create(&[("direction", direction)]).clone();
        Traffic {
            bytes_to_guest: of(&self.bytes, "to_guest"),
            bytes_from_guest: of(&self.bytes, "from_guest"),
            frames_to_guest: of(&self.frames, "to_guest"),
            frames_from_guest: of(&self.frames, "from_guest"),
        }
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

metrics! { GuestMetrics {
    connections: Counter = "guest_connections", "TCP connections accepted from guests";
    calls: Counter = "guest_calls", "Calls from the node to guests";
    reports_dropped: Counter =
        "guest_words_dropped", "Unrequested messages from guests, dropped because they came too fast";
    refused: Labelled = "guests_refused", "Connections of guests that were refused, by reason";
    claims: Labelled = "claims", "Tickets shown, by outcome";
    log_lines: Labelled =
        "guest_log_lines", "Lines of guests' logs: written, left_out (too many), lost_in_guest (lost in the VM)";
} }

impl GuestMetrics {
    pub(crate) fn refused(&self, reason: &'static str) {
        self.refused.get_or_create(&[("reason", reason)]).inc();
    }

    pub(crate) fn log(&self, result: &'static str, lines: u64) {
        self.log_lines.get_or_create(&[("result", result)]).inc_by(lines);
    }

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
