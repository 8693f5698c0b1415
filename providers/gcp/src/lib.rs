//! Provider of pod VMs on Google Cloud (Compute Engine), by its REST API.
//!
//! * `config.rs` holds the settings.
//! * `links.rs` reads names and paths of resources, `marks.rs` the marks that prove a VM's owner.
//! * `body.rs` builds the bodies of the calls that make VMs.
//! * `create.rs` makes one VM and waits for Google's decision; `batch.rs` makes many by one call.
//! * `vms.rs` lists and looks up VMs, `remove.rs` deletes them, `volumes.rs` attaches disks.
//! * `facts.rs` loads the facts that a create needs: image, machine types, network.
//! * `client.rs` makes every call, with a token of `credentials.rs`; `refusal.rs` turns refusals into provider errors.
//!
//! Touches Compute Engine, the token endpoints of the credentials, and the metadata service; keeps nothing on disk.

mod batch;
mod body;
mod client;
pub mod config;
mod create;
mod credentials;
mod facts;
mod links;
mod marks;
mod preflight;
mod provider;
mod refusal;
mod remove;
mod vms;
mod volumes;

pub use config::GcpConfig;
pub use links::GcpImage;
use provider::Gcp;
pub use provider::GcpProvider;
