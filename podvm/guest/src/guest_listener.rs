//! Waits for the node to dial, if the network does not let this VM reach the node. The peer must prove by TLS, as the
//! server, that it is the node; the guest is the client here, too.
//!
//! Any host of the network may connect. Unproven connections therefore have little time and few places, and the newest
//! evicts the oldest: a peer that only stalls cannot keep the node out.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use peerpod_common::accept::Acceptor;
use peerpod_common::crowd::Crowd;
use peerpod_link::{endpoint, tls};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// Time limit to prove the node's identity.
const HANDSHAKE: Duration = Duration::from_secs(15);
/// Limits of unproven connections, in total and per address.
const MOST: usize = 256;
const MOST_OF_ONE: usize = 128;
/// Interval between log lines about other peers than the node.
const SAID_EVERY: Duration = Duration::from_secs(60);
/// Pause before a failed listener is opened again.
const AGAIN: Duration = Duration::from_secs(1);

/// TLS configuration for a new connection: with the guest's certificate, or without one for a claim.
pub(crate) type ConfigSource = Arc<dyn Fn(bool) -> Option<Arc<rustls::ClientConfig>> + Send + Sync>;

/// Newest connection of the node, and whether it carries the guest's certificate.
#[derive(Default)]
struct Arrived {
    newest: Mutex<Option<(bool, TlsStream<TcpStream>)>>,
    changed: Notify,
    with_certificate: AtomicBool,
}

/// Listener for the node.
pub(crate) struct Waiter {
    arrived: Arc<Arrived>,
    task: AbortHandle,
}

impl Drop for Waiter {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Waiter {
    /// Listens on the port of every address of the VM, in a task of its own.
    pub(crate) fn new(port: u16, config_source: ConfigSource) -> Waiter {
        let arrived = Arc::<Arrived>::default();
        let task = tokio::spawn(listen(port, config_source, arrived.clone())).abort_handle();
        Waiter { arrived, task }
    }

    /// Returns the next connection that was proven to come from the node, with or without the guest's certificate.
    ///
    /// Cancel safety: no connection is lost.
    pub(crate) async fn next(&self, with_certificate: bool) -> TlsStream<TcpStream> {
        self.arrived.with_certificate.store(with_certificate, Relaxed);
        loop {
            let newest = self.arrived.newest.lock().take();
            match newest {
                Some((shown, stream)) if shown == with_certificate => return stream,
                // Begun before there was a certificate, or with one that the node did not know.
                Some(_) => {}
                None => self.arrived.changed.notified().await,
            }
        }
    }
}

async fn listen(port: u16, config_source: ConfigSource, arrived: Arc<Arrived>) {
    let mut said = String::new();
    let listener = loop {
        match bind(port).await {
            Ok(listener) => break listener,
            Err(error) if error.to_string() != said => {
                said = error.to_string();
                tracing::error!(port, %error, "cannot wait for the node");
            }
            Err(_) => {}
        }
        sleep(AGAIN).await;
    };
    tracing::info!(port, "waiting for the node to dial");
    let (mut crowd, mut strangers) = (Crowd::new(MOST), Strangers::default());
    let mut acceptor = Acceptor::new("node");
    loop {
        tokio::select! {
            (stream, peer) = acceptor.next(|| listener.accept()) => {
                let with_certificate = arrived.with_certificate.load(Relaxed);
                let Some(config) = config_source(with_certificate) else { continue };
                let arrived = arrived.clone();
                // Never set: any host can answer a ClientHello, and the node is the only good peer.
                let spoke = Arc::default();
                let evicted = crowd.add(peer.ip().to_canonical(), MOST_OF_ONE, spoke, async move {
                    let stream = shake(stream, config).await.map_err(|error| (peer, error))?;
                    *arrived.newest.lock() = Some((with_certificate, stream));
                    arrived.changed.notify_one();
                    Ok::<_, (SocketAddr, io::Error)>(())
                });
                if evicted {
                    strangers.note(peer, "it evicted the oldest of too many unauthenticated connections");
                }
            }
            left = crowd.leave() => {
                if let Some(Err((peer, error))) = left {
                    strangers.note(peer, &error.to_string());
                }
            }
        }
    }
}

/// Listens on both families, if the kernel has both.
async fn bind(port: u16) -> io::Result<TcpListener> {
    match TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).await {
        Ok(listener) => Ok(listener),
        Err(_) => TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).await,
    }
}

async fn shake(stream: TcpStream, config: Arc<rustls::ClientConfig>) -> io::Result<TlsStream<TcpStream>> {
    endpoint::tune(&stream)?;
    timeout(HANDSHAKE, TlsConnector::from(config).connect(tls::server_name(), stream)).await?
}

/// Counts connections of other peers than the node, for the log.
#[derive(Default)]
struct Strangers {
    times: u64,
    said: Option<Instant>,
}

impl Strangers {
    fn note(&mut self, peer: SocketAddr, why: &str) {
        let address = peer.ip().to_canonical();
        self.times += 1;
        tracing::debug!(%address, why, "refused a connection that is not from the node");
        if self.said.is_none_or(|said| said.elapsed() >= SAID_EVERY) {
            self.said = Some(Instant::now());
            let times = std::mem::take(&mut self.times);
            tracing::warn!(%address, why, times, "refused a connection that is not from the node");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_stalled_or_foreign_connection_does_not_block_others() {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let config = tls::client_config(&[[1; 32]], None).unwrap();
        let waiter = Waiter::new(free.port(), Arc::new(move |_| Some(config.clone())));
        // Far more than there are places: each is accepted and gets a ClientHello, and the oldest are evicted.
        let mut strangers = Vec::new();
        for n in 0..3 * MOST_OF_ONE {
            let mut stream = loop {
                match TcpStream::connect(free).await {
                    Ok(stream) => break stream,
                    Err(_) => sleep(Duration::from_millis(5)).await,
                }
            };
            let mut first = [0];
            let first_byte = tokio::io::AsyncReadExt::read_exact(&mut stream, &mut first);
            timeout(Duration::from_secs(2), first_byte)
                .await
                .unwrap_or_else(|_| panic!("stranger {n}"))
                .unwrap();
            assert_eq!(first, [0x16], "a TLS handshake");
            strangers.push(stream);
        }
        assert!(timeout(Duration::from_millis(50), waiter.next(false)).await.is_err());
    }
}
