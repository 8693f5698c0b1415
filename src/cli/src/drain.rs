//! `peerpod drain NODE`: cordons a node, and evicts its peer pods until their VMs are gone. It may change: the Node's
//! `spec.unschedulable`, and the node's peer pods, by the Eviction API. It deletes nothing.

mod pods;

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::bail;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{DeleteParams, EvictParams, Patch, PatchParams, Preconditions};
use kube::{Api, ResourceExt};
use peerpod_kube::client::{Error, within};
use serde::Serialize;
use serde_json::json;
use tokio::time::{Instant, sleep};

use crate::output::{Format, Output, Table, safe};
use crate::source::{Cluster, ClusterArgs};
use pods::{NodePod, Peers, find, kept};

/// Pause between two looks at the node.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// Pause between two evictions of a pod that a PodDisruptionBudget protects, as of `kubectl drain`.
const EVICT_AGAIN: Duration = Duration::from_secs(5);

/// Arguments of `peerpod drain`.
#[derive(Debug, clap::Args)]
pub(crate) struct DrainArgs {
    /// The node
    #[arg(value_name = "NODE")]
    node: String,
    #[command(flatten)]
    cluster: ClusterArgs,
    #[command(flatten)]
    output: Output,
    /// Longest time until all VMs are gone
    #[arg(long, value_name = "TIME", default_value = "15m", value_parser = crate::duration)]
    timeout: Duration,
    /// Evicts pods without a controller, too; nothing starts them again
    #[arg(long)]
    force: bool,
    /// Evicts pods with emptyDir volumes, too; the volumes' content ends with the pod
    #[arg(long)]
    delete_emptydir_data: bool,
}

/// State of a peer pod of the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    /// It must not be evicted, so nothing else is.
    Kept,
    /// Its eviction is refused now, as by a PodDisruptionBudget.
    Blocked,
    /// It ends, and its VM is there.
    Ending,
    /// Pod and VM are gone.
    Gone,
}

impl State {
    fn word(self) -> &'static str {
        match self {
            State::Kept => "kept",
            State::Blocked => "blocked",
            State::Ending => "ending",
            State::Gone => "gone",
        }
    }
}

/// A peer pod of the node.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Row {
    pod: String,
    vm: Option<String>,
    state: State,
    /// Reason of the state, if there is one.
    #[serde(skip_serializing_if = "String::is_empty")]
    cause: String,
}

/// Result of the command.
#[derive(Debug, Serialize)]
struct Drained {
    node: String,
    /// Whether the node has no peer pod and no VM of one.
    drained: bool,
    /// Whether the node takes no new pods.
    cordoned: bool,
    pods: Vec<Row>,
}

/// Drains the node and prints its peer pods. Exit code 1 if one is left.
pub(crate) async fn run(args: DrainArgs) -> anyhow::Result<ExitCode> {
    let cluster = args.cluster.open().await?;
    let mut drain = Drain {
        node: args.node.clone(),
        nodes: Api::all(cluster.client.clone()),
        cluster,
        // The API server asks for patience where a budget forbids an eviction: other pods must not wait for it.
        evictions: args.cluster.open_without_repeats().await?,
        is_cordoned: false,
        rows: BTreeMap::new(),
        tried: BTreeMap::new(),
        is_loud: matches!(args.output.format, Format::Table | Format::Wide),
    };
    let is_empty = drain.run(&args).await?;
    let drained = Drained {
        node: args.node,
        drained: is_empty,
        cordoned: drain.is_cordoned,
        pods: drain.rows.into_values().collect(),
    };
    args.output.print(&drained, |_| drained.text())?;
    Ok(if is_empty { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

struct Drain {
    node: String,
    nodes: Api<Node>,
    cluster: Cluster,
    /// The same cluster, by a client that returns each refusal at once.
    evictions: Cluster,
    is_cordoned: bool,
    /// The peer pods seen so far, by [`NodePod::key`].
    rows: BTreeMap<String, Row>,
    /// When the eviction of a pod was refused last, by UID.
    tried: BTreeMap<String, Instant>,
    /// Whether each change is printed to standard error.
    is_loud: bool,
}

impl Drain {
    /// Evicts until the node has no peer pod and no VM. Returns whether that is so.
    async fn run(&mut self, args: &DrainArgs) -> anyhow::Result<bool> {
        let deadline = Instant::now() + args.timeout;
        self.exists().await?;
        let peers = Peers::read(&self.cluster).await?;
        let first = find(&self.cluster, &self.node, &peers).await?;
        if self.keeps(&first, args) {
            return Ok(false);
        }
        self.cordon().await?;
        self.is_cordoned = true;
        loop {
            let found = match find(&self.cluster, &self.node, &peers).await {
                Ok(found) => found,
                // The API server may be away for a moment.
                Err(error) if Instant::now() < deadline && is_for_a_moment(&error) => {
                    sleep(LOOK_AGAIN).await;
                    continue;
                }
                Err(error) => return Err(error.context(self.stays_cordoned())),
            };
            self.mark_gone(&found);
            if found.is_empty() {
                return Ok(true);
            }
            if self.keeps(&found, args) {
                return Ok(false);
            }
            for one in &found {
                self.step(one).await;
            }
            if Instant::now() >= deadline {
                let (node, time) = (&self.node, args.timeout);
                eprintln!(
                    "peerpod: node {node} is not empty after {time:?}; it stays cordoned; run this again"
                );
                return Ok(false);
            }
            sleep(LOOK_AGAIN).await;
        }
    }

    async fn exists(&self) -> anyhow::Result<()> {
        let found = within(format!("look at node {}", self.node), self.nodes.get_opt(&self.node)).await?;
        if found.is_none() {
            bail!("the cluster has no node {}; `kubectl get nodes` lists them", self.node);
        }
        Ok(())
    }

    async fn cordon(&self) -> anyhow::Result<()> {
        let patch = Patch::Merge(json!({"spec": {"unschedulable": true}}));
        let params = PatchParams::default();
        within(format!("cordon node {}", self.node), self.nodes.patch(&self.node, &params, &patch)).await?;
        Ok(())
    }

    fn stays_cordoned(&self) -> String {
        format!("drain node {0}, which stays cordoned (`kubectl uncordon {0}`)", self.node)
    }

    /// Whether a pod must not be evicted.
    fn keeps(&mut self, found: &[NodePod], args: &DrainArgs) -> bool {
        let mut any = false;
        for one in found {
            if let Some(why) =
                one.evictable().and_then(|pod| kept(pod, args.force, args.delete_emptydir_data))
            {
                self.set(one, State::Kept, why);
                any = true;
            }
        }
        any
    }

    /// Evicts a pod that is not ending yet.
    async fn step(&mut self, one: &NodePod) {
        let Some(pod) = one.evictable() else {
            return self.set(one, State::Ending, String::new());
        };
        let uid = pod.uid().unwrap_or_default();
        if self.tried.get(&uid).is_some_and(|at| at.elapsed() < EVICT_AGAIN) {
            return;
        }
        match self.evict(pod).await {
            Ok(()) => self.set(one, State::Ending, String::new()),
            // It is gone, or another pod has its name: the next look shows that.
            Err(why) if why.is_not_found() || why.is_conflict() => {}
            Err(why) => {
                self.tried.insert(uid, Instant::now());
                self.set(one, State::Blocked, why.to_string());
            }
        }
    }

    async fn evict(&self, pod: &Pod) -> Result<(), Error> {
        let (namespace, name) = (pod.namespace().unwrap_or_default(), pod.name_any());
        let pods: Api<Pod> = Api::namespaced(self.evictions.client.clone(), &namespace);
        let same = Preconditions { uid: pod.uid(), resource_version: None };
        let delete_options = DeleteParams { preconditions: Some(same), ..DeleteParams::default() };
        let params = EvictParams { delete_options: Some(delete_options), ..EvictParams::default() };
        within(format!("evict pod {namespace}/{name}"), pods.evict(&name, &params)).await.map(drop)
    }

    /// Marks the pods that are no longer found.
    fn mark_gone(&mut self, found: &[NodePod]) {
        let present: Vec<&str> = found.iter().map(|one| &*one.key).collect();
        for (key, row) in &mut self.rows {
            if row.state != State::Gone && !present.contains(&&**key) {
                (row.state, row.cause) = (State::Gone, String::new());
                report(self.is_loud, row);
            }
        }
    }

    fn set(&mut self, one: &NodePod, state: State, cause: String) {
        // The VM stays in the row after its PeerPod is gone.
        let vm = one.vm.clone().or_else(|| self.rows.get(&one.key)?.vm.clone());
        let row = Row { pod: one.name.clone(), vm, state, cause };
        let before = self.rows.insert(one.key.clone(), row.clone());
        if before.is_none_or(|before| before.state != row.state) {
            report(self.is_loud, &row);
        }
    }
}

fn report(is_loud: bool, row: &Row) {
    if is_loud {
        let cause = if row.cause.is_empty() { String::new() } else { format!(": {}", row.cause) };
        eprintln!("{}", safe(&format!("{} {}{cause}", row.pod, row.state.word())));
    }
}

/// Whether the API server gave no answer, or refuses for now.
fn is_for_a_moment(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<Error>();
    error.is_some_and(|error| error.status().is_none_or(|status| status == 429 || status >= 500))
}

impl Drained {
    fn text(&self) -> String {
        let mut table = Table::new(&["POD", "VM", "STATE", "CAUSE"]);
        for row in &self.pods {
            table.row([
                row.pod.clone(),
                row.vm.clone().unwrap_or_default(),
                row.state.word().to_owned(),
                row.cause.clone(),
            ]);
        }
        let node = &self.node;
        let kept = self.pods.iter().any(|row| row.state == State::Kept);
        let end = match (self.drained, kept) {
            (true, _) => {
                format!("node {node} is cordoned and has no peer pods; afterwards: kubectl uncordon {node}")
            }
            (false, true) => {
                let cordoned = if self.cordoned { "is cordoned and" } else { "is not cordoned: it" };
                format!("node {node} {cordoned} has pods that must be kept, so no further pod is evicted")
            }
            (false, false) => format!("node {node} is cordoned and still has peer pods"),
        };
        if self.pods.is_empty() { format!("{end}\n") } else { format!("{table}{end}\n") }
    }
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;

    #[test]
    fn a_refusal_for_now_is_no_end() {
        let refused = |code| {
            let error = kube::Error::Api(Box::new(Status::failure("no", "No").with_code(code)));
            anyhow::Error::new(Error::Api { what: "list Pods".to_owned(), error })
        };
        for code in [429, 500, 503] {
            assert!(is_for_a_moment(&refused(code)), "{code}");
        }
        assert!(is_for_a_moment(&Error::Late("list Pods".to_owned()).into()));
        assert!(!is_for_a_moment(&refused(403)) && !is_for_a_moment(&anyhow::anyhow!("no")));
    }
}
