//! What may leave the tunnel: VXLAN between two inner addresses, of networks that belong to the peer. All peers of a
//! node share one TUN device, and the kernel finds a VXLAN device by the network's number alone; without this check a
//! hostile VM could speak in another pod's network.

use std::net::Ipv4Addr;

/// The node's inner address.
pub const NODE_INNER: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);

/// A VM's inner address: 10 and the three bytes of its first VXLAN network's number. `None` for a number whose
/// address is the node's own or has a meaning of its own.
pub fn inner_of(vni: u32) -> Option<Ipv4Addr> {
    match vni {
        2..=0xff_fffe => Some(Ipv4Addr::from(0x0a00_0000 | vni)),
        _ => None,
    }
}

const UDP: u8 = 17;
const IP_HEADER: usize = 20;
/// UDP and VXLAN header: what the first fragment must hold whole, and no later one may reach into.
const HEADERS: usize = 16;

/// One peer's way: from its inner address to ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lane {
    /// Our inner address.
    pub ours: Ipv4Addr,
    /// The peer's.
    pub theirs: Ipv4Addr,
    /// VXLAN's UDP port.
    pub port: u16,
    /// The VXLAN networks of this peer.
    pub vnis: Vec<u32>,
}

impl Lane {
    /// Whether the peer may send this packet to us.
    ///
    /// A datagram may come in fragments (the kernel makes them where the pod sends more than the tunnel's MTU). Its
    /// first fragment shows the network's number; later ones cannot overwrite it, because they begin behind it and
    /// the kernel drops what overlaps.
    pub fn admits(&self, packet: &[u8]) -> bool {
        let Some((ip, rest)) = packet.split_first_chunk::<IP_HEADER>() else { return false };
        let [version, _, l0, l1, _, _, f0, f1, _, protocol, _, _, s0, s1, s2, s3, d0, d1, d2, d3] = *ip;
        if version != 0x45 || protocol != UDP || usize::from(u16::from_be_bytes([l0, l1])) != packet.len() {
            return false;
        }
        let from = Ipv4Addr::new(s0, s1, s2, s3);
        let to = Ipv4Addr::new(d0, d1, d2, d3);
        if from != self.theirs || to != self.ours {
            return false;
        }
        let offset = usize::from(u16::from_be_bytes([f0, f1]) & 0x1fff) * 8;
        if offset != 0 {
            return offset >= HEADERS;
        }
        let Some(headers) = rest.first_chunk::<HEADERS>() else { return false };
        let [_, _, p0, p1, _, _, _, _, flags, _, _, _, v0, v1, v2, _] = *headers;
        let vni = u32::from_be_bytes([0, v0, v1, v2]);
        u16::from_be_bytes([p0, p1]) == self.port && flags & 0x08 != 0 && self.vnis.contains(&vni)
    }
}

/// The inner address a packet from the TUN device goes to.
pub(crate) fn destination(packet: &[u8]) -> Option<Ipv4Addr> {
    let ip = packet.first_chunk::<IP_HEADER>()?;
    let [version, .., d0, d1, d2, d3] = *ip;
    (version >> 4 == 4).then(|| Ipv4Addr::new(d0, d1, d2, d3))
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A VXLAN packet as the kernel would write it.
    pub(crate) fn vxlan(from: Ipv4Addr, to: Ipv4Addr, port: u16, vni: u32, payload: &[u8]) -> Vec<u8> {
        let length = u16::try_from(IP_HEADER + HEADERS + payload.len()).unwrap();
        let mut packet = vec![0x45, 0];
        packet.extend(length.to_be_bytes());
        packet.extend([0, 0, 0, 0, 64, UDP, 0, 0]);
        packet.extend(from.octets());
        packet.extend(to.octets());
        packet.extend(40_000u16.to_be_bytes());
        packet.extend(port.to_be_bytes());
        packet.extend((length - 20).to_be_bytes());
        packet.extend([0, 0, 0x08, 0, 0, 0]);
        packet.extend((vni << 8).to_be_bytes());
        packet.extend(payload);
        packet
    }

    const VM: Ipv4Addr = Ipv4Addr::new(10, 0, 3, 4);

    fn lane() -> Lane {
        Lane { ours: NODE_INNER, theirs: VM, port: 4789, vnis: vec![7, 0xff_fffe] }
    }

    #[test]
    fn a_peers_own_networks_pass_and_nothing_else_does() {
        let lane = lane();
        assert!(lane.admits(&vxlan(VM, NODE_INNER, 4789, 7, b"frame")));
        assert!(lane.admits(&vxlan(VM, NODE_INNER, 4789, 0xff_fffe, b"")));
        let other = Ipv4Addr::new(10, 0, 3, 5);
        assert!(!lane.admits(&vxlan(VM, NODE_INNER, 4789, 8, b"frame")), "another pod's network");
        assert!(!lane.admits(&vxlan(other, NODE_INNER, 4789, 7, b"frame")), "another VM's address");
        assert!(!lane.admits(&vxlan(VM, other, 4789, 7, b"frame")), "through us to another VM");
        assert!(!lane.admits(&vxlan(VM, NODE_INNER, 22, 7, b"frame")), "another port");
        for at in [0, 9] {
            let mut packet = vxlan(VM, NODE_INNER, 4789, 7, b"frame");
            packet[at] ^= 0x10; // IP options; another protocol
            assert!(!lane.admits(&packet));
        }
        let mut unmarked = vxlan(VM, NODE_INNER, 4789, 7, b"frame");
        unmarked[28] = 0;
        assert!(!lane.admits(&unmarked), "a number that does not count");
        let mut longer = vxlan(VM, NODE_INNER, 4789, 7, b"frame");
        longer.push(0);
        assert!(!lane.admits(&longer), "bytes beyond the packet");
    }

    #[test]
    fn fragments_pass_where_they_cannot_touch_the_networks_number() {
        let lane = lane();
        let fragment = |units: u16, length: usize| {
            let mut packet = vxlan(VM, NODE_INNER, 4789, 7, &[1; 200]);
            packet.truncate(length);
            let size = u16::try_from(length).unwrap();
            packet[2..4].copy_from_slice(&size.to_be_bytes());
            packet[6..8].copy_from_slice(&(0x2000 | units).to_be_bytes());
            packet
        };
        assert!(lane.admits(&fragment(0, 100)), "the first one, with its headers");
        assert!(!lane.admits(&fragment(0, 28)), "a first one without the network's number");
        assert!(!lane.admits(&fragment(1, 100)), "one that would write the number");
        assert!(lane.admits(&fragment(2, 100)));
    }

    #[test]
    fn an_inner_address_is_never_the_nodes_nor_special() {
        assert_eq!(inner_of(0x01_02_03), Some(Ipv4Addr::new(10, 1, 2, 3)));
        for vni in [0, 1, 0xff_ffff, 0x0100_0000] {
            assert_eq!(inner_of(vni), None);
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_check_panic(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            lane().admits(&bytes);
            destination(&bytes);
        }
    }
}
