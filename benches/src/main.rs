//! Measures speed as ratios against a reference in the same run. `make bench` prints a table, writes
//! `target/bench/summary.json` and fails when a gate is missed.
//! `peerpod-benches relay telemetry net ready check thousand machines stdin` runs only the named parts and keeps the other
//! figures in the file.

mod agent;
mod chain;
mod check;
mod encrypted;
mod guests;
mod load;
mod machines;
mod net;
mod ready;
mod relay;
mod report;
mod stages;
mod stdin;
mod telemetry;
mod thousand;

use std::path::{Path, PathBuf};

use anyhow::Context;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

/// File of the figures.
const SUMMARY: &str = "target/bench/summary.json";

fn main() -> anyhow::Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match words.first().map(String::as_str) {
        // The local provider starts this program as the VM's agent.
        Some("--config") => return Ok(agent::serve(Path::new("/run/peerpod/agent.sock"))?),
        Some("role") if words.get(1).is_some_and(|word| word == "agent") => {
            let socket = PathBuf::from(std::env::var_os("BENCH_SOCKET").context("BENCH_SOCKET")?);
            return Ok(agent::serve(&socket)?);
        }
        Some("role") => {
            // The roles run like the relay and the guest: one thread that carries links, and in the guest it is the
            // only one.
            let runtime = match words.get(1).map(String::as_str) {
                Some("far") => tokio::runtime::Builder::new_current_thread().enable_all().build()?,
                _ => tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?,
            };
            return runtime.block_on(chain::play(&words[1..]));
        }
        _ => {}
    }
    let wanted = |name: &str| words.is_empty() || words.iter().any(|word| word == name);
    if words.is_empty() {
        report::begin_afresh(Path::new(SUMMARY))?;
    }
    let mut report = report::Report::default();
    let folder = std::env::temp_dir().join(format!("peerpod-bench-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let outcome = (|| {
        if wanted("relay") {
            on_one_processor(|| relay::run(&folder, &mut report))?;
        }
        if wanted("telemetry") {
            on_one_processor(|| telemetry::run(&folder, &mut report))?;
        }
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        if wanted("net") {
            runtime.block_on(net::run(&mut report))?;
        }
        if wanted("ready") {
            runtime.block_on(ready::run(&mut report))?;
        }
        if wanted("check") {
            check::run(&folder, &mut report)?;
        }
        if wanted("thousand") {
            runtime.block_on(thousand::run(&folder, &mut report))?;
        }
        if wanted("machines") {
            runtime.block_on(machines::run(&folder, &mut report))?;
        }
        if wanted("stdin") {
            runtime.block_on(stdin::run(&folder, &mut report))?;
        }
        anyhow::Ok(())
    })();
    std::fs::remove_dir_all(&folder)?;
    outcome?;
    report.finish(Path::new(SUMMARY))
}

/// Runs `work`, and all processes it starts, on one processor.
///
/// A VM's processor takes 20 to 60 us to be woken by another one, many times the time of a call over a bare socket.
/// Whether a wake-up is needed depends on the scheduler. On one processor the ratios compare the work per call and are
/// the same in every run.
fn on_one_processor<T>(work: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T> {
    let us = Pid::from_raw(0);
    let all = sched_getaffinity(us)?;
    let last = (0..CpuSet::count()).rfind(|&n| all.is_set(n).unwrap_or(false)).context("no processor")?;
    let mut one = CpuSet::new();
    one.set(last)?;
    sched_setaffinity(us, &one)?;
    let outcome = work();
    sched_setaffinity(us, &all)?;
    outcome
}
