//! Restarts a sandbox's task after a panic. A panic is a bug in the node and must not cost the pod. The task's memory
//! is lost, but the ledger contains its intent. The new task starts from the ledger, as after a crash of the whole
//! node: at once, then after ever longer pauses.

use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};
use tracing::{Instrument, error, info, info_span, warn};

use crate::sandbox::Sandboxes;
use crate::sandbox::lifecycle::{Entry, Running};
use crate::spec::SandboxId;

/// Pause after the first panic; doubles with each further one.
const FIRST: Duration = Duration::from_millis(50);
/// Longest pause.
const LONGEST: Duration = Duration::from_secs(60);
/// Time without a panic after which the first pause applies again.
const FORGIVEN: Duration = Duration::from_secs(600);

/// Recent panics of a sandbox's task.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Panics {
    count: u32,
    last: Instant,
}

impl Panics {
    /// Counts one more panic. Returns the pause before the restart, and the new count.
    fn after(before: Option<Panics>, now: Instant) -> (Duration, Panics) {
        let recent = before.filter(|before| now.duration_since(before.last) < FORGIVEN);
        let count = recent.map_or(0, |before| before.count.saturating_add(1));
        let pause = FIRST.saturating_mul(1 << count.min(20)).min(LONGEST);
        (pause, Panics { count, last: now })
    }
}

/// Guard that schedules a restart if its task ends by a panic.
pub(crate) struct PanicGuard {
    pub(crate) table: Sandboxes,
    pub(crate) id: SandboxId,
}

impl Drop for PanicGuard {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        self.table.0.metrics.panics.inc();
        let (id, pod) = (self.id.clone(), self.table.pod(&self.id));
        let mut state = self.table.state();
        let (pause, panics) = Panics::after(state.panics.get(&id).copied(), Instant::now());
        state.panics.insert(id.clone(), panics);
        error!(sandbox = %id, pod = &*pod, again_in = ?pause, "the sandbox's task panicked; this is a bug of peerpod-node, and the node restarts the task from the ledger");
        let span = info_span!("sandbox", sandbox = %id, pod = &*pod);
        state.tasks.spawn(self.table.clone().restart(id, pause).instrument(span));
    }
}

impl Sandboxes {
    async fn restart(self, id: SandboxId, mut pause: Duration) {
        loop {
            sleep(pause).await;
            match self.0.ports.store.recall(&id).await {
                Ok(Some(record)) => {
                    let mut state = self.state();
                    self.drop_dead(&mut state, &id);
                    self.0.metrics.sandboxes.vm(record.offering(), None);
                    self.adopt(&mut state, record);
                    break;
                }
                Ok(None) => {
                    info!("the ledger has no record of the sandbox; its task is not restarted");
                    self.drop_dead(&mut self.state(), &id);
                    break;
                }
                Err(error) => {
                    pause = pause.saturating_mul(2).min(LONGEST);
                    warn!(%error, again_in = ?pause, "cannot read the sandbox's record");
                }
            }
        }
        self.0.inserted.send_modify(|count| *count += 1);
    }

    /// Waits until a sandbox without a task has a new one or is known not to exist; `false` if it is too late.
    pub(crate) async fn restarted(&self, id: &SandboxId, dead: &Running, within: Duration) -> bool {
        let mut inserted = self.0.inserted.subscribe();
        let another = async {
            loop {
                inserted.borrow_and_update();
                {
                    let state = self.state();
                    if state.closed {
                        return false;
                    }
                    match state.entries.get(id) {
                        Some(Entry::Task(now)) if now.commands.same_channel(&dead.commands) => {}
                        _ => return true,
                    }
                }
                if inserted.changed().await.is_err() {
                    return false;
                }
            }
        };
        timeout(within, another).await.unwrap_or(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn pauses_grow_to_a_bound_and_are_short_again_after_a_quiet_time() {
        let (mut panics, mut pauses) = (None, Vec::new());
        for _ in 0..30 {
            let (pause, now) = Panics::after(panics, Instant::now());
            pauses.push(pause);
            panics = Some(now);
            sleep(pause).await;
        }
        assert_eq!(pauses[..3], [FIRST, FIRST * 2, FIRST * 4]);
        assert!(pauses.is_sorted() && pauses.last() == Some(&LONGEST));
        sleep(FORGIVEN).await;
        assert_eq!(Panics::after(panics, Instant::now()).0, FIRST);
    }
}
