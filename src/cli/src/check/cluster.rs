//! Checks the cluster: API server and clock, custom resources, RuntimeClass, rights, nodes and versions. Reads only.

mod rights;

use std::net::IpAddr;
use std::path::PathBuf;

use hyper::Request;
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::node::v1::RuntimeClass;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use k8s_openapi::jiff::Timestamp;
use k8s_openapi::jiff::fmt::rfc2822::DateTimeParser;
use kube::api::ListParams;
use kube::client::Body;
use kube::{Api, Client};
use peerpod_kube::client::{Error, connect, within};
use peerpod_kube::crds;

use super::Account;
use super::config::Config;
use super::network::MOST_PEERS;
use crate::item::{Area, Item, Outcome, failed, skipped, warning};
use crate::version::{is_ours, version_of};

/// Deviation of the clocks in seconds that is named, and one that makes tickets and certificates fail.
const SKEW: (i64, i64) = (5, 60);
/// Facts of the cluster that other checks need.
#[derive(Default)]
pub(super) struct Seen {
    /// Handler of the RuntimeClass.
    pub(super) handler: Option<String>,
    /// Container runtime of this node, like `containerd://1.7.2`.
    pub(super) runtime: Option<String>,
    /// Addresses of other nodes with peer pods.
    pub(super) peers: Vec<IpAddr>,
}

/// Checks the cluster, if one is configured. `account`: that of the node's daemon, if it is not this program's.
pub(super) async fn check(config: &Config, pre: bool, account: Option<&Account>) -> (Vec<Item>, Seen) {
    let kubeconfig = Some(config.text("kubernetes.kubeconfig")).filter(|path| !path.is_empty());
    let client = connect(kubeconfig.clone().map(PathBuf::from).as_deref()).await;
    let client = match client {
        Ok(client) => client,
        Err(why) => {
            let remedy = "set kubernetes.kubeconfig, or KUBECONFIG, to a file that can be read; in a pod, mount its \
                          service account's token";
            let is_set = |name| std::env::var_os(name).is_some();
            // Kubernetes sets the second variable in each pod.
            let none =
                kubeconfig.is_none() && !["KUBECONFIG", "KUBERNETES_SERVICE_HOST"].into_iter().any(is_set);
            let outcome =
                if none { skipped("no API server is configured") } else { failed(why.to_string(), remedy) };
            return (vec![Area::Cluster.item("api-server", outcome)], Seen::default());
        }
    };
    let mut items = match reached(&client).await {
        Ok(skew) => vec![
            Area::Cluster.item("api-server", Ok("the API server answers".to_owned())),
            Area::Cluster.item("clock", clock(skew)),
        ],
        Err(why) => {
            let remedy = "correct the kubeconfig's address and credentials, or the way to the API server";
            return (
                vec![Area::Cluster.item("api-server", failed(why.to_string(), remedy))],
                Seen::default(),
            );
        }
    };
    let name = config.list("webhook.runtime-classes").into_iter().next().unwrap_or_default();
    let class =
        within("look at the RuntimeClass", Api::<RuntimeClass>::all(client.clone()).get_opt(&name)).await;
    let nodes = within("list the nodes", Api::<Node>::all(client.clone()).list(&ListParams::default())).await;
    let mut seen = Seen {
        handler: class.as_ref().ok().and_then(|class| Some(class.as_ref()?.handler.clone())),
        ..Seen::default()
    };
    items.push(
        Area::Cluster
            .item("runtime-class", outcome(class, |class| runtime_class(class.as_ref(), &name, pre))),
    );
    items.push(Area::Cluster.item("rights", rights::check(&client, config, pre, account).await));
    if let Ok(nodes) = &nodes {
        let own = config.text("cluster.node-name");
        let resource = config.text("cluster.extended-resource");
        seen.runtime = nodes
            .iter()
            .find(|node| name_of(node) == own)
            .or_else(|| nodes.items.first())
            .and_then(runtime_of);
        seen.peers = peers(&nodes.items, &own, &resource);
        if !pre {
            items.push(Area::Cluster.item("nodes", nodes_ready(&nodes.items, &own, &resource)));
        }
    }
    if !pre {
        let list = Api::<CustomResourceDefinition>::all(client.clone());
        let there = within("list the custom resources", list.list(&ListParams::default())).await;
        items.push(Area::Cluster.item("custom-resources", outcome(there, |there| definitions(&there.items))));
        let of_ours = ListParams::default().labels("app.kubernetes.io/name=peerpod");
        let sets = within("list the DaemonSets", Api::<DaemonSet>::all(client).list(&of_ours)).await;
        items.push(Area::Cluster.item("versions", outcome(sets, |sets| versions(&sets.items))));
    }
    (items, seen)
}

/// Judges an answer. A forbidden question leaves the item unchecked.
fn outcome<T>(answer: Result<T, Error>, judge: impl FnOnce(T) -> Outcome) -> Outcome {
    match answer {
        Ok(answer) => judge(answer),
        Err(why) if why.status() == Some(403) => skipped(why.to_string()),
        Err(why) => failed(why.to_string(), "see the cause, and try again"),
    }
}

/// Asks the API server, and returns the seconds by which its clock is ahead, if it sends them.
async fn reached(client: &Client) -> Result<Option<i64>, Error> {
    let asked = async {
        let request = Request::get("/version").body(Body::empty()).map_err(kube::Error::HttpError)?;
        let answer = client.send(request).await?;
        let status = answer.status();
        if !status.is_success() {
            let text = format!("GET /version: {status}");
            return Err(kube::Error::Service(text.into()));
        }
        Ok(answer.headers().get("date").and_then(|date| date.to_str().ok()).and_then(seconds))
    };
    let theirs = within("ask the API server for its version", asked).await?;
    Ok(theirs.map(|theirs| theirs - Timestamp::now().as_second()))
}

/// Seconds of a date in an HTTP header.
fn seconds(date: &str) -> Option<i64> {
    Some(DateTimeParser::new().parse_timestamp(date).ok()?.as_second())
}

fn clock(skew: Option<i64>) -> Outcome {
    let Some(skew) = skew else { return skipped("the API server sends no date") };
    let cause = format!("this clock and that of the API server differ by {} s", skew.abs());
    let remedy = "start a time service (chrony or systemd-timesyncd) on nodes and control plane";
    match skew.abs() {
        more if more >= SKEW.1 => failed(cause, remedy),
        more if more >= SKEW.0 => warning(cause, remedy),
        _ => Ok("this clock and that of the API server agree".to_owned()),
    }
}

fn runtime_class(class: Option<&RuntimeClass>, name: &str, pre: bool) -> Outcome {
    let remedy = "set the chart's value runtimeClass.create: true, or make the RuntimeClass";
    let Some(class) = class else {
        let text = format!("there is no RuntimeClass {name}");
        return if pre { Ok(format!("{text} yet; the chart makes it")) } else { failed(text, remedy) };
    };
    let label =
        |key: &str| class.metadata.labels.as_ref().and_then(|labels| labels.get(key)).map(String::as_str);
    let release = class.metadata.annotations.as_ref().and_then(|all| all.get("meta.helm.sh/release-name"));
    let ours = label("app.kubernetes.io/name") == Some("peerpod");
    let owner = match (ours, release) {
        (true, _) => "this chart".to_owned(),
        (false, Some(release)) => format!("the release {release}"),
        (false, None) => label("app.kubernetes.io/managed-by").unwrap_or("no known owner").to_owned(),
    };
    let text = format!("RuntimeClass {name} has handler {} and belongs to {owner}", class.handler);
    Ok(if pre && !ours { format!("{text}; this chart leaves it as it is") } else { text })
}

fn name_of(node: &Node) -> &str {
    node.metadata.name.as_deref().unwrap_or_default()
}

fn runtime_of(node: &Node) -> Option<String> {
    let info = node.status.as_ref()?.node_info.as_ref()?;
    Some(info.container_runtime_version.clone()).filter(|version| !version.is_empty())
}

/// Peer pods that the node offers, as its capacity shows them.
fn offered<'n>(node: &'n Node, resource: &str) -> Option<&'n str> {
    Some(node.status.as_ref()?.capacity.as_ref()?.get(resource)?.0.as_str())
}

/// Status and message of the condition that peerpod-node writes.
fn condition(node: &Node) -> Option<(&str, &str)> {
    let all = node.status.as_ref()?.conditions.as_ref()?;
    let one = all.iter().find(|one| one.type_ == "PeerPodsReady")?;
    Some((one.status.as_str(), one.message.as_deref().unwrap_or_default()))
}

fn peers(nodes: &[Node], own: &str, resource: &str) -> Vec<IpAddr> {
    let others = nodes.iter().filter(|node| name_of(node) != own && offered(node, resource).is_some());
    let internal = others.filter_map(|node| {
        let addresses = node.status.as_ref()?.addresses.as_ref()?;
        addresses.iter().find(|address| address.type_ == "InternalIP")?.address.parse().ok()
    });
    internal.take(MOST_PEERS).collect()
}

/// Judges this node, or all nodes with peer pods where the check runs on none of them.
fn nodes_ready(nodes: &[Node], own: &str, resource: &str) -> Outcome {
    let ours = |node: &&Node| if own.is_empty() { condition(node).is_some() } else { name_of(node) == own };
    let (mut ready, mut faults) = (0, Vec::new());
    for node in nodes.iter().filter(ours) {
        match (condition(node), offered(node, resource)) {
            (Some(("True", _)), Some(_)) => ready += 1,
            (Some((_, why)), None) if !why.is_empty() => faults.push(format!("{}: {why}", name_of(node))),
            (_, None) => faults.push(format!("{} offers no {resource}", name_of(node))),
            (_, Some(_)) => faults.push(format!("{} is not ready", name_of(node))),
        }
    }
    let remedy = "see the items of the daemons on that node, and `kubectl describe node`";
    match (ready, faults.is_empty()) {
        (0, true) => {
            failed("no node offers peer pods", "label nodes with katacontainers.io/kata-runtime=true")
        }
        (_, true) => Ok(format!("{ready} nodes offer peer pods")),
        _ => failed(faults.join("; "), remedy),
    }
}

/// Compares the custom resources with those of this program.
fn definitions(there: &[CustomResourceDefinition]) -> Outcome {
    let versions = |crd: &CustomResourceDefinition| {
        crd.spec
            .versions
            .iter()
            .filter(|version| version.served)
            .map(|version| version.name.clone())
            .collect::<Vec<_>>()
    };
    let missing: Vec<String> = crds::all()
        .iter()
        .filter_map(|ours| {
            let name = ours.metadata.name.clone().unwrap_or_default();
            let found = there.iter().find(|crd| crd.metadata.name.as_deref() == Some(name.as_str()));
            let served = found.map(versions).unwrap_or_default();
            (!versions(ours).iter().all(|version| served.contains(version))).then_some(name)
        })
        .collect();
    if missing.is_empty() {
        return Ok("all custom resources are there".to_owned());
    }
    let remedy = "run: peerpod-cluster crds | kubectl apply --server-side -f -";
    failed(format!("missing or old: {}", missing.join(", ")), remedy)
}

/// Compares the installed version with this program's, and finds relays that an upgrade left behind.
fn versions(sets: &[DaemonSet]) -> Outcome {
    let ours = env!("CARGO_PKG_VERSION");
    let mut behind = Vec::new();
    for set in sets {
        let name = set.metadata.name.clone().unwrap_or_default();
        let pod = set.spec.as_ref().and_then(|spec| spec.template.spec.as_ref());
        let image = pod.and_then(|pod| pod.containers.first()?.image.as_deref()).unwrap_or_default();
        let found = version_of(image, set.metadata.labels.as_ref());
        if let Some(version) = found.filter(|version| !is_ours(version)) {
            behind.push(format!("{name} is of version {version}, and this program of {ours}"));
        }
        let status = set.status.clone().unwrap_or_default();
        let old = status.desired_number_scheduled - status.updated_number_scheduled.unwrap_or_default();
        if old > 0 {
            behind.push(format!(
                "{old} of {} pods of {name} are older than its template",
                status.desired_number_scheduled
            ));
        }
    }
    if sets.is_empty() {
        return skipped("no DaemonSet of the chart is there");
    }
    if behind.is_empty() {
        return Ok(format!("all daemons have version {ours}"));
    }
    warning(behind.join("; "), "follow docs/upgrades.md; a relay is never deleted while it serves pods")
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;
    use crate::item::Verdict;

    fn verdict(outcome: Outcome) -> (Verdict, String) {
        let item = Area::Cluster.item("x", outcome);
        (item.verdict, format!("{}: {}", item.cause, item.remedy))
    }

    #[test]
    fn the_clock_is_read_from_the_date_and_a_deviation_is_named() {
        assert_eq!(seconds("Sun, 06 Nov 1994 08:49:37 GMT"), Some(784_111_777));
        let verdicts = [None, Some(0), Some(-6), Some(61)].map(|skew| verdict(clock(skew)).0);
        assert_eq!(verdicts, [Verdict::Skipped, Verdict::Ok, Verdict::Warning, Verdict::Failed]);
    }

    #[test]
    fn a_foreign_runtime_class_is_named_before_the_installation() {
        let class = |labels| {
            from_value::<RuntimeClass>(json!({"handler": "kata-remote", "metadata": {"name": "kata-remote",
                "labels": labels, "annotations": {"meta.helm.sh/release-name": "kata-deploy"}}}))
            .unwrap()
        };
        let (seen, why) = verdict(runtime_class(Some(&class(json!({}))), "kata-remote", true));
        assert!(
            seen == Verdict::Ok && why.contains("kata-deploy") && why.contains("leaves it as it is"),
            "{why}"
        );
        let ours = class(json!({"app.kubernetes.io/name": "peerpod"}));
        assert_eq!(verdict(runtime_class(Some(&ours), "kata-remote", true)).0, Verdict::Ok);
        assert_eq!(verdict(runtime_class(None, "kata-remote", true)).0, Verdict::Ok);
        assert_eq!(verdict(runtime_class(None, "kata-remote", false)).0, Verdict::Failed);
    }

    #[test]
    fn nodes_without_capacity_show_their_cause() {
        let node = |name: &str, status: &str, capacity: serde_json::Value| {
            from_value::<Node>(json!({"metadata": {"name": name}, "status": {"capacity": capacity,
                "addresses": [{"type": "InternalIP", "address": "10.0.0.7"}],
                "conditions": [{"type": "PeerPodsReady", "status": status, "message": "the relay is away"}]}}))
            .unwrap()
        };
        let good = node("a", "True", json!({"r/vm": "10"}));
        let bad = node("b", "False", json!({}));
        assert_eq!(verdict(nodes_ready(std::slice::from_ref(&good), "", "r/vm")).0, Verdict::Ok);
        let (seen, why) = verdict(nodes_ready(&[good.clone(), bad.clone()], "", "r/vm"));
        assert!(seen == Verdict::Failed && why.contains("b: the relay is away"), "{why}");
        assert_eq!(verdict(nodes_ready(&[good.clone(), bad], "a", "r/vm")).0, Verdict::Ok);
        assert_eq!(verdict(nodes_ready(&[], "", "r/vm")).0, Verdict::Failed);
        assert_eq!(peers(std::slice::from_ref(&good), "b", "r/vm"), ["10.0.0.7".parse::<IpAddr>().unwrap()]);
        assert!(peers(&[good], "a", "r/vm").is_empty());
    }

    #[test]
    fn relays_that_are_behind_and_other_versions_are_named() {
        let set = |version: &str, updated: i32| {
            from_value::<DaemonSet>(json!({"metadata": {"name": "peerpod-relay",
                "labels": {"app.kubernetes.io/version": version}},
                "status": {"desiredNumberScheduled": 3, "updatedNumberScheduled": updated,
                    "currentNumberScheduled": 3, "numberMisscheduled": 0, "numberReady": 3}}))
            .unwrap()
        };
        let ours = env!("CARGO_PKG_VERSION");
        assert_eq!(verdict(versions(&[set(ours, 3)])).0, Verdict::Ok);
        let (seen, why) = verdict(versions(&[set("0.0.1", 1)]));
        assert!(seen == Verdict::Warning && why.contains("2 of 3 pods") && why.contains("0.0.1"), "{why}");
        let mut other = set(ours, 3);
        let pod = json!({"containers": [{"name": "relay", "image": "r.example/pp:v0.0.2"}]});
        other.spec = Some(from_value(json!({"selector": {}, "template": {"spec": pod}})).unwrap());
        let (seen, why) = verdict(versions(&[other]));
        assert!(seen == Verdict::Warning && why.contains("0.0.2"), "its image has a tag of its own: {why}");
        let (seen, why) = verdict(definitions(&crds::all().into_iter().skip(1).collect::<Vec<_>>()));
        assert!(seen == Verdict::Failed && why.contains("peerpod-cluster crds"), "{why}");
        assert_eq!(verdict(definitions(&crds::all())).0, Verdict::Ok);
    }
}
