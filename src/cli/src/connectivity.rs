//! `peerpod test`: starts pods in a namespace of its own, tests their connections, and removes the namespace, also after
//! a failure and on Ctrl-C. It may touch: that namespace, processes of kubectl, and a port on the loopback.

mod objects;
mod ways;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use k8s_openapi::api::core::v1::{Namespace, Node};
use kube::api::{DeleteParams, ListParams, PostParams, Preconditions};
use kube::{Api, ResourceExt};
use peerpod_kube::client::within;
use serde::Serialize;
use serde_json::{from_value, json};
use tokio::time::{Instant, sleep};

use crate::item::{Fault, Outcome, Verdict, failed};
use crate::output::{Colour, Format, Output, Table, paint, safe, say};
use crate::signals::{INTERRUPTED, Signals};
use crate::source::{Cluster, ClusterArgs};

/// Page with the remedies.
const PAGE: &str = "docs/troubleshooting.md#connectivity-tests";
/// Time limit of the namespace's removal, which waits for the VMs.
const REMOVAL: Duration = Duration::from_secs(600);
/// Pause between two looks at an object.
const LOOK_AGAIN: Duration = Duration::from_millis(500);
/// Most nodes with test pods.
const NODES: usize = 2;

/// Arguments of `peerpod test`.
#[derive(Debug, clap::Args)]
pub(crate) struct TestArgs {
    #[command(flatten)]
    cluster: ClusterArgs,
    #[command(flatten)]
    output: Output,
    /// The RuntimeClass of peer pods
    #[arg(long, value_name = "NAME", default_value = "kata-remote")]
    runtime_class: String,
    /// An image with Busybox' commands
    #[arg(long, value_name = "IMAGE", default_value = "registry.k8s.io/e2e-test-images/busybox:1.36.1-1")]
    image: String,
    /// Tests a volume of this StorageClass, too
    #[arg(long, value_name = "NAME")]
    storage_class: Option<String>,
    /// An address outside of the cluster that pods may reach by TCP
    #[arg(long, value_name = "HOST:PORT", default_value = "1.1.1.1:443")]
    egress: String,
    /// Longest time until a pod is ready
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = crate::duration)]
    timeout: Duration,
}

/// A node with peer pods.
#[derive(Clone, Debug)]
struct TestNode {
    name: String,
    /// Id of the boot of its kernel, as kubelet reports it.
    boot: String,
}

/// Result of one test.
#[derive(Debug, Serialize)]
struct Row {
    test: String,
    verdict: Verdict,
    took_ms: u64,
    /// Found state, or the cause of the fault.
    cause: String,
    /// Empty where there is nothing to do.
    #[serde(skip_serializing_if = "String::is_empty")]
    remedy: String,
}

/// All results, with their summary.
#[derive(Debug, Serialize)]
struct Results {
    namespace: String,
    tests: Vec<Row>,
    failed: usize,
}

/// The namespace with its pods.
struct Bench {
    cluster: Cluster,
    args: TestArgs,
    namespace: String,
    nodes: Vec<TestNode>,
    rows: Vec<Row>,
}

/// Runs the tests and prints a table. Exit codes: 0 no fault, 1 a fault, 130 interrupted.
pub(crate) async fn run(args: TestArgs) -> anyhow::Result<ExitCode> {
    let cluster = args.cluster.open().await?;
    let mut signals = Signals::new().context("take the signals")?;
    let nodes = nodes(&cluster).await?;
    let namespace = make_namespace(&cluster).await?;
    let output = args.output;
    let mut bench = Bench { cluster, args, namespace: namespace.name_any(), nodes, rows: Vec::new() };
    say!(stderr, "namespace {}, nodes {}", bench.namespace, bench.names_of_nodes());
    let interrupted = tokio::select! {
        biased;
        name = signals.next() => Some(name),
        () = bench.tests() => None,
    };
    if let Some(name) = interrupted {
        say!(stderr, "\n{name}: removing namespace {}", bench.namespace);
    }
    let began = Instant::now();
    let removed = bench.remove(&namespace).await;
    bench.record("clean-up", began, removed);
    let tests = bench.rows;
    let failed = tests.iter().filter(|row| row.verdict == Verdict::Failed).count();
    let results = Results { namespace: bench.namespace, tests, failed };
    output.print(&results, |_| results.text())?;
    Ok(match (interrupted, failed) {
        (Some(_), _) => ExitCode::from(INTERRUPTED),
        (None, 0) => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    })
}

/// Returns nodes on which peer pods can start.
async fn nodes(cluster: &Cluster) -> anyhow::Result<Vec<TestNode>> {
    let mut found: Vec<Node> = cluster.list("Nodes", ListParams::default()).await?;
    found.retain(|node| {
        let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
        let is_ready =
            conditions.into_iter().flatten().any(|one| one.type_ == "PeerPodsReady" && one.status == "True");
        is_ready && node.spec.as_ref().is_none_or(|spec| spec.unschedulable != Some(true))
    });
    if found.is_empty() {
        bail!(
            "no node that takes pods has the condition PeerPodsReady, so no pod was started; `peerpod status` and \
             `peerpod check` name the cause"
        );
    }
    let of = |node: &Node| {
        let info = node.status.as_ref().and_then(|status| status.node_info.as_ref());
        TestNode { name: node.name_any(), boot: info.map(|info| info.boot_id.clone()).unwrap_or_default() }
    };
    Ok(found.iter().take(NODES).map(of).collect())
}

async fn make_namespace(cluster: &Cluster) -> anyhow::Result<Namespace> {
    let namespaces: Api<Namespace> = Api::all(cluster.client.clone());
    // Its pods need no more than the strictest level of Pod Security permits.
    let namespace = from_value(json!({"metadata": {"generateName": "peerpod-test-",
        "labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}))?;
    Ok(within("make a namespace", namespaces.create(&PostParams::default(), &namespace)).await?)
}

impl Bench {
    fn names_of_nodes(&self) -> String {
        self.nodes.iter().map(|node| node.name.as_str()).collect::<Vec<_>>().join(", ")
    }

    /// Adds the result of a test that began then, and shows it.
    fn record(&mut self, test: &str, began: Instant, outcome: Outcome) {
        let (verdict, cause, remedy) = match outcome {
            Ok(found) => (Verdict::Ok, found, String::new()),
            Err(Fault { verdict, cause, remedy }) => (verdict, cause, remedy),
        };
        let took_ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
        let row = Row { test: test.to_owned(), verdict, took_ms, cause, remedy };
        if matches!(self.args.output.format, Format::Table | Format::Wide) {
            say!(stderr, "{}", safe(&format!("{} {test}: {}", row.verdict.sign(), row.cause)));
        }
        self.rows.push(row);
    }

    /// Deletes the namespace, and waits until it is gone: it stays while a PeerPod in it has a VM.
    async fn remove(&self, made: &Namespace) -> Outcome {
        let name = &self.namespace;
        let namespaces: Api<Namespace> = Api::all(self.cluster.client.clone());
        let same = Preconditions { uid: made.uid(), resource_version: None };
        let params = DeleteParams { preconditions: Some(same), ..DeleteParams::default() };
        let remedy = format!("kubectl delete namespace {name}; `peerpod list` names VMs that are left");
        let until = Instant::now() + REMOVAL;
        let mut is_deleted = false;
        loop {
            // One refusal must not leave the VMs behind, so each failed call is repeated.
            let mut failure = None;
            if !is_deleted {
                failure = within("delete the namespace", namespaces.delete(name, &params)).await.err();
                is_deleted = failure.is_none();
            }
            match within("look at the namespace", namespaces.get_opt(name)).await {
                Ok(found) if found.as_ref().is_none_or(|found| found.uid() != made.uid()) => {
                    return Ok(format!("namespace {name} and its VMs are gone"));
                }
                Ok(_) => {}
                Err(why) => failure = failure.or(Some(why)),
            }
            match failure {
                Some(why) if matches!(why.status(), Some(401 | 403)) || Instant::now() >= until => {
                    return failed(why.to_string(), remedy);
                }
                None if Instant::now() >= until => {
                    return failed(format!("namespace {name} is still there after {REMOVAL:?}"), remedy);
                }
                _ => sleep(LOOK_AGAIN).await,
            }
        }
    }
}

impl Results {
    fn text(&self) -> String {
        let mut table = Table::new(&["  TEST", "TIME", "RESULT"]);
        for row in &self.tests {
            let time = format!("{}.{} s", row.took_ms / 1000, row.took_ms % 1000 / 100);
            let test = format!("{} {}", row.verdict.sign(), row.test);
            table.row([test, time, row.cause.clone()]);
        }
        let mut text = format!("\n{table}");
        for row in self.tests.iter().filter(|row| !row.remedy.is_empty()) {
            text += &format!("\n{}: {}\n", row.test, safe(&row.remedy));
        }
        let end = format!("{} tests: {} faults", self.tests.len(), self.failed);
        let end = paint(if self.failed == 0 { Colour::Green } else { Colour::Red }, &end);
        let more = if self.failed == 0 { String::new() } else { format!("; see {PAGE}") };
        format!("{text}\n{end}{more}\n")
    }
}
