//! What every binary on the node shares: configuration, lifecycle, telemetry.
