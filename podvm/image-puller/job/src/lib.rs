//! Messages between the guest program and `peerpod-pull`, which it starts for each image. Only data types: the guest
//! program lives as long as its VM, and should contain nothing of an HTTP client. The messages are JSON: one [`Job`] in,
//! [`Event`]s out.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Limit of quoted text of a registry, in characters.
const MAX_QUOTE: usize = 300;

/// Order to pull one image, and perhaps to mount it.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Job {
    /// Name of the image in the pod; `docker://` before it is ignored.
    pub image: String,
    /// Directory of the layers, on a filesystem that can be the upper one of an overlay.
    pub store: PathBuf,
    /// Directory for the mount `rootfs` and for `config.json`; none: the image is only fetched.
    pub bundle: Option<PathBuf>,
    /// A `.dockerconfigjson`, or empty. Secret.
    #[serde(default)]
    pub credentials: String,
    /// Registries (`host` or `host:port`) reached over plain HTTP.
    #[serde(default)]
    pub plain_http: Vec<String>,
    /// Files of CA certificates (PEM); missing ones count as empty.
    #[serde(default)]
    pub ca_files: Vec<PathBuf>,
    /// More CA certificates (PEM).
    #[serde(default)]
    pub ca_pem: String,
    /// Limits of the image.
    #[serde(default)]
    pub limits: Limits,
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job")
            .field("image", &self.image)
            .field("bundle", &self.bundle)
            .finish_non_exhaustive()
    }
}

/// Limits of one image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Bytes of all files of an image, unpacked.
    pub unpacked_bytes: u64,
    /// Number of files, folders and links of an image.
    pub entries: u64,
    /// Seconds for the whole pull.
    pub seconds: u64,
    /// Seconds of a registry's silence, after which it is given up.
    pub silence_seconds: u64,
    /// MiB of memory of the process.
    pub memory_mib: u64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            unpacked_bytes: 256 << 30,
            entries: 10_000_000,
            seconds: 20 * 60,
            silence_seconds: 30,
            memory_mib: 512,
        }
    }
}

/// Message of the process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// Progress of the pull.
    Progress {
        /// Text for people.
        text: String,
    },
    /// Bytes of the image that are in the VM.
    Fetched(Fetched),
    /// Problem that does not stop the pull.
    Warning {
        /// Text for people.
        text: String,
    },
    /// Last event: the image is there.
    Done(Outcome),
    /// Last event: the pull failed.
    Failed(Error),
}

/// Packed bytes of an image's missing layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fetched {
    /// Bytes that are in the VM.
    pub bytes: u64,
    /// Bytes of all these layers.
    pub of: u64,
}

/// Result of a pull.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// Digest of the manifest that was chosen for this machine.
    pub manifest_digest: String,
    /// Number of the image's layers.
    pub layers: usize,
    /// Number of layers that had to be fetched.
    pub fetched: usize,
    /// Bytes received from the registry.
    pub bytes: u64,
}

/// Kind of failure of a pull, on which a caller can act; its text begins the error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// The registry does not have the image.
    #[error("not found")]
    NotFound,
    /// The registry denies access to the image.
    #[error("denied")]
    Denied,
    /// The VM's disk is full.
    #[error("no space")]
    NoSpace,
    /// The registry cannot be reached, or does not answer.
    #[error("no route")]
    Unreachable,
    /// The VM does not trust the registry's certificate.
    #[error("TLS not trusted")]
    Untrusted,
    /// The received bytes do not match their digest.
    #[error("digest wrong")]
    Digest,
    /// The received bytes are not an image, or are malicious.
    #[error("malformed image")]
    Malformed,
    /// The image is not one for this VM or this program.
    #[error("unsupported image")]
    Unsupported,
    /// The image is larger than permitted.
    #[error("too large")]
    TooLarge,
    /// The pull was not done in time.
    #[error("too slow")]
    Late,
    /// Internal fault of the VM.
    #[error("internal error")]
    Internal,
}

impl Cause {
    /// Returns whether the same may work in a moment.
    pub fn is_transient(self) -> bool {
        self == Cause::Unreachable
    }
}

/// Failure: its kind, and a sentence with the attempt, the reason and a remedy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{cause}: {text}")]
pub struct Error {
    /// Kind of failure.
    pub cause: Cause,
    /// Text for people.
    pub text: String,
}

impl Error {
    /// Makes a failure of this kind.
    pub fn new(cause: Cause, text: impl Into<String>) -> Error {
        Error { cause, text: text.into() }
    }
}

/// Quotes foreign text: bounded, and on one line.
pub fn quote(text: &str) -> String {
    let mut out = text.chars().take(MAX_QUOTE).collect::<String>().replace(char::is_control, " ");
    if text.chars().nth(MAX_QUOTE).is_some() {
        out.push('…');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_text_is_bounded_and_on_one_line() {
        let text = quote(&format!("a\n\x1b[31m{}", "ß".repeat(1000)));
        assert!(text.starts_with("a  [31mß") && text.chars().count() == MAX_QUOTE + 1, "{text}");
    }
}
