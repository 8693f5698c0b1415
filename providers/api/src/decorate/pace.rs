//! Rate limit for one kind of call. Calls run without a limit until the cloud throttles. Then they run one after
//! another, with a gap that grows on each throttle and shrinks on each success. Calls keep their order, so none
//! starves.
//!
//! The cloud's token bucket is per account and this limit is per process, so the rate is learned, not configured.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

const FIRST_GAP: Duration = Duration::from_millis(100);
const LONGEST_GAP: Duration = Duration::from_secs(5);
/// Shorter gaps are set to zero.
const SHORTEST_GAP: Duration = Duration::from_millis(20);
/// Upper limit for a pause that the cloud asks for: an hour without calls would be an outage of its own.
const LONGEST_AFTER: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
pub(super) struct Pace(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    gap: Duration,
    /// Time of the next free turn.
    next: Option<Instant>,
    /// Number of times the gap grew. Calls that were in flight together are throttled together and count as one.
    lessons: u64,
}

impl Pace {
    /// Waits for the turn of the caller. The result of the call is reported with the returned number.
    pub(super) async fn turn(&self) -> u64 {
        let (at, lessons) = {
            let mut state = self.0.lock();
            let now = Instant::now();
            let at = state.next.map_or(now, |next| next.max(now));
            state.next = if state.gap.is_zero() && at <= now { None } else { Some(at + state.gap) };
            (at, state.lessons)
        };
        tokio::time::sleep_until(at).await;
        lessons
    }

    /// Records that the cloud throttled the call, with the pause it asked for, if any.
    pub(super) fn slower(&self, turn: u64, after: Option<Duration>) {
        let mut state = self.0.lock();
        if turn == state.lessons {
            state.lessons += 1;
            state.gap = (state.gap * 2).clamp(FIRST_GAP, LONGEST_GAP);
        }
        let earliest = Instant::now() + after.unwrap_or(state.gap).min(LONGEST_AFTER);
        state.next = Some(state.next.map_or(earliest, |next| next.max(earliest)));
    }

    /// Records that the cloud answered the call.
    pub(super) fn faster(&self) {
        let mut state = self.0.lock();
        state.gap = state.gap * 9 / 10;
        if state.gap < SHORTEST_GAP {
            state.gap = Duration::ZERO;
        }
    }
}
