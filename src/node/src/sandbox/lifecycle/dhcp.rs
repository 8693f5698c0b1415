//! Reports a network whose DHCP server delays each VM, from the stages of the guests. This covers also servers that the
//! provider cannot inspect, as those of a bridge.

use std::time::Duration;

use peerpod_base::admin::Ready;
use peerpod_proto::guest::StageTime;
use tracing::warn;

/// Longest wait for an address without a warning. A DHCP server without a delay answers in a few ms.
const SLOW: Duration = Duration::from_secs(1);
const WARNING: &str = "dhcp";

/// Warns in the node's readiness if this start waited long for an address, until another start does not. Logs the first
/// of these starts.
pub(super) fn judge(ready: &Ready, stages: &[StageTime]) {
    let Some(uplink) = stages.iter().find(|stage| stage.name == "uplink") else { return };
    let waited = Duration::from_micros(uplink.took_us);
    if waited <= SLOW {
        return ready.settled(WARNING);
    }
    let text = format!(
        "a VM waited {:.1} s for its address from DHCP, as every VM of this network may: let the DHCP server offer \
         addresses without a ping before (dnsmasq: no-ping), or find the cause of its late answers",
        waited.as_secs_f64()
    );
    if !ready.warnings().contains_key(WARNING) {
        warn!("{text}");
    }
    ready.warn(WARNING, &text);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_dhcp_is_a_warning_until_a_start_is_quick() {
        let ready = Ready::default();
        let start = |stage: &str, took: Duration| {
            let took_us = took.as_micros() as u64;
            judge(&ready, &[StageTime { name: stage.into(), took_us, ..StageTime::default() }]);
            ready.warnings().remove(WARNING)
        };
        assert_eq!(start("uplink", SLOW), None);
        let text = start("uplink", Duration::from_millis(3100)).unwrap();
        assert!(text.contains("waited 3.1 s") && text.contains("no-ping"), "{text}");
        // Another stage says nothing about DHCP.
        assert_eq!(start("boot", Duration::from_millis(200)), Some(text));
        assert_eq!(start("uplink", Duration::from_millis(200)), None);
        assert!(ready.waiting().is_empty());
    }
}
