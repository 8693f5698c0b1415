//! The cluster's side of peer pods: the mutating webhook ([`webhook`]).
//!
//! Knows Kubernetes; knows no provider.

pub mod webhook;
