//! Moves datagrams through the UDP socket in batches, many of one size as one for the kernel (GSO, GRO).

use std::io::{self, IoSliceMut};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use nix::sys::socket::{setsockopt, sockopt};
use quinn_udp::{RecvMeta, Transmit, UdpSockRef, UdpSocketState};
use rustix::net::sockopt::{
    Ipv4PathMtuDiscovery, Ipv6PathMtuDiscovery, set_ip_mtu_discover, set_ipv6_mtu_discover,
};
use socket2::{Domain, Protocol, Socket, Type};

use crate::engine::Path;

/// Kernel buffer of each direction in bytes: some ten milliseconds of a fast network.
const KERNEL_BUFFER: usize = 4 << 20;
/// Largest UDP payload in bytes, and the most that one send holds.
pub(crate) const LARGEST: usize = 65_507;
/// Number of buffers of one read.
const BATCH: usize = 4;

/// Opens the socket in the network namespace of the calling thread: both families on one port, or IPv4 alone if the
/// kernel has no IPv6. Port 0 lets the kernel choose. A port in use is the error `AddrInUse`.
pub fn bind(port: u16) -> io::Result<UdpSocket> {
    let open = |domain, address: SocketAddr| {
        let socket = Socket::new(domain, Type::DGRAM, Some(Protocol::UDP))?;
        if address.is_ipv6() {
            socket.set_only_v6(false)?;
        }
        // A privileged process may exceed the administrator's limit; otherwise the limit counts.
        if setsockopt(&socket, sockopt::RcvBufForce, &KERNEL_BUFFER).is_err() {
            socket.set_recv_buffer_size(KERNEL_BUFFER)?;
        }
        if setsockopt(&socket, sockopt::SndBufForce, &KERNEL_BUFFER).is_err() {
            socket.set_send_buffer_size(KERNEL_BUFFER)?;
        }
        socket.bind(&address.into())?;
        Ok::<UdpSocket, io::Error>(socket.into())
    };
    match open(Domain::IPV6, (Ipv6Addr::UNSPECIFIED, port).into()) {
        Err(e) if matches!(e.raw_os_error(), Some(nix::libc::EAFNOSUPPORT | nix::libc::EADDRNOTAVAIL)) => {
            open(Domain::IPV4, (Ipv4Addr::UNSPECIFIED, port).into())
        }
        opened => opened,
    }
}

pub(crate) struct Udp {
    socket: UdpSocket,
    state: UdpSocketState,
}

impl Udp {
    pub(crate) fn new(socket: UdpSocket) -> io::Result<Udp> {
        let state = UdpSocketState::new(UdpSockRef::from(&socket))?;
        // Routers (and this kernel) may fragment the datagrams: a path that is unexpectedly narrow is then slow instead
        // of silent.
        set_ip_mtu_discover(&socket, Ipv4PathMtuDiscovery::DONT)?;
        if socket.local_addr()?.is_ipv6() {
            set_ipv6_mtu_discover(&socket, Ipv6PathMtuDiscovery::DONT)?;
            setsockopt(&socket, sockopt::Ipv6DontFrag, &false)?;
        }
        Ok(Udp { socket, state })
    }

    pub(crate) fn socket(&self) -> &UdpSocket {
        &self.socket
    }

    /// Returns the most datagrams of one size that one call may send.
    pub(crate) fn segments(&self) -> usize {
        self.state.max_gso_segments().max(1)
    }

    /// Sends `contents`, which are datagrams of `segment` bytes each; the last may be shorter.
    pub(crate) fn send(&self, path: &Path, contents: &[u8], segment: usize) -> io::Result<()> {
        let transmit = Transmit {
            destination: path.peer,
            ecn: None,
            contents,
            segment_size: (contents.len() > segment).then_some(segment),
            src_ip: path.local,
        };
        self.state.try_send(UdpSockRef::from(&self.socket), &transmit)
    }

    /// Reads the datagrams that have arrived, at most a few buffers full, and passes each one to `each`.
    pub(crate) fn receive(
        &self,
        buffers: &mut Buffers,
        mut each: impl FnMut(&Path, &[u8]),
    ) -> io::Result<()> {
        let Buffers { bytes, meta } = buffers;
        let mut slices: Vec<IoSliceMut<'_>> =
            bytes.chunks_exact_mut(Buffers::ONE).map(IoSliceMut::new).collect();
        let count = self.state.recv(UdpSockRef::from(&self.socket), &mut slices, meta)?;
        for (meta, bytes) in meta.iter().zip(&slices).take(count) {
            let peer = SocketAddr::new(meta.addr.ip().to_canonical(), meta.addr.port());
            let path = Path { peer, local: meta.dst_ip.map(|ip| ip.to_canonical()) };
            let Some(received) = bytes.get(..meta.len) else { continue };
            for datagram in received.chunks(meta.stride.max(1)) {
                each(&path, datagram);
            }
        }
        Ok(())
    }
}

/// Buffers of one read.
pub(crate) struct Buffers {
    bytes: Vec<u8>,
    meta: [RecvMeta; BATCH],
}

impl Buffers {
    const ONE: usize = 1 << 16;

    pub(crate) fn new() -> Buffers {
        Buffers { bytes: vec![0; Buffers::ONE * BATCH], meta: [RecvMeta::default(); BATCH] }
    }
}
