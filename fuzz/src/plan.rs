//! Fuzzes a network plan from any peer that plays the node. It is refused with a reason, or it is valid, and a valid
//! plan survives writing and reading.

use peerpod_podnet::plan::{self, Tunnel};
use peerpod_proto::guest::NetworkPlan;
use protobuf::Message;

pub(crate) fn run(input: &[u8]) {
    let Ok(message) = NetworkPlan::parse_from_bytes(input) else { return };
    let Ok(mut planned) = plan::read(&message) else { return };
    for (index, interface) in (2..).zip(&mut planned.network.interfaces) {
        interface.index = index; // the node always sends it
    }
    let interfaces = planned.network.interfaces.iter().zip(&planned.vnis);
    let tunnels: Vec<Tunnel> =
        interfaces.map(|(i, vni)| Tunnel { interface: i.index, vni: *vni, mtu: i.mtu }).collect();
    let again = plan::write(&planned.network, &tunnels, &planned.underlay);
    assert_eq!(plan::read(&again).expect("what we write we read"), planned);
}
