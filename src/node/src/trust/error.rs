//! Errors of the CA, of certificates and of tickets.

use std::path::PathBuf;

/// Reason that a certificate, a ticket or the CA is not available.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The directory or file of the CA cannot be used.
    #[error("{what} {}: {why}; check the state directory's disk and permissions", path.display())]
    Disk {
        /// The attempted step.
        what: &'static str,
        /// The path of the attempt.
        path: PathBuf,
        /// The operating system's error.
        why: std::io::Error,
    },
    /// The file has content that this program does not write.
    #[error(
        "read the node's CA from {}: {why}; restore it from a backup, or move it away when no pod VM is running",
        path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The fault; never the content.
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
    /// The guest's request for a certificate is not valid.
    #[error("certificate request: {0}; the guest must send a PKCS#10 request for a P-256 key, signed by it")]
    Request(&'static str),
    /// Making or signing failed.
    #[error("{what}: {why}")]
    Certificate {
        /// The attempted step.
        what: &'static str,
        /// The library's error.
        why: rcgen::Error,
    },
    /// The kernel gave no random bytes.
    #[error("draw random bytes: {0}")]
    Random(getrandom::Error),
}
