//! One sandbox with its VM, as the node's record or the cluster's PeerPod has it.

use std::collections::BTreeMap;

use anyhow::bail;
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use kube::core::DynamicObject;
use peerpod_kube::client::Error;
use peerpod_kube::crds::PeerpodVolume;
use peerpod_node::admin::{Detail, NodeStatus, Sandbox, Stage};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Cluster, Source, text};

/// A sandbox and its VM.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Vm {
    /// Pod as namespace/name.
    pub(crate) pod: String,
    /// The sandbox's id.
    pub(crate) sandbox: String,
    /// Name of the phase.
    pub(crate) phase: String,
    /// Name of the node.
    pub(crate) node: String,
    /// The provider's id of the VM.
    pub(crate) vm: Option<String>,
    /// When CreateVM was accepted.
    pub(crate) created: Option<Timestamp>,
    /// Whether `cause` is a failure.
    pub(crate) failed: bool,
    /// Reason of the stop or failure.
    pub(crate) cause: Option<String>,
    /// Present faults of the VM, and of its node, that have not failed the sandbox; a cluster has them as Events.
    pub(crate) faults: Vec<String>,
    /// Parts of the node that work with less than they should.
    pub(crate) warnings: Vec<String>,
    /// Further facts, by name: `type`, `zone`, `market`, `price`, `image`, `addresses` and others, as far as they are
    /// known.
    pub(crate) facts: BTreeMap<String, String>,
    /// The stages that it reached, in order.
    pub(crate) stages: Vec<Stage>,
    /// Name of the PeerPod; `None` from a node.
    pub(crate) peerpod: Option<String>,
}

fn time(ms: u64) -> Option<Timestamp> {
    Timestamp::from_millisecond(i64::try_from(ms).ok()?).ok()
}

impl Vm {
    fn of_node(sandbox: Sandbox, node: &str) -> Vm {
        let Sandbox { id, pod, phase, vm, created_ms, failed, cause, .. } = sandbox;
        Vm {
            pod,
            sandbox: id,
            phase,
            node: node.to_owned(),
            vm,
            created: time(created_ms),
            failed,
            cause,
            ..Vm::default()
        }
    }

    fn of_detail(detail: Detail, node: &NodeStatus) -> Vm {
        let Detail { sandbox, uid, attempt, addresses, network, volumes, vm, guest_address, stages, .. } =
            detail;
        let addresses: Vec<String> = addresses.iter().map(ToString::to_string).collect();
        let guest = match (detail.guest_connected, guest_address) {
            (true, Some(address)) => format!("connected from {address}"),
            (true, None) => "connected".to_owned(),
            (false, _) => "not connected".to_owned(),
        };
        let tunnel = network.tunnel.map(|(kind, port)| format!("{kind}, UDP port {port}"));
        let vnis: Vec<String> = network.vnis.iter().map(u32::to_string).collect();
        let facts = [
            ("provider", Some(node.provider.clone())),
            ("uid", uid),
            ("attempt", (attempt > 0).then(|| attempt.to_string())),
            ("addresses", Some(addresses.join(", "))),
            ("netns", network.netns.map(|path| path.display().to_string())),
            ("tunnel", tunnel),
            ("vni", Some(vnis.join(", "))),
            ("mtu", mtu(network.pod_mtu, network.path_mtu)),
            ("path", network.path_fault),
            ("volumes", Some(volumes.join(", "))),
            ("type", vm.instance_type),
            ("zone", vm.zone),
            ("market", vm.market),
            ("price", vm.price.map(price)),
            ("image", vm.image),
            ("guest", Some(guest)),
            ("gone", detail.gone_ms.and_then(time).map(|at| at.to_string())),
        ];
        let of_node = |(name, why): (&String, &String)| format!("node, {name}: {why}");
        let faults = detail.faults.into_iter().chain(node.waiting.iter().map(of_node)).collect();
        let warnings = node.warnings.iter().map(of_node).collect();
        Vm { facts: known(facts), stages, faults, warnings, ..Vm::of_node(sandbox, &node.node) }
    }

    fn of_peerpod(object: &DynamicObject) -> Vm {
        let at = |pointer: &str| text(&object.data, pointer);
        let owner = object.owner_references().iter().find(|owner| owner.kind == "Pod");
        let pod = owner.map(|owner| owner.name.clone()).unwrap_or_else(|| object.name_any());
        let conditions = object.data.pointer("/status/conditions").and_then(Value::as_array);
        let failure = conditions
            .into_iter()
            .flatten()
            .find(|one| one["status"] == "False" && (one["reason"] == "Failed" || one["type"] == "Deleted"));
        let stages = Vm::stages_of(object);
        let addresses = object.data.pointer("/status/addresses").and_then(Value::as_array);
        let addresses: Vec<&str> = addresses.into_iter().flatten().filter_map(Value::as_str).collect();
        let facts = [
            ("provider", at("/spec/cloudProvider")),
            ("type", at("/status/instanceType")),
            ("zone", at("/status/zone")),
            ("market", at("/status/market")),
            ("image", at("/status/image")),
            ("addresses", Some(addresses.join(", "))),
            ("uid", owner.map(|owner| owner.uid.clone())),
        ];
        Vm {
            pod: format!("{}/{pod}", object.namespace().unwrap_or_default()),
            sandbox: at("/spec/sandboxID").unwrap_or_default(),
            phase: at("/status/phase").unwrap_or_else(|| "Unknown".to_owned()).to_lowercase(),
            node: at("/spec/nodeName").unwrap_or_default(),
            vm: at("/spec/instanceID"),
            created: object.creation_timestamp().map(|at| at.0),
            failed: failure.is_some(),
            cause: failure.and_then(|one| text(one, "/message")),
            faults: Vec::new(),
            warnings: Vec::new(),
            facts: known(facts),
            stages,
            peerpod: Some(object.name_any()),
        }
    }

    fn stages_of(object: &DynamicObject) -> Vec<Stage> {
        let stages = object.data.pointer("/status/stages").and_then(Value::as_array);
        let mut at_ms: u64 = 0;
        let stage = |one: &Value| {
            at_ms = at_ms.saturating_add(one["tookMilliseconds"].as_u64()?);
            Some(Stage { name: text(one, "/name")?, at_ms })
        };
        stages.into_iter().flatten().filter_map(stage).collect()
    }

    /// A fact, or an empty text.
    pub(crate) fn fact(&self, name: &str) -> String {
        self.facts.get(name).cloned().unwrap_or_default()
    }

    /// Time since CreateVM, in the form of kubectl.
    pub(crate) fn age(&self) -> String {
        self.created.map(since).unwrap_or_default()
    }

    fn has_name(&self, name: &str) -> bool {
        let short = self.pod.split_once('/').map_or(&*self.pod, |(_, short)| short);
        [&*self.sandbox, &*self.pod, short].contains(&name) || self.peerpod.as_deref() == Some(name)
    }
}

/// Time since then, in the form of kubectl: `42s`, `5m`, `3h`, `2d`.
pub(crate) fn since(at: Timestamp) -> String {
    let seconds = Timestamp::now().duration_since(at).as_secs().max(0);
    match seconds {
        0..120 => format!("{seconds}s"),
        120..7200 => format!("{}m", seconds / 60),
        7200..172_800 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

fn known<const N: usize>(facts: [(&'static str, Option<String>); N]) -> BTreeMap<String, String> {
    let facts = facts.into_iter().filter_map(|(name, fact)| Some((name.to_owned(), fact?)));
    facts.filter(|(_, fact)| !fact.is_empty()).collect()
}

/// Text of a price in millionths per hour. The currency is that of the provider's prices.
fn price(millionths: u64) -> String {
    format!("{} per hour, when the VM was made", millionths as f64 / 1e6)
}

/// MTU of the pod in its VM, and that of the path to the node.
fn mtu(pod: Option<u32>, path: Option<u32>) -> Option<String> {
    let pod = pod.map(|pod| format!("{pod} in the VM"));
    let path = path.map(|path| format!("{path} between VM and node"));
    Some(pod.into_iter().chain(path).collect::<Vec<_>>().join(", "))
}

impl Cluster {
    /// Returns the volumes of the VM's pod, each with its state, as the PeerpodVolumes have them.
    ///
    /// # Errors
    /// The API server refuses or is away.
    pub(crate) async fn volumes_of(&self, vm: &Vm) -> Result<Vec<String>, Error> {
        let is_of = |one: &&DynamicObject| {
            let at = |name: &str| text(&one.data, &format!("/spec/{name}")).unwrap_or_default();
            // The same name may be that of a later pod.
            let owner = at("podUid");
            let is_same = vm.facts.get("uid").is_none_or(|uid| owner.is_empty() || *uid == owner);
            format!("{}/{}", at("podNamespace"), at("podName")) == vm.pod && is_same
        };
        Ok(self.raw::<PeerpodVolume>().await?.iter().filter(is_of).map(volume).collect())
    }
}

/// Name, id and conditions of a volume.
fn volume(object: &DynamicObject) -> String {
    let id = text(&object.data, "/spec/volumeID").unwrap_or_default();
    let name = text(&object.data, "/spec/volumeName").unwrap_or_else(|| object.name_any());
    let conditions = object.data.pointer("/status/conditions").and_then(Value::as_array);
    let words = conditions.into_iter().flatten().map(|one| {
        let kind = text(one, "/type").unwrap_or_default();
        match one["status"] == "True" {
            true => kind,
            false => format!("not {kind}: {}", text(one, "/message").unwrap_or_default()),
        }
    });
    let words: Vec<String> = words.collect();
    format!("{name} ({id}) {}", words.join(", ")).trim_end().to_owned()
}

impl Source {
    /// Lists the VMs, by pod. A node has none of its tombstones.
    ///
    /// # Errors
    /// The node or the API server refuses or is away.
    pub(crate) async fn list(&self) -> anyhow::Result<Vec<Vm>> {
        let mut found: Vec<Vm> = match self {
            Source::Node(node) => {
                let status: NodeStatus = node.get("/v1/node").await?;
                let sandboxes: Vec<Sandbox> = node.get("/v1/sandboxes").await?;
                sandboxes.into_iter().map(|one| Vm::of_node(one, &status.node)).collect()
            }
            Source::Cluster(cluster) => cluster.peerpods().await?.iter().map(Vm::of_peerpod).collect(),
        };
        found.sort_by(|one, other| (&one.pod, &one.sandbox).cmp(&(&other.pod, &other.sandbox)));
        Ok(found)
    }

    /// Finds the newest VM of a pod (`NAMESPACE/NAME` or `NAME`), or that of a sandbox's id, with all its facts.
    ///
    /// # Errors
    /// There is none, the name has several pods, or the node or the API server refuses.
    pub(crate) async fn find(&self, name: &str) -> anyhow::Result<Vm> {
        let mut found = self.list().await?;
        found.retain(|vm| vm.has_name(name));
        found.sort_by_key(|vm| vm.created);
        if let (Some(first), Some(last)) = (found.first(), found.last())
            && first.pod != last.pod
        {
            bail!("{name}: pods {} and {} have this name; write NAMESPACE/NAME", first.pod, last.pod);
        }
        match (self, found.pop()) {
            (Source::Node(node), newest) => {
                // A tombstone is not in the list, and its id still has a record.
                let id = newest.map_or_else(|| name.to_owned(), |vm| vm.sandbox);
                if id.contains('/') {
                    bail!("this node has no sandbox of pod {name}; `peerpod list` shows all");
                }
                let status = node.get("/v1/node").await?;
                Ok(Vm::of_detail(node.get(&format!("/v1/sandboxes/{id}")).await?, &status))
            }
            (Source::Cluster(_), Some(newest)) => Ok(newest),
            (Source::Cluster(_), None) => {
                bail!("no PeerPod is of pod or sandbox {name}; `peerpod list` shows all")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_price_has_no_more_digits_than_it_needs() {
        let texts = [31_200, 10_000, 2_500_000, 0].map(price);
        let expected =
            ["0.0312", "0.01", "2.5", "0"].map(|text| format!("{text} per hour, when the VM was made"));
        assert_eq!(texts, expected);
    }
}
