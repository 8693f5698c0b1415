//! Compares the provider's VMs with the PeerPods, and the nodes with their heartbeats.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::{StreamExt, stream};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, ListParams, Preconditions};
use kube::runtime::events::EventType;
use kube::{Api, Resource, ResourceExt};
use peerpod_kube::client::{self, within};
use peerpod_kube::crds::PeerPod;
use peerpod_kube::lease::Term;
use peerpod_kube::{heartbeat, lease};
use tracing::{info, warn};

use super::facts::since_renewal;
use super::metrics::{Removal, count};
use super::orphan::{Beat, Claims, Look, Observation, Seen, Suspect, goes_with};
use super::{Vms, report};
use crate::controller::Context;

/// Objects per page.
const PAGE: u32 = 500;
/// How long the heartbeat of a node is kept that is gone with all its VMs and PeerPods.
const HEARTBEAT_KEPT: Duration = Duration::from_secs(24 * 3600);

/// Name of the heartbeats in the warnings of `/readyz`.
const HEARTBEATS: &str = "old-heartbeats";

pub(in crate::controller) async fn run(vms: Arc<Vms>, context: Context, term: Term) -> anyhow::Result<()> {
    // Each term starts without observations: a grace period counts one leader's observations.
    let mut sweep = Sweep { vms, context, term, seen: Seen::default(), told: HashSet::new() };
    loop {
        let began = Instant::now();
        match sweep.pass().await {
            Ok(()) => {
                sweep.vms.metrics.sweeps.inc();
                sweep.context.ready.ready("sweep");
            }
            Err(error) => {
                sweep.vms.metrics.sweeps_failed.inc();
                warn!(%error, "VMs and PeerPods could not be compared; trying again");
                sweep.context.ready.not_ready("sweep", &error.to_string());
            }
        }
        tokio::time::sleep(sweep.vms.config.sweep_every.saturating_sub(began.elapsed())).await;
        // A pass that takes longer than `SWEEP_EVERY` leaves no time to sleep; this keeps a short pause.
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

struct Sweep {
    vms: Arc<Vms>,
    context: Context,
    term: Term,
    seen: Seen,
    /// VMs that have been reported, so that each is logged once.
    told: HashSet<String>,
}

impl Drop for Sweep {
    fn drop(&mut self) {
        self.vms.metrics.unclaimed.set(0);
        self.vms.metrics.unattributed.set(0);
        self.context.ready.ready("sweep");
        self.context.ready.settled(HEARTBEATS);
    }
}

/// State of the cluster as far as the sweep needs it.
struct Cluster {
    claims: Claims,
    /// Nodes that PeerPods name.
    peerpods_of: HashSet<String>,
    nodes: HashSet<String>,
    leases: Vec<Lease>,
}

impl Sweep {
    async fn pass(&mut self) -> anyhow::Result<()> {
        // The order matters: a VM's PeerPod exists before the VM.
        let owned = self.vms.provider.list_owned().await?;
        let cluster = self.read().await?;
        let beats = beats(&cluster.leases);
        let inspect = Look {
            owned: &owned,
            claims: &cluster.claims,
            beats: &beats,
            nodes: &cluster.nodes,
            at: Instant::now(),
        };
        let config = &self.vms.config;
        let found =
            self.seen.inspect(&inspect, &cluster.peerpods_of, config.orphan_grace, config.node_gone_grace);
        self.count(&found);
        self.lost_nodes(&found.gone).await?;
        self.suspects(&found.suspects).await?;
        let kept: HashSet<&str> = owned.iter().filter_map(|vm| vm.node.as_deref()).collect();
        self.old_heartbeats(&cluster, &kept).await;
        Ok(())
    }

    fn count(&mut self, found: &Observation) {
        let number = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        self.vms.metrics.unclaimed.set(number(found.unclaimed));
        self.vms.metrics.unattributed.set(number(found.unattributed.len()));
        let there: HashSet<&str> = (found.suspects.iter().map(|suspect| suspect.id.as_str()))
            .chain(found.unattributed.iter().map(AsRef::as_ref))
            .collect();
        self.told.retain(|id| there.contains(id.as_str()));
        for vm in &found.unattributed {
            if self.told.insert(vm.to_string()) {
                warn!(%vm, "no PeerPod names this VM, and its node never had a daemon in this cluster: it is left alone");
            }
        }
    }

    async fn read(&self) -> Result<Cluster, client::Error> {
        let (mut claims, mut peerpods_of) = (Claims::default(), HashSet::new());
        let client = &self.context.client;
        let cluster_id = &self.vms.config.cluster_id;
        pages(Api::<PeerPod>::all(client.clone()), ListParams::default(), |peerpod| {
            claims.add(cluster_id, &peerpod.spec);
            peerpods_of.extend(peerpod.spec.node_name);
        })
        .await?;
        let mut leases = Vec::new();
        let api = Api::<Lease>::namespaced(client.clone(), &self.context.namespace);
        pages(api, ListParams::default(), |lease: Lease| {
            if heartbeat::node_of(&lease.name_any()).is_some() {
                leases.push(lease);
            }
        })
        .await?;
        let mut nodes = HashSet::new();
        let api = Api::<Node>::all(client.clone());
        let mut params = ListParams::default().limit(PAGE);
        loop {
            let page = within("list Nodes", api.list_metadata(&params)).await?;
            nodes.extend(page.items.iter().map(ResourceExt::name_any));
            match page.metadata.continue_.filter(|next| !next.is_empty()) {
                Some(next) => params = params.continue_token(&next),
                None => break,
            }
        }
        Ok(Cluster { claims, peerpods_of, nodes, leases })
    }

    async fn suspects(&mut self, suspects: &[Suspect]) -> anyhow::Result<()> {
        let mut may_run: HashMap<&str, bool> = HashMap::new();
        for Suspect { node, node_exists, .. } in suspects {
            if let Entry::Vacant(unknown) = may_run.entry(node) {
                unknown.insert(*node_exists && self.may_run(node).await?);
            }
        }
        let orphans: Vec<_> = suspects.iter().filter(|suspect| !may_run[suspect.node.as_str()]).collect();
        if !self.vms.config.delete_orphans {
            for orphan in orphans {
                if self.told.insert(orphan.id.to_string()) {
                    count(&self.vms.metrics.orphans, Removal::Reported);
                    self.say(orphan, "VMOrphaned", "is an orphan; controller.orphans: report leaves it")
                        .await;
                }
            }
            return Ok(());
        }
        let at_once = usize::from(self.vms.config.concurrency);
        stream::iter(orphans).for_each_concurrent(at_once, |orphan| self.delete(orphan)).await;
        Ok(())
    }

    /// Whether a pod that may have a VM is bound to the node.
    async fn may_run(&self, node: &str) -> Result<bool, client::Error> {
        let mut any = false;
        let bound = ListParams::default().fields(&format!("spec.nodeName={node}"));
        pages(Api::<Pod>::all(self.context.client.clone()), bound, |pod| {
            any |= pod.spec.is_some_and(|spec| spec.runtime_class_name.is_some());
        })
        .await?;
        Ok(any)
    }

    async fn delete(&self, orphan: &Suspect) {
        // Asks the API server: another leader has not yet waited for its own grace period.
        if let Err(error) = self.term.confirm().await {
            warn!(vm = %orphan.id, %error, "an orphan is left to the next leader");
            return;
        }
        match self.vms.provider.delete(&orphan.id).await {
            Ok(()) => {
                count(&self.vms.metrics.orphans, Removal::Deleted);
                self.say(orphan, "VMOrphanDeleted", "was an orphan and is deleted").await;
            }
            Err(error) => {
                count(&self.vms.metrics.orphans, Removal::Failed);
                let fate = format!("is an orphan and could not be deleted: {error}; trying again");
                self.say(orphan, "VMOrphanDeleteFailed", &fate).await;
            }
        }
    }

    async fn say(&self, orphan: &Suspect, reason: &str, fate: &str) {
        let Suspect { id, name, node, unclaimed_for, .. } = orphan;
        let called = name.as_ref().map(|name| format!(" ({name})")).unwrap_or_default();
        let minutes = unclaimed_for.as_secs().div_ceil(60);
        let note = format!("VM {id}{called} of node {node} {fate}: no PeerPod names it for {minutes} min");
        warn!(vm = %id, name, node, reason, "{note}");
        let mut regarding = Node::default();
        regarding.metadata.name = Some(node.clone());
        // The kubelet's own Events have the same form, so `kubectl describe node` shows them.
        regarding.metadata.uid = Some(node.clone());
        report::event(&self.context, &regarding, EventType::Warning, reason, &note).await;
    }

    /// Deletes the PeerPods of nodes that are gone; the finalizer then deletes their VMs.
    async fn lost_nodes(&self, gone: &HashSet<String>) -> anyhow::Result<()> {
        for node in gone {
            let mut lost = Vec::new();
            let of_node = ListParams::default().fields(&format!("spec.nodeName={node}"));
            pages(Api::<PeerPod>::all(self.context.client.clone()), of_node, |peerpod| {
                if goes_with(&peerpod, gone) {
                    lost.push(peerpod);
                }
            })
            .await?;
            let at_once = usize::from(self.vms.config.concurrency);
            stream::iter(&lost).for_each_concurrent(at_once, |peerpod| self.lose(node, peerpod)).await;
        }
        Ok(())
    }

    async fn lose(&self, node: &str, peerpod: &PeerPod) {
        let (name, namespace) = (peerpod.name_any(), peerpod.namespace().unwrap_or_default());
        if self.term.check().is_err() {
            return;
        }
        let note = format!("node {node} is gone, and with it the pod that this VM was made for");
        report::event(&self.context, peerpod, EventType::Warning, "NodeGone", &note).await;
        let peerpods: Api<PeerPod> = Api::namespaced(self.context.client.clone(), &namespace);
        let same = Preconditions { uid: peerpod.uid(), resource_version: None };
        let delete = DeleteParams::default().preconditions(same);
        let deleted = within(format!("delete PeerPod {namespace}/{name}"), peerpods.delete(&name, &delete));
        match deleted.await {
            Ok(_) => {
                info!(node, peerpod = format!("{namespace}/{name}"), "PeerPod of a lost node deleted");
                count(&self.vms.metrics.lost, Removal::Deleted);
            }
            Err(error) if error.is_not_found() || error.is_conflict() => {}
            Err(error) => {
                warn!(node, %error, "a PeerPod of a lost node stays; trying again");
                count(&self.vms.metrics.lost, Removal::Failed);
            }
        }
    }

    /// Deletes the heartbeats of nodes that have long been gone and have no PeerPods or VMs. `kept` are nodes that
    /// still have VMs. A failure does no harm: `/readyz` warns of it, and the VMs are managed as before.
    async fn old_heartbeats(&self, cluster: &Cluster, kept: &HashSet<&str>) {
        let mut stays = None;
        let now = Timestamp::now();
        for lease in &cluster.leases {
            let name = lease.name_any();
            let Some(node) = heartbeat::node_of(&name) else { continue };
            let needed =
                cluster.nodes.contains(node) || cluster.peerpods_of.contains(node) || kept.contains(node);
            let is_old = since_renewal(lease, now).is_some_and(|age| age > HEARTBEAT_KEPT);
            if needed || !is_old || self.term.check().is_err() {
                continue;
            }
            let leases: Api<Lease> = Api::namespaced(self.context.client.clone(), &self.context.namespace);
            let same = Preconditions { uid: lease.uid(), resource_version: lease.resource_version() };
            let delete = DeleteParams::default().preconditions(same);
            match within(format!("delete lease {name}"), leases.delete(&name, &delete)).await {
                Ok(_) => {
                    count(&self.vms.metrics.heartbeats, Removal::Deleted);
                    info!(node, "the heartbeat of a node that is long gone is removed");
                }
                // Another writer removed it, or the node is back.
                Err(error) if error.is_not_found() || error.is_conflict() => {}
                Err(error) => {
                    count(&self.vms.metrics.heartbeats, Removal::Failed);
                    warn!(node, %error, "the heartbeat of a node that is long gone stays; trying again");
                    stays = Some(error);
                }
            }
        }
        match stays {
            Some(error) => self.context.ready.warn(HEARTBEATS, &error.to_string()),
            None => self.context.ready.settled(HEARTBEATS),
        }
    }
}

fn beats(leases: &[Lease]) -> HashMap<String, Beat> {
    let beat = |lease: &Lease| {
        let node = heartbeat::node_of(&lease.name_any())?.to_owned();
        let version =
            format!("{}/{}", lease.uid().unwrap_or_default(), lease.resource_version().unwrap_or_default());
        Some((node, Beat { version, lasts: lease::lasts(lease).unwrap_or_default() }))
    };
    leases.iter().filter_map(beat).collect()
}

/// Reads all objects page by page. Each page has its own deadline.
async fn pages<K>(api: Api<K>, params: ListParams, mut each: impl FnMut(K)) -> Result<(), client::Error>
where
    K: Resource<DynamicType = ()> + Clone + std::fmt::Debug + serde::de::DeserializeOwned,
{
    let mut params = params.limit(PAGE);
    loop {
        let page = within(format!("list {}", K::plural(&())), api.list(&params)).await?;
        page.items.into_iter().for_each(&mut each);
        match page.metadata.continue_.filter(|next| !next.is_empty()) {
            Some(next) => params = params.continue_token(&next),
            None => return Ok(()),
        }
    }
}
