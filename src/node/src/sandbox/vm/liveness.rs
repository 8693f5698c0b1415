//! Detects that a pod's VM is gone, and fails its sandbox: the shim then sees that its containers are dead.
//!
//! A link that is down does not prove that the VM is gone; only the provider has the answer. After a long silence, a VM
//! is gone if two of the provider's lists, some time apart, do not show it alive and the provider reports no addresses.
//! If the provider itself reports that a VM has ended, the node only checks that it has no addresses either. That takes
//! moments, and detects VMs that end while they boot.

use std::collections::HashMap;
use std::time::Duration;

use futures_util::future::join_all;
use futures_util::{FutureExt, StreamExt};
use peerpod_provider_api::{EventKind, InstanceId, Owned, OwnedState, ProviderEvent};
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{info, warn};

use crate::sandbox::Sandboxes;
use crate::sandbox::lifecycle::Phase;
use crate::sandbox::ports::CloudError;
use crate::spec::SandboxId;

/// Limit for the provider to report that a VM has no addresses; for a VM that exists, the call may wait for ever.
const ADDRESSES: Duration = Duration::from_secs(20);

/// Times since which this process has seen guests away, and the provider's answers.
#[derive(Default)]
pub(crate) struct VmLiveness {
    away: HashMap<SandboxId, Away>,
    /// VMs that the provider reported as ended and that are not judged yet.
    ended: Vec<(InstanceId, String)>,
}

struct Away {
    since: Instant,
    /// Earliest time of the next query to the provider.
    ask: Instant,
    /// Time of the first list without the VM.
    missing: Option<Instant>,
}

impl VmLiveness {
    /// Handles the provider's events and runs a pass at every interval, forever.
    pub(crate) async fn run(mut self, table: Sandboxes) {
        let every = pause(table.0.settings.vm_gone_grace).min(Duration::from_secs(5));
        let mut events = table.0.ports.cloud.events().fuse();
        let mut next = Instant::now() + every;
        loop {
            tokio::select! {
                () = sleep_until(next) => {
                    self.pass(&table).await;
                    next = Instant::now() + every;
                }
                Some(event) = events.next() => {
                    self.event(&table, event);
                    // A host that fails ends all of its VMs at once.
                    while let Some(Some(event)) = events.next().now_or_never() {
                        self.event(&table, event);
                    }
                    self.judge_ended(&table).await;
                }
            }
        }
    }

    fn event(&mut self, table: &Sandboxes, ProviderEvent { id: vm, kind }: ProviderEvent) {
        match kind {
            EventKind::Interruption { at } => table.interrupted(&vm, at),
            EventKind::Ended { reason } => {
                if let Some((id, pod)) = table.of_vm(&vm) {
                    warn!(sandbox = %id, pod = &*pod, %vm, reason, "the provider reports that this pod's VM has ended");
                    table.0.metrics.sandboxes.notices.count("ended");
                    self.ended.push((vm, reason));
                }
            }
        }
    }

    /// Judges the VMs that the provider reported, concurrently: the cloud may take long to return each console.
    async fn judge_ended(&mut self, table: &Sandboxes) {
        let ended = std::mem::take(&mut self.ended);
        let owned = ended.into_iter().filter_map(|(vm, why)| Some((table.of_vm(&vm)?.0, vm, why)));
        let judged = owned.map(async |(id, vm, why)| (judge(table, &id, &vm, Some(&why)).await, id, vm, why));
        for (judged, id, vm, why) in join_all(judged).await {
            match judged {
                Judged::Dead => drop(self.away.remove(&id)),
                Judged::Unknown => self.ended.push((vm, why)),
                // The VM was started again after the reported end.
                Judged::Alive => {}
            }
        }
    }

    /// Runs one pass. Queries the provider only if a guest was away for long.
    pub(crate) async fn pass(&mut self, table: &Sandboxes) {
        self.judge_ended(table).await;
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
        let owned = match table.0.ports.cloud.owned().await {
            Ok(owned) => owned,
            Err(error) => {
                warn!(%error, guests = due.len(), "guests are away, and the provider cannot list their VMs; trying again");
                for (id, _) in due {
                    if let Some(away) = self.away.get_mut(&id) {
                        away.ask = now + grace;
                    }
                }
                return;
            }
        };
        due.retain(|(id, vm)| self.is_missing(table, id, vm, &owned));
        let judged = join_all(due.iter().map(|(id, vm)| judge(table, id, vm, None))).await;
        for (judged, (id, _)) in judged.into_iter().zip(due) {
            match judged {
                Judged::Dead => drop(self.away.remove(&id)),
                Judged::Alive => {
                    if let Some(away) = self.away.get_mut(&id) {
                        away.missing = None;
                    }
                }
                Judged::Unknown => {}
            }
        }
    }

    /// Whether two of the provider's lists, some time apart, lacked the VM.
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
            // The guest may come back; it has its lease for that.
            (away.ask, away.missing) = (now + grace, None);
            return false;
        }
        away.ask = now + pause(grace);
        let Some(missing) = away.missing else {
            warn!(sandbox = %id, pod = &*pod, %vm, away_for = ?away.since.elapsed(), "the sandbox's guest is away and the provider does not list its VM; checking again");
            away.missing = Some(now);
            return false;
        };
        now.duration_since(missing) >= pause(grace)
    }
}

/// Judgement of a VM that the provider reported as ended, or that its list does not show.
enum Judged {
    Dead,
    /// The VM has addresses, or may have.
    Alive,
    Unknown,
}

/// Asks for the VM's addresses, and fails its sandbox if it has none. `ended`: the provider reported that the VM ended.
async fn judge(table: &Sandboxes, id: &SandboxId, vm: &InstanceId, ended: Option<&String>) -> Judged {
    let pod = table.pod(id);
    match timeout(ADDRESSES, table.0.ports.cloud.addresses(vm)).await {
        Ok(Err(CloudError::NotFound { .. })) => {}
        Ok(Err(error)) => {
            if ended.is_none() {
                warn!(sandbox = %id, pod = &*pod, %vm, %error, "the provider cannot report the state of the VM; trying again");
            }
            return Judged::Unknown;
        }
        Err(_) if ended.is_some() => return Judged::Unknown,
        Ok(Ok(_)) | Err(_) => return Judged::Alive,
    }
    if let Some(why) = ended {
        warn!(sandbox = %id, pod = &*pod, %vm, why, "the sandbox's VM has ended");
    }
    match table.lost(id, vm, ended.cloned()).await {
        Ok(true) => Judged::Dead,
        Ok(false) if ended.is_some() => Judged::Dead,
        Ok(false) => {
            info!(sandbox = %id, pod = &*pod, %vm, "the guest has reconnected, or the sandbox is being stopped");
            Judged::Unknown
        }
        Err(error) => {
            warn!(sandbox = %id, pod = &*pod, %vm, %error, "cannot record the sandbox's failure; trying again");
            Judged::Unknown
        }
    }
}

/// Returns the pause between the two queries: a list may be some seconds old.
fn pause(grace: Duration) -> Duration {
    (grace / 4).max(Duration::from_millis(50))
}

impl Sandboxes {
    /// Returns the running sandboxes with a link that is down, with their VMs.
    fn away(&self) -> HashMap<SandboxId, InstanceId> {
        let running = self.views().into_iter().filter_map(|view| match view.phase {
            Phase::Running { vm } => Some((view.id, vm)),
            _ => None,
        });
        running.filter(|(id, _)| !self.0.ports.relay.guest(id).borrow().connected).collect()
    }
}
