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

    /// Returns a second provider with this role, if one can exist beside the first.
    fn other(&self, _role: ProviderRole) -> Option<Arc<dyn Provider>> {
        None
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

    /// Returns the pages of the provider's list. `None`: a list has one page, or a page cannot be lost.
    fn pages(&self) -> Option<ListPages<'_>> {
        None
    }

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

    /// Returns the counts and times of the suite.
    fn limits(&self) -> SuiteLimits {
        SuiteLimits::default()
    }
}

/// Role of a second provider in the same cloud.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProviderRole {
    /// The provider of another cluster or node. Its VMs have another owner.
    Stranger,
    /// The same provider as another process of the same node has it.
    Successor,
    /// The same provider for a caller that only lists and deletes. The suite never calls `preflight` on it.
    Collector,
}

/// Pages of a provider's list.
pub struct ListPages<'h> {
    /// Number of VMs on a page.
    pub size: u32,
    /// Makes the cloud answer the next question for a second page with an error.
    pub lose_next: Box<dyn FnOnce() + Send + 'h>,
}

/// Counts and times of the suite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SuiteLimits {
    /// Number of concurrent creates that this provider must handle.
    pub crowd: u32,
    /// Number of times a create, and a delete, is cut off.
    pub drops: u32,
    /// Longest time for one promise, and longest time for its clean-up.
    pub patience: Duration,
}

impl Default for SuiteLimits {
    fn default() -> SuiteLimits {
        SuiteLimits { crowd: 50, drops: 12, patience: Duration::from_secs(300) }
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

/// Tries one promise with a fresh harness and reports it to the test runner.
///
/// # Panics
/// When the provider does not keep it.
pub fn run<H: Harness>(make: impl FnOnce() -> H, promise: &Promise) {
    match verdict(make, promise) {
        Ok(()) => {}
        Err(Stop::NotApplicable(why)) => println!("not applicable: {}: {why}", promise.words()),
        Err(Stop::Broken(how)) => panic!("{}: {how}", promise.words()),
    }
}

/// Tries one promise with a fresh harness.
///
/// # Errors
/// The promise was broken, or cannot be tried.
///
/// # Panics
/// When the operating system gives no thread for the trial.
pub fn verdict<H: Harness>(make: impl FnOnce() -> H, promise: &Promise) -> Checked {
    let harness: Arc<dyn Harness> = Arc::new(make());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime for the check");
    let trial = Arc::new(Trial::new(harness.clone()));
    let verdict = runtime.block_on(trial.keeps(promise));
    harness.record(!matches!(verdict, Err(Stop::Broken(_))));
    // The trial goes before the runtime, which its provider may need to shut down.
    drop((trial, harness));
    verdict
}
