//! The parts of a node: the node's own answers, the relay's, configuration, ledger index, network, logs, versions.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use peerpod_base::config::{Sources, print};
use peerpod_node::admin::{Detail, NodeStatus, Sandbox};
use serde_json::Value;
use tokio::process::Command;
use tokio::time::timeout;

use super::Dump;
use crate::source::Node;
use crate::status::of_relay;
use crate::{config, logs};

/// Sandboxes with details and network; the list has all.
const SANDBOXES: usize = 100;
/// Bytes at the end of each log.
const LOG: u64 = 16 << 20;
/// Time limit and size limit of one program's output.
const PROGRAM: Duration = Duration::from_secs(10);
const OUTPUT: usize = 4 << 20;
/// Folders with Kata's configuration.
const KATA: [&str; 4] = [
    "/etc/kata-containers",
    "/opt/kata/share/defaults/kata-containers",
    "/opt/kata/share/defaults/kata-containers/runtime-rs",
    "/usr/share/defaults/kata-containers",
];
/// Name of the part, and the program that prints it.
const VERSIONS: [(&str, &[&str]); 4] = [
    ("kernel", &["uname", "-a"]),
    ("containerd", &["containerd", "--version"]),
    ("cri-o", &["crio", "--version"]),
    ("kata-shim", &["containerd-shim-kata-v2", "--version"]),
];
const NETWORK: [(&str, &[&str]); 6] = [
    ("addresses", &["ip", "-details", "address"]),
    ("rules", &["ip", "rule"]),
    ("routes", &["ip", "route", "show", "table", "all"]),
    ("qdiscs", &["tc", "qdisc"]),
    ("filters", &["tc", "filter", "show", "dev", "eth0", "ingress"]),
    ("nft", &["nft", "list", "ruleset"]),
];

/// Collects the parts. `settings`: the configuration file and the flags beside it.
pub(super) async fn collect(
    dump: &mut Dump,
    node: &Node,
    settings: (Option<PathBuf>, Vec<String>),
    logs: Vec<PathBuf>,
) -> anyhow::Result<()> {
    let status: anyhow::Result<NodeStatus> = node.get("/v1/node").await;
    let admin = status.as_ref().ok().map(|status| status.relay.admin);
    dump.value_of("node/status", status)?;
    for path in ["readyz", "metrics"] {
        let answer = node.ask(&format!("/{path}")).await;
        dump.text_of(&format!("node/{path}.txt"), answer.map(|(_, body)| lossy(&body)))?;
        if let Some(admin) = admin {
            let answer = of_relay(admin, &format!("/{path}")).await;
            dump.text_of(&format!("relay/{path}.txt"), answer.map(|body| lossy(&body)))?;
        }
    }
    dump.value_of("node/orphans", node.get::<Value>("/v1/orphans").await)?;
    configuration(dump, settings)?;
    sandboxes(dump, node).await?;
    for (name, program) in VERSIONS {
        dump.text_of(&format!("versions/{name}.txt"), run(program).await)?;
    }
    dump.text("versions/peerpod.txt", env!("CARGO_PKG_VERSION"))?;
    for (name, program) in NETWORK {
        dump.text_of(&format!("network/host/{name}.txt"), run(program).await)?;
    }
    kata(dump)?;
    match logs::files(logs) {
        Ok(files) => {
            for (number, path) in files.iter().enumerate() {
                let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                dump.text_of(&format!("logs/{number}-{name}"), logs::tail(path, LOG))?;
            }
            Ok(())
        }
        Err(error) => dump.failed("logs", &error),
    }
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Adds the configuration with the origin of each value, and the index of the state directory that it names.
fn configuration(dump: &mut Dump, (file, flags): (Option<PathBuf>, Vec<String>)) -> anyhow::Result<()> {
    let mut sources = Sources::of_this_process(flags);
    sources.file = file.or(sources.file);
    let settings = match config::read(sources) {
        Ok(settings) => settings,
        Err(mistakes) => return dump.text("configuration.yaml", &mistakes.to_string()),
    };
    dump.text("configuration.yaml", &print(&settings))?;
    let state = settings.iter().find(|setting| setting.key == "paths.state-dir");
    let state = state.and_then(|setting| setting.value.as_str()).unwrap_or_default();
    let mut index = String::new();
    for folder in ["sandboxes", "batches", "inbox", "quarantine"] {
        let entries = std::fs::read_dir(Path::new(state).join(folder)).into_iter().flatten().flatten();
        for entry in entries {
            let Ok(metadata) = entry.metadata() else { continue };
            let age = metadata.modified().ok().and_then(|at| at.elapsed().ok()).unwrap_or_default().as_secs();
            let name = entry.file_name();
            writeln!(index, "{:>10}  {age:>10} s  {folder}/{}", metadata.len(), name.to_string_lossy()).ok();
        }
    }
    dump.text("ledger-index.txt", &index)
}

/// Adds the list of sandboxes, and details and network of each.
async fn sandboxes(dump: &mut Dump, node: &Node) -> anyhow::Result<()> {
    let list: anyhow::Result<Vec<Sandbox>> = node.get("/v1/sandboxes").await;
    let ids: Vec<String> = list.iter().flatten().map(|one| one.id.clone()).collect();
    dump.value_of("sandboxes/list", list)?;
    for id in ids.iter().take(SANDBOXES) {
        let detail: anyhow::Result<Detail> = node.get(&format!("/v1/sandboxes/{id}")).await;
        let netns = detail.as_ref().ok().and_then(|detail| detail.netns.clone());
        dump.value_of(&format!("sandboxes/{id}"), detail)?;
        let console: anyhow::Result<String> = node.get(&format!("/v1/sandboxes/{id}/console")).await;
        dump.text_of(&format!("sandboxes/{id}.console.txt"), console)?;
        let Some(netns) = netns else { continue };
        let enter = format!("--net={}", netns.display());
        for (name, program) in NETWORK {
            let words: Vec<&str> = ["nsenter", &enter].into_iter().chain(program.iter().copied()).collect();
            dump.text_of(&format!("network/{id}/{name}.txt"), run(&words).await)?;
        }
    }
    Ok(())
}

fn kata(dump: &mut Dump) -> anyhow::Result<()> {
    for folder in KATA {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let files = entries
            .map(|entry| entry.path())
            .filter(|path| path.extension().is_some_and(|end| end == "toml"));
        for path in files {
            let name = path.display().to_string().trim_start_matches('/').replace('/', "-");
            dump.text_of(&format!("kata/{name}"), logs::tail(&path, LOG))?;
        }
    }
    Ok(())
}

/// Returns the output of a program.
async fn run(words: &[&str]) -> anyhow::Result<String> {
    let Some((program, rest)) = words.split_first() else { bail!("no program") };
    let output = Command::new(program).args(rest).kill_on_drop(true).output();
    let output =
        timeout(PROGRAM, output).await.with_context(|| format!("no end of {program} within {PROGRAM:?}"))?;
    let output = output.with_context(|| format!("start {program}"))?;
    if !output.status.success() {
        bail!("{program}: {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    let end = output.stdout.len().min(OUTPUT);
    Ok(lossy(output.stdout.get(..end).unwrap_or_default()))
}
