//! `peerpod-cluster ROLE`: `crds` prints the custom resources' definitions; `webhook` answers admission reviews.
//!
//! Exit codes: 0 stopped as told; 1 it could not start, or a part of it ended; 2 the command or the configuration has
//! mistakes.

use std::process::ExitCode;

use peerpod_base::{
    config::{Mistakes, Printed, Reader, Setting, Sources},
    lifecycle,
    program::{self, Program},
    telemetry::{self, LogConfig},
};
use peerpod_cluster::webhook::{self, WebhookConfig};
use peerpod_kube::crds;

const PROGRAM: Program = Program {
    name: "peerpod-cluster",
    version: env!("CARGO_PKG_VERSION"),
    about: "the cluster's side of peer pods; roles, as the first argument: crds (print the custom resources' definitions), \
            webhook (answer admission reviews)",
};

/// Sections of the shared file that other binaries read.
const OTHERS: [&str; 6] = ["paths", "node", "relay", "tunnel", "provider", "csi"];

fn main() -> ExitCode {
    if let Some(answer) = PROGRAM.answer(std::env::args().skip(1), settings) {
        print!("{answer}");
        return ExitCode::SUCCESS;
    }
    let mut words = std::env::args().skip(1);
    let ended = match words.next().as_deref() {
        Some("crds") => print_crds(),
        Some("webhook") => match load(Sources::from_process(words, environment())) {
            Ok((config, log, _)) => serve(config, &log),
            Err(mistakes) => {
                eprintln!("peerpod-cluster: {mistakes}");
                return ExitCode::from(2);
            }
        },
        other => {
            let said = other.map_or_else(|| "no role".to_owned(), |role| format!("{role:?} is no role"));
            eprintln!("peerpod-cluster: {said}; say crds or webhook, or --help");
            return ExitCode::from(2);
        }
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("peerpod-cluster: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn load(sources: Sources) -> Result<(WebhookConfig, LogConfig, Printed), Mistakes> {
    let mut reader = Reader::load(sources, &["webhook", "log"], &OTHERS)?;
    let config = WebhookConfig::read(&mut reader);
    let log = LogConfig::read(&mut reader);
    Ok((config, log, reader.finish()?))
}

fn environment() -> impl Iterator<Item = (String, String)> {
    std::env::vars_os()
        .map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()))
}

/// For the help alone: the defaults.
fn settings() -> Vec<Setting> {
    load(Sources::from_process([], [])).map(|(.., printed)| printed.0).unwrap_or_default()
}

fn print_crds() -> anyhow::Result<()> {
    for crd in crds::all() {
        print!("---\n{}", crds::yaml(&crd)?);
    }
    Ok(())
}

fn serve(config: WebhookConfig, log: &LogConfig) -> anyhow::Result<()> {
    telemetry::init(log)?;
    if let Err(error) = program::own_rights_and_limits() {
        tracing::warn!(%error, "the limit of open files stays as it is");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let ended = runtime.block_on(async {
        let shutdown = lifecycle::signals()?;
        webhook::server::build(config).await?.run(&shutdown).await?;
        Ok(())
    });
    // Reading the certificate may hang on a dead mount.
    runtime.shutdown_timeout(std::time::Duration::from_secs(2));
    ended
}
