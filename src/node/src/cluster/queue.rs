//! Schedules desired states by key. Only the last state of a key counts. One worker at a time works on a key: soon, or
//! later after a failure. Pure: the time is a parameter, and nothing waits.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::hash::Hash;
use std::time::Duration;

use tokio::time::Instant;

/// Pause after the first failure of a key; doubled each time.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

pub(super) struct Queue<K, W, M> {
    entries: HashMap<K, Entry<W, M>>,
    ready: VecDeque<K>,
    later: BTreeSet<(Instant, K)>,
    /// Entries that differ from the desired state.
    backlog: usize,
}

struct Entry<W, M> {
    wanted: W,
    /// Progress towards the desired state.
    memory: M,
    turn: Turn,
    failures: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Turn {
    Idle,
    Ready,
    Later(Instant),
    /// A worker has it; `true`: the desired state has changed since.
    Busy(bool),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Done {
    Held,
    /// The desired state holds, and the entry is no longer needed.
    Over,
    /// The desired state holds, but must be checked again after this time.
    Look(Duration),
    /// The desired state does not hold, by a fault of its own: retried after a pause that grows.
    Failed,
    /// The desired state does not hold, for a reason outside this entry: retried at once, when there are turns.
    Postponed,
}

impl<K: Clone + Eq + Hash + Ord, W: Clone, M: Clone + Default> Queue<K, W, M> {
    pub(super) fn new() -> Queue<K, W, M> {
        Queue { entries: HashMap::new(), ready: VecDeque::new(), later: BTreeSet::new(), backlog: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn backlog(&self) -> usize {
        self.backlog
    }

    pub(super) fn update(&self, key: &K) -> Option<&W> {
        self.entries.get(key).map(|entry| &entry.wanted)
    }

    pub(super) fn put(&mut self, key: K, wanted: W) {
        let fresh = || Entry { wanted: wanted.clone(), memory: M::default(), turn: Turn::Idle, failures: 0 };
        let entry = self.entries.entry(key.clone()).or_insert_with(fresh);
        entry.wanted = wanted;
        match entry.turn {
            Turn::Ready => return,
            Turn::Busy(_) => {
                entry.turn = Turn::Busy(true);
                return;
            }
            // A new state does not wait for a pending check, but it does wait for the pause of a failure.
            Turn::Later(_) if entry.failures > 0 => return,
            Turn::Later(at) => {
                self.later.remove(&(at, key.clone()));
            }
            Turn::Idle => {}
        }
        entry.turn = Turn::Ready;
        self.backlog += 1;
        self.ready.push_back(key);
    }

    pub(super) fn next(&mut self, now: Instant) -> Option<(K, W, M)> {
        while let Some((at, key)) = self.later.first().cloned() {
            if at > now {
                break;
            }
            self.later.pop_first();
            if let Some(entry) = self.entries.get_mut(&key) {
                if entry.failures == 0 {
                    self.backlog += 1;
                }
                entry.turn = Turn::Ready;
                self.ready.push_back(key);
            }
        }
        let key = self.ready.pop_front()?;
        let entry = self.entries.get_mut(&key)?;
        entry.turn = Turn::Busy(false);
        Some((key, entry.wanted.clone(), entry.memory.clone()))
    }

    /// Returns the end of the next pause.
    pub(super) fn due(&self) -> Option<Instant> {
        self.later.first().map(|(at, _)| *at)
    }

    /// Ends a turn with its result. Returns the number of failures in a row.
    pub(super) fn done(&mut self, key: &K, memory: M, done: Done, now: Instant) -> u32 {
        let Some(entry) = self.entries.get_mut(key) else { return 0 };
        let again = entry.turn == Turn::Busy(true);
        entry.memory = memory;
        entry.failures = if done == Done::Failed { entry.failures.saturating_add(1) } else { 0 };
        let failures = entry.failures;
        let pause = match done {
            Done::Failed => Some(FIRST_PAUSE.saturating_mul(1 << (failures - 1).min(10)).min(LONGEST_PAUSE)),
            Done::Look(after) if !again => {
                self.backlog -= 1;
                Some(after)
            }
            Done::Held | Done::Over | Done::Look(_) | Done::Postponed => None,
        };
        if let Some(pause) = pause {
            entry.turn = Turn::Later(now + pause);
            self.later.insert((now + pause, key.clone()));
        } else if again || done == Done::Postponed {
            entry.turn = Turn::Ready;
            self.ready.push_back(key.clone());
        } else {
            self.backlog -= 1;
            entry.turn = Turn::Idle;
            if done == Done::Over {
                self.entries.remove(key);
            }
        }
        failures
    }
}

#[cfg(test)]
mod tests;
