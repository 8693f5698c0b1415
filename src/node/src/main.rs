//! The per-node daemon: sandboxes, ledger, tunnel, trust.

fn main() {}
