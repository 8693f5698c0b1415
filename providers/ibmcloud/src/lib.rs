//! Provider of pod VMs on IBM Cloud VPC.
//!
//! * `config.rs` holds the settings.
//! * `create.rs` makes VMs: one POST with a unique name, exactly once per key, and waits for IBM's decision. `body.rs`
//!   builds it.
//! * `vms.rs` lists and looks up VMs; `remove.rs` deletes them, and the boot volumes that a failure left.
//! * `volumes.rs` attaches disks; `tags.rs` gives the administrator's tags to VMs.
//! * `facts.rs` loads the facts that a create needs (profiles, subnets, images, dedicated hosts).
//! * `client.rs` makes every call; `refusal.rs` is the table of IBM's codes; `ids.rs` has ids, names and places.
//!
//! Touches the VPC API of a region, Global Tagging, IAM, and the file of a projected token; keeps nothing on disk.

mod body;
mod client;
pub mod config;
mod create;
mod facts;
mod ids;
mod preflight;
mod provider;
mod refusal;
mod remove;
mod tags;
mod vms;
mod volumes;

pub use config::IbmCloudConfig;
use provider::IbmCloud;
pub use provider::IbmCloudProvider;
