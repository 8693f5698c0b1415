//! Dials the node: short attempts at all of its addresses, repeated every 100–250 ms (a beat), until one connects.
//!
//! While a cloud brings a VM's interface up, SYNs are dropped without an answer, and a connect that waits for its
//! retransmissions loses seconds. So a new attempt starts at every beat, and the old ones may still succeed. The time
//! lost after the network works is a fraction of one beat.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use peerpod_link::{endpoint, tls};
use peerpod_podnet::underlay::reaches_far;
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::log;

const ATTEMPT: Duration = Duration::from_secs(1);
/// Delay between the attempts of one beat, so that the first address usually succeeds alone.
const STAGGER: Duration = Duration::from_millis(10);
/// Addresses tried per beat; a longer list continues at the next beat.
const AT_ONCE: usize = 8;
/// Limit of remembered addresses. The addresses that did not connect for longest are dropped.
const MOST: usize = 32;
/// Time limit of a TLS handshake, sufficient for busy machines.
const HANDSHAKE: Duration = Duration::from_secs(15);
/// Time limit of a TLS handshake with other addresses left to try: another machine may have this one by now.
const HANDSHAKE_OF_MANY: Duration = Duration::from_secs(5);

/// Time without a connection after which the console gets the reason, and the interval of its repetition.
const PATIENCE: Duration = Duration::from_secs(5);
const AGAIN: Duration = Duration::from_secs(60);

/// Returns the kernel's source address for a target. Sends nothing.
fn source(target: SocketAddr) -> io::Result<IpAddr> {
    let any: IpAddr =
        if target.is_ipv6() { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() };
    let socket = std::net::UdpSocket::bind((any, 0))?;
    socket.connect(target)?;
    Ok(socket.local_addr()?.ip())
}

/// Returns the VM's address on the route to a target; `None`: there is no route, or the target does not reach it.
pub(crate) fn usable_source(target: SocketAddr) -> Option<IpAddr> {
    source(target).ok().filter(|source| !source.is_unspecified() && !is_too_early(*source, target.ip()))
}

/// Returns whether the VM would dial from a link-local address a node that is not link-local. The node would take that
/// address for the VM's own, and no tunnel can be made between the two.
fn is_too_early(source: IpAddr, target: IpAddr) -> bool {
    !reaches_far(source) && reaches_far(target)
}

/// Returns the length of a beat: 100 to 250 ms. The jitter spreads the guests of a returning node.
pub(crate) fn beat() -> Duration {
    let random = getrandom::u32().unwrap_or(0);
    Duration::from_millis(100 + u64::from(random % 151))
}

pub(crate) struct Dialler {
    addresses: Vec<SocketAddr>,
    /// Notification of a changed network, which starts the next beat at once.
    woken: Arc<Notify>,
    beat: fn() -> Duration,
}

impl Dialler {
    /// Makes a dialler. `addresses` must not be empty; user-data is checked for that.
    pub(crate) fn new(addresses: Vec<SocketAddr>, woken: Arc<Notify>) -> Dialler {
        Dialler { addresses, woken, beat }
    }

    /// Appends addresses that the node announced since, after the known ones.
    pub(crate) fn learn(&mut self, addresses: &[SocketAddr]) {
        let unknown = |address: &&SocketAddr| !self.addresses.contains(*address);
        let new: Vec<SocketAddr> = addresses.iter().filter(unknown).take(MOST / 2).copied().collect();
        self.addresses.truncate(MOST - new.len());
        self.addresses.extend(new);
    }

    /// Connects; never gives up. The connected address comes first the next time.
    pub(crate) async fn connect(&mut self) -> (TcpStream, SocketAddr) {
        let mut attempts: JoinSet<Result<(TcpStream, SocketAddr), (SocketAddr, io::Error)>> = JoinSet::new();
        let mut failures = BTreeMap::new();
        let mut due = Instant::now() + PATIENCE;
        loop {
            if Instant::now() >= due {
                due = Instant::now() + AGAIN;
                log::cannot_join(&why(&failures));
            }
            for (n, address) in self.addresses.iter().copied().take(AT_ONCE).enumerate() {
                attempts.spawn(async move {
                    sleep(STAGGER * n as u32).await;
                    let stream = attempt(address).await.map_err(|error| (address, error))?;
                    Ok((stream, address))
                });
            }
            if self.addresses.len() > AT_ONCE {
                self.addresses.rotate_left(AT_ONCE);
            }
            let (woken, length) = (self.woken.clone(), (self.beat)());
            let beat = timeout(length, woken.notified());
            tokio::pin!(beat);
            loop {
                tokio::select! {
                    biased;
                    Some(done) = attempts.join_next() => {
                        match done {
                            Ok(Ok((stream, address))) => {
                                self.first(address);
                                return (stream, address);
                            }
                            Ok(Err((address, error))) => drop(failures.insert(address, error)),
                            Err(_) => {}
                        }
                    }
                    _ = &mut beat => break,
                }
            }
        }
    }

    /// Connects and does the TLS handshake, once: after a failure the caller lets a beat pass. Fails if the peer is not
    /// the guest's node (or not yet). Calls `connected` before it sends the first byte; tasks that wait for that call run
    /// later.
    pub(crate) async fn secure(
        &mut self,
        config: Arc<rustls::ClientConfig>,
        connected: impl FnOnce(),
    ) -> anyhow::Result<TlsStream<TcpStream>> {
        let (tcp, address) = self.connect().await;
        connected();
        let connecting = TlsConnector::from(config).connect(tls::server_name(), tcp);
        let patience = if self.addresses.len() > 1 { HANDSHAKE_OF_MANY } else { HANDSHAKE };
        let result = timeout(patience, connecting).await.unwrap_or_else(|late| Err(late.into()));
        if result.is_err() {
            // Another machine may have that address by now.
            self.last(address);
        }
        result.map_err(|error| {
            let remedy = remedy(&error);
            anyhow::Error::from(error).context(format!("tls handshake with {address}{remedy}"))
        })
    }

    fn first(&mut self, address: SocketAddr) {
        if let Some(at) = self.addresses.iter().position(|a| *a == address) {
            self.addresses[..=at].rotate_right(1);
        }
    }

    fn last(&mut self, address: SocketAddr) {
        if let Some(at) = self.addresses.iter().position(|a| *a == address) {
            self.addresses[at..].rotate_left(1);
        }
    }
}

/// Connects to one address, once.
async fn attempt(address: SocketAddr) -> io::Result<TcpStream> {
    if is_too_early(source(address)?, address.ip()) {
        return Err(io::ErrorKind::AddrNotAvailable.into());
    }
    let stream = timeout(ATTEMPT, TcpStream::connect(address)).await??;
    endpoint::tune(&stream)?;
    Ok(stream)
}

/// Returns the last failure of each address, with its remedy.
fn why(failures: &BTreeMap<SocketAddr, io::Error>) -> String {
    let one = |(address, error): (&SocketAddr, &io::Error)| match error.kind() {
        io::ErrorKind::ConnectionRefused => format!(
            "{address} refuses the connection: start peerpod-relay there, or let the firewalls of node and network \
             pass this TCP port"
        ),
        io::ErrorKind::TimedOut => format!(
            "{address} does not answer: let the security group and all firewalls between VM and node pass this TCP \
             port, or correct node.relay-addresses"
        ),
        _ => format!("{address}: {error}; correct the VM's routes, or node.relay-addresses"),
    };
    match failures.is_empty() {
        true => "no address of the node was tried yet".to_owned(),
        false => failures.iter().take(AT_ONCE).map(one).collect::<Vec<_>>().join("; "),
    }
}

/// Returns the remedy of a failed handshake, to append to its attempt; empty if there is none.
fn remedy(error: &io::Error) -> &'static str {
    use rustls::CertificateError as E;
    let tls = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
    match tls {
        Some(rustls::Error::InvalidCertificate(
            E::Expired | E::ExpiredContext { .. } | E::NotValidYet | E::NotValidYetContext { .. },
        )) => " (the clocks of VM and node differ: set the VM's clock by NTP or by its hypervisor)",
        Some(rustls::Error::InvalidCertificate(_)) => {
            " (its certificate is not of the CA that this VM was given: see that node.relay-addresses lead to this \
             VM's node, and restore the node's trust/ca.json if it was replaced)"
        }
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::sync::atomic::Ordering::SeqCst;

    use tokio::net::{TcpListener, TcpSocket};

    use super::*;

    /// Returns a port without a listener, held so that no other process gets it.
    fn held() -> (TcpSocket, SocketAddr) {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_reuseaddr(true).unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = socket.local_addr().unwrap();
        (socket, address)
    }

    #[tokio::test]
    async fn a_listener_that_appears_late_is_found_within_one_interval() {
        static BEATS: AtomicUsize = AtomicUsize::new(0);
        let (_refusing, refused) = held();
        for after in [0u64, 130, 700] {
            let (late, address) = held();
            let mut dialler = Dialler::new(vec![refused, address], Arc::default());
            dialler.beat = || {
                BEATS.fetch_add(1, SeqCst);
                Duration::from_millis(100)
            };
            let dialling = tokio::spawn(async move { dialler.connect().await.1 });
            sleep(Duration::from_millis(after)).await;
            let listener = late.listen(16).unwrap();
            let before = BEATS.load(SeqCst);
            let connected = timeout(Duration::from_secs(30), dialling).await.unwrap().unwrap();
            assert_eq!(connected, address);
            // Counted in beats, because a beat may be long on a busy machine. Ten beats are the time of one attempt.
            let beats = BEATS.load(SeqCst) - before;
            assert!(beats < 10, "{beats} beats");
            drop(listener);
        }
    }

    #[tokio::test]
    async fn a_new_address_is_tried_without_waiting_for_an_interval() {
        let (later, address) = held();
        let notify = Arc::new(Notify::new());
        let mut dialler = Dialler::new(vec![address], notify.clone());
        dialler.beat = || Duration::from_secs(3600);
        let dialling = tokio::spawn(async move { dialler.connect().await.1 });
        // Whether the first attempt was refused by then does not matter: an early notification is not lost.
        tokio::task::yield_now().await;
        let _listener = later.listen(16).unwrap();
        notify.notify_one();
        assert_eq!(timeout(Duration::from_secs(30), dialling).await.unwrap().unwrap(), address);
    }

    #[tokio::test]
    async fn an_address_that_drops_all_packets_does_not_delay_the_others() {
        // A full backlog: the kernel drops further SYNs, as a network without a route does.
        let (full, black_hole) = held();
        let _listener = full.listen(1).unwrap();
        let mut fill = Vec::new();
        for _ in 0..4 {
            fill.push(tokio::spawn(TcpStream::connect(black_hole)));
        }
        sleep(Duration::from_millis(50)).await;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let good = listener.local_addr().unwrap();
        // A dialler that waits for the other address does so every time; a busy machine is slow only now and then.
        let mut took: Vec<Duration> = Vec::new();
        while took.len() < 5 && took.iter().all(|it| *it >= ATTEMPT) {
            let since = Instant::now();
            let mut dialler = Dialler::new(vec![black_hole, good], Arc::default());
            assert_eq!(dialler.connect().await.1, good);
            took.push(since.elapsed());
            assert_eq!(dialler.addresses, [good, black_hole], "the last reached address comes first");
        }
        assert!(took.iter().any(|it| *it < ATTEMPT), "{took:?}");
    }

    #[tokio::test]
    async fn an_address_of_a_foreign_server_moves_to_the_end() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let wrong = listener.local_addr().unwrap();
        let (_held, other) = held();
        tokio::spawn(async move {
            loop {
                drop(listener.accept().await); // closes at once
            }
        });
        let mut dialler = Dialler::new(vec![wrong, other], Arc::default());
        let config = tls::client_config(&[[1; 32]], None).unwrap();
        let error = dialler.secure(config, || ()).await.unwrap_err().to_string();
        assert!(error.starts_with(&format!("tls handshake with {wrong}")), "{error}");
        assert_eq!(dialler.addresses, [other, wrong]);
    }

    #[test]
    fn learnt_addresses_come_last_once_and_are_bounded() {
        let address = |port| SocketAddr::from(([10, 0, 0, 1], port));
        let mut dialler = Dialler::new(vec![address(1), address(2)], Arc::default());
        dialler.learn(&[address(3), address(1)]);
        dialler.learn(&[address(3)]);
        assert_eq!(dialler.addresses, [address(1), address(2), address(3)]);
        dialler.learn(&(100..200).map(address).collect::<Vec<_>>());
        dialler.learn(&(200..300).map(address).collect::<Vec<_>>());
        assert_eq!(dialler.addresses.len(), MOST);
        assert_eq!(dialler.addresses[0], address(1), "the last connected address stays in the list");
    }

    #[test]
    fn the_node_is_not_dialled_from_a_link_local_address_alone() {
        for (source, target, early) in [
            ("fe80::1", "fd97::1", true),
            ("fe80::1", "fe80::2", false),
            ("fd97::2", "fd97::1", false),
            ("2001:db8::2", "fd97::1", false),
            ("169.254.7.7", "10.0.0.1", true),
            ("10.0.0.2", "10.0.0.1", false),
            ("127.0.0.1", "127.0.0.1", false),
        ] {
            assert_eq!(is_too_early(source.parse().unwrap(), target.parse().unwrap()), early, "{source}");
        }
        assert_eq!(super::source("127.0.0.1:1".parse().unwrap()).unwrap().to_string(), "127.0.0.1");
    }

    #[test]
    fn an_interval_is_between_100_and_250_ms() {
        for _ in 0..1000 {
            assert!((100..=250).contains(&beat().as_millis()));
        }
    }
}
