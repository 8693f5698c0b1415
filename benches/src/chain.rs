//! Runs the chains that are compared: a bare socket, two `copy_bidirectional` processes, two processes with Peerpod's
//! endpoints; the last two plain and with TLS. Each process is this program in another role, so that their CPU times
//! are separate.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use bytes::Bytes;
use futures_util::future::BoxFuture;
use peerpod_guest::intercept::{Intercept, Notice};
use peerpod_link::endpoint::{Endpoint, Filter, Handler, Limits, LinkEvent, Role, Transport, tune};
use peerpod_link::tls;
use peerpod_relay::agent::filter::{AgentFilter, Bounds, Shared};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
use tokio::io::{AsyncRead, AsyncWrite, copy_bidirectional_with_sizes};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// Processes between the client and the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Two processes that copy bytes, one TCP connection per client connection, 64 KiB buffers.
    Splice,
    /// Peerpod's endpoints with the filters of relay and guest.
    Relay,
    /// The same without the relay's counters.
    Uncounted,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Splice => "splice",
            Kind::Relay => "relay",
            Kind::Uncounted => "uncounted",
        }
    }
}

/// A running pair of processes; drop kills both.
pub(crate) struct Pair {
    near: Child,
    far: Child,
    /// Socket that the client connects to.
    pub(crate) socket: PathBuf,
}

impl Pair {
    /// Starts both in front of the agent at `agent`.
    pub(crate) fn start(kind: Kind, with_tls: bool, folder: &Path, agent: &Path) -> anyhow::Result<Pair> {
        let tls = if with_tls { "tls" } else { "plain" };
        let socket = folder.join(format!("{}-{tls}.sock", kind.name()));
        let (mut near, address) = role(&["near", kind.name(), tls], folder, &socket)?;
        match role(&["far", kind.name(), tls, &address], folder, agent) {
            Ok((far, _)) => Ok(Pair { near, far, socket }),
            Err(error) => {
                near.kill()?;
                near.wait()?;
                Err(error)
            }
        }
    }

    /// Returns the CPU time of both so far.
    pub(crate) fn cpu(&self) -> anyhow::Result<Duration> {
        Ok(cpu_of(self.near.id())? + cpu_of(self.far.id())?)
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        for child in [&mut self.near, &mut self.far] {
            child.kill().ok(); // It may have exited already.
            child.wait().ok();
        }
    }
}

/// Returns the CPU time of a process and its threads, from the scheduler's statistics.
pub(crate) fn cpu_of(pid: u32) -> anyhow::Result<Duration> {
    let mut total = 0;
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let path = task?.path().join("schedstat");
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        total += text.split_whitespace().next().context("empty schedstat")?.parse::<u64>()?;
    }
    Ok(Duration::from_nanos(total))
}

/// Starts an agent in a process of its own and passes its socket to `work`.
pub(crate) fn with_agent(
    folder: &Path,
    work: impl FnOnce(&Path) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let socket = folder.join("agent.sock");
    let (mut agent, _) = role(&["agent"], folder, &socket)?;
    let outcome = work(&socket);
    agent.kill()?;
    agent.wait()?;
    outcome
}

/// A running copy of bytes; drop kills it.
pub(crate) struct PlainCopy(Child);

impl PlainCopy {
    /// Starts it in this network namespace, from a socket that it makes.
    pub(crate) fn start(folder: &Path, socket: &Path, to: SocketAddr) -> anyhow::Result<PlainCopy> {
        role(&["copy", &to.to_string()], folder, socket).map(|(copy, _)| PlainCopy(copy))
    }
}

impl Drop for PlainCopy {
    fn drop(&mut self) {
        self.0.kill().ok(); // It may have exited already.
        self.0.wait().ok();
    }
}

/// Starts this program in a role and waits for the one line that it prints when it is ready.
pub(crate) fn role(words: &[&str], folder: &Path, socket: &Path) -> anyhow::Result<(Child, String)> {
    let mut child = Command::new(std::env::current_exe()?)
        .arg("role")
        .args(words)
        .env("BENCH_FOLDER", folder)
        .env("BENCH_SOCKET", socket)
        .stdout(Stdio::piped())
        .spawn()?;
    let mut line = String::new();
    BufReader::new(child.stdout.take().context("no stdout")?).read_line(&mut line)?;
    if line.is_empty() {
        bail!("role {words:?} ended at once: {}", child.wait()?);
    }
    Ok((child, line.trim().to_owned()))
}

/// Writes keys and certificates for the TLS chains into the folder.
pub(crate) fn make_certificates(folder: &Path) -> anyhow::Result<()> {
    use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
    let ca_key = KeyPair::generate()?;
    let mut ca = CertificateParams::new(Vec::<String>::new())?;
    ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let ca_certificate = ca.self_signed(&ca_key)?;
    fs::write(folder.join("ca.der"), ca_certificate.der())?;
    let issuer = Issuer::new(ca, ca_key);
    for (name, host) in [("near", tls::SERVER_NAME), ("far", "guest.peerpod.internal")] {
        let key = KeyPair::generate()?;
        let certificate = CertificateParams::new(vec![host.to_owned()])?.signed_by(&key, &issuer)?;
        fs::write(folder.join(format!("{name}.der")), certificate.der())?;
        fs::write(folder.join(format!("{name}.key")), key.serialize_der())?;
    }
    Ok(())
}

type Identity = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

fn identity(folder: &Path, name: &str) -> anyhow::Result<(Identity, CertificateDer<'static>)> {
    let certificate = |name: &str| -> anyhow::Result<CertificateDer<'static>> {
        Ok(CertificateDer::from(fs::read(folder.join(format!("{name}.der")))?))
    };
    let ca = certificate("ca")?;
    let key = PrivatePkcs8KeyDer::from(fs::read(folder.join(format!("{name}.key")))?);
    Ok(((vec![certificate(name)?, ca.clone()], key.into()), ca))
}

/// Runs the role of a process that was started as `role …`.
pub(crate) async fn play(words: &[String]) -> anyhow::Result<()> {
    let folder = PathBuf::from(std::env::var_os("BENCH_FOLDER").context("BENCH_FOLDER")?);
    let socket = PathBuf::from(std::env::var_os("BENCH_SOCKET").context("BENCH_SOCKET")?);
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["near", kind, tls] => near(kind, (tls == "tls").then_some(&folder), &socket).await,
        ["far", kind, tls, address] => {
            let to: SocketAddr = address.parse()?;
            far(kind != Kind::Splice.name(), (tls == "tls").then_some(&folder), to, socket).await
        }
        ["copy", address] => copy(&socket, address.parse()?).await,
        _ => bail!("no such role: {words:?}"),
    }
}

/// Copies each connection to the socket to a TCP address, as `socat` does.
async fn copy(socket: &Path, to: SocketAddr) -> anyhow::Result<()> {
    let listener = UnixListener::bind(socket)?;
    println!("{to}");
    loop {
        let (mut from, _) = listener.accept().await?;
        tokio::spawn(async move {
            let mut to = TcpStream::connect(to).await?;
            to.set_nodelay(true)?;
            copy_bidirectional_with_sizes(&mut from, &mut to, 64 << 10, 64 << 10).await
        });
    }
}

trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Stream for T {}

async fn near(kind: &str, folder: Option<&PathBuf>, socket: &Path) -> anyhow::Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let shims = UnixListener::bind(socket)?;
    let acceptor = match folder {
        Some(folder) => {
            let ((chain, key), ca) = identity(folder, "near")?;
            Some(TlsAcceptor::from(tls::server_config(chain, key, &[ca])?))
        }
        None => None,
    };
    println!("{}", listener.local_addr()?);
    if kind != Kind::Splice.name() {
        let near = Near { shared: Arc::default(), is_counted: kind != Kind::Uncounted.name() };
        let (endpoint, handle) = Endpoint::new(Role::Relay, near, Limits::default());
        tokio::spawn(endpoint.run());
        let (tcp, peer) = listener.accept().await?;
        tune(&tcp)?;
        handle.attach(match &acceptor {
            Some(acceptor) => acceptor.accept(tcp).await?.into(),
            None => Transport::new(tcp, peer),
        });
        loop {
            handle.adopt(shims.accept().await?.0);
        }
    }
    loop {
        let (mut shim, _) = shims.accept().await?;
        let (tcp, _) = listener.accept().await?;
        tcp.set_nodelay(true)?;
        let mut far: Box<dyn Stream> = match &acceptor {
            Some(acceptor) => Box::new(acceptor.accept(tcp).await?),
            None => Box::new(tcp),
        };
        tokio::spawn(
            async move { copy_bidirectional_with_sizes(&mut shim, &mut far, 64 << 10, 64 << 10).await },
        );
    }
}

async fn far(relay: bool, folder: Option<&PathBuf>, to: SocketAddr, agent: PathBuf) -> anyhow::Result<()> {
    let connector = match folder {
        Some(folder) => {
            let (identity, ca) = identity(folder, "far")?;
            Some(TlsConnector::from(tls::client_config(&[tls::fingerprint(&ca)], Some(identity))?))
        }
        None => None,
    };
    let name = ServerName::try_from(tls::SERVER_NAME)?;
    println!("ready");
    if relay {
        let (endpoint, handle) = Endpoint::new(Role::Guest, Far(agent), Limits::default());
        let tcp = TcpStream::connect(to).await?;
        tune(&tcp)?;
        handle.attach(match &connector {
            Some(connector) => connector.connect(name, tcp).await?.into(),
            None => Transport::new(tcp, to),
        });
        tokio::spawn(endpoint.run()).await?;
        return Ok(());
    }
    // One connection always waits for the next client of the near end.
    loop {
        let tcp = TcpStream::connect(to).await?;
        tcp.set_nodelay(true)?;
        let mut near: Box<dyn Stream> = match &connector {
            Some(connector) => Box::new(connector.connect(name.clone(), tcp).await?),
            None => {
                tcp.readable().await?;
                Box::new(tcp)
            }
        };
        let mut agent = UnixStream::connect(&agent).await?;
        tokio::spawn(async move {
            copy_bidirectional_with_sizes(&mut near, &mut agent, 64 << 10, 64 << 10).await
        });
    }
}

struct Near {
    shared: Arc<Shared>,
    is_counted: bool,
}

impl Handler for Near {
    fn filter(&mut self) -> Box<dyn Filter> {
        let (shared, bounds) = (self.shared.clone(), Bounds::default());
        match self.is_counted {
            true => Box::new(AgentFilter::new(shared, bounds)),
            false => Box::new(AgentFilter::uncounted(shared, bounds)),
        }
    }
    fn dial(&mut self) -> BoxFuture<'static, std::io::Result<UnixStream>> {
        Box::pin(async { Err(std::io::Error::other("the relay dials nothing")) })
    }
    fn on_control(&mut self, _: Bytes) {}
    fn on_link(&mut self, _: LinkEvent) {}
    fn on_connections(&mut self, _: usize) {}
}

struct Far(PathBuf);

struct Unnoticed;

impl Notice for Unnoticed {
    fn container(&self) {}
    fn bind_source(&self, _: &str) {}
    fn sandbox_ends(&self) {}
}

impl Handler for Far {
    fn filter(&mut self) -> Box<dyn Filter> {
        Box::new(Intercept::new(Arc::new(Unnoticed), "/run/netns/podns".to_owned()))
    }
    fn dial(&mut self) -> BoxFuture<'static, std::io::Result<UnixStream>> {
        Box::pin(UnixStream::connect(self.0.clone()))
    }
    fn on_control(&mut self, _: Bytes) {}
    fn on_link(&mut self, _: LinkEvent) {}
    fn on_connections(&mut self, _: usize) {}
}
