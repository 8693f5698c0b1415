//! `peerpod config check|print|schema`: checks the configuration of all programs, and starts nothing.
//!
//! A program reads its own sections only; this command reads all together, to find a misspelled key in any section.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use peerpod_base::config::{Mistakes, Reader, Setting, Sources, print, schema};
use peerpod_base::telemetry::LogConfig;
use peerpod_cluster::SECTIONS;
use peerpod_csi::config::CsiConfig;
use peerpod_node::config::NodeConfig;
use peerpod_providers::{Context, Purpose};
use peerpod_relay::config::RelayConfig;
use serde_json::{Value, json};

use crate::SETTINGS;
use crate::convert::{self, Convert};

/// Subcommands of `peerpod config`.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum ConfigCommand {
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

impl ConfigCommand {
    /// Whether `--section.key VALUE` is permitted.
    pub(crate) fn takes_settings(&self) -> bool {
        matches!(self, ConfigCommand::Check(_) | ConfigCommand::Print(_))
    }
}

/// Runs a subcommand of `peerpod config`. Mistakes go to stderr and end in exit code 1.
pub(crate) fn run(command: ConfigCommand, settings: Vec<String>) -> anyhow::Result<ExitCode> {
    let sources = |File { config }| {
        let mut sources = Sources::of_this_process(settings);
        sources.file = config.or(sources.file);
        sources
    };
    let answer = match command {
        ConfigCommand::Check(file) => check(sources(file)),
        ConfigCommand::Print(file) => read(sources(file)).map(|settings| print(&settings)),
        ConfigCommand::Schema => whole_schema().map(|schema| format!("{schema:#}\n")),
        ConfigCommand::ConvertCaa(arguments) => return convert::run(arguments).map(|()| ExitCode::SUCCESS),
    };
    match answer {
        Ok(text) => {
            // A closed output is no error.
            std::io::stdout().write_all(text.as_bytes()).ok();
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

/// Reads all sections as the programs do.
pub(crate) fn read(sources: Sources) -> Result<Vec<Setting>, Mistakes> {
    let mut reader = Reader::load(sources, &SECTIONS, &[])?;
    ask(&mut reader);
    reader.finish()
}

/// Reads the keys of every program. A key of several programs is described as for the node, which is read last.
pub(crate) fn ask(reader: &mut Reader) {
    peerpod_cluster::read_settings(reader);
    CsiConfig::read(reader);
    ask_node(reader);
}

/// Reads the keys of the programs on a node.
fn ask_node(reader: &mut Reader) {
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

/// Returns the JSON Schema of the file. The section of a provider that is not in this build may have any keys.
fn whole_schema() -> Result<Value, Mistakes> {
    let mut schema = schema(&every_setting(ask)?);
    for kind in peerpod_providers::left_out() {
        let section =
            json!({"type": ["object", "null"], "description": "this provider is not in this build"});
        schema["properties"]["provider"]["properties"][kind] = section;
    }
    Ok(schema)
}

/// Returns every setting that `ask` reads with any provider in this build, independent of the configuration.
fn every_setting(ask: fn(&mut Reader)) -> Result<Vec<Setting>, Mistakes> {
    peerpod_providers::every_setting(&SECTIONS, &[], ask)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

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
        let schema = whole_schema().unwrap();
        for section in SECTIONS {
            assert_eq!(schema["properties"][section]["additionalProperties"], false, "{section}");
        }
        assert_eq!(schema["additionalProperties"], false);
        assert!(!schema["properties"]["provider"]["properties"]["libvirt"].is_null());
    }

    /// Guards the number of settings: a new one needs a reason why a constant does not do.
    #[test]
    fn an_installation_with_one_provider_has_at_most_a_hundred_settings() {
        let mut counts: BTreeMap<Option<String>, usize> = BTreeMap::new();
        for Setting { key, .. } in every_setting(ask).unwrap() {
            let of_provider = key.strip_prefix("provider.").and_then(|rest| rest.split_once('.'));
            *counts.entry(of_provider.map(|(kind, _)| kind.to_owned())).or_default() += 1;
        }
        let common = counts.remove(&None).unwrap();
        let most = counts.values().max().unwrap();
        assert!(common + most <= 100, "{common} settings, and {counts:?} of the providers");
    }

    /// Returns the providers' kinds without the one that only builds with the tests have.
    fn shipped_kinds() -> Vec<&'static str> {
        let mut kinds = [&peerpod_providers::kinds(), peerpod_providers::left_out()].concat();
        kinds.retain(|kind| *kind != "fake");
        kinds.sort_unstable();
        kinds
    }

    /// Writes sections on lines of their own, and each setting on one line. A null takes back the value of another file,
    /// but no value that is `needed`.
    fn write(schema: &Value, needed: bool, indent: usize, text: &mut String) {
        let Some(properties) = schema["properties"].as_object() else {
            let is_open = needed || schema["type"] == "object" || schema["type"][1] == "null";
            let leaf = if is_open { schema.clone() } else { json!({"anyOf": [schema, {"type": "null"}]}) };
            return text.push_str(&leaf.to_string());
        };
        let (space, required) = (" ".repeat(indent), &schema["required"]);
        text.push_str(&format!("{{\n{space}  \"type\": {},\n", schema["type"]));
        if !required.is_null() {
            text.push_str(&format!("{space}  \"required\": {required},\n"));
        }
        text.push_str(&format!("{space}  \"additionalProperties\": false,\n{space}  \"properties\": {{\n"));
        for (number, (name, property)) in properties.iter().enumerate() {
            text.push_str(&format!("{}{space}    \"{name}\": ", if number == 0 { "" } else { ",\n" }));
            let needed = required.as_array().is_some_and(|all| all.iter().any(|one| one == name));
            write(property, needed, indent + 4, text);
        }
        text.push_str(&format!("\n{space}  }}\n{space}}}"));
    }

    /// Removes what must be given: variables may give it instead of the file.
    fn forget_required(schema: &mut Value) {
        if let Some(section) = schema.as_object_mut() {
            section.remove("required");
            let properties = section.get_mut("properties").and_then(Value::as_object_mut);
            properties.into_iter().flat_map(|all| all.values_mut()).for_each(forget_required);
        }
    }

    /// The chart's value `config` has the schema of the file, without the paths, which the chart sets. It needs the
    /// provider that nodes and controller share.
    #[test]
    fn documented_values_of_the_chart_have_every_key() {
        let mut schema = whole_schema().unwrap();
        forget_required(&mut schema);
        (schema["type"], schema["required"]) = (json!("object"), json!(["provider"]));
        schema["properties"]["paths"] = json!({"type": "object", "maxProperties": 0,
            "description": "Set by the value `paths`, which the mounts follow."});
        let provider = &mut schema["properties"]["provider"];
        (provider["type"], provider["required"]) = (json!("object"), json!(["kind"]));
        provider["properties"].as_object_mut().unwrap().remove("fake");
        provider["properties"]["kind"]["enum"] = json!(shipped_kinds());
        let mut text = String::new();
        write(&schema, true, 4, &mut text);

        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/chart/values.schema.json");
        let file = std::fs::read_to_string(path).unwrap();
        let (before, rest) = file.split_once("\n    \"config\": ").unwrap();
        let (_, after) = rest.split_once(",\n    \"provider\": {\n      \"type\": \"object\",").unwrap();
        let wanted = format!(
            "{before}\n    \"config\": {text},\n    \"provider\": {{\n      \"type\": \"object\",{after}"
        );
        let read = |text: &str| {
            let mut all: Value = serde_json::from_str(text).unwrap();
            // A build does not know the providers that it leaves out.
            let known = &mut all["properties"]["config"]["properties"]["provider"]["properties"];
            for kind in peerpod_providers::left_out() {
                known[kind] = Value::Null;
            }
            all
        };
        if std::env::var_os("PEERPOD_UPDATE").is_some() && peerpod_providers::left_out().is_empty() {
            std::fs::write(path, wanted).unwrap();
        } else {
            let why = "deploy/chart/values.schema.json: PEERPOD_UPDATE=1 cargo test documented writes it";
            assert!(read(&wanted) == read(&file), "{why}, in a build with CLOUDS=1");
        }
    }

    #[test]
    fn documented_settings_are_up_to_date() {
        // All builds have the same page. Providers that the default build leaves out have tables of their own settings.
        let mut settings = every_setting(ask_node).unwrap();
        let has_own_table = |key: &str| key.starts_with("provider.aws.") || key.starts_with("provider.byom.");
        settings.retain(|setting| !has_own_table(&setting.key));
        for setting in settings.iter_mut().filter(|setting| setting.key == "provider.kind") {
            setting.schema = json!({"enum": shipped_kinds()});
        }
        let text = reference::settings(&settings);
        reference::section("configuration.md", "node", &text).unwrap();
    }
}
