//! Production implementation of the sandboxes' [ports](crate::sandbox::ports::Ports): disk, provider, tunnel, trust and
//! cluster. It translates calls; it makes no decisions. The client of the relay implements its port itself.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU32;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use futures_util::stream::{self, BoxStream, StreamExt};
use parking_lot::Mutex;
use peerpod_base::admin::Ready;
use peerpod_common::blocking::blocking;
use peerpod_link::user_data::{UserData, UserDataNode, UserDataTicket, VERSION};
use peerpod_podnet::inspect::unlisted;
use peerpod_podnet::redirect::tcx;
use peerpod_podnet::{Error as NetError, carrier, localhost, underlay};
use peerpod_proto::guest::{Images, NetworkPlan};
use peerpod_proto::relay::TunnelPeer;
use peerpod_provider_api::{
    Chosen, CreateRequest, Created, DiskRequest, IdempotencyKey, InstanceId, Owned, Placement, Provider,
    ProviderEvent,
};
use serde::{Deserialize, Serialize};
use serde_json::value::to_raw_value;
use tokio::sync::watch;
use zeroize::Zeroizing;

use crate::app::CONNECTION;
use crate::cluster::show::About;
use crate::cluster::{Cluster, DesiredPeerPod, Recorded};
use crate::ledger::{self, Batch, Ledger, NetnsRef, Network, Record};
use crate::localhost::Localhost;
use crate::preflight::PreflightFacts;
use crate::registries::Registries;
use crate::relay_client::RelayClient;
use crate::rotate::SharedTrust;
use crate::sandbox::ports::{
    Changes, Clock, Cloud, CloudError, Followed, Identity, Kubernetes, Made, NetworkError, NodeEndpoints,
    PodEvent, PodNetwork, PullSecretError, Store, Trusted,
};
use crate::secrets::PullSecrets;
use crate::spec::{PodRef, SandboxId};
use crate::trust::{Signed, Ticket, Trust};
use crate::tunnel::follow::{Merged, merge};
use crate::tunnel::{Netns, NetnsId, PodNetworkState, Reserved, Tunnel, TunnelKind, inspect};

pub(crate) use addresses::GuestAddresses;
pub(crate) use clock::NodeClock;
pub(crate) use gc::collect_garbage;
pub(crate) use surroundings::Surroundings;

mod addresses;
mod clock;
mod gc;
mod netns_watcher;
mod surroundings;
#[cfg(test)]
mod tests;

/// Choices for VMs that are kept until their sandboxes take them.
const MOST_CHOSEN: usize = 4096;

/// The provider, decorated.
pub(crate) struct ProviderCloud {
    provider: Arc<dyn Provider>,
    /// Choices that no sandbox has taken yet. A crash loses them: they are for people and metrics only.
    chosen: Mutex<HashMap<InstanceId, Chosen>>,
    ready: Ready,
    facts: PreflightFacts,
}

impl ProviderCloud {
    pub(crate) fn new(provider: Arc<dyn Provider>, ready: Ready, facts: PreflightFacts) -> ProviderCloud {
        ProviderCloud { provider, chosen: Mutex::default(), ready, facts }
    }

    fn keep(&self, created: Created) -> InstanceId {
        let mut chosen = self.chosen.lock();
        if chosen.len() >= MOST_CHOSEN {
            chosen.clear();
        }
        chosen.insert(created.id.clone(), created.chosen);
        created.id
    }
}

/// The pods' network on this node.
pub(crate) struct NodeNetwork {
    pub tunnel: Tunnel,
    pub localhost: Localhost,
    pub relay: RelayClient,
    pub surroundings: Surroundings,
    /// The kernel's boot id: after a reboot no recorded namespace exists any more.
    pub boot_id: String,
}

/// Tickets and certificates, and the endpoints at which guests reach the node.
pub(crate) struct NodeIdentity {
    pub clock: NodeClock,
    pub trust: SharedTrust,
    pub addresses: GuestAddresses,
    pub relay: RelayClient,
    pub surroundings: Surroundings,
    /// Port on which VMs wait to be dialled; `None`: VMs dial.
    pub dial: Option<u16>,
    /// Silence after which a guest powers off.
    pub lease: Duration,
}

/// The cluster, and the access to images that it grants.
pub(crate) struct NodeCluster {
    pub clock: NodeClock,
    /// Client of the cluster, and the facts that all PeerPods of this node share; `None`: this node is in no cluster.
    pub cluster: Option<(Cluster, About)>,
    pub registries: Registries,
    pub pull_secrets: Option<PullSecrets>,
}

/// Network state of a pod, as the ledger keeps it.
#[derive(Serialize, Deserialize)]
struct NetworkRecord {
    seen: PodNetworkState,
    reserved: Reserved,
    /// Carrier losses by interface index, as last recorded; `None` before the first inspection of the running pod.
    losses: Option<BTreeMap<u32, u32>>,
}

/// Returns the pod's network and its tunnels in a record; `None` if it cannot be read.
pub(crate) fn recorded(network: &Network) -> Option<(PodNetworkState, Reserved)> {
    let NetworkRecord { seen, reserved, .. } = NetworkRecord::read(network).ok()?;
    Some((seen, reserved))
}

impl NetworkRecord {
    fn read(network: &Network) -> Result<NetworkRecord, NetworkError> {
        serde_json::from_str(network.tunnel.get())
            .map_err(|error| NetworkError::permanent(format!("the recorded tunnel cannot be read: {error}")))
    }

    fn write(&self, v6: bool) -> Result<Network, NetworkError> {
        let failed = |error| NetworkError::permanent(format!("encode the tunnel's record: {error}"));
        Ok(Network { v6, tunnel: to_raw_value(self).map_err(failed)? })
    }

    /// Connects the tunnel, and returns obstacles that may keep traffic from it.
    fn connect(
        &self,
        tunnel: &Tunnel,
        netns: &Netns,
        id: &str,
        v6: bool,
        vm: IpAddr,
    ) -> Result<(NetworkPlan, Vec<String>), NetworkError> {
        let NetworkRecord { seen, reserved, .. } = self;
        match tunnel.connect(netns, id, reserved, seen, vm) {
            Err(NetError::Gone { .. }) => {}
            connected => return Ok(connected?),
        }
        // Another program deleted the device. The guest knows the VNI, so the new device must have the same one.
        let again = tunnel.reserve(netns, id, seen, v6, Some(reserved))?;
        if !again.is_same(reserved) {
            let vnis: Vec<String> = reserved.devices.iter().map(|d| d.vni.to_string()).collect();
            let text = format!(
                "another program deleted the pod's tunnel and took its VNI ({}); stop that program, and delete the pod to get \
                 another VNI",
                vnis.join(", ")
            );
            return Err(NetworkError::permanent(text));
        }
        Ok(tunnel.connect(netns, id, &again, seen, vm)?)
    }

    /// Inspects the pod's network again, and applies the changes.
    fn follow(
        self,
        tunnel: &Tunnel,
        netns: &Netns,
        id: &str,
        v6: bool,
        vm: IpAddr,
    ) -> Result<Followed, NetworkError> {
        let mut now = inspect(netns)?;
        // Slow, so it is done once per pod, at a time when no start waits for it.
        if self.losses.is_none() {
            now.left_out.extend(unlisted(netns, &now).unwrap_or_default());
        } else {
            let before = self.seen.left_out.iter().filter(|what| what.starts_with("sysctl"));
            now.left_out.extend(before.cloned());
        }
        let losses = carrier::losses(netns)?;
        let before = self.losses.clone().unwrap_or_default();
        let fell = |index| before.get(&index).is_some_and(|then| Some(then) != losses.get(&index));
        let Merged { seen, changes, left, kept } = merge(&self.seen, now, &fell);
        // An interface that lost entries by going down keeps its old count, so that the next inspection does not remove
        // them either.
        let old = |index: &u32| before.get(index).filter(|_| kept.contains(index));
        let losses = losses.iter().map(|(index, count)| (*index, *old(index).unwrap_or(count))).collect();
        let (record, network) = if changes.is_empty() && self.losses.as_ref() == Some(&losses) {
            (self, None)
        } else {
            let reserved = match self.reserved {
                same if same.carries(&seen) => same,
                other => tunnel.reserve(netns, id, &seen, v6, Some(&other))?,
            };
            let record = NetworkRecord { seen, reserved, losses: Some(losses) };
            let network = record.write(v6)?;
            (record, Some(network))
        };
        let (plan, mut obstacles) = record.connect(tunnel, netns, id, v6, vm)?;
        obstacles.extend(tcx::obstacles(netns, &record.seen.interfaces).unwrap_or_default());
        Ok(Followed { network, plan, changes, left, obstacles })
    }
}

impl NodeNetwork {
    /// Runs `work` in the recorded namespace, on a thread that may block.
    async fn in_netns<T: Send + 'static>(
        &self,
        netns: &NetnsRef,
        work: impl FnOnce(&Tunnel, &Netns) -> Result<T, NetworkError> + Send + 'static,
    ) -> Result<T, NetworkError> {
        let (tunnel, boot_id, netns) = (self.tunnel.clone(), self.boot_id.clone(), netns.clone());
        blocking(move || {
            let opened = open(&boot_id, &netns)?;
            work(&tunnel, &opened).map_err(|mut error| {
                // A device name alone does not identify the pod.
                let path = netns.path.display().to_string();
                if !error.text.contains(&path) {
                    error.text = format!("in network namespace {path}: {}", error.text);
                }
                error
            })
        })
        .await
    }
}

/// Opens the recorded namespace; another namespace at the same path is an error. Blocks.
fn open(boot_id: &str, netns: &NetnsRef) -> Result<Netns, NetworkError> {
    let opened = Netns::open(&netns.path)?;
    if opened.id() != netns.identity() || boot_id != netns.boot_id {
        let text = format!("the network namespace at {} is not the one of CreateVM", netns.path.display());
        return Err(NetworkError::permanent(text));
    }
    Ok(opened)
}

/// Whether the recorded namespace is still at its path.
fn lives(boot_id: &str, netns: &NetnsRef) -> bool {
    boot_id == netns.boot_id && NetnsId::of(&netns.path) == Some(netns.identity())
}

/// Returns the identity of a pod's namespace at a path. The node's own namespace is an error. For a pod with
/// `hostNetwork`, shims send an empty path.
fn pod_netns(path: &Path) -> Result<NetnsId, NetworkError> {
    const SHARED: &str = "the pod has hostNetwork: true, and a peer pod cannot share the node's network, because it \
                          runs in a VM; remove hostNetwork, or give the pod another runtimeClassName";
    if path.as_os_str().is_empty() {
        return Err(NetworkError::permanent(SHARED));
    }
    let id = Netns::open(path)?.id();
    if NetnsId::of(Path::new("/proc/thread-self/ns/net")) == Some(id) {
        return Err(NetworkError::permanent(SHARED));
    }
    Ok(id)
}

impl From<NetError> for NetworkError {
    fn from(error: NetError) -> NetworkError {
        let permanent = match &error {
            NetError::NotNetns { .. }
            | NetError::CannotCarry(_)
            | NetError::TooMany { .. }
            | NetError::Claimed { .. }
            | NetError::Plan(_) => true,
            other => other.is_gone(),
        };
        NetworkError { text: error.to_string(), permanent }
    }
}

#[async_trait]
impl Store for Ledger {
    async fn save(&self, record: &Record) -> Result<(), ledger::Error> {
        let (ledger, record) = (self.clone(), record.clone());
        blocking(move || ledger.save(&record)).await
    }

    async fn forget(&self, id: &SandboxId) -> Result<(), ledger::Error> {
        let (ledger, id) = (self.clone(), id.clone());
        blocking(move || ledger.remove(&id)).await
    }

    async fn recall(&self, id: &SandboxId) -> Result<Option<Record>, ledger::Error> {
        let (ledger, id) = (self.clone(), id.clone());
        blocking(move || ledger.read(&id)).await
    }

    async fn save_batch(&self, batch: &Batch) -> Result<(), ledger::Error> {
        let (ledger, batch) = (self.clone(), batch.clone());
        blocking(move || ledger.save_batch(&batch)).await
    }

    async fn forget_batch(&self, id: &str) -> Result<(), ledger::Error> {
        let (ledger, id) = (self.clone(), id.to_owned());
        blocking(move || ledger.remove_batch(&id)).await
    }
}

#[async_trait]
impl Cloud for ProviderCloud {
    fn obstacle(&self) -> Option<String> {
        self.ready.waiting().remove(CONNECTION)
    }

    async fn place(&self, request: &CreateRequest) -> Result<Option<Placement>, CloudError> {
        self.provider.place(request).await.inspect_err(|error| self.facts.refused(error))
    }

    async fn create(&self, request: &CreateRequest, key: &IdempotencyKey) -> Result<InstanceId, CloudError> {
        let made = self.provider.create(request, key).await.inspect_err(|error| self.facts.refused(error));
        made.map(|created| self.keep(created))
    }

    fn chosen(&self, vm: &InstanceId) -> Option<Chosen> {
        self.chosen.lock().remove(vm)
    }

    async fn create_many(
        &self,
        request: &CreateRequest,
        count: NonZeroU32,
        key: &IdempotencyKey,
    ) -> Result<Made, CloudError> {
        let Some(batch) = self.provider.extensions().batch else {
            // The provider supported batches when this one was recorded.
            let text = format!("provider {} no longer supports batches", self.provider.name());
            return Err(CloudError::unsupported("batch", text));
        };
        let many = batch.create_many(request, count, key).await;
        let many = many.inspect_err(|error| self.facts.refused(error))?;
        Ok(Made { vms: many.made.into_iter().map(|made| self.keep(made)).collect(), rest: many.rest })
    }

    async fn owned(&self) -> Result<Vec<Owned>, CloudError> {
        self.provider.list_owned().await
    }

    fn events(&self) -> BoxStream<'static, ProviderEvent> {
        self.provider.events().unwrap_or_else(|| stream::pending().boxed())
    }

    async fn addresses(&self, vm: &InstanceId) -> Result<Vec<IpAddr>, CloudError> {
        self.provider.addresses(vm).await
    }

    async fn delete(&self, vm: &InstanceId) -> Result<(), CloudError> {
        self.provider.delete(vm).await
    }

    async fn console(&self, vm: &InstanceId) -> Option<String> {
        // A kernel that panics writes its stack after the reason.
        let tail = self.provider.extensions().console?.tail(vm, 16 << 10).await.ok()?;
        Some(String::from_utf8_lossy(&tail).into_owned())
    }

    async fn disk_grown(&self, vm: &InstanceId, disk: &DiskRequest, bytes: u64) -> Result<(), CloudError> {
        match self.provider.extensions().volumes {
            Some(volumes) => volumes.grown(vm, disk, bytes).await,
            None => Ok(()),
        }
    }
}

#[async_trait]
impl PodNetwork for NodeNetwork {
    async fn netns(&self, path: &Path) -> Result<NetnsRef, NetworkError> {
        let own = path.to_owned();
        let NetnsId { dev, inode } = blocking(move || pod_netns(&own)).await?;
        Ok(NetnsRef { path: path.into(), dev, inode, boot_id: self.boot_id.clone() })
    }

    fn netns_lives(&self, netns: &NetnsRef) -> bool {
        lives(&self.boot_id, netns)
    }

    async fn reserve(
        &self,
        netns: &NetnsRef,
        id: &SandboxId,
        v6: bool,
        encrypted: bool,
    ) -> Result<Network, NetworkError> {
        let id = id.clone();
        let reserve = move |tunnel: &Tunnel, netns: &Netns| {
            let seen = inspect(netns)?;
            let reserved = if encrypted {
                tunnel.reserve_as(TunnelKind::Wireguard, netns, id.as_str(), &seen, v6, None)
            } else {
                tunnel.reserve(netns, id.as_str(), &seen, v6, None)
            };
            NetworkRecord { seen, reserved: reserved?, losses: None }.write(v6)
        };
        self.in_netns(netns, reserve).await
    }

    fn is_unsuited(&self, network: &Network, vm: IpAddr, addresses: &[IpAddr], from: Option<IpAddr>) -> bool {
        let recorded = NetworkRecord::read(network);
        recorded.is_ok_and(|recorded| self.tunnel.is_unsuited(&recorded.reserved, vm, addresses, from))
    }

    fn tunnel_peer(&self, network: &Network, key: &[u8]) -> Option<TunnelPeer> {
        self.tunnel.peer(&NetworkRecord::read(network).ok()?.reserved, key)
    }

    async fn connect(
        &self,
        netns: &NetnsRef,
        id: &SandboxId,
        network: &Network,
        vm: IpAddr,
    ) -> Result<NetworkPlan, NetworkError> {
        let (id, v6, recorded) = (id.clone(), network.v6, NetworkRecord::read(network)?);
        let connected =
            self.in_netns(netns, move |tunnel, netns| recorded.connect(tunnel, netns, id.as_str(), v6, vm));
        connected.await.map(|(plan, _)| plan)
    }

    async fn follow(
        &self,
        netns: &NetnsRef,
        id: &SandboxId,
        network: &Network,
        vm: IpAddr,
    ) -> Result<Followed, NetworkError> {
        let (id, v6, recorded) = (id.clone(), network.v6, NetworkRecord::read(network)?);
        self.in_netns(netns, move |tunnel, netns| recorded.follow(tunnel, netns, id.as_str(), v6, vm)).await
    }

    async fn is_one_way(&self, one: IpAddr, other: IpAddr) -> bool {
        let ask = move || -> Result<bool, NetworkError> {
            let mut node = Netns::current()?.netlink()?;
            Ok(underlay::towards(&mut node, one)? == underlay::towards(&mut node, other)?)
        };
        blocking(ask).await.unwrap_or(false)
    }

    fn netns_watcher(&self, netns: &NetnsRef, network: &Network, vm: IpAddr) -> watch::Receiver<Changes> {
        let to = NetworkRecord::read(network).ok().map(|recorded| (recorded.reserved, vm));
        let (boot_id, tunnel) = (self.boot_id.clone(), self.tunnel.clone());
        netns_watcher::watch_netns(boot_id, netns.clone(), tunnel, to, &self.surroundings)
    }

    async fn carry_localhost(&self, netns: &NetnsRef, id: &SandboxId) -> Result<(), NetworkError> {
        let netns = self.in_netns(netns, |_, netns| Ok(netns.clone())).await?;
        self.localhost.carry(&netns, id, &self.relay).await
    }

    async fn disconnect(
        &self,
        netns: &NetnsRef,
        id: &SandboxId,
        network: Option<&Network>,
        vm: Option<IpAddr>,
    ) -> Result<(), NetworkError> {
        let (tunnel, boot_id) = (self.tunnel.clone(), self.boot_id.clone());
        let (netns, id, network) = (netns.clone(), id.clone(), network.cloned());
        blocking(move || {
            let open = match open(&boot_id, &netns) {
                Ok(open) => Some(open),
                // A deleted namespace took its devices with it; only the node's own filter is left.
                Err(error) if error.permanent || !lives(&boot_id, &netns) => None,
                Err(error) => return Err(error),
            };
            // The rules may be those of a node with another configuration.
            let localhost = open.as_ref().map_or(Ok(()), localhost::remove);
            let network = network.as_ref().map(NetworkRecord::read).transpose()?;
            let reserved = network.map(|recorded| recorded.reserved);
            tunnel.undo(id.as_str(), open.as_ref(), reserved.as_ref(), vm).map_err(|errors| {
                let texts: Vec<String> = errors.iter().map(ToString::to_string).collect();
                NetworkError::transient(texts.join("; "))
            })?;
            Ok(localhost?)
        })
        .await
    }
}

#[async_trait]
impl Identity for NodeIdentity {
    fn ticket(&self, ttl: Duration) -> Result<Ticket, String> {
        Ticket::new(self.clock.now_ms(), ttl).map_err(|error| error.to_string())
    }

    async fn settled(&self) {
        self.addresses.settled().await;
    }

    fn user_data(&self, ticket: &Ticket, claims: u32) -> Result<String, String> {
        let addresses: Vec<SocketAddr> = self.addresses.now(self.relay.listen())?;
        let ca = self.trust.read().ca_sha256();
        Ok(user_data(ticket, claims, &addresses, self.dial, &ca, self.lease))
    }

    fn node_endpoints(&self) -> watch::Receiver<NodeEndpoints> {
        self.surroundings.node_endpoints.clone()
    }

    fn trusted(&self) -> watch::Receiver<Arc<Trusted>> {
        self.trust.trusted()
    }

    fn csr_key(&self, csr: &[u8]) -> Result<[u8; 32], String> {
        Trust::csr_key_sha256(csr).map_err(|error| error.to_string())
    }

    fn sign(&self, id: &SandboxId, csr: &[u8]) -> Result<Signed, String> {
        let trust = self.trust.read();
        trust.sign_guest(id.as_str(), csr, SystemTime::now()).map_err(|error| error.to_string())
    }
}

impl NodeCluster {
    /// Returns the Kubernetes view of this record, and the client that writes it. The cluster gets times of the wall clock.
    fn shown(&self, record: &Record) -> Option<(&Cluster, DesiredPeerPod)> {
        let (cluster, about) = self.cluster.as_ref()?;
        let wall_ms = |at_ms| self.clock.as_wall_ms(at_ms, SystemTime::now());
        let record = Record { created_ms: wall_ms(record.created_ms), ..record.clone() };
        Some((cluster, DesiredPeerPod::of(&record, about, wall_ms(self.clock.now_ms()))?))
    }
}

#[async_trait]
impl Kubernetes for NodeCluster {
    fn is_in_cluster(&self) -> bool {
        self.cluster.is_some()
    }

    async fn announce(&self, record: &Record) -> Option<String> {
        let (cluster, shown) = self.shown(record)?;
        cluster.announce(shown).await
    }

    fn show(&self, record: &Record) {
        if let Some((cluster, shown)) = self.shown(record) {
            drop(cluster.show(shown)); // no caller waits for the write
        }
    }

    async fn recorded(&self) -> Result<Vec<Recorded>, String> {
        let Some((cluster, _)) = &self.cluster else { return Ok(Vec::new()) };
        cluster.recorded().await.map_err(|error| error.to_string())
    }

    fn tell(&self, pod: &PodRef, said: PodEvent) {
        if let Some((cluster, _)) = &self.cluster {
            cluster.events.tell(pod, said);
        }
    }

    fn images(&self, pull_secret: &str) -> Option<Images> {
        Some(self.registries.images(pull_secret))
    }

    fn pull_secrets_every(&self) -> Option<Duration> {
        self.pull_secrets.as_ref().map(PullSecrets::refresh)
    }

    async fn pull_secret(&self, pod: &PodRef) -> Result<Zeroizing<String>, PullSecretError> {
        let Some(service) = &self.pull_secrets else { return Ok(Zeroizing::default()) };
        if self.cluster.as_ref().is_some_and(|(cluster, _)| cluster.has_no_pull_secrets(pod)) {
            return Ok(Zeroizing::default());
        }
        let given = service.of(pod).await?;
        if !given.notes.is_empty() {
            let text = format!("some of the pod's pull secrets cannot be used: {}", given.notes.join("; "));
            self.tell(pod, PodEvent::warning("PullSecretUnusable", text));
        }
        Ok(given.config)
    }
}

/// Returns the user-data of each of `claims` VMs that share a ticket. `ca` is the SHA-256 of the DER of each CA to pin.
/// `listen` is the port on which the VM waits to be dialled, if it does not dial.
///
/// The text holds the ticket's secret: store it only where the ledger is, and give it only to the cloud. The same
/// arguments give the same text, byte for byte, as a retried create needs.
pub(crate) fn user_data(
    ticket: &Ticket,
    claims: u32,
    node_addresses: &[SocketAddr],
    listen: Option<u16>,
    ca: &[[u8; 32]],
    lease: Duration,
) -> String {
    let ticket = UserDataTicket { id: ticket.id.clone(), secret: ticket.secret().clone(), claims };
    let node = UserDataNode { addresses: node_addresses.to_vec(), ca_sha256: ca.to_vec(), listen };
    let lease_seconds = u32::try_from(lease.as_secs()).unwrap_or(u32::MAX).max(1);
    UserData { version: VERSION, ticket, node, lease_seconds }.to_json()
}
