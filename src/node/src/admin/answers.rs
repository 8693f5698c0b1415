//! Defines the answers of the admin socket. New versions add fields, and keep the meaning of those that exist.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use peerpod_proto::guest::Status;
use peerpod_provider_api::OwnedState;
use protobuf::Message;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::ledger::{Record, Stage};
use crate::ports::recorded;
use crate::sandbox::View;
use crate::sandbox::ports::Guest;

/// Length limit of a guest's text, in characters.
const MOST_TEXT: usize = 400;

/// State of the node.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NodeStatus {
    /// Version of `peerpod-node`.
    pub version: String,
    /// Commit of its build, if known.
    pub commit: Option<String>,
    /// Kinds of providers in its build.
    pub providers: Vec<String>,
    /// Name of the node.
    pub node: String,
    /// `node.cluster-id`.
    pub cluster: String,
    /// Id of the installation, which its VMs carry.
    pub installation: String,
    /// Name of the provider.
    pub provider: String,
    /// Facts of the provider's preflight, once it has passed.
    #[serde(default)]
    pub preflight: Vec<String>,
    /// Whether a pod could start now.
    #[serde(rename = "ready")]
    pub is_ready: bool,
    /// Reasons against that, by name.
    pub waiting: BTreeMap<String, String>,
    /// Warnings, by name.
    pub warnings: BTreeMap<String, String>,
    /// The relay, as the node sees it.
    pub relay: RelayStatus,
    /// Number of sandboxes by phase, without tombstones.
    pub sandboxes: BTreeMap<String, u64>,
}

/// State of the relay, as the node sees it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RelayStatus {
    /// Whether the node has a connection to it.
    #[serde(rename = "connected")]
    pub is_connected: bool,
    /// Address that guests dial, as the relay bound it.
    pub listen: Option<SocketAddr>,
    /// Its admin port, as the node's configuration has it.
    pub admin: SocketAddr,
}

/// A sandbox in a list.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Sandbox {
    /// Id, as the shim sends it.
    pub id: String,
    /// Pod as namespace/name; `-` if it is not known.
    pub pod: String,
    /// Name of the phase.
    pub phase: String,
    /// The provider's id of the VM.
    pub vm: Option<String>,
    /// Time of creation, ms since 1970.
    pub created_ms: u64,
    /// Whether StartVM was called.
    pub started: bool,
    /// Whether `cause` is a failure.
    pub failed: bool,
    /// Reason of the stop or failure.
    pub cause: Option<String>,
}

impl Sandbox {
    pub(crate) fn of(view: &View) -> Sandbox {
        Sandbox {
            id: view.id.to_string(),
            pod: view.pod.to_string(),
            phase: view.phase.name().to_owned(),
            vm: view.vm().map(ToString::to_string),
            created_ms: view.created_ms,
            started: view.started,
            failed: view.failed,
            cause: view.cause.as_deref().map(str::to_owned),
        }
    }
}

/// One sandbox with the facts of its record.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Detail {
    /// The facts of the list.
    #[serde(flatten)]
    pub sandbox: Sandbox,
    /// UID of the pod.
    pub uid: Option<String>,
    /// Number of the attempt that made its VM, from 0.
    pub attempt: u32,
    /// The VM's addresses, as the provider reports them.
    pub addresses: Vec<IpAddr>,
    /// The pod's network on the node, and the path to its VM.
    #[serde(flatten)]
    pub network: NetworkDetail,
    /// Ids of the pod's CSI volumes.
    pub volumes: Vec<String>,
    /// Properties of the VM.
    #[serde(flatten)]
    pub vm: VmDetail,
    /// Whether the guest has a link to the relay.
    pub guest_connected: bool,
    /// Source address of its last connection.
    pub guest_address: Option<IpAddr>,
    /// The stages that it reached, in order.
    pub stages: Vec<Stage>,
    /// Present faults that have not failed the sandbox, with their remedies.
    #[serde(default)]
    pub faults: Vec<String>,
    /// When it became a tombstone, ms since 1970.
    pub gone_ms: Option<u64>,
}

impl Detail {
    pub(crate) fn of(record: &Record, guest: &Guest, faults: &[String]) -> Detail {
        let volumes = record.volumes.iter().flat_map(|volumes| &volumes.volumes);
        Detail {
            sandbox: Sandbox::of(&View::of(record, false)),
            uid: record.pod.as_ref().and_then(|pod| pod.uid.clone()),
            attempt: record.wanted.attempt,
            addresses: record.addresses.clone(),
            network: NetworkDetail::of(record, guest),
            volumes: volumes.map(|one| one.volume.id.as_str().to_owned()).collect(),
            vm: VmDetail::of(record),
            guest_connected: guest.connected,
            guest_address: guest.address,
            stages: record.trace.stages.clone(),
            faults: faults.to_vec(),
            gone_ms: record.end.gone_ms,
        }
    }
}

/// Properties of a sandbox's VM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct VmDetail {
    /// The VM's type, as the provider chose it; until then the wanted one.
    pub instance_type: Option<String>,
    /// The VM's zone, if the provider has zones.
    pub zone: Option<String>,
    /// The VM's pricing model, if the provider has several.
    pub market: Option<String>,
    /// The VM's price per hour when it was made, in millionths of the currency of the provider's prices.
    pub price: Option<u64>,
    /// The VM's image, as the provider chose it; until then the wanted one, if it is not the configured one.
    pub image: Option<String>,
}

impl VmDetail {
    fn of(record: &Record) -> VmDetail {
        let request = record.wanted.request.as_ref();
        let chosen = record.offering().unwrap_or_default();
        VmDetail {
            instance_type: chosen.instance_type.or_else(|| request?.instance_type.clone()),
            zone: chosen.zone,
            market: chosen.market.map(|market| market.word().to_owned()),
            price: chosen.price,
            image: chosen.image.or_else(|| request?.image.clone()),
        }
    }
}

/// Network of a sandbox. A part that is not known yet is `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct NetworkDetail {
    /// The pod's network namespace on the node.
    pub netns: Option<PathBuf>,
    /// The pod's interfaces, addresses, routes and rules, as the node recorded them.
    pub picture: Option<Value>,
    /// Encapsulation of the pod's tunnels, `vxlan` or `wireguard`, and their UDP port.
    pub tunnel: Option<(String, u16)>,
    /// VNIs of the tunnels, that of the primary interface first.
    pub vnis: Vec<u32>,
    /// MTU of the pod's primary interface in the VM, in bytes, as the guest reports it.
    pub pod_mtu: Option<u32>,
    /// Largest IP packet between VM and node, in bytes, as the guest reports it.
    pub path_mtu: Option<u32>,
    /// Reason why no UDP probe of the guest came back; `None`: probes came back, or there is no report.
    pub path_fault: Option<String>,
}

impl NetworkDetail {
    fn of(record: &Record, guest: &Guest) -> NetworkDetail {
        let (pod, reserved) = record.network.as_ref().and_then(recorded).unzip();
        let status = Status::parse_from_bytes(&guest.status).unwrap_or_default();
        let path = status.path.unwrap_or_default();
        let known = |bytes: u32| (bytes > 0).then_some(bytes);
        let why: String = path.why.chars().take(MOST_TEXT).collect();
        NetworkDetail {
            netns: record.netns.as_ref().map(|netns| netns.path.clone()),
            picture: pod.and_then(|pod| serde_json::to_value(pod).ok()),
            tunnel: reserved.as_ref().map(|reserved| (reserved.kind.word().to_owned(), reserved.port)),
            vnis: reserved.iter().flat_map(|one| &one.devices).map(|device| device.vni).collect(),
            pod_mtu: known(status.pod_mtu),
            path_mtu: known(path.mtu),
            path_fault: Some(why).filter(|why| !why.is_empty()),
        }
    }
}

/// A VM of this node that no record claims. A VM that was just made is one for a moment.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Orphan {
    /// The provider's id of the VM.
    pub vm: String,
    /// Name of its create request.
    pub name: Option<String>,
    /// Its state.
    pub state: OwnedState,
    /// Time of its creation, ms since 1970, if the provider has it.
    pub created_ms: Option<u64>,
}

#[cfg(test)]
mod tests {
    use peerpod_proto::guest::Path;
    use serde_json::{from_value, json};

    use super::*;

    #[test]
    fn the_network_is_that_of_record_and_guest() {
        let pod = json!({"name": "eth0", "index": 2, "mac": "02:00:00:00:00:01", "mtu": 1450, "tx_queue_len": null,
            "addresses": [], "routes": [], "neighbours": []});
        let reserved = json!({"kind": "wireguard", "v6": false, "port": 4790,
            "devices": [{"interface": 2, "slot": 0, "vni": 7, "ifindex": 9}]});
        let tunnel = json!({"seen": {"interfaces": [pod]}, "reserved": reserved, "losses": null});
        let mut record = Record::tombstone("a".parse().unwrap(), 1);
        record.network = from_value(json!({"v6": false, "tunnel": tunnel})).unwrap();
        let path = Path { mtu: 1500, why: "no probe came back".to_owned(), ..Path::default() };
        let status = Status { path: Some(path).into(), pod_mtu: 1390, ..Status::default() };
        let guest = Guest { status: status.write_to_bytes().unwrap(), ..Guest::default() };
        let network = NetworkDetail::of(&record, &guest);
        assert_eq!(network.tunnel, Some(("wireguard".to_owned(), 4790)));
        assert_eq!((network.vnis, network.pod_mtu, network.path_mtu), (vec![7], Some(1390), Some(1500)));
        assert_eq!(network.path_fault.as_deref(), Some("no probe came back"));
        assert_eq!(network.picture.unwrap()["interfaces"][0]["name"], "eth0");
        let none = Record::tombstone("b".parse().unwrap(), 1);
        assert_eq!(NetworkDetail::of(&none, &Guest::default()), NetworkDetail::default());
    }
}
