//! `peerpod-relay`: holds the shims' sockets and the guests' links, and outlives every upgrade of the other programs. A
//! shim never reopens its connections, so they must not end with the node daemon.
//!
//! * `hypervisor`: the hypervisor proxy, which serves `hypervisor.sock` and holds calls that wait for the node; `inbox`:
//!   stops that the node did not accept in time.
//! * `sandboxes`: one endpoint per sandbox, with its `agent` socket and its record in the `store`.
//! * `guests`: the TCP port that guests dial; `control`: `relay.sock`, the API that the node calls; `fd_handoff`:
//!   `relay-fds.sock`, over which the node passes descriptors that the relay has no right to open; `localhost` and
//!   `wireguard`: the two kinds of these descriptors.
//! * `handover`: handover to a new relay process; `supervisor`: the supervisor that keeps the old container after it.
//!
//! The relay has no cloud SDK and no Kubernetes client, because it faces hostile guests.

pub mod agent;
pub mod app;
pub mod config;
mod control;
mod fd_handoff;
mod guest_dialer;
mod guest_log;
mod guests;
mod handover;
pub mod harden;
mod hypervisor;
mod inbox;
mod localhost;
mod metrics;
mod sandboxes;
mod socket;
mod store;
pub mod supervisor;
mod volumes;
mod wireguard;

use peerpod_common::id;
