//! Subcommands about single peer pods: `list`, `describe`, `trace`, `console` and `orphans`. Read-only. In a cluster
//! `console` and `orphans` run `peerpod` in the pods of `peerpod-node`, because the provider answers the node.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::io::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use futures_util::{StreamExt as _, stream};
use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::jiff::Timestamp;
use peerpod_common::id::SandboxId;
use peerpod_node::admin::Orphan;
use serde::{Deserialize, Serialize};
use tokio::time::sleep;

use crate::output::{Colour, Format, Output, Table, paint, safe};
use crate::source::{Cluster, NO_DAEMON, Source, SourceArgs, Vm, since};

/// Interval of the questions of `list --watch`.
const WATCH: Duration = Duration::from_secs(2);
/// Lines of the console that `describe` shows.
const LAST_LINES: usize = 10;
/// Nodes that are asked at the same time, each by a process of kubectl.
const AT_ONCE: usize = 16;
/// Width of the waterfall, in characters.
const WIDTH: u64 = 40;

/// Arguments of `peerpod list`.
#[derive(Debug, clap::Args)]
pub(crate) struct List {
    #[command(flatten)]
    from: SourceArgs,
    #[command(flatten)]
    output: Output,
    /// Prints each change, until it is interrupted
    #[arg(short, long)]
    watch: bool,
}

/// Arguments of the subcommands about one peer pod.
#[derive(Debug, clap::Args)]
pub(crate) struct One {
    /// The pod as NAMESPACE/NAME or NAME, or the sandbox's id
    #[arg(value_name = "POD|ID")]
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) from: SourceArgs,
    #[command(flatten)]
    output: Output,
}

/// Arguments of `peerpod console`.
#[derive(Debug, clap::Args)]
pub(crate) struct Console {
    /// The pod as NAMESPACE/NAME or NAME, or the sandbox's id
    #[arg(value_name = "POD|ID")]
    name: String,
    #[command(flatten)]
    from: SourceArgs,
}

/// Arguments of `peerpod orphans`.
#[derive(Debug, clap::Args)]
pub(crate) struct Orphans {
    #[command(flatten)]
    from: SourceArgs,
    #[command(flatten)]
    output: Output,
    /// Lists only; there is no other form, as node and controller delete orphans themselves
    #[arg(long)]
    dry_run: bool,
}

/// Lists the peer pods.
pub(crate) async fn list(args: List) -> anyhow::Result<ExitCode> {
    let source = args.from.open().await?;
    let found = source.list().await?;
    args.output.print(&found, |wide| rows(&found, wide, true))?;
    if args.watch {
        watch(&source, args.output, found).await?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints each change of the list, until the source fails.
async fn watch(source: &Source, output: Output, mut before: Vec<Vm>) -> anyhow::Result<()> {
    loop {
        sleep(WATCH).await;
        let now = source.list().await?;
        let mut changed: Vec<Vm> = now.iter().filter(|vm| !before.contains(vm)).cloned().collect();
        let is_gone =
            |vm: &&Vm| !now.iter().any(|one| one.sandbox == vm.sandbox && one.peerpod == vm.peerpod);
        changed.extend(before.iter().filter(is_gone).map(|vm| Vm { phase: "gone".to_owned(), ..vm.clone() }));
        if !changed.is_empty() {
            output.print(&changed, |wide| rows(&changed, wide, false))?;
        }
        before = now;
    }
}

fn rows(vms: &[Vm], wide: bool, headings: bool) -> String {
    let mut names = vec!["POD", "PHASE", "NODE", "VM", "TYPE", "ZONE", "AGE"];
    if wide {
        names.extend(["SANDBOX", "MARKET", "IMAGE", "ADDRESSES", "CAUSE"]);
    }
    let mut table = Table::new(&names);
    for vm in vms {
        let id = vm.vm.clone().unwrap_or_default();
        let phase = if vm.failed { format!("{} (failed)", vm.phase) } else { vm.phase.clone() };
        let mut cells =
            vec![vm.pod.clone(), phase, vm.node.clone(), id, vm.fact("type"), vm.fact("zone"), vm.age()];
        if wide {
            let facts = ["market", "image", "addresses"].map(|name| vm.fact(name));
            cells.push(vm.sandbox.clone());
            cells.extend(facts);
            cells.push(vm.cause.clone().unwrap_or_default());
        }
        table.row(cells);
    }
    let text = table.to_string();
    match text.split_once('\n') {
        Some((_, rest)) if !headings => rest.to_owned(),
        _ => text,
    }
}

/// One peer pod with everything around it.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct Description {
    #[serde(flatten)]
    vm: Vm,
    events: Vec<EventLine>,
    /// The end of the console, each line cut where a secret may begin.
    console: Vec<String>,
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct EventLine {
    at: Option<Timestamp>,
    kind: String,
    reason: String,
    count: i32,
    message: String,
}

/// Prints the record, the stages, the Events and the last lines of one peer pod.
pub(crate) async fn describe(args: One) -> anyhow::Result<ExitCode> {
    let source = args.from.open().await?;
    let vm = source.find(&args.name).await?;
    let events = events(&source, &vm).await?;
    let described = match &source {
        Source::Node(_) => {
            let console = console_of(&source, &vm).await.map(|text| last_lines(&text)).unwrap_or_default();
            Description { vm, events, console }
        }
        Source::Cluster(cluster) => complete(cluster, vm, events).await,
    };
    args.output.print(&described, |_| described.text())?;
    Ok(ExitCode::SUCCESS)
}

/// Adds the facts that the PeerPod does not have: the pod's volumes, and the node's description of the sandbox.
async fn complete(cluster: &Cluster, mut vm: Vm, events: Vec<EventLine>) -> Description {
    let mut console = Vec::new();
    match of_node(cluster, &vm).await {
        Ok(own) => {
            (vm.faults, vm.warnings) = (own.vm.faults, own.vm.warnings);
            vm.facts.extend(own.vm.facts);
            console = own.console.iter().map(|line| peerpod_base::redact::line(line)).collect();
        }
        Err(error) => vm.warnings.push(format!(
            "network, guest, faults and console are not shown: {}",
            peerpod_base::chain::chain(error.as_ref())
        )),
    }
    match cluster.volumes_of(&vm).await {
        Ok(volumes) if volumes.is_empty() => {}
        Ok(volumes) => drop(vm.facts.insert("volumes".to_owned(), volumes.join("; "))),
        Err(error) => vm.warnings.push(format!("volumes are not shown: {error}")),
    }
    Description { vm, events, console }
}

/// Returns the node's description of the sandbox.
async fn of_node(cluster: &Cluster, vm: &Vm) -> anyhow::Result<Description> {
    let id = sandbox_of(vm)?;
    let pod = daemon_of(cluster, &vm.node, "the sandbox").await?;
    let text = cluster.ask_daemon(&pod, &["describe", id.as_str(), "-o", "json"]).await?;
    serde_json::from_str(&text).with_context(|| format!("read the answer of node {}", vm.node))
}

/// Returns the id of the VM's sandbox. A PeerPod may have any text there, also an option of the program that gets it.
fn sandbox_of(vm: &Vm) -> anyhow::Result<SandboxId> {
    SandboxId::new(&vm.sandbox)
        .with_context(|| format!("read the sandbox that the PeerPod of {} names", vm.pod))
}

/// Returns the pod of `peerpod-node` on a node. `what` is the object of the question.
async fn daemon_of(cluster: &Cluster, node: &str, what: &str) -> anyhow::Result<Pod> {
    match cluster.node_daemons().await?.remove(node) {
        Some(Ok(pod)) => Ok(pod),
        Some(Err(why)) => bail!("ask node {node} for {what}: {why}"),
        None => bail!("ask node {node} for {what}: {NO_DAEMON}"),
    }
}

async fn events(source: &Source, vm: &Vm) -> anyhow::Result<Vec<EventLine>> {
    let Source::Cluster(cluster) = source else { return Ok(Vec::new()) };
    let Some((namespace, pod)) = vm.pod.split_once('/') else { return Ok(Vec::new()) };
    let mut found = cluster.events(namespace, pod).await?;
    if let Some(peerpod) = vm.peerpod.as_deref().filter(|peerpod| *peerpod != pod) {
        found.extend(cluster.events(namespace, peerpod).await?);
    }
    drop_doubles(&mut found);
    let line = |event: Event| EventLine {
        at: event.last_timestamp.map(|at| at.0).or(event.event_time.map(|at| at.0)),
        kind: event.type_.unwrap_or_default(),
        reason: event.reason.unwrap_or_default(),
        count: event.count.unwrap_or(1),
        message: event.message.unwrap_or_default(),
    };
    let mut lines: Vec<EventLine> = found.into_iter().map(line).collect();
    lines.sort_by_key(|line| line.at);
    Ok(lines)
}

/// Drops each Event of a PeerPod that its pod has, too: the node posts it on both. Equal Events of a pod stay, such as
/// those of two containers.
fn drop_doubles(events: &mut Vec<Event>) {
    let words = |event: &Event| (event.reason.clone(), event.message.clone());
    let is_of = |event: &Event, kind: &str| event.involved_object.kind.as_deref() == Some(kind);
    let of_pod: HashSet<_> = events.iter().filter(|event| is_of(event, "Pod")).map(words).collect();
    events.retain(|event| !(is_of(event, "PeerPod") && of_pod.contains(&words(event))));
}

fn last_lines(text: &str) -> Vec<String> {
    let lines: Vec<&str> = text.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
    let last = lines.iter().skip(lines.len().saturating_sub(LAST_LINES));
    last.map(|line| peerpod_base::redact::line(line)).collect()
}

impl Description {
    fn text(&self) -> String {
        let Description { vm, events, console } = self;
        let mut text = String::new();
        let mut line = |name: &str, value: &str| {
            if !value.is_empty() {
                writeln!(text, "{name:<11} {}", safe(value)).ok();
            }
        };
        line("pod", &vm.pod);
        line("sandbox", &vm.sandbox);
        line("phase", &vm.phase);
        line(if vm.failed { "failed" } else { "ended" }, vm.cause.as_deref().unwrap_or_default());
        for fault in &vm.faults {
            line("fault", fault);
        }
        for warning in &vm.warnings {
            line("warning", warning);
        }
        line("node", &vm.node);
        line("vm", vm.vm.as_deref().unwrap_or("none yet"));
        line("created", &vm.created.map(|at| format!("{at} ({} ago)", since(at))).unwrap_or_default());
        for (name, fact) in &vm.facts {
            line(name, fact);
        }
        write!(text, "\nstages\n{}", waterfall(vm)).ok();
        if !events.is_empty() {
            writeln!(text, "\nevents").ok();
        }
        for EventLine { at, kind, reason, count, message } in events {
            let age = at.map(since).unwrap_or_default();
            let shown = safe(&format!("{kind} {reason} (x{count}) {message}"));
            writeln!(text, "  {age:>4}  {shown}").ok();
        }
        if !console.is_empty() {
            writeln!(text, "\nend of the console").ok();
        }
        for line in console {
            writeln!(text, "  {line}").ok();
        }
        text
    }
}

/// Draws the stages of a start, one below the other, each after its predecessor.
pub(crate) fn waterfall(vm: &Vm) -> String {
    let mut text = String::new();
    let whole = vm.stages.last().map_or(0, |stage| stage.at_ms).max(1);
    let name = vm.stages.iter().map(|stage| stage.name.len()).max().unwrap_or_default();
    let column = |ms: u64| usize::try_from(ms.saturating_mul(WIDTH) / whole).unwrap_or_default();
    let mut before = 0;
    for stage in &vm.stages {
        let took = stage.at_ms.saturating_sub(before);
        let (from, to) = (column(before), column(stage.at_ms));
        let bar = format!("{}{}", " ".repeat(from), "█".repeat((to - from.min(to)).max(1)));
        let seconds = |ms: u64| format!("{}.{:03} s", ms / 1000, ms % 1000);
        let took = format!("+{}", seconds(took));
        writeln!(text, "  {:name$}  {:>10}  {took:>11}  {bar}", safe(&stage.name), seconds(stage.at_ms)).ok();
        before = stage.at_ms;
    }
    text
}

/// Draws one start as a waterfall.
pub(crate) async fn trace(args: One) -> anyhow::Result<ExitCode> {
    let vm = args.from.open().await?.find(&args.name).await?;
    args.output.print(&vm.stages, |_| {
        let head = format!("pod {}, sandbox {}, phase {}", vm.pod, vm.sandbox, vm.phase);
        let missing =
            if vm.phase == "running" || vm.stages.is_empty() { "" } else { "  (the start has not ended)\n" };
        format!("{head}\n{}{missing}", waterfall(&vm))
    })?;
    Ok(ExitCode::SUCCESS)
}

async fn console_of(source: &Source, vm: &Vm) -> anyhow::Result<String> {
    let cluster = match source {
        Source::Node(node) => return node.get(&format!("/v1/sandboxes/{}/console", vm.sandbox)).await,
        Source::Cluster(cluster) => cluster,
    };
    let id = sandbox_of(vm)?;
    let pod = daemon_of(cluster, &vm.node, "the console").await?;
    cluster.ask_daemon(&pod, &["console", id.as_str()]).await
}

/// Prints the end of a VM's console, as the provider has it.
pub(crate) async fn console(args: Console) -> anyhow::Result<ExitCode> {
    let source = args.from.open().await?;
    let vm = source.find(&args.name).await?;
    let text = console_of(&source, &vm).await?;
    let mut out = std::io::stdout().lock();
    for line in text.lines() {
        writeln!(out, "{}", safe(line))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// A VM without a record, with its node.
#[derive(Debug, Serialize)]
struct OrphanRow {
    /// Name of the node; `None` from a node itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    node: Option<String>,
    #[serde(flatten)]
    orphan: Orphan,
}

/// Lists the VMs of this installation without a record. Exit code 1 if a node of the cluster gave no answer.
pub(crate) async fn orphans(args: Orphans) -> anyhow::Result<ExitCode> {
    let (found, silent) = match args.from.open().await? {
        Source::Node(node) => {
            let found: Vec<Orphan> = node.get("/v1/orphans").await?;
            (found.into_iter().map(|orphan| OrphanRow { node: None, orphan }).collect(), 0)
        }
        Source::Cluster(cluster) => orphans_of_nodes(&cluster).await?,
    };
    args.output.print(&found, |_| orphan_table(&found))?;
    if !found.is_empty() && args.output.format == Format::Table {
        eprintln!(
            "{}",
            paint(
                Colour::Yellow,
                "The node deletes a VM that has no record for a minute. This command deletes nothing."
            )
        );
    }
    Ok(if silent > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Asks each node of the cluster. Returns the VMs, and the number of nodes that gave no answer.
async fn orphans_of_nodes(cluster: &Cluster) -> anyhow::Result<(Vec<OrphanRow>, usize)> {
    let daemons = cluster.daemons_of_vms().await?;
    if daemons.is_empty() {
        bail!("no node has a pod of peerpod-node, so no node can list its VMs; see `peerpod status`");
    }
    let asked = stream::iter(daemons).map(async |(node, pod)| {
        let answer = orphans_of(cluster, pod).await;
        (node, answer)
    });
    let mut answers: Vec<(String, anyhow::Result<Vec<Orphan>>)> =
        asked.buffer_unordered(AT_ONCE).collect().await;
    answers.sort_by(|(one, _), (other, _)| one.cmp(other));
    let (mut found, mut silent) = (Vec::new(), 0);
    for (node, answer) in answers {
        match answer {
            Ok(orphans) => {
                found
                    .extend(orphans.into_iter().map(|orphan| OrphanRow { node: Some(node.clone()), orphan }));
            }
            Err(error) => {
                silent += 1;
                let why = peerpod_base::chain::chain(error.as_ref());
                eprintln!("peerpod: {}", safe(&format!("node {node}: {why}")));
            }
        }
    }
    Ok((found, silent))
}

async fn orphans_of(cluster: &Cluster, pod: Result<Pod, String>) -> anyhow::Result<Vec<Orphan>> {
    let pod = pod.map_err(anyhow::Error::msg)?;
    Ok(serde_json::from_str(&cluster.ask_daemon(&pod, &["orphans", "-o", "json"]).await?)?)
}

fn orphan_table(found: &[OrphanRow]) -> String {
    let has_nodes = found.iter().any(|row| row.node.is_some());
    let mut names = vec!["VM", "STATE", "NAME", "AGE"];
    if has_nodes {
        names.insert(0, "NODE");
    }
    let mut table = Table::new(&names);
    for OrphanRow { node, orphan } in found {
        let created = orphan.created_ms.and_then(|ms| i64::try_from(ms).ok());
        let created = created.and_then(|ms| Timestamp::from_millisecond(ms).ok());
        let cells = [
            orphan.vm.clone(),
            format!("{:?}", orphan.state).to_lowercase(),
            orphan.name.clone().unwrap_or_default(),
            created.map(since).unwrap_or_default(),
        ];
        table.row(node.iter().filter(|_| has_nodes).cloned().chain(cells));
    }
    table.to_string()
}

#[cfg(test)]
mod tests {
    use peerpod_node::admin::Stage;

    use super::*;

    #[test]
    fn a_peerpod_gives_the_node_no_option_as_its_sandbox() {
        for (sandbox, is) in [("a1-b", true), ("", false), ("--config=/x", false), ("../node", false)] {
            let vm = Vm { sandbox: sandbox.to_owned(), ..Vm::default() };
            assert_eq!(sandbox_of(&vm).is_ok(), is, "{sandbox}");
        }
    }

    #[test]
    fn an_event_of_pod_and_peerpod_is_one_and_those_of_two_containers_are_two() {
        let event = |kind: &str, message: &str| {
            let mut event = Event { message: Some(message.to_owned()), ..Event::default() };
            event.involved_object.kind = Some(kind.to_owned());
            event
        };
        let all = [
            ("Pod", "made"),
            ("PeerPod", "made"),
            ("Pod", "started"),
            ("Pod", "started"),
            ("PeerPod", "gone"),
        ];
        let mut events: Vec<Event> = all.into_iter().map(|(kind, message)| event(kind, message)).collect();
        drop_doubles(&mut events);
        let left: Vec<&str> = events.iter().filter_map(|event| event.message.as_deref()).collect();
        assert_eq!(left, ["made", "started", "started", "gone"]);
    }

    #[test]
    fn each_stage_begins_where_its_predecessor_ends() {
        let stage = |name: &str, at_ms| Stage { name: name.to_owned(), at_ms };
        let vm = Vm {
            stages: vec![stage("vm_made", 1000), stage("claimed", 1000), stage("running", 4000)],
            ..Vm::default()
        };
        let drawn = waterfall(&vm);
        let lines: Vec<&str> = drawn.lines().collect();
        assert_eq!(lines[0], format!("  vm_made     1.000 s     +1.000 s  {}", "█".repeat(10)));
        assert_eq!(lines[1], format!("  claimed     1.000 s     +0.000 s  {}█", " ".repeat(10)));
        assert_eq!(
            lines[2],
            format!("  running     4.000 s     +3.000 s  {}{}", " ".repeat(10), "█".repeat(30))
        );
        assert_eq!(waterfall(&Vm::default()), "");
    }
}
