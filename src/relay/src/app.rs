//! Puts the relay together: [`build`] binds everything and returns real addresses, [`Bound::run`] serves until told
//! to stop. Its end drains nothing, by design: what it carries lives as long as it does, and a new relay serves
//! the same sandboxes from their records.

use std::{
    fs::{DirBuilder, File, OpenOptions},
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::Path,
    sync::Arc,
    time::Duration,
};

use nix::fcntl::{Flock, FlockArg};
use peerpod_base::{
    admin::{self, Ready},
    lifecycle::Shutdown,
};
use peerpod_link::net::probe::echo::{Echo, Known};
use peerpod_proto::relay_ttrpc;
use prometheus_client::registry::Registry;
use thiserror::Error;
use tokio::{
    net::{TcpListener, UnixListener, UnixStream},
    task::JoinSet,
};

use crate::{
    config::RelayConfig,
    control::Control,
    dials, door, guests, handin,
    inbox::Inbox,
    localhost::Localhost,
    metrics::Metrics,
    sandboxes::{Sandboxes, states::States},
    socket::{self, Bound as Socket},
    store::{Store, StoreError, hex},
    wireguard::{self, WireGuard},
};

/// How long the node's calls may take to end when the relay stops.
const STOP_WITHIN: Duration = Duration::from_secs(2);

/// Why the relay does not start, or ended.
#[derive(Debug, Error)]
pub enum AppError {
    /// A folder or file is not usable.
    #[error("{what} {path}: {why}")]
    Path {
        /// What was attempted.
        what: &'static str,
        /// On what.
        path: String,
        /// Why not.
        why: io::Error,
    },
    /// Two relays would take each other's connections.
    #[error("another peerpod-relay runs with run-dir {0}; stop it, or use another paths.run-dir")]
    Running(String),
    /// The guests' port.
    #[error("listen for guests on {address}: {why}; choose another relay.listen or free this one")]
    Listen {
        /// As configured.
        address: SocketAddr,
        /// Why not.
        why: io::Error,
    },
    /// The kernel gave no random bytes.
    #[error("ask the kernel for random bytes: {0}")]
    Random(String),
    /// The state folder.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The admin port.
    #[error(transparent)]
    Admin(#[from] admin::Error),
    /// The node's socket.
    #[error("serve relay.sock: {0}")]
    Control(ttrpc::Error),
    /// A part ended that never should.
    #[error("a part of the relay ended: {0}; see the lines above, and restart it")]
    Ended(String),
}

fn path_error(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> AppError {
    let path = path.display().to_string();
    move |why| AppError::Path { what, path, why }
}

/// A relay whose sockets are bound and served.
pub struct Bound {
    /// Where guests dial, as bound.
    pub listen: SocketAddr,
    /// The admin port, as bound.
    pub admin: SocketAddr,
    tasks: JoinSet<()>,
    control: ttrpc::r#async::Server,
    sandboxes: Arc<Sandboxes>,
    // Unlinked (if still ours) when dropped; the lock last.
    _sockets: [Socket; 3],
    _lock: Flock<File>,
}

/// Takes everything up that a relay of before left, binds all sockets and starts serving.
///
/// # Errors
/// See [`AppError`]; nothing stays bound then.
pub async fn build(config: RelayConfig) -> Result<Bound, AppError> {
    let run_dir = &config.run_dir;
    make_run_dir(run_dir).map_err(path_error("make", run_dir))?;
    let lock = lock(run_dir)?;
    let store = Store::open(&config.state_dir)?;
    let inbox = Inbox::open(&config.state_dir).map_err(path_error("open the inbox in", &config.state_dir))?;

    let mut registry = Registry::default();
    let metrics = Arc::new(Metrics::new(&mut registry));
    let wireguard = Arc::new(WireGuard::default());
    let shown = Box::new(wireguard::Shown(wireguard.clone()));
    registry.sub_registry_with_prefix("peerpod_relay").register_collector(shown);
    let states = Arc::new(States::new(epoch()?));
    let sandboxes = Sandboxes::new(store.clone(), states.clone(), metrics.clone());
    let trust = Arc::new(guests::Trust::new());
    restore(&store, &sandboxes, &trust, &wireguard).await?;

    let guests =
        listen(config.listen).await.map_err(|why| AppError::Listen { address: config.listen, why })?;
    let listen = guests.local_addr().map_err(|why| AppError::Listen { address: config.listen, why })?;
    let admin = admin::serve(config.admin_listen, Arc::new(registry), Ready::new()).await?;
    let bind = |name: &str| {
        let path = run_dir.join(name);
        socket::bind(&path).map_err(path_error("listen on", &path))
    };
    let (relay_listener, relay_socket) = bind("relay.sock")?;
    let (hypervisor_listener, hypervisor_socket) = bind("hypervisor.sock")?;
    let path = run_dir.join(peerpod_base::handin::SOCKET);
    let (handin_listener, handin_socket) = handin::bind(&path).map_err(path_error("listen on", &path))?;

    let mut tasks = JoinSet::new();
    let parts = door::Parts {
        listener: hypervisor_listener,
        node_socket: run_dir.join("node.sock"),
        inbox,
        states: states.clone(),
        metrics: metrics.clone(),
    };
    let door = door::open(parts, &mut tasks);
    let paths = Known::default();
    answer_probes(listen, paths.clone(), &mut tasks).await;
    let parts = guests::Parts {
        trust: trust.clone(),
        sandboxes: sandboxes.clone(),
        door,
        metrics: metrics.clone(),
        paths,
    };
    let bounds = guests::Bounds {
        total: config.max_handshakes as usize,
        per_address: config.max_handshakes_per_address as usize,
    };
    if let Some(orders) = sandboxes.orders() {
        tasks.spawn(dials::run(orders, parts.clone()));
    }
    tasks.spawn(guests::accept(guests, parts, bounds));
    // What the node may hand in; one line for each kind.
    let localhost = Localhost { sandboxes: Arc::downgrade(&sandboxes), metrics: metrics.clone() };
    let kinds: handin::Kinds = vec![Arc::new(localhost), wireguard.clone()];
    tasks.spawn(handin::serve(handin_listener, kinds));
    let control = Control { sandboxes: sandboxes.clone(), states, store, trust, metrics, wireguard, listen };
    let control = serve_control(relay_listener, control).await?;
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        run_dir = %run_dir.display(),
        state_dir = %config.state_dir.display(),
        %listen,
        %admin,
        "peerpod-relay serves"
    );
    let sockets = [relay_socket, hypervisor_socket, handin_socket];
    Ok(Bound { listen, admin, tasks, control, sandboxes, _sockets: sockets, _lock: lock })
}

impl Bound {
    /// Serves until `shutdown`, then stops.
    ///
    /// # Errors
    /// A part ended by itself: the process must not go on half.
    pub async fn run(mut self, shutdown: &Shutdown) -> Result<(), AppError> {
        let ended = tokio::select! {
            () = shutdown.wait() => Ok(()),
            Some(ended) = self.tasks.join_next() => {
                let why = ended.map_or_else(|error| error.to_string(), |()| "it returned".to_owned());
                Err(AppError::Ended(why))
            }
        };
        self.stop().await;
        ended
    }

    /// Closes everything and unlinks the sockets that are still ours. Records stay: the next relay serves them.
    pub async fn stop(mut self) {
        self.tasks.shutdown().await;
        self.sandboxes.stop().await;
        if tokio::time::timeout(STOP_WITHIN, self.control.shutdown()).await.is_err() {
            tracing::debug!("a call of the node did not end in time");
        }
    }
}

fn make_run_dir(run_dir: &Path) -> io::Result<()> {
    // One that is there keeps its rights: others may have sockets in it.
    DirBuilder::new().recursive(true).mode(0o700).create(run_dir)
}

fn lock(run_dir: &Path) -> Result<Flock<File>, AppError> {
    let path = run_dir.join("relay.lock");
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(&path)
        .map_err(path_error("open", &path))?;
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(lock),
        Err((_, nix::errno::Errno::EWOULDBLOCK)) => Err(AppError::Running(run_dir.display().to_string())),
        Err((_, error)) => Err(path_error("lock", &path)(error.into())),
    }
}

fn epoch() -> Result<String, AppError> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).map_err(|error| AppError::Random(error.to_string()))?;
    Ok(hex(&bytes))
}

async fn restore(
    store: &Store,
    sandboxes: &Sandboxes,
    trust: &guests::Trust,
    wireguard: &WireGuard,
) -> Result<(), AppError> {
    let reader = store.clone();
    let (identity, records) = tokio::task::spawn_blocking(move || (reader.identity(), reader.records()))
        .await
        .map_err(|error| AppError::Ended(error.to_string()))?;
    if let Some(identity) = identity {
        match identity.server_config() {
            Ok(config) => trust.set(config),
            Err(error) => {
                tracing::error!(%error, "kept TLS identity is not usable; guests wait for the node")
            }
        }
    }
    let records = records?;
    for record in &records {
        if let Err(error) = wireguard.put(&record.id, record.tunnel_peer.as_ref()) {
            tracing::error!(sandbox = %record.id, error, "guest is no peer of the encrypted tunnel");
        }
    }
    sandboxes.restore(records).await;
    Ok(())
}

/// Answers guests that try how large a packet may be, on the port they dial. Without it they take their kernel's word.
async fn answer_probes(listen: SocketAddr, paths: Known, tasks: &mut JoinSet<()>) {
    match Echo::bind(listen, paths).await {
        Ok(echo) => {
            tasks.spawn(echo.run());
        }
        Err(error) => tracing::warn!(%listen, %error, "path probes (UDP) of guests are not answered"),
    }
}

/// Both families on `[::]`; a kernel without IPv6 gets the other one alone.
async fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    match TcpListener::bind(address).await {
        Err(error)
            if address.ip() == IpAddr::from([0u16; 8])
                && matches!(
                    error.raw_os_error(),
                    Some(libc_errno::EAFNOSUPPORT | libc_errno::EADDRNOTAVAIL)
                ) =>
        {
            TcpListener::bind((Ipv4Addr::UNSPECIFIED, address.port())).await
        }
        bound => bound,
    }
}

/// The two numbers, from the crate that knows them.
mod libc_errno {
    use nix::errno::Errno;

    pub(super) const EAFNOSUPPORT: i32 = Errno::EAFNOSUPPORT as i32;
    pub(super) const EADDRNOTAVAIL: i32 = Errno::EADDRNOTAVAIL as i32;
}

async fn serve_control(listener: UnixListener, control: Control) -> Result<ttrpc::r#async::Server, AppError> {
    let connections = futures_util::stream::unfold(listener, |listener| async move {
        Some((accept(&listener).await, listener))
    });
    let mut server = ttrpc::r#async::Server::new()
        .add_listener(ttrpc::r#async::transport::Listener::new(connections))
        .register_service(relay_ttrpc::create_relay(Arc::new(control)));
    server.start().await.map_err(AppError::Control)?;
    Ok(server)
}

async fn accept(listener: &UnixListener) -> io::Result<UnixStream> {
    let accepted = listener.accept().await.map(|(stream, _)| stream);
    if accepted.is_err() {
        // The server would ask again at once, for as long as descriptors are short.
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    accepted
}
