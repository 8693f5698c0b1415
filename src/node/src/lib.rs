//! Runs the per-node daemon: answers Kata's remote-hypervisor API, manages every sandbox of the node, and records each
//! intent on disk before it carries it out.

pub mod admin;
pub mod app;
mod cluster;
pub mod config;
mod installation;
pub mod ledger;
mod localhost;
mod metrics;
mod ports;
mod preflight;
mod registries;
mod relay_client;
mod rotate;
mod rpc;
pub mod runtime;
mod sandbox;
mod secrets;
mod spec;
mod sweep;
mod traces;
mod trust;
pub mod tunnel;
mod vm_metrics;
mod volumes;
mod wireguard_fds;

/// Shortens a foreign text to one log line: at most `most` characters, without control characters.
fn one_line(text: &str, most: usize) -> String {
    text.chars().take(most).map(|c| if c.is_control() { ' ' } else { c }).collect()
}
