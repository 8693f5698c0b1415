//! `peerpod version`: this program's version and providers, and those of the node or of the cluster's programs.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::process::ExitCode;

use k8s_openapi::api::core::v1::Pod;
use peerpod_node::admin::{COMMIT, NodeStatus};
use serde::Serialize;

use crate::output::{Colour, Output, paint};
use crate::source::{Source, SourceArgs};

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Arguments of `peerpod version`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    from: SourceArgs,
    #[command(flatten)]
    output: Output,
}

#[derive(Debug, Default, Serialize)]
struct Versions {
    version: &'static str,
    commit: Option<&'static str>,
    providers: Vec<&'static str>,
    /// Versions of the other programs, with the number of pods.
    programs: Vec<Other>,
    /// Reason why no other program was asked.
    alone: Option<String>,
}

#[derive(Debug, Serialize)]
struct Other {
    name: String,
    version: String,
    commit: Option<String>,
    count: usize,
    /// Whether this program has the same version.
    same: bool,
}

/// Prints the versions. Exit code 0 also if they differ.
pub(crate) async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let mut versions = Versions {
        version: VERSION,
        commit: COMMIT,
        providers: peerpod_providers::kinds(),
        ..Versions::default()
    };
    match others(&args.from).await {
        Ok(programs) => versions.programs = programs,
        Err(error) => versions.alone = Some(peerpod_base::chain::chain(error.as_ref())),
    }
    args.output.print(&versions, |_| versions.text())?;
    Ok(ExitCode::SUCCESS)
}

async fn others(from: &SourceArgs) -> anyhow::Result<Vec<Other>> {
    match from.open().await? {
        Source::Node(node) => {
            let status: NodeStatus = node.get("/v1/node").await?;
            let NodeStatus { version, commit, node, .. } = status;
            let same = version == VERSION;
            Ok(vec![Other { name: format!("peerpod-node on {node}"), version, commit, count: 1, same }])
        }
        Source::Cluster(cluster) => {
            let mut found: BTreeMap<(String, String), usize> = BTreeMap::new();
            for pod in cluster.ours::<Pod>("Pods").await? {
                let containers = pod.spec.map(|spec| spec.containers).unwrap_or_default();
                for container in containers {
                    let image = container.image.unwrap_or_default();
                    let (repository, tag) = image.rsplit_once(':').unwrap_or((&image, "of unknown tag"));
                    if repository.contains("peerpod") {
                        *found.entry((container.name, tag.to_owned())).or_default() += 1;
                    }
                }
            }
            let other = |((name, version), count): ((String, String), usize)| {
                let same = version.trim_start_matches('v') == VERSION;
                Other { name: format!("container {name}"), version, commit: None, count, same }
            };
            Ok(found.into_iter().map(other).collect())
        }
    }
}

impl Versions {
    fn text(&self) -> String {
        let mut text = String::new();
        writeln!(text, "peerpod {} ({})", self.version, self.commit.unwrap_or("commit unknown")).ok();
        writeln!(text, "providers in this build: {}", self.providers.join(", ")).ok();
        for Other { name, version, commit, count, same } in &self.programs {
            let commit = commit.as_ref().map(|commit| format!(" ({commit})")).unwrap_or_default();
            let skew = if *same { "same version" } else { &paint(Colour::Yellow, "another version") };
            let count = if *count == 1 { String::new() } else { format!(", {count} pods") };
            writeln!(text, "{name}: {version}{commit}{count}: {skew}").ok();
        }
        if let Some(why) = &self.alone {
            writeln!(text, "no other program was asked: {why}").ok();
        }
        text
    }
}
