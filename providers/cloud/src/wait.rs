//! Waits for a state of the cloud by looking again and again. May call the cloud, through the caller's function.

use std::time::Duration;

use parking_lot::Mutex;
use peerpod_provider_api::{Error, InstanceId};
use tokio::time::Instant;

use crate::recent::Recent;

/// Time for which an id may be unknown to the cloud before it counts as absent. A VM that was made a moment ago has
/// longer.
const UNKNOWN: Duration = Duration::from_secs(10);
/// Part of the usual time that passes before the first look.
const EARLY: f64 = 0.75;
/// Longest pause before the first look. A few slow states must not delay the answer for all others.
const LATEST: Duration = Duration::from_secs(5);
/// Part of a new measurement in the usual time.
const NEW: f64 = 0.25;

/// Pauses between looks at one kind of state. Share it between all waits for that kind.
#[derive(Debug)]
pub struct Wait {
    first: Duration,
    again: Duration,
    /// Usual time until the state is there, learned from earlier waits; `None`: nothing is learned.
    usual: Option<Mutex<Duration>>,
}

impl Wait {
    /// Looks at once, after the pause `first`, and then after each pause `again`.
    pub const fn new(first: Duration, again: Duration) -> Wait {
        Wait { first, again, usual: None }
    }

    /// Same as [`Wait::new`], but learns how long the state usually takes and looks first shortly before that.
    pub const fn learning(first: Duration, again: Duration) -> Wait {
        Wait { first, again, usual: Some(Mutex::new(Duration::ZERO)) }
    }

    /// Looks until there is an answer, at least once; `None`: there was none at the time `end`. Without an end, the caller ends the
    /// wait by dropping the future.
    ///
    /// # Errors
    /// The first error of a look.
    pub async fn until<T, E, F>(
        &self,
        end: Option<Instant>,
        mut look: impl FnMut() -> F,
    ) -> Result<Option<T>, E>
    where
        F: Future<Output = Result<Option<T>, E>>,
    {
        let start = Instant::now();
        let mut pause =
            self.usual.as_ref().map_or(Duration::ZERO, |usual| usual.lock().mul_f64(EARLY).min(LATEST));
        if let Some(end) = end {
            pause = pause.min(end.saturating_duration_since(start));
        }
        let mut next = self.first;
        loop {
            if pause > Duration::ZERO {
                tokio::time::sleep(pause).await;
            }
            if let Some(answer) = look().await? {
                self.learn(start.elapsed());
                return Ok(Some(answer));
            }
            (pause, next) = (next, self.again);
            if end.is_some_and(|end| Instant::now() + pause >= end) {
                return Ok(None);
            }
        }
    }

    fn learn(&self, took: Duration) {
        let Some(usual) = &self.usual else { return };
        let mut usual = usual.lock();
        *usual = usual.mul_f64(1.0 - NEW) + took.mul_f64(NEW);
    }
}

/// Result of one look at a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Look<T> {
    /// The VM has the awaited state, or a state that ends the wait.
    Done(T),
    /// The VM is there, in another state.
    Open,
    /// The VM has the marks of another owner.
    Foreign,
    /// The VM has no marks; the cloud may show a new VM before its marks.
    Unmarked,
    /// The cloud does not know the VM.
    Unknown,
}

/// Waits until a VM of this owner has a state. Believes a cloud that does not know the VM only after some seconds, and
/// for a VM that this process made a moment ago only after a minute. The caller sets the deadline by dropping the
/// future. `what` and `cloud` are for errors.
///
/// # Errors
/// [`Error::NotFound`] if this owner has no such VM; the error of a look.
pub async fn wait_for<T, F>(
    wait: &Wait,
    recent: &Recent,
    id: &InstanceId,
    (what, cloud): (&str, &str),
    mut look: impl FnMut() -> F,
) -> Result<T, Error>
where
    F: Future<Output = Result<Look<T>, Error>>,
{
    let since = Instant::now();
    let done = wait.until(None, || {
        let found = look();
        async move {
            let found = found.await?;
            let may_be_denied = recent.may_be_denied(id, Instant::now());
            match found {
                Look::Done(seen) => {
                    recent.seen(id);
                    Ok(Some(seen))
                }
                Look::Open => {
                    recent.seen(id);
                    Ok(None)
                }
                _ if may_be_denied => Ok(None),
                Look::Foreign => Err(Error::not_found(format!("{what}: it has another owner"))),
                _ if since.elapsed() < UNKNOWN => Ok(None),
                Look::Unmarked => Err(Error::not_found(format!("{what}: it has no tag of a cluster"))),
                Look::Unknown => Err(Error::not_found(format!("{what}: {cloud} does not know it"))),
            }
        }
    });
    let gone = || Error::transient(format!("{what}: the wait ended without an answer"));
    done.await?.ok_or_else(gone)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use peerpod_provider_api::IdempotencyKey;

    use super::*;

    const FIRST: Duration = Duration::from_millis(300);
    const AGAIN: Duration = Duration::from_secs(1);

    /// Waits for a state that is there after a time; returns the number of looks and the time of the answer.
    async fn looks_of(wait: &Wait, there_after: Duration) -> (u32, Duration) {
        let (start, looks) = (Instant::now(), Cell::new(0));
        let answer = wait.until(None, async || {
            looks.set(looks.get() + 1);
            Ok::<_, Error>((start.elapsed() >= there_after).then_some(()))
        });
        assert_eq!(answer.await, Ok(Some(())));
        (looks.get(), start.elapsed())
    }

    #[tokio::test(start_paused = true)]
    async fn a_wait_that_learns_needs_fewer_looks() {
        let there = Duration::from_secs(6);
        let (wait, learning) = (Wait::new(FIRST, AGAIN), Wait::learning(FIRST, AGAIN));
        let (first, _) = looks_of(&learning, there).await;
        for _ in 0..20 {
            looks_of(&learning, there).await;
            looks_of(&wait, there).await;
        }
        let (learned, at) = looks_of(&learning, there).await;
        assert_eq!((looks_of(&wait, there).await.0, first), (8, 8));
        assert!(learned < 5 && at < there + AGAIN, "{learned} looks, {at:?}");
        assert!(looks_of(&learning, Duration::ZERO).await.1 < there, "an early state is found early");
    }

    #[tokio::test(start_paused = true)]
    async fn slow_states_do_not_delay_the_first_look_at_others() {
        let learning = Wait::learning(FIRST, AGAIN);
        for _ in 0..20 {
            looks_of(&learning, Duration::from_secs(120)).await;
        }
        assert_eq!(looks_of(&learning, Duration::ZERO).await, (1, LATEST));
    }

    #[tokio::test(start_paused = true)]
    async fn a_wait_ends_at_its_end() {
        let wait = Wait::new(FIRST, AGAIN);
        let (start, looks) = (Instant::now(), Cell::new(0));
        let end = start + Duration::from_secs(5);
        let answer = wait.until(Some(end), async || {
            looks.set(looks.get() + 1);
            Ok::<Option<()>, Error>(None)
        });
        assert_eq!((answer.await, looks.get()), (Ok(None), 6));
        assert!(Instant::now() < end);
        let learning = Wait::learning(FIRST, AGAIN);
        looks_of(&learning, Duration::from_secs(60)).await;
        for wait in [wait, learning] {
            let soon = Instant::now() + FIRST;
            let once = wait.until(Some(soon), async || Ok::<_, Error>(Some(7)));
            assert_eq!(once.await, Ok(Some(7)), "one look is always made");
            assert!(Instant::now() <= soon);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_cloud_is_believed_after_a_time() {
        let (wait, recent) = (Wait::new(FIRST, AGAIN), Recent::default());
        let id = InstanceId::new("vm-1").unwrap();
        let ask = async |look: Look<()>| {
            let start = Instant::now();
            let answer = wait_for(&wait, &recent, &id, ("look at vm-1", "Cloud"), async || Ok(look)).await;
            (answer.unwrap_err().to_string(), start.elapsed())
        };
        let (text, after) = ask(Look::Unknown).await;
        assert!(text == "look at vm-1: Cloud does not know it" && after >= UNKNOWN, "{text} {after:?}");
        let (text, after) = ask(Look::Unmarked).await;
        assert!(text.contains("no tag of a cluster") && after >= UNKNOWN, "{text} {after:?}");
        let (text, after) = ask(Look::Foreign).await;
        assert!(text.contains("another owner") && after == Duration::ZERO, "{text} {after:?}");
        recent.made(&id, &IdempotencyKey::derive("c", "s", 0), "a", Instant::now());
        let (_, after) = ask(Look::Unknown).await;
        assert!(after >= crate::recent::RECENT, "{after:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_vm_that_was_seen_once_is_not_recent_any_more() {
        let (wait, recent) = (Wait::new(FIRST, AGAIN), Recent::default());
        let id = InstanceId::new("vm-1").unwrap();
        recent.made(&id, &IdempotencyKey::derive("c", "s", 0), "a", Instant::now());
        let looks = Cell::new(0);
        let look = async || {
            looks.set(looks.get() + 1);
            Ok(if looks.get() < 3 { Look::Open } else { Look::Done(looks.get()) })
        };
        assert_eq!(wait_for(&wait, &recent, &id, ("look", "Cloud"), look).await, Ok(3));
        assert!(!recent.may_be_denied(&id, Instant::now()));
    }
}
