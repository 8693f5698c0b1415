//! Merges the calls of many callers within a short time into one call.
//!
//! The first caller opens a window. The window closes when no caller came for a while, when it has been open long
//! enough, or when it is full. A separate task then makes one call for all items. A caller that goes away, even the
//! first, does not disturb the call of the others. If its window is still open, its item is left out of the call.
//!
//! Clouds refuse a whole list because of one unknown id. Such a list is halved until the bad item is alone. That takes
//! some 2·log₂ n calls instead of n.

use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
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
    /// For describes in a burst of pods. The cloud's buckets then let few calls through per second, and a window that
    /// closes at the first pause would contain one VM. This window closes before a guest has booted.
    pub const BURST: Window =
        Window { idle: Duration::from_millis(700), longest: Duration::from_secs(2), most: 500 };
}

/// Result of a call for several items: one answer per item, in their order, or one error for all of them.
pub type Answers<O> = Result<Vec<Result<O, Error>>, Error>;

/// Call for the items of a window, with the latest deadline of the waiting callers.
type Execute<I, O> =
    dyn Fn(Vec<I>, Instant) -> Pin<Box<dyn Future<Output = Answers<O>> + Send>> + Send + Sync;

/// Gathers items and makes one call for them. Clones share the window.
pub struct Batcher<I, O>(Arc<Inner<I, O>>);

struct Inner<I, O> {
    window: Window,
    execute: Box<Execute<I, O>>,
    open: Mutex<Open<I, O>>,
}

/// Window that is open or, without items, closed.
struct Open<I, O> {
    /// Distinguishes the window from later ones.
    number: u64,
    since: Instant,
    last: Instant,
    items: Vec<Item<I, O>>,
}

struct Item<I, O> {
    item: I,
    deadline: Instant,
    answer: oneshot::Sender<Result<O, Error>>,
}

impl<I, O> Clone for Batcher<I, O> {
    fn clone(&self) -> Self {
        Batcher(Arc::clone(&self.0))
    }
}

impl<I, O> Batcher<I, O>
where
    I: Clone + Send + Sync + 'static,
    O: Send + 'static,
{
    /// Returns a batcher that makes its calls with `execute` (through the scheduler). The instant is the latest
    /// deadline of its callers.
    pub fn new<F>(window: Window, execute: impl Fn(Vec<I>, Instant) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Answers<O>> + Send + 'static,
    {
        let now = Instant::now();
        Batcher(Arc::new(Inner {
            window,
            execute: Box::new(move |items, deadline| Box::pin(execute(items, deadline))),
            open: Mutex::new(Open { number: 0, since: now, last: now, items: Vec::new() }),
        }))
    }

    /// Submits the item, to be handled together with others, and waits for its answer. The last argument names the
    /// operation in error texts.
    ///
    /// # Errors
    /// The error of the call for this item; [`Error::Transient`] when there is no answer before the deadline.
    pub async fn ask(&self, item: I, deadline: Instant, what: &str) -> Result<O, Error> {
        let (answer, answered) = oneshot::channel();
        self.put(Item { item, deadline, answer });
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

    fn put(&self, item: Item<I, O>) {
        let now = Instant::now();
        let mut open = self.0.open.lock();
        let is_new = open.items.is_empty();
        open.items.push(item);
        open.last = now;
        if open.items.len() >= self.0.window.most {
            let items = std::mem::take(&mut open.items);
            tokio::spawn(self.clone().execute(items));
        } else if is_new {
            open.number += 1;
            open.since = now;
            tokio::spawn(self.clone().close(open.number));
        }
    }

    /// Closes the window when it is due, and makes the call.
    async fn close(self, number: u64) {
        let Window { idle, longest, .. } = self.0.window;
        let items = loop {
            let due = {
                let mut open = self.0.open.lock();
                // The window was full, and its call was already made.
                if open.number != number || open.items.is_empty() {
                    return;
                }
                let due = (open.last + idle).min(open.since + longest);
                if due <= Instant::now() {
                    break std::mem::take(&mut open.items);
                }
                due
            };
            tokio::time::sleep_until(due).await;
        };
        self.execute(items).await;
    }

    /// Makes the call for the callers that still wait, and answers each.
    async fn execute(self, items: Vec<Item<I, O>>) {
        let mut parts: Vec<Vec<Item<I, O>>> = vec![items];
        while let Some(mut part) = parts.pop() {
            part.retain(|item| !item.answer.is_closed());
            let Some(deadline) = part.iter().map(|item| item.deadline).max() else { continue };
            let asked = part.iter().map(|item| item.item.clone()).collect();
            match (self.0.execute)(asked, deadline).await {
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

/// Batcher that looks up objects by their ids, with one call for all concurrent callers. `None`: the cloud does not know
/// the id.
pub type Lookup<T> = Batcher<String, Option<T>>;

/// Returns a lookup. `by_ids` gets each id once, and returns the objects that exist: those of these ids, or of a list
/// of all.
pub fn lookup<T, F>(
    window: Window,
    by_ids: impl Fn(Vec<String>, Instant) -> F + Send + Sync + 'static,
) -> Lookup<T>
where
    T: Clone + Send + 'static,
    F: Future<Output = Result<HashMap<String, T>, Error>> + Send + 'static,
{
    Batcher::new(window, move |ids: Vec<String>, deadline| {
        let mut each = ids.clone();
        each.sort();
        each.dedup();
        let found = by_ids(each, deadline);
        async move {
            let found = found.await?;
            // Several callers may ask for one id.
            Ok(ids.iter().map(|id| Ok(found.get(id).cloned())).collect())
        }
    })
}

/// Describes a call for these objects, like `look at VM i-1` or `look at 3 VMs`.
pub fn what(verb: &str, kind: &str, ids: &[String]) -> String {
    match ids {
        [one] => format!("{verb} {kind} {one}"),
        many => format!("{verb} {} {kind}s", many.len()),
    }
}

/// Whether a call may have failed because of one of its items. Credentials, throttling and a broken connection concern
/// all of them.
fn is_one_items_fault(error: &Error) -> bool {
    matches!(error, Error::NotFound { .. } | Error::Invalid { .. } | Error::Unsupported { .. })
}

#[cfg(test)]
mod tests;
