//! `peerpod-relay`: holds the sockets of the shims and the links of the guests, and outlives every upgrade of the
//! rest. A shim never opens its connections again, so they must not end with the node daemon.
//!
//! * `door`: `hypervisor.sock`, and what waits for the node; `inbox`: stops the node could not take in time.
//! * `sandboxes`: one endpoint per sandbox, its `agent` socket, its record in the `store`.
//! * `guests`: the TCP port guests dial; `control`: `relay.sock`, where the node speaks to us; `handin`:
//!   `relay-fds.sock`, where it gives us descriptors that we have no right to open;
//!   `localhost`: what comes of the first of them.
//! * `takeover`: how another relay process takes the place of this one; `keeper`: what stays of its container then.
//!
//! No cloud SDK and no Kubernetes in here: this process faces hostile guests.

pub mod agent;
pub mod app;
pub mod config;
mod control;
mod dials;
mod door;
mod gate;
mod guest_log;
mod guests;
mod handin;
pub mod harden;
mod id;
mod inbox;
pub mod keeper;
mod localhost;
mod metrics;
mod sandboxes;
mod socket;
mod store;
mod takeover;
mod volumes;
mod wireguard;
