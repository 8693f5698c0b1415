//! Provider of pod VMs on VMware vSphere, by the SOAP API of a vCenter.
//!
//! * `config.rs` holds the settings.
//! * `soap.rs` writes and reads messages, `session.rs` logs in, `client.rs` makes every call.
//! * `inventory.rs` reads objects of the vCenter, `tasks.rs` waits for its tasks.
//! * `facts.rs` loads the facts that a create needs: template, hosts, datastores, networks.
//! * `body.rs` builds the call that clones a VM; `create.rs` makes it and waits for the vCenter's decision.
//! * `vms.rs` lists and looks up VMs, `remove.rs` deletes them, `volumes.rs` attaches disks.
//! * `console.rs` reads consoles, `events.rs` reports VMs that end.
//! * `refusal.rs` turns faults into provider errors.
//!
//! Touches the vCenter; keeps nothing on disk.

mod body;
mod client;
pub mod config;
mod console;
mod create;
mod events;
mod facts;
mod inventory;
mod preflight;
mod provider;
mod refusal;
mod remove;
mod session;
mod soap;
mod tasks;
mod vms;
mod volumes;

pub use config::VsphereConfig;
use provider::Vsphere;
pub use provider::VsphereProvider;
