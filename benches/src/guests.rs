//! Plays the guests of the fake provider's VMs. Each reads its request's user-data, dials the node from the "VM's"
//! address, claims, and answers its plan at once. The remaining time is that of the node and the relay.

use std::collections::HashSet;
use std::fs;
use std::io::Read;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use anyhow::{Context, ensure};
use bytes::Bytes;
use futures_util::future::BoxFuture;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, bind, connect, socket};
use peerpod_guest::intercept::{Intercept, Notice};
use peerpod_link::endpoint::{
    Endpoint, EndpointHandle, Filter, Handler, Limits, LinkEvent, Role, Transport, tune,
};
use peerpod_link::user_data::UserData;
use peerpod_link::{claim, tls};
use peerpod_podnet::netns::Netns;
use peerpod_proto::guest::{Claim, Reply, Request, Status};
use peerpod_provider_fake::FakeVm;
use protobuf::Message;
use rustls_pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// Watches the fake provider's folder for new VMs until it is dropped.
pub(crate) struct Guests(tokio::task::JoinHandle<()>);

impl Guests {
    /// Starts guests that dial from inside `cloud`, with the agent at `agent` behind them.
    pub(crate) fn watch(cloud: Netns, dir: PathBuf, agent: PathBuf) -> Guests {
        Guests(tokio::spawn(async move {
            let mut known = HashSet::new();
            // This polls the folder's time instead of using inotify: the poll adds the same half millisecond to the
            // first VM and to the last. A listing takes longer with more VMs, so there must be only a few listings per
            // VM.
            let mut beat = tokio::time::interval(Duration::from_millis(1));
            let (mut seen, mut found) = (None, false);
            loop {
                beat.tick().await;
                let changed = fs::metadata(&dir).and_then(|folder| folder.modified()).ok();
                // The folder's clock ticks every few milliseconds, so a second change within a tick does not change the
                // time. VMs are made one after another, and each takes longer than a tick.
                let settled = |at: SystemTime| at.elapsed().is_ok_and(|age| age > Duration::from_millis(20));
                if changed.is_none_or(|at| seen == changed && (found || settled(at))) {
                    continue;
                }
                seen = changed;
                let new = new_files(&dir, &mut known);
                found = !new.is_empty();
                for path in new {
                    let (cloud, agent) = (cloud.clone(), agent.clone());
                    tokio::spawn(async move {
                        if let Err(error) = live(&cloud, &path, agent).await {
                            eprintln!("guest of {}: {error:#}", path.display());
                        }
                    });
                }
            }
        }))
    }
}

impl Drop for Guests {
    fn drop(&mut self) {
        self.0.abort();
    }
}

fn new_files(dir: &Path, known: &mut HashSet<PathBuf>) -> Vec<PathBuf> {
    let Ok(listing) = fs::read_dir(dir) else { return Vec::new() };
    let paths = listing.filter_map(|entry| Some(entry.ok()?.path()));
    paths.filter(|path| path.extension().is_some_and(|e| e == "json") && known.insert(path.clone())).collect()
}

/// Plays one guest.
async fn live(cloud: &Netns, file: &Path, agent: PathBuf) -> anyhow::Result<()> {
    let fake_vm: FakeVm = serde_json::from_slice(&fs::read(file)?)?;
    let user_data = UserData::parse(fake_vm.user_data.as_bytes())?;
    let to = *user_data.node.addresses.first().context("no address of the node")?;
    let pins = &user_data.node.ca_sha256;

    let key = rcgen::KeyPair::generate()?;
    let csr = rcgen::CertificateParams::default().serialize_request(&key)?;
    let mut stream = secure(cloud, &fake_vm, to, tls::client_config(pins, None)?).await?;
    let question = Claim {
        version: 1,
        ticket_id: user_data.ticket.id.clone(),
        ticket_secret: user_data.ticket.secret.expose().to_vec(),
        csr: csr.der().to_vec(),
        ..Default::default()
    };
    let mut answer = claim::ask(&mut stream, &question).await?;
    while answer.retry {
        tokio::time::sleep(Duration::from_millis(2)).await;
        stream = secure(cloud, &fake_vm, to, tls::client_config(pins, None)?).await?;
        answer = claim::ask(&mut stream, &question).await?;
    }
    ensure!(answer.error.is_empty(), "the claim was refused: {}", answer.error);
    drop(stream);

    let chain: Vec<_> = answer.certificates.into_iter().map(CertificateDer::from).collect();
    let identity = (chain, PrivatePkcs8KeyDer::from(key.serialize_der()).into());
    let stream = secure(cloud, &fake_vm, to, tls::client_config(pins, Some(identity))?).await?;
    let home = Home { agent, handle: Arc::default() };
    let ours = home.handle.clone();
    let (endpoint, handle) = Endpoint::new(Role::Guest, home, Limits::default());
    handle.attach(Transport::from(stream));
    ensure!(ours.set(handle).is_ok(), "set twice");
    endpoint.run().await;
    Ok(())
}

/// Opens a TLS connection from the VM's address, in the cloud's namespace.
async fn secure(
    cloud: &Netns,
    fake_vm: &FakeVm,
    to: SocketAddr,
    config: Arc<rustls::ClientConfig>,
) -> anyhow::Result<TlsStream<TcpStream>> {
    let SocketAddr::V4(to) = to else { anyhow::bail!("{to}: the fake's addresses are IPv4") };
    let from = SockaddrIn::from(std::net::SocketAddrV4::new(fake_vm.address, 0));
    let tcp = cloud.run(|| -> nix::Result<std::net::TcpStream> {
        let socket = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
        bind(std::os::fd::AsRawFd::as_raw_fd(&socket), &from)?;
        connect(std::os::fd::AsRawFd::as_raw_fd(&socket), &SockaddrIn::from(to))?;
        Ok(std::net::TcpStream::from(socket))
    })??;
    tcp.set_nonblocking(true)?;
    let tcp = TcpStream::from_std(tcp)?;
    tune(&tcp)?;
    Ok(TlsConnector::from(config).connect(tls::server_name(), tcp).await?)
}

struct Home {
    agent: PathBuf,
    handle: Arc<OnceLock<EndpointHandle>>,
}

struct Unnoticed;

impl Notice for Unnoticed {
    fn container(&self) {}
    fn bind_source(&self, _: &str) {}
    fn sandbox_ends(&self) {}
}

impl Handler for Home {
    fn filter(&mut self) -> Box<dyn Filter> {
        Box::new(Intercept::new(Arc::new(Unnoticed), "/run/netns/podns".to_owned()))
    }
    fn dial(&mut self) -> BoxFuture<'static, std::io::Result<UnixStream>> {
        Box::pin(UnixStream::connect(self.agent.clone()))
    }
    fn on_control(&mut self, message: Bytes) {
        let Ok(request) = Request::parse_from_bytes(&message) else { return };
        let status = Status { stage: "running".into(), ready: true, ..Default::default() };
        let reply = Reply { id: request.id, status: Some(status).into(), ..Default::default() };
        if let (Some(handle), Ok(bytes)) = (self.handle.get(), reply.write_to_bytes())
            && let Err(error) = handle.control(bytes.into())
        {
            eprintln!("guest: {error}");
        }
    }
    fn on_link(&mut self, _: LinkEvent) {}
    fn on_connections(&mut self, _: usize) {}
}

/// Returns the resident memory of a process, in MiB.
pub(crate) fn rss_mib(pid: u32) -> anyhow::Result<f64> {
    let mut text = String::new();
    fs::File::open(format!("/proc/{pid}/status"))?.read_to_string(&mut text)?;
    let line = text.lines().find(|line| line.starts_with("VmRSS:")).context("no VmRSS")?;
    let kib: f64 = line.split_whitespace().nth(1).context("VmRSS without a number")?.parse()?;
    Ok(kib / 1024.0)
}
