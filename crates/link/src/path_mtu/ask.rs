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

/// Time limit of a measurement.
const BUDGET: Duration = Duration::from_secs(2);
/// Time limit of the first answer, after which all questions are sent again.
const FIRST_WAIT: Duration = Duration::from_millis(60);
/// Added to three times the shortest round trip, before a datagram counts as lost.
const SLACK: Duration = Duration::from_millis(8);
/// Attempts with a size before it counts as too large, because one lost packet does not prove a small path MTU.
const TRIES: usize = 3;
/// Most attempts in a row without an answer to the control, each with twice the wait of the one before.
const SLOW_TRIES: u32 = 6;
/// The same before the first answer of a measurement: 0.4 s.
const SILENT_TRIES: u32 = 2;

/// Result of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathMtu {
    /// The largest IP packet that passed both ways, in bytes.
    Passes(u32),
    /// No answer came, or none any more: UDP is blocked, no program answers at the other end, or it did not get to run.
    Silence,
    /// The other machine reports that no program listens there.
    Refused,
}

/// Measures the path to `relay` with packets of up to `top` bytes. Takes two seconds at most. Fails without a route.
///
/// cancel safety: may be dropped at any time.
pub async fn ask(relay: SocketAddr, token: Token, top: u32) -> io::Result<PathMtu> {
    let relay = SocketAddr::new(relay.ip().to_canonical(), relay.port());
    let socket = socket(relay).await?;
    let mut asking = Asking {
        socket,
        v6: relay.is_ipv6(),
        token,
        round_trip: None,
        end: Instant::now() + BUDGET,
        buffer: vec![0; LARGEST as usize],
    };
    let mut search = Search::new(top);
    loop {
        let sizes = search.next();
        if sizes.is_empty() || Instant::now() >= asking.end {
            return Ok(search.found().map_or(PathMtu::Silence, PathMtu::Passes));
        }
        match asking.round(&sizes, search.found()).await {
            Ok(Some(passed)) => search.round(&passed),
            Ok(None) => return Ok(PathMtu::Silence),
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
    /// The shortest round trip seen: one with a pause of the relay in it is no measure.
    round_trip: Option<Duration>,
    end: Instant,
    buffer: Vec<u8>,
}

struct Question {
    size: u32,
    nonce: [u8; 8],
    sent: Instant,
    answered: bool,
}

impl Question {
    fn new(size: u32) -> io::Result<Question> {
        let mut nonce = [0; 8];
        getrandom::fill(&mut nonce).map_err(io::Error::other)?;
        Ok(Question { size, nonce, sent: Instant::now(), answered: false })
    }
}

impl Asking {
    /// Sends each size until it is answered, or [`TRIES`] attempts had no answer to it. Returns the answered sizes;
    /// `None`: the other end fell silent, so that the missing answers prove nothing.
    ///
    /// An attempt ends with the control, a datagram of a size that passes: `found`, or the largest that was answered.
    /// Without an answer to it the attempt does not count, and the next one sends the control alone.
    async fn round(&mut self, sizes: &[u32], found: Option<u32>) -> io::Result<Option<Vec<u32>>> {
        let mut questions = sizes.iter().copied().map(Question::new).collect::<io::Result<Vec<_>>>()?;
        let (mut tries, mut slow) = (0, 0);
        while tries < TRIES && questions.iter().any(|question| !question.answered) {
            if slow > 0 && Instant::now() >= self.end {
                return Ok(None);
            }
            if Instant::now() >= self.end {
                break;
            }
            let passed = |questions: &[Question]| {
                questions.iter().filter(|question| question.answered).map(|question| question.size).max()
            };
            let control = passed(&questions).max(found);
            // A guest whose UDP is blocked waits for nothing longer: it also has to follow changes of its network.
            let most = if control.is_some() { SLOW_TRIES } else { SILENT_TRIES };
            if slow > most {
                return Ok(None);
            }
            if slow == 0 || control.is_none() {
                for question in questions.iter_mut().filter(|question| !question.answered) {
                    self.send(question).await?;
                }
            }
            if let Some(size) = control {
                let mut control = Question::new(size)?;
                self.send(&mut control).await?;
                questions.push(control);
            }
            self.collect(&mut questions, control.is_some(), 1 << slow).await?;
            let answered = match control {
                Some(_) => questions.pop().is_some_and(|control| control.answered),
                None => passed(&questions).is_some(),
            };
            (tries, slow) = if answered { (tries + 1, 0) } else { (tries, slow + 1) };
        }
        Ok(Some(questions.into_iter().filter(|question| question.answered).map(|one| one.size).collect()))
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

    /// Reads answers until all are there or the time limit, `times` the usual one, has passed. After an answer to the
    /// control, the last question, the usual limit holds.
    async fn collect(&mut self, questions: &mut [Question], has_control: bool, times: u32) -> io::Result<()> {
        let (mut began, mut times) = (Instant::now(), times);
        while questions.iter().any(|question| !question.answered) {
            if has_control && times > 1 && questions.last().is_some_and(|control| control.answered) {
                (began, times) = (Instant::now(), 1);
            }
            let wait = self.round_trip.map_or(FIRST_WAIT, |shortest| shortest * 3 + SLACK);
            let until = (began + wait * times).min(self.end);
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
                let took = question.sent.elapsed();
                self.round_trip = Some(self.round_trip.map_or(took, |shortest| shortest.min(took)));
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

#[cfg(test)]
mod tests {
    use std::net::UdpSocket as Socket;
    use std::thread;

    use super::*;

    const TOKEN: Token = Token([3; 16]);
    const PATH: u32 = 8896;

    /// Answers what passes a path of [`PATH`] bytes. Does nothing for the given time before the given round.
    fn answer_with_a_pause(socket: &Socket, round: usize, pause: Duration) {
        let mut buffer = vec![0; LARGEST as usize];
        let first = Search::new(9001).next();
        let mut is_paused = false;
        while let Ok((length, from)) = socket.recv_from(&mut buffer) {
            let size = length as u32 + around(false);
            if !is_paused && (round == 1 || !first.contains(&size)) {
                is_paused = true;
                thread::sleep(pause);
            }
            let question = Datagram::read(&buffer[..length]).unwrap();
            let answer = Datagram { kind: DatagramKind::Answer, ..question }.write(length as u16);
            if size <= PATH {
                socket.send_to(&answer, from).unwrap();
            }
        }
    }

    async fn asked(round: usize, pause: Duration) -> PathMtu {
        let relay = Socket::bind("127.0.0.1:0").unwrap();
        let address = relay.local_addr().unwrap();
        thread::spawn(move || answer_with_a_pause(&relay, round, pause));
        ask(address, TOKEN, 9001).await.unwrap()
    }

    #[tokio::test]
    async fn a_relay_that_pauses_does_not_narrow_the_path() {
        // Longer than three waits for an answer, as a busy machine makes it.
        for (round, pause) in [(1, 150), (2, 100), (2, 300)] {
            let found = asked(round, Duration::from_millis(pause)).await;
            assert_eq!(found, PathMtu::Passes(PATH), "{pause} ms before round {round}");
        }
    }

    #[tokio::test]
    async fn a_relay_that_falls_silent_proves_nothing() {
        assert_eq!(asked(2, Duration::from_secs(60)).await, PathMtu::Silence);
    }
}
