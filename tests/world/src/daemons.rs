//! Configures, starts, kills, restarts and inspects the real daemons of a world.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use peerpod_client::ShimClient;
use serde_json::{Map, Value, json};

use crate::World;
use crate::container::{Container, share};
use crate::wait::{eventually, eventually_blocking};

/// Time limit for the first answer of a started daemon, on a machine that is busy with tests.
const START_PATIENCE: Duration = Duration::from_secs(30);
const STOP_PATIENCE: Duration = Duration::from_secs(20);

/// Configuration on top of a world's defaults, by dotted key, and the rights of the daemons.
#[derive(Debug, Clone)]
pub struct Settings {
    values: Value,
    rights: Rights,
    /// Folders that an operator adds to the chart's volumes.
    extra: Vec<PathBuf>,
    /// Variables of the daemons' environment.
    env: Vec<String>,
}

/// Rights of the daemons.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rights {
    /// Rights of the daemons' containers in the chart. The local provider, which needs more, is a separate process.
    Chart,
    /// All rights of this process, as with a provider in the node.
    All,
}

impl Settings {
    /// Returns the defaults of a world: the local provider, sockets and state in the world's folder, debug logs.
    fn of(world: &World) -> Settings {
        let folder = world.folder();
        Settings::new(json!({
            "paths": { "run-dir": folder.join("run"), "state-dir": folder.join("state") },
            "log": { "level": std::env::var("PEERPOD_TEST_LOG").unwrap_or_else(|_| "debug".into()) },
            "node": { "cluster-id": world.prefix().trim_end_matches('-') },
            "relay": { "bundles": [folder.join("bundles")] },
            "provider": { "kind": "local" },
        }))
    }

    fn new(values: Value) -> Settings {
        Settings { values, rights: Rights::Chart, extra: Vec::new(), env: Vec::new() }
    }

    /// Returns the defaults, with the rights of the chart's containers.
    pub fn none() -> Settings {
        Settings::new(Value::Object(Map::new()))
    }

    /// Returns the defaults, with all rights and with the local provider in the node.
    pub fn privileged() -> Settings {
        Settings { rights: Rights::All, ..Settings::none() }
    }

    /// Adds a folder that an operator adds to the node's volumes (`node.extraVolumes`), for a provider's files.
    pub fn with_volume(mut self, folder: &Path) -> Settings {
        self.extra.push(folder.to_owned());
        self
    }

    /// Sets a variable of the environment of daemons with the chart's rights.
    pub fn with_env(mut self, name: &str, value: &str) -> Settings {
        self.env.push(format!("{name}={value}"));
        self
    }

    /// Grants all rights.
    pub fn with_all_rights(self) -> Settings {
        Settings { rights: Rights::All, ..self }
    }

    /// Returns a setting that is a string.
    pub fn text(&self, key: &str) -> Option<&str> {
        key.split('.').try_fold(&self.values, |place, part| place.get(part))?.as_str()
    }

    /// Sets a value by its dotted key.
    pub fn set(mut self, key: &str, value: impl Into<Value>) -> Settings {
        let mut place = &mut self.values;
        for part in key.split('.') {
            if !place.is_object() {
                *place = Value::Object(Map::new());
            }
            place = &mut place[part];
        }
        *place = value.into();
        self
    }

    fn merge(into: &mut Value, from: &Value) {
        match (into, from) {
            (Value::Object(into), Value::Object(from)) => {
                for (key, value) in from {
                    Settings::merge(into.entry(key.clone()).or_insert(Value::Null), value);
                }
            }
            (into, from) => *into = from.clone(),
        }
    }
}

/// One file of the node's ledger.
#[derive(Debug, Clone)]
pub struct LedgerEntry {
    /// The sandbox id, from the file's name.
    pub id: String,
    /// Content of the file.
    pub record: Value,
}

impl LedgerEntry {
    /// Returns the ledger in a node's state folder. A file that is not valid JSON is an entry with a null record.
    pub fn read(state_dir: &Path) -> anyhow::Result<Vec<LedgerEntry>> {
        let folder = state_dir.join("sandboxes");
        let mut entries = Vec::new();
        let listing = match fs::read_dir(&folder) {
            Ok(listing) => listing,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(entries),
            Err(error) => bail!("read {}: {error}", folder.display()),
        };
        for file in listing {
            let path = file?.path();
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            let id = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            let record = fs::read(&path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
            entries.push(LedgerEntry { id, record: record.unwrap_or(Value::Null) });
        }
        entries.sort_by(|one, other| one.id.cmp(&other.id));
        Ok(entries)
    }

    /// Returns the phase's name, or the whole record if it has none.
    pub fn phase(&self) -> String {
        match &self.record["phase"] {
            Value::String(name) => name.clone(),
            Value::Object(phase) if phase.contains_key("name") => {
                phase["name"].as_str().unwrap_or_default().into()
            }
            _ => self.record.to_string(),
        }
    }

    /// Returns the stages that the node recorded, with the time since CreateVM.
    pub fn stages(&self) -> Vec<(String, Duration)> {
        let stages = self.record["stages"].as_array().cloned().unwrap_or_default();
        let read = |stage: Value| {
            Some((stage["name"].as_str()?.to_owned(), Duration::from_millis(stage["at_ms"].as_u64()?)))
        };
        stages.into_iter().filter_map(read).collect()
    }

    /// Returns whether this is a tombstone.
    pub fn is_tombstone(&self) -> bool {
        self.phase().eq_ignore_ascii_case("gone")
    }
}

/// `peerpod-relay` and `peerpod-node` of one world. Killed when dropped.
pub struct Daemons {
    world: World,
    config: PathBuf,
    rights: Rights,
    /// Folders that an operator adds to the chart's volumes.
    extra: Vec<PathBuf>,
    /// Variables of the daemons' environment.
    env: Vec<String>,
    /// Folder of the containers' bundles.
    bundles: PathBuf,
    /// Whether `tunnel.kind` is not `vxlan`, for which the chart has one more volume.
    encrypted: bool,
    relay: Option<Child>,
    node: Option<Child>,
    /// The local provider, if it is a separate process; it outlives the daemons.
    cloud: Option<Cloud>,
}

impl Daemons {
    /// Writes the configuration, starts both daemons, and waits until they answer.
    pub async fn start(world: &World, settings: Settings) -> anyhow::Result<Daemons> {
        let mut daemons = Daemons::prepare(world, settings)?;
        daemons.start_relay()?;
        daemons.start_node()?;
        daemons.ready().await?;
        Ok(daemons)
    }

    /// Writes the configuration and starts no daemon.
    pub fn prepare(world: &World, settings: Settings) -> anyhow::Result<Daemons> {
        let Settings { mut values, .. } = Settings::of(world);
        Settings::merge(&mut values, &settings.values);
        let cloud = match settings.rights {
            Rights::Chart if values["provider"]["kind"] == "local" => Some(Cloud::start(world, &mut values)?),
            _ => None,
        };
        // JSON is YAML.
        let config = world.folder().join("peerpod.yaml");
        fs::write(&config, serde_json::to_vec_pretty(&values)?)?;
        if settings.rights == Rights::Chart {
            share(&world.folder().join("kubelet"))?;
        }
        let encrypted = values["tunnel"]["kind"].as_str().is_some_and(|kind| kind != "vxlan");
        let bundles = values["relay"]["bundles"][0].as_str().context("a folder of bundles")?.into();
        let Settings { rights, extra, env, .. } = settings;
        let world = world.clone();
        Ok(Daemons { world, config, rights, extra, env, bundles, encrypted, relay: None, node: None, cloud })
    }

    /// Restarts the local provider with one setting (`provider.local.<key>`) changed. Its VMs keep running.
    pub fn set_of_cloud(&mut self, key: &str, value: &str) -> anyhow::Result<()> {
        self.kill_cloud()?;
        if let Some(cloud) = &mut self.cloud {
            cloud.settings.insert(key.to_owned(), value.into());
        }
        self.start_cloud()
    }

    /// Kills the local provider. Its VMs keep running.
    pub fn kill_cloud(&mut self) -> anyhow::Result<()> {
        let cloud = self.cloud.as_mut().context("the local provider is no process of its own")?;
        cloud.process.kill()?;
        cloud.process.wait()?;
        Ok(())
    }

    /// Starts the local provider after [`Daemons::kill_cloud`].
    pub fn start_cloud(&mut self) -> anyhow::Result<()> {
        let cloud = self.cloud.as_mut().context("the local provider is no process of its own")?;
        cloud.process = Cloud::spawn(&self.world, &cloud.settings)?;
        Ok(())
    }

    /// Returns `paths.run-dir`.
    pub fn run_dir(&self) -> PathBuf {
        self.world.folder().join("run")
    }

    /// Returns `paths.state-dir`.
    pub fn state_dir(&self) -> PathBuf {
        self.world.folder().join("state")
    }

    /// Returns the path of the hypervisor API's socket.
    pub fn hypervisor_socket(&self) -> PathBuf {
        self.run_dir().join("hypervisor.sock")
    }

    /// Returns the configuration file of both daemons.
    pub fn config(&self) -> &Path {
        &self.config
    }

    /// Returns the log file of `relay` or `node`; every start appends to it.
    pub fn log(&self, daemon: &str) -> PathBuf {
        self.world.folder().join(format!("{daemon}.log"))
    }

    /// Opens a shim's connection.
    pub async fn shim(&self) -> anyhow::Result<ShimClient> {
        Ok(ShimClient::connect(&self.hypervisor_socket()).await?)
    }

    /// Starts the relay.
    pub fn start_relay(&mut self) -> anyhow::Result<()> {
        ensure!(self.relay.is_none(), "the relay runs");
        self.relay = Some(self.spawn("relay")?);
        Ok(())
    }

    /// Starts a relay that can see all of this machine, as one of an older release.
    pub fn start_relay_with_all_rights(&mut self) -> anyhow::Result<()> {
        ensure!(self.relay.is_none(), "the relay runs");
        let rights = std::mem::replace(&mut self.rights, Rights::All);
        let started = self.spawn("relay");
        self.rights = rights;
        self.relay = Some(started?);
        Ok(())
    }

    /// Starts the node.
    pub fn start_node(&mut self) -> anyhow::Result<()> {
        ensure!(self.node.is_none(), "the node runs");
        self.node = Some(self.spawn("node")?);
        Ok(())
    }

    /// Starts a second relay beside the running one, as an upgrade does.
    pub fn relay_beside(&self) -> anyhow::Result<Child> {
        self.spawn("relay")
    }

    /// Makes this process the relay, after the old relay is gone.
    pub fn adopt_relay(&mut self, new: Child) -> anyhow::Result<()> {
        ensure!(self.relay.is_none(), "the relay runs");
        self.relay = Some(new);
        Ok(())
    }

    /// Starts another relay, which takes over from the running one, and returns the old relay's exit status.
    pub async fn take_over(&mut self) -> anyhow::Result<ExitStatus> {
        let new = self.relay_beside()?;
        self.taken_over_by(new).await
    }

    /// Waits until this process has taken over from the running relay, and returns the old relay's exit status.
    pub async fn taken_over_by(&mut self, mut new: Child) -> anyhow::Result<ExitStatus> {
        let old = self.relay.as_mut().context("the relay does not run")?;
        let left = eventually("the old relay leaves", START_PATIENCE, async || {
            if let Some(status) = new.try_wait().ok().flatten() {
                return Some(Err(anyhow::anyhow!("the new relay ended: {}", explain(status))));
            }
            old.try_wait().ok().flatten().map(Ok)
        });
        match left.await.and_then(|left| left) {
            Ok(status) => {
                self.relay = Some(new);
                Ok(status)
            }
            Err(error) => {
                new.kill().ok();
                new.wait().ok();
                Err(error.context(self.log_tails()))
            }
        }
    }

    fn spawn(&self, daemon: &'static str) -> anyhow::Result<Child> {
        let program = binary(&format!("peerpod-{daemon}"))?;
        let log = self.log(daemon);
        if self.rights == Rights::All {
            let arguments = [OsStr::new("--config"), self.config.as_os_str()];
            return self.world.spawn(&program, &arguments, &log);
        }
        let (extra, env) = (self.extra.clone(), self.env.clone());
        let container = Container { name: daemon, volumes: self.volumes(daemon), extra, env };
        let (starter, words) =
            container.command(&program, &[OsStr::new("--config"), self.config.as_os_str()])?;
        let words: Vec<&OsStr> = words.iter().map(OsString::as_os_str).collect();
        self.world.spawn_in_pid_namespace(&starter, &words, &log)
    }

    /// Returns the volumes of a daemon's container with their paths. The world's folder is the configuration volume, so
    /// that it contains the files that a test's settings name.
    fn volumes(&self, daemon: &str) -> Vec<(&'static str, PathBuf)> {
        let folder = self.world.folder();
        let mut volumes =
            vec![("config", folder.to_owned()), ("run", self.run_dir()), ("bundles-0", self.bundles.clone())];
        if daemon == "relay" {
            let state = self.state_dir();
            volumes.extend([("state-relay", state.join("relay")), ("state-inbox", state.join("inbox"))]);
            volumes.push(("kubelet", folder.join("kubelet/pods")));
        } else {
            volumes.extend([("state", self.state_dir()), ("kubelet", folder.join("kubelet"))]);
            volumes.push(("netns", "/run/netns".into()));
            if self.encrypted {
                volumes.push(("tun", "/dev/net/tun".into()));
            }
        }
        volumes
    }

    /// Kills the node with SIGKILL and waits for its end.
    pub fn kill_node(&mut self) -> anyhow::Result<()> {
        let mut child = self.node.take().context("the node does not run")?;
        child.kill()?;
        child.wait()?;
        Ok(())
    }

    /// Kills the relay with SIGKILL and waits for its end.
    pub fn kill_relay(&mut self) -> anyhow::Result<()> {
        let mut child = self.relay.take().context("the relay does not run")?;
        child.kill()?;
        child.wait()?;
        Ok(())
    }

    /// Sends SIGTERM to the node and waits until it exits.
    pub fn terminate_node(&mut self) -> anyhow::Result<ExitStatus> {
        terminate(self.node.take().context("the node does not run")?, "node")
    }

    /// Sends SIGTERM to the relay and waits until it exits.
    pub fn terminate_relay(&mut self) -> anyhow::Result<ExitStatus> {
        terminate(self.relay.take().context("the relay does not run")?, "relay")
    }

    /// Returns the relay's pid.
    pub fn relay_pid(&self) -> Option<u32> {
        self.relay.as_ref().map(Child::id)
    }

    /// Returns the node's pid.
    pub fn node_pid(&self) -> Option<u32> {
        self.node.as_ref().map(Child::id)
    }

    /// Waits until a call passes through the relay to the node and back. Fails with the end of both logs if a daemon
    /// exits.
    pub async fn ready(&mut self) -> anyhow::Result<()> {
        let socket = self.hypervisor_socket();
        let answered = eventually("peerpod-node answers on hypervisor.sock", START_PATIENCE, async || {
            for (name, child) in [("relay", &mut self.relay), ("node", &mut self.node)] {
                if let Some(status) = child.as_mut().and_then(|child| child.try_wait().ok().flatten()) {
                    return Some(Err(anyhow::anyhow!("peerpod-{name} ended: {}", explain(status))));
                }
            }
            let shim = ShimClient::connect(&socket).await.ok()?;
            shim.version().await.ok().map(|_| Ok(()))
        })
        .await;
        match answered {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) | Err(error) => Err(error.context(self.log_tails())),
        }
    }

    /// Returns the `/metrics` of `relay` or `node`.
    pub fn metrics(&self, daemon: &str) -> anyhow::Result<String> {
        self.get(daemon, "/metrics").with_context(|| format!("scrape peerpod-{daemon}"))
    }

    /// Returns the `/readyz` of the node.
    pub fn readyz(&self) -> anyhow::Result<Value> {
        let answer = self.get("node", "/readyz")?;
        let (_, body) = answer.split_once("\r\n\r\n").context("an answer without a body")?;
        Ok(serde_json::from_str(body)?)
    }

    /// Returns the answer of a daemon's port for administrators, with its headers.
    fn get(&self, daemon: &str, path: &str) -> anyhow::Result<String> {
        let port = if daemon == "relay" { 15152 } else { 15153 };
        let fetch = || -> std::io::Result<String> {
            let mut stream = TcpStream::connect(("127.0.0.1", port))?;
            stream.set_read_timeout(Some(START_PATIENCE))?;
            write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")?;
            let mut text = String::new();
            stream.read_to_string(&mut text)?;
            Ok(text)
        };
        Ok(self.world.node().run(fetch)??)
    }

    /// Returns the node's ledger.
    pub fn ledger(&self) -> anyhow::Result<Vec<LedgerEntry>> {
        LedgerEntry::read(&self.state_dir())
    }

    /// Waits until the ledger has a tombstone for the sandbox, which the node writes when every resource is gone.
    pub async fn gone(&self, id: &str, patience: Duration) -> anyhow::Result<()> {
        eventually(&format!("{id} is a tombstone in the ledger"), patience, async || {
            let entries = self.ledger().ok()?;
            entries.iter().any(|entry| entry.id == id && entry.is_tombstone()).then_some(())
        })
        .await
        .with_context(|| format!("the ledger has {:?}", self.ledger()))
    }

    /// Returns the last lines of both logs, for error messages.
    pub fn log_tails(&self) -> String {
        let mut text = String::new();
        for daemon in ["relay", "node"] {
            let log = fs::read_to_string(self.log(daemon)).unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            let tail = lines[lines.len().saturating_sub(25)..].join("\n");
            text.push_str(&format!("--- end of peerpod-{daemon}'s log ---\n{tail}\n"));
        }
        text
    }
}

impl Drop for Daemons {
    fn drop(&mut self) {
        let cloud = self.cloud.as_mut().map(|cloud| &mut cloud.process);
        for child in [self.node.as_mut(), self.relay.as_mut(), cloud].into_iter().flatten() {
            // It may have ended before.
            child.kill().ok();
            child.wait().ok();
        }
    }
}

/// The local provider as a separate process with all rights.
struct Cloud {
    /// Settings below `provider.local`.
    settings: Map<String, Value>,
    process: Child,
}

impl Cloud {
    /// Starts the provider with the settings in `values`, and configures the node to use it.
    fn start(world: &World, values: &mut Value) -> anyhow::Result<Cloud> {
        let local = values["provider"].as_object_mut().and_then(|provider| provider.remove("local"));
        values["provider"]["kind"] = "external".into();
        values["provider"]["external"]["socket"] = Cloud::socket(world).to_string_lossy().into();
        let settings = local.and_then(|local| local.as_object().cloned()).unwrap_or_default();
        let process = Cloud::spawn(world, &settings)?;
        Ok(Cloud { settings, process })
    }

    fn socket(world: &World) -> PathBuf {
        world.folder().join("cloud.sock")
    }

    fn spawn(world: &World, settings: &Map<String, Value>) -> anyhow::Result<Child> {
        let socket = Cloud::socket(world);
        // The socket of a killed provider remains.
        fs::remove_file(&socket).ok();
        let state_dir = world.folder().join("state");
        let mut arguments: Vec<OsString> =
            vec!["--socket".into(), socket.clone().into(), "--paths.state-dir".into(), state_dir.into()];
        for (key, value) in settings {
            let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            arguments.extend([format!("--provider.local.{key}").into(), value.into()]);
        }
        let arguments: Vec<&OsStr> = arguments.iter().map(OsString::as_os_str).collect();
        let log = world.folder().join("cloud.log");
        let mut process = world.spawn(&binary("peerpod-test-plugin")?, &arguments, &log)?;
        let serves = eventually_blocking("the local provider serves", START_PATIENCE, || {
            let ended = process.try_wait().ok().flatten();
            ended.map(|status| Err(explain(status))).or_else(|| socket.exists().then_some(Ok(())))
        });
        match serves {
            Ok(Ok(())) => Ok(process),
            Ok(Err(how)) => {
                bail!("the local provider ended: {how}\n{}", fs::read_to_string(&log).unwrap_or_default())
            }
            Err(error) => Err(error),
        }
    }
}

fn terminate(mut child: Child, name: &str) -> anyhow::Result<ExitStatus> {
    kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM)?;
    let ended = eventually_blocking(&format!("peerpod-{name} ends after SIGTERM"), STOP_PATIENCE, || {
        child.try_wait().ok().flatten()
    });
    if ended.is_err() {
        child.kill().ok();
        child.wait().ok();
    }
    ended
}

fn explain(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => status.to_string(),
    }
}

/// Finds a Peerpod program: in `PEERPOD_TEST_BIN_DIR`, beside the current one, or in the folder above (test programs
/// are in `deps`).
pub fn binary(name: &str) -> anyhow::Result<PathBuf> {
    let us = std::env::current_exe()?;
    let folders = [std::env::var_os("PEERPOD_TEST_BIN_DIR").map(PathBuf::from)]
        .into_iter()
        .flatten()
        .chain(us.ancestors().skip(1).take(2).map(Path::to_owned));
    let mut tried = Vec::new();
    for folder in folders {
        let path = folder.join(name);
        if path.is_file() {
            return Ok(path);
        }
        tried.push(folder.display().to_string());
    }
    bail!("{name} is not in {}: build it first (`make bins`)", tried.join(" nor in "))
}
