//! Stops sandboxes that were never started or lost their network namespace, and removes expired tombstones.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use tokio::time::Instant;
use tracing::{info, warn};

use crate::ledger::NetnsRef;
use crate::sandbox::Sandboxes;
use crate::sandbox::lifecycle::{Entry, Phase, Stop};
use crate::spec::SandboxId;

/// Times since which sandboxes lack their namespace or a StartVM, as seen by this process: a call may have been held.
#[derive(Default)]
pub(crate) struct Reaper {
    missing: HashMap<SandboxId, Instant>,
    unstarted: HashMap<SandboxId, Instant>,
}

const EVERY: Duration = Duration::from_secs(5);

impl Reaper {
    /// Runs a pass at every interval, forever.
    pub(crate) async fn run(mut self, table: Sandboxes) {
        loop {
            self.pass(&table).await;
            tokio::time::sleep(EVERY).await;
        }
    }

    pub(crate) async fn pass(&mut self, table: &Sandboxes) {
        let now = table.0.ports.clock.now_ms();
        for id in table.expired(now) {
            table.forget(&id).await;
        }
        let settings = table.0.settings.clone();
        let mut seen = HashSet::new();
        let mut waiting = HashSet::new();
        for (id, netns, started) in table.live_netns() {
            if !started {
                waiting.insert(id.clone());
            }
            let reason = if !table.0.ports.network.netns_lives(&netns) {
                let since = *self.missing.entry(id.clone()).or_insert_with(Instant::now);
                seen.insert(id.clone());
                (since.elapsed() >= settings.netns_gone_grace).then_some(Stop::NetnsGone)
            } else if started {
                None
            } else {
                let since = *self.unstarted.entry(id.clone()).or_insert_with(Instant::now);
                (since.elapsed() >= settings.never_started_grace).then_some(Stop::NeverStarted)
            };
            let Some(reason) = reason else { continue };
            let pod = table.pod(&id);
            info!(sandbox = %id, pod = &*pod, reason = reason.reason(), "stopping an abandoned sandbox");
            if let Err(error) = table.stop(&id, reason).await {
                warn!(sandbox = %id, pod = &*pod, %error, "cannot stop an abandoned sandbox; trying again");
            }
        }
        self.missing.retain(|id, _| seen.contains(id));
        self.unstarted.retain(|id, _| waiting.contains(id));
    }
}

impl Sandboxes {
    /// Returns the live sandboxes with their network namespaces and whether StartVM was called.
    fn live_netns(&self) -> Vec<(SandboxId, NetnsRef, bool)> {
        let state = self.state();
        let live = state.running().filter_map(|(id, running)| {
            let view = running.view.borrow();
            let netns = running.netns.clone().filter(|_| view.phase.is_live())?;
            Some((id.clone(), netns, view.started))
        });
        live.collect()
    }

    fn expired(&self, now_ms: u64) -> Vec<SandboxId> {
        let state = self.state();
        let is_expired =
            |entry: &Entry| matches!(entry, Entry::Tombstone { until_ms, .. } if *until_ms <= now_ms);
        state.entries.iter().filter(|(_, entry)| is_expired(entry)).map(|(id, _)| id.clone()).collect()
    }

    /// Removes a tombstone, on disk first.
    async fn forget(&self, id: &SandboxId) {
        match self.0.ports.store.forget(id).await {
            Ok(()) => {
                self.state().entries.remove(id);
                self.0.metrics.sandboxes.moved(Some(&Phase::Gone), None);
            }
            Err(error) => warn!(sandbox = %id, pod = &*self.pod(id), %error, "cannot remove a tombstone"),
        }
    }
}
