//! Reads the VM image's settings (`/etc/peerpod/guest.json`): decisions of the image's builder, nothing about a pod.
//!
//! Unknown keys and other versions are refused: VM image and guest are built together, so a difference is a mistake of
//! the build and not a matter of compatibility. A missing file means the defaults.

use std::io::Read;
use std::path::{Path, PathBuf};

use serde::Deserialize;

/// Path of the file in the VM image.
pub(crate) const PATH: &str = "/etc/peerpod/guest.json";
const VERSION: u32 = 1;
/// Default store of container images: in memory.
pub(crate) const STORE: &str = "/run/peerpod/images";
const MAX_LEN: u64 = 64 << 10;

/// Settings of the VM image.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Settings {
    version: u32,
    /// Command line of the kata-agent; empty = another program in the VM image starts it, and the guest only waits for
    /// it.
    #[serde(default = "default_agent")]
    pub(crate) agent: Vec<String>,
    /// Socket of the kata-agent. Not below `/run/kata-containers`: CreateSandbox wipes that.
    #[serde(default = "default_agent_socket")]
    pub(crate) agent_socket: PathBuf,
    /// Files that may hold user-data, in this order.
    #[serde(default = "default_user_data")]
    pub(crate) user_data: Vec<PathBuf>,
    /// The guest's own state, on a tmpfs: a rebooted VM is a new VM.
    #[serde(default = "default_state_dir")]
    pub(crate) state_dir: PathBuf,
    /// Path of the pod's network namespace.
    #[serde(default = "default_podns")]
    pub(crate) podns: PathBuf,
    /// Whether the guest configures the VM's NICs.
    #[serde(default)]
    pub(crate) uplink: NicSetup,
    /// Seconds of silence after which `serve` is killed and started again, if pid 1 is peerpod-guest.
    #[serde(default = "default_hang_seconds")]
    pub(crate) hang_seconds: u16,
    /// `tracing` filter, like `info` or `peerpod_guest=debug`.
    #[serde(default = "default_log")]
    pub(crate) log: String,
    /// Whether the log, also of a kata-agent that the guest starts, goes over the link to the node, too. A confidential
    /// VM may want to reveal nothing to its host.
    #[serde(default = "default_log_over_link")]
    pub(crate) log_over_link: bool,
    /// Settings of container images.
    #[serde(default)]
    pub(crate) images: Images,
    /// Components for secrets and attestation, if the VM image has them.
    #[serde(default)]
    pub(crate) components: Components,
    /// Directory for the files of initdata.
    #[serde(default = "default_initdata_dir")]
    pub(crate) initdata_dir: PathBuf,
}

/// Settings of image pulls without a confidential data hub.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Images {
    /// Whether the guest answers the kata-agent's pull requests.
    pub(crate) serve: bool,
    /// Socket that the kata-agent calls: that of the hub.
    pub(crate) socket: PathBuf,
    /// Directory of the layers, on a disk if there is one (`/run` is memory). It must support overlays.
    pub(crate) store: PathBuf,
    /// Registries, `host` or `host:port`, reached over plain HTTP.
    pub(crate) plain_http: Vec<String>,
    /// Files of CA certificates (PEM) that registries' certificates may come from.
    pub(crate) ca_files: Vec<PathBuf>,
    /// Limits of one image.
    pub(crate) limits: peerpod_image_job::Limits,
}

impl Default for Images {
    fn default() -> Self {
        Images {
            serve: true,
            socket: "/run/confidential-containers/cdh.sock".into(),
            store: STORE.into(),
            plain_http: Vec::new(),
            ca_files: vec!["/etc/ssl/certs/ca-certificates.crt".into()],
            limits: peerpod_image_job::Limits::default(),
        }
    }
}

/// Confidential guest components, supplied by the builder of the VM image. They start in this order, each after the
/// previous one listens, once initdata is there and before the kata-agent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Components {
    /// `attestation-agent`, which starts first.
    pub(crate) attestation_agent: Option<Component>,
    /// `confidential-data-hub`, which starts second and then answers pull requests, too.
    pub(crate) data_hub: Option<Component>,
}

impl Components {
    /// Returns whether there are any.
    pub(crate) fn any(&self) -> bool {
        self.attestation_agent.is_some() || self.data_hub.is_some()
    }
}

/// One confidential guest component.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Component {
    /// Command line.
    pub(crate) command: Vec<String>,
    /// Socket on which it listens when it is ready.
    pub(crate) socket: PathBuf,
}

fn default_initdata_dir() -> PathBuf {
    "/run/peerpod".into()
}

/// Choice of the program that configures the VM's own NICs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum NicSetup {
    /// The guest if pid 1 is peerpod-guest, else another program (networkd).
    #[default]
    Auto,
    /// The guest.
    On,
    /// Another program.
    Off,
}

fn default_agent() -> Vec<String> {
    ["/usr/local/bin/kata-agent", "--config", "/etc/agent-config.toml"].map(str::to_owned).into()
}

fn default_agent_socket() -> PathBuf {
    "/run/peerpod/agent.sock".into()
}

fn default_user_data() -> Vec<PathBuf> {
    vec!["/media/cidata/user-data".into()]
}

fn default_state_dir() -> PathBuf {
    "/run/peerpod/guest".into()
}

fn default_podns() -> PathBuf {
    "/run/netns/podns".into()
}

fn default_hang_seconds() -> u16 {
    60
}

fn default_log() -> String {
    "info".to_owned()
}

fn default_log_over_link() -> bool {
    true
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            version: VERSION,
            agent: default_agent(),
            agent_socket: default_agent_socket(),
            user_data: default_user_data(),
            state_dir: default_state_dir(),
            podns: default_podns(),
            uplink: NicSetup::default(),
            hang_seconds: default_hang_seconds(),
            log: default_log(),
            log_over_link: default_log_over_link(),
            images: Images::default(),
            components: Components::default(),
            initdata_dir: default_initdata_dir(),
        }
    }
}

/// Fault of the settings. All of these are mistakes of the VM image.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("reading {path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path} is larger than {MAX_LEN} bytes")]
    TooLarge { path: PathBuf },
    #[error("{path}: {source}")]
    Json { path: PathBuf, source: serde_json::Error },
    #[error(
        "{path}: version {found}, this program reads {VERSION}; image and program must be built together"
    )]
    Version { path: PathBuf, found: u32 },
    #[error("{path}: {key}: {why}")]
    Value { path: PathBuf, key: &'static str, why: &'static str },
}

impl Settings {
    /// Reads the file; without one, returns the defaults.
    pub(crate) fn load(path: &Path) -> Result<Settings, Error> {
        let read = |source| Error::Read { path: path.to_owned(), source };
        let file = match std::fs::File::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Settings::default()),
            Err(error) => return Err(read(error)),
        };
        let mut text = Vec::new();
        file.take(MAX_LEN + 1).read_to_end(&mut text).map_err(read)?;
        if text.len() as u64 > MAX_LEN {
            return Err(Error::TooLarge { path: path.to_owned() });
        }
        Settings::parse(&text, path)
    }

    /// Returns whether a data hub of the VM image answers pull requests.
    pub(crate) fn has_hub(&self) -> bool {
        self.components.data_hub.is_some()
    }

    fn parse(text: &[u8], path: &Path) -> Result<Settings, Error> {
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let json = |source| Error::Json { path: path.to_owned(), source };
        let found = serde_json::from_slice::<Versioned>(text).map_err(json)?.version;
        if found != VERSION {
            return Err(Error::Version { path: path.to_owned(), found });
        }
        let settings: Settings = serde_json::from_slice(text).map_err(json)?;
        settings.check().map_err(|(key, why)| Error::Value { path: path.to_owned(), key, why })?;
        let images = Images { serve: settings.images.serve && !settings.has_hub(), ..settings.images };
        Ok(Settings { images, ..settings })
    }

    fn check(&self) -> Result<(), (&'static str, &'static str)> {
        for (key, path) in
            [("agent_socket", &self.agent_socket), ("state_dir", &self.state_dir), ("podns", &self.podns)]
        {
            if !path.is_absolute() {
                return Err((key, "must be an absolute path"));
            }
            if path.starts_with("/run/kata-containers") {
                return Err((key, "CreateSandbox removes /run/kata-containers with all its content"));
            }
        }
        if self.hang_seconds < 10 {
            return Err(("hang_seconds", "must be at least 10: a healthy guest reports every 5 s"));
        }
        if self.user_data.is_empty() {
            return Err(("user_data", "must name at least one file"));
        }
        for (key, path) in [
            ("images.socket", &self.images.socket),
            ("images.store", &self.images.store),
            ("initdata_dir", &self.initdata_dir),
        ] {
            if !path.is_absolute() || path.starts_with("/run/kata-containers") {
                return Err((key, "must be an absolute path, and not below /run/kata-containers"));
            }
        }
        if self.images.limits.memory_mib < 64 || self.images.limits.seconds == 0 {
            return Err(("images.limits", "must be at least 64 MiB of memory and 1 second"));
        }
        let components = [&self.components.attestation_agent, &self.components.data_hub];
        if components.into_iter().flatten().any(|one| one.command.first().is_none_or(|p| !p.starts_with('/')))
        {
            return Err(("components", "a command must begin with an absolute path"));
        }
        if self.agent.first().is_some_and(|program| !program.starts_with('/')) {
            return Err(("agent", "must begin with an absolute path"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Settings, String> {
        Settings::parse(text.as_bytes(), Path::new("guest.json")).map_err(|e| e.to_string())
    }

    #[test]
    fn a_missing_file_means_the_defaults() {
        assert_eq!(Settings::load(Path::new("/nonexistent/guest.json")).unwrap(), Settings::default());
        assert_eq!(parse(r#"{"version":1}"#).unwrap(), Settings::default());
    }

    #[test]
    fn the_documented_example_is_read() {
        let settings = parse(
            r#"{"version":1,"agent":["/usr/local/bin/kata-agent","--config","/etc/agent-config.toml"],
               "agent_socket":"/run/peerpod/agent.sock"}"#,
        );
        assert_eq!(settings.unwrap(), Settings::default());
    }

    #[test]
    fn mistakes_are_named() {
        assert!(parse(r#"{"version":2,"new":1}"#).unwrap_err().contains("version 2"));
        assert!(parse(r#"{"version":1,"agnet":[]}"#).unwrap_err().contains("agnet"));
        let error = parse(r#"{"version":1,"agent_socket":"/run/kata-containers/agent.sock"}"#).unwrap_err();
        assert!(error.contains("agent_socket: CreateSandbox removes"), "{error}");
        assert!(parse(r#"{"version":1,"state_dir":"run"}"#).unwrap_err().contains("state_dir"));
        assert!(parse(r#"{"version":1,"agent":["kata-agent"]}"#).unwrap_err().contains("absolute"));
        assert!(parse("").unwrap_err().contains("guest.json"));
    }
}
