//! `peerpod-relay`: settings, log, limits, then [`peerpod_relay::app`].

use std::process::ExitCode;

use nix::sys::{
    resource::{Resource, getrlimit, setrlimit},
    stat::{Mode, umask},
};
use peerpod_base::{
    config::{self, Sources},
    lifecycle, telemetry,
};
use peerpod_relay::{app, config::RelayConfig, harden};

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    match arguments.next().as_deref() {
        Some("--version" | "-V") => {
            println!("peerpod-relay {}", env!("CARGO_PKG_VERSION"));
            return ExitCode::SUCCESS;
        }
        Some("--help" | "-h" | "help") => {
            print!("{}", help());
            return ExitCode::SUCCESS;
        }
        _ => {}
    }
    match start() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("peerpod-relay: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn help() -> String {
    let settings = RelayConfig::load(Sources::from_process([], [])).map(|(_, _, printed)| printed.0);
    format!(
        "peerpod-relay: holds the sockets of the shims and the links of the guests\n\n\
         settings, as flags (--key value), environment (PEERPOD_KEY) or YAML (--config FILE):\n{}",
        config::help(&settings.unwrap_or_default())
    )
}

fn start() -> anyhow::Result<()> {
    let (config, log, _) = RelayConfig::load(Sources::of_this_process())?;
    telemetry::init(&log)?;
    // Nothing we make is for others, also in the moment before its rights are set.
    umask(Mode::S_IRWXG | Mode::S_IRWXO);
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
    if let Err(error) = setrlimit(Resource::RLIMIT_NOFILE, most, most) {
        tracing::warn!(%error, "the limit of open files stays as it is");
    }
    harden::harden(config.listen.port());
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(config.threads)
        .thread_name("peerpod-relay")
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let shutdown = lifecycle::signals()?;
        let bound = app::build(config).await?;
        bound.run(&shutdown).await?;
        Ok(())
    })
}
