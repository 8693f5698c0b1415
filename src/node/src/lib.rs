//! Runs the per-node daemon: answers Kata's remote-hypervisor API, manages every sandbox of the node, and records each
//! intent on disk before it carries it out.

pub mod app;
pub mod cluster;
pub mod config;
pub mod ledger;
pub mod localhost;
pub mod metrics;
pub mod ports;
pub mod registries;
pub mod relay_client;
pub mod rotate;
pub mod rpc;
pub mod runtime;
pub mod sandbox;
pub mod secrets;
pub mod spec;
mod sweep;
pub mod trust;
pub mod tunnel;
pub mod user_data;
pub mod volumes;
mod wireguard_fds;
