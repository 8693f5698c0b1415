//! Assembles the node: [`build`] recovers the sandboxes, binds every socket and returns the bound addresses;
//! [`Bound::run`] serves until shutdown. Shutdown stops no pod: running pods continue without the node, and unfinished
//! work is recorded in the ledger.

use std::{
    fs::{DirBuilder, File},
    io,
    net::SocketAddr,
    os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use nix::fcntl::{Flock, FlockArg};
use peerpod_base::{
    admin::{self, BlockReady, Ready},
    lifecycle::{Drain, Shutdown},
};
use peerpod_proto::relay::ConfigureRequest;
use peerpod_provider_api::{Capabilities, CreateRequest, DecoratorConfig, Provider, decorate};
use prometheus_client::registry::Registry;
use tokio::{net::UnixListener, task::JoinSet};
use tracing::{error, info, warn};
use ttrpc::asynchronous::transport::Listener;

use crate::{
    cluster::{Cluster, pods::Reflector, show::About},
    config::NodeConfig,
    ledger::{self, Inbox, Ledger, Loaded},
    localhost::Localhost,
    metrics::Metrics,
    ports::{self, GuestAddresses, NodePorts, Surroundings},
    relay_client::RelayClient,
    rotate::{self, SharedTrust},
    rpc::{self, Service},
    sandbox::{Kept, Orphans, Reaper, Sandboxes, VmLiveness, recover},
    secrets::PullSecrets,
    sweep,
    trust::{self, Trust},
    tunnel::{self, Tunnel, TunnelConfig},
    volumes::{Pods, Volumes},
    wireguard_fds,
};

/// Time that calls in progress get to complete at shutdown.
const DRAIN: Duration = Duration::from_secs(5);
/// Time that open connections get to close after that.
const CLOSE: Duration = Duration::from_secs(1);
/// Time that a start waits for the provider. After it the node starts without the provider: it is not ready, and new
/// VMs wait longer.
const PREFLIGHT: Duration = Duration::from_secs(5);
/// Interval at which the inbox is read without a request from the relay.
const INBOX_EVERY: Duration = Duration::from_secs(5);
/// Interval of the search for VMs without a record.
const ORPHANS_EVERY: Duration = Duration::from_secs(600);

/// Reason for a failed start or an unexpected end of the node.
#[derive(Debug, thiserror::Error)]
pub enum AppError {
    /// A folder or file is not usable.
    #[error("{what} {}: {why}", path.display())]
    Path {
        /// The attempted step.
        what: &'static str,
        /// The path of the attempt.
        path: PathBuf,
        /// The operating system's error.
        why: io::Error,
    },
    /// The state directory is not usable.
    #[error(transparent)]
    Ledger(#[from] ledger::Error),
    /// The node's CA is not usable.
    #[error(transparent)]
    Trust(#[from] trust::Error),
    /// The tunnels of the pods' networks cannot be opened.
    #[error(transparent)]
    Tunnel(#[from] tunnel::Error),
    /// The provider's settings or state are not usable.
    #[error("open the provider: {0}")]
    Provider(peerpod_provider_api::Error),
    /// The provider cannot add a second NIC: no pod would ever start.
    #[error(
        "tunnel.external = second-nic: provider {0} gives VMs no second NIC; set it to vm or tunnel, or use \
         another provider"
    )]
    NoSecondNic(&'static str),
    /// The provider does not support the `node.vm-…` settings: no pod would ever start.
    #[error("node.vm-arch, -confidential, -market, -zones, -public-ip: {0}")]
    Wishes(peerpod_provider_api::Error),
    /// There is no usable address of the API server, or no usable credentials for it.
    #[error(transparent)]
    Cluster(#[from] peerpod_kube::client::Error),
    /// The admin server cannot be started.
    #[error(transparent)]
    Admin(#[from] admin::Error),
    /// A ttrpc server (`node.sock` or `volumes.sock`) cannot be started.
    #[error("serve node.sock: {0}")]
    Service(ttrpc::Error),
    /// Shutdown was requested while another node still used the state directory.
    #[error("stopped while another peerpod-node still used the state directory {}", .0.display())]
    Waiting(PathBuf),
    /// A background task ended that runs until shutdown.
    #[error("a part of the node ended: {0}; see the log lines above")]
    Ended(String),
}

fn path_error(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> AppError {
    let path = path.to_owned();
    move |why| AppError::Path { what, path, why }
}

/// A recovered node with bound sockets.
pub struct Bound {
    /// Bound address of the admin port.
    pub admin: SocketAddr,
    /// Path of `node.sock`.
    pub socket: PathBuf,
    sandboxes: Sandboxes,
    cluster: Option<Cluster>,
    server: ttrpc::r#async::Server,
    /// Server of `volumes.sock`.
    volumes: ttrpc::r#async::Server,
    drain: Drain,
    ready: Ready,
    tasks: JoinSet<&'static str>,
    socket_id: (u64, u64),
}

/// Recovers the sandboxes, binds the sockets and serves. Waits for another node of the same state directory to exit, as
/// in an upgrade.
///
/// # Errors
/// See [`AppError`]; no socket stays bound, and the ledger records everything that was begun.
pub async fn build(
    config: NodeConfig,
    provider: peerpod_providers::Settings,
    shutdown: &Shutdown,
) -> Result<Bound, AppError> {
    let mut registry = Registry::default();
    let metrics = Metrics::default();
    metrics.register(&mut registry);
    let ready = Ready::new();
    let starting = ready.block("start");
    let mut tasks = JoinSet::new();
    let cluster = match config.cluster.clone() {
        Some(settings) => Some(Cluster::open(settings, metrics.clone(), ready.clone()).await?),
        None => None,
    };
    if let Some(cluster) = &cluster {
        // Claim before waiting for a predecessor: at its exit it then leaves the capacity in place.
        cluster.claim(&mut tasks);
        cluster.run(&mut tasks);
    }

    // Sandboxes create and remove their own folders in here; the folder itself stays.
    let pods = config.run_dir.join("pods");
    make_dir(&pods).map_err(path_error("make", &pods))?;
    let ledger = Ledger::open(&config.state_dir)?;
    // The ledger holds the lock: a write in progress at exit keeps the successor out until it completes.
    let ledger = ledger.guarded_by(lock(&config.state_dir, &starting, shutdown).await?);

    // The inbox comes first: the relay has already answered the stops in it.
    let inbox = Inbox::open(&config.state_dir)?;
    let (notes, bad_notes) = inbox.read()?;
    let Loaded { records, batches, unread_batches, mut quarantined } = ledger.load()?;
    let mut unread = ledger.in_quarantine()?;
    quarantined.extend(bad_notes);
    unread.extend(quarantined.iter().filter_map(|bad| bad.id.clone()));
    for bad in &quarantined {
        metrics.quarantined.inc();
        error!(file = %bad.file.display(), moved_to = %bad.moved_to.display(), why = bad.why, sandbox = bad.id.as_ref().map(tracing::field::display), "file set aside: the node does not manage its sandbox");
    }

    let trust = SharedTrust::new(Trust::open(&config.state_dir.join("trust"), SystemTime::now())?);
    let owner = config.owner();
    let tunnel = Tunnel::open(TunnelConfig { owner, ..config.tunnel.clone() })?;
    let provider = provider.open().await.map_err(AppError::Provider)?;
    if config.wants_second_nic() && !provider.capabilities().second_nic {
        return Err(AppError::NoSecondNic(provider.name()));
    }
    let mut request = CreateRequest { name: "every pod".to_owned(), ..CreateRequest::default() };
    config.wishes.ask(&mut request);
    provider.capabilities().check(&request, provider.name()).map_err(AppError::Wishes)?;
    let provider = decorate(provider, DecoratorConfig::default(), &mut registry);
    let relay = RelayClient::new(config.run_dir.join("relay.sock"), identity(trust.clone()), metrics.clone());
    let addresses = GuestAddresses::new(config.relay_addresses.clone(), config.relay_listen);

    let boot_id = boot_id()?;
    ports::collect_garbage(&tunnel, &records, unread.iter().cloned(), &boot_id).await;

    preflight(&mut tasks, provider.clone(), addresses.clone(), &ready).await;
    {
        let relay = relay.clone();
        tasks.spawn(async move {
            relay.run().await;
            "relay client"
        });
    }
    let surroundings = Surroundings::new(addresses.clone(), relay.listening(), tunnel.clone());
    if let Some(wireguard) = tunnel.wireguard().cloned() {
        tasks.spawn(wireguard_fds::run(relay.clone(), wireguard, addresses.clone(), surroundings.underlay()));
    }
    let Capabilities { max_batch: most, guest_memory_mib, .. } = provider.capabilities();
    let shown = cluster.clone().zip(config.cluster.as_ref()).map(|(cluster, settings)| {
        let about = About {
            provider: provider.name().into(),
            node: settings.node_name.as_str().into(),
            cluster_id: config.cluster_id.as_str().into(),
        };
        (cluster, about)
    });
    let fx = Arc::new(NodePorts {
        ledger,
        provider,
        tunnel,
        relay: relay.clone(),
        trust: trust.clone(),
        addresses: addresses.clone(),
        dial: config.dial,
        lease: config.lease,
        localhost: Localhost::new(config.localhost).await,
        boot_id,
        registries: config.registries.clone(),
        pull_secrets: config.secrets.clone().map(PullSecrets::new),
        surroundings,
        volumes: Volumes::new(&config.volumes_dir, known_pods(cluster.as_ref()))
            .and_direct(&config.direct_volumes_dir),
        cluster: shown,
    });
    let mut settings = config.sandbox_settings();
    settings.guest_addresses = addresses.in_words(None);
    settings.max_batch = config.max_batch(most);
    settings.guest_memory_mib = config.guest_memory(guest_memory_mib);
    info!(mib = settings.guest_memory_mib, "memory that each pod's VM has besides the pod's own");
    let sandboxes = Sandboxes::new(fx, settings, metrics.clone());

    let count = records.len();
    let kept = Kept { records, batches, unread: unread.clone(), notes };
    for note in recover(&sandboxes, kept).await {
        inbox.done(&note)?;
    }
    info!(records = count, quarantined = quarantined.len(), "recovered from the ledger");
    let (rolled, told, table) = (trust.clone(), relay.clone(), sandboxes.clone());
    tasks.spawn(async move {
        rotate::run(rolled, told, table, config.ca_roll_over, config.ca_follow_timeout).await;
        "rotation of the CA"
    });
    if let Some(cluster) = &cluster {
        let (cluster, table, unread) = (cluster.clone(), sandboxes.clone(), unread.clone());
        let cluster_id = config.cluster_id.clone();
        tasks.spawn(async move {
            sweep::run(cluster, table, unread, cluster_id).await;
            "garbage collection of PeerPods"
        });
    }
    relay_is_there(&mut tasks, &relay, &ready);
    let orphans = Orphans::new(unread, config.orphan_grace).sparing(unread_batches);
    look_after(&mut tasks, &sandboxes, &inbox, &metrics, orphans);

    let admin = admin::serve(config.admin_listen, Arc::new(registry), ready.clone()).await?;
    let drain = Drain::new();
    let socket = config.run_dir.join("node.sock");
    let (listener, socket_id) = bind(&socket).map_err(path_error("listen on", &socket))?;
    let service = Service { sandboxes: sandboxes.clone(), inbox, metrics, drain: drain.clone() };
    let server = rpc::serve(Listener::from(listener), service).await.map_err(AppError::Service)?;
    let asked = config.run_dir.join("volumes.sock");
    let (listener, _) = bind(&asked).map_err(path_error("listen on", &asked))?;
    let volumes =
        rpc::volumes::serve(Listener::from(listener), sandboxes.clone()).await.map_err(AppError::Service)?;
    drop(starting);
    if let Some(cluster) = &cluster {
        cluster.serve(&mut tasks);
    }
    info!(
        version = env!("CARGO_PKG_VERSION"),
        cluster = config.cluster_id,
        node = config.name,
        socket = %socket.display(),
        state_dir = %config.state_dir.display(),
        guests_dial = addresses.in_words(relay.listen()),
        %admin,
        "peerpod-node serves"
    );
    Ok(Bound { admin, socket, sandboxes, cluster, server, volumes, drain, ready, tasks, socket_id })
}

impl Bound {
    /// All sandboxes, for tests and tools in the same process.
    pub fn sandboxes(&self) -> &Sandboxes {
        &self.sandboxes
    }

    /// Serves until `shutdown`, then drains and closes. Running pods are not touched.
    ///
    /// # Errors
    /// A background task ended: the process must not continue without it.
    pub async fn run(mut self, shutdown: &Shutdown) -> Result<(), AppError> {
        let ended = tokio::select! {
            () = shutdown.wait() => Ok(()),
            Some(ended) = self.tasks.join_next() => {
                let what = ended.map_or_else(|error| error.to_string(), str::to_owned);
                Err(AppError::Ended(what))
            }
        };
        self.stop().await;
        ended
    }

    /// Completes the calls that write a record, then closes. The relay repeats calls that wait for a VM.
    pub async fn stop(mut self) {
        self.ready.not_ready("stop", "stopping");
        self.server.stop_listen().await;
        // Runs beside the rest: no other step waits for an unreachable API server.
        let farewell =
            self.cluster.take().map(|cluster| tokio::spawn(async move { cluster.farewell().await }));
        self.volumes.stop_listen().await;
        // Removed only if it is still this process's socket: a successor may have bound it already.
        let ours =
            std::fs::symlink_metadata(&self.socket).is_ok_and(|now| (now.dev(), now.ino()) == self.socket_id);
        if ours && let Err(error) = std::fs::remove_file(&self.socket) {
            warn!(%error, "cannot remove node.sock");
        }
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
fn known_pods(cluster: Option<&Cluster>) -> Option<Arc<dyn Pods>> {
    struct Watched(Reflector);
    impl Pods for Watched {
        fn uids(&self, namespace: &str, name: &str) -> Vec<String> {
            let newest = self.0.newest(namespace, name).filter(|pod| !pod.terminating);
            newest.into_iter().map(|pod| pod.uid).collect()
        }
    }
    cluster.map(|cluster| Arc::new(Watched(cluster.pods().clone())) as Arc<dyn Pods>)
}

/// Builds the relay's configuration: a certificate that guests can verify, its key, and the trusted CAs.
fn identity(trust: SharedTrust) -> crate::relay_client::Identity {
    Arc::new(move || {
        let trust = trust.read();
        let (chain, key) = trust.relay_identity().map_err(|error| error.to_string())?;
        Ok(ConfigureRequest {
            certificates: chain.iter().map(|der| der.to_vec()).collect(),
            private_key: key.secret_der().to_vec(),
            trusted_cas: trust.trusted_cas().iter().map(|der| der.to_vec()).collect(),
            ..ConfigureRequest::default()
        })
    })
}

/// Marks the node as not ready while the relay is disconnected: no pod could start.
fn relay_is_there(tasks: &mut JoinSet<&'static str>, relay: &RelayClient, ready: &Ready) {
    let (mut connected, ready) = (relay.connection(), ready.clone());
    tasks.spawn(async move {
        loop {
            let is = *connected.borrow_and_update();
            if is {
                ready.ready("relay");
            } else {
                ready.not_ready("relay", "peerpod-relay is away: no pod can start; running pods go on");
            }
            if connected.changed().await.is_err() {
                return "readiness of the relay";
            }
        }
    });
}

/// Asks the provider whether the node may make all later calls. Without a quick answer, it continues in the background,
/// and the node is not ready.
async fn preflight(
    tasks: &mut JoinSet<&'static str>,
    provider: Arc<dyn Provider>,
    addresses: GuestAddresses,
    ready: &Ready,
) {
    let (blocked, ready) = (ready.block("provider"), ready.clone());
    blocked.because("the provider's preflight is running");
    let asked = async move {
        loop {
            match provider.preflight().await {
                Ok(found) => {
                    for fact in &found.facts {
                        info!(provider = provider.name(), fact, "provider");
                    }
                    for warning in &found.warnings {
                        warn!(provider = provider.name(), warning, "provider");
                    }
                    if !found.warnings.is_empty() {
                        ready.warn("provider", &found.warnings.join("; "));
                    }
                    addresses.provider_says(found.node_addresses);
                    drop(blocked);
                    return;
                }
                Err(error) => {
                    error!(provider = provider.name(), %error, "the provider's preflight failed; trying again");
                    addresses.provider_fails();
                    blocked.because(&error.to_string());
                }
            }
            tokio::time::sleep(Duration::from_secs(10)).await;
        }
    };
    let mut asked = Box::pin(asked);
    if tokio::time::timeout(PREFLIGHT, &mut asked).await.is_err() {
        warn!("the provider's preflight has not finished; starting without it");
        tasks.spawn(async move {
            asked.await;
            std::future::pending().await
        });
    }
}

/// Starts the tasks that run beside the calls.
fn look_after(
    tasks: &mut JoinSet<&'static str>,
    sandboxes: &Sandboxes,
    inbox: &Inbox,
    metrics: &Metrics,
    orphans: Orphans,
) {
    let table = sandboxes.clone();
    tasks.spawn(async move {
        Reaper::default().run(table).await;
        "reaper"
    });
    let table = sandboxes.clone();
    tasks.spawn(async move {
        VmLiveness::default().run(table).await;
        "liveness of VMs"
    });
    let table = sandboxes.clone();
    tasks.spawn(async move {
        orphans.run(table, ORPHANS_EVERY).await;
        "orphans"
    });
    let (table, inbox, metrics) = (sandboxes.clone(), inbox.clone(), metrics.clone());
    tasks.spawn(async move {
        // The relay signals new notes; this loop retries a stop that could not be recorded then.
        loop {
            tokio::time::sleep(INBOX_EVERY).await;
            if let Err(error) = rpc::read_inbox(&table, &inbox, &metrics).await {
                warn!(%error, "cannot read the inbox; trying again");
            }
        }
    });
}

/// Locks the state directory for one node. Waits for an older node that is exiting.
async fn lock(state_dir: &Path, starting: &BlockReady, shutdown: &Shutdown) -> Result<Flock<File>, AppError> {
    // Locks the folder of records itself: that needs no file open for writing, and the lock goes with the folder it
    // guards.
    let path = state_dir.join("sandboxes");
    let mut said = false;
    loop {
        let file = File::open(&path).map_err(path_error("open", &path))?;
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(lock),
            Err((_, nix::errno::Errno::EWOULDBLOCK)) => {}
            Err((_, errno)) => return Err(path_error("lock", &path)(errno.into())),
        }
        if !said {
            warn!(path = %path.display(), "another peerpod-node uses this state directory; waiting for it to leave");
            starting.because("another peerpod-node uses the state directory");
            said = true;
        }
        tokio::select! {
            () = shutdown.wait() => return Err(AppError::Waiting(state_dir.to_owned())),
            () = tokio::time::sleep(Duration::from_millis(50)) => {}
        }
    }
}

/// Binds a socket for root alone. This process holds the lock, so an existing socket is left over from a dead node. The
/// rename is atomic, so that a client finds either the old socket or the new one.
fn bind(path: &Path) -> io::Result<(UnixListener, (u64, u64))> {
    let temporary = path.with_extension("new");
    match std::fs::remove_file(&temporary) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(&temporary)?;
    std::fs::set_permissions(&temporary, std::fs::Permissions::from_mode(0o600))?;
    let there = std::fs::symlink_metadata(&temporary)?;
    std::fs::rename(&temporary, path)?;
    Ok((listener, (there.dev(), there.ino())))
}

fn make_dir(dir: &Path) -> io::Result<()> {
    // An existing folder keeps its mode: other programs may have sockets in it.
    DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

fn boot_id() -> Result<String, AppError> {
    let path = Path::new("/proc/sys/kernel/random/boot_id");
    let text = std::fs::read_to_string(path).map_err(path_error("read", path))?;
    Ok(text.trim().to_owned())
}
