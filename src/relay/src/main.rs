//! `peerpod-relay`: loads the settings, sets up log and limits, then runs [`peerpod_relay::app`].

use std::process::ExitCode;

use peerpod_base::config::{Setting, Sources};
use peerpod_base::lifecycle;
use peerpod_base::program::{self, Program};
use peerpod_base::telemetry::{self, LogConfig};
use peerpod_relay::config::RelayConfig;
use peerpod_relay::{app, harden, supervisor};

const PROGRAM: Program = Program {
    name: "peerpod-relay",
    version: env!("CARGO_PKG_VERSION"),
    about: "serves the sockets of the shims and the links of the guests",
};

fn main() -> ExitCode {
    if let Some(answer) = PROGRAM.answer(program::arguments(), settings) {
        print!("{answer}");
        return ExitCode::SUCCESS;
    }
    let (config, log) = match RelayConfig::load(Sources::of_this_process(program::arguments())) {
        Ok((config, log, _)) => (config, log),
        Err(mistakes) => {
            eprintln!("{}: {mistakes}", PROGRAM.name);
            return ExitCode::from(2);
        }
    };
    match start(config, &log) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("peerpod-relay: {}", peerpod_base::chain::chain(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

/// Returns the default settings, for the help text; the present settings may have mistakes.
fn settings() -> Vec<Setting> {
    let loaded = RelayConfig::load(Sources::from_process([], []));
    loaded.map(|(_, _, settings)| settings).unwrap_or_default()
}

fn start(config: RelayConfig, log: &LogConfig) -> anyhow::Result<ExitCode> {
    telemetry::init(log)?;
    if config.waits_when_replaced {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        return Ok(runtime.block_on(supervisor::keep())?);
    }
    if let Err(error) = program::own_rights_and_limits() {
        tracing::warn!(%error, "cannot raise the limit of open files");
    }
    let files = app::files(&config)?;
    if let Err(error) = harden::harden(config.listen.port(), &files) {
        if config.must_be_hardened {
            let why =
                format!("{error:#}; use a kernel that can, or permit it with relay.hardening: best-effort");
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            return Err(runtime.block_on(app::cannot_serve(&config, why)));
        }
        tracing::warn!(error = format!("{error:#}"), "the process has more rights than it needs");
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(config.threads)
        .thread_name("peerpod-relay")
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let shutdown = lifecycle::signals()?;
        let bound = app::build(config).await?;
        bound.run(&shutdown).await?;
        Ok(ExitCode::SUCCESS)
    })
}

#[cfg(test)]
mod tests {
    use peerpod_test_reference as reference;

    use super::*;

    #[test]
    fn documented_help_is_up_to_date() {
        // docs/configuration.md has the settings.
        let help = PROGRAM.answer(std::iter::once("--help".to_owned()), Vec::new).unwrap();
        let text = reference::help(PROGRAM.name, &help);
        reference::section("cli.md", PROGRAM.name, &text).unwrap();
    }
}
