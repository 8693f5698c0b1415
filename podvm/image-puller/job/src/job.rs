//! Messages of an image pull, as JSON: one [`Job`] in, [`Event`]s out.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::cause::Error;

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
