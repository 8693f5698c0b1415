//! Assembles the relay: [`build`] binds all sockets, [`BoundRelay::run`] serves until shutdown. Shutdown drains
//! nothing, by design: connections live as long as the process. A new relay beside a running one takes over its
//! connections. A relay that starts later serves the same sandboxes from their records.

mod sockets;

use std::collections::HashSet;
use std::fs::{DirBuilder, OpenOptions, TryLockError};
use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::anyhow;
use peerpod_base::admin::{self, Ready};
use peerpod_base::lifecycle::Shutdown;
use peerpod_base::metrics::program;
use peerpod_common::accept::Acceptor;
use peerpod_common::blocking::blocking;
use peerpod_common::caller_limits::{CallerLimits, ONE_LINE_A_MINUTE};
use peerpod_common::files;
use peerpod_proto::relay_ttrpc;
use prometheus_client::registry::Registry;
use tokio::net::UnixListener;
use tokio::sync::Mutex;
use tokio::task::JoinSet;

use self::sockets::{GuestSockets, Sockets};
use crate::config::RelayConfig;
use crate::control::Control;
use crate::handover::new::{self, Taken};
use crate::handover::{self, Pause, old};
use crate::harden::PermittedFolders;
use crate::hypervisor::{self, HypervisorHandle};
use crate::id::SandboxId;
use crate::inbox::Inbox;
use crate::localhost::Localhost;
use crate::metrics::Metrics;
use crate::sandboxes::states::States;
use crate::sandboxes::{Prepared, Sandboxes};
use crate::socket::Bound as Socket;
use crate::store::{RelayStore, SandboxRecord, ServerIdentity};
use crate::wireguard::{self, WireGuard};
use crate::{agent, fd_handoff, guest_dialer, guests};

/// Time limit for the node's calls to end when the relay stops.
const STOP_WITHIN: Duration = Duration::from_secs(2);

fn path_error(what: &str, path: &Path) -> impl FnOnce(io::Error) -> anyhow::Error {
    move |why| anyhow!("{what} {}: {why}", path.display())
}

/// Relay with bound sockets, while it serves.
pub struct BoundRelay {
    /// Bound address of the guests' port.
    pub listen: SocketAddr,
    /// Bound address of the admin port.
    pub admin: SocketAddr,
    tasks: JoinSet<()>,
    control: ttrpc::r#async::Server,
    sandboxes: Arc<Sandboxes>,
    /// Locked during a handover to another process.
    source: Arc<Mutex<old::HandoverSource>>,
    // Each socket is unlinked on drop, if the file is still this relay's; the lock is released last.
    _sockets: Vec<Socket>,
    _lock: OwnedFd,
}

/// Makes the folders that the relay needs, and returns the files that it opens from then on.
pub fn files(config: &RelayConfig) -> anyhow::Result<PermittedFolders> {
    Ok(PermittedFolders::new(make_folders(config)?, &config.bundles))
}

/// Makes the relay's own folders and returns them: no other is written.
fn make_folders(config: &RelayConfig) -> anyhow::Result<Vec<PathBuf>> {
    let RelayConfig { run_dir, state_dir, .. } = config;
    // An existing folder keeps its permissions: other programs may have sockets in it.
    let made = DirBuilder::new().recursive(true).mode(0o700).create(run_dir);
    made.map_err(path_error("make", run_dir))?;
    let own = ["relay", "inbox"].map(|name| state_dir.join(name));
    for folder in &own {
        files::make_folder(folder).map_err(path_error("make", folder))?;
    }
    Ok(own.into_iter().chain([run_dir.clone()]).collect())
}

/// Takes over the state of a running or earlier relay, binds all sockets and starts serving.
/// After an error nothing stays bound.
pub async fn build(config: RelayConfig) -> anyhow::Result<BoundRelay> {
    make_folders(&config)?;
    let run_dir = &config.run_dir;
    let store = RelayStore::open(&config.state_dir)?;
    let inbox = Inbox::open(&config.state_dir, run_dir)
        .map_err(path_error("open the inbox in", &config.state_dir))?;
    match lock(run_dir)? {
        Some(lock) => {
            store.sweep()?;
            inbox.sweep().map_err(path_error("clean the inbox in", &config.state_dir))?;
            let sockets = Sockets::bind(&config, lock).await?;
            let core = Core::new(States::new(epoch()?), store, inbox);
            let (identity, records) = core.read().await?;
            core.know(identity, &records);
            agent::sweep(run_dir, &records);
            core.sandboxes.restore(records).await;
            let named = sockets.copies().map_err(path_error("copy the descriptors of", run_dir))?;
            core.serve(&config, sockets, named, hypervisor::Restored::default()).await
        }
        None => {
            let (run_dir, pod) = (config.run_dir.clone(), config.pod.clone());
            let taken = take_over(config, store, inbox).await;
            if let (Err(error), Some(pod)) = (&taken, pod) {
                handover::report::failed(&run_dir, pod, error).await;
            }
            taken
        }
    }
}

/// Returns the error of a process that may not serve. If another one serves the run-dir, the node reports it, too.
pub async fn cannot_serve(config: &RelayConfig, why: String) -> anyhow::Error {
    if !matches!(lock(&config.run_dir), Ok(None)) {
        return anyhow!(why);
    }
    let error = not_taken_over(&config.run_dir, &why);
    if let Some(pod) = config.pod.clone() {
        handover::report::failed(&config.run_dir, pod, &error).await;
    }
    error
}

fn not_taken_over(run_dir: &Path, why: &str) -> anyhow::Error {
    anyhow!(
        "take over from the peerpod-relay that serves {}: {why}; that relay goes on and no pod is affected; remove the \
         cause, or undo the rollout (kubectl rollout undo daemonset); stopping the running relay would end its pods",
        run_dir.display()
    )
}

/// Takes over from the process that serves this run-dir. If this fails, that process continues.
async fn take_over(config: RelayConfig, store: RelayStore, inbox: Inbox) -> anyhow::Result<BoundRelay> {
    let run_dir = &config.run_dir;
    // Two relays that serve one run-dir would take each other's connections.
    let running = |why: String| not_taken_over(run_dir, &why);
    let mut taken = new::ask(run_dir).await.map_err(running)?;
    let states = States::go_on(taken.process.epoch.clone(), taken.process.version);
    let core = Core::new(states, store, inbox);
    let (sockets, named, identity, records, prepared) = match prepare(&core, &mut taken, run_dir).await {
        Ok(prepared) => prepared,
        Err(why) => {
            let why = why.to_string();
            taken.refuse(&why).await;
            return Err(running(why));
        }
    };
    taken.commit().await.map_err(running)?;
    // The old process changes nothing from here on.
    tracing::info!(
        from = taken.pid,
        program = taken.program,
        pid = std::process::id(),
        "took over from another process"
    );
    core.know(identity, &records);
    if let Some(handed) = taken.wireguard
        && let Err(error) = core.wireguard.go_on(handed)
    {
        tracing::error!(error, "the encrypted tunnel waits for the node");
    }
    let known: HashSet<SandboxId> = prepared.iter().map(|sandbox| sandbox.id().clone()).collect();
    for sandbox in prepared {
        core.sandboxes.go_on(sandbox).await;
    }
    core.sandboxes.restore(records.into_iter().filter(|record| !known.contains(&record.id)).collect()).await;
    let sockets = sockets.own(run_dir);
    if config.listen.port() != 0 && config.listen.port() != sockets.guests.address.port() {
        tracing::warn!(listen = %sockets.guests.address, configured = %config.listen, "the relay keeps the port of the previous process, because guests dial it");
    }
    core.serve(&config, sockets, named, taken.hypervisor).await
}

type Ours = (Sockets, handover::Named, Option<ServerIdentity>, Vec<SandboxRecord>, Vec<Prepared>);

/// Performs every step that can fail, before anything is changed.
async fn prepare(core: &Core, taken: &mut Taken, run_dir: &Path) -> anyhow::Result<Ours> {
    let (identity, records) = core.read().await?;
    let sockets = Sockets::taken(taken)?;
    let named = sockets.copies()?;
    let mut prepared = Vec::new();
    for (handed, descriptors) in std::mem::take(&mut taken.sandboxes) {
        let (id, run_dir) = (handed.id.clone(), run_dir.display());
        let record = records.iter().find(|record| record.id.as_str() == id).ok_or_else(|| {
            anyhow!("sandbox {id} has no record; use the state-dir of the process in {run_dir}")
        })?;
        let sandbox = core.sandboxes.prepare(record.clone(), handed, descriptors);
        prepared.push(sandbox.map_err(|why| anyhow!("sandbox {id}: {why}"))?);
    }
    Ok((sockets, named, identity, records, prepared))
}

/// Components that serve, without their sockets.
struct Core {
    registry: Registry,
    metrics: Arc<Metrics>,
    wireguard: Arc<WireGuard>,
    states: Arc<States>,
    sandboxes: Arc<Sandboxes>,
    trust: Arc<guests::Trust>,
    store: RelayStore,
    inbox: Inbox,
}

impl Core {
    fn new(states: States, store: RelayStore, inbox: Inbox) -> Core {
        let mut registry = program("peerpod-relay", env!("CARGO_PKG_VERSION"));
        let metrics = Arc::new(Metrics::new(&mut registry));
        let wireguard = Arc::new(WireGuard::default());
        let shown = Box::new(wireguard::WireGuardCollector(wireguard.clone()));
        registry.sub_registry_with_prefix("peerpod_relay").register_collector(shown);
        let states = Arc::new(states);
        let sandboxes = Sandboxes::new(store.clone(), states.clone(), metrics.clone());
        let trust = Arc::default();
        Core { registry, metrics, wireguard, states, sandboxes, trust, store, inbox }
    }

    /// Reads the TLS identity and the sandbox records from disk.
    async fn read(&self) -> anyhow::Result<(Option<ServerIdentity>, Vec<SandboxRecord>)> {
        let store = self.store.clone();
        blocking(move || Ok((store.identity(), store.records()?))).await
    }

    fn know(&self, identity: Option<ServerIdentity>, records: &[SandboxRecord]) {
        if let Some(identity) = identity {
            match identity.server_config() {
                Ok(config) => *self.trust.write() = Some(config),
                Err(error) => {
                    tracing::error!(%error, "the stored TLS identity is not usable; guests wait for the node")
                }
            }
        }
        for record in records {
            if let Err(error) = self.wireguard.put(&record.id, record.tunnel_peer.as_ref()) {
                tracing::error!(sandbox = %record.id, error, "cannot add the guest as a peer of the encrypted tunnel");
            }
        }
    }

    async fn serve(
        mut self,
        config: &RelayConfig,
        sockets: Sockets,
        named: handover::Named,
        restored: hypervisor::Restored,
    ) -> anyhow::Result<BoundRelay> {
        let Sockets { guests, admin, hypervisor, control, fd_handoff, handover, lock, names } = sockets;
        let (listen, run_dir) = (guests.address, &config.run_dir);
        let admin_address = admin.local_addr().map_err(|why| admin::refused(config.admin_listen, why))?;
        admin::serve_on(admin, Arc::new(std::mem::take(&mut self.registry)), Ready::default());

        let mut tasks = JoinSet::new();
        let parts = hypervisor::HypervisorParts {
            listener: hypervisor,
            restored,
            node_socket: run_dir.join("node.sock"),
            inbox: self.inbox.clone(),
            states: self.states.clone(),
            metrics: self.metrics.clone(),
        };
        let hypervisor = hypervisor::open(parts, &mut tasks);
        self.serve_guests(&mut tasks, guests, hypervisor.clone(), config);
        let pause = Pause::default();
        // Kinds of descriptors that the node may pass, one line each.
        let localhost =
            Localhost { sandboxes: Arc::downgrade(&self.sandboxes), metrics: self.metrics.clone() };
        let kinds: fd_handoff::Kinds = vec![Arc::new(localhost), self.wireguard.clone()];
        tasks.spawn(fd_handoff::serve(fd_handoff, kinds, pause.clone(), fd_handoff::MESSAGE));
        let source = old::HandoverSource {
            hypervisor,
            sandboxes: self.sandboxes.clone(),
            states: self.states.clone(),
            wireguard: self.wireguard.clone(),
            pause: pause.clone(),
            named,
        };
        let source = Arc::new(Mutex::new(source));
        tasks.spawn(old::serve(handover, source.clone()));
        let sandboxes = self.sandboxes.clone();
        let control = serve_control(control, self.control(listen, pause)).await?;
        tracing::info!(
            version = env!("CARGO_PKG_VERSION"),
            run_dir = %run_dir.display(),
            state_dir = %config.state_dir.display(),
            %listen,
            admin = %admin_address,
            pid = std::process::id(),
            "peerpod-relay serves"
        );
        let (_sockets, _lock) = (names, lock);
        Ok(BoundRelay { listen, admin: admin_address, tasks, control, sandboxes, source, _sockets, _lock })
    }

    /// Serves the guests' port, dials the guests that cannot dial, and answers path probes.
    fn serve_guests(
        &self,
        tasks: &mut JoinSet<()>,
        sockets: GuestSockets,
        hypervisor: HypervisorHandle,
        config: &RelayConfig,
    ) {
        let GuestSockets { listener, probes, paths, .. } = sockets;
        if let Some(echo) = probes {
            tasks.spawn(echo.run());
        }
        let parts = guests::GuestParts {
            trust: self.trust.clone(),
            sandboxes: self.sandboxes.clone(),
            hypervisor,
            metrics: self.metrics.clone(),
            paths,
            lines: CallerLimits::new(ONE_LINE_A_MINUTE),
        };
        if let Some(orders) = self.sandboxes.orders() {
            tasks.spawn(guest_dialer::run(orders, parts.clone()));
        }
        let (total, per_address) = (config.max_handshakes, config.max_handshakes_per_address);
        tasks.spawn(guests::accept(listener, parts, total as usize, per_address as usize));
    }

    fn control(self, listen: SocketAddr, pause: Pause) -> Control {
        let Core { metrics, wireguard, states, sandboxes, trust, store, .. } = self;
        Control { sandboxes, states, store, trust, metrics, wireguard, listen, pause }
    }
}

impl BoundRelay {
    /// Serves until `shutdown`, then stops. Fails if a task ends by itself: the process must not continue without it.
    pub async fn run(mut self, shutdown: &Shutdown) -> anyhow::Result<()> {
        let ended = tokio::select! {
            () = shutdown.wait() => Ok(()),
            Some(ended) = self.tasks.join_next() => {
                let why = ended.map_or_else(|error| error.to_string(), |()| "its task returned".to_owned());
                Err(anyhow!("a part of the relay ended: {why}; see the log lines above, and restart the relay"))
            }
        };
        if ended.is_ok() {
            // A handover under way may finish: its commit ends this process, and the pods live on.
            drop(tokio::time::timeout(old::STILL, self.source.lock()).await);
        }
        self.stop().await;
        ended
    }

    /// Closes everything and unlinks the sockets that still belong to this relay. Records stay for the next relay.
    pub async fn stop(mut self) {
        self.tasks.shutdown().await;
        self.sandboxes.stop().await;
        if tokio::time::timeout(STOP_WITHIN, self.control.shutdown()).await.is_err() {
            tracing::debug!("a call from the node did not end in time");
        }
    }
}

/// Locks `relay.lock`; `None` means that another process holds the lock.
fn lock(run_dir: &Path) -> anyhow::Result<Option<OwnedFd>> {
    let path = run_dir.join("relay.lock");
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(&path)
        .map_err(path_error("open", &path))?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file.into())),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(error)) => Err(path_error("lock", &path)(error)),
    }
}

fn epoch() -> anyhow::Result<String> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).map_err(|error| anyhow!("get random bytes from the kernel: {error}"))?;
    Ok(hex::encode(bytes))
}

async fn serve_control(listener: UnixListener, control: Control) -> anyhow::Result<ttrpc::r#async::Server> {
    let acceptor = Acceptor::new("relay.sock");
    let connections =
        futures_util::stream::unfold((listener, acceptor), |(listener, mut acceptor)| async move {
            let (stream, _) = acceptor.next(|| listener.accept()).await;
            Some((Ok(stream), (listener, acceptor)))
        });
    let mut server = ttrpc::r#async::Server::new()
        .add_listener(ttrpc::r#async::transport::Listener::new(connections))
        .register_service(relay_ttrpc::create_relay(Arc::new(control)));
    server.start().await.map_err(|error| anyhow!("serve relay.sock: {error}"))?;
    Ok(server)
}
