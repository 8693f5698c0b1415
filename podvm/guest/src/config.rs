//! Reads the VM image's settings (`/etc/peerpod/guest.json`): decisions of the image's builder, nothing about a pod.
//!
//! Unknown keys and other versions are refused: VM image and guest are built together, so a difference is a mistake of
//! the build and not a matter of compatibility. A missing file means the defaults.

use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use serde::Deserialize;

use crate::{files, pool};

pub(crate) const PATH: &str = "/etc/peerpod/guest.json";
const VERSION: u32 = 1;
/// Default store of container images: in memory.
pub(crate) const STORE: &str = "/run/peerpod/images";
const MAX_LEN: u64 = 64 << 10;

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Settings {
    version: u32,
    /// Command line of the kata-agent; empty = another program in the VM image starts it.
    pub(crate) agent: Vec<String>,
    /// Socket of the kata-agent. Not below `/run/kata-containers`: CreateSandbox wipes that.
    pub(crate) agent_socket: PathBuf,
    /// Files that may hold user-data, in this order.
    pub(crate) user_data: Vec<PathBuf>,
    /// Folder of claim and user-data, on a tmpfs, of a machine of a pool (provider `byom`). Such a machine reboots at its
    /// end, which frees it.
    pub(crate) pool_dir: Option<PathBuf>,
    /// The guest's own state, on a tmpfs: a rebooted VM is a new VM.
    pub(crate) state_dir: PathBuf,
    /// Path of the pod's network namespace.
    pub(crate) podns: PathBuf,
    /// Whether the guest configures the VM's NICs.
    pub(crate) uplink: NicSetup,
    /// Seconds of silence after which `serve` is killed and started again, if pid 1 is peerpod-guest.
    pub(crate) hang_seconds: u16,
    /// `tracing` filter, like `info` or `peerpod_guest=debug`.
    pub(crate) log: String,
    /// Whether the log, also of a kata-agent that the guest starts, goes over the link to the node, too. A confidential
    /// VM may want to reveal nothing to its host.
    pub(crate) log_over_link: bool,
    pub(crate) images: Images,
    /// Components for secrets and attestation, if the VM image has them.
    pub(crate) components: Components,
    /// Directory for the files of initdata.
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
    pub(crate) fn any(&self) -> bool {
        self.attestation_agent.is_some() || self.data_hub.is_some()
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Component {
    /// Command line.
    pub(crate) command: Vec<String>,
    /// Socket on which it listens when it is ready.
    pub(crate) socket: PathBuf,
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

impl Default for Settings {
    fn default() -> Self {
        Settings {
            version: VERSION,
            agent: ["/usr/local/bin/kata-agent", "--config", "/etc/agent-config.toml"]
                .map(str::to_owned)
                .into(),
            agent_socket: "/run/peerpod/agent.sock".into(),
            user_data: vec!["/media/cidata/user-data".into()],
            pool_dir: None,
            state_dir: "/run/peerpod/guest".into(),
            podns: "/run/netns/podns".into(),
            uplink: NicSetup::default(),
            hang_seconds: 60,
            log: "info".to_owned(),
            log_over_link: true,
            images: Images::default(),
            components: Components::default(),
            initdata_dir: "/run/peerpod".into(),
        }
    }
}

impl Settings {
    /// Reads the file; without one, returns the defaults. All faults are mistakes of the VM image.
    pub(crate) fn load(path: &Path) -> anyhow::Result<Settings> {
        match files::read(path, MAX_LEN).with_context(|| format!("reading {}", path.display()))? {
            Some(text) => Settings::parse(&text).with_context(|| path.display().to_string()),
            None => Ok(Settings::default()),
        }
    }

    fn parse(text: &[u8]) -> anyhow::Result<Settings> {
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        let Versioned { version } = serde_json::from_slice(text)?;
        ensure!(
            version == VERSION,
            "version {version}, this program reads {VERSION}; image and program must be built together"
        );
        let settings: Settings = serde_json::from_slice(text)?;
        settings.check()?;
        // A data hub of the VM image answers pull requests itself.
        let serve = settings.images.serve && settings.components.data_hub.is_none();
        let images = Images { serve, ..settings.images };
        // A pod of a pool has no other place.
        let user_data = match &settings.pool_dir {
            Some(folder) => vec![folder.join(pool::USER_DATA)],
            None => settings.user_data,
        };
        Ok(Settings { images, user_data, ..settings })
    }

    fn check(&self) -> anyhow::Result<()> {
        let pool_dir = self.pool_dir.iter().map(|path| ("pool_dir", path));
        let others = [
            ("agent_socket", &self.agent_socket),
            ("state_dir", &self.state_dir),
            ("podns", &self.podns),
            ("images.socket", &self.images.socket),
            ("images.store", &self.images.store),
            ("initdata_dir", &self.initdata_dir),
        ];
        for (key, path) in others.into_iter().chain(pool_dir) {
            ensure!(path.is_absolute(), "{key}: must be an absolute path");
            ensure!(
                !path.starts_with("/run/kata-containers"),
                "{key}: CreateSandbox removes /run/kata-containers with all its content"
            );
        }
        let is_limited = self.images.limits.memory_mib >= 64 && self.images.limits.seconds > 0;
        let is_absolute =
            |command: &[String]| command.first().is_some_and(|program| program.starts_with('/'));
        let components = [&self.components.attestation_agent, &self.components.data_hub];
        let are_absolute = components.into_iter().flatten().all(|component| is_absolute(&component.command));
        for (holds, rule) in [
            (self.hang_seconds >= 10, "hang_seconds: must be at least 10: a healthy guest reports every 5 s"),
            (!self.user_data.is_empty(), "user_data: must name at least one file"),
            (is_limited, "images.limits: must be at least 64 MiB of memory and 1 second"),
            (are_absolute, "components: a command must begin with an absolute path"),
            (self.agent.is_empty() || is_absolute(&self.agent), "agent: must begin with an absolute path"),
        ] {
            ensure!(holds, rule);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Settings, String> {
        Settings::parse(text.as_bytes()).map_err(|e| e.to_string())
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
        let file = "/proc/self/status";
        let error = format!("{:#}", Settings::load(Path::new(file)).unwrap_err());
        assert!(error.starts_with(file), "{error}");
    }
}
