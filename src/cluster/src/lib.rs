//! The cluster's side of peer pods: the custom resources ([`crds`]) and the mutating webhook ([`webhook`]).
//!
//! Knows Kubernetes; knows no provider.

pub mod crds;
pub mod webhook;
