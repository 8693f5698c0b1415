//! How fast one kind of call may follow another: as fast as it comes, until the cloud throttles; then in single file
//! with a gap that grows while it throttles and shrinks while it does not. In the order of asking, so nobody starves.
//!
//! The cloud's bucket is per account and ours is per process, so the rate cannot be configured, only learned.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

const FIRST_GAP: Duration = Duration::from_millis(100);
const LONGEST_GAP: Duration = Duration::from_secs(5);
/// Below this a gap is none.
const SHORTEST_GAP: Duration = Duration::from_millis(20);
/// A cloud that asks for a longer pause is not believed: one hour of silence would be an outage of our making.
const LONGEST_AFTER: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
pub(super) struct Pace(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    gap: Duration,
    /// The next free turn.
    next: Option<Instant>,
    /// How often it became slower: many calls that were under way together are throttled together, and that is one
    /// lesson.
    lessons: u64,
}

/// A turn that was had; its answer is reported with it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Turn {
    lessons: u64,
}

impl Pace {
    /// Waits for the caller's turn.
    pub(super) async fn turn(&self) -> Turn {
        let (at, lessons) = {
            let mut state = self.0.lock();
            let now = Instant::now();
            let at = state.next.map_or(now, |next| next.max(now));
            state.next = if state.gap.is_zero() && at <= now { None } else { Some(at + state.gap) };
            (at, state.lessons)
        };
        tokio::time::sleep_until(at).await;
        Turn { lessons }
    }

    /// The cloud throttled, and perhaps said for how long.
    pub(super) fn slower(&self, turn: Turn, after: Option<Duration>) {
        let mut state = self.0.lock();
        if turn.lessons == state.lessons {
            state.lessons += 1;
            state.gap = (state.gap * 2).clamp(FIRST_GAP, LONGEST_GAP);
        }
        let earliest = Instant::now() + after.unwrap_or(state.gap).min(LONGEST_AFTER);
        state.next = Some(state.next.map_or(earliest, |next| next.max(earliest)));
    }

    /// The cloud answered.
    pub(super) fn faster(&self) {
        let mut state = self.0.lock();
        state.gap = state.gap * 9 / 10;
        if state.gap < SHORTEST_GAP {
            state.gap = Duration::ZERO;
        }
    }
}
