//! Helpers of the network tests: a sandbox in a pod that a CNI made, and the traffic that every pod must be able to
//! exchange, with or without a VM.

#![allow(unreachable_pub)] // a module of tests
use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use peerpod_client::{AgentClient, Annotations, ContainerSpec, ShimClient, exec_request};
use peerpod_podnet::netns::Netns;
use peerpod_proto::agent::CreateSandboxRequest;
use peerpod_tests::{CONTAINER, PATIENCE, fresh_id, long, stop_in_time};
use peerpod_world::Daemons;
use peerpod_world::cni::{Attached, Cluster};
use peerpod_world::traffic::{self, ECHO_PORT, Echo, LARGE_DATAGRAM};
use tokio::task::JoinSet;

/// MTU of the pod that the tunnel leaves of the cloud network's 1500 bytes.
pub const ROOM: u64 = 1450;

/// Running sandbox with one container, in any pod.
pub struct Vm {
    pub id: String,
    pub shim: ShimClient,
    pub agent: AgentClient,
    /// The pod's network namespace in the VM, which the container is in.
    pub inside: Netns,
}

impl Vm {
    pub async fn start(daemons: &Daemons, name: &str, netns: &Path) -> anyhow::Result<Vm> {
        Vm::boot(daemons, name, netns).await.with_context(|| daemons.log_tails())
    }

    async fn boot(daemons: &Daemons, name: &str, netns: &Path) -> anyhow::Result<Vm> {
        let id = fresh_id(name);
        let shim = daemons.shim().await?;
        let socket = shim.create_vm(&id, Annotations::new("default", &id), netns).await?;
        let started = tokio::time::timeout(PATIENCE, shim.start_vm(&id)).await;
        started.with_context(|| format!("StartVM of {id} was not answered within {PATIENCE:?}"))??;
        Vm::join(id, shim, socket).await
    }

    async fn join(id: String, shim: ShimClient, socket: PathBuf) -> anyhow::Result<Vm> {
        let agent = AgentClient::connect(&socket).await?;
        let mut request = CreateSandboxRequest::new();
        request.sandbox_id = id.clone();
        agent.create_sandbox(&request).await?;
        agent.create_container(&ContainerSpec::new(CONTAINER, &["sleep", "infinity"]).request()).await?;
        agent.start_container(CONTAINER).await?;
        let output =
            agent.exec(&exec_request(CONTAINER, "netns", &["readlink", "/proc/self/ns/net"])).await?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let inode = text.trim().strip_prefix("net:[").and_then(|rest| rest.strip_suffix(']')?.parse().ok());
        let inode = inode.with_context(|| format!("the container's namespace is {output:?}"))?;
        Ok(Vm { id, shim, agent, inside: netns_of(inode)? })
    }

    pub async fn stop(self, daemons: &Daemons) -> anyhow::Result<()> {
        stop_in_time(&self.shim, &self.id).await?;
        daemons.gone(&self.id, PATIENCE).await
    }
}

/// Opens a network namespace by a process that is in it: it has no name outside the VM.
fn netns_of(inode: u64) -> anyhow::Result<Netns> {
    for entry in fs::read_dir("/proc")?.flatten() {
        let path = entry.path().join("ns/net");
        // A process that ends meanwhile is not in the namespace.
        if fs::metadata(&path).is_ok_and(|found| found.ino() == inode) {
            return Ok(Netns::open(path)?);
        }
    }
    anyhow::bail!("no process is in the network namespace {inode}")
}

/// Network namespace of a pod's programs, and the largest packet that they send.
#[derive(Clone, Copy)]
pub struct Place<'a> {
    pub netns: &'a Netns,
    pub mtu: u64,
}

/// Places of the pods of a company, each in its VM or not.
#[derive(Clone, Copy)]
pub struct Places<'a> {
    pub pod: Place<'a>,
    pub near: Place<'a>,
    pub far: Place<'a>,
}

/// Pod and its peers.
pub struct Company<'a> {
    pub cluster: &'a Cluster,
    pub pod: &'a Attached,
    /// Another pod of its node.
    pub near: &'a Attached,
    /// Pod of another node.
    pub far: &'a Attached,
    /// Services in front of the pod and of its neighbour, one address per family.
    pub own: &'a [SocketAddr],
    pub others: &'a [SocketAddr],
}

impl Company<'_> {
    /// Returns the places of all pods in their namespaces on the nodes.
    pub fn without_vms(&self) -> Places<'_> {
        let mtu = self.cluster.shape.mtu;
        let [pod, near, far] = [self.pod, self.near, self.far].map(|pod| pod.namespace.netns());
        Places {
            pod: Place { netns: pod, mtu },
            near: Place { netns: near, mtu },
            far: Place { netns: far, mtu },
        }
    }

    /// Exchanges traffic between all pods, in all families, by address and by service. Packets are small, exactly as
    /// large as the MTU, and larger; there is one stream, and then many at once.
    pub async fn converse(&self, places: Places<'_>) -> anyhow::Result<()> {
        let all = |pod: &Attached| pod.addresses.iter().map(|(_, address)| *address).collect::<Vec<_>>();
        let (inside, beside, far) = (places.pod.netns, places.near.netns, places.far.netns);
        let echoes = [
            Echo::start(inside, &all(self.pod)).context("in the pod")?,
            Echo::start(beside, &all(self.near)).context("in its neighbour")?,
            Echo::start(far, &all(self.far)).context("in the pod far away")?,
        ];
        let mut talks = Talks::default();
        let like = |pod: &Attached, other: &IpAddr| {
            pod.primary().into_iter().find(|address| address.is_ipv4() == other.is_ipv4()).unwrap()
        };
        for pod in &self.pod.primary() {
            self.family(&mut talks, places, *pod, like(self.near, pod), like(self.far, pod));
        }
        for (service, own) in [(self.own, true), (self.others, false)] {
            for service in service {
                talks.tcp(&format!("the pod asks {service}"), inside, *service, None);
                talks.tcp(&format!("a neighbour asks {service}"), beside, *service, None);
                talks.tcp(&format!("the node asks {service}"), self.cluster.node(1).netns(), *service, None);
                if own {
                    talks.tcp(&format!("a pod far away asks {service}"), far, *service, None);
                    talks.udp(&format!("a neighbour sends to {service}"), beside, *service);
                }
            }
        }
        let first = self.pod.addresses[0].0.as_str();
        let more = |pod: &Attached| -> Vec<(String, IpAddr)> {
            pod.addresses.iter().filter(|(name, _)| name != first).cloned().collect()
        };
        for ((name, pod), (_, near)) in more(self.pod).into_iter().zip(more(self.near)) {
            let (pod_at, near_at) = (SocketAddr::new(pod, ECHO_PORT), SocketAddr::new(near, ECHO_PORT));
            talks.tcp_of(&format!("to the pod's {name}"), beside, near, pod_at);
            talks.tcp_of(&format!("from the pod's {name}"), inside, pod, near_at);
        }
        talks.all_succeed().await?;
        for echo in echoes {
            echo.end().await?;
        }
        Ok(())
    }

    fn family(&self, talks: &mut Talks, places: Places<'_>, pod: IpAddr, near: IpAddr, far: IpAddr) {
        let at = |address| SocketAddr::new(address, ECHO_PORT);
        let (inside, beside, away) = (places.pod.netns, places.near.netns, places.far.netns);
        talks.tcp("a neighbour asks the pod", beside, at(pod), Some(near));
        talks.tcp("a pod far away asks the pod", away, at(pod), Some(far));
        talks.tcp("the pod asks a neighbour", inside, at(near), Some(pod));
        talks.tcp("the pod asks one far away", inside, at(far), Some(pod));
        talks.tcp("the node probes the pod", self.cluster.node(1).netns(), at(pod), None);
        talks.tcp("the pod asks itself", inside, at(pod), Some(pod));
        for (name, from, to) in [
            ("a neighbour sends large datagrams", beside, pod),
            ("one far away sends large datagrams", away, pod),
            ("the pod sends large datagrams", inside, near),
            ("the pod sends large datagrams far away", inside, far),
        ] {
            talks.udp(name, from, at(to));
        }
        for (name, from, to, size) in [
            ("a neighbour pings the pod with whole packets", beside, pod, places.near.mtu),
            ("one far away pings the pod with whole packets", away, pod, places.far.mtu),
            ("the pod pings a neighbour with whole packets", inside, near, places.pod.mtu),
            ("the pod pings one far away with whole packets", inside, far, places.pod.mtu),
            ("the node pings the pod", self.cluster.node(1).netns(), pod, 84),
        ] {
            let from = from.clone();
            talks.add(name, to, async move { traffic::ping_whole(&from, to, size).await });
        }
        let bytes = if long() { 256 << 10 } else { 64 << 10 };
        for (name, from, to) in
            [("64 streams to the pod", beside, pod), ("64 streams from the pod far away", inside, far)]
        {
            let from = from.clone();
            talks.add(name, to, async move { traffic::streams(&from, at(to), 64, bytes).await });
        }
    }
}

/// Exchanges that run at once.
#[derive(Default)]
struct Talks(JoinSet<anyhow::Result<()>>);

impl Talks {
    fn add(
        &mut self,
        name: &str,
        to: IpAddr,
        talk: impl Future<Output = anyhow::Result<()>> + Send + 'static,
    ) {
        let name = format!("{name} ({to})");
        self.0.spawn(async move { talk.await.context(name) });
    }

    fn tcp(&mut self, name: &str, from: &Netns, to: SocketAddr, asker: Option<IpAddr>) {
        let from = from.clone();
        self.add(name, to.ip(), async move {
            let seen = traffic::tcp(&from, to, 200_000).await?;
            ensure!(asker.is_none_or(|asker| asker == seen), "it was asked by {seen}, not {asker:?}");
            Ok(())
        });
    }

    /// Connects from one of several addresses, which the server must see.
    fn tcp_of(&mut self, name: &str, from: &Netns, source: IpAddr, to: SocketAddr) {
        let from = from.clone();
        self.add(name, to.ip(), async move {
            let seen = traffic::tcp_of(&from, Some(source), to, 200_000).await?;
            ensure!(source == seen, "it was asked by {seen}, not {source}");
            Ok(())
        });
    }

    fn udp(&mut self, name: &str, from: &Netns, to: SocketAddr) {
        let from = from.clone();
        self.add(name, to.ip(), async move { traffic::udp(&from, to, LARGE_DATAGRAM).await });
    }

    async fn all_succeed(mut self) -> anyhow::Result<()> {
        let mut failed = Vec::new();
        while let Some(done) = self.0.join_next().await {
            if let Err(error) = done? {
                failed.push(format!("{error:#}"));
            }
        }
        ensure!(failed.is_empty(), "{} talks failed:\n{}", failed.len(), failed.join("\n"));
        Ok(())
    }
}
