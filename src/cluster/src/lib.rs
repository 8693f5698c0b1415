//! The cluster's side of peer pods: the mutating webhook ([`webhook`]) and the controller ([`controller`], with what it
//! rolls out: [`rollout`]).
//!
//! The webhook knows Kubernetes and no provider; the controller knows that there are providers, by their table alone.

pub mod controller;
pub mod rollout;
pub mod webhook;
