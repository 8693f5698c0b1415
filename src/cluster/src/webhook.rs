//! Implements the mutating webhook: it turns a pod that asks for a VM into a JSON patch.
//!
//! [`mutate()`] is a pure function of the pod and a [`Profile`]; a thin TLS server calls it ([`server`]). An answer
//! costs no request to the API server. Bytes, time and connections of requests are bounded. May touch: its sockets and
//! its certificate's files, or, where it manages its certificate itself ([`Managed`]), a Secret and its own
//! registration.

mod certificate;
mod config;
mod managed;
mod metrics;
mod mutate;
mod quantity;
mod review;
pub mod server;
mod totals;

pub use certificate::{Certificate, CertificateError};
pub use config::{Certificates, WebhookConfig};
pub use managed::Managed;
pub use mutate::{ACCOUNTED, Profile, Refusal, Totals, mutate};
pub use quantity::{Quantity, QuantityError};
