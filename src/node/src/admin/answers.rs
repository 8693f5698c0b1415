//! Defines the answers of the admin socket. New versions add fields, and keep the meaning of those that exist.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use peerpod_provider_api::OwnedState;
use serde::{Deserialize, Serialize};

use crate::ledger::Record;
use crate::sandbox::View;
use crate::sandbox::ports::Guest;

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

/// A stage of a start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stage {
    /// Its name, as in the node's metrics.
    pub name: String,
    /// Time at which it was reached, ms after CreateVM was accepted.
    pub at_ms: u64,
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
    /// The pod's network namespace on the node.
    pub netns: Option<PathBuf>,
    /// Ids of the pod's CSI volumes.
    pub volumes: Vec<String>,
    /// The VM's type, as the provider chose it; until then the wanted one.
    pub instance_type: Option<String>,
    /// The VM's zone, if the provider has zones.
    #[serde(default)]
    pub zone: Option<String>,
    /// The VM's pricing model, if the provider has several.
    #[serde(default)]
    pub market: Option<String>,
    /// The VM's image, as the provider chose it; until then the wanted one, if it is not the configured one.
    pub image: Option<String>,
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
        let request = record.wanted.request.as_ref();
        let chosen = record.offering().unwrap_or_default();
        let stages = record.stages.iter();
        let volumes = record.volumes.iter().flat_map(|volumes| &volumes.volumes);
        Detail {
            sandbox: Sandbox::of(&View::of(record, false)),
            uid: record.pod.as_ref().and_then(|pod| pod.uid.clone()),
            attempt: record.wanted.attempt,
            addresses: record.addresses.clone(),
            netns: record.netns.as_ref().map(|netns| netns.path.clone()),
            volumes: volumes.map(|one| one.volume.id.as_str().to_owned()).collect(),
            instance_type: chosen.instance_type.or_else(|| request?.instance_type.clone()),
            zone: chosen.zone,
            market: chosen.market.map(|market| market.word().to_owned()),
            image: chosen.image.or_else(|| request?.image.clone()),
            guest_connected: guest.connected,
            guest_address: guest.address,
            stages: stages.map(|stage| Stage { name: stage.name.clone(), at_ms: stage.at_ms }).collect(),
            faults: faults.to_vec(),
            gone_ms: record.end.gone_ms,
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
