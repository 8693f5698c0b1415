//! Pod VMs on EC2.
//!
//! * `create.rs` makes them: one CreateFleet over all offerings of a placement, or RunInstances; exactly one per key.
//! * `see.rs` and `remove.rs` look at them and take them away, many askers by one call; `volumes.rs` attaches disks.
//! * `facts.rs` is what must be known before (network, image, types), `shape.rs` the launch template of a profile,
//!   `tags.rs` the marks by which everything of ours is found again.
//! * `client.rs` is the one place where a call is made; `refusal.rs` turns what EC2 says into our errors.
//! * `config.rs` are the settings, `caa.rs` where those of another peer-pod system stand in them.
//!
//! Everything but settings and conversion needs the feature `sdk`. Touches EC2 and, where the settings leave room, the
//! node's metadata service; keeps nothing on disk.

pub mod caa;
pub mod config;

#[cfg(feature = "sdk")]
mod client;
#[cfg(feature = "sdk")]
mod create;
#[cfg(feature = "sdk")]
mod credentials;
#[cfg(feature = "sdk")]
mod facts;
#[cfg(feature = "sdk")]
mod preflight;
#[cfg(feature = "sdk")]
mod provider;
#[cfg(feature = "sdk")]
mod recent;
#[cfg(feature = "sdk")]
mod refusal;
#[cfg(feature = "sdk")]
mod remove;
#[cfg(feature = "sdk")]
mod see;
#[cfg(feature = "sdk")]
mod shape;
#[cfg(feature = "sdk")]
mod tags;
#[cfg(feature = "sdk")]
mod volumes;

pub use config::AwsConfig;
#[cfg(feature = "sdk")]
use provider::Aws;
#[cfg(feature = "sdk")]
pub use provider::AwsProvider;
