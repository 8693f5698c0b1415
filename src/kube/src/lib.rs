//! What our programs share towards Kubernetes: the custom resources ([`crds`]), a client whose calls end ([`client`]),
//! ownership and leadership by Leases ([`lease`]), and how a node says that it lives ([`heartbeat`]).
//!
//! Knows the API server and no part of ours. May touch: the network, a kubeconfig or the service account's files.

pub mod client;
pub mod crds;
pub mod heartbeat;
pub mod lease;
