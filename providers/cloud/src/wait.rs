//! Waits for asynchronous operations of a cloud (an address, an attachment) with few polls. The first poll comes at the
//! usual duration, the next ones soon after and then at growing intervals. The usual duration is learned.
//!
//! Polls go through a [`crate::Batcher`], so that all waiting callers share a call.

use std::future::Future;
use std::time::Duration;

use parking_lot::Mutex;
use peerpod_provider_api::{Error, Retry};
use tokio::time::Instant;

/// Shortest pause before a poll.
const SHORTEST: Duration = Duration::from_millis(100);
/// Longest pause before the first poll.
const LONGEST_FIRST: Duration = Duration::from_secs(60);
/// Longest pause between two polls.
const LONGEST: Duration = Duration::from_secs(5);
/// Usual duration before any is measured.
const FIRST_GUESS: Duration = Duration::from_secs(1);

/// Learned duration of one kind of wait. One per kind and account, shared by reference.
#[derive(Debug)]
pub struct Wait {
    /// Usual duration, as a moving average.
    usual: Mutex<Duration>,
}

impl Default for Wait {
    fn default() -> Wait {
        Wait { usual: Mutex::new(FIRST_GUESS) }
    }
}

impl Wait {
    /// Polls until there is a result. Retryable errors are waited out. The caller ends the wait by dropping the future.
    ///
    /// # Errors
    /// The first error of `inspect` that is not retryable.
    pub async fn until<T, F>(&self, inspect: impl Fn() -> F) -> Result<T, Error>
    where
        F: Future<Output = Result<Option<T>, Error>>,
    {
        let start = Instant::now();
        let usual = *self.usual.lock();
        let mut pause = usual.clamp(SHORTEST, LONGEST_FIRST);
        let mut next = (usual / 10).clamp(SHORTEST, LONGEST);
        loop {
            tokio::time::sleep(pause).await;
            match inspect().await {
                Ok(Some(found)) => {
                    self.learn(start.elapsed());
                    return Ok(found);
                }
                Ok(None) => pause = next,
                Err(error) => match error.retry() {
                    Retry::After(least) => pause = next.max(least),
                    Retry::NextOffering | Retry::Never => return Err(error),
                },
            }
            next = (next * 3 / 2).min(LONGEST);
        }
    }

    /// Updates the average with a quarter of the new value and three quarters of the old. The new value is slightly
    /// reduced, because a result of the first poll may have been there earlier.
    fn learn(&self, took: Duration) {
        let mut usual = self.usual.lock();
        *usual = (*usual * 3 + took.mul_f64(0.9)) / 4;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// Returns the number of polls and the seconds until a result that takes `takes` is found.
    async fn find(wait: &Wait, takes: f64) -> (u32, f64) {
        let (looks, start) = (Cell::new(0), Instant::now());
        wait.until(|| {
            looks.set(looks.get() + 1);
            async { Ok((start.elapsed().as_secs_f64() >= takes).then_some(())) }
        })
        .await
        .unwrap();
        (looks.get(), start.elapsed().as_secs_f64())
    }

    #[tokio::test(start_paused = true)]
    async fn long_waits_need_few_polls_and_lose_little_time() {
        for takes in [0.3, 2.0, 8.0, 30.0] {
            let wait = Wait::default();
            for _ in 0..30 {
                find(&wait, takes).await;
            }
            let (mut looks, mut took) = (0, 0.0);
            for _ in 0..20 {
                let (more, time) = find(&wait, takes).await;
                (looks, took) = (looks + more, took + time / 20.0);
            }
            println!("{takes} s: {:.1} looks, {took:.2} s", f64::from(looks) / 20.0);
            assert!(looks <= 20 * 3, "{takes} s: {looks} looks");
            assert!(took < takes * 1.1 + 0.2, "{takes} s: found after {took} s");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn only_transient_errors_are_waited_out() {
        let wait = Wait::default();
        let looks = Cell::new(0);
        let found = wait.until(|| {
            looks.set(looks.get() + 1);
            let now = looks.get();
            async move {
                match now {
                    1 => Err(Error::transient("reset")),
                    2 => Err(Error::Throttled { after: Some(Duration::from_secs(3)), text: "slow".into() }),
                    _ => Ok(Some(now)),
                }
            }
        });
        assert_eq!(found.await, Ok(3));
        let gone = wait.until(|| async { Err::<Option<()>, _>(Error::not_found("gone")) }).await;
        assert_eq!(gone, Err(Error::not_found("gone")));
    }
}
