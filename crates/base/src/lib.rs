//! Code shared by all binaries on a node: start, configuration, lifecycle, admin port, logs, descriptor passing.
//!
//! This crate knows no pod, VM or cloud, and has no global state: `main` makes the values and passes them down.

pub mod admin;
pub mod chain;
pub mod config;
pub mod fd_handoff;
pub mod lifecycle;
pub mod listen;
pub mod metrics;
pub mod program;
pub mod redact;
pub mod telemetry;
