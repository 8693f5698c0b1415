//! Implements the mutating webhook: it turns a pod that asks for a VM into a JSON patch.
//!
//! [`mutate::mutate`] is a pure function of the pod and its profile; a thin TLS server calls it ([`server`]). An answer
//! costs no request to the API server. Memory, time and connections of requests are bounded. May touch: its sockets and
//! its certificate's files, or, where it manages its certificate itself ([`managed`]), a Secret and its own registration.

mod certificate;
mod config;
mod managed;
mod metrics;
mod mutate;
mod pod;
mod quantity;
mod review;
mod server;
mod totals;
mod warnings;

pub(crate) use config::WebhookConfig;
pub(crate) use server::build;
