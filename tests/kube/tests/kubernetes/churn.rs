//! Many pods that come and go: all run, nothing is left, and the daemons do not grow.

use std::collections::BTreeMap;
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use peerpod_test_kube::report;
use peerpod_world::eventually_blocking;

use crate::cases::{Case, SLEEP, has_condition};
use crate::left::Listing;
use crate::node::Node;

/// Pods of a run, and of a long one.
const PODS: [usize; 2] = [50, 200];
const AT_ONCE: usize = 10;
/// Parts of the time from a pod's creation to its phase Running.
const SEEN: [&str; 3] = ["scheduled", "sandbox ready", "running"];
const PATIENCE: Duration = Duration::from_secs(120);

/// Makes and deletes the pods. Returns the numbers of those that ran and were deleted, and of the others.
pub(crate) fn run(node: &Node) -> anyhow::Result<(usize, usize)> {
    let count = PODS[usize::from(crate::is_long())];
    let sizes = Mutex::new(Vec::new());
    let before = Listing::before(node)?;
    let case = Case::new(node, "churn")?;
    let (times, mut failed) = come_and_go(&case, count, AT_ONCE, |number| {
        // The sizes after the first quarter and at the end are compared.
        if number == count / 4 {
            sizes.lock().unwrap().push(node.sizes());
        }
    });
    let running = times.last().map(Vec::as_slice).unwrap_or_default();
    let is_left = node.kubectl(&["delete", "namespace", "churn", "--timeout=180s"]);
    match is_left.and_then(|_| before.is_again(node)) {
        Ok(()) => println!("nothing is left: {} things as before", before.len()),
        Err(error) => {
            failed += 1;
            println!("FAILED nothing is left: {error:#}");
        }
    }
    report("apply_to_running_local_p50_s", at(running, 0.5))?;
    report("apply_to_running_local_p99_s", at(running, 0.99))?;
    report("churn_pods_failed", failed as f64)?;
    let mut sizes = sizes.into_inner().unwrap();
    sizes.push(node.sizes());
    for (name, [early, late]) in
        ["relay", "node"].iter().zip([0, 1].map(|at| [sizes[0][at], sizes[sizes.len() - 1][at]]))
    {
        println!(
            "resident memory of the {name}: {early} kB after {} pods, {late} kB after {count}",
            count / 4
        );
    }
    Ok((running.len(), failed))
}

/// Makes and deletes pods, and prints their times. `each` gets the number of each pod before that is made. Returns the
/// sorted seconds of each part of [`SEEN`], and the number of pods that failed.
pub(crate) fn come_and_go(
    case: &Case<'_>,
    count: usize,
    at_once: usize,
    each: impl Fn(usize) + Sync,
) -> ([Vec<f64>; 3], usize) {
    let (next, failed) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let times = Mutex::new([const { Vec::new() }; 3]);
    thread::scope(|scope| {
        for _ in 0..at_once {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Relaxed);
                    if number >= count {
                        break;
                    }
                    each(number);
                    match one(case, number) {
                        Ok(seen) => {
                            let mut times = times.lock().unwrap();
                            times.iter_mut().zip(seen).for_each(|(all, seen)| all.push(seen));
                        }
                        Err(error) => {
                            failed.fetch_add(1, Relaxed);
                            println!("FAILED pod {number}: {error:#}\n{}", case.state());
                        }
                    }
                }
            });
        }
    });
    let mut failed = failed.into_inner();
    if let Err(error) =
        eventually_blocking("no VM is left", PATIENCE, || (case.vms().ok()? == 0).then_some(()))
    {
        failed += 1;
        println!("FAILED {error:#}");
    }
    let mut times = times.into_inner().unwrap();
    for (name, times) in SEEN.iter().zip(&mut times) {
        times.sort_by(f64::total_cmp);
        println!("{name}: p50 {:.2} s, p99 {:.2} s after the creation", at(times, 0.5), at(times, 0.99));
    }
    match stages() {
        Ok(stages) => stages.iter().for_each(|(stage, mean)| println!("{mean:8.2} s  mean to stage {stage}")),
        Err(error) => println!("no stages of the node: {error:#}"),
    }
    (times, failed)
}

fn at(times: &[f64], part: f64) -> f64 {
    times.get((times.len() as f64 * part) as usize).copied().unwrap_or(f64::NAN)
}

/// Returns the mean seconds from CreateVM, or from the stop, to each stage, from the node's metrics.
fn stages() -> anyhow::Result<Vec<(String, f64)>> {
    let url = "http://127.0.0.1:15153/metrics";
    let metrics = Command::new("busybox").args(["wget", "-q", "-O", "-", url]).output()?.stdout;
    let mut parts = BTreeMap::<String, [f64; 2]>::new();
    for line in String::from_utf8(metrics)?.lines() {
        for (at, name) in ["sum", "count"].iter().enumerate() {
            let Some(rest) = line.strip_prefix(&format!("peerpod_node_stage_seconds_{name}{{stage=\""))
            else {
                continue;
            };
            let (stage, value) = rest.split_once("\"} ").context("a sample")?;
            parts.entry(stage.to_owned()).or_default()[at] = value.parse()?;
        }
    }
    let mut means: Vec<_> = parts.into_iter().map(|(stage, [sum, count])| (stage, sum / count)).collect();
    means.retain(|(_, mean)| mean.is_finite());
    means.sort_by(|(_, one), (_, other)| one.total_cmp(other));
    Ok(means)
}

/// Runs and deletes one pod. Returns the seconds from its creation to each part of [`SEEN`].
fn one(case: &Case<'_>, number: usize) -> anyhow::Result<[f64; 3]> {
    let name = format!("p{number}");
    case.script(&name, "Always", SLEEP)?;
    let began = Instant::now();
    let mut seen = [None; 3];
    case.until("the pod runs", || {
        let status = case.get(&format!("pod/{name}"))?["status"].clone();
        let conditions =
            ["PodScheduled", "PodReadyToStartContainers"].map(|kind| has_condition(&status, kind));
        let now = began.elapsed().as_secs_f64();
        let is_so = [conditions[0], conditions[1], status["phase"] == "Running"];
        for (seen, _) in seen.iter_mut().zip(is_so).filter(|(_, is_so)| *is_so) {
            seen.get_or_insert(now);
        }
        Ok(seen[2])
    })?;
    case.kubectl(&["delete", "pod", &name, "--timeout=180s"])?;
    Ok(seen.map(Option::unwrap_or_default))
}
