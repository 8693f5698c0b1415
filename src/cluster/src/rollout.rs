//! Turns PeerPodConfigs into the DaemonSets of node and relay, the webhook's registration and the RuntimeClass.
//!
//! The chart puts the manifests, as it would install them itself, into a ConfigMap (`rollout.mode: config`).
//! [`manifest`] derives from them the objects for a PeerPodConfig; pure. The controller part ([`run`]) applies these
//! by server-side apply, so that fields of other managers survive. It writes the nodes' progress to the object's status
//! ([`status`], pure). The nodes advertise their capacity themselves; they receive only the limit. The webhook's and
//! the controller's own Deployments belong to the chart.
//!
//! Serves the PeerPodConfigs of its own namespace, where its service accounts are. May touch: DaemonSets there, that
//! RuntimeClass and that registration; reads nodes, the ConfigMap and the version of the Secret that a PeerPodConfig
//! names.
//!
//! Rights that it needs: in its namespace peerpodconfigs (get, list, watch), peerpodconfigs/status (patch), daemonsets
//! (get, list, watch, create, patch), configmaps (get, list, watch), secrets (get: the version alone), deployments
//! (get); in the cluster runtimeclasses (create; by name get, patch, delete), nodes (list),
//! mutatingwebhookconfigurations (by name get, patch).

mod apply;
mod config;
mod manifest;
mod offer;
mod status;

pub(crate) use apply::run;
pub(crate) use config::RolloutConfig;

/// Field manager of all applied objects.
const MANAGER: &str = "peerpod-rollout";
