//! The cluster's side of peer pods: the mutating webhook ([`webhook`]), the controller ([`controller`]) and in it the service
//! that gives nodes their pods' pull secrets ([`secrets`]); what two of them need, a CA of our own ([`authority`]) and a TLS
//! server ([`serve`]).
//!
//! The webhook knows Kubernetes and no provider; the controller knows that there are providers, by their table alone.

pub mod authority;
pub mod controller;
pub mod secrets;
pub mod serve;
pub mod webhook;
