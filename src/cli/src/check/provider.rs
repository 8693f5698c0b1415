//! Checks the configured provider by its preflight, which makes nothing. Beside a running node the check sends the
//! provider nothing: the node reports the answer that it got. Before an installation the check is a node of its own
//! (`check-…`).

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::time::Duration;

use peerpod_base::chain::chain;
use peerpod_base::config::Reader;
use peerpod_cluster::SECTIONS;
use peerpod_node::admin::{NodeStatus, SOCKET};
use peerpod_provider_api::Preflight;
use peerpod_providers::{Context, Purpose, guide};

use super::config::Config;
use crate::config::ask;
use crate::item::{Area, Item, failed, skipped, warning};
use crate::provider::fresh;
use crate::source::Node;

/// Time limit of the preflight.
const ANSWER: Duration = Duration::from_secs(60);

/// Takes the preflight's answer from the node that runs here, or runs the preflight. Before an installation (`pre`),
/// beside another node, a provider with VMs on the node itself is not asked: its networks belong to that node's daemon.
pub(super) async fn check(config: &Config, is_running: bool, pre: bool) -> Vec<Item> {
    if is_running && !pre {
        return of_node(config).await;
    }
    // A folder that another user made first is refused.
    let folder = std::env::temp_dir().join(format!("peerpod-check-{}-{}", std::process::id(), fresh()));
    if let Err(why) = DirBuilder::new().mode(0o700).create(&folder) {
        let why = format!("make {}: {why}", folder.display());
        return vec![
            Area::Provider.item("folder", failed(why, "free space, or set TMPDIR to another folder")),
        ];
    }
    let items = ask_provider(config, is_running, &folder).await;
    drop(std::fs::remove_dir_all(&folder));
    items
}

/// Asks the node for the answer that its provider gave.
async fn of_node(config: &Config) -> Vec<Item> {
    let socket = Path::new(&config.text("paths.run-dir")).join(SOCKET);
    let status: NodeStatus = match Node::new(socket).get("/v1/node").await {
        Ok(status) => status,
        Err(why) => {
            let why = format!("peerpod-node has the provider's answer: {}", chain(why.as_ref()));
            return vec![Area::Provider.item(&config.text("provider.kind"), skipped(why))];
        }
    };
    let NodeStatus { provider, preflight, waiting, warnings, .. } = status;
    let answer = match waiting.get("provider") {
        Some(why) => Err(why.clone()),
        None => {
            let warnings = warnings.get("provider").cloned().into_iter().collect();
            Ok(Preflight { facts: preflight, warnings, ..Preflight::default() })
        }
    };
    items(&provider, answer)
}

/// Runs the preflight with this folder for the provider's records.
async fn ask_provider(config: &Config, is_running: bool, folder: &Path) -> Vec<Item> {
    let Ok(mut reader) = Reader::load(config.sources.clone(), &SECTIONS, &[]) else { return Vec::new() };
    let context = Context {
        state_dir: folder.to_owned(),
        cluster_id: config.text("node.cluster-id"),
        node_name: format!("check-{}", std::process::id()),
        purpose: Purpose::Check,
    };
    // The keys of the other sections are known, too.
    ask(&mut reader);
    let settings = peerpod_providers::read(&mut reader, &context);
    let kind = settings.kind().to_owned();
    if is_running && settings.is_free() {
        return vec![Area::Provider.item(&kind, skipped("peerpod-node reports its preflight"))];
    }
    if reader.finish().is_err() {
        return vec![Area::Provider.item(&kind, skipped("its settings have mistakes"))];
    }
    let answer = async {
        let provider = settings.open("check".to_owned()).await?;
        provider.preflight().await
    };
    let answer = match tokio::time::timeout(ANSWER, answer).await {
        Ok(answer) => answer.map_err(|error| error.to_string()),
        Err(_) => Err(format!("no answer within {ANSWER:?}")),
    };
    items(&kind, answer)
}

/// Makes one item of the answer, one each of image and quotas where the provider names them, and one per warning.
fn items(kind: &str, answer: Result<Preflight, String>) -> Vec<Item> {
    let found = match answer {
        Ok(found) => found,
        Err(why) => {
            let remedy = format!("follow the text; {} lists rights and settings", guide(kind));
            return vec![Area::Provider.item(kind, failed(why, remedy))];
        }
    };
    let (special, others): (Vec<_>, Vec<_>) =
        found.facts.iter().partition(|fact| fact.starts_with("image ") || fact.starts_with("quota "));
    let others: Vec<&str> = others.into_iter().map(String::as_str).collect();
    let text =
        if others.is_empty() { "the preflight finds no obstacle".to_owned() } else { others.join("; ") };
    let mut items = vec![Area::Provider.item(kind, Ok(text))];
    for fact in special {
        let name = fact.split(' ').next().unwrap_or_default();
        let is_known = !fact.contains("not readable");
        items.push(Area::Provider.item(name, if is_known { Ok(fact.clone()) } else { skipped(fact) }));
    }
    let remedy = format!("follow the text, or accept it; see {}", guide(kind));
    items.extend(found.warnings.iter().map(|why| Area::Provider.item(kind, warning(why, &remedy))));
    items
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::item::Verdict;

    #[test]
    fn image_quotas_and_warnings_are_items_of_their_own() {
        let facts = ["account 1", "image ami-1 for x86_64", "quota CPUS: 3 of 8 in use"].map(str::to_owned);
        let found = Preflight {
            facts: facts.to_vec(),
            warnings: vec!["small subnet".to_owned()],
            ..Preflight::default()
        };
        let shown: Vec<_> =
            items("aws", Ok(found)).into_iter().map(|item| (item.name, item.verdict)).collect();
        let expected = [
            ("provider/aws", Verdict::Ok),
            ("provider/image", Verdict::Ok),
            ("provider/quota", Verdict::Ok),
            ("provider/aws", Verdict::Warning),
        ];
        assert_eq!(shown, expected.map(|(name, verdict)| (name.to_owned(), verdict)));
        let item = items("aws", Err("allow ec2:CreateFleet".to_owned())).remove(0);
        assert_eq!((item.verdict, item.cause.as_str()), (Verdict::Failed, "allow ec2:CreateFleet"));
    }
}
