//! The image's settings (`/etc/peerpod/guest.json`): what the builder of the VM image decides, nothing about a pod.
//!
//! Unknown keys and other versions are refused: image and guest program are built together, so a difference is a
//! mistake of the build and not a matter of compatibility. A missing file means the defaults.

use std::{
    io::Read,
    path::{Path, PathBuf},
};

use serde::Deserialize;

/// Where the image keeps the file.
pub(crate) const PATH: &str = "/etc/peerpod/guest.json";
const VERSION: u32 = 1;
/// Where images are unless the image says another place: in memory.
pub(crate) const STORE: &str = "/run/peerpod/images";
const MAX_LEN: u64 = 64 << 10;

/// What the image says.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Settings {
    version: u32,
    /// Command line of the kata-agent; empty = something else in the image starts it, it is only waited for.
    #[serde(default = "default_agent")]
    pub(crate) agent: Vec<String>,
    /// Where the agent listens. Not below `/run/kata-containers`: CreateSandbox wipes that.
    #[serde(default = "default_agent_socket")]
    pub(crate) agent_socket: PathBuf,
    /// Where user-data may be found, in this order.
    #[serde(default = "default_user_data")]
    pub(crate) user_data: Vec<PathBuf>,
    /// Our own state, on a tmpfs: a rebooted VM is a new VM.
    #[serde(default = "default_state_dir")]
    pub(crate) state_dir: PathBuf,
    /// The pod's network namespace.
    #[serde(default = "default_podns")]
    pub(crate) podns: PathBuf,
    /// Whether this program gives the VM's network cards their addresses.
    #[serde(default)]
    pub(crate) uplink: Uplink,
    /// A guest program that says nothing for so long is killed and started again, where pid 1 is ours.
    #[serde(default = "default_hang_seconds")]
    pub(crate) hang_seconds: u16,
    /// A `tracing` filter, like `info` or `peerpod_guest=debug`.
    #[serde(default = "default_log")]
    pub(crate) log: String,
    /// Whether what is logged, also by an agent that we start, goes over the link to the node, too. A confidential VM
    /// may want to tell its host nothing.
    #[serde(default = "default_log_over_link")]
    pub(crate) log_over_link: bool,
    /// Containers' images.
    #[serde(default)]
    pub(crate) images: Images,
    /// What answers for secrets and attestation, where the image has it.
    #[serde(default)]
    pub(crate) components: Components,
    /// Where the files of initdata go.
    #[serde(default = "default_initdata_dir")]
    pub(crate) initdata_dir: PathBuf,
}

/// How images are pulled where no confidential data hub does it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Images {
    /// Whether we answer the agent.
    pub(crate) serve: bool,
    /// Where the agent asks: the hub's socket.
    pub(crate) socket: PathBuf,
    /// Where layers are kept: a directory on a disk, if there is one. (`/run` is memory.) Overlays must be possible on
    /// it.
    pub(crate) store: PathBuf,
    /// Registries, `host` or `host:port`, that are spoken to in plain HTTP.
    pub(crate) plain_http: Vec<String>,
    /// CA certificates (PEM) that registries may have theirs from.
    pub(crate) ca_files: Vec<PathBuf>,
    /// What one image may cost.
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

/// The confidential guest components, supplied by whoever builds the image. Started in this order, each after the one
/// before listens, when initdata is there, and before the agent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Components {
    /// First `attestation-agent`.
    pub(crate) attestation_agent: Option<Component>,
    /// Then `confidential-data-hub`, which then answers for images, too.
    pub(crate) data_hub: Option<Component>,
}

impl Components {
    /// Whether there are any.
    pub(crate) fn any(&self) -> bool {
        self.attestation_agent.is_some() || self.data_hub.is_some()
    }
}

/// One of them.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Component {
    /// Command line.
    pub(crate) command: Vec<String>,
    /// Where it listens when it is ready.
    pub(crate) socket: PathBuf,
}

fn default_initdata_dir() -> PathBuf {
    "/run/peerpod".into()
}

/// Who looks after the VM's own network cards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Uplink {
    /// This program where pid 1 is ours, else somebody else (networkd).
    #[default]
    Auto,
    /// This program.
    On,
    /// Somebody else.
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
            uplink: Uplink::default(),
            hang_seconds: default_hang_seconds(),
            log: default_log(),
            log_over_link: default_log_over_link(),
            images: Images::default(),
            components: Components::default(),
            initdata_dir: default_initdata_dir(),
        }
    }
}

/// Why the settings could not be used. All of these are mistakes of the image.
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
    /// Reads the file; defaults when there is none.
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

    /// Whether a data hub of the image's answers for images.
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
                return Err((key, "CreateSandbox removes /run/kata-containers with all that is in it"));
            }
        }
        if self.hang_seconds < 10 {
            return Err(("hang_seconds", "must be at least 10: a healthy guest gives a sign every 5 s"));
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
            return Err(("images.limits", "64 MiB of memory and 1 second are the least"));
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
