//! Drops a create at random instants and repeats it from another provider, as after a restart. One VM must result.
//! (`node.rs` does the same with the real node.)

use std::time::Duration;

use peerpod_provider_api::{IdempotencyKey, OwnedState, Provider};
use peerpod_test_clouds::Fault;
use peerpod_tests::Dice;

use super::common::{PATIENCE, Site, key, placed, request};

const CREATE: &str = "VirtualMachines_CreateOrUpdate";

#[tokio::test(flavor = "multi_thread")]
async fn a_create_dropped_at_a_hundred_random_instants_and_repeated_by_another_process_makes_one_vm() {
    let site = Site::start().await;
    site.cloud.set_times(Duration::from_millis(10), Duration::from_millis(10));
    site.cloud.set_lag(Duration::from_millis(300));
    site.cloud.set_latency(Duration::from_millis(5), Duration::from_millis(5));
    let before = site.provider(&[]);
    before.preflight().await.unwrap();
    let after = site.provider(&[]);
    after.preflight().await.unwrap();
    let mut dice = Dice(0x5eed_1234_abcd_0001);
    let mut keys: Vec<IdempotencyKey> = Vec::new();
    let (mut unsent, mut on_the_way, mut answered) = (0, 0, 0);
    for number in 0..100 {
        let wish = placed(&*before, &request(&format!("pod-{number}"))).await.unwrap();
        let key = key("crash", number);
        // The instants are before the PUT is sent, while it is answered, while the decision is awaited, and after it.
        let sent_before = site.cloud.count(Some(CREATE));
        let instant = Duration::from_micros(dice.roll(60_000));
        let answer = tokio::time::timeout(instant, before.create(&wish, &key)).await;
        match (&answer, site.cloud.count(Some(CREATE)) > sent_before) {
            (Ok(_), _) => answered += 1,
            (Err(_), true) => on_the_way += 1,
            (Err(_), false) => unsent += 1,
        }
        let again = after.create(&wish, &key).await.unwrap();
        if let Ok(Ok(made)) = answer {
            assert_eq!(made.id, again.id);
        }
        keys.push(key);
    }
    assert!(unsent > 0 && on_the_way > 10, "{unsent} unsent, {on_the_way} on the way, {answered} answered");
    site.cloud.heal();
    let owned = after.list_owned().await.unwrap();
    for key in &keys {
        assert_eq!(owned.iter().filter(|vm| vm.key.as_ref() == Some(key)).count(), 1, "{key}");
    }
    assert_eq!(site.parts(), (keys.len(), keys.len(), keys.len()), "one VM, interface and disk each");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_create_that_azure_refuses_late_is_cleaned_up_by_the_next_process() {
    let site = Site::start().await;
    site.cloud.stop_time();
    site.cloud.set_times(Duration::from_secs(1), Duration::ZERO);
    let (before, after) = (site.provider(&[]), site.provider(&[]));
    let wish = placed(&*before, &request("web-0")).await.unwrap();
    let fault = Fault::refuse_late("ZonalAllocationFailed", "We do not have sufficient capacity.");
    site.cloud.fail("VirtualMachines_CreateOrUpdate", fault, 1);
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
    site.cloud.advance(Duration::from_secs(2));
    let listed = after.list_owned().await.unwrap();
    assert_eq!((listed.len(), listed[0].state), (1, OwnedState::Ended));
    let error = after.create(&wish, &key("late", 0)).await.unwrap_err();
    assert_eq!(error.class(), "capacity", "{error}");
    site.cloud.advance(Duration::from_secs(1));
    assert_eq!(site.parts(), (0, 0, 0));
    let next = placed(&*after, &request("web-0")).await.unwrap();
    assert_ne!(next.placement, wish.placement, "the refused offering is not tried again");
}
