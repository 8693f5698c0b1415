//! Ends a process: a [`Shutdown`] for all tasks, signals that trigger it, a [`Drain`] that waits for work.
//!
//! Must be used inside a tokio runtime. Only the second signal ends the process directly.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::telemetry;

/// Notifies all tasks that the process is to end. Clones share one shutdown.
#[derive(Clone, Debug, Default)]
pub struct Shutdown {
    sender: Arc<watch::Sender<bool>>,
}

impl Shutdown {
    /// Triggers the shutdown.
    pub fn trigger(&self) {
        self.sender.send_replace(true);
    }

    /// Whether the shutdown is triggered.
    pub fn is_triggered(&self) -> bool {
        *self.sender.borrow()
    }

    /// Returns when the shutdown is triggered, at once if it was before. May be dropped at any time.
    pub async fn wait(&self) {
        let mut receiver = self.sender.subscribe();
        // Fails only when every sender is gone, and `self` holds one.
        if receiver.wait_for(|triggered| *triggered).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

/// Makes a shutdown that SIGTERM and SIGINT trigger. A second signal ends the process at once, with the exit code that a
/// shell gives for it (128 + number): a second Ctrl-C means an immediate end. SIGUSR1 switches the level of the log to
/// `debug`, and back.
pub fn signals() -> std::io::Result<Shutdown> {
    let shutdown = Shutdown::default();
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut level = signal(SignalKind::user_defined1())?;
    let told = shutdown.clone();
    tokio::spawn(async move {
        loop {
            let (name, number) = tokio::select! {
                _ = terminate.recv() => ("SIGTERM", 15),
                _ = interrupt.recv() => ("SIGINT", 2),
                _ = level.recv() => {
                    telemetry::switch_level();
                    continue;
                }
            };
            if told.is_triggered() {
                tracing::warn!(signal = name, "second signal; ending at once");
                std::process::exit(128 + number);
            }
            tracing::info!(signal = name, "shutting down");
            told.trigger();
        }
    });
    Ok(shutdown)
}

/// Waits for work in progress. Each task that must not be cut off holds a [`Busy`].
#[derive(Clone, Debug, Default)]
pub struct Drain {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    busy: Mutex<BTreeMap<&'static str, usize>>,
    count: watch::Sender<usize>,
    begun: watch::Sender<bool>,
}

/// One piece of work in progress; dropping it marks it as done.
#[derive(Debug)]
pub struct Busy {
    shared: Arc<Shared>,
    name: &'static str,
}

/// Work still in progress at the deadline, by name and number.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "not finished at the deadline:{}",
    .0.iter().map(|(name, count)| format!(" {name} ({count})")).collect::<String>()
)]
pub struct StillBusy(pub BTreeMap<&'static str, usize>);

impl Drain {
    /// Counts one piece of work of this name as in progress until the result is dropped.
    pub fn busy(&self, name: &'static str) -> Busy {
        *self.shared.busy.lock().entry(name).or_default() += 1;
        self.shared.count.send_modify(|count| *count += 1);
        Busy { shared: self.shared.clone(), name }
    }

    /// Signals all tasks to finish and waits until no work is in progress. The error is the work left at the deadline.
    pub async fn drain(&self, deadline: Duration) -> Result<(), StillBusy> {
        self.shared.begun.send_replace(true);
        let mut count = self.shared.count.subscribe();
        let done = count.wait_for(|count| *count == 0);
        match tokio::time::timeout(deadline, done).await {
            Ok(_) => Ok(()),
            Err(_) => Err(StillBusy(self.shared.busy.lock().clone())),
        }
    }
}

impl Busy {
    /// Returns when the drain begins: finish soon, and begin nothing new.
    pub async fn draining(&self) {
        let mut begun = self.shared.begun.subscribe();
        // Fails only when the sender is gone, and `self` holds it.
        if begun.wait_for(|begun| *begun).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let mut busy = self.shared.busy.lock();
        if let Some(count) = busy.get_mut(self.name) {
            *count -= 1;
            if *count == 0 {
                busy.remove(self.name);
            }
        }
        drop(busy);
        self.shared.count.send_modify(|count| *count -= 1);
    }
}

#[cfg(test)]
mod tests;
