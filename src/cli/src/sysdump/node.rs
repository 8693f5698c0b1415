//! The parts of a node: the node's own answers, the relay's, configuration, ledger index, network, logs, versions.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use peerpod_base::config::{Sources, print};
use peerpod_node::admin::{Detail, NodeStatus, Sandbox};
use serde_json::Value;
use tokio::time::error::Elapsed;
use tokio::time::{Instant, timeout_at};

use super::Dump;
use crate::source::Node;
use crate::status::of_relay;
use crate::{config, logs, run};

/// Sandboxes with details and network; the list has all.
const SANDBOXES: usize = 100;
/// Time limit of their details and network together.
const DETAILS: Duration = Duration::from_secs(180);
/// Number of timeouts after which the rest of them is left out.
const TIMEOUTS: usize = 2;
/// Phases of sandboxes that are starting.
const STARTING: [&str; 3] = ["created", "booting", "joining"];
/// Folders with the node's own answers.
pub(super) const ANSWERS: [&str; 2] = ["node/", "sandboxes/"];
/// Bytes at the end of each log.
const LOG: u64 = 16 << 20;
/// Time limit of one program.
const PROGRAM: Duration = Duration::from_secs(10);
/// Folders with Kata's configuration.
const KATA: [&str; 4] = [
    "/etc/kata-containers",
    "/opt/kata/share/defaults/kata-containers",
    "/opt/kata/share/defaults/kata-containers/runtime-rs",
    "/usr/share/defaults/kata-containers",
];
/// Name of a part, and the program that prints it.
type Program = (&'static str, &'static [&'static str]);
const VERSIONS: [Program; 4] = [
    ("kernel", &["uname", "-a"]),
    ("containerd", &["containerd", "--version"]),
    ("cri-o", &["crio", "--version"]),
    ("kata-shim", &["containerd-shim-kata-v2", "--version"]),
];
const NETWORK: [Program; 6] = [
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
    for (name, program) in VERSIONS {
        dump.text_of(&format!("versions/{name}.txt"), run::output(program, PROGRAM).await)?;
    }
    let programs = network(dump).await?;
    sandboxes(dump, node, &programs).await?;
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

/// Adds the network of this machine. Returns those of [`NETWORK`] whose programs are there: the container image has none.
async fn network(dump: &mut Dump) -> anyhow::Result<Vec<Program>> {
    let (mut there, mut missing) = (Vec::new(), BTreeSet::<&str>::new());
    for (name, program) in NETWORK {
        match run::output(program, PROGRAM).await {
            Err(error) if is_missing(&error) => missing.extend(program.first().copied()),
            output => {
                there.push((name, program));
                dump.text_of(&format!("network/host/{name}.txt"), output)?;
            }
        }
    }
    if !missing.is_empty() {
        let missing: Vec<&str> = missing.into_iter().collect();
        dump.failures
            .push(format!("network: the parts of {} are left out: not found here", missing.join(", ")));
    }
    Ok(there)
}

/// Whether the program is not there.
fn is_missing(error: &anyhow::Error) -> bool {
    let io = error.chain().find_map(|cause| cause.downcast_ref::<io::Error>());
    io.is_some_and(|io| io.kind() == ErrorKind::NotFound)
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

/// Time that is left for sandboxes.
struct Limits {
    until: Instant,
    timeouts: usize,
}

impl Limits {
    /// Returns the result of a step, and counts its timeout.
    async fn step<T>(&mut self, step: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
        let done = timeout_at(self.until, step).await;
        let done = done.with_context(|| format!("the sandboxes took longer than {DETAILS:?}"));
        let done = done.and_then(|result| result);
        if done.as_ref().is_err_and(|error| error.chain().any(|cause| cause.is::<Elapsed>())) {
            self.timeouts += 1;
        }
        done
    }

    fn are_reached(&self) -> bool {
        self.timeouts >= TIMEOUTS || Instant::now() >= self.until
    }
}

/// Adds the list of sandboxes, and details and network of each, within [`Limits`].
pub(super) async fn sandboxes(dump: &mut Dump, node: &Node, network: &[Program]) -> anyhow::Result<()> {
    let mut limits = Limits { until: Instant::now() + DETAILS, timeouts: 0 };
    let list: anyhow::Result<Vec<Sandbox>> = limits.step(node.get("/v1/sandboxes")).await;
    let found: Vec<Sandbox> = list.iter().flatten().cloned().collect();
    dump.value_of("sandboxes/list", list)?;
    for (number, sandbox) in found.iter().enumerate() {
        if number >= SANDBOXES || limits.are_reached() {
            dump.failures.push(format!("sandboxes/{}: left out", sandbox.id));
        } else if !details(dump, node, sandbox, network, &mut limits).await? {
            dump.failures.push(format!("sandboxes/{}: its other parts are left out", sandbox.id));
        }
    }
    let without = found.iter().filter(|sandbox| !has_console(sandbox)).count();
    if without > 0 {
        dump.failures
            .push(format!("consoles: left out of {without} sandboxes that neither failed nor are starting"));
    }
    Ok(())
}

/// The provider is slow to answer, so the console is asked for only where it may tell a reason.
fn has_console(sandbox: &Sandbox) -> bool {
    sandbox.failed || STARTING.contains(&&*sandbox.phase)
}

/// Adds details, console and network of a sandbox. Returns false if the limits are reached before all are added.
async fn details(
    dump: &mut Dump,
    node: &Node,
    sandbox: &Sandbox,
    network: &[Program],
    limits: &mut Limits,
) -> anyhow::Result<bool> {
    let id = &sandbox.id;
    let detail: anyhow::Result<Detail> = limits.step(node.get(&format!("/v1/sandboxes/{id}"))).await;
    let netns = detail.as_ref().ok().and_then(|detail| detail.network.netns.clone());
    dump.value_of(&format!("sandboxes/{id}"), detail)?;
    if has_console(sandbox) {
        if limits.are_reached() {
            return Ok(false);
        }
        let console: anyhow::Result<String> =
            limits.step(node.get(&format!("/v1/sandboxes/{id}/console"))).await;
        dump.text_of(&format!("sandboxes/{id}.console.txt"), console)?;
    }
    let Some(netns) = netns else { return Ok(true) };
    let enter = format!("--net={}", netns.display());
    for (name, program) in network {
        if limits.are_reached() {
            return Ok(false);
        }
        let words: Vec<&str> = ["nsenter", &enter].into_iter().chain(program.iter().copied()).collect();
        dump.text_of(&format!("network/{id}/{name}.txt"), limits.step(run::output(&words, PROGRAM)).await)?;
    }
    Ok(true)
}

fn kata(dump: &mut Dump) -> anyhow::Result<()> {
    let mut is_there = false;
    for folder in KATA {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let files = entries
            .map(|entry| entry.path())
            .filter(|path| path.extension().is_some_and(|end| end == "toml"));
        for path in files {
            is_there = true;
            let name = path.display().to_string().trim_start_matches('/').replace('/', "-");
            dump.text_of(&format!("kata/{name}"), logs::tail(&path, LOG))?;
        }
    }
    if !is_there {
        dump.failures.push(format!("kata: no configuration is in {}", KATA.join(", ")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn the_limits_are_reached_after_two_timeouts_or_at_their_end() {
        let mut limits = Limits { until: Instant::now() + DETAILS, timeouts: 0 };
        for timeouts in 0..TIMEOUTS {
            assert!(!limits.are_reached(), "{timeouts} timeouts");
            let away = async { timeout(Duration::ZERO, pending::<()>()).await.context("ask the node") };
            limits.step(away).await.unwrap_err();
        }
        assert!(limits.are_reached());
        let mut limits = Limits { until: Instant::now(), timeouts: 0 };
        assert!(limits.are_reached());
        limits.step(pending::<anyhow::Result<()>>()).await.unwrap_err();
    }

    #[test]
    fn only_failed_and_starting_sandboxes_have_a_console() {
        let of = |phase: &str, failed| {
            let value = serde_json::json!({
                "id": "a", "pod": "-", "phase": phase, "vm": null, "created_ms": 0, "started": true,
                "failed": failed, "cause": null,
            });
            has_console(&serde_json::from_value(value).unwrap())
        };
        assert!(of("leaving", true) && of("booting", false) && !of("running", false));
    }
}
