//! Queues of calls that wait for a token, one per bucket. Each queue has a task that hands out tokens while calls wait,
//! and that ends when none waits.
//!
//! The order is fair queueing in rounds. A call joins the current round, or the round after the last one of its owner.
//! Each owner therefore gets one call per round, however many it has.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::table::BucketLimits;
use super::tokens::TokenBucket;

/// Time reserved for the cloud's answer; at most a tenth of the time to the deadline.
const ANSWER: Duration = Duration::from_secs(2);

/// Reason why a call gets no turn.
pub(super) struct NoTurn {
    /// Number of calls that wait before it.
    pub(super) ahead: u32,
    /// Forecast of the wait, if it is too long. `None`: the deadline came first, because tokens came more slowly than
    /// forecast.
    pub(super) wait: Option<Duration>,
}

/// All queues of an account, by bucket.
#[derive(Default)]
pub(super) struct Queues(Mutex<HashMap<&'static str, Queue>>);

/// Position in a queue: the round, and the order of arrival.
type Place = (u64, u64);

struct Queue {
    tokens: TokenBucket,
    waiting: BTreeMap<Place, Waiter>,
    owners: HashMap<Arc<str>, Owner>,
    /// Round that is being served.
    round: u64,
    came: u64,
    running: u32,
    at_once: u32,
    /// Task that hands out tokens, while calls wait.
    server: Option<AbortHandle>,
    wake: Arc<Notify>,
}

struct Waiter {
    owner: Arc<str>,
    grant: oneshot::Sender<Permit>,
}

struct Owner {
    last: u64,
    waiting: u32,
}

impl Queue {
    fn new(limits: BucketLimits) -> Queue {
        Queue {
            tokens: TokenBucket::new(limits),
            waiting: BTreeMap::new(),
            owners: HashMap::new(),
            round: 0,
            came: 0,
            running: 0,
            at_once: limits.at_once,
            server: None,
            wake: Arc::default(),
        }
    }

    fn join(&mut self, owner: &str, grant: oneshot::Sender<Permit>) -> Place {
        let round = self.round_of(owner);
        let owner: Arc<str> = match self.owners.get_key_value(owner) {
            Some((known, _)) => Arc::clone(known),
            None => owner.into(),
        };
        let entry = self.owners.entry(Arc::clone(&owner)).or_insert(Owner { last: round, waiting: 0 });
        entry.last = round;
        entry.waiting += 1;
        self.came += 1;
        let place = (round, self.came);
        self.waiting.insert(place, Waiter { owner, grant });
        place
    }

    fn round_of(&self, owner: &str) -> u64 {
        self.owners.get(owner).map_or(self.round, |owner| self.round.max(owner.last + 1))
    }

    /// Number of waiting calls before this position.
    fn ahead(&self, place: Place) -> u32 {
        u32::try_from(self.waiting.range(..place).count()).unwrap_or(u32::MAX)
    }

    fn leave(&mut self, place: Place) -> Option<Waiter> {
        let waiter = self.waiting.remove(&place)?;
        if let Some(owner) = self.owners.get_mut(&waiter.owner) {
            owner.waiting -= 1;
            if owner.waiting == 0 {
                self.owners.remove(&waiter.owner);
            }
        }
        Some(waiter)
    }

    fn next(&mut self) -> Option<Waiter> {
        let place = *self.waiting.keys().next()?;
        self.round = place.0;
        self.leave(place)
    }

    fn is_full(&self) -> bool {
        self.running >= self.at_once
    }
}

impl Queues {
    /// Waits for a token and a slot, as long as the answer can still come in time.
    pub(super) async fn turn(
        self: &Arc<Queues>,
        bucket: &'static str,
        limits: &BucketLimits,
        owner: &str,
        deadline: Instant,
    ) -> Result<Permit, NoTurn> {
        let now = Instant::now();
        let latest = latest(now, deadline);
        let (mut granted, waiting) = {
            let mut queues = self.0.lock();
            let queue = queues.entry(bucket).or_insert_with(|| Queue::new(*limits));
            if queue.waiting.is_empty() && !queue.is_full() && queue.tokens.take(now).is_ok() {
                queue.running += 1;
                return Ok(self.permit(bucket));
            }
            let ahead = queue.ahead((queue.round_of(owner), u64::MAX));
            let at = queue.tokens.forecast(ahead, now);
            if at > latest {
                return Err(NoTurn { ahead, wait: Some(at.saturating_duration_since(now)) });
            }
            let (grant, granted) = oneshot::channel();
            let place = queue.join(owner, grant);
            // A task that ended with its runtime is finished, too.
            if queue.server.as_ref().is_none_or(AbortHandle::is_finished) {
                let task = tokio::spawn(Arc::clone(self).serve(bucket, Arc::clone(&queue.wake)));
                queue.server = Some(task.abort_handle());
            }
            (granted, Waiting { queues: self, bucket, place })
        };
        tokio::select! {
            biased;
            // The sender is dropped unsent only together with the whole queue; then no grant can come.
            Ok(permit) = &mut granted => Ok(permit),
            () = tokio::time::sleep_until(latest) => Err(NoTurn { ahead: waiting.ahead(), wait: None }),
        }
    }

    /// Records that the cloud accepts only this many more calls of the bucket for now.
    pub(super) fn left(&self, bucket: &'static str, limits: &BucketLimits, calls: u32) {
        let mut queues = self.0.lock();
        let queue = queues.entry(bucket).or_insert_with(|| Queue::new(*limits));
        queue.tokens.left(calls, Instant::now());
    }

    fn permit(self: &Arc<Queues>, bucket: &'static str) -> Permit {
        Permit { queues: Arc::clone(self), bucket, sent: None }
    }

    /// Hands out tokens of one bucket as long as calls wait.
    async fn serve(self: Arc<Queues>, bucket: &'static str, wake: Arc<Notify>) {
        loop {
            let (grants, pause) = {
                let mut queues = self.0.lock();
                let Some(queue) = queues.get_mut(bucket) else { return };
                let mut grants = Vec::new();
                let pause = loop {
                    if queue.waiting.is_empty() {
                        break Pause::Ended;
                    }
                    if queue.is_full() {
                        break Pause::UntilWoken;
                    }
                    match queue.tokens.take(Instant::now()) {
                        Err(at) => break Pause::Until(at),
                        Ok(()) => {
                            let Some(waiter) = queue.next() else { break Pause::Ended };
                            queue.running += 1;
                            grants.push(waiter.grant);
                        }
                    }
                };
                if matches!(pause, Pause::Ended) {
                    // Under the same lock as the check of the queue, so that a new call starts another task.
                    queue.server = None;
                }
                (grants, pause)
            };
            for grant in grants {
                // If the caller is gone, the unsent permit returns its token and slot when it is dropped.
                drop(grant.send(self.permit(bucket)));
            }
            match pause {
                Pause::Ended => return,
                Pause::UntilWoken => wake.notified().await,
                Pause::Until(at) => {
                    tokio::select! {
                        () = tokio::time::sleep_until(at) => {}
                        () = wake.notified() => {}
                    }
                }
            }
        }
    }

    /// Number of entries in each queue: waiters and owners.
    #[cfg(test)]
    pub(super) fn kept(&self) -> HashMap<&'static str, usize> {
        let kept = |queue: &Queue| queue.waiting.len() + queue.owners.len();
        self.0.lock().iter().map(|(bucket, queue)| (*bucket, kept(queue))).collect()
    }
}

/// Returns the latest time of a turn that leaves time for the answer before the deadline. A call that joins a full
/// queue gets the last turn in time, by less than the time of one token. Without this margin, one in every few calls
/// would be sent without waiting for its answer.
fn latest(now: Instant, deadline: Instant) -> Instant {
    deadline - ANSWER.min(deadline.saturating_duration_since(now) / 10)
}

enum Pause {
    Ended,
    UntilWoken,
    Until(Instant),
}

/// Position in a queue. It is released when its waiter is dropped.
struct Waiting<'l> {
    queues: &'l Queues,
    bucket: &'static str,
    place: Place,
}

impl Waiting<'_> {
    fn ahead(&self) -> u32 {
        self.queues.0.lock().get(self.bucket).map_or(0, |queue| queue.ahead(self.place))
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let left = self.queues.0.lock().get_mut(self.bucket).and_then(|queue| queue.leave(self.place));
        // Dropped outside the lock, as a precaution.
        drop(left);
    }
}

/// Right to make one call. If it is dropped before the call was sent, its token goes back. Its slot always goes back.
pub(super) struct Permit {
    queues: Arc<Queues>,
    bucket: &'static str,
    sent: Option<Instant>,
}

impl Permit {
    /// Records that the call is sent now.
    pub(super) fn sent(mut self) -> Permit {
        self.sent = Some(Instant::now());
        self
    }

    /// Reports that the cloud throttled the call.
    pub(super) fn throttled(self, after: Option<Duration>) {
        let now = Instant::now();
        if let Some(queue) = self.queues.0.lock().get_mut(self.bucket) {
            queue.tokens.throttled(self.sent.unwrap_or(now), after, now);
        }
    }

    /// Reports that the cloud answered the call.
    pub(super) fn answered(self) {
        if let Some(queue) = self.queues.0.lock().get_mut(self.bucket) {
            queue.tokens.answered(Instant::now());
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        if let Some(queue) = self.queues.0.lock().get_mut(self.bucket) {
            if self.sent.is_none() {
                queue.tokens.give_back(Instant::now());
            }
            queue.running = queue.running.saturating_sub(1);
            queue.wake.notify_one();
        }
    }
}
