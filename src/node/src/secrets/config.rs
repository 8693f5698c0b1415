//! Reads the nodes' half of section `secrets`.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use peerpod_base::config::Reader;
use peerpod_common::blocking::blocking;
use zeroize::Zeroizing;

use crate::sandbox::ports::PullSecretError;

/// Size limit of the files: a token has one to two kilobytes, a bundle of CAs a few.
const MOST: u64 = 64 * 1024;

/// CA certificates (PEM) of the service, as the chart mounts them; read again for each request.
const CA_FILE: &str = "/etc/peerpod/secrets/ca.crt";
/// Projected token of the daemon, as the chart mounts it; read again for each request.
const TOKEN_FILE: &str = "/var/run/secrets/peerpod/token";
/// Limit of one request. A pod waits so long for its pull secrets, then it goes on and gets them later.
const DEADLINE: Duration = Duration::from_secs(5);
/// Interval at which the node requests a running pod's pull secrets again, for secrets that change.
const REFRESH: Duration = Duration::from_secs(600);

/// Settings of the client of the pull-secret service.
#[derive(Clone, Debug)]
pub(crate) struct SecretsConfig {
    pub address: String,
    /// Name in its certificate: the host of the address.
    pub server_name: String,
    pub ca_file: PathBuf,
    pub token_file: PathBuf,
    pub deadline: Duration,
    pub refresh: Duration,
}

/// Keys of the section that only the service reads.
const SERVICE: [&str; 10] = [
    "serve",
    "listen",
    "names",
    "audience",
    "node-service-account",
    "runtime-classes",
    "ca-secret",
    "ca-config-map",
    "ca-validity",
    "ca-settle",
];

impl SecretsConfig {
    /// Reads the keys; `None` without an address: pods then use the secret of `node.pull-secret`.
    pub(crate) fn read(reader: &mut Reader) -> Option<SecretsConfig> {
        for key in SERVICE {
            reader.leave(&format!("secrets.{key}"));
        }
        let address: Option<String> = reader.optional(
            "secrets.address",
            "address of the cluster's service for pods' pull secrets (host:port); not used when not set",
        );
        let ca_file = reader.constant("secrets.ca-file", "CA_FILE", PathBuf::from(CA_FILE));
        let token_file = reader.constant("secrets.token-file", "TOKEN_FILE", PathBuf::from(TOKEN_FILE));
        let deadline = reader.constant("secrets.deadline", "DEADLINE", DEADLINE);
        let refresh = reader.constant("secrets.refresh", "REFRESH", REFRESH);
        let address = address.filter(|address| !address.is_empty())?;
        let Some((host, port)) = address.rsplit_once(':').filter(|(host, _)| !host.is_empty()) else {
            let why = "not host:port; write it like peerpod-secrets.peerpod.svc:9444";
            reader.mistake("secrets.address", why);
            return None;
        };
        if port.parse::<u16>().is_err() {
            let why = "its port is not a number; write it like peerpod-secrets.peerpod.svc:9444";
            reader.mistake("secrets.address", why);
        }
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let server_name = reader.derived("secrets.server-name", "secrets.address", host);
        Some(SecretsConfig { server_name, ca_file, token_file, deadline, refresh, address })
    }

    /// Reads the current token, which kubelet replaces in time.
    pub(super) async fn token(&self) -> Result<Zeroizing<String>, PullSecretError> {
        let text = read(&self.token_file, "the projected token of the node's service account").await?;
        Ok(Zeroizing::new(text.trim().to_owned()))
    }

    pub(super) async fn ca(&self) -> Result<Zeroizing<String>, PullSecretError> {
        read(&self.ca_file, "the ConfigMap that the controller fills in").await
    }
}

/// Reads a file on another thread: a mount may hang.
async fn read(path: &Path, what: &str) -> Result<Zeroizing<String>, PullSecretError> {
    let file = path.to_owned();
    let remedy = format!("mount {what} there");
    let read = blocking(move || {
        let mut text = Zeroizing::new(String::new());
        let read = File::open(file).and_then(|file| file.take(MOST).read_to_string(&mut text));
        read.map(|_| text).map_err(|error| io::Error::new(error.kind(), format!("{error}; {remedy}")))
    });
    read.await.map_err(|why| PullSecretError::away(format!("read {}: {why}", path.display())))
}
