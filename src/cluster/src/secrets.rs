//! Gives nodes the pull secrets of their own peer pods, and nothing else.
//!
//! A node has no right on secrets. It asks this service over TLS, with its service account's bound token, and receives
//! answers for peer pods that are bound to it. The API server's TokenReview of the token identifies the node
//! (`caller.rs`).
//!
//! Runs in every replica of the controller, leader or not: it stores nothing but a CA ([`crate::authority`]). May
//! touch: its port, the CA's Secret and ConfigMap, TokenReviews, and pods, service accounts and secrets, which it only
//! gets by name.

mod answer;
mod caller;
mod config;
mod metrics;
mod pod;
mod refusal;
mod service;

pub(crate) use config::SecretsConfig;
pub(crate) use metrics::SecretsMetrics;
pub(crate) use service::run;
