//! Provider of pod VMs on Azure.
//!
//! * `config.rs` holds the settings.
//! * `create.rs` makes VMs: one PUT by name, exactly once per key, and waits for Azure's decision. `body.rs` builds it.
//! * `vms.rs` lists and looks up VMs and their interfaces; `remove.rs` deletes them, and the parts that a failure left.
//! * `volumes.rs` attaches disks; `console.rs` reads the serial console.
//! * `facts.rs` loads the facts that a create needs (sizes, image), `image.rs` those of an image.
//! * `client.rs` makes every call; `refusal.rs` is the table of Azure's codes; `ids.rs` reads resource ids and builds the
//!   names of parts.
//!
//! Touches Azure Resource Manager, Entra ID, the storage of boot diagnostics and, for a managed identity, the node's
//! metadata service; keeps nothing on disk.

mod body;
mod client;
pub mod config;
mod console;
mod create;
mod facts;
mod ids;
mod image;
mod operations;
mod preflight;
mod provider;
mod refusal;
mod remove;
mod vms;
mod volumes;

pub use config::AzureConfig;
use provider::Azure;
pub use provider::AzureProvider;
