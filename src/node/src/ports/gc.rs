//! Removes the network state that crashed sandboxes left in the pods' namespaces, before the node serves.

use peerpod_common::blocking::blocking;
use tracing::{info, warn};

use super::NetworkRecord;
use crate::ledger::Record;
use crate::sandbox::phase::Phase;
use crate::sandbox::ports::NetworkError;
use crate::spec::SandboxId;
use crate::tunnel::{Live, Reconciled, Tunnel};

/// Removes the network state that belongs to no record, except that of the `unread` sandboxes. Errors are logged; the
/// next start tries again.
pub(crate) async fn collect_garbage(
    tunnel: &Tunnel,
    records: &[Record],
    unread: impl Iterator<Item = SandboxId>,
    boot_id: &str,
) {
    let unread = unread.map(|id| Live { sandbox: id.to_string(), netns: None, reserved: None, vm: None });
    let live = records.iter().filter_map(|record| live(record, boot_id)).chain(unread).collect::<Vec<Live>>();
    let tunnel = tunnel.clone();
    let reconciled = blocking(move || Ok::<_, NetworkError>(tunnel.reconcile(&live))).await;
    let Reconciled { looked, devices, redirects, elements, sandboxes, errors } =
        reconciled.unwrap_or_else(|error| {
            warn!(%error, "cannot remove the leftovers of a crash from the pods' networks");
            Reconciled::default()
        });
    for error in &errors {
        warn!(%error, "cannot remove all leftovers of a crash from a pod's network; trying again at the next start");
    }
    if devices + redirects + elements > 0 {
        let whose = sandboxes.join(", ");
        info!(looked, devices, redirects, elements, whose, "removed leftovers of deleted sandboxes");
    }
}

fn live(record: &Record, boot_id: &str) -> Option<Live> {
    // After a reboot nothing of it is left, and another namespace may have its inode number.
    let netns = record.netns.as_ref().filter(|netns| netns.boot_id == boot_id)?;
    if record.phase == Phase::Gone {
        return None;
    }
    let recorded = record.network.as_ref().and_then(|network| NetworkRecord::read(network).ok());
    let reserved = recorded.map(|recorded| recorded.reserved);
    let vm = reserved.as_ref().and_then(|reserved| {
        record.addresses.iter().copied().find(|address| address.is_ipv6() == reserved.v6)
    });
    let netns = Some((netns.path.clone(), netns.identity()));
    Some(Live { sandbox: record.id.to_string(), netns, reserved, vm })
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::ledger::{NetnsRef, Network};

    const OLD: &str = include_str!("../../tests/samples/network-v1.json");

    #[test]
    fn version_1_network_records_are_read() {
        let network: Network = serde_json::from_str(OLD).unwrap();
        let old = NetworkRecord::read(&network).unwrap();
        assert_eq!((old.reserved.vni(), old.reserved.port), (Some(8_739_214), 4789));
        assert_eq!(old.seen.primary().name, "eth0");
        assert!(old.reserved.carries(&old.seen), "its one device is the primary interface's");
        let now = NetworkRecord::read(&old.write(false).unwrap()).unwrap();
        assert_eq!((now.seen, now.reserved), (old.seen, old.reserved));
    }

    #[test]
    fn records_protect_their_resources_from_gc() {
        let mut record = Record::tombstone(SandboxId::new("web-1").unwrap(), 0);
        assert_eq!(live(&record, "boot"), None);
        let netns = |boot_id: &str| NetnsRef {
            path: PathBuf::from("/run/netns/cni-1"),
            dev: 4,
            inode: 7,
            boot_id: boot_id.to_owned(),
        };
        record.netns = Some(netns("boot"));
        assert_eq!(live(&record, "boot"), None, "a tombstone has nothing");
        record.phase = Phase::Created;
        assert!(live(&record, "boot").unwrap().reserved.is_none());
        assert_eq!(live(&record, "another boot"), None);
        record.network = Some(serde_json::from_str(OLD).unwrap());
        record.addresses = vec!["fd99::7".parse().unwrap(), "10.99.0.7".parse().unwrap()];
        let live = live(&record, "boot").unwrap();
        assert_eq!((live.vm, live.netns.unwrap().1.inode), (Some("10.99.0.7".parse().unwrap()), 7));
        assert_eq!(live.reserved.unwrap().vni(), Some(8_739_214));
    }
}
