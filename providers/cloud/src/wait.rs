//! Waiting for something a cloud does in its own time (an address, an attachment) with few looks: the first comes when
//! it is usually there, the next ones soon after and then ever less often. What "usually" is, is learned.
//!
//! Looks go through a [`crate::Batcher`], so that all who wait share a call.

use std::future::Future;
use std::time::Duration;

use parking_lot::Mutex;
use peerpod_provider_api::{Error, Retry};
use tokio::time::Instant;

/// The shortest pause before a look.
const SHORTEST: Duration = Duration::from_millis(100);
/// The longest pause before the first look.
const LONGEST_FIRST: Duration = Duration::from_secs(60);
/// The longest pause between two looks.
const LONGEST: Duration = Duration::from_secs(5);
/// Before anything was learned.
const FIRST_GUESS: Duration = Duration::from_secs(1);

/// What is known of one kind of wait. One per kind and account, shared by reference.
#[derive(Debug)]
pub struct Wait {
    /// How long it takes, as a moving average.
    usual: Mutex<Duration>,
}

impl Default for Wait {
    fn default() -> Wait {
        Wait { usual: Mutex::new(FIRST_GUESS) }
    }
}

impl Wait {
    /// Looks until there is something. Errors that time can mend are waited out; the caller ends the wait by dropping
    /// it.
    ///
    /// # Errors
    /// What `look` says that time cannot mend.
    pub async fn until<T, F>(&self, look: impl Fn() -> F) -> Result<T, Error>
    where
        F: Future<Output = Result<Option<T>, Error>>,
    {
        let start = Instant::now();
        let usual = *self.usual.lock();
        let mut pause = usual.clamp(SHORTEST, LONGEST_FIRST);
        let mut next = (usual / 10).clamp(SHORTEST, LONGEST);
        loop {
            tokio::time::sleep(pause).await;
            match look().await {
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

    /// A quarter of the new, three of the old. A little less than it took: whoever finds it there at the first look
    /// might have found it earlier.
    fn learn(&self, took: Duration) {
        let mut usual = self.usual.lock();
        *usual = (*usual * 3 + took.mul_f64(0.9)) / 4;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// Looks and seconds until something that takes `takes` is found.
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
    async fn after_a_while_few_looks_are_enough_and_little_time_is_lost() {
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
    async fn what_time_mends_is_waited_out_and_nothing_else() {
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
