//! VMs that died under their pods. A guest whose link is down may be anywhere; only the provider knows whether its VM
//! still exists. It is asked when a link was down for long, and believed when it is sure: its list, fetched twice some
//! time apart, does not show the VM alive, and it has no addresses for it. Then the sandbox has failed: the relay closes
//! the shim's connections to the agent, which is how a shim learns that its containers are dead.
//!
//! A provider that tells of itself that a VM has ended is believed as soon as it has no addresses for it either: that
//! takes moments, and finds VMs that end while they boot.

use std::{collections::HashMap, time::Duration};

use futures_util::{FutureExt, StreamExt, future::join_all};
use peerpod_provider_api::{EventKind, InstanceId, Owned, OwnedState, ProviderEvent};
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{info, warn};

use super::{Sandboxes, effects::CloudError, phase::Phase, table::Entry};
use crate::spec::SandboxId;

/// How long the provider may take to say that it has no addresses for a VM. One that has some may take for ever.
const ADDRESSES: Duration = Duration::from_secs(20);

/// Remembers since when guests are away, and what the provider said. Counts from when this process first saw it.
#[derive(Default)]
pub struct Deaths {
    away: HashMap<SandboxId, Away>,
    /// VMs that the provider told of, and that are not judged yet.
    told: Vec<(InstanceId, String)>,
}

struct Away {
    since: Instant,
    /// When the provider may be asked about it again.
    ask: Instant,
    /// When its list was first without the VM.
    missing: Option<Instant>,
}

impl Deaths {
    /// Looks now and then, for ever.
    pub async fn run(mut self, table: Sandboxes) {
        let every = pause(table.0.settings.vm_gone_grace).min(Duration::from_secs(5));
        let mut events = table.0.fx.events().fuse();
        let mut next = Instant::now() + every;
        loop {
            tokio::select! {
                () = sleep_until(next) => {
                    self.pass(&table).await;
                    next = Instant::now() + every;
                }
                Some(event) = events.next() => {
                    self.event(&table, event);
                    // A host takes all of its VMs with it.
                    while let Some(Some(event)) = events.next().now_or_never() {
                        self.event(&table, event);
                    }
                    self.hear(&table).await;
                }
            }
        }
    }

    fn event(&mut self, table: &Sandboxes, ProviderEvent { id: vm, kind }: ProviderEvent) {
        match kind {
            EventKind::Interruption { at } => table.interrupted(&vm, at),
            EventKind::Ended { reason } => {
                if let Some((id, pod)) = table.of_vm(&vm) {
                    warn!(sandbox = %id, pod = &*pod, %vm, reason, "the provider says that this pod's VM has ended");
                    table.0.metrics.noticed("ended");
                    self.told.push((vm, reason));
                }
            }
        }
    }

    /// Judges the VMs that the provider told of, all at once: each may take as long as the cloud likes to show a console.
    async fn hear(&mut self, table: &Sandboxes) {
        let told = std::mem::take(&mut self.told);
        for heard in join_all(told.into_iter().map(|(vm, why)| hear(table, vm, why))).await {
            match heard {
                Heard::Dead(id) => drop(self.away.remove(&id)),
                Heard::Later(vm, why) => self.told.push((vm, why)),
                Heard::Nothing => {}
            }
        }
    }

    /// Looks once. Asks the provider only when a guest was away for long.
    pub async fn pass(&mut self, table: &Sandboxes) {
        self.hear(table).await;
        let grace = table.0.settings.vm_gone_grace;
        let away = table.away();
        self.away.retain(|id, _| away.contains_key(id));
        let now = Instant::now();
        let mut due = Vec::new();
        for (id, vm) in away {
            let known =
                self.away.entry(id.clone()).or_insert(Away { since: now, ask: now + grace, missing: None });
            if now.duration_since(known.since) >= grace && known.ask <= now {
                due.push((id, vm));
            }
        }
        if due.is_empty() {
            return;
        }
        match table.0.fx.owned().await {
            Ok(owned) => {
                let mut missing = Vec::new();
                for (id, vm) in due {
                    if self.is_missing(table, &id, &vm, &owned) {
                        missing.push((id, vm));
                    }
                }
                let judged = join_all(missing.iter().map(|(id, vm)| judge(table, id, vm))).await;
                for (judged, (id, _)) in judged.into_iter().zip(&missing) {
                    match judged {
                        Judged::Dead => drop(self.away.remove(id)),
                        Judged::Alive => {
                            if let Some(away) = self.away.get_mut(id) {
                                away.missing = None;
                            }
                        }
                        Judged::Unknown => {}
                    }
                }
            }
            Err(error) => {
                warn!(%error, guests = due.len(), "guests are away, and the provider cannot say whether their VMs are there; asking again");
                for (id, _) in due {
                    if let Some(away) = self.away.get_mut(&id) {
                        away.ask = now + grace;
                    }
                }
            }
        }
    }

    /// Whether the provider has not shown the VM twice, some time apart.
    fn is_missing(&mut self, table: &Sandboxes, id: &SandboxId, vm: &InstanceId, owned: &[Owned]) -> bool {
        let grace = table.0.settings.vm_gone_grace;
        let Some(away) = self.away.get_mut(id) else { return false };
        let now = Instant::now();
        let pod = table.pod(id);
        let alive = |other: &&Owned| {
            other.id == *vm && matches!(other.state, OwnedState::Pending | OwnedState::Running)
        };
        if let Some(vm) = owned.iter().find(alive) {
            table.moved(id, vm.addresses.clone());
            // Its guest may come back; it has its lease for that.
            (away.ask, away.missing) = (now + grace, None);
            return false;
        }
        away.ask = now + pause(grace);
        let Some(missing) = away.missing else {
            warn!(sandbox = %id, pod = &*pod, %vm, away_for = ?away.since.elapsed(), "its guest is away and the provider does not show its VM; looking once more");
            away.missing = Some(now);
            return false;
        };
        now.duration_since(missing) >= pause(grace)
    }
}

/// What became of a VM that the provider told of.
enum Heard {
    Dead(SandboxId),
    /// That cannot be said yet.
    Later(InstanceId, String),
    Nothing,
}

async fn hear(table: &Sandboxes, vm: InstanceId, why: String) -> Heard {
    let Some((id, pod)) = table.of_vm(&vm) else { return Heard::Nothing };
    match timeout(ADDRESSES, table.0.fx.addresses(&vm)).await {
        Ok(Err(CloudError::NotFound { .. })) => {}
        // It has some: it was started again, and it was not this end that we were told of.
        Ok(Ok(_)) => return Heard::Nothing,
        Ok(Err(_)) | Err(_) => return Heard::Later(vm, why),
    }
    warn!(sandbox = %id, pod = &*pod, %vm, why, "its VM has ended");
    match table.lost(&id, &vm, Some(why.clone())).await {
        Ok(_) => Heard::Dead(id),
        Err(error) => {
            warn!(sandbox = %id, pod = &*pod, %vm, %error, "its failure cannot be recorded; trying again");
            Heard::Later(vm, why)
        }
    }
}

/// What became of a VM that the provider's list has not.
enum Judged {
    Dead,
    /// It has addresses, or may have.
    Alive,
    Unknown,
}

async fn judge(table: &Sandboxes, id: &SandboxId, vm: &InstanceId) -> Judged {
    let pod = table.pod(id);
    match timeout(ADDRESSES, table.0.fx.addresses(vm)).await {
        Ok(Err(CloudError::NotFound { .. })) => {}
        Ok(Err(error)) => {
            warn!(sandbox = %id, pod = &*pod, %vm, %error, "whether its VM is gone cannot be said; asking again");
            return Judged::Unknown;
        }
        Ok(Ok(_)) | Err(_) => return Judged::Alive,
    }
    match table.lost(id, vm, None).await {
        Ok(true) => Judged::Dead,
        Ok(false) => {
            info!(sandbox = %id, pod = &*pod, %vm, "it came back, or is stopped, just now");
            Judged::Unknown
        }
        Err(error) => {
            warn!(sandbox = %id, pod = &*pod, %vm, %error, "its failure cannot be recorded; trying again");
            Judged::Unknown
        }
    }
}

/// Between the two looks: a list may be some seconds old.
fn pause(grace: Duration) -> Duration {
    (grace / 4).max(Duration::from_millis(50))
}

impl Sandboxes {
    /// Running sandboxes whose guest's link is down, with their VMs.
    fn away(&self) -> HashMap<SandboxId, InstanceId> {
        let running: Vec<(SandboxId, InstanceId)> = {
            let state = self.state();
            let entries = state.entries.iter().filter_map(|(id, entry)| match entry {
                Entry::Task(running) => match &running.view.borrow().phase {
                    Phase::Running { vm } => Some((id.clone(), vm.clone())),
                    _ => None,
                },
                Entry::Tombstone { .. } => None,
            });
            entries.collect()
        };
        running.into_iter().filter(|(id, _)| !self.0.fx.guest(id).borrow().connected).collect()
    }
}
