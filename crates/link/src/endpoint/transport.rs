//! Wraps the connection under a session.

use std::fmt;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::{client, server};

use super::tls::Tls;

/// Most unsent bytes in the kernel; more would delay a health check on a slow network.
const NOT_SENT_LOW_WATER: u32 = 128 << 10;

/// Time after which unacknowledged data ends the connection.
const USER_TIMEOUT: Duration = Duration::from_secs(10);

/// Sets the options of every TCP connection of a link: no Nagle delay, a time limit for unacknowledged data, a short
/// queue of unsent data in the kernel. Both ends call it before TLS.
pub fn tune(tcp: &TcpStream) -> io::Result<()> {
    let socket = SockRef::from(tcp);
    socket.set_tcp_nodelay(true)?;
    socket.set_tcp_user_timeout(Some(USER_TIMEOUT))?;
    socket.set_tcp_notsent_lowat(NOT_SENT_LOW_WATER)
}

trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// An ordered byte stream to the peer: a TLS connection after its handshake, or any other stream.
pub struct Transport {
    io: Kind,
    peer: SocketAddr,
}

enum Kind {
    Tls(Box<Tls>),
    Any(Box<dyn Io>),
}

impl fmt::Debug for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transport").field("peer", &self.peer).finish_non_exhaustive()
    }
}

impl Transport {
    /// Wraps any stream, for tests and benches. `peer` is only reported.
    pub fn new(io: impl AsyncRead + AsyncWrite + Send + Unpin + 'static, peer: SocketAddr) -> Transport {
        Transport { io: Kind::Any(Box::new(io)), peer }
    }

    /// Returns the address of the peer.
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// Returns whether a read may succeed; call it before taking a buffer for the read.
    pub(super) fn poll_readable(&self, cx: &mut Context<'_>) -> Poll<()> {
        // An error is reported by the read.
        match &self.io {
            Kind::Tls(tls) => tls.poll_readable(cx),
            Kind::Any(_) => Poll::Ready(()),
        }
    }

    /// Reads into an initialised buffer; 0 = the peer closed the connection.
    pub(super) fn poll_read(&mut self, cx: &mut Context<'_>, buffer: &mut [u8]) -> Poll<io::Result<usize>> {
        match &mut self.io {
            Kind::Tls(tls) => tls.poll_read(cx, buffer),
            Kind::Any(io) => poll_read(io, cx, buffer),
        }
    }

    pub(super) fn poll_write(
        &mut self,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut self.io {
            Kind::Tls(tls) => tls.poll_write(cx, slices),
            Kind::Any(io) => Pin::new(io).poll_write_vectored(cx, slices),
        }
    }

    /// Sends bytes that were taken and not sent yet.
    pub(super) fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.io {
            Kind::Tls(tls) => tls.poll_flush(cx),
            Kind::Any(io) => Pin::new(io).poll_flush(cx),
        }
    }
}

pub(super) fn poll_read(
    io: &mut (impl AsyncRead + Unpin),
    cx: &mut Context<'_>,
    buffer: &mut [u8],
) -> Poll<io::Result<usize>> {
    let mut buffer = ReadBuf::new(buffer);
    Pin::new(io).poll_read(cx, &mut buffer).map_ok(|()| buffer.filled().len())
}

fn peer_of(tcp: &TcpStream) -> SocketAddr {
    // A connection that is already reset has no peer address; the endpoint's first read fails then.
    tcp.peer_addr().unwrap_or_else(|_| SocketAddr::from(([0, 0, 0, 0], 0)))
}

impl From<server::TlsStream<TcpStream>> for Transport {
    fn from(stream: server::TlsStream<TcpStream>) -> Self {
        let (tcp, tls) = stream.into_inner();
        Transport { peer: peer_of(&tcp), io: Kind::Tls(Box::new(Tls::new(tcp, tls.into()))) }
    }
}

impl From<client::TlsStream<TcpStream>> for Transport {
    fn from(stream: client::TlsStream<TcpStream>) -> Self {
        let (tcp, tls) = stream.into_inner();
        Transport { peer: peer_of(&tcp), io: Kind::Tls(Box::new(Tls::new(tcp, tls.into()))) }
    }
}

impl From<TcpStream> for Transport {
    fn from(tcp: TcpStream) -> Self {
        let peer = peer_of(&tcp);
        Transport::new(tcp, peer)
    }
}
