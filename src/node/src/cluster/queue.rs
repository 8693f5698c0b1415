//! Whose turn it is: wishes by name, of which only the last counts; each is worked on by one at a time, soon, or later
//! after a failure. Pure: the clock is handed in, and nothing waits.

use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    hash::Hash,
    time::Duration,
};

use tokio::time::Instant;

/// The pause after a first failure of one wish; doubled each time.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// The longest.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

pub(super) struct Queue<K, W, M> {
    entries: HashMap<K, Entry<W, M>>,
    ready: VecDeque<K>,
    later: BTreeSet<(Instant, K)>,
    /// Entries that are not as wished.
    backlog: usize,
}

struct Entry<W, M> {
    wish: W,
    /// What is known of how far it is fulfilled.
    memory: M,
    turn: Turn,
    failures: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Turn {
    Idle,
    Ready,
    Later(Instant),
    /// It is worked on; and whether another wish has come since.
    Busy(bool),
}

/// What became of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Done {
    /// As wished.
    Held,
    /// As wished, and nothing more will be.
    Over,
    /// As wished, but look again after this.
    Look(Duration),
    /// Not as wished, by its own fault: again after a pause that grows.
    Failed,
    /// Not as wished, by nobody's fault here: again at once, when there are turns.
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

    pub(super) fn wish(&self, key: &K) -> Option<&W> {
        self.entries.get(key).map(|entry| &entry.wish)
    }

    /// This is wished from now on.
    pub(super) fn put(&mut self, key: K, wish: W) {
        match self.entries.get_mut(&key) {
            Some(entry) => {
                entry.wish = wish;
                match entry.turn {
                    Turn::Idle => {
                        entry.turn = Turn::Ready;
                        self.backlog += 1;
                        self.ready.push_back(key);
                    }
                    Turn::Busy(_) => entry.turn = Turn::Busy(true),
                    // A look that was only for luck is not waited for; a failure's pause is.
                    Turn::Later(at) if entry.failures == 0 => {
                        entry.turn = Turn::Ready;
                        self.later.remove(&(at, key.clone()));
                        self.backlog += 1;
                        self.ready.push_back(key);
                    }
                    Turn::Ready | Turn::Later(_) => {}
                }
            }
            None => {
                let entry = Entry { wish, memory: M::default(), turn: Turn::Ready, failures: 0 };
                self.entries.insert(key.clone(), entry);
                self.backlog += 1;
                self.ready.push_back(key);
            }
        }
    }

    /// Whose turn it is now.
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
        Some((key, entry.wish.clone(), entry.memory.clone()))
    }

    /// When the next pause is over.
    pub(super) fn due(&self) -> Option<Instant> {
        self.later.first().map(|(at, _)| *at)
    }

    /// What became of a turn. Returns how often in a row it failed.
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
