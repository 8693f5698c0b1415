//! Speaks to hypervisor.sock and agent.ttrpc as a Kata shim does; for the demo, tests and benches.
