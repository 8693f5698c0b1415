//! Speed as ratios against something run beside it in the same run. `make bench` prints a table and writes
//! `target/bench/summary.json`. `peerpod-benches relay net ready thousand` runs only what is named.

mod agent;
mod chain;
mod guests;
mod load;
mod net;
mod ready;
mod relay;
mod report;
mod thousand;

use std::path::{Path, PathBuf};

use anyhow::Context;

fn main() -> anyhow::Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match words.first().map(String::as_str) {
        // The local provider starts us as the VM's agent.
        Some("--config") => return Ok(agent::serve(Path::new("/run/peerpod/agent.sock"))?),
        Some("role") if words.get(1).is_some_and(|word| word == "agent") => {
            let socket = PathBuf::from(std::env::var_os("BENCH_SOCKET").context("BENCH_SOCKET")?);
            return Ok(agent::serve(&socket)?);
        }
        Some("role") => {
            // As the relay and the guest run: one thread that carries links.
            let runtime =
                tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
            return runtime.block_on(chain::play(&words[1..]));
        }
        _ => {}
    }
    let wanted = |name: &str| words.is_empty() || words.iter().any(|word| word == name);
    let mut report = report::Report::default();
    let folder = std::env::temp_dir().join(format!("peerpod-bench-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let outcome = (|| {
        if wanted("relay") {
            relay::run(&folder, &mut report)?;
        }
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        if wanted("net") {
            runtime.block_on(net::run(&mut report))?;
        }
        if wanted("ready") {
            runtime.block_on(ready::run(&mut report))?;
        }
        if wanted("thousand") {
            runtime.block_on(thousand::run(&folder, &mut report))?;
        }
        anyhow::Ok(())
    })();
    std::fs::remove_dir_all(&folder)?;
    outcome?;
    report.finish(Path::new("target/bench/summary.json"))
}
