//! Assembles the relay: [`build`] binds all sockets and returns their real addresses, [`BoundRelay::run`] serves until
//! shutdown. Shutdown drains nothing, by design: connections live as long as the process. A new relay that starts
//! beside a running one takes over its connections. A relay that starts later serves the same sandboxes from their
//! records.

mod sockets;

use std::collections::HashSet;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use nix::fcntl::{Flock, FlockArg};
use peerpod_base::admin::{self, Ready};
use peerpod_base::lifecycle::Shutdown;
use peerpod_common::accept::Acceptor;
use peerpod_common::blocking::{Interrupted, blocking};
use peerpod_common::limit::ConnectionLimit;
use peerpod_proto::relay_ttrpc;
use prometheus_client::registry::Registry;
use thiserror::Error;
use tokio::net::UnixListener;
use tokio::sync::Mutex;
use tokio::task::JoinSet;

use self::sockets::{GuestSockets, Lock, Sockets};
use crate::config::RelayConfig;
use crate::control::Control;
use crate::handover::new::{self, HandoverError, Taken};
use crate::handover::{self, old};
use crate::hypervisor::{self, HypervisorHandle};
use crate::id::SandboxId;
use crate::inbox::Inbox;
use crate::localhost::Localhost;
use crate::metrics::Metrics;
use crate::pause::Pause;
use crate::sandboxes::states::States;
use crate::sandboxes::{Prepared, Sandboxes};
use crate::socket::Bound as Socket;
use crate::store::{Identity, Record, Store, StoreError};
use crate::wireguard::{self, WireGuard};
use crate::{fd_handoff, guest_dialer, guests};

/// Time limit for the node's calls to end when the relay stops.
const STOP_WITHIN: Duration = Duration::from_secs(2);

/// Reason why the relay did not start, or ended.
#[derive(Debug, Error)]
pub enum AppError {
    /// A folder or file is not usable.
    #[error("{what} {path}: {why}")]
    Path {
        /// Failed operation.
        what: &'static str,
        /// Path of the file or folder.
        path: String,
        /// Reason.
        why: io::Error,
    },
    /// Another relay serves the run-dir and the handover failed; two relays would take each other's connections.
    #[error(
        "take over from the peerpod-relay that serves {0}: {1}; that relay goes on and no pod is affected; remove the cause, \
         or undo the rollout (kubectl rollout undo daemonset); stopping the running relay would end its pods"
    )]
    Running(String, HandoverError),
    /// The guests' port cannot be bound.
    #[error("listen for guests on {address}: {why}; choose another relay.listen or free this one")]
    Listen {
        /// Configured address.
        address: SocketAddr,
        /// Reason.
        why: io::Error,
    },
    /// The kernel gave no random bytes.
    #[error("get random bytes from the kernel: {0}")]
    Random(String),
    /// The state folder is not usable.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The admin port cannot be served.
    #[error(transparent)]
    Admin(#[from] admin::Error),
    /// `relay.sock` cannot be served.
    #[error("serve relay.sock: {0}")]
    Control(ttrpc::Error),
    /// The records were not read.
    #[error(transparent)]
    Interrupted(#[from] Interrupted),
    /// A task that must never end has ended.
    #[error("a part of the relay ended: {0}; see the log lines above, and restart the relay")]
    Ended(String),
}

fn path_error(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> AppError {
    let path = path.display().to_string();
    move |why| AppError::Path { what, path, why }
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
    _lock: Lock,
}

/// Takes over the state of a running or earlier relay, binds all sockets and starts serving.
///
/// # Errors
/// See [`AppError`]; on an error nothing stays bound.
pub async fn build(config: RelayConfig) -> Result<BoundRelay, AppError> {
    let run_dir = &config.run_dir;
    make_run_dir(run_dir).map_err(path_error("make", run_dir))?;
    let store = Store::open(&config.state_dir)?;
    let inbox = Inbox::open(&config.state_dir).map_err(path_error("open the inbox in", &config.state_dir))?;
    match lock(run_dir)? {
        Some(lock) => {
            store.sweep()?;
            inbox.sweep().map_err(path_error("clean the inbox in", &config.state_dir))?;
            let sockets = Sockets::bind(&config, lock).await?;
            let core = Core::new(States::new(epoch()?), store, inbox);
            let (identity, records) = core.read().await?;
            core.know(identity, &records);
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

/// Takes over from the process that serves this run-dir. If this fails, that process continues.
async fn take_over(config: RelayConfig, store: Store, inbox: Inbox) -> Result<BoundRelay, AppError> {
    let run_dir = &config.run_dir;
    let running = |why: HandoverError| AppError::Running(run_dir.display().to_string(), why);
    let mut taken = new::ask(run_dir).await.map_err(running)?;
    let states = States::go_on(taken.process.epoch.clone(), taken.process.version);
    let core = Core::new(states, store, inbox);
    let prepared = prepare(&core, &mut taken, run_dir).await;
    let (sockets, named, identity, records, prepared) = match prepared {
        Ok(prepared) => prepared,
        Err(why) => {
            taken.refuse(&why).await;
            return Err(running(HandoverError::No(why)));
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

type Ours = (Sockets, handover::Named, Option<Identity>, Vec<Record>, Vec<Prepared>);

/// Performs every step that can fail, before anything is changed.
async fn prepare(core: &Core, taken: &mut Taken, run_dir: &Path) -> Result<Ours, String> {
    let (identity, records) = core.read().await.map_err(|error| error.to_string())?;
    let sockets = Sockets::taken(taken).map_err(|error| error.to_string())?;
    let named = sockets.copies().map_err(|error| error.to_string())?;
    let mut prepared = Vec::new();
    for (handed, descriptors) in std::mem::take(&mut taken.sandboxes) {
        let record = records.iter().find(|record| record.id.as_str() == handed.id).ok_or_else(|| {
            format!(
                "sandbox {} has no record; use the state-dir of the process in {}",
                handed.id,
                run_dir.display()
            )
        })?;
        let id = handed.id.clone();
        let sandbox = core.sandboxes.prepare(record.clone(), handed, descriptors);
        prepared.push(sandbox.map_err(|why| format!("sandbox {id}: {why}"))?);
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
    store: Store,
    inbox: Inbox,
}

impl Core {
    fn new(states: States, store: Store, inbox: Inbox) -> Core {
        let mut registry = Registry::default();
        let metrics = Arc::new(Metrics::new(&mut registry));
        let wireguard = Arc::new(WireGuard::default());
        let shown = Box::new(wireguard::Shown(wireguard.clone()));
        registry.sub_registry_with_prefix("peerpod_relay").register_collector(shown);
        let states = Arc::new(states);
        let sandboxes = Sandboxes::new(store.clone(), states.clone(), metrics.clone());
        let trust = Arc::new(guests::Trust::new());
        Core { registry, metrics, wireguard, states, sandboxes, trust, store, inbox }
    }

    /// Reads the TLS identity and the sandbox records from disk.
    async fn read(&self) -> Result<(Option<Identity>, Vec<Record>), AppError> {
        let store = self.store.clone();
        blocking(move || Ok((store.identity(), store.records()?))).await
    }

    fn know(&self, identity: Option<Identity>, records: &[Record]) {
        if let Some(identity) = identity {
            match identity.server_config() {
                Ok(config) => self.trust.set(config),
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
    ) -> Result<BoundRelay, AppError> {
        let Sockets { guests, admin, hypervisor, control, fd_handoff, handover, lock, names } = sockets;
        let (listen, run_dir) = (guests.address, &config.run_dir);
        let admin_address = admin.local_addr().map_err(|why| admin::refused(config.admin_listen, why))?;
        admin::serve_on(admin, Arc::new(std::mem::take(&mut self.registry)), Ready::new());

        let mut tasks = JoinSet::new();
        let parts = hypervisor::Parts {
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
        tasks.spawn(fd_handoff::serve(fd_handoff, kinds, pause.clone()));
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
        let parts = guests::Parts {
            trust: self.trust.clone(),
            sandboxes: self.sandboxes.clone(),
            hypervisor,
            metrics: self.metrics.clone(),
            paths,
        };
        if let Some(orders) = self.sandboxes.orders() {
            tasks.spawn(guest_dialer::run(orders, parts.clone()));
        }
        let (total, per_address) = (config.max_handshakes, config.max_handshakes_per_address);
        let unassigned = ConnectionLimit::new(total as usize, per_address as usize);
        tasks.spawn(guests::accept(listener, parts, unassigned));
    }

    fn control(self, listen: SocketAddr, pause: Pause) -> Control {
        let Core { metrics, wireguard, states, sandboxes, trust, store, .. } = self;
        Control { sandboxes, states, store, trust, metrics, wireguard, listen, pause }
    }
}

impl BoundRelay {
    /// Serves until `shutdown`, then stops.
    ///
    /// # Errors
    /// A task ended by itself; the process must not continue without it.
    pub async fn run(mut self, shutdown: &Shutdown) -> Result<(), AppError> {
        let ended = tokio::select! {
            () = shutdown.wait() => Ok(()),
            Some(ended) = self.tasks.join_next() => {
                let why = ended.map_or_else(|error| error.to_string(), |()| "its task returned".to_owned());
                Err(AppError::Ended(why))
            }
        };
        if ended.is_ok() {
            // A handover under way may finish: its commit ends this process, and the pods live on.
            drop(tokio::time::timeout(old::STILL, self.source.lock()).await);
        }
        self.stop().await;
        ended
    }

    /// Closes everything and unlinks the sockets that still belong to this relay. Records stay on disk for the next
    /// relay.
    pub async fn stop(mut self) {
        self.tasks.shutdown().await;
        self.sandboxes.stop().await;
        if tokio::time::timeout(STOP_WITHIN, self.control.shutdown()).await.is_err() {
            tracing::debug!("a call from the node did not end in time");
        }
    }
}

fn make_run_dir(run_dir: &Path) -> io::Result<()> {
    // An existing folder keeps its permissions: other programs may have sockets in it.
    DirBuilder::new().recursive(true).mode(0o700).create(run_dir)
}

/// Locks `relay.lock`; `None` means that another process holds the lock.
fn lock(run_dir: &Path) -> Result<Option<Flock<File>>, AppError> {
    let path = run_dir.join("relay.lock");
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(&path)
        .map_err(path_error("open", &path))?;
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(Some(lock)),
        Err((_, nix::errno::Errno::EWOULDBLOCK)) => Ok(None),
        Err((_, error)) => Err(path_error("lock", &path)(error.into())),
    }
}

fn epoch() -> Result<String, AppError> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).map_err(|error| AppError::Random(error.to_string()))?;
    Ok(hex::encode(bytes))
}

async fn serve_control(listener: UnixListener, control: Control) -> Result<ttrpc::r#async::Server, AppError> {
    let acceptor = Acceptor::new("relay.sock");
    let connections =
        futures_util::stream::unfold((listener, acceptor), |(listener, mut acceptor)| async move {
            let (stream, _) = acceptor.next(|| listener.accept()).await;
            Some((Ok(stream), (listener, acceptor)))
        });
    let mut server = ttrpc::r#async::Server::new()
        .add_listener(ttrpc::r#async::transport::Listener::new(connections))
        .register_service(relay_ttrpc::create_relay(Arc::new(control)));
    server.start().await.map_err(AppError::Control)?;
    Ok(server)
}
