//! Tests peer pods on a real node: API server, scheduler, controller manager, kube-proxy and kubelet, containerd, Kata's
//! Go shim and agent, relay and node with the chart's rights, and VMs of the local provider.
//!
//! `KATA_DIR` names the folder of Kata's programs (see CONTRIBUTING). The test runs in namespaces of its own, which end
//! with it. It prints one line per case.

#![allow(clippy::unwrap_used)] // test code outside of test functions

mod agent;
mod audit;
mod cases;
mod chart;
mod churn;
mod clock;
mod dns;
mod faults;
#[path = "../../../tests/images_common/mod.rs"]
mod images_common;
mod left;
mod metrics;
mod node;
mod storage;

use std::env;
use std::process::{Command, ExitCode};
use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use peerpod_test_kube::{forget, report};
use peerpod_world::{World, slowness};

use self::cases::{CASES, Case, LONG_CASES, OF_SLICE, Run};
use self::node::{Layout, Node};

/// Set in the process that runs in the node's namespaces, to the name of one of [`PARTS`].
const INSIDE: &str = "PEERPOD_TEST_NODE";
/// The parts of the test, each with a node of its own, and how the names of their figures begin.
const PARTS: [(&str, &[&str]); 4] = [
    ("cases", &["kubernetes_cases_"]),
    (CHURN, &["churn_", "apply_to_running_local_"]),
    (FAULTS, &["kubernetes_faults_"]),
    (CHART, &["chart_", "apply_to_running_libvirt_"]),
];
const CHURN: &str = "churn";
const FAULTS: &str = "faults";
const CHART: &str = "chart";
/// Value of `PEERPOD_TEST_CASES` for the cases of [`OF_SLICE`].
const SLICE: &str = "slice";
/// Cases that run at once.
const AT_ONCE: usize = 8;
/// Time limit of the node's start on a machine that is not busy.
const NODE_READY: Duration = Duration::from_secs(40);

/// Whether the long forms are wanted.
fn is_long() -> bool {
    env::var_os("PEERPOD_TEST_LONG").is_some()
}

fn main() -> ExitCode {
    // The local provider starts this program as the VM's agent.
    let as_agent = match env::args().nth(1).as_deref() {
        Some("--config") => Some(agent::run()),
        Some(agent::ANSWER) => Some(agent::answer()),
        _ => None,
    };
    if let Some(Err(error)) = as_agent {
        eprintln!("{error:#}");
        return ExitCode::FAILURE;
    }
    let Ok(part) = env::var(INSIDE) else {
        if env::var_os("KATA_DIR").is_none() {
            println!("left out: KATA_DIR is not set (CONTRIBUTING.md, \"Kata's programs\")");
            return ExitCode::SUCCESS;
        }
        let us = env::current_exe().unwrap();
        let script = include_str!("outside.sh");
        let wanted = env::var("PEERPOD_TEST_PARTS").unwrap_or_default();
        let mut failed = Vec::new();
        for (part, keys) in PARTS.iter().filter(|(part, _)| part.contains(&wanted)) {
            // A part that fails early reports nothing.
            forget(keys).unwrap();
            let mut command = Command::new("sh");
            command.args(["-c", script, "sh"]).arg(&us).env(INSIDE, part);
            if !command.status().unwrap().success() {
                failed.push(*part);
            }
        }
        if !failed.is_empty() {
            eprintln!("failed parts: {}", failed.join(", "));
            return ExitCode::FAILURE;
        }
        return ExitCode::SUCCESS;
    };
    match inside(&part) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn inside(part: &str) -> anyhow::Result<bool> {
    let entered = Command::new("sh").args(["-c", include_str!("enter.sh")]).status()?;
    ensure!(entered.success(), "make the node's namespaces: {entered}");
    let world = World::bare()?;
    let node = world.node().clone();
    // Threads and processes that this thread starts are in the node's network, too.
    node.run(|| match part {
        CHART => chart::run(&world),
        CHURN => with_node(&world, &Layout::harness(&world), "", |node| churn::run(&node)),
        FAULTS => {
            faults::mount_state(&world)?;
            let layout = Layout::harness(&world).with_clock(&world)?;
            with_node(&world, &layout, "kubernetes_faults", |mut node| faults::run(&mut node))
        }
        _ => with_node(&world, &Layout::harness(&world), "kubernetes_cases", |node| {
            // The slice needs no volumes and no metrics.
            let is_slice = env::var("PEERPOD_TEST_CASES").is_ok_and(|wanted| wanted == SLICE);
            let mut programs = Vec::new();
            if !is_slice {
                programs = storage::start(&node, &world)?;
                programs.push(metrics::start(&node, world.folder())?);
            }
            let results = run(&node);
            drop(programs);
            results
        }),
    })?
}

/// Runs `part` on a node with the tests' daemons. It returns the numbers of what passed and of what failed, which are
/// reported under `name` unless that is empty.
fn with_node(
    world: &World,
    layout: &Layout,
    name: &str,
    part: impl FnOnce(Node) -> anyhow::Result<(usize, usize)>,
) -> anyhow::Result<bool> {
    let began = Instant::now();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let node = Node::start(world, layout, &[]);
    let node = runtime.block_on(node).context("start the node")?;
    let took = began.elapsed();
    println!("node ready after {:.1} s", took.as_secs_f64());
    ensure!(
        took < NODE_READY.mul_f64(slowness()),
        "the node took longer than {NODE_READY:?} on this machine"
    );
    let (passed, failed) = part(node)?;
    println!("{passed} passed, {failed} failed, {:.1} s", began.elapsed().as_secs_f64());
    if !name.is_empty() {
        report(&format!("{name}_passed"), passed as f64)?;
        report(&format!("{name}_total"), (passed + failed) as f64)?;
    }
    Ok(failed == 0)
}

fn run(node: &Node) -> anyhow::Result<(usize, usize)> {
    let wanted = env::var("PEERPOD_TEST_CASES").unwrap_or_default();
    // The longest first.
    let long = if is_long() { LONG_CASES } else { &[] };
    let all = long.iter().chain(CASES).enumerate();
    let cases = all.filter(|(_, (name, _))| match wanted.as_str() {
        SLICE => OF_SLICE.contains(name),
        wanted => name.contains(wanted),
    });
    let (cases, failed, passed) = (Mutex::new(cases), AtomicUsize::new(0), AtomicUsize::new(0));
    thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some((number, (name, run))) = next(&cases) {
                    let began = Instant::now();
                    let result = case(node, &format!("case-{number}"), *run);
                    let took = began.elapsed().as_secs_f64();
                    match result {
                        Ok(()) => {
                            passed.fetch_add(1, Relaxed);
                            println!("ok     {took:6.1} s  {name}");
                        }
                        Err(error) => {
                            failed.fetch_add(1, Relaxed);
                            println!("FAILED {took:6.1} s  {name}: {error:#}");
                        }
                    }
                }
            });
        }
    });
    let (passed, failed) = (passed.into_inner(), failed.into_inner());
    if failed > 0 {
        node.keep_logs();
    }
    Ok((passed, failed))
}

fn next<T>(cases: &Mutex<impl Iterator<Item = T>>) -> Option<T> {
    cases.lock().unwrap().next()
}

/// Runs one case in a Kubernetes namespace of its own.
fn case(node: &Node, namespace: &str, run: Run) -> anyhow::Result<()> {
    let case = Case::new(node, namespace)?;
    let result =
        run(&case).and_then(|()| node.no_bare_deadline(&format!("/api/v1/namespaces/{namespace}/events")));
    let result = result.map_err(|error| error.context(case.state()));
    // The case has its result already.
    let _deleted = node.kubectl(&["delete", "namespace", namespace, "--wait=false"]);
    result
}
