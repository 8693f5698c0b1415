//! Kubernetes code that the programs share: the custom resources ([`crds`]), a client with a deadline for each call
//! ([`client`]), ownership and leader election by Leases ([`lease`]), the names of the nodes' heartbeats
//! ([`heartbeat`]), and the merging of pull secrets ([`docker_config`]).
//!
//! Of the project's crates it uses `peerpod-base` alone. May touch: the network, a kubeconfig or the service account's
//! files.

pub mod client;
pub mod crds;
pub mod docker_config;
pub mod heartbeat;
pub mod lease;
