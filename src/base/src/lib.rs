//! What every binary on the node shares: how it begins, configuration, lifecycle, the admin port, telemetry, and
//! how descriptors are handed from one to the other.
//!
//! Nothing here knows what a pod, a VM or a cloud is, and nothing here is global: values are made in `main` and
//! handed down.

pub mod admin;
pub mod chain;
pub mod config;
pub mod handin;
pub mod lifecycle;
pub mod listen;
pub mod program;
pub mod telemetry;
