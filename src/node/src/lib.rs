//! Runs the per-node daemon: answers Kata's remote-hypervisor API, manages every sandbox of the node, and records each
//! intent on disk before it carries it out.

pub mod app;
mod cluster;
pub mod config;
pub mod ledger;
mod localhost;
mod metrics;
mod ports;
pub mod registries;
mod relay_client;
pub mod rotate;
mod rpc;
pub mod runtime;
mod sandbox;
pub mod secrets;
mod spec;
mod sweep;
pub mod trust;
pub mod tunnel;
mod volumes;
mod wireguard_fds;
