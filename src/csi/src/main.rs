//! Runs one role of the CSI proxy: `peerpod-csi ROLE`. `controller` and `node` are placed before a CSI driver; `schema`
//! prints the JSON Schema of a volume's descriptor.
//!
//! Exit codes: 0 stopped on request; 1 it could not start, or a part of it ended; 2 the command or the configuration
//! has mistakes.

use std::process::ExitCode;

use peerpod_base::config::{Setting, Sources};
use peerpod_base::lifecycle;
use peerpod_base::program::{self, Program};
use peerpod_base::telemetry::{self, LogConfig};
use peerpod_csi::app::{self, Role};
use peerpod_csi::config::CsiConfig;
use peerpod_volume::GuestVolume;

const PROGRAM: Program = Program {
    name: "peerpod-csi",
    version: env!("CARGO_PKG_VERSION"),
    about: "proxies a CSI driver, so that peer pods' volumes go to their VMs; roles, as the first argument: \
         controller (before the sidecars of the driver's controller), node (before its node plugin), schema \
         (print the JSON Schema of a volume's descriptor)",
};

fn main() -> ExitCode {
    if let Some(answer) = PROGRAM.answer(std::env::args().skip(1), settings) {
        print!("{answer}");
        return ExitCode::SUCCESS;
    }
    let mut words = std::env::args().skip(1);
    let role = match words.next().as_deref() {
        Some("schema") => {
            print!("{}", schema());
            return ExitCode::SUCCESS;
        }
        Some("controller") => Role::Controller,
        Some("node") => Role::Node,
        other => {
            let said = other.map_or_else(|| "no role".to_owned(), |role| format!("{role:?} is no role"));
            eprintln!("peerpod-csi: {said}; write controller, node or schema, or --help");
            return ExitCode::from(2);
        }
    };
    let environment = std::env::vars_os()
        .map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned()));
    let (config, log) = match CsiConfig::load(Sources::from_process(words, environment)) {
        Ok((config, log, _)) => (config, log),
        Err(mistakes) => {
            eprintln!("peerpod-csi: {mistakes}");
            return ExitCode::from(2);
        }
    };
    match serve(role, &config, &log) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("peerpod-csi: {}", peerpod_base::chain::chain(error.as_ref()));
            ExitCode::FAILURE
        }
    }
}

/// Returns the JSON Schema of a volume's descriptor, as `deploy/schemas/guest-volume.json` holds it.
fn schema() -> String {
    // A generated schema always has a JSON form.
    let text = serde_json::to_string_pretty(&schemars::schema_for!(GuestVolume)).unwrap_or_default();
    text + "\n"
}

/// Returns the settings with their defaults, for `--help` alone.
fn settings() -> Vec<Setting> {
    CsiConfig::load(Sources::from_process([], [])).map(|(.., printed)| printed.0).unwrap_or_default()
}

fn serve(role: Role, config: &CsiConfig, log: &LogConfig) -> anyhow::Result<()> {
    telemetry::init(log)?;
    if let Err(error) = program::own_rights_and_limits() {
        tracing::warn!(%error, "cannot raise the limit of open files");
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let ended = runtime.block_on(async {
        let shutdown = lifecycle::signals()?;
        app::run(role, config, &shutdown).await
    });
    // A hung mount must not delay the exit.
    runtime.shutdown_timeout(std::time::Duration::from_secs(2));
    ended
}

#[cfg(test)]
mod tests {
    use peerpod_test_reference as reference;

    use super::*;

    #[test]
    fn the_published_schema_is_up_to_date() {
        let published = include_str!("../../../deploy/schemas/guest-volume.json");
        assert_eq!(
            published,
            schema(),
            "write it anew: peerpod-csi schema >deploy/schemas/guest-volume.json"
        );
    }

    #[test]
    fn documented_help_is_up_to_date() {
        // docs/configuration.md has the settings.
        let help = PROGRAM.answer(std::iter::once("--help".to_owned()), Vec::new).unwrap();
        let text = reference::help(PROGRAM.name, &help);
        reference::section("cli.md", PROGRAM.name, &text).unwrap();
    }

    #[test]
    fn documented_settings_are_up_to_date() {
        let text = reference::settings(&settings());
        reference::section("configuration.md", "csi", &text).unwrap();
    }
}
