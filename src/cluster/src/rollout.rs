//! PeerPodConfig → what its nodes run: the DaemonSets of node and relay, and the RuntimeClass.
//!
//! The chart puts the manifests, as it would install them itself, into a ConfigMap (`rollout.mode: config`); [`manifest`]
//! makes of them what a PeerPodConfig wants, pure; the part ([`part`]) applies that by server-side apply, so that fields
//! which others set survive, and says in the object's status how far the nodes are ([`status`], pure). The capacity is the
//! nodes' own matter: they are told the limit. Webhook and controller are the chart's.
//!
//! Serves the PeerPodConfigs of its own namespace, where its service accounts are. May touch: DaemonSets there, and that
//! RuntimeClass; reads nodes, the ConfigMap and the version of the Secret that a PeerPodConfig names, the webhook's
//! registration.
//!
//! Rights that it needs: in its namespace peerpodconfigs (get, list, watch), peerpodconfigs/status (patch), daemonsets (get,
//! list, watch, create, patch), configmaps (get, list, watch), secrets (get: the version alone), deployments (get); in the
//! cluster runtimeclasses (get, create, patch), nodes (list), mutatingwebhookconfigurations (get, by name).

mod apply;
mod config;
pub mod manifest;
pub mod status;

pub use apply::part;
pub use config::RolloutConfig;

/// The field manager of all that we apply.
pub const MANAGER: &str = "peerpod-rollout";
