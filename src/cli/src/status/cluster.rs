//! State of a cluster: the controller's leader, the programs, the nodes with heartbeat and capacity, failing PeerPods.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::ResourceExt;
use kube::api::ListParams;
use peerpod_kube::heartbeat::node_of;
use serde::Serialize;

use super::{mark, relays};
use crate::output::{Table, safe};
use crate::source::{Cluster, RESOURCE, Source, since};

/// Lease of the controller's leader.
const CONTROLLER: &str = "peerpod-controller";
/// Failing PeerPods that the table shows.
const SHOWN: usize = 20;

/// State of a cluster.
#[derive(Debug, Serialize)]
pub(super) struct ClusterStatus {
    /// The Lease of the controller's leader.
    controller: Option<Holder>,
    /// Peerpod's own workloads.
    programs: Vec<Program>,
    nodes: Vec<NodeRow>,
    /// Number of PeerPods by phase.
    phases: BTreeMap<String, u64>,
    failing: Vec<Failing>,
}

#[derive(Debug, Serialize)]
struct Holder {
    name: String,
    renewed: Option<Timestamp>,
    /// Whether the Lease has not lapsed.
    fresh: bool,
}

#[derive(Debug, Serialize)]
struct Program {
    name: String,
    image: String,
    wanted: i32,
    ready: i32,
    /// Pods of the present revision; the others are behind.
    updated: i32,
}

#[derive(Debug, Serialize)]
struct NodeRow {
    name: String,
    heartbeat: Holder,
    /// VMs that the Node advertises; `None`: it advertises none.
    capacity: Option<String>,
    vms: usize,
    /// Whether the node's relay is of an older revision than its DaemonSet; `None`: it is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    relay_behind: Option<bool>,
}

#[derive(Debug, Serialize)]
struct Failing {
    pod: String,
    node: String,
    phase: String,
    cause: String,
}

pub(super) async fn ask(cluster: &Cluster) -> anyhow::Result<ClusterStatus> {
    let leases: Vec<Lease> = cluster.list("Leases", ListParams::default()).await?;
    let nodes: Vec<Node> = cluster.list("Nodes", ListParams::default()).await?;
    let mut programs: Vec<Program> = Vec::new();
    for set in cluster.ours::<DaemonSet>("DaemonSets").await? {
        let image = image(set.spec.as_ref().and_then(|spec| spec.template.spec.as_ref()));
        let status = set.status.clone().unwrap_or_default();
        let (wanted, ready) = (status.desired_number_scheduled, status.number_ready);
        let updated = status.updated_number_scheduled.unwrap_or_default();
        programs.push(Program { name: set.name_any(), image, wanted, ready, updated });
    }
    for one in cluster.ours::<Deployment>("Deployments").await? {
        let image = image(one.spec.as_ref().and_then(|spec| spec.template.spec.as_ref()));
        let status = one.status.clone().unwrap_or_default();
        let wanted = one.spec.as_ref().and_then(|spec| spec.replicas).unwrap_or(1);
        let (ready, updated) = (status.ready_replicas, status.updated_replicas);
        let (ready, updated) = (ready.unwrap_or_default(), updated.unwrap_or_default());
        programs.push(Program { name: one.name_any(), image, wanted, ready, updated });
    }
    let vms = Source::Cluster(cluster.clone()).list().await?;
    let mut phases = BTreeMap::new();
    vms.iter().for_each(|vm| *phases.entry(vm.phase.clone()).or_default() += 1);
    let failing = vms.iter().filter(|vm| vm.failed).map(|vm| Failing {
        pod: vm.pod.clone(),
        node: vm.node.clone(),
        phase: vm.phase.clone(),
        cause: vm.cause.clone().unwrap_or_default(),
    });
    let relays = relays::behind(cluster).await;
    let row = |lease: &Lease| {
        let name = node_of(lease.metadata.name.as_deref()?)?;
        let node = nodes.iter().find(|node| node.name_any() == name);
        let capacity = node.and_then(|node| node.status.as_ref()?.allocatable.as_ref()?.get(RESOURCE));
        Some(NodeRow {
            name: name.to_owned(),
            heartbeat: holder(lease),
            capacity: capacity.map(|quantity| quantity.0.clone()),
            vms: vms.iter().filter(|vm| vm.node == name).count(),
            relay_behind: relays.get(name).copied(),
        })
    };
    Ok(ClusterStatus {
        controller: leases.iter().find(|lease| lease.name_any() == CONTROLLER).map(holder),
        programs,
        nodes: leases.iter().filter_map(row).collect(),
        phases,
        failing: failing.collect(),
    })
}

fn image(pod: Option<&k8s_openapi::api::core::v1::PodSpec>) -> String {
    let container = pod.and_then(|spec| spec.containers.first());
    container.and_then(|container| container.image.clone()).unwrap_or_default()
}

fn holder(lease: &Lease) -> Holder {
    let spec = lease.spec.clone().unwrap_or_default();
    let renewed = spec.renew_time.map(|at| at.0);
    let lasts = SignedDuration::from_secs(spec.lease_duration_seconds.unwrap_or_default().into());
    let name = spec.holder_identity.unwrap_or_default();
    let fresh = renewed.is_some_and(|at| Timestamp::now().duration_since(at) < lasts);
    Holder { name, renewed, fresh }
}

impl Holder {
    fn text(&self) -> String {
        let age = self.renewed.map_or("never".to_owned(), |at| format!("{} ago", since(at)));
        mark(self.fresh, &age, &format!("lapsed, {age}"))
    }
}

impl ClusterStatus {
    pub(super) fn is_ready(&self) -> bool {
        let leads = self.controller.as_ref().is_some_and(|leader| leader.fresh && !leader.name.is_empty());
        let nodes = !self.nodes.is_empty() && self.nodes.iter().all(|node| node.heartbeat.fresh);
        leads && nodes && self.programs.iter().all(|one| one.ready >= one.wanted)
    }

    pub(super) fn text(&self, wide: bool) -> String {
        let mut text = String::new();
        let leader = match &self.controller {
            Some(leader) => format!("{}, renewed {}", leader.name, leader.text()),
            None => mark(false, "", "no controller has led yet"),
        };
        writeln!(text, "installation  {}", mark(self.is_ready(), "ready", "not ready")).ok();
        writeln!(text, "controller    {leader}").ok();
        let phases: Vec<String> =
            self.phases.iter().map(|(phase, count)| format!("{count} {phase}")).collect();
        let phases = if phases.is_empty() { "none".to_owned() } else { phases.join(", ") };
        writeln!(text, "peer pods     {phases}").ok();
        let mut programs = Table::new(&["PROGRAM", "READY", "BEHIND", "IMAGE"]);
        for one in &self.programs {
            let behind = (one.wanted - one.updated).max(0).to_string();
            programs.row([
                one.name.clone(),
                format!("{}/{}", one.ready, one.wanted),
                behind,
                one.image.clone(),
            ]);
        }
        let mut nodes = Table::new(&["NODE", "HEARTBEAT", "VMS", "CAPACITY", "RELAY"]);
        for node in &self.nodes {
            let capacity = node.capacity.clone().unwrap_or_default();
            let relay = node.relay_behind.map_or("", |behind| if behind { "behind" } else { "current" });
            let vms = node.vms.to_string();
            nodes.row([node.name.clone(), node.heartbeat.text(), vms, capacity, relay.to_owned()]);
        }
        write!(text, "\n{programs}\n{nodes}").ok();
        if !self.failing.is_empty() {
            let shown = if wide { usize::MAX } else { SHOWN };
            writeln!(text, "\nfailing ({}):", self.failing.len()).ok();
            for Failing { pod, node, phase, cause } in self.failing.iter().take(shown) {
                writeln!(text, "  {}", safe(&format!("{pod} on {node}, {phase}: {cause}"))).ok();
            }
        }
        text
    }
}
