//! Conformance suite that every provider passes, against its cloud, its simulator or itself. It tries every promise of
//! the trait separately.
//!
//! A provider writes one [`Harness`] and one line in its `tests/`:
//!
//! ```ignore
//! peerpod_provider_api::conformance_suite!(make); // fn make() -> impl Harness
//! ```
//!
//! Each promise is then a test of its own, with a fresh harness and a fresh runtime. The runtime starts on the test's
//! thread after the harness was made, so a harness may move its thread to another namespace first.
//! `peerpod provider check` runs the same promises ([`PROMISES`]) against the configured provider and prints a
//! [`table`].
//!
//! The suite deletes only the VMs that it made. It recognises them by their keys and leaves all other listed VMs alone.

mod checks;
mod promises;
mod trial;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::{CreateRequest, DiskRequest, InstanceId, Provider, Size};
pub use promises::{PROMISES, Promise, promise, table, word};
pub use trial::Trial;

/// Test environment of a provider. A harness leaves out the methods that it cannot implement; promises that need them
/// are reported as not applicable, with the reason.
#[async_trait]
pub trait Harness: Send + Sync + 'static {
    /// Returns the provider under test; always the same object.
    fn provider(&self) -> Arc<dyn Provider>;

    /// Returns the user-data that this VM finds at boot, read from inside the VM. Waits until it has booted. `None`:
    /// the harness cannot look inside.
    async fn user_data(&self, _id: &InstanceId) -> Option<Vec<u8>> {
        None
    }

    /// Returns how many VMs exist, from a source other than the provider, such as the simulator or the process table.
    /// `None`: there is no such source.
    async fn machines(&self) -> Option<usize> {
        None
    }

    /// Returns an id of the right form that no VM has. `None`: the suite makes a VM and deletes it to get one.
    fn unknown_id(&self) -> Option<InstanceId> {
        None
    }

    /// Returns a provider of another cluster or node in the same cloud, if one can exist. Its VMs have another owner.
    fn stranger(&self) -> Option<Arc<dyn Provider>> {
        None
    }

    /// Returns the same provider as another process of the same node has it, if one can exist beside the first.
    fn successor(&self) -> Option<Arc<dyn Provider>> {
        None
    }

    /// Returns the same provider for a caller that only lists and deletes, if one can exist beside the first. The suite
    /// never calls `preflight` on it.
    fn collector(&self) -> Option<Arc<dyn Provider>> {
        self.successor()
    }

    /// Returns a disk that exists and is not attached.
    fn volume(&self) -> Option<DiskRequest> {
        None
    }

    /// Makes the cloud accept the next create and refuse it afterwards, for lack of capacity. Returns the request of that
    /// create. `None`: the cloud decides in its answer, or such a refusal cannot be caused.
    async fn late_refusal(&self) -> Option<CreateRequest> {
        None
    }

    /// Returns how many VMs one page of the provider's list has. `None`: a list has one page, or
    /// [`Harness::lose_page`] is not there.
    fn page(&self) -> Option<u32> {
        None
    }

    /// Makes the cloud answer the next question for a second page with an error.
    async fn lose_page(&self) {}

    /// Records whether the promise was kept, or could not be tried.
    fn record(&self, _is_kept: bool) {}

    /// Returns a request that this provider can meet. The VM boots and runs until it is deleted.
    fn request(&self) -> CreateRequest {
        CreateRequest {
            name: "conformance".to_owned(),
            user_data: "{\"peerpod\":1}".to_owned(),
            size: Size { vcpus: 1, memory_mib: 512, ..Size::default() },
            labels: [("peerpod-test".to_owned(), "conformance".to_owned())].into(),
            ..CreateRequest::default()
        }
    }

    /// Number of concurrent creates that this provider must handle.
    fn crowd(&self) -> u32 {
        50
    }

    /// Number of times a create, and a delete, is cut off.
    fn drops(&self) -> u32 {
        12
    }

    /// Longest time for one promise, and longest time for its clean-up.
    fn patience(&self) -> Duration {
        Duration::from_secs(300)
    }
}

/// Reason why a promise does not count as kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Stop {
    /// The promise was broken; holds how.
    Broken(String),
    /// The promise cannot be tried; holds why.
    NotApplicable(String),
}

/// Result of trying a promise.
pub type Checked = Result<(), Stop>;

/// Generates the tests of the suite with a harness from `$make` (a function or closure without arguments).
#[macro_export]
macro_rules! conformance_suite {
    ($make:expr) => {
        $crate::conformance_promises!(conformance_tests, $make);
    };
}

/// Generates one test per promise.
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
    let trial = Arc::new(Trial::new(harness.clone()));
    let verdict = runtime.block_on(trial.keeps(promise));
    harness.record(!matches!(verdict, Err(Stop::Broken(_))));
    // The trial goes before the runtime, which its provider may need to shut down.
    drop((trial, harness));
    match verdict {
        Ok(()) => {}
        Err(Stop::NotApplicable(why)) => println!("not applicable: {}: {why}", promise.words()),
        Err(Stop::Broken(how)) => panic!("{}: {how}", promise.words()),
    }
}
