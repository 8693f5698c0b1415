//! Provider of pod VMs on EC2.
//!
//! * `config.rs` holds the settings.
//! * `ec2/` is the provider, with the feature `sdk`:
//!   * `create.rs` makes VMs: one CreateFleet over all offerings of a placement, or RunInstances; exactly once per key.
//!   * `vms.rs` lists and looks up VMs, `remove.rs` deletes them; both serve many concurrent callers with one call.
//!   * `volumes.rs` attaches disks; `events.rs` watches for spot VMs that EC2 takes back.
//!   * `facts.rs` loads the facts that a create needs (network, image, types), `prices.rs` the prices of the types.
//!   * `preflight.rs` checks rights and settings, `quota.rs` looks up the vCPUs in use and their limit.
//!   * `shape.rs` builds the launch template of a profile.
//!   * `upload.rs` makes the AMI of a built disk image.
//!   * `client.rs` makes every call; `refusal.rs` turns EC2's errors into provider errors.
//!
//! Touches EC2, Service Quotas and, where settings are missing, the node's metadata service; an upload also the EBS
//! direct APIs and the image's folder. Keeps nothing on disk.

pub mod config;
#[cfg(feature = "sdk")]
mod ec2;

pub use config::AwsConfig;
#[cfg(feature = "sdk")]
pub use ec2::{AwsProvider, upload};
