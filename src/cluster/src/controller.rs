//! The controller: what must be right in the cluster whatever became of the node that began it.
//!
//! One process with several [`Part`]s, run by [`app`]. Those that act for the whole cluster are `leader_only`: they run in
//! one replica at a time, under a Lease (`peerpod_kube::lease`), and check it before each effect. The others run in every
//! replica. A new part is one more line in [`parts::Settings::parts`].
//!
//! Knows Kubernetes and, by `peerpod-providers`, that there are VMs; no provider by name. May touch: the API server, the
//! provider (lists and deletes, never creates), its admin port.

pub mod app;
mod config;
mod part;
pub mod parts;
mod vms;

pub use config::ControllerConfig;
pub use part::{Context, Part};
pub use vms::{Orphans, VmsConfig};
