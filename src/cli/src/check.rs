//! `peerpod check [--pre]`: checks node, container runtime, Kata, cluster, network and provider. Each item has a verdict,
//! its cause and its remedy. Facts are gathered first; pure functions judge them. It changes nothing.
//!
//! May touch: files below the root folder of the node (read only), network namespaces of its own, ports of this node and
//! of other nodes' relays, the API server, and the provider (preflight only).

mod cluster;
mod config;
mod kernel;
mod network;
mod provider;
mod runtime;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;

use peerpod_base::config::Sources;
use peerpod_common::files;
use serde_json::Value;

use crate::item::{Area, Item, Report};
use config::Config;

use crate::output::Output;

/// Exit code of mistakes that keep the check from running.
const NOT_DONE: u8 = 2;
/// Size limit of a configuration file of the node.
const MOST_FILE: u64 = 1 << 20;

/// Arguments of `peerpod check`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct CheckArgs {
    /// Checks before the installation: no daemon runs yet
    #[arg(long)]
    pre: bool,
    #[command(flatten)]
    output: Output,
    /// Folder that holds the node's root file system, for a check in a container
    #[arg(long, value_name = "FOLDER", default_value = "/")]
    root: PathBuf,
    /// The configuration file [default: PEERPOD_CONFIG, or else /etc/peerpod/peerpod.yaml if it exists]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The account of the node's daemon, whose rights are asked for [default: this program's own]
    #[arg(long, value_name = "NAMESPACE/NAME")]
    account: Option<Account>,
}

/// A service account.
#[derive(Clone, Debug)]
struct Account {
    namespace: String,
    name: String,
}

impl FromStr for Account {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Account, &'static str> {
        match text.split_once('/') {
            Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() && !name.contains('/') => {
                Ok(Account { namespace: namespace.to_owned(), name: name.to_owned() })
            }
            _ => Err("write NAMESPACE/NAME"),
        }
    }
}

/// Checks everything and prints the items. Exit codes: 0 no fault, 1 a fault, 2 the configuration cannot be read.
pub(crate) async fn run(args: CheckArgs, settings: Vec<String>) -> anyhow::Result<ExitCode> {
    let mut sources = Sources::of_this_process(settings);
    sources.file = args.config.clone().or(sources.file);
    let (config, first) = match Config::read(sources) {
        Ok(read) => read,
        Err(mistakes) => {
            eprintln!("{mistakes}");
            return Ok(ExitCode::from(NOT_DONE));
        }
    };
    let mut items = vec![first];
    items.extend(check(&args, &config).await);
    let report = Report::new(items);
    args.output.print(&report, |_| report.text())?;
    Ok(if report.failed > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

async fn check(args: &CheckArgs, config: &Config) -> Vec<Item> {
    let (of_cluster, seen) = cluster::check(config, args.pre, args.account.as_ref()).await;
    let class = config.list("webhook.runtime-classes").into_iter().next().unwrap_or_default();
    let handler = seen.handler.unwrap_or(class);
    let mut items = kernel::check(&args.root, config);
    items.extend(runtime::check(&args.root, config, &handler, seen.runtime.as_deref()));
    items.extend(of_cluster);
    if !args.pre {
        items.extend(network::daemons(config));
    }
    items.extend(network::check(config, args.pre, &seen.peers));
    if !args.pre {
        items.push(Area::Network.item("vms", network::vms::check(config).await));
    }
    items.extend(provider::check(config, network::is_running(config), args.pre).await);
    items
}

/// Path below the node's root folder.
fn below(root: &Path, path: &str) -> PathBuf {
    root.join(path.trim_start_matches('/'))
}

/// Reads a text file of the node. The error names the file.
fn read(root: &Path, path: &str) -> Result<String, String> {
    let bytes = files::read(&below(root, path), MOST_FILE).map_err(|why| format!("{path}: {why}"))?;
    let bytes = bytes.ok_or_else(|| format!("{path} is not there"))?;
    String::from_utf8(bytes).map_err(|why| format!("{path}: {why}"))
}

/// Reads a TOML file of the node. The error names the file.
fn read_toml(root: &Path, path: &str) -> Result<Value, String> {
    toml::from_str(&read(root, path)?).map_err(|why| format!("{path}: {why}"))
}
