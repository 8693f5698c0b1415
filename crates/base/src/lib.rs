//! Code shared by all binaries on a node: program start, configuration, lifecycle, the admin port, telemetry, and the
//! passing of descriptors between processes.
//!
//! This crate has no notion of a pod, a VM or a cloud, and no global state: `main` makes the values and passes them
//! down.

pub mod admin;
pub mod chain;
pub mod config;
pub mod fd_handoff;
pub mod lifecycle;
pub mod listen;
pub mod metrics;
pub mod program;
pub mod telemetry;
