//! The suite that every provider passes, against its cloud, its simulator, or itself: every promise of the trait, each
//! tried for itself.
//!
//! A provider writes one [`Harness`] and one line in its `tests/`:
//!
//! ```ignore
//! peerpod_provider_api::conformance_suite!(make); // fn make() -> impl Harness
//! ```
//!
//! Each promise is a test of its own then, with a fresh harness and a runtime of its own, started on the test's thread
//! after the harness was made (a harness may move its thread to another namespace first). `peerpod provider check` runs
//! the same promises ([`PROMISES`]) against whatever is configured, and prints a [`table`].
//!
//! The suite deletes what it made, and only that: it knows its VMs by their keys, and leaves alone what else is listed.

pub mod checks;
mod promises;
mod trial;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::{CreateRequest, DiskRequest, InstanceId, Provider, Size};
pub use promises::{PROMISES, Promise, promise, table};
pub use trial::Trial;

/// What the suite needs beside the provider. What a harness cannot do is left out, and the promises that need it are
/// told as not applicable, with this reason.
#[async_trait]
pub trait Harness: Send + Sync + 'static {
    /// The provider under test; always the same object.
    fn provider(&self) -> Arc<dyn Provider>;

    /// The user-data that this VM finds when it boots, read out of the VM itself; waits until it has booted.
    /// `None`: there is no way to look.
    async fn user_data(&self, _id: &InstanceId) -> Option<Vec<u8>> {
        None
    }

    /// How many VMs exist, by a witness that is not the provider: the simulator's count, the process table.
    /// `None`: there is no such witness.
    async fn machines(&self) -> Option<usize> {
        None
    }

    /// An id of the right form that no VM has. `None`: the suite makes a VM and deletes it to have one.
    fn unknown_id(&self) -> Option<InstanceId> {
        None
    }

    /// A provider of another cluster or node in the same cloud, if there can be one. Its VMs are not ours.
    fn stranger(&self) -> Option<Arc<dyn Provider>> {
        None
    }

    /// The same provider as another process of the same node would have it, if there can be one beside the first.
    fn successor(&self) -> Option<Arc<dyn Provider>> {
        None
    }

    /// The same provider for somebody who only lists and deletes, if there can be one beside the first. `preflight` is
    /// never called on it.
    fn collector(&self) -> Option<Arc<dyn Provider>> {
        self.successor()
    }

    /// A disk that exists and is attached nowhere.
    fn volume(&self) -> Option<DiskRequest> {
        None
    }

    /// A request this provider can meet. Boots; runs until it is deleted.
    fn request(&self) -> CreateRequest {
        CreateRequest {
            name: "conformance".to_owned(),
            user_data: "{\"peerpod\":1}".to_owned(),
            size: Size { vcpus: 1, memory_mib: 512, ..Size::default() },
            labels: [("peerpod-test".to_owned(), "conformance".to_owned())].into(),
            ..CreateRequest::default()
        }
    }

    /// How many creates at once this provider must bear.
    fn crowd(&self) -> u32 {
        50
    }

    /// How often a create, and a delete, is cut off at some moment.
    fn drops(&self) -> u32 {
        12
    }

    /// Longest time one promise may take, and longest time its clean-up may.
    fn patience(&self) -> Duration {
        Duration::from_secs(120)
    }
}

/// What became of a promise.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It was kept.
    Kept,
    /// It was not; how that was seen.
    Broken(String),
    /// It could not be tried here; why.
    NotApplicable(String),
}

/// How a check ends that does not reach its end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stop {
    /// The promise was broken.
    Broken(String),
    /// It cannot be tried.
    NotApplicable(String),
}

/// How a check ends.
pub type Checked = Result<(), Stop>;

/// Makes the suite's tests with a harness from `$make` (a function or closure without arguments).
#[macro_export]
macro_rules! conformance_suite {
    ($make:expr) => {
        $crate::conformance_promises!(conformance_tests, $make);
    };
}

/// One test for each promise.
#[doc(hidden)]
#[macro_export]
macro_rules! conformance_tests {
    ([$make:expr] $($name:ident,)*) => {
        $(
            #[test]
            fn $name() {
                $crate::conformance::run($make, $crate::conformance::promise(stringify!($name)));
            }
        )*
    };
}

/// Tries one promise with a fresh harness.
///
/// # Panics
/// When the provider does not keep it.
pub fn run<H: Harness>(make: impl FnOnce() -> H, promise: &Promise) {
    let harness: Arc<dyn Harness> = Arc::new(make());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime for the check");
    let trial = Arc::new(Trial::new(harness));
    let verdict = runtime.block_on(trial.keeps(promise));
    // Before the runtime, which its provider may need to end.
    drop(trial);
    match verdict {
        Verdict::Kept => {}
        Verdict::NotApplicable(why) => println!("not applicable: {}: {why}", promise.words()),
        Verdict::Broken(how) => panic!("{}: {how}", promise.words()),
    }
}
