//! Assembles the node. Shutdown stops no pod: running pods continue without the node, and unfinished work is in the
//! ledger.

use std::fs::File;
use std::future::Future;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, anyhow, bail};
use futures_util::StreamExt;
use futures_util::stream::{self, BoxStream};
use nix::fcntl::{Flock, FlockArg};
use peerpod_base::admin::{self, BlockReady, Ready};
use peerpod_base::lifecycle::{Drain, Shutdown};
use peerpod_base::metrics::{expiries, program};
use peerpod_common::files;
use peerpod_common::unix_socket::{self, Bound};
use peerpod_proto::relay::ConfigureRequest;
use peerpod_provider_api::{Capabilities, DecoratorConfig, Provider, decorate};
use prometheus_client::registry::Registry;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tracing::{error, info, warn};
use ttrpc::asynchronous::transport::Listener;

use crate::admin::{AboutNode, Questions};
use crate::cluster::Cluster;
use crate::cluster::show::About;
use crate::config::NodeConfig;
use crate::ledger::{Inbox, Ledger, Loaded};
use crate::localhost::Localhost;
use crate::metrics::Metrics;
use crate::ports::{
    self, GuestAddresses, NodeClock, NodeCluster, NodeIdentity, NodeNetwork, ProviderCloud, Surroundings,
};
use crate::preflight::PreflightFacts;
use crate::relay_client::{RelayClient, RelayIdentity};
use crate::rotate::{self, SharedTrust};
use crate::rpc::{self, Service};
use crate::sandbox::ports::Ports;
use crate::sandbox::{Kept, Orphans, Reaper, Sandboxes, Settings, VmLiveness, recover};
use crate::secrets::PullSecrets;
use crate::traces::Tracer;
use crate::trust::{Trust, Validity};
use crate::tunnel::{Tunnel, TunnelConfig};
use crate::vm_metrics::{RunningVm, VmMetrics};
use crate::volumes::{PodStorage, Pods, Volumes};
use crate::{installation, preflight, sweep, wireguard_fds};

/// Time that calls in progress get to complete at shutdown.
const DRAIN: Duration = Duration::from_secs(5);
/// Time that open connections get to close after that.
const CLOSE: Duration = Duration::from_secs(1);
/// Interval at which the inbox is read without a request from the relay.
const INBOX_EVERY: Duration = Duration::from_secs(5);
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// Interval of the search for VMs without a record.
const ORPHANS_EVERY: Duration = Duration::from_secs(600);

/// The node's background tasks, each with its name. None ends before the shutdown.
pub(crate) type Tasks = JoinSet<&'static str>;

pub(crate) fn spawn(tasks: &mut Tasks, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
    tasks.spawn(async move {
        task.await;
        name
    });
}

/// A recovered node with bound sockets.
pub struct BoundNode {
    /// `node.sock`, `volumes.sock` and the admin socket.
    sockets: [Bound; 3],
    sandboxes: Sandboxes,
    cluster: Option<Cluster>,
    server: ttrpc::r#async::Server,
    volumes: ttrpc::r#async::Server,
    drain: Drain,
    ready: Ready,
    tasks: Tasks,
}

/// Locks and reads the state directory, after it has waited for another node to leave it.
async fn read_state(
    state_dir: &Path,
    metrics: &Metrics,
    starting: &BlockReady,
    cluster: Option<&Cluster>,
) -> Result<(Ledger, Inbox, Kept)> {
    let ledger = Ledger::open(state_dir)?;
    // The ledger holds the lock: a write in progress at exit keeps the successor out until it completes.
    let ledger = ledger.guarded_by(lock(state_dir, starting).await?);
    cluster.iter().for_each(|cluster| cluster.is_alone());
    // The inbox comes first: the relay has already answered the stops in it.
    let inbox = Inbox::open(state_dir)?;
    let (notes, bad_notes) = inbox.read()?;
    let Loaded { records, batches, unread_batches, mut quarantined } = ledger.load()?;
    let mut unread = ledger.in_quarantine()?;
    quarantined.extend(bad_notes);
    unread.extend(quarantined.iter().filter_map(|bad| bad.id.clone()));
    for bad in &quarantined {
        metrics.sandboxes.quarantined.inc();
        error!(file = %bad.file.display(), moved_to = %bad.moved_to.display(), why = bad.why, sandbox = bad.id.as_ref().map(tracing::field::display), "file set aside: the node does not manage its sandbox");
    }
    let quarantined = quarantined.len();
    Ok((ledger, inbox, Kept { records, batches, unread, unread_batches, notes, quarantined }))
}

/// Recovers the sandboxes, binds the sockets and serves. Waits for another node of the same state directory to exit, as
/// in an upgrade. After an error, or with `None` after a signal, no socket stays bound, the ledger records everything that
/// was begun, and the claim on the node's capacity is withdrawn.
pub async fn build(
    config: NodeConfig,
    provider: peerpod_providers::ProviderSettings,
    shutdown: &Shutdown,
) -> Result<Option<BoundNode>> {
    let mut registry = program("peerpod-node", env!("CARGO_PKG_VERSION"));
    let metrics = Metrics::new(&mut registry);
    let ready = Ready::default();
    let starting = ready.block("start");
    let mut tasks = Tasks::new();
    let cluster = open_cluster(&config, &metrics, &ready, &mut tasks).await?;
    let built = tokio::select! {
        biased;
        // Unfinished work is recorded in the ledger.
        () = shutdown.wait() => Ok(None),
        built = serve(config, provider, cluster.clone(), (registry, metrics, ready, starting, tasks)) => {
            built.map(Some)
        }
    };
    if let (Err(_) | Ok(None), Some(cluster)) = (&built, cluster) {
        cluster.unclaim().await;
    }
    built
}

async fn serve(
    config: NodeConfig,
    provider: peerpod_providers::ProviderSettings,
    cluster: Option<Cluster>,
    (mut registry, metrics, ready, starting, mut tasks): (Registry, Metrics, Ready, BlockReady, Tasks),
) -> Result<BoundNode> {
    // Sandboxes create and remove their own folders in here; the folder itself stays.
    let pods = config.run_dir.join("pods");
    files::make_folders(&pods).with_context(|| format!("make {}", pods.display()))?;
    let (ledger, inbox, kept) = read_state(&config.state_dir, &metrics, &starting, cluster.as_ref()).await?;

    let (admin, may_have_vms) = ((config.admin_listen, &ready), kept.may_have_vms());
    let installation = installation::find(&config.state_dir, may_have_vms, cluster.as_ref(), admin).await?;
    let provider = open_provider(&config, provider, installation.clone(), &mut registry).await?;
    let parts = Parts::open(&config, provider, ledger, &kept, cluster.as_ref(), (&metrics, &ready)).await?;
    parts.start(&mut tasks, &ready).await;
    let tracer = open_tracer(&config, &metrics, &mut tasks);
    let settings = parts.sandbox_settings(&config, tracer, ready.clone());
    let sandboxes = Sandboxes::new(parts.ports.clone(), settings, metrics.clone());
    let (records, quarantined, unread) = (kept.records.len(), kept.quarantined, kept.unread.clone());
    let orphans = || Orphans::new(unread.clone(), kept.unread_batches.clone(), config.orphan_grace);
    let (orphans, listed) = (orphans(), orphans());
    for note in recover(&sandboxes, kept).await {
        inbox.done(&note)?;
    }
    info!(records, quarantined, "recovered from the ledger");
    parts.rotate(&mut tasks, &config, sandboxes.clone());
    if let Some(cluster) = cluster.clone() {
        spawn(&mut tasks, "installation", installation::compare(&cluster, &installation, &ready));
        let sweep = sweep::run(cluster, sandboxes.clone(), unread, config.sandbox.cluster_id.clone());
        spawn(&mut tasks, "garbage collection of PeerPods", sweep);
    }
    look_after(&mut tasks, &sandboxes, &inbox, &metrics, orphans);

    let (admin, registry) =
        serve_admin(&config, cluster.as_ref(), registry, (&parts.trust, &sandboxes, &ready), &mut tasks)
            .await?;
    let about = AboutNode::new(&config, parts.provider.name(), &installation, parts.facts.clone());
    let questions = Questions::new(about, sandboxes.clone(), parts.relay.clone(), ready.clone(), listed);
    let third = questions.serve(&config.run_dir, registry)?;
    let drain = Drain::default();
    let (listener, socket) = bind(&config.run_dir.join("node.sock"))?;
    let service = Service { sandboxes: sandboxes.clone(), inbox, metrics, drain: drain.clone() };
    let server = rpc::serve(listener, service).await.context("serve node.sock")?;
    let (listener, second) = bind(&config.run_dir.join("volumes.sock"))?;
    let volumes = rpc::volumes::serve(listener, sandboxes.clone()).await.context("serve volumes.sock")?;
    drop(starting);
    cluster.iter().for_each(|cluster| cluster.serve(&mut tasks));
    info!(
        version = env!("CARGO_PKG_VERSION"),
        cluster = config.sandbox.cluster_id,
        node = config.sandbox.node_name,
        installation,
        socket = %socket.path().display(),
        state_dir = %config.state_dir.display(),
        guests_dial = parts.addresses.to_text(parts.relay.listen()),
        %admin,
        "peerpod-node serves"
    );
    Ok(BoundNode {
        sockets: [socket, second, third],
        sandboxes,
        cluster,
        server,
        volumes,
        drain,
        ready,
        tasks,
    })
}

/// Serves the admin port, and the port for scrapers, if one is set. Returns the address of the admin port, and the metrics.
async fn serve_admin(
    config: &NodeConfig,
    cluster: Option<&Cluster>,
    mut registry: Registry,
    (trust, sandboxes, ready): (&SharedTrust, &Sandboxes, &Ready),
    tasks: &mut Tasks,
) -> Result<(SocketAddr, Arc<Registry>)> {
    let trust = trust.clone();
    // The relay's certificate ends with the oldest CA, which signs it.
    expiries(&mut registry, move || vec![("node-ca", trust.read().not_after())]);
    let sandboxes = sandboxes.clone();
    registry.register_collector(Box::new(VmMetrics::new(move || RunningVm::all(&sandboxes))));
    let registry = Arc::new(registry);
    let admin = admin::serve(config.admin_listen, registry.clone(), ready.clone()).await?;
    match (cluster, config.metrics_listen) {
        (Some(cluster), Some(listen)) => {
            cluster.serve_metrics(tasks, registry.clone(), (listen, config.relay_admin));
        }
        (None, Some(_)) => {
            warn!("node.metrics-listen has no effect outside a cluster, which permits the callers");
        }
        (_, None) => {}
    }
    Ok((admin, registry))
}

/// Starts the export of traces, if a receiver is set.
fn open_tracer(config: &NodeConfig, metrics: &Metrics, tasks: &mut Tasks) -> Tracer {
    let Some(endpoint) = config.otlp_endpoint.clone() else { return Tracer::default() };
    let node = config.sandbox.node_name.clone();
    let (tracer, exporter) = Tracer::open(endpoint, node, metrics.traces.clone());
    spawn(tasks, "export of traces", exporter.run());
    tracer
}

/// Opens the client of the cluster, if the node is in one, and starts its tasks.
async fn open_cluster(
    config: &NodeConfig,
    metrics: &Metrics,
    ready: &Ready,
    tasks: &mut Tasks,
) -> Result<Option<Cluster>> {
    let Some(settings) = config.cluster.clone() else { return Ok(None) };
    let cluster = Cluster::open(settings, metrics.clone(), ready.clone()).await?;
    // Claim before waiting for a predecessor: at its exit it then leaves the capacity in place.
    cluster.claim(tasks);
    cluster.run(tasks);
    Ok(Some(cluster))
}

/// Opens the provider, and checks that it supports the VMs of this configuration: otherwise no pod would ever start.
async fn open_provider(
    config: &NodeConfig,
    settings: peerpod_providers::ProviderSettings,
    installation: String,
    registry: &mut Registry,
) -> Result<Arc<dyn Provider>> {
    let provider = settings.open(installation).await.context("open the provider")?;
    if config.sandbox.second_nic && !provider.capabilities().second_nic {
        bail!(
            "tunnel.external = second-nic: provider {} gives VMs no second NIC; set it to vm or tunnel, or use \
             another provider",
            provider.name()
        );
    }
    Ok(decorate(provider, DecoratorConfig::default(), registry))
}

/// Parts of the node that serve the sandboxes' ports, and others beside them.
struct Parts {
    ports: Ports,
    provider: Arc<dyn Provider>,
    tunnel: Tunnel,
    relay: RelayClient,
    trust: SharedTrust,
    addresses: GuestAddresses,
    facts: PreflightFacts,
}

impl Parts {
    async fn open(
        config: &NodeConfig,
        provider: Arc<dyn Provider>,
        ledger: Ledger,
        kept: &Kept,
        cluster: Option<&Cluster>,
        (metrics, ready): (&Metrics, &Ready),
    ) -> Result<Parts> {
        let (folder, guests) = (config.state_dir.join("trust"), kept.may_have_vms());
        let trust = SharedTrust::new(Trust::open(&folder, SystemTime::now(), Validity::default(), guests)?);
        let tunnel = Tunnel::open(TunnelConfig { owner: config.owner(), ..config.tunnel.clone() })?;
        let boot_id = std::fs::read_to_string(BOOT_ID).with_context(|| format!("read {BOOT_ID}"))?;
        let (boot_id, facts) = (boot_id.trim().to_owned(), PreflightFacts::default());
        let clock = NodeClock::open(&config.state_dir, &boot_id, SystemTime::now())?;
        ports::collect_garbage(&tunnel, &kept.records, kept.unread.iter().cloned(), &boot_id).await;
        let relay =
            RelayClient::new(config.run_dir.join("relay.sock"), identity(trust.clone()), metrics.clone());
        let addresses = GuestAddresses::new(config.relay_addresses.clone(), config.relay_listen);
        let surroundings = Surroundings::new(addresses.clone(), relay.listening(), tunnel.clone());
        let volumes =
            Volumes::new(&config.volumes_dir, Some(&config.direct_volumes_dir), known_pods(cluster));
        let shown = cluster.cloned().zip(config.cluster.as_ref()).map(|(cluster, settings)| {
            let about = About {
                provider: provider.name().to_owned(),
                node: settings.node_name.clone(),
                cluster_id: config.sandbox.cluster_id.clone(),
            };
            (cluster, about)
        });
        let ports = Ports {
            clock: Arc::new(clock),
            store: Arc::new(ledger),
            cloud: Arc::new(ProviderCloud::new(provider.clone(), ready.clone(), facts.clone())),
            storage: Arc::new(PodStorage { volumes, provider: provider.clone() }),
            network: Arc::new(NodeNetwork {
                tunnel: tunnel.clone(),
                localhost: Localhost::new(config.localhost).await,
                relay: relay.clone(),
                surroundings: surroundings.clone(),
                boot_id,
            }),
            relay: Arc::new(relay.clone()),
            identity: Arc::new(NodeIdentity {
                clock,
                trust: trust.clone(),
                addresses: addresses.clone(),
                relay: relay.clone(),
                surroundings,
                dial: config.sandbox.dial,
                lease: config.sandbox.lease,
            }),
            kubernetes: Arc::new(NodeCluster {
                clock,
                cluster: shown,
                registries: config.registries.clone(),
                pull_secrets: config.secrets.clone().map(PullSecrets::new),
            }),
        };
        Ok(Parts { ports, provider, tunnel, relay, trust, addresses, facts })
    }

    /// Starts the provider's preflight, the client of the relay, and the supply of its descriptors.
    async fn start(&self, tasks: &mut Tasks, ready: &Ready) {
        let Parts { provider, relay, addresses, tunnel, facts, .. } = self;
        // Before the preflight, which may wait for a connection that is lost meanwhile.
        spawn(tasks, "readiness of the provider", report_provider(provider.health(), ready.clone()));
        preflight::start(tasks, provider.clone(), addresses.clone(), ready, facts).await;
        spawn(tasks, "relay client", relay.clone().run());
        spawn(tasks, "readiness of the relay", report_relay(relay.connection(), ready.clone()));
        if let Some(wireguard) = tunnel.wireguard().cloned() {
            spawn(tasks, "encrypted tunnel", wireguard_fds::run(relay.clone(), wireguard));
        }
    }

    /// Starts the rotation of the CA.
    fn rotate(&self, tasks: &mut Tasks, config: &NodeConfig, sandboxes: Sandboxes) {
        let (every, patience) = (config.ca_rotation, config.ca_follow_timeout);
        let rotation = rotate::run(self.trust.clone(), self.relay.clone(), sandboxes, every, patience);
        spawn(tasks, "rotation of the CA", rotation);
    }

    fn sandbox_settings(&self, config: &NodeConfig, tracer: Tracer, ready: Ready) -> Settings {
        let Capabilities { max_batch, guest_memory_mib, .. } = self.provider.capabilities();
        let guest_memory_mib = config.guest_memory(guest_memory_mib);
        info!(mib = guest_memory_mib, "memory that each pod's VM has besides the pod's own");
        Settings {
            guest_addresses: self.addresses.to_text(None),
            max_batch: config.max_batch(max_batch),
            guest_memory_mib,
            tracer,
            ready,
            ..config.sandbox.clone()
        }
    }
}

impl BoundNode {
    /// Serves until `shutdown`, then drains and closes; running pods go on. Fails if a background task ends.
    pub async fn run(mut self, shutdown: &Shutdown) -> Result<()> {
        let ended = tokio::select! {
            () = shutdown.wait() => Ok(()),
            Some(ended) = self.tasks.join_next() => {
                let what = ended.map_or_else(|error| error.to_string(), str::to_owned);
                Err(anyhow!("a part of the node ended: {what}; see the log lines above"))
            }
        };
        self.stop().await;
        ended
    }

    /// Completes the calls that write a record, then closes. The relay repeats calls that wait for a VM.
    async fn stop(mut self) {
        self.ready.not_ready("stop", "stopping");
        self.server.stop_listen().await;
        // Runs beside the rest: no other step waits for an unreachable API server.
        let farewell =
            self.cluster.take().map(|cluster| tokio::spawn(async move { cluster.farewell().await }));
        self.volumes.stop_listen().await;
        drop(self.sockets);
        if let Err(busy) = self.drain.drain(DRAIN).await {
            warn!(%busy, "not all calls were answered; the relay sends them again");
        }
        // The tasks stop first, so that none begins new work while the connections close.
        self.sandboxes.close().await;
        self.tasks.shutdown().await;
        let closed = async {
            drop(self.volumes.shutdown().await);
            self.server.shutdown().await
        };
        if tokio::time::timeout(CLOSE, closed).await.is_err() {
            tracing::debug!("a connection did not close in time");
        }
        if let Some(farewell) = farewell
            && let Err(error) = farewell.await
        {
            warn!(%error, "cannot clear the node's capacity for peer pods");
        }
        info!("stopped; running pods go on");
    }
}

/// Lookup of pod UIDs for the volumes; `None` outside a cluster.
fn known_pods(cluster: Option<&Cluster>) -> Option<Pods> {
    let pods = cluster?.pods.clone();
    Some(Arc::new(move |namespace, name| {
        let newest = pods.newest(namespace, name).filter(|pod| !pod.terminating);
        newest.into_iter().map(|pod| pod.uid).collect()
    }))
}

/// Builds the relay's configuration: a certificate that guests can verify, its key, and the trusted CAs.
fn identity(trust: SharedTrust) -> RelayIdentity {
    Arc::new(move || {
        let trust = trust.read();
        let relay = trust.relay_identity().map_err(|error| error.to_string())?;
        Ok(ConfigureRequest {
            certificates: relay.chain.iter().map(|der| der.to_vec()).collect(),
            private_key: relay.key.secret_der().to_vec(),
            trusted_cas: trust.trusted_cas().iter().map(|der| der.to_vec()).collect(),
            ..ConfigureRequest::default()
        })
    })
}

/// Marks the node as not ready while the relay is disconnected: no pod could start.
async fn report_relay<T>(mut connection: watch::Receiver<Option<T>>, ready: Ready) {
    loop {
        if connection.borrow_and_update().is_some() {
            ready.ready("relay");
        } else {
            ready.not_ready("relay", "peerpod-relay is away: no pod can start; running pods go on");
        }
        if connection.changed().await.is_err() {
            return;
        }
    }
}

/// Name of the connection to the provider in the readiness.
pub(crate) const CONNECTION: &str = "provider-connection";

/// Marks the node as not ready while the provider cannot work: no pod could start.
async fn report_provider(health: Option<BoxStream<'static, Option<String>>>, ready: Ready) {
    let mut health = health.unwrap_or_else(|| stream::pending().boxed());
    while let Some(away) = health.next().await {
        match away {
            Some(why) => ready.not_ready(CONNECTION, &format!("{why}: no pod can start; running pods go on")),
            None => ready.ready(CONNECTION),
        }
    }
}

/// Starts the tasks that run beside the calls.
fn look_after(tasks: &mut Tasks, sandboxes: &Sandboxes, inbox: &Inbox, metrics: &Metrics, orphans: Orphans) {
    spawn(tasks, "reaper", Reaper::default().run(sandboxes.clone()));
    spawn(tasks, "liveness of VMs", VmLiveness::default().run(sandboxes.clone()));
    spawn(tasks, "orphans", orphans.run(sandboxes.clone(), ORPHANS_EVERY));
    let (sandboxes, inbox, metrics) = (sandboxes.clone(), inbox.clone(), metrics.clone());
    spawn(tasks, "inbox", async move {
        // The relay signals new notes; this loop retries a stop that could not be recorded then.
        loop {
            tokio::time::sleep(INBOX_EVERY).await;
            if let Err(error) = rpc::read_inbox(&sandboxes, &inbox, &metrics).await {
                warn!(%error, "cannot read the inbox; trying again");
            }
        }
    });
}

/// Locks the state directory for one node. Waits for an older node that is exiting.
async fn lock(state_dir: &Path, starting: &BlockReady) -> Result<Flock<File>> {
    // Locks the folder of records itself: no file is open for writing, and the lock goes with the folder.
    let path = state_dir.join("sandboxes");
    let mut said = false;
    loop {
        let file = File::open(&path).with_context(|| format!("open {}", path.display()))?;
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(lock),
            Err((_, nix::errno::Errno::EWOULDBLOCK)) => {}
            Err((_, errno)) => return Err(errno).with_context(|| format!("lock {}", path.display())),
        }
        if !said {
            warn!(path = %path.display(), "another peerpod-node uses this state directory; waiting for it to leave");
            starting.because("another peerpod-node uses the state directory");
            said = true;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Binds a socket for root alone, in place of a dead node's.
fn bind(path: &Path) -> Result<(Listener, Bound)> {
    let (listener, bound) =
        unix_socket::bind(path).with_context(|| format!("listen on {}", path.display()))?;
    Ok((Listener::from(listener), bound))
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn the_node_is_not_ready_while_the_provider_cannot_work() {
        let (sender, receiver) = mpsc::channel(1);
        let health =
            stream::unfold(receiver, |mut receiver| async move { Some((receiver.recv().await?, receiver)) });
        let ready = Ready::default();
        let reporting = tokio::spawn(report_provider(Some(health.boxed()), ready.clone()));
        for round in 0..2 {
            sender.send(Some("libvirtd closed the connection".to_owned())).await.unwrap();
            while ready.waiting().is_empty() {
                tokio::task::yield_now().await;
            }
            let (_, why) = ready.waiting().pop_first().unwrap();
            assert_eq!(
                why, "libvirtd closed the connection: no pod can start; running pods go on",
                "{round}"
            );
            sender.send(None).await.unwrap();
            while !ready.waiting().is_empty() {
                tokio::task::yield_now().await;
            }
        }
        reporting.abort();
    }
}
