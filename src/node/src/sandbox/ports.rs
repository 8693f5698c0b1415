//! Defines the ports between a sandbox and its environment, one trait each. Tests implement them with a fake world,
//! stop time, and fail or kill at every call. No method retries: the task decides whether and when to retry.

use std::net::IpAddr;
use std::num::NonZeroU32;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::stream::BoxStream;
use peerpod_common::blocking::Interrupted;
use peerpod_proto::guest::{Images, NetworkPlan, Reply, Request};
use peerpod_proto::relay::{PutSandboxRequest, TunnelPeer};
use peerpod_provider_api::{
    Chosen, CreateRequest, DiskRequest, IdempotencyKey, InstanceId, Owned, Placement, ProviderEvent,
};
use tokio::sync::watch;
use zeroize::Zeroizing;

use crate::cluster::Recorded;
use crate::ledger::{self, Batch, NetnsRef, Network, Record};
use crate::spec::{PodRef, SandboxId};
use crate::trust::{Signed, Ticket};
use crate::volumes::PodVolumes;

pub(crate) use peerpod_provider_api::{Error as CloudError, Retry};

/// Number of changes seen around a sandbox's network.
pub(crate) type Changes = u64;

/// Endpoints at which guests reach the node; `None` until they are known.
pub(crate) type NodeEndpoints = Option<Arc<Vec<String>>>;

/// Failure of an operation on a pod's network.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{text}")]
pub(crate) struct NetworkError {
    pub text: String,
    /// Whether a retry is useless: the namespace is gone, or contains something that cannot be carried.
    pub permanent: bool,
}

impl NetworkError {
    pub(crate) fn permanent(text: impl Into<String>) -> NetworkError {
        NetworkError { text: text.into(), permanent: true }
    }

    pub(crate) fn transient(text: impl ToString) -> NetworkError {
        NetworkError { text: text.to_string(), permanent: false }
    }
}

impl From<Interrupted> for NetworkError {
    fn from(interrupted: Interrupted) -> NetworkError {
        NetworkError::transient(interrupted)
    }
}

/// Result of an inspection of a running pod's network.
#[derive(Clone, Debug)]
pub(crate) struct Followed {
    /// Network for the record, if it differs from the recorded one.
    pub network: Option<Network>,
    pub plan: NetworkPlan,
    pub changes: Vec<String>,
    /// New differences that cannot be followed, as text.
    pub left: Vec<String>,
    /// Possible obstacles to the pod's traffic, although the tunnel is complete, as text.
    pub obstacles: Vec<String>,
}

/// Result of one create call for several VMs.
#[derive(Clone, Debug)]
pub(crate) struct Made {
    pub vms: Vec<InstanceId>,
    /// Reason why there are fewer than requested.
    pub rest: Option<CloudError>,
}

/// Reason why a pod's pull secrets are not known.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{text}")]
pub(crate) struct PullSecretError {
    /// Message without any part of a secret.
    pub text: String,
    /// Whether the service refused, and will refuse again for a while.
    pub refused: bool,
}

impl PullSecretError {
    /// Makes the error of a request that may succeed later.
    pub(crate) fn away(text: String) -> PullSecretError {
        PullSecretError { text, refused: false }
    }
}

/// CA set that guests must trust at present.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Trusted {
    /// Changes with the CAs and with the signing CA; a guest with another id needs the new set.
    pub id: String,
    pub cas: Vec<Vec<u8>>,
}

/// Last state of a sandbox's guest and shim, as reported by the relay.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Guest {
    pub connected: bool,
    /// Changes with the process of the guest program or of the relay; empty before the first link.
    pub session: String,
    /// The guest's last status, encoded (`peerpod.guest.v1.Status`).
    pub status: Vec<u8>,
    /// Source address of its last connection, as the relay saw it.
    pub address: Option<IpAddr>,
    /// The shim had connections to the agent and has none to Peerpod now. A live shim keeps its first one and never opens
    /// another.
    pub shim_gone: bool,
}

/// Event for the pod's owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PodEvent {
    pub reason: &'static str,
    /// Problem, cause and remedy; of a normal Event the fact.
    pub text: String,
    pub is_normal: bool,
    /// Sandbox whose PeerPod gets the Event, too; `None`: the pod alone.
    pub of: Option<SandboxId>,
}

impl PodEvent {
    /// Makes the Event of a problem, for the pod alone.
    pub(crate) fn warning(reason: &'static str, text: String) -> PodEvent {
        PodEvent { reason, text, is_normal: false, of: None }
    }
}

pub(crate) trait Clock: Send + Sync + 'static {
    /// Returns the milliseconds since 1970, for records; a step of the wall clock does not change them. (Waits use
    /// tokio's clock, which tests stop.)
    fn now_ms(&self) -> u64;
}

/// Port to the durable state of the sandboxes.
#[async_trait]
pub(crate) trait Store: Send + Sync + 'static {
    async fn save(&self, record: &Record) -> Result<(), ledger::Error>;

    async fn forget(&self, id: &SandboxId) -> Result<(), ledger::Error>;

    /// Reads the record from disk; `None` if there is none.
    async fn recall(&self, id: &SandboxId) -> Result<Option<Record>, ledger::Error>;

    async fn save_batch(&self, batch: &Batch) -> Result<(), ledger::Error>;

    async fn forget_batch(&self, id: &str) -> Result<(), ledger::Error>;
}

/// Port to the provider.
#[async_trait]
pub(crate) trait Cloud: Send + Sync + 'static {
    /// Returns the reason why no call can succeed now, if that is known.
    fn obstacle(&self) -> Option<String>;

    /// Lets the provider choose the placement of the next attempt; `None` if it has no choice. Makes nothing.
    async fn place(&self, request: &CreateRequest) -> Result<Option<Placement>, CloudError>;

    /// Requests the VM from the cloud; the same key yields the same VM.
    async fn create(&self, request: &CreateRequest, key: &IdempotencyKey) -> Result<InstanceId, CloudError>;

    /// Returns the choices for a VM that a create of this process returned a moment ago, once.
    fn chosen(&self, vm: &InstanceId) -> Option<Chosen>;

    /// Requests several VMs by one call; the same key and count yield the same VMs.
    async fn create_many(
        &self,
        request: &CreateRequest,
        count: NonZeroU32,
        key: &IdempotencyKey,
    ) -> Result<Made, CloudError>;

    /// Lists every VM that this node made and that has not vanished.
    async fn owned(&self) -> Result<Vec<Owned>, CloudError>;

    /// Streams the provider's VM events; pending forever if it reports none.
    fn events(&self) -> BoxStream<'static, ProviderEvent>;

    /// Waits for the VM's addresses, and returns them best first.
    async fn addresses(&self, vm: &InstanceId) -> Result<Vec<IpAddr>, CloudError>;

    /// Deletes the VM; a VM that is gone is no error.
    async fn delete(&self, vm: &InstanceId) -> Result<(), CloudError>;

    /// Returns the raw end of the VM's console output, if the cloud offers it.
    async fn console(&self, vm: &InstanceId) -> Option<String>;

    /// Makes the VM see that one of its disks was enlarged to at least `bytes`, if it does not see that by itself.
    async fn disk_grown(&self, vm: &InstanceId, disk: &DiskRequest, bytes: u64) -> Result<(), CloudError>;
}

/// Port to the pods' CSI volumes.
#[async_trait]
pub(crate) trait Storage: Send + Sync + 'static {
    /// Reads the pod's volumes as recorded by its CSI wrapper; `None` if it has none. Never those of another pod.
    async fn volumes(&self, pod: &PodRef) -> Result<Option<PodVolumes>, String>;

    /// Reads the mount credentials of the pod's shares, in the volumes' order and in the guest's format. `None` for
    /// volumes without credentials, and while they are being unpublished. An error contains no part of them.
    async fn credentials(&self, volumes: &PodVolumes) -> Result<Vec<Option<Zeroizing<Vec<u8>>>>, String>;

    /// Records durably that a VM may be made with these volumes. Fails if they no longer belong to the pod, and while an
    /// earlier VM may have them.
    async fn expect_vm(&self, id: &SandboxId, volumes: &PodVolumes) -> Result<(), CloudError>;

    /// Attaches the volumes that are not attached yet. Returns all, with the identities that the guest looks for.
    async fn attach(
        &self,
        id: &SandboxId,
        vm: &InstanceId,
        volumes: PodVolumes,
    ) -> Result<PodVolumes, CloudError>;

    /// Records that the VM's attachments are free, once the VM is certainly gone.
    async fn release(&self, id: &SandboxId, vm: Option<&InstanceId>, uid: &str) -> Result<(), CloudError>;
}

/// Port to the pods' network on this node.
#[async_trait]
pub(crate) trait PodNetwork: Send + Sync + 'static {
    /// Opens the path and identifies the network namespace there.
    async fn netns(&self, path: &Path) -> Result<NetnsRef, NetworkError>;

    /// Whether the same namespace is still at its path.
    fn netns_lives(&self, netns: &NetnsRef) -> bool;

    /// Inspects the pod's network and reserves its tunnel: an encrypted one, which passes NATs, or one of the node's kind.
    async fn reserve(
        &self,
        netns: &NetnsRef,
        id: &SandboxId,
        v6: bool,
        encrypted: bool,
    ) -> Result<Network, NetworkError>;

    /// Whether the reserved tunnel does not suit the VM, given its addresses and the source address of its link.
    fn is_unsuited(&self, network: &Network, vm: IpAddr, addresses: &[IpAddr], from: Option<IpAddr>) -> bool;

    /// Returns the relay's data on the guest with this tunnel key; `None` if the relay does not carry the tunnel.
    fn tunnel_peer(&self, network: &Network, key: &[u8]) -> Option<TunnelPeer>;

    /// Sets the tunnel's remote and redirects the pod's traffic into it.
    async fn connect(
        &self,
        netns: &NetnsRef,
        id: &SandboxId,
        network: &Network,
        vm: IpAddr,
    ) -> Result<NetworkPlan, NetworkError>;

    /// Inspects the pod's network again, and applies the changes to the redirects and the remote.
    async fn follow(
        &self,
        netns: &NetnsRef,
        id: &SandboxId,
        network: &Network,
        vm: IpAddr,
    ) -> Result<Followed, NetworkError>;

    /// Whether packets to both addresses leave the node by the same interface.
    async fn is_one_way(&self, one: IpAddr, other: IpAddr) -> bool;

    /// Watches for changes in the pod's network namespace and on the path to the VM, until the receiver is dropped.
    fn netns_watcher(&self, netns: &NetnsRef, network: &Network, vm: IpAddr) -> watch::Receiver<Changes>;

    /// Redirects connections to the pod's localhost into its VM. Idempotent; `disconnect` undoes it.
    async fn carry_localhost(&self, netns: &NetnsRef, id: &SandboxId) -> Result<(), NetworkError>;

    /// Undoes the tunnel and the localhost redirection, as far as they exist; gone is no error.
    async fn disconnect(
        &self,
        netns: &NetnsRef,
        id: &SandboxId,
        network: Option<&Network>,
        vm: Option<IpAddr>,
    ) -> Result<(), NetworkError>;
}

/// Port to the relay, and through it to the guests.
#[async_trait]
pub(crate) trait Relay: Send + Sync + 'static {
    /// Counts relay processes; each needs the state of all sandboxes anew. 0 before the first one.
    fn epoch(&self) -> watch::Receiver<u64>;

    /// Makes the relay serve the sandbox; the latest call wins.
    async fn put(&self, request: PutSandboxRequest) -> Result<(), String>;

    /// Removes the sandbox from the relay; unknown is no error.
    async fn remove(&self, id: &SandboxId) -> Result<(), String>;

    /// Watches the guest's state as the relay reports it.
    fn guest(&self, id: &SandboxId) -> watch::Receiver<Guest>;

    async fn call(&self, id: &SandboxId, request: Request, timeout: Duration) -> Result<Reply, CallError>;
}

/// Failure of a call to a guest.
#[derive(Debug)]
pub(crate) struct CallError {
    pub text: String,
    /// Whether the relay does not serve the sandbox, so that its guest has no link.
    pub not_served: bool,
}

impl From<String> for CallError {
    fn from(text: String) -> CallError {
        CallError { text, not_served: false }
    }
}

/// Port to tickets, certificates, and the endpoints that user-data names.
#[async_trait]
pub(crate) trait Identity: Send + Sync + 'static {
    /// Makes a ticket that is valid for `ttl`.
    fn ticket(&self, ttl: Duration) -> Result<Ticket, String>;

    /// Waits, for a bounded time, until the node's endpoints are known: user-data contains them.
    async fn settled(&self);

    /// Returns the user-data of `claims` VMs that share the ticket.
    fn user_data(&self, ticket: &Ticket, claims: u32) -> Result<String, String>;

    /// Watches the endpoints at which guests reach this node, each `address:port`.
    fn node_endpoints(&self) -> watch::Receiver<NodeEndpoints>;

    /// Watches the CA set that guests must trust; it changes during a CA rotation.
    fn trusted(&self) -> watch::Receiver<Arc<Trusted>>;

    fn csr_key(&self, csr: &[u8]) -> Result<[u8; 32], String>;

    fn sign(&self, id: &SandboxId, csr: &[u8]) -> Result<Signed, String>;
}

/// Port to the Kubernetes cluster, and to the access to images that it grants.
#[async_trait]
pub(crate) trait Kubernetes: Send + Sync + 'static {
    /// Whether the node is in a cluster that shows sandboxes.
    fn is_in_cluster(&self) -> bool;

    /// Publishes the sandbox in the cluster, and waits for that, but only briefly. Returns the pod's UID, if known.
    async fn announce(&self, record: &Record) -> Option<String>;

    /// Publishes the sandbox's present state in the cluster, or removes it once the sandbox is gone. Does not wait.
    fn show(&self, record: &Record);

    /// Lists the PeerPods of this node; none outside a cluster.
    async fn recorded(&self) -> Result<Vec<Recorded>, String>;

    /// Posts an Event on the pod. Does not wait.
    fn tell(&self, pod: &PodRef, said: PodEvent);

    /// Returns the guest's registries, with the pod's own pull secrets (a `.dockerconfigjson`; empty for none).
    fn images(&self, pull_secret: &str) -> Option<Images>;

    /// Interval between queries for pods' pull secrets; `None` if there is no service to query.
    fn pull_secrets_every(&self) -> Option<Duration>;

    /// Fetches the pod's pull secrets as one `.dockerconfigjson`, empty if it has none. Returns within some seconds,
    /// and at once for a pod that names none.
    async fn pull_secret(&self, pod: &PodRef) -> Result<Zeroizing<String>, PullSecretError>;
}

/// All ports of a sandbox to its environment. Every method may be called again after a crash.
#[derive(Clone)]
pub(crate) struct Ports {
    pub clock: Arc<dyn Clock>,
    pub store: Arc<dyn Store>,
    pub cloud: Arc<dyn Cloud>,
    pub storage: Arc<dyn Storage>,
    pub network: Arc<dyn PodNetwork>,
    pub relay: Arc<dyn Relay>,
    pub identity: Arc<dyn Identity>,
    pub kubernetes: Arc<dyn Kubernetes>,
}
