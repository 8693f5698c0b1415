//! Injects faults into a node, its VMs and their network.

use std::fs;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use peerpod_client::{AgentClient, ContainerSpec, Error, exec_request};
use peerpod_proto::agent::CreateSandboxRequest;
use peerpod_test_kube::wait_for;
use peerpod_tests::of_image;
use peerpod_world::{Daemons, Settings, Sight, binary};
use rustls::ServerConfig;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_rustls::TlsAcceptor;

use super::super::images_common::{Registry, Serving, ordinary};
use super::super::node_common::{LIMIT, NODE, Rig, Running, vm_in};
use super::{Texts, away, describe, refused};

/// Program of the VMs' pid 1, which injects faults inside.
const IN_VM: &str = include_str!("vm.sh");
/// Longer than a guest waits before it reports that no DHCP server answers.
const BOOT: &str = "18s";
/// Time for which the API server is away: longer than one that is not worth an Event.
const AWAY: Duration = Duration::from_secs(6);
/// Ports of the registries, without and with a password.
const REGISTRIES: [u16; 2] = [5000, 5001];
/// Port of the server that is not the relay.
const OTHER_SERVER: u16 = 19_999;

/// Injects all faults. Those that only fail a start wait for its end together.
pub(super) async fn all() -> Texts {
    let folder = Folder::new();
    let registries = REGISTRIES.map(|port| SocketAddr::from(([10, 99, 0, 1], port)));
    let settings = Settings::none()
        .set("node.boot-timeout", BOOT)
        .set("node.slow-after", "3s")
        .set("node.vm-gone-grace", "1s")
        .set("node.netns-gone-grace", "1s")
        .set("node.plain-http-registries", registries.map(|one| one.to_string()).to_vec());
    let settings = folder.settings(settings);
    let mut rig = Rig::start(settings).await;
    rig.daemons().await;
    let (held, starts) = held(&rig, &folder).await;
    let kubeconfig = rig.cluster.folder().join("node.kubeconfig");
    let (mut texts, ends, refusals, away) = tokio::join!(
        running(&rig, held, registries),
        ends(&rig),
        refused::all(&rig, &kubeconfig),
        away::all(&rig, &kubeconfig, &folder)
    );
    for more in [ends, refusals, away] {
        texts.0.extend(more.0);
    }
    for (fault, uid, id, start) in starts {
        let error = start.await.unwrap().unwrap_err().to_string();
        let (event, _) = rig.event(&uid, "StartFailed").await;
        texts.add(fault, event, Some(error), describe(&rig.daemons, &id));
    }
    api_server_gone(&mut rig, &mut texts).await;
    texts
}

/// Folder of the VMs' programs. The VMs see its subfolder at `/pause_bundle`.
pub(super) struct Folder(PathBuf);

impl Folder {
    fn new() -> Folder {
        let folder = std::env::temp_dir().join(format!("peerpod-faults-{}", std::process::id()));
        fs::create_dir_all(folder.join("pause_bundle")).unwrap();
        fs::copy(binary("peerpod-guest").unwrap(), folder.join("pause_bundle/peerpod-guest")).unwrap();
        fs::copy(binary("peerpod-pull").unwrap(), folder.join("pause_bundle/peerpod-pull")).unwrap();
        symlink(binary("peerpod-pull").unwrap(), folder.join("peerpod-pull")).unwrap();
        symlink(binary("peerpod-test-agent").unwrap(), folder.join("kata-agent")).unwrap();
        fs::write(folder.join("peerpod-guest"), IN_VM).unwrap();
        fs::set_permissions(folder.join("peerpod-guest"), fs::Permissions::from_mode(0o755)).unwrap();
        Folder(folder)
    }

    /// Lets the local provider use the folder's programs.
    pub(super) fn settings(&self, settings: Settings) -> Settings {
        let path = |name: &str| self.0.join(name).to_string_lossy().into_owned();
        settings
            .set("provider.local.guest-binary", path("peerpod-guest"))
            .set("provider.local.agent-binary", path("kata-agent"))
    }

    /// Lets VMs boot that wait for this file.
    pub(super) fn go(&self, name: &str) {
        fs::write(self.0.join("pause_bundle").join(name), "").unwrap();
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).ok();
    }
}

/// A start that fails: fault, UID of the pod, id of the sandbox, and the call.
type Start = (&'static str, String, String, JoinHandle<Result<(), Error>>);

/// Makes pods with VMs that wait, puts the faults in the VMs' way, and lets them boot. Returns the pod that starts
/// nevertheless, with its UID, and the starts that fail.
async fn held(rig: &Rig, folder: &Folder) -> ((String, Running), Vec<Start>) {
    let failing = [
        ("the node's firewall drops the guests' port", "held-dropped"),
        ("the node's firewall rejects the guests' port", "held-rejected"),
        ("the VM has the wrong security group", "held-group"),
        ("the VM's network has no DHCP server", "held-dhcp"),
        ("another server has the node's address, or the node another CA", "held-ca"),
        ("the VM's clock is wrong", "held-clock"),
    ];
    let all: Vec<_> = failing.into_iter().chain([("the path drops large packets", "held-narrow")]).collect();
    let uids: Vec<String> = all.iter().map(|(_, pod)| rig.pod(pod)).collect();
    let made = all.iter().map(|(_, pod)| async move {
        let running = rig.create(pod).await;
        obstruct(rig, pod, &located(&rig.daemons, &running.id).await, &running.id);
        running
    });
    let mut starts = Vec::new();
    let mut kept = None;
    for (((fault, pod), uid), running) in all.iter().zip(uids).zip(join_all(made).await) {
        if *pod == "held-narrow" {
            kept = Some((uid, running));
            continue;
        }
        let id = running.id.clone();
        let start = async move {
            // Whole, with the pod's network.
            let running = running;
            running.shim.start_vm(&running.id).await
        };
        starts.push((*fault, uid, id, tokio::spawn(start)));
    }
    other_server(rig);
    folder.go("go");
    (kept.unwrap(), starts)
}

/// Returns the addresses of a sandbox's VM.
pub(super) async fn located(daemons: &Daemons, id: &str) -> Vec<IpAddr> {
    let found = wait_for("the VM's addresses", LIMIT, async || {
        let entry = daemons.ledger()?.into_iter().find(|entry| entry.id == id);
        let all: Vec<IpAddr> = entry
            .and_then(|entry| serde_json::from_value(entry.record["addresses"].clone()).ok())
            .unwrap_or_default();
        Ok(Some(all).filter(|all| !all.is_empty()))
    });
    found.await.unwrap_or_else(|error| panic!("{error}\n{}", daemons.log_tails()))
}

/// Adds the rules of a fault in the network for a VM with these addresses.
fn obstruct(rig: &Rig, pod: &str, addresses: &[IpAddr], id: &str) {
    let table = pod.replace('-', "_");
    let chain = |hook: &str, rule: &str| {
        let rules: Vec<String> = addresses
            .iter()
            .map(|address| {
                let family = if address.is_ipv6() { "ip6" } else { "ip" };
                format!("{family} saddr {address} {rule}\n")
            })
            .collect();
        format!("table inet {table} {{ chain c {{ type {hook}\n{}}}\n}}", rules.concat())
    };
    let rules = match pod {
        "held-dropped" => chain("filter hook input priority 0;", "tcp dport 15151 drop"),
        "held-rejected" => chain("filter hook input priority 0;", "tcp dport 15151 reject with tcp reset"),
        "held-ca" => {
            let rule = format!("tcp dport 15151 redirect to :{OTHER_SERVER}");
            chain("nat hook prerouting priority -100;", &rule)
        }
        "held-narrow" => {
            chain("filter hook prerouting priority -310;", "meta l4proto udp meta length > 1400 drop")
        }
        // At the VM's NIC, like a cloud's security group.
        "held-group" => {
            let vm = vm_in(&rig.daemons, id).unwrap();
            let nic = format!("ppl{}", &vm.trim_start_matches("local-")[..12]);
            format!(
                "table netdev {table} {{ chain c {{ type filter hook ingress device \"{nic}\" priority 0;\n\
                 meta l4proto tcp drop\n}}\n}}"
            )
        }
        _ => return,
    };
    rig.world.node().shell(&format!("nft -f - <<'EOF'\n{rules}\nEOF\n"), &[]).unwrap();
}

/// Serves TLS with a certificate of its own, beside the relay.
fn other_server(rig: &Rig) {
    let made = rcgen::generate_simple_self_signed(vec!["other".to_owned()]).unwrap();
    let key = rustls_pki_types::PrivateKeyDer::try_from(made.signing_key.serialize_der()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![made.cert.der().clone()], key)
        .unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let bind = || TcpListener::bind((Ipv6Addr::UNSPECIFIED, OTHER_SERVER));
    let listener = rig.world.node().run(bind).unwrap().unwrap();
    listener.set_nonblocking(true).unwrap();
    let listener = tokio::net::TcpListener::from_std(listener).unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(acceptor.accept(stream));
        }
    });
}

/// Injects faults of pods that run.
async fn running(rig: &Rig, (uid, narrow): (String, Running), registries: [SocketAddr; 2]) -> Texts {
    let mut texts = Texts::default();
    let started = timeout(LIMIT, narrow.shim.start_vm(&narrow.id)).await;
    started.unwrap_or_else(|_| panic!("{}", rig.daemons.log_tails())).unwrap();
    let (event, _) = rig.event(&uid, "NarrowPath").await;
    texts.add("the path drops large packets", event, None, describe(&rig.daemons, &narrow.id));

    let image = ordinary();
    let netns = Some(rig.world.node().name());
    let secrets = [None, Some(("pod", "geheim"))];
    let _registries: Vec<Registry> = tokio::task::block_in_place(|| {
        let both = registries.into_iter().zip(secrets);
        let start = |(at, secret)| {
            Registry::start(
                &[("team/app:v1", &image)],
                &Serving { secret, at: Some(at), netns, ..Serving::default() },
            )
        };
        both.map(start).collect()
    });
    for (fault, pod, registry) in [
        ("the VM's disk is full", "disk", registries[0]),
        ("the pull secret is bad or missing", "secret", registries[1]),
    ] {
        let (uid, running, agent) = with_agent(rig, pod).await;
        let request = of_image(&format!("{registry}/team/app:v1"), "main", &["true"]);
        let error = agent.create_container(&request).await.unwrap_err().to_string();
        let (event, _) = rig.event(&uid, "GuestNote").await;
        texts.add(fault, event, Some(error), describe(&rig.daemons, &running.id));
    }
    for (fault, pod) in [
        ("the kata-agent crashes", "crash"),
        ("the VM's kernel kills the kata-agent for lack of memory", "memory"),
    ] {
        let (uid, running, agent) = with_agent(rig, pod).await;
        agent.create_container(&ContainerSpec::new("main", &["sleep", "infinity"]).request()).await.unwrap();
        agent.start_container("main").await.unwrap();
        match pod {
            "crash" => {
                rustix::process::kill_process(agent_of(rig, pod), rustix::process::Signal::KILL).unwrap()
            }
            _ => exhaust_memory(rig, &running, &agent, pod).await,
        }
        let (event, _) = rig.event(&uid, "GuestNote").await;
        let request = exec_request("main", "after", &["true"]);
        let error = timeout(LIMIT, agent.exec(&request)).await.unwrap();
        texts.add(fault, event, Some(error.unwrap_err().to_string()), describe(&rig.daemons, &running.id));
    }
    texts
}

/// Starts a pod. Returns its UID, the sandbox, and its agent.
async fn with_agent(rig: &Rig, pod: &str) -> (String, Running, AgentClient) {
    let uid = rig.pod(pod);
    let running = rig.run(pod).await;
    let agent = AgentClient::connect(&rig.create_again(&running, pod).await.unwrap()).await.unwrap();
    let mut sandbox = CreateSandboxRequest::new();
    sandbox.sandbox_id = running.id.clone();
    agent.create_sandbox(&sandbox).await.unwrap();
    (uid, running, agent)
}

/// Returns the kata-agent of a pod's VM.
fn agent_of(rig: &Rig, pod: &str) -> rustix::process::Pid {
    let sight = Sight::of(&rig.world, &[], &rig.daemons).unwrap();
    let is_of_pod = |pid: &u32| {
        let name = fs::read_to_string(format!("/proc/{pid}/root/etc/hostname")).unwrap_or_default();
        name.starts_with(&format!("{pod}-"))
    };
    let found: Vec<u32> = sight.pids("kata-agent").into_iter().filter(is_of_pod).collect();
    assert_eq!(found.len(), 1, "{found:?}");
    rustix::process::Pid::from_raw(found[0] as i32).unwrap()
}

/// Limits the memory of a VM, and uses it up while the kernel prefers to kill the agent.
async fn exhaust_memory(rig: &Rig, running: &Running, agent: &AgentClient, pod: &str) {
    let script =
        "while [ ! -e /tmp/go ]; do sleep 0.05; done; head -c 400M /dev/zero | tail -c 400M >/dev/null";
    agent.exec_process(&exec_request("main", "fill", &["/bin/sh", "-c", script])).await.unwrap();
    let vm = vm_in(&rig.daemons, &running.id).unwrap();
    let limits = [format!("memory/peerpod-{vm}/memory.limit_in_bytes"), format!("peerpod-{vm}/memory.max")];
    let limit = limits.iter().map(|file| Path::new("/sys/fs/cgroup").join(file)).find(|file| file.exists());
    fs::write(limit.expect("the VM has a cgroup"), (96 << 20).to_string()).unwrap();
    // Processes that the agent starts from now on inherit the preference.
    let pid = agent_of(rig, pod).as_raw_nonzero();
    fs::write(format!("/proc/{pid}/oom_score_adj"), "1000").unwrap();
    // The ends of both depend on the process that the kernel kills first.
    drop(agent.exec(&exec_request("main", "go", &["touch", "/tmp/go"])).await);
    drop(timeout(LIMIT, agent.wait_process("main", "fill")).await.unwrap());
}

/// Injects faults that end a running sandbox.
async fn ends(rig: &Rig) -> Texts {
    let mut texts = Texts::default();
    let uid = rig.pod("netns");
    let running = rig.run("netns").await;
    running.network.namespace().delete().unwrap();
    let (event, _) = rig.event(&uid, "NetworkLost").await;
    let error = running.shim.start_vm(&running.id).await.unwrap_err().to_string();
    texts.add("the pod's network namespace is gone", event, Some(error), describe(&rig.daemons, &running.id));

    let uid = rig.pod("killed");
    let running = rig.run("killed").await;
    let vm = vm_in(&rig.daemons, &running.id).unwrap();
    let sight = Sight::of(&rig.world, &[], &rig.daemons).unwrap();
    let guests = sight.pids("peerpod-guest").into_iter().filter(|pid| {
        let name = fs::read_to_string(format!("/proc/{pid}/root/etc/hostname")).unwrap_or_default();
        name.starts_with("killed-")
    });
    for pid in guests {
        let pid = rustix::process::Pid::from_raw(pid as i32).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).ok();
    }
    let (event, _) = rig.event(&uid, "VMFailed").await;
    assert!(event.contains(&vm), "{event}");
    let error = running.shim.start_vm(&running.id).await.unwrap_err().to_string();
    texts.add("the VM is killed", event, Some(error), describe(&rig.daemons, &running.id));
    texts
}

async fn api_server_gone(rig: &mut Rig, texts: &mut Texts) {
    rig.daemons.ready().await.unwrap();
    rig.pod("away");
    let running = rig.run("away").await;
    rig.cluster.kill_api_server();
    let described = wait_for("a fault in describe", LIMIT, async || {
        let described = describe(&rig.daemons, &running.id);
        Ok(described.contains("api-server").then_some(described))
    });
    let described = described.await.unwrap();
    sleep_until(Instant::now() + AWAY).await;
    rig.cluster.restart_api_server().await.unwrap();
    let fields = format!("involvedObject.kind=Node,involvedObject.name={NODE},reason=ApiServerAway");
    let words =
        ["get", "events", "-n", "default", "--field-selector", &fields, "-o", "jsonpath={.items[*].message}"];
    let event = wait_for("an Event of the Node", LIMIT, async || {
        Ok(Some(rig.cluster.kubectl(&words).unwrap_or_default()).filter(|text| !text.is_empty()))
    });
    let event = event.await.unwrap_or_else(|error| panic!("{error}\n{}", rig.daemons.log_tails()));
    texts.add("the API server is away", event, None, described);
}
