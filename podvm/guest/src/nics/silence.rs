//! Reports that no NIC of the VM has an address. The node cannot be reached then: the console is the only output, and
//! the node shows the console of a VM that never connects.

use std::time::{Duration, Instant};

use super::Nic;

/// Time that slow servers get before the first report.
const PATIENCE: Duration = Duration::from_secs(10);
/// Interval between reports, so that the console tail of an abandoned VM has one.
const AGAIN: Duration = Duration::from_secs(60);

pub(super) struct Silence {
    due: Instant,
}

impl Silence {
    /// Starts the wait: the NICs request their addresses from now on.
    pub(super) fn new(now: Instant) -> Silence {
        Silence { due: now + PATIENCE }
    }

    /// Returns the report about the current NICs, if it is due.
    pub(super) fn inspect(&mut self, nics: &[Nic], now: Instant) -> Option<String> {
        if nics.iter().any(|nic| nic.addressed) {
            self.due = now + PATIENCE;
            return None;
        }
        if now < self.due {
            return None;
        }
        self.due = now + AGAIN;
        Some(words(nics))
    }
}

fn words(nics: &[Nic]) -> String {
    if nics.is_empty() {
        return "the VM has no NIC that this kernel has a driver for: give it one, or build the image with \
                its driver"
            .to_owned();
    }
    let all: Vec<String> = nics.iter().map(one).collect();
    format!("no NIC has an address: {}", all.join("; "))
}

fn one(nic: &Nic) -> String {
    let (name, mac) = (&nic.name, nic.mac.map(|byte| format!("{byte:02x}")).join(":"));
    if !nic.carrier {
        return format!("{name} ({mac}) has no carrier: connect the VM's NIC to a network");
    }
    format!(
        "{name} ({mac}): no DHCP server answers, and no router announces an IPv6 network; the guest asks \
         again. See that the VM's network has one of the two and passes UDP ports 67 and 68, or give the \
         address on the kernel's command line: ip=ADDRESS::GATEWAY:NETMASK::{name}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nic(carrier: bool, addressed: bool) -> Nic {
        Nic {
            name: "eth0".into(),
            index: 2,
            mac: [2, 0, 0, 0, 0, 0xfe],
            up: true,
            carrier,
            managed: false,
            given: (false, false),
            link_local: None,
            addressed,
        }
    }

    #[test]
    fn the_message_repeats_and_ends_with_an_address() {
        let now = Instant::now();
        let mut silence = Silence::new(now);
        let silent = [nic(true, false)];
        assert_eq!(silence.inspect(&silent, now), None, "a server may take its time");
        let said = silence.inspect(&silent, now + PATIENCE).unwrap();
        assert!(said.contains("eth0 (02:00:00:00:00:fe): no DHCP server answers"), "{said}");
        assert!(said.contains("ip=ADDRESS::GATEWAY:NETMASK::eth0"), "{said}");
        assert_eq!(silence.inspect(&silent, now + PATIENCE * 2), None, "once");
        assert!(silence.inspect(&silent, now + PATIENCE + AGAIN).is_some(), "and again");
        let one_is_enough = [nic(true, false), nic(true, true)];
        assert_eq!(silence.inspect(&one_is_enough, now + AGAIN * 9), None);
    }

    #[test]
    fn a_missing_nic_and_a_missing_cable_have_their_own_messages() {
        assert!(words(&[]).contains("no NIC that this kernel has a driver for"));
        let said = words(&[nic(false, false)]);
        assert!(said.contains("eth0 (02:00:00:00:00:fe) has no carrier"), "{said}");
    }
}
