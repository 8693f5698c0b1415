//! Sends echo requests without the `ping` tool, and checks the source of each reply.

use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use socket2::{Domain, Protocol, Socket, Type};

use crate::Namespace;

/// Time between two requests.
const INTERVAL: Duration = Duration::from_millis(100);
const HEADER: usize = 8;
const SEQUENCE: u16 = 7;

/// Pings from a namespace with `size` bytes of payload until a reply comes, and returns the round-trip time of that
/// request.
pub fn ping(from: &Namespace, to: IpAddr, size: usize, patience: Duration) -> anyhow::Result<Duration> {
    let attempt = || format!("ping {to} with {size} bytes from {}", from.name());
    from.run(|| ping_here(to, size, patience)).with_context(attempt)?.with_context(attempt)
}

fn ping_here(to: IpAddr, size: usize, patience: Duration) -> anyhow::Result<Duration> {
    let (domain, protocol, request, reply) = match to {
        IpAddr::V4(_) => (Domain::IPV4, Protocol::ICMPV4, 8, 0),
        IpAddr::V6(_) => (Domain::IPV6, Protocol::ICMPV6, 128, 129),
    };
    // std has no raw sockets, but its calls work on them.
    let socket = UdpSocket::from(Socket::new(domain, Type::RAW, Some(protocol))?);
    socket.set_read_timeout(Some(INTERVAL))?;
    let identifier = std::process::id() as u16;
    let mut packet = vec![0xa5; HEADER + size];
    packet[..HEADER].copy_from_slice(&[request, 0, 0, 0, 0, 0, 0, 0]);
    packet[4..6].copy_from_slice(&identifier.to_be_bytes());
    packet[6..8].copy_from_slice(&SEQUENCE.to_be_bytes());
    if to.is_ipv4() {
        // For ICMPv6 the kernel computes the checksum.
        let sum = checksum(&packet);
        packet[2..4].copy_from_slice(&sum.to_be_bytes());
    }
    let began = Instant::now();
    while began.elapsed() < patience {
        let sent = Instant::now();
        match socket.send_to(&packet, SocketAddr::new(to, 0)) {
            Ok(_) => {}
            // No route or no neighbour yet: retry.
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable
                ) =>
            {
                std::thread::sleep(INTERVAL);
                continue;
            }
            Err(error) => return Err(error.into()),
        }
        while sent.elapsed() < INTERVAL {
            let Some((source, message)) = receive(&socket)? else { continue };
            let ours = message.len() == packet.len()
                && message[0] == reply
                && message[4..] == packet[4..]
                && source == to;
            if ours {
                return Ok(sent.elapsed());
            }
        }
    }
    bail!("no answer within {patience:?}")
}

/// Receives one ICMP message, without its IP header, and its source.
fn receive(socket: &UdpSocket) -> io::Result<Option<(IpAddr, Vec<u8>)>> {
    let mut buffer = [0; 65_536];
    match socket.recv_from(&mut buffer) {
        Ok((count, source)) => {
            let bytes = &buffer[..count];
            // A raw IPv4 socket returns the IP header, an IPv6 socket does not.
            let skip = match source.ip() {
                IpAddr::V4(_) => usize::from(bytes.first().copied().unwrap_or(0) & 0x0f) * 4,
                IpAddr::V6(_) => 0,
            };
            Ok(Some((source.ip(), bytes.get(skip..).unwrap_or_default().to_vec())))
        }
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => Ok(None),
        Err(error) => Err(error),
    }
}

fn checksum(packet: &[u8]) -> u16 {
    let mut sum: u32 = packet
        .chunks(2)
        .map(|pair| u32::from(pair[0]) << 8 | u32::from(pair.get(1).copied().unwrap_or(0)))
        .sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}
