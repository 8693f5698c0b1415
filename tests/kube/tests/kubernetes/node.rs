//! The node: its control plane, its container runtime, kubelet and Peerpod's daemons.

use std::env;
use std::fs;
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::symlink;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use anyhow::{Context, ensure};
use hyper::Request;
use kube::Client;
use peerpod_test_kube::{Cluster, NODE, Options, Process, project, servers, wait_for};
use peerpod_world::{Daemons, LedgerEntry, Settings, World, eventually_blocking, share, slowness};
use serde_json::{Value, json};
use tokio::runtime::Handle;

use crate::audit;
use crate::cases::PAUSE;
use crate::clock::Clock;
use crate::dns;
use crate::images_common::{Image, Layer, LayerBuilder, PORT, Packing, Registry, Serving, digest};
use crate::metrics;

/// Address of the node.
pub(crate) const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 97, 1, 2);
/// Port of a second registry, which some cases start.
pub(crate) const SECOND: u16 = 5001;
/// Port of the registry that is slow for VMs.
pub(crate) const SLOW: u16 = 5002;
/// kubelet's `runtimeRequestTimeout` on a machine that is not busy, and its default. An image takes longer in one case.
const REQUEST_TIMEOUT: [Duration; 2] = [Duration::from_secs(60), Duration::from_secs(120)];
/// Time limit of the node's start.
const READY: Duration = Duration::from_secs(120);
/// Folder of Kata's shim, as Kata's releases have it.
const KATA_BIN: &str = "/opt/kata/bin";
/// Name of the shim, and of the link that containerd finds by the runtime's type.
const SHIM: [&str; 2] = ["containerd-shim-kata-v2", "containerd-shim-kata-remote-v2"];
/// Kata's configuration.
pub(crate) const KATA_FILE: &str = "/opt/kata/share/defaults/kata-containers/configuration-remote.toml";
const CONTAINERD_FILE: &str = "/etc/containerd/config.toml";

/// A program that can be started again.
struct Program {
    process: Process,
    path: PathBuf,
    words: Vec<String>,
}

impl Program {
    fn start(name: &str, path: &Path, words: Vec<String>, folder: &Path) -> anyhow::Result<Program> {
        let process = Process::start(name, path, &words, folder)?;
        Ok(Program { process, path: path.to_owned(), words })
    }
}

/// Folders of the node's programs.
pub(crate) struct Layout {
    is_harness: bool,
    /// State of containerd.
    containerd: PathBuf,
    kubelet: PathBuf,
    /// Folder of hypervisor.sock.
    run: PathBuf,
    /// Wall clock of the daemons, unless it is the kernel's.
    clock: Option<Clock>,
    /// kubelet's `runtimeRequestTimeout`.
    request_timeout: Duration,
}

impl Layout {
    /// Returns folders of the world, where the tests' harness starts the daemons.
    pub(crate) fn harness(world: &World) -> Layout {
        let at = |name: &str| world.folder().join(name);
        Layout {
            is_harness: true,
            containerd: at("containerd/state"),
            kubelet: at("kubelet"),
            run: at("run"),
            clock: None,
            request_timeout: REQUEST_TIMEOUT[usize::from(slowness() > 1.0)],
        }
    }

    /// Returns the same with a wall clock of the daemons that can be set.
    pub(crate) fn with_clock(self, world: &World) -> anyhow::Result<Layout> {
        Ok(Layout { clock: Some(Clock::new(world)?), ..self })
    }

    /// Returns the folders of users' nodes.
    pub(crate) fn chart() -> Layout {
        let [containerd, kubelet, run] =
            ["/run/containerd", "/var/lib/kubelet", "/run/peerpod"].map(PathBuf::from);
        let [_, request_timeout] = REQUEST_TIMEOUT;
        Layout { is_harness: false, containerd, kubelet, run, clock: None, request_timeout }
    }
}

/// A node whose processes end when it is dropped.
pub(crate) struct Node {
    // They end in this order.
    processes: Vec<Program>,
    /// Peerpod's daemons, unless the chart brings them.
    daemons: Option<Daemons>,
    clock: Option<Clock>,
    /// kubelet's `runtimeRequestTimeout`.
    pub(crate) request_timeout: Duration,
    /// Digest of the image with Busybox' commands.
    pub(crate) digest: String,
    registry: Registry,
    pub(crate) cluster: Cluster,
    client: Client,
    runtime: Handle,
    folder: PathBuf,
}

impl Node {
    /// Starts everything in this thread's network namespace, and waits until the node is ready. With the layout of
    /// [`Layout::harness`], the node has relay and node with the chart's rights and the local provider.
    pub(crate) async fn start(
        world: &World,
        layout: &Layout,
        more: &[(&str, &Image)],
    ) -> anyhow::Result<Node> {
        let folder = world.folder().to_owned();
        // Both ends are here: nothing is beyond the node, but it has an address and a default route.
        world.node().ip(&format!(
            "link add uplink type veth peer name eth0\nlink set uplink up\nlink set eth0 up\n\
             addr add {ADDRESS}/24 dev eth0\nroute add default via 10.97.1.1 dev eth0\n"
        ))?;
        syslog(&folder.join("shim.log"))?;
        let kata = unpack_kata(&folder)?;
        let at = SocketAddr::from((ADDRESS, PORT));
        let pause = fs::read(kata.join("pause_bundle/rootfs/pause"))?;
        let pause = LayerBuilder::new().file("pause", 0o755, &pause).build(Packing::Gzip);
        let pause = Image::configured(&[pause], |config| *config = json!({"Entrypoint": ["/pause"]}));
        let busybox = [busybox()];
        let of_busybox = Image::of(&busybox);
        let configured = Image::configured(&busybox, |config| {
            *config = json!({
                "Entrypoint": ["/bin/sh", "-c", format!("{PAUSE}; echo $KEY $PWD $(id -u) $0")],
                "Env": ["PATH=/bin", "KEY=value"], "WorkingDir": "/tmp", "User": "user",
            });
        });
        let etcd = Image::of(&[linked("/usr/bin/etcd")?]);
        let images = [
            ("pause:1", &pause),
            ("busybox:1", &of_busybox),
            ("configured:1", &configured),
            ("etcd:1", &etcd),
        ];
        let images = [&images, more].concat();
        let serving = Serving { at: Some(at), ..Serving::default() };
        let registry = tokio::task::block_in_place(|| Registry::start(&images, &serving));
        // All that the control plane writes is in memory here.
        let api_server = if layout.is_harness {
            metrics::API_SERVER.map(str::to_owned).to_vec()
        } else {
            audit::flags(&folder)?
        };
        let options = Options { controllers: vec!["*"], node: Some(ADDRESS), api_server };
        let cluster = Cluster::start(options).await?;
        let bundles = layout.containerd.join("io.containerd.runtime.v2.task/k8s.io");
        fs::create_dir_all(&bundles)?;
        share(&layout.kubelet)?;
        let mut processes = vec![containerd(&folder, layout, &at)?];
        // kubelet ends when it finds no container runtime.
        let socket = folder.join("containerd.sock");
        wait_for("containerd answers", READY, async || Ok(UnixStream::connect(&socket).ok())).await?;
        processes.extend(of_kubernetes(&folder, layout, &cluster)?);
        let daemons = if layout.is_harness {
            let settings = Settings::none()
                .set("node.name", NODE)
                .set("node.plain-http-registries", format!("{at},{ADDRESS}:{SECOND},{ADDRESS}:{SLOW}"))
                .set("relay.bundles", json!([bundles]))
                .set("provider.local.agent-binary", kata.join("agent").to_string_lossy());
            let settings = layout.clock.iter().fold(settings, |settings, clock| clock.settings(settings));
            Some(Daemons::start(world, settings).await?)
        } else {
            None
        };
        let client = cluster.client()?;
        dns::serve(ADDRESS, client.clone())?;
        let node = Node {
            processes,
            daemons,
            clock: layout.clock.clone(),
            request_timeout: layout.request_timeout,
            digest: digest(&of_busybox.manifest),
            registry,
            cluster,
            client,
            runtime: Handle::current(),
            folder,
        };
        if layout.is_harness {
            node.apply("", RUNTIME_CLASS)?;
        }
        wait_for("the node is ready", READY, async || {
            let words = ["wait", "--for=condition=Ready", "node", NODE, "--timeout=1s"];
            Ok(node.kubectl(&words).ok())
        })
        .await
        .with_context(|| node.tails())?;
        Ok(node)
    }

    /// Puts an image into the node's registry.
    pub(crate) fn store_image(&self, name: &str, layers: &[Layer]) {
        self.registry.add(name, &Image::of(layers));
    }

    /// Returns the log of the node's registry, with a line for each request.
    pub(crate) fn registry_log(&self) -> String {
        self.registry.log()
    }

    /// Lets containerd pull from a registry without TLS at this port of the node.
    pub(crate) fn trust(&self, port: u16) -> anyhow::Result<()> {
        trust(&self.folder, &SocketAddr::from((ADDRESS, port)))
    }

    /// Starts a second registry with one image, which may want a user and a password.
    pub(crate) fn second_registry(
        &self,
        name: &str,
        layers: &[Layer],
        secret: Option<(&str, &str)>,
    ) -> anyhow::Result<Registry> {
        self.trust(SECOND)?;
        let at = SocketAddr::from((ADDRESS, SECOND));
        let serving = Serving { at: Some(at), secret, ..Serving::default() };
        Ok(Registry::start(&[(name, &Image::of(layers))], &serving))
    }

    /// Kills a program of the node with SIGKILL, and starts it again.
    pub(crate) fn restart(&mut self, name: &str) -> anyhow::Result<()> {
        let program = self.processes.iter_mut().find(|program| program.process.name() == name);
        let program = program.with_context(|| format!("{name} does not run"))?;
        program.process.signal("KILL")?;
        program.process = Process::start(name, &program.path, &program.words, &self.folder)?;
        Ok(())
    }

    /// Kills the API server with SIGKILL, and starts it again.
    pub(crate) fn restart_api_server(&mut self) -> anyhow::Result<()> {
        self.runtime.block_on(self.cluster.restart_api_server())
    }

    /// Kills the API server with SIGKILL, and starts it again after this time.
    pub(crate) fn without_api_server(&mut self, time: Duration) -> anyhow::Result<()> {
        self.cluster.kill_api_server();
        std::thread::sleep(time);
        self.restart_api_server()
    }

    /// Kills etcd with SIGKILL, and starts it again.
    pub(crate) fn restart_etcd(&mut self) -> anyhow::Result<()> {
        self.runtime.block_on(self.cluster.restart_etcd())
    }

    /// Ends everything but the control plane and the pods' VMs, empties the folders that a reboot empties, and starts
    /// the programs again.
    pub(crate) fn reboot(&mut self) -> anyhow::Result<()> {
        let daemons = self.daemons.as_mut().context("the chart has the daemons")?;
        daemons.kill_node()?;
        daemons.kill_relay()?;
        let starts_again = |program: &&mut Program| program.process.name() != "kube-scheduler";
        for program in self.processes.iter_mut().filter(starts_again) {
            program.process.signal("KILL")?;
        }
        let done = Command::new("bash")
            .arg(project("tests/kube/tests/kubernetes/reboot.sh"))
            .arg(&self.folder)
            .output()?;
        ensure!(done.status.success(), "reboot.sh: {}", String::from_utf8_lossy(&done.stderr));
        let daemons = self.daemons.as_mut().context("the chart has the daemons")?;
        daemons.start_relay()?;
        daemons.start_node()?;
        for program in self.processes.iter_mut().filter(starts_again) {
            let name = program.process.name().to_owned();
            program.process = Process::start(&name, &program.path, &program.words, &self.folder)?;
            if name == "containerd" {
                let socket = self.folder.join("containerd.sock");
                eventually_blocking("containerd answers", READY, || UnixStream::connect(&socket).ok())?;
            }
        }
        self.runtime.block_on(daemons.ready())
    }

    /// Returns whether the daemons are the chart's: they know the API server, and their VMs are emulated.
    pub(crate) fn has_chart(&self) -> bool {
        self.daemons.is_none()
    }

    /// Returns the folder of the node's programs, which ends with the node.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the folder of the daemons' sockets.
    pub(crate) fn run_dir(&self) -> anyhow::Result<PathBuf> {
        Ok(self.daemons.as_ref().context("the chart has the daemons")?.run_dir())
    }

    /// Returns the folder of the daemons' state.
    pub(crate) fn state_dir(&self) -> anyhow::Result<PathBuf> {
        Ok(self.daemons.as_ref().context("the chart has the daemons")?.state_dir())
    }

    /// Returns the log of `relay`, which contains the guests' lines, or of `node`.
    pub(crate) fn log(&self, daemon: &str) -> anyhow::Result<String> {
        let daemons = self.daemons.as_ref().context("the chart has the daemons")?;
        Ok(fs::read_to_string(daemons.log(daemon))?)
    }

    /// Kills relay or node with SIGKILL, and starts it again.
    pub(crate) fn restart_daemon(&mut self, name: &str) -> anyhow::Result<()> {
        let daemons = self.daemons.as_mut().context("the chart has the daemons")?;
        if name == "node" {
            daemons.kill_node()?;
            daemons.start_node()?;
        } else {
            daemons.kill_relay()?;
            daemons.start_relay()?;
        }
        self.runtime.block_on(daemons.ready())
    }

    /// Returns the resident memory of relay and node in kB; 0 for one that does not run.
    pub(crate) fn sizes(&self) -> [u64; 2] {
        let pids = self.daemons.as_ref().map(|daemons| [daemons.relay_pid(), daemons.node_pid()]);
        pids.unwrap_or_default().map(|pid| {
            let status = fs::read_to_string(format!("/proc/{}/status", pid.unwrap_or_default())).ok();
            let line = status.and_then(|status| Some(status.split_once("VmRSS:")?.1.to_owned()));
            line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or_default()
        })
    }

    /// Returns the wall clock of relay and node, if it can be set.
    pub(crate) fn clock(&self) -> anyhow::Result<&Clock> {
        self.clock.as_ref().context("the daemons have the kernel's clock")
    }

    /// Returns the daemons' ledger of sandboxes.
    pub(crate) fn ledger(&self) -> anyhow::Result<Vec<LedgerEntry>> {
        match &self.daemons {
            Some(daemons) => daemons.ledger(),
            None => LedgerEntry::read(Path::new("/var/lib/peerpod")),
        }
    }

    /// Returns the output of kubectl; the caller's thread waits for it.
    pub(crate) fn kubectl(&self, words: &[&str]) -> anyhow::Result<String> {
        // The time limits of kubectl's own waits are later on a busy machine, too.
        let later = |word: &&str| {
            let seconds = word.strip_prefix("--timeout=").and_then(|limit| limit.strip_suffix('s'));
            match seconds.and_then(|seconds| seconds.parse::<f64>().ok()) {
                Some(seconds) => format!("--timeout={:.0}s", seconds * slowness()),
                None => (*word).to_owned(),
            }
        };
        let words: Vec<_> = words.iter().map(later).collect();
        self.cluster.kubectl(&words.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// Reads a path of the API server. The caller's thread has no runtime.
    pub(crate) fn read(&self, path: &str) -> anyhow::Result<Value> {
        read(&self.runtime, &self.client, path)
    }

    /// Fails if one of these events reports a failed sandbox by a deadline alone.
    pub(crate) fn no_bare_deadline(&self, path: &str) -> anyhow::Result<()> {
        let events = self.read(path)?;
        let messages = events["items"].as_array().into_iter().flatten();
        let of_sandboxes = messages.filter(|event| event["reason"] == "FailedCreatePodSandBox");
        let mut bare = of_sandboxes.filter(|event| is_bare(event["message"].as_str().unwrap_or_default()));
        ensure!(bare.next().is_none(), "an event FailedCreatePodSandBox has no cause but a deadline");
        Ok(())
    }

    /// Applies manifests in a namespace.
    pub(crate) fn apply(&self, namespace: &str, manifests: &str) -> anyhow::Result<()> {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let file = self.folder.join(format!("apply-{}.yaml", NEXT.fetch_add(1, Relaxed)));
        fs::write(&file, manifests)?;
        self.kubectl(&["apply", "--validate=false", "-n", namespace, "-f", &file.to_string_lossy()]).map(drop)
    }

    /// Returns a command that runs kubectl.
    pub(crate) fn kubectl_command(&self, words: &[&str]) -> anyhow::Result<Command> {
        let mut command = Command::new(servers()?);
        command.arg("kubectl").args(words);
        command.env("KUBECONFIG", self.cluster.folder().join("admin.kubeconfig"));
        Ok(command)
    }

    fn tails(&self) -> String {
        let said = self
            .processes
            .iter()
            .map(|Program { process, .. }| format!("--- {}\n{}", process.name(), process.last_lines()));
        said.collect::<Vec<_>>().join("\n")
            + &self.daemons.as_ref().map(Daemons::log_tails).unwrap_or_default()
    }

    /// Copies all logs to `target/kubernetes-logs`, because the node's files end with it.
    pub(crate) fn keep_logs(&self) {
        let to = project("target/kubernetes-logs");
        let _made = fs::create_dir_all(&to);
        for folder in [self.folder.as_path(), self.cluster.folder()] {
            for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
                if entry.path().extension().is_some_and(|extension| extension == "log") {
                    let _copied = fs::copy(entry.path(), to.join(entry.file_name()));
                }
            }
        }
        println!("logs: {}", to.display());
    }
}

/// Whether a message has no cause but a deadline: all else are the words of kubelet, containerd and gRPC.
fn is_bare(message: &str) -> bool {
    let Some(rest) = message.strip_suffix("context deadline exceeded") else { return false };
    rest.split(": ").all(|part| {
        let part = part.rsplit("desc = ").next().unwrap_or_default();
        let words =
            ["Failed to create pod sandbox", "rpc error", "failed to create", "failed to start sandbox"];
        part.is_empty() || words.iter().any(|word| part.starts_with(word))
    })
}

/// Reads a path of the API server. The caller's thread has no runtime.
pub(crate) fn read(runtime: &Handle, client: &Client, path: &str) -> anyhow::Result<Value> {
    let request = Request::get(path).body(Vec::new())?;
    Ok(runtime.block_on(client.request(request))?)
}

const RUNTIME_CLASS: &str = "{apiVersion: node.k8s.io/v1, kind: RuntimeClass, metadata: {name: kata-remote}, \
     handler: kata-remote}";

/// Unpacks Kata's programs from `KATA_DIR`. The shim goes to [`KATA_BIN`]; returns the folder of the others.
fn unpack_kata(folder: &Path) -> anyhow::Result<PathBuf> {
    let from =
        env::var_os("KATA_DIR").context("KATA_DIR is not set: see \"Kata's programs\" in CONTRIBUTING")?;
    let (from, to) = (PathBuf::from(from), folder.join("kata"));
    fs::create_dir(&to)?;
    let shim = Path::new(KATA_BIN).join(SHIM[0]);
    fs::create_dir_all(KATA_BIN)?;
    symlink(SHIM[0], Path::new(KATA_BIN).join(SHIM[1]))?;
    let script = "set -eu; cd \"$1\"\n\
         xz -dc \"$0/pause_bundle.tar.xz\" | tar -x; xz -dc \"$0/kata-agent.xz\" >pause_bundle/kata-agent\n\
         xz -dc \"$0/containerd-shim-kata-v2-go.xz\" >\"$2\"; chmod 755 pause_bundle/kata-agent \"$2\"";
    let done = Command::new("sh").args(["-c", script]).args([&from, &to, &shim]).output()?;
    ensure!(done.status.success(), "unpack {}: {}", from.display(), String::from_utf8_lossy(&done.stderr));
    // This program starts the agent (see `agent`).
    symlink(env::current_exe()?, to.join("agent"))?;
    Ok(to)
}

/// Appends everything that arrives at /dev/log to a file.
fn syslog(to: &Path) -> anyhow::Result<()> {
    let socket = UnixDatagram::bind("/dev/log").context("bind /dev/log")?;
    let mut file = fs::File::create(to)?;
    std::thread::spawn(move || {
        let mut buffer = vec![0; 64 << 10];
        while let Ok(length) = socket.recv(&mut buffer) {
            if file.write_all(&buffer[..length]).and_then(|()| file.write_all(b"\n")).is_err() {
                break;
            }
        }
    });
    Ok(())
}

/// Returns a layer with Busybox' commands and two users.
pub(crate) fn busybox() -> Layer {
    let program = fs::read("/bin/busybox").expect("busybox-static is installed by scripts/setup");
    let listed = Command::new("/bin/busybox").arg("--list").output().unwrap();
    let mut layer = LayerBuilder::new()
        .dir("bin/", 0o755)
        .file("bin/busybox", 0o755, &program)
        .dir("tmp/", 0o1777)
        .dir("root/", 0o700)
        .dir("etc/", 0o755)
        .file("etc/passwd", 0o644, b"root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/tmp:/bin/sh\n")
        .file("etc/group", 0o644, b"root:x:0:\nuser:x:1000:\n");
    for command in String::from_utf8(listed.stdout).unwrap().lines().filter(|command| *command != "busybox") {
        layer = layer.symlink(&format!("bin/{command}"), "busybox");
    }
    layer.build(Packing::Gzip)
}

/// Returns a layer with a program of the machine in its root, and the libraries that it needs.
fn linked(program: &str) -> anyhow::Result<Layer> {
    let listed = Command::new("ldd").arg(program).output()?;
    let listed = String::from_utf8(listed.stdout)?;
    let name = program.rsplit('/').next().context("a name")?;
    let mut layer = LayerBuilder::new().dir("tmp/", 0o1777).file(name, 0o755, &fs::read(program)?);
    for library in listed.split_whitespace().filter(|word| word.starts_with('/')) {
        layer = layer.file(library.trim_start_matches('/'), 0o755, &fs::read(library)?);
    }
    Ok(layer.build(Packing::Gzip))
}

/// Lets containerd pull from a registry without TLS.
fn trust(folder: &Path, registry: &SocketAddr) -> anyhow::Result<()> {
    let hosts = folder.join("hosts").join(registry.to_string());
    fs::create_dir_all(&hosts)?;
    let text = format!("[host.\"http://{registry}\"]\ncapabilities = [\"pull\", \"resolve\"]\n");
    Ok(fs::write(hosts.join("hosts.toml"), text)?)
}

/// Starts containerd with CNI's bridge and the runtime `kata-remote`, configured by the files that users get.
fn containerd(folder: &Path, layout: &Layout, registry: &SocketAddr) -> anyhow::Result<Program> {
    let at = |name: &str| folder.join(name).to_string_lossy().into_owned();
    trust(folder, registry)?;
    fs::create_dir(folder.join("cni"))?;
    let network = json!({
        "cniVersion": "0.4.0", "name": "node", "plugins": [{
            "type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true,
            "ipam": {
                "type": "host-local", "dataDir": at("ipam"),
                "ranges": [[{"subnet": "10.244.1.0/24"}], [{"subnet": "fd10:244:1::/64"}]],
                "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}],
            },
        }, {"type": "portmap", "capabilities": {"portMappings": true}}],
    });
    fs::write(folder.join("cni/node.conflist"), network.to_string())?;
    let shim = fs::read_to_string(project("deploy/kata/configuration-remote-go.toml"))?
        .replace("/run/peerpod", &layout.run.to_string_lossy())
        .replace("/var/lib/kubelet", &layout.kubelet.to_string_lossy());
    fs::create_dir_all(Path::new(KATA_FILE).parent().context("the folder of Kata's configuration")?)?;
    fs::write(KATA_FILE, shim)?;
    let runtime = fs::read_to_string(project("deploy/kata/containerd-1.toml"))?;
    let config = format!(
        "{runtime}\n\
         [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc]\nruntime_type = \"io.containerd.runc.v2\"\n\
         [plugins.\"io.containerd.grpc.v1.cri\"]\n\
         # The machine may lack CAP_SYS_RESOURCE.\nrestrict_oom_score_adj = true\nsandbox_image = \"{registry}/pause:1\"\n\
         [plugins.\"io.containerd.grpc.v1.cri\".cni]\nbin_dir = \"/usr/lib/cni\"\nconf_dir = \"{}\"\n\
         [plugins.\"io.containerd.grpc.v1.cri\".registry]\nconfig_path = \"{}\"\n\
         [plugins.\"io.containerd.internal.v1.opt\"]\npath = \"{}\"\n\
         [grpc]\naddress = \"{}\"\n",
        at("cni"),
        at("hosts"),
        at("containerd/opt"),
        at("containerd.sock"),
    );
    let config = config.replacen(
        "version = 2\n",
        &format!(
            "version = 2\nroot = \"{}\"\nstate = \"{}\"\n",
            at("containerd/root"),
            layout.containerd.display(),
        ),
        1,
    );
    fs::write(CONTAINERD_FILE, config)?;
    let path = format!("PATH={KATA_BIN}:{}", env::var("PATH").unwrap_or_default());
    let words = [&*path, "containerd", "--config", CONTAINERD_FILE].map(str::to_owned).to_vec();
    Program::start("containerd", Path::new("env"), words, folder)
}

/// Starts scheduler, kube-proxy and kubelet.
fn of_kubernetes(folder: &Path, layout: &Layout, cluster: &Cluster) -> anyhow::Result<Vec<Program>> {
    let servers = servers()?;
    let at = |name: &str| folder.join(name).to_string_lossy().into_owned();
    let of_cluster = |name: &str| cluster.folder().join(name).to_string_lossy().into_owned();
    let kubelet = json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
        "failCgroupV1": false, "cgroupDriver": "cgroupfs", "enforceNodeAllocatable": [], "failSwapOn": false,
        "evictionHard": {"memory.available": "10Mi"}, "makeIPTablesUtilChains": false,
        "containerRuntimeEndpoint": format!("unix://{}", at("containerd.sock")),
        "authentication": {"anonymous": {"enabled": false}, "webhook": {"enabled": true},
            "x509": {"clientCAFile": of_cluster("ca.crt")}},
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": of_cluster("node.crt"), "tlsPrivateKeyFile": of_cluster("node.key"),
        "clusterDNS": [ADDRESS], "clusterDomain": "cluster.local", "volumePluginDir": at("plugins"),
        "runtimeRequestTimeout": format!("{}s", layout.request_timeout.as_secs()),
        "syncFrequency": "5s", "configMapAndSecretChangeDetectionStrategy": "Watch",
    });
    fs::write(folder.join("kubelet.yaml"), kubelet.to_string())?;
    fs::write(folder.join("node.kubeconfig"), cluster.kubeconfig_of_node())?;
    let admin = format!("--kubeconfig={}", of_cluster("admin.kubeconfig"));
    let roles = [
        (
            "kube-scheduler",
            vec![admin.clone(), "--leader-elect=false".into(), "--bind-address=127.0.0.1".into()],
        ),
        (
            "kube-proxy",
            vec![
                admin,
                "--proxy-mode=nftables".into(),
                "--cluster-cidr=10.244.0.0/16".into(),
                format!("--hostname-override={NODE}"),
                "--conntrack-max-per-core=0".into(),
            ],
        ),
        (
            "kubelet",
            vec![
                format!("--config={}", at("kubelet.yaml")),
                format!("--root-dir={}", layout.kubelet.display()),
                format!("--kubeconfig={}", at("node.kubeconfig")),
                format!("--hostname-override={NODE}"),
                format!("--node-ip={ADDRESS}"),
                format!("--cert-dir={}", at("certificates")),
            ],
        ),
    ];
    let start = |(role, flags): (&str, Vec<String>)| {
        let words = [role.to_owned()].into_iter().chain(flags).collect();
        Program::start(role, &servers, words, folder)
    };
    roles.into_iter().map(start).collect()
}
