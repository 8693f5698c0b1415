//! The connection under a session.

use std::{fmt, io, net::SocketAddr, time::Duration};

use socket2::SockRef;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
};
use tokio_rustls::{client, server};

/// Bytes that may wait unsent in the kernel; more would stand in front of a health check on a slow network.
const NOT_SENT_LOW_WATER: u32 = 128 << 10;

/// Sent data that nobody acknowledges for so long ends the connection.
const USER_TIMEOUT: Duration = Duration::from_secs(10);

/// Sets what every TCP connection of a link needs: no Nagle delay, a time limit for unacknowledged data, a short queue
/// of unsent data in the kernel. To be called on both ends before TLS.
pub fn tune(tcp: &TcpStream) -> io::Result<()> {
    let socket = SockRef::from(tcp);
    socket.set_tcp_nodelay(true)?;
    socket.set_tcp_user_timeout(Some(USER_TIMEOUT))?;
    socket.set_tcp_notsent_lowat(NOT_SENT_LOW_WATER)
}

trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

/// An ordered byte stream to the peer: a TLS connection after its handshake, or anything else that reads and writes.
pub struct Transport {
    io: Box<dyn Io>,
    peer: SocketAddr,
}

impl fmt::Debug for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transport").field("peer", &self.peer).finish_non_exhaustive()
    }
}

impl Transport {
    /// Any stream, for tests and benches. `peer` is only told on.
    pub fn new(io: impl AsyncRead + AsyncWrite + Send + Unpin + 'static, peer: SocketAddr) -> Transport {
        Transport { io: Box::new(io), peer }
    }

    /// The other end.
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }
}

fn peer_of(tcp: &TcpStream) -> SocketAddr {
    // A connection that is reset already has no peer; the endpoint will notice at its first read.
    tcp.peer_addr().unwrap_or_else(|_| SocketAddr::from(([0, 0, 0, 0], 0)))
}

impl From<server::TlsStream<TcpStream>> for Transport {
    fn from(stream: server::TlsStream<TcpStream>) -> Self {
        let peer = peer_of(stream.get_ref().0);
        Transport::new(stream, peer)
    }
}

impl From<client::TlsStream<TcpStream>> for Transport {
    fn from(stream: client::TlsStream<TcpStream>) -> Self {
        let peer = peer_of(stream.get_ref().0);
        Transport::new(stream, peer)
    }
}

impl From<TcpStream> for Transport {
    fn from(stream: TcpStream) -> Self {
        let peer = peer_of(&stream);
        Transport::new(stream, peer)
    }
}
