//! What our programs share towards Kubernetes: the custom resources ([`crds`]), a client whose calls end ([`client`]),
//! ownership and leadership by Leases ([`lease`]), how a node says that it lives ([`heartbeat`]), and pull secrets
//! ([`docker_config`]).
//!
//! Knows the API server and no part of ours. May touch: the network, a kubeconfig or the service account's files.

pub mod client;
pub mod crds;
pub mod docker_config;
pub mod heartbeat;
pub mod lease;
