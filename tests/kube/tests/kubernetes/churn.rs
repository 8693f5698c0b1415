//! Many pods that come and go: all run, nothing is left, and the daemons do not grow.

use std::env;
use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::{Duration, Instant};

use peerpod_test_kube::report;
use peerpod_world::eventually_blocking;

use crate::cases::{Case, SLEEP};
use crate::node::Node;

/// Pods of a run, and of a long one.
const PODS: [usize; 2] = [50, 200];
const AT_ONCE: usize = 10;
const PATIENCE: Duration = Duration::from_secs(120);

/// Makes and deletes the pods. Returns the numbers of those that ran and were deleted, and of the others.
pub(crate) fn run(node: &Node) -> anyhow::Result<(usize, usize)> {
    let count = PODS[usize::from(env::var_os("PEERPOD_TEST_LONG").is_some())];
    let case = Case::new(node, "churn")?;
    let (next, failed) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let (times, sizes) = (Mutex::new(Vec::new()), Mutex::new(Vec::new()));
    thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Relaxed);
                    if number >= count {
                        break;
                    }
                    // The sizes after the first quarter and at the end are compared.
                    if number == count / 4 {
                        sizes.lock().unwrap().push(node.sizes());
                    }
                    match one(&case, number) {
                        Ok(took) => times.lock().unwrap().push(took),
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
    times.sort_by(f64::total_cmp);
    let at = |part: f64| times.get((times.len() as f64 * part) as usize).copied().unwrap_or(f64::NAN);
    report("apply_to_running_local_p50_s", at(0.5))?;
    report("apply_to_running_local_p99_s", at(0.99))?;
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
    Ok((times.len(), failed))
}

/// Runs and deletes one pod. Returns the seconds from its creation to its phase Running.
fn one(case: &Case<'_>, number: usize) -> anyhow::Result<f64> {
    let name = format!("p{number}");
    case.script(&name, "Always", SLEEP)?;
    let began = Instant::now();
    case.phase(&name, "Running")?;
    let took = began.elapsed().as_secs_f64();
    case.kubectl(&["delete", "pod", &name, "--timeout=90s"])?;
    Ok(took)
}
