//! The SYN of a client, as the kernel logged it: who it is from and for, the same packet again, and the reset that
//! refuses it. Pure; the packets come from the node's own side of a pod, and still nothing in them is believed that was
//! not checked.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use peerpod_link::endpoint::Target;

const TCP: u8 = 6;
const V4_HEADER: usize = 20;
const V6_HEADER: usize = 40;
const TCP_HEADER: usize = 20;
const SYN: u8 = 0x02;
const FIN_SYN_RST_ACK: u8 = 0x17;
const RST_ACK: u8 = 0x14;
/// Bytes of a netlink message's header and of netfilter's behind it; an attribute's header.
const NETLINK: usize = 16;
const NETFILTER: usize = 4;
const ATTRIBUTE: usize = 4;
/// `NFNL_SUBSYS_ULOG << 8 | NFULNL_MSG_PACKET`, and the attribute with the packet.
const LOGGED: u16 = 0x0400;
const PAYLOAD: u16 = 9;

/// A connection, as its client names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    pub(crate) client: SocketAddr,
    pub(crate) target: Target,
}

impl Key {
    /// Of an accepted socket.
    pub(crate) fn of(client: SocketAddr, local: SocketAddr) -> Key {
        // Flow label and scope are not part of a name.
        let client = SocketAddr::new(client.ip(), client.port());
        Key { client, target: Target { v6: local.is_ipv6(), port: local.port() } }
    }
}

/// A client's first packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Syn {
    pub(crate) key: Key,
    source: IpAddr,
    destination: IpAddr,
    /// The TCP header with its options, and nothing behind it: data in a SYN is sent again by its client.
    tcp: Vec<u8>,
}

impl Syn {
    /// Reads an IP packet, which may be cut off behind the TCP header.
    pub(crate) fn read(packet: &[u8]) -> Option<Syn> {
        let (source, destination, rest) = match packet.first()? >> 4 {
            4 => {
                let header: &[u8; V4_HEADER] = packet.first_chunk()?;
                let length = usize::from(header[0] & 15) * 4;
                let fragment = u16::from_be_bytes([header[6], header[7]]) & 0x3fff;
                if length < V4_HEADER || header[9] != TCP || fragment != 0 {
                    return None;
                }
                let [.., a, b, c, d, e, f, g, h] = *header;
                let (source, destination) = (Ipv4Addr::new(a, b, c, d), Ipv4Addr::new(e, f, g, h));
                (IpAddr::V4(source), IpAddr::V4(destination), packet.get(length..)?)
            }
            6 => {
                let header: &[u8; V6_HEADER] = packet.first_chunk()?;
                // With extension headers: nobody sends such a SYN to localhost.
                if header[6] != TCP {
                    return None;
                }
                let source: [u8; 16] = *header.get(8..)?.first_chunk()?;
                let destination: [u8; 16] = *header.get(24..)?.first_chunk()?;
                let rest = packet.get(V6_HEADER..)?;
                (IpAddr::V6(Ipv6Addr::from(source)), IpAddr::V6(Ipv6Addr::from(destination)), rest)
            }
            _ => return None,
        };
        let header: &[u8; TCP_HEADER] = rest.first_chunk()?;
        let length = usize::from(header[12] >> 4) * 4;
        let ports = (u16::from_be_bytes([header[0], header[1]]), u16::from_be_bytes([header[2], header[3]]));
        if length < TCP_HEADER || header[13] & FIN_SYN_RST_ACK != SYN || ports.0 == 0 || ports.1 == 0 {
            return None;
        }
        let client = SocketAddr::new(source, ports.0);
        let key = Key { client, target: Target { v6: source.is_ipv6(), port: ports.1 } };
        Some(Syn { key, source, destination, tcp: rest.get(..length)?.to_vec() })
    }

    /// Its sequence number: the same in every copy, and another one in the client's next connection.
    pub(super) fn sequence(&self) -> u32 {
        self.tcp.get(4..).and_then(|rest| rest.first_chunk().copied()).map_or(0, u32::from_be_bytes)
    }

    /// The same again, as its client sent it.
    pub(crate) fn again(&self) -> Vec<u8> {
        packet(self.source, self.destination, self.tcp.clone())
    }

    /// The kernel's answer of a port where nobody listens.
    pub(crate) fn reset(&self) -> Vec<u8> {
        let acknowledged = self.sequence().wrapping_add(1);
        let mut tcp = Vec::with_capacity(TCP_HEADER);
        tcp.extend_from_slice(&self.key.target.port.to_be_bytes());
        tcp.extend_from_slice(&self.key.client.port().to_be_bytes());
        tcp.extend_from_slice(&[0; 4]);
        tcp.extend_from_slice(&acknowledged.to_be_bytes());
        tcp.extend_from_slice(&[0x50, RST_ACK, 0, 0, 0, 0, 0, 0]);
        packet(self.destination, self.source, tcp)
    }
}

/// An IP packet with this TCP segment. The kernel fills in IPv4's own checksum.
fn packet(source: IpAddr, destination: IpAddr, mut tcp: Vec<u8>) -> Vec<u8> {
    let length = tcp.len() as u16; // a header of at most 60 bytes
    let mut pseudo = Vec::with_capacity(V6_HEADER + tcp.len());
    let mut whole = Vec::with_capacity(V6_HEADER + tcp.len());
    match (source, destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            pseudo.extend_from_slice(&source.octets());
            pseudo.extend_from_slice(&destination.octets());
            whole.extend_from_slice(&[0x45, 0]);
            whole.extend_from_slice(&(V4_HEADER as u16 + length).to_be_bytes());
            // Not to be fragmented, 64 hops.
            whole.extend_from_slice(&[0, 0, 0x40, 0, 64, TCP, 0, 0]);
            whole.extend_from_slice(&pseudo);
        }
        (source, destination) => {
            for address in [source, destination] {
                let IpAddr::V6(address) = address else { continue };
                pseudo.extend_from_slice(&address.octets());
            }
            whole.extend_from_slice(&[0x60, 0, 0, 0]);
            whole.extend_from_slice(&length.to_be_bytes());
            whole.extend_from_slice(&[TCP, 64]);
            whole.extend_from_slice(&pseudo);
        }
    }
    pseudo.extend_from_slice(&[0, TCP]);
    pseudo.extend_from_slice(&length.to_be_bytes());
    if let Some(field) = tcp.get_mut(16..18) {
        field.copy_from_slice(&[0, 0]);
    }
    let sum = checksum(&[&pseudo, &tcp]);
    if let Some(field) = tcp.get_mut(16..18) {
        field.copy_from_slice(&sum.to_be_bytes());
    }
    whole.extend_from_slice(&tcp);
    whole
}

/// RFC 1071's, over parts of even length.
fn checksum(parts: &[&[u8]]) -> u16 {
    let pairs = parts.iter().flat_map(|part| part.chunks(2));
    let mut sum: u32 =
        pairs.map(|pair| u32::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]))).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16) // folded to 16 bits
}

/// The SYNs in one datagram of the kernel's log.
pub(crate) fn logged(mut datagram: &[u8]) -> Vec<Syn> {
    let mut found = Vec::new();
    while let Some((message, kind)) = take(&mut datagram, NETLINK, |head| {
        (
            u32::from_ne_bytes([head[0], head[1], head[2], head[3]]) as usize,
            u16::from_ne_bytes([head[4], head[5]]),
        )
    }) {
        if kind != LOGGED {
            continue;
        }
        let mut attributes = message.get(NETFILTER..).unwrap_or_default();
        while let Some((value, kind)) = take(&mut attributes, ATTRIBUTE, |head| {
            (usize::from(u16::from_ne_bytes([head[0], head[1]])), u16::from_ne_bytes([head[2], head[3]]))
        }) {
            if kind & 0x3fff == PAYLOAD {
                found.extend(Syn::read(value));
            }
        }
    }
    found
}

/// Takes one of netlink's length-type-value triples off the front: what is behind its header, and its type.
fn take<'a>(
    from: &mut &'a [u8],
    header: usize,
    read: impl FnOnce(&[u8]) -> (usize, u16),
) -> Option<(&'a [u8], u16)> {
    let (length, kind) = read(from.get(..header)?);
    let value = from.get(header..length)?;
    *from = from.get(length.next_multiple_of(4)..).unwrap_or_default();
    Some((value, kind))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn syn(v6: bool) -> Vec<u8> {
        let mut tcp =
            vec![0xc0, 0x01, 0x1f, 0x90, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0, 0x60, 0xc2, 1, 0, 9, 9, 0, 0];
        tcp.extend_from_slice(&[2, 4, 5, 0xb4]);
        let address =
            |v6: bool| -> IpAddr { if v6 { Ipv6Addr::LOCALHOST.into() } else { Ipv4Addr::LOCALHOST.into() } };
        packet(address(v6), address(v6), tcp)
    }

    #[test]
    fn a_syn_is_read_sent_again_as_it_was_and_refused_by_its_number() {
        for v6 in [false, true] {
            let original = syn(v6);
            let read = Syn::read(&original).unwrap();
            assert_eq!(read.key.target, Target { v6, port: 8080 });
            assert_eq!(read.key.client.port(), 0xc001);
            assert_eq!(read.again(), original);
            // Data behind the header is not sent again.
            let mut longer = original.clone();
            longer.extend_from_slice(b"fast open");
            assert_eq!(Syn::read(&longer).unwrap().again(), original);
            let reset = read.reset();
            let tcp = &reset[reset.len() - TCP_HEADER..];
            assert_eq!(tcp[..4], [0x1f, 0x90, 0xc0, 0x01]);
            assert_eq!(tcp[8..12], [0, 0, 0, 0], "the number behind the SYN's, which was the last there is");
            assert_eq!(tcp[13], RST_ACK);
            // A right checksum sums up to nothing.
            let mut pseudo = reset[if v6 { 8 } else { 12 }..reset.len() - TCP_HEADER].to_vec();
            pseudo.extend_from_slice(&[0, TCP, 0, TCP_HEADER as u8]);
            assert_eq!(checksum(&[&pseudo, tcp]), 0);
        }
    }

    #[test]
    fn what_is_no_first_syn_is_not_read() {
        let good = syn(false);
        for (at, value) in
            [(0, 0x44), (0, 0x35), (6, 0x20), (9, 17), (20 + 12, 0x40), (20 + 13, 0x12), (20 + 13, 0x03)]
        {
            let mut bad = good.clone();
            bad[at] = value;
            assert_eq!(Syn::read(&bad), None, "byte {at} is {value:#x}");
        }
        for length in 0..good.len() {
            assert_eq!(Syn::read(&good[..length]), None);
        }
    }

    #[test]
    fn several_messages_of_one_datagram_are_found() {
        let mut datagram = Vec::new();
        for v6 in [false, true] {
            let packet = syn(v6);
            let attribute = ATTRIBUTE + packet.len();
            let length = NETLINK + NETFILTER + 8 + attribute.next_multiple_of(4);
            datagram.extend_from_slice(&(length as u32).to_ne_bytes());
            datagram.extend_from_slice(&LOGGED.to_ne_bytes());
            datagram.extend_from_slice(&[0; 10 + NETFILTER]);
            datagram.extend_from_slice(&[8, 0, 1, 0, 1, 2, 3, 4]);
            datagram.extend_from_slice(&(attribute as u16).to_ne_bytes());
            datagram.extend_from_slice(&PAYLOAD.to_ne_bytes());
            datagram.extend_from_slice(&packet);
            datagram.resize(datagram.len().next_multiple_of(4), 0);
        }
        assert_eq!(logged(&datagram).len(), 2);
        for length in 0..datagram.len() {
            let _fewer = logged(&datagram[..length]);
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_do_no_harm(bytes: Vec<u8>) {
            let _any = logged(&bytes);
            if let Some(syn) = Syn::read(&bytes) {
                prop_assert_eq!(Syn::read(&syn.again()).map(|again| again.key), Some(syn.key));
                let _reset = syn.reset();
            }
        }
    }
}
