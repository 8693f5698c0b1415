//! Runs one role of the CSI proxy: `peerpod-csi ROLE`. `controller` and `node` are placed before a CSI driver; `schema`
//! prints the JSON Schema of a volume's descriptor.
//!
//! Exit codes: 0 stopped on request; 1 it could not start, or a part of it ended; 2 the command or the configuration
//! has mistakes.

use std::process::ExitCode;

use peerpod_base::config::{Setting, Sources};
use peerpod_base::program::{self, Program};
use peerpod_csi::app::{self, Role};
use peerpod_csi::config::CsiConfig;
use peerpod_volume::GuestVolume;
use tokio::runtime::Builder;

const PROGRAM: Program = Program {
    name: "peerpod-csi",
    version: env!("CARGO_PKG_VERSION"),
    about: "proxies a CSI driver, so that peer pods' volumes go to their VMs; roles, as the first argument: \
         controller (before the sidecars of the driver's controller), node (before its node plugin), schema \
         (print the JSON Schema of a volume's descriptor)",
};

fn main() -> ExitCode {
    if let Some(answer) = PROGRAM.answer(program::arguments(), settings) {
        print!("{answer}");
        return ExitCode::SUCCESS;
    }
    let mut words = program::arguments();
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
    PROGRAM.run(CsiConfig::load(Sources::of_this_process(words)), |(config, log, _)| {
        let runtime = || Builder::new_current_thread().enable_all().build();
        program::run(&log, runtime, async |shutdown| app::run(role, &config, &shutdown).await)
    })
}

/// Returns the JSON Schema of a volume's descriptor, as `deploy/schemas/guest-volume.json` holds it.
fn schema() -> String {
    // A generated schema always has a JSON form.
    let text = serde_json::to_string_pretty(&schemars::schema_for!(GuestVolume)).unwrap_or_default();
    text + "\n"
}

/// Returns the settings with their defaults, for `--help` alone.
fn settings() -> Vec<Setting> {
    CsiConfig::load(Sources::from_process([], [])).map(|(.., settings)| settings).unwrap_or_default()
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
