//! What our programs share towards Kubernetes: the custom resources ([`crds`]) and a client whose calls end ([`client`]).
//!
//! Knows the API server and no part of ours. May touch: the network, a kubeconfig or the service account's files.

pub mod client;
pub mod crds;
