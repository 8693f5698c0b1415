//! Starts the confidential guest components of a VM image: the attestation agent, then the data hub.
//!
//! Each is started with its configuration from initdata, counts as ready when its socket accepts, and is started again
//! when it ends; the kata-agent starts after them. Like the kata-agent they survive this program and are found again by
//! their sockets.

use std::collections::HashSet;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use crate::config::{self, Component};
use crate::files;
use crate::status::Status;

/// Time that a component may take to listen. The kata-agent asks it for secrets, and so does not start without it.
const PATIENCE: Duration = Duration::from_secs(30);
const POLL: Duration = Duration::from_millis(20);
const PAUSE: Duration = Duration::from_secs(1);
/// File in which the data hub looks for registry credentials.
const AUTH: &str = "auth.json";
const AUTH_VARIABLE: &str = "CDH_DEFAULT_IMAGE_AUTHENTICATED_REGISTRY_CREDENTIALS";
/// Configuration files that stay empty if initdata has none: the components refuse to start without a file.
const CONFIGURATIONS: [&str; 2] = ["aa.toml", "cdh.toml"];

pub(crate) struct Components {
    settings: config::Components,
    dir: PathBuf,
    status: Arc<Status>,
    /// Whether the kata-agent may start.
    ready: watch::Sender<bool>,
    /// Names of supervised components: a repeated start after a failure does not start a second one.
    kept: Mutex<HashSet<&'static str>>,
}

impl Components {
    /// Makes the components without a start. Without any, the kata-agent need not wait.
    pub(crate) fn new(settings: &config::Settings, status: Arc<Status>) -> Arc<Components> {
        let ready = watch::Sender::new(!settings.components.any());
        let (settings, dir) = (settings.components.clone(), settings.initdata_dir.clone());
        Arc::new(Components { settings, dir, status, ready, kept: Mutex::default() })
    }

    pub(crate) async fn wait(&self) {
        // The sender lives as long as `self`.
        drop(self.ready.subscribe().wait_for(|ready| *ready).await);
    }

    /// Starts the missing components, in order, after initdata's files. A repeated call changes only the pull secret.
    pub(crate) async fn start(self: &Arc<Self>, pull_secret: &str) -> Result<(), String> {
        if !self.settings.any() {
            return Ok(()); // no component reads the secret's file
        }
        if *self.ready.borrow() {
            let kept = self.keep_secret(pull_secret);
            return kept.map_err(|error| format!("keeping a new pull secret: {error}"));
        }
        self.prepare(pull_secret).map_err(|error| format!("preparing the guest components: {error}"))?;
        let stage = self.status.begin("components");
        let named = [
            ("the attestation agent", &self.settings.attestation_agent),
            ("the confidential data hub", &self.settings.data_hub),
        ];
        for (name, component) in named {
            if let Some(component) = component {
                self.one(name, component.clone()).await?;
            }
        }
        self.status.done(stage);
        self.ready.send_replace(true);
        Ok(())
    }

    fn prepare(&self, pull_secret: &str) -> std::io::Result<()> {
        fs::create_dir_all(&self.dir)?;
        for name in CONFIGURATIONS {
            let path = self.dir.join(name);
            if !path.exists() {
                files::write(&path, b"")?;
            }
        }
        self.keep_secret(pull_secret)
    }

    fn keep_secret(&self, pull_secret: &str) -> std::io::Result<()> {
        let auth = if pull_secret.is_empty() { "{}" } else { pull_secret };
        let path = self.dir.join(AUTH);
        if fs::read(&path).is_ok_and(|now| now == auth.as_bytes()) {
            return Ok(());
        }
        files::write(&path, auth.as_bytes())
    }

    async fn one(self: &Arc<Self>, name: &'static str, component: Component) -> Result<(), String> {
        let socket = component.socket.clone();
        if UnixStream::connect(&socket).await.is_ok() {
            tracing::info!(name, "found running");
            return Ok(());
        }
        if let Some(folder) = socket.parent() {
            fs::create_dir_all(folder).map_err(|error| format!("making {}: {error}", folder.display()))?;
        }
        if self.kept.lock().insert(name) {
            let components = self.clone();
            tokio::spawn(async move { components.keep(name, &component).await });
        }
        let listening = async {
            while UnixStream::connect(&socket).await.is_err() {
                sleep(POLL).await;
            }
        };
        timeout(PATIENCE, listening).await.map_err(|_| {
            let socket = socket.display();
            format!(
                "{name} did not listen on {socket} within {PATIENCE:?}; the VM's console has its messages"
            )
        })
    }

    /// Runs a component, again after each end.
    async fn keep(&self, name: &'static str, component: &Component) {
        loop {
            let ended = match self.run(component) {
                Ok(mut child) => {
                    child.wait().await.map_or_else(|error| error.to_string(), |status| status.to_string())
                }
                Err(error) => format!("cannot start {}: {error}", component.command.join(" ")),
            };
            tracing::error!(name, how = ended, "a guest component ended; it is started again");
            self.status.note("components", Some(format!("{name} ended ({ended}); it is started again")));
            sleep(PAUSE).await;
        }
    }

    fn run(&self, component: &Component) -> std::io::Result<tokio::process::Child> {
        let (program, arguments) =
            component.command.split_first().ok_or_else(|| std::io::Error::other("its command is empty"))?;
        files::remove_volatile(&component.socket)?; // it has no listener any more
        let mut command = Command::new(program);
        command
            .args(arguments)
            .current_dir("/")
            .env(AUTH_VARIABLE, format!("file://{}", self.dir.join(AUTH).display()))
            .stdin(Stdio::null())
            .process_group(0); // signals to this process group do not reach it
        tokio::process::Command::from(command).spawn()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::Settings;
    use crate::files::testing::TempDir;

    /// Component as a shell script: records its start and its inputs; listens with Python.
    fn component(dir: &Path, name: &str) -> Component {
        let (socket, log) = (dir.join(format!("{name}.sock")), dir.join("log"));
        let script = format!(
            "echo $$ > {dir}/{name}.pid; echo {name} $(cat {dir}/aa.toml) $(stat -c %a {dir}/auth.json) ${AUTH_VARIABLE} >> {log}; exec python3 -c \"import socket,time; s=socket.socket(socket.AF_UNIX); s.bind('{socket}'); s.listen(); time.sleep(100)\"",
            dir = dir.display(),
            log = log.display(),
            socket = socket.display()
        );
        Component { command: vec!["/bin/sh".into(), "-c".into(), script], socket }
    }

    #[tokio::test]
    async fn components_start_in_order_with_configuration_before_the_agent() {
        let dir = TempDir::new();
        let mut settings = Settings::default();
        settings.initdata_dir = dir.path().to_owned();
        settings.components = config::Components {
            attestation_agent: Some(component(dir.path(), "aa")),
            data_hub: Some(component(dir.path(), "hub")),
        };
        let components = Components::new(&settings, Arc::new(Status::new(Path::new("/nonexistent"), false)));
        assert!(timeout(Duration::from_millis(20), components.wait()).await.is_err(), "the agent waits");
        files::write(&dir.path().join("aa.toml"), b"kbs").unwrap();
        components.start("{\"auths\":{}}").await.unwrap();
        timeout(Duration::from_secs(5), components.wait()).await.unwrap();
        let log = fs::read_to_string(dir.path().join("log")).unwrap();
        let auth = format!("file://{}/auth.json", dir.path().display());
        assert_eq!(log, format!("aa kbs 600 {auth}\nhub kbs 600 {auth}\n"));
        // A restarted guest finds them.
        let again = Components::new(&settings, Arc::new(Status::new(Path::new("/nonexistent"), true)));
        again.start("").await.unwrap();
        assert_eq!(fs::read_to_string(dir.path().join("log")).unwrap(), log);
        for name in ["aa", "hub"] {
            let pid = fs::read_to_string(dir.path().join(format!("{name}.pid"))).unwrap();
            let pid = nix::unistd::Pid::from_raw(pid.trim().parse().unwrap());
            nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_component_that_does_not_listen_fails_each_time_and_runs_once() {
        let dir = TempDir::new();
        let program = dir.path().join("mute");
        let mut settings = Settings::default();
        settings.initdata_dir = dir.path().to_owned();
        let command = ["sh", "-c", "exec sleep 600 # $0"].map(str::to_owned).into_iter();
        let command = command.chain([program.display().to_string()]).collect();
        settings.components.data_hub = Some(Component { command, socket: dir.path().join("socket") });
        let components = Components::new(&settings, Arc::new(Status::new(Path::new("/nonexistent"), false)));
        for _ in 0..2 {
            let error = components.start("").await.unwrap_err();
            assert!(error.contains("the confidential data hub did not listen"), "{error}");
        }
        assert_eq!(components.kept.lock().len(), 1);
        let children =
            fs::read_to_string(format!("/proc/self/task/{}/children", nix::unistd::gettid())).unwrap();
        let children: Vec<_> = children.split_whitespace().collect();
        assert_eq!(children.len(), 1, "{children:?}");
        let pid = nix::unistd::Pid::from_raw(children[0].parse().unwrap());
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
    }

    #[tokio::test]
    async fn without_components_the_agent_does_not_wait() {
        let components =
            Components::new(&Settings::default(), Arc::new(Status::new(Path::new("/nonexistent"), false)));
        timeout(Duration::from_secs(5), components.wait()).await.unwrap();
        components.start("").await.unwrap();
    }
}
