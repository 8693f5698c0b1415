//! Merges the calls of many callers within a short time into one call.
//!
//! The first caller of a key opens a window for it. The window closes when no caller came for a while, when it has been
//! open long enough, or when it is full. A separate task then makes one call for all items. A caller that goes away,
//! even the first, does not disturb the call of the others. If its window is still open, its item is left out of the
//! call. Items of one key go together; each key has its own window.
//!
//! Clouds refuse a whole list because of one unknown id. Such a list is halved until the bad item is alone. That takes
//! some 2·log₂ n calls instead of n.

use std::collections::HashMap;
use std::future::Future;
use std::hash::Hash;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use peerpod_provider_api::Error;
use tokio::sync::oneshot;
use tokio::time::Instant;

/// Conditions that close a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// Time without a new item.
    pub idle: Duration,
    /// Time since the window was opened.
    pub longest: Duration,
    /// Number of items; the most that one call takes.
    pub most: usize,
}

impl Window {
    /// For describes and deletes (karpenter's figures).
    pub const LIST: Window =
        Window { idle: Duration::from_millis(100), longest: Duration::from_secs(1), most: 500 };
}

/// Result of a call for several items: one answer per item, in their order, or one error for all of them.
pub type Answers<O> = Result<Vec<Result<O, Error>>, Error>;

/// Call for the items of a window: key, items, and the latest deadline of the waiting callers.
type Execute<K, I, O> =
    dyn Fn(K, Vec<I>, Instant) -> Pin<Box<dyn Future<Output = Answers<O>> + Send>> + Send + Sync;

/// Gathers items and makes one call for them. Clones share the windows.
pub struct Batcher<K, I, O>(Arc<Inner<K, I, O>>);

struct Inner<K, I, O> {
    window: Window,
    execute: Box<Execute<K, I, O>>,
    open: Mutex<HashMap<K, Open<I, O>>>,
    opened: AtomicU64,
}

/// Open window.
struct Open<I, O> {
    /// Distinguishes the window from a later one of the same key.
    number: u64,
    since: Instant,
    last: Instant,
    items: Vec<Item<I, O>>,
}

/// Result of a check of a window.
enum Look<I, O> {
    Again(Instant),
    Closed(Vec<Item<I, O>>),
}

struct Item<I, O> {
    item: I,
    deadline: Instant,
    answer: oneshot::Sender<Result<O, Error>>,
}

impl<K, I, O> Clone for Batcher<K, I, O> {
    fn clone(&self) -> Self {
        Batcher(Arc::clone(&self.0))
    }
}

impl<K, I, O> Batcher<K, I, O>
where
    K: Clone + Eq + Hash + Send + Sync + 'static,
    I: Clone + Send + Sync + 'static,
    O: Send + 'static,
{
    /// Returns a batcher that makes its calls with `execute` (through the scheduler). The instant is the latest
    /// deadline of its callers.
    pub fn new<F>(window: Window, execute: impl Fn(K, Vec<I>, Instant) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Answers<O>> + Send + 'static,
    {
        Batcher(Arc::new(Inner {
            window,
            execute: Box::new(move |key, items, deadline| Box::pin(execute(key, items, deadline))),
            open: Mutex::default(),
            opened: AtomicU64::new(0),
        }))
    }

    /// Submits the item, to be handled together with others of its key, and waits for its answer. The last argument
    /// names the operation in error texts.
    ///
    /// # Errors
    /// The error of the call for this item; [`Error::Transient`] when there is no answer before the deadline.
    pub async fn ask(&self, key: K, item: I, deadline: Instant, what: &str) -> Result<O, Error> {
        let (answer, answered) = oneshot::channel();
        self.put(key, Item { item, deadline, answer });
        match tokio::time::timeout_at(deadline, answered).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => {
                Err(Error::transient(format!("{what}: the call that was made for it and others broke off")))
            }
            Err(_) => Err(Error::transient(format!(
                "{what}: no answer when its time was over; the effect of the call is unknown"
            ))),
        }
    }

    fn put(&self, key: K, item: Item<I, O>) {
        let now = Instant::now();
        let mut windows = self.0.open.lock();
        let new = || Open {
            number: self.0.opened.fetch_add(1, Ordering::Relaxed),
            since: now,
            last: now,
            items: Vec::new(),
        };
        let is_new = !windows.contains_key(&key);
        let open = windows.entry(key.clone()).or_insert_with(new);
        open.last = now;
        open.items.push(item);
        if open.items.len() >= self.0.window.most {
            let full = windows.remove(&key);
            drop(windows);
            if let Some(full) = full {
                tokio::spawn(self.clone().execute(key, full.items));
            }
        } else if is_new {
            let number = open.number;
            drop(windows);
            tokio::spawn(self.clone().close(key, number));
        }
    }

    /// Closes the window when it is due, and makes the call.
    async fn close(self, key: K, number: u64) {
        loop {
            match self.inspect(&key, number) {
                Look::Again(at) => tokio::time::sleep_until(at).await,
                Look::Closed(items) => return self.execute(key, items).await,
            }
        }
    }

    /// Takes the items out of the window when it is due.
    fn inspect(&self, key: &K, number: u64) -> Look<I, O> {
        let Window { idle, longest, .. } = self.0.window;
        let mut windows = self.0.open.lock();
        // The window is gone or has another number: it was full, and its call was already made.
        let Some(open) = windows.get(key).filter(|open| open.number == number) else {
            return Look::Closed(Vec::new());
        };
        let at = (open.last + idle).min(open.since + longest);
        if at > Instant::now() {
            return Look::Again(at);
        }
        Look::Closed(windows.remove(key).map_or_else(Vec::new, |closed| closed.items))
    }

    /// Makes the call for the callers that still wait, and answers each.
    async fn execute(self, key: K, items: Vec<Item<I, O>>) {
        let mut parts: Vec<Vec<Item<I, O>>> = vec![items];
        while let Some(mut part) = parts.pop() {
            part.retain(|item| !item.answer.is_closed());
            let Some(deadline) = part.iter().map(|item| item.deadline).max() else { continue };
            let asked = part.iter().map(|item| item.item.clone()).collect();
            match (self.0.execute)(key.clone(), asked, deadline).await {
                Ok(answers) => {
                    for (item, answer) in part.into_iter().zip(answers) {
                        drop(item.answer.send(answer)); // the caller may be gone and will repeat its call
                    }
                }
                Err(error) if part.len() > 1 && is_one_items_fault(&error) => {
                    let rest = part.split_off(part.len() / 2);
                    parts.push(rest);
                    parts.push(part);
                }
                Err(error) => {
                    for item in part {
                        drop(item.answer.send(Err(error.clone())));
                    }
                }
            }
        }
    }
}

/// Whether a call may have failed because of one of its items. Credentials, throttling and a broken connection concern
/// all of them.
fn is_one_items_fault(error: &Error) -> bool {
    matches!(error, Error::NotFound { .. } | Error::Invalid { .. } | Error::Unsupported { .. })
}

#[cfg(test)]
mod tests;
