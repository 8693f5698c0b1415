//! `peerpod-node`: settings, log, limits, then [`peerpod_node::app`].
//!
//! Exit codes: 0 stopped as told; 1 it could not start, or a part of it ended; 2 the configuration has mistakes.

use std::process::ExitCode;

use nix::sys::{
    resource::{Resource, getrlimit, setrlimit},
    stat::{Mode, umask},
};
use peerpod_base::{
    config::{self, Sources},
    lifecycle, telemetry,
};
use peerpod_node::{app, config::NodeConfig};

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    match arguments.next().as_deref() {
        Some("--version" | "-V") => {
            println!("peerpod-node {}", env!("CARGO_PKG_VERSION"));
            return ExitCode::SUCCESS;
        }
        Some("--help" | "-h" | "help") => {
            print!("{}", help());
            return ExitCode::SUCCESS;
        }
        _ => {}
    }
    let loaded = match NodeConfig::load(Sources::of_this_process()) {
        Ok(loaded) => loaded,
        Err(mistakes) => {
            eprintln!("peerpod-node: {mistakes}");
            return ExitCode::from(2);
        }
    };
    match start(loaded) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(error = format!("{error:#}"), "peerpod-node ends");
            eprintln!("peerpod-node: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn help() -> String {
    let settings = NodeConfig::load(Sources::from_process([], [])).map(|(.., printed)| printed.0);
    format!(
        "peerpod-node: makes a VM for each pod sandbox, and takes it away again\n\n\
         settings, as flags (--key value), environment (PEERPOD_KEY) or YAML (--config FILE):\n{}",
        config::help(&settings.unwrap_or_default())
    )
}

fn start(
    (config, provider, log, _): (
        NodeConfig,
        peerpod_providers::Settings,
        telemetry::LogConfig,
        config::Printed,
    ),
) -> anyhow::Result<()> {
    telemetry::init(&log)?;
    // Nothing we make is for others, also in the moment before its rights are set.
    umask(Mode::S_IRWXG | Mode::S_IRWXO);
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
    if let Err(error) = setrlimit(Resource::RLIMIT_NOFILE, most, most) {
        tracing::warn!(%error, "the limit of open files stays as it is");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let ended = runtime.block_on(async {
        let shutdown = lifecycle::signals()?;
        // A signal during the start ends it, too: what was begun is in the ledger.
        let bound = tokio::select! {
            bound = app::build(config, provider, &shutdown) => bound?,
            () = shutdown.wait() => return Ok(()),
        };
        bound.run(&shutdown).await?;
        Ok(())
    });
    // A blocking step that hangs (a netlink request, a file on a dead disk) must not keep the process.
    runtime.shutdown_timeout(std::time::Duration::from_secs(2));
    ended
}
