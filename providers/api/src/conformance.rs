//! The suite that every provider passes, against its cloud, its simulator, or itself.
//!
//! A provider writes one [`Harness`] and one line in its `tests/`:
//!
//! ```ignore
//! peerpod_provider_api::conformance_suite!(make); // fn make() -> impl Harness
//! ```
//!
//! Each check is a test of its own with a fresh harness and a runtime of its own, started on the test's thread
//! after the harness was made (a harness may move its thread to another namespace first). At its end each check
//! deletes what it made and waits until the provider shows nothing any more.

pub mod checks;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::time::Instant;

use crate::{CreateRequest, IdempotencyKey, InstanceId, Owned, Provider, Size};

/// What the suite needs beside the provider.
#[async_trait]
pub trait Harness: Send + Sync + 'static {
    /// The provider under test; always the same object.
    fn provider(&self) -> Arc<dyn Provider>;

    /// The user-data that this VM finds when it boots, read out of the VM itself; waits until it has booted.
    async fn user_data(&self, id: &InstanceId) -> Vec<u8>;

    /// How many VMs exist, by a witness that is not the provider: the simulator's count, the process table.
    async fn machines(&self) -> usize;

    /// An id of the right form that no VM has.
    fn unknown_id(&self) -> InstanceId;

    /// A provider of another cluster or node in the same cloud, if there can be one. Its VMs are not ours.
    fn stranger(&self) -> Option<Arc<dyn Provider>> {
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
        30
    }

    /// Longest time one check may take.
    fn patience(&self) -> Duration {
        Duration::from_secs(120)
    }
}

/// Makes the suite's tests with a harness from `$make` (a function or closure without arguments).
#[macro_export]
macro_rules! conformance_suite {
    ($make:expr) => {
        $crate::conformance_suite!($make;
            the_provider_says_what_it_can_do,
            preflight_finds_everything_and_makes_nothing,
            a_repeated_create_finds_the_same_vm,
            creates_with_one_key_at_once_make_one_vm,
            a_key_with_another_request_is_refused,
            a_second_delete_is_fine,
            a_delete_of_something_unknown_is_fine,
            a_deleted_vm_has_no_addresses,
            only_our_vms_are_listed,
            many_creates_at_once_all_succeed,
            what_cannot_be_done_is_refused_not_dropped,
            user_data_arrives_byte_for_byte,
            user_data_of_the_stated_limit_arrives,
            user_data_over_the_limit_is_refused_before_any_call,
            calls_end_at_their_deadline,
            a_create_dropped_at_any_time_and_repeated_makes_one_vm,
            a_delete_dropped_at_any_time_and_repeated_leaves_nothing,
            the_console_is_there_if_it_is_promised,
        );
    };
    ($make:expr; $($check:ident),* $(,)?) => {
        $(
            #[test]
            fn $check() {
                $crate::conformance::run($make, $crate::conformance::checks::$check);
            }
        )*
    };
}

/// Runs one check with a fresh harness.
///
/// # Panics
/// When the provider does not conform, or the check takes too long.
pub fn run<H, F, C>(make: impl FnOnce() -> H, check: C)
where
    H: Harness,
    C: FnOnce(Arc<dyn Harness>) -> F,
    F: Future<Output = ()>,
{
    let harness: Arc<dyn Harness> = Arc::new(make());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime for the check");
    let patience = harness.patience();
    runtime.block_on(async {
        let whole = async {
            check(Arc::clone(&harness)).await;
            leave_nothing(&harness).await;
        };
        assert!(
            tokio::time::timeout(patience, whole).await.is_ok(),
            "the check took longer than {patience:?}"
        );
    });
    // Before the runtime, which its provider may need to end.
    drop(harness);
}

/// A key that no other check and no other run uses.
pub(crate) fn fresh_key(number: u32) -> IdempotencyKey {
    use std::hash::{BuildHasher, Hasher, RandomState};
    let chance = RandomState::new().build_hasher().finish();
    IdempotencyKey::derive("conformance", &format!("{}-{chance}", std::process::id()), number)
}

/// What the provider shows of this key.
pub(crate) async fn owned_with(provider: &dyn Provider, key: &IdempotencyKey) -> Vec<Owned> {
    let owned = provider.list_owned().await.expect("list_owned");
    owned.into_iter().filter(|one| one.key.as_ref() == Some(key)).collect()
}

/// Deletes everything that is listed and waits until nothing is.
async fn leave_nothing(harness: &Arc<dyn Harness>) {
    let provider = harness.provider();
    for one in provider.list_owned().await.expect("list_owned") {
        provider.delete(&one.id).await.expect("delete");
    }
    until("nothing is listed", || async { provider.list_owned().await.expect("list_owned").is_empty() })
        .await;
    until("no VM exists", || async { harness.machines().await == 0 }).await;
}

/// Waits for a condition; the check's own patience is the limit.
pub(crate) async fn until<F: Future<Output = bool>>(what: &str, condition: impl Fn() -> F) {
    let start = Instant::now();
    let mut said = false;
    while !condition().await {
        if !said && start.elapsed() > Duration::from_secs(10) {
            said = true;
            tracing::warn!("still waiting until {what}");
            println!("still waiting until {what}");
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
