//! `peerpod config check|print|schema`: checks the configuration of all binaries of a node, and starts nothing.
//!
//! A daemon reads its own sections only; this command reads all together, to find a misspelled key in any section.

use std::path::PathBuf;
use std::process::ExitCode;

use peerpod_base::config::{Mistakes, Reader, Setting, Sources, print, schema};
use peerpod_base::telemetry::LogConfig;
use peerpod_node::config::NodeConfig;
use peerpod_providers::{Context, Purpose};
use peerpod_relay::config::RelayConfig;

use crate::SETTINGS;
use crate::convert::{self, Convert};

/// Sections that the binaries of a node read.
pub(crate) const SECTIONS: [&str; 9] =
    ["paths", "log", "node", "relay", "tunnel", "provider", "secrets", "cluster", "kubernetes"];
/// Sections that only the cluster's programs read; not checked here.
pub(crate) const OTHERS: [&str; 4] = ["controller", "csi", "volumes", "webhook"];

/// Subcommands of `peerpod config`.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Lists every mistake with its place; exit code 1 if there is one
    #[command(after_help = SETTINGS)]
    Check(File),
    /// Prints the effective settings as a file, each with its origin; secrets are not shown
    #[command(after_help = SETTINGS)]
    Print(File),
    /// Prints the JSON Schema of the file
    Schema,
    /// Converts the ConfigMap and Secret of a cloud-api-adaptor to a Peerpod configuration; lists unconverted
    /// variables on stderr
    ConvertCaa(Convert),
}

/// Arguments of the subcommands that read a configuration.
#[derive(Debug, clap::Args)]
pub(crate) struct File {
    /// The configuration file [default: PEERPOD_CONFIG, or else /etc/peerpod/peerpod.yaml if it exists]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

impl Command {
    /// Whether `--section.key VALUE` is permitted.
    pub(crate) fn takes_settings(&self) -> bool {
        matches!(self, Command::Check(_) | Command::Print(_))
    }
}

/// Runs a subcommand of `peerpod config`. Mistakes go to stderr and end in exit code 1.
pub(crate) fn run(command: Command, settings: Vec<String>) -> anyhow::Result<ExitCode> {
    let sources = |File { config }| {
        let mut sources = Sources::of_this_process(settings);
        sources.file = config.or(sources.file);
        sources
    };
    let answer = match command {
        Command::Check(file) => check(sources(file)),
        Command::Print(file) => read(sources(file)).map(|settings| print(&settings)),
        Command::Schema => every_setting().map(|settings| format!("{:#}\n", schema(&settings))),
        Command::ConvertCaa(arguments) => return convert::run(arguments).map(|()| ExitCode::SUCCESS),
    };
    match answer {
        Ok(text) => {
            print!("{text}");
            Ok(ExitCode::SUCCESS)
        }
        Err(mistakes) => {
            eprintln!("{mistakes}");
            Ok(ExitCode::FAILURE)
        }
    }
}

fn check(sources: Sources) -> Result<String, Mistakes> {
    let file = sources.file.as_ref().map_or("no file".to_owned(), |path| path.display().to_string());
    let settings = read(sources)?;
    let given = settings.iter().filter(|setting| setting.is_given()).count();
    Ok(format!(
        "{file}: no mistakes; {given} of {} settings are given, the others have their defaults\n",
        settings.len()
    ))
}

/// Reads all sections as the binaries do.
pub(crate) fn read(sources: Sources) -> Result<Vec<Setting>, Mistakes> {
    let mut reader = Reader::load(sources, &SECTIONS, &OTHERS)?;
    ask(&mut reader);
    reader.finish()
}

fn ask(reader: &mut Reader) {
    LogConfig::read(reader);
    NodeConfig::read(reader);
    let relay = RelayConfig::read(reader);
    // The node's data in the context change none of a provider's keys.
    let context = Context {
        state_dir: relay.state_dir,
        cluster_id: String::new(),
        node_name: String::new(),
        purpose: Purpose::Create,
    };
    // Read, not opened: the provider touches nothing.
    drop(peerpod_providers::read(reader, &context));
}

/// Returns every setting of every provider in this build, independent of the configuration.
fn every_setting() -> Result<Vec<Setting>, Mistakes> {
    peerpod_providers::every_setting(&SECTIONS, &OTHERS, ask)
}

#[cfg(test)]
mod tests {
    use peerpod_test_reference as reference;

    use super::*;

    fn sources(flags: &[(&str, &str)]) -> Sources {
        let flags = flags.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        Sources { flags, ..Sources::default() }
    }

    #[test]
    fn the_defaults_of_all_binaries_have_no_mistake() {
        let text = check(sources(&[])).unwrap();
        assert!(text.starts_with("no file: no mistakes; 0 of "), "{text}");
    }

    #[test]
    fn mistakes_in_any_section_are_reported_together() {
        let flags = [
            ("log.level", "loud"),
            ("node.boot-timeout", "5"),
            ("relay.listen", "here"),
            ("provider.local.bridge", "br0"),
            ("tunnel.prot", "4789"),
        ];
        let told = check(sources(&flags)).unwrap_err().to_string();
        assert!(told.starts_with("the configuration has 5 mistakes:"), "{told}");
        for (key, _) in flags {
            assert!(told.contains(key), "{key} in {told}");
        }
        assert!(told.contains("did you mean tunnel.port?"), "{told}");
    }

    #[test]
    fn printed_settings_have_every_section() {
        let text = print(&read(sources(&[("node.lease", "20m")])).unwrap());
        for section in SECTIONS {
            assert!(text.lines().any(|line| line == format!("{section}:")), "{section} in {text}");
        }
        assert!(text.contains("  lease: \"20m\"  # --node.lease"), "{text}");
    }

    #[test]
    fn the_schema_describes_every_section_and_allows_no_other() {
        let schema = schema(&every_setting().unwrap());
        for section in SECTIONS {
            assert_eq!(schema["properties"][section]["additionalProperties"], false, "{section}");
        }
        assert_eq!(schema["additionalProperties"], false);
        assert!(!schema["properties"]["provider"]["properties"]["libvirt"].is_null());
    }

    #[test]
    fn documented_settings_are_up_to_date() {
        // Builds with and without the AWS SDK have the same page; the AWS provider has the table of its settings. A
        // build with the tests has their provider, too.
        let mut kinds = peerpod_providers::kinds();
        kinds.retain(|kind| *kind != "fake");
        kinds.push("aws");
        kinds.sort_unstable();
        kinds.dedup();
        let mut settings = every_setting().unwrap();
        settings.retain(|setting| !setting.key.starts_with("provider.aws."));
        for setting in settings.iter_mut().filter(|setting| setting.key == "provider.kind") {
            setting.schema = serde_json::json!({"enum": kinds});
        }
        let text = reference::settings(&settings);
        reference::section("configuration.md", "node", &text).unwrap();
    }
}
