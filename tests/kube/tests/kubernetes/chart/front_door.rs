//! The command line and the chart's check, from the empty node to the first pod. Their outputs are those of
//! docs/front-door.md.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, ensure};
use k8s_openapi::jiff::Timestamp;
use peerpod_test_reference::capture;
use serde_json::{Value, json};

use super::{Installed, NAMESPACE};
use crate::cases::{Case, NOTE, front_door};
use crate::node::KATA_FILE;

/// Programs with lines about a pod.
const ORIGINS: [&str; 4] = ["node", "relay", "guest", "agent"];
/// Lines of each program, and characters of each line, that the page shows.
const SHOWN: (usize, usize) = (2, 200);
/// Key of Kata's configuration that is made wrong for a moment. No pod starts meanwhile.
const KEY: &str = "experimental_force_guest_pull";

impl Installed<'_> {
    /// Records a command of the installation, and its output.
    pub(super) fn record(&self, command: &str, output: &str) {
        let output = output.replace(&*self.folder.to_string_lossy(), "/test");
        let text = format!("# {command}\n{}\n", output.trim_end());
        self.commands.borrow_mut().push(text);
    }

    /// Returns the output of the command line, which must succeed.
    fn peerpod(&self, words: &[&str]) -> anyhow::Result<String> {
        let (code, text, errors) = front_door::peerpod(&Case::of(self.node, "users"), words)?;
        ensure!(code == Some(0), "peerpod {}: {code:?} {text}{errors}", words.join(" "));
        Ok(text.replace(&*self.folder.to_string_lossy(), "/test"))
    }
}

fn same(name: &str, command: &str, text: &str) -> anyhow::Result<()> {
    capture(name, command, text).map_err(anyhow::Error::msg)
}

/// Checks the node before the installation: nothing of Peerpod is there, and nothing is wrong.
pub(super) fn before(on: &Installed<'_>) -> anyhow::Result<()> {
    on.record("kubectl get nodes", &on.node.kubectl(&["get", "nodes"])?);
    let mut values: Value = serde_json::from_slice(&fs::read(&on.values)?)?;
    let libvirt = values["config"]["provider"]["libvirt"].as_object_mut().context("settings")?;
    libvirt.retain(|_, setting| !setting.is_null());
    values["config"]["provider"]["kind"] = json!("libvirt");
    let file = on.folder.join("peerpod.yaml");
    fs::write(&file, values["config"].to_string())?;
    let text = on.peerpod(&["check", "--pre", "--config", &file.to_string_lossy()])?;
    let command = "peerpod check --pre --config peerpod.yaml";
    same("check before the installation", command, &text)?;
    on.record(&format!("{command} | tail -n 1"), text.trim_end().rsplit('\n').next().unwrap_or_default());
    Ok(())
}

/// Compares the way so far with the page.
pub(super) fn installation(on: &Installed<'_>) -> anyhow::Result<()> {
    let commands = on.commands.borrow().join("\n");
    println!("{commands}");
    let (first, rest) = commands.split_once('\n').context("commands")?;
    same("installation", first.trim_start_matches("# "), rest)
}

/// Shows the first pod by the API server.
pub(super) fn shows(on: &Installed<'_>) -> anyhow::Result<()> {
    let list = Case::of(on.node, "users").until("the PeerPod's phase", || {
        Ok(Some(on.peerpod(&["list"])?).filter(|list| list.contains("running")))
    })?;
    same("list", "peerpod list", &list)?;
    let console = on.peerpod(&["console", "users/p"])?;
    ensure!(console.contains("kata-agent"), "{console}");
    let described = on.peerpod(&["describe", "users/p"])?;
    for part in ["Normal VMCreated", "Normal VMReady", "end of the console\n  "] {
        ensure!(described.contains(part), "{part}: {described}");
    }
    same("describe in a cluster", "peerpod describe users/p", &described)?;
    let orphans = on.peerpod(&["orphans", "-o", "json"])?;
    ensure!(orphans.trim() == "[]", "{orphans}");
    sysdump(on)?;
    logs(on)
}

/// The archive of the cluster has the objects, the logs, and the parts of the node.
fn sysdump(on: &Installed<'_>) -> anyhow::Result<()> {
    let out = on.folder.join("cluster.tar.gz").display().to_string();
    let mut contents = on.peerpod(&["sysdump", "--out", &out])?;
    // The names of pods end by chance.
    let labels = "-o=custom-columns=:metadata.name,:metadata.labels.app\\.kubernetes\\.io/component";
    for pod in on.node.kubectl(&["-n", NAMESPACE, "get", "pods", "--no-headers", labels])?.lines() {
        let mut words = pod.split_whitespace();
        let (name, component) = words.next().zip(words.next()).with_context(|| format!("a pod: {pod}"))?;
        contents = contents.replace(name, &format!("peerpod-{component}-x7k2p"));
    }
    let parts: Vec<&str> = contents.lines().filter(|line| line.starts_with(' ')).collect();
    same("sysdump of a cluster", "peerpod sysdump", &parts.join("\n"))
}

/// The lines of node, relay, guest and agent about the pod are in one order of time.
fn logs(on: &Installed<'_>) -> anyhow::Result<()> {
    let text = Case::of(on.node, "users").until("lines of all four programs", || {
        let text = on.peerpod(&["logs", "users/p"])?;
        let has = |origin: &&str| text.lines().any(|line| line.split(' ').next() == Some(*origin));
        Ok(ORIGINS.iter().all(has).then_some(text))
    })?;
    let listed: Value = serde_json::from_str(&on.peerpod(&["list", "-o", "json"])?)?;
    let id = listed[0]["sandbox"].as_str().context("a sandbox")?;
    ensure!(text.lines().all(|line| line.contains(id)), "lines without {id}: {text}");
    let time = |line: &str| line.split_whitespace().nth(1)?.parse::<Timestamp>().ok();
    let times: Option<Vec<Timestamp>> = text.lines().map(time).collect();
    ensure!(times.is_some_and(|times| times.is_sorted()), "not in one order: {text}");
    let mut seen = BTreeMap::<&str, usize>::new();
    let mut shown = String::new();
    for line in text.lines() {
        let count = seen.entry(line.split(' ').next().unwrap_or_default()).or_default();
        *count += 1;
        if *count <= SHOWN.0 {
            shown.extend(line.chars().take(SHOWN.1).chain(['\n']));
        }
    }
    println!("{NOTE}lines about the pod: {seen:?}");
    same("logs", "peerpod logs users/p", &shown)
}

/// The chart's check succeeds on the healthy node. That of an upgrade names a fault of Kata's configuration, and succeeds
/// when it is mended.
pub(super) fn check(on: &Installed<'_>) -> anyhow::Result<()> {
    complete(on, 1)?;
    println!("{}", log(on, 1, "Succeeded")?.context("no pod of the check has succeeded")?);
    let right = fs::read_to_string(KATA_FILE)?;
    let wrong = right.replace(&format!("{KEY} = true"), &format!("{KEY} = false"));
    ensure!(wrong != right, "{KATA_FILE} has no {KEY}");
    fs::write(KATA_FILE, wrong)?;
    on.helm_upgrade(&["--reuse-values"])?;
    let case = Case::of(on.node, NAMESPACE);
    let failed = case.until("a check that has failed", || log(on, 2, "Failed"));
    fs::write(KATA_FILE, right)?;
    let failed = failed?;
    let faults: Vec<&str> = failed.lines().filter(|line| line.starts_with('✗')).collect();
    println!("{NOTE}{}", faults.join("\n"));
    ensure!(matches!(faults[..], [fault] if fault.contains(&format!("kata/key runtime.{KEY}"))), "{failed}");
    complete(on, 2)
}

/// Waits until the check of a revision of the release has succeeded: a pod that failed is followed by another one.
fn complete(on: &Installed<'_>, revision: u32) -> anyhow::Result<()> {
    let job = format!("job/peerpod-check-{revision}");
    let done =
        on.node.kubectl(&["-n", NAMESPACE, "wait", "--for=condition=Complete", &job, "--timeout=240s"]);
    done.map(drop).with_context(|| log(on, revision, "Failed").ok().flatten().unwrap_or_default())
}

/// Returns the log of a pod of the check in this phase, if there is one.
fn log(on: &Installed<'_>, revision: u32, phase: &str) -> anyhow::Result<Option<String>> {
    let (of, phase) =
        (format!("job-name=peerpod-check-{revision}"), format!("--field-selector=status.phase={phase}"));
    let pods = on.node.kubectl(&["-n", NAMESPACE, "get", "pods", "-l", &of, &phase, "-o", "name"])?;
    let Some(pod) = pods.lines().next() else { return Ok(None) };
    on.node.kubectl(&["-n", NAMESPACE, "logs", pod]).map(Some)
}
