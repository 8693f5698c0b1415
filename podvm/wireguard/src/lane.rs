//! Checks the packets that leave the tunnel: they must be VXLAN between two inner addresses, of networks that belong
//! to the peer. All peers of a node share one TUN device, and the kernel finds a VXLAN device by the VNI alone.
//! Without this check a hostile VM could send into another pod's network.

use std::net::Ipv4Addr;

use crate::stats::Reason;

/// Inner address of the node.
pub const NODE_INNER: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);

/// Returns a VM's inner address: 10 and the three bytes of its first VNI. Returns `None` for a VNI that would give
/// the node's address or a special one.
pub fn inner_of(vni: u32) -> Option<Ipv4Addr> {
    (2..=0xff_fffe).contains(&vni).then(|| Ipv4Addr::from(0x0a00_0000 | vni))
}

const UDP: u8 = 17;
const IP_HEADER: usize = 20;
/// Length of the UDP and VXLAN headers: the first fragment must hold them whole, and no later one may overlap them.
const HEADERS: usize = 16;
/// Fields in bytes 6 and 7 of the IP header: more fragments follow; offset of this one, in units of eight bytes.
const MORE: u16 = 0x2000;
const OFFSET: u16 = 0x1fff;

/// Packets that one peer may send: from its inner address to the own one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lane {
    /// Own inner address.
    pub ours: Ipv4Addr,
    /// Inner address of the peer.
    pub theirs: Ipv4Addr,
    /// UDP port of VXLAN.
    pub port: u16,
    /// VNIs of this peer.
    pub vnis: Vec<u32>,
    /// Whether datagrams may come in fragments. Never at the node: all VMs share the memory in which its kernel
    /// reassembles fragments, and one VM could fill it with incomplete datagrams. No VM needs fragments, because a
    /// guest fits the MTU of its pod. True at the guest, which has one peer: the node fragments larger packets that
    /// others send to the pod.
    pub fragments: bool,
}

impl Lane {
    /// Checks whether the peer may send this packet.
    ///
    /// If fragments are accepted, the first one holds the VNI. Later ones cannot overwrite it, because they begin
    /// behind it and the kernel drops overlapping ones.
    pub fn admits(&self, packet: &[u8]) -> Result<(), Reason> {
        let Some((ip, rest)) = packet.split_first_chunk::<IP_HEADER>() else {
            return Err(Reason::NotAllowed);
        };
        let [version, _, l0, l1, _, _, f0, f1, _, protocol, _, _, s0, s1, s2, s3, d0, d1, d2, d3] = *ip;
        if version != 0x45 || protocol != UDP || usize::from(u16::from_be_bytes([l0, l1])) != packet.len() {
            return Err(Reason::NotAllowed);
        }
        let from = Ipv4Addr::new(s0, s1, s2, s3);
        let to = Ipv4Addr::new(d0, d1, d2, d3);
        if from != self.theirs || to != self.ours {
            return Err(Reason::NotAllowed);
        }
        let place = u16::from_be_bytes([f0, f1]);
        if place & (MORE | OFFSET) != 0 && !self.fragments {
            return Err(Reason::Fragment);
        }
        let offset = usize::from(place & OFFSET) * 8;
        let allowed = if offset == 0 { self.is_of_its_network(rest) } else { offset >= HEADERS };
        if allowed { Ok(()) } else { Err(Reason::NotAllowed) }
    }

    fn is_of_its_network(&self, datagram: &[u8]) -> bool {
        let Some(headers) = datagram.first_chunk::<HEADERS>() else { return false };
        let [_, _, p0, p1, _, _, _, _, flags, _, _, _, v0, v1, v2, _] = *headers;
        let vni = u32::from_be_bytes([0, v0, v1, v2]);
        u16::from_be_bytes([p0, p1]) == self.port && flags & 0x08 != 0 && self.vnis.contains(&vni)
    }
}

/// Returns the inner destination address of a packet from the TUN device.
pub(crate) fn destination(packet: &[u8]) -> Option<Ipv4Addr> {
    let ip = packet.first_chunk::<IP_HEADER>()?;
    let [version, .., d0, d1, d2, d3] = *ip;
    (version >> 4 == 4).then(|| Ipv4Addr::new(d0, d1, d2, d3))
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns a VXLAN packet as the kernel writes it.
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

    const REFUSED: Result<(), Reason> = Err(Reason::NotAllowed);

    fn lane() -> Lane {
        Lane { ours: NODE_INNER, theirs: VM, port: 4789, vnis: vec![7, 0xff_fffe], fragments: false }
    }

    #[test]
    fn a_peers_own_networks_pass_and_nothing_else_does() {
        let lane = lane();
        assert_eq!(lane.admits(&vxlan(VM, NODE_INNER, 4789, 7, b"frame")), Ok(()));
        assert_eq!(lane.admits(&vxlan(VM, NODE_INNER, 4789, 0xff_fffe, b"")), Ok(()));
        let other = Ipv4Addr::new(10, 0, 3, 5);
        assert_eq!(REFUSED, lane.admits(&vxlan(VM, NODE_INNER, 4789, 8, b"frame")), "another pod's network");
        assert_eq!(
            REFUSED,
            lane.admits(&vxlan(other, NODE_INNER, 4789, 7, b"frame")),
            "another VM's address"
        );
        assert_eq!(REFUSED, lane.admits(&vxlan(VM, other, 4789, 7, b"frame")), "through us to another VM");
        assert_eq!(REFUSED, lane.admits(&vxlan(VM, NODE_INNER, 22, 7, b"frame")), "another port");
        for at in [0, 9] {
            let mut packet = vxlan(VM, NODE_INNER, 4789, 7, b"frame");
            packet[at] ^= 0x10; // IP options; another protocol
            assert_eq!(REFUSED, lane.admits(&packet));
        }
        let mut unmarked = vxlan(VM, NODE_INNER, 4789, 7, b"frame");
        unmarked[28] = 0;
        assert_eq!(REFUSED, lane.admits(&unmarked), "a number that does not count");
        let mut longer = vxlan(VM, NODE_INNER, 4789, 7, b"frame");
        longer.push(0);
        assert_eq!(REFUSED, lane.admits(&longer), "bytes beyond the packet");
    }

    /// Returns a fragment of a datagram of the pod's own network, `units` times eight bytes into it.
    fn fragment(units: u16, more: bool, length: usize) -> Vec<u8> {
        let mut packet = vxlan(VM, NODE_INNER, 4789, 7, &[1; 200]);
        packet.truncate(length);
        let size = u16::try_from(length).unwrap();
        packet[2..4].copy_from_slice(&size.to_be_bytes());
        packet[6..8].copy_from_slice(&(units | if more { MORE } else { 0 }).to_be_bytes());
        packet
    }

    #[test]
    fn at_the_node_no_fragment_passes_that_could_wait_in_its_kernel_for_the_rest() {
        let lane = lane();
        for piece in [
            fragment(0, true, 100),
            fragment(2, true, 100),
            fragment(2, false, 100),
            fragment(0x1fff, false, 28),
            fragment(1, true, 100),
        ] {
            assert_eq!(lane.admits(&piece), Err(Reason::Fragment));
        }
        let mut whole = vxlan(VM, NODE_INNER, 4789, 7, b"frame");
        whole[6] = 0x40;
        assert_eq!(lane.admits(&whole), Ok(()), "one that must not be fragmented is none");
    }

    #[test]
    fn at_the_guest_fragments_pass_where_they_cannot_touch_the_networks_number() {
        let lane = Lane { fragments: true, ..lane() };
        assert_eq!(lane.admits(&fragment(0, true, 100)), Ok(()), "the first one, with its headers");
        assert_eq!(lane.admits(&fragment(0, true, 28)), REFUSED, "a first one without the network's number");
        assert_eq!(lane.admits(&fragment(1, true, 100)), REFUSED, "one that would write the number");
        assert_eq!(lane.admits(&fragment(2, true, 100)), Ok(()));
        assert_eq!(lane.admits(&fragment(2, false, 100)), Ok(()));
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
        fn any_bytes_are_handled(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            lane().admits(&bytes).ok();
            Lane { fragments: true, ..lane() }.admits(&bytes).ok();
            destination(&bytes);
        }
    }
}
