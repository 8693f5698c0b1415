//! Before anything is served: what crashed sandboxes left in the pods' networks goes.

use tracing::{info, warn};

use super::woven;
use crate::{
    ledger::Record,
    sandbox::phase::Phase,
    spec::SandboxId,
    tunnel::{Live, NetnsId, Reconciled, Tunnel},
};

/// Compares the pods' networks with the records, and removes what belongs to none. `unread`: sandboxes whose record
/// cannot be read; what they have stays. An error is no reason not to serve: it is said, and the next start tries again.
pub async fn tidy(
    tunnel: &Tunnel,
    records: &[Record],
    unread: impl Iterator<Item = SandboxId>,
    boot_id: &str,
) {
    let unread = unread.map(|id| Live { sandbox: id.to_string(), netns: None, reserved: None, vm: None });
    let live = records.iter().filter_map(|record| live(record, boot_id)).chain(unread).collect();
    let Reconciled { looked, devices, redirects, elements, sandboxes, errors } = tunnel.reconcile(live).await;
    for error in &errors {
        warn!(%error, "what a crash left in a pod's network may still be there; trying again at the next start");
    }
    if devices + redirects + elements > 0 {
        let whose = sandboxes.join(", ");
        info!(looked, devices, redirects, elements, whose, "removed what sandboxes that are gone had left");
    }
}

fn live(record: &Record, boot_id: &str) -> Option<Live> {
    // After a reboot nothing of it is left, and its namespace's number may be another's.
    let netns = record.netns.as_ref().filter(|netns| netns.boot_id == boot_id)?;
    if record.phase == Phase::Gone {
        return None;
    }
    let id = NetnsId { dev: netns.dev, inode: netns.inode };
    let reserved =
        record.network.as_ref().and_then(|network| woven(network).ok()).map(|woven| woven.reserved);
    let vm = reserved.as_ref().and_then(|reserved| {
        record.addresses.iter().copied().find(|address| address.is_ipv6() == reserved.v6)
    });
    Some(Live { sandbox: record.id.to_string(), netns: Some((netns.path.clone(), id)), reserved, vm })
}
