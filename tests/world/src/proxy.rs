//! Proxies TCP in the node's namespace, and cuts connections at any byte, both directions at once.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::Context;
use socket2::SockRef;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::Namespace;

/// Small and odd, so that a cut falls into the middle of any message.
const PIECE: usize = 7919;

/// Passes connections on to one address until they are cut.
pub struct Proxy {
    address: SocketAddr,
    generation: watch::Sender<u64>,
    bytes: Arc<AtomicU64>,
    connections: Arc<AtomicU64>,
    task: JoinHandle<()>,
}

impl Proxy {
    /// Listens on a port on every address of the namespace, and dials `target` from within it.
    pub fn start(namespace: &Namespace, port: u16, target: SocketAddr) -> anyhow::Result<Proxy> {
        let within = namespace.clone();
        Proxy::start_dialling(namespace, port, move || {
            within.run(|| TcpStream::connect(target)).and_then(|dialled| dialled)
        })
    }

    /// Listens in the namespace, and dials `target` from the test's namespace.
    pub fn to_outside(namespace: &Namespace, port: u16, target: SocketAddr) -> anyhow::Result<Proxy> {
        Proxy::start_dialling(namespace, port, move || TcpStream::connect(target))
    }

    fn start_dialling(
        namespace: &Namespace,
        port: u16,
        dial: impl Fn() -> io::Result<TcpStream> + Send + 'static,
    ) -> anyhow::Result<Proxy> {
        let listener = namespace.run(|| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)))?;
        let listener = listener.with_context(|| format!("listen on port {port} in {}", namespace.name()))?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let (generation, receiver) = watch::channel(0);
        let (bytes, connections) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let task = tokio::spawn({
            let (bytes, connections) = (bytes.clone(), connections.clone());
            async move {
                while let Ok((stream, _)) = listener.accept().await {
                    let dialled = dial();
                    // The target does not listen: the guest's connection is closed, and the guest dials again.
                    let Ok(other) = dialled.and_then(adopt) else { continue };
                    connections.fetch_add(1, Ordering::Relaxed);
                    tokio::spawn(pass(stream, other, receiver.clone(), bytes.clone()));
                }
            }
        });
        Ok(Proxy { address, generation, bytes, connections, task })
    }

    /// Returns the address that it listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Resets every open connection at both ends.
    pub fn cut(&self) {
        self.generation.send_modify(|generation| *generation += 1);
    }

    /// Returns the bytes passed on so far, in both directions.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Returns the number of connections made so far.
    pub fn connections(&self) -> u64 {
        self.connections.load(Ordering::Relaxed)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
        self.cut();
    }
}

fn adopt(stream: TcpStream) -> io::Result<tokio::net::TcpStream> {
    stream.set_nonblocking(true)?;
    tokio::net::TcpStream::from_std(stream)
}

async fn pass(
    near: tokio::net::TcpStream,
    far: tokio::net::TcpStream,
    mut generation: watch::Receiver<u64>,
    bytes: Arc<AtomicU64>,
) {
    for stream in [&near, &far] {
        // Linger 0 resets the connection at the end; a socket that refuses it is closed with FIN.
        SockRef::from(stream).set_linger(Some(Duration::ZERO)).ok();
        stream.set_nodelay(true).ok();
    }
    let began = *generation.borrow();
    let (near_read, near_write) = near.into_split();
    let (far_read, far_write) = far.into_split();
    tokio::select! {
        _ = generation.wait_for(|now| *now != began) => {}
        () = copy(near_read, far_write, &bytes) => {}
        () = copy(far_read, near_write, &bytes) => {}
    }
}

async fn copy(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, bytes: &AtomicU64) {
    let mut buffer = [0; PIECE];
    while let Ok(count @ 1..) = from.read(&mut buffer).await {
        if to.write_all(&buffer[..count]).await.is_err() {
            return;
        }
        bytes.fetch_add(count as u64, Ordering::Relaxed);
    }
}
