//! The mutating webhook: a pod that asks for a VM comes in, a JSON patch goes out.
//!
//! [`mutate()`] is a pure function of the pod and a [`Profile`]; around it stands a thin TLS server ([`server`]). The server
//! asks nobody anything: an answer costs no request to the API server. What each request may take (bytes, time,
//! connections) is bounded. May touch: its sockets and its certificate's files, or, where it manages its certificate
//! itself ([`Managed`]), a Secret and its own registration.

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
