//! Stops sandboxes that were never started, or lost their network namespace or shim, and removes expired tombstones.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;
use tracing::{info, warn};

use crate::ledger::NetnsRef;
use crate::sandbox::Sandboxes;
use crate::sandbox::lifecycle::{Entry, Phase, Stop};
use crate::spec::SandboxId;

/// Reason to stop each abandoned sandbox, and since when, as seen by this process: a call may have been held.
#[derive(Default)]
pub(crate) struct Reaper(HashMap<SandboxId, (Stop, Instant)>);

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
        let mut abandoned = HashMap::new();
        for (id, netns, started) in table.live_netns() {
            let Some((reason, grace)) = table.abandoned(&id, &netns, started) else { continue };
            let known = self.0.get(&id).filter(|(known, _)| *known == reason);
            let since = known.map_or_else(Instant::now, |(_, since)| *since);
            abandoned.insert(id.clone(), (reason, since));
            if since.elapsed() < grace {
                continue;
            }
            let pod = table.pod(&id);
            info!(sandbox = %id, pod = &*pod, reason = reason.reason(), "stopping an abandoned sandbox");
            if let Err(error) = table.stop(&id, reason).await {
                warn!(sandbox = %id, pod = &*pod, %error, "cannot stop an abandoned sandbox; trying again");
            }
        }
        self.0 = abandoned;
    }
}

impl Sandboxes {
    /// Returns the reason to stop a live sandbox, and the time for which it must hold.
    fn abandoned(&self, id: &SandboxId, netns: &NetnsRef, started: bool) -> Option<(Stop, Duration)> {
        let (settings, ports) = (&self.0.settings, &self.0.ports);
        if !ports.network.netns_lives(netns) {
            Some((Stop::NetnsGone, settings.netns_gone_grace))
        } else if !started {
            Some((Stop::NeverStarted, settings.never_started_grace))
        } else {
            ports.relay.guest(id).borrow().shim_gone.then_some((Stop::ShimGone, settings.shim_gone_grace))
        }
    }

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
