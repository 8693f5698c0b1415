//! Runs promises against one provider, records the VMs that it makes and deletes all of them.

use std::collections::{BTreeSet, HashSet};
use std::future::Future;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use parking_lot::Mutex;
use tokio::time::{Instant, sleep, timeout};

use super::{Checked, Harness, Promise, Stop};
use crate::{CreateRequest, Created, Error, IdempotencyKey, InstanceId, Owned, OwnedState, Provider, Retry};

/// Interval between two checks of a condition.
const EVERY: Duration = Duration::from_millis(10);
/// A VM may still appear after its create was cut off. None is expected any more after this time without a change, or
/// after twice the time of the slowest create if that is longer.
const QUIET: Duration = Duration::from_millis(500);

/// One run of promises. Dropping it deletes nothing: call [`Trial::clean_up`].
pub struct Trial {
    pub(super) harness: Arc<dyn Harness>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    keys: HashSet<IdempotencyKey>,
    ids: BTreeSet<InstanceId>,
    /// Number of keys so far.
    number: u32,
    /// Whether some create was cut off before its answer.
    cut: bool,
    /// Whether a check is running or was left before its end, so that its creates may be in flight.
    open: bool,
    /// Duration of the slowest create.
    slowest: Duration,
}

impl Trial {
    /// Returns a run that has made nothing yet.
    pub fn new(harness: Arc<dyn Harness>) -> Trial {
        Trial { harness, state: Mutex::default() }
    }

    /// Tries a promise and deletes the VMs made for it. A failed clean-up counts as a broken promise.
    pub async fn keeps(self: &Arc<Trial>, promise: &Promise) -> Checked {
        let patience = self.harness.limits().patience;
        let check = AssertUnwindSafe((promise.check)(Arc::clone(self))).catch_unwind();
        self.state.lock().open = true;
        let outcome = match timeout(patience, check).await {
            Ok(Ok(outcome)) => {
                self.state.lock().open = outcome.is_err();
                outcome
            }
            Ok(Err(panic)) => Err(Stop::Broken(format!("it panicked: {}", words_of(&*panic)))),
            Err(_) => Err(Stop::Broken(format!("it took longer than {patience:?}"))),
        };
        let cleaned = self.clean_up().await;
        match (outcome, cleaned) {
            (Err(Stop::Broken(how)), _) => Err(Stop::Broken(how)),
            (_, Err(how)) => Err(Stop::Broken(format!("afterwards: {how}"))),
            (outcome, Ok(())) => outcome,
        }
    }

    /// Deletes the VMs of this run until none is left.
    ///
    /// # Errors
    /// The VMs that are left, or why they cannot be determined.
    pub async fn clean_up(&self) -> Result<(), String> {
        let patience = self.harness.limits().patience;
        let mut last = "the provider does not answer".to_owned();
        let outcome = timeout(patience, self.delete_all(&mut last)).await;
        match outcome {
            Ok(()) => {
                let mut state = self.state.lock();
                *state = State { number: state.number, slowest: state.slowest, ..State::default() };
                Ok(())
            }
            Err(_) => Err(format!("not everything that was made is gone after {patience:?}: {last}")),
        }
    }

    async fn delete_all(&self, last: &mut String) {
        let provider = self.provider();
        // VMs that are not listed are deleted by the id from their create; once is enough, because a VM that is gone is
        // `Ok`.
        let mut unlisted = self.state.lock().ids.clone();
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
                let State { cut, open, .. } = *self.state.lock();
                if since >= self.quiet() || !(cut || open) {
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

    /// Keeps the VMs of this run from a list.
    pub(super) fn ours(&self, owned: Vec<Owned>) -> Vec<Owned> {
        let State { keys, ids, .. } = &*self.state.lock();
        let ours =
            |one: &Owned| ids.contains(&one.id) || one.key.as_ref().is_some_and(|key| keys.contains(key));
        owned.into_iter().filter(ours).collect()
    }

    pub(super) fn provider(&self) -> Arc<dyn Provider> {
        self.harness.provider()
    }

    /// Returns a key that no other check and no other run uses. The suite deletes every VM with this key.
    pub(super) fn key(&self) -> IdempotencyKey {
        let mut state = self.state.lock();
        state.number += 1;
        let run = format!("{}-{}", std::process::id(), chance());
        let key = IdempotencyKey::derive("conformance", &run, state.number);
        state.keys.insert(key.clone());
        key
    }

    /// Calls create once and returns its answer.
    pub(super) async fn create_once(
        &self,
        request: &CreateRequest,
        key: &IdempotencyKey,
    ) -> Result<Created, Error> {
        let start = Instant::now();
        let made = self.provider().create(request, key).await?;
        let mut state = self.state.lock();
        state.ids.insert(made.id.clone());
        state.slowest = start.elapsed().max(state.slowest);
        Ok(made)
    }

    /// Creates a VM as the node does: a delay is followed by a retry with the same key.
    pub(super) async fn create(
        &self,
        request: &CreateRequest,
        key: &IdempotencyKey,
    ) -> Result<Created, Stop> {
        patiently("create", || self.create_once(request, key)).await
    }

    /// Creates a VM with a fresh key.
    pub(super) async fn one(&self) -> Result<(Created, IdempotencyKey), Stop> {
        let key = self.key();
        Ok((self.create(&self.harness.request(), &key).await?, key))
    }

    /// Drops a create after a time. Returns its answer, if it came before that.
    pub(super) async fn cut_create(
        &self,
        request: &CreateRequest,
        key: &IdempotencyKey,
        after: Duration,
    ) -> Option<Result<Created, Error>> {
        self.state.lock().cut = true;
        timeout(after, self.create_once(request, key)).await.ok()
    }

    /// Returns how long nothing may change before no further VM is expected.
    pub(super) fn quiet(&self) -> Duration {
        QUIET.max(self.state.lock().slowest * 2)
    }

    /// Returns the VMs listed with this key.
    pub(super) async fn listed(&self, key: &IdempotencyKey) -> Result<Vec<Owned>, Stop> {
        let owned = said("list_owned", self.provider().list_owned().await)?;
        Ok(owned.into_iter().filter(|one| one.key.as_ref() == Some(key)).collect())
    }

    /// Waits until no VM is listed with this key.
    pub(super) async fn gone(&self, key: &IdempotencyKey) -> Checked {
        until(|| async { Ok(self.listed(key).await?.is_empty()) }).await
    }

    /// Holds when this many VMs exist, or when the harness cannot count them.
    pub(super) async fn machines_are(&self, number: usize) -> Checked {
        match self.harness.machines().await {
            Some(machines) if machines != number => {
                Err(Stop::Broken(format!("{machines} VMs exist where {number} should")))
            }
            _ => Ok(()),
        }
    }

    /// Returns an id of the right form that no VM has.
    pub(super) async fn unknown_id(&self) -> Result<InstanceId, Stop> {
        if let Some(id) = self.harness.unknown_id() {
            return Ok(id);
        }
        let (made, key) = self.one().await?;
        said("delete", self.provider().delete(&made.id).await)?;
        self.gone(&key).await?;
        Ok(made.id)
    }

    /// Returns moments at which a caller gives up, from immediately to a little after most answers: some fixed, some
    /// random. Measures one create for that.
    pub(super) async fn moments(&self) -> Result<Vec<Duration>, Stop> {
        let start = Instant::now();
        let (made, key) = self.one().await?;
        let took = start.elapsed();
        said("delete", self.provider().delete(&made.id).await)?;
        self.gone(&key).await?;
        let fixed = [0, 1, 2, 5, 10, 20, 40, 80].map(Duration::from_millis);
        let by_chance = std::iter::repeat_with(|| took.mul_f64(f64::from(chance() as u32 % 1000) / 800.0));
        let number = usize::try_from(self.harness.limits().drops).unwrap_or(usize::MAX);
        Ok(fixed.into_iter().chain(by_chance.take(64)).take(number).collect())
    }
}

/// Returns a random number.
fn chance() -> u64 {
    RandomState::new().build_hasher().finish()
}

fn words_of(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default()
}

/// Unwraps an answer that must be a success.
pub(super) fn said<T>(what: &str, answer: Result<T, Error>) -> Result<T, Stop> {
    answer.map_err(|error| Stop::Broken(format!("{what}: {error} ({})", error.class())))
}

/// Makes a call as the node does: a delay is followed by a retry.
pub(super) async fn repeated<T, F>(call: impl Fn() -> F) -> Result<T, Error>
where
    F: Future<Output = Result<T, Error>>,
{
    loop {
        let answer = call().await;
        match answer.as_ref().map_err(Error::retry) {
            Err(Retry::After(pause)) => sleep(pause).await,
            _ => return answer,
        }
    }
}

/// Makes a call as the node does, one that must succeed.
pub(super) async fn patiently<T, F>(what: &str, call: impl Fn() -> F) -> Result<T, Stop>
where
    F: Future<Output = Result<T, Error>>,
{
    said(what, repeated(call).await)
}

/// Waits for a condition, limited by the patience of the promise.
pub(super) async fn until<F: Future<Output = Result<bool, Stop>>>(condition: impl Fn() -> F) -> Checked {
    while !condition().await? {
        sleep(EVERY).await;
    }
    Ok(())
}
