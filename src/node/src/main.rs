//! Runs `peerpod-node`. Exit codes: 0 regular shutdown; 1 failed start, or an unexpected end of a background task;
//! 2 mistakes in the configuration.

use std::process::ExitCode;

use peerpod_base::chain::chain;
use peerpod_base::config::{Setting, Sources};
use peerpod_base::program::{self, Program};
use peerpod_base::telemetry::LogConfig;
use peerpod_node::config::NodeConfig;
use peerpod_node::{app, runtime};
use peerpod_providers::ProviderSettings;

const PROGRAM: Program = Program {
    name: "peerpod-node",
    version: env!("CARGO_PKG_VERSION"),
    about: "makes a VM for each pod sandbox, and deletes it again",
};

fn main() -> ExitCode {
    if let Some(answer) = PROGRAM.answer(program::arguments(), settings) {
        print!("{answer}");
        return ExitCode::SUCCESS;
    }
    PROGRAM.run(
        NodeConfig::load(Sources::of_this_process(program::arguments())),
        |(config, provider, log, _)| {
            start(config, provider, &log)
                .inspect_err(|error| tracing::error!(error = chain(error.as_ref()), "peerpod-node ends"))
        },
    )
}

/// Settings for the help text: those of every provider.
fn settings() -> Vec<Setting> {
    NodeConfig::every_setting().unwrap_or_default()
}

fn start(config: NodeConfig, provider: ProviderSettings, log: &LogConfig) -> anyhow::Result<()> {
    program::run(log, runtime::new, async |shutdown| {
        match app::build(config, provider, &shutdown).await? {
            Some(bound) => bound.run(&shutdown).await,
            // A signal came during the start.
            None => Ok(()),
        }
    })
}

#[cfg(test)]
mod tests {
    use peerpod_test_reference as reference;

    use super::*;

    #[test]
    fn help_has_the_settings_of_every_provider_with_their_choices() {
        let help = PROGRAM.answer(std::iter::once("--help".to_owned()), settings).unwrap();
        for key in ["node.cluster-id", "provider.azure.region", "provider.libvirt.uri", "provider.gcp.zones"]
        {
            assert!(help.contains(&format!("  --{key} <value>\n")), "{key} in {help}");
        }
        assert!(help.contains("[one of: auto, vxlan, wireguard]"), "{help}");
    }

    #[test]
    fn documented_help_is_up_to_date() {
        // docs/configuration.md has the settings.
        let help = PROGRAM.answer(std::iter::once("--help".to_owned()), Vec::new).unwrap();
        let text = reference::help(PROGRAM.name, &help);
        reference::section("cli.md", PROGRAM.name, &text).unwrap();
    }
}
