//! A network plan as whoever speaks for the node may send it: refused with a reason, or one that makes sense; and what
//! makes sense is written and read as the same again.

use peerpod_podnet::plan::{self, Tunnel};
use peerpod_proto::guest::NetworkPlan;
use protobuf::Message;

pub(crate) fn run(input: &[u8]) {
    let Ok(message) = NetworkPlan::parse_from_bytes(input) else { return };
    let Ok(mut planned) = plan::read(&message) else { return };
    for (index, interface) in (2..).zip(&mut planned.interfaces) {
        interface.index = index; // the node always knows it
    }
    let tunnels: Vec<Tunnel> =
        planned.interfaces.iter().map(|i| Tunnel { interface: i.index, vni: i.vni, mtu: i.mtu }).collect();
    let again = plan::write(&planned.as_seen(), &tunnels, &planned.underlay);
    assert_eq!(plan::read(&again).expect("what we write we read"), planned);
}
