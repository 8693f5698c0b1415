//! Keeps an answer of the cloud that hardly changes: types, subnets, images. May call the cloud, through the caller's
//! function.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use peerpod_provider_api::Error;
use tokio::sync::Mutex;
use tokio::time::Instant;

/// Time for which an old value is used without another fetch after a failed one. Otherwise each of many callers would
/// wait for a failure of its own.
const AFTER_FAILURE: Duration = Duration::from_secs(10);

/// Value that is fetched at first use and kept for a time. Concurrent callers share one fetch. When a fetch fails, an
/// old value is better than an error.
#[derive(Debug)]
pub struct Kept<T> {
    /// Description for the log, like `facts about the account`.
    what: &'static str,
    fresh: Duration,
    /// Held across a fetch.
    value: Mutex<Option<Value<T>>>,
}

#[derive(Debug)]
struct Value<T> {
    value: Arc<T>,
    until: Instant,
}

impl<T> Kept<T> {
    /// Returns an empty one, whose values are fresh for this time.
    pub fn new(what: &'static str, fresh: Duration) -> Kept<T> {
        Kept { what, fresh, value: Mutex::default() }
    }

    /// Returns the value. Fetches it if it is missing or no longer fresh.
    ///
    /// # Errors
    /// The error of the fetch, when there is no earlier value.
    pub async fn get<F>(&self, fetch: impl FnOnce() -> F) -> Result<Arc<T>, Error>
    where
        F: Future<Output = Result<T, Error>>,
    {
        let mut kept = self.value.lock().await;
        if let Some(fresh) = kept.as_ref().filter(|kept| Instant::now() < kept.until) {
            return Ok(Arc::clone(&fresh.value));
        }
        let error = match fetch().await {
            Ok(value) => return Ok(self.put(&mut kept, value)),
            Err(error) => error,
        };
        let Some(old) = kept.as_mut() else { return Err(error) };
        tracing::warn!("an old value is used for the {}: {error}", self.what);
        old.until = Instant::now() + AFTER_FAILURE;
        Ok(Arc::clone(&old.value))
    }

    /// Fetches the value even if the kept one is fresh.
    ///
    /// # Errors
    /// The error of the fetch; an earlier value stays.
    pub async fn renew<F>(&self, fetch: impl FnOnce() -> F) -> Result<Arc<T>, Error>
    where
        F: Future<Output = Result<T, Error>>,
    {
        let mut kept = self.value.lock().await;
        let value = fetch().await?;
        Ok(self.put(&mut kept, value))
    }

    /// Drops the value: the cloud's answers contradict it. The next caller fetches it, or gets the error.
    pub async fn forget(&self) {
        *self.value.lock().await = None;
    }

    fn put(&self, kept: &mut Option<Value<T>>, value: T) -> Arc<T> {
        let value = Arc::new(value);
        *kept = Some(Value { value: Arc::clone(&value), until: Instant::now() + self.fresh });
        value
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    const FRESH: Duration = Duration::from_secs(100);

    /// Cloud that counts its calls and answers with their number, or fails.
    #[derive(Default)]
    struct Cloud {
        calls: AtomicU32,
        fails: std::sync::atomic::AtomicBool,
    }

    impl Cloud {
        async fn fetch(&self) -> Result<u32, Error> {
            let number = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
            tokio::time::sleep(Duration::from_secs(1)).await;
            if self.fails.load(Ordering::Relaxed) { Err(Error::transient("down")) } else { Ok(number) }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn callers_share_one_fetch_until_the_value_is_old() {
        let (kept, cloud) = (Kept::new("number", FRESH), Cloud::default());
        let all = futures_util::future::join_all((0..50).map(|_| kept.get(|| cloud.fetch()))).await;
        assert!(all.into_iter().all(|one| *one.unwrap() == 1));
        tokio::time::advance(FRESH).await;
        assert_eq!(*kept.get(|| cloud.fetch()).await.unwrap(), 2);
        assert_eq!(*kept.renew(|| cloud.fetch()).await.unwrap(), 3);
        assert_eq!(*kept.get(|| cloud.fetch()).await.unwrap(), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn an_old_value_is_better_than_an_error_and_is_not_fetched_by_each_caller() {
        let (kept, cloud) = (Kept::new("number", FRESH), Cloud::default());
        cloud.fails.store(true, Ordering::Relaxed);
        assert!(kept.get(|| cloud.fetch()).await.is_err(), "there is no old value");
        cloud.fails.store(false, Ordering::Relaxed);
        assert_eq!(*kept.get(|| cloud.fetch()).await.unwrap(), 2);
        cloud.fails.store(true, Ordering::Relaxed);
        tokio::time::advance(FRESH).await;
        for _ in 0..3 {
            assert_eq!(*kept.get(|| cloud.fetch()).await.unwrap(), 2);
        }
        assert_eq!(cloud.calls.load(Ordering::Relaxed), 3);
        assert!(kept.renew(|| cloud.fetch()).await.is_err());
        tokio::time::advance(AFTER_FAILURE).await;
        cloud.fails.store(false, Ordering::Relaxed);
        assert_eq!(*kept.get(|| cloud.fetch()).await.unwrap(), 5);
        kept.forget().await;
        assert_eq!(*kept.get(|| cloud.fetch()).await.unwrap(), 6);
    }
}
