//! Passes many packets of one flow to the kernel as one. The kernel takes them through its stack together and
//! segments them in front of the VXLAN device; the device's GRO then merges the inner packets. One call replaces
//! about forty.

/// Length of the header in front of a packet on the device (`struct virtio_net_hdr`).
pub(crate) const PREFIX: usize = 10;

const IP: usize = 20;
const HEADERS: usize = IP + 8;
/// Limits of the kernel for one merged packet: bytes and number of packets.
const LARGEST: usize = 65_000;
const MOST: usize = 64;

/// `VIRTIO_NET_HDR_F_NEEDS_CSUM`, `VIRTIO_NET_HDR_GSO_UDP_L4`.
const NEEDS_CHECKSUM: u8 = 1;
const GSO_UDP: u8 = 5;
const CHECKSUM_OFFSET: u16 = 6;

/// Packets that go to the device in one write.
#[derive(Debug)]
pub(crate) struct Merge {
    /// The prefix, then the first packet, then the payloads of the others.
    bytes: Vec<u8>,
    /// Payload length of each packet but the last, in bytes.
    segment: usize,
    count: usize,
    /// Whether no packet may follow, as after a shorter one.
    closed: bool,
}

impl Merge {
    pub(crate) fn new() -> Merge {
        Merge { bytes: Vec::with_capacity(PREFIX + LARGEST), segment: 0, count: 0, closed: false }
    }

    /// Adds a packet that [`crate::Lane`] admitted; returns false if the present packets must be written first.
    pub(crate) fn push(&mut self, packet: &[u8]) -> bool {
        if self.count == 0 {
            self.bytes.clear();
            self.bytes.extend_from_slice(&[0; PREFIX]);
            self.bytes.extend_from_slice(packet);
            self.segment = packet.len().saturating_sub(HEADERS);
            self.count = 1;
            self.closed = self.segment == 0 || !is_whole(packet);
            return true;
        }
        let Some(payload) = packet.get(HEADERS..) else { return false };
        let fits = !self.closed
            && self.count < MOST
            && payload.len() <= self.segment
            && !payload.is_empty()
            && self.bytes.len() + payload.len() <= LARGEST
            && self.is_same_flow(packet);
        if fits {
            self.bytes.extend_from_slice(payload);
            self.count += 1;
            self.closed = payload.len() < self.segment;
        }
        fits
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Returns the bytes to write to the device; empty if there are none.
    pub(crate) fn finish(&mut self) -> &[u8] {
        if self.count > 1 {
            self.describe();
        }
        if self.count == 0 { &[] } else { &self.bytes }
    }

    /// Passes each packet with its own prefix to `write`, for a kernel that does not accept merged packets.
    pub(crate) fn each(&self, mut write: impl FnMut(&[u8])) {
        let Some((headers, payloads)) = self.bytes.split_at_checked(PREFIX + HEADERS) else {
            return write(&self.bytes);
        };
        let mut one = Vec::with_capacity(PREFIX + HEADERS + self.segment);
        for payload in payloads.chunks(self.segment.max(1)) {
            one.clear();
            one.extend_from_slice(&[0; PREFIX]);
            one.extend_from_slice(headers.get(PREFIX..).unwrap_or_default());
            one.extend_from_slice(payload);
            if let Some(packet) = one.get_mut(PREFIX..) {
                lengths(packet);
                // No checksum, as in VXLAN over IPv4.
                put(packet, IP + 6, 0);
            }
            write(&one);
        }
    }

    pub(crate) fn clear(&mut self) {
        self.count = 0;
    }

    fn is_same_flow(&self, packet: &[u8]) -> bool {
        let Some(first) = self.bytes.get(PREFIX..PREFIX + HEADERS) else { return false };
        // Excludes lengths, packet id and checksums.
        const SAME: [std::ops::Range<usize>; 4] = [0..2, 6..10, 12..20, 20..24];
        is_whole(packet) && SAME.into_iter().all(|range| first.get(range.clone()) == packet.get(range))
    }

    fn describe(&mut self) {
        let segment = u16::try_from(self.segment).unwrap_or(u16::MAX);
        let Some((prefix, packet)) = self.bytes.split_at_mut_checked(PREFIX) else { return };
        // Native byte order, as the kernel of this machine expects.
        prefix[0] = NEEDS_CHECKSUM;
        prefix[1] = GSO_UDP;
        for (at, value) in [(2, HEADERS as u16), (4, segment), (6, IP as u16), (8, CHECKSUM_OFFSET)] {
            if let Some(place) = prefix.get_mut(at..at + 2) {
                place.copy_from_slice(&value.to_ne_bytes());
            }
        }
        let udp = lengths(packet);
        // The kernel adds the rest to a sum of addresses, protocol and length.
        let mut sum = 17 + u32::from(udp);
        for pair in packet.get(12..20).unwrap_or_default().chunks_exact(2) {
            sum += u32::from(u16::from_be_bytes([pair[0], pair[1]]));
        }
        put(packet, IP + 6, folded(sum));
    }
}

/// Returns whether a packet is not a fragment.
fn is_whole(packet: &[u8]) -> bool {
    matches!(packet.get(6..8), Some([flags, 0]) if flags & 0x3f == 0)
}

/// Writes the lengths of IP and UDP and the checksum of IP; returns the length of UDP.
fn lengths(packet: &mut [u8]) -> u16 {
    let whole = u16::try_from(packet.len()).unwrap_or(u16::MAX);
    let udp = whole.saturating_sub(IP as u16);
    put(packet, 2, whole);
    put(packet, 10, 0);
    put(packet, IP + 4, udp);
    let header = packet.get(..IP).unwrap_or_default().chunks_exact(2);
    let sum = header.map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    put(packet, 10, !folded(sum));
    udp
}

fn put(packet: &mut [u8], at: usize, value: u16) {
    if let Some(place) = packet.get_mut(at..at + 2) {
        place.copy_from_slice(&value.to_be_bytes());
    }
}

fn folded(mut sum: u32) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::lane::NODE_INNER;
    use crate::lane::tests::vxlan;

    const VM: Ipv4Addr = Ipv4Addr::new(10, 0, 3, 4);

    fn packet(vni: u32, length: usize) -> Vec<u8> {
        vxlan(VM, NODE_INNER, 4789, vni, &vec![7; length])
    }

    #[test]
    fn packets_of_one_flow_and_size_go_together_and_a_shorter_one_is_the_last() {
        let mut merge = Merge::new();
        assert!(merge.push(&packet(7, 100)) && merge.push(&packet(7, 100)) && merge.push(&packet(7, 60)));
        assert!(!merge.push(&packet(7, 60)), "after a shorter one");
        assert_eq!(merge.count(), 3);
        let written = merge.finish().to_vec();
        assert_eq!(written.len(), PREFIX + HEADERS + 3 * 8 + 260);
        assert_eq!(written[..2], [1, 5]);
        assert_eq!(u16::from_ne_bytes([written[4], written[5]]), 108);
        // The header's checksum is right: the sum over the header is all ones.
        let header = written[PREFIX..PREFIX + IP].chunks_exact(2);
        let sum = header.map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
        assert_eq!(folded(sum), 0xffff);
        let mut single = Vec::new();
        merge.each(|one| single.push(one.to_vec()));
        let lengths: Vec<usize> = single.iter().map(|one| one.len() - PREFIX).collect();
        assert_eq!(lengths, [136, 136, 96]);
        assert_eq!(single[2][PREFIX + 2..PREFIX + 4], 96u16.to_be_bytes());
        merge.clear();
        assert_eq!(merge.finish(), &[] as &[u8]);
    }

    #[test]
    fn different_packets_are_not_merged() {
        let mut other_flow = packet(7, 100);
        other_flow[20] ^= 1;
        let mut fragment = packet(7, 100);
        fragment[6] = 0x20;
        for second in [packet(7, 101), other_flow, fragment.clone(), vec![0x45; 10]] {
            let mut merge = Merge::new();
            assert!(merge.push(&packet(7, 100)));
            assert!(!merge.push(&second));
            assert_eq!(merge.finish()[..PREFIX], [0; PREFIX]);
        }
        let mut merge = Merge::new();
        assert!(merge.push(&fragment) && !merge.push(&packet(7, 100)), "a fragment goes alone");
    }
}
