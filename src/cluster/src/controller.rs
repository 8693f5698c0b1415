//! Runs the controller, which manages VMs and objects that must be right whether or not their node still runs.
//!
//! One process runs several [`Part`]s, started by [`app`]. Parts that act for the whole cluster are `leader_only`: they
//! run in one replica at a time, under a Lease (`peerpod_kube::lease`), and check the Lease before each effect. The
//! others run in every replica. A new part is one more line in [`parts::Settings::parts`].
//!
//! The controller uses Kubernetes, and providers only through `peerpod-providers`, none by name. May touch: the API
//! server, the provider (lists and deletes, never creates), its admin port.

pub mod app;
mod config;
mod part;
pub mod parts;
mod vms;

pub use config::ControllerConfig;
pub use part::{Context, Part};
pub use vms::{Orphans, VmsConfig};
