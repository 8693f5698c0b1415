//! What can go wrong with trust.

use std::path::PathBuf;

/// Why a certificate, a ticket or the CA could not be had.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The directory or file of the CA.
    #[error("{what} {}: {why}; check the state directory's disk and permissions", path.display())]
    Disk {
        /// What was attempted.
        what: &'static str,
        /// On what.
        path: PathBuf,
        /// Why it failed.
        why: std::io::Error,
    },
    /// The file is not what we wrote.
    #[error(
        "read the node's CA from {}: {why}; restore it from a backup, or move it away when no pod VM is running",
        path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it; never its content.
        why: String,
    },
    /// The file is from a later release.
    #[error(
        "read the node's CA from {}: it has version {version}, this release reads version 1; use the newer release",
        path.display()
    )]
    Newer {
        /// The file.
        path: PathBuf,
        /// Its version.
        version: u64,
    },
    /// The guest's request for a certificate.
    #[error("certificate request: {0}; the guest must send a PKCS#10 request for a P-256 key, signed by it")]
    Request(&'static str),
    /// Making or signing failed.
    #[error("{what}: {why}")]
    Certificate {
        /// What was attempted.
        what: &'static str,
        /// Why it failed.
        why: rcgen::Error,
    },
    /// The kernel gave no random bytes.
    #[error("draw random bytes: {0}")]
    Random(getrandom::Error),
}
