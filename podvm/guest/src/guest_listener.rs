//! Waits for the node to dial, if the network does not let this VM reach the node. The peer must prove by TLS, as the
//! server, that it is the node; the guest is the client here, too.
//!
//! Any host of the network may connect. Unproven connections therefore have little time and few places, and the newest
//! evicts the oldest: a peer that only stalls cannot keep the node out.

use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use peerpod_common::accept::Acceptor;
use peerpod_link::{endpoint, tls};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::{AbortHandle, Id, JoinSet};
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
pub(crate) type Greeting = Arc<dyn Fn(bool) -> Option<Arc<rustls::ClientConfig>> + Send + Sync>;

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
    pub(crate) fn new(port: u16, greeting: Greeting) -> Waiter {
        let arrived = Arc::<Arrived>::default();
        let task = tokio::spawn(listen(port, greeting, arrived.clone())).abort_handle();
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

async fn listen(port: u16, greeting: Greeting, arrived: Arc<Arrived>) {
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
    let (mut crowd, mut acceptor) = (Crowd::default(), Acceptor::new("node"));
    loop {
        tokio::select! {
            (stream, peer) = acceptor.next(|| listener.accept()) => {
                let with_certificate = arrived.with_certificate.load(Relaxed);
                let Some(config) = greeting(with_certificate) else { continue };
                let arrived = arrived.clone();
                crowd.add(peer.ip().to_canonical(), async move {
                    let stream = shake(stream, config).await.map_err(|error| (peer, error))?;
                    *arrived.newest.lock() = Some((with_certificate, stream));
                    arrived.changed.notify_one();
                    Ok(())
                });
            }
            () = crowd.leave() => {}
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

type Shaken = Result<(), (SocketAddr, io::Error)>;

/// Connections that have proven nothing yet.
#[derive(Default)]
struct Crowd {
    open: JoinSet<Shaken>,
    /// Oldest first.
    places: VecDeque<(Id, IpAddr, AbortHandle)>,
    strangers: u64,
    said: Option<Instant>,
}

impl Crowd {
    /// Adds a connection; at a limit, evicts the oldest of its address, or of all.
    fn add(&mut self, address: IpAddr, shaking: impl Future<Output = Shaken> + Send + 'static) {
        let of_it = |(_, other, _): &&(Id, IpAddr, AbortHandle)| *other == address;
        let leaves = if self.places.iter().filter(of_it).count() >= MOST_OF_ONE {
            self.places.iter().position(|place| place.1 == address)
        } else {
            (self.places.len() >= MOST).then_some(0)
        };
        if let Some((.., shaking)) = leaves.and_then(|at| self.places.remove(at)) {
            shaking.abort();
            self.stranger(address, "evicted as the oldest of too many unauthenticated connections");
        }
        let shaking = self.open.spawn(shaking);
        self.places.push_back((shaking.id(), address, shaking));
    }

    /// Waits until one handshake is done, with any result.
    async fn leave(&mut self) {
        let (id, shaken) = match self.open.join_next_with_id().await {
            Some(Ok((id, shaken))) => (id, Some(shaken)),
            Some(Err(error)) => (error.id(), None),
            None => return std::future::pending().await,
        };
        self.places.retain(|(other, ..)| *other != id);
        if let Some(Err((peer, error))) = shaken {
            self.stranger(peer.ip().to_canonical(), &error.to_string());
        }
    }

    fn stranger(&mut self, address: IpAddr, why: &str) {
        self.strangers += 1;
        tracing::debug!(%address, why, "refused a connection that is not from the node");
        if self.said.is_none_or(|said| said.elapsed() >= SAID_EVERY) {
            self.said = Some(Instant::now());
            let times = std::mem::take(&mut self.strangers);
            tracing::warn!(%address, why, times, "refused a connection that is not from the node");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held() -> impl Future<Output = Shaken> + Send + 'static {
        std::future::pending()
    }

    #[tokio::test]
    async fn connections_are_bounded_and_the_newest_is_always_accepted() {
        let mut crowd = Crowd::default();
        let (loud, ours) = (IpAddr::from([10, 0, 0, 9]), IpAddr::from([10, 0, 0, 1]));
        for _ in 0..3 * MOST_OF_ONE {
            crowd.add(loud, held());
        }
        assert_eq!(crowd.places.len(), MOST_OF_ONE, "of one address");
        for n in 0..4 * MOST_OF_ONE as u32 {
            crowd.add(IpAddr::V4(std::net::Ipv4Addr::from_bits(0x0a00_0100 + n)), held());
        }
        assert_eq!(crowd.places.len(), MOST);
        assert!(crowd.places.iter().all(|(_, address, _)| *address != loud), "the oldest left");
        crowd.add(ours, async { Ok(()) });
        while crowd.places.iter().any(|(_, address, _)| *address == ours) {
            timeout(Duration::from_secs(5), crowd.leave()).await.unwrap();
        }
        assert!(crowd.places.len() < MOST);
    }

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
            let greeted = tokio::io::AsyncReadExt::read_exact(&mut stream, &mut first);
            timeout(Duration::from_secs(2), greeted)
                .await
                .unwrap_or_else(|_| panic!("stranger {n}"))
                .unwrap();
            assert_eq!(first, [0x16], "a TLS handshake");
            strangers.push(stream);
        }
        assert!(timeout(Duration::from_millis(50), waiter.next(false)).await.is_err());
    }
}
