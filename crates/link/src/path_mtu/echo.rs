//! Answers the questions of guests with a link that is up, in the relay, with datagrams of the same length.

use std::collections::HashMap;
use std::io::{self, IoSlice, IoSliceMut};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use nix::errno::Errno;
use nix::libc::{in_pktinfo, in6_pktinfo};
use nix::sys::socket::sockopt::{Ipv4PacketInfo, Ipv6RecvPacketInfo};
use nix::sys::socket::{
    ControlMessage, ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg, sendmsg, setsockopt,
};
use parking_lot::Mutex;
use peerpod_common::limit::RateLimit;
use tokio::io::Interest;
use tokio::net::UdpSocket;

use super::ask::never_cut;
use super::{Datagram, DatagramKind, LARGEST, Token};

/// Answers that a guest may get at once; a search has some sixty questions, and a hundred more at the worst.
const BURST: f64 = 160.0;
/// Further answers per second after that.
const PER_SECOND: f64 = 16.0;

/// Tokens of the guests that get answers.
#[derive(Clone, Debug, Default)]
pub struct Known(Arc<Mutex<HashMap<Token, Allowance>>>);

#[derive(Debug)]
struct Allowance {
    rate: RateLimit,
    /// Number of the pass. The same token may be admitted twice; the later pass counts.
    pass: u64,
}

/// Keeps a token admitted for as long as the pass lives.
#[derive(Debug)]
pub struct Pass {
    known: Known,
    token: Token,
    number: u64,
}

impl Known {
    /// Answers questions with this token until the pass is dropped.
    pub fn admit(&self, token: Token) -> Pass {
        let mut known = self.0.lock();
        let number = known.get(&token).map_or(0, |before| before.pass + 1);
        let rate = RateLimit::new(BURST, PER_SECOND, Instant::now());
        known.insert(token, Allowance { rate, pass: number });
        Pass { known: self.clone(), token, number }
    }

    /// Returns the answer to a datagram, of the same length; `None` for a datagram that gets none.
    fn answer(&self, question: &[u8], now: Instant) -> Option<Vec<u8>> {
        let datagram = Datagram::read(question).filter(|d| d.kind == DatagramKind::Question)?;
        let length = u16::try_from(question.len()).ok()?;
        let allowed = self.0.lock().get_mut(&datagram.token)?.rate.take(now);
        allowed.then(|| Datagram { kind: DatagramKind::Answer, ..datagram }.write(length))
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        let mut known = self.known.0.lock();
        if known.get(&self.token).is_some_and(|allowance| allowance.pass == self.number) {
            known.remove(&self.token);
        }
    }
}

/// The bound socket.
#[derive(Debug)]
pub struct Echo {
    socket: UdpSocket,
    known: Known,
}

impl Echo {
    /// Binds to the address of the link's listener.
    pub async fn bind(address: SocketAddr, known: Known) -> io::Result<Echo> {
        let socket = UdpSocket::bind(address).await?;
        never_cut(&socket, address.is_ipv6())?;
        // An answer must come from the local address to which the question was sent.
        if address.is_ipv6() {
            setsockopt(&socket, Ipv6RecvPacketInfo, &true)?;
        } else {
            setsockopt(&socket, Ipv4PacketInfo, &true)?;
        }
        Ok(Echo { socket, known })
    }

    /// Continues on a socket that another process bound with [`Echo::bind`].
    pub fn go_on(socket: OwnedFd, known: Known) -> io::Result<Echo> {
        let socket = std::net::UdpSocket::from(socket);
        socket.set_nonblocking(true)?;
        Ok(Echo { socket: UdpSocket::from_std(socket)?, known })
    }

    /// Returns a copy of the socket, for [`Echo::go_on`].
    pub fn copy(&self) -> io::Result<OwnedFd> {
        self.socket.as_fd().try_clone_to_owned()
    }

    /// Answers until it is dropped.
    pub async fn run(self) {
        let mut buffer = vec![0; LARGEST as usize + 1];
        loop {
            let received = self.socket.async_io(Interest::READABLE, || receive(&self.socket, &mut buffer));
            let Ok((length, peer, own)) = received.await else {
                // A router's report about an answer; such an error does not repeat without a cause.
                tokio::task::yield_now().await;
                continue;
            };
            let question = buffer.get(..length).unwrap_or_default(); // longer than any question: empty
            let Some(answer) = self.known.answer(question, Instant::now()) else { continue };
            // An answer that cannot be sent counts as one that did not pass.
            if let Err(error) = send(&self.socket, &answer, &peer, own) {
                tracing::trace!(%error, bytes = answer.len(), "an answer to a path probe did not leave");
            }
        }
    }
}

#[derive(Clone, Copy)]
enum Own {
    V4(in_pktinfo),
    V6(in6_pktinfo),
}

fn receive(socket: &UdpSocket, buffer: &mut [u8]) -> io::Result<(usize, SockaddrStorage, Option<Own>)> {
    let mut space = nix::cmsg_space!(in6_pktinfo);
    let mut parts = [IoSliceMut::new(buffer)];
    let received = recvmsg::<SockaddrStorage>(
        socket.as_raw_fd(),
        &mut parts,
        Some(&mut space),
        MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_TRUNC,
    )?;
    let own = received.cmsgs()?.find_map(|message| match message {
        // `spec_dst` is the local address. No interface is set: the kernel chooses the way back.
        ControlMessageOwned::Ipv4PacketInfo(info) => Some(Own::V4(in_pktinfo {
            ipi_ifindex: 0,
            ipi_addr: info.ipi_addr,
            ipi_spec_dst: info.ipi_spec_dst,
        })),
        ControlMessageOwned::Ipv6PacketInfo(info) => Some(Own::V6(info)),
        _ => None,
    });
    let peer = received.address.ok_or(Errno::EPROTO)?;
    Ok((received.bytes, peer, own))
}

fn send(socket: &UdpSocket, bytes: &[u8], peer: &SockaddrStorage, own: Option<Own>) -> Result<(), Errno> {
    let parts = [IoSlice::new(bytes)];
    let message = own.as_ref().map(|own| match own {
        Own::V4(info) => ControlMessage::Ipv4PacketInfo(info),
        Own::V6(info) => ControlMessage::Ipv6PacketInfo(info),
    });
    sendmsg(socket.as_raw_fd(), &parts, message.as_slice(), MsgFlags::MSG_DONTWAIT, Some(peer)).map(drop)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::ask::{PathMtu, ask};
    use super::*;

    const TOKEN: Token = Token([3; 16]);

    #[test]
    fn only_whole_questions_with_a_known_token_are_answered_and_never_with_more() {
        let known = Known::default();
        let now = Instant::now();
        let question = Datagram { kind: DatagramKind::Question, nonce: [1; 8], token: TOKEN }.write(1400);
        assert_eq!(known.answer(&question, now), None, "an unknown token");
        let pass = known.admit(TOKEN);
        let answer = known.answer(&question, now).unwrap();
        assert_eq!(answer.len(), question.len());
        assert_eq!(Datagram::read(&answer).unwrap().kind, DatagramKind::Answer);
        assert_eq!(
            known.answer(&answer, now),
            None,
            "an answer is no question: two relays never echo each other"
        );
        assert_eq!(known.answer(&question[..1399], now), None);
        let again = known.admit(TOKEN);
        drop(pass);
        assert!(known.answer(&question, now).is_some(), "the later pass counts");
        drop(again);
        assert_eq!(known.answer(&question, now), None, "its link is down");
        assert!(known.0.lock().is_empty());
    }

    #[test]
    fn a_guest_that_asks_without_end_is_answered_at_its_rate() {
        let known = Known::default();
        let _pass = known.admit(TOKEN);
        let now = Instant::now();
        let question = Datagram { kind: DatagramKind::Question, nonce: [1; 8], token: TOKEN }.write(100);
        let answered = |at| (0..1000).filter(|_| known.answer(&question, at).is_some()).count();
        assert_eq!(answered(now), 160);
        assert_eq!(answered(now + Duration::from_secs(2)), 32);
    }

    #[tokio::test]
    async fn loopback_passes_probes_of_its_mtu_in_both_families() {
        for address in ["127.0.0.1:0", "[::1]:0", "[::]:0"] {
            let known = Known::default();
            let echo = Echo::bind(address.parse().unwrap(), known.clone()).await.unwrap();
            let port = echo.socket.local_addr().unwrap().port();
            let running = tokio::spawn(echo.run());
            // A second address of the same machine: the answer must come from it.
            let asked = match address {
                "[::1]:0" => SocketAddr::new("::1".parse().unwrap(), port),
                "[::]:0" => SocketAddr::new("127.0.0.2".parse().unwrap(), port),
                _ => SocketAddr::new("127.0.0.1".parse().unwrap(), port),
            };
            assert_eq!(ask(asked, TOKEN, 1500).await.unwrap(), PathMtu::Silence, "{address}: no token");
            let _pass = known.admit(TOKEN);
            assert_eq!(ask(asked, TOKEN, 1500).await.unwrap(), PathMtu::Passes(1500), "{address}");
            assert_eq!(ask(asked, TOKEN, 9001).await.unwrap(), PathMtu::Passes(9001), "{address}");
            running.abort();
            assert!(running.await.unwrap_err().is_cancelled());
            assert_eq!(ask(asked, TOKEN, 1500).await.unwrap(), PathMtu::Refused, "{address}: no listener");
        }
    }
}
