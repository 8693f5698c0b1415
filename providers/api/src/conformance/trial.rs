//! One run of promises against one provider: remembers what it made, and takes all of it away again.

use std::collections::{BTreeSet, HashSet};
use std::future::Future;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use futures_util::FutureExt;
use parking_lot::Mutex;
use tokio::time::{Instant, sleep, timeout};

use super::{Checked, Harness, Promise, Stop, Verdict};
use crate::{CreateRequest, Created, Error, IdempotencyKey, InstanceId, Owned, OwnedState, Provider, Retry};

/// How often a condition is looked at.
const EVERY: Duration = Duration::from_millis(10);
/// After a call that was cut off, something may still come into being; when nothing did for so long, or twice as long as
/// the slowest create took, nothing will.
const QUIET: Duration = Duration::from_millis(500);

/// See the module. Dropping it takes nothing away: call [`Trial::clean_up`].
pub struct Trial {
    pub(super) harness: Arc<dyn Harness>,
    keys: Mutex<HashSet<IdempotencyKey>>,
    ids: Mutex<BTreeSet<InstanceId>>,
    number: AtomicU32,
    /// Some create's answer was not waited for.
    cut: AtomicBool,
    /// A check is under way, or was left before its end: so may its creates be.
    open: AtomicBool,
    slowest: Mutex<Duration>,
}

impl Trial {
    /// A run that has made nothing yet.
    pub fn new(harness: Arc<dyn Harness>) -> Trial {
        Trial {
            harness,
            keys: Mutex::default(),
            ids: Mutex::default(),
            number: AtomicU32::new(0),
            cut: AtomicBool::new(false),
            open: AtomicBool::new(false),
            slowest: Mutex::default(),
        }
    }

    /// Tries a promise, and takes away what was made for it. A clean-up that fails is a broken promise, too.
    pub async fn keeps(self: &Arc<Trial>, promise: &Promise) -> Verdict {
        let patience = self.harness.patience();
        let check = AssertUnwindSafe((promise.check)(Arc::clone(self))).catch_unwind();
        self.open.store(true, Ordering::Relaxed);
        let outcome = match timeout(patience, check).await {
            Ok(Ok(outcome)) => {
                self.open.store(outcome.is_err(), Ordering::Relaxed);
                outcome
            }
            Ok(Err(panic)) => Err(Stop::Broken(format!("it panicked: {}", words_of(&*panic)))),
            Err(_) => Err(Stop::Broken(format!("it took longer than {patience:?}"))),
        };
        let cleaned = self.clean_up().await;
        match (outcome, cleaned) {
            (Err(Stop::Broken(how)), _) => Verdict::Broken(how),
            (_, Err(how)) => Verdict::Broken(format!("afterwards: {how}")),
            (Err(Stop::NotApplicable(why)), Ok(())) => Verdict::NotApplicable(why),
            (Ok(()), Ok(())) => Verdict::Kept,
        }
    }

    /// Deletes what this run made, until nothing of it is left.
    ///
    /// # Errors
    /// What is left, or why that cannot be known.
    pub async fn clean_up(&self) -> Result<(), String> {
        let patience = self.harness.patience();
        let mut last = "the provider does not answer".to_owned();
        let outcome = timeout(patience, self.delete_all(&mut last)).await;
        match outcome {
            Ok(()) => {
                self.keys().clear();
                self.ids().clear();
                self.cut.store(false, Ordering::Relaxed);
                self.open.store(false, Ordering::Relaxed);
                Ok(())
            }
            Err(_) => Err(format!("not everything that was made is gone after {patience:?}: {last}")),
        }
    }

    async fn delete_all(&self, last: &mut String) {
        let provider = self.provider();
        // What is not listed is deleted by what its create said; once, for gone is fine.
        let mut unlisted = self.ids().clone();
        let mut quiet: Option<Instant> = None;
        loop {
            let ours = match provider.list_owned().await {
                Ok(owned) => self.ours(owned),
                Err(error) => {
                    *last = format!("list_owned: {error}");
                    sleep(EVERY * 10).await;
                    continue;
                }
            };
            for id in ours.iter().filter(|one| one.state != OwnedState::Deleting).map(|one| one.id.clone()) {
                unlisted.insert(id);
            }
            for id in std::mem::take(&mut unlisted) {
                if let Err(error) = provider.delete(&id).await {
                    *last = format!("delete of {id}: {error}");
                    unlisted.insert(id);
                }
            }
            let machines = self.harness.machines().await.unwrap_or(0);
            if ours.is_empty() && unlisted.is_empty() && machines == 0 {
                let since = quiet.get_or_insert_with(Instant::now).elapsed();
                let settled = !self.cut.load(Ordering::Relaxed) && !self.open.load(Ordering::Relaxed);
                if since >= self.quiet() || settled {
                    return;
                }
            } else {
                quiet = None;
                let listed: Vec<_> = ours.iter().map(|one| format!("{} ({:?})", one.id, one.state)).collect();
                if unlisted.is_empty() {
                    *last = format!("{machines} VMs, and listed: {}", listed.join(", "));
                }
            }
            sleep(EVERY).await;
        }
    }

    /// Of a list, what this run made.
    pub(super) fn ours(&self, owned: Vec<Owned>) -> Vec<Owned> {
        let (keys, ids) = (self.keys(), self.ids());
        let ours =
            |one: &Owned| ids.contains(&one.id) || one.key.as_ref().is_some_and(|key| keys.contains(key));
        owned.into_iter().filter(ours).collect()
    }

    fn keys(&self) -> parking_lot::MutexGuard<'_, HashSet<IdempotencyKey>> {
        // Every step leaves the set whole.
        self.keys.lock()
    }

    fn ids(&self) -> parking_lot::MutexGuard<'_, BTreeSet<InstanceId>> {
        self.ids.lock()
    }

    pub(super) fn provider(&self) -> Arc<dyn Provider> {
        self.harness.provider()
    }

    /// A key that no other check and no other run uses; what carries it is ours to delete.
    pub(super) fn key(&self) -> IdempotencyKey {
        let number = self.number.fetch_add(1, Ordering::Relaxed);
        let run = format!("{}-{}", std::process::id(), chance());
        let key = IdempotencyKey::derive("conformance", &run, number);
        self.keys().insert(key.clone());
        key
    }

    /// One create, as it is answered.
    pub(super) async fn create_once(
        &self,
        request: &CreateRequest,
        key: &IdempotencyKey,
    ) -> Result<Created, Error> {
        let start = Instant::now();
        let made = self.provider().create(request, key).await?;
        self.ids().insert(made.id.clone());
        let mut slowest = self.slowest.lock();
        *slowest = start.elapsed().max(*slowest);
        drop(slowest);
        Ok(made)
    }

    /// Creates as a core does: what is only delayed is repeated with the same key.
    pub(super) async fn create(
        &self,
        request: &CreateRequest,
        key: &IdempotencyKey,
    ) -> Result<Created, Stop> {
        loop {
            match self.create_once(request, key).await {
                Ok(made) => return Ok(made),
                Err(error) => match error.retry() {
                    Retry::After(pause) => sleep(pause).await,
                    _ => return Err(Stop::Broken(format!("create: {error}"))),
                },
            }
        }
    }

    /// A VM with a key of its own.
    pub(super) async fn one(&self) -> Result<(Created, IdempotencyKey), Stop> {
        let key = self.key();
        Ok((self.create(&self.harness.request(), &key).await?, key))
    }

    /// A create whose caller gives up after a while; its answer, if it came before that.
    pub(super) async fn cut_create(
        &self,
        request: &CreateRequest,
        key: &IdempotencyKey,
        after: Duration,
    ) -> Option<Result<Created, Error>> {
        self.cut.store(true, Ordering::Relaxed);
        timeout(after, self.create_once(request, key)).await.ok()
    }

    /// How long to look until one may say that nothing more comes into being.
    pub(super) fn quiet(&self) -> Duration {
        let slowest = *self.slowest.lock();
        QUIET.max(slowest * 2)
    }

    /// What the provider shows of this key.
    pub(super) async fn listed(&self, key: &IdempotencyKey) -> Result<Vec<Owned>, Stop> {
        let owned = said("list_owned", self.provider().list_owned().await)?;
        Ok(owned.into_iter().filter(|one| one.key.as_ref() == Some(key)).collect())
    }

    /// Waits until nothing is listed of this key.
    pub(super) async fn gone(&self, key: &IdempotencyKey) -> Checked {
        until(|| async { Ok(self.listed(key).await?.is_empty()) }).await
    }

    /// Holds when as many VMs exist as there should be, or when nobody can count them.
    pub(super) async fn machines_are(&self, number: usize) -> Checked {
        match self.harness.machines().await {
            Some(machines) if machines != number => {
                Err(Stop::Broken(format!("{machines} VMs exist where {number} should")))
            }
            _ => Ok(()),
        }
    }

    /// An id of the right form that no VM has.
    pub(super) async fn unknown_id(&self) -> Result<InstanceId, Stop> {
        if let Some(id) = self.harness.unknown_id() {
            return Ok(id);
        }
        let (made, key) = self.one().await?;
        said("delete", self.provider().delete(&made.id).await)?;
        self.gone(&key).await?;
        Ok(made.id)
    }

    /// Moments at which a caller gives up, from at once to a little after most answers: some that are the same every
    /// time, some by chance. Measures one create for that.
    pub(super) async fn moments(&self) -> Result<Vec<Duration>, Stop> {
        let start = Instant::now();
        let (made, key) = self.one().await?;
        let took = start.elapsed();
        said("delete", self.provider().delete(&made.id).await)?;
        self.gone(&key).await?;
        let fixed = [0, 1, 2, 5, 10, 20, 40, 80].map(Duration::from_millis);
        let by_chance = std::iter::repeat_with(|| took.mul_f64(f64::from(chance() as u32 % 1000) / 800.0));
        let number = usize::try_from(self.harness.drops()).unwrap_or(usize::MAX);
        Ok(fixed.into_iter().chain(by_chance.take(64)).take(number).collect())
    }
}

/// A number that is another one every time.
fn chance() -> u64 {
    RandomState::new().build_hasher().finish()
}

fn words_of(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default()
}

/// An answer that must be a good one.
pub(super) fn said<T>(what: &str, answer: Result<T, Error>) -> Result<T, Stop> {
    answer.map_err(|error| Stop::Broken(format!("{what}: {error} ({})", error.class())))
}

/// Waits for a condition; the promise's own patience is the limit.
pub(super) async fn until<F: Future<Output = Result<bool, Stop>>>(condition: impl Fn() -> F) -> Checked {
    while !condition().await? {
        sleep(EVERY).await;
    }
    Ok(())
}
