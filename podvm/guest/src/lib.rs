//! Guest program of the pod VM. Only `peerpod-pull`, a short-lived process per image, runs beside it.
//!
//! The guest dials the node, proves with a ticket that the node made this VM, and receives its pod assignment. It makes
//! the pod's network, and carries the shim's conversation to the kata-agent.
//!
//! `peerpod-guest` as pid 1 is a small init that keeps `peerpod-guest serve` running. Under systemd `serve` is the
//! service itself, with `KillMode=process`: the kata-agent is a child of it, and survives it. No code here depends on a
//! cloud, and nothing listens on the network unless the node is to dial (`guest_listener`).

use std::path::Path;
use std::process::ExitCode;

use tracing_subscriber::filter::Targets;

mod agent;
mod assignment;
mod components;
mod confidential;
mod config;
mod control;
mod dial;
mod encrypted;
mod entropy;
mod files;
mod guest_listener;
mod identity;
mod images;
mod init;
pub mod intercept;
mod link;
mod localhost;
mod log;
mod network;
mod nics;
mod pool;
mod power;
mod proc;
mod retries;
mod serve;
mod sources;
mod status;
mod underlay;
mod usage;
mod user_data;
mod volumes;

const USAGE: &str = "usage: peerpod-guest [serve | --version]
  without arguments: init when it is pid 1, else serve";

/// Runs the program: init as pid 1, else the command in the arguments.
pub fn run() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    // The kernel passes unknown parameters of its command line to pid 1.
    let is_init = std::process::id() == 1;
    match arguments[..] {
        _ if is_init => {}
        [] | ["serve"] => {}
        // Arguments with which the kernel calls its `modprobe`.
        ["-q", "--", module] => {
            return if init::modules::requested(module) { ExitCode::SUCCESS } else { ExitCode::FAILURE };
        }
        ["--version"] => {
            println!("peerpod-guest {}", env!("CARGO_PKG_VERSION"));
            return ExitCode::SUCCESS;
        }
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    }
    let settings = config::Settings::load(Path::new(config::PATH));
    let (log, over_link) =
        settings.as_ref().map_or(("info", true), |settings| (settings.log.as_str(), settings.log_over_link));
    let filter = log.parse().unwrap_or_else(|_| Targets::new().with_default(tracing::Level::INFO));
    let ring = log::Ring::new(over_link);
    log::init(filter, (!is_init).then(|| ring.clone()));
    tracing::info!(version = env!("CARGO_PKG_VERSION"), pid = std::process::id(), "peerpod-guest");

    let result = match settings {
        Ok(settings) if is_init => init::run(&settings),
        Ok(settings) => serve::run(&settings, &ring),
        // Pid 1 must not end over a mistake in a file: `serve` logs the fault, and the lease ends the VM.
        Err(error) if is_init => {
            tracing::error!(error = format!("{error:#}"), "settings");
            init::run(&config::Settings::default())
        }
        Err(error) => Err(error),
    };
    result.unwrap_or_else(|error| {
        tracing::error!(error = format!("{error:#}"), "peerpod-guest ends");
        ExitCode::FAILURE
    })
}

/// Entry points of the fuzz targets: parsers of foreign input.
pub mod fuzzed {
    use std::path::Path;

    /// Returns whether the bytes are an answer of a metadata service, complete or ended early.
    pub fn metadata_answer(bytes: &[u8]) -> bool {
        let answers = [false, true].map(|ended| crate::sources::http::parse(bytes, ended));
        answers.iter().any(|answer| matches!(answer, Ok(Some(_))))
    }

    /// Returns whether the bytes are a cloud's description, as the builder of the VM image writes it.
    pub fn source(bytes: &[u8]) -> bool {
        crate::sources::CloudSource::parse(bytes, Path::new("fuzz.json")).is_ok()
    }

    /// Parses the output of `depmod`, aliases, and an event of the kernel; returns the number of files to load.
    pub fn modules(bytes: &[u8]) -> usize {
        let text = String::from_utf8_lossy(bytes);
        let index = crate::init::modules::Index::new(text.to_string(), text.to_string(), text.to_string());
        let _maybe = crate::init::uevents::parse(bytes);
        text.lines().flat_map(|wanted| index.find(wanted)).map(|module| index.order(module).len()).sum()
    }
}
