//! The command line for people. Subcommands that show peer pods ask the node beside them by its admin socket, or a
//! cluster by a kubeconfig. It may touch: the admin socket, the API server, files that its arguments name.
//!
//! Exit codes: 0 success; 1 the command failed, or found a fault; 2 the arguments are wrong.

mod check;
mod complete;
mod config;
mod connectivity;
mod convert;
mod drain;
mod image;
mod inspect;
mod item;
mod logs;
mod output;
mod provider;
mod run;
mod signals;
mod source;
mod status;
mod sysdump;
mod version;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::error::ErrorKind;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use peerpod_base::program;

/// Note in the help of the subcommands that read a configuration.
const SETTINGS: &str = "Settings: --section.key VALUE sets one key, before the environment and the file. \
                        `peerpod config schema` has every key.";

/// Name of the program where kubectl starts it as a plugin.
const PLUGIN: &str = "kubectl-peerpod";

/// Checks and shows peer pods, on a node and in a cluster
#[derive(Debug, Parser)]
#[command(
    name = "peerpod",
    version,
    arg_required_else_help = true,
    after_help = "Exit codes: 0 success; 1 the command failed, or found a fault; 2 the arguments are wrong.\n\
                  As `kubectl-peerpod` in a folder of PATH, the same program is the plugin `kubectl peerpod`."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Shows whether pods can start: node and relay, or controller, programs and nodes; exit code 1 if not
    Status(status::StatusArgs),
    /// Checks node, container runtime, Kata, cluster, network and provider; exit code 1 if there is a fault
    #[command(after_help = SETTINGS)]
    Check(check::CheckArgs),
    /// Lists the peer pods
    List(inspect::List),
    /// Shows one peer pod: record, VM, stages, Events, last lines of the console
    Describe(inspect::One),
    /// Draws one start as a waterfall of its stages
    Trace(inspect::One),
    /// Prints the lines of node, relay, guest and agent about one peer pod, by time
    Logs(logs::LogsArgs),
    /// Prints the end of a VM's console, as the provider has it
    Console(inspect::Console),
    /// Lists the VMs of the node, or of all nodes of the cluster, without a record
    Orphans(inspect::Orphans),
    /// Cordons a node and evicts its peer pods, until their VMs are gone; exit code 1 if one is left
    Drain(drain::DrainArgs),
    /// Starts pods in a namespace of its own, tests their connections and removes them; exit code 1 if there is a fault
    Test(connectivity::TestArgs),
    /// Collects the state for a report into one file without secrets
    #[command(after_help = SETTINGS)]
    Sysdump(sysdump::SysdumpArgs),
    /// Prints the versions of this program and of the node or the cluster
    Version(version::VersionArgs),
    /// Checks, prints and converts the configuration
    #[command(subcommand)]
    Config(config::ConfigCommand),
    /// Tests a provider
    #[command(subcommand)]
    Provider(provider::ProviderCommand),
    /// Builds VM images and uploads them to a provider
    #[command(subcommand)]
    Image(image::ImageCommand),
    /// Prints the completions for a shell
    Completions {
        /// The shell
        #[arg(value_name = "SHELL")]
        shell: clap_complete::Shell,
    },
    /// Writes a man page for each command
    Man {
        /// The folder of the pages
        #[arg(value_name = "FOLDER")]
        folder: PathBuf,
    },
}

impl Command {
    /// Whether `--section.key VALUE` is permitted.
    fn takes_settings(&self) -> bool {
        match self {
            Command::Config(command) => command.takes_settings(),
            Command::Image(command) => command.takes_settings(),
            Command::Check(_) | Command::Provider(_) | Command::Sysdump(_) => true,
            _ => false,
        }
    }

    fn run(self, settings: Vec<String>) -> anyhow::Result<ExitCode> {
        match self {
            Command::Config(command) => config::run(command, settings),
            Command::Check(args) => block_on(check::run(args, settings)),
            Command::Provider(command) => provider::run(command, settings),
            Command::Image(command) => block_on(image::run(command, settings)),
            Command::Completions { shell } => {
                let mut script = Vec::new();
                clap_complete::generate(shell, &mut Cli::command(), "peerpod", &mut script);
                // A closed output is no error.
                std::io::stdout().write_all(&script).ok();
                Ok(ExitCode::SUCCESS)
            }
            Command::Man { folder } => {
                let written = clap_mangen::generate_to(Cli::command(), &folder);
                written.with_context(|| format!("write the man pages to {}", folder.display()))?;
                Ok(ExitCode::SUCCESS)
            }
            Command::Status(args) => block_on(status::run(args)),
            Command::List(args) => block_on(inspect::list(args)),
            Command::Describe(args) => block_on(inspect::describe(args)),
            Command::Trace(args) => block_on(inspect::trace(args)),
            Command::Logs(args) => block_on(logs::run(args)),
            Command::Console(args) => block_on(inspect::console(args)),
            Command::Orphans(args) => block_on(inspect::orphans(args)),
            Command::Drain(args) => block_on(drain::run(args)),
            Command::Test(args) => block_on(connectivity::run(args)),
            Command::Sysdump(args) => block_on(sysdump::run(args, settings)),
            Command::Version(args) => block_on(version::run(args)),
        }
    }
}

/// Runs a subcommand that waits for answers.
fn block_on(command: impl Future<Output = anyhow::Result<ExitCode>>) -> anyhow::Result<ExitCode> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(command)
}

fn main() -> ExitCode {
    let name = std::env::args_os().next().unwrap_or_default();
    let is_named = |wanted: &str| std::path::Path::new(&name).file_stem().is_some_and(|name| name == wanted);
    if is_named(complete::NAME) {
        let completions = complete::complete(Cli::command(), &program::arguments().collect::<Vec<_>>());
        // A closed output is no error.
        std::io::stdout().write_all(completions.as_bytes()).ok();
        return ExitCode::SUCCESS;
    }
    let is_plugin = is_named(PLUGIN);
    let (command, settings) = match parse(is_plugin, program::arguments()) {
        Ok(parsed) => parsed,
        Err(answer) => {
            // Help and version go to standard output with code 0. A closed output is no error.
            answer.print().ok();
            return u8::try_from(answer.exit_code()).map_or(ExitCode::FAILURE, ExitCode::from);
        }
    };
    command.run(settings).unwrap_or_else(|error| {
        // Texts of clouds and of the API server must not drive the terminal.
        let text = peerpod_base::chain::chain(error.as_ref());
        let lines: Vec<String> = text.lines().map(output::safe).collect();
        eprintln!("peerpod: {}", lines.join("\n"));
        ExitCode::FAILURE
    })
}

/// Parses the arguments into a command and the settings among them.
fn parse(
    is_plugin: bool,
    arguments: impl Iterator<Item = String>,
) -> Result<(Command, Vec<String>), clap::Error> {
    let (name, bin_name) = if is_plugin { (PLUGIN, "kubectl peerpod") } else { ("peerpod", "peerpod") };
    let (words, settings) = split_settings(arguments);
    let mut command = Cli::command().bin_name(bin_name);
    let matches = command.try_get_matches_from_mut(std::iter::once(name.to_owned()).chain(words))?;
    let parsed = Cli::from_arg_matches(&matches)?.command;
    match settings.first() {
        Some(first) if !parsed.takes_settings() => {
            Err(command
                .error(ErrorKind::UnknownArgument, format!("this subcommand takes no setting `{first}`")))
        }
        _ => Ok((parsed, settings)),
    }
}

/// Parses a duration of an argument.
fn duration(text: &str) -> Result<std::time::Duration, String> {
    peerpod_base::config::parse_duration(text).map_err(|bad| bad.to_string())
}

/// Separates `--section.key VALUE` and `--section.key=VALUE` from the arguments that clap knows.
fn split_settings(arguments: impl Iterator<Item = String>) -> (Vec<String>, Vec<String>) {
    let (mut words, mut settings) = (Vec::new(), Vec::new());
    let mut arguments = arguments.peekable();
    while let Some(word) = arguments.next() {
        let (name, value) = word.split_once('=').map_or((&*word, None), |(name, value)| (name, Some(value)));
        if !(name.starts_with("--") && name.contains('.')) {
            words.push(word);
            continue;
        }
        let is_complete = value.is_some();
        settings.push(word);
        if !is_complete {
            settings.extend(arguments.next_if(|next| !next.starts_with("--")));
        }
    }
    (words, settings)
}

#[cfg(test)]
mod tests {
    use peerpod_test_reference as reference;

    use super::*;

    fn parsed(words: &[&str]) -> Result<(Command, Vec<String>), clap::Error> {
        parse(false, words.iter().map(ToString::to_string))
    }

    /// Appends the help of a command and of its subcommands.
    fn helps(command: &mut clap::Command, name: &str, texts: &mut Vec<String>) {
        texts.push(reference::help(name, &command.clone().bin_name(name).render_long_help().to_string()));
        for sub in command.get_subcommands_mut().filter(|sub| sub.get_name() != "help") {
            let name = format!("{name} {}", sub.get_name());
            helps(sub, &name, texts);
        }
    }

    #[test]
    fn documented_help_is_up_to_date() {
        let mut texts = Vec::new();
        helps(&mut Cli::command(), "peerpod", &mut texts);
        reference::section("cli.md", "peerpod", &texts.join("\n")).unwrap();
    }

    #[test]
    fn the_arguments_have_no_contradiction() {
        Cli::command().debug_assert();
    }

    #[test]
    fn settings_are_taken_from_any_place_and_only_where_they_count() {
        let words = [
            "provider",
            "check",
            "--crowd=5",
            "f.yaml",
            "--yes",
            "--provider.kind",
            "fake",
            "--log.level=warn",
        ];
        let (command, settings) = parsed(&words).unwrap();
        assert_eq!(settings, ["--provider.kind", "fake", "--log.level=warn"]);
        assert!(format!("{command:?}").contains("crowd: 5"), "{command:?}");
        let refused = parsed(&["config", "schema", "--log.level", "warn"]).unwrap_err();
        assert_eq!(
            (refused.exit_code(), refused.to_string().contains("--log.level")),
            (2, true),
            "{refused}"
        );
    }

    #[test]
    fn wrong_arguments_are_errors_of_usage() {
        for wrong in [
            &[][..],
            &["chekc"],
            &["config"],
            &["config", "chekc"],
            &["config", "convert-caa"],
            &["provider", "check"],
            &["provider", "check", "a", "b"],
            &["provider", "check", "a", "--crowd"],
            &["provider", "check", "a", "--crowd", "0"],
            &["provider", "check", "a", "--patience", "5"],
            &["provider", "check", "a", "--loud"],
            &["image", "build"],
            &["image", "upload"],
            &["image", "upload", "libvirt", "--prune", "0"],
            &["image", "build", "--kata", "4.1.0", "--provider.libvirt.pool=p"],
            &["check", "--account", "name"],
            &["check", "--account", "/name"],
            &["check", "--account", "namespace/"],
            &["check", "--account", "a/b/c"],
        ] {
            let error = parsed(wrong).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{wrong:?}: {error}");
        }
        for help in [&["help", "config"][..], &["help", "provider", "check"], &["--help"], &["--version"]] {
            assert_eq!(parsed(help).unwrap_err().exit_code(), 0, "{help:?}");
        }
    }

    #[test]
    fn a_plugin_has_the_name_of_its_command() {
        let help = parse(true, ["help", "config"].map(str::to_owned).into_iter()).unwrap_err();
        assert!(help.to_string().contains("Usage: kubectl peerpod config"), "{help}");
    }
}
