//! Test harness of the end-to-end tests: boots sandboxes on the real binaries and checks them from outside.
//!
//! The tests themselves are in `tests/`; this library holds their shared helpers.

pub mod cloud;
pub mod cloud_node;
pub mod image;
pub mod machines;
pub mod servers;
pub mod vm;
pub mod volumes;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, ensure};
use peerpod_client::{AgentClient, Annotations, ContainerSpec, Output, ShimClient, exec_request};
use peerpod_proto::agent::{CreateContainerRequest, CreateSandboxRequest, Storage};
use peerpod_world::{Daemons, Namespace, Pod, Sight, World, eventually, stop};

/// Time limit of one step, on a machine that is busy with other tests.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Id of the container that every [`Sandbox`] has.
pub const CONTAINER: &str = "main";

static COUNTER: AtomicU32 = AtomicU32::new(0);

/// Returns whether the long versions of the tests were requested (`make test-long`).
pub fn long() -> bool {
    std::env::var_os("PEERPOD_TEST_LONG").is_some()
}

/// Prints a figure, and adds it to the summary file that `PEERPOD_TEST_BENCH` names, if that is set.
pub fn report(key: &str, value: f64) {
    // Tests of this process may report at the same time.
    static FILE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    println!("{key} = {value:.3}");
    let Some(path) = std::env::var_os("PEERPOD_TEST_BENCH") else { return };
    let _turn = FILE.lock();
    let before = std::fs::read(&path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
    let mut all: std::collections::BTreeMap<String, f64> = before.unwrap_or_default();
    all.insert(key.to_owned(), value);
    // Ignored: the figure was printed.
    serde_json::to_vec_pretty(&all).ok().and_then(|bytes| std::fs::write(&path, bytes).ok());
}

/// Returns whether this is a benchmark: it has the machine for itself.
pub fn is_bench() -> bool {
    std::env::var_os("PEERPOD_TEST_BENCH").is_some()
}

/// Returns an id that no other test uses.
pub fn fresh_id(name: &str) -> String {
    format!("{name}-{}-{}", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed))
}

/// A running sandbox with one container that sleeps, and the shim's connections to it.
pub struct Sandbox {
    /// The sandbox id.
    pub id: String,
    /// Path of the agent's socket.
    pub socket: PathBuf,
    /// The shim's connection to `hypervisor.sock`.
    pub shim: ShimClient,
    /// The shim's connections to the agent.
    pub agent: AgentClient,
    /// The pod's network.
    pub pod: Pod,
}

impl Sandbox {
    /// Calls CreateVM, StartVM and CreateSandbox, and starts a container named [`CONTAINER`].
    pub async fn start(world: &World, daemons: &Daemons, name: &str) -> anyhow::Result<Sandbox> {
        let sandbox = Sandbox::boot(daemons, world.pod()?, name, |annotations| annotations, PATIENCE).await;
        let sandbox = sandbox.with_context(|| daemons.log_tails())?;
        sandbox.create_container(CONTAINER, &["sleep", "infinity"]).await?;
        Ok(sandbox)
    }

    /// Boots a sandbox on the given pod, with the annotations that `more` adds, and without a container.
    pub async fn boot(
        daemons: &Daemons,
        pod: Pod,
        name: &str,
        more: impl FnOnce(Annotations) -> Annotations,
        patience: Duration,
    ) -> anyhow::Result<Sandbox> {
        let id = fresh_id(name);
        let shim = daemons.shim().await?;
        let annotations = more(Annotations::new("default", &id));
        let socket = shim.create_vm(&id, annotations, &pod.namespace().path()).await?;
        let started = tokio::time::timeout(patience, shim.start_vm(&id)).await;
        started.with_context(|| format!("StartVM of {id} was not answered within {patience:?}"))??;
        let agent = AgentClient::connect(&socket).await?;
        let mut request = CreateSandboxRequest::new();
        request.sandbox_id = id.clone();
        agent.create_sandbox(&request).await?;
        Ok(Sandbox { id, socket, shim, agent, pod })
    }

    /// Creates a container and starts it.
    pub async fn create_container(&self, container: &str, arguments: &[&str]) -> anyhow::Result<()> {
        self.agent.create_container(&ContainerSpec::new(container, arguments).request()).await?;
        Ok(self.agent.start_container(container).await?)
    }

    /// Runs a shell script in the container to its end.
    pub async fn shell(&self, exec: &str, script: &str) -> anyhow::Result<Output> {
        Ok(self.agent.exec(&exec_request(CONTAINER, exec, &["/bin/sh", "-c", script])).await?)
    }

    /// Runs a command in the container, which must succeed, and returns its output.
    pub async fn run(&self, command: &[&str]) -> anyhow::Result<String> {
        let output = self.agent.exec(&exec_request(CONTAINER, &fresh_id("exec"), command)).await?;
        ensure!(output.status == 0, "{command:?}: {output:?}");
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Runs a shell script in the container, which must succeed, and returns its output.
    pub async fn prints(&self, script: &str) -> anyhow::Result<String> {
        self.run(&["/bin/sh", "-c", script]).await
    }

    /// Checks with a short exec that the sandbox works.
    pub async fn lives(&self) -> anyhow::Result<()> {
        let output = self.shell(&fresh_id("alive"), "echo alive").await?;
        ensure!(output.status == 0 && output.stdout == b"alive\n", "{output:?}");
        Ok(())
    }

    /// Calls StopVM and waits until the ledger has a tombstone for the sandbox.
    pub async fn stop(self, daemons: &Daemons) -> anyhow::Result<()> {
        stop_promptly(&self.shim, &self.id).await?;
        let Sandbox { id, pod: _pod, .. } = self;
        daemons.gone(&id, PATIENCE).await
    }
}

/// Returns the shim's CreateContainer request for a container with an image that the VM pulls.
pub fn of_image(image: &str, id: &str, arguments: &[&str]) -> CreateContainerRequest {
    let mut request = ContainerSpec::new(id, arguments)
        .annotation("io.kubernetes.cri.container-type", "container")
        .annotation("io.kubernetes.cri.image-name", image)
        .request();
    let mut storage = Storage::new();
    storage.driver = "image_guest_pull".into();
    storage.source = image.into();
    storage.fstype = "overlay".into();
    storage.driver_options = vec!["image_guest_pull={\"metadata\":{}}".into()];
    storage.mount_point = format!("/run/kata-containers/{id}/rootfs");
    request.storages.push(storage);
    request
}

/// Calls StopVM, which must return within the shim's time limit of one second.
pub async fn stop_in_time(shim: &ShimClient, id: &str) -> anyhow::Result<()> {
    stop::in_time(shim, id).await.map(drop)
}

/// Calls StopVM three times, as shims do: each within one second, and at most one of them as slow as a relay without a
/// node.
pub async fn stop_promptly(shim: &ShimClient, id: &str) -> anyhow::Result<()> {
    stop::promptly(shim, id).await.map(drop)
}

/// Returns the value of the first sample with a line that starts with `name`.
pub fn sample(metrics: &str, name: &str) -> anyhow::Result<f64> {
    let line = metrics.lines().find(|line| line.starts_with(name));
    let line = line.with_context(|| format!("no {name} in\n{metrics}"))?;
    Ok(line.rsplit(' ').next().unwrap_or_default().parse()?)
}

/// Returns the processor time that a process has used so far.
pub fn processor_time(pid: u32) -> anyhow::Result<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields = stat.rsplit_once(')').context("a name in parentheses")?.1;
    let ticks: Vec<u64> =
        fields.split_whitespace().skip(11).take(2).map(str::parse).collect::<Result<_, _>>()?;
    // USER_HZ, which is 100 on every supported architecture.
    Ok(Duration::from_millis(10 * ticks.iter().sum::<u64>()))
}

/// Returns the resident memory of a process, in bytes.
pub fn resident(pid: u32) -> anyhow::Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("a process has VmRSS")?;
    Ok(line.trim().trim_end_matches(" kB").trim().parse::<u64>()? << 10)
}

/// Waits until the witnesses see nothing beyond `before`, except restarted daemons.
pub async fn nothing_beyond(
    world: &World,
    namespaces: &[&Namespace],
    daemons: &Daemons,
    before: &Sight,
    running: &Sight,
) -> anyhow::Result<()> {
    let mut left = Vec::new();
    let clean = eventually("nothing is left", PATIENCE, async || {
        let now = Sight::of(world, namespaces, daemons).ok()?;
        // A restarted node or relay has another process id than before, and is expected.
        let expected: Vec<String> = [daemons.node_pid(), daemons.relay_pid()]
            .into_iter()
            .flatten()
            .map(|pid| format!("process {pid} "))
            .collect();
        left = now.beyond(before, Some(running));
        left.retain(|line| !expected.iter().any(|process| line.starts_with(process)));
        left.is_empty().then_some(())
    })
    .await;
    clean.with_context(|| format!("{}\n{}", left.join("\n"), daemons.log_tails()))
}

/// Deterministic generator of small numbers (xorshift): every run gets the same sequence.
pub struct Dice(pub u64);

impl Dice {
    /// Returns the next number below `below`.
    pub fn roll(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % below
    }
}

/// Rules in a pod's namespace in the VM that no CNI made: the egress firewall, which blocks the clouds' metadata
/// services. The format is that of [`peerpod_world::picture::Picture::differences`]. Action 8 is "prohibit".
const METADATA_WALL: [&str; 5] = [
    "+ IPv4 rule action 8 dst 100.100.100.200 priority 1 src all",
    "+ IPv4 rule action 8 dst 168.63.129.16 priority 1 src all",
    "+ IPv4 rule action 8 dst 169.254.169.254 priority 1 src all",
    "+ IPv6 rule action 8 dst fd00:ec2::254 priority 1 src all",
    "+ IPv6 rule action 8 dst fd20:ce::254 priority 1 src all",
];

/// Returns the unexpected differences between a pod's namespace on the node and in the VM: every difference except the
/// egress firewall's rules, and every missing rule of the egress firewall.
pub fn beyond_wall(mut differences: Vec<String>) -> Vec<String> {
    for part in METADATA_WALL {
        match differences.iter().position(|line| line == part) {
            Some(at) => drop(differences.remove(at)),
            None => differences.push(format!("missing: {part}")),
        }
    }
    differences
}
