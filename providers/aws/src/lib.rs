//! Pod VMs on EC2.
//!
//! * `config.rs` are the settings, `caa.rs` where those of another peer-pod system stand in them.
//! * `ec2/` is the provider, with the feature `sdk`:
//!   * `create.rs` makes VMs: one CreateFleet over all offerings of a placement, or RunInstances; exactly one per key.
//!   * `see.rs` and `remove.rs` look at them and take them away, many askers by one call; `volumes.rs` attaches disks;
//!     `events.rs` hears of spot VMs that EC2 takes back.
//!   * `facts.rs` is what must be known before (network, image, types), `prices.rs` what they cost, `shape.rs` the launch
//!     template of a profile, `tags.rs` the marks by which everything of ours is found again.
//!   * `client.rs` is the one place where a call is made; `refusal.rs` turns what EC2 says into our errors.
//!
//! Touches EC2 and, where the settings leave room, the node's metadata service; keeps nothing on disk.

pub mod caa;
pub mod config;
#[cfg(feature = "sdk")]
mod ec2;

pub use config::AwsConfig;
#[cfg(feature = "sdk")]
pub use ec2::AwsProvider;
