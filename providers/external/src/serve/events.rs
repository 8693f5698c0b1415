//! Keeps the events of a provider for a while, so that a node can read those that it missed during a disconnect.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use parking_lot::Mutex;
use peerpod_provider_api::ProviderEvent;
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout_at};

/// Most events kept; a node that missed more reads the list of VMs.
const KEPT: usize = 1000;

/// Latest events of one owner, numbered.
pub(super) struct EventLog {
    /// Identifies this log: a cursor of another process's log has no meaning here.
    epoch: u128,
    kept: Mutex<Kept>,
    more: Notify,
    follower: Mutex<Option<AbortHandle>>,
}

#[derive(Default)]
struct Kept {
    next: u64,
    events: VecDeque<ProviderEvent>,
}

impl EventLog {
    pub(super) fn follow(mut events: BoxStream<'static, ProviderEvent>) -> Arc<EventLog> {
        let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let log = Arc::new(EventLog {
            epoch: since.as_nanos(),
            kept: Mutex::default(),
            more: Notify::new(),
            follower: Mutex::default(),
        });
        let told = Arc::downgrade(&log);
        let follower = tokio::spawn(async move {
            while let Some(event) = events.next().await {
                let Some(log) = told.upgrade() else { return };
                log.add(event);
            }
        });
        *log.follower.lock() = Some(follower.abort_handle());
        log
    }

    fn add(&self, event: ProviderEvent) {
        let mut kept = self.kept.lock();
        kept.next += 1;
        kept.events.push_back(event);
        if kept.events.len() > KEPT {
            kept.events.pop_front();
        }
        drop(kept);
        self.more.notify_waiters();
    }

    /// Returns the next cursor and the events since this one. Waits at most `wait` for an event.
    pub(super) async fn since(&self, cursor: &str, wait: Duration) -> (String, Vec<ProviderEvent>) {
        let deadline = Instant::now() + wait;
        let known = cursor.split_once('-').filter(|(epoch, _)| *epoch == self.epoch.to_string());
        let from = known.and_then(|(_, number)| number.parse::<u64>().ok());
        let mut from = match from {
            Some(from) => from,
            // An empty cursor starts now; a cursor of an earlier log starts at the beginning of this one.
            None if cursor.is_empty() => self.kept.lock().next,
            None => 0,
        };
        loop {
            // Registered before the check, so that no event is missed in between.
            let mut more = std::pin::pin!(self.more.notified());
            more.as_mut().enable();
            let (next, events) = self.behind(from);
            from = from.min(next);
            if !events.is_empty() || timeout_at(deadline, more).await.is_err() {
                return (format!("{}-{next}", self.epoch), events);
            }
        }
    }

    fn behind(&self, from: u64) -> (u64, Vec<ProviderEvent>) {
        let kept = self.kept.lock();
        let new =
            usize::try_from(kept.next.saturating_sub(from)).unwrap_or(usize::MAX).min(kept.events.len());
        (kept.next, kept.events.iter().skip(kept.events.len() - new).cloned().collect())
    }
}

impl Drop for EventLog {
    fn drop(&mut self) {
        if let Some(follower) = self.follower.lock().take() {
            follower.abort();
        }
    }
}
