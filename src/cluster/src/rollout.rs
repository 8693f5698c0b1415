//! PeerPodConfig → what its nodes run, and what the cluster sees of it: the DaemonSets of node and relay, the webhook's
//! registration and the RuntimeClass.
//!
//! The chart puts the manifests, as it would install them itself, into a ConfigMap (`rollout.mode: config`); [`manifest`]
//! makes of them what a PeerPodConfig wants, pure; the part ([`part`]) applies that by server-side apply, so that fields
//! which others set survive, and says in the object's status how far the nodes are ([`status`], pure). The capacity is the
//! nodes' own matter: they are told the limit. The webhook's and the controller's own Deployments are the chart's.
//!
//! Serves the PeerPodConfigs of its own namespace, where its service accounts are. May touch: DaemonSets there, that
//! RuntimeClass and that registration; reads nodes, the ConfigMap and the version of the Secret that a PeerPodConfig names.
//!
//! Rights that it needs: in its namespace peerpodconfigs (get, list, watch), peerpodconfigs/status (patch), daemonsets (get,
//! list, watch, create, patch), configmaps (get, list, watch), secrets (get: the version alone), deployments (get); in the
//! cluster runtimeclasses (create; by name get, patch, delete), nodes (list), mutatingwebhookconfigurations (by name get,
//! patch).

mod apply;
mod config;
pub mod manifest;
mod offer;
pub mod status;

pub use apply::part;
pub use config::RolloutConfig;

/// The field manager of all that we apply.
pub const MANAGER: &str = "peerpod-rollout";
