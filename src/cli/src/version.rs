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
/// Containers of the chart's pods that run a program of this project.
const PROGRAMS: [&str; 4] = ["node", "relay", "controller", "webhook"];

/// Arguments of `peerpod version`.
#[derive(Debug, clap::Args)]
pub(crate) struct VersionArgs {
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
    /// Whether this program has the same version; `None`: the version is unknown.
    same: Option<bool>,
}

/// Prints the versions. Exit code 0 also if they differ.
pub(crate) async fn run(args: VersionArgs) -> anyhow::Result<ExitCode> {
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
            let same = Some(version == VERSION);
            Ok(vec![Other { name: format!("peerpod-node on {node}"), version, commit, count: 1, same }])
        }
        Source::Cluster(cluster) => {
            let mut found: BTreeMap<(String, Option<String>), usize> = BTreeMap::new();
            for pod in cluster.ours::<Pod>("Pods").await? {
                let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
                // The name of the image may be any.
                for container in containers.filter(|container| PROGRAMS.contains(&&*container.name)) {
                    let image = container.image.as_deref().unwrap_or_default();
                    let key = (container.name.clone(), version_of(image, pod.metadata.labels.as_ref()));
                    *found.entry(key).or_default() += 1;
                }
            }
            let other = |((name, version), count): ((String, Option<String>), usize)| {
                let same = version.as_ref().map(|version| is_ours(version));
                let version = version.unwrap_or_else(|| "image without a tag".to_owned());
                Other { name: format!("container {name}"), version, commit: None, count, same }
            };
            Ok(found.into_iter().map(other).collect())
        }
    }
}

/// Returns the version of a program: the tag of its image, or of an image by digest the label of the chart.
pub(crate) fn version_of(image: &str, labels: Option<&BTreeMap<String, String>>) -> Option<String> {
    let name = image.split('@').next().unwrap_or_default();
    // A port of the registry is before the last slash.
    let tag = name.rsplit('/').next().and_then(|last| last.split_once(':')).map(|(_, tag)| tag);
    let label = || labels?.get("app.kubernetes.io/version").map(String::as_str);
    tag.or_else(label).map(str::to_owned)
}

/// Whether a version, with or without a `v` before it, is that of this program.
pub(crate) fn is_ours(version: &str) -> bool {
    version.trim_start_matches('v') == VERSION
}

impl Versions {
    fn text(&self) -> String {
        let mut text = String::new();
        writeln!(text, "peerpod {} ({})", self.version, self.commit.unwrap_or("commit unknown")).ok();
        writeln!(text, "providers in this build: {}", self.providers.join(", ")).ok();
        for Other { name, version, commit, count, same } in &self.programs {
            let commit = commit.as_ref().map(|commit| format!(" ({commit})")).unwrap_or_default();
            let skew = match same {
                Some(true) => "same version",
                Some(false) => &paint(Colour::Yellow, "another version"),
                None => "its version is unknown",
            };
            let count = if *count == 1 { String::new() } else { format!(", {count} pods") };
            writeln!(text, "{name}: {version}{commit}{count}: {skew}").ok();
        }
        if let Some(why) = &self.alone {
            writeln!(text, "no other program was asked: {why}").ok();
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_by_digest_has_the_version_of_its_label() {
        let labels = BTreeMap::from([("app.kubernetes.io/version".to_owned(), "0.2.0".to_owned())]);
        for (image, with, without) in [
            ("r.example:5000/pp:v0.1.0", "v0.1.0", Some("v0.1.0")),
            ("pp:0.1.0@sha256:ab", "0.1.0", Some("0.1.0")),
            ("r.example:5000/pp@sha256:ab", "0.2.0", None),
            ("r.example:5000/pp", "0.2.0", None),
        ] {
            assert_eq!(version_of(image, Some(&labels)).as_deref(), Some(with), "{image}");
            assert_eq!(version_of(image, None).as_deref(), without, "{image}");
        }
    }
}
