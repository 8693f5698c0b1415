//! Reports VMs that ended without a delete: their machine has rebooted. Looks at the machines with VMs of this owner,
//! as long as a caller listens.

use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::{self, BoxStream};
use peerpod_provider_api::{EventKind, OwnedState, ProviderEvent};
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::{Instant, sleep};

use super::Pool;
use super::claim::{Claim, VmId};
use super::known::Seen;
use crate::config::MachineAddress;

/// Interval of the looks.
const EVERY: Duration = Duration::from_secs(20);

/// Returns the events from now on; the stream ends with the provider.
pub(crate) fn stream(pool: &Arc<Pool>) -> BoxStream<'static, ProviderEvent> {
    let events = pool.ended.subscribe();
    // The first listener starts the one task that looks; later listeners share its events.
    pool.watch.call_once(|| drop(tokio::spawn(watch(Arc::downgrade(pool)))));
    let next = |mut events: broadcast::Receiver<ProviderEvent>| async move {
        loop {
            match events.recv().await {
                Ok(event) => return Some((event, events)),
                Err(RecvError::Lagged(_)) => {}
                Err(RecvError::Closed) => return None,
            }
        }
    };
    stream::unfold(events, next).boxed()
}

async fn watch(pool: Weak<Pool>) {
    loop {
        sleep(EVERY).await;
        let Some(pool) = pool.upgrade() else { return };
        if pool.ended.receiver_count() == 0 {
            continue;
        }
        let now = Instant::now();
        let runs = |known: &super::known::Known| {
            matches!(known.seen(), Seen::Ours(_, OwnedState::Running))
                && known.is_worth_a_look(pool.config.quarantine, now)
        };
        for machine in pool.machines.iter().filter(|machine| runs(&machine.known.lock())) {
            let (machine, pool) = (machine.clone(), pool.clone());
            // A machine that does not answer delays no other one. A fault is in its memory.
            tokio::spawn(async move { drop(machine.look(&pool).await) });
        }
    }
}

impl Pool {
    /// Reports the end of a VM.
    pub(crate) fn has_ended(&self, machine: MachineAddress, claim: &Claim) {
        let Ok(id) = (VmId { machine, boot_id: claim.boot_id.clone() }).id() else { return };
        let reason = format!("machine {machine} has rebooted");
        tracing::warn!(%id, reason, "a VM has ended");
        // Without a listener no look is needed.
        drop(self.ended.send(ProviderEvent { id, kind: EventKind::Ended { reason } }));
    }
}
