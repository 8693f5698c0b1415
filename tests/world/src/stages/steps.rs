//! The stages, each a method that acts and checks.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use peerpod_client::{AgentClient, Annotations, ContainerSpec, ShimClient, copy_file, exec_request};
use peerpod_proto::agent::CreateSandboxRequest;
use tokio::task::{JoinHandle, spawn_blocking};

use crate::page::{self, PageServer};
use crate::ping::ping;
use crate::{Daemons, Pod, Settings, Sight, World, eventually, stop};

/// Time limit of one step, on a machine that is busy with other tests and with a VM that may be emulated.
const PATIENCE: Duration = Duration::from_secs(60);
/// Time limit of a boot. A VM of the local provider is up in well under a second; an emulated machine takes long.
const BOOT_PATIENCE: Duration = Duration::from_secs(180);
const TRANSFER: usize = 64 << 20;
const PAGE_PORT: u16 = 8080;
/// Bytes of two connections at least, one over IPv4 and one over IPv6. Each has four packets (SYN, ACK, the request and
/// FIN) with Ethernet, IP and TCP headers.
const TWO_CONNECTIONS: u64 = 4 * (14 + 20 + 20) + 4 * (14 + 40 + 20);
const NAMESPACE: &str = "default";
const POD: &str = "stages";

/// State of a walk. The stages fill the fields, which are dropped in this order.
pub struct Walk {
    oom: Option<JoinHandle<()>>,
    agent: Option<AgentClient>,
    shim: Option<ShimClient>,
    page: Option<PageServer>,
    daemons: Option<Daemons>,
    pods: Option<(Pod, Pod)>,
    world: World,
    settings: Settings,
    id: String,
    container: String,
    socket: PathBuf,
    before: Sight,
    running: Sight,
    inside: Vec<(String, Duration)>,
}

impl Walk {
    /// Returns a walk with no stage passed.
    pub fn new(world: World, settings: Settings) -> Walk {
        // containerd's ids have 64 hexadecimal digits.
        let seed = std::time::UNIX_EPOCH.elapsed().unwrap_or_default().as_nanos().reverse_bits();
        Walk {
            oom: None,
            agent: None,
            shim: None,
            page: None,
            daemons: None,
            pods: None,
            world,
            settings,
            id: format!("{seed:032x}{:032x}", std::process::id()),
            container: format!("{:032x}{seed:032x}", std::process::id()),
            socket: PathBuf::new(),
            before: Sight::default(),
            running: Sight::default(),
            inside: Vec::new(),
        }
    }

    fn daemons(&mut self) -> anyhow::Result<&mut Daemons> {
        self.daemons.as_mut().context("the daemons run")
    }

    fn pods(&self) -> anyhow::Result<(&Pod, &Pod)> {
        self.pods.as_ref().map(|(pod, other)| (pod, other)).context("the pods are made")
    }

    fn shim(&self) -> anyhow::Result<&ShimClient> {
        self.shim.as_ref().context("the shim is connected")
    }

    fn agent(&self) -> anyhow::Result<&AgentClient> {
        self.agent.as_ref().context("the agent is connected")
    }

    /// Returns the node's own stages, which are known from StopVM on.
    pub fn inside(&self) -> &[(String, Duration)] {
        &self.inside
    }

    /// Returns the ends of the daemons' logs.
    pub fn log_tails(&self) -> String {
        self.daemons.as_ref().map(Daemons::log_tails).unwrap_or_default()
    }

    /// Starts the daemons.
    pub async fn start_daemons(&mut self) -> anyhow::Result<String> {
        let daemons = self.daemons.insert(Daemons::start(&self.world, self.settings.clone()).await?);
        Ok(format!("state in {}", daemons.state_dir().display()))
    }

    /// Makes the network namespaces of the pod and of another pod.
    pub async fn make_pods(&mut self) -> anyhow::Result<String> {
        let (pod, other) = (self.world.pod()?, self.world.pod()?);
        for address in pod.addresses() {
            ping(other.namespace(), address, 56, PATIENCE)
                .context("before there is a VM, the CNI's netns answers")?;
        }
        let seen = format!("eth0 {} {}, MTU 1450; beside it {}", pod.v4(), pod.v6(), other.v4());
        self.pods = Some((pod, other));
        Ok(seen)
    }

    fn inspect(&self) -> anyhow::Result<Sight> {
        let (pod, other) = self.pods()?;
        let daemons = self.daemons.as_ref().context("the daemons run")?;
        Sight::of(&self.world, &[pod.namespace(), other.namespace()], daemons)
    }

    /// Calls CreateVM with the nine annotations, then again, which must change nothing.
    pub async fn create_vm(&mut self) -> anyhow::Result<String> {
        self.before = self.inspect()?;
        let shim = self.shim.insert(self.daemons.as_ref().context("the daemons run")?.shim().await?);
        let annotations = Annotations::new(NAMESPACE, POD).size("1.5", 512);
        let netns = self.pods.as_ref().context("the pods are made")?.0.namespace().path();
        self.socket = shim.create_vm(&self.id, annotations.clone(), &netns).await?;
        let again = shim.create_vm(&self.id, annotations, &netns).await?;
        ensure!(
            again == self.socket,
            "CreateVM of a known id answers the same path, not {}",
            again.display()
        );
        let length = self.socket.as_os_str().len();
        ensure!(length < 108, "the agent's socket path has {length} bytes, which no socket can have");
        Ok(format!("agent socket {}", self.socket.display()))
    }

    /// Calls StartVM, and meanwhile GetInfo for the VM's name.
    pub async fn start_vm(&mut self) -> anyhow::Result<String> {
        let shim = self.shim()?;
        let (started, vm) = tokio::join!(
            tokio::time::timeout(BOOT_PATIENCE, shim.start_vm(&self.id)),
            shim.vm_id(NAMESPACE, POD, true, BOOT_PATIENCE),
        );
        started.with_context(|| format!("StartVM was not answered within {BOOT_PATIENCE:?}"))??;
        let vm = vm?;
        ensure!(!vm.is_empty(), "GetInfo names the VM");
        shim.start_vm(&self.id).await.context("StartVM a second time")?;
        Ok(format!("VM {vm}"))
    }

    /// Connects to the agent with two connections, and checks one of them.
    pub async fn connect_agent(&mut self) -> anyhow::Result<String> {
        let agent = self.agent.insert(AgentClient::connect(&self.socket).await?);
        let health = agent.check().await?;
        ensure!(health.status.value() == 1, "the agent reports that it serves: {health:?}");
        let version = agent.version().await?;
        Ok(format!("agent {}", version.agent_version))
    }

    /// Calls CreateSandbox, GetGuestDetails and GetOOMEvent (pending until the sandbox ends), and starts containerd's
    /// pause container.
    pub async fn create_sandbox(&mut self) -> anyhow::Result<String> {
        let agent = self.agent()?.clone();
        let mut request = CreateSandboxRequest::new();
        request.sandbox_id = self.id.clone();
        request.hostname = POD.into();
        request.dns = vec!["nameserver 10.96.0.10".into(), "search default.svc.cluster.local".into()];
        agent.create_sandbox(&request).await?;
        let details = agent.guest_details().await?;
        self.oom = Some(tokio::spawn({
            let agent = agent.clone();
            async move {
                // It ends only with the sandbox.
                drop(agent.oom_event().await);
            }
        }));
        let hosts = format!("127.0.0.1 localhost\n{} {POD}\n", self.pods()?.0.v4());
        agent
            .copy_file(&copy_file(&format!("{}-0123456789abcdef-hosts", self.id), 0o644, hosts.as_bytes()))
            .await?;
        let pause = ContainerSpec::new(&self.id, &["sleep", "infinity"]).sandbox();
        agent.create_container(&pause.request()).await?;
        agent.start_container(&self.id).await?;
        Ok(format!("agent handles {} kinds of storage", details.agent_details.storage_handlers.len()))
    }

    /// Copies the container's files, starts the container, and starts a page server in it.
    pub async fn run_container(&mut self) -> anyhow::Result<String> {
        let (agent, container) = (self.agent()?, &self.container);
        for (name, text) in
            [("hostname", "stages\n"), ("hosts", "127.0.0.1 localhost\n"), ("resolv.conf", "")]
        {
            let file = copy_file(&format!("{container}-0123456789abcdef-{name}"), 0o644, text.as_bytes());
            agent.copy_file(&file).await?;
        }
        let script = "echo hello; echo oops >&2; trap 'echo bye; exit 7' TERM; while :; do sleep 0.05; done";
        let request = ContainerSpec::new(container, &["/bin/sh", "-c", script])
            .env("POD=stages")
            .bind(
                &format!("{}/{container}-0123456789abcdef-hosts", peerpod_client::SHARED_CONTAINERS),
                "/etc/hosts",
            )
            .request();
        agent.create_container(&request).await?;
        agent.start_container(container).await?;
        let (out, error) =
            tokio::try_join!(agent.read_stdout(container, "", 8192), agent.read_stderr(container, "", 8192))?;
        ensure!(
            out.starts_with(b"hello\n"),
            "standard output begins with hello: {:?}",
            String::from_utf8_lossy(&out)
        );
        ensure!(error == b"oops\n", "standard error is oops: {:?}", String::from_utf8_lossy(&error));
        // Serves the pages that the other pod fetches; ends with the container.
        let server = exec_request(container, "page", &["peerpod-test-tool", "page", &PAGE_PORT.to_string()]);
        agent.exec_process(&server).await?;
        let out = agent.read_stdout(container, "page", 8192).await?;
        ensure!(
            out.starts_with(b"listening"),
            "the page server listens: {:?}",
            String::from_utf8_lossy(&out)
        );
        Ok("hello on stdout, oops on stderr".into())
    }

    /// Runs a command in the container and checks its exit code, then the statistics for the kubelet.
    pub async fn exec(&mut self) -> anyhow::Result<String> {
        let (agent, container) = (self.agent()?, &self.container);
        let script = "cat /proc/net/dev | grep -c eth0; echo to-stderr >&2; exit 3";
        let output = agent.exec(&exec_request(container, "exec-1", &["/bin/sh", "-c", script])).await?;
        ensure!(output.status == 3, "the exit code is 3: {output:?}");
        ensure!(
            output.stdout == b"1\n" && output.stderr == b"to-stderr\n",
            "it finds the pod's eth0: {output:?}"
        );
        let late = agent.signal_process(container, "exec-1", 9).await;
        ensure!(
            late.is_err_and(|error| error.answer() == "InvalidExecId"),
            "an exec that was waited for is unknown"
        );
        let stats = agent.stats_container(container).await?;
        ensure!(
            stats.network_stats.iter().any(|interface| interface.name == "eth0"),
            "statistics name eth0: {stats}"
        );
        ensure!(agent.silent_is_quiet().await, "the second connection is open and silent");
        Ok("exit code 3, eth0 inside".into())
    }

    /// Sends bytes through shim connection, link and agent and back, and compares them as they come.
    pub async fn transfer(&mut self) -> anyhow::Result<String> {
        let (agent, container) = (self.agent()?, &self.container);
        let began = Instant::now();
        transfer(agent, container, "transfer", TRANSFER).await?;
        let rate = TRANSFER as f64 / (1 << 20) as f64 / began.elapsed().as_secs_f64();
        Ok(format!("equal; {rate:.0} MiB/s each way"))
    }

    /// Pings in both families, with small packets and with packets as large as the MTU permits.
    pub async fn ping_in(&mut self) -> anyhow::Result<String> {
        let (pod, other) = self.pods()?;
        let mut seen = Vec::new();
        for (address, full) in pod.addresses().into_iter().zip([1450 - 28, 1450 - 48]) {
            let from = other.namespace().clone();
            let took = spawn_blocking(move || {
                ping(&from, address, full, PATIENCE)?;
                ping(&from, address, 56, PATIENCE)
            });
            seen.push(format!("{address} {:.2} ms", took.await??.as_secs_f64() * 1e3));
        }
        Ok(seen.join(", "))
    }

    /// Fetches the page, which must name the other pod's address and not the node's address.
    pub async fn fetch_in(&mut self) -> anyhow::Result<String> {
        let (pod, other) = self.pods()?;
        for (to, asker) in pod.addresses().into_iter().zip(other.addresses()) {
            let from = other.namespace().clone();
            let address = SocketAddr::new(to, PAGE_PORT);
            let page = eventually("the page server answers", PATIENCE, async || {
                let from = from.clone();
                spawn_blocking(move || page::fetch(&from, address)).await.ok()?.ok()
            })
            .await?;
            ensure!(page == page::page_for(asker), "the page is for {asker}: {page:?}");
        }
        Ok(format!("for {} and {}", other.v4(), other.v6()))
    }

    /// Fetches a page outside from inside the VM. The traffic must pass through the pod's netns on the node, with the
    /// pod's address as its source.
    pub async fn fetch_out(&mut self) -> anyhow::Result<String> {
        let server = PageServer::start(self.pods()?.1.namespace())?;
        let (pod, other) = self.pods()?;
        let (agent, container) = (self.agent()?, &self.container);
        let came_before = pod.namespace().counters("pp-vx0")?.0;
        let left_before = pod.namespace().counters("eth0")?.1;
        for (index, (to, asker)) in other.addresses().into_iter().zip(pod.addresses()).enumerate() {
            let address = SocketAddr::new(to, server.port()).to_string();
            let request =
                exec_request(container, &format!("fetch-{index}"), &["peerpod-test-tool", "fetch", &address]);
            let output = agent.exec(&request).await?;
            let page = String::from_utf8_lossy(&output.stdout);
            ensure!(
                output.status == 0 && page == page::page_for(asker),
                "the page is for {asker}: {output:?}"
            );
        }
        ensure!(server.peers() == pod.addresses(), "the server's peers are {:?}", server.peers());
        // Both the tunnel device and eth0 of the pod's netns on the node carried at least one whole connection per
        // family.
        let came = pod.namespace().counters("pp-vx0")?.0 - came_before;
        let left = pod.namespace().counters("eth0")?.1 - left_before;
        ensure!(
            came >= TWO_CONNECTIONS,
            "the tunnel brought {came} bytes from the VM, less than two connections"
        );
        ensure!(
            left >= TWO_CONNECTIONS,
            "eth0 of the pod's netns sent {left} bytes, less than two connections"
        );
        self.page = Some(server);
        Ok(format!("{left} bytes by eth0 of the node's pod netns"))
    }

    /// Ends containers as the shim does: SIGTERM, the rest of the output, the exit code, SIGKILL, RemoveContainer.
    pub async fn remove_containers(&mut self) -> anyhow::Result<String> {
        let (agent, container) = (self.agent()?, &self.container);
        agent.signal_process(container, "", 15).await?;
        let output =
            tokio::time::timeout(PATIENCE, drain(agent, container)).await.context("the container ends")??;
        ensure!(output.1 == 7, "the exit code is 7, not {}", output.1);
        ensure!(output.0.ends_with(b"bye\n"), "it printed bye: {:?}", String::from_utf8_lossy(&output.0));
        agent.signal_process(container, "", 9).await?;
        agent.remove_container(container).await?;
        let gone = agent.remove_container(container).await;
        ensure!(gone.is_err(), "a removed container is unknown");
        agent.signal_process(&self.id, "", 9).await?;
        let status = agent.wait_process(&self.id, "").await?;
        ensure!(status == 137, "SIGKILL is exit code 137, not {status}");
        agent.remove_container(&self.id).await?;
        Ok("exit codes 7 and 137".into())
    }

    /// Calls StopVM three times in a row, each within one second; then closes the connections, as in the transcripts.
    pub async fn stop_vm(&mut self) -> anyhow::Result<String> {
        self.running = self.inspect()?;
        let entry = self.daemons()?.ledger()?.into_iter().find(|entry| entry.id == self.id);
        let entry = entry.context("the ledger has the running sandbox")?;
        self.inside = entry.stages();
        let more = self.running.beyond(&self.before, None);
        ensure!(more.len() > 5, "the witnesses find a running pod: {more:?}");
        let shim = self.shim()?;
        let took = stop::promptly(shim, &self.id).await?;
        let seen: Vec<String> = took.iter().map(|it| format!("{:.1} ms", it.as_secs_f64() * 1e3)).collect();
        self.agent = None;
        self.shim = None;
        if let Some(oom) = self.oom.take() {
            // Its clone of the client still holds a connection.
            oom.abort();
        }
        Ok(format!("answered in {}; {} things to take away", seen.join(", "), more.len()))
    }

    /// Checks that `ip`, `tc`, `nft` and `/proc` show the same state as before CreateVM, and that a late CreateVM makes
    /// nothing.
    pub async fn nothing_is_left(&mut self) -> anyhow::Result<String> {
        let id = self.id.clone();
        let Some(daemons) = &self.daemons else { bail!("the daemons run") };
        daemons.gone(&id, PATIENCE).await?;
        let mut left = Vec::new();
        let clean = eventually("nothing is left", PATIENCE, async || {
            left = self.inspect().ok()?.beyond(&self.before, Some(&self.running));
            left.is_empty().then_some(())
        })
        .await;
        clean.with_context(|| format!("left over:\n{}", left.join("\n")))?;
        let shim = self.daemons()?.shim().await?;
        let netns = self.pods()?.0.namespace().path();
        let late = shim.create_vm(&self.id, Annotations::new(NAMESPACE, POD), &netns).await?;
        ensure!(late == self.socket, "a late CreateVM gets its path");
        let left = self.inspect()?.beyond(&self.before, None);
        ensure!(left.is_empty(), "a late CreateVM makes nothing, but there is {left:?}");
        Ok("no netns, link, qdisc, rule, process, socket, mount or live ledger entry".into())
    }
}

/// Sends `total` bytes through a `cat` in the container and back, and compares them as they come.
pub async fn transfer(agent: &AgentClient, container: &str, exec: &str, total: usize) -> anyhow::Result<()> {
    const PIECE: usize = 256 << 10;
    agent.exec_process(&exec_request(container, exec, &["cat"])).await?;
    let write = async {
        let mut source = Bytes::new();
        let mut left = total;
        while left > 0 {
            let piece = source.take(left.min(PIECE));
            let length = piece.len();
            let taken = agent.write_stdin(container, exec, piece).await?;
            ensure!(taken as usize == length, "WriteStdin took {taken} of {length} bytes");
            left -= length;
        }
        agent.write_stdin(container, exec, Vec::new()).await?;
        Ok(())
    };
    let read = async {
        let mut expected = Bytes::new();
        let mut seen = 0;
        loop {
            let data = agent.read_stdout(container, exec, 64 << 10).await?;
            if data.is_empty() {
                ensure!(seen == total, "{seen} of {total} bytes came back");
                return Ok(());
            }
            ensure!(data == expected.take(data.len()), "the bytes from {seen} on are others than were sent");
            seen += data.len();
        }
    };
    tokio::try_join!(write, read)?;
    let status = agent.wait_process(container, exec).await?;
    ensure!(status == 0, "cat ended with {status}");
    Ok(())
}

/// Reads the rest of the standard output, and returns it with the exit code.
async fn drain(agent: &AgentClient, container: &str) -> anyhow::Result<(Vec<u8>, i32)> {
    let mut all = Vec::new();
    loop {
        match agent.read_stdout(container, "", 8192).await? {
            data if data.is_empty() => break,
            data => all.extend(data),
        }
    }
    Ok((all, agent.wait_process(container, "").await?))
}

/// Byte stream without short repetitions, the same for every instance (xorshift).
struct Bytes(u64, Vec<u8>);

impl Bytes {
    fn new() -> Bytes {
        Bytes(0x9e37_79b9_7f4a_7c15, Vec::new())
    }

    fn take(&mut self, count: usize) -> Vec<u8> {
        let mut taken = std::mem::take(&mut self.1);
        while taken.len() < count {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            taken.extend_from_slice(&self.0.to_le_bytes());
        }
        self.1 = taken.split_off(count);
        taken
    }
}
