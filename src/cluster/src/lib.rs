//! The cluster's side of peer pods: the mutating webhook ([`webhook`]) and the service that gives nodes their pods' pull
//! secrets ([`secrets`]); what both need, a CA of our own ([`authority`]) and a TLS server ([`serve`]).
//!
//! Knows Kubernetes; knows no provider.

pub mod authority;
pub mod secrets;
pub mod serve;
pub mod webhook;

/// `kubernetes.kubeconfig`, which every program of ours reads.
pub fn kubeconfig(reader: &mut peerpod_base::config::Reader) -> Option<std::path::PathBuf> {
    reader.optional(
        "kubernetes.kubeconfig",
        "file with the API server's address and our credentials; the pod's service account when not set",
    )
}
