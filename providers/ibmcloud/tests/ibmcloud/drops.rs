//! Drops creates at random instants and repeats them from another provider, as after a restart. (`node.rs` does the same
//! with the real node.)

use std::time::Duration;

use peerpod_provider_api::{OwnedState, Provider};
use peerpod_test_clouds::Fault;
use peerpod_tests::cloud::drop_creates;

use super::common::{CREATE, PATIENCE, Site, key, placed, request};

#[tokio::test(flavor = "multi_thread")]
async fn a_create_dropped_at_a_hundred_random_instants_and_repeated_by_another_process_makes_one_vm() {
    let site = Site::start().await;
    site.cloud.set_times(Duration::from_millis(10), Duration::from_millis(10));
    site.cloud.set_lag(Duration::from_millis(100));
    site.cloud.set_latency(Duration::from_millis(5), Duration::from_millis(5));
    // The instants are before the POST is sent, while it is answered, while the decision is awaited, and after it.
    let processes = [site.provider(&[]), site.provider(&[])];
    drop_creates(&site, processes, Duration::from_millis(60), |_| {}).await;
    assert_eq!(site.parts(), (100, 100), "one VM and boot volume each");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_create_that_ibm_refuses_late_is_cleaned_up_by_the_next_process() {
    let site = Site::start().await;
    site.cloud.stop_time();
    site.cloud.set_times(Duration::from_secs(1), Duration::ZERO);
    let (before, after) = (site.provider(&[]), site.provider(&[]));
    let wish = placed(&*before, &request("web-0")).await.unwrap();
    site.cloud.fail(CREATE, Fault::refuse_late("cannot_start_capacity", "none left"), 1);
    let create = {
        let (before, wish) = (before.clone(), wish.clone());
        tokio::spawn(async move { before.create(&wish, &key("late", 0)).await })
    };
    let made = async {
        while site.machines().is_empty() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, made).await.unwrap();
    create.abort();
    drop(create.await);
    let listed = after.list_owned().await.unwrap();
    assert_eq!((listed.len(), listed[0].state), (1, OwnedState::Pending));
    assert_eq!(listed[0].key, Some(key("late", 0)), "also before IBM has made its boot volume");
    site.cloud.advance(Duration::from_secs(2));
    let listed = after.list_owned().await.unwrap();
    assert_eq!((listed.len(), listed[0].state), (1, OwnedState::Ended));
    let error = after.create(&wish, &key("late", 0)).await.unwrap_err();
    assert_eq!(error.class(), "capacity", "{error}");
    site.cloud.advance(Duration::from_secs(1));
    assert_eq!(site.parts(), (0, 0));
    let next = placed(&*after, &request("web-0")).await.unwrap();
    assert_ne!(next.placement, wish.placement, "the refused offering is not tried again");
}
