//! Dials home: short attempts at all of the node's addresses, again and again every 100–250 ms, until one connects.
//!
//! While a cloud brings a VM's interface up, SYNs are dropped without an answer, and a connect that waits for its
//! retransmissions loses seconds. So a new attempt begins at every beat and the old ones may still win; the time lost
//! after the network is there is a fraction of one beat.

use std::{
    future::pending,
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use peerpod_link::{endpoint, tls};
use peerpod_podnet::uplink::reaches_far;
use tokio::{
    net::TcpStream,
    sync::Notify,
    task::JoinSet,
    time::{sleep, timeout},
};
use tokio_rustls::{TlsConnector, client::TlsStream};

/// An attempt is given up after this.
const ATTEMPT: Duration = Duration::from_secs(1);
/// Between the attempts of one beat, so that the first address usually wins alone.
const STAGGER: Duration = Duration::from_millis(10);
/// Addresses tried at each beat; of longer lists the next ones at the next beat.
const AT_ONCE: usize = 8;
/// Addresses that are remembered. What falls out is what did not connect for longest.
const MOST: usize = 32;
/// A TLS handshake may take so long, on busy machines, too.
const HANDSHAKE: Duration = Duration::from_secs(15);
/// The same where there is another address to try: another machine may have this one by now.
const HANDSHAKE_OF_MANY: Duration = Duration::from_secs(5);

/// The address that the kernel would speak from. Nothing is sent.
fn source(target: SocketAddr) -> io::Result<IpAddr> {
    let any: IpAddr =
        if target.is_ipv6() { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() };
    let socket = std::net::UdpSocket::bind((any, 0))?;
    socket.connect(target)?;
    Ok(socket.local_addr()?.ip())
}

/// Whether the VM has no address yet that is good for more than its wire, although home is beyond that or has one: the
/// node would take what it hears from for the VM's own, and no tunnel can be made between the two.
fn is_too_early(source: IpAddr, target: IpAddr) -> bool {
    !reaches_far(source) && reaches_far(target)
}

/// A beat: 100 to 250 ms. Jitter keeps a thousand guests of a returning node apart.
pub(crate) fn beat() -> Duration {
    let random = getrandom::u32().unwrap_or(0);
    Duration::from_millis(100 + u64::from(random % 151))
}

/// Where home is.
pub(crate) struct Dialler {
    addresses: Vec<SocketAddr>,
    /// Begins the next beat.
    woken: Option<Arc<Notify>>,
    /// How long the next one is.
    beat: fn() -> Duration,
}

impl Dialler {
    /// `addresses` must not be empty; birth data checks that.
    pub(crate) fn new(addresses: Vec<SocketAddr>) -> Dialler {
        Dialler { addresses, woken: None, beat }
    }

    /// With what tells that the network is another now, so that no beat is waited for.
    pub(crate) fn woken_by(mut self, notify: Arc<Notify>) -> Dialler {
        self.woken = Some(notify);
        self
    }

    /// Adds addresses that the node was heard of at since, behind those that are known.
    pub(crate) fn learn(&mut self, addresses: &[SocketAddr]) {
        let unknown = |address: &&SocketAddr| !self.addresses.contains(*address);
        let new: Vec<SocketAddr> = addresses.iter().filter(unknown).take(MOST / 2).copied().collect();
        self.addresses.truncate(MOST - new.len());
        self.addresses.extend(new);
    }

    /// Connects; never gives up. What connected comes first the next time.
    pub(crate) async fn connect(&mut self) -> (TcpStream, SocketAddr) {
        let mut attempts: JoinSet<io::Result<(TcpStream, SocketAddr)>> = JoinSet::new();
        loop {
            for (n, address) in self.addresses.iter().copied().take(AT_ONCE).enumerate() {
                attempts.spawn(async move {
                    sleep(STAGGER * n as u32).await;
                    if is_too_early(source(address)?, address.ip()) {
                        return Err(io::ErrorKind::AddrNotAvailable.into());
                    }
                    let stream = timeout(ATTEMPT, TcpStream::connect(address)).await??;
                    endpoint::tune(&stream)?;
                    Ok((stream, address))
                });
            }
            if self.addresses.len() > AT_ONCE {
                self.addresses.rotate_left(AT_ONCE);
            }
            let (woken, length) = (self.woken.clone(), (self.beat)());
            let beat = async {
                let woken = async {
                    match &woken {
                        Some(notify) => notify.notified().await,
                        None => pending().await,
                    }
                };
                tokio::select! {
                    () = sleep(length) => {}
                    () = woken => {}
                }
            };
            tokio::pin!(beat);
            loop {
                tokio::select! {
                    biased;
                    Some(done) = attempts.join_next() => {
                        if let Ok(Ok((stream, address))) = done {
                            self.first(address);
                            return (stream, address);
                        }
                    }
                    () = &mut beat => break,
                }
            }
        }
    }

    /// Connects and shakes hands, once: after a failure the caller lets a beat pass. `connected` is told before the first
    /// byte is sent; whoever waits for it runs after.
    pub(crate) async fn secure(
        &mut self,
        config: Arc<rustls::ClientConfig>,
        connected: impl FnOnce(),
    ) -> Result<TlsStream<TcpStream>, Error> {
        let (tcp, address) = self.connect().await;
        connected();
        let connecting = TlsConnector::from(config).connect(tls::server_name(), tcp);
        let failed = |source| Error { address, source };
        let patience = if self.addresses.len() > 1 { HANDSHAKE_OF_MANY } else { HANDSHAKE };
        let result = match timeout(patience, connecting).await {
            Ok(result) => result,
            Err(late) => Err(late.into()),
        };
        result.map_err(|source| {
            // Another machine may have that address by now.
            self.last(address);
            failed(source)
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

/// Something answered, but not our node (or not yet).
#[derive(Debug, thiserror::Error)]
#[error("tls handshake with {address}: {source}")]
pub(crate) struct Error {
    address: SocketAddr,
    source: io::Error,
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicUsize, Ordering::SeqCst},
        time::Instant,
    };

    use tokio::net::{TcpListener, TcpSocket};

    use super::*;

    /// A port that nobody listens on, held so that nobody else gets it.
    fn held() -> (TcpSocket, SocketAddr) {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_reuseaddr(true).unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = socket.local_addr().unwrap();
        (socket, address)
    }

    #[tokio::test]
    async fn a_listener_that_appears_late_is_found_within_a_beat() {
        static BEATS: AtomicUsize = AtomicUsize::new(0);
        let (_refusing, refused) = held();
        for after in [0u64, 130, 700] {
            let (late, address) = held();
            let mut dialler = Dialler::new(vec![refused, address]);
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
            // Told in beats: how long one is on a busy machine is not the dialler's matter. So many are one attempt's time.
            let beats = BEATS.load(SeqCst) - before;
            assert!(beats < 10, "{beats} beats");
            drop(listener);
        }
    }

    #[tokio::test]
    async fn a_new_address_is_not_waited_for_by_a_beat() {
        let (later, address) = held();
        let notify = Arc::new(Notify::new());
        let mut dialler = Dialler::new(vec![address]).woken_by(notify.clone());
        dialler.beat = || Duration::from_secs(3600);
        let dialling = tokio::spawn(async move { dialler.connect().await.1 });
        // Whether the first attempt was refused by then does not matter: a word that comes early is not lost.
        tokio::task::yield_now().await;
        let _listener = later.listen(16).unwrap();
        notify.notify_one();
        assert_eq!(timeout(Duration::from_secs(30), dialling).await.unwrap().unwrap(), address);
    }

    #[tokio::test]
    async fn an_address_that_swallows_everything_does_not_slow_the_others_down() {
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
        // Whoever waits for the other one waits that long every time; a busy machine only takes a moment now and then.
        let mut took: Vec<Duration> = Vec::new();
        while took.len() < 5 && took.iter().all(|it| *it >= ATTEMPT) {
            let since = Instant::now();
            let mut dialler = Dialler::new(vec![black_hole, good]);
            assert_eq!(dialler.connect().await.1, good);
            took.push(since.elapsed());
            assert_eq!(dialler.addresses, [good, black_hole], "what worked comes first");
        }
        assert!(took.iter().any(|it| *it < ATTEMPT), "{took:?}");
    }

    #[tokio::test]
    async fn an_address_where_another_speaks_goes_to_the_end() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let wrong = listener.local_addr().unwrap();
        let (_held, other) = held();
        tokio::spawn(async move {
            loop {
                drop(listener.accept().await); // closes at once
            }
        });
        let mut dialler = Dialler::new(vec![wrong, other]);
        let config = tls::client_config(&[[1; 32]], None).unwrap();
        let error = dialler.secure(config, || ()).await.unwrap_err().to_string();
        assert!(error.starts_with(&format!("tls handshake with {wrong}")), "{error}");
        assert_eq!(dialler.addresses, [other, wrong]);
    }

    #[test]
    fn what_is_learnt_comes_last_once_and_never_grows_without_bound() {
        let address = |port| SocketAddr::from(([10, 0, 0, 1], port));
        let mut dialler = Dialler::new(vec![address(1), address(2)]);
        dialler.learn(&[address(3), address(1)]);
        dialler.learn(&[address(3)]);
        assert_eq!(dialler.addresses, [address(1), address(2), address(3)]);
        dialler.learn(&(100..200).map(address).collect::<Vec<_>>());
        dialler.learn(&(200..300).map(address).collect::<Vec<_>>());
        assert_eq!(dialler.addresses.len(), MOST);
        assert_eq!(dialler.addresses[0], address(1), "what connected last stays");
    }

    #[test]
    fn home_is_not_called_from_an_address_of_the_wire_alone() {
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
    fn a_beat_lies_between_100_and_250_ms() {
        for _ in 0..1000 {
            assert!((100..=250).contains(&beat().as_millis()));
        }
    }
}
