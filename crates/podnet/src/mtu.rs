//! Fits the plan's MTUs to the path MTU between VM and node. Pure.

use peerpod_proto::guest::NetworkPlan;

/// Minimum MTU of IPv4 and of IPv6, in bytes.
const LEAST: u32 = 576;
const LEAST_V6: u32 = 1280;

/// Lowers the MTUs of a plan so that the tunnel's packets fit into `path` bytes, but never below the minimum of the
/// pod's families. Where that minimum does not fit, the tunnel's packets are fragmented, and the returned note reports
/// it.
pub fn fit(plan: &mut NetworkPlan, path: u32) -> Option<String> {
    let room = path.saturating_sub(plan.underlay.as_ref().map_or(0, |underlay| underlay.overhead));
    let mut note = None;
    for interface in &mut plan.interfaces {
        let v6 = interface.addresses.iter().any(|address| address.prefix.contains(':'));
        let least = if v6 { LEAST_V6 } else { LEAST };
        if room < least && interface.mtu > room {
            note = Some(format!(
                "packets of at most {path} bytes pass between VM and node, which leaves {room} for the pod and it needs \
                 {least}: the tunnel's packets are cut into fragments"
            ));
        }
        interface.mtu = interface.mtu.min(room.max(least));
    }
    note
}

#[cfg(test)]
mod tests {
    use peerpod_proto::guest::{Address, Interface, Underlay};

    use super::*;

    fn plan(mtu: u32, prefix: &str) -> NetworkPlan {
        let address = Address { prefix: prefix.into(), ..Default::default() };
        let interface = Interface { mtu, addresses: vec![address], ..Default::default() };
        let underlay = Underlay { overhead: 50, ..Default::default() };
        NetworkPlan { interfaces: vec![interface], underlay: Some(underlay).into(), ..Default::default() }
    }

    #[test]
    fn a_path_only_lowers_the_mtu_and_never_below_the_minimum() {
        for (mtu, prefix, path, expected, noted) in [
            (1450, "10.0.0.1/24", 1500, 1450, false),
            (1450, "10.0.0.1/24", 1460, 1410, false),
            (8951, "fd00::1/64", 1500, 1450, false),
            (1450, "fd00::1/64", 1300, 1280, true),
            (1450, "10.0.0.1/24", 1300, 1250, false),
            (1450, "10.0.0.1/24", 20, 576, true),
            (500, "10.0.0.1/24", 576, 500, false),
        ] {
            let mut plan = plan(mtu, prefix);
            let note = fit(&mut plan, path);
            assert_eq!(plan.interfaces[0].mtu, expected, "{prefix} {path}");
            assert_eq!(note.is_some(), noted, "{prefix} {path}: {note:?}");
        }
    }
}
