//! Provider of pod VMs on Alibaba Cloud (Elastic Compute Service, ECS), by its RPC API.
//!
//! * `config.rs` holds the settings.
//! * `sign.rs` signs requests (ACS3-HMAC-SHA256); `credentials.rs` finds the access key for that.
//! * `client.rs` makes every call; `refusal.rs` turns refusals into provider errors.
//! * `parameters.rs` builds the parameters of the call that makes VMs; `create.rs` makes one VM, or many by one call.
//! * `vms.rs` lists and looks up VMs, `remove.rs` deletes them, `volumes.rs` attaches disks, `events.rs` watches for spot
//!   VMs that the cloud takes back.
//! * `facts.rs` loads the facts that a create needs: image, instance types, vSwitches.
//!
//! Touches ECS, the vSwitches of VPC, the token service (STS), and the metadata service; keeps nothing on disk.

mod client;
pub mod config;
mod create;
mod credentials;
mod events;
mod facts;
mod parameters;
mod preflight;
mod provider;
mod refusal;
mod remove;
mod sign;
mod vms;
mod volumes;

pub use config::AlibabaCloudConfig;
use provider::Alibaba;
pub use provider::AlibabaCloudProvider;
