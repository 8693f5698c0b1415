//! Measures the path MTU from the guest, within a bounded time.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use rustix::net::sockopt::{
    Ipv4PathMtuDiscovery, Ipv6PathMtuDiscovery, set_ip_mtu_discover, set_ipv6_mtu_discover,
};
use tokio::net::UdpSocket;
use tokio::time::{Instant, timeout_at};

use super::{Datagram, DatagramKind, HEADER, LARGEST, Search, Token, around};

const BUDGET: Duration = Duration::from_millis(450);
/// Time limit of the first answer, after which all questions are sent again.
const FIRST_WAIT: Duration = Duration::from_millis(60);
/// Added to three times the longest round trip seen, before a datagram counts as lost.
const SLACK: Duration = Duration::from_millis(8);
/// Attempts with a size before it counts as too large, because one lost packet does not prove a small path MTU.
const TRIES: usize = 3;

/// Result of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathMtu {
    /// The largest IP packet that passed both ways, in bytes.
    Passes(u32),
    /// No answer came: UDP is blocked, or no program answers at the other end.
    Silence,
    /// The other machine reports that no program listens there.
    Refused,
}

/// Measures the path to `relay` with packets of up to `top` bytes. Takes at most half a second. Fails without a route.
///
/// cancel safety: may be dropped at any time.
pub async fn ask(relay: SocketAddr, token: Token, top: u32) -> io::Result<PathMtu> {
    let relay = SocketAddr::new(relay.ip().to_canonical(), relay.port());
    let socket = socket(relay).await?;
    let mut asking = Asking {
        socket,
        v6: relay.is_ipv6(),
        token,
        round_trip: Duration::ZERO,
        end: Instant::now() + BUDGET,
        buffer: vec![0; LARGEST as usize],
    };
    let mut search = Search::new(top);
    loop {
        let sizes = search.next();
        if sizes.is_empty() || Instant::now() >= asking.end {
            return Ok(search.found().map_or(PathMtu::Silence, PathMtu::Passes));
        }
        match asking.round(&sizes).await {
            Ok(passed) => search.round(&passed),
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => return Ok(PathMtu::Refused),
            Err(e) => return Err(e),
        }
    }
}

async fn socket(relay: SocketAddr) -> io::Result<UdpSocket> {
    let any: IpAddr = match relay {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0)).await?;
    never_cut(&socket, relay.is_ipv6())?;
    socket.connect(relay).await?;
    Ok(socket)
}

/// Sets DF on every packet, regardless of the path MTU that the kernel assumes: that assumption is under test.
pub(super) fn never_cut(socket: &UdpSocket, v6: bool) -> io::Result<()> {
    if v6 {
        set_ipv6_mtu_discover(socket, Ipv6PathMtuDiscovery::PROBE)?;
    }
    // An IPv6 socket may carry IPv4, too. Where it cannot, the kernel refuses the option, which does no harm.
    match set_ip_mtu_discover(socket, Ipv4PathMtuDiscovery::PROBE) {
        Err(e) if !v6 => Err(e.into()),
        _ => Ok(()),
    }
}

struct Asking {
    socket: UdpSocket,
    v6: bool,
    token: Token,
    /// The longest round trip seen.
    round_trip: Duration,
    end: Instant,
    buffer: Vec<u8>,
}

struct Question {
    size: u32,
    nonce: [u8; 8],
    sent: Instant,
    answered: bool,
}

impl Asking {
    /// Sends each size until it is answered or was sent [`TRIES`] times; returns the answered sizes.
    async fn round(&mut self, sizes: &[u32]) -> io::Result<Vec<u32>> {
        let mut questions = Vec::with_capacity(sizes.len());
        for size in sizes {
            let mut nonce = [0; 8];
            getrandom::fill(&mut nonce).map_err(io::Error::other)?;
            questions.push(Question { size: *size, nonce, sent: Instant::now(), answered: false });
        }
        for _ in 0..TRIES {
            if questions.iter().all(|question| question.answered) || Instant::now() >= self.end {
                break;
            }
            for question in questions.iter_mut().filter(|question| !question.answered) {
                self.send(question).await?;
            }
            self.collect(&mut questions).await?;
        }
        Ok(questions.into_iter().filter(|question| question.answered).map(|question| question.size).collect())
    }

    async fn send(&self, question: &mut Question) -> io::Result<()> {
        let length = question.size.saturating_sub(around(self.v6)).max(HEADER as u32);
        let datagram = Datagram { kind: DatagramKind::Question, nonce: question.nonce, token: self.token };
        // At most `LARGEST`, so it fits.
        let bytes = datagram.write(u16::try_from(length).unwrap_or(u16::MAX));
        question.sent = Instant::now();
        match self.socket.send(&bytes).await {
            Err(e) if is_about_a_packet(&e) => Ok(()), // it did not pass
            other => other.map(drop),
        }
    }

    /// Reads answers until all are there or the time limit has passed.
    async fn collect(&mut self, questions: &mut [Question]) -> io::Result<()> {
        let began = Instant::now();
        while questions.iter().any(|question| !question.answered) {
            let wait = match self.round_trip {
                Duration::ZERO => FIRST_WAIT,
                longest => longest * 3 + SLACK,
            };
            let until = (began + wait).min(self.end);
            let received = match timeout_at(until, self.socket.recv(&mut self.buffer)).await {
                Err(_) => break,
                Ok(Err(e)) if is_about_a_packet(&e) => continue,
                Ok(received) => received?,
            };
            let answer = self.buffer.get(..received).and_then(Datagram::read);
            let Some(answer) = answer.filter(|a| a.kind == DatagramKind::Answer && a.token == self.token)
            else {
                continue;
            };
            let question = questions.iter_mut().find(|question| {
                let length = question.size.saturating_sub(around(self.v6)).max(HEADER as u32);
                question.nonce == answer.nonce && length as usize == received
            });
            if let Some(question) = question {
                question.answered = true;
                self.round_trip = self.round_trip.max(question.sent.elapsed());
            }
        }
        Ok(())
    }
}

/// Returns whether a router or the device reported the error about one packet, and not about the socket.
fn is_about_a_packet(error: &io::Error) -> bool {
    use nix::errno::Errno;
    matches!(
        error.raw_os_error().map(Errno::from_raw),
        Some(Errno::EMSGSIZE | Errno::EHOSTUNREACH | Errno::ENETUNREACH | Errno::ENOBUFS | Errno::EPERM)
    )
}
