//! Drops a create at random instants and repeats it from another provider, as after a restart. One VM must result.
//! (`node.rs` does the same with the real node.)

use std::time::Duration;

use peerpod_provider_api::{IdempotencyKey, Provider};
use peerpod_test_clouds::Fault;
use peerpod_tests::Dice;

use super::common::{Site, key, placed, request};

#[tokio::test(flavor = "multi_thread")]
async fn a_create_dropped_at_a_hundred_random_instants_and_repeated_by_another_process_makes_one_vm() {
    let site = Site::start().await;
    site.cloud.set_times(Duration::from_millis(40), Duration::from_millis(20));
    site.cloud.set_lag(Duration::from_millis(200));
    site.cloud.set_latency(Duration::from_millis(10), Duration::from_millis(10));
    let before = site.provider(&[]);
    before.preflight().await.unwrap();
    let after = site.provider(&[]);
    after.preflight().await.unwrap();
    let mut dice = Dice(0x5eed_1234_abcd_0002);
    let mut keys: Vec<IdempotencyKey> = Vec::new();
    for number in 0..100 {
        let wish = placed(&*before, &request(&format!("pod-{number}"))).await.unwrap();
        let key = key("crash", number);
        // The connection breaks, too, before and after the cloud has made the VM.
        match number % 5 {
            0 => site.cloud.fail("compute.instances.insert", Fault::LostAnswer, 1),
            1 => site.cloud.fail("compute.instances.insert", Fault::Reset, 1),
            2 => site.cloud.fail("compute.instances.insert", Fault::Late(Duration::from_millis(30)), 1),
            _ => {}
        }
        let instant = Duration::from_micros(dice.roll(100_000));
        let answer = tokio::time::timeout(instant, before.create(&wish, &key)).await;
        let again = loop {
            match after.create(&wish, &key).await {
                Err(error) if error.class() == "transient" => {}
                answer => break answer.unwrap(),
            }
        };
        if let Ok(Ok(made)) = answer {
            assert_eq!(made.id, again.id);
        }
        keys.push(key);
    }
    site.cloud.heal();
    let owned = after.list_owned().await.unwrap();
    for key in &keys {
        assert_eq!(owned.iter().filter(|vm| vm.key.as_ref() == Some(key)).count(), 1, "{key}");
    }
    assert_eq!(site.machines().len(), keys.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_create_whose_request_id_was_forgotten_finds_its_vm_by_name() {
    let site = Site::start().await;
    let provider = site.provider(&[]);
    let wish = placed(&*provider, &request("web-0")).await.unwrap();
    let first = provider.create(&wish, &key("forgotten", 0)).await.unwrap();
    site.cloud.with(|gcp, _| gcp.forget_requests());
    let again = provider.create(&wish, &key("forgotten", 0)).await.unwrap();
    assert_eq!(first.id, again.id);
    let other = peerpod_provider_api::CreateRequest { name: "web-1".to_owned(), ..wish };
    let error = provider.create(&other, &key("forgotten", 0)).await.unwrap_err();
    assert_eq!(error.class(), "key_reused", "{error}");
    assert_eq!(site.machines().len(), 1);
}
