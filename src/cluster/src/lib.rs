//! Implements the cluster side of peer pods: the mutating webhook ([`webhook`]) and the controller ([`controller`]).
//! The controller also rolls out the nodes' DaemonSets ([`rollout`]) and gives nodes the pull secrets of their pods
//! ([`secrets`]). Both roles share a CA ([`authority`]) and a TLS server ([`serve`]).
//!
//! The webhook uses Kubernetes and no provider. The controller uses providers only through their table.

pub mod authority;
pub mod controller;
pub mod rollout;
pub mod secrets;
pub mod serve;
pub mod webhook;
