//! `peerpod logs`: the lines about one peer pod of node, relay, guest and agent, by time.
//!
//! The relay's log has the lines of guest and agent. In a cluster the lines come from the API server, and on a node
//! from the files that kubelet keeps, or from named files. A line belongs to the pod if it contains the sandbox's id.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail, ensure};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use serde_json::Value;

use crate::output::safe;
use crate::source::{Cluster, Source, SourceArgs};

/// Containers of Peerpod with lines about a sandbox.
const CONTAINERS: [&str; 2] = ["node", "relay"];
/// Beginnings of the names of their pods.
const DAEMONS: [&str; 2] = ["peerpod-node-", "peerpod-relay-"];
/// File with the namespace of the pod in which the command runs.
const NAMESPACE_FILE: &str = "/var/run/secrets/kubernetes.io/serviceaccount/namespace";
/// Folder of the files that kubelet keeps, one folder for each pod.
const KUBELET: &str = "/var/log/pods";
/// Bytes at the end of each file that are read.
const MOST: u64 = 64 << 20;

/// Arguments of `peerpod logs`.
#[derive(Debug, clap::Args)]
pub(crate) struct LogsArgs {
    /// The pod as NAMESPACE/NAME or NAME, or the sandbox's id
    #[arg(value_name = "POD|ID")]
    name: String,
    #[command(flatten)]
    from: SourceArgs,
    /// A log of peerpod-node or peerpod-relay, instead of kubelet's files; may be repeated
    #[arg(long, value_name = "FILE")]
    file: Vec<PathBuf>,
}

/// One line with the time at its beginning.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Line {
    at: Option<Timestamp>,
    origin: String,
    text: String,
}

/// Prints the lines.
pub(crate) async fn run(args: LogsArgs) -> anyhow::Result<ExitCode> {
    let source = args.from.open().await?;
    let vm = source.find(&args.name).await?;
    // Every line contains an empty id.
    ensure!(!vm.sandbox.is_empty(), "{}: its PeerPod names no sandbox, so no line is of it", args.name);
    let mut lines = Vec::new();
    match &source {
        Source::Cluster(cluster) if args.file.is_empty() => {
            for (origin, text) in of_cluster(cluster, &vm.node).await? {
                lines.extend(select(&text, &origin, &vm.sandbox));
            }
        }
        _ => {
            for path in files(args.file)? {
                let text = tail(&path, MOST)?;
                let name = if text.contains("guests_dial") { "node" } else { "log" };
                lines.extend(select(&text, &origin(&path, name), &vm.sandbox));
            }
        }
    }
    // A stable sort: a line without a time stays behind its predecessor.
    let mut last = None;
    for line in &mut lines {
        last = line.at.or(last);
        line.at = last;
    }
    lines.sort_by_key(|line| line.at);
    let mut out = std::io::stdout().lock();
    for Line { origin, text, .. } in lines {
        writeln!(out, "{origin:<6} {}", safe(&text))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the logs of Peerpod's containers on this node, each with the container's name.
async fn of_cluster(cluster: &Cluster, node: &str) -> anyhow::Result<Vec<(String, String)>> {
    let mut logs = Vec::new();
    for (name, (pod, container)) in containers(cluster, Some(node)).await? {
        match cluster.log(&pod, &container).await {
            Ok(text) => logs.push((name, text)),
            Err(error) => eprintln!("peerpod: {error}"),
        }
    }
    Ok(logs)
}

/// Returns Peerpod's containers with lines about a sandbox on this node, or else all on all nodes: the log's name, the
/// pod, and the container.
///
/// # Errors
/// The API server refuses or is away.
pub(crate) async fn containers(
    cluster: &Cluster,
    node: Option<&str>,
) -> anyhow::Result<Vec<(String, (Pod, String))>> {
    let mut found = Vec::new();
    for pod in cluster.ours::<Pod>("Pods").await? {
        let Some(spec) = &pod.spec else { continue };
        if node.is_some() && spec.node_name.as_deref() != node {
            continue;
        }
        for container in spec.containers.iter().map(|container| container.name.clone()) {
            match node {
                Some(_) if CONTAINERS.contains(&&*container) => {
                    found.push((container.clone(), (pod.clone(), container)));
                }
                Some(_) => {}
                None => {
                    found.push((format!("{}.{container}", pod.name_any()), (pod.clone(), container)));
                }
            }
        }
    }
    Ok(found)
}

/// Returns the named files, or else those that kubelet keeps of Peerpod's containers on this machine.
///
/// # Errors
/// There is none.
pub(crate) fn files(named: Vec<PathBuf>) -> anyhow::Result<Vec<PathBuf>> {
    if !named.is_empty() {
        return Ok(named);
    }
    let folders =
        |folder: &Path| std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut found = Vec::new();
    let namespace = std::fs::read_to_string(NAMESPACE_FILE).ok();
    let namespace = namespace.as_deref().map(str::trim);
    for pod in folders(Path::new(KUBELET)).filter(|pod| is_of_peerpod(pod, namespace)) {
        for container in CONTAINERS {
            found.extend(
                folders(&pod.join(container)).filter(|path| path.extension().is_some_and(|end| end == "log")),
            );
        }
    }
    if found.is_empty() {
        bail!(
            "{KUBELET} has no log of Peerpod's containers; name the logs with --file, for example a file with the output \
             of journalctl"
        );
    }
    found.sort();
    Ok(found)
}

/// Whether kubelet's folder NAMESPACE_POD_UID is of a pod of Peerpod's DaemonSets, in this namespace if it is known.
fn is_of_peerpod(folder: &Path, namespace: Option<&str>) -> bool {
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    let [of, pod, _] = name.split('_').collect::<Vec<_>>()[..] else { return false };
    // A DaemonSet appends one word to its name.
    let of_daemon = |daemon: &&str| pod.strip_prefix(*daemon).is_some_and(|word| !word.contains('-'));
    DAEMONS.iter().any(of_daemon) && namespace.is_none_or(|namespace| namespace == of)
}

/// Returns the end of a file, without an incomplete first line.
///
/// # Errors
/// The file cannot be read.
pub(crate) fn tail(path: &Path, most: u64) -> anyhow::Result<String> {
    let read = || {
        let mut file = File::open(path)?;
        let skip = file.metadata()?.len().saturating_sub(most);
        file.seek(SeekFrom::Start(skip))?;
        let mut bytes = Vec::new();
        file.take(most).read_to_end(&mut bytes)?;
        let text = String::from_utf8_lossy(&bytes).into_owned();
        std::io::Result::Ok(match text.split_once('\n') {
            Some((_, rest)) if skip > 0 => rest.to_owned(),
            _ => text,
        })
    };
    read().with_context(|| format!("read {}", path.display()))
}

/// Name of the program with this log: the container's folder, or the file's own name.
fn origin(path: &Path, otherwise: &str) -> String {
    let names = [path.parent().and_then(Path::file_name), path.file_stem()];
    let names = names.into_iter().flatten().map(|name| name.to_string_lossy());
    let known = names.filter(|name| CONTAINERS.iter().any(|container| name.contains(container)));
    let container = |name: std::borrow::Cow<'_, str>| CONTAINERS.into_iter().find(|one| name.contains(one));
    known.filter_map(container).next().unwrap_or(otherwise).to_owned()
}

fn select<'t>(text: &'t str, origin: &'t str, sandbox: &'t str) -> impl Iterator<Item = Line> + 't {
    text.lines().filter(move |line| line.contains(sandbox)).map(move |line| {
        // Of kubelet: the time, the stream and a flag before the program's own line.
        let words: Vec<&str> = line.splitn(4, ' ').collect();
        let text = match words[..] {
            [_, "stdout" | "stderr", "F" | "P", rest] => rest,
            _ => line,
        };
        let origin = match origin {
            "relay" if is_of(text, "kata-agent") => "agent",
            "relay" if text.contains("log line of the guest") => "guest",
            other => other,
        };
        Line { at: time(line), origin: origin.to_owned(), text: text.to_owned() }
    })
}

fn is_of(line: &str, program: &str) -> bool {
    line.contains("log line of the guest")
        && (line.contains(&format!("from=\"{program}\""))
            || line.contains(&format!("\"from\":\"{program}\"")))
}

/// The time of a line: its first word, or the field `timestamp` of JSON.
fn time(line: &str) -> Option<Timestamp> {
    let first = line.split(' ').next()?;
    first.parse().ok().or_else(|| {
        let json: Value = serde_json::from_str(line).ok()?;
        json["timestamp"].as_str()?.parse().ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_all_forms_have_their_time_and_their_program() {
        let text = "2026-01-02T03:04:05.5Z  INFO created sandbox=abc\n\
            2026-01-02T03:04:05.1Z stdout F {\"timestamp\":\"2026-01-02T03:04:05Z\",\"sandbox\":\"abc\"}\n\
            2026-01-02T03:04:07Z  INFO other sandbox=def\n\
            {\"timestamp\":\"2026-01-02T03:04:06Z\",\"message\":\"log line of the guest\",\"from\":\"kata-agent\",\"sandbox\":\"abc\"}\n";
        let lines: Vec<Line> = select(text, "relay", "abc").collect();
        let origins: Vec<&str> = lines.iter().map(|line| &*line.origin).collect();
        assert_eq!(origins, ["relay", "relay", "agent"]);
        assert!(lines[1].text.starts_with('{') && lines.iter().all(|line| line.at.is_some()), "{lines:?}");
        assert!(lines[1].at < lines[0].at && lines[0].at < lines[2].at);
        assert_eq!(origin(Path::new("/var/log/pods/a_peerpod-node-x_u/relay/0.log"), "log"), "relay");
        assert_eq!(origin(Path::new("/tmp/node.log"), "log"), "node");
    }

    #[test]
    fn only_folders_of_peerpods_own_pods_are_read() {
        let is_ours = |name: &str, namespace| is_of_peerpod(&Path::new(KUBELET).join(name), namespace);
        assert!(is_ours("peerpod-system_peerpod-node-x7k2p_uid", None));
        assert!(is_ours("peerpod-system_peerpod-relay-x7k2p_uid", Some("peerpod-system")));
        assert!(!is_ours("other_peerpod-node-x7k2p_uid", Some("peerpod-system")));
        for name in [
            "peerpod-apps_web-1_uid",
            "a_my-peerpod-node-x_uid",
            "a_peerpod-node-app-x_uid",
            "peerpod-node-x",
        ] {
            assert!(!is_ours(name, None), "{name}");
        }
    }
}
