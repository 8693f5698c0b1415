//! What is said, as JSON: one [`Job`] in, [`Event`]s out.

use std::{fmt, path::PathBuf};

use serde::{Deserialize, Serialize};

use crate::cause::Error;

/// One image to be had, and perhaps mounted.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Job {
    /// As the pod names it; `docker://` before it is ignored.
    pub image: String,
    /// Where layers are kept: a directory on a filesystem that can be an overlay's upper one.
    pub store: PathBuf,
    /// Where `rootfs` is to be mounted, and `config.json` written; none: the image is only fetched.
    pub bundle: Option<PathBuf>,
    /// A `.dockerconfigjson`, or empty. Secret.
    #[serde(default)]
    pub credentials: String,
    /// Registries (`host` or `host:port`) that are spoken to in plain HTTP.
    #[serde(default)]
    pub plain_http: Vec<String>,
    /// Files of CA certificates (PEM); those that are missing count as empty.
    #[serde(default)]
    pub ca_files: Vec<PathBuf>,
    /// More CA certificates (PEM).
    #[serde(default)]
    pub ca_pem: String,
    /// What is permitted.
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

/// What one image may cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Bytes of all files of an image, unpacked.
    pub unpacked_bytes: u64,
    /// Files, folders and links of an image.
    pub entries: u64,
    /// Seconds for the whole.
    pub seconds: u64,
    /// Seconds in which a registry sends nothing, after which it is given up.
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

/// What the process says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// How far it is.
    Progress {
        /// In words.
        text: String,
    },
    /// Something that does not stand in the way.
    Warning {
        /// In words.
        text: String,
    },
    /// The last one: the image is there.
    Done(Outcome),
    /// The last one: it is not.
    Failed(Error),
}

/// What became of the image.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// Digest of the manifest that was chosen for this machine.
    pub manifest_digest: String,
    /// Layers of the image.
    pub layers: usize,
    /// Layers that had to be fetched.
    pub fetched: usize,
    /// Bytes that came from the registry.
    pub bytes: u64,
}
